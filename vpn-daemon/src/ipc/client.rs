//! One client: what it asks is answered, what changes is broadcast to it, within its rights.

use std::time::Duration;

use codervpn_proto::ext::{self, FailureCode, client_ext, service_ext};
use codervpn_proto::rpc::Service;
use codervpn_proto::speaker::{self, Broadcast, Incoming, Limits, Request, Slot, Speaker};
use codervpn_proto::vpn::{self, client_message, service_message};
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use interprocess::local_socket::tokio::Stream;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::check;
use crate::config::SharedConfig;
use crate::daemon::{Asker, DaemonHandle, Done, Outcome, Request as Ask};
use crate::deployment::{self, PingAnswer, PingTarget};
use crate::failure::Failure;
use crate::ipc::access::Standing;
use crate::status::{Lifecycle, duration};

/// A status is repeated so long after a change of the lifecycle, for clients that apply messages out of order.
const REPEAT: Duration = Duration::from_millis(250);
/// Longest wait for a pong; the engine gives up by itself.
const PING_LIMIT: Duration = Duration::from_secs(6);
/// How much longer the engine may take to say that nothing came.
const PING_GRACE: Duration = Duration::from_millis(500);
/// An ICMPv6 message of the engine: header and 56 bytes, as `ping` sends.
const ECHO_BYTES: u32 = 64;

type Reply = service_message::Msg;
type Answer = (Request<Service>, Reply);

pub(super) async fn serve(
    stream: Stream,
    asker: Asker,
    config: SharedConfig,
    daemon: DaemonHandle,
    shutdown: CancellationToken,
) {
    let (reader, writer) = tokio::io::split(stream);
    let greeted = tokio::select! {
        greeted = speaker::connect::<Service, _, _>(reader, writer, Limits::service()) => greeted,
        () = shutdown.cancelled() => return,
    };
    let (speaker, mut inbox) = match greeted {
        Ok(pair) => pair,
        Err(error) => {
            tracing::warn!(uid = asker.uid, %error, "handshake with a client failed");
            return;
        }
    };
    let mut client = Client { speaker, asker, config, daemon, lifecycle: None, repeat: None };
    // broadcasts begin only now, after the handshake.
    client.daemon.status.mark_unchanged();
    client.daemon.progress.mark_unchanged();
    let mut answers: FuturesUnordered<BoxFuture<'static, Answer>> = FuturesUnordered::new();
    loop {
        let repeat = client.repeat;
        tokio::select! {
            // Broadcasts before replies: progress must not follow the reply to a start.
            biased;
            Ok(()) = client.daemon.progress.changed() => client.publish_progress(),
            Ok(()) = client.daemon.status.changed() => client.publish_status(),
            () = sleep_until(repeat.unwrap_or_else(Instant::now)), if repeat.is_some() => {
                client.repeat = None;
                client.publish_status();
            }
            Some((request, reply)) = answers.next(), if !answers.is_empty() => {
                // The client may be gone, and one that does not read is closed by the speaker.
                let _ = request.reply(reply).await;
            }
            incoming = inbox.next() => match incoming {
                Some(Incoming::Request(request)) => answers.push(client.answer(request)),
                // Without an id nothing can be answered; clients never send that.
                Some(Incoming::OneWay(_)) => {}
                None => break,
            },
            () = shutdown.cancelled() => {
                client.publish_status();
                client.speaker.close();
                break;
            }
        }
    }
    let reason = client.speaker.closed().await;
    tracing::debug!(uid = asker.uid, %reason, "client gone");
}

struct Client {
    speaker: Speaker<Service>,
    asker: Asker,
    config: SharedConfig,
    daemon: DaemonHandle,
    lifecycle: Option<Lifecycle>,
    repeat: Option<Instant>,
}

impl Client {
    fn publish_status(&mut self) {
        let status = self.status();
        let lifecycle = self.daemon.status.borrow().lifecycle;
        if self.lifecycle.replace(lifecycle) != Some(lifecycle) {
            self.repeat = Some(Instant::now() + REPEAT);
        }
        self.publish(Slot::Status, Reply::Status(status));
    }

