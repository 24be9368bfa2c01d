//! Decides how IPv6 packets inside the tunnel are read and how the few that we originate are written.
//!
//! Reading: [`Ipv6Packet::parse`] checks version and length once; [`Ipv6Packet::upper`] walks the extension headers and
//! gives ports, flags or ICMPv6 types. Writing (in `build`): ICMPv6 errors and echoes, TCP resets, UDP datagrams, all
//! into a buffer of the caller. IPv4 is not used inside the tunnel.

mod build;

use std::net::Ipv6Addr;

pub use build::{
    Ipv6Header, Unreachable, may_answer_with_error, write_echo_reply, write_echo_request, write_packet_too_big,
    write_tcp_reset, write_udp, write_unreachable,
};

/// Bytes of the fixed header.
pub const HEADER_LEN: usize = 40;
/// MTU of the tunnel, the smallest that IPv6 allows. ICMPv6 errors are cut to it too.
pub const MTU: usize = 1280;

/// Next header: TCP.
pub const TCP: u8 = 6;
/// Next header: UDP.
pub const UDP: u8 = 17;
/// Next header: ICMPv6.
pub const ICMPV6: u8 = 58;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const NO_NEXT_HEADER: u8 = 59;
const DESTINATION_OPTIONS: u8 = 60;
/// Extension headers walked; nobody sends more than two or three.
const MAX_EXTENSIONS: usize = 8;

/// ICMPv6 type: destination unreachable.
pub const ICMPV6_UNREACHABLE: u8 = 1;
/// ICMPv6 type: packet too big.
pub const ICMPV6_TOO_BIG: u8 = 2;
/// ICMPv6 type: echo request.
pub const ICMPV6_ECHO_REQUEST: u8 = 128;
/// ICMPv6 type: echo reply.
pub const ICMPV6_ECHO_REPLY: u8 = 129;
const ICMPV6_REDIRECT: u8 = 137;

/// A packet whose version and length are right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Packet<'a> {
    header: &'a [u8; HEADER_LEN],
    payload: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> Ipv6Packet<'a> {
    /// `None`: not IPv6, or shorter than its header says. Bytes beyond the announced length are not looked at.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_LEN>()?;
        let payload = rest.get(..usize::from(u16::from_be_bytes([header[4], header[5]])))?;
        let bytes = bytes.get(..HEADER_LEN + payload.len())?;
        (header[0] >> 4 == 6).then_some(Self { header, payload, bytes })
    }

    /// The whole packet.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Where it says to come from.
    pub fn source(&self) -> Ipv6Addr {
        address(self.header, 8)
    }

    /// Where it goes.
    pub fn destination(&self) -> Ipv6Addr {
        address(self.header, 24)
    }

    /// Type of what follows the fixed header; see [`Ipv6Packet::upper`] for what follows the extensions.
    pub fn next_header(&self) -> u8 {
        self.header[6]
    }

    /// Hops left.
    pub fn hop_limit(&self) -> u8 {
        self.header[7]
    }

    /// 20 bits.
    pub fn flow_label(&self) -> u32 {
        u32::from_be_bytes([0, self.header[1] & 0x0f, self.header[2], self.header[3]])
    }

    /// All that follows the fixed header.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// What the packet carries behind its extension headers. `None`: broken, or more headers than anybody sends.
    pub fn upper(&self) -> Option<Upper<'a>> {
        let mut next = self.next_header();
        let mut rest = self.payload;
        for _ in 0..=MAX_EXTENSIONS {
            let len = match next {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => (usize::from(*rest.get(1)?) + 1) * 8,
                AUTHENTICATION => (usize::from(*rest.get(1)?) + 2) * 4,
                FRAGMENT => {
                    let [after, _, high, low, ..] = *rest.first_chunk::<8>()?;
                    let offset_and_more = u16::from_be_bytes([high, low]);
                    if offset_and_more & !0b110 != 0 {
                        return Some(Upper::Fragment { protocol: after });
                    }
                    8
                }
                _ => return Upper::parse(next, rest),
            };
            let (header, after) = rest.split_at_checked(len)?;
            next = *header.first()?;
            rest = after;
        }
        None
    }
}

fn address(header: &[u8; HEADER_LEN], at: usize) -> Ipv6Addr {
    let bytes = header.get(at..).and_then(|rest| rest.first_chunk::<16>());
    Ipv6Addr::from(*bytes.expect("both addresses lie within the fixed header"))
}

