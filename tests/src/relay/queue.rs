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
/// Oldest packets dropped for one new one before the new one is dropped itself.
const ATTEMPTS: usize = 3;
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
    disco: VecDeque<Vec<u8>>,
    data: VecDeque<Vec<u8>>,
    bytes: usize,
    pong: Option<[u8; 8]>,
    gone: VecDeque<(NodePublic, GoneReason)>,
}

/// A whole frame with a packet.
#[derive(Debug)]
pub(super) struct Framed {
    pub(super) bytes: Vec<u8>,
    pub(super) is_disco: bool,
}

impl Waiting {
    /// Says how many were dropped for it, itself included.
    fn push(&mut self, Framed { bytes, is_disco }: Framed) -> u64 {
        let queue = if is_disco { &mut self.disco } else { &mut self.data };
        let mut dropped = 0;
        for _ in 0..ATTEMPTS {
            if queue.len() < PACKETS && self.bytes + bytes.len() <= BYTES {
                break;
            }
            if let Some(oldest) = queue.pop_front() {
                self.bytes -= oldest.len();
                dropped += 1;
            }
        }
        if queue.len() >= PACKETS || self.bytes + bytes.len() > BYTES {
            return dropped + 1;
        }
        self.bytes += bytes.len();
        queue.push_back(bytes);
        dropped
    }
}

impl Queue {
    /// Says how many were dropped for them, themselves included. Who empties the queue is woken once for all.
    pub(super) fn push(&self, frames: impl IntoIterator<Item = Framed>) -> u64 {
        let dropped = {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            frames.into_iter().map(|frame| waiting.push(frame)).sum()
        };
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
                while out.len() < limit {
                    let frame = waiting.disco.pop_front();
                    let Some(frame) = frame.or_else(|| waiting.data.pop_front()) else { break };
                    waiting.bytes -= frame.len();
                    out.extend_from_slice(&frame);
                }
                let more = !waiting.data.is_empty() || !waiting.disco.is_empty();
                if more {
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

    #[tokio::test]
    async fn a_full_queue_drops_the_oldest_data_and_leaves_disco_alone() {
        let queue = Queue::default();
        assert_eq!(queue.push([Framed { bytes: vec![0xff; 3], is_disco: true }]), 0);
        for number in 0..PACKETS + 10 {
            let dropped = queue.push([Framed { bytes: vec![(number % 256) as u8; 1], is_disco: false }]);
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
        let dropped = queue.push((0..pushed).map(|_| Framed { bytes: vec![0; 65_536], is_disco: false }));
        assert_eq!(dropped as usize, pushed - BYTES / 65_536);
    }
}
