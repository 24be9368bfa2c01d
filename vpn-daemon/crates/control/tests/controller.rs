//! The controller against a server made of the crate's own server halves, in virtual time. Names are those of
//! `control-plane.md` 11.
#![allow(clippy::unwrap_used)] // a test that cannot go on fails

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use codervpn_control::controller::{Dial, DialFailure, DialFuture, Dialed};
use codervpn_control::mux::Connection;
use codervpn_control::rpc::{Replies, ServerCall, Service, serve};
use codervpn_control::{
    ApiError, ControlEvent, Controller, ControllerConfig, ControllerRole, Handle, Obstacle, PeerUpdateKind,
};
use codervpn_proto::tailnet::{self as pb, calls, coordinate_response::peer_update::Kind};
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::drpc::CallError;
use codervpn_wire::keys::{DiscoPublic, NodePublic};
use codervpn_wire::node::{Node, Prefix, coder_address};
use secrecy::{ExposeSecret, SecretString};
use tokio::io::{DuplexStream, duplex};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

const OWNER: Uuid = Uuid::from_u128(0x0011_2233);

/// What the server heard, in order.
#[derive(Debug, Clone, PartialEq)]
enum Heard {
    Node(Option<prost_types::Timestamp>),
    Add(Uuid),
    Remove(Uuid),
    Ready(Vec<Uuid>),
    Disconnect,
    /// The Coordinate stream ended without a Disconnect, or after it.
    Gone,
}

/// How the server behaves; one for all connections.
#[derive(Default)]
struct Server {
    heard: Mutex<Vec<Heard>>,
    /// The open Coordinate call.
    coordinate: Mutex<Option<Replies>>,
    workspaces: Mutex<Option<Replies>>,
    refreshes: AtomicUsize,
    without_resume_tokens: AtomicBool,
    hang_refresh: AtomicBool,
    ignore_disconnect: AtomicBool,
    read_delay: Mutex<Duration>,
    refuse_tunnels: AtomicBool,
    refused: Mutex<Option<Uuid>>,
    session_bad: AtomicBool,
    snapshot: Mutex<pb::WorkspaceUpdate>,
    live: AtomicUsize,
}

impl Server {
    fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
    }

    async fn coordinate(&self, call: &mut ServerCall) -> Result<(), CallError> {
        *self.coordinate.lock().unwrap() = Some(call.replies.clone());
        while let Some(request) = call.requests.next::<pb::CoordinateRequest>().await? {
            let delay = *self.read_delay.lock().unwrap();
            sleep(delay).await;
            let id = |tunnel: pb::coordinate_request::Tunnel| Uuid::from_slice(&tunnel.id).unwrap();
            let mut heard = Vec::new();
            if let Some(update) = request.update_self {
                heard.push(Heard::Node(update.node.expect("ND-9").as_of));
            }
            heard.extend(request.add_tunnel.map(|tunnel| Heard::Add(id(tunnel))));
            heard.extend(request.remove_tunnel.map(|tunnel| Heard::Remove(id(tunnel))));
            if !request.ready_for_handshake.is_empty() {
                let ids = request.ready_for_handshake.iter().map(|ready| Uuid::from_slice(&ready.id).unwrap());
                heard.push(Heard::Ready(ids.collect()));
            }
            if request.disconnect.is_some() {
                heard.push(Heard::Disconnect);
            }
            let bad = *self.refused.lock().unwrap();
            let all = self.refuse_tunnels.load(Ordering::Relaxed);
            let refused = heard.iter().any(|heard| matches!(heard, Heard::Add(id) if all || Some(*id) == bad));
            let left = heard.contains(&Heard::Disconnect) && !self.ignore_disconnect.load(Ordering::Relaxed);
            self.heard.lock().unwrap().extend(heard);
            if refused {
                say(
                    &call.replies,
                    pb::CoordinateResponse {
                        error: "authorization: workspace agent not found or you do not have permission".into(),
                        ..Default::default()
                    },
                )
                .await;
            }
            if left || refused {
                let _ = call.replies.close().await;
                return Ok(());
            }
        }
        self.heard.lock().unwrap().push(Heard::Gone);
        Ok(())
    }
}

