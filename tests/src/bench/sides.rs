//! Who is compared: a client and an agent with what lies between them, started for one round, watched, and ended. All of
//! it are processes of their own, so that each one's processor time and memory are its own.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use codervpn_proto::ext::{AgentPath, PathKind, client_ext, service_ext};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::generator::Reached;
use super::links::SERVER;
use crate::binaries;
use crate::daemon::Client as DaemonClient;
use crate::foreign::{self, EngineOptions};
use crate::netns::Namespace;

/// Starts, ends and answers that belong to no measurement.
pub(super) const PATIENCE: Duration = Duration::from_secs(25);
/// How often a client is asked about its path.
const LOOK: Duration = Duration::from_millis(10);
/// A path that holds for so long is there to stay.
const SETTLED: Duration = Duration::from_millis(700);
/// The device of a client, and of an agent that has one.
pub(super) const CLIENT_DEVICE: &str = "bench0";
pub(super) const AGENT_DEVICE: &str = "bench1";

/// Whose program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Maker {
    Ours,
    Go,
}

/// What an agent has behind its tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Behind {
    Tun,
    /// A stack in user space, as Coder's real agents have.
    Stack,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Direct,
    Relay,
}

/// A deployment that runs through all rounds.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) url: String,
    pub(super) token: String,
    pub(super) agents: Vec<Uuid>,
    process: Running,
}

#[derive(Debug)]
enum Running {
    Ours(Helper),
    Go(foreign::Process),
}

impl Server {
    /// Agents are listed beside the one that runs, as many people have that many workspaces.
    const AGENTS: usize = 10;

    pub(super) async fn start(maker: Maker, way: Way, port: u16) -> anyhow::Result<Self> {
        let listen = SocketAddr::new(SERVER.parse()?, port);
        if maker == Maker::Ours {
            let mut process = Helper::start(None, &["server", &listen.to_string()])?;
            let told: Value = process.told().await?;
            let agents = told["agents"].as_array().context("agents")?.iter();
            let agents = agents.map(|id| Ok(id.as_str().context("an id")?.parse()?)).collect::<anyhow::Result<_>>()?;
            let text = |name: &str| Ok::<_, anyhow::Error>(told[name].as_str().context("a text")?.to_owned());
            return Ok(Self { url: text("url")?, token: text("token")?, agents, process: Running::Ours(process) });
        }
        let mut coordinator = foreign::Coordinator::start(foreign::CoordinatorOptions {
            listen: Some(listen),
            stun: if way == Way::Direct { vec![SocketAddr::new(listen.ip(), 3478)] } else { Vec::new() },
            disable_direct: way == Way::Relay,
            ..foreign::CoordinatorOptions::default()
        })
        .await?;
        let mut agents = Vec::new();
        for number in 0..Self::AGENTS {
            let agent = Uuid::new_v4();
            coordinator.add_workspace(Uuid::new_v4(), &format!("dev{number}"), &[(agent, "main")]).await?;
            agents.push(agent);
        }
        let foreign::Coordinator { process, url, token, .. } = coordinator;
        Ok(Self { url, token, agents, process: Running::Go(process) })
    }

    pub(super) fn pid(&self) -> anyhow::Result<u32> {
        match &self.process {
            Running::Ours(helper) => helper.pid(),
            Running::Go(process) => process.id().context("the coordinator has ended"),
        }
    }
}

/// A client and an agent that have found each other.
pub(super) struct Pair {
    client: Client,
    agent: Agent,
    id: Uuid,
    way: Way,
    pub(super) started: Started,
}

/// How long it took from the start of the client's process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Started {
    pub(super) first_answer: f64,
    pub(super) path: f64,
}

enum Client {
    Ours { process: Child, client: DaemonClient },
    Go(foreign::Client),
}

enum Agent {
    Ours(Helper),
    Go(foreign::Agent),
}

/// What a pair is made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recipe {
    pub(super) client: Maker,
    pub(super) agent: Maker,
    pub(super) behind: Behind,
    pub(super) way: Way,
}

/// The namespaces of both ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places<'a> {
    pub(super) client: &'a Namespace,
    pub(super) agent: &'a Namespace,
}

impl Pair {
    /// Starts both and waits until packets take the way that is wanted; fails when they take another.
    pub(super) async fn start(recipe: Recipe, server: &Server, id: Uuid, places: Places<'_>) -> anyhow::Result<Self> {
        let agent = Agent::start(recipe, server, id, places.agent).await.context("the agent")?;
        let begin = Instant::now();
        let client = Client::start(recipe, server, places.client).await.context("the client")?;
        let mut pair =
            Self { client, agent, id, way: recipe.way, started: Started { first_answer: f64::NAN, path: f64::NAN } };
        let address = foreign::agent_address(id);
        let mut reach = Helper::start(Some(places.client), &["generate", "reach", &address.to_string()])?;
        let mut first_answer = None;
        let mut since: Option<Instant> = None;
        let found = timeout(PATIENCE, async {
            loop {
                tokio::select! {
                    reached = reach.told::<Reached>(), if first_answer.is_none() => {
                        reached?;
                        first_answer = Some(begin.elapsed());
                    }
                    () = sleep(LOOK) => {}
                }
                if first_answer.is_none() || pair.way_now().await? != Some(pair.way) {
                    since = None;
                    continue;
                }
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() >= SETTLED {
                    return anyhow::Ok(since.duration_since(begin));
                }
            }
        });
        let path = match found.await {
            Ok(found) => found?,
            Err(_) => bail!("not {:?} within {PATIENCE:?}, but {}", recipe.way, pair.describe().await?),
        };
        pair.started =
            Started { first_answer: first_answer.unwrap_or_default().as_secs_f64(), path: path.as_secs_f64() };
        reach.end().await?;
        Ok(pair)
    }

