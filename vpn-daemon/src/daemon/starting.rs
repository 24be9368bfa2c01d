//! A start is under way: it succeeds, fails, or is stopped.

use codervpn_host::{Paths, cleanup};
use codervpn_proto::ext::FailureCode;
use codervpn_proto::vpn::StartProgressStage;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::started::Started;
use super::stopped::{self, Stopped};
use super::stopping::Stopping;
use super::{Daemon, Done, Next, Outcome, Request, refused, waited};
use crate::deployment;
use crate::failure::Failure;
use crate::parameters::Parameters;
use crate::status::Lifecycle;

/// Requests for a deployment that may wait for it.
const REQUESTS: usize = 16;

pub(super) struct Starting {
    pub(super) owner: u32,
    parameters: Parameters,
    running: Running,
    started: oneshot::Receiver<Result<(), Failure>>,
    /// Everybody who asked for this very start.
    replies: Vec<oneshot::Sender<Outcome>>,
}

/// The deployment's task, which cares for its own end.
pub(super) struct Running {
    pub(super) task: JoinHandle<Option<Failure>>,
    pub(super) requests: mpsc::Sender<deployment::Request>,
    pub(super) stop: CancellationToken,
}

impl Running {
    /// Its end, within the limit of a stop.
    pub(super) async fn ended_soon(&mut self, daemon: &Daemon) -> Option<Failure> {
        match tokio::time::timeout(super::stopping::LIMIT, self.ended()).await {
            Ok(failure) => failure,
            Err(_) => {
                self.abandon(&daemon.context.paths);
                None
            }
        }
    }

    /// It does not end by itself. Its parts give back what they can when they are dropped; what may still be left is
    /// what a crash would leave.
    pub(super) fn abandon(&self, paths: &Paths) {
        tracing::error!("taking the tunnel down hangs; it is abandoned");
        self.task.abort();
        let paths = paths.clone();
        tokio::task::spawn_blocking(move || {
            for failed in cleanup::undo_leftovers(&paths).failed {
                tracing::error!("{failed}");
            }
        });
    }

    /// Why it ended.
    pub(super) async fn ended(&mut self) -> Option<Failure> {
        match (&mut self.task).await {
            Ok(failure) => failure,
            Err(error) => {
                tracing::error!(%error, "the deployment's task failed");
                Some(Failure::new(FailureCode::Internal, "the tunnel failed; see the daemon's log"))
            }
        }
    }
}

impl Starting {
    /// From here on the asker owns the tunnel, so that it can cancel what it began.
    pub(super) fn begin(
        daemon: &Daemon,
        owner: u32,
        parameters: Parameters,
        replies: Vec<oneshot::Sender<Outcome>>,
    ) -> Self {
        daemon.enter(Lifecycle::Starting, Some(owner), None);
        daemon.context.report(StartProgressStage::Initializing);
        let (started_tx, started) = oneshot::channel();
        let (requests, requests_rx) = mpsc::channel(REQUESTS);
        let stop = CancellationToken::new();
        let serve =
            deployment::serve(daemon.context.clone(), parameters.clone(), requests_rx, started_tx, stop.clone());
        let running = Running { task: tokio::spawn(serve), requests, stop };
        Self { owner, parameters, running, started, replies }
    }

    pub(super) async fn run(mut self, daemon: &mut Daemon) -> Next {
        loop {
            let until = daemon.waiting_until();
            tokio::select! {
                result = &mut self.started => return self.finish(daemon, result).await,
                () = daemon.shutdown.cancelled() => return self.cancel(daemon, Vec::new()),
                () = waited(until) => daemon.give_up_waiting(),
                request = daemon.requests.recv() => match request {
                    None => return self.cancel(daemon, Vec::new()),
                    Some(Request::Deployment(request)) => stopped::refuse(request),
                    Some(Request::Stop { asker, reply }) => {
                        match asker.standing.may_command(asker.uid, Some(self.owner)) {
                            Ok(()) => return self.cancel(daemon, vec![reply]),
                            Err(refusal) => drop(reply.send(Err(refused(refusal)))),
                        }
                    }
                    Some(Request::Start { asker, request, reply }) => {
                        let allowed = asker.standing.may_command(asker.uid, Some(self.owner)).map_err(refused);
                        match allowed.and_then(|()| daemon.parameters((*request).clone())) {
                            Ok(parameters) if parameters.same(&self.parameters) => self.replies.push(reply),
                            Ok(_) => daemon.wait(asker, request, reply),
                            Err(failure) => drop(reply.send(Err(failure))),
                        }
                    }
                },
            }
        }
    }

    async fn finish(mut self, daemon: &Daemon, result: Result<Result<(), Failure>, oneshot::error::RecvError>) -> Next {
        let failure = match result {
            Ok(Ok(())) => {
                daemon.enter(Lifecycle::Started, Some(self.owner), None);
                answer(self.replies, &Ok(Done::Now));
                return Next::Started(Started {
                    owner: self.owner,
                    parameters: self.parameters,
                    running: self.running,
                });
            }
            Ok(Err(failure)) => {
                self.running.ended_soon(daemon).await;
                failure
            }
            // The task ended without a word.
            Err(_) => self.running.ended_soon(daemon).await.unwrap_or_else(super::cancelled),
        };
        tracing::warn!(%failure, "start failed");
        daemon.enter(Lifecycle::Stopped, None, Some(failure.clone()));
        answer(self.replies, &Err(failure));
        Next::Stopped(Stopped)
    }

    /// A start that is stopped is a failure for whoever asked for it, and a success for whoever stopped it.
    fn cancel(self, daemon: &Daemon, stops: Vec<oneshot::Sender<Outcome>>) -> Next {
        answer(self.replies, &Err(super::cancelled()));
        Next::Stopping(Stopping::begin(daemon, self.owner, self.running, stops))
    }
}

pub(super) fn answer(replies: Vec<oneshot::Sender<Outcome>>, outcome: &Outcome) {
    for reply in replies {
        // Whoever asked may be gone; the daemon goes on.
        let _ = reply.send(outcome.clone());
    }
}
