//! What clients are shown of a running deployment, made anew from the facts each time.

use std::net::Ipv6Addr;
use std::time::{Instant, SystemTime};

use codervpn_engine::{Path, PeerState, PeerStatus, RelayReason};
use codervpn_proto::ext::{self, ControlState, FailureCode, PathKind};
use codervpn_underlay::relays::{RegionId, RelayPhase, Relays};
use codervpn_wire::derp_map::DerpMap;

use super::names::Names;
use crate::failure::Failure;
use crate::status::{AgentStatus, LastPing, PathStatus, TunnelStatus, WorkspaceStatus, duration, workspace_status};
use crate::tunnel::{self, Snapshot};
use crate::workspaces::Workspaces;

/// What does not change during one start.
pub(super) struct Facts {
    pub(super) deployment: String,
    pub(super) user: String,
    pub(super) suffix: String,
    pub(super) interface: String,
    pub(super) address: Ipv6Addr,
    pub(super) server_version: String,
}

/// The facts and how the control connection stands.
pub(super) struct View {
    facts: Facts,
    link: Link,
    /// The last failure of the control connection, or what the coordinator complained about.
    error: Option<Failure>,
}

/// The control connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    /// Never up since the start.
    First,
    /// Up, its first full list of workspaces not seen yet.
    Up {
        synchronised: bool,
    },
    Down,
    Refused,
}

impl View {
    pub(super) fn new(facts: Facts) -> Self {
        Self { facts, link: Link::First, error: None }
    }

    /// Returns whether it had been up before.
    pub(super) fn connected(&mut self, server_version: Option<String>) -> bool {
        let again = self.link != Link::First;
        self.link = Link::Up { synchronised: false };
        if let Some(version) = server_version {
            self.facts.server_version = version;
        }
        again
    }

    pub(super) fn synchronised(&mut self) {
        if let Link::Up { synchronised } = &mut self.link {
            *synchronised = true;
            self.error = None;
        }
    }

    pub(super) fn lost(&mut self, reason: &str, signed_out: bool) {
        if !matches!(self.link, Link::First) {
            self.link = Link::Down;
        }
        let code = if signed_out { FailureCode::Unauthorized } else { FailureCode::Unreachable };
        self.error = Some(Failure::new(code, reason));
        if signed_out {
            self.link = Link::Refused;
        }
    }

    pub(super) fn refused(&mut self, failure: Failure) {
        self.link = Link::Refused;
        self.error = Some(failure);
    }

    pub(super) fn coordinator_error(&mut self, text: &str) {
        self.error = Some(Failure::new(FailureCode::ServerError, format!("the coordinator says: {text}")));
    }

    /// Why the control connection is over for good.
    pub(super) fn control_failure(&self) -> Failure {
        self.error
            .clone()
            .unwrap_or_else(|| Failure::new(FailureCode::Internal, "the control connection ended by itself"))
    }

    /// Connected means that the names are right: the list of workspaces is here and the resolver has been set up.
    fn control(&self, names: &Names) -> ControlState {
        match self.link {
            Link::Up { synchronised: true } if names.is_settled() => ControlState::Connected,
            Link::First | Link::Up { .. } => ControlState::Connecting,
            Link::Down => ControlState::Reconnecting,
            Link::Refused => ControlState::Refused,
        }
    }

    pub(super) fn tunnel(
        &self,
        snapshot: &Snapshot,
        workspaces: &Workspaces,
        names: &Names,
        map: &DerpMap,
    ) -> TunnelStatus {
        let clock = Clock { instant: snapshot.taken, wall: SystemTime::now() };
        let peers: std::collections::HashMap<_, _> = snapshot.peers.iter().map(|peer| (peer.id, peer)).collect();
        let agent = |agent: &codervpn_control::Agent| AgentStatus {
            id: agent.id,
            name: agent.name.clone(),
            fqdn: names.of(agent.id).iter().map(|name| name.trim_end_matches('.').to_owned()).collect(),
            address: codervpn_wire::node::coder_address(agent.id),
            path: peers.get(&agent.id).map_or_else(PathStatus::default, |peer| self.path(peer, snapshot, map, &clock)),
        };
        let mut listed: Vec<WorkspaceStatus> = workspaces
            .tree()
            .map(|(workspace, agents)| {
                let mut agents: Vec<AgentStatus> = agents.into_iter().map(agent).collect();
                agents.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
                WorkspaceStatus {
                    id: workspace.id,
                    name: workspace.name.clone(),
                    status: workspace_status(workspace.status),
                    agents,
                }
            })
            .collect();
        listed.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        TunnelStatus {
            control: self.control(names),
            control_error: self.error.clone(),
            deployment: self.facts.deployment.clone(),
            user: self.facts.user.clone(),
            suffix: self.facts.suffix.clone(),
            interface: self.facts.interface.clone(),
            address: Some(self.facts.address),
            dns: names.status(),
            server_version: self.facts.server_version.clone(),
            workspaces: listed,
        }
    }

