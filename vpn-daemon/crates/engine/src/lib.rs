//! The tunnel engine: which packets of this machine go to which peer, sealed and along which relay, and which packets of
//! peers may come in. It performs no input or output and reads no clock: bytes, commands and the time are arguments,
//! output bytes go into a [`Sink`] of the caller, everything else is an [`Event`].
//!
//! # Contract
//!
//! ```text
//! loop {
//!     engine.handle_tun / handle_relay / handle_udp / apply (…, now, &mut sink)   // as input comes; output is in the sink
//!     if engine.poll_timeout() <= now { engine.handle_timeout(now, &mut sink) }
//!     while let Some(event) = engine.poll_event() { … }
//!     wait for input or engine.poll_timeout()
//! }
//! ```
//!
//! `now` never goes back. Every call does bounded work; a bad packet is counted and ends nothing. In steady state no call
//! for a packet allocates. Calls for packets may come in runs, with `poll_event` and `poll_timeout` only after the run.
//!
//! # Life of a packet
//!
//! *Out*: `handle_tun` checks source and size, finds the peer by destination, notes the conversation for the filter and
//! seals the packet into the sink's buffer, or holds it until the peer's session is up. Unknown and unreachable
//! destinations are answered with ICMPv6, so that `connect()` fails at once.
//! *In*: `handle_udp` knows the sender by its address, `handle_relay` by the relay's word; either wants it to be a peer
//! before any cryptography, sorts WireGuard from path messages, opens into the sink's buffer, and delivers what the peer
//! may send.
#![forbid(unsafe_code)]

// The simulation of `tests/` serves unit tests too.
#[cfg(test)]
extern crate self as codervpn_engine;
#[cfg(test)]
#[path = "../tests/sim/mod.rs"]
mod sim;

mod addresses;
mod candidates;
mod command;
mod common;
mod config;
mod echo;
mod endpoints;
mod event;
mod filter;
mod flows;
mod held;
mod home_relay;
mod limits;
mod lookup;
mod net_report;
mod paths;
mod peer;
mod peers;
mod pings;
mod relays;
mod self_node;
mod session;
mod sink;
mod stats;
mod timers;
mod traffic;

use std::collections::VecDeque;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use codervpn_wire::classify::{self, Datagram, WireGuard};
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::ip::{self, Ipv6Packet, Unreachable};
use codervpn_wire::keys::{NodePrivate, NodePublic};
use codervpn_wire::node::{self, Node, Prefix};
use codervpn_wire::tsmp;

pub use command::{Command, Direct, LinkChange, PeerId, RelayLatency, SendFailure, StunServer};
pub use config::{Config, Role};
pub use event::{Event, NetReport, Path, PeerState, PeerStatus, Ping, PingError, RelayReason};
pub use filter::Inbound;
pub use home_relay::{HomeCandidate, HomeRelay};
pub use session::LIBRARY_LOG_TARGET;
pub use sink::{Route, Sink};
pub use stats::Counters;

use common::{Common, Own, PLAIN_ROOM};
use filter::Filter;
use limits::{Bucket, IcmpLimit};
use net_report::Net;
use peer::{After, Peer, Remote};
use peers::Peers;
use pings::Via;
use relays::Relays;
use self_node::SelfNode;
use session::Sessions;
use timers::Timers;

/// Pongs over all peers and second (T-08).
const PONGS_PER_SECOND: u32 = 200;
/// Discovery pings over all peers and second (T-05).
const DISCOVERY_PER_SECOND: u32 = 1000;
/// Addresses taken from the node of a party that is no workspace agent.
const MAX_CLIENT_ADDRESSES: usize = 4;

/// Where the first of several packets went that were one super-packet.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    slot: u32,
    ways: traffic::Ways,
}

/// See the crate's documentation.
pub struct Engine {
    role: Role,
    node_private: NodePrivate,
    peers: Peers,
    filter: Filter,
    icmp: IcmpLimit,
    self_node: SelfNode,
    /// When the node may be published though home is not connected.
    publish_at: Option<Instant>,
    cx: Common,
}

