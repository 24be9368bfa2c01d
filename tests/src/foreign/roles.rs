//! The subcommands with typed options, and the questions that each answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::Process;
use crate::netns::Namespace;

/// Where a server listens when the test does not care.
const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Adds `--NAME VALUE`.
fn flag(args: &mut Vec<String>, name: &str, value: &(impl ToString + ?Sized)) {
    args.extend([format!("--{name}"), value.to_string()]);
}

/// TLS of a Go server with a self-signed certificate.
#[derive(Debug, Clone)]
pub struct Tls {
    /// Name or address in certificate and URL; default: the listening address.
    pub host: Option<String>,
    /// Where the certificate is written as PEM: the value of `network.extra_ca`.
    pub certificate: PathBuf,
}

impl Tls {
    fn flags(&self, args: &mut Vec<String>) {
        args.push("--tls".into());
        flag(args, "cert-out", &self.certificate.display());
        if let Some(host) = &self.host {
            flag(args, "host", host);
        }
    }
}

/// `foreign derp`: a relay.
#[derive(Debug)]
pub struct Relay {
    pub process: Process,
    pub listen: SocketAddr,
    /// `nodekey:HEX`.
    pub key: String,
    /// A complete map with this relay alone, in tailcfg's JSON form.
    pub derp_map: Value,
}

#[derive(Debug, Default)]
pub struct RelayOptions<'a> {
    pub namespace: Option<&'a Namespace>,
    pub listen: Option<SocketAddr>,
    pub tls: Option<Tls>,
    /// Answer STUN there too.
    pub stun: Option<SocketAddr>,
    /// Further flags.
    pub flags: Vec<String>,
}

impl Relay {
    pub async fn start(options: RelayOptions<'_>) -> anyhow::Result<Self> {
        let mut args = options.flags;
        flag(&mut args, "listen", &options.listen.unwrap_or(ANY_PORT));
        if let Some(tls) = &options.tls {
            tls.flags(&mut args);
        }
        if let Some(stun) = options.stun {
            flag(&mut args, "stun", &stun);
        }
        let mut process = Process::spawn(options.namespace, "derp", args)?;
        let mut ready = process.event("ready").await?;
        Ok(Self {
            listen: text(&ready, "listen")?.parse()?,
            key: text(&ready, "key")?.to_owned(),
            derp_map: ready["derp_map"].take(),
            process,
        })
    }

    /// Cuts every connection; the relay goes on.
    pub async fn drop_connections(&mut self) -> anyhow::Result<()> {
        self.process.call("drop", Value::Null).await.map(drop)
    }
}

/// `foreign coordinator`: a deployment with embedded relay.
#[derive(Debug)]
pub struct Coordinator {
    pub process: Process,
    pub url: String,
    /// The user's session token.
    pub token: String,
    pub owner: Uuid,
    pub derp_map: Value,
}

#[derive(Debug, Default)]
pub struct CoordinatorOptions<'a> {
    pub namespace: Option<&'a Namespace>,
    pub listen: Option<SocketAddr>,
    pub tls: Option<Tls>,
    /// Answer STUN there too, as regions from 1000 on.
    pub stun: Vec<SocketAddr>,
    /// `disable_direct_connections` in the connection info.
    pub disable_direct: bool,
    /// Instead of the embedded relay's map.
    pub derp_map: Option<Value>,
    pub hostname_suffix: Option<String>,
    /// RPC names answered as unknown, as an older server does.
    pub without: Vec<String>,
    /// Further flags.
    pub flags: Vec<String>,
}

impl Coordinator {
    pub async fn start(options: CoordinatorOptions<'_>) -> anyhow::Result<Self> {
        let mut args = options.flags;
        flag(&mut args, "listen", &options.listen.unwrap_or(ANY_PORT));
        if let Some(tls) = &options.tls {
            tls.flags(&mut args);
        }
        if !options.stun.is_empty() {
            let all: Vec<_> = options.stun.iter().map(ToString::to_string).collect();
            flag(&mut args, "stun", &all.join(","));
        }
        if options.disable_direct {
            args.push("--disable-direct".into());
        }
        if let Some(map) = &options.derp_map {
            args.push("--embedded-derp=false".into());
            flag(&mut args, "derp-map", map);
        }
        if let Some(suffix) = &options.hostname_suffix {
            flag(&mut args, "hostname-suffix", suffix);
        }
        if !options.without.is_empty() {
            flag(&mut args, "without", &options.without.join(","));
        }
        let mut process = Process::spawn(options.namespace, "coordinator", args)?;
        let mut ready = process.event("ready").await?;
        Ok(Self {
            url: text(&ready, "url")?.to_owned(),
            token: text(&ready, "token")?.to_owned(),
            owner: text(&ready, "owner")?.parse()?,
            derp_map: ready["derp_map"].take(),
            process,
        })
    }

    /// Sends one `WorkspaceUpdate` with exactly these members (see the README
    /// of `tests/foreign`); it is also kept for later snapshots.
    pub async fn workspaces(&mut self, update: Value) -> anyhow::Result<()> {
        self.process.call("workspaces", update).await.map(drop)
    }

