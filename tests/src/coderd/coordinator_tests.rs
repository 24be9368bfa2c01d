//! The hang-up matrix of 8.5 and the rules of 8.3, row by row.

use codervpn_proto::tailnet::coordinate_request::{Disconnect, ReadyForHandshake, Tunnel, UpdateSelf};
use codervpn_wire::node::coder_address;
use tokio::sync::mpsc::error::TryRecvError;

use super::super::workspaces::WorkspaceStore;
use super::*;

const AGENT: Uuid = Uuid::from_u128(0xaaaa_aaaa_bbbb_4ccc_8ddd_eeee_eeee_eeee);
const STRANGER: Uuid = Uuid::from_u128(0xffff);
const CLIENT: Uuid = Uuid::from_u128(0x11);
const USER: Uuid = Uuid::from_u128(0x99);

type Responses = mpsc::Receiver<CoordinateResponse>;

struct Fixture {
    coordinator: Coordinator,
    store: Arc<WorkspaceStore>,
}

impl Fixture {
    fn new() -> Self {
        let store = Arc::new(WorkspaceStore::default());
        for (owner, agent) in [(USER, AGENT), (STRANGER, STRANGER)] {
            let workspace = store.create(owner, "dev").unwrap();
            store.finish_build(workspace, &[(agent, "main".into())]).unwrap();
        }
        Self { coordinator: Coordinator::new(Arc::default()), store }
    }

    fn client(&self, id: Uuid) -> (Membership, Responses) {
        self.coordinator.connect(id, Authorization::User { user: USER, store: Arc::clone(&self.store) })
    }

    fn agent(&self) -> (Membership, Responses) {
        self.coordinator.connect(AGENT, Authorization::Agent(AGENT))
    }

    /// A client and an agent that have each other's node; what was said so far is taken away.
    fn joined(&self) -> ((Membership, Responses), (Membership, Responses)) {
        let (agent, mut to_agent) = self.agent();
        let (client, mut to_client) = self.client(CLIENT);
        self.request(&agent, &update_self(AGENT, 1));
        self.request(&client, &update_self(CLIENT, 1));
        self.request(&client, &add(AGENT));
        assert_eq!(news(&mut to_client), [(AGENT, Kind::Node, "add tunnel".into())]);
        assert_eq!(news(&mut to_agent), [(CLIENT, Kind::Node, "add tunnel".into())]);
        ((client, to_client), (agent, to_agent))
    }

    fn request(&self, membership: &Membership, request: &CoordinateRequest) {
        assert_eq!(self.coordinator.request(membership, request), Next::Continue);
    }

    fn last_request(&self, membership: &Membership, request: &CoordinateRequest) {
        assert_eq!(self.coordinator.request(membership, request), Next::Over);
    }
}

fn node(id: Uuid, home: i32) -> Node {
    let address = format!("{}/128", coder_address(id));
    Node {
        key: [b"np".as_slice(), &[7; 32]].concat(),
        as_of: Some(prost_types::Timestamp::default()),
        preferred_derp: home,
        addresses: vec![address.clone()],
        allowed_ips: vec![address],
        ..Node::default()
    }
}

fn update_self(id: Uuid, home: i32) -> CoordinateRequest {
    let update_self = Some(UpdateSelf { node: Some(node(id, home)) });
    CoordinateRequest { update_self, ..CoordinateRequest::default() }
}

fn tunnel(id: Uuid) -> Option<Tunnel> {
    Some(Tunnel { id: id.into_bytes().to_vec() })
}

fn add(id: Uuid) -> CoordinateRequest {
    CoordinateRequest { add_tunnel: tunnel(id), ..CoordinateRequest::default() }
}

fn remove(id: Uuid) -> CoordinateRequest {
    CoordinateRequest { remove_tunnel: tunnel(id), ..CoordinateRequest::default() }
}

fn ready(id: Uuid) -> CoordinateRequest {
    let ready_for_handshake = vec![ReadyForHandshake { id: id.into_bytes().to_vec() }];
    CoordinateRequest { ready_for_handshake, ..CoordinateRequest::default() }
}

fn disconnect() -> CoordinateRequest {
    CoordinateRequest { disconnect: Some(Disconnect {}), ..CoordinateRequest::default() }
}

