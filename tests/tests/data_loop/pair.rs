//! Two tunnels that know each other, with devices that make traffic themselves.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use std::{io, ptr};

use codervpn_engine::{Command, Config, Direct, Engine, Path, PeerState};
use codervpn_host::tun::{Frame, Written};
use codervpn_testbed::relay::{Relay, RelayOptions as ServerOptions};
use codervpn_underlay::{Dialer, DialerConfig, RelayAccess, RelayOptions, Relays};
use codervpn_wire::node::coder_address;
use rand_core::OsRng;
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::mpsc;
use uuid::Uuid;
use vpn_daemon::tunnel::{PacketDevice, Snapshot, Tunnel, TunnelEvent, TunnelHandle, Wake};

const CLIENT: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888);
const AGENT: Uuid = Uuid::from_u128(0x7f3c_9a52_1d4e_4b86_a2c7_5e90_d1f8_b364);
/// A full packet.
const PACKET: usize = 1280;
/// Its payload.
pub(crate) const PAYLOAD: usize = PACKET - 48;
/// Packets of a frame, as many as the device's limits allow (fast path 4.2).
pub(crate) const SEGMENTS: u64 = 49;
/// Packets under way, as a TCP connection would have them: never more than sockets and the relay hold (it keeps 512).
const WINDOW: u64 = 400;
const PATIENCE: Duration = Duration::from_secs(60);

/// How the packets travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Relay,
    Direct,
}

pub(crate) struct Pair {
    sides: [Side; 2],
    _relay: Relay,
}

struct Side {
    tunnel: Tunnel,
    relays: Relays,
    traffic: Arc<Traffic>,
}

/// What a device and the test share.
struct Traffic {
    /// Packets that shall have been sent by now.
    wanted: AtomicU64,
    sent: AtomicU64,
    got: AtomicU64,
    /// Of the loop's thread.
    allocations: AtomicU64,
    signal: OwnedFd,
}

impl Traffic {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            wanted: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            got: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            signal: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap(),
        })
    }

    fn raise(&self) {
        let _ = rustix::io::write(&self.signal, &1_u64.to_ne_bytes());
    }

    fn want(&self, packets: u64) {
        self.wanted.fetch_add(packets, SeqCst);
        self.raise();
    }
}

struct Device {
    own: Arc<Traffic>,
    other: Arc<Traffic>,
    /// A super-packet with the kernel's header in front.
    frame: Vec<u8>,
    room: Vec<u8>,
    /// Packets given since the last flush.
    waiting: u64,
}

impl Device {
    /// How many packets the next frame has.
    fn may_send(&self) -> u64 {
        let sent = self.own.sent.load(SeqCst);
        let wanted = self.own.wanted.load(SeqCst) - sent;
        let window = (self.other.got.load(SeqCst) + WINDOW) - sent;
        if window < SEGMENTS { 0 } else { wanted.min(SEGMENTS) }
    }
}

impl PacketDevice for Device {
    fn recv(&mut self, frame: &mut Frame) -> io::Result<()> {
        self.own.allocations.store(crate::ALLOCATIONS.get(), SeqCst);
        let mut packets = self.may_send();
        if packets == 0 {
            let _ = rustix::io::read(&self.own.signal, &mut [0; 8]);
            // Whoever changed it before the signal was cleared is seen here, later ones signal again.
            packets = self.may_send();
            if packets == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        self.own.sent.fetch_add(packets, SeqCst);
        let len = HEADERS + packets as usize * PAYLOAD;
        frame.fill_with_header(|room| {
            room[..len].copy_from_slice(&self.frame[..len]);
            io::Result::Ok(len)
        })
    }

    fn room(&mut self, room: usize) -> Option<&mut [u8]> {
        self.room.get_mut(..room)
    }

    fn commit(&mut self, len: usize) {
        assert_eq!(len, PACKET);
        assert_eq!(self.room[PACKET - PAYLOAD..PACKET], self.frame[HEADERS..HEADERS + PAYLOAD]);
        self.waiting += 1;
    }

    fn flush(&mut self) -> Written {
        let packets = std::mem::take(&mut self.waiting);
        if packets > 0 {
            self.own.got.fetch_add(packets, SeqCst);
            self.other.raise();
        }
        Written { writes: u64::from(packets > 0), packets, ..Written::default() }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.own.signal.as_fd()
    }
}

/// Of a frame: the kernel's, IPv6 and UDP.
const HEADERS: usize = 10 + 48;

/// UDP datagrams that fill packets, as one super-packet.
fn super_packet(from: Ipv6Addr, to: Ipv6Addr, ports: [u16; 2]) -> Vec<u8> {
    let mut frame = vec![0; HEADERS];
    // Checksum to be finished; UDP in segments.
    frame[..2].copy_from_slice(&[1, 5]);
    for (at, number) in [(2, 48), (4, PAYLOAD as u16), (6, 40), (8, 6)] {
        frame[at..at + 2].copy_from_slice(&number.to_ne_bytes());
    }
    frame[10..18].copy_from_slice(&[0x60, 0, 0, 0, 0, 0, 17, 64]);
    frame[18..34].copy_from_slice(&from.octets());
    frame[34..50].copy_from_slice(&to.octets());
    frame[50..52].copy_from_slice(&ports[0].to_be_bytes());
    frame[52..54].copy_from_slice(&ports[1].to_be_bytes());
    let payload: Vec<u8> = (0..PAYLOAD).map(|at| at as u8).collect();
    frame.extend((0..SEGMENTS).flat_map(|_| payload.clone()));
    frame
}

impl Pair {
    pub(crate) async fn connected(way: Way) -> Self {
        let relay = Relay::start(ServerOptions::default()).await.unwrap();
        let traffic = [Traffic::new(), Traffic::new()];
        let mut configs = [Config::client(OsRng), Config::agent(AGENT, OsRng)];
        for config in &mut configs {
            config.allow_loopback = true;
            config.status_pings = false;
            if way == Way::Relay {
                config.direct = Direct::DisabledByUser;
            }
        }
        let [client, agent] = [configs[0].addresses[0], coder_address(AGENT)];
        let frames = [super_packet(client, agent, [40_000, 7]), super_packet(agent, client, [7, 40_000])];
        let mut sides = Vec::new();
        let mut events = Vec::new();
        for ((config, frame), own) in configs.into_iter().zip(frames).zip(&traffic) {
            let other = traffic.iter().find(|other| !ptr::eq(*other, own)).unwrap();
            let device = Device { own: own.clone(), other: other.clone(), frame, room: vec![0; 2048], waiting: 0 };
            let (side, told) = Side::start(config, device, &relay).await;
            sides.push(side);
            events.push(told);
        }
        let sides: [Side; 2] = sides.try_into().ok().unwrap();
        let handles = [sides[0].handle(), sides[1].handle()];
        handles[0].apply(vec![Command::AddDestination(AGENT)]).await.unwrap();
        let [to_agent, to_client] = [handles[1].clone(), handles[0].clone()];
        for (events, (peer, other)) in events.into_iter().zip([(CLIENT, to_agent), (AGENT, to_client)]) {
            tokio::spawn(introduce(events, peer, other));
        }
        let pair = Self { sides, _relay: relay };
        // The first packet opens the session, and the filter of the client for the way back.
        pair.until("a session", |snapshot| snapshot.peers.iter().any(|peer| peer.state == PeerState::Up)).await;
        pair.send([1, 0]).await;
        pair.send([0, 1]).await;
        let direct = |snapshot: &Snapshot| snapshot.peers.iter().any(|peer| matches!(peer.path, Some(Path::Direct(_))));
        if way == Way::Direct {
            pair.until("a direct path", direct).await;
        }
        pair
    }