    /// One running workspace with these agents `(id, name)`.
    pub async fn add_workspace(&mut self, id: Uuid, name: &str, agents: &[(Uuid, &str)]) -> anyhow::Result<()> {
        let agents: Vec<_> =
            agents.iter().map(|(agent, name)| json!({"id": agent, "name": name, "workspace_id": id})).collect();
        self.workspaces(json!({
            "upserted_workspaces": [{"id": id, "name": name, "status": "RUNNING"}],
            "upserted_agents": agents,
        }))
        .await
    }

    /// Ends one peer's Coordinate call; a text is sent as `error` before.
    pub async fn drop_peer(&mut self, id: Uuid, error: &str) -> anyhow::Result<()> {
        self.process.call("drop-peer", json!({"id": id, "error": error})).await.map(drop)
    }

    /// Cuts every control WebSocket without a close frame.
    pub async fn drop_connections(&mut self) -> anyhow::Result<()> {
        self.process.call("drop-connections", Value::Null).await.map(drop)
    }

    /// Cuts every connection of the embedded relay.
    pub async fn drop_relay_connections(&mut self) -> anyhow::Result<()> {
        self.process.call("drop-derp", Value::Null).await.map(drop)
    }

    /// Makes the next `count` dials of `/api/v2/tailnet` fail. A `field` adds a
    /// validation for it.
    pub async fn refuse(&mut self, status: u16, count: u32, message: &str, field: &str) -> anyhow::Result<()> {
        let members = json!({"status": status, "count": count, "message": message, "field": field});
        self.process.call("refuse", members).await.map(drop)
    }

    /// Pushes a DERP map to everybody.
    pub async fn push_derp_map(&mut self, map: &Value) -> anyhow::Result<()> {
        self.process.call("derp-map", json!({"map": map})).await.map(drop)
    }

    /// All peers with node and tunnels.
    pub async fn peers(&mut self) -> anyhow::Result<Value> {
        Ok(self.process.call("status", Value::Null).await?["peers"].take())
    }
}

/// Flags that every Go engine knows.
#[derive(Debug, Default, Clone)]
pub struct EngineOptions {
    /// Relay only.
    pub block_direct: bool,
    /// DERP over WebSocket.
    pub force_websocket: bool,
    pub derp_map: Option<Value>,
    /// A TUN device of this name and the kernel's stack instead of gVisor and
    /// the services.
    pub tun: Option<String>,
    /// A PEM file that replaces the system's trust roots.
    pub trust: Option<PathBuf>,
    /// Further flags.
    pub flags: Vec<String>,
}

impl EngineOptions {
    fn args(&self) -> Vec<String> {
        let mut args = self.flags.clone();
        if self.block_direct {
            args.push("--block-direct".into());
        }
        if self.force_websocket {
            args.push("--force-websocket".into());
        }
        if let Some(map) = &self.derp_map {
            flag(&mut args, "derp-map", map);
        }
        if let Some(tun) = &self.tun {
            flag(&mut args, "tun", tun);
        }
        args
    }

    fn spawn(&self, namespace: Option<&Namespace>, subcommand: &str, args: Vec<String>) -> anyhow::Result<Process> {
        Process::spawn_with(namespace, subcommand, args, |command| {
            if let Some(trust) = &self.trust {
                command.env("SSL_CERT_FILE", trust);
            }
        })
    }
}

/// What nodes, agents and clients can be asked.
impl Process {
    /// The event that tells a usable relay connection. Before it a first
    /// WireGuard initiation to this peer would be lost, which costs 5 s.
    pub async fn relay_up(&mut self) -> anyhow::Result<()> {
        self.event("relay-up").await.map(drop)
    }

    /// The self node, as `add_peer` of another engine takes it.
    pub async fn node(&mut self) -> anyhow::Result<Value> {
        Ok(self.call("node", Value::Null).await?["node"].take())
    }

    pub async fn add_peer(&mut self, id: &str, node: &Value, keep_alive: bool) -> anyhow::Result<()> {
        self.call("add-peer", json!({"id": id, "node": node, "keep_alive": keep_alive})).await.map(drop)
    }

    pub async fn remove_peer(&mut self, id: &str) -> anyhow::Result<()> {
        self.call("remove-peer", json!({"id": id})).await.map(drop)
    }

    /// Sends a disco, TSMP or ICMP ping.
    pub async fn ping(&mut self, ip: IpAddr, kind: PingKind) -> anyhow::Result<Pong> {
        let answer = self.call("ping", json!({"ip": ip, "kind": kind.name()})).await?;
        Ok(Pong::deserialize(answer)?)
    }

    /// Fetches a URL through the tunnel; its host is an IP address.
    pub async fn get(&mut self, url: &str) -> anyhow::Result<String> {
        Ok(text(&self.call("get", json!({"url": url})).await?, "body")?.to_owned())
    }

    /// Sends bytes to TCP port 7 and compares what comes back.
    pub async fn echo(&mut self, ip: IpAddr, bytes: u64) -> anyhow::Result<Duration> {
        let answer = self.call("echo", json!({"ip": ip, "bytes": bytes})).await?;
        Ok(Duration::from_secs_f64(answer["seconds"].as_f64().context("seconds")?))
    }

