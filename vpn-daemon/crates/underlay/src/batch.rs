//! What crosses between the data thread and the relay connections: one
//! contiguous buffer of relay frames per hand-over, from a pool, so that a
//! packet costs no allocation and at most one copy.
//!
//! Towards a relay the data thread frames packets itself ([`SendBatch`]), even
//! sealing them straight into the buffer. From a relay the buffer is the one
//! the socket was read into, cut at a frame boundary ([`RelayBatch`]); packets
//! are handed out as slices of it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use codervpn_wire::derp::{self, HEADER_LEN, MAX_PACKET_LEN, PACKET_HEADER_LEN, kind};
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::{KEY_LEN, NodePublic};

/// Longest frame with a packet.
pub(crate) const MAX_PACKET_FRAME: usize = PACKET_HEADER_LEN + MAX_PACKET_LEN;

/// A batch past this length should be sent. One read from the TUN with offload
/// is 64 KiB, so it makes one batch and one write.
const FULL: usize = 64 * 1024;
/// Room for a full batch and the frames added by the same TUN read.
const SEND_CAPACITY: usize = 2 * FULL;
/// One read from the socket takes up to this much: about 190 full packets, the
/// size at which larger reads stopped to help.
pub(crate) const RECEIVE_CAPACITY: usize = 256 * 1024;

/// Free buffers of one size. Taken and returned once per batch, so a mutex is
/// cheap enough. Beyond `keep` they are freed: what one busy moment needed
/// must not stay forever.
pub(crate) struct Pool {
    free: Mutex<Vec<Vec<u8>>>,
    capacity: usize,
    keep: usize,
}

impl Pool {
    pub(crate) fn for_sending() -> Arc<Pool> {
        // As many as the 1 MiB of one region's queue can hold when full.
        Arc::new(Pool::new(SEND_CAPACITY, 16))
    }

    pub(crate) fn for_receiving() -> Arc<Pool> {
        // One in the making per busy relay and those the data thread holds.
        Arc::new(Pool::new(RECEIVE_CAPACITY, 8))
    }

    fn new(capacity: usize, keep: usize) -> Pool {
        Pool { free: Mutex::new(Vec::with_capacity(keep)), capacity, keep }
    }

    pub(crate) fn take(&self) -> Vec<u8> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.pop().unwrap_or_else(|| Vec::with_capacity(self.capacity))
    }

    fn give(&self, mut buffer: Vec<u8>) {
        // Grown buffers are odd ones; empty ones were taken apart.
        if buffer.capacity() < self.capacity || buffer.capacity() > 2 * self.capacity {
            return;
        }
        buffer.clear();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.keep {
            free.push(buffer);
        }
    }
}

/// Packets for peers behind one relay, already framed. Returns to its pool
/// when dropped.
pub struct SendBatch {
    buffer: Vec<u8>,
    frames: usize,
    pool: Arc<Pool>,
}

impl SendBatch {
    pub(crate) fn new(pool: &Arc<Pool>) -> SendBatch {
        SendBatch { buffer: pool.take(), frames: 0, pool: pool.clone() }
    }

    /// Appends one packet. Packets that no relay would take (empty or longer
    /// than [`MAX_PACKET_LEN`]) are left out.
    pub fn push(&mut self, to: &NodePublic, packet: &[u8]) {
        if !packet.is_empty() && derp::write_send_packet(&mut self.buffer, to, packet).is_ok() {
            self.frames += 1;
        }
    }

    /// Appends one packet that `fill` writes into a slot of `room` bytes; it
    /// returns the length it used, or `None` to append nothing.
    pub fn push_with(&mut self, to: &NodePublic, room: usize, fill: impl FnOnce(&mut [u8]) -> Option<usize>) {
        let room = room.min(MAX_PACKET_LEN);
        let fill = |slot: &mut [u8]| fill(slot).filter(|used| *used > 0);
        if let Ok(true) = derp::write_send_packet_with(&mut self.buffer, to, room, fill) {
            self.frames += 1;
        }
    }

    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Bytes on the wire.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Large enough that waiting for more gains nothing.
    pub fn is_full(&self) -> bool {
        self.buffer.len() >= FULL
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for SendBatch {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.buffer));
    }
}

impl fmt::Debug for SendBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendBatch({} frames)", self.frames)
    }
}

/// Packets that came from one relay. Returns to its pool when dropped.
pub struct RelayBatch {
    pub region: RegionId,
    /// Whole frames only, of any type.
    buffer: Vec<u8>,
    packets: usize,
    pool: Arc<Pool>,
}

/// One packet, to be opened in place. The relay vouches for the source.
#[derive(Debug)]
pub struct Packet<'a> {
    pub source: NodePublic,
    pub payload: &'a mut [u8],
}

