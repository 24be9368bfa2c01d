//! No input panics, and what is written is read back, for inputs that nobody thought of.

use std::net::{Ipv6Addr, SocketAddr};

use codervpn_wire::classify;
use codervpn_wire::derp::{self, Frame, FrameBuffer, Frames, Side};
use codervpn_wire::disco::{self, Envelope, Message, Outgoing, Padding, TxId};
use codervpn_wire::drpc::{CallError, Kind, PacketReader, PacketWriter};
use codervpn_wire::ip::{self, Ipv6Packet};
use codervpn_wire::keys::{DiscoPrivate, DiscoPublic, NodePrivate, NodePublic};
use codervpn_wire::node::{Node, NodeFields, Prefix};
use codervpn_wire::{stun, tsmp};
use proptest::collection::vec;
use proptest::prelude::*;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..300)
}

/// Bytes that get past the first checks: plausible starts.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let starts: Vec<Vec<u8>> = vec![
        vec![],
        disco::MAGIC.to_vec(),
        vec![1, 1, 0, 12, 0x21, 0x12, 0xa4, 0x42],
        vec![0, 1, 0, 20, 0x21, 0x12, 0xa4, 0x42],
        vec![0x60, 0, 0, 0, 0, 60],
        vec![0x60, 0, 0, 0, 0, 60, 58, 64],
        vec![0x60, 0, 0, 0, 0, 60, 0, 64],
        vec![5, 1, 1],
        vec![0x04, 0, 0, 0],
        vec![0x05, 0, 0, 0],
    ];
    (prop::sample::select(starts), bytes()).prop_map(|(start, rest)| [start, rest].concat())
}

fn sides() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::Client), Just(Side::Server)]
}

