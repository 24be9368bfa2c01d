//! What must hold after every step, in every network and whatever happens to it.
//!
//! * What comes out of a tunnel went into it, at the party and from the party that it says, once (T-29, T-32).
//! * Nothing is sent to an address that may not be pinged (T-06, T-44); nothing at all by UDP once direct paths are off
//!   (T-40); and no data to an address that was not pinged before (T-07).
//! * A peer with a working path answers within 10 s.
//! * Who has nothing to say sends no more than upkeep (5.11, T-42).
//! * A path is not left for another again and again while the network stays as it is.

use std::collections::BTreeMap;

use codervpn_engine::{Path, Route};
use codervpn_wire::classify::{self, Datagram};
use codervpn_wire::node;
use uuid::Uuid;

use crate::inner::{self, Label};
use crate::party::{PartyId, QUIET_AFTER};
use crate::world::{Flow, World};
use crate::{Time, ms, secs};

/// A peer with a working path is reached within this time.
const REACHED_WITHIN: Time = secs(10);
/// So many packets have to be lost in a row before their loss says something.
const ENOUGH_UNANSWERED: u32 = 8;
/// Packets are forgotten after this long: nothing stays under way for so long.
const REMEMBERED: Time = secs(300);
/// T-40.
const DIRECT_OFF_WITHIN: Time = ms(100);
/// Bytes a second and peer of a party that nobody talks to: a round of pings every 30 s to each of a few candidates and
/// the answers to the peer's, keepalives, a handshake every 120 s, and news of a peer's endpoints. 5.11 has as much for a
/// client of today.
const UPKEEP: u64 = 700;
/// A quiet stretch has to be this long to be judged.
const QUIET_FOR: Time = secs(120);
/// Changes in an hour that nothing outside explains: to the relay for longer than a ping takes, and between addresses.
const RELAYED_PER_HOUR: u32 = 6;
/// Behind a NAT with many ports for one host all addresses are alike, and jitter decides.
const CHANGES_PER_HOUR: u32 = 400;
/// A direct path that was not used for a while is proven anew with the first packet; meanwhile both ways are used.
const PROVEN_WITHIN: Time = ms(1000);
/// After trouble in the network paths may change for this long.
const SETTLED_AFTER: Time = secs(70);

#[derive(Default)]
pub(crate) struct Packets {
    next: u64,
    /// What is under way or may still be.
    sent: BTreeMap<u64, Sent>,
}

struct Sent {
    label: Label,
    at: Time,
    size: usize,
    delivered: bool,
}

/// What is observed of a client and an agent.
#[derive(Debug)]
pub(crate) struct Pair {
    /// First request of those in a row that nobody answered, and how many they are.
    unanswered: Option<(Time, u32)>,
    pub(crate) answered: u64,
    pub(crate) asked: u64,
    pub(crate) last_answer: Time,
    last_asked: Time,
    pub(crate) longest_gap: Time,
    path: Option<Path>,
    /// Changes of path in the present hour, and when that began.
    changes: (u32, Time),
    relayed: u32,
    /// Since when the path is a relay after a direct one, if nothing outside explains it.
    relayed_since: Option<Time>,
    pub(crate) all_changes: u32,
    pub(crate) first_direct: Option<Time>,
    pub(crate) first_answer: Option<Time>,
}

impl Pair {
    pub(crate) fn new(now: Time) -> Self {
        Self {
            unanswered: None,
            answered: 0,
            asked: 0,
            last_answer: now,
            last_asked: now,
            longest_gap: Time::ZERO,
            path: None,
            changes: (0, now),
            relayed: 0,
            relayed_since: None,
            all_changes: 0,
            first_direct: None,
            first_answer: None,
        }
    }
}

