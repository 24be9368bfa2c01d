//! The forwarder (`dns-and-os.md` 1.9), without sockets and with hand-made time.

use std::net::SocketAddr;

use super::{OWN, at, decode, query, responder, with_opt};
use crate::{BaseServers, ForwardReply, ForwardRequest, Forwarder, Responder, Transport, Verdict, Zone, answer};

const AAAA: u16 = 28;

fn server(number: u8) -> SocketAddr {
    format!("192.0.2.{number}:53").parse().unwrap()
}

fn forwarder(count: u8) -> Forwarder<u32> {
    let listed: Vec<_> = (1..=count).map(server).collect();
    let (servers, dropped) = BaseServers::select(&listed, OWN, |_| false);
    assert!(dropped.is_empty());
    let mut id = 0x7000u16;
    Forwarder::new(
        servers,
        Box::new(move || {
            id = id.wrapping_mul(25173).wrapping_add(13849);
            id
        }),
    )
}

fn requests(forwarder: &mut Forwarder<u32>) -> Vec<ForwardRequest> {
    std::iter::from_fn(|| forwarder.poll_request()).collect()
}

/// An answer of a server to a request, with `rcode` and flags of the second byte.
fn reply(request: &ForwardRequest, rcode: u8) -> Vec<u8> {
    let mut reply = request.message.clone();
    reply[2] |= 0x80;
    reply[3] = 0x80 | rcode;
    reply
}

fn answered(forwarder: &mut Forwarder<u32>) -> Vec<(u32, u8)> {
    std::iter::from_fn(|| forwarder.poll_reply()).map(|(client, reply)| (client, reply[3] & 15)).collect()
}

#[test]
fn messages_are_relayed_raw_but_for_the_id() {
    let mut forwarder = forwarder(1);
    let asked = with_opt(query("ExAmple.com", 65), 1232);
    assert!(forwarder.handle_query(1, &asked, Transport::Udp, at(0)));
    let request = &requests(&mut forwarder)[0];
    assert_eq!((request.server, request.transport, request.deadline), (server(1), Transport::Udp, at(5000)));
    assert_eq!(request.message[2..], asked[2..]);
    assert_ne!(request.message[..2], asked[..2]);
    let mut reply = reply(request, 0);
    // A server that answers in lower case, with AD set and unknown bytes at the end.
    reply[12..25].make_ascii_lowercase();
    reply[3] |= 0x20;
    reply.extend_from_slice(b"opaque");
    assert_eq!(forwarder.handle_answer(request.id, &reply, at(1)), ForwardReply::Taken);
    let (client, relayed) = forwarder.poll_reply().unwrap();
    assert_eq!((client, &relayed[..2], &relayed[4..asked.len()]), (1, &asked[..2], &asked[4..]));
    assert_eq!((relayed[3], relayed.ends_with(b"opaque")), (reply[3], true));
    assert_eq!(forwarder.handle_answer(request.id, &reply, at(2)), ForwardReply::Closed);
    assert_eq!(forwarder.poll_timeout(), None);
}

/// D-26.
#[test]
fn forged_answers_are_ignored() {
    let mut forwarder = forwarder(1);
    forwarder.handle_query(1, &query("example.com", AAAA), Transport::Udp, at(0));
    let request = requests(&mut forwarder).remove(0);
    let good = reply(&request, 0);
    let forge = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut forged = good.clone();
        change(&mut forged);
        forged
    };
    let end = good.len();
    for forged in [
        forge(&|m| m[0] ^= 1),
        forge(&|m| m[2] &= 0x7f),
        forge(&|m| m[13] = b'x'),
        forge(&|m| m[end - 3] = 1),
        forge(&|m| m[end - 1] = 3),
        forge(&|m| m[5] = 2),
        forge(&|m| m.truncate(end - 1)),
        forge(&Vec::clear),
    ] {
        assert_eq!(forwarder.handle_answer(request.id, &forged, at(1)), ForwardReply::Ignored);
    }
    assert!(forwarder.poll_reply().is_none());
    assert_eq!(forwarder.handle_answer(request.id, &good, at(1)), ForwardReply::Taken);
    assert_eq!(answered(&mut forwarder), [(1, 0)]);
}

#[test]
fn servers_take_turns_in_order_and_silence_ends_in_servfail() {
    let mut forwarder = forwarder(3);
    forwarder.handle_query(1, &query("example.com", AAAA), Transport::Udp, at(0));
    let mut sent = Vec::new();
    let mut now = at(0);
    loop {
        sent.extend(requests(&mut forwarder).into_iter().map(|r| ((now - at(0)).as_millis(), r.server)));
        let Some(due) = forwarder.poll_timeout() else { break };
        now = due;
        forwarder.handle_timeout(now);
    }
    let times = [0, 250, 500, 1500, 1750, 2000, 3000, 3250, 3500];
    let wanted: Vec<_> = times.iter().zip([1, 2, 3].iter().cycle()).map(|(t, s)| (*t, server(*s))).collect();
    assert_eq!(sent, wanted);
    assert_eq!((now, answered(&mut forwarder)), (at(5000), vec![(1, 2)]));
}

