//! Decides when to dial, when to give up, and what to report: the loop of 6.2.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use codervpn_wire::node::Node;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::backoff::{Backoff, CEILING};
use super::connection::{self, End};
use super::{Command, ControllerConfig, ControllerRole, Dial};
use crate::api::ApiError;
use crate::coordination::Coordination;
use crate::derp_maps::DerpMaps;
use crate::event::ControlEvent;
use crate::resume_token::ResumeToken;
use crate::tailnet::CoordinateWriter;

/// A connection that lived shorter does not reset the back-off: a server that accepts and drops is not hammered (CC-1).
const STEADY: Duration = Duration::from_secs(1);

pub(super) struct Inputs {
    pub(super) config: ControllerConfig,
    pub(super) dialer: Arc<dyn Dial>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) nodes: watch::Receiver<Option<Node>>,
    pub(super) events: mpsc::Sender<ControlEvent>,
    pub(super) stop: watch::Receiver<bool>,
}

/// Everything that outlives a connection.
pub(super) struct State {
    pub(super) role: ControllerRole,
    pub(super) graceful_limit: Duration,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) nodes: watch::Receiver<Option<Node>>,
    pub(super) stop: watch::Receiver<bool>,
    pub(super) coordination: Coordination,
    pub(super) derp_maps: DerpMaps,
    pub(super) resume: ResumeToken,
    events: mpsc::Sender<ControlEvent>,
    /// Events for which the channel has no room. Nothing is read from the network while there are any, so it holds what
    /// one message and one change of state bring.
    outbox: VecDeque<ControlEvent>,
}

pub(super) async fn run(inputs: Inputs) {
    let Inputs { config, dialer, commands, nodes, events, stop } = inputs;
    let mut state = State {
        role: config.role,
        graceful_limit: config.graceful_limit,
        commands,
        nodes,
        stop,
        coordination: Coordination::new(matches!(config.role, ControllerRole::Client { .. })),
        derp_maps: DerpMaps::new(config.deployment, config.derp_map),
        resume: ResumeToken::default(),
        events,
        outbox: VecDeque::new(),
    };
    let refused = state.dial_loop(dialer.as_ref()).await;
    state.resume.forget();
    if let Some(error) = refused {
        state.emit(ControlEvent::Refused { error });
    }
    // Nobody waits for these when we were told to stop.
    state.deliver_rest().await;
}

impl State {
    /// Returns at a stop signal, or with the refusal that ends the first phase.
    async fn dial_loop(&mut self, dialer: &dyn Dial) -> Option<ApiError> {
        let mut backoff = Backoff::default();
        let mut first_phase = true;
        let mut attempt = 0;
        let mut delay = backoff.next_delay();
        loop {
            self.unless_stopped(sleep(delay)).await?;
            // CC-2: with no delay the timer may have won against a stop signal that was there before it.
            if self.is_stopped() {
                return None;
            }
            if self.coordination.doubts_session() && self.unless_stopped(dialer.session_is_good()).await? {
                self.coordination.session_is_good();
            }
            attempt += 1;
            self.emit(ControlEvent::Connecting { attempt });
            let token = self.resume.for_dial(SystemTime::now()).cloned();
            let dialed = self.unless_stopped(dialer.dial(token.as_ref())).await?;
            drop(token);
            let (reason, signed_out) = match dialed {
                Ok(dialed) => {
                    first_phase = false;
                    attempt = 0;
                    self.resume.dial_accepted();
                    let since = Instant::now();
                    let reason = match connection::run(self, dialed).await {
                        End::Stopped => return None,
                        End::Lost(reason) => reason,
                    };
                    if self.coordination.was_overwritten() {
                        self.resume.forget();
                    }
                    self.coordination.disconnected(since.elapsed());
                    if since.elapsed() >= STEADY {
                        backoff.reset();
                    }
                    delay = backoff.next_delay();
                    (reason, false)
                }
                Err(error) if error.is_refused_resume_token() => {
                    self.resume.refused();
                    delay = backoff.next_delay();
                    (error.to_string(), false)
                }
                Err(error) if error.is_permanent() && first_phase => return Some(error),
                Err(error) => {
                    first_phase = false;
                    delay = backoff.next_delay();
                    if let Some(wait) = error.retry_after() {
                        delay = delay.max(wait);
                    }
                    // HTTP-17.
                    if error.is_signed_out() {
                        delay = CEILING;
                    }
                    (error.to_string(), error.is_signed_out())
                }
            };
            tracing::debug!(%reason, retry_in = ?delay, "no control connection");
            self.emit(ControlEvent::Lost { reason, retry_in: delay, signed_out });
        }
    }

    /// Waits for `future`, or until told to stop. Commands are taken and events delivered meanwhile.
    async fn unless_stopped<F: Future>(&mut self, future: F) -> Option<F::Output> {
        tokio::pin!(future);
        loop {
            tokio::select! {
                biased;
                () = stopped(&mut self.stop) => return None,
                command = self.commands.recv() => match command {
                    Some(command) => self.handle_command(command, None),
                    None => return None,
                },
                result = deliver(&self.events, &mut self.outbox), if !self.outbox.is_empty() => result?,
                output = &mut future => return Some(output),
            }
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        *self.stop.borrow()
    }

    pub(super) fn emit(&mut self, event: ControlEvent) {
        self.outbox.push_back(event);
    }

    pub(super) fn has_undelivered(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Carries out a command, or notes it for the next connection. Telemetry and acknowledgements are of no use then.
    pub(super) fn handle_command(&mut self, command: Command, mut writer: Option<&mut CoordinateWriter>) {
        match command {
            Command::SetDestinations(wanted) => self.coordination.set(wanted, writer),
            Command::AddDestinations(ids) => self.coordination.add(ids, writer),
            Command::RemoveDestinations(ids) => self.coordination.remove(&ids, writer),
            Command::ReadyForHandshake(ids) => {
                if let (ControllerRole::Agent, Some(writer), false) = (self.role, writer.as_mut(), ids.is_empty()) {
                    writer.ready_for_handshake(&ids);
                }
            }
            Command::PostTelemetry(_) => {}
            Command::Settled(done) => {
                let _ = done.send(());
            }
        }
    }

    pub(super) fn outlets(&mut self) -> Outlets<'_> {
        Outlets {
            commands: &mut self.commands,
            nodes: &mut self.nodes,
            stop: &mut self.stop,
            events: &self.events,
            outbox: &mut self.outbox,
        }
    }

    async fn deliver_rest(&mut self) {
        while !self.outbox.is_empty() {
            tokio::select! {
                biased;
                () = stopped(&mut self.stop) => return,
                result = deliver(&self.events, &mut self.outbox) => if result.is_none() { return },
            }
        }
    }
}

/// The waiting ends of a [`State`], borrowed apart for a select.
pub(super) struct Outlets<'a> {
    pub(super) commands: &'a mut mpsc::Receiver<Command>,
    pub(super) nodes: &'a mut watch::Receiver<Option<Node>>,
    pub(super) stop: &'a mut watch::Receiver<bool>,
    pub(super) events: &'a mpsc::Sender<ControlEvent>,
    pub(super) outbox: &'a mut VecDeque<ControlEvent>,
}

/// Resolves at the stop signal, or when the handle was dropped.
pub(super) async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

pub(super) async fn deliver(events: &mpsc::Sender<ControlEvent>, outbox: &mut VecDeque<ControlEvent>) -> Option<()> {
    let room = events.reserve().await.ok()?;
    if let Some(event) = outbox.pop_front() {
        room.send(event);
    }
    Some(())
}
