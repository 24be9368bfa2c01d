//! One region as the data thread, its connection and status displays share it.
//! Decides what may queue for the region, what of it is too old to send, and
//! how long the region counts as needed.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use codervpn_wire::derp_map::{Region, RegionId};
use codervpn_wire::keys::NodePrivate;
use futures_util::task::AtomicWaker;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::batch::{Pool, SendBatch};
use crate::dialer::Dialer;
use crate::inbox::{Inbox, RelayEvent};
use crate::lock::lock;
use crate::relay::RelayAccess;

/// A connection that carried nothing for so long is closed unless it is home.
const IDLE: Duration = Duration::from_secs(60);
/// Bytes a region may queue. 1 MiB is what upstream's queue of packets comes
/// to; beyond it new batches are dropped (data plane 2.9).
const QUEUE_BYTES: usize = 1024 * 1024;
/// Frames a region may queue, so that small packets do not wait in thousands.
const QUEUE_FRAMES: usize = 4096;
/// Above this the sender is asked to pause ([`Sent::Congested`]): the rest of
/// the delay belongs into the TUN's queue (fast path, relay-shaped part).
/// Below half of it it may go on.
const HIGH_WATER: usize = 256 * 1024;
/// What waits is bounded by time, too: a connection that carries less than
/// 13 MB/s is congested earlier, when so much time is in the queue, ...
const DELAY: Duration = Duration::from_millis(20);
/// ... but not by a single small batch, ...
const LEAST_WATER: usize = 32 * 1024;
/// ... and drops beyond so many times that, when the sender does not pause.
const PATIENCE: usize = 4;
/// Packets older than this are not worth sending: their sender has repeated
/// them. Long enough for the packets that wait for the first connect.
const STALE: Duration = Duration::from_secs(3);

/// What came of sending a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    Queued,
    /// Queued, but the connection does not keep up: send no more until
    /// [`RelayEvent::Drained`], or accept that batches will be dropped.
    Congested,
    /// The queue was full.
    Dropped,
    /// The map has no such region, or it has no relay.
    NoSuchRegion,
}

/// Where a region's connection stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelayPhase {
    /// Nobody needs it.
    Unused,
    Connecting,
    Connected,
    /// Waiting before the next attempt.
    BackingOff,
}

/// One region, for status displays.
#[derive(Debug, Clone)]
pub struct RelayStatus {
    pub region: RegionId,
    pub code: String,
    pub name: String,
    pub home: bool,
    pub phase: RelayPhase,
    /// Address of the relay while connected.
    pub address: Option<SocketAddr>,
    /// Last failure, until the next success.
    pub error: Option<String>,
    /// The relay's own complaint.
    pub health: Option<String>,
    pub counters: RelayCounters,
}

/// What went over a region's connections so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelayCounters {
    pub sent_bytes: u64,
    pub sent_packets: u64,
    pub received_bytes: u64,
    pub received_packets: u64,
    /// Packets not sent because the queue was full, ...
    pub dropped_full: u64,
    /// ... because they had waited too long, ...
    pub dropped_stale: u64,
    /// ... because the relay asked for a lower rate, ...
    pub dropped_rate: u64,
    /// ... or because the connection ended under them.
    pub dropped_lost: u64,
    /// System calls, or TLS calls, to show that batches stay together.
    pub reads: u64,
    pub writes: u64,
}

/// What all regions share.
pub(crate) struct Shared {
    pub(crate) dialer: Dialer,
    pub(crate) key: NodePrivate,
    pub(crate) access: RelayAccess,
    pub(crate) inbox: Inbox,
    pub(crate) receive_pool: Arc<Pool>,
    pub(crate) send_pool: Arc<Pool>,
    pub(crate) started: Instant,
}

/// What the data thread, the region's task and status displays share.
pub(crate) struct RegionState {
    pub(crate) region: Region,
    pub(crate) shared: Arc<Shared>,
    outbox: Mutex<Outbox>,
    /// Wakes the region's task, the only one that registers here.
    pub(crate) waker: AtomicWaker,
    pub(crate) home: AtomicBool,
    pub(crate) connected: AtomicBool,
    /// A link check is asked for.
    pub(crate) check: AtomicBool,
    pub(crate) retry_now: tokio::sync::Notify,
    pub(crate) stopped: CancellationToken,
    /// Milliseconds since `Shared::started`; 0 = never.
    last_use: AtomicU64,
    pub(crate) view: Mutex<View>,
    pub(crate) counters: Counters,
}

