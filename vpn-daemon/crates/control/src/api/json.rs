//! Decides which members of coderd's JSON are read. Unknown members are ignored and names match in any case, as in Go.

use codervpn_underlay::http::Response;
use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RelayNodeFields};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::Telemetry;
use crate::convert::derp_map;

#[derive(Deserialize)]
pub(super) struct User {
    pub(super) id: String,
    pub(super) username: String,
}

#[derive(Deserialize)]
pub(super) struct BuildInfo {
    pub(super) version: String,
    #[serde(default)]
    pub(super) upgrade_message: String,
}

#[derive(Deserialize)]
pub(super) struct Connection {
    pub(super) derp_map: Option<MapJson>,
    #[serde(default)]
    pub(super) derp_force_websockets: bool,
    #[serde(default)]
    pub(super) disable_direct_connections: bool,
    #[serde(default)]
    pub(super) hostname_suffix: Option<String>,
}

/// Body of an error (1.6).
#[derive(Deserialize)]
pub(super) struct ErrorBody {
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    pub(super) detail: String,
    #[serde(default)]
    pub(super) validations: Vec<Validation>,
}

#[derive(Deserialize)]
pub(super) struct Validation {
    #[serde(default)]
    pub(super) field: String,
    #[serde(default)]
    pub(super) detail: String,
}

impl ErrorBody {
    /// The JSON error in a body. With `refused_upgrade` also behind a first line that is not JSON, whatever the content
    /// type says (HTTP-24).
    pub(super) fn find(response: &Response, refused_upgrade: bool) -> Option<Self> {
        if response.is_json() {
            return read(&response.body);
        }
        if !refused_upgrade {
            return None;
        }
        let second_line = || {
            let at = response.body.iter().position(|byte| *byte == b'\n')?;
            read(response.body.get(at + 1..)?)
        };
        read(&response.body).or_else(second_line)
    }
}

/// Only objects count: a bare string or number is no error body.
fn read(bytes: &[u8]) -> Option<ErrorBody> {
    let object: Map<String, Value> = serde_json::from_slice(bytes).ok()?;
    serde_json::from_value(Value::Object(object)).ok()
}

/// A relay map in Tailscale's JSON form.
#[derive(Deserialize)]
pub(super) struct MapJson(#[serde(deserialize_with = "any_case")] MapMembers);

#[derive(Deserialize)]
struct MapMembers {
    #[serde(default)]
    homeparams: Option<AnyCase<HomeParams>>,
    #[serde(default)]
    regions: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct HomeParams {
    #[serde(default)]
    regionscore: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct RegionMembers {
    #[serde(default)]
    embeddedrelay: bool,
    #[serde(default)]
    regionid: i64,
    #[serde(default)]
    regioncode: String,
    #[serde(default)]
    regionname: String,
    #[serde(default)]
    avoid: bool,
    #[serde(default)]
    nodes: Option<Vec<AnyCase<NodeMembers>>>,
}

#[derive(Deserialize)]
struct NodeMembers {
    #[serde(default)]
    name: String,
    #[serde(default)]
    regionid: i64,
    #[serde(default)]
    hostname: String,
    #[serde(default)]
    certname: String,
    #[serde(default)]
    ipv4: String,
    #[serde(default)]
    ipv6: String,
    #[serde(default)]
    stunport: i32,
    #[serde(default)]
    stunonly: bool,
    #[serde(default)]
    derpport: i32,
    #[serde(default)]
    insecurefortests: bool,
    #[serde(default)]
    forcehttp: bool,
    #[serde(default)]
    stuntestip: String,
    #[serde(default)]
    canport80: bool,
}

/// An object whose member names are compared in lower case.
struct AnyCase<T>(T);

impl<'de, T: DeserializeOwned> Deserialize<'de> for AnyCase<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        any_case(deserializer).map(Self)
    }
}

fn any_case<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    let members = Map::<String, Value>::deserialize(deserializer)?;
    let members = members.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value)).collect();
    serde_json::from_value(Value::Object(members)).map_err(serde::de::Error::custom)
}

impl MapJson {
    pub(super) fn into_derp_map(self) -> DerpMap {
        let members = self.0;
        let scores = members.homeparams.and_then(|params| params.0.regionscore).unwrap_or_default();
        derp_map(&DerpMapFields {
            region_scores: scores
                .iter()
                .filter_map(|(region, score)| Some((region.parse().ok()?, score.as_f64()?)))
                .collect(),
            regions: members.regions.unwrap_or_default().into_iter().filter_map(region).collect(),
        })
    }
}

fn region((key, value): (String, Value)) -> Option<(i64, RegionFields)> {
    let parsed = key.parse().ok().and_then(|id| Some((id, serde_json::from_value(value).ok()?)));
    let Some((id, AnyCase::<RegionMembers>(region))) = parsed else {
        tracing::warn!(region = %key.escape_debug(), "a region of the relay map cannot be read");
        return None;
    };
    let nodes = region.nodes.unwrap_or_default().into_iter().map(|node| node.0.into_fields()).collect();
    let fields = RegionFields {
        region_id: region.regionid,
        embedded_relay: region.embeddedrelay,
        region_code: region.regioncode,
        region_name: region.regionname,
        avoid: region.avoid,
        nodes,
    };
    Some((id, fields))
}

impl NodeMembers {
    fn into_fields(self) -> RelayNodeFields {
        RelayNodeFields {
            name: self.name,
            region_id: self.regionid,
            host_name: self.hostname,
            cert_name: self.certname,
            ipv4: self.ipv4,
            ipv6: self.ipv6,
            stun_port: self.stunport,
            stun_only: self.stunonly,
            derp_port: self.derpport,
            insecure_for_tests: self.insecurefortests,
            force_http: self.forcehttp,
            stun_test_ip: self.stuntestip,
            can_port_80: self.canport80,
        }
    }
}

/// Reads a relay map in the JSON form of 1.2.2, for instance one given to a test.
pub fn parse_derp_map(json: &str) -> Result<DerpMap, serde_json::Error> {
    serde_json::from_str::<MapJson>(json).map(MapJson::into_derp_map)
}

/// Value of the telemetry header; `None` when there is nothing to say (HTTP-5).
pub fn desktop_telemetry(telemetry: &Telemetry) -> Option<String> {
    #[derive(Serialize)]
    struct Header<'a> {
        device_id: &'a str,
        device_os: &'a str,
        coder_desktop_version: &'a str,
    }
    if telemetry == &Telemetry::default() {
        return None;
    }
    serde_json::to_string(&Header {
        device_id: &telemetry.device_id,
        device_os: &telemetry.device_os,
        coder_desktop_version: &telemetry.version,
    })
    .ok()
}
