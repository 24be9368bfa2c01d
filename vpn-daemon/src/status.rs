//! What can be known about the daemon from outside, as one value that replaces the one before.
//!
//! The parts that own the facts write here; every client's view is made from it with that client's rights. Nothing
//! secret is ever put in.

use std::net::Ipv6Addr;
use std::time::{Duration, SystemTime};

use codervpn_proto::ext::{self, ControlState, DnsMode, DnsState, PathKind};
use codervpn_proto::vpn;
use prost_types::Timestamp;
use uuid::Uuid;

use crate::failure::Failure;

/// Requests that exist: check, ping, diagnostics, workspaces (codervpn_ext.proto).
const EXT_REVISION: u32 = 1;

/// The four states a client can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifecycle {
    Starting,
    Started,
    Stopping,
    Stopped,
}

/// Everything, for root and the tunnel's owner.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    pub lifecycle: Lifecycle,
    pub since: SystemTime,
    /// The failure that ended or prevented the last start.
    pub last_failure: Option<Failure>,
    /// Whose start that was: its text names their deployment, which is nobody else's business.
    pub failed: Option<u32>,
    /// Who started the tunnel; none while stopped.
    pub owner: Option<u32>,
    pub tunnel: TunnelStatus,
}

/// What is known about a tunnel. The default is what is known without one.
#[derive(Debug, Clone, PartialEq)]
pub struct TunnelStatus {
    pub control: ControlState,
    pub control_error: Option<Failure>,
    pub deployment: String,
    pub user: String,
    pub suffix: String,
    pub interface: String,
    pub address: Option<Ipv6Addr>,
    pub dns: DnsStatus,
    pub server_version: String,
    pub workspaces: Vec<WorkspaceStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsStatus {
    pub mode: DnsMode,
    pub state: DnsState,
    pub text: String,
    pub upstreams: Vec<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct WorkspaceStatus {
    pub id: Uuid,
    pub name: String,
    pub status: vpn::workspace::Status,
    pub agents: Vec<AgentStatus>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AgentStatus {
    pub id: Uuid,
    pub name: String,
    /// Without the final dot, shortest first.
    pub fqdn: Vec<String>,
    pub address: Ipv6Addr,
    pub path: PathStatus,
}

/// How packets to one agent travel.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PathStatus {
    pub kind: PathKind,
    pub endpoint: String,
    pub relay: String,
    pub reason: &'static str,
    pub online: bool,
    pub last_ping: Option<LastPing>,
    pub last_handshake: Option<SystemTime>,
    pub rx_bytes: u64,
    pub tx_bytes: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct LastPing {
    pub latency: Duration,
    pub direct: bool,
    /// Display name of the relay the pong used, or of our home relay when it came directly.
    pub relay: String,
    /// Our latency to that relay.
    pub relay_latency: Option<Duration>,
}

impl Default for TunnelStatus {
    fn default() -> Self {
        Self {
            control: ControlState::Off,
            control_error: None,
            deployment: String::new(),
            user: String::new(),
            suffix: String::new(),
            interface: String::new(),
            address: None,
            dns: DnsStatus::default(),
            server_version: String::new(),
            workspaces: Vec::new(),
        }
    }
}

impl Default for DnsStatus {
    fn default() -> Self {
        Self { mode: DnsMode::None, state: DnsState::Off, text: String::new(), upstreams: Vec::new() }
    }
}

impl Status {
    pub fn stopped(now: SystemTime) -> Self {
        Self {
            lifecycle: Lifecycle::Stopped,
            since: now,
            last_failure: None,
            failed: None,
            owner: None,
            tunnel: TunnelStatus::default(),
        }
    }

    /// The message for a client, complete (codervpn-protocol 11.3) or restricted to the lifecycle (11.5.3).
    /// `sees_failure`: whether the last failure is shown, too.
    pub fn to_proto(&self, sees_peers: bool, sees_failure: bool) -> vpn::Status {
        let lifecycle = match self.lifecycle {
            Lifecycle::Starting => vpn::status::Lifecycle::Starting,
            Lifecycle::Started => vpn::status::Lifecycle::Started,
            Lifecycle::Stopping => vpn::status::Lifecycle::Stopping,
            Lifecycle::Stopped => vpn::status::Lifecycle::Stopped,
        };
        let mut ext = ext::StatusExt {
            revision: EXT_REVISION,
            service_version: env!("CARGO_PKG_VERSION").to_owned(),
            since: Some(Timestamp::from(self.since)),
            restricted: !sees_peers,
            ..ext::StatusExt::default()
        };
        // Frontends dereference it without looking, so it is there even when empty.
        let mut peer_update = vpn::PeerUpdate::default();
        let mut error_message = String::new();
        if sees_peers {
            if let Some(failure) = self.problem(sees_failure) {
                error_message = failure.to_string();
            }
            if sees_failure {
                self.fill(&mut ext);
            }
            self.tunnel.fill(&mut ext, &mut peer_update);
        }
        vpn::Status { lifecycle: lifecycle.into(), error_message, peer_update: Some(peer_update), ext: Some(ext) }
    }

    /// The last failure while stopped, what is degraded while started (11.3).
    fn problem(&self, sees_failure: bool) -> Option<&Failure> {
        match self.lifecycle {
            Lifecycle::Stopped => self.last_failure.as_ref().filter(|_| sees_failure),
            _ => self.tunnel.control_error.as_ref(),
        }
    }

    fn fill(&self, ext: &mut ext::StatusExt) {
        ext.last_failure = self.last_failure.as_ref().map(Failure::to_proto);
    }
}

impl TunnelStatus {
    fn fill(&self, ext: &mut ext::StatusExt, update: &mut vpn::PeerUpdate) {
        ext.control = self.control.into();
        ext.control_error = self.control_error.as_ref().map(Failure::to_proto);
        ext.deployment.clone_from(&self.deployment);
        ext.user.clone_from(&self.user);
        ext.suffix.clone_from(&self.suffix);
        ext.interface.clone_from(&self.interface);
        ext.address = self.address.map(|address| address.to_string()).unwrap_or_default();
        ext.server_version.clone_from(&self.server_version);
        ext.dns = Some(ext::DnsStatus {
            mode: self.dns.mode.into(),
            state: self.dns.state.into(),
            text: self.dns.text.clone(),
            upstreams: self.dns.upstreams.clone(),
        });
        for workspace in &self.workspaces {
            update.upserted_workspaces.push(vpn::Workspace {
                id: workspace.id.as_bytes().to_vec(),
                name: workspace.name.clone(),
                status: workspace.status.into(),
            });
            // an agent without any name breaks frontends; it is tunnelled to, not shown.
            for agent in workspace.agents.iter().filter(|agent| !agent.fqdn.is_empty()) {
                update.upserted_agents.push(agent.to_proto(workspace.id));
                ext.agents.push(agent.path.to_proto(agent.id));
            }
        }
    }

    /// The tree of the extension.
    pub fn to_tree(&self, only: &str) -> ext::WorkspacesReply {
        let workspaces = self
            .workspaces
            .iter()
            .filter(|workspace| only.is_empty() || workspace.name == only)
            .map(|workspace| ext::WorkspaceStatus {
                id: workspace.id.as_bytes().to_vec(),
                name: workspace.name.clone(),
                status: workspace.status.into(),
                agents: workspace
                    .agents
                    .iter()
                    .map(|agent| ext::AgentStatus {
                        id: agent.id.as_bytes().to_vec(),
                        name: agent.name.clone(),
                        fqdn: agent.fqdn.clone(),
                        addresses: vec![agent.address.to_string()],
                        path: Some(agent.path.to_proto(agent.id)),
                    })
                    .collect(),
            })
            .collect();
        ext::WorkspacesReply { workspaces }
    }
}

impl AgentStatus {
    fn to_proto(&self, workspace: Uuid) -> vpn::Agent {
        vpn::Agent {
            id: self.id.as_bytes().to_vec(),
            name: self.name.clone(),
            workspace_id: workspace.as_bytes().to_vec(),
            fqdn: self.fqdn.iter().map(|name| format!("{name}.")).collect(),
            ip_addrs: vec![self.address.to_string()],
            last_handshake: self.path.last_handshake.map(Timestamp::from),
            last_ping: self.path.last_ping.as_ref().map(LastPing::to_proto),
        }
    }
}

impl PathStatus {
    fn to_proto(&self, agent: Uuid) -> ext::AgentPath {
        ext::AgentPath {
            agent_id: agent.as_bytes().to_vec(),
            kind: self.kind.into(),
            endpoint: self.endpoint.clone(),
            relay: self.relay.clone(),
            reason: self.reason.to_owned(),
            latency: self.last_ping.as_ref().map(|ping| duration(ping.latency)),
            last_handshake: self.last_handshake.map(Timestamp::from),
            rx_bytes: self.rx_bytes,
            tx_bytes: self.tx_bytes,
            online: self.online,
        }
    }
}

impl LastPing {
    fn to_proto(&self) -> vpn::LastPing {
        vpn::LastPing {
            latency: Some(duration(self.latency)),
            did_p2p: self.direct,
            preferred_derp: self.relay.clone(),
            preferred_derp_latency: self.relay_latency.map(duration),
        }
    }
}

/// A latency is far below the range that could overflow; if not, the longest that the wire can carry.
pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or(prost_types::Duration { seconds: i64::MAX, nanos: 0 })
}

/// The number the frontends know a workspace's state by.
pub fn workspace_status(status: codervpn_control::WorkspaceStatus) -> vpn::workspace::Status {
    use codervpn_control::WorkspaceStatus as From;
    use vpn::workspace::Status as To;
    match status {
        From::Unknown => To::Unknown,
        From::Pending => To::Pending,
        From::Starting => To::Starting,
        From::Running => To::Running,
        From::Stopping => To::Stopping,
        From::Stopped => To::Stopped,
        From::Failed => To::Failed,
        From::Canceling => To::Canceling,
        From::Canceled => To::Canceled,
        From::Deleting => To::Deleting,
        From::Deleted => To::Deleted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codervpn_proto::ext::FailureCode;

    fn running() -> Status {
        let agent = |id: u128, fqdn: &[&str]| AgentStatus {
            id: Uuid::from_u128(id),
            name: "main".into(),
            fqdn: fqdn.iter().map(|name| (*name).to_owned()).collect(),
            address: Ipv6Addr::LOCALHOST,
            path: PathStatus::default(),
        };
        let workspace = WorkspaceStatus {
            id: Uuid::from_u128(1),
            name: "dev".into(),
            status: vpn::workspace::Status::Running,
            agents: vec![agent(2, &["dev.coder", "main.dev.me.coder"]), agent(3, &[])],
        };
        Status {
            lifecycle: Lifecycle::Started,
            owner: Some(1000),
            tunnel: TunnelStatus {
                deployment: "https://coder.example.com".into(),
                workspaces: vec![workspace],
                control_error: Some(Failure::new(FailureCode::Unreachable, "no answer")),
                ..TunnelStatus::default()
            },
            ..Status::stopped(SystemTime::UNIX_EPOCH)
        }
    }

    #[test]
    fn the_whole_view_has_peers_paths_and_what_is_degraded() {
        let status = running().to_proto(true, true);
        let update = status.peer_update.unwrap();
        let ext = status.ext.unwrap();
        assert_eq!(update.upserted_agents.len(), 1, "R-18: an agent without a name is not reported");
        assert_eq!(update.upserted_agents[0].fqdn, ["dev.coder.", "main.dev.me.coder."]);
        assert_eq!(ext.agents.len(), 1);
        assert_eq!(status.error_message, "no answer");
        assert!(!ext.restricted && ext.revision > 0);
    }

    #[test]
    fn others_see_the_lifecycle_and_nothing_else() {
        let status = running().to_proto(false, true);
        assert_eq!(status.lifecycle, i32::from(vpn::status::Lifecycle::Started));
        assert_eq!(status.peer_update, Some(vpn::PeerUpdate::default()), "frontends dereference it");
        assert!(status.error_message.is_empty());
        let ext = status.ext.unwrap();
        let told = ext::StatusExt {
            revision: ext.revision,
            service_version: ext.service_version.clone(),
            since: ext.since,
            restricted: true,
            ..ext::StatusExt::default()
        };
        assert_eq!(ext, told);
    }

    /// S-02: an address of one user's deployment is not told to the next.
    #[test]
    fn a_failure_is_shown_only_to_whom_it_happened() {
        let failure = Failure::new(FailureCode::Unreachable, "https://secret.example.com does not answer");
        let status =
            Status { last_failure: Some(failure), failed: Some(1000), ..Status::stopped(SystemTime::UNIX_EPOCH) };
        let own = status.to_proto(true, true);
        assert!(own.error_message.contains("secret.example.com") && own.ext.unwrap().last_failure.is_some());
        let other = status.to_proto(true, false);
        let ext = other.ext.unwrap();
        assert!(other.error_message.is_empty() && ext.last_failure.is_none() && !ext.restricted);
    }

    #[test]
    fn a_handshake_that_never_was_is_absent() {
        let status = running().to_proto(true, true);
        assert_eq!(status.peer_update.unwrap().upserted_agents[0].last_handshake, None);
    }
}
