//! One WireGuard session per peer, over `boringtun::noise::Tunn`. The only file that knows boringtun.
//!
//! Decides when a handshake starts, is repeated, is given up and renewed, when a keepalive goes out, and whether a
//! packet can be sealed now. All of it by the caller's clock. boringtun reads a clock of its own for the ages of its
//! session keys; the same rules run there with the same limits, later than ours, as a backstop whose output is sent.
//!
//! What boringtun leaves to its user and where it is done here:
//! * `encapsulate` and `decapsulate` panic on short buffers: both check the room first.
//! * without a session `encapsulate` queues up to 256 packets: `seal` never calls it then; packets are held by the peer.
//! * no padding: `seal` takes what the caller padded.
//! * no handshake at creation, none on keepalive-only traffic: `initiate` on READY, renewal at 120 s while keepalive is on.
//! * an expired `Tunn` reports an error for ever: ignored, the next initiation revives it.
//! * time stamps have the resolution of `update_timers`: it is called before every handshake message.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use boringtun::noise::errors::WireGuardError;
use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::noise::{Tunn, TunnResult};
use codervpn_wire::keys::{NodePrivate, NodePublic};
use x25519_dalek::{PublicKey, StaticSecret};

/// The target under which the library below logs. Ordinary expiries are errors to it, so a daemon may want to silence it.
pub const LIBRARY_LOG_TARGET: &str = "boringtun";

/// A data message is this much longer than its plaintext.
pub(crate) const DATA_OVERHEAD: usize = 32;
/// Room that every message that carries no data fits into (an initiation is 148 bytes).
pub(crate) const CONTROL_ROOM: usize = 192;

const REKEY_AFTER: Duration = Duration::from_secs(120);
/// A responder renews only when the initiator, who is due at 120 s, did not.
const REKEY_AFTER_AS_RESPONDER: Duration = Duration::from_secs(150);
const REJECT_AFTER: Duration = Duration::from_secs(180);
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
const REKEY_JITTER_MS: u64 = 333;
/// The first initiations to a key that never answered follow faster, each this long after the one before: a process that
/// has just started may know us before its relay does, and what reaches a relay too early is lost (6.2 step 9).
const EARLY_RETRIES: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_millis(400), Duration::from_millis(800)];
const REKEY_ATTEMPT: Duration = Duration::from_secs(90);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
const PERSISTENT_KEEPALIVE: Duration = Duration::from_secs(25);
/// Between two initiations of one peer that READY or traffic ask for (`control-plane.md` CC-62).
const MIN_BETWEEN_REQUESTED: Duration = Duration::from_millis(100);
/// Initiations accepted from one peer (wireguard-go: `HandshakeInitationRate`).
const MIN_BETWEEN_RECEIVED: Duration = Duration::from_millis(20);
/// Handshake messages per second over all peers before cookies are asked for. Only configured peers get that far;
/// 2000 cost about a third of a core.
const HANDSHAKES_PER_SECOND: u64 = 2000;
/// How long a receiver index stays unused after its session is gone: packets for it may be under way.
const INDEX_REST: Duration = Duration::from_secs(180);
/// With this index a receiver index would begin like a STUN message (`data-plane.md` 3.2).
const STUN_LOOKALIKE_INDEX: u32 = 0x42A412;
/// Receiver indices have 24 bits for the peer.
const MAX_INDEX: u32 = 1 << 24;

/// What all sessions share: our key, the flood guard and the receiver indices.
pub(crate) struct Sessions {
    secret: StaticSecret,
    limiter: Arc<RateLimiter>,
    indices: Indices,
}

impl Sessions {
    pub(crate) fn new(key: &NodePrivate) -> Self {
        let secret = StaticSecret::from(*key.expose());
        let limiter = Arc::new(RateLimiter::new(&PublicKey::from(&secret), HANDSHAKES_PER_SECOND));
        Self { secret, limiter, indices: Indices::default() }
    }

    /// A session for the peer in `slot`; `None` when all indices are taken.
    pub(crate) fn open(&mut self, peer: &NodePublic, slot: u32, now: Instant) -> Option<Session> {
        let index = self.indices.take(slot, now)?;
        let tunn = Tunn::new(
            self.secret.clone(),
            PublicKey::from(*peer.as_bytes()),
            None,
            None,
            index,
            Some(Arc::clone(&self.limiter)),
        );
        Some(Session {
            tunn: Box::new(tunn),
            limiter: Arc::clone(&self.limiter),
            index,
            established: None,
            unconfirmed: None,
            initiation: None,
            early: 0,
            last_initiation: None,
            last_received_initiation: None,
            last_handshake: None,
            keepalive: false,
            resting_until: None,
            last_sent: now,
            unanswered_since: None,
            owed_since: None,
            used: false,
        })
    }

