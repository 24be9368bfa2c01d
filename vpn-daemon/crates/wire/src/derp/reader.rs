//! Decides where a frame ends: in a byte stream as it is read, and in a batch of whole frames.

use super::{Frame, FrameError, HEADER_LEN, Side, kept_len, kind};
use crate::keys::{KEY_LEN, NodePublic};

/// Initial and usual size: holds a full read of a fast connection and the longest packet frame.
const CAPACITY: usize = 128 << 10;
/// `space` returns at least this much, so that a read is worth its system call.
const MIN_SPACE: usize = 16 << 10;

/// Takes one frame off the front of `bytes`: the frame and how many bytes it took. `None`: not all of it is there.
///
/// # Errors
/// See [`FrameError`]: the connection must be closed.
pub fn split_frame(side: Side, bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, FrameError> {
    let Some((kind, len)) = header(bytes) else { return Ok(None) };
    let kept = kept_len(side, kind, len)?;
    // `kept_len` limits what is kept; the rest of a type nobody limits may reach beyond any buffer.
    let Some(total) = usize::try_from(len).ok().and_then(|len| len.checked_add(HEADER_LEN)) else {
        return Err(FrameError::Length { kind, len });
    };
    if bytes.len() < total {
        return Ok(None);
    }
    let payload = bytes.get(HEADER_LEN..HEADER_LEN + kept).unwrap_or_default();
    Ok(Some((Frame::parse(side, kind, payload)?, total)))
}

fn header(bytes: &[u8]) -> Option<(u8, u32)> {
    let [kind, a, b, c, d] = *bytes.first_chunk::<HEADER_LEN>()?;
    Some((kind, u32::from_be_bytes([a, b, c, d])))
}

/// Walks a batch of whole frames, as one thread hands it to another.
#[derive(Debug, Clone)]
pub struct Frames<'a> {
    side: Side,
    rest: &'a [u8],
}

impl<'a> Frames<'a> {
    /// `side` is who reads: `Client` for batches of RecvPacket frames, `Server` for SendPacket frames.
    pub fn new(side: Side, batch: &'a [u8]) -> Self {
        Self { side, rest: batch }
    }

    /// What is left: empty at the end of a good batch.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Just the packets of SendPacket and RecvPacket frames with their keys. Ends at the first broken frame.
    pub fn packets(self) -> impl Iterator<Item = (NodePublic, &'a [u8])> {
        self.filter_map(|frame| match frame {
            Frame::SendPacket { to: key, packet } | Frame::RecvPacket { from: key, packet } => Some((key, packet)),
            _ => None,
        })
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Frame<'a>;

    fn next(&mut self) -> Option<Frame<'a>> {
        let (frame, used) = split_frame(self.side, self.rest).ok().flatten()?;
        self.rest = self.rest.get(used..).unwrap_or_default();
        Some(frame)
    }
}

/// Cuts a byte stream into frames without copying them.
///
/// Read into [`FrameBuffer::space`], tell [`FrameBuffer::filled`] how much came, then call
/// [`FrameBuffer::next_frame`] until it returns `None`. Holds at most one frame of the longest kind that its side
/// allows, and what one read brought.
#[derive(Debug)]
pub struct FrameBuffer {
    side: Side,
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes still to come of a frame that nobody needs.
    skip: u64,
}

impl FrameBuffer {
    /// For what the other side of `side` writes.
    pub fn new(side: Side) -> Self {
        Self { side, bytes: vec![0; CAPACITY], start: 0, end: 0, skip: 0 }
    }

    /// Room for the next read, never empty.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        // Only a frame that is allowed and not yet whole is left in here, so this stays bounded by its length.
        let wanted = self.pending_len().max(self.end - self.start + 1);
        if self.bytes.len() - self.end < MIN_SPACE || self.start + wanted > self.bytes.len() {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            if self.bytes.len() - self.end < MIN_SPACE || wanted > self.bytes.len() {
                self.bytes.resize(wanted.max(self.end) + MIN_SPACE, 0);
            } else if self.bytes.len() > CAPACITY && wanted + MIN_SPACE <= CAPACITY && self.end + MIN_SPACE <= CAPACITY
            {
                self.bytes.truncate(CAPACITY);
                self.bytes.shrink_to_fit();
            }
        }
        self.bytes.get_mut(self.end..).unwrap_or_default()
    }

    /// `len` bytes were read into the front of [`FrameBuffer::space`].
    pub fn filled(&mut self, len: usize) {
        self.end = self.bytes.len().min(self.end + len);
    }

    /// Takes bytes that were read elsewhere, e.g. behind the head of an HTTP answer.
    pub fn extend(&mut self, bytes: &[u8]) {
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let space = self.space();
            let len = space.len().min(bytes.len());
            let (now, later) = bytes.split_at(len);
            if let Some(room) = space.get_mut(..len) {
                room.copy_from_slice(now);
            }
            self.filled(len);
            bytes = later;
        }
    }

    /// The next frame, if all of it has come.
    ///
    /// # Errors
    /// See [`FrameError`]: close the connection.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        let available = self.end - self.start;
        let skip = usize::try_from(self.skip).unwrap_or(usize::MAX).min(available);
        self.start += skip;
        self.skip -= skip as u64;
        let Some((kind, len)) = self.bytes.get(self.start..self.end).and_then(header) else { return Ok(None) };
        let kept = kept_len(self.side, kind, len)?;
        if self.end - self.start < HEADER_LEN + kept {
            return Ok(None);
        }
        let payload = self.start + HEADER_LEN;
        self.start = payload + kept;
        self.skip = u64::from(len) - kept as u64;
        let payload = self.bytes.get(payload..payload + kept).unwrap_or_default();
        Frame::parse(self.side, kind, payload).map(Some)
    }

    /// Takes the whole packet frames that stand together at the front (RecvPacket for a client, SendPacket for a
    /// server), as one slice for [`Frames`], or nothing if another frame or half a frame comes first. A relay task
    /// copies such a run to its batch at once instead of packet by packet. At most `max_len` bytes, unless the first
    /// frame alone is longer.
    ///
    /// # Errors
    /// See [`FrameError`]: close the connection.
    pub fn next_packets(&mut self, max_len: usize) -> Result<&[u8], FrameError> {
        if self.skip > 0 {
            return Ok(&[]);
        }
        let wanted = match self.side {
            Side::Client => kind::RECV_PACKET,
            Side::Server => kind::SEND_PACKET,
        };
        let from = self.start;
        while let Some((kind, len)) = self.bytes.get(self.start..self.end).and_then(header) {
            if kind != wanted {
                break;
            }
            let kept = match kept_len(self.side, kind, len) {
                Ok(kept) => kept,
                // The packets before a broken frame are good; the next call reports it.
                Err(_) if self.start > from => break,
                Err(error) => return Err(error),
            };
            let total = HEADER_LEN + kept;
            let within = self.start - from + total <= max_len || self.start == from;
            if self.end - self.start < total || total < HEADER_LEN + KEY_LEN || !within {
                break;
            }
            self.start += total;
        }
        Ok(self.bytes.get(from..self.start).unwrap_or_default())
    }

    /// Length of the frame at the front with its header, as far as it is kept.
    fn pending_len(&self) -> usize {
        self.bytes
            .get(self.start..self.end)
            .and_then(header)
            .and_then(|(kind, len)| kept_len(self.side, kind, len).ok())
            .map_or(0, |kept| HEADER_LEN + kept)
    }
}
