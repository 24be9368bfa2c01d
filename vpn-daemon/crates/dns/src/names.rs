//! Decides which names and which address an agent has (`codervpn-protocol.md` 7, `dns-and-os.md` 1.1 and 1.5).
//!
//! Pure functions of what the server said. The same [`Assignment`] feeds the zone and the `fqdn` lists that clients
//! see, so that a name a person reads in a status is a name that resolves.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::Ipv6Addr;

use codervpn_wire::node::{DNS_ADDRESS, coder_address};
use uuid::Uuid;

use crate::suffix::{Suffix, is_label, shown};

/// `tailnet.IsCoderConnectEnabledFmtString`, without the suffix.
const ENABLED_LABELS: &str = "is.coder--connect--enabled--right--now";

/// Without the dot at the end.
const MAX_NAME_BYTES: usize = 253;

/// Everything names follow from. Workspaces without agents may be listed; they have no names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneInput {
    pub suffix: Suffix,
    /// `username` of the token's user. The update stream is per owner, so every workspace here is theirs.
    pub owner: String,
    pub workspaces: Vec<Workspace>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    pub id: Uuid,
    pub name: String,
    pub agents: Vec<Agent>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agent {
    pub id: Uuid,
    pub name: String,
}

/// Who is called what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Every agent of the input, by workspace id, then agent id.
    pub agents: Vec<AgentNames>,
    /// Names left out; to be logged once each.
    pub skipped: Vec<Skipped>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentNames {
    pub workspace: Uuid,
    pub agent: Uuid,
    pub address: Ipv6Addr,
    /// For `Agent.fqdn`: with the final dot, shortest first, ties in byte order. Empty if no name was legal; such an
    /// agent must not be reported to clients.
    pub fqdn: Vec<String>,
}

/// A name that is not published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub agent: Uuid,
    /// Escaped and shortened, safe to log.
    pub name: String,
    pub reason: SkipReason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// A label or the whole is no legal DNS name.
    Illegal,
    /// A workspace or agent with a lower id has this name.
    Taken,
    /// The agent's address is the DNS server's or that of an agent with a lower id.
    AddressTaken,
}

/// Names of all agents. Clashes go to the lowest workspace id, then the lowest agent id (CC-60).
pub fn assign(input: &ZoneInput) -> Assignment {
    let mut workspaces: Vec<&Workspace> = input.workspaces.iter().collect();
    workspaces.sort_by_key(|w| w.id);

    let mut assignment = Assignment::default();
    let mut taken = HashSet::new();
    let mut addresses: HashMap<Ipv6Addr, Uuid> = HashMap::new();
    for workspace in workspaces {
        let mut agents: Vec<&Agent> = workspace.agents.iter().collect();
        agents.sort_by_key(|a| a.id);
        let only_agent = agents.len() == 1;
        for agent in agents {
            let address = coder_address(agent.id);
            let mut skip = |name: &str, reason| {
                assignment.skipped.push(Skipped { agent: agent.id, name: shown(name), reason });
            };
            let mut fqdn = Vec::new();
            if address == DNS_ADDRESS || *addresses.entry(address).or_insert(agent.id) != agent.id {
                skip(&agent.name, SkipReason::AddressTaken);
            } else {
                for Candidate { name, legal } in
                    candidates(&agent.name, &workspace.name, &input.owner, &input.suffix, only_agent)
                {
                    if !legal {
                        skip(&name, SkipReason::Illegal);
                    } else if !taken.insert(name.clone()) {
                        // An owner called `me` has the same name twice, which is no clash.
                        if !fqdn.contains(&name) {
                            skip(&name, SkipReason::Taken);
                        }
                    } else {
                        fqdn.push(name);
                    }
                }
                sort(&mut fqdn);
            }
            assignment.agents.push(AgentNames { workspace: workspace.id, agent: agent.id, address, fqdn });
        }
    }
    assignment
}

/// Legal names of one agent, in the order of `Agent.fqdn`, as if nobody else had a claim to them.
pub fn fqdns(agent: &str, workspace: &str, owner: &str, suffix: &Suffix, only_agent: bool) -> Vec<String> {
    let candidates = candidates(agent, workspace, owner, suffix, only_agent);
    let mut names: Vec<String> = candidates.into_iter().filter(|c| c.legal).map(|c| c.name).collect();
    sort(&mut names);
    names.dedup();
    names
}

/// The name programs look up to learn whether the tunnel is active, with the final dot.
pub fn own_name(suffix: &Suffix) -> String {
    format!("{ENABLED_LABELS}.{suffix}.")
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Skipped { agent, name, reason } = self;
        let why = match reason {
            SkipReason::Illegal => "not a legal DNS name",
            SkipReason::Taken => "already the name of another agent",
            SkipReason::AddressTaken => "its address is already in use",
        };
        write!(f, "name {name} of agent {agent} is left out: {why}")
    }
}

struct Candidate {
    name: String,
    legal: bool,
}

fn candidates(agent: &str, workspace: &str, owner: &str, suffix: &Suffix, only_agent: bool) -> Vec<Candidate> {
    let [agent, workspace, owner] = [agent, workspace, owner].map(str::to_ascii_lowercase);
    // Judged by part: a dot inside a part would shift the depth and could hit a name of somebody else.
    let candidate = |parts: &[&str]| {
        let name = format!("{}.{suffix}.", parts.join("."));
        let legal = name.len() <= MAX_NAME_BYTES + 1 && parts.iter().all(|part| is_label(part));
        Candidate { name, legal }
    };
    let mut names = vec![candidate(&[&agent, &workspace, "me"]), candidate(&[&agent, &workspace, &owner])];
    if only_agent {
        names.push(candidate(&[&workspace]));
    }
    names
}

fn sort(names: &mut [String]) {
    names.sort_by(|a, b| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
}
