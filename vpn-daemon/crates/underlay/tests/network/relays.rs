//! DR-.. and T-..: relay connections against small relays.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use codervpn_underlay::{
    Dialer, DialerConfig, Incoming, RelayAccess, RelayEvent, RelayOptions, RelayPhase, Relays, Sent,
};
use codervpn_wire::derp;
use codervpn_wire::derp_map::DerpMap;
use codervpn_wire::keys::{NodePrivate, NodePublic};
use http::{HeaderName, HeaderValue};
use rand_core::OsRng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use url::Url;

use crate::support::{Relay, canned, map_of, read_head, region, serve, soon};

/// A client with its wake-up.
struct Client {
    relays: Relays,
    key: NodePublic,
    woken: Arc<Notify>,
}

impl Client {
    fn new(access: RelayAccess) -> Client {
        Client::with(DialerConfig::default(), access)
    }

    fn with(config: DialerConfig, access: RelayAccess) -> Client {
        let private = NodePrivate::generate(&mut OsRng);
        let key = private.public();
        let woken = Arc::new(Notify::new());
        let wake = woken.clone();
        let options = RelayOptions { access, wake: Arc::new(move || wake.notify_one()) };
        let relays = Relays::new(Dialer::new(config).unwrap(), private, options);
        Client { relays, key, woken }
    }

    async fn home(map: &DerpMap, id: i64) -> Client {
        let client = Client::new(RelayAccess::default());
        client.relays.set_map(map);
        client.relays.set_home(Some(region(id)));
        client.until_connected(id).await;
        client
    }

    async fn next(&self) -> Incoming {
        soon(async {
            loop {
                if let Some(incoming) = self.relays.receive() {
                    return incoming;
                }
                self.woken.notified().await;
            }
        })
        .await
    }

    async fn event(&self) -> RelayEvent {
        loop {
            if let Incoming::Event(event) = self.next().await {
                return event;
            }
        }
    }

    async fn until_connected(&self, id: i64) {
        loop {
            match self.event().await {
                RelayEvent::Connected { region: connected } if connected == region(id) => return,
                // Shown when the test fails.
                other => println!("{other:?}"),
            }
        }
    }

    async fn packet(&self) -> (NodePublic, Vec<u8>) {
        loop {
            if let Incoming::Packets(mut batch) = self.next().await {
                let packet = batch.packets().next().unwrap();
                return (packet.source, packet.payload.to_vec());
            }
        }
    }

    fn send(&self, id: i64, to: &NodePublic, packet: &[u8]) -> Sent {
        let mut batch = self.relays.batch();
        batch.push(to, packet);
        self.relays.send(region(id), batch)
    }
}

#[tokio::test]
async fn packets_travel_and_the_home_is_noted() {
    let relay = Relay::start().await;
    let map = map_of(&[(1, relay.server.address)]);
    let a = Client::home(&map, 1).await;
    let b = Client::home(&map, 1).await;
    // Sending to oneself shows that the relay knows both.
    for client in [&a, &b] {
        client.send(1, &client.key, b"self");
        assert_eq!(client.packet().await.1, b"self");
    }
    assert_eq!(a.send(1, &b.key, b"hello"), Sent::Queued);
    assert_eq!(b.packet().await, (a.key, b"hello".to_vec()));
    assert_eq!(*relay.log.preferred.lock().unwrap(), [true, true]);
    let status = a.relays.status().remove(0);
    assert_eq!((status.phase, status.home, status.error), (RelayPhase::Connected, true, None));
    assert_eq!(status.counters.sent_packets, 2);
}

/// Fast path: many frames of one hand-over are one write and few batches back.
#[tokio::test]
async fn a_batch_is_one_write_and_arrives_in_order() {
    let relay = Relay::start().await;
    let map = map_of(&[(1, relay.server.address)]);
    let a = Client::home(&map, 1).await;
    a.send(1, &a.key, b"warm");
    a.packet().await;
    let before = a.relays.status().remove(0).counters;
    let mut batch = a.relays.batch();
    for number in 0..50u8 {
        batch.room(&a.key, 1400).unwrap()[..1300].fill(number);
        batch.commit(1300);
    }
    a.relays.send(region(1), batch);
    let mut numbers = Vec::new();
    while numbers.len() < 50 {
        if let Incoming::Packets(mut batch) = a.next().await {
            numbers.extend(batch.packets().map(|packet| {
                assert_eq!(packet.payload.len(), 1300);
                packet.payload[0]
            }));
        }
    }
    assert_eq!(numbers, (0..50).collect::<Vec<_>>());
    let after = a.relays.status().remove(0).counters;
    assert_eq!(after.writes - before.writes, 1);
    assert_eq!(after.sent_packets - before.sent_packets, 50);
}

