//! Decides how messages are cut out of a byte stream: a 32-bit big-endian
//! length and so many bytes of one encoded message.
//!
//! The length comes from outside and is only ever compared. Memory grows with
//! the bytes that really arrived.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use thiserror::Error;

use crate::rpc::Message;

/// Largest body the protocol allows, inclusive.
pub const MAX_BODY: usize = 0x0100_0000;

/// Largest body a service takes from a client, which never needs more.
pub const MAX_CLIENT_BODY: usize = 0x0010_0000;

const LENGTH: usize = 4;

/// Encodes one message as one frame, to be written in one piece. Refuses what
/// must never be sent: a body above `limit`, an empty one, an unset oneof.
pub fn encode<M: Message>(message: &M, limit: usize) -> Result<Bytes, EncodeError> {
    if !message.has_body() {
        return Err(EncodeError::NoBody);
    }
    let length = message.encoded_len();
    if length == 0 {
        return Err(EncodeError::NoBody);
    }
    let prefix =
        u32::try_from(length).ok().filter(|_| length <= limit.min(MAX_BODY)).ok_or(EncodeError::TooLarge { length })?;
    let mut frame = BytesMut::with_capacity(LENGTH + length);
    frame.put_u32(prefix);
    message.encode(&mut frame).expect("the buffer grows as needed");
    Ok(frame.freeze())
}

/// Decodes the body of a frame.
pub fn decode<M: Message>(body: &[u8]) -> Result<M, FrameError> {
    M::decode(body).map_err(FrameError::Undecodable)
}

/// Cuts frames out of bytes in any splitting.
#[derive(Debug)]
pub struct Decoder {
    limit: usize,
    buffer: BytesMut,
}

impl Decoder {
    /// `limit` is the largest body to accept, at most [`MAX_BODY`].
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.min(MAX_BODY), buffer: BytesMut::new() }
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// To read into directly instead of `feed`.
    #[cfg(feature = "io")]
    pub(crate) fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The body of the next complete frame; it may be empty, which is to be
    /// ignored with a warning. `None` when more bytes are needed. After an
    /// error the stream has no meaning any more.
    pub fn next_body(&mut self) -> Result<Option<Bytes>, FrameError> {
        let Some(prefix) = self.buffer.first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let stated = u32::from_be_bytes(*prefix);
        let length = usize::try_from(stated).unwrap_or(usize::MAX);
        if length > self.limit {
            return Err(FrameError::TooLarge { length: stated, limit: self.limit });
        }
        if self.buffer.len() - LENGTH < length {
            return Ok(None);
        }
        self.buffer.advance(LENGTH);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    /// Judges the end of the stream: orderly between frames only.
    pub fn finish(&self) -> Result<(), FrameError> {
        if self.buffer.is_empty() { Ok(()) } else { Err(FrameError::Truncated) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FrameError {
    #[error("the other end announced a frame of {length} bytes, the limit is {limit}")]
    TooLarge { length: u32, limit: usize },
    #[error("the other end sent a frame that cannot be decoded: {0}")]
    Undecodable(prost::DecodeError),
    #[error("the connection ended inside a frame")]
    Truncated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum EncodeError {
    #[error("the message has {length} bytes, more than a frame may hold")]
    TooLarge { length: usize },
    #[error("the message has no content")]
    NoBody,
}