impl World {
    /// Sends one packet of a flow through the tunnel.
    pub(crate) fn send_packet(&mut self, flow: &Flow) {
        let (from, to) = (flow.from, flow.to);
        if !self.parties[from.0].is_awake() {
            return;
        }
        let number = self.packets.next;
        self.packets.next += 1;
        let label = Label { number, from, to, request: true, answer_wanted: flow.answered };
        let bytes = inner::write(&label, (self.parties[from.0].address, self.parties[to.0].address), flow.size);
        self.packets.sent.insert(number, Sent { label, at: self.now, size: bytes.len(), delivered: false });
        let horizon = self.now.saturating_sub(REMEMBERED);
        while self.packets.sent.first_key_value().is_some_and(|(_, sent)| sent.at < horizon) {
            self.packets.sent.pop_first();
        }
        self.spoken(from);
        self.check_reached(from, to, flow.answered);
        self.call(from, |engine, now, out| engine.handle_tun(&bytes, now, out));
    }

    /// Something came out of a tunnel.
    pub(crate) fn delivered(&mut self, party: PartyId, packet: &[u8]) {
        let Some(label) = inner::read(packet) else { return };
        if label.to != party {
            self.fail(format_args!("{party:?} got a packet for {:?}", label.to));
        }
        let Some(sent) = self.packets.sent.get_mut(&label.number) else {
            self.fail(format_args!("packet {} from {:?} was never sent or is too old", label.number, label.from));
        };
        let same = sent.label == label && sent.size == packet.len();
        let again = std::mem::replace(&mut sent.delivered, true);
        if !same {
            self.fail(format_args!("packet {} is not what was sent", label.number));
        }
        if again {
            self.fail(format_args!("packet {} was delivered twice (T-32)", label.number));
        }
        self.spoken(party);
        if label.request && label.answer_wanted {
            let number = self.packets.next;
            self.packets.next += 1;
            let answer = Label { number, from: party, to: label.from, request: false, answer_wanted: false };
            let addresses = (self.parties[party.0].address, self.parties[label.from.0].address);
            let bytes = inner::write(&answer, addresses, packet.len());
            let sent = Sent { label: answer, at: self.now, size: bytes.len(), delivered: false };
            self.packets.sent.insert(number, sent);
            // Not within the engine's call: another one has to follow.
            self.at(Time::ZERO, move |world| {
                world.call(party, |engine, now, out| engine.handle_tun(&bytes, now, out));
            });
        } else if !label.request {
            self.answered(party, label.from);
        }
    }

    fn answered(&mut self, client: PartyId, agent: PartyId) {
        let (now, disturbed_at) = (self.now, self.disturbed_at);
        let Some(pair) = self.pairs.get_mut(&(client, agent)) else { return };
        if let Some((since, count)) = pair.unanswered.filter(|(_, count)| *count > 1) {
            let took = now - since.max(disturbed_at);
            if took > self.extremes.recovery {
                self.extremes.recovery = took;
                let what = format!("{client:?} -> {agent:?} after {took:?} and {count} requests");
                self.note(format_args!("slowest recovery: {what}"));
            }
        }
        let Some(pair) = self.pairs.get_mut(&(client, agent)) else { return };
        pair.answered += 1;
        pair.longest_gap = pair.longest_gap.max(now - pair.last_answer);
        pair.last_answer = now;
        pair.first_answer.get_or_insert(now);
        pair.unanswered = None;
    }

    fn spoken(&mut self, party: PartyId) {
        self.check_quiet(party);
        let now = self.now;
        let meter = &mut self.parties[party.0].meter;
        meter.active = now;
        meter.quiet = None;
    }

    /// Whether packets between both should arrive, whatever direct paths there are: by relay.
    fn should_work(&self, client: PartyId, agent: PartyId) -> bool {
        let relays_up = self.relays.values().all(|relay| relay.up);
        let fine = |party: PartyId| {
            let p = &self.parties[party.0];
            p.is_awake() && self.network.is_online(p.host)
        };
        // Who had met before the coordinator was lost still reach each other, but news does not come.
        let heard = |party: PartyId| !self.parties[party.0].uncoordinated;
        relays_up && fine(client) && fine(agent) && heard(client) && heard(agent)
    }

