//! The table of `dns-and-os.md` 1.3 and the vectors of 1.13, decoded by hickory.

use std::net::Ipv6Addr;

use hickory_proto::op::{Message, MessageType, ResponseCode};
use hickory_proto::rr::{RData, Record};
use proptest::prelude::{any, prop, proptest};

use super::{AGENT, ask, decode, input, query, raw, with_opt, workspace};
use crate::{DNS_ADDRESS, Suffix, Transport, Verdict, Zone, answer};

const A: u16 = 1;
const NS: u16 = 2;
const SOA: u16 = 6;
const PTR: u16 = 12;
const TXT: u16 = 16;
const AAAA: u16 = 28;
const DS: u16 = 43;
const HTTPS: u16 = 65;
const AXFR: u16 = 252;
const ANY: u16 = 255;

const POINTER: &str = "5.0.0.0.6.0.0.0.7.0.0.0.8.0.0.0.9.0.0.0.b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa";

fn zone() -> Zone {
    Zone::build(&input())
}

fn counts(message: &Message) -> (usize, usize, usize) {
    (message.answers.len(), message.authorities.len(), message.additionals.len())
}

fn code(message: &Message) -> ResponseCode {
    message.metadata.response_code
}

fn addresses(message: &Message) -> Vec<Ipv6Addr> {
    let address = |record: &Record| match &record.data {
        RData::AAAA(address) => address.0,
        other => panic!("{other:?}"),
    };
    message.answers.iter().map(address).collect()
}

/// NODATA or NXDOMAIN: authoritative, no answer, a SOA whose minimum and TTL are two seconds.
fn assert_negative(message: &Message, rcode: ResponseCode, apex: &str) {
    assert_eq!((code(message), counts(message)), (rcode, (0, 1, 0)), "{message:?}");
    assert!(message.metadata.authoritative && message.metadata.recursion_available);
    let record = &message.authorities[0];
    let RData::SOA(soa) = &record.data else { panic!("{record:?}") };
    assert_eq!((record.ttl, soa.minimum, record.name.to_ascii().as_str()), (2, 2, apex));
    assert_eq!((soa.mname.to_ascii().as_str(), soa.rname.to_ascii().as_str()), ("ns.coder.", "hostmaster.coder."));
}

#[test]
fn aaaa_of_every_name_of_an_agent() {
    for name in ["main.ws.me.coder", "main.ws.alice.coder", "ws.coder"] {
        let message = ask(&zone(), name, AAAA);
        assert_eq!((code(&message), counts(&message)), (ResponseCode::NoError, (1, 0, 0)));
        assert_eq!(addresses(&message), [AGENT]);
        assert_eq!((message.answers[0].ttl, message.metadata.id), (2, 0xabcd));
        assert!(message.metadata.authoritative && message.metadata.recursion_available);
        assert!(message.metadata.recursion_desired && !message.metadata.authentic_data);
        assert_eq!(message.metadata.message_type, MessageType::Response);
    }
    assert_eq!(addresses(&ask(&zone(), "is.coder--connect--enabled--right--now.coder", AAAA)), [DNS_ADDRESS]);
    assert_eq!(addresses(&ask(&zone(), "main.ws.me.coder", ANY)), [AGENT]);
}

#[test]
fn question_is_spelled_as_asked_and_opt_answered_with_opt() {
    let asked = with_opt(query("MAIN.Ws.Me.CoDeR", AAAA), 1232);
    let answer = raw(&zone(), &asked);
    assert_eq!(&answer[12..34], &asked[12..34], "byte for byte");
    let message = decode(&answer);
    assert_eq!(addresses(&message), [AGENT]);
    assert_eq!(message.answers[0].name.to_ascii(), "MAIN.Ws.Me.CoDeR.");
    let edns = message.edns.unwrap();
    assert_eq!((edns.max_payload(), edns.version()), (1232, 0));
    assert!(decode(&raw(&zone(), &query("ws.coder", AAAA))).edns.is_none(), "no OPT in, no OPT out");
}

