//! Path messages of one peer: its pings answered, our pings sent and matched to their pongs, and each side's word to the
//! other to be pinged (call-me-maybe).
//!
//! A message by relay is believed only from the peer whose node key the relay names and whose disco key sealed it (T-03);
//! by UDP the box alone tells who it is. A call-me-maybe counts only by relay (T-04). Discovery pings every address the
//! peer might have, at most every 5 s each, in three rounds within a second when there is news; a heartbeat keeps the
//! address in use proven while packets flow (`data-plane.md` 5.5). A status ping every 5 s keeps the latency of a peer in
//! use fresh, every 30 s that of an idle one; it does not count as use (5.11).

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use codervpn_wire::derp_map::RegionId;
use codervpn_wire::disco::{self, Envelope, Message, Outgoing, Padding, TxId};
use codervpn_wire::keys::{SharedKey, random_nonce};
use codervpn_wire::node::RELAY_ADDRESS;

use crate::candidates::Candidate;
use crate::common::Common;
use crate::event::{Event, Path, Ping, PingError};
use crate::limits::Bucket;
use crate::paths::{Check, HEARTBEAT, SHUN};
use crate::peer::{Peer, Remote};
use crate::sink::{Route, Sink};

/// Go: `pingTimeoutDuration`.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two discovery pings of one address (Go: `discoPingInterval`).
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(5);
/// Rounds of pings that follow news, after the first one: a lost ping must not cost 5 s.
const ROUNDS: [Duration; 2] = [Duration::from_millis(300), Duration::from_millis(700)];
/// Between two pings of one address in such rounds.
const ROUND_INTERVAL: Duration = Duration::from_millis(250);
/// Between two call-me-maybes that ask; receivers take one a second.
const CALL_INTERVAL: Duration = Duration::from_secs(1);
const STATUS_IN_USE: Duration = Duration::from_secs(5);
const STATUS_IDLE: Duration = Duration::from_secs(30);
const IDLE_SPREAD_MS: u64 = 3000;
/// Inner packets within this time mean "in use" (Go: `sessionActiveTimeout`).
pub(crate) const IN_USE: Duration = Duration::from_secs(45);
/// User's pings under way at once.
const MAX_ASKED: usize = 8;
/// Pings under way at once: two rounds to every candidate.
const MAX_OUTSTANDING: usize = 256;
/// T-08.
const PONGS_PER_SECOND: u32 = 20;
/// T-05.
const DISCOVERY_PER_SECOND: u32 = 64;
/// Call-me-maybes taken: this many at once, one a second (T-05).
const CALLS_BURST: u32 = 3;
const REPEATED_WITHIN: Duration = Duration::from_secs(10);
/// Pings remembered: all that can have been answered within that time, and what was saved up.
const MAX_REMEMBERED: usize = (PONGS_PER_SECOND as usize) * (REPEATED_WITHIN.as_secs() as usize + 1);

/// By which way a message came or went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Via {
    Relay(RegionId),
    Udp(SocketAddr),
}

struct Outstanding {
    tx: TxId,
    sent: Instant,
    to: Via,
    /// Pings of one question share a number; the first pong answers it. 0: nobody asked.
    question: u32,
}

/// One more time everything is pinged.
#[derive(Clone, Copy)]
struct Round {
    at: Instant,
    /// How many follow.
    left: usize,
    /// Whether to call the peer, too. Not after its own call: both would call each other for ever.
    call: bool,
}

pub(crate) struct Pings {
    /// The box between us and the peer; made at first use, one scalar multiplication.
    shared: Option<SharedKey>,
    outstanding: Vec<Outstanding>,
    last_question: u32,
    next_status: Option<Instant>,
    /// Oldest first; `MAX_REMEMBERED` at most, a few for peers that behave.
    answered: VecDeque<(TxId, Via, Instant)>,
    pongs: Bucket,
    discovery: Bucket,
    calls: Bucket,
    pub(crate) last_discovery: Option<Instant>,
    /// The next round of a discovery.
    round: Option<Round>,
    last_call: Option<Instant>,
    /// A call-me-maybe waits for fresh endpoints of ours.
    call_waits: bool,
    heartbeat_at: Option<Instant>,
    /// How the peer sees us at the address in use.
    seen_as: Option<SocketAddr>,
    /// The peer was told to forget the address under which it knows us, and no path has been proven since.
    called_off: bool,
    /// Since when direct paths have been looked for, without a success yet.
    pub(crate) looking_since: Option<Instant>,
}

