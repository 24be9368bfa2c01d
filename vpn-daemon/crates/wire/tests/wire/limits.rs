//! What must be refused, and at which length exactly.

use std::net::SocketAddr;

use codervpn_wire::derp::{self, Frame, FrameBuffer, FrameError, MAX_PACKET_LEN, Side, kind};
use codervpn_wire::derp_map::{
    DerpMap, DerpMapFields, MapWarning, Reach, RegionClass, RegionFields, RegionId, RelayNodeFields,
};
use codervpn_wire::disco::{self, Message};
use codervpn_wire::drpc::{Kind, MAX_PACKET_LEN as MAX_DRPC, PacketReader, PacketWriter, ProtocolError};
use codervpn_wire::keys::{DiscoPublic, KeyError, NodePrivate, NodePublic};
use codervpn_wire::node::{self, Family, Node, NodeError, NodeFields, Prefix, Timestamp};
use codervpn_wire::stun;
use rand_core::OsRng;

fn header(kind: u8, len: u32) -> Vec<u8> {
    let mut out = vec![kind];
    out.extend_from_slice(&len.to_be_bytes());
    out
}

/// T-16: the header alone decides.
#[test]
fn t16_derp_lengths_are_judged_by_the_header() {
    let packet = (32 + MAX_PACKET_LEN) as u32;
    let cases = [
        (Side::Client, kind::SERVER_KEY, 39, false),
        (Side::Client, kind::SERVER_KEY, 40, true),
        (Side::Client, kind::SERVER_KEY, 1024, true),
        (Side::Client, kind::SERVER_KEY, 1025, false),
        (Side::Client, kind::RECV_PACKET, 0, true),
        (Side::Client, kind::RECV_PACKET, packet, true),
        (Side::Client, kind::RECV_PACKET, packet + 1, false),
        (Side::Client, kind::SERVER_INFO, 1 << 20, true),
        (Side::Client, kind::SERVER_INFO, (1 << 20) + 1, false),
        (Side::Client, 0x7f, 1 << 20, true),
        (Side::Client, 0x7f, (1 << 20) + 1, false),
        (Side::Client, kind::KEEP_ALIVE, u32::MAX, false),
        (Side::Server, kind::CLIENT_INFO, 55, false),
        (Side::Server, kind::CLIENT_INFO, 56, true),
        (Side::Server, kind::CLIENT_INFO, 256 << 10, true),
        (Side::Server, kind::CLIENT_INFO, (256 << 10) + 1, false),
        (Side::Server, kind::SEND_PACKET, 31, false),
        (Side::Server, kind::SEND_PACKET, 32, true),
        (Side::Server, kind::SEND_PACKET, packet, true),
        (Side::Server, kind::SEND_PACKET, packet + 1, false),
        (Side::Server, kind::SEND_PACKET, u32::MAX, false),
        (Side::Server, kind::NOTE_PREFERRED, 0, false),
        (Side::Server, kind::NOTE_PREFERRED, 2, false),
        (Side::Server, kind::PING, 7, false),
        (Side::Server, kind::PING, 1000, true),
        (Side::Server, kind::PING, 1001, false),
        (Side::Server, 0x7f, u32::MAX, true),
    ];
    for (side, kind, len, allowed) in cases {
        let bytes = header(kind, len);
        let split = derp::split_frame(side, &bytes);
        let mut buffer = FrameBuffer::new(side);
        buffer.extend(&bytes);
        let buffered = buffer.next_frame().map(|_| ());
        if allowed {
            assert!(split.is_ok() && buffered.is_ok(), "{kind:#x} {len}");
        } else {
            assert_eq!(split, Err(FrameError::Length { kind, len }));
            assert_eq!(buffered, Err(FrameError::Length { kind, len }));
        }
    }
}

