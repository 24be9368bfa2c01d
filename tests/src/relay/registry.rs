//! Decides which connection a key's packets go to, and who is told when it goes.
//!
//! A key may have several connections; the one that spoke last is active and receives. Frames of a client make its
//! connection active, so a client that changed networks gets its packets at once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use codervpn_wire::derp::GoneReason;
use codervpn_wire::keys::NodePublic;

use super::queue::Queue;

/// Destinations remembered for each source; a client with more of them loses hints only.
const ROUTES: usize = 4096;

/// All clients of a relay.
#[derive(Debug, Default)]
pub(super) struct Registry {
    clients: RwLock<HashMap<NodePublic, Client>>,
    next: AtomicU64,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Client {
    /// Newest speaker last; the last one is active.
    connections: Vec<Seat>,
    /// Whom it has sent to, and on which connection of theirs.
    sent_to: HashMap<NodePublic, u64>,
}

#[derive(Debug, Clone)]
struct Seat {
    number: u64,
    queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Counters {
    forwarded: AtomicU64,
    bytes: AtomicU64,
    unknown: AtomicU64,
    overflow: AtomicU64,
    to_self: AtomicU64,
    homes: AtomicU64,
}

/// What a relay has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelayCounters {
    /// Packets put into a client's queue.
    pub forwarded: u64,
    pub bytes: u64,
    /// Packets for keys that are not here.
    pub unknown: u64,
    /// Packets dropped because a client did not read.
    pub overflow: u64,
    /// Packets of a client to itself (T-18).
    pub to_self: u64,
    /// Connections that have said that this is their home.
    pub homes: u64,
}

/// One connection's place.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: NodePublic,
    pub(super) number: u64,
    pub(super) queue: Arc<Queue>,
}

impl Registry {
    /// A new connection is active at once.
    pub(super) fn enter(&self, key: NodePublic) -> Entry {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let queue = Arc::new(Queue::default());
        let seat = Seat { number, queue: Arc::clone(&queue) };
        self.write().entry(key).or_default().connections.push(seat);
        Entry { key, number, queue }
    }

    /// Forgets a connection; when it was its key's last, those it sent to are told.
    pub(super) fn leave(&self, entry: &Entry) {
        let mut clients = self.write();
        let Some(client) = clients.get_mut(&entry.key) else { return };
        client.connections.retain(|seat| seat.number != entry.number);
        if !client.connections.is_empty() {
            return;
        }
        let Some(client) = clients.remove(&entry.key) else { return };
        for (to, number) in client.sent_to {
            let seats = clients.get(&to).map(|other| &other.connections[..]).unwrap_or_default();
            if let Some(seat) = seats.iter().find(|seat| seat.number == number) {
                seat.queue.peer_gone(entry.key, GoneReason::Disconnected);
            }
        }
    }

    /// Whoever spoke last is active.
    pub(super) fn spoke(&self, entry: &Entry) {
        let is_active = |client: &Client| client.connections.last().map(|seat| seat.number) == Some(entry.number);
        if self.read().get(&entry.key).is_none_or(is_active) {
            return;
        }
        if let Some(client) = self.write().get_mut(&entry.key)
            && let Some(at) = client.connections.iter().position(|seat| seat.number == entry.number)
        {
            let seat = client.connections.remove(at);
            client.connections.push(seat);
        }
    }

    /// Where packets for `to` go; remembers that `from` sent there.
    pub(super) fn route(&self, from: &Entry, to: &NodePublic) -> Option<Arc<Queue>> {
        let seat = {
            let clients = self.read();
            let Some(seat) = clients.get(to).and_then(|client| client.connections.last()).cloned() else {
                self.counters.unknown.fetch_add(1, Ordering::Relaxed);
                return None;
            };
            if clients.get(&from.key).is_some_and(|client| client.sent_to.get(to) == Some(&seat.number)) {
                return Some(seat.queue);
            }
            seat
        };
        if let Some(client) = self.write().get_mut(&from.key)
            && (client.sent_to.len() < ROUTES || client.sent_to.contains_key(to))
        {
            client.sent_to.insert(*to, seat.number);
        }
        Some(seat.queue)
    }

    pub(super) fn count(&self, packets: u64, bytes: usize, dropped: u64, to_self: bool) {
        self.counters.forwarded.fetch_add(packets, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.counters.overflow.fetch_add(dropped, Ordering::Relaxed);
        self.counters.to_self.fetch_add(if to_self { packets } else { 0 }, Ordering::Relaxed);
    }

    pub(super) fn count_home(&self) {
        self.counters.homes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn clients(&self) -> Vec<NodePublic> {
        self.read().keys().copied().collect()
    }

    pub(super) fn counters(&self) -> RelayCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { forwarded, bytes, unknown, overflow, to_self, homes } = &self.counters;
        RelayCounters {
            forwarded: read(forwarded),
            bytes: read(bytes),
            unknown: read(unknown),
            overflow: read(overflow),
            to_self: read(to_self),
            homes: read(homes),
        }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, HashMap<NodePublic, Client>> {
        self.clients.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<NodePublic, Client>> {
        self.clients.write().unwrap_or_else(PoisonError::into_inner)
    }
}
