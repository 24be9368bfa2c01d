//! The tunnel is being taken down; the deployment's task does it, here its end is awaited.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::starting::{Running, answer};
use super::stopped::{self, Stopped};
use super::{Daemon, Done, Next, Outcome, Request, refused, waited};
use crate::status::Lifecycle;

/// Longer than the deployment's own limits together: only a hanging system call reaches it. Frontends give up after 5 s.
pub(super) const LIMIT: Duration = Duration::from_secs(4);

pub(super) struct Stopping {
    owner: u32,
    running: Running,
    replies: Vec<oneshot::Sender<Outcome>>,
}

impl Stopping {
    pub(super) fn begin(daemon: &Daemon, owner: u32, running: Running, replies: Vec<oneshot::Sender<Outcome>>) -> Self {
        daemon.enter(Lifecycle::Stopping, Some(owner), None);
        running.stop.cancel();
        Self { owner, running, replies }
    }

    pub(super) async fn run(mut self, daemon: &mut Daemon) -> Next {
        let limit = tokio::time::Instant::now() + LIMIT;
        loop {
            let until = daemon.waiting_until();
            tokio::select! {
                ended = timeout(limit - tokio::time::Instant::now(), self.running.ended()) => {
                    if ended.is_err() {
                        self.running.abandon(&daemon.context.paths);
                    }
                    break;
                }
                () = waited(until) => daemon.give_up_waiting(),
                Some(request) = daemon.requests.recv() => match request {
                    Request::Deployment(request) => stopped::refuse(request),
                    Request::Start { asker, request, reply } => daemon.wait(asker, request, reply),
                    Request::Stop { asker, reply } => {
                        match asker.standing.may_command(asker.uid, Some(self.owner)) {
                            Ok(()) => self.replies.push(reply),
                            Err(refusal) => drop(reply.send(Err(refused(refusal)))),
                        }
                    }
                },
            }
        }
        daemon.enter(Lifecycle::Stopped, None, None);
        answer(self.replies, &Ok(Done::Now));
        Next::Stopped(Stopped)
    }
}
