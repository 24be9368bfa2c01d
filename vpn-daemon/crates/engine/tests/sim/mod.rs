//! Engines with hand-made time, joined by a relay made of one queue. Shared by the tests of this folder.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::type_complexity)]

use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant, SystemTime};

use codervpn_engine::{Command, Config, Engine, Event, Inbound, PeerState, Route, Sink};
use codervpn_wire::derp_map::{DerpMap, Reach, Region, RegionId, RelayNode};
use codervpn_wire::ip::{self, Ipv6Header};
use codervpn_wire::keys::NodePublic;
use codervpn_wire::node::{Node, coder_address};
use rand_core::{CryptoRng, RngCore, impls};
use uuid::Uuid;

pub const AGENT: Uuid = Uuid::from_u128(0x7f3c_9a52_1d4e_4b86_a2c7_5e90_d1f8_b364);
pub const DESKTOP: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888);

/// Not random at all, which is what a test wants.
pub struct TestRng(pub u64);

impl RngCore for TestRng {
    fn next_u32(&mut self) -> u32 {
        self.next_u64() as u32
    }
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn fill_bytes(&mut self, dest: &mut [u8]) {
        impls::fill_bytes_via_next(self, dest);
    }
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), rand_core::Error> {
        self.fill_bytes(dest);
        Ok(())
    }
}

impl CryptoRng for TestRng {}

#[allow(clippy::disallowed_methods)]
pub fn start() -> Instant {
    Instant::now()
}

pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

pub fn region(id: i64) -> RegionId {
    RegionId::new(id).unwrap()
}

pub fn map(ids: &[i64]) -> DerpMap {
    let mut map = DerpMap::default();
    for id in ids {
        let node = RelayNode {
            name: format!("{id}a"),
            host: "relay.test".into(),
            cert_name: None,
            ipv4: Reach::Resolve,
            ipv6: Reach::Resolve,
            derp_port: Some(443),
            stun_port: None,
            force_http: true,
            insecure_for_tests: false,
            stun_test_ip: None,
            can_port_80: false,
        };
        let id = region(*id);
        let region =
            Region { id, code: "coder".into(), name: "Coder".into(), embedded: false, avoid: false, nodes: vec![node] };
        map.regions.insert(id, region);
    }
    map
}

/// Keeps what comes out.
#[derive(Default)]
pub struct Out {
    room: Vec<u8>,
    pub sent: VecDeque<(Route, Vec<u8>)>,
    pub delivered: VecDeque<Vec<u8>>,
    pub full: bool,
}

impl Sink for Out {
    fn outgoing(&mut self, _: Route, room: usize) -> Option<&mut [u8]> {
        self.room.clear();
        self.room.resize(room, 0xee);
        (!self.full).then_some(&mut self.room)
    }
    fn send(&mut self, route: Route, len: usize) {
        self.sent.push_back((route, self.room[..len].to_vec()));
    }
    fn incoming(&mut self, room: usize) -> Option<&mut [u8]> {
        self.room.clear();
        self.room.resize(room, 0xdd);
        (!self.full).then_some(&mut self.room)
    }
    fn deliver(&mut self, len: usize) {
        self.delivered.push_back(self.room[..len].to_vec());
    }
}

pub struct Party {
    pub id: Uuid,
    pub engine: Engine,
    pub out: Out,
    pub events: Vec<Event>,
    pub address: Ipv6Addr,
}

impl Party {
    pub fn client(seed: u64, now: Instant) -> Self {
        Self::new(DESKTOP, Config::client(TestRng(seed)), now)
    }

    pub fn agent(id: Uuid, seed: u64, now: Instant) -> Self {
        Self::new(id, Config::agent(id, TestRng(seed)), now)
    }

    pub fn new(id: Uuid, config: Config, now: Instant) -> Self {
        let address = config.addresses[0];
        Self { id, engine: Engine::new(config, now), out: Out::default(), events: Vec::new(), address }
    }

    pub fn apply(&mut self, command: Command, now: Instant) {
        self.engine.apply(command, now, &mut self.out);
        self.drain();
    }

    pub fn tun(&mut self, packet: &[u8], now: Instant) {
        self.engine.handle_tun(packet, now, &mut self.out);
        self.drain();
    }

    pub fn drain(&mut self) {
        while let Some(event) = self.engine.poll_event() {
            self.events.push(event);
        }
    }

    pub fn node(&self) -> Box<Node> {
        Box::new(self.engine.self_node(SystemTime::UNIX_EPOCH).expect("home is known"))
    }

    pub fn key(&self) -> NodePublic {
        self.engine.node_key()
    }

    pub fn online(&mut self, now: Instant) {
        self.apply(Command::DerpMap(map(&[1])), now);
        self.apply(Command::RelayUp(region(1)), now);
    }

    /// Kinds of what was sent since the last call: first bytes, disco as `d`.
    pub fn sent_kinds(&mut self) -> Vec<u8> {
        self.out.sent.drain(..).map(|(_, bytes)| bytes[0]).collect()
    }

    pub fn state(&self, id: Uuid, now: Instant) -> PeerState {
        self.engine.peer(id, now).expect("known").state
    }
}

