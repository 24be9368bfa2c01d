//! Decides what the packets to and from the DNS address look like: IPv6 without extension headers, UDP, ICMPv6.

use std::net::Ipv6Addr;

use crate::names::DNS_ADDRESS;

pub(crate) const IPV6: usize = 40;
const UDP: usize = 8;
/// The MTU of the tunnel, and the minimum of IPv6.
pub(crate) const MTU: usize = 1280;
const HOP_LIMIT: u8 = 64;

pub(crate) const NEXT_TCP: u8 = 6;
const NEXT_UDP: u8 = 17;
const NEXT_ICMPV6: u8 = 58;

const DESTINATION_UNREACHABLE: u8 = 1;
const PORT_UNREACHABLE: u8 = 4;
const ECHO_REQUEST: u8 = 128;
const ECHO_REPLY: u8 = 129;

/// A packet to the DNS address, addresses and lengths checked.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Packet<'p> {
    Udp { source: u16, destination: u16, payload: &'p [u8] },
    Tcp(TcpSegment<'p>),
    Echo(&'p [u8]),
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TcpSegment<'p> {
    pub(crate) source: u16,
    pub(crate) destination: u16,
    /// Opens a connection.
    pub(crate) is_syn: bool,
    pub(crate) has_payload: bool,
    pub(crate) bytes: &'p [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Not a plain packet of a protocol spoken here.
    Malformed,
    /// Not from this machine's own address.
    ForeignSource,
    BadChecksum,
}

/// `verify`: whether the checksum is the sender's; otherwise it is for us to complete and the link is local.
pub(crate) fn parse(packet: &[u8], own: Ipv6Addr, verify: bool) -> Result<Packet<'_>, Unusable> {
    let (header, body) = packet.split_first_chunk::<IPV6>().ok_or(Unusable::Malformed)?;
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let (next, source, destination) = (header[6], address(&header[8..24]), address(&header[24..40]));
    if header[0] >> 4 != 6 || length != body.len() || destination != DNS_ADDRESS {
        return Err(Unusable::Malformed);
    }
    if source != own {
        return Err(Unusable::ForeignSource);
    }
    let valid = || !verify || checksum(source, destination, next, body) == 0;
    match next {
        NEXT_UDP => {
            let (udp, payload) = body.split_first_chunk::<UDP>().ok_or(Unusable::Malformed)?;
            if usize::from(u16::from_be_bytes([udp[4], udp[5]])) != body.len() {
                return Err(Unusable::Malformed);
            }
            // Zero means "none", which IPv6 does not allow.
            if !valid() || (verify && udp[6..8] == [0, 0]) {
                return Err(Unusable::BadChecksum);
            }
            let word = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
            Ok(Packet::Udp { source: word(0), destination: word(2), payload })
        }
        NEXT_TCP => {
            let tcp = body.first_chunk::<20>().ok_or(Unusable::Malformed)?;
            if !valid() {
                return Err(Unusable::BadChecksum);
            }
            Ok(Packet::Tcp(TcpSegment {
                source: u16::from_be_bytes([tcp[0], tcp[1]]),
                destination: u16::from_be_bytes([tcp[2], tcp[3]]),
                is_syn: tcp[13] & 0b1_0110 == 0b0_0010,
                has_payload: body.len() > usize::from(tcp[12] >> 4) * 4,
                bytes: body,
            }))
        }
        NEXT_ICMPV6 => match body.first() {
            Some(&ECHO_REQUEST) if body.len() >= 8 => {
                if valid() {
                    Ok(Packet::Echo(body))
                } else {
                    Err(Unusable::BadChecksum)
                }
            }
            _ => Err(Unusable::Malformed),
        },
        _ => Err(Unusable::Malformed),
    }
}

/// A datagram from our port 53.
pub(crate) fn write_udp(out: &mut Vec<u8>, own: Ipv6Addr, port: u16, payload: &[u8]) {
    let length = UDP + payload.len();
    begin(out, own, NEXT_UDP, length);
    out.extend_from_slice(&53u16.to_be_bytes());
    out.extend_from_slice(&port.to_be_bytes());
    out.extend_from_slice(&(length as u16).to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(payload);
    end(out, own, NEXT_UDP, 6);
}

/// The reply to an echo request, which came as `body`.
pub(crate) fn write_echo_reply(out: &mut Vec<u8>, own: Ipv6Addr, body: &[u8]) {
    begin(out, own, NEXT_ICMPV6, body.len());
    out.extend_from_slice(&[ECHO_REPLY, 0, 0, 0]);
    out.extend_from_slice(body.get(4..).unwrap_or_default());
    end(out, own, NEXT_ICMPV6, 2);
}

/// "Port unreachable", with as much of `packet` as fits.
pub(crate) fn write_port_unreachable(out: &mut Vec<u8>, own: Ipv6Addr, packet: &[u8]) {
    let quoted = &packet[..packet.len().min(MTU - IPV6 - 8)];
    begin(out, own, NEXT_ICMPV6, 8 + quoted.len());
    out.extend_from_slice(&[DESTINATION_UNREACHABLE, PORT_UNREACHABLE, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(quoted);
    end(out, own, NEXT_ICMPV6, 2);
}

/// A packet to ourselves with this TCP segment and a right checksum.
pub(crate) fn write_tcp(out: &mut Vec<u8>, source: Ipv6Addr, segment: &[u8]) {
    begin(out, source, NEXT_TCP, segment.len());
    out.extend_from_slice(segment);
    // Towards us for once.
    out[8..24].copy_from_slice(&source.octets());
    out[24..40].copy_from_slice(&DNS_ADDRESS.octets());
    end(out, source, NEXT_TCP, 16);
}

fn begin(out: &mut Vec<u8>, own: Ipv6Addr, next: u8, length: usize) {
    out.clear();
    out.extend_from_slice(&[0x60, 0, 0, 0]);
    out.extend_from_slice(&(length as u16).to_be_bytes());
    out.extend_from_slice(&[next, HOP_LIMIT]);
    out.extend_from_slice(&DNS_ADDRESS.octets());
    out.extend_from_slice(&own.octets());
}

/// Puts the checksum at `at` behind the IPv6 header. The sum does not care which way the packet goes.
fn end(out: &mut [u8], own: Ipv6Addr, next: u8, at: usize) {
    let body = &mut out[IPV6..];
    body[at..at + 2].copy_from_slice(&[0, 0]);
    let sum = match checksum(DNS_ADDRESS, own, next, body) {
        0 => 0xffff,
        sum => sum,
    };
    body[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Internet checksum with the pseudo header of IPv6; 0 over a body that carries its right checksum.
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, next: u8, body: &[u8]) -> u16 {
    // 64 KiB of 0xffff stay below 2^32.
    let mut sum = u32::from(next) + body.len() as u32;
    for address in [source, destination] {
        sum += address.segments().iter().map(|segment| u32::from(*segment)).sum::<u32>();
    }
    let (words, rest) = body.as_chunks::<2>();
    sum += words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum::<u32>();
    sum += rest.first().map_or(0, |byte| u32::from(*byte) << 8);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn address(octets: &[u8]) -> Ipv6Addr {
    octets.first_chunk::<16>().map_or(Ipv6Addr::UNSPECIFIED, |octets| Ipv6Addr::from(*octets))
}
