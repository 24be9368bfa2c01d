//! Decides what a *node* is: what the coordinator distributes about one party, and what of it we believe.
//!
//! [`NodeFields`] are the plain fields as they stand in a message, [`Node`] is what is left after validation: keys are
//! keys, addresses are addresses. A broken key or prefix makes the whole node invalid (PB-6, PB-7); a broken endpoint or
//! latency is left out and counted (PB-8). Which addresses a party may *own* is decided by [`Node::addresses_of`], from
//! its id alone (CC-36).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use uuid::Uuid;

use crate::derp_map::RegionId;
use crate::keys::{DiscoPublic, KeyError, NodePublic};
use crate::text;

/// Endpoints taken from one node (T-27).
pub const MAX_ENDPOINTS: usize = 64;
/// Prefixes taken from each list of one node; agents send two, very old ones three.
pub const MAX_PREFIXES: usize = 64;
/// Latencies and forced-websocket reasons taken from one node: two families for each region of a full map.
const MAX_REGION_ENTRIES: usize = 2 * crate::derp_map::MAX_REGIONS;

/// First 48 bits of every address that we route: Coder's own prefix (`tailnet.CoderServicePrefix`).
pub const CODER_PREFIX: [u8; 6] = [0xfd, 0x60, 0x62, 0x7a, 0xa4, 0x2b];
/// First 48 bits of the addresses that agents have besides (`tailnet.TailscaleServicePrefix`); not routed.
pub const TAILSCALE_PREFIX: [u8; 6] = [0xfd, 0x7a, 0x11, 0x5c, 0xa1, 0xe0];
/// The address that all very old agents share: never routed.
pub const LEGACY_AGENT_ADDRESS: Ipv6Addr =
    Ipv6Addr::new(0xfd7a, 0x115c, 0xa1e0, 0x49d6, 0xb259, 0xb7ac, 0xb1b2, 0x48f4);
/// Our resolver inside the tunnel.
pub const DNS_ADDRESS: Ipv6Addr = Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 0, 0, 0, 0, 0x53);
/// Stands for "by relay" where an address is asked for; the port is the region.
pub const RELAY_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 3, 3, 40);

/// The address of a party under Coder's prefix: its id with the first six bytes replaced.
pub fn coder_address(id: Uuid) -> Ipv6Addr {
    derived(CODER_PREFIX, id)
}

/// The address of an agent under Tailscale's prefix.
pub fn tailscale_address(id: Uuid) -> Ipv6Addr {
    derived(TAILSCALE_PREFIX, id)
}

fn derived(prefix: [u8; 6], id: Uuid) -> Ipv6Addr {
    let mut bytes = id.into_bytes();
    for (byte, fixed) in bytes.iter_mut().zip(prefix) {
        *byte = fixed;
    }
    bytes.into()
}

/// Whether an address lies under Coder's prefix: an agent's, another client's, or our resolver's.
pub fn is_coder_address(address: Ipv6Addr) -> bool {
    address.octets().starts_with(&CODER_PREFIX)
}

/// Whether an address lies inside the tunnel (both prefixes).
pub fn is_tunnel_address(address: Ipv6Addr) -> bool {
    is_coder_address(address) || address.octets().starts_with(&TAILSCALE_PREFIX)
}

/// Whether a candidate may be pinged, from whatever source it came (T-06, T-44): a unicast address outside the tunnel
/// with a port; loopback only where a test wants it.
pub fn is_usable_endpoint(endpoint: &SocketAddr, allow_loopback: bool) -> bool {
    let ip = endpoint.ip().to_canonical();
    let forbidden = match ip {
        IpAddr::V4(v4) => {
            // 0.0.0.0/8 is "this network": Linux takes some of it for loopback.
            v4.octets()[0] == 0 || v4.is_multicast() || v4.is_broadcast() || v4 == RELAY_ADDRESS
        }
        IpAddr::V6(v6) => {
            v6.is_unspecified() || v6.is_multicast() || v6.is_unicast_link_local() || is_tunnel_address(v6)
        }
    };
    endpoint.port() != 0 && !forbidden && (allow_loopback || !ip.is_loopback())
}