    fn publish_progress(&mut self) {
        let stage = self.daemon.progress.borrow_and_update().stage;
        if self.daemon.status.borrow().lifecycle == Lifecycle::Starting {
            let progress = vpn::StartProgress { stage: stage.into(), download_progress: None };
            self.publish(Slot::Progress, Reply::StartProgress(progress));
        }
    }

    fn publish(&self, slot: Slot, message: Reply) {
        match Broadcast::new(message) {
            // A closed connection ends the loop by itself.
            Ok(message) => drop(self.speaker.publish(slot, &message)),
            Err(error) => tracing::error!(%error, "a broadcast cannot be encoded"),
        }
    }

    fn status(&mut self) -> vpn::Status {
        let status = self.daemon.status.borrow_and_update();
        let Asker { uid, standing } = self.asker;
        status.to_proto(standing.sees_peers(uid, status.owner), standing.sees_peers(uid, status.failed))
    }

    /// What is answered at once is answered by a future that is ready.
    fn answer(&mut self, mut request: Request<Service>) -> BoxFuture<'static, Answer> {
        let asker = self.asker;
        let daemon = self.daemon.clone();
        let Some(body) = request.take_body() else { return Box::pin(std::future::pending()) };
        match body {
            client_message::Msg::Status(_) => {
                let status = self.status();
                ready(request, Reply::Status(status))
            }
            client_message::Msg::Start(start) => Box::pin(async move {
                let outcome = ask(&daemon, |reply| Ask::Start { asker, request: Box::new(start), reply }).await;
                (request, Reply::Start(start_response(outcome)))
            }),
            client_message::Msg::Stop(_) => Box::pin(async move {
                let outcome = ask(&daemon, |reply| Ask::Stop { asker, reply }).await;
                (request, Reply::Stop(stop_response(outcome)))
            }),
            client_message::Msg::Ext(ext) => self.answer_extension(request, ext),
        }
    }

    fn answer_extension(&self, request: Request<Service>, ext: ext::ClientExt) -> BoxFuture<'static, Answer> {
        let Some(asked) = ext.request else {
            let failure = Failure::new(FailureCode::Unsupported, "this daemon does not know that request")
                .remedy("use a codervpn and a codervpnd of the same version");
            return ready(request, extension(Err(failure)));
        };
        if self.asker.standing == Standing::Stranger {
            let failure = Failure::new(FailureCode::PermissionDenied, "you may only see whether the VPN runs");
            return ready(request, extension(Err(failure)));
        }
        if let client_ext::Request::Check(asked) = asked {
            let config = self.config.load_full();
            return Box::pin(async move {
                let reply = check::check(&config, asked).await;
                (request, extension(reply.map(service_ext::Reply::Check)))
            });
        }
        let status = self.daemon.status.borrow();
        if !self.asker.standing.sees_peers(self.asker.uid, status.owner) {
            let failure = Failure::new(FailureCode::StartedByOtherUser, "the VPN was started by another user");
            return ready(request, extension(Err(failure)));
        }
        match asked {
            client_ext::Request::Workspaces(asked) => {
                let tree = status.tunnel.to_tree(&asked.name);
                ready(request, extension(Ok(service_ext::Reply::Workspaces(tree))))
            }
            client_ext::Request::Ping(asked) => {
                let daemon = self.daemon.clone();
                Box::pin(async move {
                    let reply = ping(&daemon, asked).await;
                    (request, extension(reply.map(service_ext::Reply::Ping)))
                })
            }
            client_ext::Request::Diagnostics(_) => {
                let daemon = self.daemon.clone();
                Box::pin(async move {
                    let reply = diagnose(&daemon).await;
                    (request, extension(reply.map(service_ext::Reply::Diagnostics)))
                })
            }
            client_ext::Request::Check(_) => {
                ready(request, extension(Err(Failure::new(FailureCode::Internal, "answered before"))))
            }
        }
    }
}

fn ready(request: Request<Service>, reply: Reply) -> BoxFuture<'static, Answer> {
    Box::pin(std::future::ready((request, reply)))
}

