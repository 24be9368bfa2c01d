//! Which UDP addresses we advertise, and in which order (`data-plane.md` 3.6).
//!
//! First where the gateway maps our port, then where STUN servers saw us, then where both were a while ago (the mapping
//! may still stand, and a peer that just learnt it would otherwise lose it), last this machine's own addresses. A peer
//! pings all of them, so each has to be one that may be pinged at all and that could reach *us*: nothing of the tunnel,
//! no link-local address that means another link at the peer's side, and no loopback address, from which we would not
//! take its packets either.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use codervpn_wire::node;

/// How long a mapping is advertised after it was last seen (Go: `endpointTracker`).
const REMEMBERED_FOR: Duration = Duration::from_secs(310);
/// Mappings of the past. A NAT that gives us a new one every 20 s would fill the list of a peer.
const MAX_REMEMBERED: usize = 8;
/// A peer of ours takes 32 addresses out of one message (T-05).
const MAX_ADVERTISED: usize = 32;
/// Own addresses that are looked at: a container host may have hundreds.
const MAX_LOCAL: usize = 256;

/// What STUN servers answered in the last report.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Mapped {
    pub(crate) v4: Option<SocketAddr>,
    pub(crate) v6: Option<SocketAddr>,
}

#[derive(Default)]
pub(crate) struct Endpoints {
    allow_loopback: bool,
    v4_port: Option<u16>,
    v6_port: Option<u16>,
    local: Vec<IpAddr>,
    port_mapped: Option<SocketAddr>,
    /// Port-mapped and STUN addresses with the time they were last advertised as present, latest first.
    remembered: Vec<(SocketAddr, Instant)>,
    list: Vec<SocketAddr>,
}

impl Endpoints {
    pub(crate) fn new(allow_loopback: bool) -> Self {
        Self { allow_loopback, ..Self::default() }
    }

    pub(crate) fn list(&self) -> &[SocketAddr] {
        &self.list
    }

    pub(crate) fn port_mapped(&self) -> Option<SocketAddr> {
        self.port_mapped
    }

    /// Whether there is a socket of this address's family.
    pub(crate) fn has_socket_for(&self, address: &SocketAddr) -> bool {
        if address.is_ipv4() { self.v4_port.is_some() } else { self.v6_port.is_some() }
    }

    /// Takes the ports of the sockets. Mappings of a port that is no longer ours lead nowhere and are forgotten.
    pub(crate) fn set_ports(&mut self, v4: Option<u16>, v6: Option<u16>) {
        let changed = |old: Option<u16>, new: Option<u16>| old.is_some() && old != new;
        let (lost_v4, lost_v6) = (changed(self.v4_port, v4), changed(self.v6_port, v6));
        self.remembered.retain(|(address, _)| !if address.is_ipv4() { lost_v4 } else { lost_v6 });
        (self.v4_port, self.v6_port) = (v4, v6);
    }

    /// Takes this machine's addresses; false if they are the same.
    pub(crate) fn set_local(&mut self, mut addresses: Vec<IpAddr>) -> bool {
        addresses.truncate(MAX_LOCAL);
        let same = self.local == addresses;
        self.local = addresses;
        !same
    }

    /// Takes the gateway's mapping of our port; false if it is the same.
    pub(crate) fn set_port_mapped(&mut self, address: Option<SocketAddr>) -> bool {
        let address = address.filter(|address| node::is_usable_endpoint(address, self.allow_loopback));
        let same = self.port_mapped == address;
        self.port_mapped = address;
        !same
    }

    /// No direct paths: nothing is advertised and nothing remembered.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
        self.remembered.clear();
    }

    /// Makes the list anew.
    pub(crate) fn rebuild(&mut self, mapped: Mapped, now: Instant) {
        self.remembered.retain(|(_, seen)| now.saturating_duration_since(*seen) < REMEMBERED_FOR);
        let mut list: Vec<SocketAddr> = [self.port_mapped, mapped.v4, mapped.v6].into_iter().flatten().collect();
        for present in &list {
            self.remembered.retain(|(address, _)| address != present);
        }
        list.extend(self.remembered.iter().map(|(address, _)| *address));
        list.extend(self.local_endpoints());
        for present in [self.port_mapped, mapped.v6, mapped.v4].into_iter().flatten() {
            self.remembered.insert(0, (present, now));
        }
        self.remembered.truncate(MAX_REMEMBERED);

        self.list.clear();
        for endpoint in list {
            if self.list.len() < MAX_ADVERTISED && !self.list.contains(&endpoint) {
                self.list.push(endpoint);
            }
        }
    }

    fn local_endpoints(&self) -> Vec<SocketAddr> {
        let with_port = |ip: &IpAddr| {
            let ip = ip.to_canonical();
            let port = if ip.is_ipv4() { self.v4_port } else { self.v6_port };
            port.map(|port| SocketAddr::new(ip, port))
        };
        let usable =
            self.local.iter().filter_map(with_port).filter(|e| node::is_usable_endpoint(e, self.allow_loopback));
        let (poor, good): (Vec<_>, Vec<_>) = usable.partition(|endpoint| is_last_resort(endpoint.ip()));
        if good.is_empty() { poor } else { good }
    }
}

