//! The life of the daemon: one task that owns at most one deployment and decides what a request does in which state.
//!
//! Each state is a file with a struct; running it waits for what can happen in it and gives the next one. A start belongs
//! to the daemon and not to the connection that asked, a stop interrupts a start, and one tunnel is down
//! completely before the next begins.

mod started;
mod starting;
mod stopped;
mod stopping;

use std::time::{Duration, SystemTime};

use codervpn_proto::ext::FailureCode;
use codervpn_proto::vpn::{StartProgressStage, StartRequest};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::SharedConfig;
use crate::deployment::{self, Context};
use crate::failure::Failure;
use crate::ipc::access::{Refusal, Standing};
use crate::parameters::{Device, Parameters};
use crate::status::{Lifecycle, Status, TunnelStatus};

use stopped::Stopped;

/// Requests of clients that may wait. Each client waits for its own, so more than a few are never there.
const REQUESTS: usize = 64;
/// How long a start waits for the operation before it (codervpn-protocol 11.2).
const OPERATION_WAIT: Duration = Duration::from_millis(500);

/// Who asks.
#[derive(Debug, Clone, Copy)]
pub struct Asker {
    pub uid: u32,
    pub standing: Standing,
}

/// What came of a start or a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    Now,
    /// It was so already.
    Before,
}

pub type Outcome = Result<Done, Failure>;

pub enum Request {
    Start {
        asker: Asker,
        request: Box<StartRequest>,
        reply: oneshot::Sender<Outcome>,
    },
    Stop {
        asker: Asker,
        reply: oneshot::Sender<Outcome>,
    },
    /// For the running deployment, if there is one; the rights have been checked.
    Deployment(deployment::Request),
}

/// Progress of a start, numbered so that a repeated stage is news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub number: u64,
    pub stage: StartProgressStage,
}

/// The clients' way to the daemon. Clones share it.
#[derive(Clone)]
pub struct DaemonHandle {
    requests: mpsc::Sender<Request>,
    pub status: watch::Receiver<Status>,
    pub progress: watch::Receiver<Progress>,
}

impl DaemonHandle {
    /// `Err` when the daemon is ending.
    pub async fn send(&self, request: Request) -> Result<(), Failure> {
        self.requests.send(request).await.map_err(|_| Failure::new(FailureCode::Cancelled, "the daemon is ending"))
    }
}

/// The task's own data, shared by all states.
struct Daemon {
    context: Context,
    device: Device,
    requests: mpsc::Receiver<Request>,
    shutdown: CancellationToken,
    /// A start that waits for the operation under way to end.
    waiting: Option<Waiting>,
}

struct Waiting {
    asker: Asker,
    request: Box<StartRequest>,
    reply: oneshot::Sender<Outcome>,
    until: Instant,
}

/// What follows a state.
enum Next {
    Stopped(Stopped),
    Starting(starting::Starting),
    Started(started::Started),
    Stopping(stopping::Stopping),
    Exit,
}

/// Starts the daemon's task. It ends after `shutdown`, when everything has been taken down.
pub fn spawn(
    config: SharedConfig,
    paths: codervpn_host::Paths,
    device: Device,
    shutdown: CancellationToken,
) -> (DaemonHandle, tokio::task::JoinHandle<()>) {
    let (requests_tx, requests) = mpsc::channel(REQUESTS);
    let (status_tx, status) = watch::channel(Status::stopped(SystemTime::now()));
    let (progress_tx, progress) = watch::channel(Progress { number: 0, stage: StartProgressStage::Initializing });
    let context = Context { config, paths, status: status_tx, progress: progress_tx };
    let daemon = Daemon { context, device, requests, shutdown, waiting: None };
    let task = tokio::spawn(daemon.run());
    (DaemonHandle { requests: requests_tx, status, progress }, task)
}

impl Daemon {
    async fn run(mut self) {
        let mut next = Next::Stopped(Stopped);
        loop {
            next = match next {
                Next::Stopped(state) => state.run(&mut self).await,
                Next::Starting(state) => state.run(&mut self).await,
                Next::Started(state) => state.run(&mut self).await,
                Next::Stopping(state) => state.run(&mut self).await,
                Next::Exit => return,
            };
        }
    }

    /// Broadcasts a change of the lifecycle. What is known of the tunnel begins anew with a start and ends with it.
    fn enter(&self, lifecycle: Lifecycle, owner: Option<u32>, failure: Option<Failure>) {
        tracing::info!(?lifecycle, "lifecycle");
        self.context.status.send_modify(|status| {
            status.lifecycle = lifecycle;
            status.since = SystemTime::now();
            status.failed = failure.as_ref().and(status.owner);
            status.owner = owner;
            status.last_failure = failure;
            match lifecycle {
                Lifecycle::Starting | Lifecycle::Stopped => status.tunnel = TunnelStatus::default(),
                // Names are gone from here on, so nobody is to be shown them.
                Lifecycle::Stopping => status.tunnel.workspaces.clear(),
                Lifecycle::Started => {}
            }
        });
    }

    fn parameters(&self, request: StartRequest) -> Result<Parameters, Failure> {
        Parameters::from_request(request, &self.device)
    }

    /// Keeps one start until the operation under way is over; a second one is told at once.
    fn wait(&mut self, asker: Asker, request: Box<StartRequest>, reply: oneshot::Sender<Outcome>) {
        if self.waiting.is_some() {
            let _ = reply.send(Err(busy()));
            return;
        }
        self.waiting = Some(Waiting { asker, request, reply, until: Instant::now() + OPERATION_WAIT });
    }

    /// The start that waited, as an ordinary request.
    fn take_waiting(&mut self) -> Option<Request> {
        let Waiting { asker, request, reply, .. } = self.waiting.take()?;
        Some(Request::Start { asker, request, reply })
    }

    fn waiting_until(&self) -> Option<Instant> {
        self.waiting.as_ref().map(|waiting| waiting.until)
    }

    /// The start that waits has waited long enough.
    fn give_up_waiting(&mut self) {
        if let Some(waiting) = self.waiting.take() {
            let _ = waiting.reply.send(Err(busy()));
        }
    }
}

async fn waited(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

fn busy() -> Failure {
    Failure::new(FailureCode::Busy, "another operation is in progress").remedy("try again in a moment")
}

/// A request that this user may not make, in words that tell nothing about the other user.
fn refused(refusal: Refusal) -> Failure {
    match refusal {
        Refusal::NotAdmitted => Failure::new(FailureCode::PermissionDenied, "you may not start or stop the VPN")
            .remedy("ask an administrator to add you to the group codervpn, or to run the daemon with --allow-user"),
        Refusal::StartedByAnother => {
            Failure::new(FailureCode::StartedByOtherUser, "the VPN was started by another user")
                .remedy("only that user or root can stop it or start another")
        }
    }
}

fn cancelled() -> Failure {
    Failure::new(FailureCode::Cancelled, "the start was cancelled")
}