async fn ask(daemon: &DaemonHandle, request: impl FnOnce(oneshot::Sender<Outcome>) -> Ask) -> Outcome {
    let (reply, outcome) = oneshot::channel();
    daemon.send(request(reply)).await?;
    outcome.await.unwrap_or_else(|_| Err(Failure::new(FailureCode::Cancelled, "the daemon is ending")))
}

fn start_response(outcome: Outcome) -> vpn::StartResponse {
    match outcome {
        Ok(done) => vpn::StartResponse {
            success: true,
            error_message: String::new(),
            ext: Some(ext::StartResponseExt { failure: None, already_started: done == Done::Before }),
        },
        Err(failure) => vpn::StartResponse {
            success: false,
            error_message: failure.to_string(),
            ext: Some(ext::StartResponseExt { failure: Some(failure.to_proto()), already_started: false }),
        },
    }
}

fn stop_response(outcome: Outcome) -> vpn::StopResponse {
    match outcome {
        Ok(done) => vpn::StopResponse {
            success: true,
            error_message: String::new(),
            ext: Some(ext::StopResponseExt { failure: None, already_stopped: done == Done::Before }),
        },
        Err(failure) => vpn::StopResponse {
            success: false,
            error_message: failure.to_string(),
            ext: Some(ext::StopResponseExt { failure: Some(failure.to_proto()), already_stopped: false }),
        },
    }
}

fn extension(reply: Result<service_ext::Reply, Failure>) -> Reply {
    let reply = reply.unwrap_or_else(|failure| service_ext::Reply::Failed(failure.to_proto()));
    Reply::Ext(ext::ServiceExt { reply: Some(reply) })
}

async fn ping(daemon: &DaemonHandle, asked: ext::PingRequest) -> Result<ext::PingReply, Failure> {
    use ext::ping_request::Target;
    let target = match asked.target {
        Some(Target::AgentId(id)) => PingTarget::Id(
            Uuid::from_slice(&id).map_err(|_| Failure::new(FailureCode::BadRequest, "an agent's id has 16 bytes"))?,
        ),
        Some(Target::Name(name)) => PingTarget::Name(name),
        None => return Err(Failure::new(FailureCode::BadRequest, "no agent was named")),
    };
    let asked_limit = asked.timeout.and_then(|limit| Duration::try_from(limit).ok()).filter(|limit| !limit.is_zero());
    let limit = asked_limit.unwrap_or(PING_LIMIT).min(PING_LIMIT);
    let (reply, answer) = oneshot::channel();
    daemon.send(Ask::Deployment(deployment::Request::Ping { target, reply })).await?;
    let unreachable =
        || Failure::new(FailureCode::AgentUnreachable, format!("no answer within {} s", limit.as_secs_f32()));
    let answer = tokio::time::timeout(limit + PING_GRACE, answer).await.map_err(|_| unreachable())?;
    let PingAnswer { agent, name, latency, echo, path_latency, endpoint, relay } =
        answer.map_err(|_| Failure::new(FailureCode::NotStarted, "the VPN is not running"))??;
    let path = match (&endpoint, &relay) {
        (Some(_), _) => ext::PathKind::Direct,
        (None, Some(_)) => ext::PathKind::Relay,
        (None, None) => ext::PathKind::None,
    };
    Ok(ext::PingReply {
        agent_id: agent.as_bytes().to_vec(),
        name,
        latency: Some(duration(latency)),
        path: path.into(),
        endpoint: endpoint.unwrap_or_default(),
        relay: relay.unwrap_or_default(),
        echo,
        bytes: if echo { ECHO_BYTES } else { 0 },
        path_latency: path_latency.map(duration),
    })
}

async fn diagnose(daemon: &DaemonHandle) -> Result<ext::DiagnosticsReply, Failure> {
    let (reply, answer) = oneshot::channel();
    daemon.send(Ask::Deployment(deployment::Request::Diagnostics { reply })).await?;
    answer
        .await
        .map_err(|_| Failure::new(FailureCode::NotStarted, "the VPN is not running").remedy("run `codervpn start`"))
}
