//! Packets of one peer: from the device sealed and sent or held, from the network opened, checked and delivered.
//!
//! A packet from the device leaves at once when a session stands and a way leads to the peer: directly where that is
//! proven, else by relay and, beside it, to the address that was proven last. Otherwise it is held and whatever is missing
//! is started. A packet from the peer reaches the device only if its source is an address of this peer, its destination is
//! ours, and the filter admits it; TSMP never does.

use std::time::{Duration, Instant};

use codervpn_wire::classify::WireGuard;
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::ip::{self, Ipv6Packet, Upper};
use codervpn_wire::tsmp;

use crate::common::{Common, PLAIN_ROOM};
use crate::event::Event;
use crate::filter::Filter;
use crate::paths::Best;
use crate::peer::Peer;
use crate::pings::Via;
use crate::session::{CONTROL_ROOM, DATA_OVERHEAD, Opened, Refused, Session};
use crate::sink::{Route, Sink};
use crate::stats::Counters;

/// Every deadline that one packet can bring nearer lies at least this far ahead (passive keepalive).
const NEAREST_NEW_DEADLINE: Duration = Duration::from_secs(10);
const PADDING: usize = 16;
/// An address that was proven last is tried beside the relay for so long; afterwards only pings go there.
const TRIED_BESIDE: Duration = Duration::from_secs(30);
/// A handshake that waits for a relay connection asks for it again after this long.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// The way packets take, and a second one beside it while the first is not proven.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    first: Route,
    second: Option<Route>,
}

/// What becomes of a packet that came out of a session.
enum Inner {
    Deliver,
    /// An answer of this length lies in the scratch.
    Answer(usize),
    Drop,
}

impl Peer {
    /// The region that packets to this peer go through.
    pub(crate) fn region(&mut self, cx: &Common) -> Option<RegionId> {
        let version = cx.relays.version();
        match self.route {
            Some((known, region)) if known == version => region,
            _ => {
                let region = cx.relays.route(self.home(), self.heard);
                self.route = Some((version, region));
                region
            }
        }
    }

    /// Where packets to this peer go now (5.3). `None`: a relay connection has to come up first, and is asked for.
    pub(crate) fn ways(&mut self, cx: &mut Common, now: Instant) -> Option<Ways> {
        if cx.may_go_direct() {
            if let Some(address) = self.paths.trusted(now) {
                return Some(Ways { first: Route::Udp(address), second: None });
            }
            let fresh = |best: &Best| now.saturating_duration_since(best.at) < TRIED_BESIDE;
            if let Some(best) = self.paths.best().filter(|best| cx.has_socket(best.address)) {
                let direct = Route::Udp(best.address);
                return Some(match self.relay_or_ask(cx, now) {
                    Some(relay) => Ways { first: relay, second: fresh(&best).then_some(direct) },
                    None => Ways { first: direct, second: None },
                });
            }
        }
        self.relay_or_ask(cx, now).map(|first| Ways { first, second: None })
    }

    /// `ways` and the relay beside them, if one is connected. For handshake messages while no session stands: nothing else
    /// would tell that a direct path has died meanwhile, and one that is lost costs 5 s.
    fn with_relay(&mut self, ways: Ways, cx: &Common) -> Ways {
        match ways {
            Ways { first: Route::Udp(_), second: None } => Ways { second: self.relay(cx), ..ways },
            _ => ways,
        }
    }

    /// A way to the peer was found: a handshake message that is under way may have taken another and be lost.
    pub(crate) fn repeat_handshake(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if !self.is_up(now) && self.session.as_ref().is_some_and(Session::is_initiating) {
            self.start_handshake(cx, sink, now);
        }
    }

    /// The way by relay, if one is connected.
    pub(crate) fn relay(&mut self, cx: &Common) -> Option<Route> {
        let remote = self.remote?;
        self.region(cx).map(|region| Route::Relay { region, peer: remote.key })
    }

    /// As `relay`; without one, a connection to the peer's home is asked for.
    pub(crate) fn relay_or_ask(&mut self, cx: &mut Common, now: Instant) -> Option<Route> {
        let relay = self.relay(cx);
        if relay.is_some() {
            return relay;
        }
        if let Some(home) = self.home()
            && cx.relays.ask(home, now)
        {
            cx.event(Event::RelayWanted(home));
        }
        None
    }

    /// A message of this peer came over `region`.
    pub(crate) fn note_heard(&mut self, region: RegionId, cx: &Common) {
        if self.home() == Some(region) {
            return;
        }
        let heard = cx.relays.heard_on(region);
        if heard != self.heard {
            self.heard = heard;
            self.route = None;
        }
    }

