//! What the two tasks and all handles of a connection share: the outgoing
//! queue, requests that wait for replies, and what arrived and was not fetched.
//!
//! One lock guards it, held only for moves in memory, never across a wait.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError, oneshot, watch};

use super::{CloseReason, Limits, RequestError, SendError, Slot};
use crate::frame::{self, MAX_BODY};
use crate::ids::{RequestId, RequestIds, Served};
use crate::rpc::{self, End, ReceiveBody, SendBody};
use crate::version::Version;

/// Room for one frame in the outgoing queue.
pub(super) type Room = OwnedSemaphorePermit;

pub(super) struct Shared<E: End> {
    pub(super) version: Version,
    pub(super) limits: Limits,
    state: Mutex<State<E>>,
    /// One permit for each frame that may still be queued.
    room: Arc<Semaphore>,
    /// A frame is queued, or the writer is to finish.
    writable: Notify,
    /// Something arrived, or the connection ended. One task waits for it.
    arrived: Notify,
    phase: watch::Sender<Phase>,
    read_ended: watch::Sender<bool>,
}

struct State<E: End> {
    /// False from the beginning of a close on.
    accepting: bool,
    queue: VecDeque<Queued>,
    ids: RequestIds,
    waiting: HashMap<RequestId, oneshot::Sender<Option<ReceiveBody<E>>>>,
    served: Served,
    inbox: VecDeque<(Arrived<E>, usize)>,
    /// Sum of the sizes of one-way messages in `inbox`.
    unread_bytes: usize,
    unread: usize,
    dropped: u64,
    discard: bool,
}

#[derive(Debug, Clone)]
enum Phase {
    Open,
    /// What is queued is being written.
    Closing,
    Ended(CloseReason),
}

/// A frame that waits for the writer.
struct Queued {
    frame: Bytes,
    place: Place,
}

enum Place {
    /// Gives its room back when it leaves the queue.
    Room {
        _room: Room,
    },
    Slot(Slot),
    /// The last frame, for which there is always room.
    Last,
}

pub(super) enum Arrived<E: End> {
    OneWay(ReceiveBody<E>),
    Request(RequestId, ReceiveBody<E>),
}

pub(super) enum Next {
    Frame(Bytes),
    /// Everything is written and nothing more will come.
    Closed,
}

impl<E: End> Shared<E> {
    pub(super) fn new(version: Version, limits: Limits) -> Self {
        Self {
            version,
            state: Mutex::new(State {
                accepting: true,
                queue: VecDeque::new(),
                ids: RequestIds::default(),
                waiting: HashMap::new(),
                served: Served::default(),
                inbox: VecDeque::new(),
                unread_bytes: 0,
                unread: 0,
                dropped: 0,
                discard: false,
            }),
            room: Arc::new(Semaphore::new(limits.queued_frames)),
            writable: Notify::new(),
            arrived: Notify::new(),
            phase: watch::Sender::new(Phase::Open),
            read_ended: watch::Sender::new(false),
            limits,
        }
    }

    fn state(&self) -> MutexGuard<'_, State<E>> {
        // No code under the lock panics half way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- Sending ----------------------------------------------------------

    pub(super) async fn room(&self) -> Result<Room, SendError> {
        Arc::clone(&self.room).acquire_owned().await.map_err(|_| self.closed_error())
    }

    pub(super) fn try_room(&self) -> Result<Room, SendError> {
        Arc::clone(&self.room).try_acquire_owned().map_err(|error| match error {
            TryAcquireError::NoPermits => SendError::Full,
            TryAcquireError::Closed => self.closed_error(),
        })
    }

    pub(super) fn push(&self, frame: Bytes, room: Room) -> Result<(), SendError> {
        self.enqueue(frame, Place::Room { _room: room })
    }

    pub(super) fn publish(&self, slot: Slot, frame: Bytes) -> Result<(), SendError> {
        self.enqueue(frame, Place::Slot(slot))
    }

    fn enqueue(&self, frame: Bytes, place: Place) -> Result<(), SendError> {
        let mut state = self.state();
        if !state.accepting {
            drop(state);
            return Err(self.closed_error());
        }
        if let Place::Slot(slot) = place {
            // The queue holds `queued_frames` and one of each slot at most.
            state.queue.retain(|queued| !matches!(queued.place, Place::Slot(other) if other == slot));
        }
        state.queue.push_back(Queued { frame, place });
        drop(state);
        self.writable.notify_one();
        Ok(())
    }

