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

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn region(id: i64) -> RegionId {
        RegionId::new(id).unwrap()
    }

    fn candidates(ids: &[i64]) -> Vec<HomeCandidate> {
        ids.iter().map(|id| HomeCandidate { region: region(*id), embedded: false, score: 1.0 }).collect()
    }

    /// One report after the other, ten seconds apart; the home after the last.
    fn home(reports: &[&[(i64, u64)]]) -> i64 {
        let start = Instant::now();
        let mut choice = HomeRelay::default();
        for (i, report) in reports.iter().enumerate() {
            let report: Vec<_> = report.iter().map(|(id, ms)| (region(*id), Duration::from_millis(*ms))).collect();
            choice.report(&report, &candidates(&[1, 2]), start + Duration::from_secs(10) * i as u32);
        }
        choice.home().unwrap().get().into()
    }

    /// Makes 1 the home and lets the report that did so be forgotten.
    fn from_home_1(report: &[(i64, u64)]) -> i64 {
        let start = Instant::now();
        let mut choice = HomeRelay::default();
        choice.report(&[(region(1), Duration::from_millis(500))], &candidates(&[1, 2]), start);
        let report: Vec<_> = report.iter().map(|(id, ms)| (region(*id), Duration::from_millis(*ms))).collect();
        choice.report(&report, &candidates(&[1, 2]), start + REPORT_LIFE).unwrap().get().into()
    }

    #[test]
    fn the_worked_cases_of_the_specification() {
        assert_eq!(from_home_1(&[(1, 20), (2, 12)]), 1, "8 ms are not worth it");
        assert_eq!(from_home_1(&[(1, 100), (2, 60)]), 2);
        assert_eq!(from_home_1(&[(1, 100), (2, 70)]), 1, "not below two thirds");
        assert_eq!(from_home_1(&[(2, 60)]), 2, "home did not answer");
        assert_eq!(home(&[&[(1, 20)], &[(1, 20), (2, 12)], &[(1, 30), (2, 31)]]), 2, "its best counts");
    }

    #[test]
    fn without_an_answer_home_stays_or_the_embedded_relay_is_taken() {
        assert_eq!(from_home_1(&[]), 1);
        let mut choice = HomeRelay::default();
        let mut regions = candidates(&[1, 2, 3]);
        regions[1].embedded = true;
        assert_eq!(choice.report(&[], &regions, Instant::now()), Some(region(2)));
        let mut choice = HomeRelay::default();
        assert_eq!(choice.report(&[], &candidates(&[7, 3]), Instant::now()), Some(region(3)));
        assert_eq!(HomeRelay::default().report(&[], &[], Instant::now()), None);
    }

    #[test]
    fn scores_scale_and_silly_ones_do_not_panic() {
        let mut regions = candidates(&[1, 2]);
        regions[1].score = 0.1;
        let report = [(region(1), Duration::from_millis(100)), (region(2), Duration::from_millis(500))];
        assert_eq!(HomeRelay::default().report(&report, &regions, Instant::now()), Some(region(2)));
        for score in [f64::NAN, f64::INFINITY, -1.0, 0.0, f64::MAX, f64::MIN_POSITIVE] {
            regions[1].score = score;
            let report = [(region(1), Duration::MAX), (region(2), Duration::MAX)];
            HomeRelay::default().report(&report, &regions, Instant::now());
        }
    }

    #[test]
    fn the_memory_of_reports_is_bounded() {
        let mut choice = HomeRelay::default();
        let now = Instant::now();
        for _ in 0..1000 {
            choice.report(&[(region(1), Duration::from_millis(1))], &candidates(&[1]), now);
        }
        assert!(choice.reports.len() <= MAX_REPORTS);
    }
}