    /// The relay says that the peer is not there: only what was learnt from hearing it is void (T-20).
    pub(crate) fn gone_from(&mut self, region: RegionId, cx: &Common) {
        if self.heard.is_some() && self.heard == cx.relays.heard_on(region) {
            self.heard = None;
            self.route = None;
        }
    }

    /// A packet from the device, checked and at most 1280 bytes long. The way it took, if it left at once by one.
    pub(crate) fn send(&mut self, packet: &[u8], cx: &mut Common, sink: &mut impl Sink, now: Instant) -> Option<Ways> {
        if self.last_inner.is_none_or(|at| at + NEAREST_NEW_DEADLINE < now) {
            self.ping_as_in_use(now);
        }
        self.last_inner = Some(now);
        self.unheard_since.get_or_insert(now);
        if self.is_up(now)
            && self.held.is_empty()
            && let Some(ways) = self.ways(cx, now)
        {
            self.seal_and_send(packet, ways, cx, sink, now);
            self.note_sent(cx, sink, now);
            self.reschedule_after_packet(cx, now);
            return Some(ways).filter(|ways| ways.second.is_none());
        }
        if self.held.push(packet, now, &mut cx.held) {
            cx.counters.tun_held += 1;
        } else {
            cx.counters.held_overflow += 1;
        }
        if self.is_up(now) {
            self.flush_held(cx, sink, now);
        } else {
            self.start_handshake_if_due(cx, sink, now);
        }
        self.note_sent(cx, sink, now);
        self.settle(cx, now);
        None
    }

    /// Without the table of deadlines being touched for every packet.
    fn reschedule_after_packet(&mut self, cx: &mut Common, now: Instant) {
        if self.scheduled.is_none_or(|at| at > now + NEAREST_NEW_DEADLINE) {
            self.settle(cx, now);
        }
    }

    pub(crate) fn seal_and_send(
        &mut self,
        packet: &[u8],
        ways: Ways,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) {
        let Some(session) = &mut self.session else { return };
        let padded = packet.len().next_multiple_of(PADDING).min(ip::MTU.max(packet.len()));
        let room = (padded + DATA_OVERHEAD).max(CONTROL_ROOM);
        let Some(out) = ways.room(room, &mut cx.sealed, sink) else {
            cx.counters.sink_full += 1;
            return;
        };
        let plain = if padded == packet.len() {
            packet
        } else {
            let (Some(body), true) = (cx.scratch.get_mut(..packet.len()), padded <= PLAIN_ROOM) else { return };
            body.copy_from_slice(packet);
            if let Some(padding) = cx.scratch.get_mut(packet.len()..padded) {
                padding.fill(0);
            }
            cx.scratch.get(..padded).unwrap_or(packet)
        };
        let Some(len) = session.seal(plain, out, now) else {
            cx.counters.tun_no_session += 1;
            return;
        };
        self.tx_bytes += packet.len() as u64;
        cx.counters.tun_sent += 1;
        self.commit(ways, len, cx, sink, now);
    }

    /// `len` bytes were sealed into the sink for the one way there is, or into our own buffer for two.
    fn commit(&mut self, ways: Ways, len: usize, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if let Some(second) = ways.second {
            cx.counters.sent_both += 1;
            let Common { sealed, counters, .. } = cx;
            let sealed = sealed.get(..len).unwrap_or_default();
            copy_out(sealed, ways.first, counters, sink);
            copy_out(sealed, second, counters, sink);
            return;
        }
        sink.send(ways.first, len);
        if let Route::Udp(_) = ways.first {
            cx.counters.sent_direct += 1;
            if self.paths.sent(len, now)
                && let Some(at) = self.paths.next_check()
            {
                cx.timers.schedule(self.slot, &mut self.scheduled, at);
            }
        }
    }

    pub(crate) fn flush_held(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        while !self.held.is_empty() && self.is_up(now) {
            let Some(ways) = self.ways(cx, now) else { return };
            let Some(packet) = self.held.pop(now, &mut cx.held, &mut cx.counters.held_expired) else { return };
            self.seal_and_send(&packet, ways, cx, sink, now);
        }
    }

