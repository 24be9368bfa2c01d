//! The names of agents: who is called what, the zone that answers, and how the machine comes to ask us.
//!
//! The zone is swapped at once, because a person or a program may already be waiting for a name. Pointing the machine's
//! resolver at us may take long or hang, so a task of its own does that and reports what came of it.

use std::collections::HashMap;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use codervpn_dns::names::{self as naming, AgentNames};
use codervpn_dns::{BaseServers, DNS_ADDRESS, DnsState as Tested, SelfTest, Suffix, ZoneHandle, ZoneInput, self_test};
use codervpn_host::Paths;
use codervpn_host::dns::{self, Backend, ConfiguredMode, DnsConfig, Mode, State};
use codervpn_proto::ext::{DnsMode, DnsState};
use codervpn_underlay::Dialer;
use rand_core::{OsRng, RngCore as _};
use tokio::net::UdpSocket;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{interval, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::bring_up::service_prefix;
use crate::status::DnsStatus;
use crate::tunnel::TunnelHandle;
use crate::workspaces::Workspaces;

/// Settings of ours that another program took away are put back after at most so long.
const CHECK_EVERY: Duration = Duration::from_secs(30);
/// The reverse zone of the /48.
const REVERSE_ZONE: &str = "b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa";

/// What names depend on; fixed for one start.
pub(super) struct Setup {
    pub(super) mode: ConfiguredMode,
    pub(super) search: bool,
    pub(super) paths: Paths,
    /// The text says why there are no names.
    pub(super) suffix: Result<Suffix, String>,
    pub(super) owner: String,
    pub(super) zone: ZoneHandle,
    pub(super) interface_index: u32,
    pub(super) address: Ipv6Addr,
    pub(super) tunnel: TunnelHandle,
    pub(super) dialer: Dialer,
}

pub(super) struct Names {
    setup: Setup,
    assigned: HashMap<Uuid, AgentNames>,
    resolver: Option<JoinHandle<()>>,
    check: Arc<Notify>,
    stop: CancellationToken,
    status_tx: watch::Sender<DnsStatus>,
    status: watch::Receiver<DnsStatus>,
}

impl Names {
    pub(super) fn new(setup: Setup) -> Self {
        let initial = match &setup.suffix {
            Ok(_) => DnsStatus { state: DnsState::Pending, ..DnsStatus::default() },
            Err(reason) => DnsStatus { state: DnsState::Failed, text: reason.clone(), ..DnsStatus::default() },
        };
        if let Err(reason) = &setup.suffix {
            tracing::error!(reason, "names are not served");
        }
        let (status_tx, status) = watch::channel(initial);
        Self {
            setup,
            assigned: HashMap::new(),
            resolver: None,
            check: Arc::default(),
            stop: CancellationToken::new(),
            status_tx,
            status,
        }
    }

    /// Swaps the zone. The machine's resolver is set up with the first content (dns-and-os 1.1).
    pub(super) fn publish(&mut self, workspaces: &Workspaces) {
        let Ok(suffix) = &self.setup.suffix else {
            self.assigned.clear();
            return;
        };
        let input = ZoneInput {
            suffix: suffix.clone(),
            owner: self.setup.owner.clone(),
            workspaces: workspaces
                .tree()
                .map(|(workspace, agents)| naming::Workspace {
                    id: workspace.id,
                    name: workspace.name.clone(),
                    agents: agents
                        .into_iter()
                        .map(|agent| naming::Agent { id: agent.id, name: agent.name.clone() })
                        .collect(),
                })
                .collect(),
        };
        let assignment = self.setup.zone.publish(&input, unix_seconds());
        for skipped in &assignment.skipped {
            tracing::warn!(name = skipped.name, reason = ?skipped.reason, "name left out");
        }
        self.assigned = assignment.agents.into_iter().map(|names| (names.agent, names)).collect();
        if self.resolver.is_none() {
            self.start_resolver(suffix.clone());
        }
    }

    fn start_resolver(&mut self, suffix: Suffix) {
        let setup = &self.setup;
        let resolver = Resolver {
            mode: setup.mode,
            paths: setup.paths.clone(),
            config: DnsConfig {
                interface_index: setup.interface_index,
                server: DNS_ADDRESS,
                suffixes: vec![suffix.as_str().to_owned()],
                reverse_zone: REVERSE_ZONE.to_owned(),
                search: setup.search,
                tunnel_prefix: service_prefix(),
            },
            suffix,
            address: setup.address,
            tunnel: setup.tunnel.clone(),
            dialer: setup.dialer.clone(),
            status: self.status_tx.clone(),
            check: self.check.clone(),
            stop: self.stop.clone(),
        };
        self.resolver = Some(tokio::spawn(resolver.run()));
    }

    /// The names of an agent, shortest first, with the final dot; empty when it has none.
    pub(super) fn of(&self, agent: Uuid) -> &[String] {
        self.assigned.get(&agent).map_or(&[], |names| &names.fqdn)
    }

    pub(super) fn suffix(&self) -> &str {
        self.setup.suffix.as_ref().map_or("", Suffix::as_str)
    }

    pub(super) fn status(&self) -> DnsStatus {
        self.status.borrow().clone()
    }

    /// Whether setting up the resolver has come to an end, good or bad.
    pub(super) fn is_settled(&self) -> bool {
        self.status.borrow().state != DnsState::Pending
    }

    /// Resolves when the state of the resolver changed.
    pub(super) async fn changed(&mut self) {
        if self.status.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Looks whether the resolver still has our settings, at once.
    pub(super) fn check(&self) {
        self.check.notify_one();
    }

    /// Takes all names away; every look-up fails from now on.
    pub(super) fn withdraw(&mut self) {
        if let Ok(suffix) = &self.setup.suffix {
            self.setup.zone.withdraw(suffix, unix_seconds());
        }
    }

    /// Gives the machine's resolver back. What does not get done within `limit` is left to the next start's clean-up.
    pub(super) async fn close(&mut self, limit: Duration) {
        self.stop.cancel();
        if let Some(resolver) = self.resolver.take()
            && timeout(limit, resolver).await.is_err()
        {
            tracing::error!("giving the machine's resolver back takes too long; only resolv.conf is restored");
            restore_file(&self.setup.paths);
        }
    }
}

/// Also when a deployment is abandoned the resolver is given back.
impl Drop for Names {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Settings of a service end with the interface; those in a file do not.
fn restore_file(paths: &Paths) {
    for failure in codervpn_host::cleanup::restore_while_aborting(paths).failed {
        tracing::error!(failure, "cannot give the machine's resolver back");
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Points the machine at us and keeps it so.
struct Resolver {
    mode: ConfiguredMode,
    paths: Paths,
    config: DnsConfig,
    suffix: Suffix,
    address: Ipv6Addr,
    tunnel: TunnelHandle,
    dialer: Dialer,
    status: watch::Sender<DnsStatus>,
    check: Arc<Notify>,
    stop: CancellationToken,
}

impl Resolver {
    async fn run(self) {
        // Whoever reads the file the moment it is ours gets answers already.
        let may_be_direct = matches!(self.mode, ConfiguredMode::Auto | ConfiguredMode::Fixed(Mode::Direct));
        if may_be_direct {
            self.forward_to(Mode::Direct, &dns::direct::current_servers(&self.paths, &self.config)).await;
        }
        let installed = tokio::select! {
            installed = dns::install(self.mode, &self.paths, &self.config) => installed,
            // What was half done is undone by the clean-up that follows every stop.
            () = self.stop.cancelled() => return restore_file(&self.paths),
        };
        let installed = match installed {
            Ok(installed) => installed,
            Err(error) => {
                tracing::error!(%error, "the machine's resolver could not be set up");
                self.forward_nothing().await;
                self.status.send_replace(DnsStatus {
                    state: DnsState::Failed,
                    text: error.to_string(),
                    ..DnsStatus::default()
                });
                return;
            }
        };
        tracing::info!(mode = %installed.choice.mode, reason = installed.choice.reason, "machine's resolver");
        if let Some(warning) = &installed.choice.warning {
            tracing::warn!("{warning}");
        }
        let mut backend = installed.backend;
        match backend.mode().can_split() {
            true if may_be_direct => self.forward_nothing().await,
            true => {}
            false => self.forward_to(backend.mode(), &backend.upstreams()).await,
        }
        let mut shown = DnsStatus {
            mode: mode(installed.choice.mode),
            state: if installed.choice.mode == Mode::None { DnsState::Off } else { DnsState::Ok },
            text: installed.choice.warning.unwrap_or_default(),
            upstreams: backend.upstreams().iter().map(SocketAddr::to_string).collect(),
        };
        self.status.send_replace(shown.clone());
        if installed.choice.mode == Mode::None {
            self.stop.cancelled().await;
            return;
        }
        self.keep(&mut *backend, &mut shown).await;
        if let Err(error) = backend.revert().await {
            tracing::error!(%error, "cannot give the machine's resolver back; run `codervpnd cleanup`");
        }
        self.dialer.set_base_dns(Vec::new());
    }

    /// We are not the machine's only server.
    async fn forward_nothing(&self) {
        self.dialer.set_base_dns(Vec::new());
        let _ = self.tunnel.forwarding(None).await;
    }

    /// Where the system cannot split, we are its only server: everything else goes to those that it had before.
    async fn forward_to(&self, mode: Mode, upstreams: &[SocketAddr]) {
        if mode.can_split() {
            return;
        }
        // Local servers that do not answer were left out where the file was read.
        let (servers, dropped) = BaseServers::select(upstreams, self.address, |_| false);
        for server in dropped {
            tracing::warn!(%server, "name server left out: it leads back to us");
        }
        if servers.as_slice().is_empty() {
            tracing::warn!("the machine had no name server; only names of workspaces resolve");
        }
        self.dialer.set_base_dns(servers.as_slice().to_vec());
        let _ = self.tunnel.forwarding(Some(servers)).await;
    }

    /// Until it is stopped: looks whether our settings still stand, and whether names resolve.
    async fn keep(&self, backend: &mut dyn Backend, shown: &mut DnsStatus) {
        let mut check = interval(CHECK_EVERY);
        check.tick().await;
        let mut test = SelfTest::default();
        test.request();
        loop {
            let due = test.poll_timeout(Instant::now());
            tokio::select! {
                () = self.stop.cancelled() => return,
                _ = check.tick() => {}
                () = self.check.notified() => test.request(),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now).into()), if due.is_some() => {
                    if !test.poll_start(Instant::now()) {
                        continue;
                    }
                    let (through_os, through_tun) = tokio::select! {
                        () = self.stop.cancelled() => return,
                        results = async { tokio::join!(self.ask_system(), self.ask_tunnel()) } => results,
                    };
                    let known = test.handle_result(through_os, through_tun).is_none();
                    (shown.state, shown.text) = tested(test.state());
                    if !known || *self.status.borrow() != *shown {
                        self.status.send_replace(shown.clone());
                    }
                    if test.state() != Tested::DegradedOs {
                        continue;
                    }
                }
            }
            let checked = tokio::select! {
                () = self.stop.cancelled() => return,
                checked = backend.check() => checked,
            };
            match checked {
                Ok(State::Applied | State::Off) => {}
                Ok(State::Repaired) => {
                    tracing::warn!("another program changed the machine's resolver; our settings were put back");
                    self.forward_to(backend.mode(), &backend.upstreams()).await;
                    shown.upstreams = backend.upstreams().iter().map(SocketAddr::to_string).collect();
                    test.request();
                }
                Ok(State::Overwritten) => {
                    shown.state = DnsState::Degraded;
                    shown.text = "another program replaces the machine's resolver settings again and again; \
                        names do not resolve until the next start"
                        .to_owned();
                    self.status.send_replace(shown.clone());
                }
                Err(error) => {
                    shown.state = DnsState::Degraded;
                    shown.text = error.to_string();
                    self.status.send_replace(shown.clone());
                }
            }
        }
    }

    /// As every program of this machine would look the name up.
    async fn ask_system(&self) -> bool {
        let name = self_test::name(&self.suffix);
        match timeout(self_test::LOOKUP_TIMEOUT, tokio::net::lookup_host((name.as_str(), 0))).await {
            Ok(Ok(found)) => self_test::is_ours(found.map(|address| address.ip())),
            _ => false,
        }
    }

    /// Straight to the responder, past the machine's resolver.
    async fn ask_tunnel(&self) -> bool {
        let query = self_test::query(&self.suffix, OsRng.next_u32() as u16);
        let ask = async {
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).await?;
            socket.connect((DNS_ADDRESS, 53)).await?;
            socket.send(&query).await?;
            let mut answer = [0; 1232];
            let length = socket.recv(&mut answer).await?;
            Ok::<_, std::io::Error>(self_test::is_right(answer.get(..length).unwrap_or_default(), &query))
        };
        matches!(timeout(self_test::LOOKUP_TIMEOUT, ask).await, Ok(Ok(true)))
    }
}

fn mode(mode: Mode) -> DnsMode {
    match mode {
        Mode::Resolved => DnsMode::Resolved,
        Mode::Direct => DnsMode::Direct,
        Mode::None => DnsMode::None,
    }
}

fn tested(state: Tested) -> (DnsState, String) {
    match state {
        Tested::Ok => (DnsState::Ok, String::new()),
        Tested::Off => (DnsState::Off, String::new()),
        Tested::DegradedOs => (
            DnsState::Degraded,
            "names resolve inside the tunnel, but this machine's resolver does not ask it".to_owned(),
        ),
        Tested::DegradedTun => (
            DnsState::Degraded,
            "the name server inside the tunnel does not answer; a local firewall may block the interface".to_owned(),
        ),
    }
}