    pub(crate) fn close(&mut self, session: &Session, now: Instant) {
        self.indices.retire(session.index, now);
    }

    /// The slot of the peer that a data, response or cookie message is for.
    pub(crate) fn slot_of(&self, receiver_index: u32) -> Option<u32> {
        self.indices.slot_of(receiver_index >> 8)
    }
}

#[derive(Clone, Copy)]
struct Established {
    renew_at: Instant,
    /// Its keys are not used any more from then on.
    rejected_at: Instant,
}

#[derive(Clone, Copy)]
struct Initiation {
    first: Instant,
    retry_at: Instant,
}

pub(crate) struct Session {
    tunn: Box<Tunn>,
    limiter: Arc<RateLimiter>,
    index: u32,
    established: Option<Established>,
    /// We answered an initiation: receiver index and time of the session that exists once its initiator used it.
    unconfirmed: Option<(u32, Instant)>,
    initiation: Option<Initiation>,
    /// Initiations sent before the peer ever answered.
    early: usize,
    last_initiation: Option<Instant>,
    last_received_initiation: Option<Instant>,
    last_handshake: Option<Instant>,
    keepalive: bool,
    /// After 90 s without an answer: no initiation of our own accord before this.
    resting_until: Option<Instant>,
    last_sent: Instant,
    /// First data sent since anything authentic arrived.
    unanswered_since: Option<Instant>,
    /// First data received since we sent anything.
    owed_since: Option<Instant>,
    /// Data went one way or the other since the session was established.
    used: bool,
}

/// What a received message was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opened {
    /// An IPv6 packet of this length lies at the start of the buffer.
    Packet(usize),
    /// A keepalive or a cookie: nothing to do.
    Nothing,
    /// A message of this length lies at the start of the buffer and goes back to the peer.
    Reply(usize),
    Refused(Refused),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// Not a WireGuard message, or its contents are not IPv6.
    Malformed,
    /// Not sealed for this session or not by this peer.
    NotAuthentic,
    /// Seen before, or too old.
    Replay,
    /// Too many handshakes.
    Flood,
}

impl Session {
    /// Whether `seal` works now.
    pub(crate) fn is_up(&self, now: Instant) -> bool {
        self.established.is_some_and(|e| now < e.rejected_at)
    }

    pub(crate) fn last_handshake(&self) -> Option<Instant> {
        self.last_handshake
    }

    pub(crate) fn set_keepalive(&mut self, on: bool) {
        self.keepalive = on;
    }

    /// Seals one packet (empty = keepalive). `None` without a session or with too little room.
    pub(crate) fn seal(&mut self, plaintext: &[u8], out: &mut [u8], now: Instant) -> Option<usize> {
        if !self.is_up(now) || out.len() < plaintext.len() + DATA_OVERHEAD || out.len() < CONTROL_ROOM {
            return None;
        }
        let sealed = match self.tunn.encapsulate(plaintext, out) {
            TunnResult::WriteToNetwork(sealed) if sealed.first() == Some(&DATA) => sealed,
            // By its own clock boringtun has dropped the session a moment before us.
            _ => {
                self.established = None;
                return None;
            }
        };
        let len = sealed.len();
        self.last_sent = now;
        self.owed_since = None;
        if !plaintext.is_empty() {
            self.used = true;
            self.unanswered_since.get_or_insert(now);
        }
        Some(len)
    }

    /// An initiation, unless one left less than 100 ms ago. `out` has room for `CONTROL_ROOM`.
    pub(crate) fn initiate(&mut self, out: &mut [u8], jitter: u32, now: Instant) -> Option<usize> {
        if self.last_initiation.is_some_and(|at| now.saturating_duration_since(at) < MIN_BETWEEN_REQUESTED) {
            return None;
        }
        self.force_initiation(out, jitter, now)
    }

    /// An initiation was sent and not answered yet.
    pub(crate) fn is_initiating(&self) -> bool {
        self.initiation.is_some()
    }

    /// Whether traffic without a session should start a handshake: none is under way and the last try is not fresh.
    pub(crate) fn wants_initiation(&self, now: Instant) -> bool {
        self.initiation.is_none()
            && self.last_initiation.is_none_or(|at| now.saturating_duration_since(at) >= REKEY_TIMEOUT)
    }

    fn force_initiation(&mut self, out: &mut [u8], jitter: u32, now: Instant) -> Option<usize> {
        if out.len() < CONTROL_ROOM {
            return None;
        }
        self.refresh_clock(out);
        let TunnResult::WriteToNetwork(message) = self.tunn.format_handshake_initiation(out, true) else { return None };
        let len = message.len();
        self.initiation_sent(jitter, now);
        Some(len)
    }

