//! First contact, restarts and losses: when handshakes start, and what becomes of packets meanwhile.

mod sim;

use codervpn_engine::{Command, Event, PeerState};
use codervpn_wire::node::{coder_address, tailscale_address};
use sim::{AGENT, CLIENT_SIDE, DESKTOP, Party, World, map, ms, region, secs, udp};
use uuid::Uuid;

const INITIATION: u8 = 1;

#[test]
fn t46_ready_starts_the_handshake_and_data_flows_both_ways() {
    let mut world = World::pair();
    world.run(secs(1));
    assert!(world.client().sent_kinds().is_empty(), "nothing before READY");
    world.introduce();
    assert_eq!(world.parties[0].out.sent.len(), 1, "the initiation leaves with READY, by the same call");
    world.run(ms(3));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Up, "one round trip");
    assert_eq!(world.agent().state(DESKTOP, now), PeerState::Up);

    let ping = world.client_to_agent(b"ping");
    world.client().tun(&ping, now);
    world.run(ms(1));
    assert_eq!(world.agent().out.delivered.pop_front().as_deref(), Some(&ping[..]));
    let pong = world.agent_to_client(b"pong");
    let now = world.now;
    world.agent().tun(&pong, now);
    world.run(ms(1));
    assert_eq!(world.client().out.delivered.pop_front().as_deref(), Some(&pong[..]));

    let status = world.client().engine.peer(AGENT, now).unwrap();
    assert_eq!((status.rx_bytes, status.tx_bytes), (pong.len() as u64, ping.len() as u64));
    assert!(status.last_handshake.is_some());
}

#[test]
fn without_ready_the_handshake_starts_after_five_seconds() {
    let mut world = World::pair();
    let (client, agent) = (world.client().node(), world.agent().node());
    let now = world.now;
    world.agent().apply(Command::Node { id: DESKTOP, node: client }, now);
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    world.run(ms(4999));
    assert_eq!(world.client().state(AGENT, now), PeerState::WaitingForReady);
    world.run(ms(10));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Up);
}

#[test]
fn cc30_ready_before_node_counts() {
    let mut world = World::pair();
    let (client, agent) = (world.client().node(), world.agent().node());
    let now = world.now;
    world.agent().apply(Command::Node { id: DESKTOP, node: client }, now);
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    world.run(ms(100));
    let now = world.now;
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    world.run(ms(5));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Up);
}

#[test]
fn t52_first_packets_are_held_and_delivered_once_in_order() {
    let mut world = World::pair();
    let now = world.now;
    let packets: Vec<_> = (0..5u8).map(|n| world.client_to_agent(&[n; 100])).collect();
    for packet in &packets {
        world.client().tun(packet, now);
    }
    assert!(world.client().out.delivered.is_empty(), "no ICMPv6 for a held packet");
    world.run(ms(50));
    world.introduce();
    world.run(ms(5));
    let delivered: Vec<_> = world.agent().out.delivered.drain(..).collect();
    assert_eq!(delivered, packets);
    assert_eq!(world.client().engine.counters().tun_held, 5);
}

#[test]
fn t52_held_packets_expire_and_bounds_hold() {
    let mut world = World::pair();
    let now = world.now;
    let packet = world.client_to_agent(&[0; 1000]);
    for _ in 0..10_000 {
        world.client().tun(&packet, now);
    }
    assert_eq!(world.client().engine.counters().tun_held, 32);
    assert_eq!(world.client().engine.counters().held_overflow, 10_000 - 32);
    world.run(ms(3000));
    assert_eq!(world.client().engine.counters().held_expired, 32);
    world.introduce();
    world.run(ms(10));
    assert!(world.agent().out.delivered.is_empty(), "nothing older than 3 s is sent");
}