proptest! {
    /// Bytes from outside never panic, whichever parser they reach.
    #[test]
    fn no_parser_panics(input in prop_oneof![bytes(), plausible()], side in sides(), max_len in any::<usize>()) {
        let mut out = [0; 2048];
        let _ = classify::datagram(&input);
        let _ = disco::parse_message(&input);
        if let Message::CallMeMaybe(message) = disco::parse_message(&[&[3, 0][..], &input].concat()) {
            prop_assert!(message.endpoints().count() <= input.len() / 18);
        }
        let _ = stun::parse_binding_request(&input, stun::Strictness::Strict);
        let _ = stun::parse_binding_request(&input, stun::Strictness::Lenient);
        let _ = stun::parse_binding_response(&input);
        let _ = tsmp::parse(&input);
        let _ = tsmp::write_pong(&input, &mut out);
        let _ = CallError::decode(&input);
        let _ = NodePublic::from_binary(&input);
        if let Some(packet) = Ipv6Packet::parse(&input) {
            let _ = ip::has_right_checksum(&packet);
            let _ = ip::write_unreachable(&packet, ip::Unreachable::Address, Ipv6Addr::LOCALHOST, &mut out);
            let _ = ip::write_packet_too_big(&packet, 1280, Ipv6Addr::LOCALHOST, &mut out);
            let _ = ip::write_tcp_reset(&packet, &mut out);
            let _ = ip::write_echo_reply(&packet, &mut out);
            if let Some(ip::Upper::Icmpv6(icmp)) = packet.upper() {
                let _ = icmp.quoted();
            }
        }
        let mut frames = Frames::new(side, &input);
        frames.by_ref().for_each(drop);
        let mut buffer = FrameBuffer::new(side);
        buffer.extend(&input);
        while let Ok(run) = buffer.next_packets(max_len) {
            let ran = !run.is_empty();
            if !ran && !matches!(buffer.next_frame(), Ok(Some(_))) {
                break;
            }
        }
        let (mut reader, mut rest) = (PacketReader::new(), &input[..]);
        while let Ok(Some(_)) = reader.read(&mut rest) {}
    }

    /// Text from outside never panics either.
    #[test]
    fn no_text_panics(text in any::<String>(), region in any::<i32>(), latency in any::<f64>()) {
        let _ = text.parse::<NodePublic>();
        let _ = text.parse::<NodePrivate>();
        let _ = text.parse::<DiscoPublic>();
        let _ = text.parse::<Prefix>();
        let fields = NodeFields {
            key: NodePublic::from_bytes([9; 32]).unwrap().to_binary().to_vec(),
            disco: DiscoPublic::from_bytes([8; 32]).unwrap().to_string(),
            preferred_derp: region,
            derp_latency: vec![(text.clone(), latency), (format!("{region}-v4"), latency)],
            derp_forced_websocket: vec![(region, text.clone())],
            endpoints: vec![text],
            ..NodeFields::default()
        };
        if let Ok((node, _)) = Node::from_fields(&fields)
            && node.home.is_some()
        {
            let again = Node::from_fields(&node.to_fields()).unwrap();
            prop_assert_eq!(again.1, 0);
            prop_assert_eq!(again.0.endpoints, node.endpoints);
        }
    }

    /// However a stream is cut, the same frames come out.
    #[test]
    fn derp_frames_survive_any_cut(packets in vec(bytes(), 0..8), cuts in vec(1usize..200, 1..20), key in any::<[u8; 32]>()) {
        let key = NodePublic::from_wire(key);
        let mut stream = Vec::new();
        for packet in &packets {
            derp::write_send_packet(&mut stream, &key, packet).unwrap();
            derp::write_ping(&mut stream, &[3; 8]);
        }
        let mut buffer = FrameBuffer::new(Side::Server);
        let (mut seen, mut rest, mut cuts) = (Vec::new(), &stream[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            buffer.extend(now);
            rest = later;
            while let Some(frame) = buffer.next_frame().unwrap() {
                if let Frame::SendPacket { to, packet } = frame {
                    prop_assert_eq!(to, key);
                    seen.push(packet.to_vec());
                } else {
                    prop_assert_eq!(frame, Frame::Ping([3; 8]));
                }
            }
        }
        prop_assert_eq!(seen, packets);
    }

    /// Sealed messages open to the same, and only with the right key.
    #[test]
    fn disco_round_trip(a in any::<[u8; 32]>(), b in any::<[u8; 32]>(), tx in any::<[u8; 12]>(), source in any::<SocketAddr>(), nonce in any::<[u8; 24]>()) {
        prop_assume!(a != [0; 32] && b != [0; 32]);
        let (a, b) = (DiscoPrivate::from_bytes(a).unwrap(), DiscoPrivate::from_bytes(b).unwrap());
        let source = SocketAddr::new(source.ip().to_canonical(), source.port());
        let pong = Outgoing::Pong { tx: TxId(tx), source, padding: Padding::Full };
        let mut out = [0; disco::MAX_SEALED_LEN];
        let len = pong.seal(&a.public(), &a.shared_key(&b.public()).unwrap(), &nonce, &mut out).unwrap();
        let envelope = Envelope::parse(&out[..len]).unwrap();
        let mut scratch = [0; disco::MAX_SEALED_LEN];
        let opened = envelope.open(&b.shared_key(&envelope.sender()).unwrap(), &mut scratch).unwrap();
        prop_assert!(matches!(opened, Message::Pong(pong) if pong.tx == TxId(tx) && pong.source == source));
        if a.public() != b.public() {
            prop_assert!(envelope.open(&a.shared_key(&a.public()).unwrap(), &mut scratch).is_err());
        }
    }

    /// Addresses survive STUN.
    #[test]
    fn stun_round_trip(tx in any::<[u8; 12]>(), mapped in any::<SocketAddr>()) {
        let tx = stun::TxId(tx);
        let mapped = SocketAddr::new(mapped.ip().to_canonical(), mapped.port());
        let mut out = [0; stun::MAX_RESPONSE_LEN];
        let len = stun::binding_response(&tx, mapped, &mut out);
        prop_assert_eq!(stun::parse_binding_response(&out[..len]), Some(stun::Response { tx, mapped }));
        prop_assert_eq!(stun::parse_binding_request(&stun::binding_request(&tx), stun::Strictness::Strict), Some(tx));
    }

    /// However a stream is cut, the same packets come out.
    #[test]
    fn drpc_round_trip(messages in vec(vec(any::<u8>(), 0..400), 1..6), cut in 1usize..50, stream in 1u64..) {
        let mut writer = PacketWriter::new(stream);
        let mut bytes = Vec::new();
        for message in &messages {
            writer.write(Kind::Message, message, &mut bytes);
        }
        let mut reader = PacketReader::new();
        let mut seen = Vec::new();
        for mut piece in bytes.chunks(cut) {
            while let Some(packet) = reader.read(&mut piece).unwrap() {
                prop_assert_eq!((packet.stream, packet.message), (stream, seen.len() as u64 + 1));
                seen.push(packet.data);
            }
        }
        prop_assert!(reader.is_idle());
        prop_assert_eq!(seen, messages);
    }
}
