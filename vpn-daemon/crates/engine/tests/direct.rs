//! Direct paths between engines, from the first ping to the last: found, preferred, doubted, left and found again.
#![allow(clippy::unwrap_used)]

mod sim;

use std::cell::{Ref, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use codervpn_engine::{Command, Direct, Event, LinkChange, Path, PeerState, RelayReason, Route};
use codervpn_wire::disco;
use sim::{AGENT, DESKTOP, LoseRelayed, LoseUdp, World, ms, region, secs};

const DESKTOP_AT: &str = "192.0.2.1:4001";
const AGENT_AT: &str = "192.0.2.2:4002";

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn direct(text: &str) -> Option<Path> {
    Some(Path::Direct(at(text)))
}

fn path(world: &mut World) -> Option<Path> {
    let now = world.now;
    world.client().path(AGENT, now)
}

/// Captures of path messages by length.
fn is_disco(bytes: &[u8]) -> bool {
    disco::looks_like_disco(bytes)
}

/// Copies of datagrams on their way.
#[derive(Default)]
struct Captured(Rc<RefCell<Vec<Vec<u8>>>>);

impl Captured {
    /// Keeps those for which `take` holds, which do not arrive if `lost`.
    fn udp(&self, lost: bool, take: impl FnMut(SocketAddr, &[u8]) -> bool + 'static) -> LoseUdp {
        let mut keep = self.keep(lost, take);
        Box::new(move |from, _, bytes| keep(from, bytes))
    }

    /// The same of those by relay.
    fn relayed(&self, lost: bool, take: impl FnMut(usize, &[u8]) -> bool + 'static) -> LoseRelayed {
        Box::new(self.keep(lost, take))
    }

    fn keep<F, T>(&self, lost: bool, mut take: T) -> impl FnMut(F, &[u8]) -> bool + use<F, T>
    where
        T: FnMut(F, &[u8]) -> bool,
    {
        let kept = Rc::clone(&self.0);
        move |from, bytes| {
            let take = take(from, bytes);
            if take {
                kept.borrow_mut().push(bytes.to_vec());
            }
            take && lost
        }
    }

    fn all(&self) -> Ref<'_, Vec<Vec<u8>>> {
        self.0.borrow()
    }
}

#[test]
fn a_direct_path_is_found_before_the_first_packet_and_carries_it_alone() {
    let mut world = World::direct();
    assert_eq!(path(&mut world), direct(AGENT_AT));
    let (now, relayed) = (world.now, world.relayed);
    assert_eq!(world.agent().path(DESKTOP, now), direct(DESKTOP_AT));
    let packet = world.client_to_agent(b"hello");
    world.client().tun(&packet, now);
    world.run(ms(3));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
    assert_eq!(world.relayed, relayed, "nothing by relay");
    let status = world.client().engine.peer(AGENT, now).unwrap();
    assert_eq!(status.relay_reason, None);
    world.run(secs(40));
    let now = world.now;
    let status = world.client().engine.peer(AGENT, now).unwrap();
    assert_eq!(status.last_ping.unwrap().path, Path::Direct(at(AGENT_AT)));
}

#[test]
fn t13_our_pings_and_pongs_have_the_size_of_full_packets() {
    let world = World::direct();
    let pings: Vec<usize> = world.udp_log.iter().map(|sent| sent.3).filter(|len| *len > 1000).collect();
    assert!(pings.len() >= 4 && pings.iter().all(|len| *len == disco::FULL_LEN), "{pings:?}");
}

#[test]
fn t13_a_path_one_byte_too_small_is_not_chosen() {
    for limit in [1310, 1311] {
        let mut world = World::pair();
        world.udp_limit = limit;
        let now = world.now;
        world.client().bind(&[DESKTOP_AT], now);
        world.agent().bind(&[AGENT_AT], now);
        world.introduce();
        world.run(secs(10));
        assert_eq!(path(&mut world), Some(Path::Relay(region(1))));
        let now = world.now;
        let status = world.client().engine.peer(AGENT, now).unwrap();
        assert_eq!(status.relay_reason, Some(RelayReason::PathTooSmall));
        assert!(world.probe(secs(2), ms(50)) <= ms(60));
    }
}