    /// A request is about to leave.
    fn check_reached(&mut self, client: PartyId, agent: PartyId, answered: bool) {
        let (now, works, disturbed_at) = (self.now, self.should_work(client, agent), self.disturbed_at);
        let Some(pair) = self.pairs.get_mut(&(client, agent)).filter(|_| answered) else { return };
        pair.asked += 1;
        // A new conversation says nothing of how the last one ended.
        if now > std::mem::replace(&mut pair.last_asked, now) + secs(5) {
            pair.unanswered = None;
        }
        let (since, count) = pair.unanswered.get_or_insert((now, 0));
        *count += 1;
        if !works {
            *since = now;
            *count = 0;
            return;
        }
        if *since < disturbed_at {
            *since = disturbed_at;
            *count = 1;
        }
        let (since, count) = (*since, *count);
        if now > since + REACHED_WITHIN && count > ENOUGH_UNANSWERED {
            let status = self.status(client, agent);
            let back = self.status(agent, client);
            self.fail(format_args!(
                "{client:?} does not reach {agent:?}: {count} packets unanswered since {:.3} s\n  {status:?}\n  back: {back:?}\n  {:?}\n  {:?}",
                since.as_secs_f64(),
                self.engine(client).net_report(),
                self.engine(client).counters(),
            ));
        }
    }

    /// An engine is about to send.
    pub(crate) fn check_output(&mut self, party: PartyId, route: &Route, bytes: &[u8]) {
        if self.is_watched() {
            let kind = classify::datagram(bytes);
            let kind = format!("{kind:?}").chars().take(12).collect::<String>();
            self.note(format_args!("{party:?} sends {} bytes {kind} by {route:?}", bytes.len()));
        }
        let Route::Udp(to) = route else { return };
        if matches!(classify::datagram(bytes), Datagram::Disco(_)) {
            self.parties[party.0].pinged.insert(*to);
            self.parties[party.0].meter.pings += 1;
        }
        let p = &self.parties[party.0];
        if !node::is_usable_endpoint(to, false) {
            self.fail(format_args!("{party:?} sends to {to}, a forbidden address"));
        }
        if p.direct_off.is_some_and(|since| self.now > since + DIRECT_OFF_WITHIN) {
            self.fail(format_args!("{party:?} sends to {to} though direct paths are off (T-40)"));
        }
        if matches!(classify::datagram(bytes), Datagram::WireGuard(_)) && !p.pinged.contains(to) {
            self.fail(format_args!("{party:?} sends data to {to}, which it never pinged (T-07)"));
        }
    }

    /// What users see of a peer changed.
    pub(crate) fn peer_changed(&mut self, party: PartyId, id: Uuid) {
        let now = self.instant(party);
        let Some(other) = self.parties.iter().position(|p| p.id == id).map(PartyId) else { return };
        let path = self.parties[party.0].engine.peer(id, now).and_then(|status| status.path);
        let (now, disturbed_at) = (self.now, self.disturbed_at);
        let Some(pair) = self.pairs.get_mut(&(party, other)) else { return };
        let before = std::mem::replace(&mut pair.path, path);
        if before == path {
            return;
        }
        if matches!(path, Some(Path::Direct(_))) {
            pair.first_direct.get_or_insert(now);
        }
        pair.all_changes += 1;
        if now > pair.changes.1 + secs(3600) {
            pair.changes = (0, now);
            pair.relayed = 0;
        }
        // From none and to none is the session's doing.
        if now > disturbed_at + SETTLED_AFTER && before.is_some() && path.is_some() {
            pair.changes.0 += 1;
            match (before, path) {
                (Some(Path::Direct(_)), Some(Path::Relay(_))) => pair.relayed_since = Some(now),
                (_, Some(Path::Direct(_))) => {
                    let long = pair.relayed_since.take().is_some_and(|since| now > since + PROVEN_WITHIN);
                    pair.relayed += u32::from(long);
                }
                _ => {}
            }
        } else {
            pair.relayed_since = None;
        }
        let (changes, relayed) = (pair.changes.0, pair.relayed);
        self.note(format_args!("{party:?} -> {other:?}: {before:?} becomes {path:?}"));
        if changes > CHANGES_PER_HOUR {
            self.fail(format_args!("{party:?} -> {other:?}: {changes} changes of path in an hour, nothing happened"));
        }
        if relayed > RELAYED_PER_HOUR {
            self.fail(format_args!("{party:?} -> {other:?}: {relayed} times by relay in an hour, nothing happened"));
        }
    }

