//! No tunnel: a start begins one.

use codervpn_proto::ext::FailureCode;

use super::starting::Starting;
use super::{Daemon, Done, Next, Request, refused};
use crate::deployment;
use crate::failure::Failure;

pub(super) struct Stopped;

impl Stopped {
    pub(super) async fn run(self, daemon: &mut Daemon) -> Next {
        loop {
            let request = match daemon.take_waiting() {
                Some(request) => request,
                None => tokio::select! {
                    () = daemon.shutdown.cancelled() => return Next::Exit,
                    request = daemon.requests.recv() => match request {
                        Some(request) => request,
                        // Nobody can ask any more.
                        None => return Next::Exit,
                    },
                },
            };
            match request {
                Request::Start { asker, request, reply } => {
                    let allowed = asker.standing.may_command(asker.uid, None).map_err(refused);
                    match allowed.and_then(|()| daemon.parameters(*request)) {
                        Ok(parameters) => {
                            return Next::Starting(Starting::begin(daemon, asker.uid, parameters, vec![reply]));
                        }
                        Err(failure) => {
                            let _ = reply.send(Err(failure));
                        }
                    }
                }
                Request::Stop { asker, reply } => {
                    let outcome = asker.standing.may_command(asker.uid, None).map_err(refused);
                    let _ = reply.send(outcome.map(|()| Done::Before));
                }
                Request::Deployment(request) => refuse(request),
            }
        }
    }
}

/// There is nothing to ask.
pub(super) fn refuse(request: deployment::Request) {
    match request {
        deployment::Request::Ping { reply, .. } => {
            let failure =
                Failure::new(FailureCode::NotStarted, "the VPN is not running").remedy("run `codervpn start`");
            let _ = reply.send(Err(failure));
        }
        // Dropping the reply says that there is nothing to diagnose.
        deployment::Request::Diagnostics { .. } | deployment::Request::Reloaded => {}
    }
}