/// D-14, D-15: musl drops the AAAA answer on NXDOMAIN, glibc calls an empty answer without AA lame.
#[test]
fn other_types_of_an_existing_name_are_nodata() {
    for rtype in [A, HTTPS, TXT, SOA, NS, DS, 13, 15, 33, 64, 5, 48, 65280] {
        for name in ["main.ws.me.coder", "ws.coder"] {
            assert_negative(&ask(&zone(), name, rtype), ResponseCode::NoError, "coder.");
        }
    }
}

#[test]
fn empty_non_terminals_and_the_apex_are_nodata() {
    for name in ["me.coder", "ws.me.coder", "alice.coder", "ws.alice.coder", "coder"] {
        assert_negative(&ask(&zone(), name, AAAA), ResponseCode::NoError, "coder.");
        assert_negative(&ask(&zone(), name, ANY), ResponseCode::NoError, "coder.");
    }
}

#[test]
fn unknown_names_are_nxdomain_whatever_the_type() {
    for name in ["nope.coder", "encoder.coder", "a_b.coder", "x.main.ws.me.coder", "main.me.coder"] {
        for rtype in [A, AAAA, SOA, HTTPS, ANY] {
            assert_negative(&ask(&zone(), name, rtype), ResponseCode::NXDomain, "coder.");
        }
    }
}

/// A label may contain a dot: `ws.me` in one label is not two.
#[test]
fn dot_inside_a_label_does_not_match() {
    let mut asked = query("main.wsXme.coder", AAAA);
    let at = asked.iter().position(|b| *b == b'X').unwrap();
    asked[at] = b'.';
    assert_eq!(raw(&zone(), &asked)[3] & 15, 3);
}

#[test]
fn names_outside_are_refused() {
    for name in ["encoder", "example.com", "coder.example.com", "xcoder", "ip6.arpa"] {
        let message = ask(&zone(), name, AAAA);
        assert_eq!((code(&message), counts(&message)), (ResponseCode::Refused, (0, 0, 0)), "{name}");
        assert!(!message.metadata.authoritative);
    }
    // Extended errors: 20 outside, 14 before there is content.
    let asked = with_opt(query("example.com", AAAA), 1232);
    assert!(raw(&zone(), &asked).ends_with(&[0, 15, 0, 2, 0, 20]));
    assert!(raw(&Zone::unset(), &asked).ends_with(&[0, 15, 0, 2, 0, 14]));
    assert_eq!(code(&ask(&Zone::unset(), "ws.coder", AAAA)), ResponseCode::Refused);
}

#[test]
fn soa_and_ns_at_the_apex() {
    let soa = ask(&zone(), "coder", SOA);
    assert!(matches!(&soa.answers[0].data, RData::SOA(soa) if soa.minimum == 2), "{soa:?}");
    assert_eq!(counts(&soa), (1, 0, 0));
    let ns = ask(&zone(), "coder", NS);
    assert!(matches!(&ns.answers[0].data, RData::NS(ns) if ns.to_ascii() == "ns.coder."), "{ns:?}");
    assert_eq!(addresses(&ask(&zone(), "ns.coder", AAAA)), [DNS_ADDRESS]);
}

/// D-20: the short name follows the number of agents.
#[test]
fn second_agent_takes_the_short_name_away_and_its_end_gives_it_back() {
    let mut input = input();
    let other = Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 1, 1, 1, 1, 1);
    input.workspaces = vec![workspace(1, "ws", &[(AGENT, "main"), (other, "gpu")])];
    let two = Zone::build(&input);
    assert_negative(&ask(&two, "ws.coder", AAAA), ResponseCode::NXDomain, "coder.");
    assert_eq!(addresses(&ask(&two, "gpu.ws.me.coder", AAAA)), [other]);
    assert_eq!(addresses(&ask(&zone(), "ws.coder", AAAA)), [AGENT]);
}