#[test]
fn t12_a_path_that_shrinks_is_left_at_once() {
    let mut world = World::direct();
    assert!(world.probe(secs(1), ms(50)) <= ms(60));
    world.udp_limit = 1300;
    let now = world.now;
    let packet = world.client_to_agent(&[7; 1232]);
    world.client().tun(&packet, now);
    world.run(ms(1));
    assert_eq!(path(&mut world), Some(Path::Relay(region(1))));
    // The packet that did not fit is lost, the next one is not.
    let now = world.now;
    world.agent().out.delivered.clear();
    world.client().tun(&packet, now);
    world.run(ms(3));
    assert_eq!(world.agent().out.delivered.len(), 1);
    assert!(world.probe(secs(3), ms(50)) <= ms(60), "the relay goes on");
}

#[test]
fn t13_a_path_that_swallows_large_datagrams_is_left_though_small_ones_pass() {
    let mut world = World::direct();
    world.lose_udp = Box::new(|_, _, bytes| bytes.len() > 1300);
    let start = world.now;
    let large = world.client_to_agent(&[7; 1232]);
    while path(&mut world) != Some(Path::Relay(region(1))) {
        assert!(world.now - start < secs(4), "still direct");
        let now = world.now;
        world.client().tun(&large, now);
        world.probe(ms(50), ms(50));
    }
    let now = world.now;
    world.agent().out.delivered.clear();
    world.client().tun(&large, now);
    world.run(ms(5));
    assert_eq!(world.agent().out.delivered.len(), 1);
}

#[test]
fn udp_that_is_cut_silently_costs_about_a_second_and_comes_back_by_itself() {
    let mut world = World::direct();
    assert!(world.probe(secs(5), ms(50)) <= ms(60));
    world.lose_udp = Box::new(|_, _, _| true);
    let gap = world.probe(secs(20), ms(50));
    assert!(gap <= ms(1500), "{gap:?}");
    assert_eq!(path(&mut world), Some(Path::Relay(region(1))));
    world.lose_udp = Box::new(|_, _, _| false);
    let gap = world.probe(secs(15), ms(50));
    assert!(gap <= ms(60), "nothing is lost when the better path is back: {gap:?}");
    assert_eq!(path(&mut world), direct(AGENT_AT));
}

/// The first ping is lost at the peer's firewall, the peer's comes through: the second goes out at once.
#[test]
fn firewalls_on_both_sides_cost_one_more_ping_and_no_waiting() {
    let mut world = World::pair();
    let now = world.now;
    world.client().bind(&[DESKTOP_AT], now);
    world.agent().bind(&[AGENT_AT], now);
    let mut opened = std::collections::HashSet::new();
    world.lose_udp = Box::new(move |from, to, _| {
        opened.insert((from, to));
        !opened.contains(&(to, from))
    });
    world.introduce();
    // The agent is called as soon as a net report has ended, and pings then.
    let answered = |world: &World| world.udp_log.iter().any(|(_, from, ..)| *from == at(AGENT_AT));
    while !answered(&world) {
        assert!(world.now < world.start + secs(5), "the agent was never called");
        world.run(ms(1));
    }
    world.run(ms(8));
    assert_eq!(path(&mut world), direct(AGENT_AT));
    let now = world.now;
    assert_eq!(world.agent().path(DESKTOP, now), direct(DESKTOP_AT));
}

#[test]
fn a_peer_that_was_sent_to_the_relay_is_called_back_when_the_path_is_proven_again() {
    let mut world = World::direct();
    world.probe(secs(2), ms(50));
    world.lose_udp = Box::new(|_, _, _| true);
    world.probe(secs(10), ms(50));
    world.lose_udp = Box::new(|_, _, _| false);
    // The agent notices first here; the client lets go of the path because it is told to.
    let (mut before, mut now) = (0, world.now);
    while world.agent().path(DESKTOP, now) != direct(DESKTOP_AT) {
        before = world.agent().engine.counters().disco_calls_sent;
        world.run(ms(1));
        now = world.now;
    }
    assert_eq!(world.agent().engine.counters().disco_calls_sent, before + 1);
}

#[test]
fn a_cut_of_one_direction_is_noticed_too() {
    for (from, to) in [(DESKTOP_AT, AGENT_AT), (AGENT_AT, DESKTOP_AT)] {
        let mut world = World::direct();
        world.probe(secs(2), ms(50));
        world.lose_udp = Box::new(move |a, b, _| a == at(from) && b == at(to));
        let gap = world.probe(secs(20), ms(50));
        assert!(gap <= ms(1500), "{from} to {to}: {gap:?}");
    }
}

