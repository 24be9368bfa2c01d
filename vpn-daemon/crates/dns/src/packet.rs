//! Decides which packets to the DNS address are taken: plain UDP, TCP and echo requests of this machine, nothing else.

use std::net::Ipv6Addr;

use codervpn_wire::ip::{self, Ipv6Packet, Upper};
use codervpn_wire::node::DNS_ADDRESS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Not a plain packet of a protocol spoken here.
    Malformed,
    /// Not from this machine's own address.
    ForeignSource,
    BadChecksum,
}

/// The packet, and what it carries: UDP, TCP or an echo request.
///
/// `verify`: whether the checksum is the sender's; otherwise it is for us to complete and the link is local.
pub(crate) fn parse(bytes: &[u8], own: Ipv6Addr, verify: bool) -> Result<(Ipv6Packet<'_>, Upper<'_>), Unusable> {
    let packet = Ipv6Packet::parse(bytes).ok_or(Unusable::Malformed)?;
    if packet.bytes().len() != bytes.len() || packet.destination() != DNS_ADDRESS {
        return Err(Unusable::Malformed);
    }
    if packet.source() != own {
        return Err(Unusable::ForeignSource);
    }
    // Programs that ask a name server send no extension headers.
    let plain = matches!(packet.next_header(), ip::TCP | ip::UDP | ip::ICMPV6);
    let upper = packet.upper().filter(|_| plain).ok_or(Unusable::Malformed)?;
    let spoken = match &upper {
        Upper::Tcp(_) => true,
        Upper::Udp(udp) => udp.bytes().len() == packet.payload().len(),
        Upper::Icmpv6(icmp) => icmp.kind() == ip::ICMPV6_ECHO_REQUEST,
        _ => false,
    };
    if !spoken {
        return Err(Unusable::Malformed);
    }
    if verify && !ip::has_right_checksum(&packet) {
        return Err(Unusable::BadChecksum);
    }
    Ok((packet, upper))
}
