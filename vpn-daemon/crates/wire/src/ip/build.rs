//! Decides which packets we originate inside the tunnel, and how they are written.

use std::net::Ipv6Addr;

use super::{
    HEADER_LEN, ICMPV6, ICMPV6_ECHO_REPLY, ICMPV6_ECHO_REQUEST, ICMPV6_REDIRECT, ICMPV6_TOO_BIG, ICMPV6_UNREACHABLE,
    Ipv6Packet, MTU, TCP, UDP, Upper, checksum,
};

/// Hop limit of what we originate.
const HOP_LIMIT: u8 = 64;
/// Type, code, checksum and four bytes by type.
const ICMPV6_HEADER_LEN: usize = 8;

/// A fixed header to write. Traffic class is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Header {
    /// From.
    pub source: Ipv6Addr,
    /// To.
    pub destination: Ipv6Addr,
    /// What follows.
    pub next_header: u8,
    /// Hops.
    pub hop_limit: u8,
    /// 20 bits.
    pub flow_label: u32,
}

impl Ipv6Header {
    /// A header as we usually write it.
    pub fn new(source: Ipv6Addr, destination: Ipv6Addr, next_header: u8) -> Self {
        Self { source, destination, next_header, hop_limit: HOP_LIMIT, flow_label: 0 }
    }

    /// The bytes, for a payload of that length. `None`: longer than IPv6 allows.
    pub fn to_bytes(&self, payload_len: usize) -> Option<[u8; HEADER_LEN]> {
        let mut out = [0; HEADER_LEN];
        out[..4].copy_from_slice(&(6 << 28 | self.flow_label & 0xf_ffff).to_be_bytes());
        out[4..6].copy_from_slice(&u16::try_from(payload_len).ok()?.to_be_bytes());
        out[6] = self.next_header;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&self.source.octets());
        out[24..].copy_from_slice(&self.destination.octets());
        Some(out)
    }

    /// Writes header and payload and returns the packet's length. `None`: `out` is too short.
    pub fn write(&self, payload: &[u8], out: &mut [u8]) -> Option<usize> {
        let packet = out.get_mut(..HEADER_LEN + payload.len())?;
        let (head, room) = packet.split_first_chunk_mut::<HEADER_LEN>()?;
        *head = self.to_bytes(payload.len())?;
        room.copy_from_slice(payload);
        Some(HEADER_LEN + payload.len())
    }

    /// Writes a packet whose payload `fill` writes into `len` bytes, then puts its checksum at `checksum_at`.
    fn write_with(
        &self,
        len: usize,
        checksum_at: usize,
        out: &mut [u8],
        fill: impl FnOnce(&mut [u8]),
    ) -> Option<usize> {
        let packet = out.get_mut(..HEADER_LEN + len)?;
        let (head, payload) = packet.split_first_chunk_mut::<HEADER_LEN>()?;
        *head = self.to_bytes(len)?;
        payload.fill(0);
        fill(payload);
        let mut sum = checksum(self.source, self.destination, self.next_header, payload);
        if sum == 0 && self.next_header == UDP {
            sum = 0xffff;
        }
        payload.get_mut(checksum_at..)?.first_chunk_mut::<2>()?.copy_from_slice(&sum.to_be_bytes());
        Some(HEADER_LEN + len)
    }
}

/// Why a destination is unreachable: the code of ICMPv6 type 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreachable {
    /// Code 0.
    NoRoute,
    /// Code 3: `connect` fails at once with "no route to host".
    Address,
    /// Code 4.
    Port,
}

impl Unreachable {
    fn code(self) -> u8 {
        match self {
            Self::NoRoute => 0,
            Self::Address => 3,
            Self::Port => 4,
        }
    }
}

/// RFC 4443 2.4 (e): no error about an error or a redirect, nor about what came from or went to many or to nobody.
pub fn may_answer_with_error(packet: &Ipv6Packet<'_>) -> bool {
    let (source, destination) = (packet.source(), packet.destination());
    if source.is_unspecified() || source.is_multicast() || source.is_loopback() || destination.is_multicast() {
        return false;
    }
    match packet.upper() {
        Some(Upper::Icmpv6(icmp)) => !icmp.is_error() && icmp.kind() != ICMPV6_REDIRECT,
        // A fragment of an ICMPv6 message may be one of an error.
        Some(Upper::Fragment { protocol }) => protocol != ICMPV6,
        Some(_) => true,
        None => false,
    }
}

/// Writes "destination unreachable" about `packet`, from `from` to its source, and returns its length; at most [`MTU`].
/// `None`: this packet must not be answered (see [`may_answer_with_error`]), or `out` is too short.
pub fn write_unreachable(
    packet: &Ipv6Packet<'_>,
    reason: Unreachable,
    from: Ipv6Addr,
    out: &mut [u8],
) -> Option<usize> {
    write_error(packet, ICMPV6_UNREACHABLE, reason.code(), 0, from, out)
}

