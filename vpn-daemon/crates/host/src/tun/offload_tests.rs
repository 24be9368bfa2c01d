//! Cutting and joining are inverse, keep the order of every conversation, and leave right checksums, judged by another
//! implementation.

use std::net::Ipv6Addr;

use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;

const MTU: usize = 1280;

fn ends(flow: u8) -> ([u8; 16], [u8; 16]) {
    let from: Ipv6Addr = "fd60:627a:a42b::1".parse().unwrap();
    let to = Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 0, 0, 0, 0, 0x100 + u16::from(flow));
    (from.octets(), to.octets())
}

fn tcp(flow: u8, sequence: u32, payload: &[u8], push: bool) -> Vec<u8> {
    let (from, to) = ends(flow);
    let mut builder = PacketBuilder::ipv6(from, to, 64)
        .tcp(5000 + u16::from(flow), 80, sequence, 64_000)
        .ack(77)
        .options_raw(&[1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2])
        .unwrap();
    if push {
        builder = builder.psh();
    }
    let mut packet = Vec::new();
    builder.write(&mut packet, payload).unwrap();
    packet
}

fn udp(flow: u8, payload: &[u8]) -> Vec<u8> {
    let (from, to) = ends(flow);
    let mut packet = Vec::new();
    PacketBuilder::ipv6(from, to, 64).udp(6000 + u16::from(flow), 53).write(&mut packet, payload).unwrap();
    packet
}

/// The judge: a checksum computed by others.
fn assert_right(packet: &[u8]) {
    let sliced = SlicedPacket::from_ip(packet).unwrap();
    let (from, to) = (packet[8..24].try_into().unwrap(), packet[24..40].try_into().unwrap());
    match sliced.transport.unwrap() {
        TransportSlice::Tcp(tcp) => {
            let header = tcp.to_header();
            let checksum = header.calc_checksum_ipv6_raw(from, to, tcp.payload()).unwrap();
            assert_eq!(header.checksum, checksum);
        }
        TransportSlice::Udp(udp) => {
            let header = udp.to_header();
            assert_eq!(usize::from(header.length), 8 + udp.payload().len());
            assert_eq!(header.checksum, header.calc_checksum_ipv6_raw(from, to, udp.payload()).unwrap());
        }
        _ => panic!("another transport"),
    }
}

/// What `Tun` does with packets of peers, the writes kept.
fn join(packets: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut arena = Vec::new();
    let mut runs = Runs::new(true);
    let mut written = Vec::new();
    for packet in packets {
        let piece = Piece { at: arena.len(), length: packet.len() };
        arena.extend_from_slice(packet);
        if !runs.add(&arena, piece) {
            runs.flush(&arena, |joined| written.push(bytes_of(&joined, &arena)));
            assert!(runs.add(&arena, piece));
        }
    }
    runs.flush(&arena, |joined| written.push(bytes_of(&joined, &arena)));
    written
}

fn bytes_of(joined: &Joined<'_>, arena: &[u8]) -> Vec<u8> {
    let mut bytes = joined.vnet.to_vec();
    bytes.extend_from_slice(joined.headers());
    let skip = if joined.pieces.len() > 1 { joined.headers().len() } else { 0 };
    for piece in joined.pieces {
        bytes.extend_from_slice(&arena[piece.at + skip..piece.at + piece.length]);
    }
    bytes
}

/// What the kernel would do with one write, and what `Frame` does with one read.
fn cut(written: &[u8]) -> Vec<Vec<u8>> {
    let mut frame = Frame::default();
    frame
        .fill_with_header(|buffer| {
            buffer[..written.len()].copy_from_slice(written);
            Ok::<_, std::io::Error>(written.len())
        })
        .unwrap();
    let mut packets = Vec::new();
    while let Some(packet) = frame.next() {
        packets.push(packet.to_vec());
    }
    packets
}

