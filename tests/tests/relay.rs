//! Our relay, spoken to frame by frame (data-plane 2.1 to 2.5, 2.8).

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use codervpn_testbed::coderd::Deployment;
use codervpn_testbed::relay::{Relay, RelayOptions};
use codervpn_wire::derp::greeting::{open_server_info, write_client_info};
use codervpn_wire::derp::{
    Frame, GoneReason, Side, kind, split_frame, write_note_preferred, write_ping, write_send_packet,
};
use codervpn_wire::disco;
use codervpn_wire::keys::{NodePrivate, NodePublic, random_nonce};
use rand_core::OsRng;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

type Result<T = ()> = anyhow::Result<T>;

const PATIENCE: Duration = Duration::from_secs(10);
const UPGRADE: &str = "GET /derp HTTP/1.1\r\nHost: relay\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n\r\n";

/// What came, with its bytes.
#[derive(Debug, PartialEq)]
enum Got {
    Packet(NodePublic, Vec<u8>),
    Gone(NodePublic, GoneReason),
    Pong([u8; 8]),
}

/// A client of the relay, written anew.
struct Client {
    key: NodePublic,
    stream: TcpStream,
    /// Received and not used yet.
    bytes: Vec<u8>,
    used: usize,
}

/// Sends a request; returns the head of the answer in lower case, and what follows it. A fast start has none.
async fn open(relay: &Relay, request: &str) -> Result<(TcpStream, String, Vec<u8>)> {
    let address = (relay.url().host_str().context("a host")?, relay.url().port().context("a port")?);
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = vec![0; 4096];
    let length = timeout(PATIENCE, stream.read(&mut bytes)).await.context("no answer")??;
    bytes.truncate(length);
    if bytes.first() == Some(&kind::SERVER_KEY) {
        return Ok((stream, String::new(), bytes));
    }
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").context("no whole head")? + 4;
    let rest = bytes.split_off(end);
    Ok((stream, String::from_utf8_lossy(&bytes).to_ascii_lowercase(), rest))
}

impl Client {
    async fn connect(relay: &Relay) -> Result<Self> {
        Self::connect_as(relay, &NodePrivate::generate(&mut OsRng), UPGRADE).await
    }

    async fn connect_as(relay: &Relay, private: &NodePrivate, request: &str) -> Result<Self> {
        let (stream, head, bytes) = open(relay, request).await?;
        if request.contains("Fast-Start") {
            ensure!(head.is_empty(), "an answer to a fast start: {head}");
        } else {
            ensure!(head.starts_with("http/1.1 101") && head.contains("upgrade: derp"), "{head}");
            ensure!(head.contains("derp-version: 2") && head.contains(&relay.server().key().to_hex()), "{head}");
        }
        let mut client = Self { key: private.public(), stream, bytes, used: 0 };
        let Frame::ServerKey(server) = client.frame().await? else { bail!("no greeting") };
        ensure!(server == relay.server().key());
        let mut out = Vec::new();
        let shared = write_client_info(&mut out, private, &server, &random_nonce(&mut OsRng))?;
        client.stream.write_all(&out).await?;
        let Frame::ServerInfo { sealed } = client.frame().await? else { bail!("no answer to our greeting") };
        ensure!(open_server_info(&shared, sealed)?.version == 2);
        relay.server().connected(client.key).await;
        Ok(client)
    }

    async fn frame(&mut self) -> Result<Frame<'_>> {
        self.bytes.drain(..self.used);
        self.used = 0;
        while split_frame(Side::Client, &self.bytes)?.is_none() {
            let length = timeout(PATIENCE, self.stream.read_buf(&mut self.bytes)).await.context("no frame")??;
            ensure!(length > 0, "the relay has closed");
        }
        let (frame, used) = split_frame(Side::Client, &self.bytes)?.context("a frame is there")?;
        self.used = used;
        Ok(frame)
    }

    async fn got(&mut self) -> Result<Got> {
        Ok(match self.frame().await? {
            Frame::RecvPacket { from, packet } => Got::Packet(from, packet.to_vec()),
            Frame::PeerGone { key, reason } => Got::Gone(key, reason),
            Frame::Pong(data) => Got::Pong(data),
            other => bail!("{other:?}"),
        })
    }

    async fn send(&mut self, to: &NodePublic, packet: &[u8]) -> Result {
        let mut out = Vec::new();
        write_send_packet(&mut out, to, packet)?;
        Ok(self.stream.write_all(&out).await?)
    }

    async fn ping(&mut self, data: &[u8; 8]) -> Result {
        let mut out = Vec::new();
        write_ping(&mut out, data);
        Ok(self.stream.write_all(&out).await?)
    }

    /// Everything sent before has been worked off, and nothing else has come.
    async fn nothing_more(&mut self) -> Result {
        self.ping(b"the end!").await?;
        let got = self.got().await?;
        ensure!(got == Got::Pong(*b"the end!"), "{got:?}");
        Ok(())
    }

    async fn closed(mut self) -> Result {
        let mut rest = Vec::new();
        // A reset is an end, too.
        let _ = timeout(PATIENCE, self.stream.read_to_end(&mut rest)).await.context("still open")?;
        Ok(())
    }
}