    /// Queues the last frame and begins to close.
    pub(super) fn push_last(&self, frame: Bytes) -> Result<(), SendError> {
        let mut state = self.state();
        if !state.accepting {
            drop(state);
            return Err(self.closed_error());
        }
        state.queue.push_back(Queued { frame, place: Place::Last });
        self.begin_close(state);
        Ok(())
    }

    pub(super) fn send_request(self: &Arc<Self>, body: SendBody<E>, room: Room) -> Result<Waiting<E>, RequestError> {
        let mut state = self.state();
        if !state.accepting {
            drop(state);
            return Err(self.closed_error().into());
        }
        let Some(id) = state.ids.next_id() else {
            return Err(RequestError::NotSupported);
        };
        let frame = frame::encode(&rpc::request::<E::Send>(id, body), MAX_BODY)?;
        let (sender, receiver) = oneshot::channel();
        state.waiting.insert(id, sender);
        state.queue.push_back(Queued { frame, place: Place::Room { _room: room } });
        drop(state);
        self.writable.notify_one();
        Ok(Waiting { id, receiver, shared: Arc::clone(self) })
    }

    /// For the writer.
    pub(super) async fn next_frame(&self) -> Next {
        loop {
            {
                let mut state = self.state();
                if let Some(queued) = state.queue.pop_front() {
                    return Next::Frame(queued.frame);
                }
                if !state.accepting {
                    return Next::Closed;
                }
            }
            self.writable.notified().await;
        }
    }

    // ---- Receiving --------------------------------------------------------

    pub(super) fn replied(&self, id: RequestId, body: Option<ReceiveBody<E>>) {
        let waiting = self.state().waiting.remove(&id);
        match waiting {
            // The requester may have given up in this very moment.
            Some(sender) => drop(sender.send(body)),
            None => tracing::debug!(%id, "reply to no request of ours dropped"),
        }
    }

    pub(super) fn requested(&self, id: RequestId, body: ReceiveBody<E>) -> Result<(), CloseReason> {
        let mut state = self.state();
        if state.discard || !state.accepting {
            return Ok(());
        }
        if !state.served.begin(id) {
            tracing::warn!(%id, "second request with an id that is being served dropped");
            return Ok(());
        }
        if state.served.len() > self.limits.open_requests {
            tracing::error!(role = %E::ROLE, "too many requests at once");
            return Err(CloseReason::TooManyRequests);
        }
        state.inbox.push_back((Arrived::Request(id, body), 0));
        drop(state);
        self.arrived.notify_one();
        Ok(())
    }

    pub(super) fn notified(&self, body: ReceiveBody<E>, size: usize) {
        let mut state = self.state();
        if state.discard {
            return;
        }
        state.inbox.push_back((Arrived::OneWay(body), size));
        state.unread += 1;
        state.unread_bytes += size;
        while state.unread > self.limits.unread_messages
            || (state.unread_bytes > self.limits.unread_bytes && state.unread > 1)
        {
            let oldest = state.inbox.iter().position(|(arrived, _)| matches!(arrived, Arrived::OneWay(_)));
            let Some((_, size)) = oldest.and_then(|oldest| state.inbox.remove(oldest)) else {
                break;
            };
            state.unread -= 1;
            state.unread_bytes -= size;
            state.dropped += 1;
            if state.dropped == 1 {
                tracing::warn!(role = %E::ROLE, "messages arrive faster than they are handled; the oldest are dropped");
            }
        }
        drop(state);
        self.arrived.notify_one();
    }

    /// For the one inbox. What arrived before the end is still handed out.
    pub(super) async fn next_arrived(&self) -> Option<Arrived<E>> {
        loop {
            let ended = matches!(*self.phase.borrow(), Phase::Ended(_));
            {
                let mut state = self.state();
                if let Some((arrived, size)) = state.inbox.pop_front() {
                    if matches!(arrived, Arrived::OneWay(_)) {
                        state.unread -= 1;
                        state.unread_bytes -= size;
                    }
                    return Some(arrived);
                }
            }
            if ended {
                return None;
            }
            self.arrived.notified().await;
        }
    }

