//! Decides how protobuf messages and the validated types of `wire` turn into each other. Both directions live here, so
//! that daemon and test deployment read and write the same way.

use codervpn_proto::tailnet as pb;
use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RelayNodeFields};
use codervpn_wire::node::{Node, NodeError, NodeFields, Timestamp};
use std::time::{SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// An id of a message (PB-5).
pub fn uuid(bytes: &[u8]) -> Option<Uuid> {
    Uuid::from_slice(bytes).ok()
}

/// The time now, in the precision of upstream: microseconds.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Microseconds below a second fit in nanoseconds of an i32; seconds fit for 292 billion years.
    Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_micros() as i32 * 1000 }
}

/// A node as received. The number counts entries that were left out.
pub fn node_from_proto(node: pb::Node) -> Result<(Node, usize), NodeError> {
    Node::from_fields(&NodeFields {
        id: node.id,
        as_of: node.as_of.map(|at| Timestamp { seconds: at.seconds, nanos: at.nanos }),
        key: node.key,
        disco: node.disco,
        preferred_derp: node.preferred_derp,
        derp_latency: node.derp_latency.into_iter().collect(),
        derp_forced_websocket: node.derp_forced_websocket.into_iter().collect(),
        addresses: node.addresses,
        allowed_ips: node.allowed_ips,
        endpoints: node.endpoints,
    })
}

/// A node to be sent.
pub fn node_to_proto(node: &Node) -> pb::Node {
    let fields = node.to_fields();
    pb::Node {
        id: fields.id,
        as_of: fields.as_of.map(|at| prost_types::Timestamp { seconds: at.seconds, nanos: at.nanos }),
        key: fields.key,
        disco: fields.disco,
        preferred_derp: fields.preferred_derp,
        derp_latency: fields.derp_latency.into_iter().collect(),
        derp_forced_websocket: fields.derp_forced_websocket.into_iter().collect(),
        addresses: fields.addresses,
        allowed_ips: fields.allowed_ips,
        endpoints: fields.endpoints,
    }
}

/// A relay map as received.
pub fn derp_map_from_proto(map: pb::DerpMap) -> DerpMap {
    derp_map(&DerpMapFields {
        region_scores: map.home_params.map(|params| params.region_score.into_iter().collect()).unwrap_or_default(),
        regions: map.regions.into_iter().map(|(key, region)| (key, region_fields(region))).collect(),
    })
}

/// Validates; what cannot be right is left out and logged (T-26).
pub(crate) fn derp_map(fields: &DerpMapFields) -> DerpMap {
    let (map, warnings) = DerpMap::from_fields(fields);
    for warning in warnings {
        tracing::warn!(%warning, "part of the relay map is left out");
    }
    map
}

/// A relay map to be sent; `home_params` is always present (PB-10).
pub fn derp_map_to_proto(map: &DerpMap) -> pb::DerpMap {
    let fields = map.to_fields();
    pb::DerpMap {
        home_params: Some(pb::derp_map::HomeParams { region_score: fields.region_scores.into_iter().collect() }),
        regions: fields.regions.into_iter().map(|(key, region)| (key, region_to_proto(region))).collect(),
    }
}

fn region_fields(region: pb::derp_map::Region) -> RegionFields {
    let nodes = region.nodes.into_iter().map(|node| RelayNodeFields {
        name: node.name,
        region_id: node.region_id,
        host_name: node.host_name,
        cert_name: node.cert_name,
        ipv4: node.ipv4,
        ipv6: node.ipv6,
        stun_port: node.stun_port,
        stun_only: node.stun_only,
        derp_port: node.derp_port,
        insecure_for_tests: node.insecure_for_tests,
        force_http: node.force_http,
        stun_test_ip: node.stun_test_ip,
        can_port_80: node.can_port_80,
    });
    RegionFields {
        region_id: region.region_id,
        embedded_relay: region.embedded_relay,
        region_code: region.region_code,
        region_name: region.region_name,
        avoid: region.avoid,
        nodes: nodes.collect(),
    }
}

fn region_to_proto(region: RegionFields) -> pb::derp_map::Region {
    let nodes = region.nodes.into_iter().map(|node| pb::derp_map::region::Node {
        name: node.name,
        region_id: node.region_id,
        host_name: node.host_name,
        cert_name: node.cert_name,
        ipv4: node.ipv4,
        ipv6: node.ipv6,
        stun_port: node.stun_port,
        stun_only: node.stun_only,
        derp_port: node.derp_port,
        insecure_for_tests: node.insecure_for_tests,
        force_http: node.force_http,
        stun_test_ip: node.stun_test_ip,
        can_port_80: node.can_port_80,
    });
    pb::derp_map::Region {
        region_id: region.region_id,
        embedded_relay: region.embedded_relay,
        region_code: region.region_code,
        region_name: region.region_name,
        avoid: region.avoid,
        nodes: nodes.collect(),
    }
}
