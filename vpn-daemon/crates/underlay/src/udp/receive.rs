//! Receiving. Decides how many slots a call gets: one for trains, so that the same 64 KiB stay in the cache, and 32 when
//! datagrams come singly, since one call a datagram would halve the throughput (fast path 4.4).

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;

use quinn_udp::{RecvMeta, UdpSockRef};

use super::{Socket, UdpCounters};

/// More than any message has, so that a full slot betrays one that was cut.
const SLOT: usize = 64 * 1024;
/// As many as one call of `quinn-udp` takes.
const SLOTS: usize = quinn_udp::BATCH_SIZE;
/// A message longer than this is a train.
const TRAIN: usize = 16 * 1024;

/// Where received datagrams lie until they are opened. Most of it stays untouched, and so unmapped, while messages are
/// short.
pub struct ReceiveBuffer {
    slots: Box<[u8]>,
    metas: Box<[RecvMeta; SLOTS]>,
    filled: usize,
    /// The last call took as much as it had room for.
    full: bool,
}

impl ReceiveBuffer {
    pub fn new() -> Self {
        Self {
            slots: vec![0; SLOT * SLOTS].into_boxed_slice(),
            metas: Box::new([RecvMeta::default(); SLOTS]),
            filled: 0,
            full: false,
        }
    }

    /// What the last call brought, in the order of arrival.
    pub fn datagrams(&mut self) -> Datagrams<'_> {
        let metas = self.metas.get(..self.filled).unwrap_or_default();
        Datagrams { slots: self.slots.chunks_exact_mut(SLOT).zip(metas), rest: &mut [], stride: 0, source: None }
    }

    /// Whether the socket may have had more than the last call had room for.
    pub fn may_be_more(&self) -> bool {
        self.full
    }

    pub(super) fn clear(&mut self) {
        (self.filled, self.full) = (0, false);
    }
}

impl Default for ReceiveBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for ReceiveBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReceiveBuffer({} messages)", self.filled)
    }
}

/// Iterator over received datagrams, each to be opened in place.
pub struct Datagrams<'a> {
    slots: std::iter::Zip<std::slice::ChunksExactMut<'a, u8>, std::slice::Iter<'a, RecvMeta>>,
    /// What is left of the present message.
    rest: &'a mut [u8],
    stride: usize,
    source: Option<SocketAddr>,
}

impl<'a> Iterator for Datagrams<'a> {
    type Item = (SocketAddr, &'a mut [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        while self.rest.is_empty() {
            let (slot, meta) = self.slots.next()?;
            if !is_whole(meta) {
                continue;
            }
            self.rest = slot.get_mut(..meta.len).unwrap_or_default();
            self.stride = meta.stride;
            self.source = Some(source(meta));
        }
        let rest = std::mem::take(&mut self.rest);
        let (datagram, rest) = rest.split_at_mut(self.stride.clamp(1, rest.len()));
        self.rest = rest;
        Some((self.source?, datagram))
    }
}

impl Socket {
    /// One call.
    pub(super) fn receive(&mut self, buffer: &mut ReceiveBuffer, counters: &mut UdpCounters) -> usize {
        let reference = UdpSockRef::from(&self.inner);
        let metas = &mut buffer.metas[..];
        let mut slots = buffer.slots.chunks_exact_mut(SLOT).map(IoSliceMut::new);
        let received = if self.trains {
            let mut slots: [_; 1] = std::array::from_fn(|_| slots.next().unwrap_or_else(|| IoSliceMut::new(&mut [])));
            self.state.recv(reference, &mut slots, metas)
        } else {
            let mut slots: [_; SLOTS] =
                std::array::from_fn(|_| slots.next().unwrap_or_else(|| IoSliceMut::new(&mut [])));
            self.state.recv(reference, &mut slots, metas)
        };
        match received {
            Ok(messages) => {
                buffer.filled = messages;
                buffer.full = messages == if self.trains { 1 } else { SLOTS };
                counters.receives += 1;
                self.count_messages(buffer.metas.get(..messages).unwrap_or_default(), counters)
            }
            Err(error) => {
                // What comes after a pause may be anything; the call for 32 takes everything.
                self.trains = false;
                match error.kind() {
                    io::ErrorKind::WouldBlock => counters.empty_receives += 1,
                    _ => {
                        counters.receive_errors += 1;
                        tracing::trace!(%error, "cannot receive");
                    }
                }
                0
            }
        }
    }

    fn count_messages(&mut self, metas: &[RecvMeta], counters: &mut UdpCounters) -> usize {
        let mut datagrams = 0;
        for meta in metas {
            if is_whole(meta) {
                datagrams += meta.len.div_ceil(meta.stride.max(1));
                counters.received_bytes += meta.len as u64;
            } else {
                counters.truncated += 1;
            }
        }
        self.trains = metas.last().is_some_and(|meta| meta.len > TRAIN);
        counters.received_datagrams += datagrams as u64;
        datagrams
    }
}

fn is_whole(meta: &RecvMeta) -> bool {
    meta.len < SLOT
}

/// Without the flow label, which would make one peer's address look like two.
fn source(meta: &RecvMeta) -> SocketAddr {
    match meta.addr {
        SocketAddr::V6(mut address) => {
            address.set_flowinfo(0);
            address.into()
        }
        v4 @ SocketAddr::V4(_) => v4,
    }
}
