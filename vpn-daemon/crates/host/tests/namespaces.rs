//! Device, address, route, rule and resolver file for real, each test in namespaces of its own.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test program: its helpers are tests, too")]

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv6Addr, UdpSocket};
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use codervpn_host::dns::{self, Backend as _, ConfiguredMode, DnsConfig, Mode, State, direct};
use codervpn_host::links::{self, Change, Monitor};
use codervpn_host::routes::{Error, Prefix, RouteConfig, Routes, Watch};
use codervpn_host::tun::{self, Frame, Tun};
use codervpn_host::{Paths, cleanup};
use common::{block_on, in_namespaces, ip, run};

mod common;

const OWN: &str = "fd60:627a:a42b:1:2:3:4:5";
const PEER: &str = "fd60:627a:a42b:9:8:7:6:5";

fn prefix() -> Prefix {
    Prefix::new("fd60:627a:a42b::".parse().unwrap(), 48)
}

fn route_config() -> RouteConfig {
    RouteConfig::new(OWN.parse().unwrap(), prefix())
}

fn dns_config(tun: &Tun) -> DnsConfig {
    DnsConfig {
        interface_index: tun.index(),
        server: "fd60:627a:a42b::53".parse().unwrap(),
        suffixes: vec!["coder".to_owned()],
        reverse_zone: "b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa".to_owned(),
        search: false,
        tunnel_prefix: prefix(),
    }
}

fn temporary() -> (tempfile::TempDir, Paths) {
    let dir = tempfile::tempdir().unwrap();
    let mut paths = Paths::new(dir.path().join("state"), dir.path().join("run"));
    std::fs::create_dir(dir.path().join("etc")).unwrap();
    paths.resolv_conf = dir.path().join("etc/resolv.conf");
    (dir, paths)
}

fn our_rules() -> Vec<String> {
    ip("-d -6 rule").lines().filter(|line| line.contains("12861")).map(ToOwned::to_owned).collect()
}

/// Waits for a packet that is neither multicast nor ours to ignore.
fn receive(tun: &mut Tun) -> Vec<u8> {
    let mut frame = Frame::default();
    loop {
        match tun.recv(&mut frame) {
            Ok(()) => return frame.next().unwrap().to_vec(),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let mut fds = [rustix::event::PollFd::from_borrowed_fd(tun.as_fd(), rustix::event::PollFlags::IN)];
                let limit = rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 };
                let ready = rustix::event::poll(&mut fds, Some(&limit)).unwrap();
                assert_eq!(ready, 1, "no packet within five seconds");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn send(tun: &mut Tun, packet: &[u8]) {
    tun.room(packet.len()).unwrap().copy_from_slice(packet);
    tun.commit(packet.len());
    let written = tun.flush();
    assert_eq!((written.packets, written.dropped), (1, 0), "{written:?}");
}

/// Sends every packet back where it came from, until the device goes or `stop` is set. Returns packets and writes.
fn mirror(tun: &mut Tun, stop: &std::sync::atomic::AtomicBool) -> (u64, u64) {
    let mut frame = Frame::default();
    let (mut packets, mut writes) = (0, 0);
    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
        match tun.recv(&mut frame) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let mut fds = [rustix::event::PollFd::from_borrowed_fd(tun.as_fd(), rustix::event::PollFlags::IN)];
                let limit = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
                rustix::event::poll(&mut fds, Some(&limit)).unwrap();
                continue;
            }
            Err(error) => panic!("{error}"),
        }
        while let Some(packet) = frame.next() {
            let room = tun.room(packet.len()).unwrap();
            room.copy_from_slice(packet);
            room[8..24].copy_from_slice(&packet[24..40]);
            room[24..40].copy_from_slice(&packet[8..24]);
            room[40..42].copy_from_slice(&packet[42..44]);
            room[42..44].copy_from_slice(&packet[40..42]);
            tun.commit(packet.len());
        }
        let written = tun.flush();
        assert_eq!(written.dropped, 0, "{written:?}");
        packets += written.packets;
        writes += written.writes;
    }
    assert_eq!(frame.bad(), 0);
    (packets, writes)
}

