//! One party we exchange packets with: what the coordinator said about it, whether it may be spoken to, and when it has
//! to be looked at again.
//!
//! Phases of a workspace agent: (1) *destination*: its address is known, packets are held; (2) NODE: its keys and home
//! relay are known; (3) ready: READY_FOR_HANDSHAKE came for this key, or 5 s passed: a session is opened and a handshake
//! starts at once; (4) up: what was held is sent. A new key takes it back to (2), DISCONNECTED to (1). `traffic.rs`
//! moves its packets, `pings.rs` its path messages.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::{DiscoPublic, NodePublic};
use codervpn_wire::node::Node;

use crate::candidates::Candidates;
use crate::command::{Direct, PeerId};
use crate::common::Common;
use crate::event::{Event, Path, PeerState, PeerStatus, Ping, RelayReason};
use crate::held::Held;
use crate::paths::Paths;
use crate::pings::Pings;
use crate::relays::Heard;
use crate::session::Session;
use crate::sink::Sink;

/// Without READY a handshake starts this long after NODE (Go: `ReadyForHandshakeTimeout`).
const READY_TIMEOUT: Duration = Duration::from_secs(5);
/// A lost peer is forgotten this long after its last handshake (Go: `lostTimeout`).
const LOST_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// A READY that overtook its NODE by less than this is for the new key (`control-plane.md` CC-33).
const READY_OVERTAKES: Duration = Duration::from_secs(1);
/// Two processes of one agent evict each other: at most one change per this time (CC-63).
const MIN_BETWEEN_KEYS: Duration = Duration::from_secs(1);
/// Packets were sent and nothing was heard for this long: the peer counts as unreachable (`dns-and-os.md` 1.7).
const UNREACHABLE_AFTER: Duration = Duration::from_secs(30);

/// An idle peer is pinged every 30 s; after two missed pongs its direct path is no longer shown.
const SHOWN_AFTER_PONG: Duration = Duration::from_secs(75);
/// A peer that has just appeared learns its endpoints within this time.
const FIRST_NEWS: Duration = Duration::from_secs(10);
/// Endpoints of an idle peer are tried at most this often.
const IDLE_NEWS: Duration = Duration::from_secs(300);
/// For so long a relay is used because a direct path is still looked for, afterwards because there is none.
const LOOKING: Duration = Duration::from_secs(5);

/// What the coordinator said about the peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) key: NodePublic,
    pub(crate) disco: DiscoPublic,
    pub(crate) home: Option<RegionId>,
}

pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) slot: u32,
    /// One of the agents we asked for; the others asked for us.
    pub(crate) destination: bool,
    /// Addresses under which the table finds it.
    pub(crate) addresses: Vec<Ipv6Addr>,
    /// Addresses that its present node may send from.
    pub(crate) allowed: Vec<Ipv6Addr>,
    pub(crate) remote: Option<Remote>,

    ready: bool,
    /// READY came, as against the 5 s having passed.
    acknowledged: bool,
    ready_at: Option<Instant>,
    ready_since_lost: bool,
    ready_deadline: Option<Instant>,
    lost: bool,
    forget_at: Option<Instant>,
    key_changed_at: Option<Instant>,
    /// The newest node with another key, while the last change is too fresh.
    pub(crate) deferred: Option<Box<Node>>,

    pub(crate) session: Option<Session>,
    /// A handshake should start as soon as a relay connection allows it; looked at again at this time.
    pub(crate) handshake_waits: Option<Instant>,
    pub(crate) held: Held,
    pub(crate) heard: Option<Heard>,
    pub(crate) route: Option<(u64, Option<RegionId>)>,
    pub(crate) pings: Pings,
    pub(crate) candidates: Candidates,
    pub(crate) paths: Paths,
    /// As the present node lists them, for when direct paths are allowed again.
    endpoints: Vec<SocketAddr>,

    /// First packet sent since anything authentic came back.
    pub(crate) unheard_since: Option<Instant>,
    pub(crate) last_inner: Option<Instant>,
    pub(crate) last_handshake: Option<Instant>,
    pub(crate) last_ping: Option<Ping>,
    pub(crate) rx_bytes: u64,
    pub(crate) tx_bytes: u64,

    pub(crate) scheduled: Option<Instant>,
    /// What users saw last, and whether a `PeerChanged` is waiting to be read.
    shown: (PeerState, Option<Path>, bool),
    pub(crate) change_queued: bool,
}

/// What the table has to do after a tick.
pub(crate) enum After {
    Nothing,
    /// The peer's node is forgotten: unindex its key; drop the peer if it is no destination.
    Forget,
    /// This node had to wait and may be applied now.
    Apply(Box<Node>),
}

