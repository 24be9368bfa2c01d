//! `ping`: asks an agent through the tunnel, one ping a second, by whatever path is in use.

use std::path::Path;
use std::time::Duration;

use codervpn_proto::ext::client_ext::Request;
use codervpn_proto::ext::ping_request::Target;
use codervpn_proto::ext::service_ext::Reply;
use codervpn_proto::ext::{FailureCode, PingReply, PingRequest};
use tokio::time::{MissedTickBehavior, interval};

use crate::args;
use crate::connect::{Service, not_ours};
use crate::problem::{Exit, Problem};
use crate::report::milliseconds;

const EVERY: Duration = Duration::from_secs(1);
/// How long the service waits for an answer, and how much longer we wait for the service.
const LIMIT: Duration = Duration::from_secs(5);
const GRACE: Duration = Duration::from_secs(5);

pub(crate) struct Pinged {
    /// Counts from 1.
    pub(crate) seq: u32,
    pub(crate) result: Result<Answer, Problem>,
}

pub(crate) struct Answer {
    pub(crate) name: String,
    pub(crate) latency_ms: Option<f64>,
    pub(crate) path: Option<&'static str>,
    pub(crate) endpoint: Option<String>,
    pub(crate) relay: Option<String>,
}

/// Success when at least one was answered.
pub(crate) async fn run(
    socket: &Path,
    args: &args::Ping,
    mut show: impl FnMut(&Pinged) -> Result<(), Problem>,
) -> Result<Exit, Problem> {
    let service = Service::connect(socket).await?;
    if service.is_anothers() {
        return Err(Problem::started_by_another());
    }
    if service.ext().is_none() {
        return Err(not_ours("ping"));
    }
    let mut answered = false;
    let mut tick = interval(EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for seq in 1..=args.count {
        tick.tick().await;
        let result = ping(&service, &args.agent).await;
        // Only silence is worth another try; a name that does not exist stays so.
        if let Err(problem) = &result
            && problem.code != FailureCode::AgentUnreachable
        {
            return Err(problem.clone());
        }
        answered |= result.is_ok();
        show(&Pinged { seq, result })?;
    }
    Ok(if answered { Exit::Success } else { Exit::Failed })
}

async fn ping(service: &Service, agent: &str) -> Result<Answer, Problem> {
    let request = PingRequest {
        target: Some(Target::Name(agent.to_owned())),
        timeout: prost_types::Duration::try_from(LIMIT).ok(),
    };
    match service.requests().ask(Request::Ping(request), LIMIT + GRACE).await? {
        Reply::Ping(reply) => Ok(Answer::of(reply)),
        _ => Err(not_ours("ping")),
    }
}

impl Answer {
    fn of(reply: PingReply) -> Self {
        let path = reply.path().label();
        let known = |text: String| (!text.is_empty()).then_some(text);
        Self {
            name: reply.name,
            latency_ms: reply.latency.and_then(milliseconds),
            path,
            endpoint: known(reply.endpoint),
            relay: known(reply.relay),
        }
    }
}
