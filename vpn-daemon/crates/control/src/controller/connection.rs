//! Decides what happens on one connection: open the calls, move messages both ways, and end as a whole when any part of
//! it ends (CC-5).
//!
//! Only the session's driver is a task of its own, so that pings are answered whatever we wait for; it ends with this
//! function. Nothing more is read while events wait for the receiver: the pressure reaches the server's queues.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use codervpn_proto::tailnet as pb;
use codervpn_wire::node::Node;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::dial::Dialed;
use super::task::{Outlets, State, deliver, stopped};
use super::{Command, ControllerRole};
use crate::event::ControlEvent;
use crate::mux::{Connection, MuxError};
use crate::rpc::RpcError;
use crate::tailnet::{CoordinateReader, CoordinateWriter, DerpMapStream, TailnetClient, WorkspaceStream};
use crate::telemetry::{Posted, Telemetry};
use crate::workspace_updates::UpdateReader;

/// Requests waiting for the server beyond which no more commands are taken: five thousand tunnels.
const REQUEST_BACKLOG: usize = 128 * 1024;

/// Opening the calls writes a few hundred bytes; a server that does not let us is not one.
const OPEN_LIMIT: Duration = Duration::from_secs(10);

/// How a connection ended.
pub(super) enum End {
    /// By our stop signal.
    Stopped,
    /// By itself; the reason is for users.
    Lost(String),
}

/// Ends the driver with the connection, whatever happens.
struct DriverTask(JoinHandle<MuxError>);

impl Drop for DriverTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

type Call<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The calls of one connection.
struct Calls {
    session: Connection,
    client: TailnetClient,
    writer: CoordinateWriter,
    reader: CoordinateReader,
    derp_maps: DerpMapStream,
    workspaces: Option<WorkspaceStream>,
    updates: UpdateReader,
    /// The refresh under way.
    refresh: Option<Call<Result<pb::RefreshResumeTokenResponse, RpcError>>>,
    /// When to refresh next; `None` when the refresher has ended.
    refresh_at: Option<Instant>,
    telemetry: Telemetry,
    post: Option<Call<Posted>>,
    /// The node that was sent last on this connection, to tell changes from repetitions (ND-6).
    sent_node: Option<Node>,
}

/// What the select found.
enum Event {
    Stop,
    Command(Option<Command>),
    Node,
    Delivered(Option<()>),
    Flushed(Result<(), RpcError>),
    Coordinate(Result<Option<pb::CoordinateResponse>, RpcError>),
    DerpMap(Result<Option<pb::DerpMap>, RpcError>),
    Workspaces(Result<Option<pb::WorkspaceUpdate>, RpcError>),
    RefreshDue,
    HeldBackDue,
    Refreshed(Result<pb::RefreshResumeTokenResponse, RpcError>),
    Posted(Posted),
}

/// Runs a connection from its 101 to its end.
pub(super) async fn run(state: &mut State, dialed: Dialed) -> End {
    let (session, driver) = Connection::client(dialed.transport);
    let mut driver = DriverTask(tokio::spawn(driver));
    let mut stop = state.stop.clone();
    let opening = timeout(OPEN_LIMIT, open(state, &session));
    let opened = tokio::select! {
        biased;
        () = stopped(&mut stop) => return End::Stopped,
        opened = opening => opened,
    };
    let mut calls = match opened {
        Ok(Ok(calls)) => calls,
        Ok(Err(error)) => return End::Lost(format!("the calls could not be opened: {error}")),
        Err(_) => return End::Lost("the calls could not be opened: the server takes no data".into()),
    };
    tracing::debug!("control connection stands");
    state.emit(ControlEvent::Connected { server_version: dialed.server_version });
    let end = calls.run(state).await;
    match &end {
        End::Stopped => calls.leave(state, &mut driver).await,
        End::Lost(_) => {
            state.emit(ControlEvent::AllPeersLost);
            // Without Disconnect: we mean to come back, so peers must see us as lost, not as gone (CC-11).
            session.close();
            let _ = (&mut driver.0).await;
        }
    }
    end
}