impl Pings {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            shared: None,
            outstanding: Vec::new(),
            last_question: 0,
            next_status: None,
            answered: VecDeque::new(),
            pongs: Bucket::per_second(PONGS_PER_SECOND, now),
            discovery: Bucket::per_second(DISCOVERY_PER_SECOND, now),
            calls: Bucket::new(CALLS_BURST, 1, now),
            last_discovery: None,
            round: None,
            last_call: None,
            call_waits: false,
            heartbeat_at: None,
            seen_as: None,
            called_off: false,
            looking_since: None,
        }
    }

    pub(crate) fn next(&self, may_ping: bool) -> Option<Instant> {
        let timeout = self.outstanding.first().map(|ping| ping.sent + PING_TIMEOUT);
        let status = self.next_status.filter(|_| may_ping);
        [timeout, status, self.round.map(|round| round.at), self.heartbeat_at].into_iter().flatten().min()
    }

    fn shared_with(&mut self, remote: &Remote, cx: &Common) -> Option<&SharedKey> {
        if self.shared.is_none() {
            self.shared = cx.own.disco_private.shared_key(&remote.disco).ok();
        }
        self.shared.as_ref()
    }

    /// Whether this ping was answered a moment ago.
    fn was_answered(&mut self, tx: TxId, via: Via, now: Instant) -> bool {
        let old = |(_, _, at): &(TxId, Via, Instant)| now.saturating_duration_since(*at) >= REPEATED_WITHIN;
        while self.answered.front().is_some_and(old) {
            self.answered.pop_front();
        }
        self.answered.iter().any(|(known, by, _)| *known == tx && *by == via)
    }

    fn note_answered(&mut self, tx: TxId, via: Via, now: Instant) {
        if self.answered.len() >= MAX_REMEMBERED {
            self.answered.pop_front();
        }
        self.answered.push_back((tx, via, now));
    }

    fn is_open(&self, question: u32) -> bool {
        self.outstanding.iter().any(|ping| ping.question == question)
    }

    fn questions(&self) -> usize {
        let mut open: Vec<u32> = self.outstanding.iter().map(|ping| ping.question).filter(|q| *q != 0).collect();
        open.dedup();
        open.len()
    }
}

impl Peer {
    /// The peer has other keys, or none: its box is void, nobody will answer, and its addresses are nobody's.
    pub(crate) fn forget_paths(&mut self, cx: &mut Common) {
        self.pings.shared = None;
        self.pings.next_status = None;
        self.end_questions(PingError::NoNode, cx);
        self.drop_candidates(cx);
    }

    /// Direct paths are not allowed, or everything about them may have changed.
    pub(crate) fn drop_candidates(&mut self, cx: &mut Common) {
        for candidate in self.candidates.iter() {
            cx.addresses.remove(candidate.address, self.slot);
        }
        self.candidates.clear();
        self.paths.clear();
        self.pings.outstanding.retain(|ping| matches!(ping.to, Via::Relay(_)) || ping.question != 0);
        self.pings.round = None;
        self.pings.heartbeat_at = None;
        self.pings.call_waits = false;
        self.pings.last_discovery = None;
        self.pings.last_call = None;
        self.pings.seen_as = None;
        self.pings.looking_since = None;
    }

    fn end_questions(&mut self, error: PingError, cx: &mut Common) {
        let mut last = 0;
        for ping in self.pings.outstanding.drain(..) {
            if ping.question > last {
                last = ping.question;
                cx.event(Event::PingDone { id: self.id, result: Err(error) });
            }
        }
    }

