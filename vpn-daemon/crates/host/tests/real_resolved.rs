//! The real systemd-resolved, unpacked and never installed, in namespaces with a bus of its own:
//! `auto` finds it, names of ours arrive at our server through its stub, and no others.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test program: its helpers are tests, too")]

use std::net::{Ipv6Addr, UdpSocket};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::Duration;

use codervpn_host::Paths;
use codervpn_host::dns::{self, ConfiguredMode, DnsConfig, Mode, State};
use codervpn_host::routes::{Prefix, RouteConfig, Routes};
use codervpn_host::tun::{self, Frame, Tun};
use common::bus::PrivateBus;
use common::{block_on, in_namespaces, run, skip};
use futures_util::StreamExt as _;

mod common;

const AGENT: &str = "fd60:627a:a42b:9:8:7:6:5";
const SERVER: &str = "fd60:627a:a42b::53";
const ROOT: &str = "CODERVPN_ROOTFS";

/// Where the unpacked packages are; fetches them when they are not.
fn rootfs() -> Option<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = std::env::var_os(ROOT).map_or_else(|| manifest.join("../../../target/rootfs"), PathBuf::from);
    if !root.join("lib/systemd/systemd-resolved").exists() {
        let script = manifest.join("tests/fetch-resolved.sh");
        match Command::new(&script).arg(&root).output() {
            Ok(output) if output.status.success() => {}
            other => {
                skip(&format!("{} {} failed: {other:?}", script.display(), root.display()));
                return None;
            }
        }
    }
    Some(root)
}

struct Service(Child);

impl Service {
    /// Started, and on the bus.
    async fn start(root: &Path, bus: &PrivateBus) -> Self {
        let watcher = zbus::connection::Builder::address(bus.address.as_str()).build().await.unwrap();
        let mut signals = zbus::MessageStream::from(&watcher);
        watcher
            .call_method(
                Some("org.freedesktop.DBus"),
                "/org/freedesktop/DBus",
                Some("org.freedesktop.DBus"),
                "AddMatch",
                &"type='signal',member='NameOwnerChanged',arg0='org.freedesktop.resolve1'",
            )
            .await
            .unwrap();
        let libraries = ["usr/lib", "lib"]
            .map(|lib| root.join(lib).join("x86_64-linux-gnu/systemd"))
            .map(|path| path.display().to_string())
            .join(":");
        let child =
            Command::new(root.join("lib/systemd/systemd-resolved")).env("LD_LIBRARY_PATH", libraries).spawn().unwrap();
        let service = Service(child);
        let on_the_bus = async {
            while let Some(Ok(message)) = signals.next().await {
                let header = message.header();
                if header.member().is_some_and(|member| *member == "NameOwnerChanged") {
                    let (_, _, owner): (String, String, String) = message.body().deserialize().unwrap();
                    if !owner.is_empty() {
                        return;
                    }
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(10), on_the_bus)
            .await
            .expect("systemd-resolved comes up within ten seconds");
        service
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn auto_finds_resolved_and_our_names_come_to_us_alone() {
    let Some(root) = rootfs() else {
        return;
    };
    in_namespaces("auto_finds_resolved_and_our_names_come_to_us_alone", || {
        let (folder, paths) = machine();
        let Some(bus) = PrivateBus::start(Path::new("/run/dbus")) else {
            return skip("no dbus-daemon here");
        };
        let tun = Tun::open("coder0", tun::MTU).unwrap();
        let prefix = Prefix::new("fd60:627a:a42b::".parse().unwrap(), 48);
        let own: Ipv6Addr = "fd60:627a:a42b:1:2:3:4:5".parse().unwrap();
        let config = DnsConfig {
            interface_index: tun.index(),
            server: SERVER.parse().unwrap(),
            suffixes: vec!["coder".to_owned()],
            reverse_zone: "b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa".to_owned(),
            search: false,
            tunnel_prefix: prefix,
        };
        block_on(async {
            let service = Service::start(&root, &bus).await;
            let routes = Routes::apply(&tun, &RouteConfig::new(own, prefix), &paths).await.unwrap();
            let names = serve(tun);

            let mut installed = dns::install(ConfiguredMode::Auto, &paths, &config).await.unwrap();
            assert_eq!(installed.choice.mode, Mode::Resolved, "{installed:?}");
            let backend = &mut installed.backend;
            assert_eq!(backend.check().await.unwrap(), State::Applied);

            let answer = ask_stub("main.dev.me.coder").expect("an answer through the stub");
            let agent: Ipv6Addr = AGENT.parse().unwrap();
            assert!(answer.ends_with(&agent.octets()), "{answer:02x?}");
            // D-13: other names, look-alikes included, are nobody's business here.
            for other in ["www.example.com", "host.encoder"] {
                let code = ask_stub(other).map(|answer| answer[3] & 0xf);
                assert_ne!(code, Some(0), "{other}");
            }

            // D-09: resolved restarts and remembers nothing.
            drop(service);
            let _ = std::fs::remove_dir_all("/run/systemd/resolve/netif");
            let service = Service::start(&root, &bus).await;
            assert_eq!(backend.check().await.unwrap(), State::Repaired);
            assert_eq!(backend.check().await.unwrap(), State::Applied);
            assert!(ask_stub("other.dev.me.coder").is_some());

            backend.revert().await.unwrap();
            let code = ask_stub("third.dev.me.coder").map(|answer| answer[3] & 0xf);
            assert_ne!(code, Some(0));
            routes.undo().await.unwrap();
            drop(service);

            let seen: Vec<String> = names.try_iter().collect();
            assert!(seen.iter().any(|name| name == "main.dev.me.coder"), "{seen:?}");
            assert!(seen.iter().all(|name| name.ends_with(".coder")), "{seen:?}");
            assert!(!seen.iter().any(|name| name.starts_with("third")), "{seen:?}");
        });
        drop(folder);
    });
}

/// A machine with resolved in stub mode.
fn machine() -> (tempfile::TempDir, Paths) {
    run("mount", &["-t", "tmpfs", "none", "/run"]);
    for folder in ["/run/dbus", "/run/systemd/resolve"] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let (from, to) = (folder.path().join(name), format!("/etc/{name}"));
        std::fs::write(&from, text).unwrap();
        run("mount", &["--bind", from.to_str().unwrap(), &to]);
    };
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let group = std::fs::read_to_string("/etc/group").unwrap();
    put("passwd", &format!("{passwd}\nsystemd-resolve:x:991:991::/:/usr/sbin/nologin\n"));
    put("group", &format!("{group}\nsystemd-resolve:x:991:\n"));
    put("resolv.conf", "nameserver 127.0.0.53\noptions edns0 trust-ad\n");
    run("chown", &["991:991", "/run/systemd/resolve"]);
    let paths = Paths::new(folder.path().join("state"), folder.path().join("run"));
    (folder, paths)
}

/// Asks resolved's stub for AAAA, as glibc does; `None` when nothing comes within its patience.
fn ask_stub(name: &str) -> Option<Vec<u8>> {
    let mut query = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).unwrap());
        query.extend_from_slice(label.as_bytes());
    }
    query.extend_from_slice(&[0, 0, 28, 0, 1]);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    socket.send_to(&query, "127.0.0.53:53").unwrap();
    let mut answer = vec![0; 1500];
    let length = socket.recv(&mut answer).ok()?;
    answer.truncate(length);
    Some(answer)
}

