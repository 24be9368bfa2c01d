//! Decides what waits for a client and what is dropped when it does not read: two bounded queues, so that a flood of data
//! does not push out path discovery, and a few small things of the relay itself.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use codervpn_wire::derp::{GoneReason, write_peer_gone, write_pong};
use codervpn_wire::keys::NodePublic;
use tokio::sync::Notify;

/// Packets in each queue, as in Coder's fork of the relay.
const PACKETS: usize = 512;
/// Bytes in both together; without it 512 packets could be 32 MiB.
const BYTES: usize = 4 * 1024 * 1024;
/// PeerGone that wait; they are hints.
const HINTS: usize = 256;

/// What waits for one connection.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    some: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    disco: Frames,
    data: Frames,
    pong: Option<[u8; 8]>,
    gone: VecDeque<(NodePublic, GoneReason)>,
}

/// Frames with packets, back to back, so that they pass from the reader of one client to the writer of another without an
/// allocation for each, and mostly without being copied.
#[derive(Debug, Default)]
pub(super) struct Frames {
    bytes: Vec<u8>,
    /// Bytes in front that are gone already.
    start: usize,
    lengths: VecDeque<usize>,
}

impl Frames {
    /// Appends what `write` writes as one frame.
    pub(super) fn add(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let before = self.bytes.len();
        write(&mut self.bytes);
        if self.bytes.len() > before {
            self.lengths.push_back(self.bytes.len() - before);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.lengths.len()
    }

    fn bytes(&self) -> usize {
        self.bytes.len() - self.start
    }

    fn drop_oldest(&mut self) -> Option<usize> {
        let length = self.lengths.pop_front()?;
        self.start += length;
        Some(length)
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.lengths.clear();
        self.start = 0;
    }

    /// Moves everything behind what is here.
    fn append(&mut self, other: &mut Frames) {
        if self.lengths.is_empty() {
            std::mem::swap(self, other);
        } else {
            // A queue that is never quite empty must not grow for ever.
            if self.start > self.bytes() {
                self.bytes.drain(..self.start);
                self.start = 0;
            }
            self.bytes.extend_from_slice(other.bytes.get(other.start..).unwrap_or_default());
            self.lengths.append(&mut other.lengths);
        }
        other.clear();
    }

    /// Moves frames to `out` while that is shorter than `limit`.
    fn take(&mut self, out: &mut Vec<u8>, limit: usize) {
        if out.is_empty() && self.start == 0 && self.bytes.len() <= limit {
            std::mem::swap(&mut self.bytes, out);
            self.clear();
            return;
        }
        let start = self.start;
        while out.len() + self.start - start < limit && self.drop_oldest().is_some() {}
        out.extend_from_slice(self.bytes.get(start..self.start).unwrap_or_default());
        if self.lengths.is_empty() {
            self.clear();
        }
    }
}

impl Waiting {
    /// Appends `frames` and says how many were dropped for them: the oldest of their kind.
    fn push(&mut self, frames: &mut Frames, is_disco: bool) -> u64 {
        let (queue, other) = match is_disco {
            true => (&mut self.disco, self.data.bytes()),
            false => (&mut self.data, self.disco.bytes()),
        };
        queue.append(frames);
        let mut dropped = 0;
        while queue.len() > PACKETS || queue.bytes() + other > BYTES {
            if queue.drop_oldest().is_none() {
                break;
            }
            dropped += 1;
        }
        dropped
    }
}

impl Queue {
    /// Empties `frames` and says how many were dropped for them, themselves included. Who empties the queue is woken once
    /// for all.
    pub(super) fn push(&self, frames: &mut Frames, is_disco: bool) -> u64 {
        let dropped = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(frames, is_disco);
        self.some.notify_one();
        dropped
    }

    /// One answer may wait; more pings are dropped.
    pub(super) fn pong(&self, data: [u8; 8]) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pong.get_or_insert(data);
        self.some.notify_one();
    }

    pub(super) fn peer_gone(&self, key: NodePublic, reason: GoneReason) {
        {
            let gone = &mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner).gone;
            if gone.len() == HINTS {
                gone.pop_front();
            }
            gone.push_back((key, reason));
        }
        self.some.notify_one();
    }

    /// Waits for something, then appends what there is, up to about `limit` bytes.
    pub(super) async fn take(&self, out: &mut Vec<u8>, limit: usize) {
        loop {
            {
                let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                while let Some((key, reason)) = waiting.gone.pop_front() {
                    write_peer_gone(out, &key, reason);
                }
                if let Some(data) = waiting.pong.take() {
                    write_pong(out, &data);
                }
                waiting.disco.take(out, limit);
                waiting.data.take(out, limit);
                if waiting.disco.len() + waiting.data.len() > 0 {
                    self.some.notify_one();
                }
            }
            if !out.is_empty() {
                return;
            }
            self.some.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(each: impl IntoIterator<Item = Vec<u8>>) -> Frames {
        let mut frames = Frames::default();
        each.into_iter().for_each(|bytes| frames.add(|out| out.extend(bytes)));
        frames
    }

    /// In order and whole, whether they are moved or copied, and however they are cut.
    #[tokio::test]
    async fn what_is_pushed_comes_out() {
        let queue = Queue::default();
        let mut pushed = Vec::new();
        let mut taken = Vec::new();
        for round in 0..200_usize {
            let some: Vec<_> =
                (0..round % 7).map(|at| vec![(round + at) as u8; 1 + (round * 31 + at * 7) % 90]).collect();
            pushed.extend(some.concat());
            assert_eq!(queue.push(&mut frames(some), false), 0);
            if pushed.len() > taken.len() && round % 3 > 0 {
                let mut out = Vec::new();
                queue.take(&mut out, 1 + round % 150).await;
                taken.extend(out);
            }
        }
        while taken.len() < pushed.len() {
            let mut out = Vec::new();
            queue.take(&mut out, 100).await;
            taken.extend(out);
        }
        assert_eq!(taken, pushed);
    }

    #[tokio::test]
    async fn a_full_queue_drops_the_oldest_data_and_leaves_disco_alone() {
        let queue = Queue::default();
        assert_eq!(queue.push(&mut frames([vec![0xff; 3]]), true), 0);
        for number in 0..PACKETS + 10 {
            let dropped = queue.push(&mut frames([vec![(number % 256) as u8; 1]]), false);
            assert_eq!(dropped, u64::from(number >= PACKETS));
        }
        let mut out = Vec::new();
        queue.take(&mut out, usize::MAX).await;
        assert_eq!(out.len(), 3 + PACKETS);
        assert_eq!(out.get(..4), Some(&[0xff, 0xff, 0xff, 10][..]));
    }

    #[test]
    fn bytes_are_bounded_too() {
        let queue = Queue::default();
        let pushed = 2 * BYTES / 65_536;
        let dropped = queue.push(&mut frames((0..pushed).map(|_| vec![0; 65_536])), false);
        assert_eq!(dropped as usize, pushed - BYTES / 65_536);
    }
}
