//! Decides what the rest of the daemon learns from the control connection.

use std::time::Duration;

use codervpn_wire::derp_map::DerpMap;
use codervpn_wire::node::Node;
use uuid::Uuid;

use crate::api::ApiError;
use crate::workspace_updates::WorkspaceUpdate;

/// What happened on the control connection, in order.
#[derive(Debug, Clone)]
pub enum ControlEvent {
    /// A dial begins; the first has number 1, every connection starts counting anew.
    Connecting {
        /// Number of this attempt.
        attempt: u32,
    },
    /// Dial answered and every call of the role opened.
    Connected {
        /// The server's build version, if it said one (HTTP-4).
        server_version: Option<String>,
    },
    /// A dial failed or a connection ended; we go on by ourselves. A start counts as done from here on (1.8), workspaces,
    /// names and WireGuard sessions stay as they are.
    Lost {
        /// For the user.
        reason: String,
        /// Time until the next dial.
        retry_in: Duration,
        /// The server says that the session token is no longer good (HTTP-17). Left again by the next
        /// [`ControlEvent::Connected`].
        signed_out: bool,
    },
    /// The server refuses us for good, before anything else was heard from it. The controller has ended; this is its last
    /// event.
    Refused {
        /// What to tell the user.
        error: ApiError,
    },
    /// Changes of peers in the order of the server, one event for one message. Peers that are no destination of ours
    /// never appear here in the client role (CC-24).
    PeerUpdates(Vec<PeerUpdate>),
    /// The Coordinate stream ended: the server knows nothing of our tunnels now. Every peer counts as lost (CC-32).
    AllPeersLost,
    /// What the coordinator said before it hung up on us, or about a handshake acknowledgement (6.4.5).
    CoordinatorError(String),
    /// A relay map, rewritten for the URL we use (CC-46), when it differs from the one before.
    DerpMap(DerpMap),
    /// Workspaces and agents. The destinations follow by the receiver's
    /// [`Handle::set_destinations`](crate::Handle::set_destinations).
    Workspaces(WorkspaceUpdate),
}

/// What the coordinator says about one peer.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerUpdate {
    /// The peer; for agents the agent id.
    pub id: Uuid,
    /// What is said.
    pub kind: PeerUpdateKind,
    /// The server's reason, for logs.
    pub reason: String,
}

/// The kinds of news about a peer.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerUpdateKind {
    /// The peer's node is this now.
    Node(Box<Node>),
    /// It left on purpose: remove it.
    Disconnected,
    /// It fell silent towards the server: keep its session (CC-31).
    Lost,
    /// It has programmed our node: handshakes will be answered (CC-62).
    ReadyForHandshake,
}
