//! Decides what a UDP datagram or the payload of a relay frame is.
//!
//! The three protocols cannot be taken for each other: disco starts with its magic, WireGuard with 1..4 and three zero
//! bytes, a STUN binding message with `00 01` or `01 01`. Lengths are checked too, so that what is `WireGuard` here has
//! the shape its kind must have.

use crate::disco::Envelope;
use crate::stun;

/// What came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Datagram<'a> {
    /// A path message, still sealed.
    Disco(Envelope<'a>),
    /// A STUN binding message: believe it only if its transaction is outstanding.
    Stun,
    /// A WireGuard message.
    WireGuard(WireGuard),
    /// Nothing of ours: drop and count.
    Other,
}

/// The kinds of WireGuard messages and what stands in clear text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireGuard {
    /// First message of a handshake.
    Initiation {
        /// The sender's session.
        sender: u32,
    },
    /// Its answer.
    Response {
        /// The sender's session.
        sender: u32,
        /// Our session.
        receiver: u32,
    },
    /// "I am under load, prove your address."
    Cookie {
        /// Our session.
        receiver: u32,
    },
    /// Sealed data, or a keepalive if nothing is inside.
    Data {
        /// Our session.
        receiver: u32,
        /// For replay protection.
        counter: u64,
    },
}

/// Bytes of a handshake initiation.
pub const INITIATION_LEN: usize = 148;
/// Bytes of a handshake response.
pub const RESPONSE_LEN: usize = 92;
/// Bytes of a cookie reply.
pub const COOKIE_LEN: usize = 64;
/// Bytes around the content of a data message: header 16, tag 16. A keepalive has just these.
pub const DATA_OVERHEAD: usize = 32;

impl WireGuard {
    /// Reads the clear part. `None`: not WireGuard, or a length that its kind cannot have.
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        let (kind, rest) = datagram.split_first_chunk::<4>()?;
        let kind = u32::from_le_bytes(*kind);
        let (first, rest) = rest.split_first_chunk::<4>()?;
        let first = u32::from_le_bytes(*first);
        match (kind, datagram.len()) {
            (1, INITIATION_LEN) => Some(Self::Initiation { sender: first }),
            (2, RESPONSE_LEN) => {
                let receiver = u32::from_le_bytes(*rest.first_chunk()?);
                Some(Self::Response { sender: first, receiver })
            }
            (3, COOKIE_LEN) => Some(Self::Cookie { receiver: first }),
            (4, DATA_OVERHEAD..) => {
                let counter = u64::from_le_bytes(*rest.first_chunk()?);
                Some(Self::Data { receiver: first, counter })
            }
            _ => None,
        }
    }

    /// The session of ours that the message is for; an initiation has none.
    pub fn receiver(&self) -> Option<u32> {
        match *self {
            Self::Initiation { .. } => None,
            Self::Response { receiver, .. } | Self::Cookie { receiver } | Self::Data { receiver, .. } => Some(receiver),
        }
    }
}

/// Sorts a datagram from the network. For the payload of a relay frame `Stun` means `Other`.
pub fn datagram(bytes: &[u8]) -> Datagram<'_> {
    if let Some(message) = WireGuard::parse(bytes) {
        Datagram::WireGuard(message)
    } else if let Some(envelope) = Envelope::parse(bytes) {
        Datagram::Disco(envelope)
    } else if stun::looks_like_stun(bytes) {
        Datagram::Stun
    } else {
        Datagram::Other
    }
}