    /// A path message under this peer's keys.
    pub(crate) fn receive_disco(
        &mut self,
        envelope: &Envelope<'_>,
        via: Via,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) {
        let Some(remote) = self.remote.filter(|remote| remote.disco == envelope.sender()) else {
            cx.counters.disco_refused += 1;
            return;
        };
        let Some(shared) = self.pings.shared_with(&remote, cx) else {
            cx.counters.disco_refused += 1;
            return;
        };
        match envelope.open(shared, &mut cx.scratch[..]) {
            Ok(Message::Ping(ping)) => {
                cx.counters.disco_pings += 1;
                if self.pings.was_answered(ping.tx, via, now) || !self.pings.pongs.take(now) || !cx.pongs.take(now) {
                    cx.counters.disco_pings_limited += 1;
                    return;
                }
                self.pings.note_answered(ping.tx, via, now);
                let (source, route) = match via {
                    Via::Relay(region) => (
                        SocketAddr::new(IpAddr::V4(RELAY_ADDRESS), region.get()),
                        Route::Relay { region, peer: remote.key },
                    ),
                    Via::Udp(source) => (source, Route::Udp(source)),
                };
                // The peer shall not take for good what we have found to carry nothing (T-11).
                let mut shunned = |source| self.candidates.find(source).is_some_and(|c| c.is_shunned(now));
                if matches!(via, Via::Udp(source) if shunned(source)) {
                    return;
                }
                // Nor an address whose packets we would not let in.
                if let Via::Udp(source) = via
                    && self.candidates.pinged_us(source, cx.allow_loopback, now).is_none()
                {
                    cx.counters.disco_pings_limited += 1;
                    return;
                }
                let padding = if ping.padded { Padding::Full } else { Padding::None };
                self.send_disco(&Outgoing::Pong { tx: ping.tx, source, padding }, route, cx, sink);
                if let Via::Udp(source) = via {
                    self.pinged_from(source, cx, sink, now);
                }
            }
            Ok(Message::Pong(pong)) => self.receive_pong(pong, via, cx, sink, now),
            Ok(Message::CallMeMaybe(call)) => {
                // At most this many are read, so the scratch may be used again (T-05).
                let mut endpoints = [None; 64];
                for (place, endpoint) in endpoints.iter_mut().zip(call.endpoints()) {
                    *place = Some(endpoint);
                }
                cx.counters.disco_call_me_maybe += 1;
                // T-04: whoever can send UDP could send us anywhere.
                if !matches!(via, Via::Relay(_)) || !cx.may_go_direct() || !self.pings.calls.take(now) {
                    cx.counters.disco_calls_ignored += 1;
                    return;
                }
                self.called(endpoints.into_iter().flatten(), cx, sink, now);
            }
            Ok(Message::Unknown(_)) | Err(_) => cx.counters.disco_refused += 1,
        }
    }

    /// The peer pinged us from here: its datagrams are let in, and it may be a way to it.
    fn pinged_from(&mut self, source: SocketAddr, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let hurried = self.paths.trusted(now).is_none() && (self.began_discovery(now) || self.is_in_use(now));
        // Two NATs with a port for every destination would answer each other from ever new ports otherwise.
        let needless = self.direct(cx, now).is_some_and(|shown| shown != source);
        let Some(candidate) = self.candidates.find(source) else { return };
        cx.addresses.admit(source, self.slot);
        // Its ping has opened both firewalls: ours goes through now if ever. One that was sent before may be lost.
        let (last, pause) = match hurried {
            true => (candidate.pinged_back, ROUND_INTERVAL),
            false => (candidate.last_ping, DISCOVERY_INTERVAL),
        };
        let due = last.is_none_or(|at| now.saturating_duration_since(at) >= pause);
        if due && !needless && self.session.is_some() {
            candidate.pinged_back = Some(now);
            self.discovery_ping(source, 0, cx, sink, now);
        }
        self.settle(cx, now);
    }

    /// A call-me-maybe.
    fn called(
        &mut self,
        endpoints: impl Iterator<Item = SocketAddr>,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) {
        let before: Vec<SocketAddr> = self.candidates.iter().map(|candidate| candidate.address).collect();
        self.candidates.set_called(endpoints, cx.allow_loopback);
        for address in before {
            if self.candidates.find(address).is_none() {
                cx.addresses.remove(address, self.slot);
                self.paths.forget(address);
            }
        }
        if self.session.is_some() {
            self.begin_discovery(false, cx, sink, now);
        }
        self.settle(cx, now);
    }

