//! Packets inside the tunnel: read, answered, refused.

use std::net::Ipv6Addr;

use codervpn_wire::ip::{self, Ipv6Header, Ipv6Packet, Unreachable, Upper};

const US: Ipv6Addr = Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 1, 0, 0, 0, 1);
const AGENT: Ipv6Addr = Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 2, 0, 0, 0, 2);

fn packet(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 40 + payload.len()];
    Ipv6Header::new(US, AGENT, protocol).write(payload, &mut out).unwrap();
    out
}

fn written(write: impl FnOnce(&mut [u8]) -> Option<usize>) -> Vec<u8> {
    let mut out = vec![0xaa; 4096];
    let len = write(&mut out).unwrap();
    out.truncate(len);
    assert!(ip::has_right_checksum(&Ipv6Packet::parse(&out).unwrap()));
    out
}

#[test]
fn lengths_must_agree() {
    let good = packet(99, &[1, 2, 3]);
    let parsed = Ipv6Packet::parse(&good).unwrap();
    assert_eq!((parsed.source(), parsed.destination(), parsed.payload()), (US, AGENT, &[1, 2, 3][..]));
    for len in 0..good.len() {
        assert!(Ipv6Packet::parse(&good[..len]).is_none());
    }
    let longer = [&good[..], &[0; 5]].concat();
    assert_eq!(Ipv6Packet::parse(&longer).unwrap().bytes(), good, "padding of the sealed form is cut");
    let mut v4 = good;
    v4[0] = 0x45;
    assert!(Ipv6Packet::parse(&v4).is_none(), "T-29");
}

#[test]
fn extension_headers_are_walked() {
    let udp = written(|out| ip::write_udp((US, 1000), (AGENT, 53), b"query", out));
    // Hop-by-hop of 8 bytes, destination options of 16, a first and only fragment.
    let mut chain = vec![60, 0, 0, 0, 0, 0, 0, 0, 44, 1];
    chain.extend_from_slice(&[0; 14]);
    chain.extend_from_slice(&[17, 0, 0, 0, 0, 0, 0, 1]);
    chain.extend_from_slice(&udp[40..]);
    let bytes = packet(0, &chain);
    let Some(Upper::Udp(found)) = Ipv6Packet::parse(&bytes).unwrap().upper() else { panic!("no UDP") };
    assert_eq!((found.source(), found.destination(), found.payload()), (1000, 53, &b"query"[..]));
    // More fragments to come, or a later one: no ports.
    for offset in [1, 8] {
        let mut bytes = bytes.clone();
        bytes[40 + 24 + 3] = offset;
        assert_eq!(Ipv6Packet::parse(&bytes).unwrap().upper(), Some(Upper::Fragment { protocol: 17 }));
    }
    let endless = packet(0, &[0; 8 * 20]);
    assert_eq!(Ipv6Packet::parse(&endless).unwrap().upper(), None);
    let cut = packet(60, &[17, 9, 0, 0]);
    assert_eq!(Ipv6Packet::parse(&cut).unwrap().upper(), None);
}

/// dns-and-os 1.7, T-47; RFC 4443 2.4 (e).
#[test]
fn errors_quote_and_are_not_answered() {
    let udp = written(|out| ip::write_udp((US, 1000), (AGENT, 80), &[7; 2000], out));
    let original = Ipv6Packet::parse(&udp).unwrap();
    let error = written(|out| ip::write_unreachable(&original, Unreachable::Address, AGENT, out));
    assert_eq!(error.len(), ip::MTU);
    let parsed = Ipv6Packet::parse(&error).unwrap();
    assert_eq!((parsed.source(), parsed.destination()), (AGENT, US));
    let Some(Upper::Icmpv6(icmp)) = parsed.upper() else { panic!("no ICMPv6") };
    assert_eq!((icmp.kind(), icmp.code()), (1, 3));
    let quoted = icmp.quoted().unwrap();
    assert_eq!((quoted.source, quoted.destination, quoted.next_header), (US, AGENT, ip::UDP));
    assert_eq!(quoted.ports, Some((1000, 80)));
    let too_big = written(|out| ip::write_packet_too_big(&original, 1280, AGENT, out));
    let Some(Upper::Icmpv6(icmp)) = Ipv6Packet::parse(&too_big).unwrap().upper() else { panic!("no ICMPv6") };
    assert_eq!((icmp.kind(), &icmp.bytes()[4..8]), (2, &1280u32.to_be_bytes()[..]));

    let mut out = [0; 2000];
    assert_eq!(ip::write_unreachable(&parsed, Unreachable::Address, US, &mut out), None, "no error about an error");
    let multicast = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let to_many = written(|out| ip::write_udp((US, 1), (multicast, 2), b"", out));
    let to_many = Ipv6Packet::parse(&to_many).unwrap();
    assert_eq!(ip::write_unreachable(&to_many, Unreachable::Port, AGENT, &mut out), None);
    let short = ip::write_unreachable(&original, Unreachable::NoRoute, AGENT, &mut out[..100]);
    assert_eq!(short, None, "too short a buffer");
}