/// Writes "packet too big" (T-47), as [`write_unreachable`] does.
pub fn write_packet_too_big(packet: &Ipv6Packet<'_>, mtu: u32, from: Ipv6Addr, out: &mut [u8]) -> Option<usize> {
    write_error(packet, ICMPV6_TOO_BIG, 0, mtu, from, out)
}

fn write_error(
    packet: &Ipv6Packet<'_>,
    kind: u8,
    code: u8,
    parameter: u32,
    from: Ipv6Addr,
    out: &mut [u8],
) -> Option<usize> {
    if !may_answer_with_error(packet) {
        return None;
    }
    let quote = packet.bytes();
    let quote = quote.get(..MTU - HEADER_LEN - ICMPV6_HEADER_LEN).unwrap_or(quote);
    let header = Ipv6Header::new(from, packet.source(), ICMPV6);
    header.write_with(ICMPV6_HEADER_LEN + quote.len(), 2, out, |payload| {
        let (head, body) = payload.split_at_mut(ICMPV6_HEADER_LEN);
        head[0] = kind;
        head[1] = code;
        head[4..].copy_from_slice(&parameter.to_be_bytes());
        body.copy_from_slice(quote);
    })
}

/// Writes an echo request and returns its length. `None`: `out` is too short.
pub fn write_echo_request(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    id: u16,
    sequence: u16,
    data: &[u8],
    out: &mut [u8],
) -> Option<usize> {
    write_echo(&Ipv6Header::new(source, destination, ICMPV6), ICMPV6_ECHO_REQUEST, [id, sequence], data, out)
}

/// Writes the answer to an echo request and returns its length. `None`: `request` is none, or `out` is too short.
pub fn write_echo_reply(request: &Ipv6Packet<'_>, out: &mut [u8]) -> Option<usize> {
    let Some(Upper::Icmpv6(icmp)) = request.upper() else { return None };
    if icmp.kind() != ICMPV6_ECHO_REQUEST || request.source().is_multicast() || request.source().is_unspecified() {
        return None;
    }
    let header = Ipv6Header::new(request.destination(), request.source(), ICMPV6);
    write_echo(&header, ICMPV6_ECHO_REPLY, [icmp.echo_id(), icmp.echo_sequence()], icmp.body(), out)
}

fn write_echo(header: &Ipv6Header, kind: u8, numbers: [u16; 2], data: &[u8], out: &mut [u8]) -> Option<usize> {
    header.write_with(ICMPV6_HEADER_LEN + data.len(), 2, out, |payload| {
        let (head, body) = payload.split_at_mut(ICMPV6_HEADER_LEN);
        head[0] = kind;
        head[4..6].copy_from_slice(&numbers[0].to_be_bytes());
        head[6..].copy_from_slice(&numbers[1].to_be_bytes());
        body.copy_from_slice(data);
    })
}

/// Writes the reset that refuses a TCP segment (RFC 9293 3.10.7.1) and returns its length. `None`: not TCP, itself a
/// reset, or `out` is too short.
pub fn write_tcp_reset(packet: &Ipv6Packet<'_>, out: &mut [u8]) -> Option<usize> {
    let Some(Upper::Tcp(tcp)) = packet.upper() else { return None };
    if tcp.rst() || packet.source().is_multicast() || packet.destination().is_multicast() {
        return None;
    }
    let (sequence, acknowledgment, flags) = if tcp.ack() {
        (tcp.acknowledgment(), 0, 0b0000_0100)
    } else {
        let len = tcp.payload().len() as u32 + u32::from(tcp.syn()) + u32::from(tcp.fin());
        (0, tcp.sequence().wrapping_add(len), 0b0001_0100)
    };
    let header = Ipv6Header::new(packet.destination(), packet.source(), TCP);
    header.write_with(20, 16, out, |segment| {
        segment[..2].copy_from_slice(&tcp.destination().to_be_bytes());
        segment[2..4].copy_from_slice(&tcp.source().to_be_bytes());
        segment[4..8].copy_from_slice(&sequence.to_be_bytes());
        segment[8..12].copy_from_slice(&acknowledgment.to_be_bytes());
        segment[12] = 5 << 4;
        segment[13] = flags;
    })
}

/// Writes a UDP datagram and returns the packet's length. `None`: `out` is too short, or the data too long for UDP.
pub fn write_udp(source: (Ipv6Addr, u16), destination: (Ipv6Addr, u16), data: &[u8], out: &mut [u8]) -> Option<usize> {
    let len = u16::try_from(8 + data.len()).ok()?;
    let header = Ipv6Header::new(source.0, destination.0, UDP);
    header.write_with(len.into(), 6, out, |datagram| {
        let (head, body) = datagram.split_at_mut(8);
        head[..2].copy_from_slice(&source.1.to_be_bytes());
        head[2..4].copy_from_slice(&destination.1.to_be_bytes());
        head[4..6].copy_from_slice(&len.to_be_bytes());
        body.copy_from_slice(data);
    })
}
