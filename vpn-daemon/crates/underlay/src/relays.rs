//! The set of relay connections. Decides which regions are connected when
//! (data plane 2.9), how failures are spaced, and how batches travel between
//! the data thread and the connections.
//!
//! Every usable region of the map has one task. It sleeps until the region is
//! needed: because it is home, or because something was sent to it or wanted
//! from it within the last minute. Each region has a queue of its own, so a
//! slow relay delays nobody else.
//!
//! All methods may be called from any thread and none blocks: the data thread
//! calls [`Relays::send`] and [`Relays::receive`], and is woken by the callback
//! given in [`RelayOptions`].

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use codervpn_wire::derp::GoneReason;
use codervpn_wire::derp_map::{DerpMap, Region};
use codervpn_wire::keys::{NodePrivate, NodePublic};
use futures_util::task::AtomicWaker;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

pub use codervpn_wire::derp_map::RegionId;

use crate::backoff::Backoff;
use crate::batch::{Pool, RelayBatch, SendBatch};
use crate::dialer::Dialer;
use crate::inbox::Inbox;
use crate::probe::{self, ProbeError};
use crate::relay::{self, RelayAccess, RelayError};
use crate::relay_session::Session;

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

/// How [`Relays`] works.
#[derive(Clone)]
pub struct RelayOptions {
    pub access: RelayAccess,
    /// Called when something can be received after nothing could. Must not
    /// block: write to an eventfd.
    pub wake: Arc<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for RelayOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RelayOptions")
    }
}

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

/// What comes from the relays.
#[derive(Debug)]
pub enum Incoming {
    Packets(RelayBatch),
    Event(RelayEvent),
}

/// What happened to a relay connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelayEvent {
    /// Packets can be sent and received now.
    Connected { region: RegionId },
    /// The connection ended; routes learnt on it are void.
    Disconnected { region: RegionId, reason: String },
    /// An attempt failed; it will be repeated while the region is needed.
    Failed { region: RegionId, reason: String },
    /// A hint: the relay does not have that peer (any more).
    PeerGone { region: RegionId, peer: NodePublic, reason: GoneReason },
    /// The relay's complaint, `None` when it is over.
    Health { region: RegionId, text: Option<String> },
    /// A congested region takes batches again.
    Drained { region: RegionId },
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

/// The handle. Cheap to clone; when the last clone goes, all connections end.
#[derive(Clone)]
pub struct Relays {
    set: Arc<Set>,
}

struct Set {
    shared: Arc<Shared>,
    regions: RwLock<BTreeMap<RegionId, Arc<RegionState>>>,
    home: Mutex<Option<RegionId>>,
    runtime: Handle,
}

impl Drop for Set {
    fn drop(&mut self) {
        let regions = self.regions.get_mut().unwrap_or_else(PoisonError::into_inner);
        for region in regions.values() {
            region.stop();
        }
    }
}

/// What all regions share.
pub(crate) struct Shared {
    dialer: Dialer,
    key: NodePrivate,
    access: RelayAccess,
    pub(crate) inbox: Inbox,
    pub(crate) receive_pool: Arc<Pool>,
    send_pool: Arc<Pool>,
    started: Instant,
}

impl Relays {
    /// To be called inside the runtime that shall carry the connections.
    pub fn new(dialer: Dialer, key: NodePrivate, options: RelayOptions) -> Relays {
        let shared = Shared {
            dialer,
            key,
            access: options.access,
            inbox: Inbox::new(options.wake),
            receive_pool: Pool::for_receiving(),
            send_pool: Pool::for_sending(),
            started: Instant::now(),
        };
        Relays {
            set: Arc::new(Set {
                shared: Arc::new(shared),
                regions: RwLock::default(),
                home: Mutex::new(None),
                runtime: Handle::current(),
            }),
        }
    }