#[test]
fn crossing_initiations_do_not_cost_five_seconds() {
    let mut world = World::pair();
    // Both sides wait for each other as destinations and start in the same moment.
    let (client, agent) = (world.client().node(), world.agent().node());
    let now = world.now;
    world.parties[1] = Party::agent(AGENT, 2, now);
    world.parties[1].online(now);
    assert_eq!(world.agent().node().key, agent.key);
    world.agent().apply(Command::Node { id: DESKTOP, node: client }, now);
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    let outgoing = world.agent_to_client(b"from the agent");
    world.agent().tun(&outgoing, now);
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    sim::open_inbound(world.client(), now);
    assert_eq!(world.parties.iter().map(|p| p.out.sent.len()).collect::<Vec<_>>(), [1, 1]);
    world.run(ms(10));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Up);
    assert_eq!(world.agent().state(DESKTOP, now), PeerState::Up);
    assert_eq!(world.client().out.delivered.pop_front(), Some(outgoing));
    for n in 0..20u8 {
        let there = world.client_to_agent(&[n]);
        let back = world.agent_to_client(&[n]);
        let now = world.now;
        world.client().tun(&there, now);
        world.agent().tun(&back, now);
        world.run(ms(2));
        assert_eq!(world.agent().out.delivered.pop_front(), Some(there));
        assert_eq!(world.client().out.delivered.pop_front(), Some(back));
    }
}

#[test]
fn t46_a_lost_initiation_is_repeated_soon_then_after_five_seconds_and_at_once_on_ready() {
    let mut world = World::pair();
    world.lose = Box::new(|_, bytes| bytes[0] == INITIATION);
    world.introduce();
    for (wait, sent) in [(190, 1), (400, 2), (800, 3), (20, 4), (4970, 4)] {
        world.run(ms(wait));
        assert_eq!(world.client().engine.counters().initiations_sent, sent, "after 0.2, 0.6 and 1.4 s");
    }
    world.run(ms(400));
    assert_eq!(world.client().engine.counters().initiations_sent, 5, "5 s and up to a third");

    let now = world.now;
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    let at_once = world.client().engine.counters().initiations_sent;
    world.lose = Box::new(|_, _| false);
    world.run(ms(101));
    let now = world.now;
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    assert!(at_once <= 6);
    world.run(ms(5));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Up, "READY without a session starts afresh");
    let initiations = world.client().engine.counters().initiations_sent;
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    assert_eq!(world.client().engine.counters().initiations_sent, initiations, "with a session it starts nothing");
}

#[test]
fn t51_a_restarted_agent_is_reachable_within_milliseconds_of_its_ready() {
    let mut world = World::connected();
    world.run(secs(20));
    let now = world.now;
    world.client().apply(Command::Lost(AGENT), now);
    world.run(ms(400));

    // The new process: another key, the same id.
    let now = world.now;
    world.parties[1] = Party::agent(AGENT, 77, now);
    world.parties[1].online(now);
    let (client, agent) = (world.client().node(), world.agent().node());
    world.client().sent_kinds();
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    let waiting = world.client_to_agent(b"SYN of an impatient user");
    world.client().tun(&waiting, now);
    assert!(world.client().sent_kinds().is_empty(), "no initiation to the new key before its READY");
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().last_handshake, None, "that was another process");
    world.run(ms(2));
    let now = world.now;
    world.agent().apply(Command::Node { id: DESKTOP, node: client }, now);
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    assert_eq!(world.parties[0].out.sent.len(), 1, "one at once on READY");
    world.run(ms(5));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(waiting));
}

#[test]
fn t53_a_flapping_agent_changes_at_most_once_a_second() {
    let mut world = World::connected();
    let now = world.now;
    let nodes: Vec<_> = [50, 51]
        .map(|seed| {
            let mut party = Party::agent(AGENT, seed, now);
            party.online(now);
            party.node()
        })
        .into();
    let mut changes = 0;
    let mut last = world.client().engine.peer(AGENT, now).unwrap().key;
    for n in 0..100 {
        let now = world.now;
        world.client().apply(Command::Node { id: AGENT, node: nodes[n % 2].clone() }, now);
        world.run(ms(100));
        let key = world.client().engine.peer(AGENT, now).unwrap().key;
        changes += usize::from(key != last);
        last = key;
    }
    assert!((5..=11).contains(&changes), "{changes} changes in 10 s");
    world.run(secs(2));
    let now = world.now;
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().key, Some(nodes[1].key), "the newest wins");
}