impl Engine {
    pub fn new(config: Config, now: Instant) -> Self {
        let Config {
            role, node_key, disco_key, node_id, addresses, inbound, answer_echo, status_pings, mut rng, ..
        } = config;
        let net = Net::new(config.direct, config.allow_loopback);
        let own = Own {
            node_key: node_key.public(),
            disco_key: disco_key.public(),
            disco_private: disco_key,
            addresses: addresses.clone(),
            status_pings,
            answer_echo,
        };
        let seed = rng.next_u64();
        Self {
            role,
            filter: Filter::new(inbound, seed, now),
            icmp: IcmpLimit::new(now),
            self_node: SelfNode::new(node_id, own.node_key, own.disco_key, addresses),
            publish_at: None,
            peers: Peers::default(),
            cx: Common {
                own,
                rng,
                sessions: Sessions::new(&node_key),
                relays: Relays::default(),
                net,
                addresses: addresses::Addresses::default(),
                link_up: true,
                has_v4: false,
                has_v6: false,
                allow_loopback: config.allow_loopback,
                discovery: Bucket::per_second(DISCOVERY_PER_SECOND, now),
                sealed: Box::new([0; PLAIN_ROOM]),
                echoes: echo::Echoes::default(),
                held: held::HeldTotal::default(),
                timers: Timers::default(),
                events: VecDeque::new(),
                counters: Counters::default(),
                pongs: Bucket::per_second(PONGS_PER_SECOND, now),
                scratch: Box::new([0; PLAIN_ROOM]),
            },
            node_private: node_key,
        }
    }

    /// A packet that the packet device handed us. Packets for the resolver at `node::DNS_ADDRESS` are the caller's.
    pub fn handle_tun(&mut self, bytes: &[u8], now: Instant, sink: &mut impl Sink) {
        self.handle_tun_first(bytes, now, sink);
    }

    /// As `handle_tun`. Where the packet went, if it left at once: for [`Engine::handle_tun_next`].
    pub fn handle_tun_first(&mut self, bytes: &[u8], now: Instant, sink: &mut impl Sink) -> Option<Run> {
        let Some(packet) = Ipv6Packet::parse(bytes) else {
            self.cx.counters.tun_malformed += 1;
            return None;
        };
        if !self.cx.is_own(packet.source()) {
            self.cx.counters.tun_foreign_source += 1;
            return None;
        }
        let destination = packet.destination();
        let for_peers = node::is_tunnel_address(destination)
            && destination != node::DNS_ADDRESS
            && !self.cx.is_own(destination)
            && packet.next_header() != tsmp::PROTOCOL;
        if !for_peers {
            self.cx.counters.tun_not_for_peers += 1;
            return None;
        }
        if packet.bytes().len() > ip::MTU {
            self.cx.counters.tun_too_big += 1;
            self.refuse(&packet, None, now, sink);
            return None;
        }
        let slot = self.peers.slot_of_address(destination);
        let Some(peer) = slot.and_then(|slot| self.peers.get_mut(slot)) else {
            self.cx.counters.tun_unknown_peer += 1;
            self.refuse(&packet, Some(Unreachable::Address), now, sink);
            return None;
        };
        self.cx.net.note_active(now);
        if peer.is_unreachable(now) {
            self.cx.counters.tun_unreachable += 1;
            peer.send_in_vain(&mut self.cx, sink, now);
            self.refuse(&packet, Some(Unreachable::Address), now, sink);
            return None;
        }
        self.filter.outgoing(&packet, now);
        let slot = peer.slot;
        peer.send(packet.bytes(), &mut self.cx, sink, now).map(|ways| Run { slot, ways })
    }

    /// A packet that was cut from the same super-packet as the one before, at the same moment and with no other call in
    /// between. What was decided for the first holds for it, so that it costs hardly more than its cipher.
    pub fn handle_tun_next(&mut self, run: &Run, bytes: &[u8], now: Instant, sink: &mut impl Sink) {
        match self.peers.get_mut(run.slot) {
            Some(peer) if bytes.len() <= ip::MTU => peer.seal_and_send(bytes, run.ways, &mut self.cx, sink, now),
            _ => self.cx.counters.tun_malformed += 1,
        }
    }

