//! Decides how the liveness messages inside the tunnel (TSMP, IP protocol 99) look.
//!
//! They prove that WireGuard *and* the other side's stack are up. We answer pings to our address and never let TSMP
//! reach the TUN device (T-31). A pong's flow label is the inverse of the ping's, so it is never compared.

use std::net::Ipv6Addr;

use crate::ip::{self, Ipv6Header};

/// Its number as a next header.
pub const PROTOCOL: u8 = 99;
/// Bytes of a whole ping packet.
pub const PING_LEN: usize = ip::HEADER_LEN + 9;
/// Bytes of a whole pong packet.
pub const PONG_LEN: usize = ip::HEADER_LEN + 11;

const PING: u8 = b'p';
const PONG: u8 = b'o';
const REJECTED: u8 = b'!';
const HOP_LIMIT: u8 = 64;

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// "Are you up?"
    Ping([u8; 8]),
    /// "Yes."
    Pong([u8; 8]),
    /// A connection was refused by a filter over there; for logs at most.
    Rejected,
    /// Anything else: consume it too.
    Other,
}

/// Reads the payload of an IPv6 packet of protocol [`PROTOCOL`].
pub fn parse(payload: &[u8]) -> Message {
    match payload {
        [PING, data @ ..] => data.first_chunk().map_or(Message::Other, |data| Message::Ping(*data)),
        [PONG, data @ ..] => data.first_chunk().map_or(Message::Other, |data| Message::Pong(*data)),
        [REJECTED, ..] => Message::Rejected,
        _ => Message::Other,
    }
}

/// Writes a ping packet and returns its length. `None`: `out` is too short.
pub fn write_ping(source: Ipv6Addr, destination: Ipv6Addr, data: &[u8; 8], out: &mut [u8]) -> Option<usize> {
    let header = Ipv6Header { source, destination, next_header: PROTOCOL, hop_limit: HOP_LIMIT, flow_label: 0 };
    let mut payload = [0; 9];
    payload[0] = PING;
    payload[1..].copy_from_slice(data);
    header.write(&payload, out)
}

/// Writes the answer to the ping packet `request` and returns its length. `None`: `request` is not a ping, or `out` is
/// too short.
pub fn write_pong(request: &[u8], out: &mut [u8]) -> Option<usize> {
    let packet = ip::Ipv6Packet::parse(request)?;
    if packet.next_header() != PROTOCOL {
        return None;
    }
    let Message::Ping(data) = parse(packet.payload()) else { return None };
    let header = Ipv6Header {
        source: packet.destination(),
        destination: packet.source(),
        next_header: PROTOCOL,
        hop_limit: HOP_LIMIT,
        flow_label: !packet.flow_label() & 0xf_ffff,
    };
    // The last two bytes are the port of a local API that we do not have.
    let mut payload = [0; 11];
    payload[0] = PONG;
    payload[1..9].copy_from_slice(&data);
    header.write(&payload, out)
}
