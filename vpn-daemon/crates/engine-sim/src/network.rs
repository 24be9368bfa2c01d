//! Segments, the hosts on them and the routers between them. Decides where a datagram goes next and whether it gets there;
//! the world asks hop by hop, so that NATs and firewalls see every datagram at its own time.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use codervpn_engine::SendFailure;
use codervpn_wire::stun;

use crate::nat::{Firewall, Nat, is_private};
use crate::rng::Rng;
use crate::wire::{Crossing, Wire, packet_size};
use crate::{Time, secs};

/// A machine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct HostId(pub(crate) usize);
/// A LAN, a provider's network, or the Internet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SegmentId(pub(crate) usize);
/// What joins a segment to the next one outwards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RouterId(pub(crate) usize);

/// Where all gateways lead in the end.
pub(crate) const INTERNET: SegmentId = SegmentId(0);
/// A loop would be a fault of this file.
const MAX_HOPS: u8 = 32;
/// How long a host remembers that a path takes small packets only (Linux: `mtu_expires`).
const PMTU_LIFE: Time = secs(600);

/// What passes a router besides translated IPv4.
#[derive(Clone, Debug, Default)]
pub enum Passage {
    /// Nothing of this family.
    #[default]
    Closed,
    /// Everything.
    Open,
    /// What answers.
    Stateful(Firewall),
    /// Only to and from the router's own outer address.
    Translated(Nat),
}

#[derive(Debug)]
pub struct Router {
    inside: SegmentId,
    outside: SegmentId,
    outer_v4: Option<IpAddr>,
    pub v4: Passage,
    pub v6: Passage,
    /// Its own attachment to the outer segment.
    pub wire: Wire,
}

impl Router {
    /// Its address outside, if it translates.
    #[must_use]
    pub fn outer_v4(&self) -> Option<IpAddr> {
        self.outer_v4
    }
}

#[derive(Debug)]
pub struct Host {
    pub(crate) segment: SegmentId,
    pub v4: Option<IpAddr>,
    pub v6: Option<IpAddr>,
    /// Addresses of interfaces that lead nowhere else, such as a container bridge's.
    pub bridges: Vec<IpAddr>,
    pub wire: Wire,
    /// Sending fails, as with a local firewall.
    pub blocked: bool,
    small_paths: Vec<(IpAddr, usize, Time)>,
}

#[derive(Debug)]
pub struct StunServer {
    pub address: SocketAddr,
    pub up: bool,
    delay: Time,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Host(HostId),
    Router(RouterId),
    Stun(usize),
}

#[derive(Debug, Default)]
struct Segment {
    members: Vec<(IpAddr, Owner)>,
    gateway: Option<RouterId>,
}

/// A datagram under way.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) source: SocketAddr,
    pub(crate) destination: SocketAddr,
    pub(crate) bytes: Rc<[u8]>,
    /// Who sent it, and to whom by its own reckoning; for what routers tell senders.
    origin: Option<(HostId, IpAddr)>,
    hops: u8,
}

/// Where it is.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    Segment { id: SegmentId, from_outside: bool },
    Router(RouterId),
    Host(HostId),
}

#[derive(Clone, Debug)]
pub(crate) struct Hop {
    pub(crate) stop: Stop,
    pub(crate) datagram: Datagram,
}

/// Where everybody is attached.
#[derive(Debug)]
pub struct Network {
    segments: Vec<Segment>,
    pub hosts: Vec<Host>,
    pub routers: Vec<Router>,
    pub stun: Vec<StunServer>,
    /// Outer addresses between which nothing passes.
    pub severed: Vec<(IpAddr, IpAddr)>,
    /// Hops to come.
    pub(crate) next: Vec<(Time, Hop)>,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            segments: vec![Segment::default()],
            hosts: Vec::new(),
            routers: Vec::new(),
            stun: Vec::new(),
            severed: Vec::new(),
            next: Vec::new(),
        }
    }
}

