//! Decides which numbers requests carry, and which of a peer's are taken.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU64;

/// Number of a request within one connection and direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(NonZeroU64);

impl RequestId {
    /// `None` for 0, which on the wire means "no id".
    #[must_use]
    pub fn new(id: u64) -> Option<Self> {
        NonZeroU64::new(id).map(Self)
    }

    #[must_use]
    pub fn to_u64(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Gives out 1, 2, 3, … and none of them twice.
#[derive(Debug, Default)]
pub struct RequestIds {
    last: u64,
}

impl RequestIds {
    /// `None` only after 2⁶⁴ − 1 requests.
    pub fn next_id(&mut self) -> Option<RequestId> {
        self.last = self.last.checked_add(1)?;
        RequestId::new(self.last)
    }
}

/// The requests of the peer that still wait for our reply.
#[derive(Debug, Default)]
pub struct Served(BTreeSet<RequestId>);

impl Served {
    /// False when a request with this id is being served already.
    pub fn begin(&mut self, id: RequestId) -> bool {
        self.0.insert(id)
    }

    pub fn end(&mut self, id: RequestId) {
        self.0.remove(&id);
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_count_from_one() {
        let mut ids = RequestIds::default();
        assert_eq!(ids.next_id().map(RequestId::to_u64), Some(1));
        assert_eq!(ids.next_id().map(RequestId::to_u64), Some(2));
        ids.last = u64::MAX;
        assert_eq!(ids.next_id(), None, "an id is never reused");
    }

    #[test]
    fn an_id_is_served_once_at_a_time() {
        let mut served = Served::default();
        let id = RequestId::new(9).unwrap();
        assert!(served.begin(id));
        assert!(!served.begin(id));
        served.end(id);
        assert!(served.is_empty());
        assert!(served.begin(id));
    }
}
