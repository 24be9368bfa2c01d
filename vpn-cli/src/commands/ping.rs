//! `ping`: asks an agent through the tunnel once a second, whatever became of the pings before, and sums up at the end.
//!
//! The service sends the echo request itself, so no privilege is needed, and says which way the answer came.

use std::path::Path;
use std::time::Duration;

use codervpn_proto::ext::client_ext::Request;
use codervpn_proto::ext::ping_request::Target;
use codervpn_proto::ext::service_ext::Reply;
use codervpn_proto::ext::{FailureCode, PingReply, PingRequest};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::args;
use crate::connect::{Requests, Service, not_ours};
use crate::interrupt::Interrupt;
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
    /// Of the echo, or of the path message when only that came back.
    pub(crate) latency_ms: Option<f64>,
    pub(crate) path: Option<&'static str>,
    pub(crate) endpoint: Option<String>,
    pub(crate) relay: Option<String>,
    /// The agent's network stack answered, not only its end of the tunnel.
    pub(crate) echo: bool,
    pub(crate) bytes: Option<u32>,
    pub(crate) path_latency_ms: Option<f64>,
}

/// All pings together.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Summary {
    /// As the agent calls itself, or as it was asked for when it never answered.
    pub(crate) name: String,
    /// Answered or given up; what was still under way at the end counts as neither sent nor lost.
    pub(crate) sent: u32,
    pub(crate) answered: u32,
    times: Vec<f64>,
}

/// Shows every ping as it ends, until `args.count` have or Ctrl-C comes. Success when at least one was answered.
pub(crate) async fn run(
    socket: &Path,
    args: &args::Ping,
    interrupt: &mut Interrupt,
    mut show: impl FnMut(&Pinged) -> Result<(), Problem>,
) -> Result<Summary, Problem> {
    let mut summary = Summary { name: args.agent.clone(), ..Summary::default() };
    let service = tokio::select! {
        service = Service::connect(socket) => service?,
        () = interrupt.next() => return Err(Problem::interrupted()),
    };
    if service.is_anothers() {
        return Err(Problem::started_by_another());
    }
    if service.ext().is_none() {
        return Err(not_ours("ping"));
    }
    let mut tick = interval(EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // At most as many as fit into the time that one waits.
    let mut asked = JoinSet::new();
    let mut seq = 0;
    loop {
        let more = args.count.is_none_or(|count| seq < count);
        if !more && asked.is_empty() {
            break;
        }
        tokio::select! {
            () = interrupt.next() => break,
            _ = tick.tick(), if more => {
                seq += 1;
                asked.spawn(ping(service.requests(), args.agent.clone(), seq));
            }
            Some(pinged) = asked.join_next() => {
                let Ok(pinged) = pinged else { continue };
                // Only silence is worth another try; a name that does not exist stays so.
                if let Err(problem) = &pinged.result
                    && problem.code != FailureCode::AgentUnreachable
                {
                    return Err(problem.clone());
                }
                summary.count(&pinged);
                show(&pinged)?;
            }
        }
    }
    if summary.sent == 0 { Err(Problem::interrupted()) } else { Ok(summary) }
}

async fn ping(requests: Requests, agent: String, seq: u32) -> Pinged {
    let request =
        PingRequest { target: Some(Target::Name(agent)), timeout: prost_types::Duration::try_from(LIMIT).ok() };
    let result = match requests.ask(Request::Ping(request), LIMIT + GRACE).await {
        Ok(Reply::Ping(reply)) => Ok(Answer::of(reply)),
        Ok(_) => Err(not_ours("ping")),
        Err(problem) => Err(problem),
    };
    Pinged { seq, result }
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
            echo: reply.echo,
            bytes: (reply.bytes != 0).then_some(reply.bytes),
            path_latency_ms: reply.path_latency.and_then(milliseconds),
        }
    }
}

impl Summary {
    fn count(&mut self, pinged: &Pinged) {
        self.sent += 1;
        if let Ok(answer) = &pinged.result {
            self.answered += 1;
            self.times.extend(answer.latency_ms);
            self.name.clone_from(&answer.name);
        }
    }

    pub(crate) fn exit(&self) -> Exit {
        if self.answered > 0 { Exit::Success } else { Exit::Failed }
    }

    pub(crate) fn loss_percent(&self) -> f64 {
        let lost = f64::from(self.sent - self.answered) * 100.0 / f64::from(self.sent.max(1));
        (lost * 10.0).round() / 10.0
    }

    /// Smallest, average and largest time.
    pub(crate) fn times(&self) -> Option<[f64; 3]> {
        let least = self.times.iter().copied().min_by(f64::total_cmp)?;
        let most = self.times.iter().copied().max_by(f64::total_cmp)?;
        let average = self.times.iter().sum::<f64>() / self.times.len() as f64;
        Some([least, (average * 1e3).round() / 1e3, most])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_and_times_are_of_what_ended() {
        let answer = |ms| Answer {
            name: "main.dev.me.coder".into(),
            latency_ms: Some(ms),
            path: None,
            endpoint: None,
            relay: None,
            echo: true,
            bytes: Some(64),
            path_latency_ms: None,
        };
        let mut summary = Summary::default();
        assert_eq!((summary.loss_percent(), summary.times(), summary.exit()), (0.0, None, Exit::Failed));
        for result in [Ok(answer(3.0)), Err(Problem::failed("silence", "")), Ok(answer(1.0))] {
            summary.count(&Pinged { seq: 1, result });
        }
        assert_eq!((summary.sent, summary.answered, summary.loss_percent()), (3, 2, 33.3));
        assert_eq!((summary.times(), summary.exit()), (Some([1.0, 2.0, 3.0]), Exit::Success));
    }
}