impl RelayBatch {
    pub(crate) fn new(region: RegionId, buffer: Vec<u8>, packets: usize, pool: &Arc<Pool>) -> RelayBatch {
        RelayBatch { region, buffer, packets, pool: pool.clone() }
    }

    pub fn packets(&mut self) -> Packets<'_> {
        Packets { rest: &mut self.buffer }
    }

    /// Takes over a few more frames if they fit, so that a consumer that lags
    /// finds one batch rather than many small ones.
    pub(crate) fn append(&mut self, frames: &[u8], packets: usize) -> bool {
        if self.buffer.capacity() - self.buffer.len() < frames.len() {
            return false;
        }
        self.buffer.extend_from_slice(frames);
        self.packets += packets;
        true
    }

    /// How many packets there are.
    pub fn count(&self) -> usize {
        self.packets
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }
}

impl Drop for RelayBatch {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.buffer));
    }
}

impl fmt::Debug for RelayBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RelayBatch({} packets)", self.packets)
    }
}

/// Iterator over the packets of a batch; other frames are passed over.
pub struct Packets<'a> {
    rest: &'a mut [u8],
}

impl<'a> Iterator for Packets<'a> {
    type Item = Packet<'a>;

    fn next(&mut self) -> Option<Packet<'a>> {
        loop {
            let rest = std::mem::take(&mut self.rest);
            let frame = FrameHead::read(rest)?;
            let (content, after) = rest.get_mut(HEADER_LEN..)?.split_at_mut_checked(frame.length)?;
            self.rest = after;
            if frame.kind != kind::RECV_PACKET {
                continue;
            }
            let Some((key, payload)) = content.split_first_chunk_mut::<KEY_LEN>() else {
                continue;
            };
            return Some(Packet { source: NodePublic::from_wire(*key), payload });
        }
    }
}

/// The five bytes in front of a frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameHead {
    pub(crate) kind: u8,
    pub(crate) length: usize,
}

impl FrameHead {
    #[inline]
    pub(crate) fn read(bytes: &[u8]) -> Option<FrameHead> {
        let head = bytes.first_chunk::<HEADER_LEN>()?;
        let [kind, length @ ..] = *head;
        Some(FrameHead { kind, length: u32::from_be_bytes(length) as usize })
    }

    /// A packet with a whole source key in front of it.
    #[inline]
    pub(crate) fn is_packet(self) -> bool {
        self.kind == kind::RECV_PACKET && self.length >= KEY_LEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> NodePublic {
        NodePublic::from_wire([byte; 32])
    }

    #[test]
    fn frames_are_laid_out_back_to_back() {
        let pool = Pool::for_sending();
        let mut batch = SendBatch::new(&pool);
        batch.push(&key(7), b"abc");
        batch.push(&key(8), b"");
        batch.push(&key(8), &vec![0; MAX_PACKET_LEN + 1]);
        batch.push_with(&key(9), 10, |slot| {
            slot[..2].copy_from_slice(b"xy");
            Some(2)
        });
        batch.push_with(&key(9), 10, |_| None);
        assert_eq!(batch.frames(), 2);
        let mut wanted = vec![4, 0, 0, 0, 35];
        wanted.extend([7; 32]);
        wanted.extend(b"abc");
        wanted.extend([4, 0, 0, 0, 34]);
        wanted.extend([9; 32]);
        wanted.extend(b"xy");
        assert_eq!(batch.bytes(), wanted);
    }

    #[test]
    fn buffers_return_to_the_pool() {
        let pool = Pool::for_sending();
        let batch = SendBatch::new(&pool);
        let address = batch.buffer.as_ptr();
        drop(batch);
        assert_eq!(SendBatch::new(&pool).buffer.as_ptr(), address);
    }

    /// Nothing from outside can panic: any bytes make an iterator that ends.
    #[test]
    fn packets_survive_any_bytes() {
        let pool = Pool::for_receiving();
        let mut bytes = vec![0x06, 0, 0, 0, 0];
        bytes.extend([0x05, 0, 0, 0, 3, 1, 2, 3]);
        bytes.extend([0x05, 0, 0, 0, 34]);
        bytes.extend([1; 32]);
        bytes.extend(b"hi");
        bytes.extend([0x05, 0xff, 0xff, 0xff, 0xff]);
        let mut batch = RelayBatch::new(RegionId::new(1).unwrap(), bytes, 1, &pool);
        let packets: Vec<_> = batch.packets().map(|p| (p.source, p.payload.to_vec())).collect();
        assert_eq!(packets, [(key(1), b"hi".to_vec())]);
    }
}