    fn receive_pong(&mut self, pong: disco::Pong, via: Via, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let fits = |ping: &Outstanding| {
            let same_kind = match (ping.to, via) {
                (Via::Relay(asked), Via::Relay(by)) => asked == by,
                (Via::Udp(_), Via::Udp(_)) => true,
                _ => false,
            };
            ping.tx == pong.tx && same_kind && now.saturating_duration_since(ping.sent) < PING_TIMEOUT
        };
        let Some(found) = self.pings.outstanding.iter().position(fits) else {
            cx.counters.disco_stray_pongs += 1;
            return;
        };
        cx.counters.disco_pongs += 1;
        let ping = self.pings.outstanding.remove(found);
        let latency = now.saturating_duration_since(ping.sent);
        let path = match ping.to {
            Via::Relay(region) => Path::Relay(region),
            Via::Udp(address) => Path::Direct(address),
        };
        if let (Via::Udp(address), Via::Udp(source)) = (ping.to, via) {
            cx.net.note_udp_works();
            let trusted = self.paths.trusted(now);
            self.proven(address, source, latency, pong.source, cx, now);
            if trusted != self.paths.trusted(now) {
                self.repeat_handshake(cx, sink, now);
            }
            if self.pings.called_off && self.paths.trusted(now).is_some() {
                self.pings.called_off = false;
                // Else its packets would go on taking the relay until it pings us again by itself, up to 5 s with Go's.
                self.call_now(cx, sink, now);
            }
        }
        let result = Ping { latency, path, at: now };
        self.last_ping = Some(result);
        self.unheard_since = None;
        if ping.question != 0 {
            self.pings.outstanding.retain(|other| other.question != ping.question);
            cx.event(Event::PingDone { id: self.id, result: Ok(result) });
        }
        self.flush_held(cx, sink, now);
        self.tell_change(cx);
        self.settle(cx, now);
    }

    /// The peer answered at `address`, from `source`.
    fn proven(
        &mut self,
        address: SocketAddr,
        source: SocketAddr,
        latency: Duration,
        seen_as: SocketAddr,
        cx: &mut Common,
        now: Instant,
    ) {
        let shunned = match self.candidates.find(address) {
            Some(candidate) => {
                candidate.too_small = false;
                candidate.is_shunned(now)
            }
            // It was withdrawn while the ping was under way.
            None => return,
        };
        if source != address && self.candidates.pinged_us(source, cx.allow_loopback, now).is_none() {
            return;
        }
        cx.addresses.prove(source, self.slot);
        if shunned {
            return;
        }
        cx.addresses.prove(address, self.slot);
        if self.paths.pong(address, latency, now) {
            cx.counters.path_changes += 1;
            tracing::debug!(peer = %self.id, %address, ?latency, "direct path");
        }
        if self.paths.trusted(now) == Some(address) {
            self.pings.seen_as = Some(seen_as);
            self.pings.looking_since = None;
            self.pings.round = None;
        }
    }

    /// A ping that a user asked for.
    pub(crate) fn ping(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let result = if self.remote.is_none() {
            Err(PingError::NoNode)
        } else if self.pings.questions() >= MAX_ASKED {
            Err(PingError::Busy)
        } else {
            self.pings.last_question += 1;
            self.ping_ways(self.pings.last_question, cx, sink, now)
        };
        if let Err(error) = result {
            cx.event(Event::PingDone { id: self.id, result: Err(error) });
        }
        self.settle(cx, now);
    }

    /// By the address in use if it is proven, else by relay and to every address there is.
    fn ping_ways(
        &mut self,
        question: u32,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) -> Result<(), PingError> {
        let trusted = self.paths.trusted(now).filter(|_| cx.may_go_direct());
        // Nobody waits for a status ping: of an idle peer only the address shown is asked, so that it stays the one.
        let shown = self.direct(cx, now).filter(|_| question == 0);
        let trusted = trusted.or(shown);
        if let Some(address) = trusted {
            let sent = self.send_ping(Via::Udp(address), question, cx, sink, now);
            return if sent { Ok(()) } else { Err(PingError::NoPath) };
        }
        self.pings.looking_since.get_or_insert(now);
        let mut sent = false;
        if let Some(Route::Relay { region, .. }) = self.relay_or_ask(cx, now) {
            sent = self.send_ping(Via::Relay(region), question, cx, sink, now);
        }
        if self.session.is_some() && cx.may_go_direct() {
            for address in self.due_candidates(ROUND_INTERVAL, cx, now) {
                sent |= self.discovery_ping(address, question, cx, sink, now);
            }
        }
        if sent { Ok(()) } else { Err(PingError::NoPath) }
    }