    /// Fails when packets no longer take the way that is measured.
    pub(super) async fn check(&mut self) -> anyhow::Result<()> {
        let mut way = None;
        // A moment between two paths is no change.
        for _ in 0..20 {
            way = self.way_now().await?;
            if way == Some(self.way) {
                return Ok(());
            }
            sleep(Duration::from_millis(50)).await;
        }
        let story = self.describe().await?;
        bail!("the path changed from {:?} to {way:?}: {story}", self.way)
    }

    async fn way_now(&mut self) -> anyhow::Result<Option<Way>> {
        match &mut self.client {
            Client::Ours { client, .. } => {
                let status = client.status().await?;
                let agents = status.ext.context("our status")?.agents;
                let path = agents.iter().find(|path| path.agent_id == self.id.as_bytes()).map(AgentPath::kind);
                Ok(match path {
                    Some(PathKind::Direct) => Some(Way::Direct),
                    Some(PathKind::Relay) => Some(Way::Relay),
                    _ => None,
                })
            }
            Client::Go(client) => {
                let status = client.process.call("status", Value::Null).await?;
                let id = self.id.to_string();
                let peers = status["peers"].as_array().context("peers")?;
                let peer = peers.iter().find(|peer| peer["id"] == id.as_str());
                let endpoint = peer.and_then(|peer| peer["cur_addr"].as_str());
                Ok(endpoint.map(|endpoint| if endpoint.is_empty() { Way::Relay } else { Way::Direct }))
            }
        }
    }

    /// What the client says about its path.
    async fn describe(&mut self) -> anyhow::Result<String> {
        Ok(match &mut self.client {
            Client::Ours { client, .. } => {
                let agents = client.status().await?.ext.context("our status")?.agents;
                let path = agents.into_iter().find(|path| path.agent_id == self.id.as_bytes());
                format!("{path:?}")
            }
            Client::Go(client) => client.process.call("status", Value::Null).await?["peers"].to_string(),
        })
    }

    pub(super) fn address(&self) -> Ipv6Addr {
        foreign::agent_address(self.id)
    }

    pub(super) fn client_pid(&self) -> anyhow::Result<u32> {
        match &self.client {
            Client::Ours { process, .. } => process.id(),
            Client::Go(client) => client.process.id(),
        }
        .context("the client has ended")
    }

    pub(super) fn agent_pid(&self) -> anyhow::Result<u32> {
        match &self.agent {
            Agent::Ours(helper) => helper.pid(),
            Agent::Go(agent) => agent.process.id().context("the agent has ended"),
        }
    }

    /// Counters of our client and of our agent, as far as they are ours.
    pub(super) async fn counters(&mut self) -> anyhow::Result<[Vec<(String, u64)>; 2]> {
        let client = match &self.client {
            Client::Ours { client, .. } => {
                let request = client_ext::Request::Diagnostics(codervpn_proto::ext::DiagnosticsRequest::default());
                let service_ext::Reply::Diagnostics(reply) = client.extension(request).await? else {
                    bail!("no diagnostics")
                };
                reply.counters.into_iter().map(|counter| (counter.name, counter.value)).collect()
            }
            Client::Go(_) => Vec::new(),
        };
        let agent = match &mut self.agent {
            Agent::Ours(helper) => helper.ask("counters").await?,
            Agent::Go(_) => Vec::new(),
        };
        Ok([client, agent])
    }

    pub(super) async fn stop(self) -> anyhow::Result<()> {
        match self.client {
            Client::Ours { mut process, client } => {
                client.stopped().await?;
                let pid = process.id().context("the daemon has ended")?.cast_signed();
                let pid = rustix::process::Pid::from_raw(pid).context("a process id is not 0")?;
                rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
                let status = timeout(PATIENCE, process.wait()).await.context("the daemon does not end")??;
                ensure!(status.success(), "the daemon ended with {status}");
            }
            Client::Go(client) => client.process.quit().await?,
        }
        match self.agent {
            Agent::Ours(helper) => helper.end().await,
            Agent::Go(agent) => agent.process.quit().await,
        }
    }
}

