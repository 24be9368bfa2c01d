//! The relay map of a deployment, as values and as the JSON of the REST call (1.2.2).

use std::net::SocketAddr;

use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RelayNodeFields};
use serde_json::{Map, Value, json};
use url::Url;

/// Region of the relay inside the deployment.
pub const EMBEDDED_REGION: i64 = 999;

/// The first region that has a STUN server only; each further server has one more.
pub const FIRST_STUN_REGION: i64 = 1000;

/// The map of a deployment at `url` with its embedded relay alone.
pub fn embedded(url: &Url) -> DerpMap {
    single(url, EMBEDDED_REGION, true)
}

/// A map with the relay at `url` alone.
pub fn single(url: &Url, region_id: i64, embedded: bool) -> DerpMap {
    DerpMap::from_fields(&DerpMapFields {
        region_scores: Vec::new(),
        regions: vec![(region_id, region(url, region_id, embedded))],
    })
    .0
}

/// A map with STUN servers alone, each in a region of its own, as deployments list the servers they are told to use.
pub fn stun(servers: &[SocketAddr]) -> DerpMap {
    let regions = (FIRST_STUN_REGION..).zip(servers).map(|(id, server)| (id, stun_region(id, *server)));
    DerpMap::from_fields(&DerpMapFields { region_scores: Vec::new(), regions: regions.collect() }).0
}

fn stun_region(region_id: i64, server: SocketAddr) -> RegionFields {
    let address = server.ip().to_string();
    let none = || "none".to_owned();
    let (ipv4, ipv6) = if server.is_ipv4() { (address.clone(), none()) } else { (none(), address.clone()) };
    let node = RelayNodeFields {
        name: format!("{region_id}stun0"),
        region_id,
        host_name: address,
        ipv4,
        ipv6,
        stun_port: server.port().into(),
        stun_only: true,
        ..RelayNodeFields::default()
    };
    RegionFields {
        region_id,
        embedded_relay: false,
        region_code: format!("coder_stun_{region_id}"),
        region_name: format!("Coder STUN {region_id}"),
        avoid: false,
        nodes: vec![node],
    }
}

/// Several relays in one map.
pub fn joined<'a>(maps: impl IntoIterator<Item = &'a DerpMap>) -> DerpMap {
    let mut all = DerpMap::default();
    for map in maps {
        all.regions.extend(map.regions.clone());
        all.scores.extend(map.scores.clone());
    }
    all
}

fn region(url: &Url, region_id: i64, embedded: bool) -> RegionFields {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let (code, name) = match embedded {
        true => ("coder".to_owned(), "Coder Embedded Relay".to_owned()),
        false => (format!("relay_{region_id}"), format!("Relay {region_id}")),
    };
    let node = RelayNodeFields {
        name: format!("{region_id}b"),
        region_id,
        host_name: host,
        stun_port: -1,
        derp_port: url.port_or_known_default().map_or(443, i32::from),
        force_http: url.scheme() == "http",
        ..RelayNodeFields::default()
    };
    RegionFields {
        region_id,
        embedded_relay: embedded,
        region_code: code,
        region_name: name,
        avoid: false,
        nodes: vec![node],
    }
}

/// As Go's encoder writes it: members that are zero are left out.
pub fn to_json(map: &DerpMap) -> Value {
    let fields = map.to_fields();
    let regions = fields.regions.into_iter().map(|(id, region)| {
        let mut members = Map::new();
        members.insert("EmbeddedRelay".into(), region.embedded_relay.into());
        members.insert("RegionID".into(), region.region_id.into());
        members.insert("RegionCode".into(), region.region_code.into());
        members.insert("RegionName".into(), region.region_name.into());
        if region.avoid {
            members.insert("Avoid".into(), true.into());
        }
        members.insert("Nodes".into(), region.nodes.into_iter().map(node_json).collect());
        (id.to_string(), Value::Object(members))
    });
    let mut all = json!({ "Regions": regions.collect::<Map<_, _>>() });
    if !fields.region_scores.is_empty() {
        let scores: Map<_, _> =
            fields.region_scores.into_iter().map(|(id, score)| (id.to_string(), score.into())).collect();
        if let Some(members) = all.as_object_mut() {
            members.insert("HomeParams".into(), json!({ "RegionScore": scores }));
        }
    }
    all
}

fn node_json(node: RelayNodeFields) -> Value {
    let all = [
        ("Name", Value::from(node.name)),
        ("RegionID", node.region_id.into()),
        ("HostName", node.host_name.into()),
        ("CertName", node.cert_name.into()),
        ("IPv4", node.ipv4.into()),
        ("IPv6", node.ipv6.into()),
        ("STUNPort", node.stun_port.into()),
        ("STUNOnly", node.stun_only.into()),
        ("DERPPort", node.derp_port.into()),
        ("InsecureForTests", node.insecure_for_tests.into()),
        ("ForceHTTP", node.force_http.into()),
        ("STUNTestIP", node.stun_test_ip.into()),
        ("CanPort80", node.can_port_80.into()),
    ];
    let zero = |name: &str, value: &Value| match value {
        Value::String(text) => text.is_empty() && name != "Name" && name != "HostName",
        Value::Number(number) => number.as_i64() == Some(0) && name != "RegionID",
        Value::Bool(value) => !value,
        _ => false,
    };
    let kept = all.into_iter().filter(|(name, value)| !zero(name, value));
    Value::Object(kept.map(|(name, value)| (name.to_owned(), value)).collect())
}
