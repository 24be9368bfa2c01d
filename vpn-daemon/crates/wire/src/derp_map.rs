//! Decides what the map of relays is: which regions exist, how each of their nodes is reached, and which are for us.
//!
//! [`DerpMapFields`] is the plain form, as protobuf and JSON have it; [`DerpMap`] the validated one. Validation never
//! fails as a whole: what cannot be right is left out with a [`MapWarning`], because one broken region of a deployment
//! must not cut off the others (T-26).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;
use std::str::FromStr;

use crate::text;

/// Regions taken from one map (T-26).
pub const MAX_REGIONS: usize = 256;
/// Nodes taken from one region (T-26).
pub const MAX_NODES: usize = 16;
/// Port of a relay that names none.
const DEFAULT_DERP_PORT: u16 = 443;
/// Port of a STUN server that names none.
const DEFAULT_STUN_PORT: u16 = 3478;
/// Longest host name (RFC 1035).
const MAX_HOST_LEN: usize = 253;

/// Number of a region. Never 0, and a port number where `127.3.3.40:<region>` stands for a relay.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(NonZeroU16);

impl RegionId {
    /// `None`: no region can have this number.
    pub fn new(id: i64) -> Option<Self> {
        u16::try_from(id).ok().and_then(NonZeroU16::new).map(Self)
    }

    /// The number.
    pub fn get(self) -> u16 {
        self.0.get()
    }
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A map as a message has it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DerpMapFields {
    /// Region and factor of its latency.
    pub region_scores: Vec<(i64, f64)>,
    /// Key and region.
    pub regions: Vec<(i64, RegionFields)>,
}

/// A region as a message has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct RegionFields {
    pub region_id: i64,
    pub embedded_relay: bool,
    pub region_code: String,
    pub region_name: String,
    pub avoid: bool,
    pub nodes: Vec<RelayNodeFields>,
}

/// A node of a region as a message has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct RelayNodeFields {
    pub name: String,
    pub region_id: i64,
    pub host_name: String,
    pub cert_name: String,
    pub ipv4: String,
    pub ipv6: String,
    pub stun_port: i32,
    pub stun_only: bool,
    pub derp_port: i32,
    pub insecure_for_tests: bool,
    pub force_http: bool,
    pub stun_test_ip: String,
    pub can_port_80: bool,
}

/// What was left out of a map, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapWarning {
    /// Ids are 1..=65535.
    #[error("region {0} has an impossible number")]
    RegionId(i64),
    /// Key and content disagree.
    #[error("region {key} calls itself {inside}")]
    RegionMismatch {
        /// The map's key.
        key: i64,
        /// The region's own field.
        inside: i64,
    },
    /// The later one is left out.
    #[error("region {0} appears twice")]
    DuplicateRegion(RegionId),
    /// See [`MAX_REGIONS`].
    #[error("more than 256 regions")]
    TooManyRegions,
    /// See [`MAX_NODES`].
    #[error("region {0} has more than 16 nodes")]
    TooManyNodes(RegionId),
    /// A node without a usable host name, address or port.
    #[error("region {0} has a node that cannot be reached")]
    Node(RegionId),
    /// Not a positive number.
    #[error("region {0} has an impossible score")]
    Score(i64),
}

/// All relays, by region.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DerpMap {
    /// Regions by number. One may have no nodes.
    pub regions: BTreeMap<RegionId, Region>,
    /// Latencies are multiplied by these before they are compared.
    pub scores: BTreeMap<RegionId, f64>,
}

/// Some relays of which any may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Its number.
    pub id: RegionId,
    /// Short name, `coder` for the deployment itself.
    pub code: String,
    /// Name for people.
    pub name: String,
    /// It is the deployment itself.
    pub embedded: bool,
    /// Never a home relay.
    pub avoid: bool,
    /// In order of trial.
    pub nodes: Vec<RelayNode>,
}

/// Who runs a region: decides which headers it may see (data plane 2.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionClass {
    /// The deployment: may see the session token (under the conditions of T-23) and the user's headers.
    Embedded,
    /// A workspace proxy of the deployment: the user's headers only.
    WorkspaceProxy,
    /// Anybody else: nothing.
    Foreign,
}