/// An address and how many of its bits count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    /// With host bits as written.
    pub address: IpAddr,
    /// 0..=32 or 0..=128.
    pub bits: u8,
}

impl Prefix {
    /// One address.
    pub fn single(address: impl Into<IpAddr>) -> Self {
        let address = address.into();
        Self { address, bits: if address.is_ipv4() { 32 } else { 128 } }
    }

    /// The address, if it is a single IPv6 one.
    pub fn as_single_v6(&self) -> Option<Ipv6Addr> {
        match (self.address, self.bits) {
            (IpAddr::V6(address), 128) => Some(address),
            _ => None,
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

impl FromStr for Prefix {
    type Err = NodeError;

    /// PB-7: strict, no zone, no leading zeros or signs in the length.
    fn from_str(text: &str) -> Result<Self, NodeError> {
        let (address, bits) = text.split_once('/').ok_or(NodeError::Prefix)?;
        let address: IpAddr = address.parse().map_err(|_| NodeError::Prefix)?;
        let plain = bits.bytes().all(|b| b.is_ascii_digit()) && (bits.len() == 1 || !bits.starts_with('0'));
        let bits: u8 = bits.parse().ok().filter(|_| plain).ok_or(NodeError::Prefix)?;
        if bits > if address.is_ipv4() { 32 } else { 128 } {
            return Err(NodeError::Prefix);
        }
        Ok(Self { address, bits })
    }
}

/// A moment as messages have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub struct Timestamp {
    /// Since 1970, UTC.
    pub seconds: i64,
    /// 0..1_000_000_000.
    pub nanos: i32,
}

/// Address family of a latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The fields of a node as a message has them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeFields {
    /// Field 1.
    pub id: i64,
    /// Field 2.
    pub as_of: Option<Timestamp>,
    /// Field 3: `np` and 32 bytes.
    pub key: Vec<u8>,
    /// Field 4: `discokey:` and hex.
    pub disco: String,
    /// Field 5.
    pub preferred_derp: i32,
    /// Field 6: `<region>-v4` or `<region>-v6` and seconds.
    pub derp_latency: Vec<(String, f64)>,
    /// Field 7.
    pub derp_forced_websocket: Vec<(i32, String)>,
    /// Field 8: prefixes.
    pub addresses: Vec<String>,
    /// Field 9: prefixes.
    pub allowed_ips: Vec<String>,
    /// Field 10: `ip:port`.
    pub endpoints: Vec<String>,
}

/// Why a node as a whole is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// PB-6.
    #[error("invalid node key: {0}")]
    Key(KeyError),
    /// PB-6.
    #[error("invalid disco key: {0}")]
    Disco(KeyError),
    /// PB-7.
    #[error("invalid address prefix")]
    Prefix,
    /// More than [`MAX_PREFIXES`].
    #[error("too many address prefixes")]
    TooManyPrefixes,
    /// The party has no home relay yet: such an update is ignored.
    #[error("no home relay yet")]
    NoHome,
}

/// What the coordinator distributes about one party, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Number of the node; informational.
    pub id: i64,
    /// When it was made.
    pub as_of: Option<Timestamp>,
    /// WireGuard key, and address on relays.
    pub key: NodePublic,
    /// Key of path messages.
    pub disco: DiscoPublic,
    /// Home relay. `None` in a received node: a number that no region can have, so it cannot be reached by relay.
    pub home: Option<RegionId>,
    /// How far relays are from it.
    pub derp_latency: BTreeMap<(RegionId, Family), Duration>,
    /// Relays that it reaches only by WebSocket, and why.
    pub forced_websocket: BTreeMap<RegionId, String>,
    /// Its own addresses.
    pub addresses: Vec<Prefix>,
    /// What it may send from.
    pub allowed_ips: Vec<Prefix>,
    /// Where it listens. Not filtered: see [`is_usable_endpoint`].
    pub endpoints: Vec<SocketAddr>,
}