#[test]
fn sessions_are_renewed_without_a_gap() {
    let mut world = World::connected();
    let mut handshakes = std::collections::BTreeSet::new();
    for n in 0..900u32 {
        let there = world.client_to_agent(&n.to_be_bytes());
        let now = world.now;
        world.client().tun(&there, now);
        world.run(secs(1));
        assert_eq!(world.agent().out.delivered.pop_front(), Some(there), "second {n}");
        handshakes.insert(world.client().engine.peer(AGENT, now).unwrap().last_handshake);
    }
    assert!((6..=9).contains(&handshakes.len()), "{} in 15 minutes", handshakes.len());
}

#[test]
fn an_idle_session_is_kept_alive_and_its_handshake_stays_young() {
    let mut world = World::connected();
    for _ in 0..60 {
        world.run(secs(10));
        let now = world.now;
        let status = world.client().engine.peer(AGENT, now).unwrap();
        assert_eq!(status.state, PeerState::Up);
        assert!(now - status.last_handshake.unwrap() < secs(200));
    }
}

#[test]
fn a_relay_that_breaks_delays_packets_and_loses_none() {
    let mut world = World::connected();
    let now = world.now;
    world.client().apply(Command::RelayDown(region(1)), now);
    assert!(world.client().events.contains(&Event::RelayWanted(region(1))));
    let packet = world.client_to_agent(b"while the relay is away");
    world.client().tun(&packet, now);
    world.run(secs(2));
    assert!(world.agent().out.delivered.is_empty());
    let now = world.now;
    world.client().apply(Command::RelayUp(region(1)), now);
    world.run(ms(2));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
}

#[test]
fn relay_first_the_initiation_waits_for_our_home_and_at_most_a_second() {
    let mut world = World::new(|now| vec![Party::client(1, now), Party::agent(AGENT, 2, now)]);
    let now = world.now;
    world.agent().online(now);
    let agent = world.agent().node();
    world.client().apply(Command::AddDestination(AGENT), now);
    world.client().apply(Command::DerpMap(map(&[1])), now);
    assert!(world.client().events.contains(&Event::HomeRelayChanged(region(1))), "one region needs no measurement");
    assert!(world.client().events.contains(&Event::RelayWanted(region(1))));
    assert!(!world.client().events.contains(&Event::SelfNodeChanged));
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    world.run(ms(500));
    assert_eq!(world.client().engine.counters().initiations_sent, 0);
    let now = world.now;
    world.client().apply(Command::RelayUp(region(1)), now);
    assert_eq!(world.client().engine.counters().initiations_sent, 1);
    assert!(world.client().events.contains(&Event::SelfNodeChanged));

    let mut alone = World::new(|now| vec![Party::client(1, now)]);
    let now = alone.now;
    alone.client().apply(Command::DerpMap(map(&[1])), now);
    alone.run(ms(999));
    assert!(!alone.client().events.contains(&Event::SelfNodeChanged));
    alone.run(ms(1));
    assert!(alone.client().events.contains(&Event::SelfNodeChanged), "published after a second without a relay");
}

#[test]
fn lost_peers_stay_and_are_forgotten_a_quarter_of_an_hour_after_their_last_handshake() {
    let mut world = World::connected();
    let now = world.now;
    world.client().apply(Command::AllLost, now);
    let packet = world.client_to_agent(b"still there");
    world.client().tun(&packet, now);
    world.run(ms(5));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet), "LOST ends nothing");
    assert!(world.client().engine.peer(AGENT, now).unwrap().lost);
    world.run(secs(20 * 60));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Up, "its handshakes go on: only the coordinator lost it");

    world.lose = Box::new(|_, _| true);
    world.run(secs(20 * 60));
    let now = world.now;
    assert!(world.client().engine.peer(AGENT, now).unwrap().key.is_none(), "forgotten, but still a destination");
}

#[test]
fn cc31_a_lost_peer_that_never_shook_hands_is_forgotten_at_once() {
    let mut world = World::pair();
    let agent = world.agent().node();
    let now = world.now;
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    world.client().apply(Command::AllLost, now);
    world.run(ms(1));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::WaitingForNode);
}