/// One server of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayNode {
    /// Unique name.
    pub name: String,
    /// Name to resolve, and TLS server name. May be the text of an address.
    pub host: String,
    /// Name in the certificate, if it is not `host`.
    pub cert_name: Option<String>,
    /// How it is reached by IPv4.
    pub ipv4: Reach<Ipv4Addr>,
    /// How it is reached by IPv6.
    pub ipv6: Reach<Ipv6Addr>,
    /// Port of the relay. `None`: only a STUN server.
    pub derp_port: Option<u16>,
    /// Port for STUN. `None`: no STUN here.
    pub stun_port: Option<u16>,
    /// HTTP without TLS.
    pub force_http: bool,
    /// Certificates need not be checked. Honour it only if the user's configuration says so (T-24).
    pub insecure_for_tests: bool,
    /// Where to send STUN instead.
    pub stun_test_ip: Option<IpAddr>,
    /// Port 80 answers captive-portal checks.
    pub can_port_80: bool,
}

/// How a family is dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach<A> {
    /// Ask DNS for the host name.
    Resolve,
    /// Without DNS.
    At(A),
    /// Not at all.
    Disabled,
}

impl<A: FromStr> Reach<A> {
    fn parse(text: &str) -> Self {
        if text.is_empty() { Self::Resolve } else { text.parse().map_or(Self::Disabled, Self::At) }
    }
}

impl<A: fmt::Display> Reach<A> {
    fn text(&self) -> String {
        match self {
            Self::Resolve => String::new(),
            Self::At(address) => address.to_string(),
            Self::Disabled => "none".into(),
        }
    }
}

impl DerpMap {
    /// Validates, with a warning for all that was left out.
    pub fn from_fields(fields: &DerpMapFields) -> (Self, Vec<MapWarning>) {
        let mut map = Self::default();
        let mut warnings = Vec::new();
        for (key, region) in &fields.regions {
            if map.regions.len() >= MAX_REGIONS {
                warnings.push(MapWarning::TooManyRegions);
                break;
            }
            match Region::from_fields(*key, region, &mut warnings) {
                Ok(region) if map.regions.contains_key(&region.id) => {
                    warnings.push(MapWarning::DuplicateRegion(region.id));
                }
                Ok(region) => {
                    map.regions.insert(region.id, region);
                }
                Err(warning) => warnings.push(warning),
            }
        }
        for (key, score) in fields.region_scores.iter().take(MAX_REGIONS) {
            // Zero means "not set", as in Go.
            match RegionId::new(*key) {
                Some(id) if score.is_finite() && *score > 0.0 => {
                    map.scores.insert(id, *score);
                }
                Some(_) if *score == 0.0 => {}
                _ => warnings.push(MapWarning::Score(*key)),
            }
        }
        (map, warnings)
    }

    /// The plain form.
    pub fn to_fields(&self) -> DerpMapFields {
        DerpMapFields {
            region_scores: self.scores.iter().map(|(id, score)| (id.get().into(), *score)).collect(),
            regions: self.regions.iter().map(|(id, region)| (id.get().into(), region.to_fields())).collect(),
        }
    }

    /// CC-46: the embedded relay is reached as we reach the deployment, not as the deployment calls itself. To be done
    /// on every map received.
    pub fn rewrite_embedded(&mut self, host: &str, port: u16, force_http: bool) {
        let embedded = self.regions.values_mut().filter(|region| region.embedded);
        for node in embedded.flat_map(|region| &mut region.nodes).filter(|node| node.derp_port.is_some()) {
            node.host = host.to_owned();
            node.derp_port = Some(port);
            node.force_http = force_http;
        }
    }

    /// Factor of a region's latency.
    pub fn score(&self, id: RegionId) -> f64 {
        self.scores.get(&id).copied().unwrap_or(1.0)
    }

    /// Regions that have at least one relay.
    pub fn relay_regions(&self) -> impl Iterator<Item = &Region> {
        self.regions.values().filter(|region| region.relays().next().is_some())
    }
}

impl Region {
    /// Servers that are relays, in order of trial.
    pub fn relays(&self) -> impl Iterator<Item = &RelayNode> {
        self.nodes.iter().filter(|node| node.derp_port.is_some())
    }