    /// Starts or repeats a handshake, or notes that it has to wait for a relay connection.
    pub(crate) fn start_handshake(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        self.handshake_waits = None;
        if self.session.is_none() || self.is_up(now) {
            return;
        }
        let ways = self.ways(cx, now).filter(|ways| ways.is_open(cx, now)).map(|ways| self.with_relay(ways, cx));
        let (Some(ways), Some(session)) = (ways, &mut self.session) else {
            let open_at = cx.relays.open_at(now).filter(|at| *at > now);
            self.handshake_waits = Some(open_at.unwrap_or(now + LOOK_AGAIN));
            return;
        };
        let mut message = [0; CONTROL_ROOM];
        let jitter = cx.jitter();
        if let Some(len) = session.initiate(&mut message, jitter, now) {
            cx.counters.initiations_sent += 1;
            send_control(message.get(..len).unwrap_or_default(), ways, cx, sink);
            self.begin_discovery_if_due(cx, sink, now);
        }
    }

    /// A packet for a peer that counts as unreachable: it may be back without anybody having told us.
    pub(crate) fn send_in_vain(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        self.last_inner = Some(now);
        self.ping_as_in_use(now);
        self.start_handshake_if_due(cx, sink, now);
        self.settle(cx, now);
    }

    /// A packet asks for a session that does not stand: starts a handshake unless one is under way or was just tried.
    pub(crate) fn start_handshake_if_due(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if self.session.as_ref().is_some_and(|session| session.wants_initiation(now)) {
            self.start_handshake(cx, sink, now);
            self.settle(cx, now);
        }
    }

    pub(crate) fn tick_session(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        // A tick has at most a handshake and a keepalive to send.
        for _ in 0..4 {
            let mut message = [0; CONTROL_ROOM];
            let jitter = cx.jitter();
            let Some(len) = self.session.as_mut().and_then(|session| session.tick(&mut message, jitter, now)) else {
                return;
            };
            let initiation = message.first() == Some(&1);
            let ways = self.ways(cx, now).filter(|ways| !initiation || ways.is_open(cx, now));
            let Some(ways) = ways else {
                cx.counters.no_route += 1;
                if initiation && !self.is_up(now) {
                    self.handshake_waits = Some(now + LOOK_AGAIN);
                }
                continue;
            };
            let ways = if initiation && !self.is_up(now) { self.with_relay(ways, cx) } else { ways };
            cx.counters.initiations_sent += u64::from(initiation);
            send_control(message.get(..len).unwrap_or_default(), ways, cx, sink);
        }
    }

    /// A WireGuard message for this peer.
    pub(crate) fn receive(
        &mut self,
        (kind, datagram): (WireGuard, &[u8]),
        via: Via,
        filter: &mut Filter,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) {
        let Some(session) = &mut self.session else {
            cx.counters.wg_no_session += 1;
            return;
        };
        let handshake_before = session.last_handshake();
        if !matches!(kind, WireGuard::Data { .. }) {
            let mut answer = [0; CONTROL_ROOM];
            match session.open(datagram, &mut answer, now) {
                Opened::Reply(len) => {
                    self.heard_by(via);
                    if let Some(ways) = self.ways(cx, now) {
                        // Who initiates by relay may not hear us directly any more.
                        let ways = if matches!(via, Via::Relay(_)) { self.with_relay(ways, cx) } else { ways };
                        send_control(answer.get(..len).unwrap_or_default(), ways, cx, sink);
                    } else {
                        cx.counters.no_route += 1;
                    }
                }
                Opened::Refused(why) => count_refused(why, cx),
                Opened::Packet(_) | Opened::Nothing => self.heard_by(via),
            }
            self.after_open(handshake_before, cx, sink, now);
            return;
        }
        let Some(out) = sink.incoming(datagram.len().max(CONTROL_ROOM)) else {
            cx.counters.device_full += 1;
            return;
        };
        match session.open(datagram, out, now) {
            Opened::Packet(len) => {
                let was_unreachable = self.is_unreachable(now);
                self.unheard_since = None;
                self.heard_by(via);
                self.rx_bytes += len as u64;
                match self.judge(out.get(..len).unwrap_or_default(), filter, cx, now) {
                    Inner::Deliver => {
                        cx.counters.peer_delivered += 1;
                        self.last_inner = Some(now);
                        cx.net.note_active(now);
                        sink.deliver(len);
                    }
                    Inner::Answer(len) => self.send_scratch(len, cx, sink, now),
                    Inner::Drop => {}
                }
                if was_unreachable {
                    self.settle(cx, now);
                }
            }
            Opened::Nothing => {
                let was_unreachable = self.is_unreachable(now);
                self.unheard_since = None;
                self.heard_by(via);
                if was_unreachable {
                    self.settle(cx, now);
                }
            }
            Opened::Reply(_) => {}
            Opened::Refused(why) => count_refused(why, cx),
        }
        self.after_open(handshake_before, cx, sink, now);
    }