pub(crate) struct View {
    phase: RelayPhase,
    address: Option<SocketAddr>,
    pub(crate) error: Option<String>,
    health: Option<String>,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) sent_packets: AtomicU64,
    pub(crate) received_bytes: AtomicU64,
    pub(crate) received_packets: AtomicU64,
    pub(crate) dropped_full: AtomicU64,
    pub(crate) dropped_stale: AtomicU64,
    pub(crate) dropped_rate: AtomicU64,
    pub(crate) dropped_lost: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
}

#[derive(Default)]
struct Outbox {
    queue: VecDeque<Queued>,
    /// Queued or being written.
    bytes: usize,
    frames: usize,
    congested: bool,
    pace: Pace,
}

impl Outbox {
    /// Above which the sender is asked to pause.
    fn high_water(&self) -> usize {
        self.pace.bytes_in(DELAY).map_or(HIGH_WATER, |bytes| bytes.clamp(LEAST_WATER, HIGH_WATER))
    }

    /// Above which batches are dropped.
    fn limit(&self) -> usize {
        match self.pace.rate {
            Some(_) => (self.high_water() * PATIENCE).min(QUEUE_BYTES),
            None => QUEUE_BYTES,
        }
    }
}

/// How fast the connection takes what is queued, measured while something is.
#[derive(Default)]
struct Pace {
    /// Bytes a second; unknown until a connection was busy for a while.
    rate: Option<f64>,
    /// Since when it has been busy, and what it took since.
    since: Option<Instant>,
    taken: usize,
}

impl Pace {
    /// Shorter than this the kernel's buffer is measured, not the connection.
    const WINDOW: Duration = Duration::from_millis(100);

    fn begin(&mut self, now: Instant) {
        self.since = Some(now);
        self.taken = 0;
    }

    fn took(&mut self, bytes: usize, now: Instant) {
        let Some(since) = self.since else { return };
        self.taken += bytes;
        let busy = now.duration_since(since);
        if busy >= Self::WINDOW {
            self.rate = Some(self.taken as f64 / busy.as_secs_f64());
            self.begin(now);
        }
    }

    /// Everything is taken. That may have been too fast for a measurement, but what was known may be too little now.
    fn emptied(&mut self, now: Instant) {
        let Some(since) = self.since.take() else { return };
        let fast = self.taken as f64 / now.duration_since(since).as_secs_f64().max(1e-6);
        self.rate = self.rate.filter(|rate| *rate > fast);
    }

    fn bytes_in(&self, time: Duration) -> Option<usize> {
        self.rate.map(|rate| (rate * time.as_secs_f64()) as usize)
    }
}

pub(crate) struct Queued {
    pub(crate) batch: SendBatch,
    pub(crate) since: Instant,
}

impl RegionState {
    pub(crate) fn new(region: Region, shared: Arc<Shared>) -> RegionState {
        RegionState {
            region,
            shared,
            outbox: Mutex::default(),
            waker: AtomicWaker::new(),
            home: AtomicBool::new(false),
            connected: AtomicBool::new(false),
            check: AtomicBool::new(false),
            retry_now: tokio::sync::Notify::new(),
            stopped: CancellationToken::new(),
            last_use: AtomicU64::new(0),
            view: Mutex::new(View { phase: RelayPhase::Unused, address: None, error: None, health: None }),
            counters: Counters::default(),
        }
    }

    pub(crate) fn id(&self) -> RegionId {
        self.region.id
    }

    pub(crate) fn stop(&self) {
        self.stopped.cancel();
        self.waker.wake();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.is_cancelled()
    }

    fn now(&self) -> u64 {
        // Never 0, which means "never".
        self.shared.started.elapsed().as_millis() as u64 + 1
    }

    /// Something used this region just now.
    pub(crate) fn touch(&self) {
        self.last_use.store(self.now(), Relaxed);
    }

    /// Whether a connection should stand.
    pub(crate) fn is_needed(&self) -> bool {
        let last = self.last_use.load(Relaxed);
        let used = last > 0 && self.now().saturating_sub(last) < IDLE.as_millis() as u64;
        used || self.home.load(Relaxed)
    }