impl Agent {
    async fn start(recipe: Recipe, server: &Server, id: Uuid, place: &Namespace) -> anyhow::Result<Self> {
        let tun = (recipe.behind == Behind::Tun).then(|| AGENT_DEVICE.to_owned());
        if recipe.agent == Maker::Ours {
            let id = id.to_string();
            let mut args = vec!["agent", server.url.as_str(), id.as_str()];
            if let Some(tun) = &tun {
                args.extend(["--tun", tun]);
            }
            if recipe.way == Way::Relay {
                args.push("--relay-only");
            }
            let mut helper = Helper::start(Some(place), &args)?;
            let _: Value = helper.told().await?;
            return Ok(Self::Ours(helper));
        }
        let options = EngineOptions { block_direct: recipe.way == Way::Relay, tun, ..EngineOptions::default() };
        let mut agent = foreign::Agent::start(Some(place), &server.url, id, &options).await?;
        agent.process.relay_up().await?;
        Ok(Self::Go(agent))
    }
}

impl Client {
    async fn start(recipe: Recipe, server: &Server, place: &Namespace) -> anyhow::Result<Self> {
        if recipe.client == Maker::Ours {
            let started = start_daemon(&server.url, &server.token, place, recipe.way == Way::Direct).await?;
            let (process, client) = started;
            return Ok(Self::Ours { process, client });
        }
        let options = EngineOptions {
            block_direct: recipe.way == Way::Relay,
            tun: Some(CLIENT_DEVICE.to_owned()),
            ..EngineOptions::default()
        };
        Ok(Self::Go(foreign::Client::start(Some(place), &server.url, &server.token, &options).await?))
    }
}

/// Our client, as it comes out of the box.
pub(super) async fn start_daemon_alone(
    url: &str,
    token: &str,
    place: &Namespace,
) -> anyhow::Result<(Child, DaemonClient)> {
    start_daemon(url, token, place, true).await
}

/// The release program, unless only those of the tests were built (`--smoke`).
fn program() -> anyhow::Result<PathBuf> {
    if std::env::var_os(binaries::BUILT).is_some() {
        return binaries::codervpnd();
    }
    Ok(binaries::release_folder()?.join("codervpnd"))
}

async fn start_daemon(
    url: &str,
    token: &str,
    place: &Namespace,
    direct: bool,
) -> anyhow::Result<(Child, DaemonClient)> {
    let folder = PathBuf::from("/run/bench");
    let socket = folder.join("vpn.sock");
    let mut process = place
        .command(program()?)
        .args(["serve", "--dns-mode", "none", "--log", "error", "--tun-name", CLIENT_DEVICE])
        .arg(format!("--paths-direct={direct}"))
        .arg("--runtime-dir")
        .arg(&folder)
        .arg("--state-dir")
        .arg(folder.join("state"))
        .arg("--socket")
        .arg(&socket)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let client = timeout(PATIENCE, async {
        loop {
            if let Ok(client) = DaemonClient::connect(&socket).await {
                return Ok(client);
            }
            if let Some(status) = process.try_wait()? {
                bail!("the daemon ended with {status}");
            }
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .context("the daemon does not listen")??;
    client.started(url, token).await?;
    Ok((process, client))
}

/// This program in another role, see `mod.rs`: says lines of JSON, is told lines, ends with its stdin.
#[derive(Debug)]
pub(super) struct Helper {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Helper {
    pub(super) fn start(place: Option<&Namespace>, args: &[&str]) -> anyhow::Result<Self> {
        let program = std::env::current_exe()?;
        let mut command = match place {
            Some(place) => place.command(program),
            None => Command::new(program),
        };
        let mut child = command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("stdout is piped")?;
        Ok(Self { child, stdin, lines: BufReader::new(stdout).lines() })
    }

    pub(super) fn pid(&self) -> anyhow::Result<u32> {
        self.child.id().context("a helper has ended")
    }

    /// One line of text. May be dropped and called again.
    pub(super) async fn line(&mut self) -> anyhow::Result<String> {
        let line = timeout(PATIENCE * 2, self.lines.next_line()).await.context("a helper says nothing")??;
        line.context("a helper failed, see above")
    }

    /// One line of JSON. May be dropped and called again.
    pub(super) async fn told<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let line = self.line().await?;
        serde_json::from_str(&line).with_context(|| line)
    }

    /// As `told`, for what may take long; the caller bounds it.
    pub(super) async fn told_at_last<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let line = self.lines.next_line().await?.context("a helper failed, see above")?;
        serde_json::from_str(&line).with_context(|| line)
    }

    pub(super) async fn tell(&mut self, what: &str) -> anyhow::Result<()> {
        let stdin = self.stdin.as_mut().context("stdin is open")?;
        Ok(stdin.write_all(format!("{what}\n").as_bytes()).await?)
    }

    pub(super) async fn ask<T: DeserializeOwned>(&mut self, what: &str) -> anyhow::Result<T> {
        self.tell(what).await?;
        self.told().await
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        self.stdin = None;
        let status = timeout(PATIENCE, self.child.wait()).await.context("a helper does not end")??;
        ensure!(status.success(), "a helper ended with {status}");
        Ok(())
    }
}

/// What the roles say when they are ready.
pub(super) fn ready() -> String {
    json!({ "ready": true }).to_string()
}
