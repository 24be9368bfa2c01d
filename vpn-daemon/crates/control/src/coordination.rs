//! Decides what is asked of the coordinator and what of its answers is passed on.
//!
//! The destinations live across connections; a new connection asks for all of them again (CC-14). Which peer is
//! programmed, kept while lost or removed is the engine's matter: here an answer is only checked and translated. No
//! bytes are moved here, requests go to a [`Requests`].

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::time::Duration;

use codervpn_proto::tailnet as pb;
use codervpn_proto::tailnet::coordinate_response::peer_update::Kind;
use tokio::time::Instant;
use uuid::Uuid;

use crate::convert::{node_from_proto, uuid};
use crate::event::{PeerUpdate, PeerUpdateKind};
use crate::refusals::Refusals;
use crate::tailnet::CoordinateWriter;

/// Start of the texts about handshake acknowledgements, which end nothing (CC-26).
const READY_ERROR: &str = "ready for handshake error";

/// Start of the texts about tunnels that are not allowed, or cannot be looked up (CC-66).
const AUTHORIZATION: &str = "authorization: ";

/// Text of a coordinator that gave our id to another connection.
const OVERWRITTEN: &str = "peer ID overwritten by new connection";

/// Strange peers that are told off on one connection; more are ignored in silence.
const MAX_STRAYS: usize = 1024;

/// Longest text of the coordinator that is kept.
const MAX_TEXT: usize = 512;

/// Where requests go: the Coordinate stream of the present connection.
pub(crate) trait Requests {
    fn add_tunnel(&mut self, id: Uuid);
    fn remove_tunnel(&mut self, id: Uuid);
}

impl Requests for CoordinateWriter {
    fn add_tunnel(&mut self, id: Uuid) {
        CoordinateWriter::add_tunnel(self, id);
    }

    fn remove_tunnel(&mut self, id: Uuid) {
        CoordinateWriter::remove_tunnel(self, id);
    }
}

/// What we want of the coordinator, over all connections.
#[derive(Debug)]
pub(crate) struct Coordination {
    /// Clients take nodes of their destinations only (CC-24); agents are the destination.
    strict: bool,
    destinations: BTreeSet<Uuid>,
    /// Of the present connection.
    strays: HashSet<Uuid>,
    error: Option<String>,
    refusals: Refusals,
    pace: Pace,
}

/// A coordinator keeps a few hundred answers for a slow reader and hangs up beyond (Go: `ResponseBufferSize`, 512); each
/// tunnel brings two. So tunnels of a user with very many agents are asked for in portions.
const PORTION: usize = 128;
const BETWEEN_PORTIONS: Duration = Duration::from_millis(50);

/// Tunnels that wait for their portion, bounded by the number of destinations.
#[derive(Debug, Default)]
struct Pace {
    waiting: VecDeque<Uuid>,
    /// Requests left in the portion that began then.
    portion: Option<(Instant, usize)>,
}

impl Pace {
    fn ask(&mut self, id: Uuid, requests: &mut impl Requests, now: Instant) {
        if !self.waiting.contains(&id) {
            self.waiting.push_back(id);
        }
        self.go_on(requests, now);
    }

    fn go_on(&mut self, requests: &mut impl Requests, now: Instant) {
        if self.portion.is_none_or(|(began, _)| now >= began + BETWEEN_PORTIONS) {
            self.portion = Some((now, PORTION));
        }
        let Some((_, left)) = &mut self.portion else { return };
        while *left > 0
            && let Some(id) = self.waiting.pop_front()
        {
            requests.add_tunnel(id);
            *left -= 1;
        }
    }

    fn due(&self) -> Option<Instant> {
        let (began, _) = self.portion.filter(|_| !self.waiting.is_empty())?;
        Some(began + BETWEEN_PORTIONS)
    }
}

/// What an answer says.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) updates: Vec<PeerUpdate>,
    pub(crate) error: Option<String>,
}

