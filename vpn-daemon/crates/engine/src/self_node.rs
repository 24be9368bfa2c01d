//! What the coordinator is told about us, and when it changed enough to be told again.
//!
//! Withheld until a home region is chosen and its connection stands or has been waited for (`data-plane.md` 6.2 step 9).
//! Latencies alone are no reason to publish: every agent would reprogram us every 20 s. They travel along when
//! something else changes, and when regions appear or vanish (`data-plane.md` 3.3). No endpoints: there are no direct
//! paths yet.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;
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

#[derive(Clone, PartialEq)]
struct Content {
    home: RegionId,
    latencies: Latencies,
    websocket_fallback: BTreeMap<RegionId, String>,
}

impl SelfNode {
    pub(crate) fn new(id: i64, key: NodePublic, disco: DiscoPublic, addresses: Vec<Ipv6Addr>) -> Self {
        Self { id, key, disco, addresses, websocket_fallback: BTreeMap::new(), content: None }
    }

    /// Takes the present values; true if the node has to be published (again).
    pub(crate) fn update(&mut self, home: RegionId, latencies: Latencies) -> bool {
        if let Some(present) = &self.content
            && present.home == home
            && present.websocket_fallback == self.websocket_fallback
            && present.latencies.keys().eq(latencies.keys())
        {
            return false;
        }
        self.content = Some(Content { home, latencies, websocket_fallback: self.websocket_fallback.clone() });
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
            endpoints: Vec::new(),
        })
    }
}

/// Microseconds, as the other senders have them.
fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_micros() * 1000).unwrap_or(0),
    }
}