    /// Replaces the map. Embedded relays are reached at the access URL
    /// whatever the map says (data plane 2.6). Regions whose definition did
    /// not change keep their connection, the others lose it.
    pub fn set_map(&self, map: &DerpMap) {
        let mut map = map.clone();
        self.rewrite(&mut map);
        let home = *lock(&self.set.home);
        let mut regions = self.set.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|id, state| {
            let same = map.regions.get(id).is_some_and(|region| same_definition(region, &state.region));
            if !same {
                state.stop();
            }
            same
        });
        for region in map.relay_regions() {
            if regions.contains_key(&region.id) {
                continue;
            }
            let state = Arc::new(RegionState::new(region.clone(), self.set.shared.clone()));
            state.home.store(home == Some(region.id), Relaxed);
            regions.insert(region.id, state.clone());
            self.set.runtime.spawn(run(state));
        }
    }

    fn rewrite(&self, map: &mut DerpMap) {
        let Some(url) = &self.set.shared.access.access_url else { return };
        let Some(target) = crate::dialer::Target::from_url(url) else { return };
        map.rewrite_embedded(&target.host, target.port, target.tls.is_none());
    }

    /// Keeps one region connected and tells all relays which it is.
    pub fn set_home(&self, home: Option<RegionId>) {
        *lock(&self.set.home) = home;
        for (id, state) in self.regions().iter() {
            let is_home = home == Some(*id);
            if state.home.swap(is_home, Relaxed) && !is_home {
                // The old home falls under the idle rule from now on.
                state.touch();
            }
            state.waker.wake();
        }
    }

    /// Opens a region's connection without sending anything yet.
    pub fn want(&self, region: RegionId) {
        if let Some(state) = self.regions().get(&region) {
            state.touch();
            state.waker.wake();
        }
    }

    /// An empty batch to fill.
    pub fn batch(&self) -> SendBatch {
        SendBatch::new(&self.set.shared.send_pool)
    }

    /// Queues a batch and connects the region if need be. Never blocks.
    pub fn send(&self, region: RegionId, batch: SendBatch) -> Sent {
        match self.regions().get(&region) {
            Some(state) => state.send(batch),
            None => Sent::NoSuchRegion,
        }
    }

    /// The next thing that came, in order per region. Never blocks.
    pub fn receive(&self) -> Option<Incoming> {
        let (incoming, resume) = self.set.shared.inbox.pop();
        if resume {
            for state in self.regions().values() {
                state.waker.wake();
            }
        }
        incoming
    }

    pub fn is_connected(&self, region: RegionId) -> bool {
        self.regions().get(&region).is_some_and(|state| state.connected.load(Relaxed))
    }

    /// After a change of networks: every open connection must answer a ping
    /// within three seconds or is replaced, and nobody waits for a back-off.
    pub fn check_links(&self) {
        for state in self.regions().values() {
            state.check.store(true, Relaxed);
            state.retry_now.notify_waiters();
            state.waker.wake();
        }
    }

    /// Measures the latency of every region's relay (data plane 3.3), all at
    /// the same time, at most `limit` long.
    pub async fn probe(&self, limit: Duration) -> Vec<(RegionId, Result<probe::RegionLatency, ProbeError>)> {
        let regions: Vec<Region> = self.regions().values().map(|state| state.region.clone()).collect();
        let shared = &self.set.shared;
        probe::probe_all(&shared.dialer, &shared.access, &regions, limit).await
    }

    pub fn status(&self) -> Vec<RelayStatus> {
        self.regions().values().map(|state| state.status()).collect()
    }

    /// Ends all connections and forgets the map.
    pub fn close(&self) {
        let mut regions = self.set.regions.write().unwrap_or_else(PoisonError::into_inner);
        for state in std::mem::take(&mut *regions).values() {
            state.stop();
        }
    }

    fn regions(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<RegionId, Arc<RegionState>>> {
        self.set.regions.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Relays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Relays")
    }
}

/// Two maps may list the same nodes in another order.
fn same_definition(a: &Region, b: &Region) -> bool {
    let key = |node: &codervpn_wire::derp_map::RelayNode| node.name.clone();
    let sorted = |region: &Region| {
        let mut region = region.clone();
        region.nodes.sort_by_key(key);
        region
    };
    sorted(a) == sorted(b)
}

