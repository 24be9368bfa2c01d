//! A recorded session of a real server, replayed against the controller: the server's bytes as they were split then, one
//! at a time, and joined. What must come out follows from the recording's own messages, decoded without our multiplexer.
#![allow(clippy::unwrap_used)] // a test that cannot go on fails

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use codervpn_control::controller::{Dial, DialFuture, Dialed};
use codervpn_control::{ControlEvent, Controller, ControllerConfig, ControllerRole, Handle, PeerUpdateKind};
use codervpn_proto::tailnet as pb;
use codervpn_wire::drpc::{Kind, PacketReader};
use prost::Message;
use secrecy::SecretString;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use uuid::Uuid;

const TRACE: &str = include_str!("data/a-tailnet-session.txt");
const OWNER: Uuid = Uuid::from_u128(0xa774ba76_d665_4271_8dc1_106fc8d4b9eb);
/// The graceful stop begins here.
const STOP: f64 = 74.9;

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// One binary message of the recording.
struct Chunk {
    at: f64,
    from_server: bool,
    payload: Vec<u8>,
}

fn chunks() -> Vec<Chunk> {
    let lines = TRACE.lines().filter(|line| line.contains(" WS ") && line.contains(" op=2 "));
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            Chunk {
                at: words.next().unwrap().parse().unwrap(),
                from_server: words.next() == Some("S>C"),
                payload: hex(line.split("payload=").nth(1).unwrap()),
            }
        })
        .collect()
}

/// Decodes one direction of a session: yamux headers by hand, then dRPC.
#[derive(Default)]
struct Decoder {
    buffer: Vec<u8>,
    streams: BTreeSet<u32>,
    packets: BTreeMap<u32, PacketReader>,
}

impl Decoder {
    fn feed(&mut self, bytes: &[u8]) -> Vec<(u32, Kind, Vec<u8>)> {
        self.buffer.extend_from_slice(bytes);
        let mut out = Vec::new();
        while self.buffer.len() >= 12 {
            let word = |at: usize| u32::from_be_bytes(self.buffer[at..at + 4].try_into().unwrap());
            let (kind, flags, stream, length) = (self.buffer[1], word(0) as u16, word(4), word(8) as usize);
            let body = if kind == 0 { length } else { 0 };
            if self.buffer.len() < 12 + body {
                break;
            }
            if flags & 1 != 0 && kind <= 1 {
                self.streams.insert(stream);
            }
            let frame: Vec<u8> = self.buffer.drain(..12 + body).collect();
            let mut body = &frame[12..];
            while let Some(packet) = self.packets.entry(stream).or_default().read(&mut body).unwrap() {
                out.push((stream, packet.kind, packet.data));
            }
        }
        out
    }
}

/// What the client has said that the server's answers depend on.
#[derive(Default)]
struct Progress {
    decoder: Decoder,
    tunnels: BTreeSet<Uuid>,
    node: bool,
    disconnected: bool,
    removed: BTreeSet<Uuid>,
}

impl Progress {
    fn feed(&mut self, bytes: &[u8]) {
        for (stream, kind, data) in self.decoder.feed(bytes) {
            if (stream, kind) != (1, Kind::Message) {
                continue;
            }
            let request = pb::CoordinateRequest::decode(data.as_slice()).unwrap();
            if let Some(update) = request.update_self {
                assert!(update.node.is_some(), "ND-9");
                self.node = true;
            }
            let id = |tunnel: pb::coordinate_request::Tunnel| Uuid::from_slice(&tunnel.id).unwrap();
            self.tunnels.extend(request.add_tunnel.map(id));
            self.removed.extend(request.remove_tunnel.map(id));
            self.disconnected |= request.disconnect.is_some();
            assert!(request.ready_for_handshake.is_empty(), "CC-23");
        }
    }

