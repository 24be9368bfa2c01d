//! Decides the life of the control connection.
//!
//! One task: wait, dial, run the connection, report, again. It ends only by [`Handle::shutdown`] (or the loss of every
//! handle) and by a permanent refusal of the first phase (1.8). What runs on a connection runs inside that task, so
//! nothing of connection N can touch anything after N+1 began (CC-6), and a stop signal is tested between the wait and
//! the dial (CC-2: no phantom redial).

mod backoff;
mod connection;
mod dial;
mod task;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use codervpn_wire::derp_map::DerpMap;
use codervpn_wire::node::Node;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::api::Deployment;
use crate::event::ControlEvent;

pub use backoff::Backoff;
pub use dial::{Dial, DialFailure, DialFuture, Dialed, Transport, WebSocketDialer};

/// Events that may wait for the receiver. One event is one message of the server; the coordinator itself holds 512 for
/// us before it hangs up, so a slow receiver is noticed there and not by our memory.
pub const EVENT_QUEUE: usize = 64;

/// Commands that may wait for the task; it takes them at once unless it is stuck in a write, which ends within 10 s.
const COMMAND_QUEUE: usize = 64;

/// What we are to the deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControllerRole {
    /// A person's tunnel: Coordinate, StreamDERPMaps, WorkspaceUpdates, RefreshResumeToken.
    Client {
        /// Whose workspaces (`users/me`).
        owner: Uuid,
    },
    /// A workspace agent: Coordinate and StreamDERPMaps; every node of a peer is acknowledged with ReadyForHandshake by
    /// the receiver of the events through [`Handle::ready_for_handshake`].
    Agent,
}

/// How a controller works.
#[derive(Clone)]
pub struct ControllerConfig {
    /// What we are.
    pub role: ControllerRole,
    /// The relay map of the REST call, already rewritten: only maps that differ from it are reported.
    pub derp_map: Option<DerpMap>,
    /// Relay maps are rewritten for this deployment (CC-46); `None` leaves them as they come.
    pub deployment: Option<Deployment>,
    /// Limit of a graceful disconnect (6.3); 1 s upstream.
    pub graceful_limit: Duration,
}

impl ControllerConfig {
    /// The usual limits.
    pub fn new(role: ControllerRole) -> Self {
        Self { role, derp_map: None, deployment: None, graceful_limit: Duration::from_secs(1) }
    }
}

/// Starts controllers.
#[derive(Debug)]
pub struct Controller;

impl Controller {
    /// Starts the loop on the current runtime. `dialer` is a [`WebSocketDialer`] outside of tests.
    pub fn spawn(config: ControllerConfig, dialer: Arc<dyn Dial>) -> (Handle, mpsc::Receiver<ControlEvent>) {
        let (commands_tx, commands) = mpsc::channel(COMMAND_QUEUE);
        let (events, events_rx) = mpsc::channel(EVENT_QUEUE);
        let (stop, stopped) = watch::channel(false);
        let (node, nodes) = watch::channel(None);
        let task = tokio::spawn(task::run(task::Inputs { config, dialer, commands, nodes, events, stop: stopped }));
        (Handle { commands: commands_tx, node, stop, task }, events_rx)
    }
}

/// What the task is asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    SetDestinations(BTreeSet<Uuid>),
    AddDestinations(Vec<Uuid>),
    RemoveDestinations(Vec<Uuid>),
    ReadyForHandshake(Vec<Uuid>),
    PostTelemetry(Box<codervpn_proto::tailnet::TelemetryEvent>),
    Settled(oneshot::Sender<()>),
}

/// The controller has ended; nothing can be asked of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the control connection has been stopped")]
pub struct Ended;

/// Commands to a running controller. Dropping it stops the controller, without waiting for the graceful disconnect.
#[derive(Debug)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
    node: watch::Sender<Option<Node>>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Handle {
    /// What peers shall know about us. Sent at once and again on every new connection, with a fresh `as_of`. A node
    /// without a home relay is kept back until it has one (ND-4). Only the newest of several quick changes is sent (ND-3).
    pub fn set_self_node(&self, node: Node) {
        self.node.send_replace(Some(node));
    }

    /// The agents we want tunnels to, all of them (CC-19).
    pub async fn set_destinations(&self, wanted: impl IntoIterator<Item = Uuid>) -> Result<(), Ended> {
        self.send(Command::SetDestinations(wanted.into_iter().collect())).await
    }

    /// Adds destinations (CC-17).
    pub async fn add_destinations(&self, ids: impl IntoIterator<Item = Uuid>) -> Result<(), Ended> {
        self.send(Command::AddDestinations(ids.into_iter().collect())).await
    }

    /// Removes destinations (CC-18).
    pub async fn remove_destinations(&self, ids: impl IntoIterator<Item = Uuid>) -> Result<(), Ended> {
        self.send(Command::RemoveDestinations(ids.into_iter().collect())).await
    }

    /// Tells peers that their nodes are programmed. Agents only; ignored in the client role, because servers hang up on
    /// clients for it (CC-23).
    pub async fn ready_for_handshake(&self, ids: impl IntoIterator<Item = Uuid>) -> Result<(), Ended> {
        self.send(Command::ReadyForHandshake(ids.into_iter().collect())).await
    }

    /// Posts one telemetry event if connected; dropped otherwise (6.10).
    pub async fn post_telemetry(&self, event: codervpn_proto::tailnet::TelemetryEvent) -> Result<(), Ended> {
        self.send(Command::PostTelemetry(Box::new(event))).await
    }

    /// Resolves when every command given before has been carried out or noted for the next connection.
    pub async fn settled(&self) -> Result<(), Ended> {
        let (done, wait) = oneshot::channel();
        self.send(Command::Settled(done)).await?;
        wait.await.map_err(|_| Ended)
    }

    /// Leaves: says Disconnect if connected, waits until the server has ended the stream or the graceful limit is over,
    /// closes the connection. Returns when nothing of the controller runs any more. Works in every state, also during a
    /// dial, and never leaves a redial behind (CC-2, CC-13).
    pub async fn shutdown(self) {
        self.stop.send_replace(true);
        if let Err(error) = self.task.await
            && error.is_panic()
        {
            tracing::error!("the control task panicked");
        }
    }

    /// The signal of [`Handle::shutdown`] without the wait, for use behind a shared reference.
    pub fn request_stop(&self) {
        self.stop.send_replace(true);
    }

    async fn send(&self, command: Command) -> Result<(), Ended> {
        self.commands.send(command).await.map_err(|_| Ended)
    }
}