impl Service for Server {
    async fn call(self: Arc<Self>, mut call: ServerCall) -> Result<(), CallError> {
        match call.rpc.as_str() {
            calls::COORDINATE => self.coordinate(&mut call).await,
            calls::STREAM_DERP_MAPS => {
                say(&call.replies, pb::DerpMap { home_params: Some(Default::default()), ..Default::default() }).await;
                call.closed().await;
                Ok(())
            }
            calls::WORKSPACE_UPDATES => {
                let request: pb::WorkspaceUpdatesRequest = call.request().await?;
                assert_eq!(request.workspace_owner_id, OWNER.as_bytes());
                let snapshot = self.snapshot.lock().unwrap().clone();
                say(&call.replies, snapshot).await;
                *self.workspaces.lock().unwrap() = Some(call.replies.clone());
                call.closed().await;
                Ok(())
            }
            calls::REFRESH_RESUME_TOKEN if self.without_resume_tokens.load(Ordering::Relaxed) => {
                Err(CallError::unknown_rpc(&call.rpc))
            }
            calls::REFRESH_RESUME_TOKEN => {
                let count = self.refreshes.fetch_add(1, Ordering::Relaxed) + 1;
                if self.hang_refresh.load(Ordering::Relaxed) {
                    call.closed().await;
                    return Ok(());
                }
                say(
                    &call.replies,
                    pb::RefreshResumeTokenResponse {
                        token: format!("MARKER-{count}"),
                        refresh_in: Some(prost_types::Duration { seconds: 43_200, nanos: 0 }),
                        expires_at: Some(prost_types::Timestamp { seconds: 1 << 40, nanos: 0 }),
                    },
                )
                .await;
                Ok(())
            }
            other => Err(CallError::unknown_rpc(other)),
        }
    }
}

async fn say<M: prost::Message>(replies: &Replies, message: M) {
    let _ = replies.send(&message).await;
}

/// What the next dial brings.
enum Dialing {
    Connect,
    Fail(DialFailure),
    Hang,
    /// Takes this stream instead of the server's.
    Give(DuplexStream),
}

/// Dials the server, after the prepared outcomes are used up.
struct Lab {
    server: Arc<Server>,
    script: Mutex<VecDeque<Dialing>>,
    /// Time and resume token of every dial.
    dials: Mutex<Vec<(Instant, Option<String>)>>,
    /// Cuts the connection.
    cut: Mutex<Option<tokio::task::AbortHandle>>,
}

impl Dial for Lab {
    fn dial<'a>(&'a self, resume_token: Option<&'a SecretString>) -> DialFuture<'a> {
        Box::pin(async move {
            let token = resume_token.map(|token| token.expose_secret().to_owned());
            self.dials.lock().unwrap().push((Instant::now(), token));
            let next = self.script.lock().unwrap().pop_front();
            let transport = match next.unwrap_or(Dialing::Connect) {
                Dialing::Fail(error) => return Err(error),
                Dialing::Hang => std::future::pending().await,
                Dialing::Give(stream) => stream,
                Dialing::Connect => {
                    let (ours, theirs) = duplex(1 << 16);
                    let (session, driver) = Connection::server(theirs);
                    let driver = tokio::spawn(driver);
                    *self.cut.lock().unwrap() = Some(driver.abort_handle());
                    let server = Arc::clone(&self.server);
                    server.live.fetch_add(1, Ordering::Relaxed);
                    tokio::spawn(async move {
                        serve(session, Arc::clone(&server)).await;
                        server.live.fetch_sub(1, Ordering::Relaxed);
                    });
                    ours
                }
            };
            Ok(Dialed { transport: Box::new(transport), server_version: Some("v2.26.0".into()) })
        })
    }

    fn session_is_good(&self) -> std::pin::Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async { !self.server.session_bad.load(Ordering::Relaxed) })
    }
}

struct Run {
    lab: Arc<Lab>,
    server: Arc<Server>,
    handle: Handle,
    events: mpsc::Receiver<ControlEvent>,
}

fn start(script: Vec<Dialing>) -> Run {
    start_with(Server::default(), script, ControllerRole::Client { owner: OWNER })
}

fn start_with(server: Server, script: Vec<Dialing>, role: ControllerRole) -> Run {
    let server = Arc::new(server);
    let lab = Arc::new(Lab {
        server: Arc::clone(&server),
        script: Mutex::new(script.into()),
        dials: Mutex::default(),
        cut: Mutex::default(),
    });
    let (handle, events) = Controller::spawn(ControllerConfig::new(role), Arc::clone(&lab) as Arc<dyn Dial>);
    Run { lab, server, handle, events }
}