    /// Moves data for some seconds; `up` sends, otherwise the peer does.
    pub async fn throughput(&mut self, ip: IpAddr, up: bool, seconds: f64) -> anyhow::Result<Throughput> {
        let direction = if up { "up" } else { "down" };
        let members = json!({"ip": ip, "direction": direction, "seconds": seconds});
        Ok(Throughput::deserialize(self.call("throughput", members).await?["result"].take())?)
    }

    /// CPU seconds that the process has used so far.
    pub async fn cpu_seconds(&mut self) -> anyhow::Result<f64> {
        self.call("status", Value::Null).await?["cpu_s"].as_f64().context("cpu_s")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PingKind {
    /// Outside WireGuard.
    Disco,
    Tsmp,
    Icmp,
}

impl PingKind {
    fn name(self) -> &'static str {
        match self {
            Self::Disco => "disco",
            Self::Tsmp => "TSMP",
            Self::Icmp => "ICMP",
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
pub struct Pong {
    pub latency_s: f64,
    /// UDP path; empty means the relay.
    pub endpoint: String,
    pub derp_region: u16,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Throughput {
    pub bytes: u64,
    pub seconds: f64,
    pub gbit_s: f64,
    pub cpu_s: f64,
    pub peer_cpu_s: f64,
}

/// `foreign node`: an engine programmed by the test. Derefs to its process.
#[derive(Debug)]
pub struct Node {
    pub process: Process,
    pub addresses: Vec<IpAddr>,
}

impl Node {
    pub async fn start(namespace: Option<&Namespace>, options: &EngineOptions) -> anyhow::Result<Self> {
        let mut process = options.spawn(namespace, "node", options.args())?;
        let ready = process.event("ready").await?;
        Ok(Self { addresses: addresses(&ready)?, process })
    }
}

/// `foreign agent`: a workspace agent. It serves TCP 7, 9, 19 and 80.
#[derive(Debug)]
pub struct Agent {
    pub process: Process,
    pub id: Uuid,
}

impl Agent {
    /// Starts the agent `id` of the deployment at `url`; its token is `agent-ID`.
    pub async fn start(
        namespace: Option<&Namespace>,
        url: &str,
        id: Uuid,
        options: &EngineOptions,
    ) -> anyhow::Result<Self> {
        let mut args = options.args();
        flag(&mut args, "coordinator", url);
        flag(&mut args, "id", &id);
        let mut process = options.spawn(namespace, "agent", args)?;
        process.event("ready").await?;
        Ok(Self { process, id })
    }

    /// Its address in Coder's prefix.
    pub fn address(&self) -> Ipv6Addr {
        agent_address(self.id)
    }
}

/// `foreign client`: the role of our daemon.
#[derive(Debug)]
pub struct Client {
    pub process: Process,
}

/// One agent as the Go client lists it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ListedAgent {
    pub id: Uuid,
    pub name: String,
    pub workspace_id: Uuid,
    pub address: IpAddr,
}

impl Client {
    pub async fn start(
        namespace: Option<&Namespace>,
        url: &str,
        token: &str,
        options: &EngineOptions,
    ) -> anyhow::Result<Self> {
        let mut args = options.args();
        flag(&mut args, "url", url);
        flag(&mut args, "token", token);
        let mut process = options.spawn(namespace, "client", args)?;
        process.event("ready").await?;
        Ok(Self { process })
    }

    pub async fn agents(&mut self) -> anyhow::Result<Vec<ListedAgent>> {
        Ok(Vec::deserialize(self.process.call("agents", Value::Null).await?["agents"].take())?)
    }

    /// Waits until the coordinator has passed on that `agent` is ready for handshakes.
    pub async fn agent_ready(&mut self, agent: Uuid) -> anyhow::Result<()> {
        let id = agent.to_string();
        self.process
            .event_where("peer-update", |e| e["kind"] == "READY_FOR_HANDSHAKE" && e["id"] == id.as_str())
            .await
            .map(drop)
    }
}

/// The address of an agent in Coder's prefix: the first six bytes of its id
/// are replaced (CC rules of the control plane; here written anew, so that
/// tests do not take our own code's word for it).
pub fn agent_address(id: Uuid) -> Ipv6Addr {
    let mut bytes = *id.as_bytes();
    bytes[..6].copy_from_slice(&[0xfd, 0x60, 0x62, 0x7a, 0xa4, 0x2b]);
    Ipv6Addr::from(bytes)
}

fn addresses(ready: &Value) -> anyhow::Result<Vec<IpAddr>> {
    let list = ready["addresses"].as_array().context("addresses")?;
    list.iter()
        .map(|prefix| {
            let prefix = prefix.as_str().context("an address is a string")?;
            Ok(prefix.split('/').next().unwrap_or(prefix).parse()?)
        })
        .collect()
}

fn text<'a>(event: &'a Value, member: &str) -> anyhow::Result<&'a str> {
    event[member].as_str().with_context(|| format!("{member} is missing in {event}"))
}