impl Peer {
    pub(crate) fn new(id: PeerId, slot: u32, destination: bool, addresses: Vec<Ipv6Addr>, now: Instant) -> Self {
        Self {
            id,
            slot,
            destination,
            addresses,
            allowed: Vec::new(),
            remote: None,
            ready: false,
            acknowledged: false,
            ready_at: None,
            ready_since_lost: false,
            ready_deadline: None,
            lost: false,
            forget_at: None,
            key_changed_at: None,
            deferred: None,
            session: None,
            handshake_waits: None,
            held: Held::default(),
            heard: None,
            route: None,
            pings: Pings::new(now),
            candidates: Candidates::default(),
            paths: Paths::default(),
            endpoints: Vec::new(),
            unheard_since: None,
            last_inner: None,
            last_handshake: None,
            last_ping: None,
            rx_bytes: 0,
            tx_bytes: 0,
            scheduled: None,
            shown: (PeerState::WaitingForNode, None, false),
            change_queued: false,
        }
    }

    pub(crate) fn key(&self) -> Option<NodePublic> {
        self.remote.map(|remote| remote.key)
    }

    /// Whether a node with this key has to wait because the last change of key is too fresh (CC-63).
    pub(crate) fn must_defer(&self, key: NodePublic, now: Instant) -> bool {
        self.key().is_some_and(|present| present != key)
            && self.key_changed_at.is_some_and(|at| now.saturating_duration_since(at) < MIN_BETWEEN_KEYS)
    }

    /// Takes a node that has been checked.
    pub(crate) fn set_node(
        &mut self,
        remote: Remote,
        allowed: Vec<Ipv6Addr>,
        endpoints: Vec<SocketAddr>,
        cx: &mut Common,
        sink: &mut impl Sink,
        now: Instant,
    ) {
        let other_key = self.key() != Some(remote.key);
        let other_disco = self.remote.is_some_and(|present| present.disco != remote.disco);
        if other_key {
            let overtook = self.ready_at.is_some_and(|at| now.saturating_duration_since(at) < READY_OVERTAKES);
            if !(self.ready_since_lost || overtook) {
                self.ready = false;
                self.acknowledged = false;
            }
            if self.remote.is_some() {
                self.key_changed_at = Some(now);
            }
            self.unheard_since = None;
            self.last_handshake = None;
        }
        if other_key || other_disco {
            self.end_session(cx, now);
            self.forget_paths(cx);
            self.heard = None;
        }
        self.deferred = None;
        self.lost = false;
        self.ready_since_lost = false;
        self.forget_at = None;
        self.remote = Some(remote);
        self.allowed = allowed;
        self.endpoints = endpoints;
        self.route = None;
        let news = cx.may_go_direct() && self.candidates.set_node(&self.endpoints, cx.allow_loopback);
        if self.destination && !self.ready {
            self.ready_deadline = Some(now + READY_TIMEOUT);
        }
        self.program(cx, sink, now);
        if !self.destination {
            cx.event(Event::Programmed(self.id));
        }
        // Its endpoints came later than its session: an agent publishes itself before STUN has answered.
        if news && !other_key && self.session.is_some() && self.paths.trusted(now).is_none() && self.is_news_urgent(now)
        {
            self.begin_discovery(true, cx, sink, now);
        }
        self.settle(cx, now);
    }

    /// Whether new endpoints are tried at once: not for an idle peer again and again, whose NAT may have others every 20 s.
    /// Its next packet tries them.
    fn is_news_urgent(&self, now: Instant) -> bool {
        let within = |at: Option<Instant>, time| at.is_some_and(|at| now.saturating_duration_since(at) < time);
        self.is_in_use(now)
            || within(self.pings.looking_since, FIRST_NEWS)
            || !within(self.pings.last_discovery, IDLE_NEWS)
    }

    /// READY_FOR_HANDSHAKE.
    pub(crate) fn set_ready(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        self.ready = true;
        self.acknowledged = true;
        self.ready_at = Some(now);
        self.ready_since_lost |= self.lost;
        self.ready_deadline = None;
        if !self.is_up(now) {
            self.unheard_since = None;
        }
        self.program(cx, sink, now);
        self.settle(cx, now);
    }

    /// Opens the session if the peer may be spoken to, and starts a handshake with a destination that has none.
    fn program(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        let Some(remote) = self.remote.filter(|_| self.ready || !self.destination) else { return };
        if self.session.is_none() {
            self.session = cx.sessions.open(&remote.key, self.slot, now);
        }
        if let Some(session) = &mut self.session {
            session.set_keepalive(self.destination && self.acknowledged);
        }
        if self.destination && !self.is_up(now) {
            self.start_handshake(cx, sink, now);
        }
    }

