//! Nothing that comes from outside can panic or be passed on unchecked (T-01, T-02, T-14).

mod sim;

use codervpn_engine::{Command, RelayLatency};
use codervpn_wire::keys::NodePublic;
use codervpn_wire::node::Family;
use proptest::prelude::*;
use rand_core::RngCore;
use sim::{AGENT, DESKTOP, Party, TestRng, World, ms, region, secs};
use uuid::Uuid;

#[test]
fn t02_an_initiation_from_a_stranger_of_the_relay_costs_one_look_up() {
    let mut world = World::pair();
    world.introduce();
    // The agent's own words, as good as any: only the relay's word for the sender differs.
    let (_, initiation) = world.client().out.sent.pop_front().expect("the first handshake");
    let now = world.now;
    let before = *world.agent().engine.counters();
    for stranger in 0..200 {
        let agent = world.agent();
        let key = NodePublic::from_wire([stranger; 32]);
        agent.engine.handle_relay(region(1), key, &initiation, now, &mut agent.out);
    }
    let after = *world.agent().engine.counters();
    assert_eq!(after.relay_stranger - before.relay_stranger, 200);
    assert!(world.agent().out.sent.is_empty(), "no answer, so no cryptography");
    let from = world.client().key();
    let agent = world.agent();
    agent.engine.handle_relay(region(1), from, &initiation, now, &mut agent.out);
    assert!(!agent.out.sent.is_empty(), "from its sender it is answered");
}

#[test]
fn t14_random_bytes_of_every_length_at_every_input() {
    let mut world = World::connected();
    let mut rng = TestRng(5);
    let now = world.now;
    let peer = world.agent().key();
    let party = world.client();
    let lengths = (0..2000).chain((2000..=65_535).step_by(487)).chain([65_535]);
    for len in lengths {
        for start in [None, Some([1, 0, 0, 0]), Some([2, 0, 0, 0]), Some([3, 0, 0, 0]), Some([4, 0, 0, 0])] {
            let mut bytes = vec![0; len];
            rng.fill_bytes(&mut bytes);
            if let (Some(start), Some(head)) = (start, bytes.get_mut(..4)) {
                head.copy_from_slice(&start);
            }
            // Aim at the session that exists: its index is small.
            if let Some(index) = bytes.get_mut(4..8) {
                index.copy_from_slice(&[rng.next_u32() as u8 % 4, 0, 0, 0]);
            }
            party.engine.handle_relay(region(1), peer, &bytes, now, &mut party.out);
            party.engine.handle_relay(region(9), NodePublic::from_wire([3; 32]), &bytes, now, &mut party.out);
            party.engine.handle_udp("192.0.2.1:9".parse().unwrap(), &bytes, now, &mut party.out);
            if let Some(first) = bytes.first_mut() {
                *first = 0x60;
            }
            party.engine.handle_tun(&bytes, now, &mut party.out);
        }
    }
    assert!(party.out.sent.is_empty() && party.out.delivered.is_empty(), "and nothing came of it");
    let counters = *party.engine.counters();
    assert!(counters.relay_stranger > 1000 && counters.wg_not_authentic > 100, "{counters:?}");
    let packet = world.client_to_agent(b"still alive");
    world.client().tun(&packet, now);
    world.run(ms(2));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
}

#[test]
fn bytes_changed_on_the_way_are_refused() {
    let mut world = World::connected();
    let now = world.now;
    let (from, packet) = (world.client().key(), world.client_to_agent(&[9; 200]));
    world.client().tun(&packet, now);
    let (_, sealed) = world.client().out.sent.pop_front().unwrap();
    let agent = world.agent();
    for at in 0..sealed.len() {
        let mut bytes = sealed.clone();
        bytes[at] ^= 1;
        agent.engine.handle_relay(region(1), from, &bytes, now, &mut agent.out);
        agent.engine.handle_relay(region(1), from, &bytes[..at], now, &mut agent.out);
    }
    assert!(agent.out.delivered.is_empty());
    for _ in 0..3 {
        agent.engine.handle_relay(region(1), from, &sealed, now, &mut agent.out);
    }
    assert_eq!(agent.out.delivered.len(), 1, "T-32: once");
    assert!(agent.engine.counters().wg_replay >= 2);
}

