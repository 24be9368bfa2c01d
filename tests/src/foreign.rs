//! Decides how tests talk to the peers we did not write: the Go program in
//! `tests/foreign`, made of the libraries that real Coder servers and agents
//! use. Its README describes events and commands; here they get types.
//!
//! [`program`] builds it once per change of its sources. Every process writes
//! events to stdout, takes commands on stdin and ends when stdin is closed, so
//! none outlives its [`Process`]. Without Go a test says that it is skipped
//! ([`available`]); in CI that fails.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;
use uuid::Uuid;

use crate::netns::Namespace;
use crate::{binaries, skip};

/// In an isolated child: the program that its parent has built.
pub(crate) const BUILT: &str = "CODERVPN_TEST_FOREIGN";

/// How long an event is awaited unless told otherwise: several times the
/// longest known wait, the 5 s that a lost WireGuard initiation costs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// True when the Go peers can be used; says that the test is skipped (in CI:
/// fails) when not. Never true after a failed build: that is an error.
pub fn available() -> bool {
    match program() {
        Ok(_) => true,
        Err(err) if go().is_err() => {
            skip::skip(format!("{err:#}"));
            false
        }
        Err(err) => panic!("tests/foreign: {err:#}"),
    }
}

/// Path of the program, built on the first call when sources have changed.
pub fn program() -> anyhow::Result<&'static Path> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = PROGRAM.get_or_init(|| match std::env::var_os(BUILT) {
        Some(path) => Ok(path.into()),
        None => build().map_err(|err| format!("{err:#}")),
    });
    built.as_deref().map_err(|err| anyhow::anyhow!("{err}"))
}

/// The folder of the Go module.
pub fn sources() -> PathBuf {
    binaries::workspace().join("tests/foreign")
}

/// The `go` command, also where its usual folder is not in `PATH`.
pub fn go() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/go/bin".into(), "/usr/lib/go/bin".into()])
        .map(|folder| folder.join("go"))
        .find(|go| go.is_file())
        .context("Go is not installed (1.24.6 or newer, or 1.21 with access to its module proxy)")
}

/// A call of `go` in the module's folder.
pub fn go_command() -> anyhow::Result<std::process::Command> {
    let mut command = std::process::Command::new(go()?);
    // The tree may belong to another user than Go's version control stamping likes.
    command.current_dir(sources()).env("GOFLAGS", "-buildvcs=false").stdin(Stdio::null());
    Ok(command)
}

fn build() -> anyhow::Result<PathBuf> {
    let folder = binaries::target()?.folder.join("foreign");
    fs::create_dir_all(&folder)?;
    // Tests of several packages may run at the same time.
    let lock = fs::File::create(folder.join("lock"))?;
    lock.lock()?;
    let (program, stamp) = (folder.join("foreign"), folder.join("stamp"));
    let sources = format!("{:016x}", hash_sources()?);
    if program.exists() && fs::read_to_string(&stamp).is_ok_and(|old| old == sources) {
        return Ok(program);
    }
    let fresh = folder.join("foreign.new");
    let out = go_command()?.arg("build").arg("-o").arg(&fresh).arg(".").output().context("go cannot be run")?;
    if !out.status.success() {
        bail!("go build failed:\n{}", String::from_utf8_lossy(&out.stderr));
    }
    fs::rename(&fresh, &program)?;
    fs::write(&stamp, sources)?;
    Ok(program)
}

fn hash_sources() -> anyhow::Result<u64> {
    let mut files = Vec::new();
    for folder in [sources(), sources().join("tailnetpb")] {
        for entry in fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "go" || e == "mod" || e == "sum") {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut hash = DefaultHasher::new();
    for path in files {
        hash.write(path.as_os_str().as_encoded_bytes());
        hash.write(&fs::read(&path)?);
    }
    Ok(hash.finish())
}

/// One event: a JSON object with `event` and `t`.
pub type Event = Value;

/// A running subcommand.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    seen: Arc<Mutex<Seen>>,
    changed: watch::Receiver<()>,
    tags: u64,
}

