//! What may pass in either direction, what is answered, and what a peer can be asked.

#![allow(clippy::unwrap_used)]

mod sim;

use std::net::Ipv6Addr;

use codervpn_engine::{Command, Event, Path, PeerState, PingError, Route};
use codervpn_wire::ip::{self, Ipv6Packet, Upper};
use codervpn_wire::node::{DNS_ADDRESS, coder_address};
use codervpn_wire::tsmp;
use sim::{ACK, AGENT, DESKTOP, Party, SYN, SYN_ACK, World, ms, raw, region, secs, tcp, udp};
use uuid::Uuid;

/// Type and code of an ICMPv6 packet, with its source.
fn icmp(packet: &[u8]) -> (u8, u8, Ipv6Addr) {
    let packet = Ipv6Packet::parse(packet).unwrap();
    assert!(ip::has_right_checksum(&packet));
    let Some(Upper::Icmpv6(message)) = packet.upper() else { panic!("not ICMPv6") };
    (message.kind(), message.code(), packet.source())
}

fn from_agent(world: &mut World, packet: &[u8]) -> Option<Vec<u8>> {
    let now = world.now;
    world.agent().tun(packet, now);
    world.run(ms(2));
    world.client().out.delivered.pop_front()
}

#[test]
fn unknown_agents_are_refused_at_once_and_ten_times_a_second() {
    let mut world = World::pair();
    let now = world.now;
    let unknown: Ipv6Addr = "fd60:627a:a42b::1234".parse().unwrap();
    let syn = tcp(world.client().address, unknown, 4000, 80, SYN);
    for _ in 0..100 {
        world.client().tun(&syn, now);
    }
    assert_eq!(world.client().out.delivered.len(), 10);
    let answer = world.client().out.delivered.pop_front().unwrap();
    assert_eq!(icmp(&answer), (1, 3, DNS_ADDRESS), "address unreachable: connect() fails at once");
    assert_eq!(Ipv6Packet::parse(&answer).unwrap().destination(), world.client().address);
    world.client().out.delivered.clear();
    world.client().tun(&answer, now);
    assert!(world.client().out.delivered.is_empty(), "no error about an error");
}

#[test]
fn a_removed_agent_is_refused_at_once() {
    let mut world = World::connected();
    let now = world.now;
    world.client().apply(Command::RemoveDestination(AGENT), now);
    let packet = world.client_to_agent(b"x");
    world.client().tun(&packet, now);
    assert_eq!(icmp(&world.client().out.delivered.pop_front().unwrap()).0, 1);
    assert!(world.client().engine.peer(AGENT, now).is_none());
}

#[test]
fn an_agent_that_was_not_heard_for_thirty_seconds_is_refused_until_it_is_back() {
    let mut world = World::connected();
    world.lose = Box::new(|_, _| true);
    let packet = world.client_to_agent(b"anybody?");
    for second in 0..30 {
        let now = world.now;
        world.client().tun(&packet, now);
        assert!(world.client().out.delivered.is_empty(), "refused after {second} s");
        world.run(secs(1));
    }
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Unreachable);
    assert!(world.client().events.contains(&Event::PeerChanged(AGENT)));
    world.client().tun(&packet, now);
    assert_eq!(icmp(&world.client().out.delivered.pop_front().unwrap()).1, 3);

    world.lose = Box::new(|_, _| false);
    world.run(secs(31));
    let now = world.now;
    assert_eq!(world.client().state(AGENT, now), PeerState::Up, "a ping or a handshake brought it back");
    world.agent().out.delivered.clear();
    world.client().tun(&packet, now);
    world.run(ms(5));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
}

#[test]
fn an_agent_that_never_connects_is_held_first_and_refused_after_thirty_seconds() {
    let mut world = World::pair();
    let packet = world.client_to_agent(b"x");
    let now = world.now;
    world.client().tun(&packet, now);
    world.run(secs(30));
    let now = world.now;
    world.client().tun(&packet, now);
    assert_eq!(icmp(&world.client().out.delivered.pop_front().unwrap()).1, 3);
    world.introduce();
    world.run(ms(5));
    let now = world.now;
    world.client().tun(&packet, now);
    assert!(world.client().out.delivered.is_empty(), "its node makes it alive again");
}

