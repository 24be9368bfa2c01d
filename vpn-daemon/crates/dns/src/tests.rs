//! What the tests share: one deployment, queries by hand, answers judged by hickory and etherparse.

mod forwarding;
mod naming;
mod packets;
mod tcp;
mod vectors;

use std::net::Ipv6Addr;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use hickory_proto::op::Message;
use uuid::Uuid;

use crate::zone::wire;
use crate::{Agent, Config, Responder, Suffix, Transport, Verdict, Workspace, Zone, ZoneHandle, ZoneInput};

pub(crate) const OWN: Ipv6Addr = Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 0x4111, 1, 2, 3, 4);
pub(crate) const AGENT: Ipv6Addr = Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 9, 8, 7, 6, 5);

/// The one moment all clocks of the tests are relative to.
#[expect(clippy::disallowed_methods, reason = "an Instant can only be had from the clock")]
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

pub(crate) fn at(millis: u64) -> Instant {
    *START + Duration::from_millis(millis)
}

/// The id whose Coder address ends in the given 80 bits.
pub(crate) fn id(address: Ipv6Addr) -> Uuid {
    Uuid::from_bytes(address.octets())
}

pub(crate) fn workspace(number: u128, name: &str, agents: &[(Ipv6Addr, &str)]) -> Workspace {
    let agents = agents.iter().map(|(address, name)| Agent { id: id(*address), name: (*name).to_owned() }).collect();
    Workspace { id: Uuid::from_u128(number), name: name.to_owned(), agents }
}

/// `main` of `ws` of `alice`, as in `dns-and-os.md` 1.13.
pub(crate) fn input() -> ZoneInput {
    ZoneInput {
        suffix: Suffix::default(),
        owner: "alice".to_owned(),
        workspaces: vec![workspace(1, "ws", &[(AGENT, "main")])],
    }
}

pub(crate) fn responder() -> (Responder, ZoneHandle) {
    let zone = ZoneHandle::new();
    zone.publish(&input(), 1_700_000_000);
    let mut next = 0x4000u16;
    let random_id = Box::new(move || {
        next = next.wrapping_mul(25173).wrapping_add(13849);
        next
    });
    (Responder::new(Config { own_address: OWN, zone: zone.clone(), seed: 7, random_id }, at(0)), zone)
}

pub(crate) fn query(name: &str, rtype: u16) -> Vec<u8> {
    let mut query = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let labels = wire(name).map_or_else(|| vec![0], |labels| labels.to_vec());
    query.extend_from_slice(&labels);
    query.extend_from_slice(&rtype.to_be_bytes());
    query.extend_from_slice(&[0, 1]);
    query
}

pub(crate) fn with_opt(mut query: Vec<u8>, payload: u16) -> Vec<u8> {
    query[11] = 1;
    query.extend_from_slice(&[0, 0, 41]);
    query.extend_from_slice(&payload.to_be_bytes());
    query.extend_from_slice(&[0; 6]);
    query
}

/// Raw answer over UDP without forwarding; empty if dropped.
pub(crate) fn raw(zone: &Zone, query: &[u8]) -> Vec<u8> {
    let mut out = b"left over".to_vec();
    match crate::answer(zone, query, Transport::Udp, false, &mut out) {
        Verdict::Answer => out,
        Verdict::Drop => Vec::new(),
        Verdict::Forward => panic!("forwarded in split mode"),
    }
}

pub(crate) fn ask(zone: &Zone, name: &str, rtype: u16) -> Message {
    decode(&raw(zone, &query(name, rtype)))
}

pub(crate) fn decode(answer: &[u8]) -> Message {
    Message::from_vec(answer).unwrap()
}