/// What stands behind the IPv6 headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upper<'a> {
    /// TCP with a whole header.
    Tcp(Tcp<'a>),
    /// UDP with a whole header.
    Udp(Udp<'a>),
    /// ICMPv6 with a whole header.
    Icmpv6(Icmpv6<'a>),
    /// Part of a fragmented packet, so ports may be missing or incomplete.
    Fragment {
        /// Of the first header in the fragmented part.
        protocol: u8,
    },
    /// Any other protocol, e.g. TSMP.
    Other {
        /// Its number.
        protocol: u8,
        /// What it carries.
        payload: &'a [u8],
    },
}

impl<'a> Upper<'a> {
    fn parse(protocol: u8, payload: &'a [u8]) -> Option<Self> {
        match protocol {
            TCP => Tcp::parse(payload).map(Self::Tcp),
            UDP => Udp::parse(payload).map(Self::Udp),
            ICMPV6 => Icmpv6::parse(payload).map(Self::Icmpv6),
            NO_NEXT_HEADER => Some(Self::Other { protocol, payload: &[] }),
            _ => Some(Self::Other { protocol, payload }),
        }
    }
}

/// A TCP segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tcp<'a> {
    header: &'a [u8; 20],
    payload: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> Tcp<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let header = bytes.first_chunk::<20>()?;
        let offset = usize::from(header[12] >> 4) * 4;
        if offset < header.len() {
            return None;
        }
        Some(Self { header, payload: bytes.get(offset..)?, bytes })
    }

    /// Port.
    pub fn source(&self) -> u16 {
        u16::from_be_bytes([self.header[0], self.header[1]])
    }

    /// Port.
    pub fn destination(&self) -> u16 {
        u16::from_be_bytes([self.header[2], self.header[3]])
    }

    /// Number of the first byte.
    pub fn sequence(&self) -> u32 {
        u32::from_be_bytes([self.header[4], self.header[5], self.header[6], self.header[7]])
    }

    /// Next byte expected; meaningful with [`Tcp::ack`].
    pub fn acknowledgment(&self) -> u32 {
        u32::from_be_bytes([self.header[8], self.header[9], self.header[10], self.header[11]])
    }

    /// Flag: last byte.
    pub fn fin(&self) -> bool {
        self.header[13] & 1 != 0
    }

    /// Flag: start.
    pub fn syn(&self) -> bool {
        self.header[13] & 2 != 0
    }

    /// Flag: reset.
    pub fn rst(&self) -> bool {
        self.header[13] & 4 != 0
    }

    /// Flag: [`Tcp::acknowledgment`] counts.
    pub fn ack(&self) -> bool {
        self.header[13] & 16 != 0
    }

    /// Data.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Header and data, e.g. for a checksum.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// A UDP datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Udp<'a> {
    header: &'a [u8; 8],
    payload: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> Udp<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let header = bytes.first_chunk::<8>()?;
        let bytes = bytes.get(..usize::from(u16::from_be_bytes([header[4], header[5]])))?;
        Some(Self { header, payload: bytes.get(8..)?, bytes })
    }

    /// Port.
    pub fn source(&self) -> u16 {
        u16::from_be_bytes([self.header[0], self.header[1]])
    }

    /// Port.
    pub fn destination(&self) -> u16 {
        u16::from_be_bytes([self.header[2], self.header[3]])
    }

    /// Data.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Header and data, e.g. for a checksum.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// An ICMPv6 message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Icmpv6<'a> {
    header: &'a [u8; 8],
    body: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> Icmpv6<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, body) = bytes.split_first_chunk::<8>()?;
        Some(Self { header, body, bytes })
    }

    /// Type.
    pub fn kind(&self) -> u8 {
        self.header[0]
    }

    /// Code.
    pub fn code(&self) -> u8 {
        self.header[1]
    }

    /// An error message, not an informational one.
    pub fn is_error(&self) -> bool {
        self.kind() < 128
    }

    /// Identifier of an echo.
    pub fn echo_id(&self) -> u16 {
        u16::from_be_bytes([self.header[4], self.header[5]])
    }

    /// Sequence number of an echo.
    pub fn echo_sequence(&self) -> u16 {
        u16::from_be_bytes([self.header[6], self.header[7]])
    }

    /// What follows the eight bytes: an echo's data, or the start of the packet that an error complains about.
    pub fn body(&self) -> &'a [u8] {
        self.body
    }

    /// The packet that an error complains about, as far as it is quoted: source, destination, and the first bytes
    /// behind its fixed header. `None`: not an error, or not even a header is quoted.
    pub fn quoted(&self) -> Option<Quoted<'a>> {
        if !self.is_error() {
            return None;
        }
        let (header, rest) = self.body.split_first_chunk::<HEADER_LEN>()?;
        (header[0] >> 4 == 6).then(|| Quoted {
            source: address(header, 8),
            destination: address(header, 24),
            next_header: header[6],
            ports: rest.first_chunk().map(|&[a, b, c, d]| (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))),
            payload: rest,
        })
    }

    /// Header and body, e.g. for a checksum.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// The packet inside an ICMPv6 error, cut off somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quoted<'a> {
    /// Its source.
    pub source: Ipv6Addr,
    /// Its destination.
    pub destination: Ipv6Addr,
    /// Its first next header.
    pub next_header: u8,
    /// Source and destination port, if `next_header` is TCP or UDP.
    pub ports: Option<(u16, u16)>,
    /// What is left behind its fixed header.
    pub payload: &'a [u8],
}

/// The checksum of TCP, UDP and ICMPv6 over `bytes` with the pseudo header. Over bytes that contain a right checksum it
/// is 0; UDP sends 0 as 0xffff.
pub fn checksum(source: Ipv6Addr, destination: Ipv6Addr, protocol: u8, bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    let mut add = |bytes: &[u8]| {
        let mut pairs = bytes.chunks_exact(2);
        for pair in &mut pairs {
            if let [high, low] = *pair {
                sum += u64::from(u16::from_be_bytes([high, low]));
            }
        }
        if let [last] = pairs.remainder() {
            sum += u64::from(*last) << 8;
        }
    };
    add(&source.octets());
    add(&destination.octets());
    add(&(bytes.len() as u64).to_be_bytes());
    add(&[0, protocol]);
    add(bytes);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Whether a packet's TCP, UDP or ICMPv6 checksum is right. Packets from a TUN device with offload carry unfinished ones.
pub fn has_right_checksum(packet: &Ipv6Packet<'_>) -> bool {
    let (protocol, bytes) = match packet.upper() {
        Some(Upper::Tcp(tcp)) => (TCP, tcp.bytes()),
        Some(Upper::Udp(udp)) => (UDP, udp.bytes()),
        Some(Upper::Icmpv6(icmp)) => (ICMPV6, icmp.bytes()),
        _ => return false,
    };
    // A UDP checksum of zero means "none", which IPv6 forbids.
    let absent = protocol == UDP && bytes.get(6..8) == Some(&[0, 0]);
    !absent && checksum(packet.source(), packet.destination(), protocol, bytes) == 0
}