#[test]
fn t47_a_packet_larger_than_the_tunnel_gets_packet_too_big() {
    let mut world = World::connected();
    let now = world.now;
    let packet = world.client_to_agent(&[0; 1233]);
    assert_eq!(packet.len(), 1281);
    world.client().tun(&packet, now);
    let answer = world.client().out.delivered.pop_front().unwrap();
    assert_eq!(icmp(&answer), (2, 0, DNS_ADDRESS));
    assert!(answer.len() <= 1280);
    let packet = world.client_to_agent(&[0; 1232]);
    world.client().tun(&packet, now);
    world.run(ms(5));
    assert_eq!(world.agent().out.delivered.pop_front(), Some(packet));
}

#[test]
fn only_our_own_packets_for_agents_leave_the_device() {
    let mut world = World::connected();
    let now = world.now;
    let ours = world.client().address;
    let agent = coder_address(AGENT);
    let v6 = |text: &str| text.parse::<Ipv6Addr>().unwrap();
    let cases = [
        udp(v6("fd60:627a:a42b::77"), agent, 1, 2, b"foreign source"),
        udp(ours, v6("ff02::1"), 1, 2, b"multicast"),
        udp(ours, v6("fe80::1"), 1, 2, b"link-local"),
        udp(ours, v6("2001:db8::1"), 1, 2, b"the internet"),
        udp(ours, DNS_ADDRESS, 1, 53, b"the resolver"),
        udp(ours, ours, 1, 2, b"ourselves"),
        raw(ours, agent, tsmp::PROTOCOL, b"p12345678"),
        vec![0x45; 60],
        vec![0x60; 39],
        vec![],
    ];
    world.client().out.sent.clear();
    for case in &cases {
        world.client().tun(case, now);
    }
    assert!(world.client().out.sent.is_empty() && world.client().out.delivered.is_empty());
    let counters = *world.client().engine.counters();
    assert_eq!((counters.tun_foreign_source, counters.tun_malformed, counters.tun_not_for_peers), (1, 3, 6));
}

#[test]
fn t30_agents_cannot_open_connections_to_the_desktop() {
    let mut world = World::connected();
    let (agent, ours) = (coder_address(AGENT), world.client().address);
    for flags in [SYN, ACK, SYN_ACK, 1, 4, 0, 0x3f] {
        assert_eq!(from_agent(&mut world, &tcp(agent, ours, 80, 22, flags)), None);
    }
    assert_eq!(from_agent(&mut world, &udp(agent, ours, 53, 5353, b"x")), None);
    assert_eq!(from_agent(&mut world, &raw(agent, ours, 132, &[0; 20])), None, "SCTP");
    assert_eq!(from_agent(&mut world, &raw(agent, ours, ip::ICMPV6, &[134, 0, 0, 0, 0, 0, 0, 0])), None, "RA");
    assert_eq!(world.client().engine.counters().inner_filtered, 10);

    let now = world.now;
    world.client().tun(&tcp(ours, agent, 40_000, 80, SYN), now);
    world.run(ms(2));
    assert!(from_agent(&mut world, &tcp(agent, ours, 80, 40_000, SYN_ACK)).is_some(), "the answer to our SYN");
    assert_eq!(from_agent(&mut world, &tcp(agent, ours, 81, 40_000, SYN_ACK)), None, "from another port");
    assert_eq!(from_agent(&mut world, &tcp(agent, ours, 80, 40_001, SYN_ACK)), None, "to another port");

    let now = world.now;
    sim::open_inbound(world.client(), now);
    assert!(from_agent(&mut world, &tcp(agent, ours, 80, 22, SYN)).is_some(), "switched off");
}

