//! A workspace agent: the daemon's own data loop and control connection, with a network stack in user space behind it and
//! small services on top ([`services`]).
//!
//! Echo requests are answered by the engine; TCP ports that no service has are refused by the stack. With a TUN device
//! instead ([`AgentOptions::tun`]) the kernel's stack answers everything, as benchmarks need it.

mod control;
mod crash;
mod device;
mod http;
mod services;
mod stack;
mod tun;

use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use codervpn_control::{Api, Controller, ControllerConfig, ControllerRole, WebSocketDialer};
use codervpn_engine::{Config, Direct, Engine};
use codervpn_underlay::{Dialer, DialerConfig, RelayAccess, RelayOptions, Relays};
use codervpn_wire::keys::NodePublic;
use http_header::HeaderValue;
use rand_core::{OsRng, RngCore as _};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::watch;
use tokio::task;
use tokio_util::sync::CancellationToken;
use url::Url;
use uuid::Uuid;
use vpn_daemon::party::Survey;
use vpn_daemon::tunnel::{Snapshot, Tunnel, TunnelHandle, Wake};

use ::http as http_header;

use control::Progress;
use crash::{Crash, Severable};
use stack::Stack;

/// How long [`WorkspaceAgent::ready`] waits.
const PATIENCE: Duration = Duration::from_secs(30);

/// What an agent has to know.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// The deployment.
    pub url: Url,
    pub id: Uuid,
    /// Said in `hello from NAME`.
    pub name: String,
    pub token: SecretString,
    /// PEM file with further trust roots.
    pub extra_ca: Option<PathBuf>,
    /// A TUN device of this name in the namespace of the caller, instead of the stack in user space and its services.
    pub tun: Option<String>,
    /// Relays alone, as in a deployment that forbids direct connections.
    pub relay_only: bool,
}

/// A running agent. Dropping it looks like a crash; [`WorkspaceAgent::stop`] leaves properly.
#[derive(Debug)]
pub struct WorkspaceAgent {
    id: Uuid,
    name: String,
    key: NodePublic,
    addresses: Vec<Ipv6Addr>,
    handle: TunnelHandle,
    progress: watch::Receiver<Progress>,
    leave: CancellationToken,
    crash: Crash,
    task: task::JoinHandle<()>,
    stack: Option<JoinHandle<()>>,
    /// Address and routes of the TUN device.
    _routes: Option<tun::Link>,
}

impl WorkspaceAgent {
    /// Starts it; [`WorkspaceAgent::ready`] waits for more.
    pub async fn start(options: AgentOptions) -> anyhow::Result<Self> {
        let deployment = codervpn_control::Deployment::parse(options.url.as_str()).context("the deployment's URL")?;
        let dialer = Dialer::new(DialerConfig { extra_ca: options.extra_ca, ..DialerConfig::default() })
            .context("cannot set up the dialer")?;
        let mut config = Config::agent(options.id, OsRng);
        if options.relay_only {
            config.direct = Direct::DisabledByDeployment;
        }
        // The kernel does it then.
        config.answer_echo = options.tun.is_none();
        let (addresses, node_key) = (config.addresses.clone(), config.node_key.clone());
        let key = node_key.public();

        let wake = Wake::new().context("cannot create an eventfd")?;
        let waker = wake.clone();
        let mut token = HeaderValue::from_str(options.token.expose_secret()).context("the token is no token")?;
        token.set_sensitive(true);
        let access =
            RelayAccess { access_url: Some(deployment.url("/")), session_token: Some(token), allow_insecure: false };
        let relays =
            Relays::new(dialer.clone(), node_key, RelayOptions { access, wake: Arc::new(move || waker.wake()) });

        let engine = Engine::new(config, Instant::now());
        let (started, stack, routes) = match &options.tun {
            Some(name) => {
                let address = *addresses.first().context("an agent has addresses")?;
                let (device, routes) = tun::open(name, address).await?;
                (Tunnel::start(device, engine, None, relays.clone(), wake), None, Some(routes))
            }
            None => {
                let (device, port) = device::pair().context("cannot create an eventfd")?;
                let stack = Stack::start(port, &addresses, &options.name, OsRng.next_u64());
                let stack = stack.context("cannot start a thread")?;
                (Tunnel::start(device, engine, None, relays.clone(), wake), Some(stack), None)
            }
        };
        let (tunnel, tunnel_events) = started.context("cannot start the data loop")?;
        let handle = tunnel.handle().clone();

        let survey = Survey::new(relays.clone(), dialer.clone());
        let api = Arc::new(Api::new(deployment.clone(), options.token, dialer));
        let role = ControllerRole::Agent;
        let crash = Crash::default();
        let mut control_config = ControllerConfig::new(role);
        control_config.deployment = Some(deployment);
        let (control, control_events) =
            Controller::spawn(control_config, Arc::new(Severable::new(WebSocketDialer::new(api, role), crash.clone())));

        let leave = CancellationToken::new();
        let (progress, progress_watch) = watch::channel(Progress::default());
        let parts = control::Parts {
            control,
            control_events,
            tunnel,
            tunnel_events,
            relays,
            survey,
            progress,
            programmed: Vec::new(),
        };
        let task = tokio::spawn(control::run(parts, leave.clone()));
        Ok(Self {
            id: options.id,
            name: options.name,
            key,
            addresses,
            handle,
            progress: progress_watch,
            leave,
            crash,
            task,
            stack,
            _routes: routes,
        })
    }

    /// Waits until it has published its node and its home relay takes packets for it.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let mut progress = self.progress.clone();
        let ready = progress.wait_for(Progress::is_ready);
        let ready = tokio::time::timeout(PATIENCE, ready).await;
        let state = || format!("agent {}: {:?}", self.name, *self.progress.borrow());
        ready.with_context(state)?.with_context(state)?;
        Ok(())
    }

    pub fn id(&self) -> Uuid {
        self.id
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its key at relays.
    pub fn key(&self) -> NodePublic {
        self.key
    }

    /// First the one that users reach it at.
    pub fn addresses(&self) -> &[Ipv6Addr] {
        &self.addresses
    }

    /// The one that users reach it at.
    pub fn address(&self) -> Ipv6Addr {
        self.addresses.first().copied().expect("an agent has addresses")
    }

    /// Peers and counters.
    pub async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        self.handle.snapshot().await.context("the agent has ended")
    }

    /// Says Disconnect and ends.
    pub async fn stop(mut self) {
        self.leave.cancel();
        // It has ended by itself, or was aborted, or has reported its panic.
        let _ = (&mut self.task).await;
        self.join_stack().await;
    }

    /// Ends without a word, as a crash does.
    pub async fn kill(mut self) {
        self.crash.crash();
        self.task.abort();
        let _ = (&mut self.task).await;
        self.join_stack().await;
    }

    async fn join_stack(&mut self) {
        if let Some(stack) = self.stack.take() {
            // It ends when the data loop lets go of the device.
            let _ = task::spawn_blocking(move || stack.join()).await;
        }
    }
}

impl Drop for WorkspaceAgent {
    fn drop(&mut self) {
        self.crash.crash();
        self.task.abort();
    }
}
