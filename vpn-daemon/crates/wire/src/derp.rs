//! Decides how relay frames look, which lengths each side accepts, and who may seal what at the greeting.
//!
//! A frame is `type:u8 || length:u32 big-endian || payload`. [`Frame`] is one frame, borrowed; [`FrameBuffer`] cuts a
//! byte stream into frames; [`Frames`] walks a batch of whole frames, the unit that travels between threads; the
//! functions `write_*` append frames to a `Vec`. The sealed greetings are in [`greeting`].
//!
//! Lengths are judged from the header alone, before anything is stored. Payload bytes that nobody needs (unknown types,
//! growth of known ones) are skipped, not kept, so a peer cannot make us hold more than one allowed frame.

pub mod greeting;
mod reader;

use std::time::Duration;

use crate::keys::{KEY_LEN, NONCE_LEN, NodePublic};
use crate::text::{self, MAX_FOREIGN_TEXT};

pub use reader::{FrameBuffer, Frames, split_frame};

/// Version of the protocol, also for the `Derp-Version` header.
pub const PROTOCOL_VERSION: i64 = 2;
/// "DERP🔑", the start of the server's first frame.
pub const MAGIC: [u8; 8] = [0x44, 0x45, 0x52, 0x50, 0xf0, 0x9f, 0x94, 0x91];
/// Type and length.
pub const HEADER_LEN: usize = 5;
/// Longest packet inside a frame (`MaxPacketSize`).
pub const MAX_PACKET_LEN: usize = 64 << 10;
/// Header of a frame that carries a packet: frame header and one key.
pub const PACKET_HEADER_LEN: usize = HEADER_LEN + KEY_LEN;
/// Longest frame that a client takes from a server.
const MAX_CLIENT_FRAME: usize = 1 << 20;
/// Longest client greeting that a server takes (`MaxInfoLen` and room for keys).
const MAX_CLIENT_INFO: usize = 256 << 10;
/// Longest server greeting; what follows the key is for later versions.
const MAX_SERVER_KEY: usize = 1024;
/// Longest ping that a server takes.
const MAX_PING: usize = 1000;

/// Frame types by number.
pub mod kind {
    #![allow(missing_docs)]
    pub const SERVER_KEY: u8 = 0x01;
    pub const CLIENT_INFO: u8 = 0x02;
    pub const SERVER_INFO: u8 = 0x03;
    pub const SEND_PACKET: u8 = 0x04;
    pub const RECV_PACKET: u8 = 0x05;
    pub const KEEP_ALIVE: u8 = 0x06;
    pub const NOTE_PREFERRED: u8 = 0x07;
    pub const PEER_GONE: u8 = 0x08;
    pub const PEER_PRESENT: u8 = 0x09;
    pub const FORWARD_PACKET: u8 = 0x0a;
    pub const WATCH_CONNS: u8 = 0x10;
    pub const CLOSE_PEER: u8 = 0x11;
    pub const PING: u8 = 0x12;
    pub const PONG: u8 = 0x13;
    pub const HEALTH: u8 = 0x14;
    pub const RESTARTING: u8 = 0x15;
}

/// Who reads: the limits differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// We read what a server wrote.
    Client,
    /// We read what a client wrote.
    Server,
}

/// What is wrong with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The connection is over: nothing can be trusted behind such a header.
    #[error("relay frame of type {kind:#04x} with a forbidden length of {len} bytes")]
    Length {
        /// Type byte.
        kind: u8,
        /// Announced length.
        len: u32,
    },
    /// Not a relay at all.
    #[error("the other side's greeting is not that of a relay")]
    Magic,
    /// A greeting with a key that must not be used.
    #[error("greeting with an invalid key")]
    Key,
}

/// Why a peer is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoneReason {
    /// It disconnected (also when an old server gives no reason).
    Disconnected,
    /// The relay does not know it.
    NotHere,
    /// A reason of a later version.
    Other(u8),
}

impl GoneReason {
    fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Disconnected,
            1 => Self::NotHere,
            other => Self::Other(other),
        }
    }

    fn byte(self) -> u8 {
        match self {
            Self::Disconnected => 0,
            Self::NotHere => 1,
            Self::Other(other) => other,
        }
    }
}

