//! The daemon's controller against our deployment, over real sockets: what a session goes through (control-plane 6, 8).

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use codervpn_control::{
    Api, ApiError, ControlEvent, Controller, ControllerConfig, ControllerRole, Handle, PeerUpdateKind, WebSocketDialer,
    WorkspaceUpdate,
};
use codervpn_proto::tailnet::calls;
use codervpn_testbed::coderd::{Deployment, Fault, Order, Route, RpcFault, Standing, User, Workspace};
use codervpn_underlay::{Dialer, DialerConfig};
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::{DiscoPrivate, NodePrivate};
use codervpn_wire::node::{Node, Prefix, coder_address};
use rand_core::OsRng;
use tokio::sync::mpsc;
use tokio::time::timeout;
use uuid::Uuid;

type Result<T = ()> = anyhow::Result<T>;

/// Longer than a back-off on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The daemon's side.
struct Client {
    handle: Handle,
    events: mpsc::Receiver<ControlEvent>,
}

impl Client {
    fn start(deployment: &Deployment, user: &User) -> Result<Self> {
        let api = api(deployment, user)?;
        let role = ControllerRole::Client { owner: user.id };
        let mut config = ControllerConfig::new(role);
        config.deployment = Some(api.deployment().clone());
        let (handle, events) = Controller::spawn(config, Arc::new(WebSocketDialer::new(api, role)));
        Ok(Self { handle, events })
    }

    /// The first event that `take` accepts.
    async fn event<T>(&mut self, what: &str, mut take: impl FnMut(ControlEvent) -> Option<T>) -> Result<T> {
        let wait = async {
            loop {
                let event = self.events.recv().await.context("the controller has ended")?;
                if let Some(taken) = take(event) {
                    return Ok(taken);
                }
            }
        };
        timeout(PATIENCE, wait).await.with_context(|| format!("waited in vain: {what}"))?
    }

    async fn connected(&mut self) -> Result {
        self.event("connected", |event| matches!(event, ControlEvent::Connected { .. }).then_some(())).await
    }

    async fn lost(&mut self) -> Result<(String, bool)> {
        self.event("lost", |event| match event {
            ControlEvent::Lost { reason, signed_out, .. } => Some((reason, signed_out)),
            _ => None,
        })
        .await
    }

    async fn workspaces(&mut self) -> Result<WorkspaceUpdate> {
        self.event("workspaces", |event| match event {
            ControlEvent::Workspaces(update) => Some(update),
            _ => None,
        })
        .await
    }

    async fn peer(&mut self, id: Uuid, what: &str, fits: impl Fn(&PeerUpdateKind) -> bool) -> Result {
        self.event(what, |event| match event {
            ControlEvent::PeerUpdates(updates) => {
                updates.iter().any(|update| update.id == id && fits(&update.kind)).then_some(())
            }
            _ => None,
        })
        .await
    }

    async fn coordinator_error(&mut self) -> Result<String> {
        self.event("coordinator error", |event| match event {
            ControlEvent::CoordinatorError(text) => Some(text),
            _ => None,
        })
        .await
    }

    async fn refused(&mut self) -> Result<ApiError> {
        self.event("refused", |event| match event {
            ControlEvent::Refused { error } => Some(error),
            _ => None,
        })
        .await
    }
}

fn api(deployment: &Deployment, user: &User) -> Result<Arc<Api>> {
    let config = DialerConfig { extra_ca: deployment.ca_file().map(Into::into), ..DialerConfig::default() };
    let url = codervpn_control::Deployment::parse(deployment.url().as_str())?;
    Ok(Arc::new(Api::new(url, user.secret(), Dialer::new(config)?)))
}

fn node() -> Node {
    let address = coder_address(Uuid::new_v4());
    Node {
        id: 1,
        as_of: None,
        key: NodePrivate::generate(&mut OsRng).public(),
        disco: DiscoPrivate::generate(&mut OsRng).public(),
        home: RegionId::new(999),
        derp_latency: Default::default(),
        forced_websocket: Default::default(),
        addresses: vec![Prefix::single(address)],
        allowed_ips: vec![Prefix::single(address)],
        endpoints: Vec::new(),
    }
}

/// A deployment with one workspace, its agent running, a client with a tunnel to it.
struct Joined {
    deployment: Deployment,
    user: User,
    workspace: Workspace,
    agent: codervpn_testbed::agent::WorkspaceAgent,
    client: Client,
}

async fn joined(deployment: Deployment) -> Result<Joined> {
    let user = deployment.add_user("anna");
    let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
    let entry = workspace.agents.first().context("one agent")?;
    let agent = deployment.run_agent(entry).await?;
    let mut client = Client::start(&deployment, &user)?;
    client.connected().await?;
    client.handle.set_self_node(node());
    client.handle.set_destinations([entry.id]).await?;
    client.peer(entry.id, "ReadyForHandshake", |kind| matches!(kind, PeerUpdateKind::ReadyForHandshake)).await?;
    Ok(Joined { deployment, user, workspace, agent, client })
}