#[test]
fn bad_answers_and_errors_bring_the_next_server_at_once() {
    let mut forwarder = forwarder(3);
    forwarder.handle_query(1, &query("example.com", AAAA), Transport::Udp, at(0));
    let first = requests(&mut forwarder).remove(0);
    forwarder.handle_answer(first.id, &reply(&first, 2), at(10));
    let second = requests(&mut forwarder).remove(0);
    assert_eq!(second.server, server(2));
    forwarder.handle_failure(second.id, at(20));
    let third = requests(&mut forwarder).remove(0);
    assert_eq!(third.server, server(3));
    // REFUSED everywhere: the last bad answer, at once.
    forwarder.handle_answer(third.id, &reply(&third, 5), at(30));
    assert_eq!(answered(&mut forwarder), [(1, 5)]);

    // A good answer wins although it comes late and from an earlier server.
    forwarder.handle_query(1, &query("example.org", AAAA), Transport::Udp, at(100));
    let slow = requests(&mut forwarder).remove(0);
    forwarder.handle_timeout(at(350));
    let bad = requests(&mut forwarder).remove(0);
    forwarder.handle_answer(bad.id, &reply(&bad, 2), at(360));
    forwarder.handle_answer(slow.id, &reply(&slow, 3), at(370));
    assert_eq!(answered(&mut forwarder), [(1, 3)]);
    assert!(requests(&mut forwarder).is_empty(), "a request nobody waits for is not sent");
}

#[test]
fn no_server_means_servfail_at_once() {
    let mut forwarder = forwarder(0);
    forwarder.handle_query(1, &query("example.com", AAAA), Transport::Udp, at(0));
    assert_eq!(answered(&mut forwarder), [(1, 2)]);
}

#[test]
fn truncated_answers_are_fetched_over_tcp() {
    let mut forwarder = forwarder(2);
    forwarder.handle_query(1, &query("example.com", AAAA), Transport::Udp, at(0));
    let udp = requests(&mut forwarder).remove(0);
    let mut truncated = reply(&udp, 0);
    truncated[2] |= 2;
    forwarder.handle_answer(udp.id, &truncated, at(10));
    let tcp = requests(&mut forwarder).remove(0);
    assert_eq!((tcp.server, tcp.transport), (server(1), Transport::Tcp));
    // Fits the client: relayed whole. Too long: question alone, TC.
    let mut whole = reply(&tcp, 0);
    whole.resize(600, 9);
    forwarder.handle_answer(tcp.id, &whole, at(20));
    let (_, relayed) = forwarder.poll_reply().unwrap();
    assert_eq!((relayed.len(), relayed[2] & 2), (query("example.com", AAAA).len(), 2));
    assert!(decode(&relayed).metadata.truncation);

    let large = with_opt(query("example.com", AAAA), 4096);
    forwarder.handle_query(2, &large, Transport::Udp, at(30));
    let request = requests(&mut forwarder).remove(0);
    let mut fits = reply(&request, 0);
    fits.resize(1232, 9);
    forwarder.handle_answer(request.id, &fits, at(40));
    assert_eq!(forwarder.poll_reply().unwrap().1.len(), 1232);

    forwarder.handle_query(3, &large, Transport::Udp, at(50));
    let request = requests(&mut forwarder).remove(0);
    let mut too_long = reply(&request, 0);
    too_long.resize(1233, 9);
    forwarder.handle_answer(request.id, &too_long, at(60));
    let relayed = decode(&forwarder.poll_reply().unwrap().1);
    assert!(relayed.metadata.truncation && relayed.edns.is_some());

    // TCP fails: a client over UDP at least learns that there is more.
    forwarder.handle_query(4, &query("example.com", AAAA), Transport::Udp, at(70));
    let udp = requests(&mut forwarder).remove(0);
    let mut truncated = reply(&udp, 0);
    truncated[2] |= 2;
    forwarder.handle_answer(udp.id, &truncated, at(80));
    forwarder.handle_timeout(at(5070));
    assert!(decode(&forwarder.poll_reply().unwrap().1).metadata.truncation);
}

/// Equal queries share a lookup, each with its own id and spelling; that is also what ends a loop (D-27).
#[test]
fn duplicates_join_and_loops_expire() {
    let mut forwarder = forwarder(1);
    let first = query("example.com", AAAA);
    let mut second = query("EXAMPLE.com", AAAA);
    second[..2].copy_from_slice(&[1, 2]);
    forwarder.handle_query(1, &first, Transport::Udp, at(0));
    forwarder.handle_query(2, &second, Transport::Udp, at(1));
    forwarder.handle_query(2, &second, Transport::Udp, at(2));
    let sent = requests(&mut forwarder);
    assert_eq!(sent.len(), 1);
    forwarder.handle_answer(sent[0].id, &reply(&sent[0], 0), at(3));
    let replies: Vec<_> = std::iter::from_fn(|| forwarder.poll_reply()).collect();
    assert_eq!(replies.len(), 2);
    assert_eq!((&replies[1].1[..2], &replies[1].1[12..]), (&second[..2], &second[12..]));

    // What we send comes back to us as a query from another port, again and again.
    forwarder.handle_query(0, &first, Transport::Udp, at(100));
    let mut sent_in_all = 0;
    let mut now = at(100);
    for hop in 1.. {
        for request in requests(&mut forwarder) {
            sent_in_all += 1;
            forwarder.handle_query(hop, &request.message, Transport::Udp, now);
        }
        let Some(due) = forwarder.poll_timeout() else { break };
        now = due;
        forwarder.handle_timeout(now);
    }
    assert_eq!((sent_in_all, answered(&mut forwarder)[0]), (3, (0, 2)));
}