    /// Who runs it.
    pub fn class(&self) -> RegionClass {
        if self.embedded {
            RegionClass::Embedded
        } else if self.code.starts_with("coder_") && self.relays().next().is_some() {
            RegionClass::WorkspaceProxy
        } else {
            RegionClass::Foreign
        }
    }

    fn from_fields(key: i64, fields: &RegionFields, warnings: &mut Vec<MapWarning>) -> Result<Self, MapWarning> {
        let id = RegionId::new(key).ok_or(MapWarning::RegionId(key))?;
        if fields.region_id != key && fields.region_id != 0 {
            return Err(MapWarning::RegionMismatch { key, inside: fields.region_id });
        }
        if fields.nodes.len() > MAX_NODES {
            warnings.push(MapWarning::TooManyNodes(id));
        }
        let mut nodes = Vec::with_capacity(fields.nodes.len().min(MAX_NODES));
        for node in fields.nodes.iter().take(MAX_NODES) {
            match RelayNode::from_fields(node) {
                Some(node) => nodes.push(node),
                None => warnings.push(MapWarning::Node(id)),
            }
        }
        Ok(Self {
            id,
            code: text::foreign(fields.region_code.as_bytes()),
            name: text::foreign(fields.region_name.as_bytes()),
            embedded: fields.embedded_relay,
            avoid: fields.avoid,
            nodes,
        })
    }

    fn to_fields(&self) -> RegionFields {
        let region_id = self.id.get().into();
        RegionFields {
            region_id,
            embedded_relay: self.embedded,
            region_code: self.code.clone(),
            region_name: self.name.clone(),
            avoid: self.avoid,
            nodes: self.nodes.iter().map(|node| node.to_fields(region_id)).collect(),
        }
    }
}

impl RelayNode {
    fn from_fields(fields: &RelayNodeFields) -> Option<Self> {
        let ipv4 = Reach::parse(&fields.ipv4);
        let ipv6 = Reach::parse(&fields.ipv6);
        let fixed = matches!(ipv4, Reach::At(_)) || matches!(ipv6, Reach::At(_));
        let nameless = fixed && fields.host_name.is_empty();
        if !nameless && !is_host(&fields.host_name) {
            return None;
        }
        if !fields.cert_name.is_empty() && !is_host(&fields.cert_name) {
            return None;
        }
        let derp_port = match fields.derp_port {
            _ if fields.stun_only => None,
            0 => Some(DEFAULT_DERP_PORT),
            port => Some(u16::try_from(port).ok()?),
        };
        let stun_port = match fields.stun_port {
            ..0 => None,
            0 => Some(DEFAULT_STUN_PORT),
            port => Some(u16::try_from(port).ok()?),
        };
        Some(Self {
            name: text::foreign(fields.name.as_bytes()),
            host: fields.host_name.clone(),
            cert_name: (!fields.cert_name.is_empty()).then(|| fields.cert_name.clone()),
            ipv4,
            ipv6,
            derp_port,
            stun_port,
            force_http: fields.force_http,
            insecure_for_tests: fields.insecure_for_tests,
            stun_test_ip: fields.stun_test_ip.parse().ok(),
            can_port_80: fields.can_port_80,
        })
    }

    fn to_fields(&self, region_id: i64) -> RelayNodeFields {
        RelayNodeFields {
            name: self.name.clone(),
            region_id,
            host_name: self.host.clone(),
            cert_name: self.cert_name.clone().unwrap_or_default(),
            ipv4: self.ipv4.text(),
            ipv6: self.ipv6.text(),
            stun_port: self.stun_port.map_or(-1, i32::from),
            stun_only: self.derp_port.is_none(),
            derp_port: self.derp_port.map_or(0, i32::from),
            insecure_for_tests: self.insecure_for_tests,
            force_http: self.force_http,
            stun_test_ip: self.stun_test_ip.map(|ip| ip.to_string()).unwrap_or_default(),
            can_port_80: self.can_port_80,
        }
    }
}

/// Text that can stand in a URL and a `Host` header: a name or an address.
fn is_host(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b':');
    !text.is_empty() && text.len() <= MAX_HOST_LEN && text.bytes().all(allowed)
}
