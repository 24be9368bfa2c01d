//! Which relay region is our home. Pure: reports in, region out.
//!
//! Phases: (1) `best` of each region is its smallest latency over the reports of the last five minutes, scaled by the
//! score the deployment gives it; (2) the region of the current report with the smallest `best` is the candidate;
//! (3) the present home stays unless the candidate is clearly better (`data-plane.md` 3.3), because a change makes every
//! agent reprogram us. Without any measurement the present home stays, and without a home the embedded relay, else the
//! lowest region, is taken.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use codervpn_wire::derp_map::RegionId;

/// Age at which a report stops counting (Go: `netcheck` keeps five minutes).
const REPORT_LIFE: Duration = Duration::from_secs(5 * 60);
/// Reports come every 20 s or slower; a caller in a loop must not grow the list.
const MAX_REPORTS: usize = 32;
/// A home is not left for less than this gain (Go: `preferredDERPAbsoluteDiff`).
const ABSOLUTE_GAIN: Duration = Duration::from_millis(10);

/// What the choice needs to know of a region of the current map that has at least one relay node.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HomeCandidate {
    pub region: RegionId,
    pub embedded: bool,
    /// Factor on latencies; values that are not positive finite numbers count as 1.
    pub score: f64,
}

#[derive(Default)]
pub struct HomeRelay {
    home: Option<RegionId>,
    reports: VecDeque<(Instant, Vec<(RegionId, Duration)>)>,
}

impl HomeRelay {
    pub fn home(&self) -> Option<RegionId> {
        self.home
    }

    /// The map changed so that the home is no longer what it was: the next choice starts without one.
    pub fn forget_home(&mut self) {
        self.home = None;
    }

    /// Takes the smallest latency of each region that answered and chooses. `candidates` are all regions of the map
    /// with a relay node; latencies of other regions are ignored.
    pub fn report(
        &mut self,
        latencies: &[(RegionId, Duration)],
        candidates: &[HomeCandidate],
        now: Instant,
    ) -> Option<RegionId> {
        while self.reports.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) >= REPORT_LIFE)
            || self.reports.len() >= MAX_REPORTS
        {
            self.reports.pop_front();
        }
        self.reports.push_back((now, latencies.to_vec()));
        self.choose(latencies, candidates);
        self.home
    }

    /// Chooses without a measurement, for a start or a map where there is only one choice anyway.
    pub fn choose_unmeasured(&mut self, candidates: &[HomeCandidate]) -> Option<RegionId> {
        if self.home.is_none() {
            self.home = candidates.iter().min_by_key(|c| (!c.embedded, c.region)).map(|c| c.region);
        }
        self.home
    }

    fn choose(&mut self, current: &[(RegionId, Duration)], candidates: &[HomeCandidate]) {
        let scored = |latency: Duration, candidate: &HomeCandidate| scale(latency, candidate.score);
        let best = candidates
            .iter()
            .filter(|c| current.iter().any(|(region, _)| *region == c.region))
            .filter_map(|c| {
                let over_time = self.reports.iter().flat_map(|(_, latencies)| latencies);
                let lowest = over_time.filter(|(region, _)| *region == c.region).map(|(_, latency)| *latency).min()?;
                Some((scored(lowest, c), c.region))
            })
            .min();
        let Some((best_latency, best_region)) = best else {
            self.choose_unmeasured(candidates);
            return;
        };
        if let Some(home) = self.home.filter(|home| *home != best_region) {
            let candidate = candidates.iter().find(|c| c.region == home);
            let here = current.iter().filter(|(region, _)| *region == home).map(|(_, latency)| *latency).min();
            if let (Some(candidate), Some(here)) = (candidate, here) {
                let here = scored(here, candidate);
                if here.saturating_sub(best_latency) < ABSOLUTE_GAIN || best_latency > two_thirds(here) {
                    return;
                }
            }
        }
        self.home = Some(best_region);
    }
}

fn scale(latency: Duration, score: f64) -> Duration {
    if score.is_finite() && score > 0.0 && score != 1.0 {
        Duration::try_from_secs_f64(latency.as_secs_f64() * score).unwrap_or(Duration::MAX)
    } else {
        latency
    }
}

/// Division first, in whole nanoseconds, as the peers of this decision do it.
fn two_thirds(latency: Duration) -> Duration {
    (latency / 3).saturating_mul(2)
}
