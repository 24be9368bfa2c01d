//! Pings of agents that clients asked for: which agent is meant, who waits, and what the answer says.

use std::collections::HashMap;
use std::time::Duration;

use codervpn_engine::{Path, Ping, PingError};
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

/// A pong.
#[derive(Debug, Clone, PartialEq)]
pub struct PingAnswer {
    pub agent: Uuid,
    /// Without the final dot.
    pub name: String,
    pub latency: Duration,
    /// A UDP address, for a direct path.
    pub endpoint: Option<String>,
    /// Display name of the relay, for a relayed one.
    pub relay: Option<String>,
}

type Reply = oneshot::Sender<Result<PingAnswer, Failure>>;

#[derive(Default)]
pub(super) struct Pings {
    waiting: HashMap<Uuid, Vec<(String, Reply)>>,
}

impl Pings {
    /// Notes who asks. `Some`: this agent is to be pinged now.
    pub(super) fn ask(
        &mut self,
        target: &PingTarget,
        reply: Reply,
        workspaces: &Workspaces,
        names: &Names,
    ) -> Option<Uuid> {
        let Some(id) = find(target, workspaces, names) else {
            let _ = reply.send(Err(unknown(target)));
            return None;
        };
        let waiting = self.waiting.entry(id).or_default();
        waiting.retain(|(_, reply)| !reply.is_closed());
        if waiting.len() == WAITING {
            let _ = reply.send(Err(Failure::new(FailureCode::Busy, "too many pings of this agent are under way")));
            return None;
        }
        let name = names.of(id).first().map(|name| name.trim_end_matches('.').to_owned()).unwrap_or_default();
        waiting.push((name, reply));
        Some(id)
    }

    pub(super) fn done(&mut self, id: Uuid, result: Result<Ping, PingError>, map: &DerpMap) {
        for (name, reply) in self.waiting.remove(&id).unwrap_or_default() {
            let answer = match &result {
                Ok(ping) => {
                    let (endpoint, relay) = match ping.path {
                        Path::Direct(address) => (Some(address.to_string()), None),
                        Path::Relay(region) => (None, Some(region_name(map, region))),
                    };
                    Ok(PingAnswer { agent: id, name, latency: ping.latency, endpoint, relay })
                }
                Err(PingError::UnknownPeer) => Err(unknown(&PingTarget::Id(id))),
                Err(error) => Err(Failure::new(FailureCode::AgentUnreachable, error.to_string())),
            };
            let _ = reply.send(answer);
        }
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
