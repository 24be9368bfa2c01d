//! Pings of agents that clients asked for: which agent is meant, who waits, and what the answer says.
//!
//! Each ping is two questions at once: an echo request through the tunnel, whose round trip is what programs see, and a
//! path message, which the agent's end of the tunnel answers even where its network stack does not. The echo's answer
//! is the answer; the other stands in for it when the echo's time is over.

use std::collections::HashMap;
use std::time::Duration;

use codervpn_engine::{self as engine, Path, Ping, PingError};
use codervpn_proto::ext::FailureCode;
use codervpn_wire::derp_map::DerpMap;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::names::Names;
use super::view::region_name;
use crate::failure::Failure;
use crate::workspaces::Workspaces;

/// Clients that may wait for one agent's pong.
const WAITING: usize = 64;

/// An agent as a client names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PingTarget {
    Id(Uuid),
    /// With or without suffix and final dot.
    Name(String),
}

/// What came back.
#[derive(Debug, Clone, PartialEq)]
pub struct PingAnswer {
    pub agent: Uuid,
    /// Without the final dot.
    pub name: String,
    pub latency: Duration,
    /// The echo was answered, not only the path message.
    pub echo: bool,
    /// Round trip of the path message.
    pub path_latency: Option<Duration>,
    /// A UDP address, for a direct path.
    pub endpoint: Option<String>,
    /// Display name of the relay, for a relayed one.
    pub relay: Option<String>,
}

type Reply = oneshot::Sender<Result<PingAnswer, Failure>>;

#[derive(Default)]
pub(super) struct Pings {
    waiting: HashMap<Uuid, Vec<Waiting>>,
    last_token: u64,
}

struct Waiting {
    token: u64,
    name: String,
    reply: Reply,
    echo: Option<Result<Duration, PingError>>,
    path: Option<Path>,
    pong: Option<Result<Ping, PingError>>,
}

impl Pings {
    /// Notes who asks, and returns what the engine is to be told.
    pub(super) fn ask(
        &mut self,
        target: &PingTarget,
        reply: Reply,
        workspaces: &Workspaces,
        names: &Names,
    ) -> Vec<engine::Command> {
        let Some(id) = find(target, workspaces, names) else {
            let _ = reply.send(Err(unknown(target)));
            return Vec::new();
        };
        let waiting = self.waiting.entry(id).or_default();
        waiting.retain(|waiting| !waiting.reply.is_closed());
        if waiting.len() == WAITING {
            let _ = reply.send(Err(Failure::new(FailureCode::Busy, "too many pings of this agent are under way")));
            return Vec::new();
        }
        let name = names.of(id).first().map(|name| name.trim_end_matches('.').to_owned()).unwrap_or_default();
        self.last_token += 1;
        let token = self.last_token;
        waiting.push(Waiting { token, name, reply, echo: None, path: None, pong: None });
        vec![engine::Command::Ping(id), engine::Command::Echo { id, token }]
    }

    /// The path message's answer, for everybody who waits for one of this agent.
    pub(super) fn pong(&mut self, id: Uuid, result: Result<Ping, PingError>, map: &DerpMap) {
        for waiting in self.waiting.get_mut(&id).into_iter().flatten() {
            waiting.pong.get_or_insert(result);
        }
        self.answer(id, map);
    }

    pub(super) fn echo(
        &mut self,
        id: Uuid,
        token: u64,
        result: Result<Duration, PingError>,
        path: Option<Path>,
        map: &DerpMap,
    ) {
        let waiting = self.waiting.get_mut(&id).into_iter().flatten();
        for waiting in waiting.filter(|waiting| waiting.token == token) {
            (waiting.echo, waiting.path) = (Some(result), path);
        }
        self.answer(id, map);
    }

    fn answer(&mut self, id: Uuid, map: &DerpMap) {
        let Some(waiting) = self.waiting.get_mut(&id) else { return };
        for index in (0..waiting.len()).rev() {
            if waiting.get(index).is_some_and(Waiting::is_done) {
                waiting.remove(index).finish(id, map);
            }
        }
        if waiting.is_empty() {
            self.waiting.remove(&id);
        }
    }
}

impl Waiting {
    fn is_done(&self) -> bool {
        matches!(self.echo, Some(Ok(_))) || (self.echo.is_some() && self.pong.is_some())
    }