impl Run {
    async fn next(&mut self) -> ControlEvent {
        timeout(Duration::from_secs(600), self.events.recv()).await.expect("an event").expect("the controller runs")
    }

    /// Skips to the first event that `pick` takes.
    async fn until<T>(&mut self, pick: impl Fn(ControlEvent) -> Option<T>) -> T {
        loop {
            if let Some(found) = pick(self.next().await) {
                return found;
            }
        }
    }

    async fn connected(&mut self) {
        self.until(|event| matches!(event, ControlEvent::Connected { .. }).then_some(())).await;
    }

    async fn lost(&mut self) -> (String, Duration, bool) {
        self.until(|event| match event {
            ControlEvent::Lost { reason, retry_in, signed_out } => Some((reason, retry_in, signed_out)),
            _ => None,
        })
        .await
    }

    fn cut(&self) {
        self.lab.cut.lock().unwrap().take().unwrap().abort();
    }

    fn dials(&self) -> usize {
        self.lab.dials.lock().unwrap().len()
    }

    fn token_of_dial(&self, at: usize) -> Option<String> {
        self.lab.dials.lock().unwrap()[at].1.clone()
    }

    /// Waits until the server has heard so much.
    async fn heard(&self, count: usize) -> Vec<Heard> {
        for _ in 0..2000 {
            let heard = self.server.heard();
            if heard.len() >= count {
                return heard;
            }
            sleep(Duration::from_millis(1)).await;
        }
        panic!("heard only {:?}", self.server.heard());
    }

    async fn coordinator_says(&self, response: pb::CoordinateResponse) {
        let replies = self.server.coordinate.lock().unwrap().clone().unwrap();
        replies.send(&response).await.unwrap();
    }
}

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn node(number: u8) -> Node {
    let address = Prefix::single(coder_address(id(number.into())));
    Node {
        id: number.into(),
        as_of: None,
        key: NodePublic::from_bytes([number; 32]).unwrap(),
        disco: DiscoPublic::from_bytes([number; 32]).unwrap(),
        home: RegionId::new(999),
        derp_latency: Default::default(),
        forced_websocket: Default::default(),
        addresses: vec![address],
        allowed_ips: vec![address],
        endpoints: vec![],
    }
}

fn peer(number: u128, kind: Kind, with: Option<Node>) -> pb::CoordinateResponse {
    pb::CoordinateResponse {
        peer_updates: vec![pb::coordinate_response::PeerUpdate {
            id: id(number).as_bytes().to_vec(),
            kind: kind.into(),
            node: with.map(|node| codervpn_control::convert::node_to_proto(&node)),
            reason: "test".into(),
        }],
        ..Default::default()
    }
}

fn network_error() -> DialFailure {
    ApiError::Unreachable { obstacle: Obstacle::Connection, text: "refused".into() }
}

fn reply(status: u16, message: &str) -> codervpn_control::api::Reply {
    codervpn_control::api::Reply {
        method: "GET".into(),
        url: "https://coder.example.com/api/v2/tailnet".into(),
        status,
        message: message.into(),
        detail: String::new(),
        validations: vec![],
        retry_after: None,
    }
}

fn unauthorized(class: codervpn_control::api::Unauthorized) -> DialFailure {
    ApiError::Unauthorized { reply: Box::new(reply(401, "text")), class }
}

#[tokio::test(start_paused = true)]
async fn a_connection_from_start_to_graceful_end() {
    let mut run = start(vec![]);
    assert!(matches!(run.next().await, ControlEvent::Connecting { attempt: 1 }));
    run.connected().await;
    assert!(matches!(run.next().await, ControlEvent::Workspaces(update) if update.full));
    assert!(matches!(run.next().await, ControlEvent::DerpMap(_)));
    run.handle.set_destinations([id(1)]).await.unwrap();
    run.handle.set_self_node(node(9));
    run.heard(2).await;
    run.coordinator_says(peer(1, Kind::Node, Some(node(1)))).await;
    let updates = run.until(|event| match event {
        ControlEvent::PeerUpdates(updates) => Some(updates),
        _ => None,
    });
    assert!(matches!(&updates.await[..], [update] if update.id == id(1) && update.reason == "test"));
    let (server, begin) = (Arc::clone(&run.server), Instant::now());
    run.handle.shutdown().await;
    assert!(begin.elapsed() < Duration::from_millis(100));
    let heard = server.heard();
    assert_eq!(heard.last(), Some(&Heard::Disconnect), "{heard:?}");
    assert_eq!(run.lab.dials.lock().unwrap().len(), 1);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.live.load(Ordering::Relaxed), 0);
}