#[test]
fn t30_echo_and_errors_about_our_packets_come_in() {
    let mut world = World::connected();
    let (agent, ours) = (coder_address(AGENT), world.client().address);
    let mut packet = [0; 200];
    let len = ip::write_echo_request(agent, ours, 7, 1, b"are you there", &mut packet).unwrap();
    assert!(from_agent(&mut world, &packet[..len]).is_some(), "the kernel answers it");

    let error_about = |quoted: &[u8]| {
        let mut body = vec![1, 4, 0, 0, 0, 0, 0, 0];
        body.extend_from_slice(quoted);
        raw(agent, ours, ip::ICMPV6, &body)
    };
    let sent = udp(ours, agent, 3000, 4000, b"question");
    assert_eq!(from_agent(&mut world, &error_about(&sent)), None, "not sent yet");
    let now = world.now;
    world.client().tun(&sent, now);
    world.run(ms(2));
    assert!(from_agent(&mut world, &error_about(&sent)).is_some());
    let other = udp(ours, "fd60:627a:a42b::9".parse().unwrap(), 3000, 4000, b"question");
    assert_eq!(from_agent(&mut world, &error_about(&other)), None, "about another agent");

    let reply = |id: u8| raw(agent, ours, ip::ICMPV6, &[129, 0, 0, 0, 0, id, 0, 1]);
    assert_eq!(from_agent(&mut world, &reply(9)), None, "a reply to nothing");
    let len = ip::write_echo_request(ours, agent, 9, 1, b"", &mut packet).unwrap();
    let now = world.now;
    world.client().tun(&packet[..len], now);
    world.run(ms(5));
    let answer = world.client().out.delivered.pop_front().expect("the agent's engine answers");
    assert_eq!(icmp(&answer), (129, 0, agent));
    assert_eq!(world.agent().engine.counters().echo_answered, 1);
}

#[test]
fn fragments_follow_their_first_one() {
    let mut world = World::connected();
    let (agent, ours) = (coder_address(AGENT), world.client().address);
    let fragment = |id: u8, offset: u16, more: bool, body: &[u8]| {
        let [high, low] = (offset | u16::from(more)).to_be_bytes();
        let mut payload = vec![ip::UDP, 0, high, low, 0, 0, 0, id];
        payload.extend_from_slice(body);
        raw(agent, ours, 44, &payload)
    };
    let first = [0, 53, 0x13, 0x88, 0, 24, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(from_agent(&mut world, &fragment(1, 0, true, &first)), None);
    assert_eq!(from_agent(&mut world, &fragment(1, 16, false, &[0; 8])), None);
    let now = world.now;
    world.client().tun(&udp(ours, agent, 5000, 53, b"big answer, please"), now);
    world.run(ms(2));
    assert!(from_agent(&mut world, &fragment(2, 0, true, &first)).is_some());
    assert!(from_agent(&mut world, &fragment(2, 16, false, &[0; 8])).is_some());
    assert_eq!(from_agent(&mut world, &fragment(3, 16, false, &[0; 8])), None);
    assert_eq!(from_agent(&mut world, &fragment(4, 0, true, &first[..6])), None, "ports cut off from their header");
}

#[test]
fn t29_an_agent_speaks_only_for_itself_and_only_to_us() {
    let mut world = World::connected();
    let now = world.now;
    let ours = world.client().address;
    sim::open_inbound(world.client(), now);
    // An agent that also owns the address of somebody else, in its own opinion.
    let foreign: Ipv6Addr = "fd60:627a:a42b::bad".parse().unwrap();
    let mut config = codervpn_engine::Config::agent(AGENT, sim::TestRng(2));
    config.addresses.push(foreign);
    let client = world.client().node();
    let mut liar = Party::new(AGENT, config, now);
    liar.online(now);
    assert_eq!(liar.key(), world.agent().key());
    liar.apply(Command::Node { id: DESKTOP, node: client }, now);
    world.parties[1] = liar;
    world.run(secs(16));
    let now = world.now;
    world.client().apply(Command::Disconnected(AGENT), now);
    world.introduce();
    world.run(ms(5));
    assert!(from_agent(&mut world, &udp(coder_address(AGENT), ours, 1, 2, b"true")).is_some());
    assert_eq!(from_agent(&mut world, &udp(foreign, ours, 1, 2, b"false")), None);
    assert_eq!(world.client().engine.counters().inner_foreign_source, 1);
}

#[test]
fn t31_tsmp_is_answered_and_never_delivered() {
    let mut world = World::connected();
    // The agent's engine does not let TSMP out of its device; its answer shows what the desktop's does.
    let mut packet = [0; 64];
    let len = tsmp::write_ping(world.client().address, coder_address(AGENT), &[7; 8], &mut packet).unwrap();
    let now = world.now;
    world.client().tun(&packet[..len], now);
    assert_eq!(world.client().engine.counters().tun_not_for_peers, 1);
    assert!(world.client().out.delivered.is_empty());
}

#[test]
fn status_pings_measure_the_relay_path() {
    let mut world = World::connected();
    world.latency = ms(20);
    world.run(secs(1));
    let now = world.now;
    let first = world.client().engine.peer(AGENT, now).unwrap().last_ping.expect("one at once");
    assert!(first.latency <= ms(40) && first.path == Path::Relay(region(1)));
    assert!(world.client().events.contains(&Event::PeerChanged(AGENT)));

    let count = |world: &mut World, time| {
        let before = world.client().engine.counters().disco_pongs;
        world.run(time);
        world.client().engine.counters().disco_pongs - before
    };
    let idle = count(&mut world, secs(300));
    assert!((10..=11).contains(&idle), "idle: one in 27 to 30 s, {idle}");
    let mut in_use = 0;
    for _ in 0..60 {
        let packet = world.client_to_agent(b"work");
        let now = world.now;
        world.client().tun(&packet, now);
        in_use += count(&mut world, secs(1));
    }
    assert!((11..=13).contains(&in_use), "in use: one in 5 s, {in_use}");
    let now = world.now;
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().last_ping.unwrap().latency, ms(40));
}