    pub(crate) fn tick_pings(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        while self.pings.outstanding.first().is_some_and(|p| now.saturating_duration_since(p.sent) >= PING_TIMEOUT) {
            let ping = self.pings.outstanding.remove(0);
            if ping.question != 0 && !self.pings.is_open(ping.question) {
                cx.event(Event::PingDone { id: self.id, result: Err(PingError::Timeout) });
            }
        }
        self.check_path(cx, sink, now);
        if let Some(round) = self.pings.round.filter(|round| round.at <= now) {
            self.pings.round = None;
            if self.paths.trusted(now).is_none() {
                self.discover(ROUND_INTERVAL, round.call, cx, sink, now);
                self.pings.round = next_round(round.left, round.call, now);
            }
        }
        if self.pings.heartbeat_at.is_some_and(|at| at <= now) {
            self.heartbeat(cx, sink, now);
        }
        if self.may_ping(cx) && self.pings.next_status.is_some_and(|at| at <= now) {
            let _ = self.ping_ways(0, cx, sink, now);
            // Spread, so that the pings of many agents do not stay in step.
            let spread = Duration::from_millis(u64::from(cx.jitter()) % IDLE_SPREAD_MS);
            self.pings.next_status = Some(now + if self.is_in_use(now) { STATUS_IN_USE } else { STATUS_IDLE - spread });
        }
    }

    pub(crate) fn is_in_use(&self, now: Instant) -> bool {
        self.last_inner.is_some_and(|at| now.saturating_duration_since(at) < IN_USE)
    }

    /// Looks whether the address in use is still worth its trust.
    fn check_path(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if self.paths.next_check().is_none_or(|at| at > now) {
            return;
        }
        if self.paths.carries_only_pongs(now)
            && let Some(best) = self.paths.best()
        {
            tracing::info!(peer = %self.id, "a direct path answers pings and carries no data: the relay is used");
            if let Some(candidate) = self.candidates.find(best.address) {
                candidate.shunned_until = Some(now + SHUN);
            }
            self.paths.forget(best.address);
            self.lost_path(cx, sink, now);
            return;
        }
        match self.paths.check(now) {
            Check::Nothing => {}
            Check::Ping(address) => {
                self.send_ping(Via::Udp(address), 0, cx, sink, now);
            }
            Check::Failed => {
                tracing::debug!(peer = %self.id, "a direct path has fallen silent");
                self.lost_path(cx, sink, now);
            }
        }
    }

    /// The address in use is not to be relied on any more.
    pub(crate) fn lost_path(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        cx.counters.paths_lost += 1;
        self.pings.looking_since.get_or_insert(now);
        self.call_off(cx, sink);
        // Asks again only after the peer has let go of the address.
        self.pings.last_call = Some(now);
        self.discover(Duration::ZERO, false, cx, sink, now);
        self.pings.round = Some(Round { at: now + CALL_INTERVAL, left: 0, call: true });
        if self.relay_or_ask(cx, now).is_none() {
            cx.counters.no_route += 1;
        }
        self.settle(cx, now);
    }

    /// Has the peer forget the address under which it knows us, so that it uses the relay at once and not when its own
    /// trust ends: named in one call-me-maybe and not in the next, an address is forgotten (5.6). Said again over every
    /// relay connection that comes up before a path is proven: the one it went over may be as dead as the path.
    pub(crate) fn call_off(&mut self, cx: &mut Common, sink: &mut impl Sink) {
        let Some(seen_as) = self.pings.seen_as.filter(|_| cx.net.is_direct_allowed()) else { return };
        let Some(route) = self.relay(cx) else { return };
        self.pings.called_off = true;
        self.send_disco(&Outgoing::CallMeMaybe(&[seen_as]), route, cx, sink);
        self.send_disco(&Outgoing::CallMeMaybe(&[]), route, cx, sink);
    }

