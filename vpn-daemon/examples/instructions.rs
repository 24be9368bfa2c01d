//! One piece of the data path, so many times: what `cargo bench-micro` counts the instructions of.
//!
//! `instructions PIECE TIMES`. What a piece needs is made before and does not depend on TIMES, so the difference of two
//! runs is the piece alone.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

use codervpn_engine::{Command, Config, Engine, Route, Sink};
use codervpn_host::tun::Frame;
use codervpn_host::tun::offload::{Piece, Runs};
use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RegionId, RelayNodeFields};
use codervpn_wire::keys::NodePublic;
use codervpn_wire::node::coder_address;
use codervpn_wire::{classify, derp, ip};
use rand_core::OsRng;
use uuid::Uuid;

const AGENT: Uuid = Uuid::from_u128(0x7f3c_9a52_1d4e_4b86_a2c7_5e90_d1f8_b364);
const DESKTOP: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888);
/// Datagrams sealed in advance; within one replay window after another they open in order.
const SEALED: usize = 1000;
const SEGMENTS: usize = 49;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (piece, times) = (
        arguments.next().expect("made for this"),
        arguments.next().expect("made for this").parse().expect("made for this"),
    );
    match piece.as_str() {
        "seal" => seal(times),
        "open" => open(times),
        "split" => split(times),
        "coalesce" => coalesce(times),
        "classify" => classify(times),
        "derp" => frames(times),
        _ => panic!("no such piece"),
    }
}

/// Keeps what is sent while told to, else reuses one buffer.
struct Out {
    room: Box<[u8; 4096]>,
    keep: bool,
    sent: VecDeque<Vec<u8>>,
    delivered: usize,
}

impl Out {
    fn new() -> Self {
        Self { room: Box::new([0; 4096]), keep: true, sent: VecDeque::new(), delivered: 0 }
    }
}

impl Sink for Out {
    fn outgoing(&mut self, _: Route, room: usize) -> Option<&mut [u8]> {
        self.room.get_mut(..room)
    }
    fn send(&mut self, _: Route, len: usize) {
        if self.keep {
            self.sent.push_back(self.room[..len].to_vec());
        }
    }
    fn incoming(&mut self, room: usize) -> Option<&mut [u8]> {
        self.room.get_mut(..room)
    }
    fn deliver(&mut self, len: usize) {
        self.delivered += black_box(len).min(1);
    }
}

struct Party {
    engine: Engine,
    out: Out,
}

fn region() -> RegionId {
    RegionId::new(1).expect("made for this")
}

fn map() -> DerpMap {
    let node = RelayNodeFields { name: "1a".into(), host_name: "relay.test".into(), ..RelayNodeFields::default() };
    let region = RegionFields { region_id: 1, nodes: vec![node], ..RegionFields::default() };
    DerpMap::from_fields(&DerpMapFields { regions: vec![(1, region)], ..DerpMapFields::default() }).0
}

/// A desktop and an agent with a session.
fn connected(now: Instant) -> (Party, Party) {
    let party = |config: Config| {
        let mut party = Party { engine: Engine::new(config, now), out: Out::new() };
        for command in [Command::DerpMap(map()), Command::RelayUp(region())] {
            party.engine.apply(command, now, &mut party.out);
        }
        party
    };
    let mut client_config = Config::client(OsRng);
    client_config.status_pings = false;
    let (mut client, mut agent) = (party(client_config), party(Config::agent(AGENT, OsRng)));
    let node =
        |party: &Party| Box::new(party.engine.self_node(std::time::SystemTime::UNIX_EPOCH).expect("made for this"));
    let (client_node, agent_node) = (node(&client), node(&agent));
    client.engine.apply(Command::AddDestination(AGENT), now, &mut client.out);
    agent.engine.apply(Command::Node { id: DESKTOP, node: client_node }, now, &mut agent.out);
    client.engine.apply(Command::Node { id: AGENT, node: agent_node }, now, &mut client.out);
    client.engine.apply(Command::ReadyForHandshake(AGENT), now, &mut client.out);
    while !client.out.sent.is_empty() || !agent.out.sent.is_empty() {
        pass(&mut client, &mut agent, now);
        pass(&mut agent, &mut client, now);
    }
    (client, agent)
}

fn pass(from: &mut Party, to: &mut Party, now: Instant) {
    let key = from.engine.node_key();
    while let Some(datagram) = from.out.sent.pop_front() {
        to.engine.handle_relay(region(), key, &datagram, now, &mut to.out);
    }
}