#[test]
fn echoes_are_answered() {
    let request = written(|out| ip::write_echo_request(US, AGENT, 7, 9, b"data", out));
    let reply = written(|out| ip::write_echo_reply(&Ipv6Packet::parse(&request).unwrap(), out));
    let parsed = Ipv6Packet::parse(&reply).unwrap();
    let Some(Upper::Icmpv6(icmp)) = parsed.upper() else { panic!("no ICMPv6") };
    assert_eq!((parsed.source(), icmp.kind(), icmp.echo_id(), icmp.echo_sequence()), (AGENT, 129, 7, 9));
    assert_eq!(icmp.body(), b"data");
    assert_eq!(ip::write_echo_reply(&parsed, &mut [0; 100]), None, "a reply is not answered");
    let mut altered = reply.clone();
    altered[50] ^= 1;
    assert!(!ip::has_right_checksum(&Ipv6Packet::parse(&altered).unwrap()));
}

/// RFC 9293 3.10.7.1.
#[test]
fn connections_are_refused_by_a_reset() {
    let segment = |sequence: u32, ack: u32, flags: u8, data: &[u8]| {
        let mut tcp = [1000u16.to_be_bytes(), 80u16.to_be_bytes()].concat();
        tcp.extend_from_slice(&sequence.to_be_bytes());
        tcp.extend_from_slice(&ack.to_be_bytes());
        tcp.extend_from_slice(&[5 << 4, flags, 0, 0, 0, 0, 0, 0]);
        tcp.extend_from_slice(data);
        packet(ip::TCP, &tcp)
    };
    let refused = |request: &[u8]| {
        let reset = written(|out| ip::write_tcp_reset(&Ipv6Packet::parse(request).unwrap(), out));
        let Some(Upper::Tcp(tcp)) = Ipv6Packet::parse(&reset).unwrap().upper() else { panic!("no TCP") };
        assert!(tcp.rst() && (tcp.source(), tcp.destination()) == (80, 1000));
        (tcp.sequence(), tcp.ack(), tcp.acknowledgment())
    };
    assert_eq!(refused(&segment(u32::MAX, 0, 2, b"")), (0, true, 0));
    assert_eq!(refused(&segment(5, 77, 0x10, b"abc")), (77, false, 0));
    assert_eq!(refused(&segment(5, 0, 1, b"abc")), (0, true, 9));
    let reset = segment(5, 0, 4, b"");
    assert_eq!(ip::write_tcp_reset(&Ipv6Packet::parse(&reset).unwrap(), &mut [0; 100]), None);
}

/// IPv6 forbids a UDP checksum of zero: it is sent as 0xffff.
#[test]
fn udp_checksums_are_never_zero() {
    let sums: Vec<_> = (0..=u16::MAX)
        .map(|data| {
            let mut out = [0; 50];
            ip::write_udp((US, 1), (AGENT, 2), &data.to_be_bytes(), &mut out).unwrap();
            u16::from_be_bytes([out[46], out[47]])
        })
        .collect();
    assert!(!sums.contains(&0) && sums.contains(&0xffff));
}