impl Network {
    /// A segment behind a router that is attached to `outside`.
    pub(crate) fn add_segment(
        &mut self,
        outside: SegmentId,
        outer_v4: Option<IpAddr>,
        v4: Passage,
        v6: Passage,
        wire: Wire,
    ) -> (SegmentId, RouterId) {
        let (segment, router) = (SegmentId(self.segments.len()), RouterId(self.routers.len()));
        self.segments.push(Segment { members: Vec::new(), gateway: Some(router) });
        self.routers.push(Router { inside: segment, outside, outer_v4, v4, v6, wire });
        if let Some(address) = outer_v4 {
            self.announce(outside, address, Owner::Router(router));
        }
        (segment, router)
    }

    pub(crate) fn add_host(
        &mut self,
        segment: SegmentId,
        v4: Option<IpAddr>,
        v6: Option<IpAddr>,
        wire: Wire,
    ) -> HostId {
        let id = HostId(self.hosts.len());
        let host =
            Host { segment, v4: None, v6: None, bridges: Vec::new(), wire, blocked: false, small_paths: Vec::new() };
        self.hosts.push(host);
        self.attach(id, segment, v4, v6);
        id
    }

    /// Puts a host somewhere else, with other addresses.
    pub(crate) fn attach(&mut self, id: HostId, segment: SegmentId, v4: Option<IpAddr>, v6: Option<IpAddr>) {
        for segment in &mut self.segments {
            segment.members.retain(|(_, owner)| *owner != Owner::Host(id));
        }
        let host = &mut self.hosts[id.0];
        for old in [host.v4, host.v6].into_iter().flatten().filter(|old| !is_private(*old)) {
            for segment in &mut self.segments {
                segment.members.retain(|(address, _)| *address != old);
            }
        }
        (host.segment, host.v4, host.v6) = (segment, v4, v6);
        host.small_paths.clear();
        for address in [v4, v6].into_iter().flatten() {
            self.announce(segment, address, Owner::Host(id));
        }
    }

    pub(crate) fn add_stun(&mut self, address: SocketAddr, delay: Time) -> usize {
        self.stun.push(StunServer { address, up: true, delay });
        let index = self.stun.len() - 1;
        self.segments[INTERNET.0].members.push((address.ip(), Owner::Stun(index)));
        index
    }

    /// Tells every segment outwards where an address is, as far as it is known there.
    fn announce(&mut self, segment: SegmentId, address: IpAddr, owner: Owner) {
        self.segments[segment.0].members.push((address, owner));
        let Some(gateway) = self.segments[segment.0].gateway else { return };
        let router = &self.routers[gateway.0];
        let translated = address.is_ipv4() && matches!(router.v4, Passage::Translated(_) | Passage::Closed);
        let outside = router.outside;
        if !translated {
            self.announce(outside, address, Owner::Router(gateway));
        }
    }

    /// All that a look at this host's interfaces would show.
    pub(crate) fn addresses(&self, host: HostId) -> Vec<IpAddr> {
        let host = &self.hosts[host.0];
        let own = if host.wire.up { [host.v4, host.v6] } else { [None, None] };
        own.into_iter().flatten().chain(host.bridges.iter().copied()).collect()
    }

    /// The routers between a host and the Internet.
    pub(crate) fn routers_of(&self, host: HostId) -> Vec<RouterId> {
        let mut found = Vec::new();
        let mut segment = self.hosts[host.0].segment;
        while let Some(gateway) = self.segments[segment.0].gateway {
            found.push(gateway);
            segment = self.routers[gateway.0].outside;
        }
        found
    }

    /// From the host to the middle of the Internet.
    pub(crate) fn delay_of(&self, host: HostId) -> Time {
        let routers: Time = self.routers_of(host).iter().map(|router| self.routers[router.0].wire.delay).sum();
        self.hosts[host.0].wire.delay + routers
    }

    /// Whether every attachment up to the Internet is in order.
    pub(crate) fn is_online(&self, host: HostId) -> bool {
        let has_address = self.hosts[host.0].v4.is_some() || self.hosts[host.0].v6.is_some();
        let routers = self.routers_of(host);
        has_address && self.hosts[host.0].wire.up && routers.iter().all(|router| self.routers[router.0].wire.up)
    }