    /// The payload of a RecvPacket frame: `from` is the sender that the relay names.
    pub fn handle_relay(
        &mut self,
        region: RegionId,
        from: NodePublic,
        payload: &[u8],
        now: Instant,
        sink: &mut impl Sink,
    ) {
        // T-02: a stranger costs one look-up.
        let Some(sender) = self.peers.slot_of_key(from) else {
            self.cx.counters.relay_stranger += 1;
            return;
        };
        let datagram = classify::datagram(payload);
        if let Some(peer) = self.peers.get_mut(sender) {
            peer.note_heard(region, &self.cx);
            if let Datagram::Disco(envelope) = datagram {
                peer.receive_disco(&envelope, Via::Relay(region), &mut self.cx, sink, now);
                return;
            }
        }
        let Datagram::WireGuard(message) = datagram else {
            self.cx.counters.relay_garbage += 1;
            return;
        };
        self.receive_wireguard((message, payload), sender, Via::Relay(region), now, sink);
    }

    /// A UDP datagram. Without cryptography a stranger costs one look-up (T-01); a path message is opened only if it names
    /// a peer's key.
    pub fn handle_udp(&mut self, source: SocketAddr, payload: &[u8], now: Instant, sink: &mut impl Sink) {
        match classify::datagram(payload) {
            Datagram::Stun => {
                self.cx.net.answer(source, payload, &mut self.cx.counters);
                self.drive_report(now, sink);
            }
            Datagram::Disco(envelope) => {
                // A pong to an address that will never be a path would have the peer send its data there, in vain (T-06).
                let usable = self.cx.may_go_direct() && node::is_usable_endpoint(&source, self.cx.allow_loopback);
                let slot = self.peers.slot_of_disco(&envelope.sender()).filter(|_| usable);
                match slot.and_then(|slot| self.peers.get_mut(slot)) {
                    Some(peer) => peer.receive_disco(&envelope, Via::Udp(source), &mut self.cx, sink, now),
                    None => self.cx.counters.udp_ignored += 1,
                }
            }
            Datagram::WireGuard(message) => {
                let Some(sender) = self.cx.addresses.slot_of(source) else {
                    self.cx.counters.udp_stranger += 1;
                    return;
                };
                self.receive_wireguard((message, payload), sender, Via::Udp(source), now, sink);
            }
            Datagram::Other => self.cx.counters.udp_stranger += 1,
        }
    }

    /// A WireGuard message and its datagram, from the peer in slot `sender` as far as the way it came by tells.
    fn receive_wireguard(
        &mut self,
        message: (WireGuard, &[u8]),
        sender: u32,
        via: Via,
        now: Instant,
        sink: &mut impl Sink,
    ) {
        // The index is authoritative; only an initiation has none.
        let slot = match message.0.receiver() {
            Some(index) => self.cx.sessions.slot_of(index),
            None => Some(sender),
        };
        match slot.and_then(|slot| self.peers.get_mut(slot)) {
            Some(peer) => peer.receive(message, via, &mut self.filter, &mut self.cx, sink, now),
            None => self.cx.counters.wg_no_session += 1,
        }
    }

    /// A datagram for `destination` could not be sent.
    pub fn handle_send_failure(
        &mut self,
        destination: SocketAddr,
        failure: SendFailure,
        now: Instant,
        sink: &mut impl Sink,
    ) {
        if failure == SendFailure::Unreachable {
            self.cx.net.unreachable(destination);
        }
        let slot = self.cx.addresses.slot_of(destination).or_else(|| {
            // An address that never answered is in no table. Failures are few: pings are limited (T-05).
            let tried = |peer: &&Peer| peer.candidates.iter().any(|candidate| candidate.address == destination);
            self.peers.iter().find(tried).map(|peer| peer.slot)
        });
        let Some(peer) = slot.and_then(|slot| self.peers.get_mut(slot)) else { return };
        match failure {
            SendFailure::TooBig => {
                self.cx.counters.paths_too_small += 1;
                peer.too_big(destination, &mut self.cx, sink, now);
            }
            SendFailure::Unreachable | SendFailure::Blocked => {
                if peer.paths.trusted(now) == Some(destination) {
                    peer.paths.distrust();
                    peer.lost_path(&mut self.cx, sink, now);
                }
            }
        }
    }

    /// What is known about the network we are in.
    pub fn net_report(&self) -> NetReport {
        self.cx.net.report()
    }