    #[inline]
    fn heard_by(&mut self, via: Via) {
        self.paths.heard(match via {
            Via::Udp(source) => Some(source),
            Via::Relay(_) => None,
        });
    }

    fn after_open(&mut self, handshake_before: Option<Instant>, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let handshake = self.session.as_ref().and_then(Session::last_handshake);
        if handshake != handshake_before {
            let first = handshake_before.is_none();
            cx.counters.sessions_established += 1;
            self.last_handshake = handshake;
            self.handshake_waits = None;
            self.unheard_since = None;
            if first {
                self.ping_soon(now);
            }
            self.flush_held(cx, sink, now);
            self.tell_change(cx);
            self.settle(cx, now);
        } else {
            self.reschedule_after_packet(cx, now);
        }
    }

    /// Checks a packet of this peer (T-29, T-30, T-31) and writes an answer of our own into the scratch.
    fn judge(&self, bytes: &[u8], filter: &mut Filter, cx: &mut Common, now: Instant) -> Inner {
        let Some(packet) = Ipv6Packet::parse(bytes).filter(|packet| packet.bytes().len() <= ip::MTU) else {
            cx.counters.inner_malformed += 1;
            return Inner::Drop;
        };
        if !self.allowed.contains(&packet.source()) {
            cx.counters.inner_foreign_source += 1;
            return Inner::Drop;
        }
        if !cx.is_own(packet.destination()) {
            cx.counters.inner_foreign_destination += 1;
            return Inner::Drop;
        }
        match packet.upper() {
            Some(Upper::Other { protocol: tsmp::PROTOCOL, .. }) => {
                cx.counters.tsmp += 1;
                tsmp::write_pong(bytes, &mut cx.scratch[..]).map_or(Inner::Drop, Inner::Answer)
            }
            Some(Upper::Icmpv6(icmp)) if cx.own.answer_echo && icmp.kind() == ip::ICMPV6_ECHO_REQUEST => {
                cx.counters.echo_answered += 1;
                ip::write_echo_reply(&packet, &mut cx.scratch[..]).map_or(Inner::Drop, Inner::Answer)
            }
            Some(Upper::Icmpv6(icmp))
                if icmp.kind() == ip::ICMPV6_ECHO_REPLY
                    && let Some((token, latency)) = cx.echoes.answer(self.id, &icmp, now) =>
            {
                let path = self.status(cx, now).path;
                cx.event(Event::EchoDone { id: self.id, token, result: Ok(latency), path });
                Inner::Drop
            }
            _ if filter.admits(&packet, &self.allowed, now) => Inner::Deliver,
            _ => {
                cx.counters.inner_filtered += 1;
                Inner::Drop
            }
        }
    }

    /// Sends the packet that lies in the scratch; unpadded, since the scratch cannot be its own padding.
    fn send_scratch(&mut self, len: usize, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let Some(ways) = self.ways(cx, now) else { return };
        let padded = len.next_multiple_of(PADDING).min(ip::MTU.max(len));
        if let Some(padding) = cx.scratch.get_mut(len..padded) {
            padding.fill(0);
        }
        let Common { scratch, sealed, counters, .. } = cx;
        let (Some(session), Some(plain)) = (&mut self.session, scratch.get(..padded)) else { return };
        let room = (padded + DATA_OVERHEAD).max(CONTROL_ROOM);
        let Some(out) = ways.room(room, sealed, sink) else {
            counters.sink_full += 1;
            return;
        };
        if let Some(sealed) = session.seal(plain, out, now) {
            self.tx_bytes += len as u64;
            self.commit(ways, sealed, cx, sink, now);
        }
    }
}

impl Ways {
    /// Whether a first message may leave: by relay not before our own relay connection stands.
    fn is_open(self, cx: &Common, now: Instant) -> bool {
        matches!(self.first, Route::Udp(_)) || cx.relays.is_open(now)
    }

    /// Where to seal a datagram: where the one way sends from, or beside both. The receiver's window keeps one of the two.
    fn room<'a>(self, room: usize, sealed: &'a mut [u8; PLAIN_ROOM], sink: &'a mut impl Sink) -> Option<&'a mut [u8]> {
        match self.second {
            None => sink.outgoing(self.first, room),
            Some(_) => sealed.get_mut(..room),
        }
    }
}

