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
const HIGH_WATER: usize = 256 * 1024;
/// Below this it may go on.
const LOW_WATER: usize = 128 * 1024;
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
    /// Packets not sent: queue full, too old, over the relay's rate limit, or
    /// lost with the connection.
    pub dropped_packets: u64,
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
    pub(crate) dropped_packets: AtomicU64,
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
        if outbox.bytes + batch.len() > QUEUE_BYTES || outbox.frames + frames > QUEUE_FRAMES {
            drop(outbox);
            self.counters.dropped_packets.fetch_add(frames as u64, Relaxed);
            return Sent::Dropped;
        }
        outbox.bytes += batch.len();
        outbox.frames += frames;
        outbox.queue.push_back(Queued { batch, since: Instant::now() });
        // Waiting for a connection is no congestion: others may be sent to.
        outbox.congested |= connected && outbox.bytes > HIGH_WATER;
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
        self.counters.dropped_packets.fetch_add(taken as u64, Relaxed);
    }

    /// A batch left `writing`, sent or not.
    pub(crate) fn finished(&self, batch: &SendBatch) {
        let mut outbox = lock(&self.outbox);
        outbox.bytes -= batch.len();
        outbox.frames -= batch.frames();
        let drained = outbox.congested && outbox.bytes < LOW_WATER;
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
        let congested = std::mem::take(&mut lock(&self.outbox).congested);
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
        self.counters.dropped_packets.fetch_add(frames as u64, Relaxed);
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
                dropped_packets: c.dropped_packets.load(Relaxed),
                reads: c.reads.load(Relaxed),
                writes: c.writes.load(Relaxed),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialer::DialerConfig;
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
        assert_eq!(state.counters.dropped_packets.load(Relaxed), 1);
        state.finished(&writing[0].batch);
        let outbox = lock(&state.outbox);
        assert_eq!((outbox.bytes, outbox.frames), (0, 0));
    }
}