#[test]
fn t33_replayed_and_hurried_initiations_are_refused() {
    let mut world = World::pair();
    world.introduce();
    let now = world.now;
    let (_, initiation) = world.client().out.sent.pop_front().unwrap();
    let from = world.client().key();
    let agent = world.agent();
    let mut answers = 0;
    for n in 0..100 {
        agent.engine.handle_relay(region(1), from, &initiation, now + ms(n), &mut agent.out);
        answers += agent.out.sent.drain(..).count();
    }
    assert_eq!(answers, 1);
    let counters = agent.engine.counters();
    assert!(counters.wg_flood >= 90 && counters.wg_replay >= 1, "{counters:?}");
}

#[test]
fn t32_late_packets_within_the_window_are_delivered_whatever_their_order() {
    let mut world = World::connected();
    let now = world.now;
    let mut packets = Vec::new();
    for n in 0..1000u32 {
        let packet = world.client_to_agent(&n.to_be_bytes());
        world.client().tun(&packet, now);
        packets.push(world.client().out.sent.pop_front().unwrap().1);
    }
    let from = world.client().key();
    let agent = world.agent();
    for packet in packets.iter().rev().chain(&packets) {
        agent.engine.handle_relay(region(1), from, packet, now, &mut agent.out);
    }
    assert_eq!(agent.out.delivered.len(), 1000);
}

#[test]
fn a_sink_without_room_drops_and_counts() {
    let mut world = World::connected();
    let now = world.now;
    let packet = world.client_to_agent(b"x");
    world.client().out.full = true;
    world.client().tun(&packet, now);
    world.client().apply(Command::Ping(AGENT), now);
    assert!(world.client().engine.counters().sink_full >= 2);
    world.run(secs(200));
    world.client().out.full = false;
    world.run(secs(30));
    let now = world.now;
    world.client().tun(&packet, now);
    world.run(ms(10));
    assert_eq!(world.agent().out.delivered.pop_back(), Some(packet));
}

