//! No heap allocation per packet in steady state, in either direction. A program of its own, because it counts with the
//! allocator of the whole process; one test only, so that no other thread allocates meanwhile.
#![allow(clippy::unwrap_used, reason = "helpers of tests count as tests")]

mod sim;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Instant;

use codervpn_engine::{Command, Route, Sink};
use codervpn_wire::node::coder_address;
use sim::{AGENT, AGENT_SIDE, CLIENT_SIDE, DESKTOP, World, ms, region, secs, tcp, udp};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator; counting touches only a thread-local integer
// without a destructor, so it neither allocates nor runs after the thread's end.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are ours.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are ours.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One buffer a direction, as a data loop has them.
struct Fixed {
    outgoing: Vec<u8>,
    sent: usize,
    /// The way of the last datagram, and how many there were.
    route: Option<Route>,
    datagrams: usize,
    incoming: Vec<u8>,
    delivered: usize,
}

impl Sink for Fixed {
    fn outgoing(&mut self, _: Route, room: usize) -> Option<&mut [u8]> {
        self.outgoing.get_mut(..room)
    }
    fn send(&mut self, route: Route, len: usize) {
        self.sent = len;
        self.route = Some(route);
        self.datagrams += 1;
    }
    fn incoming(&mut self, room: usize) -> Option<&mut [u8]> {
        self.incoming.get_mut(..room)
    }
    fn deliver(&mut self, len: usize) {
        self.delivered = len;
    }
}

fn fixed() -> Fixed {
    Fixed { outgoing: vec![0; 2048], sent: 0, route: None, datagrams: 0, incoming: vec![0; 2048], delivered: 0 }
}

/// Sends `packets` round and round, the far side answers each; returns the allocations meanwhile. Every packet has to
/// leave as exactly one datagram, by relay or, where both have a socket, directly.
fn exchange(world: &mut World, there: &[Vec<u8>], back: &[Vec<u8>], rounds: u32, now: Instant) -> u64 {
    let keys = [world.parties[CLIENT_SIDE].key(), world.parties[AGENT_SIDE].key()];
    let sockets: [Option<SocketAddr>; 2] = [0, 1].map(|side: usize| world.parties[side].sockets.first().copied());
    let mut sinks = [fixed(), fixed()];
    let mut pass = |world: &mut World, from: usize, packet: &[u8], now: Instant| {
        let [a, b] = &mut sinks;
        let (sender, receiver) = if from == CLIENT_SIDE { (a, b) } else { (b, a) };
        (sender.sent, sender.datagrams) = (0, 0);
        receiver.delivered = 0;
        world.parties[from].engine.handle_tun(packet, now, sender);
        let frame = &sender.outgoing[..sender.sent];
        let other = &mut world.parties[1 - from].engine;
        match (sender.route, sockets[from], sockets[1 - from]) {
            (Some(Route::Udp(to)), Some(source), there) if there == Some(to) => {
                other.handle_udp(source, frame, now, receiver);
            }
            (Some(Route::Relay { .. }), None, _) => other.handle_relay(region(1), keys[from], frame, now, receiver),
            (route, ..) => panic!("an unexpected way: {route:?}"),
        }
        assert_eq!((sender.datagrams, receiver.delivered), (1, packet.len()));
        assert_eq!(&receiver.incoming[..packet.len()], packet);
    };
    let before = ALLOCATIONS.get();
    for round in 0..rounds {
        let now = now + ms(u64::from(round) / 10);
        for (there, back) in there.iter().zip(back) {
            pass(world, CLIENT_SIDE, there, now);
            pass(world, AGENT_SIDE, back, now);
        }
    }
    ALLOCATIONS.get() - before
}

#[test]
fn no_packet_allocates_in_steady_state() {
    by(World::direct(), "directly");
    let mut world = by(World::connected(), "by relay");
    nor_does_what_is_dropped(&mut world);
}

fn by(mut world: World, way: &str) -> World {
    world.run(secs(2));
    let (desktop, agent) = (world.client().address, coder_address(AGENT));
    let mut there = Vec::new();
    let mut back = Vec::new();
    // Odd sizes are padded, others are not; several conversations.
    for (n, len) in [0usize, 1, 100, 1000, 1231, 1232].into_iter().enumerate() {
        let port = 5000 + n as u16;
        there.push(udp(desktop, agent, port, 7, &vec![1; len]));
        back.push(udp(agent, desktop, 7, port, &vec![2; len]));
        there.push(tcp(desktop, agent, port, 80, sim::ACK));
        back.push(tcp(agent, desktop, 80, port, sim::ACK));
    }
    let now = world.now;
    exchange(&mut world, &there, &back, 10, now);
    let allocations = exchange(&mut world, &there, &back, 2000, now);
    assert_eq!(allocations, 0, "in 48,000 packets {way}");
    world.now += secs(1);
    world
}

/// What is dropped and answered does not allocate either.
fn nor_does_what_is_dropped(world: &mut World) {
    let now = world.now;
    let (desktop, agent) = (world.client().address, coder_address(AGENT));
    let unknown = udp(desktop, "fd60:627a:a42b::99".parse().unwrap(), 1, 2, b"nobody");
    let stray = udp(agent, desktop, 9999, 22, b"unasked");
    let mut sink = fixed();
    let keys = [world.parties[CLIENT_SIDE].key(), world.parties[AGENT_SIDE].key()];
    let before = ALLOCATIONS.get();
    for _ in 0..1000 {
        world.parties[CLIENT_SIDE].engine.handle_tun(&unknown, now, &mut sink);
        world.parties[AGENT_SIDE].engine.handle_tun(&stray, now, &mut sink);
        let (party, frame) = (&mut world.parties[CLIENT_SIDE], sink.outgoing[..sink.sent].to_vec());
        party.engine.handle_relay(region(1), keys[AGENT_SIDE], &frame, now, &mut sink);
        party.engine.handle_relay(region(1), keys[CLIENT_SIDE], &frame, now, &mut sink);
    }
    assert_eq!(ALLOCATIONS.get() - before, 1000, "only the copies that this test makes");
    assert_eq!(world.client().engine.counters().inner_filtered, 1000);
    assert!(world.client().engine.peer(AGENT, now).is_some() && world.agent().engine.peer(DESKTOP, now).is_some());
    world.client().apply(Command::RelayDown(region(1)), now);
}
