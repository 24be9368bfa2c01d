//! A Coder deployment in miniature: what `codervpnd` talks to in tests and in the demo.
//!
//! It answers as a real server does, down to the texts, and is strict where real servers are forgiving: what a client of
//! ours must not do is remembered ([`Deployment::violations`]). Everything lives in memory and in this process:
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use codervpn_testbed::coderd::Deployment;
//!
//! let deployment = Deployment::builder().start().await?;
//! let user = deployment.add_user("anna");
//! let dev = deployment.create_workspace(&user, "dev", &["main"])?;
//! let agent = deployment.run_agent(&dev.agents[0]).await?;
//! // codervpn login deployment.url() with user.token()
//! # drop(agent); Ok(()) }
//! ```
//!
//! Parts: `routes` says what HTTP requests get, `session` carries a control connection, `service` answers its calls,
//! [`coordinator`] knows peers and tunnels, [`workspaces`] the workspaces, [`faults`] what goes wrong on purpose.

mod answers;
mod authorization;
pub mod coordinator;
pub mod derp_map;
pub mod faults;
pub(crate) mod listener;
mod resume;
pub(crate) mod routes;
mod service;
pub mod session;
pub mod tls;
mod users;
mod version;
mod violations;
pub mod workspaces;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use codervpn_proto::tailnet::TelemetryEvent;
use codervpn_wire::derp_map::DerpMap;
use rustls::ServerConfig;
use secrecy::SecretString;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use url::Url;
use uuid::Uuid;

use crate::agent::{AgentOptions, WorkspaceAgent};
use crate::relay::RelayServer;

pub(crate) use answers::{Answer, Problem};
pub use authorization::Authorization;
pub use faults::{Fault, Faults, Route, RpcFault};
pub use session::{Order, SessionFacts, SessionTimes};
pub use users::{Standing, User, new_token};
pub use version::ApiVersion;
pub use violations::Violations;
pub use workspaces::{Transition, WorkspaceError, WorkspaceState, WorkspaceStore};

use coordinator::Coordinator;
use listener::Running;
use resume::ResumeTokens;
use session::Sessions;
use tls::Authority;
use users::Users;

/// How long [`Deployment::until`] waits: far more than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// How a deployment is set up.
#[derive(Debug, Clone)]
pub struct Builder {
    listen: SocketAddr,
    /// Name or address in the URL instead of the listening address.
    host: Option<String>,
    tls: bool,
    config: Config,
    resume_life: Duration,
    stun: Vec<SocketAddr>,
}

#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) build_version: String,
    pub(crate) api_version: ApiVersion,
    pub(crate) hostname_suffix: Option<String>,
    /// An administrator may change it while sessions stand.
    pub(crate) disable_direct: Arc<AtomicBool>,
    pub(crate) force_websockets: bool,
    pub(crate) browser_only: bool,
    pub(crate) session_times: SessionTimes,
}

