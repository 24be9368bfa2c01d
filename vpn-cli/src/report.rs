//! The status as data: what `status --json` promises (product contract, section 3), and what people are shown.
//!
//! Made from our service's status and from a foreign one's. What is not known is `None`, never left out.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use codervpn_proto::ext::{self, AgentPath, ControlState, DnsMode, DnsState, PathKind, StatusExt};
use codervpn_proto::vpn::{self, status::Lifecycle};
use prost_types::Timestamp;
use serde::{Serialize, Serializer};
use uuid::Uuid;

const SCHEMA: u32 = 1;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Report {
    schema: u32,
    pub(crate) lifecycle: Option<&'static str>,
    pub(crate) control: Option<&'static str>,
    pub(crate) error: Option<String>,
    pub(crate) since: Option<Time>,
    pub(crate) deployment: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) suffix: Option<String>,
    pub(crate) interface: Option<String>,
    pub(crate) dns: Dns,
    pub(crate) server_version: Option<String>,
    pub(crate) restricted: bool,
    /// Unknown to a user who may not see them.
    pub(crate) workspaces: Option<Vec<Workspace>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Dns {
    pub(crate) mode: Option<&'static str>,
    pub(crate) state: Option<&'static str>,
    /// For people only.
    #[serde(skip)]
    pub(crate) text: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Workspace {
    id: Option<Uuid>,
    pub(crate) name: String,
    pub(crate) status: Option<&'static str>,
    pub(crate) agents: Vec<Agent>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Agent {
    id: Option<Uuid>,
    pub(crate) name: String,
    /// Shortest first.
    pub(crate) fqdn: Vec<String>,
    pub(crate) addresses: Vec<String>,
    #[serde(flatten)]
    pub(crate) path: Path,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Path {
    #[serde(rename = "path")]
    pub(crate) kind: Option<&'static str>,
    pub(crate) endpoint: Option<String>,
    pub(crate) relay: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) latency_ms: Option<f64>,
    pub(crate) last_handshake: Option<Time>,
    pub(crate) rx_bytes: Option<u64>,
    pub(crate) tx_bytes: Option<u64>,
}

/// RFC 3339 in UTC, to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Time(Timestamp);

impl Report {
    pub(crate) fn of(status: &vpn::Status) -> Self {
        let none = StatusExt::default();
        let ext = status.ext.as_ref().unwrap_or(&none);
        let dns = ext.dns.as_ref();
        let restricted = ext.restricted && status.lifecycle() != Lifecycle::Stopped;
        Self {
            schema: SCHEMA,
            lifecycle: status.lifecycle().label(),
            control: ext.control().label(),
            error: error(status, ext),
            since: ext.since.and_then(Time::known),
            deployment: known(&ext.deployment),
            user: known(&ext.user),
            suffix: known(&ext.suffix),
            interface: known(&ext.interface),
            dns: Dns {
                mode: dns.and_then(|dns| dns.mode().label()),
                state: dns.and_then(|dns| dns.state().label()),
                text: dns.map(|dns| dns.text.clone()).unwrap_or_default(),
            },
            server_version: known(&ext.server_version),
            restricted: ext.restricted,
            workspaces: (!restricted).then(|| workspaces(status, ext)),
        }
    }

    pub(crate) fn is_started(&self) -> bool {
        self.lifecycle == Lifecycle::Started.label()
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.control == ControlState::Connected.label()
    }

    /// Whether names need a word of warning, with its text.
    pub(crate) fn dns_trouble(&self) -> Option<&str> {
        let bad = [DnsState::Degraded, DnsState::Failed].iter().any(|state| self.dns.state == state.label());
        (bad || !self.dns.text.is_empty()).then_some(match self.dns.text.as_str() {
            "" => "this machine's resolver could not be set up",
            text => text,
        })
    }

    /// Programs of this machine are not told of our names, as somebody chose.
    pub(crate) fn has_no_resolver(&self) -> bool {
        self.dns.mode == DnsMode::None.label()
    }
}

impl Workspace {
    pub(crate) fn of_tree(workspace: &ext::WorkspaceStatus) -> Self {
        let agent = |agent: &ext::AgentStatus| Agent {
            id: Uuid::from_slice(&agent.id).ok(),
            name: agent.name.clone(),
            fqdn: agent.fqdn.iter().map(|name| without_dot(name)).collect(),
            addresses: agent.addresses.clone(),
            path: agent.path.as_ref().map(Path::of).unwrap_or_default(),
        };
        Self {
            id: Uuid::from_slice(&workspace.id).ok(),
            name: workspace.name.clone(),
            status: vpn::workspace::Status::try_from(workspace.status).ok().and_then(vpn::workspace::Status::label),
            agents: workspace.agents.iter().map(agent).collect(),
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.status == vpn::workspace::Status::Running.label()
    }
}

impl Path {
    fn of(path: &AgentPath) -> Self {
        Self {
            kind: path.kind().label(),
            endpoint: known(&path.endpoint),
            relay: known(&path.relay),
            reason: known(&path.reason),
            latency_ms: path.latency.and_then(milliseconds),
            last_handshake: path.last_handshake.and_then(Time::known),
            rx_bytes: Some(path.rx_bytes),
            tx_bytes: Some(path.tx_bytes),
        }
    }

    /// What can be said by the protocol alone.
    fn of_foreign(agent: &vpn::Agent) -> Self {
        let ping = agent.last_ping.as_ref();
        let kind = ping.map(|ping| if ping.did_p2p { PathKind::Direct } else { PathKind::Relay });
        Self {
            kind: kind.and_then(PathKind::label),
            relay: ping.and_then(|ping| known(&ping.preferred_derp)),
            latency_ms: ping.and_then(|ping| ping.latency).and_then(milliseconds),
            last_handshake: agent.last_handshake.and_then(Time::known),
            ..Self::default()
        }
    }
}

impl Time {
    /// The epoch and year 1 mean "never" (codervpn-protocol 6.7).
    fn known(time: Timestamp) -> Option<Self> {
        (time.seconds > 0).then(|| Self(Timestamp { nanos: time.nanos / 1_000_000 * 1_000_000, ..time }))
    }

    /// Zero for a time to come: clocks step.
    pub(crate) fn age(self, now: SystemTime) -> Duration {
        SystemTime::try_from(self.0).ok().and_then(|time| now.duration_since(time).ok()).unwrap_or_default()
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Why it is not as it should be: what the service says itself, else what its fields say.
fn error(status: &vpn::Status, ext: &StatusExt) -> Option<String> {
    let failure = match status.lifecycle() {
        Lifecycle::Stopped => ext.last_failure.as_ref(),
        _ => ext.control_error.as_ref(),
    };
    known(&status.error_message).or_else(|| failure.and_then(|failure| known(&failure.text())))
}

fn workspaces(status: &vpn::Status, ext: &StatusExt) -> Vec<Workspace> {
    let Some(update) = &status.peer_update else { return Vec::new() };
    let paths: HashMap<&[u8], &AgentPath> = ext.agents.iter().map(|path| (path.agent_id.as_slice(), path)).collect();
    let mut agents: HashMap<&[u8], Vec<&vpn::Agent>> = HashMap::new();
    for agent in &update.upserted_agents {
        agents.entry(&agent.workspace_id).or_default().push(agent);
    }
    let agent = |agent: &&vpn::Agent| Agent {
        id: Uuid::from_slice(&agent.id).ok(),
        name: agent.name.clone(),
        fqdn: agent.fqdn.iter().map(|name| without_dot(name)).collect(),
        addresses: agent.ip_addrs.clone(),
        path: paths.get(agent.id.as_slice()).map_or_else(|| Path::of_foreign(agent), |path| Path::of(path)),
    };
    let mut listed: Vec<Workspace> = update
        .upserted_workspaces
        .iter()
        .map(|workspace| {
            let mut agents: Vec<Agent> = agents.get(workspace.id.as_slice()).into_iter().flatten().map(agent).collect();
            agents.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
            Workspace {
                id: Uuid::from_slice(&workspace.id).ok(),
                name: workspace.name.clone(),
                status: workspace.status().label(),
                agents,
            }
        })
        .collect();
    listed.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
    listed
}

/// Empty means unknown.
fn known(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn without_dot(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_owned()
}

/// To the microsecond. A negative one is nonsense and therefore unknown.
pub(crate) fn milliseconds(duration: prost_types::Duration) -> Option<f64> {
    let duration = Duration::try_from(duration).ok()?;
    Some((duration.as_secs_f64() * 1e6).round() / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_is_written_in_three_ways() {
        // codervpn-protocol 6.7: absent, epoch, year 1.
        assert_eq!(Time::known(Timestamp { seconds: 0, nanos: 0 }), None);
        assert_eq!(Time::known(Timestamp { seconds: -62_135_596_800, nanos: 0 }), None);
        let time = Time::known(Timestamp { seconds: 1_700_000_000, nanos: 123_456_789 }).unwrap();
        assert_eq!(time.to_string(), "2023-11-14T22:13:20.123Z");
        // Whatever a service sends, nothing panics.
        let far = Time::known(Timestamp { seconds: i64::MAX, nanos: i32::MIN }).unwrap();
        assert!(!far.to_string().is_empty());
        assert_eq!(far.age(SystemTime::UNIX_EPOCH), Duration::ZERO);
    }

    #[test]
    fn latencies_are_milliseconds() {
        assert_eq!(milliseconds(prost_types::Duration { seconds: 0, nanos: 1_234_567 }), Some(1.235));
        assert_eq!(milliseconds(prost_types::Duration { seconds: -1, nanos: 0 }), None);
    }

    #[test]
    fn a_foreign_service_is_read_by_the_protocol_alone() {
        let agent = vpn::Agent {
            id: vec![2; 16],
            name: "main".into(),
            workspace_id: vec![1; 16],
            fqdn: vec!["dev.coder.".into()],
            ip_addrs: vec!["fd60::1".into()],
            last_handshake: Some(Timestamp { seconds: -62_135_596_800, nanos: 0 }),
            last_ping: Some(vpn::LastPing { did_p2p: true, ..Default::default() }),
        };
        let stray = vpn::Agent { workspace_id: vec![9; 16], ..agent.clone() };
        let workspace = vpn::Workspace { id: vec![1; 16], name: "dev".into(), status: 99 };
        let status = vpn::Status {
            lifecycle: Lifecycle::Started.into(),
            peer_update: Some(vpn::PeerUpdate {
                upserted_workspaces: vec![workspace],
                upserted_agents: vec![agent, stray],
                ..Default::default()
            }),
            ..Default::default()
        };
        let report = Report::of(&status);
        assert_eq!((report.control, report.restricted, report.since), (None, false, None));
        let workspaces = report.workspaces.unwrap();
        assert_eq!(workspaces.len(), 1);
        assert_eq!((workspaces[0].status, workspaces[0].agents.len()), (None, 1));
        let path = &workspaces[0].agents[0].path;
        assert_eq!((path.kind, path.last_handshake, path.rx_bytes), (Some("direct"), None, None));
    }
}
