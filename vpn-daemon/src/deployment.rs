//! One deployment being served, from the first request to the last withdrawal.
//!
//! A single task owns everything that a start creates: device, routes, data thread, relays, control connection, names.
//! It brings them up, keeps them in step while they run, and takes them down again, in that order and whatever happens
//! in between, so that neither a failed nor a cancelled start leaves anything behind.

mod bring_up;
mod keeper;
mod names;
mod pings;
mod view;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use codervpn_control::{Api, ApiError, ConnectionSettings, ControlEvent, Handle, WorkspaceUpdate};
use codervpn_engine as engine;
use codervpn_host::links::{Change, Monitor};
use codervpn_proto::ext::{ControlState, FailureCode};
use codervpn_proto::vpn::StartProgressStage;
use codervpn_underlay::{MapTarget, PortMapper, Relays};
use codervpn_wire::derp_map::DerpMap;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::config::SharedConfig;
use crate::daemon::Progress;
use crate::failure::Failure;
use crate::forwarder::Forwarder;
use crate::parameters::Parameters;
use crate::party::{self, Survey};
use crate::status::Status;
use crate::tunnel::{Tunnel, TunnelEvent};
use crate::workspaces::Workspaces;

use bring_up::Known;
use keeper::Keeper;
use names::Names;
use pings::Pings;
use view::View;

pub(crate) use bring_up::{api_failure, dialer};
pub use pings::{PingAnswer, PingTarget};

/// Fresh handshake and ping times reach the clients so often (codervpn-protocol 6.6).
const TICK: Duration = Duration::from_secs(5);
/// Changes of peers are shown together when they come within this time.
const GATHER: Duration = Duration::from_millis(50);
/// Making what is shown takes at most this part of our time: with thousands of agents it is shown less often.
const SHOW_SHARE: u32 = 100;
/// Leaving the coordinator and giving the resolver back, side by side; then the routes; then the device. Together at
/// most 3 s (codervpn-protocol 6.4).
const LEAVE_LIMIT: Duration = Duration::from_millis(1800);
const ROUTES_LIMIT: Duration = Duration::from_millis(600);
const DEVICE_LIMIT: Duration = Duration::from_millis(600);
/// A device that was made anew and is lost again within this time has an enemy: we give up.
const DEVICE_TRIAL: Duration = Duration::from_secs(60);

/// What a deployment needs from the daemon.
#[derive(Clone)]
pub struct Context {
    pub config: SharedConfig,
    pub paths: codervpn_host::Paths,
    pub status: watch::Sender<Status>,
    pub progress: watch::Sender<Progress>,
}

impl Context {
    /// Tells every client how far a start is.
    pub(crate) fn report(&self, stage: StartProgressStage) {
        self.progress.send_modify(|progress| *progress = Progress { number: progress.number + 1, stage });
    }
}

/// What clients ask of a running deployment.
pub enum Request {
    Ping {
        target: PingTarget,
        reply: oneshot::Sender<Result<PingAnswer, Failure>>,
    },
    /// The configuration was read again: what of it can change while we run does so now, and the machine's resolver is
    /// looked at.
    Reloaded,
    Diagnostics {
        reply: oneshot::Sender<codervpn_proto::ext::DiagnosticsReply>,
    },
}

/// Serves a deployment until `stop`, or until it fails. `started` is told once whether the start succeeded; the result
/// is why the deployment ended by itself, `None` when it was stopped.
pub async fn serve(
    context: Context,
    parameters: Parameters,
    mut requests: mpsc::Receiver<Request>,
    started: oneshot::Sender<Result<(), Failure>>,
    stop: CancellationToken,
) -> Option<Failure> {
    let mut started = Some(started);
    let mut known = None;
    let mut device_made: Option<Instant> = None;
    loop {
        // A bring-up that fails or is cancelled takes back what it had done so far.
        let running = match bring_up::bring_up(&context, &parameters, &stop, known.take()).await {
            Ok(running) => running,
            Err(failure) => {
                if let Some(started) = started {
                    let _ = started.send(Err(failure.clone()));
                }
                return Some(failure);
            }
        };
        let mut deployment = Deployment { requests, started, ..running };
        // Nothing that the deployment waits for may delay a stop.
        let end = tokio::select! {
            biased;
            () = stop.cancelled() => End::Stopped,
            end = deployment.run() => end,
        };
        let again = matches!(end, End::DeviceLost(_)) && device_made.is_none_or(|at| at.elapsed() > DEVICE_TRIAL);
        let facts = deployment.known.clone();
        (requests, started) = deployment.take_down(&end).await;
        let failure = match end {
            End::Stopped => None,
            End::Failed(failure) => Some(failure),
            // 6.5: once more, with the same address.
            End::DeviceLost(failure) if again => {
                tracing::warn!(%failure, "the device is made anew");
                device_made = Some(Instant::now());
                known = Some(facts);
                continue;
            }
            End::DeviceLost(failure) => Some(failure),
        };
        if let Some(started) = started {
            let cancelled = || Failure::new(FailureCode::Cancelled, "the start was cancelled");
            let _ = started.send(Err(failure.clone().unwrap_or_else(cancelled)));
        }
        return failure;
    }
}