/// As long as the shortest disco message, with its magic.
fn disco_packet() -> Vec<u8> {
    let mut packet = disco::MAGIC.to_vec();
    packet.resize(disco::OVERHEAD, 1);
    packet
}

async fn relay() -> Result<Relay> {
    Relay::start(RelayOptions::default()).await
}

/// T-18: the source is who the connection is. The longest packet passes, a longer one ends its sender.
#[tokio::test]
async fn t18_packets_pass_with_their_source() -> Result {
    let relay = relay().await?;
    let (mut a, mut b) = (Client::connect(&relay).await?, Client::connect(&relay).await?);
    a.send(&b.key, b"hello").await?;
    ensure!(b.got().await? == Got::Packet(a.key, b"hello".to_vec()));
    let longest = vec![7; 65_536];
    b.send(&a.key, &longest).await?;
    ensure!(a.got().await? == Got::Packet(b.key, longest));
    let own = a.key;
    a.send(&own, b"me").await?;
    ensure!(a.got().await? == Got::Packet(own, b"me".to_vec()));
    ensure!(relay.server().counters().to_self == 1);
    let mut out = Vec::new();
    write_note_preferred(&mut out, true);
    // A type of a later version is skipped.
    out.extend_from_slice(&[0x77, 0, 0, 0, 3, 1, 2, 3]);
    a.stream.write_all(&out).await?;
    a.nothing_more().await?;
    ensure!(relay.server().counters().homes == 1);
    let mut too_long = vec![kind::SEND_PACKET];
    too_long.extend_from_slice(&(32 + 65_537_u32).to_be_bytes());
    too_long.extend_from_slice(b.key.as_bytes());
    a.stream.write_all(&too_long).await?;
    a.closed().await
}

/// Unknown destinations: a hint for disco only, three at once (2.8); PeerGone when a peer leaves for good.
#[tokio::test]
async fn peers_that_are_not_here_or_gone() -> Result {
    let relay = relay().await?;
    let mut a = Client::connect(&relay).await?;
    let nobody = NodePrivate::generate(&mut OsRng).public();
    a.send(&nobody, b"not disco").await?;
    a.nothing_more().await?;
    for _ in 0..10 {
        a.send(&nobody, &disco_packet()).await?;
    }
    for _ in 0..3 {
        ensure!(a.got().await? == Got::Gone(nobody, GoneReason::NotHere));
    }
    a.nothing_more().await?;
    // b has sent to a: a is told when b goes. c has not.
    let (mut b, c) = (Client::connect(&relay).await?, Client::connect(&relay).await?);
    let gone = b.key;
    b.send(&a.key, b"x").await?;
    ensure!(a.got().await? == Got::Packet(gone, b"x".to_vec()));
    drop((b, c));
    ensure!(a.got().await? == Got::Gone(gone, GoneReason::Disconnected));
    a.nothing_more().await
}

/// T-19: the newest connection of a key is active, later whichever spoke last; both may stay.
#[tokio::test]
async fn t19_one_key_on_two_connections() -> Result {
    let relay = relay().await?;
    let private = NodePrivate::generate(&mut OsRng);
    let mut sender = Client::connect(&relay).await?;
    let mut old = Client::connect_as(&relay, &private, UPGRADE).await?;
    let mut new = Client::connect_as(&relay, &private, UPGRADE).await?;
    let from = sender.key;
    sender.send(&old.key, b"1").await?;
    ensure!(new.got().await? == Got::Packet(from, b"1".to_vec()));
    old.nothing_more().await?;
    sender.send(&old.key, b"2").await?;
    ensure!(old.got().await? == Got::Packet(from, b"2".to_vec()));
    new.nothing_more().await?;
    let key = new.key;
    new.send(&from, b"3").await?;
    ensure!(sender.got().await? == Got::Packet(key, b"3".to_vec()));
    // The active one goes: no PeerGone while another is left, and that one receives.
    drop(new);
    loop {
        sender.send(&key, b"4").await?;
        match timeout(Duration::from_millis(50), old.got()).await {
            Ok(got) => {
                ensure!(got? == Got::Packet(from, b"4".to_vec()));
                break;
            }
            // Sent into the connection that was just closing.
            Err(_) => continue,
        }
    }
    sender.nothing_more().await
}