fn by_flow(packets: &[Vec<u8>], flow: &[u8]) -> Vec<Vec<u8>> {
    packets.iter().filter(|packet| &packet[8..44] == flow).cloned().collect()
}

#[derive(Debug, Clone)]
enum Sent {
    Data { flow: u8, length: usize, push: bool },
    Datagram { flow: u8, length: usize },
    Gap { flow: u8 },
}

fn sent() -> impl Strategy<Value = Sent> {
    prop_oneof![
        8 => (0..4_u8, prop_oneof![Just(1208_usize), 1..1208_usize], prop::bool::weighted(0.1))
            .prop_map(|(flow, length, push)| Sent::Data { flow, length, push }),
        4 => (0..3_u8, prop_oneof![Just(1200_usize), 1..1200_usize]).prop_map(|(flow, length)| Sent::Datagram { flow, length }),
        1 => (0..4_u8).prop_map(|flow| Sent::Gap { flow }),
    ]
}

/// Packets in the order of the steps, sequence numbers as a sender would give them.
fn packets_of(steps: &[Sent]) -> Vec<Vec<u8>> {
    let mut sequences = [u32::MAX - 5000; 4];
    let mut packets = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let fill = |length: usize| (0..length).map(|i| (i * 7 + index) as u8).collect::<Vec<u8>>();
        match *step {
            Sent::Data { flow, length, push } => {
                let sequence = &mut sequences[usize::from(flow)];
                packets.push(tcp(flow, *sequence, &fill(length), push));
                *sequence = sequence.wrapping_add(length as u32);
            }
            Sent::Datagram { flow, length } => packets.push(udp(flow, &fill(length))),
            Sent::Gap { flow } => sequences[usize::from(flow)] = sequences[usize::from(flow)].wrapping_add(10_000),
        }
    }
    packets
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn joined_and_cut_again_every_flow_is_as_it_was(steps in prop::collection::vec(sent(), 1..150)) {
        let packets = packets_of(&steps);
        let written = join(&packets);
        let again: Vec<Vec<u8>> = written.iter().flat_map(|bytes| cut(bytes)).collect();
        prop_assert_eq!(again.len(), packets.len());
        for packet in &again {
            assert_right(packet);
            prop_assert!(packet.len() <= MTU);
        }
        let mut flows: Vec<&[u8]> = packets.iter().map(|packet| &packet[8..44]).collect();
        flows.sort_unstable();
        flows.dedup();
        for flow in flows {
            prop_assert_eq!(by_flow(&again, flow), by_flow(&packets, flow));
        }
    }

    #[test]
    fn a_super_packet_cut_and_joined_is_what_it_was(payload in prop::collection::vec(any::<u8>(), 2000..60_000), is_tcp: bool) {
        let size = if is_tcp { 1208 } else { 1232 };
        let whole = super_packet(&payload, size, is_tcp);
        let segments = cut(&whole);
        prop_assert_eq!(segments.len(), payload.len().div_ceil(size));
        for segment in &segments {
            assert_right(segment);
        }
        let again = join(&segments);
        prop_assert_eq!(again.len(), 1);
        prop_assert_eq!(&again[0], &whole);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..3000), head in any::<[u8; 10]>(), version in prop_oneof![Just(0x60_u8), Just(0x45)]) {
        let _ = cut(&bytes);
        let mut shaped = head.to_vec();
        shaped[1] = [1, 4, 5, 0][usize::from(head[1] % 4)];
        shaped.extend_from_slice(&bytes);
        if let Some(byte) = shaped.get_mut(10) {
            *byte = version;
        }
        let _ = cut(&shaped);
        let _ = join(&[bytes]);
    }
}