/// Updates that wait; errors are not expected among them.
fn news(responses: &mut Responses) -> Vec<(Uuid, Kind, String)> {
    let mut all = Vec::new();
    while let Ok(response) = responses.try_recv() {
        assert_eq!(response.error, "");
        for update in response.peer_updates {
            assert_eq!(update.node.is_some(), update.kind() == Kind::Node);
            all.push((Uuid::from_slice(&update.id).unwrap(), update.kind(), update.reason.clone()));
        }
    }
    all
}

/// The last thing said, then the end.
fn ends_with(responses: &mut Responses, text: &str) {
    assert_eq!(responses.try_recv().map(|response| response.error), Ok(text.to_owned()));
    assert_eq!(responses.try_recv(), Err(TryRecvError::Disconnected));
}

fn ends(responses: &mut Responses) {
    assert_eq!(responses.try_recv(), Err(TryRecvError::Disconnected));
}

#[test]
fn a_disconnect_is_graceful() {
    let fixture = Fixture::new();
    let ((_client, mut to_client), (agent, mut to_agent)) = fixture.joined();
    fixture.last_request(&agent, &disconnect());
    ends(&mut to_agent);
    assert_eq!(news(&mut to_client), [(AGENT, Kind::Disconnected, "graceful disconnect".into())]);
    // SV-9: the end of the stream behind it changes nothing.
    fixture.coordinator.end(&agent, None);
    assert_eq!(news(&mut to_client), []);
}

#[test]
fn the_end_of_a_stream_is_a_loss_and_the_agent_is_found_again() {
    let fixture = Fixture::new();
    let ((_client, mut to_client), (agent, mut to_agent)) = fixture.joined();
    fixture.coordinator.end(&agent, None);
    ends(&mut to_agent);
    assert_eq!(news(&mut to_client), [(AGENT, Kind::Lost, "lost".into())]);
    let (agent, mut to_agent) = fixture.agent();
    assert_eq!(news(&mut to_agent), [(CLIENT, Kind::Node, "init".into())]);
    fixture.request(&agent, &update_self(AGENT, 2));
    assert_eq!(news(&mut to_client), [(AGENT, Kind::Node, "node update".into())]);
}

/// 8.4, with its texts.
#[test]
fn what_is_not_authorised_ends_the_peer() {
    const NO_AGENT: &str = "authorization: workspace agent not found or you do not have permission";
    let empty = CoordinateRequest { update_self: Some(UpdateSelf { node: None }), ..CoordinateRequest::default() };
    let short = CoordinateRequest { add_tunnel: Some(Tunnel { id: vec![1, 2, 3] }), ..CoordinateRequest::default() };
    let with_address = |address: &str| {
        let mut request = update_self(CLIENT, 1);
        let node = request.update_self.as_mut().and_then(|update| update.node.as_mut());
        node.unwrap().addresses = vec![address.to_owned()];
        request
    };
    let bad_address = "authorization: parse node address: netip.ParsePrefix(\"zzz/128\"): ParseAddr(\"zzz\"): unable \
                       to parse IP";
    for (request, text) in [
        (add(STRANGER), NO_AGENT),
        (add(Uuid::from_u128(5)), NO_AGENT),
        (ready(AGENT), "authorization: clients may not send ready_for_handshake"),
        (empty, "update_self node is required"),
        (short, "authorization: parse add tunnel id: invalid UUID (got 3 bytes)"),
        (with_address("fd00::/64"), "authorization: invalid address bits, expected 128, got 64"),
        (with_address("zzz/128"), bad_address),
    ] {
        let fixture = Fixture::new();
        let ((client, mut to_client), (_agent, mut to_agent)) = fixture.joined();
        fixture.last_request(&client, &request);
        ends_with(&mut to_client, text);
        assert_eq!(news(&mut to_agent), [(CLIENT, Kind::Lost, "lost".into())]);
    }
    let fixture = Fixture::new();
    for (request, text) in [
        (add(CLIENT), "authorization: agents cannot open tunnels".to_owned()),
        (update_self(CLIENT, 1), format!("authorization: invalid node address, got {}", coder_address(CLIENT))),
    ] {
        let (agent, mut to_agent) = fixture.agent();
        fixture.last_request(&agent, &request);
        ends_with(&mut to_agent, &text);
    }
}

#[test]
fn a_malformed_tunnel_that_needs_no_authorisation_ends_the_peer() {
    let fixture = Fixture::new();
    let (client, mut to_client) = fixture.client(CLIENT);
    let request = CoordinateRequest { remove_tunnel: Some(Tunnel { id: vec![1] }), ..CoordinateRequest::default() };
    fixture.last_request(&client, &request);
    ends_with(&mut to_client, "unable to convert bytes to UUID: invalid UUID (got 1 bytes)");
}