    /// A datagram leaves a socket of `host`.
    pub(crate) fn send(
        &mut self,
        id: HostId,
        port: u16,
        destination: SocketAddr,
        bytes: &[u8],
        now: Time,
        rng: &mut Rng,
    ) -> Result<(), SendFailure> {
        let host = &mut self.hosts[id.0];
        let own = if destination.is_ipv4() { host.v4 } else { host.v6 };
        let to_itself = own == Some(destination.ip()) || host.bridges.contains(&destination.ip());
        let source = if host.bridges.contains(&destination.ip()) { Some(destination.ip()) } else { own };
        let source = source.filter(|_| host.wire.up || to_itself).ok_or(SendFailure::Unreachable)?;
        if host.blocked {
            return Err(SendFailure::Blocked);
        }
        let datagram = Datagram {
            source: SocketAddr::new(source, port),
            destination,
            bytes: bytes.into(),
            origin: Some((id, destination.ip())),
            hops: 0,
        };
        if to_itself {
            self.next.push((now, Hop { stop: Stop::Host(id), datagram }));
            return Ok(());
        }
        let size = packet_size(destination, bytes.len());
        host.small_paths.retain(|(_, _, at)| now < *at + PMTU_LIFE);
        if host.small_paths.iter().any(|(ip, mtu, _)| *ip == destination.ip() && size > *mtu) {
            return Err(SendFailure::TooBig);
        }
        let segment = Stop::Segment { id: host.segment, from_outside: false };
        match host.wire.cross(true, size, now, rng) {
            Crossing::TooBig => Err(SendFailure::TooBig),
            Crossing::Lost => Ok(()),
            Crossing::Through(at, again) => {
                self.push(at, again, segment, datagram);
                Ok(())
            }
        }
    }

    fn push(&mut self, at: Time, again: Option<Time>, stop: Stop, datagram: Datagram) {
        if let Some(again) = again {
            self.next.push((again, Hop { stop: stop.clone(), datagram: datagram.clone() }));
        }
        self.next.push((at, Hop { stop, datagram }));
    }

    /// Moves a datagram on. Returns it when it has reached a host's socket.
    pub(crate) fn hop(&mut self, hop: Hop, now: Time, rng: &mut Rng) -> Option<(HostId, Datagram)> {
        let Hop { stop, mut datagram } = hop;
        datagram.hops += 1;
        assert!(datagram.hops < MAX_HOPS, "a routing loop: {datagram:?}");
        match stop {
            Stop::Host(id) => return Some((id, datagram)),
            Stop::Router(id) => self.inward(id, datagram, now),
            Stop::Segment { id, from_outside } => self.on_segment(id, from_outside, datagram, now, rng),
        }
        None
    }

    fn on_segment(&mut self, id: SegmentId, from_outside: bool, datagram: Datagram, now: Time, rng: &mut Rng) {
        let (source, destination) = (datagram.source, datagram.destination);
        if id == INTERNET {
            let pair = |(a, b): &(IpAddr, IpAddr)| [(*a, *b), (*b, *a)].contains(&(source.ip(), destination.ip()));
            if self.severed.iter().any(pair) || is_private(source.ip()) || is_private(destination.ip()) {
                return;
            }
        }
        let size = packet_size(destination, datagram.bytes.len());
        let segment = &self.segments[id.0];
        let owner = segment.members.iter().find(|(address, _)| *address == destination.ip()).map(|(_, owner)| *owner);
        let (crossing, stop) = match owner {
            Some(Owner::Host(host)) => (self.hosts[host.0].wire.cross(false, size, now, rng), Stop::Host(host)),
            Some(Owner::Router(router)) => {
                (self.routers[router.0].wire.cross(false, size, now, rng), Stop::Router(router))
            }
            Some(Owner::Stun(server)) => return self.answer_stun(server, &datagram, now),
            None => {
                let Some(gateway) = segment.gateway.filter(|_| !from_outside) else { return };
                return self.outward(gateway, datagram, now, rng);
            }
        };
        self.crossed(crossing, stop, datagram, now);
    }

