//! Interception (`dns-and-os.md` 1.8), with packets built and judged by etherparse.

use std::net::Ipv6Addr;

use etherparse::{Icmpv6Slice, Icmpv6Type, NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use proptest::prelude::{any, prop, proptest};

use super::{AGENT, OWN, at, decode, input, query, responder};
use crate::{DNS_ADDRESS, Responder, Suffix};

const AAAA: u16 = 28;

fn udp(source: Ipv6Addr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let builder = PacketBuilder::ipv6(source.octets(), DNS_ADDRESS.octets(), 64).udp(ports.0, ports.1);
    let mut packet = Vec::new();
    builder.write(&mut packet, payload).unwrap();
    packet
}

fn send(responder: &mut Responder, packet: &[u8]) -> Vec<Vec<u8>> {
    let mut replies = Vec::new();
    responder.handle_packet(packet, at(1), &mut |reply: &[u8]| replies.push(reply.to_vec()));
    replies
}

/// Checks everything but the payload, which is returned with the ports.
fn udp_payload(packet: &[u8]) -> (u16, u16, Vec<u8>) {
    let sliced = SlicedPacket::from_ip(packet).unwrap();
    let Some(NetSlice::Ipv6(ip)) = sliced.net else { panic!("no IPv6") };
    let header = ip.header();
    assert_eq!((header.source_addr(), header.destination_addr()), (DNS_ADDRESS, OWN));
    assert_eq!((header.hop_limit(), header.flow_label().value()), (64, 0));
    let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
    let sum = udp.to_header().calc_checksum_ipv6_raw(header.source(), header.destination(), udp.payload()).unwrap();
    assert_eq!(udp.checksum(), sum);
    assert_ne!(udp.checksum(), 0, "mandatory in IPv6");
    (udp.source_port(), udp.destination_port(), udp.payload().to_vec())
}

fn icmp(packet: &[u8]) -> (Icmpv6Type, Vec<u8>) {
    let sliced = SlicedPacket::from_ip(packet).unwrap();
    let Some(TransportSlice::Icmpv6(icmp)) = sliced.transport else { panic!("no ICMPv6") };
    let icmp: Icmpv6Slice<'_> = icmp;
    assert!(icmp.is_checksum_valid(DNS_ADDRESS.octets(), OWN.octets()));
    (icmp.icmp_type(), icmp.payload().to_vec())
}

#[test]
fn responder_moves_to_the_data_thread() {
    fn sendable<T: Send>(_: &T) {}
    sendable(&responder().0);
}

/// D-24: A and AAAA back to back from one port.
#[test]
fn queries_of_one_socket_are_all_answered() {
    let (mut responder, _) = responder();
    for round in 0..1000u16 {
        for rtype in [1, AAAA] {
            let mut asked = query("main.ws.me.coder", rtype);
            asked[..2].copy_from_slice(&round.to_be_bytes());
            let replies = send(&mut responder, &udp(OWN, (40000, 53), &asked));
            let (source, destination, payload) = udp_payload(&replies[0]);
            assert_eq!((replies.len(), source, destination), (1, 53, 40000));
            let message = decode(&payload);
            assert_eq!((message.metadata.id, message.answers.len()), (round, usize::from(rtype == AAAA)));
        }
    }
    assert_eq!(responder.stats().queries_udp, 2000);
}

/// A name is answered with the next query after the swap, and gone with the next after the withdrawal (D-18).
#[test]
fn swapped_zone_is_answered_at_once() {
    let (mut responder, zone) = responder();
    let mut answers = |name: &str| {
        let replies = send(&mut responder, &udp(OWN, (40000, 53), &query(name, AAAA)));
        decode(&udp_payload(&replies[0]).2).answers.len()
    };
    assert_eq!((answers("ws.coder"), answers("later.coder")), (1, 0));
    let mut later = input();
    later.workspaces[0].name = "later".to_owned();
    std::thread::spawn({
        let zone = zone.clone();
        move || zone.publish(&later, 1_700_000_001)
    })
    .join()
    .unwrap();
    assert_eq!((answers("ws.coder"), answers("later.coder")), (0, 1));
    zone.withdraw(&Suffix::default(), 1_700_000_002);
    assert_eq!(answers("later.coder"), 0);
}

/// D-25 and item 2: nobody but this machine's own address may ask.
#[test]
fn foreign_sources_are_dropped() {
    let (mut responder, _) = responder();
    for source in [AGENT, DNS_ADDRESS, Ipv6Addr::LOCALHOST] {
        assert!(send(&mut responder, &udp(source, (40000, 53), &query("ws.coder", AAAA))).is_empty());
    }
    assert_eq!(responder.stats().dropped_foreign_source, 3);
}

#[test]
fn other_ports_are_unreachable() {
    let (mut responder, _) = responder();
    let packet = udp(OWN, (40000, 5353), &[7; 1232]);
    let replies = send(&mut responder, &packet);
    let (kind, quoted) = icmp(&replies[0]);
    assert!(matches!(kind, Icmpv6Type::DestinationUnreachable(code) if code.code_u8() == 4), "{kind:?}");
    assert!(replies[0].len() == 1280 && packet.starts_with(&quoted), "as much as fits");
    // RFC 4443: limited.
    let sent = (0..1000).filter(|_| !send(&mut responder, &packet).is_empty()).count();
    assert_eq!(sent, 99);
}

#[test]
fn echo_is_replied_to() {
    let (mut responder, _) = responder();
    let mut packet = Vec::new();
    let builder = PacketBuilder::ipv6(OWN.octets(), DNS_ADDRESS.octets(), 64).icmpv6_echo_request(5, 6);
    builder.write(&mut packet, b"abcdefg").unwrap();
    let (kind, payload) = icmp(&send(&mut responder, &packet)[0]);
    assert!(matches!(kind, Icmpv6Type::EchoReply(echo) if (echo.id, echo.seq) == (5, 6)), "{kind:?}");
    assert_eq!(payload, b"abcdefg");
    packet[44] ^= 1;
    assert!(send(&mut responder, &packet).is_empty());
}

/// Item 3: with NEEDS_CSUM the checksum is partial and not to be looked at.
#[test]
fn checksum_is_verified_unless_offloaded() {
    let (mut responder, _) = responder();
    for sum in [[0, 0], [0x12, 0x34]] {
        let mut packet = udp(OWN, (40000, 53), &query("ws.coder", AAAA));
        packet[46..48].copy_from_slice(&sum);
        assert!(send(&mut responder, &packet).is_empty());
        let mut replies = 0;
        responder.handle_offloaded_packet(&packet, at(1), &mut |reply: &[u8]| {
            udp_payload(reply);
            replies += 1;
        });
        assert_eq!(replies, 1);
    }
    assert_eq!(responder.stats().dropped_checksum, 2);
}

/// Item 1: no extension headers, no fragments, no wrong lengths, no other version or destination.
#[test]
fn anything_but_plain_packets_is_dropped() {
    let (mut responder, _) = responder();
    let good = udp(OWN, (40000, 53), &query("ws.coder", AAAA));
    type Change<'c> = &'c dyn Fn(&mut Vec<u8>);
    let changes: [Change<'_>; 8] = [
        &|p| p[6] = 0,
        &|p| p[6] = 44,
        &|p| p[0] = 0x45,
        &|p| p[5] -= 1,
        &|p| p[45] += 1,
        &|p| p[39] = 0x54,
        &|p| p.truncate(39),
        &|p| p.push(0),
    ];
    for change in changes {
        let mut packet = good.clone();
        change(&mut packet);
        assert!(send(&mut responder, &packet).is_empty());
    }
    assert_eq!(responder.stats().dropped_malformed, 8);
    assert_eq!(send(&mut responder, &good).len(), 1);
}

/// TCP to any port but 53 is refused, so that `connect()` fails at once.
#[test]
fn tcp_to_other_ports_is_reset() {
    let (mut responder, _) = responder();
    for port in [80, 443, 54] {
        let mut packet = Vec::new();
        let builder = PacketBuilder::ipv6(OWN.octets(), DNS_ADDRESS.octets(), 64).tcp(40000, port, 1000, 65535).syn();
        builder.write(&mut packet, &[]).unwrap();
        let replies = send(&mut responder, &packet);
        let sliced = SlicedPacket::from_ip(&replies[0]).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else { panic!("no TCP") };
        assert!(tcp.rst() && tcp.ack() && tcp.acknowledgment_number() == 1001);
        assert_eq!((tcp.source_port(), tcp.destination_port()), (port, 40000));
        let sum = tcp.calc_checksum_ipv6(DNS_ADDRESS.octets(), OWN.octets()).unwrap();
        assert_eq!(sum, tcp.checksum());
    }
    assert_eq!(responder.poll_timeout(), None);
}

proptest! {
    /// Nothing from outside can panic.
    #[test]
    fn any_packet_is_survived(
        next in prop::sample::select(vec![6u8, 17, 58, 0, 44]),
        mut body in prop::collection::vec(any::<u8>(), 0..200),
        dns in any::<bool>(),
        offset in 4u8..8,
    ) {
        let (mut responder, _) = responder();
        let mut packet = vec![0x60, 0, 0, 0, 0, body.len() as u8, next, 64];
        packet.extend_from_slice(&OWN.octets());
        packet.extend_from_slice(&DNS_ADDRESS.octets());
        if dns && body.len() > 20 {
            body[2..4].copy_from_slice(&[0, 53]);
            if next == 17 {
                body[4..6].copy_from_slice(&[0, packet[5]]);
            } else {
                body[12] = offset << 4;
            }
        }
        packet.extend_from_slice(&body);
        let mut longest = 0;
        for _ in 0..2 {
            responder.handle_offloaded_packet(&packet, at(0), &mut |reply: &[u8]| longest = longest.max(reply.len()));
            responder.handle_packet(&packet, at(0), &mut |reply: &[u8]| longest = longest.max(reply.len()));
        }
        responder.handle_timeout(at(60_000), &mut |_: &[u8]| {});
        assert!(longest <= 1280);
    }
}