#[test]
fn random_loss_does_not_make_the_path_flap() {
    let mut world = World::direct();
    let mut state = 7_u64;
    world.lose_udp = Box::new(move |_, _, _| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % 100 < 10
    });
    world.probe(secs(120), ms(50));
    let counters = *world.client().engine.counters();
    assert!(counters.paths_lost <= 2, "{} times in two minutes with 10 % loss", counters.paths_lost);
}

#[test]
fn a_peer_that_only_receives_keeps_its_direct_path() {
    let mut world = World::direct();
    let relayed = world.relayed;
    for _ in 0..600 {
        let now = world.now;
        let packet = world.client_to_agent(&[1; 1000]);
        world.client().tun(&packet, now);
        world.run(ms(20));
    }
    assert_eq!(path(&mut world), direct(AGENT_AT));
    assert_eq!(world.client().engine.counters().paths_lost, 0);
    assert_eq!(world.relayed, relayed);
}

#[test]
fn t10_a_dead_fast_path_does_not_block_a_slower_one() {
    let mut world = World::pair();
    let now = world.now;
    world.client().bind(&["192.0.2.1:4001"], now);
    world.agent().bind(&["192.0.2.2:4002", "[2001:db8::2]:4002"], now);
    world.parties[0].bind(&["192.0.2.1:4001", "[2001:db8::1]:4001"], now);
    world.udp_latency = Box::new(|_, to| if to.is_ipv4() { ms(2) } else { ms(15) });
    world.introduce();
    world.run(secs(1));
    assert_eq!(path(&mut world), direct(AGENT_AT));
    world.probe(secs(5), ms(50));
    world.lose_udp = Box::new(|_, to, _| to.is_ipv4());
    world.probe(secs(7), ms(50));
    assert_eq!(path(&mut world), direct("[2001:db8::2]:4002"));
}

#[test]
fn t11_a_path_that_answers_pings_and_drops_data_is_shunned() {
    let mut world = World::direct();
    world.probe(secs(1), ms(50));
    world.lose_udp = Box::new(|_, _, bytes| !is_disco(bytes));
    world.probe(secs(20), ms(50));
    assert_eq!(path(&mut world), Some(Path::Relay(region(1))));
    let gap = world.probe(secs(20), ms(50));
    assert!(gap <= ms(60), "{gap:?}");
}

#[test]
fn t04_a_call_me_maybe_by_udp_is_ignored() {
    let mut world = World::direct();
    // The agent's next call-me-maybe, taken from the relay and delivered by UDP instead.
    let before = world.client().engine.counters().disco_calls_ignored;
    let relayed = Captured::default();
    world.lose = relayed.relayed(false, |from, bytes| from == 1 && is_disco(bytes) && bytes.len() < 300);
    world.lose_udp = Box::new(|_, _, _| true);
    world.probe(secs(8), ms(50));
    let call = relayed.all().first().cloned().expect("the agent calls when its path is gone");
    let now = world.now;
    world.client().udp(AGENT_AT, &call, now);
    assert_eq!(world.client().engine.counters().disco_calls_ignored, before + 1);
}

#[test]
fn t01_strangers_by_udp_cost_nothing_and_get_nothing() {
    let mut world = World::direct();
    let captured = Captured::default();
    world.lose_udp = captured.udp(false, |_, _| true);
    world.probe(secs(4), ms(50));
    world.lose_udp = Box::new(|_, _, _| false);
    let (now, sent) = (world.now, world.udp_log.len());
    let data = captured.all().iter().find(|bytes| bytes[0] == 4).cloned().unwrap();
    let mut stranger_disco = captured.all().iter().find(|bytes| is_disco(bytes)).cloned().unwrap();
    if let Some(byte) = stranger_disco.get_mut(10) {
        *byte ^= 1;
    }
    let before = *world.client().engine.counters();
    for datagram in [&data, &stranger_disco, &vec![1; 148], &vec![0xaa; 40], &Vec::new()] {
        world.client().udp("198.51.100.9:9", datagram, now);
    }
    world.run(ms(1));
    assert_eq!(world.udp_log.len(), sent);
    let after = *world.client().engine.counters();
    assert_eq!((after.udp_stranger - before.udp_stranger, after.udp_ignored - before.udp_ignored), (4, 1));
    assert_eq!((after.wg_not_authentic, after.wg_replay), (before.wg_not_authentic, before.wg_replay));
}