/// T-16: nothing of an unknown frame is kept, so the buffer stays small whatever is announced.
#[test]
fn t16_t21_derp_skips_what_nobody_needs() {
    let mut buffer = FrameBuffer::new(Side::Server);
    buffer.extend(&header(0x7f, 64 << 20));
    assert_eq!(buffer.next_frame(), Ok(Some(Frame::Unknown(0x7f))));
    let piece = vec![kind::PING; 1 << 20];
    for _ in 0..64 {
        buffer.extend(&piece);
        assert_eq!(buffer.next_frame(), Ok(None));
        assert!(buffer.space().len() < 4 << 20);
    }
    let mut ping = Vec::new();
    derp::write_ping(&mut ping, &[1; 8]);
    buffer.extend(&ping);
    assert_eq!(buffer.next_frame(), Ok(Some(Frame::Ping([1; 8]))));
    // T-21: of a complaint of 1 MiB, 512 bytes.
    let mut buffer = FrameBuffer::new(Side::Client);
    buffer.extend(&header(kind::HEALTH, 1 << 20));
    buffer.extend(&vec![b'\x1b'; 1 << 20]);
    let Ok(Some(Frame::Health(raw))) = buffer.next_frame() else { panic!("no complaint") };
    assert_eq!((raw.len(), derp::health_text(raw)), (512, String::new()));
    assert_eq!(buffer.next_frame(), Ok(None));
}

/// The longest allowed frames pass, in small reads too, and the room shrinks again.
#[test]
fn derp_longest_frames_pass() {
    let to = NodePrivate::generate(&mut OsRng).public();
    let packet = vec![7; MAX_PACKET_LEN];
    let mut bytes = Vec::new();
    for _ in 0..20 {
        derp::write_send_packet(&mut bytes, &to, &packet).unwrap();
    }
    assert!(derp::write_send_packet(&mut bytes, &to, &vec![7; MAX_PACKET_LEN + 1]).is_err());
    let mut buffer = FrameBuffer::new(Side::Server);
    let mut frames = 0;
    for piece in bytes.chunks(1000) {
        buffer.extend(piece);
        while let Some(frame) = buffer.next_frame().unwrap() {
            assert_eq!(frame, Frame::SendPacket { to, packet: &packet });
            frames += 1;
        }
        assert!(buffer.space().len() <= 256 << 10);
    }
    assert_eq!(frames, 20);
    let mut buffer = FrameBuffer::new(Side::Client);
    buffer.extend(&header(kind::SERVER_INFO, 1 << 20));
    buffer.extend(&vec![0; 1 << 20]);
    assert!(matches!(buffer.next_frame(), Ok(Some(Frame::ServerInfo { sealed })) if sealed.len() == 1 << 20));
    assert!(buffer.space().len() > 1 << 20, "grown for that frame");
}

/// A short RecvPacket and odd small frames are dropped, the connection lives on (2.2).
#[test]
fn derp_short_frames_are_no_reason_to_close() {
    for kind in [kind::RECV_PACKET, kind::PEER_GONE, kind::PEER_PRESENT, kind::PING, kind::PONG, kind::RESTARTING] {
        let mut bytes = header(kind, 3);
        bytes.extend_from_slice(&[1, 2, 3]);
        assert_eq!(derp::split_frame(Side::Client, &bytes), Ok(Some((Frame::Short(kind), 8))));
    }
    let mut zero_key = header(kind::SERVER_KEY, 40);
    zero_key.extend_from_slice(&derp::MAGIC);
    zero_key.extend_from_slice(&[0; 32]);
    assert_eq!(derp::split_frame(Side::Client, &zero_key), Err(FrameError::Key), "T-15");
    zero_key[5] ^= 1;
    assert_eq!(derp::split_frame(Side::Client, &zero_key), Err(FrameError::Magic));
}