fn full_packet(client: &Party) -> Vec<u8> {
    let mut packet = vec![0; 1280];
    let ends = ((client.engine.addresses()[0], 5000), (coder_address(AGENT), 7));
    let len = ip::write_udp(ends.0, ends.1, &[7; 1232], &mut packet).expect("made for this");
    packet.truncate(len);
    packet
}

fn seal(times: usize) {
    let now = Instant::now();
    let (mut client, _) = connected(now);
    let packet = full_packet(&client);
    client.out.keep = false;
    for _ in 0..times {
        let run = client.engine.handle_tun_first(black_box(&packet), now, &mut client.out).expect("a session stands");
        for _ in 1..SEGMENTS {
            client.engine.handle_tun_next(&run, black_box(&packet), now, &mut client.out);
        }
    }
    assert_eq!(client.engine.counters().tun_sent, (times * SEGMENTS) as u64);
}

fn open(times: usize) {
    assert!(times <= SEALED);
    let now = Instant::now();
    let (mut client, mut agent) = connected(now);
    let packet = full_packet(&client);
    for _ in 0..SEALED {
        client.engine.handle_tun(&packet, now, &mut client.out);
    }
    let key = client.engine.node_key();
    agent.out.keep = false;
    for datagram in client.out.sent.iter().take(times) {
        agent.engine.handle_relay(region(), key, black_box(datagram), now, &mut agent.out);
    }
    assert_eq!(agent.out.delivered, times);
}

/// A TCP packet of the agent's with time stamps, checksum left out.
fn segment(sequence: u32, payload: usize) -> Vec<u8> {
    let mut packet = vec![0x5a; 72 + payload];
    packet[..40].fill(0);
    packet[0] = 0x60;
    packet[4..6].copy_from_slice(&((32 + payload) as u16).to_be_bytes());
    (packet[6], packet[7]) = (ip::TCP, 64);
    packet[8..24].copy_from_slice(&coder_address(AGENT).octets());
    packet[24..40].copy_from_slice(&coder_address(DESKTOP).octets());
    packet[40..44].copy_from_slice(&[0, 80, 0x13, 0x88]);
    packet[44..48].copy_from_slice(&sequence.to_be_bytes());
    packet[48..52].fill(1);
    (packet[52], packet[53]) = (8 << 4, 0x10);
    packet[54..72].fill(1);
    packet
}

fn split(times: usize) {
    let packet = segment(1, SEGMENTS * 1208);
    // NEEDS_CSUM, TCPv6, cut every 1,208 bytes, transport at 40, checksum at 16.
    let mut read = vec![1, 4];
    for number in [72_u16, 1208, 40, 16] {
        read.extend_from_slice(&number.to_ne_bytes());
    }
    read.extend_from_slice(&packet);
    let mut frame = Frame::default();
    for _ in 0..times {
        let filled = frame.fill_with_header(|buffer| {
            buffer[..read.len()].copy_from_slice(&read);
            Ok::<_, std::io::Error>(read.len())
        });
        filled.expect("made for this");
        let mut packets = 0;
        while let Some(packet) = frame.next() {
            packets += black_box(packet).len().min(1);
        }
        assert_eq!(packets, SEGMENTS);
    }
}

fn coalesce(times: usize) {
    let mut arena = Vec::new();
    let mut pieces = Vec::new();
    for i in 0..SEGMENTS as u32 {
        let packet = segment(1 + i * 1208, 1208);
        pieces.push(Piece { at: arena.len(), length: packet.len() });
        arena.extend_from_slice(&packet);
    }
    let mut runs = Runs::new(true);
    for _ in 0..times {
        for piece in &pieces {
            assert!(runs.add(black_box(&arena), *piece));
        }
        let mut writes = 0;
        runs.flush(&arena, |joined| writes += black_box(joined.pieces).len().min(1));
        assert_eq!(writes, 1);
    }
}

fn classify(times: usize) {
    let mut data = vec![0; 1312];
    data[0] = 4;
    let disco = [&b"TS\xf0\x9f\x92\xac"[..], &[7; 1306]].concat();
    for _ in 0..times {
        for datagram in [&data, &disco] {
            black_box(classify::datagram(black_box(datagram)));
        }
    }
}

fn frames(times: usize) {
    let (key, packet) = (NodePublic::from_wire([7; 32]), [0x5a; 1312]);
    let mut out = Vec::with_capacity(256 * 1024);
    for _ in 0..times {
        out.clear();
        for _ in 0..SEGMENTS {
            derp::write_send_packet(&mut out, &key, black_box(&packet)).expect("made for this");
        }
        black_box(&out);
    }
}