#[test]
fn pointers() {
    let target = |zone: &Zone, name: &str| match &ask(zone, name, PTR).answers[0].data {
        RData::PTR(target) => target.to_ascii(),
        other => panic!("{other:?}"),
    };
    assert_eq!(target(&zone(), POINTER), "main.ws.alice.coder.");
    assert_eq!(target(&zone(), &POINTER.to_ascii_uppercase()), "main.ws.alice.coder.");
    let own = format!("3.5.{}b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa", "0.".repeat(18));
    assert_eq!(target(&zone(), &own), "is.coder--connect--enabled--right--now.coder.");
    // The longest is that of the owner, also for one whose name is as short as "me".
    let mut short = input();
    short.owner = "al".to_owned();
    assert_eq!(target(&Zone::build(&short), POINTER), "main.ws.al.coder.");

    let apex = "b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa.";
    assert_negative(&ask(&zone(), POINTER, AAAA), ResponseCode::NoError, apex);
    assert_negative(&ask(&zone(), &POINTER[2..], PTR), ResponseCode::NoError, apex);
    assert_negative(&ask(&zone(), apex, PTR), ResponseCode::NoError, apex);
    assert_negative(&ask(&zone(), &format!("6{}", &POINTER[1..]), PTR), ResponseCode::NXDomain, apex);
    assert_negative(&ask(&zone(), &format!("7{}", &POINTER[3..]), PTR), ResponseCode::NXDomain, apex);
    assert_negative(&ask(&zone(), &format!("0.{POINTER}"), PTR), ResponseCode::NXDomain, apex);
    assert_negative(&ask(&zone(), &format!("zz{}", &POINTER[1..]), PTR), ResponseCode::NXDomain, apex);
}

#[test]
fn what_is_no_plain_query_gets_the_code_of_the_table() {
    let plain = query("ws.coder", AAAA);
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut asked = plain.clone();
        change(&mut asked);
        raw(&zone(), &asked)
    };
    let rcode = |answer: &[u8]| answer[3] & 15;

    let two = changed(&|q| q[5] = 2);
    assert_eq!((two.len(), rcode(&two), &two[..2]), (12, 1, &[0xab, 0xcd][..]), "two questions");
    assert_eq!(rcode(&changed(&|q| q[5] = 0)), 1, "no question");
    assert_eq!(changed(&|q| q[12] = 0xc0).len(), 12, "undecodable question: header only");
    assert_eq!(rcode(&changed(&|q| q[12] = 0xc0)), 1);
    assert_eq!(rcode(&changed(&|q| q[2] |= 0x28)), 4, "opcode");
    assert_eq!(rcode(&changed(&|q| *q.last_mut().unwrap() = 3)), 5, "class CH");
    assert_eq!(rcode(&changed(&|q| *q.last_mut().unwrap() = 255)), 5, "class ANY");
    assert_eq!(rcode(&changed(&|q| q[11] = 1)), 1, "a record that is not there");
    assert!(changed(&|q| q[2] |= 0x80).is_empty(), "QR=1 is never answered");
    assert!(changed(&|q| q.truncate(11)).is_empty(), "shorter than a header");

    for transport in [Transport::Udp, Transport::Tcp] {
        for rtype in [AXFR, AXFR - 1] {
            let mut out = Vec::new();
            assert_eq!(answer(&zone(), &query("coder", rtype), transport, true, &mut out), Verdict::Answer);
            assert_eq!(code(&decode(&out)), ResponseCode::Refused);
        }
    }

    let mut version = with_opt(plain.clone(), 1232);
    let at = version.len() - 5;
    version[at] = 1;
    let message = decode(&raw(&zone(), &version));
    assert_eq!((u16::from(code(&message)), counts(&message).0), (16, 0), "BADVERS");
    let mut dnssec = with_opt(plain.clone(), 1232);
    let at = dnssec.len() - 4;
    dnssec[at] = 0x80;
    assert!(decode(&raw(&zone(), &dnssec)).edns.unwrap().flags().dnssec_ok, "DO is copied");
    let mut twice = with_opt(with_opt(plain.clone(), 1232), 1232);
    twice[11] = 2;
    assert_eq!(rcode(&raw(&zone(), &twice)), 1, "two OPT records");
}