/// What the data thread, the region's task and status displays share.
pub(crate) struct RegionState {
    pub(crate) region: Region,
    pub(crate) shared: Arc<Shared>,
    outbox: Mutex<Outbox>,
    /// Wakes the region's task, the only one that registers here.
    pub(crate) waker: AtomicWaker,
    pub(crate) home: AtomicBool,
    connected: AtomicBool,
    /// A link check is asked for.
    pub(crate) check: AtomicBool,
    retry_now: tokio::sync::Notify,
    stopped: CancellationToken,
    /// Milliseconds since `Shared::started`; 0 = never.
    last_use: AtomicU64,
    view: Mutex<View>,
    pub(crate) counters: Counters,
}

struct View {
    phase: RelayPhase,
    address: Option<SocketAddr>,
    error: Option<String>,
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
    fn new(region: Region, shared: Arc<Shared>) -> RegionState {
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

    fn stop(&self) {
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

    fn send(&self, batch: SendBatch) -> Sent {
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
    fn end_congestion(&self) {
        let congested = std::mem::take(&mut lock(&self.outbox).congested);
        if congested {
            self.tell(RelayEvent::Drained { region: self.id() });
        }
    }

    /// Throws away what waits too long already.
    fn drop_stale(&self) {
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

    fn set_phase(&self, phase: RelayPhase, address: Option<SocketAddr>) {
        let mut view = lock(&self.view);
        if phase == RelayPhase::Connected {
            view.error = None;
        } else {
            view.health = None;
        }
        view.phase = phase;
        view.address = address;
    }

    fn status(&self) -> RelayStatus {
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

/// The life of one region: wait until needed, connect, carry, and again.
async fn run(state: Arc<RegionState>) {
    let mut backoff = Backoff::default();
    loop {
        state.set_phase(RelayPhase::Unused, None);
        tokio::select! {
            () = state.stopped.cancelled() => return,
            () = needed(&state) => {}
        }
        state.set_phase(RelayPhase::BackingOff, None);
        tokio::select! {
            () = state.stopped.cancelled() => return,
            () = state.retry_now.notified() => {}
            () = tokio::time::sleep_until(backoff.next_attempt()) => {}
        }
        state.set_phase(RelayPhase::Connecting, None);
        backoff.attempt();
        let shared = &state.shared;
        let result = tokio::select! {
            () = state.stopped.cancelled() => return,
            result = relay::connect(&shared.dialer, &shared.access, &state.region, &shared.key) => result,
        };
        let greeted = match result {
            Ok(greeted) => greeted,
            Err(error) => {
                backoff.failed();
                note_failure(&state, &error);
                state.drop_stale();
                continue;
            }
        };
        let region = state.id();
        state.set_phase(RelayPhase::Connected, greeted.stream.peer_address());
        state.connected.store(true, Relaxed);
        debug!(%region, "relay connected");
        state.tell(RelayEvent::Connected { region });
        let mut session = Session::new(&state, greeted);
        let end = std::future::poll_fn(|cx| session.poll(cx)).await;
        let heard = session.heard();
        drop(session);
        state.connected.store(false, Relaxed);
        state.end_congestion();
        debug!(%region, reason = %end, "relay disconnected");
        state.tell(RelayEvent::Disconnected { region, reason: end.to_string() });
        if heard {
            backoff.heard();
        }
        match end {
            RelayError::Stopped => return,
            RelayError::Idle => {}
            RelayError::Restarting { reconnect_in, try_for } => backoff.restarting(reconnect_in, try_for),
            error => {
                backoff.failed();
                lock(&state.view).error = Some(error.to_string());
            }
        }
    }
}

async fn needed(state: &RegionState) {
    std::future::poll_fn(|cx| {
        state.waker.register(cx.waker());
        if state.is_needed() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// A repeated failure is told once at WARN, then at DEBUG.
fn note_failure(state: &RegionState, error: &RelayError) {
    let reason = error.to_string();
    let region = state.id();
    let mut view = lock(&state.view);
    let news = view.error.as_deref() != Some(&reason);
    view.error = Some(reason.clone());
    drop(view);
    if news {
        warn!(%region, reason, "cannot connect to the relay");
        state.tell(RelayEvent::Failed { region, reason });
    } else {
        debug!(%region, reason, "still cannot connect to the relay");
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialer::DialerConfig;
    use codervpn_wire::derp_map::{DerpMapFields, RegionFields, RelayNodeFields};

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