    /// Something was sent to the peer that a person or program waits for.
    pub(crate) fn note_sent(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if !cx.may_go_direct() {
            return;
        }
        if self.pings.heartbeat_at.is_none() {
            let at = now + HEARTBEAT;
            self.pings.heartbeat_at = Some(at);
            cx.timers.schedule(self.slot, &mut self.scheduled, at);
        }
        if self.paths.trusted(now).is_none() && self.session.is_some() {
            self.begin_discovery_if_due(cx, sink, now);
        }
    }

    /// Unless one began a moment ago.
    pub(crate) fn begin_discovery_if_due(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if !self.began_discovery(now) {
            self.begin_discovery(true, cx, sink, now);
        }
    }

    fn began_discovery(&self, now: Instant) -> bool {
        self.pings.last_discovery.is_some_and(|at| now.saturating_duration_since(at) < DISCOVERY_INTERVAL)
    }

    fn heartbeat(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        self.pings.heartbeat_at = None;
        if !self.is_in_use(now) || !cx.may_go_direct() {
            return;
        }
        self.pings.heartbeat_at = Some(now + HEARTBEAT);
        // Not of the discovery's budget: what is in use must not starve because much is looked for.
        if let Some(best) = self.paths.best() {
            self.send_ping(Via::Udp(best.address), 0, cx, sink, now);
        }
        if self.paths.wants_discovery(self.pings.last_discovery, now) {
            self.discover(DISCOVERY_INTERVAL, true, cx, sink, now);
        }
    }

    /// There is news: pings every address now and twice more within a second.
    pub(crate) fn begin_discovery(&mut self, call: bool, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if !cx.may_go_direct() || self.remote.is_none() {
            return;
        }
        self.discover(ROUND_INTERVAL, call, cx, sink, now);
        // Rounds under way that may call go on calling.
        let call = call || self.pings.round.is_some_and(|round| round.call);
        self.pings.round = next_round(ROUNDS.len(), call, now);
        if let Some(round) = self.pings.round {
            cx.timers.schedule(self.slot, &mut self.scheduled, round.at);
        }
    }

    fn discover(&mut self, pause: Duration, call: bool, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if !cx.may_go_direct() || self.remote.is_none() {
            return;
        }
        self.pings.last_discovery = Some(now);
        if self.paths.trusted(now).is_none() {
            self.pings.looking_since.get_or_insert(now);
        }
        let (slot, keep) = (self.slot, self.paths.best().map(|best| best.address));
        self.candidates.prune(keep, now, |address| cx.addresses.remove(address, slot));
        for address in self.due_candidates(pause, cx, now) {
            self.discovery_ping(address, 0, cx, sink, now);
        }
        if call {
            self.call(cx, sink, now);
        }
    }

    fn due_candidates(&self, pause: Duration, cx: &Common, now: Instant) -> Vec<SocketAddr> {
        let due = |last: Option<Instant>| last.is_none_or(|at| now.saturating_duration_since(at) >= pause);
        let usable = |c: &&Candidate| cx.has_socket(c.address) && !c.is_shunned(now);
        let candidates = self.candidates.iter().filter(|c| due(c.last_ping)).filter(usable);
        candidates.map(|candidate| candidate.address).collect()
    }

    /// A ping within the limits of what is sent to addresses that may be nobody's.
    fn discovery_ping(
        &mut self,
        address: SocketAddr,
        question: u32,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) -> bool {
        if !self.pings.discovery.take(now) || !cx.discovery.take(now) {
            cx.counters.discovery_limited += 1;
            return false;
        }
        self.send_ping(Via::Udp(address), question, cx, sink, now)
    }

    /// Asks the peer to ping us, now or as soon as our endpoints are fresh.
    fn call(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if self.pings.last_call.is_some_and(|at| now.saturating_duration_since(at) < CALL_INTERVAL) {
            return;
        }
        if !cx.net.is_fresh(now) {
            cx.net.request_unless_fresh(now);
            self.pings.call_waits = true;
            return;
        }
        self.call_now(cx, sink, now);
    }

