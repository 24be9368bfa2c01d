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

use codervpn_wire::derp::{HEADER_LEN, MAX_PACKET_LEN, PACKET_HEADER_LEN, kind};
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

    /// An empty buffer.
    pub(crate) fn take(&self) -> Vec<u8> {
        let mut buffer = self.take_used();
        buffer.clear();
        buffer
    }

    /// A buffer with whatever its last user left in it, since clearing it only to fill it with zeros again costs time.
    fn take_used(&self) -> Vec<u8> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.pop().unwrap_or_else(|| Vec::with_capacity(self.capacity))
    }

    fn give(&self, buffer: Vec<u8>) {
        // Grown buffers are odd ones; empty ones were taken apart.
        if buffer.capacity() < self.capacity || buffer.capacity() > 2 * self.capacity {
            return;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.keep {
            free.push(buffer);
        }
    }
}

/// Packets for peers behind one relay, already framed. Returns to its pool
/// when dropped.
pub struct SendBatch {
    /// Frames, then whatever was there before.
    buffer: Vec<u8>,
    used: usize,
    frames: usize,
    pool: Arc<Pool>,
}

impl SendBatch {
    pub(crate) fn new(pool: &Arc<Pool>) -> SendBatch {
        SendBatch { buffer: pool.take_used(), used: 0, frames: 0, pool: pool.clone() }
    }

    /// Room behind the frames for one packet to `to`, to be written in place.
    /// `None` for more than a relay takes. Only `commit` makes it a frame.
    pub fn room(&mut self, to: &NodePublic, room: usize) -> Option<&mut [u8]> {
        if room > MAX_PACKET_LEN {
            return None;
        }
        let end = self.used + PACKET_HEADER_LEN + room;
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        let (header, packet) = self.buffer.get_mut(self.used..end)?.split_at_mut(PACKET_HEADER_LEN);
        header.get_mut(HEADER_LEN..)?.copy_from_slice(to.as_bytes());
        Some(packet)
    }

    /// The first `len` bytes of the last room are a packet. Empty ones, which
    /// no relay takes, are left out.
    pub fn commit(&mut self, len: usize) {
        let frame = self.buffer.get_mut(self.used..self.used + PACKET_HEADER_LEN + len);
        let Some(head) = frame.and_then(|frame| frame.first_chunk_mut()) else { return };
        if len > 0 {
            *head = FrameHead { kind: kind::SEND_PACKET, length: KEY_LEN + len }.bytes();
            self.used += PACKET_HEADER_LEN + len;
            self.frames += 1;
        }
    }

    /// Appends one packet. Packets that no relay would take (empty or longer
    /// than [`MAX_PACKET_LEN`]) are left out.
    pub fn push(&mut self, to: &NodePublic, packet: &[u8]) {
        if let Some(room) = self.room(to, packet.len()) {
            room.copy_from_slice(packet);
            self.commit(packet.len());
        }
    }

    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Bytes on the wire.
    pub fn len(&self) -> usize {
        self.used
    }

    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Large enough that waiting for more gains nothing.
    pub fn is_full(&self) -> bool {
        self.used >= FULL
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.buffer.get(..self.used).unwrap_or_default()
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

    fn bytes(self) -> [u8; HEADER_LEN] {
        // Lengths here are those of packets.
        let [a, b, c, d] = (self.length as u32).to_be_bytes();
        [self.kind, a, b, c, d]
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
        batch.room(&key(8), 10).unwrap().fill(8);
        batch.room(&key(9), 10).unwrap()[..2].copy_from_slice(b"xy");
        batch.commit(2);
        batch.room(&key(9), 10).unwrap().fill(8);
        batch.commit(0);
        assert!(batch.room(&key(9), MAX_PACKET_LEN + 1).is_none());
        assert_eq!((batch.frames(), batch.len()), (2, 79));
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
        let mut batch = SendBatch::new(&pool);
        batch.push(&key(7), b"abc");
        let address = batch.buffer.as_ptr();
        drop(batch);
        let batch = SendBatch::new(&pool);
        assert_eq!((batch.buffer.as_ptr(), batch.bytes()), (address, &[][..]));
        drop(batch);
        assert!(pool.take().is_empty());
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