/// One frame. Keys in it are as the other side wrote them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Server's greeting.
    ServerKey(NodePublic),
    /// Client's greeting: its key and a box (`greeting::open_client_info`).
    ClientInfo {
        /// The key that the box must prove.
        key: NodePublic,
        /// Nonce, tag, JSON.
        sealed: &'a [u8],
    },
    /// Server's answer: a box (`greeting::open_server_info`).
    ServerInfo {
        /// Nonce, tag, JSON.
        sealed: &'a [u8],
    },
    /// Client to server: deliver this.
    SendPacket {
        /// Destination.
        to: NodePublic,
        /// Disco or WireGuard.
        packet: &'a [u8],
    },
    /// Server to client: this came for you.
    RecvPacket {
        /// Source, as true as the relay is.
        from: NodePublic,
        /// Disco or WireGuard.
        packet: &'a [u8],
    },
    /// Nothing but a sign of life.
    KeepAlive,
    /// "This is (not) my home relay."
    NotePreferred(bool),
    /// A hint that a peer left this relay (T-20).
    PeerGone {
        /// Which peer.
        key: NodePublic,
        /// Why.
        reason: GoneReason,
    },
    /// Mesh only.
    PeerPresent(NodePublic),
    /// Mesh only: a server closes a client that sends it.
    ForwardPacket,
    /// Mesh only.
    WatchConns,
    /// Mesh only.
    ClosePeer,
    /// Answer with a pong of the same bytes.
    Ping([u8; 8]),
    /// Answer to a ping.
    Pong([u8; 8]),
    /// The relay's complaint, raw; [`health_text`] makes it fit for people. Empty: healthy again.
    Health(&'a [u8]),
    /// The relay will go away.
    Restarting {
        /// Reconnect after this.
        reconnect_in: Duration,
        /// And keep trying for this long.
        try_for: Duration,
    },
    /// A known type, too short to mean anything: ignore and count.
    Short(u8),
    /// A type of a later version: ignore.
    Unknown(u8),
}

/// A relay's health text without control characters, 512 bytes at most (T-21).
pub fn health_text(raw: &[u8]) -> String {
    text::foreign(raw)
}

/// How many payload bytes of a frame are kept; the rest is skipped.
///
/// # Errors
/// [`FrameError::Length`]: the length is not allowed for this type on this side.
fn kept_len(side: Side, kind: u8, len: u32) -> Result<usize, FrameError> {
    let error = FrameError::Length { kind, len };
    let len = usize::try_from(len).map_err(|_| error)?;
    if side == Side::Client && len > MAX_CLIENT_FRAME {
        return Err(error);
    }
    let within = |min: usize, max: usize, keep: usize| {
        if (min..=max).contains(&len) { Ok(len.min(keep)) } else { Err(error) }
    };
    match (side, kind) {
        (Side::Client, kind::SERVER_KEY) => within(MAGIC.len() + KEY_LEN, MAX_SERVER_KEY, MAGIC.len() + KEY_LEN),
        (Side::Client, kind::SERVER_INFO) => within(NONCE_LEN, MAX_CLIENT_FRAME, usize::MAX),
        // A short one is dropped without closing.
        (Side::Client, kind::RECV_PACKET) => within(0, KEY_LEN + MAX_PACKET_LEN, usize::MAX),
        (Side::Client, kind::PEER_GONE) => Ok(len.min(KEY_LEN + 1)),
        (Side::Client, kind::PEER_PRESENT) => Ok(len.min(KEY_LEN)),
        (Side::Client, kind::HEALTH) => Ok(len.min(MAX_FOREIGN_TEXT)),
        (Side::Client, kind::PING | kind::PONG | kind::RESTARTING) => Ok(len.min(8)),
        (Side::Server, kind::CLIENT_INFO) => within(KEY_LEN + NONCE_LEN, MAX_CLIENT_INFO, usize::MAX),
        (Side::Server, kind::SEND_PACKET) => within(KEY_LEN, KEY_LEN + MAX_PACKET_LEN, usize::MAX),
        (Side::Server, kind::NOTE_PREFERRED) => within(1, 1, 1),
        (Side::Server, kind::PING) => within(8, MAX_PING, 8),
        (Side::Server, kind::PONG) => Ok(len.min(8)),
        _ => Ok(0),
    }
}