#[test]
fn t07_a_replayed_ping_from_elsewhere_makes_nobody_a_target_of_data() {
    let mut world = World::direct();
    let captured = Captured::default();
    let mut taken = false;
    // Never arrives, so it is new when it is replayed.
    world.lose_udp = captured
        .udp(true, move |from, bytes| from == at(AGENT_AT) && is_disco(bytes) && !std::mem::replace(&mut taken, true));
    world.probe(secs(4), ms(50));
    let ping = captured.all().first().cloned().expect("a heartbeat or pong of the agent");
    world.lose_udp = Box::new(|_, _, _| false);
    let now = world.now;
    let sent = world.udp_log.len();
    world.client().udp("198.51.100.9:9", &ping, now);
    world.probe(secs(10), ms(50));
    let there: Vec<usize> =
        world.udp_log[sent..].iter().filter(|sent| sent.2 == at("198.51.100.9:9")).map(|sent| sent.3).collect();
    assert!(there.iter().all(|len| *len == disco::FULL_LEN), "only pings and a pong: {there:?}");
    assert!(there.len() <= 5);
    assert_eq!(path(&mut world), direct(AGENT_AT));
}

#[test]
fn t32_what_comes_by_both_ways_is_delivered_once() {
    let mut world = World::direct();
    let now = world.now;
    // Nothing is trusted, so everything takes both ways.
    world.client().apply(Command::Link(LinkChange::Down), now);
    world.client().apply(Command::Link(LinkChange::Minor), now);
    let (agent_at, before) = (at(AGENT_AT), *world.client().engine.counters());
    world.lose_udp = Box::new(move |_, to, bytes| is_disco(bytes) && to == agent_at);
    for _ in 0..100 {
        let now = world.now;
        let packet = world.client_to_agent(b"once");
        world.client().tun(&packet, now);
    }
    world.run(ms(20));
    assert_eq!(world.client().engine.counters().sent_both - before.sent_both, 100);
    assert_eq!(world.agent().out.delivered.len(), 100);
}

#[test]
fn t39_after_a_change_of_networks_the_relay_carries_until_a_pong_comes_in() {
    let mut world = World::direct();
    world.probe(secs(1), ms(50));
    let now = world.now;
    world.client().events.clear();
    world.client().apply(Command::Link(LinkChange::Major), now);
    assert!(world.client().events.contains(&Event::RebindSockets));
    world.client().bind(&["192.0.2.77:5555"], now);
    let gap = world.probe(secs(3), ms(50));
    assert!(gap <= ms(100), "{gap:?}");
    assert_eq!(path(&mut world), direct(AGENT_AT));
    let now = world.now;
    assert_eq!(world.agent().path(DESKTOP, now), direct("192.0.2.77:5555"));
}

#[test]
fn t40_direct_paths_can_be_forbidden_at_any_time() {
    let mut world = World::direct();
    world.probe(secs(1), ms(50));
    let now = world.now;
    world.client().apply(Command::Direct(Direct::DisabledByUser), now);
    assert!(world.client().node().endpoints.is_empty());
    let sent = world.udp_log.len();
    world.run(ms(100));
    let from_us =
        |world: &World, since: usize| world.udp_log[since..].iter().filter(|sent| sent.1 == at(DESKTOP_AT)).count();
    assert_eq!(from_us(&world, sent), 0);
    let gap = world.probe(secs(10), ms(50));
    assert!(gap <= ms(1500), "the agent still trusts its path for a moment: {gap:?}");
    assert_eq!(from_us(&world, sent), 0);
    let now = world.now;
    let status = world.client().engine.peer(AGENT, now).unwrap();
    assert_eq!(status.relay_reason, Some(RelayReason::DisabledByUser));
    world.client().apply(Command::Direct(Direct::Allowed), now);
    world.probe(secs(7), ms(50));
    assert_eq!(path(&mut world), direct(AGENT_AT));
}

#[test]
fn two_that_cannot_reach_each_other_directly_give_up_calling() {
    let mut world = World::pair();
    world.lose_udp = Box::new(|_, _, _| true);
    let now = world.now;
    world.client().bind(&[DESKTOP_AT], now);
    world.agent().bind(&[AGENT_AT], now);
    world.introduce();
    world.probe(secs(10), ms(500));
    world.run(secs(60));
    let sent = |world: &World| world.parties.iter().map(|p| p.engine.counters().disco_calls_sent).sum::<u64>();
    let before = sent(&world);
    world.run(secs(120));
    assert!(sent(&world) <= before + 8, "{} calls in two idle minutes", sent(&world) - before);
}