    fn finish(self, id: Uuid, map: &DerpMap) {
        let pong = self.pong.and_then(Result::ok);
        let answer = match (self.echo, pong) {
            (Some(Ok(latency)), _) => Ok((latency, true, self.path.or(pong.map(|pong| pong.path)))),
            (_, Some(pong)) => Ok((pong.latency, false, Some(pong.path))),
            (Some(Err(PingError::UnknownPeer)), _) => Err(unknown(&PingTarget::Id(id))),
            (Some(Err(error)), _) => Err(Failure::new(FailureCode::AgentUnreachable, error.to_string())),
            (None, _) => return,
        };
        let answer = answer.map(|(latency, echo, path)| {
            let (endpoint, relay) = match path {
                Some(Path::Direct(address)) => (Some(address.to_string()), None),
                Some(Path::Relay(region)) => (None, Some(region_name(map, region))),
                None => (None, None),
            };
            let path_latency = pong.map(|pong| pong.latency);
            PingAnswer { agent: id, name: self.name, latency, echo, path_latency, endpoint, relay }
        });
        let _ = self.reply.send(answer);
    }
}

fn find(target: &PingTarget, workspaces: &Workspaces, names: &Names) -> Option<Uuid> {
    match target {
        PingTarget::Id(id) => workspaces.agent(*id).map(|agent| agent.id),
        PingTarget::Name(name) => {
            let asked = name.trim_end_matches('.').to_ascii_lowercase();
            let full = format!("{asked}.{}.", names.suffix());
            let me = format!("{asked}.me.{}.", names.suffix());
            let asked = format!("{asked}.");
            let is_meant = |name: &String| *name == asked || *name == full || *name == me;
            workspaces.agents().map(|agent| agent.id).find(|id| names.of(*id).iter().any(is_meant))
        }
    }
}

fn unknown(target: &PingTarget) -> Failure {
    let what = match target {
        PingTarget::Id(id) => id.to_string(),
        PingTarget::Name(name) => format!("{name:?}"),
    };
    Failure::new(FailureCode::UnknownAgent, format!("there is no running agent {what}"))
        .remedy("`codervpn workspaces` lists them")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use codervpn_underlay::relays::RegionId;

    use super::*;

    const ID: Uuid = Uuid::from_u128(7);

    fn asked(pings: &mut Pings) -> oneshot::Receiver<Result<PingAnswer, Failure>> {
        let (reply, answer) = oneshot::channel();
        pings.last_token += 1;
        let token = pings.last_token;
        let waiting = Waiting { token, name: "dev.coder".into(), reply, echo: None, path: None, pong: None };
        pings.waiting.entry(ID).or_default().push(waiting);
        answer
    }

    fn pong(path: Path) -> Result<Ping, PingError> {
        Ok(Ping { latency: Duration::from_millis(3), path, at: Instant::now() })
    }

    #[test]
    fn the_echo_answers_and_the_pong_stands_in_for_it() {
        let map = DerpMap::default();
        let direct = Path::Direct("192.0.2.1:41641".parse().unwrap());
        let relay = Path::Relay(RegionId::new(1).unwrap());
        let mut pings = Pings::default();
        let (mut first, mut second) = (asked(&mut pings), asked(&mut pings));
        pings.pong(ID, pong(relay), &map);
        assert!(first.try_recv().is_err(), "the echo may still come");
        pings.echo(ID, 2, Ok(Duration::from_millis(5)), Some(direct), &map);
        let answer = second.try_recv().unwrap().unwrap();
        assert_eq!((answer.latency, answer.echo), (Duration::from_millis(5), true));
        assert_eq!(answer.endpoint.as_deref(), Some("192.0.2.1:41641"));
        assert_eq!(answer.path_latency, Some(Duration::from_millis(3)));
        pings.echo(ID, 1, Err(PingError::Timeout), None, &map);
        let answer = first.try_recv().unwrap().unwrap();
        assert_eq!((answer.latency, answer.echo), (Duration::from_millis(3), false));
        assert_eq!(answer.relay.as_deref(), Some("Unnamed 1"));
        assert!(pings.waiting.is_empty());
    }

    #[test]
    fn when_nothing_came_back_the_echo_says_why() {
        let map = DerpMap::default();
        let mut pings = Pings::default();
        let mut answer = asked(&mut pings);
        pings.pong(ID, Err(PingError::Busy), &map);
        pings.echo(ID, 1, Err(PingError::Timeout), None, &map);
        let failure = answer.try_recv().unwrap().unwrap_err();
        assert_eq!(
            (failure.code, failure.to_string().as_str()),
            (FailureCode::AgentUnreachable, "no answer within 5 s")
        );
    }
}
