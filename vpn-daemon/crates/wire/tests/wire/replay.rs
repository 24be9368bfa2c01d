//! Recorded conversations of real programs, read back.

use std::collections::BTreeMap;

use codervpn_wire::classify::{self, Datagram, WireGuard};
use codervpn_wire::derp::{self, Frame, FrameBuffer, Frames, Side};

use super::hex;

struct Recorded {
    side: Side,
    name: String,
    bytes: Vec<u8>,
}

fn recorded(text: &str) -> Vec<Recorded> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let [direction, name, len, bytes] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            let bytes = hex(bytes);
            assert_eq!(bytes.len(), len.parse::<usize>().unwrap() + derp::HEADER_LEN);
            let side = if direction == "C>S" { Side::Server } else { Side::Client };
            Recorded { side, name: name.into(), bytes }
        })
        .collect()
}

fn name(frame: &Frame<'_>) -> &'static str {
    match frame {
        Frame::ServerKey(_) => "ServerKey",
        Frame::ClientInfo { .. } => "ClientInfo",
        Frame::ServerInfo { .. } => "ServerInfo",
        Frame::SendPacket { .. } => "SendPacket",
        Frame::RecvPacket { .. } => "RecvPacket",
        Frame::KeepAlive => "KeepAlive",
        Frame::NotePreferred(true) => "NotePreferred",
        other => panic!("not in a recording: {other:?}"),
    }
}

/// Names of the frames that come out of one direction when it is read in pieces of `piece` bytes.
fn replay(side: Side, frames: &[Recorded], piece: usize) -> Vec<String> {
    let bytes: Vec<u8> = frames.iter().filter(|f| f.side == side).flat_map(|f| f.bytes.clone()).collect();
    let mut buffer = FrameBuffer::new(side);
    let mut names = Vec::new();
    for piece in bytes.chunks(piece) {
        buffer.extend(piece);
        while let Some(frame) = buffer.next_frame().unwrap() {
            if let Frame::SendPacket { packet, .. } | Frame::RecvPacket { packet, .. } = frame {
                let kind = classify::datagram(packet);
                assert!(matches!(kind, Datagram::Disco(_) | Datagram::WireGuard(_)), "{kind:?}");
            }
            names.push(name(&frame).into());
        }
    }
    names
}

fn check_replay(text: &str) {
    let frames = recorded(text);
    for side in [Side::Client, Side::Server] {
        let expected: Vec<String> = frames.iter().filter(|f| f.side == side).map(|f| f.name.clone()).collect();
        assert!(expected.len() > 5);
        for piece in [1, 7, 1460, usize::MAX] {
            assert_eq!(replay(side, &frames, piece), expected, "in pieces of {piece}");
        }
    }
    // What we write for the same packets is the same to the byte.
    for frame in &frames {
        let mut out = Vec::new();
        match derp::split_frame(frame.side, &frame.bytes).unwrap().unwrap().0 {
            Frame::SendPacket { to, packet } => derp::write_send_packet(&mut out, &to, packet).unwrap(),
            Frame::RecvPacket { from, packet } => derp::write_recv_packet(&mut out, &from, packet).unwrap(),
            Frame::NotePreferred(home) => derp::write_note_preferred(&mut out, home),
            Frame::KeepAlive => derp::write_keep_alive(&mut out),
            Frame::ServerKey(key) => derp::write_server_key(&mut out, &key),
            _ => continue,
        }
        assert_eq!(out, frame.bytes);
    }
}

#[test]
fn relay_connection_by_upgrade() {
    check_replay(include_str!("../data/derp-upgrade.txt"));
}

#[test]
fn relay_connection_by_websocket() {
    check_replay(include_str!("../data/derp-websocket.txt"));
}

/// A run of packets is taken at once, and read again from the batch as another thread would.
#[test]
fn runs_of_packets_are_taken_whole() {
    let frames = recorded(include_str!("../data/derp-websocket.txt"));
    for side in [Side::Client, Side::Server] {
        let bytes: Vec<u8> = frames.iter().filter(|f| f.side == side).flat_map(|f| f.bytes.clone()).collect();
        let packets = frames.iter().filter(|f| f.side == side && f.name.ends_with("Packet")).count();
        for (piece, max_len) in [(1, 4096), (997, 1), (usize::MAX, 4096), (usize::MAX, usize::MAX)] {
            let mut buffer = FrameBuffer::new(side);
            let (mut batch, mut others) = (Vec::new(), 0);
            for piece in bytes.chunks(piece) {
                buffer.extend(piece);
                loop {
                    let run = buffer.next_packets(max_len).unwrap();
                    if !run.is_empty() {
                        assert!(run.len() <= max_len || Frames::new(side, run).count() == 1);
                        batch.extend_from_slice(run);
                        continue;
                    }
                    match buffer.next_frame().unwrap() {
                        Some(Frame::SendPacket { .. } | Frame::RecvPacket { .. }) => panic!("left by next_packets"),
                        Some(_) => others += 1,
                        None => break,
                    }
                }
            }
            assert_eq!(Frames::new(side, &batch).packets().count(), packets);
            assert_eq!(others, 2, "both greetings, or greeting and home mark");
            let mut frames = Frames::new(side, &batch);
            frames.by_ref().for_each(drop);
            assert!(frames.rest().is_empty());
        }
    }
}

/// Everything that a tunnel's socket saw is told apart, noise included.
#[test]
fn direct_datagrams_are_told_apart() {
    let mut seen = BTreeMap::new();
    for line in include_str!("../data/udp-direct.txt").lines().filter(|line| !line.starts_with('#')) {
        let [kind, len, bytes] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let bytes = hex(bytes);
        assert_eq!(bytes.len(), len.parse::<usize>().unwrap());
        let told = match classify::datagram(&bytes) {
            Datagram::Disco(envelope) => {
                assert_eq!(bytes.len(), codervpn_wire::disco::PADDED_LEN);
                assert_eq!(envelope.content_len(), 1232);
                "disco"
            }
            Datagram::WireGuard(WireGuard::Response { .. }) => "wg-resp",
            Datagram::WireGuard(WireGuard::Data { .. }) => "wg-data",
            Datagram::WireGuard(WireGuard::Initiation { .. }) => "wg-init",
            Datagram::Other => "other",
            unexpected => panic!("{unexpected:?}"),
        };
        assert_eq!(told, kind);
        *seen.entry(told).or_insert(0) += 1;
    }
    assert_eq!(seen, BTreeMap::from([("disco", 34), ("other", 10), ("wg-data", 9), ("wg-resp", 1)]));
}