#[test]
fn t40_no_packet_is_lost_when_direct_paths_are_forbidden() {
    let mut world = World::direct();
    assert!(world.probe(secs(1), ms(50)) <= ms(60));
    let now = world.now;
    world.client().apply(Command::Direct(Direct::DisabledByUser), now);
    let gap = world.probe(secs(2), ms(50));
    assert!(gap <= ms(110), "the agent goes on by relay at once: {gap:?}");
}

#[test]
fn t03_a_path_message_by_relay_must_be_of_its_sender() {
    let mut world = World::direct();
    let captured = Captured::default();
    world.lose = captured.relayed(true, |from, bytes| from == 1 && is_disco(bytes));
    world.lose_udp = Box::new(|_, _, _| true);
    world.probe(secs(8), ms(50));
    let message = captured.all().first().cloned().unwrap();
    let now = world.now;
    let before = *world.client().engine.counters();
    let stranger = codervpn_wire::keys::NodePublic::from_wire([9; 32]);
    let client = world.client();
    client.engine.handle_relay(region(1), stranger, &message, now, &mut client.out);
    let after = *world.client().engine.counters();
    assert_eq!(after.relay_stranger, before.relay_stranger + 1);
    assert_eq!(after.disco_call_me_maybe, before.disco_call_me_maybe);
}

#[test]
fn t05_a_call_with_thousands_of_addresses_gets_few_pings() {
    let mut world = World::direct();
    let endpoints: Vec<SocketAddr> = (0..60).map(|i| SocketAddr::from(([198, 51, 100, 1], 1000 + i))).collect();
    let mut node = world.agent().node();
    node.endpoints = endpoints;
    let now = world.now;
    let sent = world.udp_log.len();
    world.client().apply(Command::Node { id: AGENT, node: node.clone() }, now);
    world.lose_udp = Box::new(|_, _, _| true);
    world.probe(secs(10), ms(50));
    for second in 0..10 {
        let from = now + secs(second);
        let pings = world.udp_log[sent..]
            .iter()
            .filter(|s| s.1 == at(DESKTOP_AT) && s.3 == disco::FULL_LEN && s.0 >= from && s.0 < from + secs(1));
        assert!(pings.count() <= 140, "64 a second and what was saved up");
    }
}

#[test]
fn t08_however_many_pings_are_replayed_none_is_answered_twice() {
    let mut world = World::direct();
    let captured = Captured::default();
    // None of the agent's path messages arrives, so it goes on pinging.
    world.lose_udp = captured.udp(true, |from, bytes| from == at(AGENT_AT) && is_disco(bytes));
    while captured.all().len() < 80 {
        world.probe(secs(1), ms(50));
    }
    world.lose_udp = Box::new(|_, _, _| false);
    world.run(secs(60));
    let elsewhere = at("198.51.100.9:9");
    let mut opened = Vec::new();
    for _ in 0..2 {
        let before = *world.client().engine.counters();
        for messages in captured.all().chunks(8) {
            let now = world.now;
            for message in messages {
                world.client().udp("198.51.100.9:9", message, now);
            }
            world.run(ms(500));
        }
        let after = *world.client().engine.counters();
        opened.push((after.disco_pings - before.disco_pings, after.disco_pings_limited - before.disco_pings_limited));
    }
    let [(pings, 0), (again, limited)] = opened[..] else { panic!("{opened:?}") };
    assert!(pings > 40, "more than fit into a short memory: {pings}");
    // The pings of ours to that address answer none of these.
    assert_eq!((again, limited), (pings, pings), "{opened:?}");
    assert!(world.udp_log.iter().any(|sent| sent.2 == elsewhere));
}

#[test]
fn t09_only_the_pong_of_an_open_ping_counts() {
    let mut world = World::direct();
    let captured = Captured::default();
    world.lose_udp = captured.udp(false, |from, bytes| from == at(AGENT_AT) && is_disco(bytes));
    world.probe(secs(10), ms(50));
    let now = world.now;
    let before = *world.client().engine.counters();
    let messages = captured.all().clone();
    for message in &messages {
        world.client().udp(AGENT_AT, message, now);
    }
    let after = *world.client().engine.counters();
    assert_eq!(after.disco_pongs, before.disco_pongs, "repeated ones answer nothing");
    assert!(after.disco_stray_pongs > before.disco_stray_pongs);
}