impl<'a> Frame<'a> {
    /// Reads the kept part of a payload.
    fn parse(side: Side, kind: u8, payload: &'a [u8]) -> Result<Self, FrameError> {
        let parsed = match (side, kind) {
            (Side::Client, kind::SERVER_KEY) => {
                let key = payload.strip_prefix(&MAGIC).ok_or(FrameError::Magic)?;
                let key = key.first_chunk().ok_or(FrameError::Magic)?;
                Some(Self::ServerKey(NodePublic::from_bytes(*key).map_err(|_| FrameError::Key)?))
            }
            (Side::Server, kind::CLIENT_INFO) => match split_key(payload) {
                Some((key, sealed)) => {
                    let key = NodePublic::from_bytes(*key.as_bytes()).map_err(|_| FrameError::Key)?;
                    Some(Self::ClientInfo { key, sealed })
                }
                None => None,
            },
            (Side::Client, kind::SERVER_INFO) => Some(Self::ServerInfo { sealed: payload }),
            (Side::Server, kind::SEND_PACKET) => split_key(payload).map(|(to, packet)| Self::SendPacket { to, packet }),
            (Side::Client, kind::RECV_PACKET) => {
                split_key(payload).map(|(from, packet)| Self::RecvPacket { from, packet })
            }
            (Side::Client, kind::KEEP_ALIVE) => Some(Self::KeepAlive),
            (Side::Server, kind::NOTE_PREFERRED) => payload.first().map(|byte| Self::NotePreferred(*byte != 0)),
            (Side::Client, kind::PEER_GONE) => split_key(payload).map(|(key, rest)| Self::PeerGone {
                key,
                reason: GoneReason::from_byte(rest.first().copied().unwrap_or(0)),
            }),
            (Side::Client, kind::PEER_PRESENT) => split_key(payload).map(|(key, _)| Self::PeerPresent(key)),
            (Side::Server, kind::FORWARD_PACKET) => Some(Self::ForwardPacket),
            (Side::Server, kind::WATCH_CONNS) => Some(Self::WatchConns),
            (Side::Server, kind::CLOSE_PEER) => Some(Self::ClosePeer),
            (_, kind::PING) => payload.first_chunk().map(|data| Self::Ping(*data)),
            (_, kind::PONG) => payload.first_chunk().map(|data| Self::Pong(*data)),
            (Side::Client, kind::HEALTH) => Some(Self::Health(payload)),
            (Side::Client, kind::RESTARTING) => parse_restarting(payload),
            _ => return Ok(Self::Unknown(kind)),
        };
        Ok(parsed.unwrap_or(Self::Short(kind)))
    }
}

fn split_key(payload: &[u8]) -> Option<(NodePublic, &[u8])> {
    let (key, rest) = payload.split_first_chunk::<KEY_LEN>()?;
    Some((NodePublic::from_wire(*key), rest))
}

fn parse_restarting(payload: &[u8]) -> Option<Frame<'_>> {
    let (reconnect_in, rest) = payload.split_first_chunk::<4>()?;
    let try_for = rest.first_chunk::<4>()?;
    let millis = |bytes: &[u8; 4]| Duration::from_millis(u32::from_be_bytes(*bytes).into());
    Some(Frame::Restarting { reconnect_in: millis(reconnect_in), try_for: millis(try_for) })
}

/// A packet above [`MAX_PACKET_LEN`] cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("packet of {0} bytes is too long for a relay")]
pub struct PacketTooLong(pub usize);

/// The 37 bytes before the packet of a SendPacket frame.
///
/// # Errors
/// [`PacketTooLong`].
pub fn send_packet_header(to: &NodePublic, packet_len: usize) -> Result<[u8; PACKET_HEADER_LEN], PacketTooLong> {
    packet_header(kind::SEND_PACKET, to, packet_len)
}

/// The 37 bytes before the packet of a RecvPacket frame.
///
/// # Errors
/// [`PacketTooLong`].
pub fn recv_packet_header(from: &NodePublic, packet_len: usize) -> Result<[u8; PACKET_HEADER_LEN], PacketTooLong> {
    packet_header(kind::RECV_PACKET, from, packet_len)
}

fn packet_header(kind: u8, key: &NodePublic, packet_len: usize) -> Result<[u8; PACKET_HEADER_LEN], PacketTooLong> {
    if packet_len > MAX_PACKET_LEN {
        return Err(PacketTooLong(packet_len));
    }
    let mut out = [0; PACKET_HEADER_LEN];
    let (head, room) = out.split_at_mut(HEADER_LEN);
    head.copy_from_slice(&frame_header(kind, KEY_LEN + packet_len));
    room.copy_from_slice(key.as_bytes());
    Ok(out)
}