/// The server hangs up in the same instant as the stop signal comes, and any number of times in a row.
#[tokio::test(start_paused = true)]
async fn tr_1_no_phantom_redial() {
    for _ in 0..200 {
        let mut run = start(vec![]);
        run.connected().await;
        // Old enough for a redial without delay.
        sleep(Duration::from_secs(2)).await;
        run.cut();
        run.handle.request_stop();
        let lab = Arc::clone(&run.lab);
        run.handle.shutdown().await;
        sleep(Duration::from_secs(30)).await;
        assert_eq!(lab.dials.lock().unwrap().len(), 1);
    }
}

/// TR-2, TR-43, TR-64: the loop survives dial errors, with the waits of CC-1.
#[tokio::test(start_paused = true)]
async fn tr_2_dial_errors_are_retried_with_growing_waits() {
    let mut run = start((0..4).map(|_| Dialing::Fail(network_error())).collect());
    let (reason, retry_in, signed_out) = run.lost().await;
    assert_eq!((reason.as_str(), signed_out), ("refused", false));
    assert_eq!(retry_in.as_micros(), 80_901);
    run.connected().await;
    let dials = run.lab.dials.lock().unwrap().clone();
    let waits: Vec<u128> = dials.windows(2).map(|pair| (pair[1].0 - pair[0].0).as_millis()).collect();
    assert!(
        waits.iter().zip([80, 130, 211, 342]).all(|(wait, wanted)| (wanted..wanted + 4).contains(wait)),
        "{waits:?}"
    );
    run.handle.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn tr_4_disconnect_is_heard_although_the_server_reads_slowly() {
    let mut run = start(vec![]);
    run.connected().await;
    run.handle.set_self_node(node(9));
    run.heard(1).await;
    *run.server.read_delay.lock().unwrap() = Duration::from_millis(300);
    let server = Arc::clone(&run.server);
    run.handle.shutdown().await;
    assert_eq!(server.heard()[1..], [Heard::Disconnect]);
}

#[tokio::test(start_paused = true)]
async fn tr_5_a_server_that_never_hangs_up_costs_one_second() {
    let mut run = start(vec![]);
    run.connected().await;
    run.server.ignore_disconnect.store(true, Ordering::Relaxed);
    let begin = Instant::now();
    run.handle.shutdown().await;
    assert!((1000..2100).contains(&begin.elapsed().as_millis()), "{:?}", begin.elapsed());
}

/// TR-6: stop before the first connect, during a dial, during a wait; and by dropping the handle.
#[tokio::test(start_paused = true)]
async fn tr_6_stop_at_any_time_returns_at_once() {
    let run = start(vec![]);
    run.handle.shutdown().await;
    assert!(run.lab.dials.lock().unwrap().is_empty());

    let mut run = start(vec![Dialing::Hang]);
    run.next().await;
    let begin = Instant::now();
    run.handle.shutdown().await;
    assert_eq!(begin.elapsed(), Duration::ZERO);

    let mut run = start((0..20).map(|_| Dialing::Fail(network_error())).collect());
    while run.lost().await.1 < Duration::from_secs(10) {}
    let begin = Instant::now();
    run.handle.shutdown().await;
    assert_eq!(begin.elapsed(), Duration::ZERO);

    let mut run = start(vec![]);
    run.connected().await;
    drop(run.handle);
    while run.events.recv().await.is_some() {}
    assert_eq!(run.server.heard().last(), Some(&Heard::Disconnect));
}

/// TR-7, TR-8: a cut connection says no Disconnect; the next one carries our node with a fresh time and every tunnel once.
#[tokio::test(start_paused = true)]
async fn tr_8_everything_is_said_again_after_a_reconnect() {
    let mut run = start(vec![]);
    run.handle.set_self_node(node(9));
    run.handle.set_destinations([id(1), id(2), id(3)]).await.unwrap();
    run.connected().await;
    let first = run.heard(4).await;
    assert_eq!(first[1..], [Heard::Add(id(1)), Heard::Add(id(2)), Heard::Add(id(3))]);
    sleep(Duration::from_secs(2)).await;
    run.cut();
    let (reason, retry_in, _) = run.lost().await;
    assert_eq!(retry_in, Duration::ZERO, "{reason}");
    run.handle.add_destinations([id(3), id(4)]).await.unwrap();
    run.handle.remove_destinations([id(1), id(7)]).await.unwrap();
    run.connected().await;
    let heard = run.heard(8).await;
    assert_eq!(heard[4], Heard::Gone);
    assert!(matches!((&heard[0], &heard[5]), (Heard::Node(old), Heard::Node(new)) if old != new), "ND-8: {heard:?}");
    assert!(!heard.contains(&Heard::Disconnect));
    // The commands may have come before or after the redial; what counts is what the server knows in the end.
    run.handle.settled().await.unwrap();
    sleep(Duration::from_millis(100)).await;
    let mut tunnels = BTreeSet::new();
    for heard in &run.server.heard()[5..] {
        match heard {
            Heard::Add(id) => assert!(tunnels.insert(*id), "{id} twice"),
            Heard::Remove(id) => assert!(tunnels.remove(id)),
            _ => {}
        }
    }
    assert_eq!(tunnels, [id(2), id(3), id(4)].into());
    run.handle.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn tr_9_sync_sends_differences_adds_first() {
    let mut run = start(vec![]);
    run.connected().await;
    run.handle.set_destinations([id(1), id(2), id(3)]).await.unwrap();
    run.heard(3).await;
    run.handle.set_destinations([id(2), id(3), id(4), id(4)]).await.unwrap();
    run.handle.set_destinations([id(4), id(3), id(2)]).await.unwrap();
    run.handle.ready_for_handshake([id(4)]).await.unwrap();
    run.handle.add_destinations([id(5)]).await.unwrap();
    let heard = run.heard(6).await;
    assert_eq!(heard[3..], [Heard::Add(id(4)), Heard::Remove(id(1)), Heard::Add(id(5))], "and no READY (CC-23)");
    run.handle.shutdown().await;
}

/// TR-18, ND-6: nothing without a home relay, nothing twice.
#[tokio::test(start_paused = true)]
async fn tr_18_a_node_without_home_is_kept_back() {
    let mut run = start(vec![]);
    run.connected().await;
    let mut ours = node(9);
    ours.home = None;
    run.handle.set_self_node(ours.clone());
    run.handle.settled().await.unwrap();
    ours.home = RegionId::new(999);
    run.handle.set_self_node(ours.clone());
    run.heard(1).await;
    ours.as_of = Some(codervpn_wire::node::Timestamp { seconds: 5, nanos: 0 });
    run.handle.set_self_node(ours);
    run.handle.add_destinations([id(1)]).await.unwrap();
    assert_eq!(run.heard(2).await[1..], [Heard::Add(id(1))]);
    run.handle.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn tr_21_a_refused_resume_token_is_left_out_once() {
    let mut run =
        start(vec![Dialing::Connect, Dialing::Fail(unauthorized(codervpn_control::api::Unauthorized::ResumeToken))]);
    run.connected().await;
    sleep(Duration::from_secs(2)).await;
    run.cut();
    run.lost().await;
    run.connected().await;
    assert_eq!(run.token_of_dial(1).as_deref(), Some("MARKER-1"));
    assert_eq!(run.token_of_dial(2), None);
    sleep(Duration::from_secs(2)).await;
    run.cut();
    run.connected().await;
    assert_eq!(run.token_of_dial(3).as_deref(), Some("MARKER-2"));
    run.handle.shutdown().await;
}

/// TR-22, TR-58, TR-61: permanent at first, retried at the ceiling later, left again on success.
#[tokio::test(start_paused = true)]
async fn tr_22_signed_out_is_permanent_at_first_only() {
    use codervpn_control::api::Unauthorized::SignedOut;
    let mut run = start(vec![Dialing::Fail(unauthorized(SignedOut))]);
    let refused = run.until(|event| match event {
        ControlEvent::Refused { error } => Some(error),
        _ => None,
    });
    assert!(refused.await.is_signed_out());
    assert!(run.events.recv().await.is_none());
    assert!(run.handle.set_destinations([]).await.is_err());
    run.handle.shutdown().await;

    let mut run = start(vec![Dialing::Connect, Dialing::Fail(unauthorized(SignedOut))]);
    run.connected().await;
    sleep(Duration::from_secs(2)).await;
    run.cut();
    assert!(!run.lost().await.2);
    let (_, retry_in, signed_out) = run.lost().await;
    assert_eq!((retry_in, signed_out), (Duration::from_secs(10), true));
    run.connected().await;
    run.handle.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn tr_60_an_outage_on_the_first_dial_ends_connected() {
    let outage = || Dialing::Fail(unauthorized(codervpn_control::api::Unauthorized::Outage));
    let mut run = start((0..10).map(|_| outage()).collect());
    let (_, _, signed_out) = run.lost().await;
    assert!(!signed_out);
    run.connected().await;
    run.handle.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn tr_24_a_server_without_resume_tokens_is_fine() {
    let server = Server::default();
    server.without_resume_tokens.store(true, Ordering::Relaxed);
    let mut run = start_with(server, vec![], ControllerRole::Client { owner: OWNER });
    run.connected().await;
    sleep(Duration::from_secs(20)).await;
    assert_eq!(run.dials(), 1);
    run.cut();
    run.lost().await;
    run.connected().await;
    assert_eq!(run.token_of_dial(1), None);
    run.handle.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn tr_25_a_refresh_that_never_returns_holds_nothing() {
    let server = Server::default();
    server.hang_refresh.store(true, Ordering::Relaxed);
    let mut run = start_with(server, vec![], ControllerRole::Client { owner: OWNER });
    run.connected().await;
    sleep(Duration::from_secs(2)).await;
    let cut = Instant::now();
    run.cut();
    run.connected().await;
    assert!(cut.elapsed() < Duration::from_millis(50));
    run.handle.shutdown().await;
}

/// TR-27, CC-28: the text reaches the receiver, the stream is read to its end, the token that somebody else has is dropped.
#[tokio::test(start_paused = true)]
async fn tr_27_the_coordinators_last_words_are_shown() {
    let mut run = start(vec![]);
    run.connected().await;
    sleep(Duration::from_secs(2)).await;
    run.handle.add_destinations([id(1)]).await.unwrap();
    run.heard(1).await;
    let text = "peer ID overwritten by new connection";
    run.coordinator_says(pb::CoordinateResponse { error: text.into(), ..Default::default() }).await;
    run.coordinator_says(peer(1, Kind::Lost, None)).await;
    let replies = run.server.coordinate.lock().unwrap().clone().unwrap();
    replies.close().await.unwrap();
    let said = run.until(|event| match event {
        ControlEvent::CoordinatorError(text) => Some(text),
        _ => None,
    });
    assert_eq!(said.await, text);
    assert!(matches!(run.next().await, ControlEvent::PeerUpdates(updates) if updates[0].kind == PeerUpdateKind::Lost));
    assert!(matches!(run.next().await, ControlEvent::AllPeersLost));
    assert!(run.lost().await.0.contains(text));
    run.connected().await;
    assert_eq!(run.token_of_dial(1), None);
    run.handle.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn tr_28_a_ready_error_ends_nothing() {
    let mut run = start(vec![]);
    run.connected().await;
    run.handle.settled().await.unwrap();
    run.handle.set_self_node(node(9));
    run.heard(1).await;
    let text = "ready for handshake error: you do not share a tunnel with \"x\"";
    run.coordinator_says(pb::CoordinateResponse { error: text.into(), ..Default::default() }).await;
    let said = run.until(|event| match event {
        ControlEvent::CoordinatorError(text) => Some(text),
        _ => None,
    });
    assert_eq!(said.await, text);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(run.dials(), 1);
    run.handle.shutdown().await;
}

/// CC-24, TR-56: strange peers, bad ids, unknown kinds, nodes without home: nothing comes of them, and the stray tunnel is
/// removed once.
#[tokio::test(start_paused = true)]
async fn cc_24_what_is_not_wanted_is_not_passed_on() {
    let mut run = start(vec![]);
    run.connected().await;
    run.handle.add_destinations([id(1)]).await.unwrap();
    run.heard(1).await;
    run.coordinator_says(peer(77, Kind::Node, Some(node(7)))).await;
    run.coordinator_says(peer(77, Kind::Node, Some(node(7)))).await;
    let mut bad = peer(1, Kind::Node, Some(node(1)));
    bad.peer_updates[0].id.truncate(3);
    run.coordinator_says(bad).await;
    let mut odd = peer(1, Kind::Node, Some(node(1)));
    odd.peer_updates[0].kind = 9;
    run.coordinator_says(odd).await;
    let mut homeless = node(1);
    homeless.home = None;
    run.coordinator_says(peer(1, Kind::Node, Some(homeless))).await;
    run.coordinator_says(peer(1, Kind::Node, None)).await;
    run.coordinator_says(peer(1, Kind::ReadyForHandshake, None)).await;
    let updates = run.until(|event| match event {
        ControlEvent::PeerUpdates(updates) => Some(updates),
        _ => None,
    });
    assert_eq!(updates.await[0].kind, PeerUpdateKind::ReadyForHandshake);
    assert_eq!(run.heard(2).await[1..], [Heard::Remove(id(77))]);
    run.handle.shutdown().await;
}

/// TR-30, CC-49: an agent of an unknown workspace ends the connection, the next snapshot heals. An unknown deletion does not.
#[tokio::test(start_paused = true)]
async fn tr_30_broken_updates_end_the_connection_and_heal() {
    let mut run = start(vec![]);
    run.connected().await;
    run.until(|event| matches!(event, ControlEvent::Workspaces(_)).then_some(())).await;
    sleep(Duration::from_secs(2)).await;
    let stray = pb::Agent { id: id(5).as_bytes().to_vec(), name: "a".into(), workspace_id: id(6).as_bytes().to_vec() };
    let replies = run.server.workspaces.lock().unwrap().clone().unwrap();
    say(&replies, pb::WorkspaceUpdate { deleted_agents: vec![stray.clone()], ..Default::default() }).await;
    let update = run.until(|event| match event {
        ControlEvent::Workspaces(update) => Some(update),
        _ => None,
    });
    assert!(!update.await.full);
    say(&replies, pb::WorkspaceUpdate { upserted_agents: vec![stray.clone()], ..Default::default() }).await;
    assert!(run.lost().await.0.contains("unknown workspace"));
    run.connected().await;
    let full = run.until(|event| match event {
        ControlEvent::Workspaces(update) => Some(update.full),
        _ => None,
    });
    assert!(full.await);
    run.handle.shutdown().await;
}

/// TR-51, CC-1: a server that accepts dials and refuses tunnels is not hammered.
#[tokio::test(start_paused = true)]
async fn tr_51_refused_tunnels_keep_the_back_off() {
    let server = Server::default();
    server.refuse_tunnels.store(true, Ordering::Relaxed);
    let mut run = start_with(server, vec![], ControllerRole::Client { owner: OWNER });
    run.handle.set_destinations([id(1)]).await.unwrap();
    let begin = Instant::now();
    for _ in 0..8 {
        assert!(run.lost().await.0.contains("authorization: "));
    }
    assert!(begin.elapsed() > Duration::from_secs(3), "{:?}", begin.elapsed());
    run.handle.shutdown().await;
}

/// One of five agents is refused each time: the others get their tunnels, and it is tried again after a minute.
#[tokio::test(start_paused = true)]
async fn tr_52_a_refused_destination_does_not_keep_the_others_away() {
    let server = Server::default();
    *server.refused.lock().unwrap() = Some(id(3));
    let mut run = start_with(server, vec![], ControllerRole::Client { owner: OWNER });
    run.handle.set_destinations((1..=5).map(id)).await.unwrap();
    // Three times all at once, then one at a time, and the refused one once more.
    for _ in 0..5 {
        assert!(run.lost().await.0.contains("authorization: "));
    }
    run.connected().await;
    let last = || {
        let heard = run.server.heard();
        let begin = heard.iter().rposition(|heard| *heard == Heard::Gone).map_or(0, |at| at + 1);
        heard[begin..].to_vec()
    };
    sleep(Duration::from_secs(10)).await;
    let dials = run.dials();
    let heard = last();
    let tail: Vec<_> = heard.iter().rev().take(4).rev().cloned().collect();
    assert_eq!(tail, [1, 2, 4, 5].map(|number| Heard::Add(id(number))), "{heard:?}");
    *run.server.refused.lock().unwrap() = None;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(last().last(), Some(&Heard::Add(id(3))), "quarantine ends");
    assert_eq!(run.dials(), dials);
    run.handle.shutdown().await;
}

/// CC-66, CC-67: while everything is refused nobody is left out, whether the session is said to be good or not.
#[tokio::test(start_paused = true)]
async fn tr_52_an_outage_is_no_verdict() {
    for session_bad in [false, true] {
        let server = Server::default();
        server.refuse_tunnels.store(true, Ordering::Relaxed);
        server.session_bad.store(session_bad, Ordering::Relaxed);
        let mut run = start_with(server, vec![], ControllerRole::Client { owner: OWNER });
        run.handle.set_destinations((1..=3).map(id)).await.unwrap();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(120) {
            assert!(!run.lost().await.2);
        }
        run.server.refuse_tunnels.store(false, Ordering::Relaxed);
        run.server.heard.lock().unwrap().clear();
        run.connected().await;
        sleep(Duration::from_secs(5)).await;
        let heard = run.server.heard();
        for number in 1..=3 {
            assert!(heard.contains(&Heard::Add(id(number))), "{session_bad}: {heard:?}");
        }
        run.handle.shutdown().await;
    }
}

/// TR-42, WS-13: garbage instead of yamux, and an end right after the 101: both redial.
#[tokio::test(start_paused = true)]
async fn tr_42_hostile_and_abrupt_ends_redial() {
    let (ours, theirs) = duplex(64);
    drop(theirs);
    let (garbled, mut peer) = duplex(64);
    tokio::io::AsyncWriteExt::write_all(&mut peer, b"HTTP/1.1 400 Bad Request\r\n").await.unwrap();
    let mut run = start(vec![Dialing::Give(ours), Dialing::Give(garbled)]);
    run.lost().await;
    assert!(run.lost().await.0.contains("yamux"));
    run.connected().await;
    run.until(|event| matches!(event, ControlEvent::Workspaces(_)).then_some(())).await;
    run.handle.shutdown().await;
}

/// TR-41: a frozen server is noticed within 45 s by its silence; the stop during that time is as fast as ever.
#[tokio::test(start_paused = true)]
async fn tr_41_a_frozen_server_is_lost_after_40_s() {
    let (ours, theirs) = duplex(1 << 16);
    let mut run = start(vec![Dialing::Give(ours)]);
    run.connected().await;
    let begin = Instant::now();
    let reason = run.lost().await.0;
    assert!(reason.contains("keepalive"), "{reason}");
    assert_eq!(begin.elapsed().as_secs(), 40);
    drop(theirs);
    run.handle.shutdown().await;
}

/// A receiver that takes nothing stops the flow, loses nothing and can still give commands.
#[tokio::test(start_paused = true)]
async fn a_slow_receiver_is_waited_for() {
    let mut run = start(vec![]);
    run.connected().await;
    run.handle.add_destinations([id(1)]).await.unwrap();
    run.heard(1).await;
    for _ in 0..300 {
        run.coordinator_says(peer(1, Kind::ReadyForHandshake, None)).await;
    }
    for number in 0..200 {
        run.handle.add_destinations([id(100 + number)]).await.unwrap();
    }
    run.handle.settled().await.unwrap();
    for _ in 0..300 {
        run.until(|event| matches!(event, ControlEvent::PeerUpdates(_)).then_some(())).await;
    }
    run.handle.shutdown().await;
}

/// 8.10: the agent's side has two calls and may acknowledge; peers need not be destinations.
#[tokio::test(start_paused = true)]
async fn an_agent_acknowledges_nodes() {
    let mut run = start_with(Server::default(), vec![], ControllerRole::Agent);
    run.connected().await;
    run.handle.set_self_node(node(9));
    run.heard(1).await;
    run.coordinator_says(peer(5, Kind::Node, Some(node(5)))).await;
    let updates = run.until(|event| match event {
        ControlEvent::PeerUpdates(updates) => Some(updates),
        _ => None,
    });
    assert_eq!(updates.await[0].id, id(5));
    run.handle.ready_for_handshake([id(5)]).await.unwrap();
    assert_eq!(run.heard(2).await[1], Heard::Ready(vec![id(5)]));
    assert_eq!(run.server.refreshes.load(Ordering::Relaxed), 0);
    run.handle.shutdown().await;
}

/// TR-65: no event shows the resume token.
#[tokio::test(start_paused = true)]
async fn tr_65_events_show_no_token() {
    let mut run = start(vec![]);
    run.connected().await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(run.server.refreshes.load(Ordering::Relaxed), 1);
    run.cut();
    let mut shown = String::new();
    for _ in 0..6 {
        shown += &format!("{:?}", run.next().await);
    }
    assert!(!shown.contains("MARKER"), "{shown}");
    run.handle.shutdown().await;
}