/// Messages without data are copied: they are small and rare.
fn send_control(message: &[u8], ways: Ways, cx: &mut Common, sink: &mut impl Sink) {
    for route in [Some(ways.first), ways.second].into_iter().flatten() {
        copy_out(message, route, &mut cx.counters, sink);
    }
}

fn copy_out(message: &[u8], route: Route, counters: &mut Counters, sink: &mut impl Sink) {
    match sink.outgoing(route, message.len()).and_then(|out| out.get_mut(..message.len())) {
        Some(out) => {
            out.copy_from_slice(message);
            sink.send(route, message.len());
        }
        None => counters.sink_full += 1,
    }
}

fn count_refused(why: Refused, cx: &mut Common) {
    let counter = match why {
        Refused::Malformed => &mut cx.counters.wg_malformed,
        Refused::NotAuthentic => &mut cx.counters.wg_not_authentic,
        Refused::Replay => &mut cx.counters.wg_replay,
        Refused::Flood => &mut cx.counters.wg_flood,
    };
    *counter += 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{AGENT, DESKTOP, World, ms};
    use codervpn_wire::node::coder_address;

    /// Sends what a device may not hand in.
    fn send_from_agent(world: &mut World, packet: &[u8]) {
        let now = world.now;
        let party = world.agent();
        let engine = &mut party.engine;
        let slot = engine.peers.slot_of_id(DESKTOP).unwrap();
        engine.peers.get_mut(slot).unwrap().send(packet, &mut engine.cx, &mut party.out, now);
        world.run(ms(5));
    }

    #[test]
    fn t31_a_tsmp_ping_of_an_agent_is_answered_and_no_tsmp_reaches_the_device() {
        let mut world = World::connected();
        let (agent, desktop) = (coder_address(AGENT), world.client().address);
        let mut packet = [0; 64];
        let len = tsmp::write_ping(agent, desktop, &[7; 8], &mut packet).unwrap();
        let before = world.parties[1].engine.peer(DESKTOP, world.start).unwrap().rx_bytes;
        send_from_agent(&mut world, &packet[..len]);
        assert!(world.client().out.delivered.is_empty());
        assert_eq!(world.client().engine.counters().tsmp, 1);
        // The agent's engine consumes the pong.
        assert_eq!(world.agent().engine.counters().tsmp, 1);
        assert_eq!(
            world.parties[1].engine.peer(DESKTOP, world.start).unwrap().rx_bytes - before,
            tsmp::PONG_LEN as u64
        );
        assert!(world.agent().out.delivered.is_empty());
    }

    #[test]
    fn packets_of_one_super_packet_go_where_the_first_went() {
        let mut world = World::connected();
        let (agent, desktop) = (coder_address(AGENT), world.client().address);
        let now = world.now;
        let packet = crate::sim::udp(desktop, agent, 1, 2, b"x");
        let stray = crate::sim::udp(desktop, "fd60:627a:a42b::7".parse().unwrap(), 1, 2, b"x");
        let client = world.client();
        assert!(client.engine.handle_tun_first(&stray, now, &mut client.out).is_none());
        let run = client.engine.handle_tun_first(&packet, now, &mut client.out).unwrap();
        client.engine.handle_tun_next(&run, &packet, now, &mut client.out);
        client.engine.handle_tun_next(&run, &packet, now, &mut client.out);
        client.engine.handle_tun_next(&run, &[0x60; ip::MTU + 1], now, &mut client.out);
        assert_eq!((client.engine.counters().tun_sent, client.engine.counters().tun_malformed), (3, 1));
        world.run(ms(5));
        assert_eq!(world.agent().out.delivered, vec![packet; 3]);
    }

    #[test]
    fn t29_inner_packets_for_others_or_too_large_are_dropped() {
        let mut world = World::connected();
        let (agent, desktop) = (coder_address(AGENT), world.client().address);
        let now = world.now;
        crate::sim::open_inbound(world.client(), now);
        let other = "fd60:627a:a42b::7".parse().unwrap();
        send_from_agent(&mut world, &crate::sim::udp(agent, other, 1, 2, b"x"));
        send_from_agent(&mut world, &crate::sim::udp(agent, desktop, 1, 2, &[0; 1300]));
        send_from_agent(&mut world, &[0x45; 60]);
        let counters = world.client().engine.counters();
        assert_eq!((counters.inner_foreign_destination, counters.inner_malformed), (1, 1));
        assert_eq!(counters.wg_malformed, 1, "IPv4");
        assert!(world.client().out.delivered.is_empty());
    }
}