/// Opens Coordinate first, then the subscriptions (CC-7), and queues our node and all destinations (CC-14).
async fn open(state: &mut State, session: &Connection) -> Result<Calls, RpcError> {
    let client = TailnetClient::new(session.clone());
    let (mut writer, reader) = client.coordinate()?;
    let derp_maps = client.stream_derp_maps().await?;
    let (workspaces, refresh_at) = match state.role {
        ControllerRole::Client { owner } => (Some(client.workspace_updates(owner).await?), Some(Instant::now())),
        ControllerRole::Agent => (None, None),
    };
    let sent_node = state.nodes.borrow_and_update().clone().filter(|node| writer.update_self(node));
    state.coordination.connected(&mut writer);
    writer.flush().await?;
    Ok(Calls {
        session: session.clone(),
        client,
        writer,
        reader,
        derp_maps,
        workspaces,
        updates: UpdateReader::default(),
        refresh: None,
        refresh_at,
        telemetry: Telemetry::default(),
        post: None,
        sent_node,
    })
}

impl Calls {
    async fn run(&mut self, state: &mut State) -> End {
        loop {
            let event = self.next_event(state).await;
            let failed = match event {
                Event::Stop | Event::Command(None) | Event::Delivered(None) => return End::Stopped,
                Event::Delivered(Some(())) => None,
                Event::Command(Some(Command::PostTelemetry(event))) => {
                    if self.post.is_none() && self.telemetry.is_available() {
                        self.post = Some(Box::pin(Telemetry::post(self.client.clone(), *event)));
                    }
                    None
                }
                Event::Command(Some(command)) => {
                    state.handle_command(command, Some(&mut self.writer));
                    None
                }
                Event::Node => {
                    self.send_node(state);
                    None
                }
                Event::Flushed(result) => result.err().map(|error| self.because("Coordinate", Some(error), state)),
                Event::Coordinate(Ok(Some(response))) => {
                    let answer = state.coordination.receive(response, &mut self.writer);
                    if let Some(text) = answer.error {
                        state.emit(ControlEvent::CoordinatorError(text));
                    }
                    if !answer.updates.is_empty() {
                        state.emit(ControlEvent::PeerUpdates(answer.updates));
                    }
                    None
                }
                Event::Coordinate(end) => Some(self.because("Coordinate", end.err(), state)),
                Event::DerpMap(Ok(Some(map))) => {
                    if let Some(map) = state.derp_maps.receive(map) {
                        state.emit(ControlEvent::DerpMap(map));
                    }
                    None
                }
                Event::DerpMap(end) => Some(self.because("StreamDERPMaps", end.err(), state)),
                Event::Workspaces(Ok(Some(update))) => match self.updates.read(update) {
                    Ok(update) => {
                        if update.full {
                            state.coordination.snapshot(&mut self.writer);
                        }
                        state.emit(ControlEvent::Workspaces(update));
                        None
                    }
                    Err(error) => Some(error.to_string()),
                },
                Event::Workspaces(end) => Some(self.because("WorkspaceUpdates", end.err(), state)),
                Event::HeldBackDue => {
                    state.coordination.tick(&mut self.writer);
                    None
                }
                Event::RefreshDue => {
                    self.refresh_at = None;
                    let client = self.client.clone();
                    self.refresh = Some(Box::pin(async move { client.refresh_resume_token().await }));
                    None
                }
                Event::Refreshed(answer) => {
                    self.refresh = None;
                    self.refreshed(answer, state);
                    None
                }
                Event::Posted(result) => {
                    self.post = None;
                    self.telemetry.posted(&result);
                    None
                }
            };
            if let Some(reason) = failed {
                return End::Lost(reason);
            }
        }
    }