    fn path(&self, peer: &PeerStatus, snapshot: &Snapshot, map: &DerpMap, clock: &Clock) -> PathStatus {
        let (kind, endpoint, region) = match peer.path {
            Some(Path::Direct(address)) => (PathKind::Direct, address.to_string(), peer.home),
            Some(Path::Relay(region)) => (PathKind::Relay, String::new(), Some(region)),
            None => (PathKind::None, String::new(), peer.home),
        };
        let reason = match peer.state {
            PeerState::WaitingForNode => "offline",
            PeerState::Unreachable => "unreachable",
            PeerState::WaitingForReady | PeerState::Connecting => "probing",
            PeerState::Up => match kind {
                PathKind::Direct => "",
                PathKind::Relay | PathKind::None => peer.relay_reason.map_or("probing", reason_code),
            },
        };
        PathStatus {
            kind,
            endpoint,
            relay: region.map(|region| region_name(map, region)).unwrap_or_default(),
            reason,
            online: peer.state != PeerState::WaitingForNode && !peer.lost,
            last_ping: peer.last_ping.map(|ping| {
                let (direct, region) = match ping.path {
                    Path::Direct(_) => (true, snapshot.home),
                    Path::Relay(region) => (false, Some(region)),
                };
                LastPing {
                    latency: ping.latency,
                    direct,
                    relay: region.map(|region| region_name(map, region)).unwrap_or_default(),
                    relay_latency: region.and_then(|region| {
                        snapshot.latencies.iter().filter(|l| l.region == region).map(|l| l.latency).min()
                    }),
                }
            }),
            last_handshake: peer.last_handshake.map(|at| clock.wall(at)),
            rx_bytes: peer.rx_bytes,
            tx_bytes: peer.tx_bytes,
        }
    }
}

/// One word for programs (`AgentPath.reason`); the command line has the words for people.
fn reason_code(reason: RelayReason) -> &'static str {
    match reason {
        RelayReason::Probing => "probing",
        RelayReason::DisabledByUser => "disabled",
        RelayReason::DisabledByDeployment => "disabled_by_deployment",
        RelayReason::UdpBlocked => "udp_blocked",
        RelayReason::HardNat => "hard_nat",
        RelayReason::PathTooSmall => "path_too_small",
        RelayReason::NoEndpoints => "no_endpoints",
        RelayReason::NoAnswer => "no_answer",
    }
}

/// Turns instants of the engine into times of day.
struct Clock {
    instant: Instant,
    wall: SystemTime,
}

impl Clock {
    /// Never in the future, whole seconds: a steady value must not look like a change.
    fn wall(&self, at: Instant) -> SystemTime {
        let wall = self.wall - self.instant.saturating_duration_since(at);
        let since_epoch = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let rounded = (since_epoch.as_secs_f64() + 0.25) as u64;
        SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(rounded)
    }
}

/// What people call a relay region.
pub(super) fn region_name(map: &DerpMap, region: RegionId) -> String {
    match map.regions.get(&region) {
        Some(region) if !region.name.is_empty() => region.name.clone(),
        _ => format!("Unnamed {}", region.get()),
    }
}

/// Everything that helps to find a fault, for a client that asks.
pub(super) fn diagnostics(snapshot: &Snapshot, relays: &Relays) -> ext::DiagnosticsReply {
    let relays = relays.status();
    let counters = snapshot.counters().chain(tunnel::of_relays(&relays));
    ext::DiagnosticsReply {
        service_version: env!("CARGO_PKG_VERSION").to_owned(),
        counters: counters.map(|(name, value)| ext::Counter { name: name.to_owned(), value }).collect(),
        relays: relays
            .into_iter()
            .map(|relay| ext::RelayStatus {
                region_id: relay.region.get().into(),
                name: relay.name,
                latency: snapshot
                    .latencies
                    .iter()
                    .filter(|measured| measured.region == relay.region)
                    .map(|measured| duration(measured.latency))
                    .next(),
                connected: relay.phase == RelayPhase::Connected,
                home: relay.home,
                error: relay.error.or(relay.health).unwrap_or_default(),
            })
            .collect(),
        dump: format!("{:#?}\n{:#?}", snapshot.net, snapshot.engine),
        ..ext::DiagnosticsReply::default()
    }
}