    /// Ends a quiet stretch and judges it.
    fn check_quiet(&mut self, party: PartyId) {
        let now = self.now;
        let peers = self.parties[party.0].engine.peer_count().max(1) as u64;
        let meter = &mut self.parties[party.0].meter;
        let Some((begin, bytes)) = meter.quiet.take() else { return };
        let (lasted, said) = (now - begin, meter.bytes - bytes);
        if lasted >= QUIET_FOR && said > peers * UPKEEP * lasted.as_secs() {
            let rate = said / lasted.as_secs();
            self.fail(format_args!(
                "{party:?} sent {rate} bytes a second for {lasted:?} with nothing to say to {peers} peers"
            ));
        }
    }

    /// Looks at what no packet makes us look at.
    pub(crate) fn check_all(&mut self) {
        let now = self.now;
        let mut most = None;
        for index in 0..self.parties.len() {
            let long = self.parties[index].meter.quiet.is_none_or(|(begin, _)| now >= begin + QUIET_FOR);
            if long {
                self.check_quiet(PartyId(index));
            }
            let peers = self.parties[index].engine.peer_count().max(1) as f64;
            let meter = &mut self.parties[index].meter;
            let (since, pings, wakes) = meter.looked;
            let lasted = (now - since).as_secs_f64();
            if lasted >= 10.0 {
                let rate = |count: u64| count as f64 / lasted / peers;
                let pinged = rate(meter.pings - pings);
                if pinged > self.extremes.pings {
                    self.extremes.pings = pinged;
                    most = Some((index, pinged, lasted));
                }
                self.extremes.wakes = self.extremes.wakes.max(rate(meter.wakes - wakes));
                meter.looked = (now, meter.pings, meter.wakes);
            }
            if now > meter.active + QUIET_AFTER && meter.quiet.is_none() {
                meter.quiet = Some((now, meter.bytes));
            }
        }
        if let Some((party, rate, lasted)) = most {
            self.note(format_args!("most path messages: party {party}, {rate:.1} a second and peer for {lasted} s"));
        }
        // Whatever is under way is bounded by what is sent.
        assert!(self.queue.len() < 100_000, "{}: {} events wait", self.name, self.queue.len());
    }

    /// Answers, requests and the longest time without an answer.
    pub fn observed(&self, client: PartyId, agent: PartyId) -> Observed {
        let pair = &self.pairs[&(client, agent)];
        Observed {
            asked: pair.asked,
            answered: pair.answered,
            longest_gap: pair.longest_gap.max(self.now - pair.last_answer),
            changes: pair.all_changes,
            first_direct: pair.first_direct,
            first_answer: pair.first_answer,
        }
    }

    /// Begins to look for gaps anew.
    pub fn forget_gaps(&mut self, client: PartyId, agent: PartyId) {
        let now = self.now;
        if let Some(pair) = self.pairs.get_mut(&(client, agent)) {
            pair.longest_gap = Time::ZERO;
            pair.last_answer = now;
        }
    }
}

/// The farthest that anything went, within what is allowed.
#[derive(Clone, Copy, Default, Debug)]
pub struct Extremes {
    /// From the first unanswered request, or the end of a trouble, to an answer.
    pub recovery: Time,
    /// Path messages by UDP a second and peer, over ten seconds and more.
    pub pings: f64,
    /// Timers that fired a second and peer.
    pub wakes: f64,
}

impl Extremes {
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            recovery: self.recovery.max(other.recovery),
            pings: self.pings.max(other.pings),
            wakes: self.wakes.max(other.wakes),
        }
    }
}

/// What was seen of a client and an agent so far.
#[derive(Clone, Copy, Debug)]
pub struct Observed {
    pub asked: u64,
    pub answered: u64,
    pub longest_gap: Time,
    pub changes: u32,
    pub first_direct: Option<Time>,
    pub first_answer: Option<Time>,
}