#[test]
fn a_ping_on_request_has_an_answer_whatever_happens() {
    let mut world = World::connected();
    world.run(secs(6));
    let unknown = Uuid::from_u128(1);
    let done = |world: &mut World| {
        let events = std::mem::take(&mut world.client().events);
        let mut results = Vec::new();
        for event in events {
            if let Event::PingDone { id, result } = event {
                results.push((id, result));
            }
        }
        results
    };
    done(&mut world);
    let now = world.now;
    world.client().apply(Command::Ping(unknown), now);
    assert_eq!(done(&mut world), [(unknown, Err(PingError::UnknownPeer))]);
    world.client().apply(Command::Ping(AGENT), now);
    world.run(ms(10));
    assert!(matches!(done(&mut world)[..], [(AGENT, Ok(ping))] if ping.latency == ms(2)));

    world.lose = Box::new(|_, _| true);
    let now = world.now;
    for _ in 0..20 {
        world.client().apply(Command::Ping(AGENT), now);
    }
    assert_eq!(done(&mut world), vec![(AGENT, Err(PingError::Busy)); 12]);
    world.run(secs(5));
    assert_eq!(done(&mut world), vec![(AGENT, Err(PingError::Timeout)); 8]);
    let now = world.now;
    world.client().apply(Command::RelayDown(region(1)), now);
    world.client().apply(Command::Ping(AGENT), now);
    assert_eq!(done(&mut world), [(AGENT, Err(PingError::NoPath))]);
    world.client().apply(Command::Disconnected(AGENT), now);
    world.client().apply(Command::Ping(AGENT), now);
    assert_eq!(done(&mut world), [(AGENT, Err(PingError::NoNode))]);
}