    pub(super) fn dropped(&self) -> u64 {
        self.state().dropped
    }

    pub(super) fn end_served(&self, id: RequestId) {
        self.state().served.end(id);
    }

    pub(super) fn discard_incoming(&self) {
        let mut state = self.state();
        state.discard = true;
        state.inbox.clear();
    }

    // ---- Ending -----------------------------------------------------------

    pub(super) fn close(&self) {
        let state = self.state();
        if state.accepting {
            self.begin_close(state);
        }
    }

    fn begin_close(&self, mut state: MutexGuard<'_, State<E>>) {
        state.accepting = false;
        // Dropped senders fail the requests that wait.
        state.waiting.clear();
        drop(state);
        self.room.close();
        self.phase.send_if_modified(|phase| {
            let open = matches!(phase, Phase::Open);
            if open {
                *phase = Phase::Closing;
            }
            open
        });
        self.writable.notify_one();
    }

    /// Ends everything at once; the first reason stays.
    pub(super) fn end(&self, reason: CloseReason) {
        self.phase.send_if_modified(|phase| {
            let first = !matches!(phase, Phase::Ended(_));
            if first {
                *phase = Phase::Ended(reason);
            }
            first
        });
        let mut state = self.state();
        state.accepting = false;
        state.waiting.clear();
        state.queue.clear();
        drop(state);
        self.room.close();
        self.arrived.notify_one();
    }

    /// Nothing more will be read. While we close, what is queued is still written.
    pub(super) fn reading_ended(&self, reason: CloseReason) {
        self.read_ended.send_replace(true);
        if !matches!(*self.phase.borrow(), Phase::Closing) {
            self.end(reason);
        }
    }

    pub(super) async fn reading_has_ended(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.read_ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// The time at which an orderly close gives up.
    pub(super) async fn close_is_due(&self) {
        let closing = |phase: &Phase| !matches!(phase, Phase::Open);
        let _ = self.phase.subscribe().wait_for(closing).await;
        tokio::time::sleep(self.limits.close_within).await;
    }

    pub(super) async fn ended(&self) -> CloseReason {
        let mut phase = self.phase.subscribe();
        let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_))).await;
        match ended.as_deref() {
            Ok(Phase::Ended(reason)) => reason.clone(),
            _ => CloseReason::Local,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        !self.state().accepting
    }

    fn closed_error(&self) -> SendError {
        SendError::Closed(self.reason())
    }

    fn reason(&self) -> CloseReason {
        match &*self.phase.borrow() {
            Phase::Ended(reason) => reason.clone(),
            Phase::Open | Phase::Closing => CloseReason::Local,
        }
    }
}

/// A request whose reply is awaited. However the wait ends, its entry in the
/// table goes.
pub(super) struct Waiting<E: End> {
    id: RequestId,
    receiver: oneshot::Receiver<Option<ReceiveBody<E>>>,
    shared: Arc<Shared<E>>,
}

impl<E: End> Waiting<E> {
    pub(super) async fn reply(mut self) -> Result<Option<ReceiveBody<E>>, CloseReason> {
        let reply = (&mut self.receiver).await;
        reply.map_err(|_| self.shared.reason())
    }
}

impl<E: End> Drop for Waiting<E> {
    fn drop(&mut self) {
        self.shared.state().waiting.remove(&self.id);
    }
}

/// Closes the connection when the last handle is gone.
pub(super) struct Guard<E: End>(pub(super) Arc<Shared<E>>);

impl<E: End> Deref for Guard<E> {
    type Target = Arc<Shared<E>>;

    fn deref(&self) -> &Arc<Shared<E>> {
        &self.0
    }
}

impl<E: End> Drop for Guard<E> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
impl<E: End> Shared<E> {
    pub(super) fn requests_waiting(&self) -> usize {
        self.state().waiting.len()
    }

    pub(super) fn queued(&self) -> (usize, usize) {
        let state = self.state();
        let bytes = state.queue.iter().map(|queued| queued.frame.len()).sum();
        (state.queue.len(), bytes)
    }
}
