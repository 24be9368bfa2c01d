//! The packets that parties send through the tunnel. Each carries a number of its own, who sent it to whom, and whether an
//! answer is wanted, so that whatever comes out can be held against what went in.

use std::net::Ipv6Addr;

use codervpn_wire::ip::{self, Ipv6Packet, Upper};

use crate::party::PartyId;

const MAGIC: [u8; 4] = *b"simu";
/// Bytes that every packet has.
pub(crate) const LEAST: usize = 48 + 24;
/// Bytes that a packet may have.
pub(crate) const MOST: usize = ip::MTU;
/// The side that starts a conversation and the side that answers.
const PORTS: (u16, u16) = (5000, 7);

/// What a packet says about itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Label {
    pub(crate) number: u64,
    pub(crate) from: PartyId,
    pub(crate) to: PartyId,
    pub(crate) request: bool,
    pub(crate) answer_wanted: bool,
}

/// A packet of `size` bytes.
pub(crate) fn write(label: &Label, addresses: (Ipv6Addr, Ipv6Addr), size: usize) -> Vec<u8> {
    let size = size.clamp(LEAST, MOST);
    let mut payload = vec![label.number as u8; size - 48];
    payload[..4].copy_from_slice(&MAGIC);
    payload[4..12].copy_from_slice(&label.number.to_be_bytes());
    payload[12..16].copy_from_slice(&(label.from.0 as u32).to_be_bytes());
    payload[16..20].copy_from_slice(&(label.to.0 as u32).to_be_bytes());
    payload[20] = u8::from(label.request);
    payload[21] = u8::from(label.answer_wanted);
    let ports = if label.request { PORTS } else { (PORTS.1, PORTS.0) };
    let mut packet = vec![0; size];
    let written = ip::write_udp((addresses.0, ports.0), (addresses.1, ports.1), &payload, &mut packet);
    packet.truncate(written.expect("there is room"));
    packet
}

/// What came out of a tunnel; `None` for what no party sent, such as an ICMPv6 error of the engine.
pub(crate) fn read(packet: &[u8]) -> Option<Label> {
    let packet = Ipv6Packet::parse(packet)?;
    let Upper::Udp(udp) = packet.upper()? else { return None };
    let payload = udp.payload();
    let field = |at: usize| Some(u32::from_be_bytes(payload.get(at..at + 4)?.try_into().ok()?));
    if payload.get(..4)? != MAGIC {
        return None;
    }
    let number = u64::from_be_bytes(payload.get(4..12)?.try_into().ok()?);
    assert!(payload.get(22..)?.iter().all(|byte| *byte == 0 || *byte == number as u8), "packet {number} is damaged");
    Some(Label {
        number,
        from: PartyId(field(12)? as usize),
        to: PartyId(field(16)? as usize),
        request: payload.get(20) == Some(&1),
        answer_wanted: payload.get(21) == Some(&1),
    })
}
