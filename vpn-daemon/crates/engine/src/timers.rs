//! When which peer has to be looked at next. Decides the order; what happens then is the peer's business.
//!
//! A heap with lazy deletion: an entry counts only while its peer still names that instant as its next one. A peer is
//! pushed again only for an earlier instant than the one it waits for, so at most a few stale entries per peer exist at
//! any time, nothing scans all peers, and once the heap has grown to its size a packet never allocates.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

#[derive(Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
}

impl Timers {
    /// Wakes `slot` at `at`, unless it already waits for an earlier instant. `scheduled` is the peer's own note.
    pub(crate) fn schedule(&mut self, slot: u32, scheduled: &mut Option<Instant>, at: Instant) {
        if scheduled.is_some_and(|earlier| earlier <= at) {
            return;
        }
        *scheduled = Some(at);
        self.heap.push(Reverse((at, slot)));
    }

    /// The first entry that is due. The caller compares it with the peer's own note and skips it if they differ.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<(Instant, u32)> {
        let &Reverse((at, slot)) = self.heap.peek()?;
        if at > now {
            return None;
        }
        self.heap.pop();
        Some((at, slot))
    }

    /// The instant of the first entry for which `live` holds; the stale ones before it are thrown away.
    pub(crate) fn next(&mut self, live: impl Fn(Instant, u32) -> bool) -> Option<Instant> {
        while let Some(&Reverse((at, slot))) = self.heap.peek() {
            if live(at, slot) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_earlier_instant_replaces_a_later_one_and_not_the_other_way_round() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut timers = Timers::default();
        let mut note = None;
        timers.schedule(7, &mut note, at(10));
        timers.schedule(7, &mut note, at(20));
        assert_eq!(note, Some(at(10)));
        timers.schedule(7, &mut note, at(5));
        assert_eq!(timers.next(|when, slot| slot == 7 && note == Some(when)), Some(at(5)));
        assert_eq!(timers.pop_due(at(4)), None);
        assert_eq!(timers.pop_due(at(5)), Some((at(5), 7)));
        note = None;
        assert_eq!(timers.next(|when, _| note == Some(when)), None, "the stale entry is gone");
    }
}