/// What the process has said so far.
#[derive(Debug, Default)]
struct Seen {
    /// Events that nobody has taken yet, oldest first.
    events: VecDeque<Event>,
    ended: bool,
    /// The newest lines of stderr, for error messages.
    log: VecDeque<String>,
}

/// Events kept for later waits; more than that is a test that never looks.
const MAX_EVENTS: usize = 10_000;
const MAX_LOG: usize = 60;

impl Process {
    /// Starts `foreign SUBCOMMAND ARGS`, inside `namespace` if one is given.
    pub fn spawn<S: AsRef<OsStr>>(
        namespace: Option<&Namespace>,
        subcommand: &str,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<Self> {
        Self::spawn_with(namespace, subcommand, args, |_| {})
    }

    /// As [`Process::spawn`]; `adjust` may set environment variables.
    pub fn spawn_with<S: AsRef<OsStr>>(
        namespace: Option<&Namespace>,
        subcommand: &str,
        args: impl IntoIterator<Item = S>,
        adjust: impl FnOnce(&mut Command),
    ) -> anyhow::Result<Self> {
        let program = program()?;
        let mut command = match namespace {
            Some(namespace) => namespace.command(program),
            None => Command::new(program),
        };
        command.arg(subcommand).args(args);
        adjust(&mut command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("foreign {subcommand}"))?;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (tell, changed) = watch::channel(());
        let stdout = BufReader::new(child.stdout.take().context("stdout is piped")?);
        let stderr = BufReader::new(child.stderr.take().context("stderr is piped")?);
        tokio::spawn(read_events(stdout, Arc::clone(&seen), tell));
        tokio::spawn(read_log(stderr, Arc::clone(&seen)));
        let stdin = child.stdin.take();
        Ok(Self { name: format!("foreign {subcommand}"), child, stdin, seen, changed, tags: 0 })
    }

    /// Process id; `None` once it has been waited for. (With a namespace it is
    /// the same process: `nsenter` replaces itself.)
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Takes the oldest event of that name, waiting for it if need be.
    pub async fn event(&mut self, name: &str) -> anyhow::Result<Event> {
        self.event_where(name, |_| true).await
    }

    /// Takes the oldest event of that name for which `fits` holds; the others
    /// stay for later waits.
    pub async fn event_where(&mut self, name: &str, fits: impl FnMut(&Event) -> bool) -> anyhow::Result<Event> {
        self.event_within(PATIENCE, name, fits).await
    }

    /// As [`Process::event_where`] with a deadline of its own.
    pub async fn event_within(
        &mut self,
        limit: Duration,
        name: &str,
        mut fits: impl FnMut(&Event) -> bool,
    ) -> anyhow::Result<Event> {
        let mut changed = self.changed.clone();
        let wait = async {
            loop {
                changed.borrow_and_update();
                if let Some(event) = self.take(name, &mut fits) {
                    return Ok(event);
                }
                if self.seen().ended || changed.changed().await.is_err() {
                    // The last line and the end may have come together.
                    return self.take(name, &mut fits).context("it ended before");
                }
            }
        };
        match tokio::time::timeout(limit, wait).await {
            Ok(result) => result,
            Err(_) => Err(anyhow::anyhow!("not within {limit:?}")),
        }
        .with_context(|| format!("{}: waiting for {name:?}; {}", self.name, self.story()))
    }

    /// Takes the oldest event of that name if it has come already.
    pub fn take(&self, name: &str, mut fits: impl FnMut(&Event) -> bool) -> Option<Event> {
        let mut seen = self.seen();
        let at = seen.events.iter().position(|e| e["event"] == name && fits(e))?;
        seen.events.remove(at)
    }

    /// Forgets what has come so far, so that a wait sees only what is new.
    pub fn forget(&self, name: &str) {
        self.seen().events.retain(|e| e["event"] != name);
    }

    /// Sends a command without waiting for an answer.
    pub async fn send(&mut self, cmd: &str, members: Value) -> anyhow::Result<()> {
        let mut line = members;
        ensure!(line.is_null() || line.is_object(), "members are an object");
        line["cmd"] = cmd.into();
        let stdin = self.stdin.as_mut().context("stdin is closed")?;
        stdin.write_all(format!("{line}\n").as_bytes()).await.with_context(|| format!("{}: {cmd}", self.name))?;
        stdin.flush().await?;
        Ok(())
    }

    /// Sends a command and returns its answer; an `error` event is an error.
    pub async fn call(&mut self, cmd: &str, members: Value) -> anyhow::Result<Event> {
        self.tags += 1;
        let tag = format!("#{}", self.tags);
        let mut members = members;
        ensure!(members.is_null() || members.is_object(), "members are an object");
        members["tag"] = tag.as_str().into();
        self.send(cmd, members).await?;
        let mut changed = self.changed.clone();
        let wait = async {
            loop {
                changed.borrow_and_update();
                for name in [cmd, "error"] {
                    if let Some(event) = self.take(name, |e| e["tag"] == tag.as_str()) {
                        return Some(event);
                    }
                }
                if self.seen().ended || changed.changed().await.is_err() {
                    return None;
                }
            }
        };
        let answer = tokio::time::timeout(PATIENCE * 5, wait).await.ok().flatten();
        let answer = answer.with_context(|| format!("{}: no answer to {cmd}; {}", self.name, self.story()))?;
        ensure!(answer["event"] != "error", "{}: {cmd}: {}", self.name, answer["error"]);
        Ok(answer)
    }

    /// Closes stdin, which makes agents and clients say Disconnect, and waits for the end.
    pub async fn quit(mut self) -> anyhow::Result<()> {
        self.stdin = None;
        let status = tokio::time::timeout(PATIENCE, self.child.wait())
            .await
            .with_context(|| format!("{}: does not end; {}", self.name, self.story()))??;
        ensure!(status.success(), "{}: {status}; {}", self.name, self.story());
        Ok(())
    }

    /// Ends it without a word, as a crash does.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("no reader panics with the lock")
    }