#[test]
fn t03_t08_pings_are_answered_to_their_owner_and_not_too_often() {
    use codervpn_wire::disco::{Outgoing, Padding, TxId};
    use codervpn_wire::keys::{DiscoPrivate, NodePrivate};

    let mut world = World::new(|now| vec![Party::client(1, now)]);
    let now = world.now;
    world.client().online(now);
    let id = AGENT;
    let mut rng = sim::TestRng(44);
    let (node_key, disco_key) = (NodePrivate::generate(&mut rng), DiscoPrivate::generate(&mut rng));
    let mut agent = Party::agent(id, 9, now);
    agent.online(now);
    let mut node = agent.node();
    node.key = node_key.public();
    node.disco = disco_key.public();
    let client = world.client().node();
    world.client().apply(Command::AddDestination(id), now);
    world.client().apply(Command::Node { id, node }, now);

    let shared = disco_key.shared_key(&client.disco).unwrap();
    let ping = |n: u8, padding| {
        let mut bytes = vec![0; 1400];
        let message = Outgoing::Ping { tx: TxId([n; 12]), node_key: node_key.public(), padding };
        let len = message.seal(&disco_key.public(), &shared, &[n; 24], &mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    };
    let answers = |world: &mut World, from, bytes: &[u8]| {
        let party = world.client();
        party.out.sent.clear();
        party.engine.handle_relay(region(1), from, bytes, now, &mut party.out);
        party.out.sent.iter().map(|(route, bytes)| (*route, bytes.len())).collect::<Vec<_>>()
    };
    let key = node_key.public();
    let route = Route::Relay { region: region(1), peer: key };
    assert_eq!(answers(&mut world, key, &ping(1, Padding::Coder)), [(route, 1312)]);
    assert_eq!(answers(&mut world, key, &ping(1, Padding::Coder)), [], "the same again");
    let short = answers(&mut world, key, &ping(2, Padding::None));
    assert!(short[0].1 < 130, "T-50, T-08: a short ping gets a short pong");
    let stranger = NodePrivate::generate(&mut rng).public();
    assert_eq!(answers(&mut world, stranger, &ping(3, Padding::Coder)), []);
    let flood = (10..200).filter(|n| !answers(&mut world, key, &ping(*n, Padding::Coder)).is_empty()).count();
    assert!(flood <= 20, "{flood}");
    let counters = world.client().engine.counters();
    assert_eq!(counters.relay_stranger, 1);
    assert!(counters.disco_pings_limited >= 170);

    let mut bytes = vec![0; 200];
    let endpoints = ["192.0.2.1:1".parse().unwrap()];
    let len = Outgoing::CallMeMaybe(&endpoints).seal(&disco_key.public(), &shared, &[1; 24], &mut bytes).unwrap();
    assert_eq!(answers(&mut world, key, &bytes[..len]), [], "ignored while there are no direct paths");
    assert_eq!(world.client().engine.counters().disco_call_me_maybe, 1);
}

#[test]
fn an_agent_acknowledges_every_node_of_a_client() {
    let mut world = World::pair();
    let client = world.client().node();
    let now = world.now;
    for _ in 0..2 {
        world.agent().events.clear();
        world.agent().apply(Command::Node { id: DESKTOP, node: client.clone() }, now);
        assert!(world.agent().events.contains(&Event::Programmed(DESKTOP)));
    }
    world.agent().apply(Command::Disconnected(DESKTOP), now);
    assert_eq!(world.agent().engine.peer_count(), 0);
}

#[test]
fn our_node_is_what_the_coordinator_accepts_and_is_told_only_when_it_changed() {
    use codervpn_engine::RelayLatency;
    use codervpn_wire::node::Family;
    use std::time::{Duration, SystemTime};

    let mut world = World::new(|now| vec![Party::client(1, now)]);
    let now = world.now;
    assert!(world.client().engine.self_node(SystemTime::UNIX_EPOCH).is_none(), "ND-4");
    world.client().online(now);
    let as_of = SystemTime::UNIX_EPOCH + Duration::new(5, 123_456_789);
    let node = world.client().engine.self_node(as_of).unwrap();
    let as_of = node.as_of.unwrap();
    assert_eq!((as_of.seconds, as_of.nanos), (5, 123_456_000), "microseconds");
    let fields = node.to_fields();
    assert_eq!(fields.preferred_derp, 1);
    assert_eq!(fields.addresses, fields.allowed_ips);
    assert!(fields.addresses.len() == 1 && fields.addresses[0].ends_with("/128") && fields.endpoints.is_empty());
    assert!(fields.addresses[0].starts_with("fd60:627a:a42b:"));
    assert!(fields.id > 0);

    let changed = |world: &mut World, command| {
        world.client().events.clear();
        world.client().apply(command, now);
        world.client().events.contains(&Event::SelfNodeChanged)
    };
    let round = |latency| {
        Command::RelayLatencies(vec![RelayLatency { region: region(1), family: Family::V4, latency: ms(latency) }])
    };
    assert!(changed(&mut world, round(10)), "a region appeared in the latencies");
    assert!(!changed(&mut world, round(20)), "latencies alone are no reason");
    let fallback =
        |reason: Option<&str>| Command::RelayWebsocketFallback { region: region(1), reason: reason.map(str::to_owned) };
    assert!(changed(&mut world, fallback(Some("proxy"))));
    assert!(!changed(&mut world, fallback(Some("proxy"))));
    let fields = world.client().node().to_fields();
    assert_eq!(fields.derp_forced_websocket, [(1, "proxy".to_owned())]);
    assert_eq!(fields.derp_latency, [("1-v4".to_owned(), 0.02)]);
    assert!(changed(&mut world, fallback(None)));
}
