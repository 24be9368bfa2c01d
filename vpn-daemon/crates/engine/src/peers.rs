//! The table of all peers: found by id, by address, by key. Decides who owns an address or a key: the first who has it
//! keeps it (T-28).

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::time::Instant;

use codervpn_wire::keys::{DiscoPublic, NodePublic};
use slab::Slab;

use crate::command::PeerId;
use crate::lookup::Lookup;
use crate::peer::Peer;

/// Parties we know at once. A deployment's largest users have some hundred agents; beyond this a server is broken.
pub(crate) const MAX_PEERS: usize = 16 * 1024;

#[derive(Default)]
pub(crate) struct Peers {
    peers: Slab<Box<Peer>>,
    by_id: HashMap<PeerId, u32>,
    by_address: Lookup<Ipv6Addr>,
    by_key: Lookup<NodePublic>,
    by_disco: Lookup<DiscoPublic>,
}

impl Peers {
    /// Adds a peer. `None`: there are too many, or another peer owns all of its addresses.
    pub(crate) fn insert(
        &mut self,
        id: PeerId,
        destination: bool,
        addresses: &[Ipv6Addr],
        now: Instant,
    ) -> Option<u32> {
        let free: Vec<Ipv6Addr> = addresses.iter().copied().filter(|a| self.by_address.get(a).is_none()).collect();
        if free.is_empty() || self.peers.len() >= MAX_PEERS || self.by_id.contains_key(&id) {
            return None;
        }
        let entry = self.peers.vacant_entry();
        let slot = u32::try_from(entry.key()).ok()?;
        for address in &free {
            self.by_address.insert(*address, slot);
        }
        entry.insert(Box::new(Peer::new(id, slot, destination, free, now)));
        self.by_id.insert(id, slot);
        Some(slot)
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Option<Box<Peer>> {
        let peer = self.peers.try_remove(slot as usize)?;
        self.by_id.remove(&peer.id);
        for address in &peer.addresses {
            self.by_address.remove(address);
        }
        if let Some(key) = peer.key() {
            self.by_key.remove(&key);
        }
        if let Some(remote) = peer.remote {
            self.set_disco(slot, Some(remote.disco), None);
        }
        Some(peer)
    }

    /// Moves a peer from one disco key to another. A key that another peer has stays that peer's.
    pub(crate) fn set_disco(&mut self, slot: u32, old: Option<DiscoPublic>, new: Option<DiscoPublic>) {
        if let Some(old) = old {
            self.by_disco.remove_of(&old, slot);
        }
        if let Some(new) = new {
            self.by_disco.insert_if_free(new, slot);
        }
    }

    pub(crate) fn slot_of_disco(&self, key: &DiscoPublic) -> Option<u32> {
        self.by_disco.get(key)
    }

    /// Moves a peer from one key to another.
    pub(crate) fn set_key(&mut self, slot: u32, old: Option<NodePublic>, new: Option<NodePublic>) {
        if let Some(old) = old {
            self.by_key.remove(&old);
        }
        if let Some(new) = new {
            self.by_key.insert(new, slot);
        }
    }

    /// Gives a peer that is no destination the addresses of its newest node, except those of others.
    pub(crate) fn set_addresses(&mut self, slot: u32, addresses: &[Ipv6Addr]) {
        let Some(peer) = self.peers.get_mut(slot as usize) else { return };
        for address in peer.addresses.drain(..) {
            self.by_address.remove(&address);
        }
        for address in addresses {
            if self.by_address.insert_if_free(*address, slot) {
                peer.addresses.push(*address);
            }
        }
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Peer> {
        self.peers.get(slot as usize).map(|peer| &**peer)
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut Peer> {
        self.peers.get_mut(slot as usize).map(|peer| &mut **peer)
    }

    pub(crate) fn slot_of_id(&self, id: PeerId) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn slot_of_address(&mut self, address: Ipv6Addr) -> Option<u32> {
        self.by_address.find(address)
    }

    pub(crate) fn slot_of_key(&mut self, key: NodePublic) -> Option<u32> {
        self.by_key.find(key)
    }

    pub(crate) fn owner_of_address(&self, address: &Ipv6Addr) -> Option<u32> {
        self.by_address.get(address)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().map(|(_, peer)| &**peer)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.peers.iter_mut().map(|(_, peer)| &mut **peer)
    }

    /// Peers whose node is known.
    pub(crate) fn with_node(&self) -> usize {
        self.by_key.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.peers.len()
    }
}
