//! Engines with hand-made time, joined by a relay made of one queue. Shared by the tests of this folder.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::type_complexity)]

use std::collections::VecDeque;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use codervpn_engine::{Command, Config, Engine, Event, Inbound, PeerState, Route, Sink};
use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RegionId, RelayNodeFields};
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
    let region = |id: &i64| {
        let node = RelayNodeFields {
            name: format!("{id}a"),
            host_name: "relay.test".into(),
            stun_port: -1,
            force_http: true,
            ..RelayNodeFields::default()
        };
        let region = RegionFields {
            region_id: *id,
            region_code: "coder".into(),
            region_name: "Coder".into(),
            nodes: vec![node],
            ..RegionFields::default()
        };
        (*id, region)
    };
    let fields = DerpMapFields { regions: ids.iter().map(region).collect(), ..DerpMapFields::default() };
    DerpMap::from_fields(&fields).0
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
    /// Where it is reached by UDP; none of them has a NAT in front.
    pub sockets: Vec<SocketAddr>,
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
        Self {
            id,
            engine: Engine::new(config, now),
            out: Out::default(),
            events: Vec::new(),
            address,
            sockets: Vec::new(),
        }
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

    /// Gives the party a UDP socket on each of these addresses, which all have one port.
    pub fn bind(&mut self, sockets: &[&str], now: Instant) {
        self.sockets = sockets.iter().map(|text| text.parse().unwrap()).collect();
        let port = |v4| self.sockets.iter().find(|s| s.is_ipv4() == v4).map(SocketAddr::port);
        let (v4, v6) = (port(true), port(false));
        self.apply(Command::SocketsBound { v4, v6 }, now);
        let addresses = self.sockets.iter().map(SocketAddr::ip).collect();
        self.apply(Command::LocalAddresses(addresses), now);
    }

    pub fn udp(&mut self, from: &str, datagram: &[u8], now: Instant) {
        self.engine.handle_udp(from.parse().unwrap(), datagram, now, &mut self.out);
        self.drain();
    }

    pub fn path(&self, id: Uuid, now: Instant) -> Option<codervpn_engine::Path> {
        self.engine.peer(id, now).expect("known").path
    }

    /// Kinds of what was sent since the last call: first bytes, disco as `d`.
    pub fn sent_kinds(&mut self) -> Vec<u8> {
        self.out.sent.drain(..).map(|(_, bytes)| bytes[0]).collect()
    }

    pub fn state(&self, id: Uuid, now: Instant) -> PeerState {
        self.engine.peer(id, now).expect("known").state
    }
}

/// Whether a datagram is lost: from, to, bytes.
pub type LoseUdp = Box<dyn FnMut(SocketAddr, SocketAddr, &[u8]) -> bool>;
/// The same for what a party, by number, sends by relay.
pub type LoseRelayed = Box<dyn FnMut(usize, &[u8]) -> bool>;

/// A datagram on its way.
struct Frame {
    at: Instant,
    to: To,
    bytes: Vec<u8>,
}

enum To {
    Relay { from: NodePublic, to: NodePublic },
    Udp { from: SocketAddr, to: SocketAddr },
}

/// Engines, the relay between them, and a network where every party is reached at its addresses.
pub struct World {
    pub now: Instant,
    pub start: Instant,
    pub parties: Vec<Party>,
    pub latency: Duration,
    in_flight: VecDeque<Frame>,
    /// One way, by UDP, between two addresses.
    pub udp_latency: Box<dyn Fn(SocketAddr, SocketAddr) -> Duration>,
    /// UDP datagrams for which this holds are lost: from, to, bytes.
    pub lose_udp: LoseUdp,
    /// Larger UDP datagrams are refused to their sender.
    pub udp_limit: usize,
    /// Every UDP datagram sent: when, from, to, length.
    pub udp_log: Vec<(Instant, SocketAddr, SocketAddr, usize)>,
    /// Frames for which this holds are lost.
    pub lose: LoseRelayed,
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
            udp_latency: Box::new(|_, _| ms(2)),
            lose_udp: Box::new(|_, _, _| false),
            udp_limit: 1500,
            udp_log: Vec::new(),
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
            let arrival = self.in_flight.iter().map(|frame| frame.at).min();
            let timeout = self.parties.iter_mut().filter_map(|p| p.engine.poll_timeout()).min();
            let next = [arrival, timeout].into_iter().flatten().min();
            let Some(next) = next.filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            while let Some(due) = self.in_flight.iter().position(|frame| frame.at <= self.now) {
                let Frame { to, bytes, .. } = self.in_flight.remove(due).unwrap();
                self.arrive(&to, &bytes);
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
                match route {
                    Route::Relay { peer, .. } => {
                        self.relayed += 1;
                        if !(self.lose)(index, &bytes) {
                            let at = self.now + self.latency;
                            self.in_flight.push_back(Frame { at, to: To::Relay { from, to: peer }, bytes });
                        }
                    }
                    Route::Udp(to) => {
                        let Some(from) = party.sockets.iter().copied().find(|s| s.is_ipv4() == to.is_ipv4()) else {
                            panic!("no socket for {to}")
                        };
                        self.udp_log.push((self.now, from, to, bytes.len()));
                        if bytes.len() > self.udp_limit {
                            let failure = codervpn_engine::SendFailure::TooBig;
                            party.engine.handle_send_failure(to, failure, self.now, &mut party.out);
                            party.drain();
                        } else if !(self.lose_udp)(from, to, &bytes) {
                            let at = self.now + (self.udp_latency)(from, to);
                            self.in_flight.push_back(Frame { at, to: To::Udp { from, to }, bytes });
                        }
                    }
                }
            }
        }
    }

    fn arrive(&mut self, to: &To, bytes: &[u8]) {
        for party in &mut self.parties {
            match to {
                To::Relay { from, to } if party.key() == *to => {
                    party.engine.handle_relay(region(1), *from, bytes, self.now, &mut party.out);
                }
                To::Udp { from, to } if party.sockets.contains(to) => {
                    party.engine.handle_udp(*from, bytes, self.now, &mut party.out);
                }
                _ => continue,
            }
            party.drain();
        }
    }

    /// As `connected`, on one network without NAT.
    pub fn direct() -> Self {
        let mut world = Self::pair();
        let now = world.now;
        world.client().bind(&["192.0.2.1:4001"], now);
        world.agent().bind(&["192.0.2.2:4002"], now);
        world.introduce();
        world.run(ms(50));
        let now = world.now;
        assert_eq!(world.client().state(AGENT, now), PeerState::Up);
        world
    }

    /// Sends a packet from the desktop every `every` and has the agent answer each; returns the longest time without an
    /// answer. Packets carry their number, so none counts twice.
    pub fn probe(&mut self, time: Duration, every: Duration) -> Duration {
        let end = self.now + time;
        let (mut last, mut longest) = (self.now, Duration::ZERO);
        self.client().out.delivered.clear();
        self.agent().out.delivered.clear();
        while self.now < end {
            let packet = self.client_to_agent(&[0; 32]);
            let now = self.now;
            self.client().tun(&packet, now);
            let until = now + every;
            while self.now < until {
                self.run(ms(1));
                let asked = self.agent().out.delivered.len();
                self.agent().out.delivered.clear();
                for _ in 0..asked {
                    let answer = self.agent_to_client(&[1; 32]);
                    let now = self.now;
                    self.agent().tun(&answer, now);
                }
                if !self.client().out.delivered.is_empty() {
                    self.client().out.delivered.clear();
                    last = self.now;
                }
                longest = longest.max(self.now - last);
            }
        }
        longest
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