/// One arbitrary thing that the slow side can say or the network can bring.
#[derive(Clone, Debug)]
enum Step {
    Add(u8),
    Remove(u8),
    Node(u8, u8),
    Ready(u8),
    Lost(u8),
    AllLost,
    Disconnected(u8),
    Map(Vec<i64>),
    Latencies(Vec<(i64, u64)>),
    Up(i64),
    Down(i64),
    Gone(i64, u8),
    Ping(u8),
    Tun(u8, Vec<u8>),
    Relay(u8, Vec<u8>),
    Wait(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let peer = 0..4u8;
    let relay = 1..4i64;
    prop_oneof![
        peer.clone().prop_map(Step::Add),
        peer.clone().prop_map(Step::Remove),
        (peer.clone(), 0..6u8).prop_map(|(p, seed)| Step::Node(p, seed)),
        peer.clone().prop_map(Step::Ready),
        peer.clone().prop_map(Step::Lost),
        Just(Step::AllLost),
        peer.clone().prop_map(Step::Disconnected),
        prop::collection::vec(relay.clone(), 0..3).prop_map(Step::Map),
        prop::collection::vec((relay.clone(), any::<u64>()), 0..3).prop_map(Step::Latencies),
        relay.clone().prop_map(Step::Up),
        relay.clone().prop_map(Step::Down),
        (relay, peer.clone()).prop_map(|(r, p)| Step::Gone(r, p)),
        peer.clone().prop_map(Step::Ping),
        (peer.clone(), prop::collection::vec(any::<u8>(), 0..1400)).prop_map(|(p, b)| Step::Tun(p, b)),
        (peer, prop::collection::vec(any::<u8>(), 0..200)).prop_map(|(p, b)| Step::Relay(p, b)),
        (0..200_000u32).prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_order_of_commands_is_survived(steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new(|now| vec![Party::client(1, now)]);
        let id = |n: u8| Uuid::from_u128(0xaaaa_0000_0000_4000_8000_0000_0000_0000 + u128::from(n));
        let nodes: Vec<_> = (0..6u8).map(|seed| {
            let mut party = Party::agent(id(seed % 4), 100 + u64::from(seed), world.now);
            party.online(world.now);
            party.node()
        }).collect();
        for step in steps {
            let now = world.now;
            let party = world.client();
            match step {
                Step::Add(n) => party.apply(Command::AddDestination(id(n)), now),
                Step::Remove(n) => party.apply(Command::RemoveDestination(id(n)), now),
                Step::Node(n, seed) => {
                    party.apply(Command::Node { id: id(n), node: nodes[usize::from(seed)].clone() }, now);
                }
                Step::Ready(n) => party.apply(Command::ReadyForHandshake(id(n)), now),
                Step::Lost(n) => party.apply(Command::Lost(id(n)), now),
                Step::AllLost => party.apply(Command::AllLost, now),
                Step::Disconnected(n) => party.apply(Command::Disconnected(id(n)), now),
                Step::Map(ids) => party.apply(Command::DerpMap(sim::map(&ids)), now),
                Step::Latencies(round) => {
                    let round = round.into_iter().map(|(r, nanos)| RelayLatency {
                        region: region(r),
                        family: Family::V4,
                        latency: std::time::Duration::from_nanos(nanos),
                    });
                    party.apply(Command::RelayLatencies(round.collect()), now);
                }
                Step::Up(r) => party.apply(Command::RelayUp(region(r)), now),
                Step::Down(r) => party.apply(Command::RelayDown(region(r)), now),
                Step::Gone(r, n) => {
                    let peer = nodes[usize::from(n)].key;
                    party.apply(Command::RelayPeerGone { region: region(r), peer }, now);
                }
                Step::Ping(n) => party.apply(Command::Ping(id(n)), now),
                Step::Tun(n, payload) => {
                    let to = codervpn_wire::node::coder_address(id(n));
                    let packet = sim::udp(party.address, to, 1, 2, &payload);
                    party.tun(&packet, now);
                }
                Step::Relay(n, bytes) => {
                    let from = nodes[usize::from(n)].key;
                    party.engine.handle_relay(region(1), from, &bytes, now, &mut party.out);
                    party.drain();
                }
                Step::Wait(millis) => world.run(ms(millis.into())),
            }
            let now = world.now;
            let party = world.client();
            prop_assert!(party.engine.peers(now).count() <= 4);
            party.out.sent.clear();
            party.out.delivered.clear();
            if let Some(at) = party.engine.poll_timeout() {
                if at <= now {
                    party.engine.handle_timeout(now, &mut party.out);
                    party.drain();
                }
                prop_assert!(party.engine.poll_timeout().is_none_or(|at| at > now), "timers move on");
            }
        }
    }
}

#[test]
fn a_client_that_names_our_own_or_many_addresses_gets_few() {
    let mut world = World::pair();
    let now = world.now;
    let mut node = world.client().node();
    let own = world.agent().node().addresses;
    node.addresses = own.clone();
    node.allowed_ips = own;
    world.agent().apply(Command::Node { id: DESKTOP, node: node.clone() }, now);
    assert_eq!(world.agent().engine.counters().node_refused, 1, "ours");
    let many: Vec<_> = (1..60u16)
        .map(|n| codervpn_wire::node::Prefix::single(std::net::Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, n, 1, 1, 1, 1)))
        .collect();
    node.addresses = many.clone();
    node.allowed_ips = many;
    world.agent().apply(Command::Node { id: DESKTOP, node }, now);
    assert_eq!(world.agent().engine.peer(DESKTOP, now).unwrap().addresses.len(), 4);
}
