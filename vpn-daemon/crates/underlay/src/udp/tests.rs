//! Over loopback, and in a network namespace of their own where a path has to be small.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Command;

use super::*;

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

fn loopback(sockets: &UdpSockets, family: Family) -> SocketAddr {
    match family {
        Family::V4 => (Ipv4Addr::LOCALHOST, sockets.ports().v4.unwrap()).into(),
        Family::V6 => (Ipv6Addr::LOCALHOST, sockets.ports().v6.unwrap()).into(),
    }
}

/// `count` datagrams of `size` bytes and one of `last`, each beginning with its number.
fn numbered(count: usize, size: usize, last: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..count).flat_map(|number| vec![number as u8; size]).collect();
    bytes.resize(bytes.len() + last, count as u8);
    bytes
}

/// What has arrived, with every source.
fn receive_all(sockets: &mut UdpSockets, buffer: &mut ReceiveBuffer) -> Vec<(SocketAddr, Vec<u8>)> {
    let mut all = Vec::new();
    for family in FAMILIES {
        while sockets.receive(family, buffer) > 0 {
            all.extend(buffer.datagrams().map(|(source, datagram)| (source, datagram.to_vec())));
        }
    }
    all
}

#[test]
fn both_families_share_a_port_and_keep_it_over_a_rebind() {
    let mut sockets = UdpSockets::bind(0).unwrap();
    let ports = sockets.ports();
    assert_eq!(ports.v4, ports.v6);
    assert!(sockets.fds().iter().all(Option::is_some));
    sockets.rebind().unwrap();
    assert_eq!(sockets.ports(), ports);
    // A port that is taken is passed over, in both families.
    let others = UdpSockets::bind(ports.v4.unwrap()).unwrap();
    assert_ne!(others.ports(), ports);
    assert_eq!(others.ports().v4, others.ports().v6);
    // A port that is taken in one family only, too.
    let half = std::net::UdpSocket::bind("[::]:0").unwrap();
    let half = half.local_addr().unwrap().port();
    let others = UdpSockets::bind(half).unwrap();
    assert_ne!(others.ports().v4, Some(half));
    assert_eq!(others.ports().v4, others.ports().v6);
}

/// Fast path 4.3 and 4.4: a group costs one system call at each end, in both families.
#[test]
fn a_group_is_one_send_and_one_receive() {
    for family in FAMILIES {
        let (mut a, mut b) = (UdpSockets::bind(0).unwrap(), UdpSockets::bind(0).unwrap());
        let mut buffer = ReceiveBuffer::new();
        let bytes = numbered(48, 1312, 700);
        a.send(loopback(&b, family), 1312, &bytes).unwrap();
        assert_eq!(b.receive(family, &mut buffer), 49);
        let mut got = Vec::new();
        for (number, (source, datagram)) in buffer.datagrams().enumerate() {
            assert_eq!(source, loopback(&a, family));
            assert_eq!(datagram.len(), if number < 48 { 1312 } else { 700 });
            got.extend_from_slice(datagram);
        }
        assert_eq!(got, bytes);
        let (sent, received) = (a.counters(), b.counters());
        assert_eq!((sent.sends, sent.sent_datagrams, sent.sent_bytes), (1, 49, bytes.len() as u64));
        assert_eq!((received.receives, received.received_datagrams), (1, 49));
        assert_eq!((sent.gso_disabled, received.truncated), (0, 0));
    }
}