#[test]
fn large_record_sets_are_truncated_over_udp_and_whole_over_tcp() {
    let many = (0..60).map(|n| Ipv6Addr::from(u128::from(AGENT) + n));
    let zone = Zone::with_records(&Suffix::default(), "big.coder", many);
    let limited = |payload: Option<u16>| {
        let asked = query("big.coder", AAAA);
        let answer = raw(&zone, &payload.map_or(asked.clone(), |payload| with_opt(asked, payload)));
        let message = decode(&answer);
        (answer.len(), message.metadata.truncation, message.answers.len())
    };
    for (payload, limit) in [(None, 512), (Some(4096), 1232), (Some(100), 512)] {
        let (length, truncated, answers) = limited(payload);
        assert!(length <= limit && truncated && answers == 0, "{payload:?}: whole sets go");
    }
    let mut out = Vec::new();
    answer(&zone, &query("big.coder", AAAA), Transport::Tcp, false, &mut out);
    assert_eq!((addresses(&decode(&out)).len(), decode(&out).metadata.truncation), (60, false));

    let some = (0..40).map(|n| Ipv6Addr::from(u128::from(AGENT) + n));
    let zone = Zone::with_records(&Suffix::default(), "big.coder", some);
    let answer = raw(&zone, &with_opt(query("big.coder", AAAA), 4096));
    assert!(answer.len() > 512 && answer.len() <= 1232 && addresses(&decode(&answer)).len() == 40);
}

/// D-18: withdrawn names are denied with authority, not refused.
#[test]
fn withdrawn_zone_denies_all_names() {
    let zone = Zone::withdrawn(&Suffix::default());
    for name in ["main.ws.me.coder", "is.coder--connect--enabled--right--now.coder", "me.coder"] {
        assert_negative(&ask(&zone, name, AAAA), ResponseCode::NXDomain, "coder.");
    }
}

proptest! {
    /// 1.13, D-28: any bytes: no panic, bounded, id equal, never an answer to an answer, nothing of an earlier query.
    #[test]
    fn any_bytes_are_answered_safely(noise in prop::collection::vec(any::<u8>(), 0..600), plausible in any::<bool>()) {
        let zone = zone();
        let mut buffer = Vec::new();
        answer(&zone, &query("marker-of-somebody-else.coder", AAAA), Transport::Udp, false, &mut buffer);
        let mut message = noise;
        if plausible && message.len() >= 12 {
            message[2] &= 1;
            let additionals = message[11] & 3;
            message[4..12].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, additionals]);
        }
        let verdict = answer(&zone, &message, Transport::Udp, true, &mut buffer);
        assert!(buffer.len() <= 1232);
        assert!(!buffer.windows(6).any(|window| window == b"marker"));
        if message.len() < 12 || message[2] & 0x80 != 0 {
            assert_eq!(verdict, Verdict::Drop);
        }
        if verdict == Verdict::Answer {
            assert_eq!(buffer[..2], message[..2]);
            decode(&buffer);
        }
    }

    /// What is cut or changed anywhere still gets a decodable answer or none.
    #[test]
    fn damaged_queries_are_answered_safely(at in 0usize..64, byte in any::<u8>(), cut in 0usize..64) {
        let mut message = with_opt(query("main.ws.me.coder", AAAA), 1232);
        message.truncate(message.len().saturating_sub(cut));
        if let Some(place) = message.get_mut(at) {
            *place = byte;
        }
        let answer = raw(&zone(), &message);
        if !answer.is_empty() {
            decode(&answer);
        }
    }
}