    pub(crate) fn set_lost(&mut self, cx: &mut Common, now: Instant) {
        if self.remote.is_none() {
            return;
        }
        self.lost = true;
        self.ready_since_lost = false;
        self.forget_at = Some(self.last_handshake.map_or(now, |at| at + LOST_TIMEOUT));
        self.settle(cx, now);
    }

    /// DISCONNECTED, or lost for too long. A destination keeps its address and what is held for it.
    pub(crate) fn forget_node(&mut self, cx: &mut Common, now: Instant) {
        self.end_session(cx, now);
        self.forget_paths(cx);
        self.endpoints.clear();
        self.remote = None;
        self.deferred = None;
        self.allowed.clear();
        self.ready = false;
        self.acknowledged = false;
        self.ready_at = None;
        self.ready_since_lost = false;
        self.ready_deadline = None;
        self.lost = false;
        self.forget_at = None;
        self.last_handshake = None;
        self.heard = None;
        self.route = None;
        self.settle(cx, now);
    }

    /// The peer is about to be dropped.
    pub(crate) fn close(&mut self, cx: &mut Common, now: Instant) {
        self.end_session(cx, now);
        self.forget_paths(cx);
        cx.counters.held_discarded += self.held.clear(&mut cx.held);
    }

    fn end_session(&mut self, cx: &mut Common, now: Instant) {
        if let Some(session) = self.session.take() {
            cx.sessions.close(&session, now);
        }
        self.handshake_waits = None;
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) -> After {
        self.scheduled = None;
        cx.counters.held_expired += self.held.expire(now, &mut cx.held);
        if self.forget_at.is_some_and(|at| at <= now) {
            // A handshake after the loss means that only the coordinator lost it.
            let again = self.last_handshake.map(|at| at + LOST_TIMEOUT).filter(|at| *at > now);
            self.forget_at = again;
            if again.is_none() {
                return After::Forget;
            }
        }
        if self.ready_deadline.is_some_and(|at| at <= now) {
            self.ready_deadline = None;
            self.ready = true;
            self.program(cx, sink, now);
        }
        if self.handshake_waits.is_some_and(|at| at <= now) {
            self.start_handshake(cx, sink, now);
        }
        self.tick_session(cx, sink, now);
        self.tick_pings(cx, sink, now);
        let due = self.deferred_at().is_none_or(|at| at <= now);
        let node = if due { self.deferred.take() } else { None };
        self.settle(cx, now);
        node.map_or(After::Nothing, After::Apply)
    }

    /// A relay connection came up: what waited for it goes on.
    pub(crate) fn relay_up(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if self.paths.trusted(now).is_none() {
            self.call_off(cx, sink);
        }
        if self.handshake_waits.is_some() {
            self.start_handshake(cx, sink, now);
        } else {
            self.repeat_handshake(cx, sink, now);
            self.flush_held(cx, sink, now);
        }
        self.settle(cx, now);
    }

    /// Notes when to look again and tells of what users can see. Not on the path of every packet.
    pub(crate) fn settle(&mut self, cx: &mut Common, now: Instant) {
        if let Some(at) = self.next_deadline(cx, now) {
            cx.timers.schedule(self.slot, &mut self.scheduled, at);
        }
        let seen = (self.state(now), self.path(cx, now), self.lost);
        if seen != self.shown {
            self.shown = seen;
            self.tell_change(cx);
        }
    }

    pub(crate) fn tell_change(&mut self, cx: &mut Common) {
        if !std::mem::replace(&mut self.change_queued, true) {
            cx.event(Event::PeerChanged(self.id));
        }
    }

    fn next_deadline(&self, cx: &Common, now: Instant) -> Option<Instant> {
        let unreachable = self.unheard_since.map(|since| since + UNREACHABLE_AFTER).filter(|at| *at > now);
        let session = self.session.as_ref().and_then(Session::next_tick);
        let pings = self.pings.next(self.may_ping(cx));
        let trust = self.paths.trust_until().filter(|at| *at > now);
        let candidates = [
            self.paths.next_check(),
            trust,
            self.held.next_expiry(),
            self.forget_at,
            self.ready_deadline,
            self.deferred_at().filter(|_| self.deferred.is_some()),
            self.handshake_waits,
            unreachable,
            session,
            pings,
        ];
        candidates.into_iter().flatten().min()
    }

