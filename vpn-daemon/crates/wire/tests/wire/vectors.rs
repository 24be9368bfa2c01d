//! The byte vectors of the specification and of the real libraries.

use std::net::SocketAddr;
use std::time::Duration;

use codervpn_wire::derp::greeting::{self, ClientInfo, ServerInfo};
use codervpn_wire::derp::{self, Frame, FrameBuffer, GoneReason, Side};
use codervpn_wire::disco::{Envelope, Message, Outgoing, Padding, Ping, Pong, TxId};
use codervpn_wire::drpc::{CallError, Kind, Packet, PacketReader, PacketWriter};
use codervpn_wire::keys::{DiscoPrivate, DiscoPublic, KeyError, NodePrivate, NodePublic, Nonce};
use codervpn_wire::{stun, tsmp};

use super::{array, hex, vector, vector_lines};

const DERP_SERVER: &str = "e8280c2e9d5adeb29c4da3f692c50aeac6653de1d221e32d88911a68a38b9667";
const NODE_A: &str = "c063a88a6c3108a7b5f7df4e204d57b62cfb88b39d6390e00a7ffb2a771b7256";
const NODE_B: &str = "30ad812303f7debd9ec9e2c13a5d7a58851141bd1a0b2f1e37e90ed342ccab6e";
const DISCO_A: &str = "70f44076c98f7b39781d5af96b521ba3adaf0ec2902d0c681eb175e613b2956a";
const DISCO_B: &str = "503d424f6e1ee9f5e79373a869e89de5c856694ac3f54efedac97f7f9dcc5040";
const TX: [u8; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

fn node(private: &str) -> NodePrivate {
    NodePrivate::from_bytes(array(private)).unwrap()
}

fn disco(private: &str) -> DiscoPrivate {
    DiscoPrivate::from_bytes(array(private)).unwrap()
}

/// 8.1.
#[test]
fn keys_have_their_public_halves_and_text_forms() {
    for (private, name) in [(DERP_SERVER, "derp-server"), (NODE_A, "node-a"), (NODE_B, "node-b")] {
        assert_eq!(node(private).public().as_bytes()[..], vector(&format!("key {name} public")));
    }
    for (private, name) in [(DISCO_A, "disco-a"), (DISCO_B, "disco-b")] {
        assert_eq!(disco(private).public().as_bytes()[..], vector(&format!("key {name} public")));
    }
    let (private, public) = (node(NODE_A), node(NODE_A).public());
    assert_eq!(private.expose(), &array(NODE_A), "a clamped key stays as it is");
    assert_eq!(private.to_secret_text().as_bytes(), vector("key node-a private text"));
    assert_eq!(private.to_secret_text().parse::<NodePrivate>().unwrap().public(), public);
    assert_eq!(public.to_string(), "nodekey:18cd4e736272e0b5562aa51983db0152d3a2568bb62168175412d70a22403d42");
    assert_eq!(public.to_string().parse(), Ok(public));
    assert_eq!(public.to_binary()[..], vector("key node-a public binary"));
    assert_eq!(NodePublic::from_binary(&public.to_binary()), Ok(public));
    assert_eq!(public.short().to_string(), "[GM1Oc]");
    let public = disco(DISCO_A).public();
    assert_eq!(public.to_string(), "discokey:717a061b0f503295b4a1ba733393d83ee79327b25a902cacef8f4f3d6ceace73");
    assert_eq!(public.to_string().parse(), Ok(public));
    assert_eq!(public.to_string().to_uppercase().replace("DISCOKEY", "discokey").parse(), Ok(public));
    assert_eq!(public.short().to_string(), "d:717a061b0f503295");
}

/// T-43: neither Debug nor errors show key bytes.
#[test]
fn t43_private_keys_do_not_show() {
    let text = format!("{:?} {:?}", node(NODE_A), disco(DISCO_A));
    assert_eq!(text, "NodePrivate(..) DiscoPrivate(..)");
    let shared = node(NODE_A).shared_key(&node(NODE_B).public()).unwrap();
    assert_eq!(format!("{shared:?}"), "SharedKey(..)");
    let error = format!("privkey:{}", NODE_A.replace('c', "x")).parse::<NodePrivate>().unwrap_err();
    assert_eq!(error, KeyError::Hex);
    assert!(!error.to_string().contains("063"));
}

/// 1.2: exact prefix and length.
#[test]
fn key_texts_are_strict() {
    let good = node(NODE_A).public().to_string();
    assert_eq!(good[8..].parse::<NodePublic>(), Err(KeyError::Prefix("nodekey:")));
    assert_eq!(good.to_uppercase().parse::<NodePublic>(), Err(KeyError::Prefix("nodekey:")));
    assert_eq!(good[..71].parse::<NodePublic>(), Err(KeyError::Length));
    assert_eq!(format!("{good}0").parse::<NodePublic>(), Err(KeyError::Length));
    assert_eq!(format!("{}+1", &good[..70]).parse::<NodePublic>(), Err(KeyError::Hex));
    assert_eq!(good.parse::<DiscoPublic>(), Err(KeyError::Prefix("discokey:")));
    assert_eq!(NodePublic::from_binary(b"np"), Err(KeyError::Length));
    assert_eq!(NodePublic::from_binary(&[0; 34]), Err(KeyError::Prefix("np")));
    assert_eq!(format!("nodekey:{}", "0".repeat(64)).parse::<NodePublic>(), Err(KeyError::Zero));
}

/// 8.2: both sealed greetings, both sides.
#[test]
fn derp_greetings_equal_those_of_the_library() {
    let (server, client) = (node(DERP_SERVER), node(NODE_A));
    let sent = vector("derp ClientInfo (client frame 0)");
    let nonce: &Nonce = sent[37..61].try_into().unwrap();
    let mut out = Vec::new();
    let shared = greeting::write_client_info(&mut out, &client, &server.public(), nonce).unwrap();
    assert_eq!(out, sent);
    let (frame, used) = derp::split_frame(Side::Server, &sent).unwrap().unwrap();
    assert_eq!(used, sent.len());
    let Frame::ClientInfo { key, sealed } = frame else { panic!("{frame:?}") };
    assert_eq!(key, client.public());
    let (info, at_server) = greeting::open_client_info(&server, &key, sealed).unwrap();
    assert_eq!(info, ClientInfo { version: 2, can_ack_pings: true, ..ClientInfo::default() });

    let answer = vector("derp ServerInfo (server frame 1)");
    let nonce: &Nonce = answer[5..29].try_into().unwrap();
    let mut out = Vec::new();
    greeting::write_server_info(&mut out, &at_server, nonce, &ServerInfo::default());
    assert_eq!(out, answer);
    let (Frame::ServerInfo { sealed }, _) = derp::split_frame(Side::Client, &answer).unwrap().unwrap() else {
        panic!("not a ServerInfo");
    };
    assert_eq!(greeting::open_server_info(&shared, sealed), Ok(ServerInfo::default()));
    let mut altered = sealed.to_vec();
    altered[30] ^= 1;
    assert!(greeting::open_server_info(&shared, &altered).is_err());
}

/// 8.2 and 2.2: JSON of other programs.
#[test]
fn derp_greetings_of_others_are_read_as_go_reads_them() {
    let (server, client) = (node(DERP_SERVER), node(NODE_A));
    let shared = client.shared_key(&server.public()).unwrap();
    let open = |json: &str| {
        let mut sealed = Vec::new();
        shared.seal_append(&[7; 24], json.as_bytes(), &mut sealed);
        greeting::open_client_info(&server, &client.public(), &sealed).map(|(info, _)| info)
    };
    assert_eq!(open("{}"), Ok(ClientInfo::default()));
    let info = open(r#"{"VERSION":2,"meshkey":"x","canAckPings":true,"later":[{}],"IsProber":null}"#).unwrap();
    assert_eq!((info.version, info.has_mesh_key, info.can_ack_pings, info.is_prober), (2, true, true, false));
    let deep = "[".repeat(100_000);
    for bad in ["", "null1", "[]", r#"{"version":"2"}"#, r#"{"version":2.5}"#, deep.as_str()] {
        assert!(open(bad).is_err(), "{bad:.20}");
    }
    let limit = r#"{"version":2,"TokenBucketBytesPerSecond":1000,"TokenBucketBytesBurst":2000}"#;
    let mut sealed = Vec::new();
    shared.seal_append(&[7; 24], limit.as_bytes(), &mut sealed);
    let info = greeting::open_server_info(&shared, &sealed).unwrap();
    assert_eq!(info.rate_limit.map(|limit| (limit.bytes_per_second, limit.burst)), Some((1000, 2000)));
    let mut out = Vec::new();
    greeting::write_server_info(&mut out, &shared, &[7; 24], &info);
    assert_eq!(out[5..], sealed);
}

/// 8.2: every frame in clear text, written and read.
#[test]
fn derp_frames_equal_those_of_the_library() {
    let (a, b) = (node(NODE_A).public(), node(NODE_B).public());
    let gone = NodePublic::from_wire(vector("derp PeerGone (server frame 4)")[5..37].try_into().unwrap());
    let data = [1, 2, 3, 4, 5, 6, 7, 8];
    let packet = [0xde, 0xad, 0xbe, 0xef];
    let millis = Duration::from_millis;
    type Write<'a> = Box<dyn Fn(&mut Vec<u8>) + 'a>;
    let cases: Vec<(&str, Side, Frame<'_>, Write<'_>)> = vec![
        (
            "derp ServerKey (server frame 0)",
            Side::Client,
            Frame::ServerKey(node(DERP_SERVER).public()),
            Box::new(|out| derp::write_server_key(out, &node(DERP_SERVER).public())),
        ),
        (
            "derp SendPacket (client frame 2)",
            Side::Server,
            Frame::SendPacket { to: b, packet: &packet },
            Box::new(|out| derp::write_send_packet(out, &b, &packet).unwrap()),
        ),
        (
            "derp RecvPacket (server to node-b)",
            Side::Client,
            Frame::RecvPacket { from: a, packet: &packet },
            Box::new(|out| derp::write_recv_packet(out, &a, &packet).unwrap()),
        ),
        ("derp KeepAlive", Side::Client, Frame::KeepAlive, Box::new(derp::write_keep_alive)),
        (
            "derp NotePreferred (client frame 1)",
            Side::Server,
            Frame::NotePreferred(true),
            Box::new(|out| derp::write_note_preferred(out, true)),
        ),
        (
            "derp PeerGone (server frame 4)",
            Side::Client,
            Frame::PeerGone { key: gone, reason: GoneReason::NotHere },
            Box::new(|out| derp::write_peer_gone(out, &gone, GoneReason::NotHere)),
        ),
        (
            "derp PeerGone (server frame 5)",
            Side::Client,
            Frame::PeerGone { key: b, reason: GoneReason::Disconnected },
            Box::new(|out| derp::write_peer_gone(out, &b, GoneReason::Disconnected)),
        ),
        ("derp Ping (client frame 3)", Side::Server, Frame::Ping(data), Box::new(|out| derp::write_ping(out, &data))),
        ("derp Pong (server frame 3)", Side::Client, Frame::Pong(data), Box::new(|out| derp::write_pong(out, &data))),
        ("derp Health dup", Side::Client, Frame::Health(b"dup"), Box::new(|out| derp::write_health(out, "dup"))),
        ("derp Health cleared", Side::Client, Frame::Health(b""), Box::new(|out| derp::write_health(out, ""))),
        (
            "derp Restarting",
            Side::Client,
            Frame::Restarting { reconnect_in: millis(500), try_for: millis(5000) },
            Box::new(|out| derp::write_restarting(out, millis(500), millis(5000))),
        ),
    ];
    for (name, side, frame, write) in cases {
        let bytes = vector(name);
        let mut out = Vec::new();
        write(&mut out);
        assert_eq!(out, bytes, "{name}");
        assert_eq!(derp::split_frame(side, &bytes), Ok(Some((frame, bytes.len()))), "{name}");
        for short in 0..bytes.len() {
            assert_eq!(derp::split_frame(side, &bytes[..short]), Ok(None), "{name} cut at {short}");
        }
    }
}

/// 8.2: what only a reader sees.
#[test]
fn derp_frames_of_other_versions_are_read() {
    let b = node(NODE_B).public();
    let mut buffer = FrameBuffer::new(Side::Client);
    for name in ["derp PeerGone without reason", "derp PeerPresent", "derp unknown type 0x7f, then Ping"] {
        buffer.extend(&vector(name));
    }
    let gone = Frame::PeerGone { key: b, reason: GoneReason::Disconnected };
    assert_eq!(buffer.next_frame(), Ok(Some(gone)));
    assert_eq!(buffer.next_frame(), Ok(Some(Frame::PeerPresent(b))));
    assert_eq!(buffer.next_frame(), Ok(Some(Frame::Unknown(0x7f))));
    assert_eq!(buffer.next_frame(), Ok(Some(Frame::Ping([1, 2, 3, 4, 5, 6, 7, 8]))));
    assert_eq!(buffer.next_frame(), Ok(None));
}

/// 8.3, T-50: every disco message, opened and sealed.
#[test]
fn t13_t50_disco_messages_equal_those_of_the_library() {
    let (a, b) = (disco(DISCO_A), disco(DISCO_B));
    let at_a = a.shared_key(&b.public()).unwrap();
    let at_b = b.shared_key(&a.public()).unwrap();
    let tx = TxId(TX);
    let node_key = node(NODE_A).public();
    let source: SocketAddr = "192.0.2.10:41641".parse().unwrap();
    let listed: [SocketAddr; 2] = ["198.51.100.7:41641".parse().unwrap(), "[2001:db8::7]:41641".parse().unwrap()];
    let ping = |padding| Outgoing::Ping { tx, node_key, padding };
    let pong = |padding| Outgoing::Pong { tx, source, padding };
    let cases = [
        ("disco ping v0", &a, ping(Padding::None)),
        ("disco ping v1", &a, ping(Padding::Coder)),
        ("disco pong v0", &b, pong(Padding::None)),
        ("disco pong v1", &b, pong(Padding::Coder)),
        ("disco call-me-maybe", &a, Outgoing::CallMeMaybe(&listed)),
    ];
    for (name, sender, message) in cases {
        let bytes = vector(name);
        let nonce: &Nonce = bytes[38..62].try_into().unwrap();
        let mut out = [0xaa; 2000];
        let len = message.seal(&sender.public(), &at_a, nonce, &mut out).unwrap();
        assert_eq!(out[..len], bytes, "{name}");
        assert_eq!(len, message.sealed_len());
        assert_eq!(message.seal(&sender.public(), &at_a, nonce, &mut out[..len - 1]), None, "too short a buffer");
        let mut plain = [0xaa; 2000];
        let len = message.write_plain(&mut plain).unwrap();
        assert_eq!(plain[..len], vector(&format!("{name} plaintext")));

        let envelope = Envelope::parse(&bytes).unwrap();
        assert_eq!(envelope.sender(), sender.public());
        let mut scratch = vec![0; envelope.content_len()];
        let opened = envelope.open(&at_b, &mut scratch).unwrap();
        match (message, opened) {
            (Outgoing::Ping { padding, .. }, Message::Ping(opened)) => {
                let padded = padding == Padding::Coder;
                assert_eq!(opened, Ping { tx, node_key: Some(node_key), padded });
            }
            (Outgoing::Pong { .. }, Message::Pong(opened)) => assert_eq!(opened, Pong { tx, source }),
            (Outgoing::CallMeMaybe(_), Message::CallMeMaybe(opened)) => {
                assert!(opened.endpoints().eq(listed));
            }
            (_, opened) => panic!("{name} was read as {opened:?}"),
        }
        assert!(envelope.open(&at_b, &mut vec![0; envelope.content_len() - 1]).is_err());
        for at in [62, 78, bytes.len() - 1] {
            let mut altered = bytes.clone();
            altered[at] ^= 1;
            let mut scratch = vec![0; bytes.len()];
            assert!(Envelope::parse(&altered).unwrap().open(&at_b, &mut scratch).is_err(), "{name} altered at {at}");
        }
    }
    let full = ping(Padding::Full).sealed_len();
    assert_eq!(full, 1312, "T-13");
}

/// 8.4.
#[test]
fn stun_messages_equal_those_of_the_library() {
    let tx = stun::TxId(TX);
    let request = vector("stun request");
    assert_eq!(stun::binding_request(&tx)[..], request);
    assert_eq!(stun::parse_binding_request(&request, stun::Strictness::Strict), Some(tx));
    for name in ["192.0.2.10:41641", "[2001:db8::7]:41641"] {
        let (mapped, bytes) = (name.parse().unwrap(), vector(&format!("stun response {name}")));
        let mut out = [0; stun::MAX_RESPONSE_LEN];
        let len = stun::binding_response(&tx, mapped, &mut out);
        assert_eq!(out[..len], bytes);
        assert_eq!(stun::parse_binding_response(&bytes), Some(stun::Response { tx, mapped }));
    }
}

/// 8.5.
#[test]
fn tsmp_packets_equal_those_of_the_library() {
    let (ping, pong) = (vector("tsmp ping"), vector("tsmp pong"));
    let client = "fd60:627a:a42b:1::1".parse().unwrap();
    let agent = "fd7a:115c:a1e0:4a2b:8c3d:1122:3344:5566".parse().unwrap();
    let data = [1, 2, 3, 4, 5, 6, 7, 8];
    let mut out = [0; 64];
    assert_eq!(tsmp::write_ping(client, agent, &data, &mut out), Some(tsmp::PING_LEN));
    assert_eq!(out[..tsmp::PING_LEN], ping);
    assert_eq!(tsmp::write_pong(&ping, &mut out), Some(tsmp::PONG_LEN));
    assert_eq!(out[..tsmp::PONG_LEN], pong);
    assert_eq!(tsmp::write_pong(&pong, &mut out), None, "a pong is not answered");
    assert_eq!(tsmp::parse(&ping[40..]), tsmp::Message::Ping(data));
    assert_eq!(tsmp::parse(&pong[40..]), tsmp::Message::Pong(data));
}

fn read_all(mut input: &[u8]) -> Vec<Packet> {
    let mut reader = PacketReader::new();
    let mut packets = Vec::new();
    while let Some(packet) = reader.read(&mut input).unwrap() {
        packets.push(packet);
    }
    assert!(input.is_empty() && reader.is_idle());
    packets
}

fn read_bytewise(input: &[u8]) -> Vec<Packet> {
    let mut reader = PacketReader::new();
    let mut packets = Vec::new();
    for byte in input.chunks(1) {
        packets.extend(reader.read(&mut &*byte).unwrap());
    }
    packets
}

/// 9.4 to 9.9: every call seen between the libraries, per stream and direction: read whole and bytewise, written again.
#[test]
fn drpc_streams_equal_those_of_the_library() {
    let mut streams = 0;
    for group in ["session client", "session server", "unknown rpc client", "unknown rpc server", "unimplemented"] {
        for stream in [1, 3, 5, 7] {
            let suffix = format!("data stream {stream}");
            let frames = vector_lines().filter(|(name, _)| name.starts_with(group) && name.ends_with(&suffix));
            for bytes in join(group, frames) {
                let packets = read_all(&bytes);
                assert_eq!(read_bytewise(&bytes), packets);
                let mut writer = PacketWriter::default();
                let mut out = Vec::new();
                for packet in &packets {
                    assert_eq!(packet.stream, 1, "DR-1");
                    writer.write(packet.kind, &packet.data, &mut out);
                }
                assert_eq!(out, bytes);
                streams += 1;
            }
        }
    }
    assert_eq!(streams, 12);
}

/// The client's and the server's bytes of "unimplemented" are two streams, all else is one direction already.
fn join<'a>(group: &str, frames: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Vec<u8>> {
    let frames: Vec<Vec<u8>> = frames.map(|(_, text)| hex(text)[12..].to_vec()).collect();
    if frames.is_empty() || group == "unimplemented" { frames } else { vec![frames.concat()] }
}

/// 9.4, 9.6, 9.8: the calls themselves.
#[test]
fn drpc_calls_are_written_as_specified() {
    let mut out = Vec::new();
    let mut call = PacketWriter::default();
    call.invoke("/coder.tailnet.v2.Tailnet/WorkspaceUpdates", &mut out);
    call.message(&hex("0a1000112233445566778899aabbccddeeff"), &mut out);
    assert_eq!(out, vector("session client 05: data stream 5")[12..]);
    out.clear();
    call.close_send(&mut out);
    assert_eq!(out, vector("session client 06: data stream 5")[12..]);
    out.clear();
    call.close(&mut out);
    assert_eq!(out, vector("session client 15: data stream 5")[12..]);
    out.clear();
    let mut call = PacketWriter::default();
    call.invoke("/coder.tailnet.v2.Tailnet/RefreshResumeToken", &mut out);
    call.message(&[], &mut out);
    call.close_send(&mut out);
    assert_eq!(out, vector("session client 11: data stream 7")[12..]);
}

/// 9.9, DR-18.
#[test]
fn drpc_errors_say_what_the_server_lacks() {
    for (vector_name, error) in [
        (
            "unknown rpc server 01: data stream 1",
            CallError::unknown_rpc("/coder.tailnet.v2.Tailnet/RefreshResumeToken"),
        ),
        ("unimplemented server 01: data stream 1", CallError::unimplemented()),
    ] {
        let bytes = &vector(vector_name)[12..];
        let packets = read_all(bytes);
        assert_eq!(packets[0].kind, Kind::Error);
        assert_eq!(CallError::decode(&packets[0].data), error);
        assert!(error.is_unimplemented());
        let mut out = Vec::new();
        PacketWriter::default().error(&error, &mut out);
        assert_eq!(out, bytes);
    }
    assert!(!CallError::new("other").is_unimplemented());
    assert_eq!(CallError::decode(b"short"), CallError::new("short"), "4.8");
}

/// 9.10.
#[test]
fn drpc_corner_cases() {
    let packets = read_all(&vector("drpc metadata, Invoke, Message"));
    let kinds: Vec<_> = packets.iter().map(|packet| (packet.kind, packet.message)).collect();
    assert_eq!(kinds[..2], [(Kind::InvokeMetadata, 1), (Kind::Invoke, 2)]);
    assert_eq!(packets[0].data, hex("0a080a016b120376616c"));

    let cancel = read_all(&vector("drpc soft cancel"));
    assert!(matches!(cancel[..], [Packet { kind: Kind::Cancel, control: true, message: 4, .. }]));
    let mut writer = PacketWriter::default();
    let mut out = Vec::new();
    (0..3).for_each(|_| writer.message(&[], &mut out));
    out.clear();
    writer.write(Kind::Cancel, &[], &mut out);
    assert_eq!(out, vector("drpc soft cancel"));

    let mut writer = PacketWriter::default();
    let mut out = Vec::new();
    writer.invoke("x", &mut out);
    out.clear();
    writer.message(&vec![0; 65537], &mut out);
    let first = vector("drpc split frame 1 header");
    assert_eq!(out[..first.len()], first);
    assert_eq!(out[first.len() + 65536..], vector("drpc split frame 2"));
    assert_eq!(read_all(&out)[0].data, vec![0; 65537]);
}