    fn crossed(&mut self, crossing: Crossing, stop: Stop, datagram: Datagram, now: Time) {
        match crossing {
            Crossing::Lost => {}
            Crossing::Through(at, again) => self.push(at, again, stop, datagram),
            Crossing::TooBig => {
                let Some((host, destination)) = datagram.origin else { return };
                let fits = packet_size(datagram.destination, datagram.bytes.len()) - 1;
                let mtu = match stop {
                    Stop::Host(host) => self.hosts[host.0].wire.mtu,
                    Stop::Router(router) => self.routers[router.0].wire.mtu,
                    Stop::Segment { .. } => fits,
                };
                self.hosts[host.0].small_paths.push((destination, mtu.min(fits), now));
            }
        }
    }

    /// From inside through a router.
    fn outward(&mut self, id: RouterId, mut datagram: Datagram, now: Time, rng: &mut Rng) {
        let router = &mut self.routers[id.0];
        let (source, destination) = (datagram.source, datagram.destination);
        let passage = if destination.is_ipv4() { &mut router.v4 } else { &mut router.v6 };
        match passage {
            Passage::Closed => return,
            Passage::Open => {}
            Passage::Stateful(firewall) => firewall.outward(source, destination, now),
            Passage::Translated(nat) => {
                let Some(outer) = router.outer_v4 else { return };
                let to_itself = destination.ip() == outer;
                if to_itself && !nat.hairpin {
                    return;
                }
                datagram.source = SocketAddr::new(outer, nat.outward(source, destination, now, rng));
                if to_itself {
                    let Some(inside) = nat.inward(destination.port(), datagram.source, now) else { return };
                    datagram.destination = inside;
                    let stop = Stop::Segment { id: router.inside, from_outside: true };
                    self.next.push((now, Hop { stop, datagram }));
                    return;
                }
            }
        }
        let size = packet_size(destination, datagram.bytes.len());
        let crossing = router.wire.cross(true, size, now, rng);
        let stop = Stop::Segment { id: router.outside, from_outside: false };
        if crossing == Crossing::TooBig
            && let Some((host, named)) = datagram.origin
        {
            let mtu = router.wire.mtu;
            self.hosts[host.0].small_paths.push((named, mtu, now));
            return;
        }
        self.crossed(crossing, stop, datagram, now);
    }

    /// From outside through a router.
    fn inward(&mut self, id: RouterId, mut datagram: Datagram, now: Time) {
        let router = &mut self.routers[id.0];
        let (source, destination) = (datagram.source, datagram.destination);
        let passage = if destination.is_ipv4() { &mut router.v4 } else { &mut router.v6 };
        match passage {
            Passage::Closed => return,
            Passage::Open => {}
            Passage::Stateful(firewall) => {
                if !firewall.admits(destination, source, now) {
                    return;
                }
            }
            Passage::Translated(nat) => {
                let Some(inside) = nat.inward(destination.port(), source, now) else { return };
                datagram.destination = inside;
            }
        }
        let stop = Stop::Segment { id: router.inside, from_outside: true };
        self.next.push((now, Hop { stop, datagram }));
    }

    fn answer_stun(&mut self, server: usize, request: &Datagram, now: Time) {
        let server = &self.stun[server];
        let (up, delay) = (server.up, server.delay);
        let right_port = server.address == request.destination;
        let tx = stun::parse_binding_request(&request.bytes, stun::Strictness::Strict);
        let Some(tx) = tx.filter(|_| up && right_port) else { return };
        let mut out = [0; stun::MAX_RESPONSE_LEN];
        let len = stun::binding_response(&tx, request.source, &mut out);
        let datagram = Datagram {
            source: request.destination,
            destination: request.source,
            bytes: out[..len].into(),
            origin: None,
            hops: 0,
        };
        let stop = Stop::Segment { id: INTERNET, from_outside: false };
        self.next.push((now + delay * 2, Hop { stop, datagram }));
    }
}