/// Appends a SendPacket frame. Many of them make one write.
///
/// # Errors
/// [`PacketTooLong`]; nothing is appended then.
pub fn write_send_packet(out: &mut Vec<u8>, to: &NodePublic, packet: &[u8]) -> Result<(), PacketTooLong> {
    out.extend_from_slice(&send_packet_header(to, packet.len())?);
    out.extend_from_slice(packet);
    Ok(())
}

/// Appends a RecvPacket frame.
///
/// # Errors
/// [`PacketTooLong`]; nothing is appended then.
pub fn write_recv_packet(out: &mut Vec<u8>, from: &NodePublic, packet: &[u8]) -> Result<(), PacketTooLong> {
    out.extend_from_slice(&recv_packet_header(from, packet.len())?);
    out.extend_from_slice(packet);
    Ok(())
}

/// Appends a SendPacket frame whose packet `fill` writes in place, e.g. by sealing into it. `fill` gets `room` bytes
/// and returns how many it used; with `None`, or more than it got, nothing is appended. True if a frame was.
///
/// # Errors
/// [`PacketTooLong`] if `room` is above the limit.
pub fn write_send_packet_with(
    out: &mut Vec<u8>,
    to: &NodePublic,
    room: usize,
    fill: impl FnOnce(&mut [u8]) -> Option<usize>,
) -> Result<bool, PacketTooLong> {
    let start = out.len();
    out.extend_from_slice(&send_packet_header(to, room)?);
    let content = out.len();
    out.resize(content + room, 0);
    let used = out.get_mut(content..).and_then(fill).filter(|used| *used <= room);
    let Some(used) = used else {
        out.truncate(start);
        return Ok(false);
    };
    out.truncate(content + used);
    if let Some(head) = out.get_mut(start..).and_then(|frame| frame.first_chunk_mut::<HEADER_LEN>()) {
        *head = frame_header(kind::SEND_PACKET, KEY_LEN + used);
    }
    Ok(true)
}

/// Appends a server's greeting.
pub fn write_server_key(out: &mut Vec<u8>, key: &NodePublic) {
    write_frame(out, kind::SERVER_KEY, &[&MAGIC, key.as_bytes()]);
}

/// Appends a sign of life.
pub fn write_keep_alive(out: &mut Vec<u8>) {
    write_frame(out, kind::KEEP_ALIVE, &[]);
}

/// Appends "this is (not) my home relay".
pub fn write_note_preferred(out: &mut Vec<u8>, home: bool) {
    write_frame(out, kind::NOTE_PREFERRED, &[&[u8::from(home)]]);
}

/// Appends "that peer is not here (any more)".
pub fn write_peer_gone(out: &mut Vec<u8>, key: &NodePublic, reason: GoneReason) {
    write_frame(out, kind::PEER_GONE, &[key.as_bytes(), &[reason.byte()]]);
}

/// Appends a ping.
pub fn write_ping(out: &mut Vec<u8>, data: &[u8; 8]) {
    write_frame(out, kind::PING, &[data]);
}

/// Appends the answer to a ping.
pub fn write_pong(out: &mut Vec<u8>, data: &[u8; 8]) {
    write_frame(out, kind::PONG, &[data]);
}

/// Appends a complaint; empty text takes it back.
pub fn write_health(out: &mut Vec<u8>, text: &str) {
    write_frame(out, kind::HEALTH, &[text.as_bytes()]);
}

/// Appends the announcement of a restart.
pub fn write_restarting(out: &mut Vec<u8>, reconnect_in: Duration, try_for: Duration) {
    let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX).to_be_bytes();
    write_frame(out, kind::RESTARTING, &[&millis(reconnect_in), &millis(try_for)]);
}

/// Appends any frame from the parts of its payload.
fn write_frame(out: &mut Vec<u8>, kind: u8, parts: &[&[u8]]) {
    let len = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&frame_header(kind, len));
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

fn frame_header(kind: u8, len: usize) -> [u8; HEADER_LEN] {
    let len = u32::try_from(len).expect("frames that we write are far below 4 GiB");
    let [a, b, c, d] = len.to_be_bytes();
    [kind, a, b, c, d]
}