fn super_packet(payload: &[u8], size: usize, is_tcp: bool) -> Vec<u8> {
    let (mut packet, checksum_at, protocol) =
        if is_tcp { (tcp(1, 1000, payload, true), TCP_CHECKSUM, TCP) } else { (udp(1, payload), UDP_CHECKSUM, UDP) };
    let headers = packet.len() - payload.len();
    let length = (packet.len() - 40) as u32;
    let sum = addresses(&packet).unwrap().add_number(length).add_number(protocol.into());
    put(&mut packet, 40 + checksum_at, sum.folded()).unwrap();
    let vnet = VnetHeader {
        flags: NEEDS_CSUM,
        gso_type: if is_tcp { GSO_TCPV6 } else { GSO_UDP_L4 },
        hdr_len: headers as u16,
        gso_size: size as u16,
        csum_start: 40,
        csum_offset: checksum_at as u16,
    };
    let mut whole = vnet.write().to_vec();
    whole.extend_from_slice(&packet);
    whole
}

#[test]
fn a_partial_checksum_is_completed() {
    let mut packet = tcp(1, 5, b"hello", false);
    let length = (packet.len() - 40) as u32;
    let sum = addresses(&packet).unwrap().add_number(length).add_number(TCP.into());
    put(&mut packet, 40 + TCP_CHECKSUM, sum.folded()).unwrap();
    let vnet = VnetHeader { flags: NEEDS_CSUM, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 40, csum_offset: 16 };
    let mut read = vnet.write().to_vec();
    read.extend_from_slice(&packet);
    let packets = cut(&read);
    assert_eq!(packets, [tcp(1, 5, b"hello", false)]);
}

#[test]
fn forty_nine_full_segments_are_one_write_and_flags_are_where_they_belong() {
    let payload = vec![9; 1208];
    let packets: Vec<_> = (0..49).map(|i| tcp(1, i * 1208, &payload, i == 48)).collect();
    let written = join(&packets);
    assert_eq!(written.len(), 1);
    let again = cut(&written[0]);
    let pushed: Vec<bool> = again.iter().map(|packet| packet[53] & PSH != 0).collect();
    assert_eq!(pushed.iter().filter(|push| **push).count(), 1);
    assert!(pushed[48]);
}

#[test]
fn four_interleaved_flows_are_four_writes() {
    let payload = vec![9; 1208];
    let packets: Vec<_> = (0..40_u32)
        .flat_map(|i| (0..4).map(move |flow| (flow, i)))
        .map(|(flow, i)| tcp(flow, i * 1208, &payload, false))
        .collect();
    assert_eq!(join(&packets).len(), 4);
}

#[test]
fn what_must_stay_alone_stays_alone() {
    let payload = vec![9; 100];
    let mut fin = tcp(1, 100, &payload, false);
    fin[53] |= FIN;
    let ack = tcp(1, 200, b"", false);
    let mut other_window = tcp(1, 100, &payload, false);
    other_window[55] ^= 1;
    for second in [fin, ack, other_window, tcp(1, 101, &payload, false), tcp(2, 100, &payload, false)] {
        assert_eq!(join(&[tcp(1, 0, &payload, false), second]).len(), 2);
    }
    assert_eq!(join(&[udp(1, &payload), udp(1, &[1; 101])]).len(), 2, "longer than the first");
    let mut no_checksum = udp(1, &payload);
    put(&mut no_checksum, 46, [0, 0]).unwrap();
    assert_eq!(join(&[no_checksum.clone(), no_checksum]).len(), 2);
}

#[test]
fn a_fragment_is_not_overtaken_by_the_next_datagram() {
    let payload = vec![9; 100];
    let mut fragment = udp(1, &payload);
    fragment[6] = 44; // The fragment header hides the ports, so the conversation is known by its addresses only.
    let mut elsewhere = udp(2, &payload);
    elsewhere[6] = 44;
    let written = join(&[udp(1, &payload), fragment.clone(), udp(1, &payload)]);
    assert_eq!(written.len(), 3);
    assert_eq!(&written[1][VNET_HEADER..], fragment);
    assert_eq!(join(&[udp(1, &payload), elsewhere, udp(1, &payload)]).len(), 2, "fragments for others close nothing");
}