#[test]
fn the_same_id_again_overwrites_and_tunnels_stay() {
    let fixture = Fixture::new();
    let ((client, mut to_client), (_agent, mut to_agent)) = fixture.joined();
    let (_new, mut to_new) = fixture.client(CLIENT);
    ends_with(&mut to_client, "peer ID overwritten by new connection");
    assert_eq!(news(&mut to_agent), []);
    assert_eq!(news(&mut to_new), [(AGENT, Kind::Node, "init".into())]);
    // What the old one still says is not heard.
    fixture.last_request(&client, &disconnect());
    fixture.coordinator.end(&client, None);
    assert_eq!(news(&mut to_agent), []);
    assert_eq!(fixture.coordinator.overwrites(), 1);
}

#[test]
fn a_full_queue_ends_its_peer() {
    let fixture = Fixture::new();
    let ((_client, mut to_client), (agent, mut to_agent)) = fixture.joined();
    for home in 2..2 + RESPONSE_QUEUE as i32 {
        fixture.request(&agent, &update_self(AGENT, home));
    }
    assert_eq!(news(&mut to_agent), []);
    fixture.request(&agent, &update_self(AGENT, 1));
    assert_eq!(news(&mut to_agent), [(CLIENT, Kind::Disconnected, "failed update".into())]);
    // There was no room for an error.
    assert_eq!(news(&mut to_client).len(), RESPONSE_QUEUE);
    ends(&mut to_client);
}

#[test]
fn closing_ends_everybody() {
    let fixture = Fixture::new();
    let ((_client, mut to_client), (_agent, mut to_agent)) = fixture.joined();
    fixture.coordinator.close();
    // The client goes first and is gone when the agent goes.
    ends_with(&mut to_client, "coordinator closed");
    let lost = to_agent.try_recv().unwrap();
    assert_eq!(lost.peer_updates[0].reason, "coordinator close");
    ends_with(&mut to_agent, "coordinator closed");
    let (_late, mut to_late) = fixture.client(CLIENT);
    ends(&mut to_late);
}

#[test]
fn ready_for_handshake_passes_along_a_tunnel_only() {
    let fixture = Fixture::new();
    let ((_client, mut to_client), (agent, mut to_agent)) = fixture.joined();
    fixture.request(&agent, &ready(CLIENT));
    assert_eq!(news(&mut to_client), [(AGENT, Kind::ReadyForHandshake, String::new())]);
    fixture.request(&agent, &ready(STRANGER));
    let text = format!("ready for handshake error: you do not share a tunnel with \"{STRANGER}\"");
    assert_eq!(to_agent.try_recv().unwrap().error, text);
    // It lives on.
    fixture.request(&agent, &ready(CLIENT));
}

#[test]
fn a_removed_tunnel_disconnects_both() {
    let fixture = Fixture::new();
    let ((client, mut to_client), (_agent, mut to_agent)) = fixture.joined();
    fixture.request(&client, &remove(AGENT));
    assert_eq!(news(&mut to_client), [(AGENT, Kind::Disconnected, "remove tunnel".into())]);
    assert_eq!(news(&mut to_agent), [(CLIENT, Kind::Disconnected, "remove tunnel".into())]);
}

/// The same node twice is said once; several fields of one request in their order (SV-7).
#[test]
fn equal_nodes_are_not_repeated() {
    let fixture = Fixture::new();
    let ((client, mut to_client), (agent, _to_agent)) = fixture.joined();
    fixture.request(&agent, &update_self(AGENT, 1));
    assert_eq!(news(&mut to_client), []);
    let all = CoordinateRequest { disconnect: Some(Disconnect {}), ..update_self(CLIENT, 3) };
    fixture.last_request(&client, &all);
    ends(&mut to_client);
    assert!(fixture.coordinator.peer(CLIENT).is_none());
}

/// Tolerated by servers, never done by us.
#[test]
fn violations_are_noticed() {
    let violations = Arc::new(Violations::default());
    let fixture = Fixture { coordinator: Coordinator::new(Arc::clone(&violations)), ..Fixture::new() };
    let (client, _to_client) = fixture.client(CLIENT);
    for request in
        [update_self(CLIENT, 0), add(AGENT), add(AGENT), remove(AGENT), remove(AGENT), CoordinateRequest::default()]
    {
        fixture.request(&client, &request);
    }
    let list = violations.list();
    assert_eq!(list.len(), 4, "{list:?}");
}