    /// Whether our client has done what the recorded one had done by then.
    fn reached(&self, recorded: &Progress) -> bool {
        recorded.decoder.streams.is_subset(&self.decoder.streams)
            && recorded.tunnels.is_subset(&self.tunnels)
            && recorded.removed.is_subset(&self.removed)
            && recorded.node <= self.node
            && recorded.disconnected <= self.disconnected
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Splitting {
    Recorded,
    Bytes,
    Joined,
}

/// Plays the server. Returns what the client asked for.
async fn play(mut io: DuplexStream, splitting: Splitting) -> Progress {
    let (mut ours, mut recorded) = (Progress::default(), Progress::default());
    let mut joined = Vec::new();
    let mut buffer = [0; 4096];
    for chunk in chunks() {
        if !chunk.from_server {
            recorded.feed(&chunk.payload);
            continue;
        }
        if !ours.reached(&recorded) {
            io.write_all(&std::mem::take(&mut joined)).await.unwrap();
        }
        while !ours.reached(&recorded) {
            let count = io.read(&mut buffer).await.unwrap();
            assert_ne!(count, 0, "the client left at {}", chunk.at);
            ours.feed(&buffer[..count]);
        }
        match splitting {
            Splitting::Recorded => io.write_all(&chunk.payload).await.unwrap(),
            Splitting::Joined => joined.extend_from_slice(&chunk.payload),
            Splitting::Bytes => {
                for byte in chunk.payload {
                    // The client may leave as soon as the server has hung up, before the last FINs.
                    let sent = io.write_all(&[byte]).await;
                    assert!(sent.is_ok() || ours.disconnected);
                    tokio::task::yield_now().await;
                }
            }
        }
    }
    io.write_all(&joined).await.unwrap();
    while let Ok(count @ 1..) = io.read(&mut buffer).await {
        ours.feed(&buffer[..count]);
    }
    ours
}

/// Hands out one connection; the second dial never ends.
struct Once(Mutex<Option<DuplexStream>>);

impl Dial for Once {
    fn dial<'a>(&'a self, resume_token: Option<&'a SecretString>) -> DialFuture<'a> {
        Box::pin(async move {
            assert!(resume_token.is_none());
            let io = self.0.lock().unwrap().take();
            match io {
                Some(io) => Ok(Dialed { transport: Box::new(io), server_version: None }),
                None => std::future::pending().await,
            }
        })
    }
}

/// Recorded messages of one stream of the server, before the stop.
fn recorded<M: Message + Default>(stream: u32) -> Vec<M> {
    let mut decoder = Decoder::default();
    let chunks = chunks().into_iter().filter(|chunk| chunk.from_server && chunk.at < STOP);
    let packets = chunks.flat_map(|chunk| decoder.feed(&chunk.payload)).collect::<Vec<_>>();
    let messages = packets.iter().filter(|(id, kind, _)| (*id, *kind) == (stream, Kind::Message));
    messages.map(|(_, _, data)| M::decode(data.as_slice()).unwrap()).collect()
}

fn self_node() -> codervpn_wire::node::Node {
    let chunks = chunks().into_iter().filter(|chunk| !chunk.from_server);
    let mut decoder = Decoder::default();
    let packets = chunks.flat_map(|chunk| decoder.feed(&chunk.payload)).collect::<Vec<_>>();
    let node = packets
        .iter()
        .filter(|(stream, kind, _)| (*stream, *kind) == (1, Kind::Message))
        .find_map(|(_, _, data)| pb::CoordinateRequest::decode(data.as_slice()).unwrap().update_self?.node);
    codervpn_control::convert::node_from_proto(node.unwrap()).unwrap().0
}

/// What the receiver of the events saw.
#[derive(Default)]
struct Seen {
    derp_maps: usize,
    updates: Vec<(bool, usize, usize, usize, usize)>,
    peers: Vec<(Uuid, &'static str, String)>,
    agents: BTreeMap<Uuid, String>,
    workspaces: BTreeMap<Uuid, String>,
}

impl Seen {
    /// As the daemon does: apply, then say what tunnels are wanted.
    async fn take(&mut self, event: ControlEvent, handle: &Handle) {
        match event {
            ControlEvent::Connecting { attempt } => assert_eq!(attempt, 1),
            ControlEvent::Connected { .. } => {}
            ControlEvent::DerpMap(map) => {
                assert_eq!(map.regions.len(), 1);
                self.derp_maps += 1;
            }
            ControlEvent::Workspaces(update) => {
                self.updates.push((
                    update.full,
                    update.upserted_workspaces.len(),
                    update.upserted_agents.len(),
                    update.deleted_workspaces.len(),
                    update.deleted_agents.len(),
                ));
                self.workspaces.extend(update.upserted_workspaces.into_iter().map(|w| (w.id, w.name)));
                for agent in update.deleted_agents {
                    self.agents.remove(&agent.id);
                }
                for workspace in update.deleted_workspaces {
                    self.workspaces.remove(&workspace.id);
                }
                self.agents.extend(update.upserted_agents.into_iter().map(|a| (a.id, a.name)));
                handle.set_destinations(self.agents.keys().copied()).await.unwrap();
            }
            ControlEvent::PeerUpdates(updates) => {
                for update in updates {
                    let kind = match update.kind {
                        PeerUpdateKind::Node(node) => {
                            assert_eq!(node.addresses_of(update.id).count(), 2);
                            "NODE"
                        }
                        PeerUpdateKind::Disconnected => "DISCONNECTED",
                        PeerUpdateKind::Lost => "LOST",
                        PeerUpdateKind::ReadyForHandshake => "READY",
                    };
                    self.peers.push((update.id, kind, update.reason));
                }
            }
            other => panic!("unexpected: {other:?}"),
        }
    }
}

async fn replay(splitting: Splitting) {
    let (ours, theirs) = duplex(1 << 16);
    let server = tokio::spawn(play(theirs, splitting));
    let dialer = Arc::new(Once(Mutex::new(Some(ours))));
    let (handle, mut events) =
        Controller::spawn(ControllerConfig::new(ControllerRole::Client { owner: OWNER }), dialer);
    handle.set_self_node(self_node());

    let updates = recorded::<pb::WorkspaceUpdate>(5);
    let mut expected_peers = Vec::new();
    for response in recorded::<pb::CoordinateResponse>(1) {
        assert_eq!(response.error, "");
        for update in response.peer_updates {
            let kind = ["UNSPECIFIED", "NODE", "DISCONNECTED", "LOST", "READY"][update.kind as usize];
            expected_peers.push((Uuid::from_slice(&update.id).unwrap(), kind, update.reason));
        }
    }
    let mut seen = Seen::default();
    while seen.updates.len() < updates.len() || seen.peers.len() < expected_peers.len() || seen.derp_maps == 0 {
        let event = events.recv().await.expect("the controller goes on");
        seen.take(event, &handle).await;
    }
    handle.settled().await.unwrap();
    handle.shutdown().await;
    let asked = server.await.unwrap();

    assert_eq!(seen.derp_maps, 1);
    assert_eq!(seen.peers, expected_peers, "{splitting:?}");
    let wanted: Vec<_> = updates
        .iter()
        .enumerate()
        .map(|(at, update)| {
            (
                at == 0,
                update.upserted_workspaces.len(),
                update.upserted_agents.len(),
                update.deleted_workspaces.len(),
                update.deleted_agents.len(),
            )
        })
        .collect();
    assert_eq!(seen.updates, wanted);
    assert_eq!(seen.agents.len(), 4, "{:?}", seen.agents);
    assert!(!seen.workspaces.values().any(|name| name == "Tmp-1"), "CC-65: deleted in the end");
    assert!(asked.disconnected && asked.node);
    let mut recorded_client = Progress::default();
    for chunk in chunks().iter().filter(|chunk| !chunk.from_server) {
        recorded_client.feed(&chunk.payload);
    }
    assert_eq!(asked.tunnels, recorded_client.tunnels);
    assert_eq!(asked.removed, recorded_client.removed);
}

#[tokio::test(start_paused = true)]
async fn recorded_splitting() {
    replay(Splitting::Recorded).await;
}

#[tokio::test(start_paused = true)]
async fn one_byte_at_a_time() {
    replay(Splitting::Bytes).await;
}

#[tokio::test(start_paused = true)]
async fn joined() {
    replay(Splitting::Joined).await;
}