    fn initiation_sent(&mut self, jitter: u32, now: Instant) {
        let early = EARLY_RETRIES.get(self.early).filter(|_| self.last_handshake.is_none());
        self.early += 1;
        let regular = REKEY_TIMEOUT + Duration::from_millis(u64::from(jitter) % REKEY_JITTER_MS);
        let retry_at = now + early.copied().unwrap_or(regular);
        let first = self.initiation.map_or(now, |i| i.first);
        self.initiation = Some(Initiation { first, retry_at });
        self.last_initiation = Some(now);
        self.resting_until = None;
        self.last_sent = now;
    }

    /// Opens one message into `out`, which has room for the whole datagram and at least `CONTROL_ROOM`.
    pub(crate) fn open(&mut self, datagram: &[u8], out: &mut [u8], now: Instant) -> Opened {
        if datagram.len() < DATA_OVERHEAD || out.len() < datagram.len() || out.len() < CONTROL_ROOM {
            return Opened::Refused(Refused::Malformed);
        }
        let kind = datagram.first().copied().unwrap_or(0);
        if kind != DATA {
            self.limiter.reset_count();
        }
        if kind == INITIATION {
            let last = self.last_received_initiation;
            if last.is_some_and(|at| now.saturating_duration_since(at) < MIN_BETWEEN_RECEIVED) {
                return Opened::Refused(Refused::Flood);
            }
            self.last_received_initiation = Some(now);
            self.refresh_clock(out);
        }
        // wireguard-go binds its cookies to a stable address per peer too: the path may change under a cookie.
        let pseudo_address = IpAddr::V6(Ipv6Addr::from(u128::from(self.index) + 1));
        let outcome = match self.tunn.decapsulate(Some(pseudo_address), datagram, out) {
            TunnResult::WriteToTunnelV6(packet, _) => Ok(Opened::Packet(packet.len())),
            TunnResult::WriteToTunnelV4(..) => Ok(Opened::Refused(Refused::Malformed)),
            TunnResult::Done => Ok(Opened::Nothing),
            TunnResult::WriteToNetwork(reply) => Ok(Opened::Reply(reply.len())),
            // Only the contents can be malformed here: the message itself opened.
            TunnResult::Err(WireGuardError::InvalidPacket) if kind == DATA => Ok(Opened::Refused(Refused::Malformed)),
            TunnResult::Err(error) => Err(error),
        };
        match outcome {
            Ok(opened) => {
                self.opened(kind, datagram, opened, out, now);
                opened
            }
            Err(error) => Opened::Refused(refused(&error)),
        }
    }

    /// Notes what an authentic message means for the session.
    fn opened(&mut self, kind: u8, datagram: &[u8], opened: Opened, out: &[u8], now: Instant) {
        match (kind, opened) {
            // Anything else sent back is a cookie: nothing has been proven then.
            (INITIATION, Opened::Reply(_)) if out.first() == Some(&RESPONSE) => {
                self.unconfirmed = index_at(out, 4).map(|index| (index, now));
                self.last_sent = now;
                self.unanswered_since = None;
            }
            (RESPONSE, Opened::Reply(_)) if out.first() == Some(&DATA) => {
                self.establish(now, REKEY_AFTER, now);
                self.last_sent = now;
            }
            (DATA, _) => {
                if let Some((_, at)) = self.unconfirmed.filter(|(index, _)| index_at(datagram, 4) == Some(*index)) {
                    self.establish(at, REKEY_AFTER_AS_RESPONDER, now);
                }
                self.unanswered_since = None;
                if matches!(opened, Opened::Packet(_)) {
                    self.used = true;
                    self.owed_since.get_or_insert(now);
                }
            }
            _ => {}
        }
    }

    fn establish(&mut self, at: Instant, renew_after: Duration, now: Instant) {
        self.established = Some(Established { renew_at: at + renew_after, rejected_at: at + REJECT_AFTER });
        self.unconfirmed = None;
        self.initiation = None;
        self.resting_until = None;
        self.last_handshake = Some(now);
        self.unanswered_since = None;
        self.owed_since = None;
        self.used = false;
    }