impl Builder {
    /// Default: `127.0.0.1:0`.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = address;
        self
    }

    /// Name or address that users know it by; also in the certificate and in the relay map.
    #[must_use]
    pub fn host(mut self, host: &str) -> Self {
        self.host = Some(host.to_owned());
        self
    }

    /// HTTPS with an authority of its own ([`Deployment::ca_file`]).
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// `None`: the server does not say one, as old ones do.
    #[must_use]
    pub fn hostname_suffix(mut self, suffix: Option<&str>) -> Self {
        self.config.hostname_suffix = suffix.map(str::to_owned);
        self
    }

    /// `X-Coder-Build-Version` and `buildinfo`.
    #[must_use]
    pub fn build_version(mut self, version: &str) -> Self {
        self.config.build_version = version.to_owned();
        self
    }

    #[must_use]
    pub fn api_version(mut self, major: i64, minor: i64) -> Self {
        self.config.api_version = ApiVersion { major, minor };
        self
    }

    #[must_use]
    pub fn disable_direct(self) -> Self {
        self.config.disable_direct.store(true, Ordering::Relaxed);
        self
    }

    #[must_use]
    pub fn force_websockets(mut self) -> Self {
        self.config.force_websockets = true;
        self
    }

    /// Answers control dials of clients with 409.
    #[must_use]
    pub fn browser_only(mut self) -> Self {
        self.config.browser_only = true;
        self
    }

    #[must_use]
    pub fn session_times(mut self, times: SessionTimes) -> Self {
        self.config.session_times = times;
        self
    }

    /// How long resume tokens last; clients ask for a new one after half of it.
    #[must_use]
    pub fn resume_life(mut self, life: Duration) -> Self {
        self.resume_life = life;
        self
    }

    /// A STUN server that its relay map names, so that direct paths through NATs can be found. Whoever calls this runs
    /// one there ([`crate::relay::StunServer`]); like those of real deployments it lives on when the deployment is down.
    #[must_use]
    pub fn stun(mut self, server: SocketAddr) -> Self {
        self.stun.push(server);
        self
    }

    /// Listens and serves from now on.
    pub async fn start(self) -> anyhow::Result<Deployment> {
        let listener =
            TcpListener::bind(self.listen).await.with_context(|| format!("cannot listen on {}", self.listen))?;
        let address = listener.local_addr().context("a listener has an address")?;
        let authority = self.tls.then(|| Authority::new("testbed authority")).transpose()?;
        let further: Vec<String> = self.host.iter().cloned().collect();
        let names = tls::names_of(address.ip(), &further);
        let tls = authority.as_ref().map(|authority| authority.server(&names)).transpose()?;
        let url = url_of(self.tls, self.host.as_deref(), address)?;
        let violations = Arc::new(Violations::default());
        let shared = Arc::new(Shared {
            id: Uuid::new_v4(),
            config: self.config,
            users: Mutex::default(),
            store: Arc::default(),
            derp_map: watch::Sender::new(derp_map::joined([&derp_map::embedded(&url), &derp_map::stun(&self.stun)])),
            url,
            resume: ResumeTokens::new(),
            resume_life: Mutex::new(self.resume_life),
            faults: Faults::default(),
            coordinator: Mutex::new(Arc::new(Coordinator::new(Arc::clone(&violations)))),
            violations,
            relay: RelayServer::new(),
            sessions: Arc::default(),
            interrupts: Mutex::default(),
            telemetry: Mutex::default(),
            requests: Mutex::default(),
            stop: Mutex::default(),
        });
        let deployment = Deployment { shared, authority, tls, address, running: Mutex::default() };
        deployment.run(listener);
        Ok(deployment)
    }
}

fn url_of(tls: bool, host: Option<&str>, address: SocketAddr) -> anyhow::Result<Url> {
    let host = match (host, address.ip()) {
        (Some(host), _) => host.to_owned(),
        (None, IpAddr::V6(address)) => format!("[{address}]"),
        (None, IpAddr::V4(address)) => address.to_string(),
    };
    let scheme = if tls { "https" } else { "http" };
    Url::parse(&format!("{scheme}://{host}:{}", address.port())).with_context(|| format!("{host:?} is no host"))
}

/// A running deployment. Dropping it cuts every connection.
#[derive(Debug)]
pub struct Deployment {
    shared: Arc<Shared>,
    authority: Option<Authority>,
    tls: Option<Arc<ServerConfig>>,
    address: SocketAddr,
    running: Mutex<Option<Running>>,
}

/// What every part of it sees.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: Uuid,
    pub(crate) config: Config,
    users: Mutex<Users>,
    pub(crate) store: Arc<WorkspaceStore>,
    pub(crate) derp_map: watch::Sender<DerpMap>,
    url: Url,
    pub(crate) resume: ResumeTokens,
    resume_life: Mutex<Duration>,
    pub(crate) faults: Faults,
    /// A new one after each restart.
    coordinator: Mutex<Arc<Coordinator>>,
    pub(crate) violations: Arc<Violations>,
    pub(crate) relay: RelayServer,
    pub(crate) sessions: Arc<Sessions>,
    interrupts: Mutex<BTreeMap<String, watch::Sender<u64>>>,
    pub(crate) telemetry: Mutex<Vec<TelemetryEvent>>,
    pub(crate) requests: Mutex<VecDeque<RequestRecord>>,
    stop: Mutex<CancellationToken>,
}