#[test]
fn disconnected_ends_the_session_and_a_new_node_starts_again() {
    let mut world = World::connected();
    let now = world.now;
    world.client().apply(Command::Disconnected(AGENT), now);
    assert_eq!(world.client().state(AGENT, now), PeerState::WaitingForNode);
    let packet = world.client_to_agent(b"while it restarts");
    world.client().tun(&packet, now);
    world.parties[1] = Party::agent(AGENT, 99, now);
    world.parties[1].online(now);
    world.introduce();
    world.run(ms(5));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
}

#[test]
fn cc25_an_equal_node_again_changes_nothing() {
    let mut world = World::connected();
    let now = world.now;
    let relayed = world.relayed;
    let agent = world.agent().node();
    world.client().events.clear();
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    world.run(ms(10));
    assert_eq!(world.relayed, relayed);
    assert!(world.client().events.is_empty());
}

#[test]
fn cc24_nodes_of_parties_that_are_no_destinations_are_ignored() {
    let mut world = World::pair();
    let agent = world.agent().node();
    let now = world.now;
    world.client().apply(Command::Node { id: Uuid::from_u128(5), node: agent }, now);
    assert_eq!(world.client().engine.counters().node_stray, 1);
    assert_eq!(world.client().engine.peer_count(), 1);
}

#[test]
fn t28_a_node_with_foreign_keys_or_addresses_is_refused() {
    let mut world = World::connected();
    let now = world.now;
    let other = Uuid::from_u128(0xaaaa_bbbb_cccc_dddd_eeee_ffff_0000_1111);
    world.client().apply(Command::AddDestination(other), now);
    let agents = world.agent().node();
    let mut refused = 0;
    let mut refuse = |world: &mut World, node| {
        world.client().apply(Command::Node { id: other, node }, now);
        refused += 1;
        assert_eq!(world.client().engine.counters().node_refused, refused);
        assert_eq!(world.client().state(other, now), PeerState::WaitingForNode);
    };
    refuse(&mut world, agents.clone());
    let mut party = Party::agent(other, 5, now);
    party.online(now);
    let mut node = party.node();
    node.addresses = agents.addresses.clone();
    node.allowed_ips = agents.addresses.clone();
    refuse(&mut world, node);
    let mut node = party.node();
    node.key = world.client().key();
    refuse(&mut world, node);
    let mut node = party.node();
    node.key = codervpn_wire::keys::NodePublic::from_wire([0; 32]);
    refuse(&mut world, node);
    world.client().apply(Command::Node { id: other, node: party.node() }, now);
    assert_eq!(world.client().state(other, now), PeerState::WaitingForReady);
}

#[test]
fn t20_peer_gone_removes_only_a_reverse_route() {
    let mut world = World::connected();
    let now = world.now;
    let peer = world.agent().key();
    world.client().apply(Command::RelayPeerGone { region: region(1), peer }, now);
    let packet = world.client_to_agent(b"anyway");
    world.client().tun(&packet, now);
    world.run(ms(2));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
}

#[test]
fn another_region_is_asked_for_when_an_agent_lives_there() {
    let mut world = World::new(|now| vec![Party::client(1, now), Party::agent(AGENT, 2, now)]);
    let now = world.now;
    for side in 0..2 {
        world.parties[side].apply(Command::DerpMap(map(&[1, 2])), now);
        let latency = codervpn_engine::RelayLatency {
            region: region(1 + side as i64),
            family: codervpn_wire::node::Family::V4,
            latency: ms(5),
        };
        world.parties[side].apply(Command::RelayLatencies(vec![latency]), now);
        world.parties[side].apply(Command::RelayUp(region(1 + side as i64)), now);
    }
    world.client().apply(Command::AddDestination(AGENT), now);
    let agent = world.agent().node();
    assert_eq!(agent.home, Some(region(2)));
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    world.client().events.clear();
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    assert!(world.client().events.contains(&Event::RelayWanted(region(2))));
    assert_eq!(world.client().engine.counters().initiations_sent, 0);
    world.client().apply(Command::RelayUp(region(2)), now);
    assert_eq!(world.client().engine.counters().initiations_sent, 1);
}