    pub(crate) fn send(&self, batch: SendBatch) -> Sent {
        if batch.is_empty() {
            return Sent::Queued;
        }
        self.touch();
        let connected = self.connected.load(Relaxed);
        let mut outbox = lock(&self.outbox);
        let frames = batch.frames();
        if outbox.bytes == 0 {
            outbox.pace.begin(Instant::now());
        }
        // One batch is always taken, however slow the connection.
        let full = outbox.bytes > 0 && outbox.bytes + batch.len() > outbox.limit();
        if full || outbox.frames + frames > QUEUE_FRAMES {
            drop(outbox);
            self.counters.dropped_full.fetch_add(frames as u64, Relaxed);
            return Sent::Dropped;
        }
        outbox.bytes += batch.len();
        outbox.frames += frames;
        outbox.queue.push_back(Queued { batch, since: Instant::now() });
        // Waiting for a connection is no congestion: others may be sent to.
        outbox.congested |= connected && outbox.bytes > outbox.high_water();
        let congested = outbox.congested;
        drop(outbox);
        self.waker.wake();
        if congested { Sent::Congested } else { Sent::Queued }
    }

    /// Moves what shall be written next into `writing`; drops what is stale.
    pub(crate) fn take_queued(&self, writing: &mut VecDeque<Queued>, limit: usize) {
        let mut outbox = lock(&self.outbox);
        let mut taken = 0;
        while writing.len() < limit {
            let Some(queued) = outbox.queue.pop_front() else { break };
            if queued.since.elapsed() > STALE {
                outbox.bytes -= queued.batch.len();
                outbox.frames -= queued.batch.frames();
                taken += queued.batch.frames();
                continue;
            }
            writing.push_back(queued);
        }
        drop(outbox);
        self.counters.dropped_stale.fetch_add(taken as u64, Relaxed);
    }

    /// A batch left `writing`, sent or not.
    pub(crate) fn finished(&self, batch: &SendBatch) {
        let now = Instant::now();
        let mut outbox = lock(&self.outbox);
        outbox.pace.took(batch.len(), now);
        outbox.bytes -= batch.len();
        outbox.frames -= batch.frames();
        if outbox.bytes == 0 {
            outbox.pace.emptied(now);
        }
        let drained = outbox.congested && outbox.bytes < outbox.high_water() / 2;
        if drained {
            outbox.congested = false;
        }
        drop(outbox);
        if drained {
            self.tell(RelayEvent::Drained { region: self.id() });
        }
    }

    /// After a connection ended nobody shall wait for it to drain.
    pub(crate) fn end_congestion(&self) {
        let mut outbox = lock(&self.outbox);
        // The next connection may be another way.
        outbox.pace = Pace::default();
        let congested = std::mem::take(&mut outbox.congested);
        drop(outbox);
        if congested {
            self.tell(RelayEvent::Drained { region: self.id() });
        }
    }

    /// Throws away what waits too long already.
    pub(crate) fn drop_stale(&self) {
        let mut none = VecDeque::new();
        let mut outbox = lock(&self.outbox);
        while outbox.queue.front().is_some_and(|queued| queued.since.elapsed() > STALE) {
            let Some(queued) = outbox.queue.pop_front() else { break };
            outbox.bytes -= queued.batch.len();
            outbox.frames -= queued.batch.frames();
            none.push_back(queued);
        }
        drop(outbox);
        let frames: usize = none.iter().map(|queued| queued.batch.frames()).sum();
        self.counters.dropped_stale.fetch_add(frames as u64, Relaxed);
    }

    pub(crate) fn tell(&self, event: RelayEvent) {
        self.shared.inbox.push_event(event);
    }

    pub(crate) fn set_health(&self, text: Option<String>) {
        lock(&self.view).health.clone_from(&text);
        self.tell(RelayEvent::Health { region: self.id(), text });
    }

    pub(crate) fn set_phase(&self, phase: RelayPhase, address: Option<SocketAddr>) {
        let mut view = lock(&self.view);
        if phase == RelayPhase::Connected {
            view.error = None;
        } else {
            view.health = None;
        }
        view.phase = phase;
        view.address = address;
    }

