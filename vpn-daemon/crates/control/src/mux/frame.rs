//! Decides the bytes of a yamux frame header, and nothing else.
//!
//! Every frame starts with twelve bytes: version, type, flags (u16), stream id (u32), length (u32), big-endian. Only data
//! frames have a body; in the other types `length` is a window delta, a ping id or a go-away code.

use super::MuxError;

/// Bytes of a frame header.
pub(crate) const HEADER_LEN: usize = 12;

pub(crate) const SYN: u16 = 1;
pub(crate) const ACK: u16 = 2;
pub(crate) const FIN: u16 = 4;
pub(crate) const RST: u16 = 8;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Data,
    WindowUpdate,
    Ping,
    GoAway,
}

/// One decoded frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flags: u16,
    pub(crate) stream: u32,
    pub(crate) length: u32,
}

impl Header {
    pub(crate) fn new(kind: Kind, flags: u16, stream: u32, length: u32) -> Self {
        Self { kind, flags, stream, length }
    }

    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Reads a header. Unknown versions and types end the session (YX-19).
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, MuxError> {
        let [version, kind, f0, f1, s0, s1, s2, s3, l0, l1, l2, l3] = *bytes;
        if version != 0 {
            return Err(MuxError::Protocol(format!("yamux version {version}, expected 0")));
        }
        let kind = match kind {
            0 => Kind::Data,
            1 => Kind::WindowUpdate,
            2 => Kind::Ping,
            3 => Kind::GoAway,
            other => return Err(MuxError::Protocol(format!("unknown yamux frame type {other}"))),
        };
        Ok(Self {
            kind,
            flags: u16::from_be_bytes([f0, f1]),
            stream: u32::from_be_bytes([s0, s1, s2, s3]),
            length: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let kind = match self.kind {
            Kind::Data => 0,
            Kind::WindowUpdate => 1,
            Kind::Ping => 2,
            Kind::GoAway => 3,
        };
        let [f0, f1] = self.flags.to_be_bytes();
        let [s0, s1, s2, s3] = self.stream.to_be_bytes();
        let [l0, l1, l2, l3] = self.length.to_be_bytes();
        [0, kind, f0, f1, s0, s1, s2, s3, l0, l1, l2, l3]
    }
}
