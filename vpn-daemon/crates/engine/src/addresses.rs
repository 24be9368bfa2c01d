//! Which peer a UDP source address belongs to. Nothing from an address that is not here reaches a session (T-01).
//!
//! A ping that a peer sealed admits its source; only a pong proves that the peer is there (T-07), and takes an address
//! away from another peer. Entries are those of the peers' candidates, so their number is bounded by these.

use std::collections::HashMap;
use std::net::SocketAddr;

#[derive(Default)]
pub(crate) struct Addresses {
    owners: HashMap<SocketAddr, u32>,
    /// Datagrams come in runs.
    last: Option<(SocketAddr, u32)>,
}

impl Addresses {
    #[inline]
    pub(crate) fn slot_of(&mut self, address: SocketAddr) -> Option<u32> {
        if let Some((known, slot)) = self.last
            && known == address
        {
            return Some(slot);
        }
        let slot = *self.owners.get(&address)?;
        self.last = Some((address, slot));
        Some(slot)
    }

    /// The peer pinged from here. Another peer that was here first stays.
    pub(crate) fn admit(&mut self, address: SocketAddr, slot: u32) {
        self.owners.entry(address).or_insert(slot);
    }

    /// The peer answered from here.
    pub(crate) fn prove(&mut self, address: SocketAddr, slot: u32) {
        if self.owners.insert(address, slot).is_some_and(|before| before != slot) {
            self.last = None;
        }
    }

    pub(crate) fn remove(&mut self, address: SocketAddr, slot: u32) {
        if self.owners.get(&address) == Some(&slot) {
            self.owners.remove(&address);
            self.last = None;
        }
    }
}