/// Engines and the relay between them.
pub struct World {
    pub now: Instant,
    pub start: Instant,
    pub parties: Vec<Party>,
    pub latency: Duration,
    in_flight: VecDeque<(Instant, NodePublic, NodePublic, Vec<u8>)>,
    /// Frames for which this holds are lost.
    pub lose: Box<dyn FnMut(usize, &[u8]) -> bool>,
    pub relayed: usize,
}

pub const CLIENT_SIDE: usize = 0;
pub const AGENT_SIDE: usize = 1;

impl World {
    pub fn new(parties: impl FnOnce(Instant) -> Vec<Party>) -> Self {
        let start = start();
        Self {
            now: start,
            start,
            parties: parties(start),
            latency: ms(1),
            in_flight: VecDeque::new(),
            lose: Box::new(|_, _| false),
            relayed: 0,
        }
    }

    /// A desktop and an agent, both online, the agent known as a destination, nothing else.
    pub fn pair() -> Self {
        let mut world = Self::new(|now| vec![Party::client(1, now), Party::agent(AGENT, 2, now)]);
        for party in &mut world.parties {
            party.online(world.now);
        }
        world.parties[CLIENT_SIDE].apply(Command::AddDestination(AGENT), world.now);
        world
    }

    /// As `pair`, with a session.
    pub fn connected() -> Self {
        let mut world = Self::pair();
        world.introduce();
        world.run(ms(10));
        let now = world.now;
        assert_eq!(world.client().state(AGENT, now), PeerState::Up);
        world
    }

    /// The coordinator's part: nodes both ways, then READY to the desktop.
    pub fn introduce(&mut self) {
        let (client, agent) = (self.client().node(), self.agent().node());
        let now = self.now;
        self.agent().apply(Command::Node { id: DESKTOP, node: client }, now);
        self.client().apply(Command::Node { id: AGENT, node: agent }, now);
        self.client().apply(Command::ReadyForHandshake(AGENT), now);
    }

    pub fn client(&mut self) -> &mut Party {
        &mut self.parties[CLIENT_SIDE]
    }

    pub fn agent(&mut self) -> &mut Party {
        &mut self.parties[AGENT_SIDE]
    }

    /// Lets time pass: frames arrive, timers fire.
    pub fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.collect();
            let arrival = self.in_flight.iter().map(|frame| frame.0).min();
            let timeout = self.parties.iter_mut().filter_map(|p| p.engine.poll_timeout()).min();
            let next = [arrival, timeout].into_iter().flatten().min();
            let Some(next) = next.filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            while let Some(due) = self.in_flight.iter().position(|frame| frame.0 <= self.now) {
                let (_, from, to, bytes) = self.in_flight.remove(due).unwrap();
                for party in self.parties.iter_mut().filter(|p| p.key() == to) {
                    party.engine.handle_relay(region(1), from, &bytes, self.now, &mut party.out);
                    party.drain();
                }
            }
            for party in &mut self.parties {
                if party.engine.poll_timeout().is_some_and(|at| at <= self.now) {
                    party.engine.handle_timeout(self.now, &mut party.out);
                    party.drain();
                    let next = party.engine.poll_timeout();
                    assert!(next.is_none_or(|at| at > self.now), "a timer that does not move on");
                }
            }
        }
        self.now = end;
    }

    fn collect(&mut self) {
        for (index, party) in self.parties.iter_mut().enumerate() {
            let from = party.engine.node_key();
            while let Some((route, bytes)) = party.out.sent.pop_front() {
                let Route::Relay { peer, .. } = route else { panic!("no direct paths yet") };
                self.relayed += 1;
                if !(self.lose)(index, &bytes) {
                    self.in_flight.push_back((self.now + self.latency, from, peer, bytes));
                }
            }
        }
    }

    pub fn client_to_agent(&mut self, payload: &[u8]) -> Vec<u8> {
        udp(self.client().address, coder_address(AGENT), 5000, 7, payload)
    }

    pub fn agent_to_client(&mut self, payload: &[u8]) -> Vec<u8> {
        udp(coder_address(AGENT), self.client().address, 7, 5000, payload)
    }
}

pub fn udp(from: Ipv6Addr, to: Ipv6Addr, from_port: u16, to_port: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 48 + payload.len()];
    let len = ip::write_udp((from, from_port), (to, to_port), payload, &mut packet).unwrap();
    packet.truncate(len);
    packet
}

/// A TCP segment without data; flags as in the header's byte.
pub fn tcp(from: Ipv6Addr, to: Ipv6Addr, from_port: u16, to_port: u16, flags: u8) -> Vec<u8> {
    let mut segment = [0; 20];
    segment[..2].copy_from_slice(&from_port.to_be_bytes());
    segment[2..4].copy_from_slice(&to_port.to_be_bytes());
    segment[12] = 5 << 4;
    segment[13] = flags;
    raw(from, to, ip::TCP, &segment)
}

pub fn raw(from: Ipv6Addr, to: Ipv6Addr, next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 40 + payload.len()];
    Ipv6Header::new(from, to, next_header).write(payload, &mut packet).unwrap();
    packet
}

pub const SYN: u8 = 2;
pub const SYN_ACK: u8 = 18;
pub const ACK: u8 = 16;

pub fn open_inbound(party: &mut Party, now: Instant) {
    party.apply(Command::Inbound(Inbound::All), now);
}
