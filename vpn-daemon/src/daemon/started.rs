//! The tunnel runs, until it is stopped, replaced, or fails.

use tokio::sync::mpsc::error::TrySendError;

use super::starting::{Running, Starting};
use super::stopped::{self, Stopped};
use super::stopping::Stopping;
use super::{Daemon, Done, Next, Request, refused};
use crate::parameters::Parameters;
use crate::status::Lifecycle;

pub(super) struct Started {
    pub(super) owner: u32,
    pub(super) parameters: Parameters,
    pub(super) running: Running,
}

impl Started {
    pub(super) async fn run(mut self, daemon: &mut Daemon) -> Next {
        loop {
            let request = match daemon.take_waiting() {
                Some(request) => request,
                None => tokio::select! {
                    failure = self.running.ended() => {
                        // a dead tunnel is not shown as running.
                        if let Some(failure) = &failure {
                            tracing::error!(%failure, "the tunnel ended");
                        }
                        daemon.enter(Lifecycle::Stopped, None, failure);
                        return Next::Stopped(Stopped);
                    }
                    () = daemon.shutdown.cancelled() => {
                        return Next::Stopping(Stopping::begin(daemon, self.owner, self.running, Vec::new()));
                    }
                    request = daemon.requests.recv() => match request {
                        Some(request) => request,
                        None => return Next::Stopping(Stopping::begin(daemon, self.owner, self.running, Vec::new())),
                    },
                },
            };
            match request {
                Request::Deployment(request) => {
                    // A deployment that takes no requests is about to end; the asker is told as if it had.
                    if let Err(TrySendError::Full(request) | TrySendError::Closed(request)) =
                        self.running.requests.try_send(request)
                    {
                        stopped::refuse(request);
                    }
                }
                Request::Stop { asker, reply } => match asker.standing.may_command(asker.uid, Some(self.owner)) {
                    Ok(()) => return Next::Stopping(Stopping::begin(daemon, self.owner, self.running, vec![reply])),
                    Err(refusal) => drop(reply.send(Err(refused(refusal)))),
                },
                Request::Start { asker, request, reply } => {
                    let allowed = asker.standing.may_command(asker.uid, Some(self.owner)).map_err(refused);
                    match allowed.and_then(|()| daemon.parameters(*request)) {
                        Ok(parameters) if parameters.same(&self.parameters) => drop(reply.send(Ok(Done::Before))),
                        Ok(parameters) => {
                            // The last start wins (11.4); the old tunnel is down before the new one begins.
                            daemon.enter(Lifecycle::Starting, Some(asker.uid), None);
                            self.running.stop.cancel();
                            self.running.ended_soon(daemon).await;
                            return Next::Starting(Starting::begin(daemon, asker.uid, parameters, vec![reply]));
                        }
                        Err(failure) => drop(reply.send(Err(failure))),
                    }
                }
            }
        }
    }
}
