//! Which peer a UDP source address belongs to. Nothing from an address that is not here reaches a session (T-01).
//!
//! A ping that a peer sealed admits its source; only a pong proves that the peer is there (T-07), and takes an address
//! away from another peer. Entries are those of the peers' candidates, so their number is bounded by these.

use std::net::SocketAddr;

use crate::lookup::Lookup;

#[derive(Default)]
pub(crate) struct Addresses(Lookup<SocketAddr>);

impl Addresses {
    #[inline]
    pub(crate) fn slot_of(&mut self, address: SocketAddr) -> Option<u32> {
        self.0.find(address)
    }

    /// The peer pinged from here. Another peer that was here first stays.
    pub(crate) fn admit(&mut self, address: SocketAddr, slot: u32) {
        self.0.insert_if_free(address, slot);
    }

    /// The peer answered from here.
    pub(crate) fn prove(&mut self, address: SocketAddr, slot: u32) {
        if self.0.get(&address) != Some(slot) {
            self.0.insert(address, slot);
        }
    }

    pub(crate) fn remove(&mut self, address: SocketAddr, slot: u32) {
        self.0.remove_of(&address, slot);
    }
}
