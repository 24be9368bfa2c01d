//! Address translation and stateful firewalls, in the words of RFC 4787: how far a mapping serves, and how far it lets
//! others in. Decides which datagram passes a router and under which addresses.

use std::net::{IpAddr, SocketAddr};

use crate::rng::Rng;
use crate::{Time, secs};

/// How much of the remote address counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// None of it: endpoint-independent.
    Any,
    /// Its IP address: address-dependent.
    Address,
    /// Address and port.
    AddressPort,
}

impl Scope {
    fn matches(self, one: SocketAddr, other: SocketAddr) -> bool {
        match self {
            Self::Any => true,
            Self::Address => one.ip() == other.ip(),
            Self::AddressPort => one == other,
        }
    }
}

/// Which port a new mapping gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ports {
    /// The inner one, unless it is taken.
    Preserving,
    Random,
    /// One after the other.
    Sequential,
}

/// Most routers forget a UDP mapping this long after its last datagram.
const TIMEOUT: Time = secs(30);

/// A router that translates IPv4 addresses.
#[derive(Clone, Debug)]
pub struct Nat {
    pub mapping: Scope,
    pub filtering: Scope,
    /// Whether insiders reach each other by their outer addresses.
    pub hairpin: bool,
    pub ports: Ports,
    pub timeout: Time,
    /// Whether datagrams from outside keep a mapping alive.
    pub refreshed_from_outside: bool,
    /// Ports that are always mapped.
    pub forwards: Vec<(u16, SocketAddr)>,
    next_port: u16,
    mappings: Vec<Mapping>,
}

#[derive(Clone, Debug)]
struct Mapping {
    inside: SocketAddr,
    /// The remote that it was made for.
    made_for: SocketAddr,
    port: u16,
    used: Time,
    /// Who was sent to, and when last.
    remotes: Vec<(SocketAddr, Time)>,
}

impl Nat {
    /// A NAT as a home router has it: easy to pass.
    #[must_use]
    pub fn easy() -> Self {
        Self::new(Scope::Any, Scope::AddressPort, Ports::Preserving)
    }

    /// Another port for every destination.
    #[must_use]
    pub fn hard() -> Self {
        Self::new(Scope::AddressPort, Scope::AddressPort, Ports::Random)
    }

    #[must_use]
    pub fn new(mapping: Scope, filtering: Scope, ports: Ports) -> Self {
        Self {
            mapping,
            filtering,
            hairpin: false,
            ports,
            timeout: TIMEOUT,
            refreshed_from_outside: true,
            forwards: Vec::new(),
            next_port: 1024,
            mappings: Vec::new(),
        }
    }

    #[must_use]
    pub fn with_hairpin(self) -> Self {
        Self { hairpin: true, ..self }
    }

    /// As after a restart of the router.
    pub fn forget(&mut self) {
        self.mappings.clear();
    }

    /// The port under which `inside` appears to `remote`.
    pub(crate) fn outward(&mut self, inside: SocketAddr, remote: SocketAddr, now: Time, rng: &mut Rng) -> u16 {
        if let Some((port, _)) = self.forwards.iter().find(|(_, to)| *to == inside) {
            return *port;
        }
        let (timeout, scope) = (self.timeout, self.mapping);
        self.mappings.retain(|mapping| now < mapping.used + timeout);
        let known = self.mappings.iter().position(|m| m.inside == inside && scope.matches(m.made_for, remote));
        let index = known.unwrap_or_else(|| {
            let port = self.new_port(inside, remote, rng);
            self.mappings.push(Mapping { inside, made_for: remote, port, used: now, remotes: Vec::new() });
            self.mappings.len() - 1
        });
        let mapping = &mut self.mappings[index];
        mapping.used = now;
        mapping.remotes.retain(|(_, at)| now < *at + timeout);
        match mapping.remotes.iter_mut().find(|(known, _)| *known == remote) {
            Some((_, at)) => *at = now,
            None => mapping.remotes.push((remote, now)),
        }
        mapping.port
    }

    /// Who inside gets what `remote` sent to `port`.
    pub(crate) fn inward(&mut self, port: u16, remote: SocketAddr, now: Time) -> Option<SocketAddr> {
        if let Some((_, to)) = self.forwards.iter().find(|(forwarded, _)| *forwarded == port) {
            return Some(*to);
        }
        let (timeout, filtering, refreshed) = (self.timeout, self.filtering, self.refreshed_from_outside);
        let alive = self.mappings.iter_mut().filter(|m| m.port == port && now < m.used + timeout);
        for mapping in alive {
            let admitted = filtering == Scope::Any
                || mapping.remotes.iter().any(|(known, at)| filtering.matches(*known, remote) && now < *at + timeout);
            if admitted {
                if refreshed {
                    mapping.used = now;
                    for (_, at) in mapping.remotes.iter_mut().filter(|(known, _)| *known == remote) {
                        *at = now;
                    }
                }
                return Some(mapping.inside);
            }
        }
        None
    }

