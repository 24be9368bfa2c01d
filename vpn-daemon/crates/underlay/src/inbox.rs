//! What the relays delivered and the data thread has not taken yet. Decides how
//! much that may be, and when a connection stops being read because of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use codervpn_wire::derp::GoneReason;
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::NodePublic;

use crate::batch::RelayBatch;
use crate::lock::lock;

/// Received bytes that may wait for the data thread. It takes less than 50 ms
/// to work them off; until then the relays are not read.
const INBOX_BYTES: usize = 2 * 1024 * 1024;
/// Batches that may wait, since each owns a buffer.
const INBOX_BATCHES: usize = 64;
/// Batches up to this size are joined with the one that waits already.
const JOIN: usize = 16 * 1024;
/// Hints (peer gone, health) that may wait; further ones are dropped.
const INBOX_EVENTS: usize = 1024;

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

/// What waits for the data thread, from all regions.
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct InboxState {
    items: VecDeque<Incoming>,
    bytes: usize,
    batches: usize,
    /// Some region stopped reading because of the bounds.
    paused: bool,
}

impl Inbox {
    pub(crate) fn new(wake: Arc<dyn Fn() + Send + Sync>) -> Inbox {
        Inbox { state: Mutex::default(), wake }
    }

    /// Whether a connection may be read. If not, its task is woken when it may.
    pub(crate) fn has_room(&self) -> bool {
        let mut state = lock(&self.state);
        let room = state.bytes < INBOX_BYTES && state.batches < INBOX_BATCHES;
        state.paused |= !room;
        room
    }

    /// Copies whole frames into the batch that waits last, if it is of the
    /// same region, has room, and there are few.
    pub(crate) fn join(&self, region: RegionId, frames: &[u8], packets: usize) -> bool {
        if frames.len() > JOIN {
            return false;
        }
        let mut state = lock(&self.state);
        let joined = match state.items.back_mut() {
            Some(Incoming::Packets(last)) => last.region == region && last.append(frames, packets),
            _ => false,
        };
        if joined {
            state.bytes += frames.len();
        }
        joined
    }

    pub(crate) fn push_batch(&self, batch: RelayBatch) {
        let mut state = lock(&self.state);
        state.bytes += batch.len();
        state.batches += 1;
        self.push(state, Incoming::Packets(batch));
    }

    pub(crate) fn push_event(&self, event: RelayEvent) {
        let state = lock(&self.state);
        let hint = matches!(event, RelayEvent::PeerGone { .. } | RelayEvent::Health { .. });
        if hint && state.items.len() - state.batches >= INBOX_EVENTS {
            return;
        }
        self.push(state, Incoming::Event(event));
    }

    fn push(&self, mut state: MutexGuard<'_, InboxState>, incoming: Incoming) {
        let first = state.items.is_empty();
        state.items.push_back(incoming);
        drop(state);
        if first {
            (self.wake)();
        }
    }

    pub(crate) fn pop(&self) -> (Option<Incoming>, bool) {
        let mut state = lock(&self.state);
        let incoming = state.items.pop_front();
        if let Some(Incoming::Packets(batch)) = &incoming {
            state.bytes -= batch.len();
            state.batches -= 1;
        }
        let resume = state.paused && state.bytes < INBOX_BYTES / 2 && state.batches < INBOX_BATCHES / 2;
        if resume {
            state.paused = false;
        }
        (incoming, resume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Pool;

    /// A lagging consumer stops the reading, and going on wakes it.
    #[test]
    fn the_inbox_is_bounded_and_joins_small_batches() {
        let inbox = Inbox::new(Arc::new(|| {}));
        let pool = Pool::for_receiving();
        let id = RegionId::new(1).unwrap();
        let small = [0u8; 100];
        let make = || {
            let mut buffer = pool.take();
            buffer.extend_from_slice(&small);
            RelayBatch::new(id, buffer, 1, &pool)
        };
        inbox.push_batch(make());
        assert!(inbox.join(id, &small, 1));
        assert!(!inbox.join(RegionId::new(2).unwrap(), &small, 1));
        for _ in 1..INBOX_BATCHES {
            assert!(inbox.has_room());
            inbox.push_batch(make());
        }
        assert!(!inbox.has_room());
        let (Some(Incoming::Packets(first)), false) = inbox.pop() else { panic!() };
        assert_eq!((first.count(), first.len()), (2, 200));
        assert!((0..INBOX_BATCHES).any(|_| inbox.pop().1), "reading never resumed");
        let hints = || RelayEvent::Health { region: id, text: None };
        (0..2 * INBOX_EVENTS).for_each(|_| inbox.push_event(hints()));
        let inbox = lock(&inbox.state);
        assert_eq!(inbox.items.len() - inbox.batches, INBOX_EVENTS);
    }
}
