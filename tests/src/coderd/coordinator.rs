//! Decides who hears what about whom: the in-memory coordinator, with the events, texts and ends of a real one.
//!
//! One lock; every request is worked off completely under it. A peer is removed at most once, whatever brings its end,
//! and a removal may bring the end of others whose queues are full. Sending to a peer never blocks: its queue holds what
//! a real coordinator's holds, and a peer that lets it fill is removed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use codervpn_proto::tailnet::{CoordinateRequest, CoordinateResponse, Node, coordinate_response};
use coordinate_response::PeerUpdate;
use coordinate_response::peer_update::Kind;
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use super::authorization::Authorization;
use super::violations::Violations;

/// Responses that may wait for one peer (upstream `ResponseBufferSize`).
pub const RESPONSE_QUEUE: usize = 512;

/// The coordinator of one run of a deployment.
#[derive(Debug)]
pub struct Coordinator {
    state: Mutex<State>,
    violations: Arc<Violations>,
    /// Counts every change, so that tests can wait for one.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    peers: BTreeMap<Uuid, Peer>,
    /// Source, destination.
    tunnels: BTreeSet<(Uuid, Uuid)>,
    connections: u64,
    overwrites: u64,
    closed: bool,
}

#[derive(Debug)]
struct Peer {
    connection: u64,
    authorization: Authorization,
    node: Option<Node>,
    responses: mpsc::Sender<CoordinateResponse>,
    /// The last node sent about each other peer.
    sent: HashMap<Uuid, Node>,
    ready: BTreeSet<Uuid>,
    /// Tunnels added on this connection; after an overwrite others may stand.
    added: BTreeSet<Uuid>,
}

/// One Coordinate call.
#[derive(Debug)]
pub struct Membership {
    /// Whose it is.
    pub id: Uuid,
    connection: u64,
}

/// Whether a call goes on after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Continue,
    Over,
}

/// What can be seen of a peer.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerState {
    pub id: Uuid,
    pub is_agent: bool,
    pub node: Option<Node>,
    /// Tunnels from it.
    pub destinations: BTreeSet<Uuid>,
    /// Peers it has said to be ready for.
    pub ready_for: BTreeSet<Uuid>,
}

/// A response that did not fit ends its receiver with this text.
struct Full {
    id: Uuid,
    text: &'static str,
}

/// What failed, as the receiver is told.
mod full {
    pub(super) const PEER: &str = "failed to update tunnel peer mapping";
    pub(super) const DESTINATION: &str = "failed to update tunnel dest mapping";
    pub(super) const SOURCE: &str = "failed to update tunnel src mapping";
    pub(super) const REMOVE_DESTINATION: &str = "failed to remove tunnel dest mapping";
    pub(super) const REMOVE_SOURCE: &str = "failed to remove tunnel src mapping";
}

impl Coordinator {
    pub fn new(violations: Arc<Violations>) -> Self {
        Self { state: Mutex::default(), violations, changed: watch::Sender::new(0) }
    }

    /// A new Coordinate call of `id`. The receiver ends when the coordinator is done with it.
    pub fn connect(&self, id: Uuid, authorization: Authorization) -> (Membership, mpsc::Receiver<CoordinateResponse>) {
        let (responses, receiver) = mpsc::channel(RESPONSE_QUEUE);
        let mut state = self.lock();
        state.connections += 1;
        let connection = state.connections;
        let membership = Membership { id, connection };
        if state.closed {
            return (membership, receiver);
        }
        if let Some(old) = state.peers.remove(&id) {
            let _ = old.responses.try_send(error("peer ID overwritten by new connection"));
            state.overwrites += 1;
        }
        let mut peer = Peer {
            connection,
            authorization,
            node: None,
            responses,
            sent: HashMap::new(),
            ready: BTreeSet::new(),
            added: BTreeSet::new(),
        };
        let mut updates = Vec::new();
        for other in state.tunnel_peers(id) {
            if let Some(node) = state.peers.get(&other).and_then(|other| other.node.clone()) {
                updates.push(update(other, Kind::Node, Some(node.clone()), "init"));
                peer.sent.insert(other, node);
            }
        }
        if !updates.is_empty() {
            // The queue is new.
            let _ = peer.responses.try_send(CoordinateResponse { peer_updates: updates, error: String::new() });
        }
        state.peers.insert(id, peer);
        drop(state);
        self.note_change();
        (membership, receiver)
    }