/// Packets sealed straight into a batch.
#[test]
fn derp_packets_are_written_in_place() {
    let to = NodePrivate::generate(&mut OsRng).public();
    let (mut expected, mut out) = (Vec::new(), Vec::new());
    derp::write_send_packet(&mut expected, &to, b"one").unwrap();
    let fill = |room: &mut [u8]| {
        room[..3].copy_from_slice(b"one");
        Some(3)
    };
    assert_eq!(derp::write_send_packet_with(&mut out, &to, 1500, fill), Ok(true));
    assert_eq!(derp::write_send_packet_with(&mut out, &to, 1500, |_| None), Ok(false));
    assert_eq!(derp::write_send_packet_with(&mut out, &to, 2, |_| Some(3)), Ok(false));
    assert!(derp::write_send_packet_with(&mut out, &to, MAX_PACKET_LEN + 1, |_| None).is_err());
    assert_eq!(out, expected);
}

/// T-15: no secret with anybody is shared over a point of small order, in every encoding.
#[test]
fn t15_low_order_keys_are_refused() {
    let private = NodePrivate::generate(&mut OsRng);
    let p_minus = |low: u8| {
        let mut bytes = [0xff; 32];
        (bytes[0], bytes[31]) = (low, 0x7f);
        bytes
    };
    let mut one = [0; 32];
    one[0] = 1;
    let points = [
        [0; 32],
        one,
        super::array("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
        super::array("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
        p_minus(0xec),
        p_minus(0xed),
        p_minus(0xee),
    ];
    for point in points {
        for high in [0, 0x80] {
            let mut bytes = point;
            bytes[31] |= high;
            assert!(NodePublic::from_bytes(bytes).is_err(), "{bytes:x?}");
            assert!(private.shared_key(&NodePublic::from_wire(bytes)).is_err());
            assert!(DiscoPublic::from_bytes(bytes).is_err());
        }
    }
    assert!(NodePublic::from_bytes([9; 32]).is_ok());
    assert!(matches!(NodePrivate::from_bytes([0; 32]), Err(KeyError::Zero)));
    let made = NodePrivate::from_bytes([0xff; 32]).unwrap();
    assert_eq!((made.expose()[0], made.expose()[31]), (0xf8, 0x7f), "clamped when made");
}

/// T-49.
#[test]
fn t49_odd_call_me_maybes_list_nothing() {
    for content in [&[3, 0][..], &[3, 1, 0], &[3, 0, 1, 2, 3], &[&[3, 1][..], &[1; 18]].concat()] {
        let Message::CallMeMaybe(message) = disco::parse_message(content) else { panic!("{content:?}") };
        assert_eq!(message.endpoints().len(), 0);
    }
    assert_eq!(disco::parse_message(&[]), Message::Unknown(0));
    assert_eq!(disco::parse_message(&[9, 0, 1]), Message::Unknown(9));
    assert_eq!(disco::parse_message(&[&[1, 0][..], &[0; 11]].concat()), Message::Unknown(1), "ping without its id");
    assert_eq!(disco::parse_message(&[&[2, 0][..], &[0; 29]].concat()), Message::Unknown(2), "pong without address");
    let Message::Ping(ping) = disco::parse_message(&[&[1, 1][..], &[5; 12]].concat()) else { panic!("no ping") };
    assert!(ping.node_key.is_none() && !ping.padded, "T-08: short pings get short pongs, whatever their version");
}

/// 3.2: what a server answers and a client believes.
#[test]
fn t34_stun_reads_only_what_it_should() {
    let tx = stun::TxId([7; 12]);
    let good = stun::binding_request(&tx);
    use stun::Strictness::{Lenient, Strict};
    for at in 0..good.len() {
        let mut bad = good;
        bad[at] ^= 0x40;
        assert_eq!(stun::parse_binding_request(&bad, Strict), None, "altered at {at}");
    }
    assert_eq!(stun::parse_binding_request(&good[..39], Strict), None);
    let mut bare = good[..20].to_vec();
    bare[3] = 0;
    assert_eq!(stun::parse_binding_request(&bare, Lenient), Some(tx));
    assert_eq!(stun::parse_binding_request(&bare, Strict), None);
    assert_eq!(stun::parse_binding_response(&good), None);

    let mapped: SocketAddr = "192.0.2.1:5".parse().unwrap();
    let mut out = [0; stun::MAX_RESPONSE_LEN];
    let len = stun::binding_response(&tx, "[::ffff:192.0.2.1]:5".parse().unwrap(), &mut out);
    assert_eq!(len, 32, "un-mapped before the family is written");
    assert_eq!(stun::parse_binding_response(&out).unwrap().mapped, mapped, "a longer datagram is fine");
    assert_eq!(stun::parse_binding_response(&out[..31]), None, "a shorter one is not");
    // A plain MAPPED-ADDRESS counts only without the better one.
    let mut fallback = out[..20].to_vec();
    fallback.extend_from_slice(&[0, 1, 0, 8, 0, 1, 0, 5, 192, 0, 2, 1]);
    assert_eq!(stun::parse_binding_response(&fallback).unwrap().mapped, mapped);
    // T-34: a WireGuard message whose index collides with the cookie is WireGuard.
    let mut collision = [0; 32];
    collision[0] = 4;
    collision[4..8].copy_from_slice(&0x42a4_1221u32.to_le_bytes());
    assert!(!stun::looks_like_stun(&collision) && stun::looks_like_stun(&good));
}

fn read(bytes: &[u8]) -> Result<usize, ProtocolError> {
    let (mut reader, mut input, mut packets) = (PacketReader::new(), bytes, 0);
    while reader.read(&mut input)?.is_some() {
        packets += 1;
    }
    Ok(packets)
}

/// DR-3 to DR-6.
#[test]
fn drpc_rules() {
    let long_one = [0x81, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0];
    let mut endless = long_one;
    endless[9] = 0x80;
    let cases: &[(&str, Vec<u8>, Result<usize, ProtocolError>)] = &[
        ("DR-3 long varint", [&[5][..], &long_one, &[1, 0]].concat(), Ok(1)),
        ("DR-3 too long", [&[5][..], &endless].concat(), Err(ProtocolError::Varint)),
        ("DR-4 stream 0", vec![5, 0, 1, 0], Err(ProtocolError::ZeroId)),
        ("DR-4 message 0", vec![5, 1, 0, 0], Err(ProtocolError::ZeroId)),
        ("DR-4 message 0 later", vec![5, 2, 0, 0], Err(ProtocolError::ZeroId)),
        ("DR-5 gap", vec![3, 1, 1, 0, 5, 1, 9, 0], Ok(2)),
        ("DR-5 again", vec![3, 1, 1, 0, 5, 1, 1, 0], Err(ProtocolError::IdOrder)),
        ("DR-5 lower stream", vec![3, 2, 1, 0, 5, 1, 9, 0], Err(ProtocolError::IdOrder)),
        ("DR-5 unfinished is dropped", vec![4, 1, 1, 1, 7, 5, 1, 2, 1, 8], Ok(1)),
        ("DR-5 continued", vec![4, 1, 1, 1, 7, 5, 1, 1, 1, 8], Ok(1)),
        ("DR-5 kind changes", vec![4, 1, 1, 1, 7, 3, 1, 1, 1, 8], Err(ProtocolError::KindChange)),
        ("DR-2 next call", vec![3, 1, 1, 0, 3, 2, 1, 0], Ok(2)),
        ("DR-9 unknown kinds are read", vec![0x7f, 1, 1, 0, 0xff, 1, 2, 0], Ok(2)),
        ("DR-6 announced", vec![5, 1, 1, 0x81, 0x80, 0x80, 0x02], Err(ProtocolError::Overflow)),
        ("DR-6 just fits", vec![5, 1, 1, 0x80, 0x80, 0x80, 0x02], Ok(0)),
        ("half a header", vec![5, 1, 1], Ok(0)),
    ];
    for (name, bytes, expected) in cases {
        assert_eq!(read(bytes), *expected, "{name}");
    }
    // DR-6 by many frames.
    let mut bytes = Vec::new();
    PacketWriter::default().message(&vec![0; MAX_DRPC], &mut bytes);
    assert_eq!(read(&bytes), Ok(1));
    bytes.clear();
    PacketWriter::default().message(&vec![0; MAX_DRPC + 1], &mut bytes);
    assert_eq!(read(&bytes), Err(ProtocolError::Overflow));
    // An error stays.
    let mut reader = PacketReader::new();
    assert!(reader.read(&mut &[5, 0, 1, 0][..]).is_err());
    assert_eq!(reader.read(&mut &[5, 1, 1, 0][..]), Err(ProtocolError::ZeroId));
    let packet = PacketReader::new().read(&mut &[0xff, 1, 1, 0][..]).unwrap().unwrap();
    assert_eq!((packet.kind, packet.control), (Kind::Unknown(0x3f), true));
}

fn fields() -> NodeFields {
    NodeFields {
        id: 7,
        as_of: Some(Timestamp { seconds: 1, nanos: 2 }),
        key: NodePublic::from_bytes([9; 32]).unwrap().to_binary().to_vec(),
        disco: DiscoPublic::from_bytes([8; 32]).unwrap().to_string(),
        preferred_derp: 999,
        derp_latency: vec![("999-v4".into(), 0.025)],
        derp_forced_websocket: vec![(999, "proxy".into())],
        addresses: vec!["fd60:627a:a42b::7/128".into()],
        allowed_ips: vec!["fd60:627a:a42b::7/128".into()],
        endpoints: vec!["192.0.2.1:41641".into(), "[2001:db8::7]:1".into()],
    }
}

/// T-27, PB-6 to PB-8.
#[test]
fn t27_nodes_are_validated() {
    let (node, left_out) = Node::from_fields(&fields()).unwrap();
    assert_eq!((node.to_fields(), left_out), (fields(), 0));
    assert_eq!(node.derp_latency[&(RegionId::new(999).unwrap(), Family::V4)].as_millis(), 25);
    type Change = fn(&mut NodeFields);
    let broken: [(Change, NodeError); 8] = [
        (|f| f.key.truncate(33), NodeError::Key(KeyError::Length)),
        (|f| f.key[0] = b'x', NodeError::Key(KeyError::Prefix("np"))),
        (|f| f.key[2..].fill(0), NodeError::Key(KeyError::Zero)),
        (|f| f.disco.clear(), NodeError::Disco(KeyError::Prefix("discokey:"))),
        (|f| f.addresses.push("fd60::1".into()), NodeError::Prefix),
        (|f| f.allowed_ips.push("fd60::1%lo/128".into()), NodeError::Prefix),
        (|f| f.addresses = vec!["::/0".into(); 65], NodeError::TooManyPrefixes),
        (|f| f.preferred_derp = 0, NodeError::NoHome),
    ];
    for (change, error) in broken {
        let mut fields = fields();
        change(&mut fields);
        assert_eq!(Node::from_fields(&fields).map(|_| ()), Err(error));
    }
    let mut odd = fields();
    odd.preferred_derp = -3;
    odd.endpoints = vec!["x".into(), "1.2.3.4".into(), "[fe80::1%eth0]:41641".into(), "192.0.2.1:1".into()];
    odd.endpoints.extend((0..1000).map(|port| format!("192.0.2.2:{port}")));
    odd.derp_latency =
        vec![("x-v4".into(), 1.0), ("1-v5".into(), 1.0), ("1-v4".into(), f64::NAN), ("1-v6".into(), -1.0)];
    let (node, left_out) = Node::from_fields(&odd).unwrap();
    assert_eq!((node.home, node.endpoints.len(), node.derp_latency.len()), (None, 61, 0));
    assert_eq!(left_out, 1004 - 61 + 4);
}

/// PB-7.
#[test]
fn prefixes_are_strict() {
    for good in ["::/0", "fd60::1/128", "10.0.0.0/8", "1.2.3.4/32"] {
        assert_eq!(good.parse::<Prefix>().unwrap().to_string(), good);
    }
    for bad in ["", "/", "::", "::/129", "1.2.3.4/33", "::/+1", "::/01", "::/ 1", "::1%1/128", "::/", "01.2.3.4/32"] {
        assert_eq!(bad.parse::<Prefix>(), Err(NodeError::Prefix), "{bad}");
    }
}

/// CC-36: an agent owns what its id gives it and nothing else.
#[test]
fn agents_own_only_derived_addresses() {
    let id = uuid::Uuid::parse_str("aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee").unwrap();
    let coder = "fd60:627a:a42b:cccc:dddd:eeee:eeee:eeee".parse().unwrap();
    let other = "fd7a:115c:a1e0:cccc:dddd:eeee:eeee:eeee".parse().unwrap();
    assert_eq!((node::coder_address(id), node::tailscale_address(id)), (coder, other));
    let mut fields = fields();
    let foreign = "fd60:627a:a42b:1111:1111:1111:1111:1111/128".to_owned();
    fields.addresses = vec![format!("{other}/128"), format!("{coder}/128"), foreign.clone(), "::/0".into()];
    fields.allowed_ips = fields.addresses.clone();
    let owned = |fields: &NodeFields| Node::from_fields(fields).unwrap().0.addresses_of(id).collect::<Vec<_>>();
    assert_eq!(owned(&fields), [coder, other]);
    fields.allowed_ips.remove(0);
    assert_eq!(owned(&fields), [coder], "only what stands in both lists");
    fields.addresses = vec![format!("{coder}/64"), foreign];
    assert_eq!(owned(&fields), [] as [std::net::Ipv6Addr; 0]);
}

/// T-06, T-44.
#[test]
fn t06_t44_endpoints_are_filtered() {
    for (text, usable, in_tests) in [
        ("192.0.2.1:1", true, true),
        ("10.0.0.1:1", true, true),
        ("169.254.1.1:1", true, true),
        ("[2001:db8::1]:1", true, true),
        ("127.0.0.1:1", false, true),
        ("[::1]:1", false, true),
        ("[::ffff:127.0.0.1]:1", false, true),
        ("192.0.2.1:0", false, false),
        ("0.0.0.0:1", false, false),
        ("[::]:1", false, false),
        ("224.0.0.1:1", false, false),
        ("[ff02::1]:1", false, false),
        ("255.255.255.255:1", false, false),
        ("[fe80::1]:1", false, false),
        ("127.3.3.40:999", false, false),
        ("[fd60:627a:a42b::1]:1", false, false),
        ("[fd7a:115c:a1e0::1]:1", false, false),
    ] {
        let endpoint = text.parse().unwrap();
        assert_eq!(node::is_usable_endpoint(&endpoint, false), usable, "{text}");
        assert_eq!(node::is_usable_endpoint(&endpoint, true), in_tests, "{text} with loopback");
    }
}

fn relay(host: &str) -> RelayNodeFields {
    RelayNodeFields { name: "n".into(), host_name: host.into(), stun_port: -1, derp_port: 443, ..Default::default() }
}

fn region(id: i64, code: &str, nodes: Vec<RelayNodeFields>) -> (i64, RegionFields) {
    (id, RegionFields { region_id: id, region_code: code.into(), nodes, ..RegionFields::default() })
}

/// 1.2.2, 2.6, 2.7, CC-46.
#[test]
fn derp_maps_mean_what_they_say() {
    let stun = RelayNodeFields { stun_only: true, stun_port: 19302, derp_port: 0, ..relay("stun.example.com") };
    let mut embedded = region(999, "coder", vec![relay("other.example.com"), stun.clone()]);
    embedded.1.embedded_relay = true;
    let fields = DerpMapFields {
        region_scores: vec![(999, 0.5), (1000, 0.0)],
        regions: vec![
            embedded,
            region(1000, "coder_stun_1000", vec![stun]),
            region(10_001, "coder_p", vec![relay("p")]),
        ],
    };
    let (mut map, warnings) = DerpMap::from_fields(&fields);
    assert_eq!(warnings, []);
    assert_eq!(DerpMap::from_fields(&map.to_fields()).0, map, "there and back");
    let id = |id| RegionId::new(id).unwrap();
    assert_eq!((map.score(id(999)), map.score(id(1000))), (0.5, 1.0));
    let classes: Vec<_> = map.regions.values().map(codervpn_wire::derp_map::Region::class).collect();
    assert_eq!(classes, [RegionClass::Embedded, RegionClass::Foreign, RegionClass::WorkspaceProxy]);
    assert_eq!(map.relay_regions().count(), 2);
    map.rewrite_embedded("coder.example.com", 8080, true);
    let [first, second] = &map.regions[&id(999)].nodes[..] else { panic!("two nodes") };
    assert_eq!((first.host.as_str(), first.derp_port, first.force_http), ("coder.example.com", Some(8080), true));
    assert_eq!((second.host.as_str(), second.derp_port, second.stun_port), ("stun.example.com", None, Some(19302)));
    assert_eq!(map.regions[&id(10_001)].nodes[0].host, "p");

    let defaults =
        RelayNodeFields { derp_port: 0, stun_port: 0, ipv4: "none".into(), ipv6: "::1".into(), ..relay("h") };
    let (map, _) =
        DerpMap::from_fields(&DerpMapFields { regions: vec![region(1, "", vec![defaults])], ..Default::default() });
    let node = &map.regions[&id(1)].nodes[0];
    assert_eq!((node.derp_port, node.stun_port), (Some(443), Some(3478)));
    assert_eq!((node.ipv4, node.ipv6), (Reach::Disabled, Reach::At(std::net::Ipv6Addr::LOCALHOST)));
}

/// T-26.
#[test]
fn t26_odd_derp_maps_lose_only_what_is_odd() {
    let mut regions = vec![
        region(1, "good", vec![relay("a")]),
        region(2, "empty", vec![]),
        region(0, "", vec![]),
        region(-1, "", vec![]),
        region(65_536, "", vec![]),
        region(i64::MIN, "", vec![]),
        region(1, "again", vec![]),
        region(3, "hosts", vec![relay(""), relay("a b"), relay("a\r\nb"), relay(&"x".repeat(254)), relay("c")]),
        region(4, "many", vec![relay("d"); 17]),
        region(5, "ports", vec![RelayNodeFields { derp_port: 70_000, ..relay("e") }]),
    ];
    regions.push((6, region(7, "mismatch", vec![]).1));
    let id = |id| RegionId::new(id).unwrap();
    let (map, warnings) = DerpMap::from_fields(&DerpMapFields {
        regions,
        region_scores: vec![(1, f64::NAN), (1, -1.0), (0, 1.0), (2, f64::INFINITY)],
    });
    assert_eq!(map.regions.keys().map(|id| id.get()).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert_eq!(map.regions[&id(1)].code, "good", "the later duplicate is left out");
    assert_eq!((map.regions[&id(3)].nodes.len(), map.regions[&id(4)].nodes.len()), (1, 16));
    assert!(map.regions[&id(5)].nodes.is_empty() && map.scores.is_empty());
    for expected in [
        MapWarning::RegionId(0),
        MapWarning::DuplicateRegion(id(1)),
        MapWarning::Node(id(3)),
        MapWarning::TooManyNodes(id(4)),
        MapWarning::RegionMismatch { key: 6, inside: 7 },
        MapWarning::Score(1),
    ] {
        assert!(warnings.contains(&expected), "{expected}");
    }
    let huge = DerpMapFields { regions: (1..=300).map(|id| region(id, "", vec![])).collect(), ..Default::default() };
    let (map, warnings) = DerpMap::from_fields(&huge);
    assert_eq!((map.regions.len(), &warnings[..]), (256, &[MapWarning::TooManyRegions][..]));
}
