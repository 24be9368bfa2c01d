//! What the coordinator is told about us, and when it changed enough to be told again.
//!
//! Withheld until a home region is chosen and its connection stands or has been waited for (`data-plane.md` 6.2 step 9);
//! never for the sake of endpoints, which follow when STUN servers have answered. Latencies alone are no reason to
//! publish: every agent would reprogram us every 20 s. They travel along when something else changes, and when a region
//! is measured for the first time (`data-plane.md` 3.3). Nor is another order of the endpoints: receivers rely on none.

use std::collections::BTreeMap;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::{DiscoPublic, NodePublic};
use codervpn_wire::node::{Family, Node, Prefix, Timestamp};

type Latencies = BTreeMap<(RegionId, Family), Duration>;

pub(crate) struct SelfNode {
    id: i64,
    key: NodePublic,
    disco: DiscoPublic,
    addresses: Vec<Ipv6Addr>,
    pub(crate) websocket_fallback: BTreeMap<RegionId, String>,
    content: Option<Content>,
}

struct Content {
    home: RegionId,
    latencies: Latencies,
    websocket_fallback: BTreeMap<RegionId, String>,
    endpoints: Vec<SocketAddr>,
}

impl SelfNode {
    pub(crate) fn new(id: i64, key: NodePublic, disco: DiscoPublic, addresses: Vec<Ipv6Addr>) -> Self {
        Self { id, key, disco, addresses, websocket_fallback: BTreeMap::new(), content: None }
    }

    /// Takes the present values; true if the node has to be published (again).
    pub(crate) fn update(&mut self, home: RegionId, latencies: Latencies, endpoints: &[SocketAddr]) -> bool {
        if let Some(present) = &self.content
            && present.home == home
            && present.websocket_fallback == self.websocket_fallback
            && latencies.keys().all(|measured| present.latencies.contains_key(measured))
            && same_set(&present.endpoints, endpoints)
        {
            return false;
        }
        let (websocket_fallback, endpoints) = (self.websocket_fallback.clone(), endpoints.to_vec());
        self.content = Some(Content { home, latencies, websocket_fallback, endpoints });
        true
    }

    /// The node to send. `None` until it may be published. `as_of` is fresh at every build (ND-8).
    pub(crate) fn build(&self, as_of: SystemTime) -> Option<Node> {
        let content = self.content.as_ref()?;
        let addresses: Vec<Prefix> = self.addresses.iter().map(|address| Prefix::single(*address)).collect();
        Some(Node {
            id: self.id,
            as_of: Some(timestamp(as_of)),
            key: self.key,
            disco: self.disco,
            home: Some(content.home),
            derp_latency: content.latencies.clone(),
            forced_websocket: content.websocket_fallback.clone(),
            addresses: addresses.clone(),
            allowed_ips: addresses,
            endpoints: content.endpoints.clone(),
        })
    }
}

fn same_set(one: &[SocketAddr], other: &[SocketAddr]) -> bool {
    one.len() == other.len() && one.iter().all(|endpoint| other.contains(endpoint))
}

/// Microseconds, as the other senders have them.
fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_micros() * 1000).unwrap_or(0),
    }
}
