//! Slots by what names them on the data path. Remembers the last hit, since packets come in runs.

use std::collections::HashMap;
use std::hash::Hash;

pub(crate) struct Lookup<K> {
    slots: HashMap<K, u32>,
    last: Option<(K, u32)>,
}

impl<K> Default for Lookup<K> {
    fn default() -> Self {
        Self { slots: HashMap::new(), last: None }
    }
}

impl<K: Copy + Eq + Hash> Lookup<K> {
    #[inline]
    pub(crate) fn find(&mut self, key: K) -> Option<u32> {
        if let Some((known, slot)) = self.last
            && known == key
        {
            return Some(slot);
        }
        let slot = *self.slots.get(&key)?;
        self.last = Some((key, slot));
        Some(slot)
    }

    /// As `find`, for those who only look.
    pub(crate) fn get(&self, key: &K) -> Option<u32> {
        self.slots.get(key).copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whoever had the key before has it no longer.
    pub(crate) fn insert(&mut self, key: K, slot: u32) {
        self.slots.insert(key, slot);
        self.last = None;
    }

    /// False if somebody has the key, who keeps it.
    pub(crate) fn insert_if_free(&mut self, key: K, slot: u32) -> bool {
        let free = !self.slots.contains_key(&key);
        if free {
            self.insert(key, slot);
        }
        free
    }

    pub(crate) fn remove(&mut self, key: &K) {
        self.slots.remove(key);
        self.last = None;
    }

    /// Removes the key if `slot` has it.
    pub(crate) fn remove_of(&mut self, key: &K, slot: u32) {
        if self.get(key) == Some(slot) {
            self.remove(key);
        }
    }
}