async fn next_change(links: &mut Option<Monitor>) -> Change {
    match links {
        Some(monitor) => monitor.changed().await,
        None => std::future::pending().await,
    }
}

/// Why a deployment does not run any more.
enum End {
    Stopped,
    DeviceLost(Failure),
    Failed(Failure),
}

/// Everything that runs.
struct Deployment {
    context: Context,
    tunnel: Tunnel,
    tunnel_events: mpsc::Receiver<TunnelEvent>,
    relays: Relays,
    routes: Keeper,
    /// What bringing it up again need not ask for.
    known: Known,
    stop: CancellationToken,
    control: Option<Handle>,
    control_events: mpsc::Receiver<ControlEvent>,
    requests: mpsc::Receiver<Request>,
    started: Option<oneshot::Sender<Result<(), Failure>>>,
    workspaces: Workspaces,
    names: Names,
    view: View,
    pings: Pings,
    /// The networks of this machine; `None` if they cannot be watched.
    links: Option<Monitor>,
    /// The gateway's port that leads to us.
    mapper: PortMapper,
    /// Relays and STUN servers.
    survey: Survey,
    /// Whether packets may go to agents directly, as the engine was told.
    direct: engine::Direct,
    api: Arc<Api>,
    /// The deployment's settings, being asked for again after a reconnect: an administrator may have changed them.
    settings: JoinSet<Result<ConnectionSettings, ApiError>>,
    /// Lookups for other programs.
    forwarder: Forwarder,
    map: DerpMap,
    /// When what is shown has to be made anew.
    refresh: Option<Instant>,
    /// How long that took last.
    show_takes: Duration,
}

