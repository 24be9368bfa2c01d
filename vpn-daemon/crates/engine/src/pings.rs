//! Path messages of one peer: its pings answered, our pings sent and matched to their pongs.
//!
//! Everything goes by relay here. A ping or pong is believed only if it comes from the relay under the peer's node key
//! and is sealed with the disco key that the coordinator named for it (T-03). A status ping every 5 s keeps the latency
//! of a peer in use fresh, every 30 s that of an idle one; it does not count as use (`data-plane.md` 5.11).

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use codervpn_wire::derp_map::RegionId;
use codervpn_wire::disco::{self, Envelope, Message, Outgoing, Padding, TxId};
use codervpn_wire::keys::{SharedKey, random_nonce};
use codervpn_wire::node::RELAY_ADDRESS;

use crate::command::PeerId;
use crate::common::Common;
use crate::event::{Event, Path, Ping, PingError};
use crate::limits::Bucket;
use crate::peer::Peer;
use crate::sink::{Route, Sink};

/// Go: `pingTimeoutDuration`.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
const STATUS_IN_USE: Duration = Duration::from_secs(5);
const STATUS_IDLE: Duration = Duration::from_secs(30);
const IDLE_SPREAD_MS: u64 = 3000;
/// Inner packets within this time mean "in use" (Go: `sessionActiveTimeout`).
const IN_USE: Duration = Duration::from_secs(45);
/// Pings under way at once: the status ping and some of the user's.
const MAX_OUTSTANDING: usize = 8;
/// T-08.
const PONGS_PER_SECOND: u32 = 20;
const REPEATED_WITHIN: Duration = Duration::from_secs(10);
const REMEMBERED: usize = 8;

struct Outstanding {
    tx: TxId,
    sent: Instant,
    /// Asked for by a command, which waits for the result.
    asked: bool,
}

pub(crate) struct Pings {
    /// The box between us and the peer; made at first use, one scalar multiplication.
    shared: Option<SharedKey>,
    outstanding: Vec<Outstanding>,
    next_status: Option<Instant>,
    answered: [Option<(TxId, Instant)>; REMEMBERED],
    next_answered: usize,
    pongs: Bucket,
}

impl Pings {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            shared: None,
            outstanding: Vec::new(),
            next_status: None,
            answered: [None; REMEMBERED],
            next_answered: 0,
            pongs: Bucket::per_second(PONGS_PER_SECOND, now),
        }
    }

    /// The peer has another key, or none: its box is void and nobody will answer.
    pub(crate) fn forget_path(&mut self, id: PeerId, cx: &mut Common) {
        self.shared = None;
        self.next_status = None;
        for ping in self.outstanding.drain(..).filter(|ping| ping.asked) {
            let _ = ping;
            cx.event(Event::PingDone { id, result: Err(PingError::NoNode) });
        }
    }

    pub(crate) fn next(&self, may_ping: bool) -> Option<Instant> {
        let timeout = self.outstanding.first().map(|ping| ping.sent + PING_TIMEOUT);
        let status = self.next_status.filter(|_| may_ping);
        [timeout, status].into_iter().flatten().min()
    }

    /// False if this ping was answered a moment ago.
    fn is_new(&mut self, tx: TxId, now: Instant) -> bool {
        let seen = self
            .answered
            .iter()
            .flatten()
            .any(|(known, at)| *known == tx && now.saturating_duration_since(*at) < REPEATED_WITHIN);
        if !seen && let Some(entry) = self.answered.get_mut(self.next_answered) {
            *entry = Some((tx, now));
            self.next_answered = (self.next_answered + 1) % REMEMBERED;
        }
        !seen
    }
}