    /// So many packets in each direction, at the same time.
    pub(crate) async fn exchange(&self, packets: u64) {
        self.send([packets; 2]).await;
    }

    pub(crate) async fn send(&self, packets: [u64; 2]) {
        let [a, b] = &self.sides;
        a.traffic.want(packets[0]);
        b.traffic.want(packets[1]);
        let deadline = Instant::now() + PATIENCE;
        for (from, to) in [(a, b), (b, a)] {
            while to.traffic.got.load(SeqCst) < from.traffic.wanted.load(SeqCst) {
                if Instant::now() > deadline {
                    let snapshots = (a.handle().snapshot().await, b.handle().snapshot().await);
                    panic!("packets are missing: {snapshots:#?}");
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// Of each loop so far.
    pub(crate) fn allocations(&self) -> [u64; 2] {
        self.sides.each_ref().map(|side| side.traffic.allocations.load(SeqCst))
    }

    pub(crate) async fn snapshots(&self) -> [Snapshot; 2] {
        let [a, b] = &self.sides;
        [a.handle().snapshot().await.unwrap(), b.handle().snapshot().await.unwrap()]
    }

    async fn until(&self, what: &str, mut holds: impl FnMut(&Snapshot) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let snapshots = self.snapshots().await;
            if snapshots.iter().all(&mut holds) {
                return;
            }
            assert!(Instant::now() < deadline, "no {what}: {snapshots:#?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn stop(self) {
        for side in self.sides {
            side.relays.close();
            side.tunnel.stop().await;
        }
    }
}

impl Side {
    async fn start(config: Config, device: Device, relay: &Relay) -> (Self, mpsc::Receiver<TunnelEvent>) {
        let wake = Wake::new().unwrap();
        let waker = wake.clone();
        let dialer = Dialer::new(DialerConfig::default()).unwrap();
        let options = RelayOptions { access: RelayAccess::default(), wake: Arc::new(move || waker.wake()) };
        let relays = Relays::new(dialer, config.node_key.clone(), options);
        relays.set_map(&relay.derp_map());
        let traffic = device.own.clone();
        let engine = Engine::new(config, Instant::now());
        let (tunnel, events) = Tunnel::start(device, engine, None, relays.clone(), wake).unwrap();
        let commands =
            vec![Command::LocalAddresses(vec![Ipv4Addr::LOCALHOST.into()]), Command::DerpMap(relay.derp_map())];
        tunnel.handle().apply(commands).await.unwrap();
        (Self { tunnel, relays, traffic }, events)
    }

    fn handle(&self) -> TunnelHandle {
        self.tunnel.handle().clone()
    }
}

/// What the coordinator does.
async fn introduce(mut events: mpsc::Receiver<TunnelEvent>, id: Uuid, other: TunnelHandle) {
    while let Some(event) = events.recv().await {
        let command = match event {
            TunnelEvent::SelfNode(node) => Command::Node { id, node },
            TunnelEvent::Programmed(_) => Command::ReadyForHandshake(id),
            _ => continue,
        };
        if other.apply(vec![command]).await.is_err() {
            return;
        }
    }
}