/// Our server inside the tunnel: answers every AAAA with the agent and tells which names came.
fn serve(mut tun: Tun) -> mpsc::Receiver<String> {
    let (sender, names) = mpsc::channel();
    let server: Ipv6Addr = SERVER.parse().unwrap();
    std::thread::spawn(move || {
        let mut frame = Frame::default();
        loop {
            match tun.recv(&mut frame) {
                Ok(()) => {
                    let packet = frame.next().unwrap();
                    if packet.len() > 60 && packet[6] == 17 && packet[24..40] == server.octets() {
                        let (name, reply) = answer(packet);
                        tun.room(reply.len()).unwrap().copy_from_slice(&reply);
                        tun.commit(reply.len());
                        assert_eq!(tun.flush().dropped, 0);
                        if sender.send(name).is_err() {
                            return;
                        }
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let mut fds = [rustix::event::PollFd::from_borrowed_fd(tun.as_fd(), rustix::event::PollFlags::IN)];
                    rustix::event::poll(&mut fds, None).unwrap();
                }
                Err(_) => return,
            }
        }
    });
    names
}

/// The name that a query asks for, and the packet that answers it.
fn answer(packet: &[u8]) -> (String, Vec<u8>) {
    let query = &packet[48..];
    let mut labels = Vec::new();
    let mut at = 12;
    while query[at] != 0 {
        let end = at + 1 + usize::from(query[at]);
        labels.push(String::from_utf8_lossy(&query[at + 1..end]).to_lowercase());
        at = end;
    }
    let question = &query[12..at + 5];
    let is_aaaa = query[at + 2] == 28;
    let mut dns = vec![query[0], query[1], 0x85, 0, 0, 1, 0, u8::from(is_aaaa), 0, 0, 0, 0];
    dns.extend_from_slice(question);
    if is_aaaa {
        dns.extend_from_slice(&[0xc0, 12, 0, 28, 0, 1, 0, 0, 0, 2, 0, 16]);
        dns.extend_from_slice(&AGENT.parse::<Ipv6Addr>().unwrap().octets());
    }
    let length = u16::try_from(dns.len() + 8).unwrap();
    let mut reply = vec![0x60, 0, 0, 0];
    reply.extend_from_slice(&length.to_be_bytes());
    reply.extend_from_slice(&[17, 64]);
    reply.extend_from_slice(&packet[24..40]);
    reply.extend_from_slice(&packet[8..24]);
    reply.extend_from_slice(&packet[42..44]);
    reply.extend_from_slice(&packet[40..42]);
    reply.extend_from_slice(&length.to_be_bytes());
    reply.extend_from_slice(&[0, 0]);
    reply.extend_from_slice(&dns);
    let mut sum = u32::from(length) + 17;
    for pair in reply[8..].chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let sum = !u16::try_from(sum).unwrap();
    reply[46..48].copy_from_slice(&sum.to_be_bytes());
    (labels.join("."), reply)
}
