//! The relay connections as the engine sees them: which regions are connected, wanted and home, and whether the first
//! handshakes may go out. Decides the route of a packet for a peer; dialling, back-off and closing are the caller's.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use codervpn_wire::derp_map::{DerpMap, RegionId};
use codervpn_wire::node::Family;

use crate::command::RelayLatency;
use crate::home_relay::{HomeCandidate, HomeRelay};

/// How long our node and first handshakes wait for the connection to the home relay (`data-plane.md` 6.2 step 9).
pub(crate) const HOME_PATIENCE: Duration = Duration::from_secs(1);
/// A missing connection is asked for again after this long.
const ASK_AGAIN: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Connection {
    up: bool,
    /// Counts connections of this region: what was learnt on an earlier one is void.
    epoch: u32,
    asked: Option<Instant>,
}

/// A relay connection that a peer was heard on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Heard {
    region: RegionId,
    epoch: u32,
}

#[derive(Default)]
pub(crate) struct Relays {
    map: Option<DerpMap>,
    choice: HomeRelay,
    home_since: Option<Instant>,
    latencies: Vec<RelayLatency>,
    connections: HashMap<RegionId, Connection>,
    /// Changes whenever a cached route may have become wrong.
    version: u64,
}

impl Relays {
    pub(crate) fn home(&self) -> Option<RegionId> {
        self.choice.home()
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn latencies(&self) -> &[RelayLatency] {
        &self.latencies
    }

    pub(crate) fn latency(&self, region: RegionId) -> Option<Duration> {
        self.latencies.iter().filter(|l| l.region == region).map(|l| l.latency).min()
    }

    pub(crate) fn is_up(&self, region: RegionId) -> bool {
        self.connections.get(&region).is_some_and(|c| c.up)
    }

    /// Takes a map; returns true if home changed. One usable region needs no measurement.
    pub(crate) fn set_map(&mut self, map: DerpMap, now: Instant) -> bool {
        if self.map.as_ref() == Some(&map) {
            return false;
        }
        let before = self.home();
        let candidates = candidates(&map);
        if let Some(home) = before {
            let same = self.map.as_ref().and_then(|old| old.regions.get(&home)) == map.regions.get(&home);
            if !same || !candidates.iter().any(|c| c.region == home) {
                self.choice.forget_home();
            }
        }
        self.latencies.retain(|l| candidates.iter().any(|c| c.region == l.region));
        if candidates.len() == 1 {
            self.choice.choose_unmeasured(&candidates);
        }
        self.map = Some(map);
        self.version += 1;
        self.home_changed(before, now)
    }

    /// Takes a round of measurements; returns true if home changed.
    pub(crate) fn set_latencies(&mut self, latencies: Vec<RelayLatency>, now: Instant) -> bool {
        let Some(map) = &self.map else { return false };
        let before = self.home();
        let candidates = candidates(map);
        let round: Vec<RelayLatency> =
            latencies.into_iter().filter(|l| candidates.iter().any(|c| c.region == l.region)).collect();
        let best: Vec<(RegionId, Duration)> = round.iter().map(|l| (l.region, l.latency)).collect();
        self.choice.report(&best, &candidates, now);
        self.latencies = round;
        self.home_changed(before, now)
    }

    fn home_changed(&mut self, before: Option<RegionId>, now: Instant) -> bool {
        let home = self.home();
        if home == before {
            return false;
        }
        self.home_since = home.map(|_| now);
        home.is_some()
    }

    pub(crate) fn up(&mut self, region: RegionId) {
        let connection = self.connections.entry(region).or_default();
        connection.up = true;
        connection.epoch = connection.epoch.wrapping_add(1);
        connection.asked = None;
        self.version += 1;
    }

    pub(crate) fn down(&mut self, region: RegionId) {
        if let Some(connection) = self.connections.get_mut(&region) {
            connection.up = false;
            self.version += 1;
        }
    }

    /// A packet came in on this region's connection.
    pub(crate) fn heard_on(&self, region: RegionId) -> Option<Heard> {
        let connection = self.connections.get(&region).filter(|c| c.up)?;
        Some(Heard { region, epoch: connection.epoch })
    }

    /// The region to send through for a peer whose node names `home` and that was `heard`: its home if we are connected
    /// there, else where it was heard. `None`: its home has to be connected first.
    pub(crate) fn route(&self, home: Option<RegionId>, heard: Option<Heard>) -> Option<RegionId> {
        if let Some(home) = home.filter(|home| self.is_up(*home)) {
            return Some(home);
        }
        let heard = heard?;
        let connection = self.connections.get(&heard.region)?;
        (connection.up && connection.epoch == heard.epoch).then_some(heard.region)
    }

    /// Whether to ask the caller for a connection now.
    pub(crate) fn ask(&mut self, region: RegionId, now: Instant) -> bool {
        if self.map.as_ref().is_none_or(|map| !map.regions.contains_key(&region)) {
            return false;
        }
        let connection = self.connections.entry(region).or_default();
        if connection.up || connection.asked.is_some_and(|at| now.saturating_duration_since(at) < ASK_AGAIN) {
            return false;
        }
        connection.asked = Some(now);
        true
    }

    /// From when on our node may be published and handshakes may start: once home is connected, or has been waited for
    /// long enough. `None`: there is no home yet.
    pub(crate) fn open_at(&self, now: Instant) -> Option<Instant> {
        let home = self.home()?;
        if self.is_up(home) { Some(now) } else { self.home_since.map(|since| since + HOME_PATIENCE) }
    }

    pub(crate) fn is_open(&self, now: Instant) -> bool {
        self.open_at(now).is_some_and(|at| at <= now)
    }

    /// For `Node.derp_latency`: the smallest latency of each region and family.
    pub(crate) fn node_latencies(&self) -> BTreeMap<(RegionId, Family), Duration> {
        let mut smallest = BTreeMap::new();
        for l in &self.latencies {
            let known = smallest.entry((l.region, l.family)).or_insert(l.latency);
            *known = l.latency.min(*known);
        }
        smallest
    }
}

/// Regions that can be home. One that the deployment wants avoided is home only if there is no other.
fn candidates(map: &DerpMap) -> Vec<HomeCandidate> {
    let all = || map.relay_regions();
    let avoid_none = all().all(|region| region.avoid);
    all()
        .filter(|region| avoid_none || !region.avoid)
        .map(|region| HomeCandidate { region: region.id, embedded: region.embedded, score: map.score(region.id) })
        .collect()
}