    /// Does everything that is due.
    pub fn handle_timeout(&mut self, now: Instant, sink: &mut impl Sink) {
        while let Some((at, slot)) = self.cx.timers.pop_due(now) {
            let Some(peer) = self.peers.get_mut(slot).filter(|peer| peer.scheduled == Some(at)) else { continue };
            match peer.tick(&mut self.cx, sink, now) {
                After::Nothing => {}
                After::Forget => self.forget(slot, now),
                After::Apply(node) => {
                    let id = peer.id;
                    self.set_node(id, node, now, sink);
                }
            }
        }
        if self.publish_at.is_some_and(|at| at <= now) {
            self.publish_at = None;
            self.publish(now);
        }
        while let Some((id, token)) = self.cx.echoes.pop_due(now) {
            self.cx.event(Event::EchoDone { id, token, result: Err(PingError::Timeout), path: None });
        }
        self.drive_report(now, sink);
    }

    /// When `handle_timeout` has something to do.
    pub fn poll_timeout(&mut self) -> Option<Instant> {
        let peers = &self.peers;
        let peer = self.cx.timers.next(|at, slot| peers.get(slot).is_some_and(|peer| peer.scheduled == Some(at)));
        [peer, self.publish_at, self.cx.net.next_timeout(), self.cx.echoes.next_timeout()].into_iter().flatten().min()
    }