#[test]
fn a_restarted_agent_is_reached_directly_again() {
    let mut world = World::direct();
    world.probe(secs(2), ms(50));
    let now = world.now;
    let mut fresh = sim::Party::agent(AGENT, 99, now);
    fresh.online(now);
    fresh.bind(&[AGENT_AT], now);
    world.parties[1] = fresh;
    world.client().apply(Command::Lost(AGENT), now);
    world.introduce();
    let gap = world.probe(secs(3), ms(50));
    assert!(gap <= ms(120), "{gap:?}");
    assert_eq!(path(&mut world), direct(AGENT_AT));
    assert_eq!(world.parties[0].state(AGENT, world.now), PeerState::Up);
}

#[test]
fn t42_an_idle_peer_is_asked_once_in_half_a_minute_and_stays_known_as_direct() {
    let mut world = World::direct();
    world.run(secs(60));
    let (sent, relayed) = (world.udp_log.len(), world.relayed);
    world.run(secs(300));
    let bytes: usize = world.udp_log[sent..].iter().map(|sent| sent.3).sum();
    assert!(bytes / 300 < 700, "{} bytes a second", bytes / 300);
    let large = world.udp_log[sent..].iter().filter(|sent| sent.3 > 1000).count();
    assert!(large <= 4 * 12, "a ping each way and its pong every 30 s at most, not {large} in 300 s");
    assert!(world.relayed - relayed < 100, "{}", world.relayed - relayed);
    assert_eq!(path(&mut world), direct(AGENT_AT));
}

#[test]
fn the_path_shown_of_an_idle_peer_stays_the_same_though_others_answer_first() {
    let mut world = World::pair();
    let now = world.now;
    world.client().bind(&["10.0.0.1:4001", "[2001:db8::1]:4001"], now);
    world.agent().bind(&["10.0.0.2:4002", "[2001:db8::2]:4002"], now);
    world.udp_latency = Box::new(|_, to| ms(if to.is_ipv4() { 40 } else { 38 }));
    world.introduce();
    world.run(secs(60));
    assert_eq!(path(&mut world), direct("10.0.0.2:4002"));
    for _ in 0..50_000 {
        world.run(ms(2));
        assert_eq!(path(&mut world), direct("10.0.0.2:4002"));
    }
}

#[test]
fn a_user_ping_goes_the_way_of_packets() {
    let mut world = World::direct();
    let now = world.now;
    world.client().events.clear();
    world.client().apply(Command::Ping(AGENT), now);
    world.run(ms(10));
    let done: Vec<_> = world.client().events.iter().filter(|e| matches!(e, Event::PingDone { .. })).copied().collect();
    let [Event::PingDone { result: Ok(ping), .. }] = done[..] else { panic!("{done:?}") };
    assert_eq!((ping.path, ping.latency), (Path::Direct(at(AGENT_AT)), ms(4)));
}

#[test]
fn nothing_is_sent_by_udp_before_there_is_a_socket() {
    let mut world = World::pair();
    let now = world.now;
    world.agent().bind(&[AGENT_AT], now);
    world.introduce();
    world.run(secs(5));
    assert!(world.client().out.sent.iter().all(|(route, _)| matches!(route, Route::Relay { .. })));
    assert_eq!(path(&mut world), Some(Path::Relay(region(1))));
}

#[test]
fn t06_a_ping_from_an_address_that_cannot_be_a_path_is_not_answered() {
    let mut world = World::direct();
    let captured = Captured::default();
    // Pings and pongs: the pongs of them do no harm here.
    world.lose_udp = captured.udp(true, |from, bytes| from == at(AGENT_AT) && is_disco(bytes));
    world.probe(secs(4), ms(50));
    world.lose_udp = Box::new(|_, _, _| false);
    let now = world.now;
    let sent = world.udp_log.len();
    for source in ["127.0.0.1:9", "[::1]:9", "[fe80::1]:9", "[fd60:627a:a42b::9]:9", "224.0.0.1:9"] {
        for message in captured.all().iter() {
            world.client().udp(source, message, now);
        }
        world.run(ms(10));
        let there = world.udp_log[sent..].iter().filter(|sent| sent.2 == at(source)).count();
        assert_eq!(there, 0, "{source}: who gets a pong sends its data there");
    }
    for message in captured.all().iter() {
        world.client().udp("198.51.100.9:9", message, now);
    }
    world.run(ms(10));
    assert!(world.udp_log[sent..].iter().any(|sent| sent.2 == at("198.51.100.9:9")), "there was a ping among them");
}