/// A request that was received, without anything secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRecord {
    pub method: String,
    pub path: String,
    pub header_names: Vec<String>,
    /// A session token came along.
    pub has_token: bool,
}

/// A workspace as it was created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workspace {
    pub id: Uuid,
    pub owner: Uuid,
    pub name: String,
    /// Those of its newest build.
    pub agents: Vec<Agent>,
}

/// An agent that may connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    pub id: Uuid,
    pub name: String,
}

impl Agent {
    /// Its session token, `agent-UUID`.
    pub fn token(&self) -> String {
        format!("agent-{}", self.id)
    }
}

impl Shared {
    pub(crate) fn url(&self) -> &Url {
        &self.url
    }

    pub(crate) fn coordinator(&self) -> Arc<Coordinator> {
        Arc::clone(&lock(&self.coordinator))
    }

    pub(crate) fn resume_life(&self) -> Duration {
        *lock(&self.resume_life)
    }

    /// Cancelled when all connections have to end.
    pub(crate) fn stop_token(&self) -> CancellationToken {
        lock(&self.stop).clone()
    }

    /// Resolves when running streams of that call have to end.
    pub(crate) async fn interrupted(&self, rpc: &str) {
        let mut interrupt = lock(&self.interrupts).entry(rpc.to_owned()).or_default().subscribe();
        // The sender lives as long as we do.
        let _ = interrupt.changed().await;
    }
}

impl Deployment {
    pub fn builder() -> Builder {
        Builder {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            host: None,
            tls: false,
            config: Config {
                build_version: "v2.26.0-devel+testbed".into(),
                api_version: ApiVersion::default(),
                hostname_suffix: Some("coder".into()),
                disable_direct: Arc::default(),
                force_websockets: false,
                browser_only: false,
                session_times: SessionTimes::default(),
            },
            resume_life: Duration::from_secs(24 * 3600),
            stun: Vec::new(),
        }
    }

    /// On `127.0.0.1`, plain HTTP.
    pub async fn start() -> anyhow::Result<Self> {
        Self::builder().start().await
    }