impl Coordination {
    pub(crate) fn new(strict: bool) -> Self {
        Self {
            strict,
            destinations: BTreeSet::new(),
            strays: HashSet::new(),
            error: None,
            refusals: Refusals::default(),
            pace: Pace::default(),
        }
    }

    /// A new Coordinate stream: everything is asked for again. Our node has been queued before (CC-14).
    pub(crate) fn connected(&mut self, requests: &mut impl Requests) {
        self.strays.clear();
        self.error = None;
        self.pace = Pace::default();
        for id in self.refusals.at_connect(&self.destinations) {
            self.pace.ask(id, requests, Instant::now());
        }
    }

    /// The connection is over; how long it lived tells whether its requests ended it.
    pub(crate) fn disconnected(&mut self, lived: Duration) {
        let refused = self.error.as_deref().is_some_and(|text| text.starts_with(AUTHORIZATION));
        self.refusals.connection_ended(refused, lived);
    }

    /// So many connections were ended by refusals that it matters whether the session itself is good (CC-66).
    pub(crate) fn doubts_session(&self) -> bool {
        self.refusals.wants_probing()
    }

    /// It is: find out which destination is refused.
    pub(crate) fn session_is_good(&mut self) {
        self.refusals.begin(&self.destinations);
    }

    /// The first update of a WorkspaceUpdates stream has come.
    pub(crate) fn snapshot(&mut self, requests: &mut impl Requests) {
        for id in self.refusals.snapshot() {
            self.pace.ask(id, requests, Instant::now());
        }
    }

    /// When [`Coordination::tick`] is due on a connection.
    pub(crate) fn due(&self) -> Option<Instant> {
        [self.refusals.due(Instant::now()), self.pace.due()].into_iter().flatten().min()
    }

    /// Goes on with destinations that were held back.
    pub(crate) fn tick(&mut self, requests: &mut impl Requests) {
        for id in self.refusals.tick(Instant::now()) {
            self.pace.ask(id, requests, Instant::now());
        }
        self.pace.go_on(requests, Instant::now());
    }

    /// Makes the destinations exactly these: additions first, then removals (CC-19).
    pub(crate) fn set(&mut self, wanted: BTreeSet<Uuid>, mut requests: Option<&mut impl Requests>) {
        for id in wanted.difference(&self.destinations) {
            if self.refusals.admit(*id)
                && let Some(requests) = requests.as_mut()
            {
                self.pace.ask(*id, *requests, Instant::now());
            }
        }
        for id in self.destinations.difference(&wanted) {
            self.refusals.forget(*id);
            self.pace.waiting.retain(|waiting| waiting != id);
            if let Some(requests) = requests.as_mut() {
                requests.remove_tunnel(*id);
            }
        }
        self.destinations = wanted;
        self.strays.retain(|id| !self.destinations.contains(id));
    }

    /// CC-17.
    pub(crate) fn add(&mut self, ids: Vec<Uuid>, requests: Option<&mut impl Requests>) {
        let mut wanted = self.destinations.clone();
        wanted.extend(ids);
        self.set(wanted, requests);
    }

    /// CC-18.
    pub(crate) fn remove(&mut self, ids: &[Uuid], requests: Option<&mut impl Requests>) {
        let mut wanted = self.destinations.clone();
        for id in ids {
            wanted.remove(id);
        }
        self.set(wanted, requests);
    }

    /// Reads one answer; error and updates of the same message both count (CC-27).
    pub(crate) fn receive(&mut self, response: pb::CoordinateResponse, requests: &mut impl Requests) -> Answer {
        let error = (!response.error.is_empty()).then(|| plain(&response.error));
        match &error {
            Some(text) if text.starts_with(READY_ERROR) => tracing::debug!(%text, "coordinator"),
            Some(text) => {
                tracing::debug!(%text, "the coordinator is about to hang up");
                self.error = Some(text.clone());
            }
            None => {}
        }
        let updates = response.peer_updates.into_iter().filter_map(|update| self.update(update, requests)).collect();
        Answer { updates, error }
    }