#[tokio::test]
async fn the_region_is_connected_on_demand_and_first_packets_wait_for_it() {
    let relay = Relay::start().await;
    let client = Client::new(RelayAccess::default());
    client.relays.set_map(&map_of(&[(1, relay.server.address)]));
    assert_eq!(client.relays.status()[0].phase, RelayPhase::Unused);
    assert_eq!(client.send(2, &client.key, b"x"), Sent::NoSuchRegion);
    assert_eq!(client.send(1, &client.key, b"first"), Sent::Queued);
    assert_eq!(client.packet().await.1, b"first");
    assert_eq!(relay.log.preferred.lock().unwrap().len(), 0);
}

/// 8.6: the answer may be cut anywhere.
#[tokio::test]
async fn the_greeting_may_come_byte_by_byte() {
    let server = serve(|mut stream| async move {
        read_head(&mut stream).await;
        let private = NodePrivate::generate(&mut OsRng);
        let mut out = b"HTTP/1.1 101 x\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n\r\n".to_vec();
        derp::write_server_key(&mut out, &private.public());
        for byte in out {
            stream.write_all(&[byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
    })
    .await;
    Client::home(&map_of(&[(1, server.address)]), 1).await;
}

async fn failure_of(address: SocketAddr) -> String {
    let client = Client::new(RelayAccess::default());
    client.relays.set_map(&map_of(&[(1, address)]));
    client.relays.want(region(1));
    match client.event().await {
        RelayEvent::Failed { reason, .. } | RelayEvent::Disconnected { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn t16_t21_t22_bad_relays_are_named() {
    let upgraded = |bytes: &[u8]| {
        let mut answer = b"HTTP/1.1 101 x\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n\r\n".to_vec();
        answer.extend_from_slice(bytes);
        answer
    };
    let not_a_key = canned(upgraded(&[0x06, 0, 0, 0, 0])).await;
    assert!(failure_of(not_a_key.address).await.contains("first frame"));
    let huge = canned(upgraded(&[0x01, 0xff, 0xff, 0xff, 0xff])).await;
    assert!(failure_of(huge.address).await.contains("forbidden length"));
    let page = canned(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".to_vec()).await;
    assert!(failure_of(page.address).await.contains("200"));
    let redirect =
        canned(b"HTTP/1.1 302 x\r\nLocation: http://portal.example\r\nContent-Length: 0\r\n\r\n".to_vec()).await;
    assert!(failure_of(redirect.address).await.contains("portal.example"));
    let mut refusal = b"HTTP/1.1 426 x\r\nContent-Length: 1000\r\n\r\n".to_vec();
    refusal.extend([b'\x1b'; 500]);
    refusal.extend([b'z'; 500]);
    let refusing = canned(refusal).await;
    let text = failure_of(refusing.address).await;
    assert!(text.contains("426") && text.len() < 800 && !text.contains('\x1b'), "{text}");
}

/// T-16: a wrong length ends the connection, what is unknown is skipped.
#[tokio::test]
async fn t16_frames_after_the_greeting() {
    let relay = Relay::start().await;
    let client = Client::home(&map_of(&[(1, relay.server.address)]), 1).await;
    client.send(1, &client.key, b"here");
    client.packet().await;

    let mut bytes = vec![0x77, 0, 0x0f, 0, 0];
    bytes.extend(vec![0xee; 0x0f_0000]);
    bytes.extend([0x05, 0, 0, 0, 3, 1, 2, 3]);
    derp::write_keep_alive(&mut bytes);
    derp::write_ping(&mut bytes, b"12345678");
    derp::write_recv_packet(&mut bytes, &client.key, b"after the unknown").unwrap();
    relay.write_raw(&client.key, bytes);
    assert_eq!(client.packet().await.1, b"after the unknown");

    let mut bytes = Vec::new();
    derp::write_health(&mut bytes, "too\x1b many\nclients");
    derp::write_health(&mut bytes, "");
    derp::write_peer_gone(&mut bytes, &client.key, derp::GoneReason::NotHere);
    relay.write_raw(&client.key, bytes);
    let RelayEvent::Health { text: Some(text), .. } = client.event().await else { panic!() };
    assert!(!text.contains('\x1b') && text.contains("clients"), "{text}");
    assert_eq!(client.event().await, RelayEvent::Health { region: region(1), text: None });
    let gone = RelayEvent::PeerGone { region: region(1), peer: client.key, reason: derp::GoneReason::NotHere };
    assert_eq!(client.event().await, gone);

    relay.write_raw(&client.key, vec![0x05, 0xff, 0xff, 0xff, 0xff]);
    let RelayEvent::Disconnected { reason, .. } = client.event().await else { panic!() };
    assert!(reason.contains("forbidden length"), "{reason}");
    client.until_connected(1).await;
}

#[tokio::test]
async fn a_restarted_relay_is_reconnected() {
    let relay = Relay::start().await;
    let address = relay.server.address;
    let client = Client::home(&map_of(&[(1, address)]), 1).await;
    drop(relay);
    assert!(matches!(client.event().await, RelayEvent::Disconnected { .. }));
    assert!(matches!(client.event().await, RelayEvent::Failed { .. }));
    let _relay = Relay::start_at(address).await;
    client.until_connected(1).await;
    client.send(1, &client.key, b"again");
    assert_eq!(client.packet().await.1, b"again");
}

/// T-45: a relay that closes every connection at once does not get a storm.
#[tokio::test]
async fn t45_attempts_are_spaced() {
    let (sender, mut accepted) = tokio::sync::mpsc::unbounded_channel();
    let relay = serve(move |stream| {
        sender.send(tokio::time::Instant::now()).unwrap();
        async move { drop(stream) }
    })
    .await;
    let client = Client::new(RelayAccess::default());
    client.relays.set_map(&map_of(&[(1, relay.address)]));
    client.relays.set_home(Some(region(1)));
    let first = soon(accepted.recv()).await.unwrap();
    for _ in 0..3 {
        soon(accepted.recv()).await.unwrap();
    }
    // Three spaces of 250 ms, with some room for the accepting side's clock.
    assert!(first.elapsed() >= Duration::from_millis(700));
    assert!(client.relays.status()[0].error.is_some());
}

/// One slow relay holds up nobody else, and says when it is congested.
#[tokio::test]
async fn a_slow_relay_delays_no_other() {
    let slow = serve(|mut stream| async move {
        read_head(&mut stream).await;
        let private = NodePrivate::generate(&mut OsRng);
        let mut out = b"HTTP/1.1 101 x\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n\r\n".to_vec();
        derp::write_server_key(&mut out, &private.public());
        stream.write_all(&out).await.unwrap();
        // Never reads again.
        std::future::pending::<()>().await;
    })
    .await;
    let relay = Relay::start().await;
    let map = map_of(&[(1, slow.address), (2, relay.server.address)]);
    let client = Client::home(&map, 1).await;
    let mut answers = Vec::new();
    for _ in 0..2000 {
        let mut batch = client.relays.batch();
        while !batch.is_full() {
            batch.push(&client.key, &[0; 1400]);
        }
        let sent = client.relays.send(region(1), batch);
        if answers.last() != Some(&sent) {
            answers.push(sent);
        }
        if sent == Sent::Dropped {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert!(answers.contains(&Sent::Congested), "{answers:?}");
    assert_eq!(answers.last(), Some(&Sent::Dropped));
    client.send(2, &client.key, b"fast");
    assert_eq!(client.packet().await.1, b"fast");
}

/// Data plane 2.9: only changed regions lose their connection.
#[tokio::test]
async fn a_new_map_keeps_what_did_not_change() {
    let (one, two) = (Relay::start().await, Relay::start().await);
    let client = Client::home(&map_of(&[(1, one.server.address), (2, one.server.address)]), 1).await;
    client.relays.want(region(2));
    client.until_connected(2).await;
    client.relays.set_map(&map_of(&[(1, one.server.address), (2, two.server.address)]));
    let RelayEvent::Disconnected { region: ended, .. } = client.event().await else { panic!() };
    assert_eq!(ended, region(2));
    assert!(client.relays.is_connected(region(1)));
    client.relays.want(region(2));
    client.until_connected(2).await;
}

/// T-23: three classes of regions see three sets of headers; probes too.
#[tokio::test]
async fn t23_headers_by_region_class() {
    let relays = [Relay::start().await, Relay::start().await, Relay::start().await];
    let mut map =
        map_of(&[(1, relays[0].server.address), (2, relays[1].server.address), (3, relays[2].server.address)]);
    map.regions.get_mut(&region(1)).unwrap().embedded = true;
    map.regions.get_mut(&region(2)).unwrap().code = "coder_proxy".into();
    // The map lies about the embedded relay: it is reached at the access URL.
    map.regions.get_mut(&region(1)).unwrap().nodes[0].host = "wrong.invalid".into();
    let access = RelayAccess {
        access_url: Some(Url::parse(&format!("http://{}/", relays[0].server.address)).unwrap()),
        session_token: Some(HeaderValue::from_static("sesame")),
        allow_insecure: false,
    };
    let config = DialerConfig {
        headers: vec![(HeaderName::from_static("x-front"), HeaderValue::from_static("open"))],
        ..DialerConfig::default()
    };
    let client = Client::with(config, access);
    client.relays.set_map(&map);
    for id in 1..=3 {
        client.relays.want(region(id));
        client.until_connected(id).await;
    }
    let probes = client.relays.probe(Duration::from_secs(10)).await;
    assert_eq!(probes.len(), 3);
    assert!(probes.iter().all(|(_, result)| result.is_ok()), "{probes:?}");
    for (index, (token, front)) in [(true, true), (false, true), (false, false)].into_iter().enumerate() {
        let heads = relays[index].log.heads.lock().unwrap();
        assert_eq!(heads.len(), 2);
        for head in heads.iter() {
            let head = head.to_ascii_lowercase();
            assert_eq!(head.contains("coder-session-token: sesame"), token, "{head}");
            assert_eq!(head.contains("x-front: open"), front, "{head}");
        }
    }
}

/// A frozen network is found by the ping of a link check.
#[tokio::test]
async fn a_link_check_replaces_a_dead_connection() {
    let frozen = serve(|mut stream| async move {
        read_head(&mut stream).await;
        let private = NodePrivate::generate(&mut OsRng);
        let mut out = b"HTTP/1.1 101 x\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n\r\n".to_vec();
        derp::write_server_key(&mut out, &private.public());
        stream.write_all(&out).await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let client = Client::home(&map_of(&[(1, frozen.address)]), 1).await;
    let start = std::time::Instant::now();
    client.relays.check_links();
    let RelayEvent::Disconnected { reason, .. } = client.event().await else { panic!() };
    assert!(reason.contains("silent for 3 s"), "{reason}");
    assert!(start.elapsed() < Duration::from_secs(6));
    client.until_connected(1).await;
}

/// Against the relay that real deployments run, when the environment names
/// the program of `tests/foreign`.
#[tokio::test]
#[ignore = "needs the Go relay: CODERVPN_FOREIGN=path/of/foreign"]
async fn the_go_relay() {
    use tokio::io::AsyncBufReadExt;
    let program = std::env::var("CODERVPN_FOREIGN").expect("CODERVPN_FOREIGN names the program");
    for tls in [false, true] {
        let certificate = tempfile::NamedTempFile::new().unwrap();
        let mut command = tokio::process::Command::new(&program);
        command.args(["derp", "-q", "--listen", "127.0.0.1:0"]);
        if tls {
            command.args(["--tls", "--host", "localhost", "--cert-out"]).arg(certificate.path());
        }
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = tokio::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let line = soon(lines.next_line()).await.unwrap().unwrap();
        let address = line.split("\"listen\":\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        let mut map = map_of(&[(1, address.parse().unwrap())]);
        let node = &mut map.regions.get_mut(&region(1)).unwrap().nodes[0];
        node.force_http = !tls;
        node.host = if tls { "localhost".into() } else { node.host.clone() };
        let config =
            || DialerConfig { extra_ca: tls.then(|| certificate.path().to_owned()), ..DialerConfig::default() };

        let a = Client::with(config(), RelayAccess::default());
        a.relays.set_map(&map);
        a.relays.set_home(Some(region(1)));
        a.until_connected(1).await;
        let b = Client::with(config(), RelayAccess::default());
        b.relays.set_map(&map);
        b.relays.set_home(Some(region(1)));
        b.until_connected(1).await;
        b.send(1, &b.key, b"known");
        b.packet().await;

        // Bulk: 64 MiB, a few batches in flight, so that the relay drops nothing.
        let start = std::time::Instant::now();
        let cpu = cpu_time();
        let (mut sent, mut received) = (0usize, 0usize);
        while received < 48_000 {
            while sent < 48_000 && sent - received < 400 {
                let mut batch = a.relays.batch();
                for _ in 0..48 {
                    batch.push(&b.key, &[7; 1344]);
                }
                sent += batch.frames();
                a.relays.send(region(1), batch);
            }
            if let Incoming::Packets(mut batch) = b.next().await {
                received += batch.packets().count();
            }
        }
        let bytes = (received * 1344) as f64;
        let seconds = start.elapsed().as_secs_f64();
        let stats = (a.relays.status().remove(0).counters, b.relays.status().remove(0).counters);
        println!(
            "tls {tls}: {:.2} Gbit/s, {:.2} CPU-s/GB (both ends)",
            bytes * 8e-9 / seconds,
            (cpu_time() - cpu) / bytes * 1e9
        );
        println!("  {stats:?}");
        let probes = a.relays.probe(Duration::from_secs(5)).await;
        println!("  probe {probes:?}");
        assert!(probes[0].1.is_ok());
        child.kill().await.unwrap();
        while !matches!(a.event().await, RelayEvent::Disconnected { .. }) {}
    }
}

fn cpu_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