/// Frames of a mesh end the connection (2.8), and so does anything but a greeting at the start.
#[tokio::test]
async fn what_is_not_allowed_ends_the_connection() -> Result {
    let relay = relay().await?;
    for (kind, length) in [(kind::FORWARD_PACKET, 64), (kind::WATCH_CONNS, 0), (kind::CLOSE_PEER, 32)] {
        let mut client = Client::connect(&relay).await?;
        let mut frame = vec![kind, 0, 0, 0, length];
        frame.resize(5 + usize::from(length), 1);
        client.stream.write_all(&frame).await?;
        client.closed().await?;
    }
    let (mut stream, _, _) = open(&relay, UPGRADE).await?;
    stream.write_all(&[kind::PING, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0]).await?;
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.context("still open")?;
    ensure!(relay.server().clients().is_empty());
    Ok(())
}

/// T-17: connections that never greet hold a bounded number of places, and give them back.
#[tokio::test]
async fn t17_handshakes_that_do_not_go_on_are_few() -> Result {
    let relay = relay().await?;
    let mut waiting = Vec::new();
    for _ in 0..64 {
        waiting.push(open(&relay, UPGRADE).await?);
    }
    let (mut refused, _, _) = open(&relay, UPGRADE).await?;
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, refused.read_to_end(&mut rest)).await.context("the 65th is held")?;
    waiting.clear();
    timeout(PATIENCE, async {
        while Client::connect(&relay).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .context("the places are not given back")
}

/// 2.4: how a connection begins, and T-48.
#[tokio::test]
async fn t48_upgrades() -> Result {
    let relay = relay().await?;
    let private = NodePrivate::generate(&mut OsRng);
    for request in [
        "GET /derp/ HTTP/1.1\r\nHost: relay\r\nUpgrade: derp\r\nConnection: Upgrade\r\n\r\n",
        "GET /derp HTTP/1.1\r\nHost: relay\r\nUpgrade: DERP\r\n\r\n",
        // A WebSocket without the subprotocol is the plain upgrade.
        "GET /derp HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        "GET /derp HTTP/1.1\r\nHost: relay\r\nUpgrade: DERP\r\nConnection: Upgrade\r\nDerp-Fast-Start: 1\r\n\r\n",
    ] {
        Client::connect_as(&relay, &private, request).await.with_context(|| request.to_owned())?.nothing_more().await?;
    }
    let (_, head, _) = open(&relay, "GET /derp HTTP/1.1\r\nHost: relay\r\n\r\n").await?;
    ensure!(head.starts_with("http/1.1 426"), "{head}");
    let (_, head, _) = open(&relay, "GET /derp/latency-check HTTP/1.1\r\nHost: relay\r\n\r\n").await?;
    ensure!(head.starts_with("http/1.1 200"), "{head}");
    let (_, head, _) = open(&relay, "GET /derp/probe HTTP/1.1\r\nHost: relay\r\n\r\n").await?;
    ensure!(head.starts_with("http/1.1 404"), "{head}");
    Ok(())
}

/// A reader that does not read is cut after 2 s and costs others nothing; the relay can go and come back.
#[tokio::test]
async fn t17_slow_readers_and_restarts() -> Result {
    let relay = relay().await?;
    let (mut fast, slow) = (Client::connect(&relay).await?, Client::connect(&relay).await?);
    let packet = vec![1; 60_000];
    let cut = async {
        while relay.server().clients().contains(&slow.key) {
            fast.send(&slow.key, &packet).await?;
        }
        anyhow::Ok(())
    };
    timeout(PATIENCE, cut).await.context("the slow reader stays")??;
    ensure!(relay.server().counters().overflow > 0, "nothing was dropped");
    relay.stop().await;
    fast.closed().await?;
    ensure!(Client::connect(&relay).await.is_err(), "still there");
    relay.resume().await?;
    Client::connect(&relay).await?.nothing_more().await
}

/// Our agent survives a loss of the embedded relay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_returns_to_its_relay() -> Result {
    let deployment = Deployment::start().await?;
    let user = deployment.add_user("anna");
    let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
    let agent = deployment.run_agent(&workspace.agents[0]).await?;
    deployment.relay().drop_connections();
    let mut changes = deployment.relay().changes();
    timeout(PATIENCE, changes.changed()).await.context("the agent does not notice")??;
    timeout(PATIENCE, deployment.relay().connected(agent.key())).await.context("the agent does not return")?;
    agent.stop().await;
    Ok(())
}