    /// The last error of this connection that is followed by a hang-up.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// CC-28: somebody else uses our id, with a copy of our resume token.
    pub(crate) fn was_overwritten(&self) -> bool {
        self.error.as_deref() == Some(OVERWRITTEN)
    }

    fn update(
        &mut self,
        update: pb::coordinate_response::PeerUpdate,
        requests: &mut impl Requests,
    ) -> Option<PeerUpdate> {
        let Some(id) = uuid(&update.id) else {
            tracing::error!(length = update.id.len(), "peer update with an id that is not 16 bytes is ignored");
            return None;
        };
        let reason = plain(&update.reason);
        let kind = match Kind::try_from(update.kind) {
            Ok(Kind::Node) => PeerUpdateKind::Node(Box::new(self.node(id, update.node?, requests)?)),
            Ok(Kind::Disconnected) => PeerUpdateKind::Disconnected,
            Ok(Kind::Lost) => PeerUpdateKind::Lost,
            Ok(Kind::ReadyForHandshake) => PeerUpdateKind::ReadyForHandshake,
            Ok(Kind::Unspecified) | Err(_) => {
                tracing::warn!(peer = %id, kind = update.kind, "peer update of unknown kind is ignored");
                return None;
            }
        };
        if self.is_stray(id) {
            return None;
        }
        tracing::debug!(peer = %id, kind = kind.name(), reason, "peer update");
        Some(PeerUpdate { id, kind, reason })
    }

    fn node(&mut self, id: Uuid, node: pb::Node, requests: &mut impl Requests) -> Option<codervpn_wire::node::Node> {
        if self.is_stray(id) {
            if self.strays.len() < MAX_STRAYS && self.strays.insert(id) {
                tracing::info!(peer = %id, "the server has a tunnel that we do not want; removing it");
                requests.remove_tunnel(id);
            }
            return None;
        }
        match node_from_proto(node) {
            Ok((node, 0)) => Some(node),
            Ok((node, left_out)) => {
                tracing::warn!(peer = %id, left_out, "parts of a peer's node are left out");
                Some(node)
            }
            Err(error) => {
                tracing::warn!(peer = %id, %error, "a peer's node is ignored");
                None
            }
        }
    }

    fn is_stray(&self, id: Uuid) -> bool {
        self.strict && !self.destinations.contains(&id)
    }
}

impl PeerUpdateKind {
    fn name(&self) -> &'static str {
        match self {
            Self::Node(_) => "node",
            Self::Disconnected => "disconnected",
            Self::Lost => "lost",
            Self::ReadyForHandshake => "ready",
        }
    }
}

/// Text of a stranger for logs and screens.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_TEXT).collect()
}

#[cfg(test)]
mod pace_tests {
    use super::*;

    #[derive(Default)]
    struct Asked(usize);

    impl Requests for Asked {
        fn add_tunnel(&mut self, _: Uuid) {
            self.0 += 1;
        }
        fn remove_tunnel(&mut self, _: Uuid) {}
    }

    #[test]
    fn thousands_of_tunnels_are_asked_for_in_portions_and_each_once() {
        let start = Instant::now();
        let (mut pace, mut asked) = (Pace::default(), Asked::default());
        for id in 0..2000_u128 {
            pace.ask(Uuid::from_u128(id), &mut asked, start);
            pace.ask(Uuid::from_u128(id), &mut asked, start);
        }
        assert!((PORTION..=2 * PORTION).contains(&asked.0), "{}", asked.0);
        let mut portions = 0;
        while let Some(at) = pace.due() {
            let before = asked.0;
            pace.go_on(&mut asked, at);
            assert!(asked.0 - before <= PORTION);
            portions += 1;
        }
        assert!(portions <= 16);
        assert!((2000..=2000 + PORTION).contains(&asked.0));
    }
}
