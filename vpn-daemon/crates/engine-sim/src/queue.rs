//! What happens when: events in order of their time, and those of one instant in the order they were made.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::Time;

struct Entry<T> {
    at: Time,
    number: u64,
    event: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    /// The heap hands out the greatest: the earliest is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

pub(crate) struct Queue<T> {
    heap: BinaryHeap<Entry<T>>,
    number: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), number: 0 }
    }
}

impl<T> Queue<T> {
    pub(crate) fn push(&mut self, at: Time, event: T) {
        self.number += 1;
        self.heap.push(Entry { at, number: self.number, event });
    }

    pub(crate) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|entry| entry.at)
    }

    pub(crate) fn pop_due(&mut self, now: Time) -> Option<T> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|entry| entry.event)
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }
}