    pub fn url(&self) -> &Url {
        &self.shared.url
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// PEM file for `network.extra_ca`, with TLS.
    pub fn ca_file(&self) -> Option<&Path> {
        self.authority.as_ref().map(Authority::file)
    }

    /// A new user with a new token.
    pub fn add_user(&self, name: &str) -> User {
        self.insert_user(User::new(name))
    }

    /// A new user with this id and token.
    pub fn add_user_with(&self, id: Uuid, name: &str, token: &str) -> User {
        self.insert_user(User::with(id, name, token))
    }

    /// A new user with the owner role: may use everybody's agents.
    pub fn add_admin(&self, name: &str) -> User {
        let user = self.add_user(name);
        self.shared.store.set_admin(user.id);
        user
    }

    fn insert_user(&self, user: User) -> User {
        lock(&self.shared.users).add(user.clone());
        user
    }

    pub fn users(&self) -> Vec<User> {
        lock(&self.shared.users).list()
    }

    /// Suspension, expiry, logout. Running sessions go on (HTTP-25).
    pub fn set_standing(&self, user: &User, standing: &Standing) {
        lock(&self.shared.users).set_standing(user.id, standing);
    }

    /// Creates a workspace and runs its first build: two messages for followers.
    pub fn create_workspace(&self, owner: &User, name: &str, agents: &[&str]) -> Result<Workspace, WorkspaceError> {
        let id = self.shared.store.create(owner.id, name)?;
        let agents = new_agents(agents);
        self.shared.store.finish_build(id, &entries(&agents))?;
        Ok(Workspace { id, owner: owner.id, name: name.to_owned(), agents })
    }

    /// As [`Deployment::create_workspace`] with agents that have these ids.
    pub fn create_workspace_with(
        &self,
        owner: &User,
        name: &str,
        agents: &[Agent],
    ) -> Result<Workspace, WorkspaceError> {
        let id = self.shared.store.create(owner.id, name)?;
        self.shared.store.finish_build(id, &entries(agents))?;
        Ok(Workspace { id, owner: owner.id, name: name.to_owned(), agents: agents.to_vec() })
    }

    /// A workspace that is stopped from the beginning, as most are.
    pub fn create_stopped_workspace(&self, owner: &User, name: &str) -> Result<Workspace, WorkspaceError> {
        let workspace = self.create_workspace(owner, name, &[])?;
        self.stop_workspace(&workspace)?;
        Ok(workspace)
    }

    /// A new start build, also for a running one. The agents are new and have new ids; returns the workspace with them.
    pub fn start_workspace(&self, workspace: &Workspace, agents: &[&str]) -> Result<Workspace, WorkspaceError> {
        self.shared.store.create_build(workspace.id, Transition::Start, false)?;
        let agents = new_agents(agents);
        self.shared.store.finish_build(workspace.id, &entries(&agents))?;
        Ok(Workspace { agents, ..workspace.clone() })
    }

    /// Agents vanish from the list at once; their processes are the caller's to end.
    pub fn stop_workspace(&self, workspace: &Workspace) -> Result<(), WorkspaceError> {
        self.shared.store.create_build(workspace.id, Transition::Stop, false)?;
        self.shared.store.finish_build(workspace.id, &[])
    }

    pub fn delete_workspace(&self, workspace: &Workspace) -> Result<(), WorkspaceError> {
        self.shared.store.create_build(workspace.id, Transition::Delete, false)?;
        self.shared.store.finish_build(workspace.id, &[])
    }

    /// Shows with the owner's next event only (CC-52).
    pub fn rename_workspace(&self, workspace: &Workspace, name: &str) -> Result<(), WorkspaceError> {
        self.shared.store.rename(workspace.id, name)
    }

    /// For single steps: pending, failing and cancelled builds, merged events, states that no build brings.
    pub fn workspaces(&self) -> &WorkspaceStore {
        &self.shared.store
    }

    /// Starts a workspace agent in this process; resolves when it is coordinated and on its relay.
    pub async fn run_agent(&self, agent: &Agent) -> anyhow::Result<WorkspaceAgent> {
        let agent = WorkspaceAgent::start(self.agent_options(agent)).await?;
        agent.ready().await?;
        Ok(agent)
    }

    /// What an agent of this deployment has to know.
    pub fn agent_options(&self, agent: &Agent) -> AgentOptions {
        AgentOptions {
            url: self.shared.url.clone(),
            id: agent.id,
            name: agent.name.clone(),
            token: SecretString::from(agent.token()),
            extra_ca: self.ca_file().map(Path::to_owned),
            tun: None,
            relay_only: false,
        }
    }

    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// What the connection settings say from now on; clients learn it when they ask again.
    pub fn set_disable_direct(&self, disable: bool) {
        self.shared.config.disable_direct.store(disable, Ordering::Relaxed);
    }

    /// The database fails: REST and dials answer 401 as real servers do then, new tunnels are refused, sessions go on.
    pub fn set_database_down(&self, down: bool) {
        self.shared.faults.set_database_down(down);
        self.shared.store.set_database_down(down);
    }

    pub fn relay(&self) -> &RelayServer {
        &self.shared.relay
    }

    pub fn coordinator(&self) -> Arc<Coordinator> {
        self.shared.coordinator()
    }

    pub fn derp_map(&self) -> DerpMap {
        self.shared.derp_map.borrow().clone()
    }

    /// Pushed to everybody at once.
    pub fn set_derp_map(&self, map: DerpMap) {
        self.shared.derp_map.send_replace(map);
    }

    pub fn set_resume_life(&self, life: Duration) {
        *lock(&self.shared.resume_life) = life;
    }

    /// A resume token for a peer of the test's choice.
    pub fn resume_token(&self, peer: Uuid, life: Duration) -> String {
        self.shared.resume.issue(peer, life)
    }

    /// Control connections that are open.
    pub fn sessions(&self) -> Vec<SessionFacts> {
        self.shared.sessions.facts()
    }

    /// Control connections of that peer so far, ended ones included.
    pub fn sessions_opened(&self, peer: Uuid) -> u32 {
        self.shared.sessions.opened(peer)
    }

    /// Does something to every control connection that fits; says to how many.
    pub fn order(&self, order: &Order, fits: impl FnMut(&SessionFacts) -> bool) -> usize {
        self.shared.sessions.order(order, fits)
    }

    /// Cuts the control connections of all clients and agents; they may come back.
    pub fn drop_connections(&self) -> usize {
        self.order(&Order::Cut, |_| true)
    }

    /// Ends running streams of that call with Close.
    pub fn end_streams(&self, rpc: &str) {
        lock(&self.shared.interrupts).entry(rpc.to_owned()).or_default().send_modify(|count| *count += 1);
    }

    pub fn telemetry(&self) -> Vec<TelemetryEvent> {
        lock(&self.shared.telemetry).clone()
    }

    /// The newest requests, oldest first.
    pub fn requests(&self) -> Vec<RequestRecord> {
        lock(&self.shared.requests).iter().cloned().collect()
    }

    /// What clients did that they must not do, though real servers let it pass. Empty at the end of a good test.
    pub fn violations(&self) -> Vec<String> {
        self.shared.violations.list()
    }

    /// Waits until `holds`, looked at after every event of the coordinator and of connections.
    pub async fn until(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> anyhow::Result<()> {
        let mut sessions = self.shared.sessions.count();
        let wait = async {
            loop {
                let mut changes = self.coordinator().changes();
                if holds(self) {
                    return;
                }
                tokio::select! {
                    _ = changes.changed() => {}
                    _ = sessions.changed() => {}
                    // For conditions on other things, and across restarts.
                    () = tokio::time::sleep(Duration::from_millis(20)) => {}
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.with_context(|| format!("waited in vain: {what}"))
    }

    /// Waits until that agent has published its node.
    pub async fn agent_appears(&self, agent: Uuid) -> anyhow::Result<()> {
        let has_node =
            move |deployment: &Self| deployment.coordinator().peer(agent).is_some_and(|peer| peer.node.is_some());
        self.until("an agent appears", has_node).await
    }

    /// Goes away as a killed server does: every connection is cut, the address is free, the coordinator forgets.
    pub async fn stop(&self) {
        let running = lock(&self.running).take();
        if let Some(running) = running {
            running.stop().await;
        }
        self.coordinator().close();
        self.shared.relay.drop_connections();
    }

    /// Comes back at the same address after [`Deployment::stop`], with its users, workspaces and keys.
    pub async fn resume(&self) -> anyhow::Result<()> {
        let coordinator = Arc::new(Coordinator::new(Arc::clone(&self.shared.violations)));
        *lock(&self.shared.coordinator) = coordinator;
        let listener = TcpListener::bind(self.address).await.context("cannot listen again")?;
        self.run(listener);
        Ok(())
    }

    fn run(&self, listener: TcpListener) {
        let running = Running::start(listener, self.tls.clone(), Arc::clone(&self.shared));
        *lock(&self.shared.stop) = running.stop.clone();
        *lock(&self.running) = Some(running);
    }
}

fn new_agents(names: &[&str]) -> Vec<Agent> {
    names.iter().map(|name| Agent { id: Uuid::new_v4(), name: (*name).to_owned() }).collect()
}

fn entries(agents: &[Agent]) -> Vec<(Uuid, String)> {
    agents.iter().map(|agent| (agent.id, agent.name.clone())).collect()
}

/// 200 with nothing in it.
pub(crate) fn empty_page() -> Answer {
    answers::plain(200, "")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