    /// Takes one event. The queue is bounded by what it tells of: one change per peer, one answer per ping.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.cx.events.pop_front()?;
        if let Event::PeerChanged(id) = event
            && let Some(peer) = self.peers.slot_of_id(id).and_then(|slot| self.peers.get_mut(slot))
        {
            peer.change_queued = false;
        }
        Some(event)
    }

    pub fn apply(&mut self, command: Command, now: Instant, sink: &mut impl Sink) {
        match command {
            Command::AddDestination(id) => self.add_destination(id, now),
            Command::RemoveDestination(id) => {
                if let Some(slot) = self.peers.slot_of_id(id).filter(|slot| self.is_destination(*slot)) {
                    self.drop_peer(slot, now);
                }
            }
            Command::Node { id, node } => self.set_node(id, node, now, sink),
            Command::ReadyForHandshake(id) => {
                if let Some(peer) = self.peers.slot_of_id(id).and_then(|slot| self.peers.get_mut(slot)) {
                    peer.set_ready(&mut self.cx, sink, now);
                }
            }
            Command::Lost(id) => {
                if let Some(peer) = self.peers.slot_of_id(id).and_then(|slot| self.peers.get_mut(slot)) {
                    peer.set_lost(&mut self.cx, now);
                }
            }
            Command::AllLost => {
                for peer in self.peers.iter_mut().filter(|peer| !peer.is_lost()) {
                    peer.set_lost(&mut self.cx, now);
                }
            }
            Command::Disconnected(id) => {
                if let Some(slot) = self.peers.slot_of_id(id) {
                    self.forget(slot, now);
                }
            }
            Command::DerpMap(map) => {
                let (before, version) = (self.cx.relays.home(), self.cx.relays.version());
                self.cx.relays.set_map(map, now);
                self.after_relays(before, now);
                if self.cx.relays.version() != version {
                    self.cx.net.map_changed(now);
                    self.drive_report(now, sink);
                }
            }
            Command::RelayLatencies(latencies) => {
                let before = self.cx.relays.home();
                self.cx.relays.set_latencies(latencies, now);
                self.after_relays(before, now);
            }
            Command::RelayWebsocketFallback { region, reason } => {
                match reason {
                    Some(reason) => self.self_node.websocket_fallback.insert(region, reason),
                    None => self.self_node.websocket_fallback.remove(&region),
                };
                self.publish(now);
            }
            Command::RelayUp(region) => {
                self.cx.relays.up(region);
                self.publish(now);
                for peer in self.peers.iter_mut() {
                    peer.relay_up(&mut self.cx, sink, now);
                }
            }
            Command::RelayDown(region) => {
                self.cx.relays.down(region);
                // Others are closed by ourselves, too, when nobody needs them.
                if self.cx.relays.home() == Some(region) {
                    self.want_relay(region, now);
                    // Whatever broke it may have changed how the network looks.
                    self.cx.net.request(now);
                    self.drive_report(now, sink);
                }
                for peer in self.peers.iter_mut() {
                    peer.settle(&mut self.cx, now);
                }
            }
            Command::RelayPeerGone { region, peer } => {
                if let Some(peer) = self.peers.slot_of_key(peer).and_then(|slot| self.peers.get_mut(slot)) {
                    peer.gone_from(region, &self.cx);
                }
            }
            Command::Ping(id) => match self.peers.slot_of_id(id).and_then(|slot| self.peers.get_mut(slot)) {
                Some(peer) => peer.ping(&mut self.cx, sink, now),
                None => self.cx.event(Event::PingDone { id, result: Err(PingError::UnknownPeer) }),
            },
            Command::Echo { id, token } => self.send_echo(id, token, now, sink),
            Command::Inbound(inbound) => self.filter.set_inbound(inbound),
            Command::SocketsBound { v4, v6 } => {
                (self.cx.has_v4, self.cx.has_v6) = (v4.is_some(), v6.is_some());
                self.cx.net.set_ports(v4, v6, now);
                self.drive_report(now, sink);
                for peer in self.peers.iter_mut() {
                    peer.network_changed(&mut self.cx, sink, now);
                }
            }
            Command::LocalAddresses(addresses) => {
                let changed = self.cx.net.set_local_addresses(addresses, now);
                self.publish_if(changed, now);
            }
            Command::StunServers(servers) => {
                self.cx.net.set_servers(&servers, now);
                self.drive_report(now, sink);
            }
            Command::PortMapped(address) => {
                let changed = self.cx.net.set_port_mapped(address, now);
                self.publish_if(changed, now);
                self.drive_report(now, sink);
            }
            Command::Direct(direct) => {
                let allowed = self.cx.net.is_direct_allowed();
                if direct != Direct::Allowed {
                    // What peers still send us directly would be lost until they notice.
                    for peer in self.peers.iter_mut().filter(|_| allowed) {
                        peer.call_off(&mut self.cx, sink);
                    }
                }
                let changed = self.cx.net.set_direct(direct, now);
                self.publish_if(changed, now);
                self.drive_report(now, sink);
                for peer in self.peers.iter_mut().filter(|_| allowed != (direct == Direct::Allowed)) {
                    peer.direct_changed(&mut self.cx, sink, now);
                }
            }
            Command::Link(change) => {
                self.cx.link_up = change != LinkChange::Down;
                self.cx.net.set_link_up(self.cx.link_up);
                self.cx.net.request(now);
                self.drive_report(now, sink);
                if change != LinkChange::Minor {
                    // The relays carry packets until pongs come in on the new sockets (T-39).
                    for peer in self.peers.iter_mut() {
                        peer.distrust_paths();
                        peer.call_off(&mut self.cx, sink);
                        peer.settle(&mut self.cx, now);
                    }
                }
                let rebind = matches!(change, LinkChange::Major | LinkChange::Up);
                if rebind && !self.cx.events.contains(&Event::RebindSockets) {
                    self.cx.event(Event::RebindSockets);
                }
            }
        }
    }

    /// A packet of our own for a peer, sent as those of the device are.
    fn send_echo(&mut self, id: PeerId, token: u64, now: Instant, sink: &mut impl Sink) {
        let cx = &mut self.cx;
        let peer = self.peers.slot_of_id(id).and_then(|slot| self.peers.get_mut(slot));
        let addresses = |peer: &Peer| Some((*cx.own.addresses.first()?, *peer.addresses.first()?));
        let request = match peer.as_ref() {
            None => Err(PingError::UnknownPeer),
            Some(peer) if peer.remote.is_none() => Err(PingError::NoNode),
            Some(peer) => addresses(peer)
                .ok_or(PingError::NoPath)
                .and_then(|addresses| cx.echoes.request(id, token, addresses, &mut &mut *cx.rng, now)),
        };
        match (request, peer) {
            (Ok(packet), Some(peer)) => drop(peer.send(&packet, cx, sink, now)),
            (Err(error), _) => cx.event(Event::EchoDone { id, token, result: Err(error), path: None }),
            (Ok(_), None) => {}
        }
    }

    /// Moves the net report on: starts a run that is due, sends its requests, ends it.
    fn drive_report(&mut self, now: Instant, sink: &mut impl Sink) {
        let has_peers = self.peers.with_node() > 0;
        loop {
            let Common { net, relays, rng, counters, .. } = &mut self.cx;
            let latency = |region| relays.latency(region);
            let progress = net.tick(has_peers, latency, &mut &mut **rng, counters, sink, now);
            if progress.started && !self.cx.events.contains(&Event::MeasureRelays) {
                self.cx.event(Event::MeasureRelays);
            }
            if !progress.finished {
                return;
            }
            for peer in self.peers.iter_mut() {
                peer.endpoints_fresh(&mut self.cx, sink, now);
            }
            // The next run may be due; at most two fall into one instant.
            self.publish(now);
        }
    }

    fn publish_if(&mut self, changed: bool, now: Instant) {
        if changed {
            self.publish(now);
        }
    }

    /// Our node for the coordinator; `None` until it may be published. Read it after `Event::SelfNodeChanged` and for
    /// every new connection to the coordinator.
    pub fn self_node(&self, as_of: SystemTime) -> Option<Node> {
        self.self_node.build(as_of)
    }

    pub fn node_key(&self) -> NodePublic {
        self.cx.own.node_key
    }

    /// Our addresses inside the tunnel.
    pub fn addresses(&self) -> &[Ipv6Addr] {
        &self.cx.own.addresses
    }

    pub fn home_relay(&self) -> Option<RegionId> {
        self.cx.relays.home()
    }

    /// The last round of measurements.
    pub fn relay_latencies(&self) -> &[RelayLatency] {
        self.cx.relays.latencies()
    }

    /// The smaller latency of both families in the last round.
    pub fn relay_latency(&self, region: RegionId) -> Option<Duration> {
        self.cx.relays.latency(region)
    }

    pub fn peer(&self, id: PeerId, now: Instant) -> Option<PeerStatus> {
        let peer = self.peers.slot_of_id(id).and_then(|slot| self.peers.get(slot))?;
        Some(peer.status(&self.cx, now))
    }

    pub fn peers(&self, now: Instant) -> impl Iterator<Item = PeerStatus> {
        self.peers.iter().map(move |peer| peer.status(&self.cx, now))
    }

    pub fn peer_count(&self) -> usize {
        self.peers.len()
    }

    pub fn counters(&self) -> &Counters {
        &self.cx.counters
    }

    fn add_destination(&mut self, id: PeerId, now: Instant) {
        if let Some(peer) = self.peers.slot_of_id(id).and_then(|slot| self.peers.get_mut(slot)) {
            peer.destination = true;
            return;
        }
        let addresses = [node::coder_address(id), node::tailscale_address(id)]
            .map(|address| (!self.cx.is_own(address)).then_some(address))
            .into_iter()
            .flatten()
            .filter(|address| *address != node::DNS_ADDRESS && *address != node::LEGACY_AGENT_ADDRESS);
        let addresses: Vec<Ipv6Addr> = addresses.collect();
        if self.peers.insert(id, true, &addresses, now).is_none() {
            tracing::warn!(%id, "agent left out: another agent has its addresses, or there are too many");
        }
    }

    fn is_destination(&self, slot: u32) -> bool {
        self.peers.get(slot).is_some_and(|peer| peer.destination)
    }

    /// Checks a node and hands it to its peer (CC-36, T-15, T-27, T-28).
    fn set_node(&mut self, id: PeerId, node: Box<Node>, now: Instant, sink: &mut impl Sink) {
        let slot = self.peers.slot_of_id(id);
        if slot.is_none() && self.role == Role::Client {
            self.cx.counters.node_stray += 1;
            return;
        }
        let known_key = slot.and_then(|slot| self.peers.get(slot)).and_then(Peer::key);
        let owner = self.peers.slot_of_key(node.key);
        let taken = owner.is_some() && owner != slot;
        let unusable = node.key == self.cx.own.node_key
            || (known_key != Some(node.key) && self.node_private.shared_key(&node.key).is_err());
        let destination = slot.is_some_and(|slot| self.is_destination(slot));
        let mut allowed: Vec<Ipv6Addr> =
            if destination { node.addresses_of(id).collect() } else { client_addresses(&node) };
        allowed.retain(|address| !self.cx.is_own(*address));
        allowed.retain(|address| self.peers.owner_of_address(address).is_none_or(|owner| Some(owner) == slot));
        if taken || unusable || allowed.is_empty() {
            self.cx.counters.node_refused += 1;
            tracing::warn!(%id, taken, unusable, addresses = allowed.len(), "node refused");
            return;
        }
        let Some(slot) = slot.or_else(|| self.peers.insert(id, false, &allowed, now)) else {
            self.cx.counters.node_refused += 1;
            return;
        };
        if !destination {
            self.peers.set_addresses(slot, &allowed);
        }
        let Some(peer) = self.peers.get_mut(slot) else { return };
        if peer.must_defer(node.key, now) {
            peer.deferred = Some(node);
            peer.settle(&mut self.cx, now);
            return;
        }
        let remote = Remote { key: node.key, disco: node.disco, home: node.home };
        let (old, old_disco) = (peer.key(), peer.remote.map(|remote| remote.disco));
        peer.set_node(remote, allowed, node.endpoints.clone(), &mut self.cx, sink, now);
        self.peers.set_disco(slot, old_disco, Some(node.disco));
        if old != Some(node.key) {
            self.peers.set_key(slot, old, Some(node.key));
        }
        if old.is_none() && self.peers.with_node() == 1 {
            self.cx.net.request_unless_fresh(now);
        }
    }

    /// DISCONNECTED or lost for too long: a destination stays, without its node.
    fn forget(&mut self, slot: u32, now: Instant) {
        let Some(peer) = self.peers.get_mut(slot) else { return };
        if !peer.destination {
            self.drop_peer(slot, now);
            return;
        }
        let (old, old_disco) = (peer.key(), peer.remote.map(|remote| remote.disco));
        peer.forget_node(&mut self.cx, now);
        self.peers.set_disco(slot, old_disco, None);
        self.peers.set_key(slot, old, None);
    }

    fn drop_peer(&mut self, slot: u32, now: Instant) {
        if let Some(mut peer) = self.peers.remove(slot) {
            peer.close(&mut self.cx, now);
        }
    }

    fn after_relays(&mut self, home_before: Option<RegionId>, now: Instant) {
        if let Some(home) = self.cx.relays.home().filter(|home| Some(*home) != home_before) {
            self.cx.event(Event::HomeRelayChanged(home));
            self.want_relay(home, now);
        }
        self.publish(now);
    }

    fn want_relay(&mut self, region: RegionId, now: Instant) {
        if self.cx.relays.ask(region, now) {
            self.cx.event(Event::RelayWanted(region));
        }
    }

    /// Tells of our node if it may be published and differs from what was told.
    fn publish(&mut self, now: Instant) {
        let (Some(home), Some(open_at)) = (self.cx.relays.home(), self.cx.relays.open_at(now)) else { return };
        if open_at > now {
            self.publish_at = Some(open_at);
            return;
        }
        self.publish_at = None;
        if self.self_node.update(home, self.cx.relays.node_latencies(), self.cx.net.endpoints())
            && !self.cx.events.contains(&Event::SelfNodeChanged)
        {
            self.cx.event(Event::SelfNodeChanged);
        }
    }

    /// Writes an ICMPv6 error about a packet of this machine to the device; `None` means "too big".
    fn refuse(&mut self, packet: &Ipv6Packet<'_>, why: Option<Unreachable>, now: Instant, sink: &mut impl Sink) {
        if !ip::may_answer_with_error(packet) {
            return;
        }
        if !self.icmp.take(packet.destination(), now) {
            self.cx.counters.icmp_limited += 1;
            return;
        }
        let Some(out) = sink.incoming(ip::MTU) else {
            self.cx.counters.device_full += 1;
            return;
        };
        let written = match why {
            Some(reason) => ip::write_unreachable(packet, reason, node::DNS_ADDRESS, out),
            None => ip::write_packet_too_big(packet, ip::MTU as u32, node::DNS_ADDRESS, out),
        };
        if let Some(len) = written {
            sink.deliver(len);
            self.cx.counters.icmp_sent += 1;
        }
    }
}

/// The addresses of a party that is no workspace agent: single ones inside the tunnel that it claims in both lists.
fn client_addresses(node: &Node) -> Vec<Ipv6Addr> {
    let claimed = node.addresses.iter().filter(|prefix| node.allowed_ips.contains(prefix));
    claimed
        .filter_map(Prefix::as_single_v6)
        .filter(|address| {
            node::is_tunnel_address(*address) && *address != node::DNS_ADDRESS && *address != node::LEGACY_AGENT_ADDRESS
        })
        .take(MAX_CLIENT_ADDRESSES)
        .collect()
}