impl Deployment {
    async fn run(&mut self) -> End {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let refresh = self.refresh;
            tokio::select! {
                event = self.control_events.recv() => {
                    // The channel ends with the refusal that we were told before.
                    let Some(event) = event else { return End::Failed(self.view.control_failure()) };
                    if let Some(failure) = self.take_control_event(event).await {
                        return End::Failed(failure);
                    }
                }
                event = self.tunnel_events.recv() => match event {
                    Some(TunnelEvent::DeviceLost(reason)) => return End::DeviceLost(device_lost(&reason)),
                    Some(event) => self.take_tunnel_event(event),
                    None => return End::Failed(data_thread_ended()),
                },
                Some(request) = self.requests.recv() => self.take_request(request).await,
                change = next_change(&mut self.links) => self.take_link_change(change).await,
                mapped = self.mapper.changed() => {
                    let _ = self.tunnel.handle().apply(vec![engine::Command::PortMapped(mapped)]).await;
                }
                command = self.survey.found() => {
                    let _ = self.tunnel.handle().apply(vec![command]).await;
                }
                Some(done) = self.settings.join_next(), if !self.settings.is_empty() => self.take_settings(done).await,
                () = self.names.changed() => self.show().await,
                _ = tick.tick() => self.show().await,
                () = sleep_until(refresh.unwrap_or_else(Instant::now)), if refresh.is_some() => self.show().await,
            }
        }
    }

    /// A failure ends the deployment.
    async fn take_control_event(&mut self, event: ControlEvent) -> Option<Failure> {
        match event {
            ControlEvent::Connecting { .. } => return None,
            ControlEvent::Connected { server_version } => {
                tracing::info!("control connection up");
                if self.view.connected(server_version) {
                    let api = self.api.clone();
                    self.settings.abort_all();
                    self.settings.spawn(async move { api.connection_settings().await });
                }
                self.report_start(Ok(()));
            }
            ControlEvent::Lost { reason, retry_in, signed_out } => {
                tracing::warn!(reason, ?retry_in, "control connection lost");
                self.view.lost(&reason, signed_out);
                self.report_start(Ok(()));
            }
            ControlEvent::Refused { error } => {
                let failure = api_failure(&error);
                self.view.refused(failure.clone());
                if self.started.is_some() {
                    return Some(failure);
                }
            }
            ControlEvent::PeerUpdates(updates) => {
                let _ = self.tunnel.handle().apply(party::commands_of(updates)).await;
            }
            ControlEvent::AllPeersLost => {
                let _ = self.tunnel.handle().apply(vec![engine::Command::AllLost]).await;
            }
            ControlEvent::CoordinatorError(text) => {
                tracing::error!(text, "the coordinator reports an error");
                self.view.coordinator_error(&text);
            }
            ControlEvent::DerpMap(map) => self.take_map(map).await,
            ControlEvent::Workspaces(update) => {
                self.take_workspaces(update).await;
                self.show().await;
                return None;
            }
        }
        self.refresh_soon();
        None
    }

    async fn take_map(&mut self, map: DerpMap) {
        self.relays.set_map(&map);
        self.survey.set_map(&map);
        self.map = map.clone();
        let _ = self.tunnel.handle().apply(vec![engine::Command::DerpMap(map)]).await;
    }

    /// Whatever was learnt through the networks before is found out again; connections that died with them are replaced.
    async fn take_link_change(&mut self, change: Change) {
        tracing::info!(?change, "the networks of this machine have changed");
        let mut commands: Vec<engine::Command> = party::local_addresses().await.into_iter().collect();
        commands.push(engine::Command::Link(match change {
            Change::Major => engine::LinkChange::Major,
            Change::Minor => engine::LinkChange::Minor,
            Change::Down => engine::LinkChange::Down,
            Change::Up => engine::LinkChange::Up,
        }));
        let _ = self.tunnel.handle().apply(commands).await;
        if matches!(change, Change::Major | Change::Up) {
            self.relays.check_links();
            self.survey.forget();
        }
        self.refresh_soon();
    }

    async fn take_settings(&mut self, settings: Result<Result<ConnectionSettings, ApiError>, JoinError>) {
        match settings {
            Ok(Ok(settings)) => {
                self.known.settings.disable_direct_connections = settings.disable_direct_connections;
                self.decide_direct().await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "the deployment's settings stay as they were"),
            // Replaced by a newer question.
            Err(_) => {}
        }
    }

    /// The user and the deployment both have to allow direct paths; either may change its mind while we run.
    async fn decide_direct(&mut self) {
        let direct = bring_up::direct(&self.context.config.load(), &self.known.settings);
        if self.direct == direct {
            return;
        }
        tracing::info!(?direct, "direct connections");
        self.direct = direct;
        self.survey.set_direct(direct == engine::Direct::Allowed);
        if direct != engine::Direct::Allowed {
            self.mapper.set_target(None);
        }
        let _ = self.tunnel.handle().apply(vec![engine::Command::Direct(direct)]).await;
        self.refresh_soon();
    }

    /// The order matters (design: workspace update): an agent is known to the engine before its name exists, so that a
    /// first packet is held and not refused, and its name is gone before the engine forgets it.
    async fn take_workspaces(&mut self, update: WorkspaceUpdate) {
        let full = update.full;
        let diff = self.workspaces.apply(update);
        let added = diff.added_agents.iter().map(|id| engine::Command::AddDestination(*id)).collect();
        let _ = self.tunnel.handle().applied(added).await;
        if diff.names || full {
            self.names.publish(&self.workspaces);
        }
        if let Some(control) = &self.control {
            let wanted: BTreeSet<_> = self.workspaces.agents().map(|agent| agent.id).collect();
            let _ = control.set_destinations(wanted).await;
        }
        let removed = diff.removed_agents.iter().map(|id| engine::Command::RemoveDestination(*id)).collect();
        let _ = self.tunnel.handle().apply(removed).await;
        if full {
            self.view.synchronised();
        }
        tracing::debug!(
            workspaces = self.workspaces.len(),
            added = diff.added_agents.len(),
            removed = diff.removed_agents.len(),
            "workspaces updated"
        );
    }

    fn take_tunnel_event(&mut self, event: TunnelEvent) {
        match event {
            TunnelEvent::SelfNode(node) => {
                if let Some(control) = &self.control {
                    control.set_self_node(*node);
                }
            }
            TunnelEvent::PeerChanged(_) => self.refresh_soon(),
            TunnelEvent::MeasureRelays => self.survey.begin(),
            // Shown with the next tick: thousands of idle agents are pinged all the time, and a path that changes is told.
            TunnelEvent::PingDone { id, result } => self.pings.pong(id, result, &self.map),
            TunnelEvent::EchoDone { id, token, result, path } => self.pings.echo(id, token, result, path, &self.map),
            TunnelEvent::Forward(request) => {
                self.forwarder.ask(request, self.tunnel.handle());
            }
            // Said to agents; and the loss of the device is handled where events are taken.
            TunnelEvent::Programmed(_) | TunnelEvent::DeviceLost(_) => {}
        }
    }

    async fn take_request(&mut self, request: Request) {
        match request {
            Request::Ping { target, reply } => {
                let commands = self.pings.ask(&target, reply, &self.workspaces, &self.names);
                let _ = self.tunnel.handle().apply(commands).await;
            }
            Request::Reloaded => {
                self.names.check();
                self.decide_direct().await;
            }
            Request::Diagnostics { reply } => {
                if let Ok(snapshot) = self.tunnel.handle().snapshot().await {
                    let _ = reply.send(view::diagnostics(&snapshot, &self.relays));
                }
            }
        }
    }

    fn refresh_soon(&mut self) {
        let gather = GATHER.max(self.show_takes * SHOW_SHARE);
        self.refresh.get_or_insert_with(|| Instant::now() + gather);
    }

    /// Makes what clients see anew.
    async fn show(&mut self) {
        self.refresh = None;
        let Ok(snapshot) = self.tunnel.handle().snapshot().await else { return };
        self.map_port(snapshot.ports.v4);
        let began = Instant::now();
        let tunnel = self.view.tunnel(&snapshot, &self.workspaces, &self.names, &self.map);
        self.context.status.send_if_modified(|status| {
            // From the stop on the daemon shows that nothing is left; that stays.
            let changed = status.tunnel != tunnel && !self.stop.is_cancelled();
            if changed {
                status.tunnel = tunnel;
            }
            changed
        });
        self.show_takes = began.elapsed();
    }

    /// T-54: nothing is asked of the gateway where nobody would be told the answer.
    fn map_port(&self, port: Option<u16>) {
        let wanted = self.context.config.load().paths.portmap
            && self.direct == engine::Direct::Allowed
            && self.survey.has_stun();
        let target = port.filter(|_| wanted).and_then(|port| {
            let (gateway, own) = codervpn_host::links::gateway()?;
            Some(MapTarget { gateway, own, port })
        });
        self.mapper.set_target(target);
    }

    fn report_start(&mut self, result: Result<(), Failure>) {
        if let Some(started) = self.started.take() {
            let _ = started.send(result);
        }
    }

    /// Names first, then the resolver and the coordinator side by side, routes, device (dns-and-os 1.7). Returns what
    /// outlives it.
    async fn take_down(mut self, end: &End) -> (mpsc::Receiver<Request>, Option<oneshot::Sender<Result<(), Failure>>>) {
        self.names.withdraw();
        let control = self.control.take();
        let leave = async {
            let Some(control) = control else { return };
            party::leave(control, &mut self.control_events, LEAVE_LIMIT).await;
        };
        tokio::join!(leave, self.names.close(LEAVE_LIMIT), self.mapper.close());
        self.routes.close(ROUTES_LIMIT).await;
        self.survey.close();
        self.settings.abort_all();
        self.relays.close();
        if tokio::time::timeout(DEVICE_LIMIT, self.tunnel.stop()).await.is_err() {
            tracing::error!("the data thread does not end");
        }
        // Without a device nobody is connected, whatever comes next.
        let control = if matches!(end, End::DeviceLost(_)) { ControlState::Connecting } else { ControlState::Off };
        self.context.status.send_modify(|status| status.tunnel.control = control);
        (self.requests, self.started)
    }
}

fn device_lost(reason: &str) -> Failure {
    Failure::new(FailureCode::Tun, format!("the TUN device is gone ({reason}); another program removed it"))
        .remedy("start the VPN again")
}

fn data_thread_ended() -> Failure {
    Failure::new(FailureCode::Internal, "the tunnel's data thread ended; see the daemon's log")
        .remedy("start the VPN again")
}