fn peer_id(deployment: &Deployment) -> Option<Uuid> {
    deployment.sessions().into_iter().find(|session| !session.is_agent).map(|session| session.peer)
}

/// Start to stop, with TLS: snapshot, sequences, names of others unseen, rename, graceful end (CC-9, CC-65, TR-4).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_session() -> Result {
    let Joined { deployment, user, workspace, agent, mut client } =
        joined(Deployment::builder().tls().start().await?).await?;
    let other = deployment.add_user("ben");
    deployment.create_workspace(&other, "secret", &["main"])?;
    let second = deployment.create_workspace(&user, "two", &["a", "b"])?;
    let mut seen = Vec::new();
    loop {
        let update = client.workspaces().await?;
        seen.extend(update.upserted_workspaces.into_iter().map(|workspace| workspace.name));
        if update.upserted_agents.len() == second.agents.len() {
            break;
        }
    }
    ensure!(!seen.contains(&"secret".to_owned()), "{seen:?}");
    deployment.rename_workspace(&workspace, "prod")?;
    deployment.stop_workspace(&second)?;
    let stopping = client.workspaces().await?;
    ensure!(stopping.deleted_agents.len() == 2, "{stopping:?}");
    ensure!(stopping.upserted_workspaces.iter().any(|workspace| workspace.name == "prod"), "{stopping:?}");

    let peer = peer_id(&deployment).context("the client is connected")?;
    client.handle.shutdown().await;
    deployment.until("the client is gone", |deployment| deployment.coordinator().peer(peer).is_none()).await?;
    agent.stop().await;
    ensure!(deployment.violations().is_empty(), "{:?}", deployment.violations());
    ensure!(deployment.coordinator().overwrites() == 0, "somebody was overwritten");
    Ok(())
}

/// 8.5 as a client sees it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_leaves_and_one_that_crashes() -> Result {
    let Joined { deployment, workspace, agent, mut client, .. } = joined(Deployment::start().await?).await?;
    let id = agent.id();
    agent.kill().await;
    client.peer(id, "Lost", |kind| matches!(kind, PeerUpdateKind::Lost)).await?;
    let agent = deployment.run_agent(&workspace.agents[0]).await?;
    client.peer(id, "Node(_)", |kind| matches!(kind, PeerUpdateKind::Node(_))).await?;
    client.peer(id, "ReadyForHandshake", |kind| matches!(kind, PeerUpdateKind::ReadyForHandshake)).await?;
    agent.stop().await;
    client.peer(id, "Disconnected", |kind| matches!(kind, PeerUpdateKind::Disconnected)).await?;
    client.handle.shutdown().await;
    Ok(())
}

/// However a connection ends, the client comes back with the same id by its resume token, and with its tunnels
/// (WS-13, TR-8, CC-40).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_end_of_a_connection_is_survived() -> Result {
    let Joined { deployment, agent, mut client, .. } = joined(Deployment::start().await?).await?;
    let peer = peer_id(&deployment).context("the client is connected")?;
    let orders = [
        Order::Cut,
        Order::Close { code: 1000, reason: String::new() },
        Order::Close { code: 1011, reason: "broken".into() },
        Order::Text("hello".into()),
        // A data frame of 16 MiB for stream 1: far over its window (YX-9).
        Order::Bytes([&[0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0][..], &[0; 64]].concat()),
        // Version 9 (YX-19).
        Order::Bytes(vec![9; 12]),
    ];
    for (number, order) in orders.into_iter().enumerate() {
        // The token must have come, or the id would be new.
        tokio::time::sleep(Duration::from_millis(50)).await;
        ensure!(deployment.order(&order, |session| !session.is_agent) == 1, "no connection");
        client.lost().await.with_context(|| format!("{order:?}"))?;
        client.connected().await?;
        client.peer(agent.id(), "Node(_)", |kind| matches!(kind, PeerUpdateKind::Node(_))).await?;
        deployment.until("the client is back", |deployment| peer_id(deployment) == Some(peer)).await?;
        let opened = deployment.sessions_opened(peer);
        ensure!(opened as usize == number + 2, "{opened} connections after {order:?}");
    }
    let tunnels = |deployment: &Deployment| deployment.coordinator().tunnels().into_iter().collect::<Vec<_>>();
    deployment.until("the tunnel is back", |deployment| tunnels(deployment) == [(peer, agent.id())]).await?;
    client.handle.shutdown().await;
    ensure!(deployment.violations().is_empty(), "{:?}", deployment.violations());
    Ok(())
}