    pub(crate) fn status(&self) -> RelayStatus {
        let view = lock(&self.view);
        let c = &self.counters;
        RelayStatus {
            region: self.id(),
            code: self.region.code.clone(),
            name: self.region.name.clone(),
            home: self.home.load(Relaxed),
            phase: view.phase.clone(),
            address: view.address,
            error: view.error.clone(),
            health: view.health.clone(),
            counters: RelayCounters {
                sent_bytes: c.sent_bytes.load(Relaxed),
                sent_packets: c.sent_packets.load(Relaxed),
                received_bytes: c.received_bytes.load(Relaxed),
                received_packets: c.received_packets.load(Relaxed),
                dropped_full: c.dropped_full.load(Relaxed),
                dropped_stale: c.dropped_stale.load(Relaxed),
                dropped_rate: c.dropped_rate.load(Relaxed),
                dropped_lost: c.dropped_lost.load(Relaxed),
                reads: c.reads.load(Relaxed),
                writes: c.writes.load(Relaxed),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DialerConfig;
    use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RelayNodeFields};
    use codervpn_wire::keys::NodePublic;

    fn region() -> Region {
        let node = RelayNodeFields { name: "1a".into(), host_name: "relay.invalid".into(), ..Default::default() };
        let fields = RegionFields { region_id: 1, nodes: vec![node], ..Default::default() };
        let map = DerpMapFields { region_scores: Vec::new(), regions: vec![(1, fields)] };
        DerpMap::from_fields(&map).0.regions.into_values().next().unwrap()
    }

    fn state() -> RegionState {
        let shared = Shared {
            dialer: Dialer::new(DialerConfig::default()).unwrap(),
            key: NodePrivate::from_bytes([7; 32]).unwrap(),
            access: RelayAccess::default(),
            inbox: Inbox::new(Arc::new(|| {})),
            receive_pool: Pool::for_receiving(),
            send_pool: Pool::for_sending(),
            started: Instant::now(),
        };
        RegionState::new(region(), Arc::new(shared))
    }

    fn batch(state: &RegionState) -> SendBatch {
        let mut batch = SendBatch::new(&state.shared.send_pool);
        batch.push(&NodePublic::from_wire([1; 32]), b"packet");
        batch
    }

    #[tokio::test(start_paused = true)]
    async fn a_region_is_needed_for_a_minute_after_use_and_always_as_home() {
        let state = state();
        assert!(!state.is_needed());
        state.touch();
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(state.is_needed());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(!state.is_needed());
        state.home.store(true, Relaxed);
        assert!(state.is_needed());
    }

    /// Fast path: what waits is bounded by time as well as by size.
    #[tokio::test(start_paused = true)]
    async fn stale_batches_are_not_sent() {
        let state = state();
        assert_eq!(state.send(batch(&state)), Sent::Queued);
        tokio::time::advance(STALE + Duration::from_millis(1)).await;
        assert_eq!(state.send(batch(&state)), Sent::Queued);
        let mut writing = VecDeque::new();
        state.take_queued(&mut writing, 8);
        assert_eq!(writing.len(), 1);
        assert_eq!(state.counters.dropped_stale.load(Relaxed), 1);
        state.finished(&writing[0].batch);
        let outbox = lock(&state.outbox);
        assert_eq!((outbox.bytes, outbox.frames), (0, 0));
    }

    /// Fast path, relay-shaped part: a slow connection is congested by what it needs 20 ms for, a fast one by 256 KiB.
    #[tokio::test(start_paused = true)]
    async fn what_waits_is_bounded_by_time() {
        let state = state();
        state.connected.store(true, Relaxed);
        let mut large = SendBatch::new(&state.shared.send_pool);
        for _ in 0..40 {
            large.push(&NodePublic::from_wire([1; 32]), &[0; 1280]);
        }
        let bytes = large.len();
        let again = || {
            let mut batch = SendBatch::new(&state.shared.send_pool);
            for _ in 0..40 {
                batch.push(&NodePublic::from_wire([1; 32]), &[0; 1280]);
            }
            batch
        };
        // Nothing is known: four batches are no congestion, a fifth is.
        assert_eq!(state.send(large), Sent::Queued);
        let mut sent = 1;
        while state.send(again()) == Sent::Queued {
            sent += 1;
        }
        assert_eq!(sent, HIGH_WATER / bytes);
        // It takes a batch every 20 ms.
        let mut writing = VecDeque::new();
        state.take_queued(&mut writing, 8);
        while let Some(queued) = writing.pop_front() {
            tokio::time::advance(Duration::from_millis(20)).await;
            state.finished(&queued.batch);
        }
        assert!(lock(&state.outbox).pace.rate.is_some());
        assert_eq!(state.shared.inbox.pop().0.map(|_| ()), Some(()), "drained");
        assert_eq!(state.send(again()), Sent::Queued);
        assert_eq!(state.send(again()), Sent::Congested);
        let more = std::iter::repeat_with(|| state.send(again())).take_while(|sent| *sent == Sent::Congested).count();
        assert_eq!(2 + more, PATIENCE);
        // It has become faster.
        state.take_queued(&mut writing, 8);
        while let Some(queued) = writing.pop_front() {
            state.finished(&queued.batch);
        }
        assert_eq!(state.send(again()), Sent::Queued);
        assert_eq!(lock(&state.outbox).high_water(), HIGH_WATER);
        // A new connection starts anew.
        state.end_congestion();
        assert_ne!(state.send(again()), Sent::Dropped);
    }
}
