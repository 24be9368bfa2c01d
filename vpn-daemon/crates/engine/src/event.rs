//! What the engine tells the slow side, and what can be read about a peer. Events carry little: most say what changed,
//! and the present value is read from the engine. That bounds the queue, since no event of a kind is queued twice.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::NodePublic;

use crate::command::PeerId;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// Our node differs from the last one published: read `Engine::self_node` and send it.
    SelfNodeChanged,
    /// Another region is home now: tell every relay connection (NotePreferred).
    HomeRelayChanged(RegionId),
    /// A connection to this region is needed: keep trying until it stands. Repeated, at most once a second, whenever it
    /// is missed again.
    RelayWanted(RegionId),
    /// Something in `Engine::peer` changed that a user can see (not byte counters).
    PeerChanged(PeerId),
    /// The peer can shake hands with us from now on. An agent tells the coordinator so (ReadyForHandshake); a client
    /// ignores it.
    Programmed(PeerId),
    /// A net report begins: measure the latency of every relay and resolve the STUN servers, and answer with
    /// `RelayLatencies` and `StunServers`.
    MeasureRelays,
    /// Bind both UDP sockets again, preferring the present ports, and answer with `SocketsBound`.
    RebindSockets,
    /// Answer to `Command::Ping`.
    PingDone { id: PeerId, result: Result<Ping, PingError> },
    /// Answer to `Command::Echo`: the round trip, and the path that packets to the peer took when it came.
    EchoDone { id: PeerId, token: u64, result: Result<Duration, PingError>, path: Option<Path> },
}

/// A pong that came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ping {
    pub latency: Duration,
    pub path: Path,
    pub at: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PingError {
    #[error("no such agent")]
    UnknownPeer,
    #[error("the coordinator has not sent this agent's address yet")]
    NoNode,
    #[error("no connection to a relay that reaches this agent")]
    NoPath,
    #[error("no answer within 5 s")]
    Timeout,
    #[error("too many pings of this agent are under way")]
    Busy,
}

/// The way packets to a peer take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    Relay(RegionId),
    Direct(SocketAddr),
}

/// Why a peer that could be reached directly is reached by relay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RelayReason {
    /// Still looking.
    Probing,
    DisabledByUser,
    DisabledByDeployment,
    /// No UDP datagram of ours was ever answered, by a STUN server or a peer.
    UdpBlocked,
    /// Our NAT gives every destination another port and the peer's side does not let us in either.
    HardNat,
    /// Short datagrams pass, full-size ones do not.
    PathTooSmall,
    /// The peer advertises no address.
    NoEndpoints,
    /// Every address of the peer was tried and none answered.
    NoAnswer,
}

/// What is known about the network we are in.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NetReport {
    /// `None`: not known yet.
    pub udp: Option<bool>,
    pub v4: Option<SocketAddr>,
    pub v6: Option<SocketAddr>,
    /// Whether the NAT gives us another port for every destination; `None`: fewer than two answers.
    pub mapping_varies: Option<bool>,
    pub port_mapped: Option<SocketAddr>,
    /// What we advertise, in this order.
    pub endpoints: Vec<SocketAddr>,
}

/// How far we are with a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerState {
    /// A destination whose node the coordinator has not sent.
    WaitingForNode,
    /// Its node is known, it has not said that it knows ours.
    WaitingForReady,
    /// No session yet, or no longer.
    Connecting,
    /// A session stands.
    Up,
    /// Nothing was heard for 30 s though packets were sent: its packets are refused.
    Unreachable,
}

/// What can be shown about a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerStatus {
    pub id: PeerId,
    pub state: PeerState,
    pub key: Option<NodePublic>,
    /// First the address that users reach it at.
    pub addresses: Vec<Ipv6Addr>,
    /// Its own home region, as its node says.
    pub home: Option<RegionId>,
    /// The coordinator does not hear it at present.
    pub lost: bool,
    pub path: Option<Path>,
    /// Why `path` is a relay; `None` while it is not.
    pub relay_reason: Option<RelayReason>,
    pub last_handshake: Option<Instant>,
    /// The last ping that was answered.
    pub last_ping: Option<Ping>,
    /// IP bytes from and to the peer.
    pub rx_bytes: u64,
    pub tx_bytes: u64,
}