#[test]
fn an_agent_heard_on_our_own_relay_is_answered_there() {
    let mut world = World::new(|now| vec![Party::client(1, now), Party::agent(AGENT, 2, now)]);
    let now = world.now;
    for party in &mut world.parties {
        party.apply(Command::DerpMap(map(&[1, 2])), now);
        let latency = codervpn_engine::RelayLatency {
            region: region(1),
            family: codervpn_wire::node::Family::V4,
            latency: ms(5),
        };
        party.apply(Command::RelayLatencies(vec![latency]), now);
        party.apply(Command::RelayUp(region(1)), now);
    }
    world.client().apply(Command::AddDestination(AGENT), now);
    let (client, mut agent) = (world.client().node(), world.agent().node());
    agent.home = Some(region(2));
    world.agent().apply(Command::Node { id: DESKTOP, node: client }, now);
    world.client().apply(Command::Node { id: AGENT, node: agent }, now);
    world.client().apply(Command::ReadyForHandshake(AGENT), now);
    let (there, back) = (world.client_to_agent(b"there"), world.agent_to_client(b"back"));
    world.client().tun(&there, now);
    world.run(ms(10));
    assert!(world.agent().out.delivered.is_empty(), "its home is not connected");
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().path, None);

    let now = world.now;
    world.agent().tun(&back, now);
    world.run(ms(10));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(there), "by the reverse route");
    let path = Some(codervpn_engine::Path::Relay(region(1)));
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().path, path);
    let peer = world.agent().key();
    world.client().apply(Command::RelayPeerGone { region: region(1), peer }, now);
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().path, None);
}

#[test]
fn a_deferred_node_that_is_refused_later_leaves_the_peer_alive() {
    let mut world = World::connected();
    let now = world.now;
    let mut other = Party::agent(AGENT, 60, now);
    other.online(now);
    world.client().apply(Command::Node { id: AGENT, node: other.node() }, now);
    let mut bad = Party::agent(AGENT, 61, now);
    bad.online(now);
    // Deferred, and by the time it may be applied its key belongs to another agent.
    world.client().apply(Command::Node { id: AGENT, node: bad.node() }, now);
    let id = Uuid::from_u128(77);
    let mut thief = Party::agent(id, 61, now);
    thief.online(now);
    assert_eq!(thief.key(), bad.key());
    world.client().apply(Command::AddDestination(id), now);
    world.client().apply(Command::Node { id, node: thief.node() }, now);
    world.run(secs(2));
    assert_eq!(world.client().engine.counters().node_refused, 1);
    let now = world.now;
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().key, Some(other.key()));
    assert!(world.client().engine.poll_timeout().is_some(), "its 5 s for READY still run");
    world.run(secs(4));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Connecting);
}

#[test]
fn t41_ten_thousand_agents_come_and_go_and_leave_nothing() {
    let mut world = World::pair();
    for n in 0..10_000u128 {
        let now = world.now;
        let id = Uuid::from_u128(0x1000_0000_0000_0000_0000 + n);
        world.client().apply(Command::AddDestination(id), now);
        let packet = udp(world.client().address, coder_address(id), 1, 2, b"held");
        world.client().tun(&packet, now);
        world.client().apply(Command::RemoveDestination(id), now);
    }
    assert_eq!(world.client().engine.peer_count(), 1);
    assert_eq!(world.client().engine.counters().held_discarded, 10_000);
    world.client().engine.poll_timeout();
    let now = world.now;
    world.client().apply(Command::RemoveDestination(AGENT), now);
    // The net report pauses where there are no peers.
    world.run(secs(30));
    assert_eq!(world.client().engine.poll_timeout(), None);
}

#[test]
fn the_second_prefix_of_an_agent_reaches_it_too() {
    let mut world = World::connected();
    let now = world.now;
    let packet = udp(world.client().address, tailscale_address(AGENT), 5000, 7, b"old prefix");
    world.client().tun(&packet, now);
    world.run(ms(2));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
    assert_eq!(world.parties[CLIENT_SIDE].engine.counters().tun_unknown_peer, 0);
}