    /// A net report ended: what waited for it is said.
    pub(crate) fn endpoints_fresh(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if std::mem::take(&mut self.pings.call_waits) && self.paths.trusted(now).is_none() {
            self.call_now(cx, sink, now);
        }
    }

    fn call_now(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let Some(route) = self.relay(cx) else { return };
        let mut endpoints = [SocketAddr::new(IpAddr::V4(RELAY_ADDRESS), 0); 64];
        let own = cx.net.endpoints();
        let count = own.len().min(endpoints.len());
        for (place, endpoint) in endpoints.iter_mut().zip(own) {
            *place = *endpoint;
        }
        let Some(endpoints) = endpoints.get(..count).filter(|endpoints| !endpoints.is_empty()) else { return };
        self.pings.last_call = Some(now);
        cx.counters.disco_calls_sent += 1;
        self.send_disco(&Outgoing::CallMeMaybe(endpoints), route, cx, sink);
    }

    /// Full-size datagrams do not reach this address.
    pub(crate) fn too_big(&mut self, address: SocketAddr, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        self.pings.outstanding.retain(|ping| ping.to != Via::Udp(address) || ping.question != 0);
        let Some(candidate) = self.candidates.find(address) else { return };
        candidate.too_small = true;
        if self.paths.forget(address) {
            self.lost_path(cx, sink, now);
        }
        self.settle(cx, now);
    }

    /// Sockets or links changed: nothing is proven any more (T-39).
    pub(crate) fn distrust_paths(&mut self) {
        self.paths.distrust();
        self.pings.last_discovery = None;
        self.pings.last_call = None;
        self.pings.looking_since = None;
        for candidate in self.candidates.iter_mut() {
            candidate.last_ping = None;
            candidate.too_small = false;
        }
    }

    /// The session came up: show a latency soon.
    pub(crate) fn ping_soon(&mut self, now: Instant) {
        self.pings.next_status = Some(now);
    }

    /// Packets flow after a pause: the slow cadence of an idle peer ends.
    pub(crate) fn ping_as_in_use(&mut self, now: Instant) {
        let soon = now + STATUS_IN_USE;
        if let Some(next) = &mut self.pings.next_status {
            *next = soon.min(*next);
        }
    }

    fn send_ping(&mut self, to: Via, question: u32, cx: &mut Common, sink: &mut impl Sink, now: Instant) -> bool {
        let Some(remote) = self.remote else { return false };
        let route = match to {
            Via::Relay(region) => Route::Relay { region, peer: remote.key },
            Via::Udp(address) if cx.may_go_direct() && cx.has_socket(address) => Route::Udp(address),
            Via::Udp(_) => return false,
        };
        if self.pings.outstanding.len() >= MAX_OUTSTANDING {
            return false;
        }
        let tx = TxId::random(&mut &mut *cx.rng);
        let ping = Outgoing::Ping { tx, node_key: cx.own.node_key, padding: Padding::Full };
        if !self.send_disco(&ping, route, cx, sink) {
            return false;
        }
        self.pings.outstanding.push(Outstanding { tx, sent: now, to, question });
        // Whoever pings back need not be pinged again.
        if let Via::Udp(address) = to
            && let Some(candidate) = self.candidates.find(address)
        {
            candidate.last_ping = Some(now);
        }
        true
    }

    fn send_disco(&mut self, message: &Outgoing<'_>, route: Route, cx: &mut Common, sink: &mut impl Sink) -> bool {
        let Some(remote) = self.remote else { return false };
        let Some(shared) = self.pings.shared_with(&remote, cx) else { return false };
        let Some(out) = sink.outgoing(route, message.sealed_len().max(disco::FULL_LEN)) else {
            cx.counters.sink_full += 1;
            return false;
        };
        let nonce = random_nonce(&mut &mut *cx.rng);
        let Some(len) = message.seal(&cx.own.disco_key, shared, &nonce, out) else { return false };
        sink.send(route, len);
        true
    }
}

fn next_round(left: usize, call: bool, now: Instant) -> Option<Round> {
    let pause = ROUNDS.get(ROUNDS.len().checked_sub(left)?)?;
    Some(Round { at: now + *pause, left: left.checked_sub(1)?, call })
}