impl Peer {
    /// A path message that came over `region` under this peer's node key.
    pub(crate) fn receive_disco(
        &mut self,
        envelope: &Envelope<'_>,
        region: RegionId,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) {
        let Some(remote) = self.remote.filter(|remote| remote.disco == envelope.sender()) else {
            cx.counters.disco_refused += 1;
            return;
        };
        if self.pings.shared.is_none() {
            self.pings.shared = cx.own.disco_private.shared_key(&remote.disco).ok();
        }
        let Some(shared) = &self.pings.shared else {
            cx.counters.disco_refused += 1;
            return;
        };
        match envelope.open(shared, &mut cx.scratch[..]) {
            Ok(Message::Ping(ping)) => {
                cx.counters.disco_pings += 1;
                if !self.pings.pongs.take(now) || !cx.pongs.take(now) || !self.pings.is_new(ping.tx, now) {
                    cx.counters.disco_pings_limited += 1;
                    return;
                }
                let source = SocketAddr::new(IpAddr::V4(RELAY_ADDRESS), region.get());
                let padding = if ping.padded { Padding::Full } else { Padding::None };
                let route = Route::Relay { region, peer: remote.key };
                self.send_disco(&Outgoing::Pong { tx: ping.tx, source, padding }, route, cx, sink);
            }
            Ok(Message::Pong(pong)) => self.receive_pong(pong.tx, region, cx, now),
            Ok(Message::CallMeMaybe(_)) => cx.counters.disco_call_me_maybe += 1,
            Ok(Message::Unknown(_)) | Err(_) => cx.counters.disco_refused += 1,
        }
    }

    fn receive_pong(&mut self, tx: TxId, region: RegionId, cx: &mut Common, now: Instant) {
        let pings = &mut self.pings;
        let found = pings
            .outstanding
            .iter()
            .position(|ping| ping.tx == tx && now.saturating_duration_since(ping.sent) < PING_TIMEOUT);
        let Some(found) = found else {
            cx.counters.disco_stray_pongs += 1;
            return;
        };
        cx.counters.disco_pongs += 1;
        let ping = pings.outstanding.remove(found);
        let result = Ping { latency: now.saturating_duration_since(ping.sent), path: Path::Relay(region), at: now };
        self.last_ping = Some(result);
        self.unheard_since = None;
        if ping.asked {
            cx.event(Event::PingDone { id: self.id, result: Ok(result) });
        }
        self.tell_change(cx);
        self.settle(cx, now);
    }

    /// A ping that a user asked for.
    pub(crate) fn ping(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let result = if self.remote.is_none() { Err(PingError::NoNode) } else { self.send_ping(true, cx, sink, now) };
        if let Err(error) = result {
            cx.event(Event::PingDone { id: self.id, result: Err(error) });
        }
        self.settle(cx, now);
    }

    pub(crate) fn tick_pings(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        while self.pings.outstanding.first().is_some_and(|p| now.saturating_duration_since(p.sent) >= PING_TIMEOUT) {
            let ping = self.pings.outstanding.remove(0);
            if ping.asked {
                cx.event(Event::PingDone { id: self.id, result: Err(PingError::Timeout) });
            }
        }
        if self.may_ping(cx) && self.pings.next_status.is_some_and(|at| at <= now) {
            let _ = self.send_ping(false, cx, sink, now);
            let in_use = self.last_inner.is_some_and(|at| now.saturating_duration_since(at) < IN_USE);
            // Spread, so that the pings of many agents do not stay in step.
            let spread = Duration::from_millis(u64::from(cx.jitter()) % IDLE_SPREAD_MS);
            self.pings.next_status = Some(now + if in_use { STATUS_IN_USE } else { STATUS_IDLE - spread });
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

    fn send_ping(&mut self, asked: bool, cx: &mut Common, sink: &mut impl Sink, now: Instant) -> Result<(), PingError> {
        if self.pings.outstanding.len() >= MAX_OUTSTANDING {
            return Err(PingError::Busy);
        }
        let route = self.route_or_ask(cx, now).ok_or(PingError::NoPath)?;
        let tx = TxId::random(&mut &mut *cx.rng);
        let ping = Outgoing::Ping { tx, node_key: cx.own.node_key, padding: Padding::Full };
        if !self.send_disco(&ping, route, cx, sink) {
            return Err(PingError::NoPath);
        }
        self.pings.outstanding.push(Outstanding { tx, sent: now, asked });
        Ok(())
    }

    fn send_disco(&mut self, message: &Outgoing<'_>, route: Route, cx: &mut Common, sink: &mut impl Sink) -> bool {
        if self.pings.shared.is_none()
            && let Some(remote) = self.remote
        {
            self.pings.shared = cx.own.disco_private.shared_key(&remote.disco).ok();
        }
        let Some(shared) = &self.pings.shared else { return false };
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