    async fn next_event(&mut self, state: &mut State) -> Event {
        let reading = !state.has_undelivered();
        let taking = self.writer.waiting() < REQUEST_BACKLOG;
        let writing = self.writer.waiting() > 0;
        let held_back = state.coordination.due();
        let Outlets { commands, nodes, stop, events, outbox } = state.outlets();
        tokio::select! {
            biased;
            () = stopped(stop) => Event::Stop,
            command = commands.recv(), if taking => Event::Command(command),
            Ok(()) = nodes.changed(), if taking => Event::Node,
            delivered = deliver(events, outbox), if !reading => Event::Delivered(delivered),
            flushed = self.writer.flush(), if writing => Event::Flushed(flushed),
            message = self.reader.next(), if reading => Event::Coordinate(message),
            message = next_workspaces(&mut self.workspaces), if reading => Event::Workspaces(message),
            message = self.derp_maps.next(), if reading => Event::DerpMap(message),
            answer = running(&mut self.refresh) => Event::Refreshed(answer),
            () = sleep_until(self.refresh_at.unwrap_or_else(Instant::now)), if self.refresh_at.is_some() => {
                Event::RefreshDue
            }
            () = sleep_until(held_back.unwrap_or_else(Instant::now)), if held_back.is_some() && taking => {
                Event::HeldBackDue
            }
            result = running(&mut self.post) => Event::Posted(result),
        }
    }

    /// Only the newest of several changes is sent, and none that says what was said before on this connection (ND-3, ND-6).
    fn send_node(&mut self, state: &mut State) {
        let node = state.nodes.borrow_and_update().clone();
        let Some(node) = node.filter(|node| !same(self.sent_node.as_ref(), node)) else { return };
        if self.writer.update_self(&node) {
            self.sent_node = Some(node);
        }
    }

    /// CC-43: whatever goes wrong here, the connection stays.
    fn refreshed(&mut self, answer: Result<pb::RefreshResumeTokenResponse, RpcError>, state: &mut State) {
        match answer {
            Ok(answer) => self.refresh_at = Some(Instant::now() + state.resume.store(answer)),
            Err(error) if error.is_unimplemented() => {
                tracing::info!("the server has no resume tokens: peers see us as new after a reconnect");
            }
            Err(error) => tracing::error!(%error, "no resume token"),
        }
    }

    /// Why the connection ended: what the coordinator said explains more than the end of a stream.
    fn because(&self, call: &str, error: Option<RpcError>, state: &State) -> String {
        if let Some(text) = state.coordination.error() {
            return format!("the coordinator hung up: {text}");
        }
        match error {
            Some(RpcError::Session(error)) => error.to_string(),
            Some(error) if error.is_unimplemented() => {
                format!("the server has no {call}; the deployment must be upgraded to Coder 2.18 or newer")
            }
            Some(error) => format!("{call} failed: {error}"),
            None => format!("the server ended {call}"),
        }
    }

    /// 6.3: the other calls end at once; Disconnect, then wait until the server has hung up, for a dRPC Close could
    /// overtake it (CC-9).
    async fn leave(mut self, state: &State, driver: &mut DriverTask) {
        let deadline = Instant::now() + state.graceful_limit;
        self.refresh = None;
        self.post = None;
        self.writer.disconnect();
        let goodbye = async {
            if let Some(workspaces) = &mut self.workspaces {
                let _ = workspaces.close().await;
            }
            let _ = self.derp_maps.close().await;
            // A failed send: the server has hung up already.
            if self.writer.flush().await.is_ok() {
                while let Ok(Some(_)) = self.reader.next().await {}
            }
        };
        if timeout_at(deadline, goodbye).await.is_err() {
            tracing::debug!("the server did not hang up in time");
        }
        self.writer.finish();
        self.session.close();
        let _ = (&mut driver.0).await;
    }
}

async fn next_workspaces(stream: &mut Option<WorkspaceStream>) -> Result<Option<pb::WorkspaceUpdate>, RpcError> {
    match stream {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}

async fn running<T>(call: &mut Option<Call<T>>) -> T {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}

/// Equal but for the time of making.
fn same(old: Option<&Node>, new: &Node) -> bool {
    old.is_some_and(|old| Node { as_of: new.as_of, ..old.clone() } == *new)
}
