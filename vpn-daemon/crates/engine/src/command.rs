//! What the slow side tells the engine. Each command is idempotent: said twice, it changes nothing the second time.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use codervpn_wire::derp_map::{DerpMap, RegionId};
use codervpn_wire::keys::NodePublic;
use codervpn_wire::node::{Family, Node};
use uuid::Uuid;

use crate::filter::Inbound;

/// The coordinator's id of a party; for a workspace agent the agent's id.
pub type PeerId = Uuid;

/// How far one relay region is over one address family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayLatency {
    pub region: RegionId,
    pub family: Family,
    pub latency: Duration,
}

/// A server that tells us our address as it sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StunServer {
    /// The region of the map that names it.
    pub region: RegionId,
    pub address: SocketAddr,
}

/// Whether packets may go to peers directly, and who does not want it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Direct {
    #[default]
    Allowed,
    DisabledByUser,
    DisabledByDeployment,
}

/// What happened to the networks of this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkChange {
    /// The default route or our addresses changed, or the machine woke up: sockets are bound again.
    Major,
    /// Something else changed: measured again, nothing torn down.
    Minor,
    /// There is no network at all.
    Down,
    /// There is one again.
    Up,
}

/// Why a UDP datagram could not be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendFailure {
    /// EMSGSIZE: the path does not carry datagrams of this size.
    TooBig,
    /// EPERM or EACCES: a local firewall.
    Blocked,
    /// No route, network down, no socket of this family.
    Unreachable,
}

#[derive(Clone, Debug)]
pub enum Command {
    /// A workspace agent that the user may reach. From now on its packets are held, not refused.
    AddDestination(PeerId),
    /// It exists no more: its session ends and its packets are refused at once.
    RemoveDestination(PeerId),
    /// The coordinator's NODE update.
    Node {
        id: PeerId,
        node: Box<Node>,
    },
    /// READY_FOR_HANDSHAKE: the peer knows our node, a handshake will be answered.
    ReadyForHandshake(PeerId),
    /// LOST: the coordinator no longer hears the peer. Traffic goes on.
    Lost(PeerId),
    /// The Coordinate stream ended: as `Lost` for every peer.
    AllLost,
    /// DISCONNECTED: the peer left.
    Disconnected(PeerId),

    /// With one region home is chosen at once. With several, `RelayLatencies` has to follow soon: there is no home, and
    /// our node stays unpublished, until a first round has been reported.
    DerpMap(DerpMap),
    /// One round of latency measurements. Regions that did not answer are left out; an empty round is meaningful.
    RelayLatencies(Vec<RelayLatency>),
    /// The upgrade to DERP failed at this region and WebSocket is in use there, or is no longer (`None`).
    RelayWebsocketFallback {
        region: RegionId,
        reason: Option<String>,
    },
    /// A connection to this region stands and takes frames.
    RelayUp(RegionId),
    RelayDown(RegionId),
    /// The relay says that it does not know this peer (any more).
    RelayPeerGone {
        region: RegionId,
        peer: NodePublic,
    },

    /// A disco ping now; answered by `Event::PingDone`.
    Ping(PeerId),
    /// An ICMPv6 echo request through the tunnel now; answered by `Event::EchoDone` with the same token.
    Echo {
        id: PeerId,
        token: u64,
    },
    /// What peers may open towards us.
    Inbound(Inbound),

    /// Ports that the UDP sockets are bound to; `None`: no socket of this family. Said once at the start and after
    /// every `Event::RebindSockets`.
    SocketsBound {
        v4: Option<u16>,
        v6: Option<u16>,
    },
    /// Addresses of this machine's interfaces, unfiltered but for our own device.
    LocalAddresses(Vec<IpAddr>),
    /// The STUN servers of the map, names resolved; at most a few addresses for each.
    StunServers(Vec<StunServer>),
    /// Where the gateway maps our IPv4 port to.
    PortMapped(Option<SocketAddr>),
    /// Whether there may be direct paths; takes effect at once.
    Direct(Direct),
    Link(LinkChange),
}