impl Node {
    /// Validates. The number beside the node counts entries that were left out (endpoints, latencies, reasons).
    ///
    /// # Errors
    /// See [`NodeError`].
    pub fn from_fields(fields: &NodeFields) -> Result<(Self, usize), NodeError> {
        let key = NodePublic::from_binary(&fields.key).map_err(NodeError::Key)?;
        let disco = fields.disco.parse().map_err(NodeError::Disco)?;
        let addresses = prefixes(&fields.addresses)?;
        let allowed_ips = prefixes(&fields.allowed_ips)?;
        if fields.preferred_derp == 0 {
            return Err(NodeError::NoHome);
        }
        let endpoints: Vec<SocketAddr> =
            fields.endpoints.iter().take(MAX_ENDPOINTS).filter_map(|text| text.parse().ok()).collect();
        let derp_latency: BTreeMap<_, _> = fields
            .derp_latency
            .iter()
            .take(MAX_REGION_ENTRIES)
            .filter_map(|(key, seconds)| Some((latency_key(key)?, Duration::try_from_secs_f64(*seconds).ok()?)))
            .collect();
        let forced_websocket: BTreeMap<_, _> = fields
            .derp_forced_websocket
            .iter()
            .take(MAX_REGION_ENTRIES)
            .filter_map(|(region, reason)| Some((RegionId::new((*region).into())?, text::foreign(reason.as_bytes()))))
            .collect();
        let given = fields.endpoints.len() + fields.derp_latency.len() + fields.derp_forced_websocket.len();
        let left_out = given - endpoints.len() - derp_latency.len() - forced_websocket.len();
        let node = Self {
            id: fields.id,
            as_of: fields.as_of,
            key,
            disco,
            home: RegionId::new(fields.preferred_derp.into()),
            derp_latency,
            forced_websocket,
            addresses,
            allowed_ips,
            endpoints,
        };
        Ok((node, left_out))
    }

    /// The fields for a message. A node without a home must not be sent: receivers drop it.
    pub fn to_fields(&self) -> NodeFields {
        let texts = |prefixes: &[Prefix]| prefixes.iter().map(ToString::to_string).collect();
        NodeFields {
            id: self.id,
            as_of: self.as_of,
            key: self.key.to_binary().to_vec(),
            disco: self.disco.to_string(),
            preferred_derp: self.home.map_or(0, |home| home.get().into()),
            derp_latency: self
                .derp_latency
                .iter()
                .map(|((region, family), latency)| {
                    let family = if *family == Family::V4 { "v4" } else { "v6" };
                    (format!("{region}-{family}"), latency.as_secs_f64())
                })
                .collect(),
            derp_forced_websocket: self
                .forced_websocket
                .iter()
                .map(|(region, reason)| (region.get().into(), reason.clone()))
                .collect(),
            addresses: texts(&self.addresses),
            allowed_ips: texts(&self.allowed_ips),
            endpoints: self.endpoints.iter().map(ToString::to_string).collect(),
        }
    }

    /// CC-36, T-27: the addresses that the agent `id` may own and really claims in both lists, Coder's first.
    pub fn addresses_of(&self, id: Uuid) -> impl Iterator<Item = Ipv6Addr> {
        [coder_address(id), tailscale_address(id)].into_iter().filter(|address| {
            let claimed = |list: &[Prefix]| list.iter().any(|prefix| prefix.as_single_v6() == Some(*address));
            *address != LEGACY_AGENT_ADDRESS
                && *address != DNS_ADDRESS
                && claimed(&self.addresses)
                && claimed(&self.allowed_ips)
        })
    }
}

fn prefixes(texts: &[String]) -> Result<Vec<Prefix>, NodeError> {
    if texts.len() > MAX_PREFIXES {
        return Err(NodeError::TooManyPrefixes);
    }
    texts.iter().map(|text| text.parse()).collect()
}

fn latency_key(text: &str) -> Option<(RegionId, Family)> {
    let (region, family) = text.split_once('-')?;
    let family = match family {
        "v4" => Family::V4,
        "v6" => Family::V6,
        _ => return None,
    };
    Some((RegionId::new(region.parse().ok()?)?, family))
}