#[test]
fn queries_in_work_are_bounded() {
    let mut forwarder = forwarder(1);
    for client in 0..300u32 {
        let asked = query(&format!("h{}.example.com", client / 2), AAAA);
        assert_eq!(forwarder.handle_query(client, &asked, Transport::Udp, at(0)), client < 256);
    }
    assert!(!forwarder.has_room());
    forwarder.handle_timeout(at(5000));
    assert_eq!((answered(&mut forwarder).len(), forwarder.has_room()), (256, true));
}

/// D-27.
#[test]
fn servers_that_lead_back_are_dropped() {
    let parse = |server: &str| server.parse::<SocketAddr>().unwrap();
    let bad =
        ["[fd60:627a:a42b::53]:53", "[fd60:627a:a42b:1::1]:53", "127.0.0.53:53", "[::1]:53", "0.0.0.0:53", "[::]:53"];
    let good = ["127.0.0.1:53", "192.0.2.1:53", "192.0.2.1:53", "[2001:db8::1]:53", "192.0.2.9:53"];
    let listed: Vec<_> = bad.iter().chain(&good).map(|server| parse(server)).collect();
    let (servers, dropped) = BaseServers::select(&listed, OWN, |server| server != parse("127.0.0.1:53"));
    assert_eq!(dropped, bad.map(parse));
    assert_eq!(servers.as_slice(), [parse(good[0]), parse(good[1]), parse(good[3])]);
}

#[test]
fn only_foreign_names_are_forwarded() {
    let zone = Zone::build(&super::input());
    let verdict = |name: &str, rtype: u16| {
        let mut out = Vec::new();
        let verdict = answer(&zone, &query(name, rtype), Transport::Udp, true, &mut out);
        (verdict, out.get(3).map(|flags| flags & 15))
    };
    for (name, rtype) in [("example.com", AAAA), ("com", 2), ("printer", 15), ("1.2.0.192.in-addr.arpa", 12)] {
        assert_eq!(verdict(name, rtype), (Verdict::Forward, None), "{name}");
    }
    for (name, rtype) in
        [("printer", 1), ("printer", AAAA), ("nope.coder", 1), ("f.b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa", 12)]
    {
        assert_eq!(verdict(name, rtype), (Verdict::Answer, Some(3)), "{name}");
    }
}

/// Through packets: forwarded, answered to the port that asked, and switched off again.
#[test]
fn responder_forwards_when_told_to() {
    let (mut responder, _) = responder();
    let packet = |name: &str| {
        let builder = etherparse::PacketBuilder::ipv6(OWN.octets(), crate::DNS_ADDRESS.octets(), 64).udp(40000, 53);
        let mut packet = Vec::new();
        builder.write(&mut packet, &query(name, AAAA)).unwrap();
        packet
    };
    let mut out: Vec<Vec<u8>> = Vec::new();
    fn collect(out: &mut Vec<Vec<u8>>) -> impl FnMut(&[u8]) {
        |reply: &[u8]| out.push(reply.to_vec())
    }
    let rcode = |out: &mut Vec<Vec<u8>>| out.pop().map(|packet| packet[48 + 3] & 15);
    responder.handle_packet(&packet("example.com"), at(0), &mut collect(&mut out));
    assert_eq!(rcode(&mut out), Some(5));

    let (servers, _) = BaseServers::select(&[server(1)], OWN, |_| false);
    responder.apply_forwarding(Some(servers));
    responder.handle_packet(&packet("example.com"), at(0), &mut collect(&mut out));
    assert!(out.is_empty());
    let request = responder.poll_forward().unwrap();
    let taken = Responder::handle_forward_answer(
        &mut responder,
        request.id,
        &reply(&request, 0),
        at(1),
        &mut collect(&mut out),
    );
    assert_eq!((taken, out[0][42..44].to_vec()), (ForwardReply::Taken, 40000u16.to_be_bytes().to_vec()));
    assert_eq!(rcode(&mut out), Some(0));

    responder.handle_packet(&packet("example.org"), at(10), &mut collect(&mut out));
    assert_eq!(responder.poll_timeout(), Some(at(1510)));
    responder.handle_timeout(at(5010), &mut collect(&mut out));
    assert_eq!((rcode(&mut out), responder.stats().forwarded), (Some(2), 2));

    responder.apply_forwarding(None);
    responder.handle_packet(&packet("example.com"), at(6000), &mut collect(&mut out));
    assert_eq!(rcode(&mut out), Some(5));
}