    /// Works off one request. After [`Next::Over`] the receiver of the call has ended or will at once.
    pub fn request(&self, membership: &Membership, request: &CoordinateRequest) -> Next {
        let mut state = self.lock();
        let Some(peer) = state.current(membership) else { return Next::Over };
        let authorization = peer.authorization.clone();
        let next = match self.work_off(&mut state, membership.id, &authorization, request) {
            Ok(next) => next,
            Err(text) => {
                tracing::debug!(id = %membership.id, text, "coordinator ends a peer");
                state.remove(membership.id, Kind::Lost, "lost", Some(&text));
                Next::Over
            }
        };
        let alive = state.current(membership).is_some();
        drop(state);
        self.note_change();
        if alive { next } else { Next::Over }
    }

    /// The stream of requests has ended, by `error` or without.
    pub fn end(&self, membership: &Membership, error: Option<&str>) {
        let mut state = self.lock();
        if state.current(membership).is_some() {
            state.remove(membership.id, Kind::Lost, "lost", error);
        }
        drop(state);
        self.note_change();
    }

    /// Ends every peer; later ones are born ended.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        while let Some(id) = state.peers.keys().next().copied() {
            state.remove(id, Kind::Lost, "coordinator close", Some("coordinator closed"));
        }
        drop(state);
        self.note_change();
    }

    /// Ends one peer by force, with an error if there is a text. Its tunnel peers see it lost.
    pub fn hang_up(&self, id: Uuid, text: Option<&str>) {
        self.lock().remove(id, Kind::Lost, "lost", text);
        self.note_change();
    }

    /// Sends a response as it is, for tests of duplicated, reordered or wrong ones. False: no such peer or no room.
    pub fn inject(&self, id: Uuid, response: CoordinateResponse) -> bool {
        self.lock().peers.get(&id).is_some_and(|peer| peer.responses.try_send(response).is_ok())
    }

    pub fn peers(&self) -> Vec<PeerState> {
        let state = self.lock();
        let peers = state.peers.iter().map(|(id, peer)| PeerState {
            id: *id,
            is_agent: matches!(peer.authorization, Authorization::Agent(_)),
            node: peer.node.clone(),
            destinations: state.destinations(*id).collect(),
            ready_for: peer.ready.clone(),
        });
        peers.collect()
    }

    pub fn peer(&self, id: Uuid) -> Option<PeerState> {
        self.peers().into_iter().find(|peer| peer.id == id)
    }

    /// Tunnels, also of and to peers that are not connected.
    pub fn tunnels(&self) -> BTreeSet<(Uuid, Uuid)> {
        self.lock().tunnels.clone()
    }

    /// How often a peer took the place of another connection with its id.
    pub fn overwrites(&self) -> u64 {
        self.lock().overwrites
    }

    /// Changes after every event.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn work_off(
        &self,
        state: &mut State,
        id: Uuid,
        authorization: &Authorization,
        request: &CoordinateRequest,
    ) -> Result<Next, String> {
        self.look_for_violations(state, id, request);
        // SV-6: said before anything else, since older servers crash on it.
        if request.update_self.as_ref().is_some_and(|update| update.node.is_none()) {
            return Err("update_self node is required".into());
        }
        authorization.check(id, request).map_err(|text| format!("authorization: {text}"))?;
        if let Some(node) = request.update_self.as_ref().and_then(|update| update.node.as_ref()) {
            state.update_self(id, node);
        }
        if let Some(tunnel) = &request.add_tunnel {
            state.add_tunnel(id, tunnel_id(&tunnel.id)?);
        }
        if let Some(tunnel) = &request.remove_tunnel {
            state.remove_tunnel(id, tunnel_id(&tunnel.id)?);
        }
        if request.disconnect.is_some() {
            state.remove(id, Kind::Disconnected, "graceful disconnect", None);
            return Ok(Next::Over);
        }
        for ready in &request.ready_for_handshake {
            state.ready_for_handshake(id, tunnel_id(&ready.id)?);
        }
        Ok(Next::Continue)
    }

    /// What a server tolerates and a client of ours must not do.
    fn look_for_violations(&self, state: &State, id: Uuid, request: &CoordinateRequest) {
        match &request.update_self {
            Some(update) => match &update.node {
                None => self.violations.add("ND-9: UpdateSelf without a node"),
                Some(node) if node.preferred_derp == 0 => self.violations.add("ND-4: UpdateSelf without a home relay"),
                Some(node) if node.as_of.is_none() => self.violations.add("ND-8: UpdateSelf without a time"),
                Some(node) if node.key.len() != 34 => self.violations.add("PB-6: node key without its prefix"),
                Some(_) => {}
            },
            None if *request == CoordinateRequest::default() => {
                self.violations.add("CoordinateRequest with nothing in it");
            }
            None => {}
        }
        let added = |tunnel: &[u8]| {
            let other = Uuid::from_slice(tunnel);
            other.is_ok_and(|other| state.peers.get(&id).is_some_and(|peer| peer.added.contains(&other)))
        };
        if request.add_tunnel.as_ref().is_some_and(|tunnel| added(&tunnel.id)) {
            self.violations.add("CC-19: AddTunnel for a tunnel that stands");
        }
        if request.remove_tunnel.as_ref().is_some_and(|tunnel| !added(&tunnel.id)) {
            self.violations.add("CC-19: RemoveTunnel for a tunnel that was not added");
        }
    }

    fn note_change(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn current(&self, membership: &Membership) -> Option<&Peer> {
        self.peers.get(&membership.id).filter(|peer| peer.connection == membership.connection)
    }

    fn destinations(&self, id: Uuid) -> impl Iterator<Item = Uuid> {
        self.tunnels.range((id, Uuid::nil())..=(id, Uuid::max())).map(|(_, destination)| *destination)
    }

    /// Destinations of `id` and sources with it as destination.
    fn tunnel_peers(&self, id: Uuid) -> BTreeSet<Uuid> {
        let sources = self.tunnels.iter().filter(|(_, destination)| *destination == id).map(|(source, _)| *source);
        self.destinations(id).chain(sources).collect()
    }

    fn update_self(&mut self, id: Uuid, node: &Node) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.node = Some(node.clone());
        }
        let peers = self.tunnel_peers(id);
        let full =
            peers.into_iter().filter_map(|to| self.tell(to, id, Kind::Node, Some(node), "node update", full::PEER));
        let full = full.collect();
        self.remove_full(full);
    }

    fn add_tunnel(&mut self, source: Uuid, destination: Uuid) {
        self.tunnels.insert((source, destination));
        if let Some(peer) = self.peers.get_mut(&source) {
            peer.added.insert(destination);
        }
        let node = |id| self.peers.get(&id).and_then(|peer: &Peer| peer.node.clone());
        let (source_node, destination_node) = (node(source), node(destination));
        let mut full = Vec::new();
        if let Some(node) = destination_node {
            full.extend(self.tell(source, destination, Kind::Node, Some(&node), "add tunnel", full::DESTINATION));
        }
        if let Some(node) = source_node {
            full.extend(self.tell(destination, source, Kind::Node, Some(&node), "add tunnel", full::SOURCE));
        }
        self.remove_full(full);
    }

    fn remove_tunnel(&mut self, source: Uuid, destination: Uuid) {
        let kind = Kind::Disconnected;
        let told_source = self.tell(source, destination, kind, None, "remove tunnel", full::REMOVE_DESTINATION);
        let told_destination = self.tell(destination, source, kind, None, "remove tunnel", full::REMOVE_SOURCE);
        self.tunnels.remove(&(source, destination));
        if let Some(peer) = self.peers.get_mut(&source) {
            peer.added.remove(&destination);
        }
        self.remove_full(told_source.into_iter().chain(told_destination).collect());
    }

    fn ready_for_handshake(&mut self, from: Uuid, to: Uuid) {
        if !self.tunnels.contains(&(from, to)) && !self.tunnels.contains(&(to, from)) {
            let text = format!("ready for handshake error: you do not share a tunnel with \"{to}\"");
            if let Some(peer) = self.peers.get(&from) {
                let _ = peer.responses.try_send(error(&text));
            }
            return;
        }
        if let Some(peer) = self.peers.get_mut(&from) {
            peer.ready.insert(to);
        }
        let Some(other) = self.peers.get(&to) else { return };
        let ready = CoordinateResponse {
            peer_updates: vec![update(from, Kind::ReadyForHandshake, None, "")],
            error: String::new(),
        };
        if other.responses.try_send(ready).is_err() {
            self.remove_full(vec![Full { id: to, text: full::PEER }]);
        }
    }

    /// Tells `to` about `about`; what it has been told before decides whether there is anything to say.
    fn tell(
        &mut self,
        to: Uuid,
        about: Uuid,
        kind: Kind,
        node: Option<&Node>,
        reason: &str,
        text: &'static str,
    ) -> Option<Full> {
        let peer = self.peers.get_mut(&to)?;
        let known = peer.sent.get(&about);
        match kind {
            Kind::Node if known == node => return None,
            Kind::Node => {
                peer.sent.insert(about, node?.clone());
            }
            _ => {
                peer.sent.remove(&about)?;
            }
        }
        let response =
            CoordinateResponse { peer_updates: vec![update(about, kind, node.cloned(), reason)], error: String::new() };
        peer.responses.try_send(response).is_err().then_some(Full { id: to, text })
    }

    /// Removing one may fill the queues of others, so this goes on until nobody is left to remove.
    fn remove_full(&mut self, mut full: Vec<Full>) {
        while let Some(next) = full.pop() {
            full.extend(self.take_out(next.id, Kind::Disconnected, "failed update", Some(next.text)));
        }
    }

    fn remove(&mut self, id: Uuid, kind: Kind, reason: &str, text: Option<&str>) {
        let full = self.take_out(id, kind, reason, text);
        self.remove_full(full);
    }

    fn take_out(&mut self, id: Uuid, kind: Kind, reason: &str, text: Option<&str>) -> Vec<Full> {
        // SV-9: the second removal finds nothing to do.
        let Some(peer) = self.peers.remove(&id) else { return Vec::new() };
        let told = self.tunnel_peers(id);
        // Tunnels towards it stay, so that it is found again when it returns.
        self.tunnels.retain(|(source, _)| *source != id);
        let full = told.into_iter().filter_map(|to| self.tell(to, id, kind, None, reason, full::PEER)).collect();
        if let Some(text) = text {
            let _ = peer.responses.try_send(error(text));
        }
        full
    }
}

fn update(id: Uuid, kind: Kind, node: Option<Node>, reason: &str) -> PeerUpdate {
    PeerUpdate { id: id.into_bytes().to_vec(), node, kind: kind.into(), reason: reason.to_owned() }
}

fn error(text: &str) -> CoordinateResponse {
    CoordinateResponse { peer_updates: Vec::new(), error: text.to_owned() }
}

fn tunnel_id(bytes: &[u8]) -> Result<Uuid, String> {
    Uuid::from_slice(bytes)
        .map_err(|_| format!("unable to convert bytes to UUID: invalid UUID (got {} bytes)", bytes.len()))
}

#[cfg(test)]
#[path = "coordinator_tests.rs"]
mod tests;
