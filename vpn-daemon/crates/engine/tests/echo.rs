//! Echo requests that the engine sends itself: through the session, told with their path, and nobody else's answers.
#![allow(clippy::unwrap_used)]

mod sim;

use codervpn_engine::{Command, Event, Path, PingError};
use codervpn_wire::ip::{self, Ipv6Packet, Upper};
use codervpn_wire::node::coder_address;
use sim::{AGENT, Party, World, ms, region, secs};
use uuid::Uuid;

fn done(party: &mut Party) -> Vec<Event> {
    party.events.drain(..).filter(|event| matches!(event, Event::EchoDone { .. })).collect()
}

#[test]
fn an_echo_travels_inside_the_session_and_its_answer_names_time_and_path() {
    let mut world = World::connected();
    let now = world.now;
    let tx = world.client().engine.peer(AGENT, now).unwrap().tx_bytes;
    for token in [7, 8] {
        world.client().apply(Command::Echo { id: AGENT, token }, now);
    }
    world.run(ms(5));
    let answer =
        |token| Event::EchoDone { id: AGENT, token, result: Ok(world.latency * 2), path: Some(Path::Relay(region(1))) };
    let expected = [answer(7), answer(8)];
    assert_eq!(done(world.client()), expected);
    assert!(world.client().out.delivered.is_empty(), "the device sees nothing of it");
    let now = world.now;
    assert_eq!(world.client().engine.peer(AGENT, now).unwrap().tx_bytes - tx, 2 * 104);
    world.run(secs(10));
    assert_eq!(done(world.client()), [], "answered once");
}

#[test]
fn an_echo_waits_for_the_session_like_any_packet() {
    let mut world = World::pair();
    world.introduce();
    let now = world.now;
    world.client().apply(Command::Echo { id: AGENT, token: 1 }, now);
    world.run(ms(50));
    assert!(matches!(done(world.client())[..], [Event::EchoDone { token: 1, result: Ok(_), .. }]));
}

#[test]
fn what_cannot_be_asked_is_said_at_once_and_silence_after_five_seconds() {
    let mut world = World::pair();
    let now = world.now;
    let failed = |id, token, error| Event::EchoDone { id, token, result: Err(error), path: None };
    let stranger = Uuid::from_u128(5);
    world.client().apply(Command::Echo { id: stranger, token: 1 }, now);
    world.client().apply(Command::Echo { id: AGENT, token: 2 }, now);
    assert_eq!(
        done(world.client()),
        [failed(stranger, 1, PingError::UnknownPeer), failed(AGENT, 2, PingError::NoNode)]
    );

    let mut world = World::connected();
    world.lose = Box::new(|_, _| true);
    let now = world.now;
    for token in 0..100 {
        world.client().apply(Command::Echo { id: AGENT, token }, now);
    }
    let busy = done(world.client());
    assert_eq!(busy.len(), 36);
    assert!(busy.contains(&failed(AGENT, 99, PingError::Busy)), "what may wait is bounded");
    world.run(ms(4999));
    assert_eq!(done(world.client()), []);
    world.run(ms(2));
    let silent = done(world.client());
    assert_eq!((silent.len(), silent[0]), (64, failed(AGENT, 0, PingError::Timeout)));
}

#[test]
fn the_answers_of_others_are_left_to_the_filter() {
    let mut world = World::connected();
    let now = world.now;
    // A program of this machine pings, too.
    let mut packet = [0; 104];
    let (from, to) = (world.client().address, coder_address(AGENT));
    let len = ip::write_echo_request(from, to, 9, 1, &[5; 56], &mut packet).unwrap();
    world.client().apply(Command::Echo { id: AGENT, token: 1 }, now);
    world.client().tun(&packet[..len], now);
    world.run(ms(5));
    assert_eq!(done(world.client()).len(), 1);
    let delivered = &world.client().out.delivered;
    assert_eq!(delivered.len(), 1);
    let Some(Upper::Icmpv6(icmp)) = Ipv6Packet::parse(&delivered[0]).unwrap().upper() else { panic!("no ICMPv6") };
    assert_eq!((icmp.kind(), icmp.echo_id()), (ip::ICMPV6_ECHO_REPLY, 9));
}
