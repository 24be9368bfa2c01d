//! The set of relay connections. Decides which regions are connected when
//! (data plane 2.9) and how failures are spaced.
//!
//! Every usable region of the map has one task. It sleeps until the region is
//! needed: because it is home, or because something was sent to it or wanted
//! from it within the last minute. Each region has a queue of its own, so a
//! slow relay delays nobody else.
//!
//! All methods may be called from any thread and none blocks: the data thread
//! calls [`Relays::send`] and [`Relays::receive`], and is woken by the callback
//! given in [`RelayOptions`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use codervpn_wire::derp_map::{DerpMap, Region};
use codervpn_wire::keys::NodePrivate;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tracing::debug;

pub use codervpn_wire::derp_map::RegionId;

pub use crate::inbox::{Incoming, RelayEvent};
pub use crate::region::{RelayCounters, RelayPhase, RelayStatus, Sent};

use crate::backoff::Backoff;
use crate::batch::{Pool, SendBatch};
use crate::dialer::Dialer;
use crate::inbox::Inbox;
use crate::lock::lock;
use crate::probe::{self, ProbeError};
use crate::region::{RegionState, Shared};
use crate::relay::{self, RelayAccess, RelayError};
use crate::relay_session::Session;

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

/// A repeated failure is told once; how loud is for the receiver to decide.
fn note_failure(state: &RegionState, error: &RelayError) {
    let reason = error.to_string();
    let region = state.id();
    let mut view = lock(&state.view);
    let news = view.error.as_deref() != Some(&reason);
    view.error = Some(reason.clone());
    drop(view);
    if news {
        debug!(%region, reason, "cannot connect to the relay");
        state.tell(RelayEvent::Failed { region, reason });
    } else {
        debug!(%region, reason, "still cannot connect to the relay");
    }
}