    fn deferred_at(&self) -> Option<Instant> {
        self.key_changed_at.map(|at| at + MIN_BETWEEN_KEYS)
    }

    pub(crate) fn may_ping(&self, cx: &Common) -> bool {
        cx.own.status_pings && self.destination && self.session.is_some()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    pub(crate) fn is_up(&self, now: Instant) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_up(now))
    }

    pub(crate) fn is_unreachable(&self, now: Instant) -> bool {
        self.unheard_since.is_some_and(|since| since + UNREACHABLE_AFTER <= now)
    }

    pub(crate) fn state(&self, now: Instant) -> PeerState {
        if self.is_unreachable(now) {
            PeerState::Unreachable
        } else if self.remote.is_none() {
            PeerState::WaitingForNode
        } else if self.session.is_none() {
            PeerState::WaitingForReady
        } else if self.is_up(now) {
            PeerState::Up
        } else {
            PeerState::Connecting
        }
    }

    fn path(&mut self, cx: &Common, now: Instant) -> Option<Path> {
        self.session.as_ref()?;
        match self.direct(cx, now) {
            Some(address) => Some(Path::Direct(address)),
            None => self.region(cx).map(Path::Relay),
        }
    }

    /// The address that packets take, or would take as far as can be known without asking all the time: while nothing is
    /// sent, the answer to the last status ping counts.
    pub(crate) fn direct(&self, cx: &Common, now: Instant) -> Option<SocketAddr> {
        let best = self.paths.best().filter(|_| cx.may_go_direct())?;
        let fresh = now.saturating_duration_since(best.at) < SHOWN_AFTER_PONG;
        let proven = self.paths.trusted(now).is_some() || (!self.is_in_use(now) && fresh && !self.paths.is_doubted());
        proven.then_some(best.address)
    }

    /// Why packets take a relay.
    fn relay_reason(&self, cx: &Common, now: Instant) -> RelayReason {
        let looking = self.pings.looking_since.is_none_or(|since| now.saturating_duration_since(since) < LOOKING);
        match cx.net.direct() {
            Direct::DisabledByUser => RelayReason::DisabledByUser,
            Direct::DisabledByDeployment => RelayReason::DisabledByDeployment,
            Direct::Allowed if cx.net.is_udp_blocked() => RelayReason::UdpBlocked,
            Direct::Allowed if self.candidates.iter().any(|c| c.too_small) => RelayReason::PathTooSmall,
            Direct::Allowed if looking => RelayReason::Probing,
            Direct::Allowed if self.candidates.is_empty() => RelayReason::NoEndpoints,
            Direct::Allowed if cx.net.is_nat_hard() => RelayReason::HardNat,
            Direct::Allowed => RelayReason::NoAnswer,
        }
    }

    /// Direct paths are allowed, or not any more.
    pub(crate) fn direct_changed(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        if cx.may_go_direct() {
            self.candidates.set_node(&self.endpoints, cx.allow_loopback);
            if self.session.is_some() {
                self.begin_discovery(true, cx, sink, now);
            }
        } else {
            self.drop_candidates(cx);
        }
        self.settle(cx, now);
    }

    /// The sockets or the networks under them are others: nothing is proven any more, everything is tried again.
    pub(crate) fn network_changed(&mut self, cx: &mut Common, sink: &mut impl Sink, now: Instant) {
        self.distrust_paths();
        if cx.may_go_direct() {
            // Those of a node that came while there was no network.
            self.candidates.set_node(&self.endpoints, cx.allow_loopback);
        }
        self.call_off(cx, sink);
        if self.session.is_some() {
            self.begin_discovery(true, cx, sink, now);
        }
        self.settle(cx, now);
    }

    pub(crate) fn status(&self, cx: &Common, now: Instant) -> PeerStatus {
        let direct = self.direct(cx, now).map(Path::Direct);
        let relay = || cx.relays.route(self.home(), self.heard).map(Path::Relay);
        let path = self.session.as_ref().and_then(|_| direct.or_else(relay));
        PeerStatus {
            id: self.id,
            state: self.state(now),
            key: self.key(),
            addresses: self.addresses.clone(),
            home: self.home(),
            lost: self.lost,
            path,
            relay_reason: matches!(path, Some(Path::Relay(_))).then(|| self.relay_reason(cx, now)),
            last_handshake: self.last_handshake,
            last_ping: self.last_ping,
            rx_bytes: self.rx_bytes,
            tx_bytes: self.tx_bytes,
        }
    }

    pub(crate) fn home(&self) -> Option<RegionId> {
        self.remote.and_then(|remote| remote.home)
    }
}