/// A restart of the server: agents and clients come back by themselves, with their old ids (6.12).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_restart_is_survived() -> Result {
    let Joined { deployment, agent, mut client, .. } = joined(Deployment::start().await?).await?;
    resumable(&deployment, &mut client).await?;
    let peer = peer_id(&deployment).context("the client is connected")?;
    deployment.stop().await;
    client.lost().await?;
    deployment.resume().await?;
    client.connected().await?;
    client.peer(agent.id(), "ReadyForHandshake", |kind| matches!(kind, PeerUpdateKind::ReadyForHandshake)).await?;
    ensure!(peer_id(&deployment) == Some(peer), "another id");
    client.handle.shutdown().await;
    agent.stop().await;
    Ok(())
}

/// Waits until the client surely holds a resume token: it came back with one.
async fn resumable(deployment: &Deployment, client: &mut Client) -> Result {
    let wait = async {
        while !deployment.sessions().iter().any(|session| !session.is_agent && session.resumed) {
            deployment.drop_connections();
            client.connected().await?;
        }
        Ok(())
    };
    timeout(PATIENCE, wait).await.context("the client never resumes")?
}

/// Errors before the end are told (6.4.5), and a single stream's end ends the connection (CC-5).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_and_ended_streams() -> Result {
    let Joined { deployment, mut client, .. } = joined(Deployment::start().await?).await?;
    let peer = peer_id(&deployment).context("the client is connected")?;
    deployment.coordinator().hang_up(peer, Some("coordinator unhealthy"));
    ensure!(client.coordinator_error().await? == "coordinator unhealthy");
    client.connected().await?;
    for rpc in [calls::WORKSPACE_UPDATES, calls::STREAM_DERP_MAPS] {
        client.workspaces().await?;
        deployment.end_streams(rpc);
        client.lost().await?;
        client.connected().await?;
    }
    client.handle.set_destinations([Uuid::new_v4()]).await?;
    let text = client.coordinator_error().await?;
    ensure!(text == "authorization: workspace agent not found or you do not have permission", "{text}");
    client.handle.shutdown().await;
    Ok(())
}

/// A refused resume token is dropped once (TR-21).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_resume_token_is_dropped() -> Result {
    let deployment = Deployment::builder().resume_life(Duration::ZERO).start().await?;
    let user = deployment.add_user("anna");
    let mut client = Client::start(&deployment, &user)?;
    client.connected().await?;
    deployment.drop_connections();
    client.connected().await?;
    ensure!(deployment.sessions().iter().all(|session| !session.resumed), "an expired token was taken");
    let refused = Fault::Validation {
        status: 401,
        message: "Invalid resume token".into(),
        field: "resume_token".into(),
        detail: "Invalid resume token".into(),
    };
    deployment.faults().times(Route::Tailnet, 1, refused);
    deployment.drop_connections();
    client.connected().await?;
    client.handle.shutdown().await;
    Ok(())
}

/// What the first dial says for good, and what it does not (1.8, HTTP-23).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_of_the_first_dial() -> Result {
    let old = Deployment::builder().api_version(2, 2).start().await?;
    let user = old.add_user("anna");
    let error = Client::start(&old, &user)?.refused().await?;
    ensure!(matches!(error, ApiError::ServerTooOld { .. }), "{error:?}");
    ensure!(error.to_string().contains("server is at version 2.2, behind requested minor version 2.3"), "{error}");

    let browsers = Deployment::builder().browser_only().start().await?;
    let user = browsers.add_user("anna");
    let error = Client::start(&browsers, &user)?.refused().await?;
    ensure!(matches!(error, ApiError::BrowserOnly(_)), "{error:?}");

    let deployment = Deployment::start().await?;
    let user = deployment.add_user("anna");
    deployment.set_standing(&user, &Standing::Expired);
    let error = Client::start(&deployment, &user)?.refused().await?;
    ensure!(matches!(error, ApiError::Unauthorized { .. }), "{error:?}");

    // An outage is no verdict, in no phase.
    deployment.set_standing(&user, &Standing::Active);
    deployment.set_database_down(true);
    let mut client = Client::start(&deployment, &user)?;
    let (reason, signed_out) = client.lost().await?;
    ensure!(!signed_out, "{reason}");
    deployment.set_database_down(false);
    client.connected().await?;
    // Later a refusal is a state, and it ends (HTTP-17).
    deployment.set_standing(&user, &Standing::Expired);
    deployment.drop_connections();
    while !client.lost().await?.1 {}
    client.handle.shutdown().await;
    Ok(())
}

/// Servers without resume tokens (TR-24); one that lacks what we need (DR-18).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_calls() -> Result {
    for fault in [RpcFault::Unknown, RpcFault::Unimplemented] {
        let deployment = Deployment::start().await?;
        let user = deployment.add_user("anna");
        deployment.faults().rpc(calls::REFRESH_RESUME_TOKEN, fault);
        let mut client = Client::start(&deployment, &user)?;
        client.connected().await?;
        ensure!(client.workspaces().await?.full);
        client.handle.shutdown().await;
        ensure!(deployment.sessions_opened(Uuid::nil()) == 0);
    }
    Ok(())
}