/// Fast path 4.4: short datagrams come by 32 a call; after a train one slot is used, until a call finds nothing.
#[test]
fn the_receive_adapts_to_what_comes() {
    let (mut a, mut b) = (UdpSockets::bind(0).unwrap(), UdpSockets::bind(0).unwrap());
    let mut buffer = ReceiveBuffer::new();
    let to = loopback(&b, Family::V4);
    for number in 0..40 {
        a.send(to, 100, &[number; 100]).unwrap();
    }
    assert_eq!(b.receive(Family::V4, &mut buffer), 32);
    let numbers: Vec<u8> = buffer.datagrams().map(|(_, datagram)| datagram[0]).collect();
    assert_eq!(numbers, (0..32).collect::<Vec<_>>());
    assert_eq!(b.receive(Family::V4, &mut buffer), 8);
    for _ in 0..3 {
        a.send(to, 1312, &numbered(49, 1312, 0)).unwrap();
    }
    assert_eq!(b.receive(Family::V4, &mut buffer), 3 * 49, "32 slots take all three trains");
    for _ in 0..2 {
        a.send(to, 1312, &numbered(49, 1312, 0)).unwrap();
    }
    assert_eq!(b.receive(Family::V4, &mut buffer), 49);
    assert_eq!(b.receive(Family::V4, &mut buffer), 49);
    assert_eq!(b.receive(Family::V4, &mut buffer), 0);
    assert_eq!(buffer.datagrams().count(), 0);
    for _ in 0..5 {
        a.send(to, 100, &[0; 100]).unwrap();
    }
    assert_eq!(b.receive(Family::V4, &mut buffer), 5);
    assert_eq!((b.counters().receives, b.counters().empty_receives), (6, 1));
}

/// More than one send holds is several; what the kernel would cut is never offered to it.
#[test]
fn any_amount_is_sent() {
    let (mut a, mut b) = (UdpSockets::bind(0).unwrap(), UdpSockets::bind(0).unwrap());
    let mut buffer = ReceiveBuffer::new();
    let to = loopback(&b, Family::V4);
    let bytes = numbered(150, 1312, 1);
    a.send(to, 1312, &bytes).unwrap();
    a.send(to, 60_000, &bytes[..60_000]).unwrap();
    a.send(to, 1312, &[]).unwrap();
    assert_eq!(a.counters().sends, 5);
    let got = receive_all(&mut b, &mut buffer);
    assert_eq!(got.len(), 152);
    assert_eq!(got.iter().flat_map(|(_, datagram)| datagram.clone()).take(bytes.len()).collect::<Vec<_>>(), bytes);
    assert_eq!(got[151].1.len(), 60_000);
}

#[test]
fn without_gso_datagrams_leave_by_one_call_all_the_same() {
    for family in FAMILIES {
        let (mut a, mut b) = (UdpSockets::bind(0).unwrap(), UdpSockets::bind(0).unwrap());
        let mut buffer = ReceiveBuffer::new();
        for socket in [&mut a.v4, &mut a.v6] {
            socket.as_mut().unwrap().gso = false;
        }
        let bytes = numbered(40, 1312, 16);
        a.send(loopback(&b, family), 1312, &bytes).unwrap();
        assert_eq!((a.counters().sends, a.counters().sent_datagrams), (1, 41));
        let got = receive_all(&mut b, &mut buffer);
        assert_eq!(got.iter().flat_map(|(_, datagram)| datagram.clone()).collect::<Vec<_>>(), bytes);
    }
}

/// T-44: nothing of the underlay goes into the tunnel, in whatever clothes.
#[test]
fn t44_destinations_inside_the_tunnel_are_refused() {
    let mut sockets = UdpSockets::bind(0).unwrap();
    for inside in ["[fd60:627a:a42b::1]:9", "[fd60:627a:a42b:ffff::]:41641", "[fd7a:115c:a1e0::1]:9"] {
        assert_eq!(sockets.send(inside.parse().unwrap(), 9, b"datagram!"), Err(SendError::InsideTunnel));
    }
    assert_eq!((sockets.counters().dropped_inside_tunnel, sockets.counters().sends), (3, 0));
}