/// A connection whose packets come back mirrored is connected to itself (RFC 9293, simultaneous open): what is written is
/// read again, after the kernel cut it nowhere, we cut it, joined it, and the kernel took it apart.
fn echo_through(tun: &mut Tun, bytes: usize) -> (u64, u64) {
    let stop = std::sync::atomic::AtomicBool::new(false);
    let sent: Vec<u8> = (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    std::thread::scope(|scope| {
        let counts = scope.spawn(|| mirror(tun, &stop));
        let peer: Ipv6Addr = PEER.parse().unwrap();
        let stream = std::net::TcpStream::connect_timeout(&(peer, 7).into(), Duration::from_secs(5)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut writer = stream.try_clone().unwrap();
        let mut got = vec![0; bytes];
        scope.spawn({
            let sent = &sent;
            move || std::io::Write::write_all(&mut writer, sent).unwrap()
        });
        std::io::Read::read_exact(&mut &stream, &mut got).unwrap();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(sent == got, "bytes changed on the way");
        counts.join().unwrap()
    })
}

#[test]
fn bulk_data_passes_the_device_in_super_packets_and_also_without_offload() {
    in_namespaces("bulk_data_passes_the_device_in_super_packets_and_also_without_offload", || {
        let (_dir, paths) = temporary();
        let mut tun = Tun::open("coder0", tun::MTU).unwrap();
        // Rule and route stay when their handle goes.
        block_on(async { drop(Routes::apply(&tun, &route_config(), &paths).await.unwrap()) });
        const BYTES: usize = 20_000_000;
        let (packets, writes) = echo_through(&mut tun, BYTES);
        assert!(packets as usize >= BYTES / 1208, "{packets}");
        assert!(writes * 8 < packets, "{packets} packets in {writes} writes");
        assert!(ip("-d link show coder0").contains("gso_max_size 59264 gso_max_segs 49"));
        // What a kernel without segmentation offload leaves: one packet a read, joined or not as it takes them.
        tun.without_offload();
        let (packets, _) = echo_through(&mut tun, BYTES / 10);
        assert!(packets as usize >= BYTES / 10 / 1208);
    });
}

#[test]
fn packets_for_the_prefix_reach_the_device_and_answers_come_back() {
    in_namespaces("packets_for_the_prefix_reach_the_device_and_answers_come_back", || {
        let (_dir, paths) = temporary();
        // N-01: an exit node's default route in another table.
        ip("link add exit0 type veth peer name exit0p");
        ip("link set exit0 up");
        ip("-6 route add default dev exit0 table 52");
        ip("-6 rule add priority 5270 lookup 52");

        let mut tun = Tun::open("coder0", tun::MTU).unwrap();
        assert_eq!(tun.name(), "coder0");
        block_on(async {
            let routes = Routes::apply(&tun, &route_config(), &paths).await.unwrap();
            assert!(routes.has_rule());

            let link = ip("-d link show coder0");
            assert!(link.contains("mtu 1280") && link.contains("UP"), "{link}");
            assert!(link.contains("qlen 4000"), "{link}");
            assert!(link.contains("persist off"), "{link}");
            assert!(!link.contains("multi_queue"), "{link}");
            let addresses = ip("-6 addr show dev coder0");
            assert!(addresses.contains(&format!("{OWN}/128")), "{addresses}");
            assert!(!addresses.contains("fe80"), "{addresses}");
            assert!(!addresses.contains("tentative"), "{addresses}");
            // N-02: the mark that systemd-networkd respects.
            let rules = our_rules();
            assert_eq!(rules.len(), 1, "{rules:?}");
            assert!(rules[0].starts_with("5100:") && rules[0].contains("proto kernel"), "{rules:?}");
            let way = ip(&format!("-6 route get {PEER}"));
            assert!(way.contains("dev coder0") && way.contains(OWN), "{way}");
            assert!(!ip("-6 route show table main").contains("fd60"));

            let socket = UdpSocket::bind("[::]:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let peer: Ipv6Addr = PEER.parse().unwrap();
            socket.send_to(b"there", (peer, 7)).unwrap();
            // N-08: no solicitation or report comes first.
            let mut packet = receive(&mut tun);
            assert_eq!(packet[0] >> 4, 6);
            assert_eq!(packet[6], 17);
            assert_eq!(packet[24..40], peer.octets());
            assert_eq!(&packet[48..], b"there");

            // Back: swapping addresses and ports keeps the checksum right.
            let (source, destination) = (packet[8..24].to_vec(), packet[24..40].to_vec());
            packet[8..24].copy_from_slice(&destination);
            packet[24..40].copy_from_slice(&source);
            packet[40..44].rotate_left(2);
            send(&mut tun, &packet);
            let mut answer = [0; 16];
            let (length, from) = socket.recv_from(&mut answer).unwrap();
            assert_eq!(&answer[..length], b"there");
            assert_eq!(from, (peer, 7).into());

            routes.undo().await.unwrap();
        });
        assert!(our_rules().is_empty());
        assert!(!paths.state_dir.join("routes.json").exists());
        drop(tun);
        assert!(!ip("link").contains("coder0"));
    });
}

/// The next change that is not minor: those depend on when the kernel tells of what.
async fn significant(monitor: &mut Monitor) -> Change {
    let next = async {
        loop {
            match monitor.changed().await {
                Change::Minor => {}
                change => return change,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(8), next).await.expect("a change")
}

#[test]
fn another_network_is_told_once_and_none_at_all_is_told_too() {
    in_namespaces("another_network_is_told_once_and_none_at_all_is_told_too", || {
        ip("link add up0 type veth peer name up0p");
        ip("link set up0 up");
        ip("link set up0p up");
        ip("addr add 10.9.0.2/24 dev up0");
        ip("route add default via 10.9.0.1");
        assert_eq!(links::gateway(), Some(("10.9.0.1".parse().unwrap(), "10.9.0.2".parse().unwrap())));
        block_on(async {
            let mut monitor = Monitor::new().await.unwrap();
            ip("addr add 10.8.0.2/24 dev up0");
            ip("route replace default via 10.8.0.1");
            assert_eq!(significant(&mut monitor).await, Change::Major);
            ip("link set up0 down");
            assert_eq!(significant(&mut monitor).await, Change::Down);
            ip("link set up0 up");
            assert_eq!(significant(&mut monitor).await, Change::Up);
        });
    });
}

/// Our own device is up all the time, and is no way out.
#[test]
fn our_own_device_is_no_network() {
    in_namespaces("our_own_device_is_no_network", || {
        ip("link add up0 type veth peer name up0p");
        ip("link set up0 up");
        ip("link set up0p up");
        ip("addr add 10.9.0.2/24 dev up0");
        ip("route add default via 10.9.0.1");
        let (_dir, paths) = temporary();
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        block_on(async {
            let routes = Routes::apply(&tun, &route_config(), &paths).await.unwrap();
            let mut monitor = Monitor::new().await.unwrap();
            ip("link set up0 down");
            assert_eq!(significant(&mut monitor).await, Change::Down);
            ip("link set up0 up");
            assert_eq!(significant(&mut monitor).await, Change::Up);
            routes.undo().await.unwrap();
        });
    });
}

/// The daemon waits for many things at once and drops the others whenever one happens.
#[test]
fn a_change_is_told_in_time_to_one_who_does_not_wait_through() {
    in_namespaces("a_change_is_told_in_time_to_one_who_does_not_wait_through", || {
        ip("link add up0 type veth peer name up0p");
        ip("link set up0 up");
        ip("link set up0p up");
        ip("addr add 10.9.0.2/24 dev up0");
        ip("route add default via 10.9.0.1");
        block_on(async {
            let mut monitor = Monitor::new().await.unwrap();
            let began = std::time::Instant::now();
            ip("addr add 10.8.0.2/24 dev up0");
            ip("route replace default via 10.8.0.1");
            loop {
                match tokio::time::timeout(Duration::from_millis(100), monitor.changed()).await {
                    Ok(Change::Major) => break,
                    _ => assert!(began.elapsed() < Duration::from_secs(10)),
                }
            }
            let took = began.elapsed();
            assert!(took < Duration::from_millis(1500), "told after {took:?}");
        });
    });
}

// N-03: the switch of our link only.
#[test]
fn ipv6_is_enabled_for_our_link_alone() {
    in_namespaces("ipv6_is_enabled_for_our_link_alone", || {
        let (_dir, paths) = temporary();
        for scope in ["all", "default"] {
            std::fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1").unwrap();
        }
        ip("link add other0 type veth peer name other0p");
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        block_on(async {
            let routes = Routes::apply(&tun, &route_config(), &paths).await.unwrap();
            assert!(ip("-6 addr show dev coder0").contains(OWN));
            assert!(ip(&format!("-6 route get {PEER}")).contains("dev coder0"));
            for other in ["all", "default", "other0"] {
                let value = std::fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{other}/disable_ipv6"));
                assert_eq!(value.unwrap().trim(), "1", "{other}");
            }
            routes.undo().await.unwrap();
        });
    });
}

#[test]
fn a_switch_that_cannot_be_written_is_named() {
    in_namespaces("a_switch_that_cannot_be_written_is_named", || {
        let (_dir, paths) = temporary();
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        run("mount", &["--bind", "/proc/sys", "/proc/sys"]);
        run("mount", &["-o", "remount,bind,ro", "/proc/sys"]);
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        let error = block_on(Routes::apply(&tun, &route_config(), &paths)).unwrap_err();
        assert!(matches!(error, Error::Ipv6Disabled { .. }), "{error}");
        assert!(error.to_string().contains("--sysctl net.ipv6.conf.all.disable_ipv6=0"));
        assert!(our_rules().is_empty());
    });
}

// N-06, in all three ways a name can be taken.
#[test]
fn a_name_that_is_taken_is_refused_and_nothing_is_left() {
    in_namespaces("a_name_that_is_taken_is_refused_and_nothing_is_left", || {
        let first = Tun::open("coder0", tun::MTU).unwrap();
        let taken = |result| matches!(result, Err(tun::Error::NameTaken { .. }));
        assert!(taken(Tun::open("coder0", tun::MTU)));
        drop(first);
        ip("link add coder0 type veth peer name coder0p");
        assert!(taken(Tun::open("coder0", tun::MTU)));
        ip("link del coder0");
        // Persistent and free: attaching would work, and outlive us.
        ip("tuntap add dev coder0 mode tun");
        assert!(taken(Tun::open("coder0", tun::MTU)));
        ip("link del coder0");
        drop(Tun::open("coder0", tun::MTU).unwrap());
        assert!(our_rules().is_empty());
    });
}

// N-07: crashes leave the rule only, and the next start or cleanup removes it.
#[test]
fn crashes_never_pile_up_rules() {
    in_namespaces("crashes_never_pile_up_rules", || {
        let (_dir, paths) = temporary();
        for _ in 0..10 {
            let tun = Tun::open("coder0", tun::MTU).unwrap();
            block_on(async {
                // Not undone, as after a kill.
                Routes::apply(&tun, &route_config(), &paths).await.unwrap();
            });
        }
        assert_eq!(our_rules().len(), 1);
        ip("-6 rule add to 2001:db8::/32 lookup 12861 priority 77");
        let report = cleanup::cleanup(&paths, None, false).unwrap();
        assert!(report.is_ok() && report.done.len() == 1, "{report:?}");
        // A rule of somebody else is not ours because it names our table.
        assert_eq!(our_rules().len(), 1);
        assert!(our_rules()[0].starts_with("77:"));
        let report = cleanup::cleanup(&paths, None, false).unwrap();
        assert!(report.is_ok() && report.done.is_empty(), "{report:?}");

        // Unusual numbers are found by the record.
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        let config = RouteConfig { table: 777, rule_priority: 4000, ..route_config() };
        block_on(async {
            Routes::apply(&tun, &config, &paths).await.unwrap();
        });
        assert!(ip("-6 rule").contains("lookup 777"));
        drop(tun);
        cleanup::cleanup(&paths, None, false).unwrap();
        assert!(!ip("-6 rule").contains("lookup 777"));
    });
}

// N-02, N-05: what others break is made whole again.
#[test]
fn damage_is_heard_and_repaired() {
    in_namespaces("damage_is_heard_and_repaired", || {
        let (_dir, paths) = temporary();
        let mut tun = Tun::open("coder0", tun::MTU).unwrap();
        block_on(async {
            let mut routes = Routes::apply(&tun, &route_config(), &paths).await.unwrap();
            let watch = Watch::new().unwrap();
            for damage in [
                "link set coder0 mtu 1200",
                "-6 rule del priority 5100",
                "-6 route flush table 12861",
                "link set coder0 down",
                "-6 addr flush dev coder0",
            ] {
                assert!(!routes.check().await.unwrap(), "before {damage}");
                watch.clear();
                ip(damage);
                tokio::time::timeout(Duration::from_secs(5), watch.changed()).await.expect(damage);
                assert!(routes.check().await.unwrap(), "{damage}");
                let way = ip(&format!("-6 route get {PEER}"));
                assert!(way.contains("dev coder0") && way.contains(OWN), "{damage}: {way}");
                assert!(ip("link show coder0").contains("mtu 1280"));
                assert_eq!(our_rules().len(), 1, "{damage}");
            }
            // 6.5: the device itself cannot be repaired here.
            ip("link del coder0");
            let error = routes.check().await.unwrap_err();
            assert!(matches!(error, Error::InterfaceGone), "{error}");
            let gone = tun.recv(&mut Frame::default()).unwrap_err();
            assert_ne!(gone.kind(), std::io::ErrorKind::WouldBlock, "{gone}");
            routes.undo().await.unwrap();
        });
        assert!(our_rules().is_empty());
    });
}

// 6.4: another product in our network is named.
#[test]
fn a_foreign_route_inside_the_prefix_is_named() {
    in_namespaces("a_foreign_route_inside_the_prefix_is_named", || {
        let (_dir, paths) = temporary();
        ip("link add rival0 type veth peer name rival0p");
        ip("link set rival0 up");
        ip("-6 route add fd60:627a:a42b:7::/64 dev rival0 table 99");
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        let error = block_on(Routes::apply(&tun, &route_config(), &paths)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::RouteTaken { .. }), "{text}");
        assert!(text.contains("rival0") && text.contains("fd60:627a:a42b:7::/64"), "{text}");
        assert!(our_rules().is_empty());
    });
}

// D-01, N-07 for a real process: kill -9 with everything installed, then cleanup, twice.
#[test]
fn kill_then_cleanup_restores_everything() {
    const FOLDER: &str = "CODERVPN_HOST_TEST_FOLDER";
    in_namespaces("kill_then_cleanup_restores_everything", || {
        if let Some(folder) = std::env::var_os(FOLDER) {
            let folder = std::path::PathBuf::from(folder);
            let mut paths = Paths::new(folder.join("state"), folder.join("run"));
            paths.resolv_conf = folder.join("etc/resolv.conf");
            let _lock = codervpn_host::lock::InstanceLock::acquire(&paths).unwrap();
            let tun = Tun::open("coder0", tun::MTU).unwrap();
            block_on(async {
                let _routes = Routes::apply(&tun, &route_config(), &paths).await.unwrap();
                let mode = ConfiguredMode::Fixed(Mode::Direct);
                let installed = dns::install(mode, &paths, &dns_config(&tun)).await.unwrap();
                assert_eq!(installed.backend.state(), State::Applied);
                println!("\ninstalled");
                std::future::pending::<()>().await;
            });
            return;
        }
        let (dir, paths) = temporary();
        let before = b"nameserver 192.0.2.1\n";
        std::fs::write(&paths.resolv_conf, before).unwrap();
        let mut daemon = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kill_then_cleanup_restores_everything", "--nocapture"])
            .env(FOLDER, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "installed"));
        assert_eq!(our_rules().len(), 1);
        assert_ne!(std::fs::read(&paths.resolv_conf).unwrap(), before);
        // 3.4: refused while it lives.
        assert!(cleanup::cleanup(&paths, None, false).is_err());

        daemon.kill().unwrap();
        daemon.wait().unwrap();
        assert!(!ip("link").contains("coder0"));
        assert_eq!(our_rules().len(), 1);

        let socket = dir.path().join("vpn.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let report = cleanup::cleanup(&paths, Some(&socket), false).unwrap();
        assert!(report.is_ok(), "{report:?}");
        assert_eq!(report.done.len(), 3, "{report:?}");
        assert!(our_rules().is_empty());
        assert_eq!(std::fs::read(&paths.resolv_conf).unwrap(), before);
        assert!(!socket.exists());
        let report = cleanup::cleanup(&paths, Some(&socket), false).unwrap();
        assert!(report.is_ok() && report.done.is_empty(), "{report:?}");
    });
}

// D-05: a container's resolv.conf is a mount point.
#[test]
fn a_bind_mounted_file_is_written_in_place() {
    in_namespaces("a_bind_mounted_file_is_written_in_place", || {
        let (dir, paths) = temporary();
        let outside = dir.path().join("outside");
        let before = b"search corp.example\nnameserver 192.0.2.1\n";
        std::fs::write(&outside, before).unwrap();
        std::fs::write(&paths.resolv_conf, "").unwrap();
        let (from, to) = (outside.to_str().unwrap(), paths.resolv_conf.to_str().unwrap());
        run("mount", &["--bind", from, to]);
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        let config = dns_config(&tun);
        block_on(async {
            let mut backend = direct::Direct::new(&paths);
            backend.apply(&config).await.unwrap();
            // Seen on both sides: the file was written, not replaced.
            for path in [&outside, &paths.resolv_conf] {
                let text = std::fs::read_to_string(path).unwrap();
                assert!(text.contains("nameserver fd60:627a:a42b::53\nsearch corp.example\n"), "{text}");
            }
            assert_eq!(backend.check().await.unwrap(), State::Applied);
            assert_eq!(backend.upstreams(), ["192.0.2.1:53".parse().unwrap()]);
            backend.revert().await.unwrap();
            assert_eq!(std::fs::read(&outside).unwrap(), before);
            // And after a crash.
            backend.apply(&config).await.unwrap();
        });
        let report = cleanup::cleanup(&paths, None, false).unwrap();
        assert!(report.is_ok() && report.done.len() == 1, "{report:?}");
        assert_eq!(std::fs::read(&outside).unwrap(), before);
        let left: Vec<_> = std::fs::read_dir(dir.path().join("etc")).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    });
}

// D-05: nothing can be written: mode none, a text, nothing left behind.
#[test]
fn a_file_that_cannot_be_written_means_none_with_a_text() {
    in_namespaces("a_file_that_cannot_be_written_means_none_with_a_text", || {
        // No bus of this machine may answer.
        run("mount", &["-t", "tmpfs", "none", "/run"]);
        let (dir, mut paths) = temporary();
        paths.nsswitch_conf = dir.path().join("nsswitch.conf");
        std::fs::write(&paths.resolv_conf, "nameserver 192.0.2.1\n").unwrap();
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        let config = dns_config(&tun);

        let etc = dir.path().join("etc");
        let etc = etc.to_str().unwrap();
        run("mount", &["--bind", etc, etc]);
        run("mount", &["-o", "remount,bind,ro", etc]);
        let installed = block_on(dns::install(ConfiguredMode::Auto, &paths, &config)).unwrap();
        assert_eq!(installed.choice.mode, Mode::None, "{installed:?}");
        let text = installed.choice.warning.unwrap();
        assert!(text.contains("Read-only file system"), "{text}");
        let error = block_on(dns::install(ConfiguredMode::Fixed(Mode::Direct), &paths, &config)).unwrap_err();
        assert!(error.to_string().contains("Read-only file system"), "{error}");
        run("umount", &[etc]);

        // Immutable, where this file system knows that.
        let file = paths.resolv_conf.to_str().unwrap();
        let immutable = Command::new("chattr").args(["+i", file]).output();
        if immutable.is_ok_and(|output| output.status.success()) {
            let installed = block_on(dns::install(ConfiguredMode::Auto, &paths, &config)).unwrap();
            let fixed = ConfiguredMode::Fixed(Mode::Direct);
            let error = block_on(dns::install(fixed, &paths, &config));
            run("chattr", &["-i", file]);
            assert_eq!(installed.choice.mode, Mode::None, "{installed:?}");
            assert!(error.is_err());
            let left: Vec<_> = std::fs::read_dir(etc).unwrap().collect();
            assert_eq!(left.len(), 1, "{left:?}");
        }
        assert_eq!(std::fs::read(&paths.resolv_conf).unwrap(), b"nameserver 192.0.2.1\n");
        assert_eq!(direct::restore(&paths).unwrap(), None);

        // The same machine, writable.
        let installed = block_on(dns::install(ConfiguredMode::Auto, &paths, &config)).unwrap();
        assert_eq!(installed.choice.mode, Mode::Direct, "{installed:?}");
        cleanup::cleanup(&paths, None, false).unwrap();
    });
}