    /// One message that is due now, in `out`. Call again until `None`.
    pub(crate) fn tick(&mut self, out: &mut [u8], jitter: u32, now: Instant) -> Option<usize> {
        if out.len() < CONTROL_ROOM {
            return None;
        }
        if !self.is_up(now) {
            self.established = None;
            self.unanswered_since = None;
            self.owed_since = None;
        }
        if let Some(initiation) = self.initiation {
            if now.saturating_duration_since(initiation.first) >= REKEY_ATTEMPT {
                self.initiation = None;
                self.resting_until = Some(now + PERSISTENT_KEEPALIVE);
            } else if initiation.retry_at <= now {
                return self.force_initiation(out, jitter, now);
            }
        } else if self.handshake_at().is_some_and(|at| at <= now) {
            self.unanswered_since = None;
            return self.force_initiation(out, jitter, now);
        }
        if self.keepalive_at().is_some_and(|at| at <= now) {
            return self.seal(&[], out, now);
        }
        let message = match self.tunn.update_timers(out) {
            TunnResult::WriteToNetwork(message) => Some((message.len(), message.first().copied())),
            _ => None,
        };
        self.follow_expiry();
        let (len, kind) = message?;
        if kind == Some(INITIATION) {
            self.initiation_sent(jitter, now);
        }
        Some(len)
    }

    /// When `tick` has something to do again.
    pub(crate) fn next_tick(&self) -> Option<Instant> {
        let initiation = self.initiation.map(|i| i.retry_at.min(i.first + REKEY_ATTEMPT));
        let handshake = if self.initiation.is_some() { None } else { self.handshake_at() };
        let expiry = self.established.map(|e| e.rejected_at);
        [initiation, handshake, self.keepalive_at(), expiry].into_iter().flatten().min()
    }

    /// When a handshake should start, if none is under way.
    fn handshake_at(&self) -> Option<Instant> {
        let Some(established) = self.established else {
            // Keepalive keeps asking for a session that never came up, was given up, or ran out.
            return (self.keepalive && self.last_initiation.is_some()).then(|| {
                let earliest = self.last_initiation.map_or(self.last_sent, |at| at + REKEY_TIMEOUT);
                self.resting_until.map_or(earliest, |until| until.max(earliest))
            });
        };
        let renewal = (self.keepalive || self.used).then_some(established.renew_at);
        let silence = self.unanswered_since.map(|since| since + KEEPALIVE_TIMEOUT + REKEY_TIMEOUT);
        let earliest = [renewal, silence].into_iter().flatten().min()?;
        Some(self.resting_until.map_or(earliest, |until| until.max(earliest)))
    }

    fn keepalive_at(&self) -> Option<Instant> {
        self.established?;
        let owed = self.owed_since.map(|since| since + KEEPALIVE_TIMEOUT);
        let persistent = self.keepalive.then(|| self.last_sent + PERSISTENT_KEEPALIVE);
        [owed, persistent].into_iter().flatten().min()
    }

    /// Brings boringtun's notion of now up to date; whatever it wants to send is repeated by its next call.
    fn refresh_clock(&mut self, out: &mut [u8]) {
        let _ = self.tunn.update_timers(out);
        self.follow_expiry();
    }

    /// `update_timers` may have dropped the session.
    fn follow_expiry(&mut self) {
        if self.tunn.time_since_last_handshake().is_none() {
            self.established = None;
        }
    }
}

const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const DATA: u8 = 4;

fn index_at(message: &[u8], offset: usize) -> Option<u32> {
    let bytes = message.get(offset..offset + 4)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn refused(error: &WireGuardError) -> Refused {
    match error {
        WireGuardError::DuplicateCounter | WireGuardError::InvalidCounter | WireGuardError::WrongTai64nTimestamp => {
            Refused::Replay
        }
        WireGuardError::UnderLoad => Refused::Flood,
        WireGuardError::InvalidPacket | WireGuardError::IncorrectPacketLength => Refused::Malformed,
        _ => Refused::NotAuthentic,
    }
}

/// Which receiver index belongs to which peer. Indices rest before they are used again.
#[derive(Default)]
struct Indices {
    slots: Vec<Option<u32>>,
    resting: std::collections::VecDeque<(Instant, u32)>,
}

impl Indices {
    fn take(&mut self, slot: u32, now: Instant) -> Option<u32> {
        if self.resting.front().is_some_and(|(until, _)| *until <= now) {
            let (_, index) = self.resting.pop_front()?;
            *self.slots.get_mut(index as usize)? = Some(slot);
            return Some(index);
        }
        if self.slots.len() == STUN_LOOKALIKE_INDEX as usize {
            self.slots.push(None);
        }
        let index = u32::try_from(self.slots.len()).ok().filter(|index| *index < MAX_INDEX)?;
        self.slots.push(Some(slot));
        Some(index)
    }

    fn retire(&mut self, index: u32, now: Instant) {
        if let Some(entry) = self.slots.get_mut(index as usize)
            && entry.take().is_some()
        {
            self.resting.push_back((now + INDEX_REST, index));
        }
    }

    fn slot_of(&self, index: u32) -> Option<u32> {
        self.slots.get(index as usize).copied().flatten()
    }
}