    fn new_port(&mut self, inside: SocketAddr, remote: SocketAddr, rng: &mut Rng) -> u16 {
        let mut port = match self.ports {
            Ports::Preserving => inside.port(),
            Ports::Random => 1024 + rng.below(64_000) as u16,
            Ports::Sequential => {
                self.next_port = self.next_port.wrapping_add(1).max(1024);
                self.next_port
            }
        };
        while self.is_taken(port, remote) {
            port = port.wrapping_add(1).max(1024);
        }
        port
    }

    /// One port serves several mappings if they are for different remotes, as Linux does it.
    fn is_taken(&self, port: u16, remote: SocketAddr) -> bool {
        self.forwards.iter().any(|(forwarded, _)| *forwarded == port)
            || self.mappings.iter().any(|m| m.port == port && self.mapping.matches(m.made_for, remote))
    }
}

/// A router or host that lets in only what answers.
#[derive(Clone, Debug)]
pub struct Firewall {
    pub filtering: Scope,
    pub timeout: Time,
    flows: Vec<(SocketAddr, SocketAddr, Time)>,
}

impl Firewall {
    #[must_use]
    pub fn new(filtering: Scope) -> Self {
        Self { filtering, timeout: TIMEOUT, flows: Vec::new() }
    }

    pub(crate) fn outward(&mut self, inside: SocketAddr, remote: SocketAddr, now: Time) {
        let timeout = self.timeout;
        self.flows.retain(|(_, _, at)| now < *at + timeout);
        match self.flows.iter_mut().find(|(from, to, _)| *from == inside && *to == remote) {
            Some((_, _, at)) => *at = now,
            None => self.flows.push((inside, remote, now)),
        }
    }

    pub(crate) fn admits(&mut self, inside: SocketAddr, remote: SocketAddr, now: Time) -> bool {
        let (timeout, filtering) = (self.timeout, self.filtering);
        let mut admitted = filtering == Scope::Any;
        for (from, to, at) in &mut self.flows {
            if *from == inside && filtering.matches(*to, remote) && now < *at + timeout {
                admitted = true;
                if *to == remote {
                    *at = now;
                }
            }
        }
        admitted
    }
}

/// Whether routers of the Internet know where this is.
pub(crate) fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => {
            v4.is_private() || v4.is_link_local() || (v4.octets()[0] == 100 && v4.octets()[1] & 0xc0 == 64)
        }
        IpAddr::V6(v6) => v6.is_unique_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_easy_nat_keeps_the_port_and_lets_in_only_who_was_sent_to() {
        let mut rng = Rng::new(1);
        let mut nat = Nat::easy();
        let (inside, one, other) = (at("192.168.1.10:4000"), at("5.1.1.1:7"), at("5.1.1.1:8"));
        assert_eq!(nat.outward(inside, one, secs(0), &mut rng), 4000);
        assert_eq!(nat.inward(4000, one, secs(1)), Some(inside));
        assert_eq!(nat.inward(4000, other, secs(1)), None);
        assert_eq!(nat.outward(inside, other, secs(1), &mut rng), 4000);
        assert_eq!(nat.inward(4000, one, secs(32)), None, "30 s later it is forgotten");
    }

    #[test]
    fn a_hard_nat_has_another_port_for_each_destination() {
        let mut rng = Rng::new(1);
        let mut nat = Nat::hard();
        let inside = at("192.168.1.10:4000");
        let one = nat.outward(inside, at("5.1.1.1:7"), secs(0), &mut rng);
        let other = nat.outward(inside, at("5.1.1.1:8"), secs(0), &mut rng);
        assert_ne!(one, other);
        assert_eq!(nat.inward(one, at("5.1.1.1:8"), secs(0)), None);
        assert_eq!(nat.outward(inside, at("5.1.1.1:7"), secs(1), &mut rng), one);
    }

    #[test]
    fn address_dependent_filtering_lets_in_every_port_of_an_address() {
        let mut rng = Rng::new(1);
        let mut nat = Nat::new(Scope::Any, Scope::Address, Ports::Preserving);
        let inside = at("192.168.1.10:4000");
        nat.outward(inside, at("5.1.1.1:7"), secs(0), &mut rng);
        assert_eq!(nat.inward(4000, at("5.1.1.1:8"), secs(0)), Some(inside));
        assert_eq!(nat.inward(4000, at("5.1.1.2:7"), secs(0)), None);
    }

    #[test]
    fn two_insiders_never_share_a_port() {
        let mut rng = Rng::new(1);
        let mut nat = Nat::easy();
        let remote = at("5.1.1.1:7");
        let one = nat.outward(at("192.168.1.10:4000"), remote, secs(0), &mut rng);
        let other = nat.outward(at("192.168.1.11:4000"), remote, secs(0), &mut rng);
        assert_ne!(one, other);
    }
}
