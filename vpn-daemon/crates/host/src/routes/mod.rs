//! Link settings, address, route and policy rule of the tunnel (`dns-and-os.md` 3.1 to 3.4).
//!
//! The route stands in a table of its own and one rule sends the prefix there, before the rules
//! of other VPNs: an exit node's default route in another table would otherwise swallow it (N-01).
//! Only the rule outlives the device; it is recorded on disk before it is made.

use std::net::Ipv6Addr;
use std::path::PathBuf;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub use linux::Routes;
#[cfg(target_os = "linux")]
pub(crate) use linux::remove_leftovers;

#[cfg(not(target_os = "linux"))]
mod unsupported;
#[cfg(not(target_os = "linux"))]
pub use unsupported::Routes;
#[cfg(not(target_os = "linux"))]
pub(crate) use unsupported::remove_leftovers;

#[cfg(target_os = "linux")]
mod record;
#[cfg(target_os = "linux")]
mod watch;
#[cfg(not(target_os = "linux"))]
pub use unsupported::Watch;
#[cfg(target_os = "linux")]
pub use watch::Watch;

/// Our routing table. Not 52 and not near 5210 to 5270: those are Tailscale's, which Coder's own
/// Go tunnel inherits.
pub const TABLE: u32 = 12_861;
/// Before Tailscale (52xx).
pub const RULE_PRIORITY: u32 = 5_100;
/// Holds a burst of 100,000 packets a second between two turns of the data loop; the kernel's 500
/// lost 0.1 % there (`fast-path.md` 4.1).
pub const TX_QUEUE_LENGTH: u32 = 4_000;

/// An IPv6 network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Prefix {
    pub address: Ipv6Addr,
    pub length: u8,
}

impl Prefix {
    pub const fn new(address: Ipv6Addr, length: u8) -> Self {
        Prefix { address, length }
    }

    /// Whether `other` lies inside this network (or is the same).
    pub fn contains(&self, other: &Prefix) -> bool {
        let mask = match self.length {
            0 => 0,
            length => u128::MAX << 128_u8.saturating_sub(length),
        };
        other.length >= self.length && (self.address.to_bits() ^ other.address.to_bits()) & mask == 0
    }
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

/// What the tunnel wants: a full desired state, so that applying it again repairs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteConfig {
    /// Our own address; gets /128.
    pub address: Ipv6Addr,
    /// What goes into the tunnel, `fd60:627a:a42b::/48`.
    pub prefix: Prefix,
    pub table: u32,
    pub rule_priority: u32,
}

impl RouteConfig {
    /// The usual table and priority.
    pub fn new(address: Ipv6Addr, prefix: Prefix) -> Self {
        RouteConfig { address, prefix, table: TABLE, rule_priority: RULE_PRIORITY }
    }
}

/// Why the tunnel has no address or no route.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "this kernel has no IPv6 (booted with ipv6.disable=1, or the module is missing); the tunnel is IPv6 inside and cannot work without"
    )]
    NoIpv6,
    #[error(
        "IPv6 is disabled for {interface} and {} cannot be written ({source}); allow it with sysctl net.ipv6.conf.all.disable_ipv6=0, for a container with --sysctl net.ipv6.conf.all.disable_ipv6=0",
        .path.display()
    )]
    Ipv6Disabled { interface: String, path: PathBuf, source: std::io::Error },
    #[error(
        "{route} is routed to {interface} already (table {table}): another product uses the tunnel's network; stop it first"
    )]
    RouteTaken { route: Prefix, interface: String, table: u32 },
    #[error("not permitted to {what}: run codervpnd as root or with CAP_NET_ADMIN")]
    NotPermitted { what: &'static str },
    #[error("the network interface is gone: another program removed it")]
    InterfaceGone,
    #[error("cannot {what}: {source}")]
    Netlink { what: &'static str, source: std::io::Error },
    #[error("cannot write {}: {source}", .path.display())]
    Record { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Unsupported(#[from] crate::Unsupported),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_contain_what_lies_inside() {
        let ours = Prefix::new("fd60:627a:a42b::".parse().unwrap(), 48);
        let inside = Prefix::new("fd60:627a:a42b:1::".parse().unwrap(), 64);
        let host = Prefix::new("fd60:627a:a42b::53".parse().unwrap(), 128);
        let other = Prefix::new("fd60:627a:a42c::".parse().unwrap(), 48);
        let all = Prefix::new(Ipv6Addr::UNSPECIFIED, 0);
        assert!(ours.contains(&ours) && ours.contains(&inside) && ours.contains(&host));
        assert!(!ours.contains(&other) && !ours.contains(&all) && !inside.contains(&ours));
        assert!(all.contains(&ours) && host.contains(&host) && !host.contains(&ours));
    }
}