    /// The newest events and log lines, for error messages.
    fn story(&self) -> String {
        let seen = self.seen();
        let events: Vec<_> = seen.events.iter().rev().take(8).rev().map(ToString::to_string).collect();
        let log: Vec<_> = seen.log.iter().map(String::as_str).collect();
        format!("events not taken: [{}], log:\n{}", events.join(", "), log.join("\n"))
    }
}

async fn read_events(
    stdout: BufReader<impl tokio::io::AsyncRead + Unpin>,
    seen: Arc<Mutex<Seen>>,
    tell: watch::Sender<()>,
) {
    let mut lines = stdout.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let event = serde_json::from_str(&line).unwrap_or_else(|_| json!({"event": "garbage", "line": line}));
        {
            let mut seen = seen.lock().expect("no reader panics with the lock");
            if seen.events.len() == MAX_EVENTS {
                seen.events.pop_front();
            }
            seen.events.push_back(event);
        }
        tell.send_replace(());
    }
    seen.lock().expect("no reader panics with the lock").ended = true;
    tell.send_replace(());
}

async fn read_log(stderr: BufReader<impl tokio::io::AsyncRead + Unpin>, seen: Arc<Mutex<Seen>>) {
    let mut lines = stderr.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut seen = seen.lock().expect("no reader panics with the lock");
        if seen.log.len() == MAX_LOG {
            seen.log.pop_front();
        }
        seen.log.push_back(line);
    }
}

/// Where a server listens when the test does not care.
const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

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
    /// Answer STUN there too, as region 1000.
    pub stun: Option<SocketAddr>,
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
        if let Some(stun) = options.stun {
            flag(&mut args, "stun", &stun);
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