#[test]
fn ipv4_in_ipv6_clothes_leaves_by_ipv4() {
    let (mut a, mut b) = (UdpSockets::bind(0).unwrap(), UdpSockets::bind(0).unwrap());
    let to = (Ipv4Addr::LOCALHOST.to_ipv6_mapped(), b.ports().v4.unwrap()).into();
    a.send(to, 5, b"hello").unwrap();
    let got = receive_all(&mut b, &mut ReceiveBuffer::new());
    assert_eq!(got, [(loopback(&a, Family::V4), b"hello".to_vec())]);
}

#[test]
fn a_family_without_socket_is_unreachable() {
    let mut sockets = UdpSockets::bind(0).unwrap();
    sockets.v6 = None;
    assert_eq!(sockets.send("[::1]:9".parse().unwrap(), 1, b"x"), Err(SendError::Unreachable));
    assert_eq!(sockets.receive(Family::V6, &mut ReceiveBuffer::new()), 0);
    assert_eq!(sockets.counters().dropped_unreachable, 1);
}

/// An empty datagram carries nothing and ends nothing.
#[test]
fn empty_datagrams_do_not_stop_the_others() {
    let mut b = UdpSockets::bind(0).unwrap();
    let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    for datagram in [&b"one"[..], b"", b"two"] {
        sender.send_to(datagram, loopback(&b, Family::V4)).unwrap();
    }
    let got = receive_all(&mut b, &mut ReceiveBuffer::new());
    assert_eq!(got.iter().map(|(_, datagram)| &datagram[..]).collect::<Vec<_>>(), [&b"one"[..], b"two"]);
}

/// T-12: a small path is reported for its destination, and costs the others nothing.
#[test]
fn t12_a_path_that_is_too_small_is_reported() {
    let script = "ip link set lo up && ip route add 198.51.100.1/32 dev lo mtu 1300 \
        && ip -6 route add 2001:db8::1/128 dev lo mtu 1300 \
        && exec \"$0\" --exact udp::tests::inside_a_namespace_with_small_paths --ignored --nocapture";
    let output = Command::new("unshare")
        .args(["--map-root-user", "--net", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .output();
    match output {
        Ok(output) if output.status.success() => {
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
        }
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("unshare") => {
            println!("skipped: no network namespaces here: {}", String::from_utf8_lossy(&output.stderr));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "run by the test above, in a network namespace"]
fn inside_a_namespace_with_small_paths() {
    let (mut a, mut b) = (UdpSockets::bind(0).unwrap(), UdpSockets::bind(0).unwrap());
    let mut buffer = ReceiveBuffer::new();
    for (far, family) in [("198.51.100.1:9", Family::V4), ("[2001:db8::1]:9", Family::V6)] {
        let far = far.parse().unwrap();
        // The route's MTU is what an ICMP message would have told.
        assert_eq!(a.send(far, 1312, &numbered(1, 1312, 0)), Err(SendError::TooBig));
        assert_eq!(a.send(far, 1312, &numbered(10, 1312, 0)), Err(SendError::TooBig));
        assert_eq!(a.send(far, 1200, &numbered(10, 1200, 0)), Ok(()));
        for socket in [&mut a.v4, &mut a.v6] {
            socket.as_mut().unwrap().gso = false;
        }
        assert_eq!(a.send(far, 1312, &numbered(10, 1312, 0)), Err(SendError::TooBig));
        for socket in [&mut a.v4, &mut a.v6] {
            socket.as_mut().unwrap().gso = true;
        }
        let before = a.counters().sends;
        a.send(loopback(&b, family), 1312, &numbered(10, 1312, 0)).unwrap();
        assert_eq!(a.counters().sends - before, 1, "one small path must not cost the others their speed");
        assert_eq!(receive_all(&mut b, &mut buffer).len(), 10);
    }
    assert_eq!((a.counters().dropped_too_big, a.counters().gso_disabled), (42, 0));
    assert_eq!(a.send("203.0.113.1:9".parse().unwrap(), 1, b"x"), Err(SendError::Unreachable), "no route");
}