/// Addresses that rarely lead from one network to another: IPv4 link-local and IPv6 unique local.
fn is_last_resort(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => Ipv4Addr::is_link_local(&v4),
        IpAddr::V6(v6) => v6.is_unique_local(),
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn local(addresses: &[&str]) -> Vec<IpAddr> {
        addresses.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn bound(addresses: &[&str]) -> Endpoints {
        let mut endpoints = Endpoints::new(false);
        endpoints.set_ports(Some(4001), Some(6001));
        endpoints.set_local(local(addresses));
        endpoints
    }

    fn list(endpoints: &Endpoints) -> Vec<String> {
        endpoints.list().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_order_is_mapped_seen_remembered_local_and_each_family_has_its_port() {
        let start = Instant::now();
        let mut endpoints = bound(&["192.168.1.5", "2001:db8::5"]);
        let old = Mapped { v4: Some(address("203.0.113.9:1000")), v6: None };
        endpoints.rebuild(old, start);
        endpoints.set_port_mapped(Some(address("203.0.113.7:5000")));
        let mapped = Mapped { v4: Some(address("203.0.113.7:4001")), v6: Some(address("[2001:db8::9]:6001")) };
        endpoints.rebuild(mapped, start + Duration::from_secs(20));
        assert_eq!(
            list(&endpoints),
            [
                "203.0.113.7:5000",
                "203.0.113.7:4001",
                "[2001:db8::9]:6001",
                "203.0.113.9:1000",
                "192.168.1.5:4001",
                "[2001:db8::5]:6001"
            ]
        );
    }

    #[test]
    fn a_mapping_is_remembered_for_310_seconds_and_not_beyond_its_socket() {
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mapped = Mapped { v4: Some(address("203.0.113.9:1000")), v6: None };
        let mut endpoints = bound(&["192.168.1.5"]);
        endpoints.rebuild(mapped, start);
        endpoints.rebuild(Mapped::default(), at(309));
        assert_eq!(list(&endpoints), ["203.0.113.9:1000", "192.168.1.5:4001"]);
        endpoints.rebuild(Mapped::default(), at(310));
        assert_eq!(list(&endpoints), ["192.168.1.5:4001"]);

        endpoints.rebuild(mapped, at(400));
        endpoints.set_ports(Some(4001), Some(6001));
        endpoints.rebuild(Mapped::default(), at(401));
        assert_eq!(list(&endpoints), ["203.0.113.9:1000", "192.168.1.5:4001"], "the same port");
        endpoints.set_ports(Some(4002), Some(6001));
        endpoints.rebuild(Mapped::default(), at(401));
        assert_eq!(list(&endpoints), ["192.168.1.5:4002"]);
    }

    #[test]
    fn t06_t44_of_our_own_addresses_only_those_go_out_that_lead_to_us() {
        let now = Instant::now();
        let cases: [(&[&str], &[&str]); 7] = [
            (&["fd60:627a:a42b::7", "fd7a:115c:a1e0::7", "10.0.0.1"], &["10.0.0.1:4001"]),
            (&["fe80::1", "ff02::1", "224.0.0.1", "0.0.0.0", "127.3.3.40", "10.0.0.1"], &["10.0.0.1:4001"]),
            (&["127.0.0.1", "::1", "10.0.0.1"], &["10.0.0.1:4001"]),
            (&["169.254.1.1", "fd00::5", "10.0.0.1"], &["10.0.0.1:4001"]),
            (&["169.254.1.1", "fd00::5"], &["169.254.1.1:4001", "[fd00::5]:6001"]),
            (&["127.0.0.1", "::1"], &[]),
            (&["::ffff:10.0.0.1", "10.0.0.1"], &["10.0.0.1:4001"]),
        ];
        for (addresses, expected) in cases {
            let mut endpoints = bound(addresses);
            endpoints.rebuild(Mapped::default(), now);
            assert_eq!(list(&endpoints), expected, "{addresses:?}");
        }
        let mut test = Endpoints::new(true);
        test.set_ports(Some(4001), None);
        test.set_local(local(&["127.0.0.1"]));
        test.rebuild(Mapped::default(), now);
        assert_eq!(list(&test), ["127.0.0.1:4001"], "where a test allows it");
    }

    #[test]
    fn a_family_without_a_socket_advertises_nothing_and_the_list_is_bounded() {
        let now = Instant::now();
        let mut endpoints = bound(&["10.0.0.1", "2001:db8::5"]);
        endpoints.set_ports(Some(4001), None);
        endpoints.rebuild(Mapped::default(), now);
        assert_eq!(list(&endpoints), ["10.0.0.1:4001"]);
        endpoints.set_local((0..1000).map(|i: u32| IpAddr::from((0x0a00_0000 + i).to_be_bytes())).collect());
        for i in 0..100 {
            endpoints.rebuild(Mapped { v4: Some(SocketAddr::from(([203, 0, 113, 1], 1000 + i))), v6: None }, now);
        }
        assert_eq!(endpoints.list().len(), MAX_ADVERTISED);
        assert_eq!(endpoints.remembered.len(), MAX_REMEMBERED);
        endpoints.clear();
        assert!(endpoints.list().is_empty());
    }

    #[test]
    fn a_mapping_that_cannot_be_pinged_is_none() {
        let mut endpoints = bound(&[]);
        assert!(!endpoints.set_port_mapped(Some(address("[fd60:627a:a42b::5]:1"))));
        assert!(!endpoints.set_port_mapped(Some(address("203.0.113.1:0"))));
        assert!(endpoints.set_port_mapped(Some(address("203.0.113.1:1"))));
    }
}
