//! The coordinator: passes nodes between parties that want to meet, says READY for agents, and LOST for those it no longer
//! hears.

use std::collections::{BTreeMap, BTreeSet};

use codervpn_engine::Command;
use codervpn_wire::node::Node;
use uuid::Uuid;

use crate::party::PartyId;
use crate::world::{What, World};
use crate::{Time, ms};

/// From the middle of the Internet to the coordinator and through it.
const DELAY: Time = ms(10);

#[derive(Default)]
pub(crate) struct Coordinator {
    nodes: BTreeMap<PartyId, Box<Node>>,
    /// Client and agent.
    tunnels: BTreeSet<(PartyId, PartyId)>,
}

/// What a party says to it.
#[derive(Clone, Debug)]
pub(crate) enum Said {
    Node(Box<Node>),
    /// A client wants to meet an agent, or no longer.
    Tunnel(PartyId),
    NoTunnel(PartyId),
    /// An agent is ready for this client.
    Ready(Uuid),
    Goodbye,
}

impl World {
    /// A party says something.
    pub(crate) fn say(&mut self, party: PartyId, said: Said) {
        let p = &self.parties[party.0];
        if p.uncoordinated || !p.is_awake() || !self.network.is_online(p.host) {
            // Said again when the connection stands again.
            return;
        }
        let delay = self.network.delay_of(p.host) + DELAY;
        let generation = p.generation;
        let last = self.parties[party.0].last_told;
        let at = (self.now + delay).max(last);
        self.queue.push(at, What::Said { party, generation, said: Box::new(said) });
    }

    pub(crate) fn said(&mut self, party: PartyId, said: Said) {
        match said {
            Said::Node(node) => {
                for other in self.counterparts(party) {
                    let id = self.parties[party.0].id;
                    self.tell(other, Command::Node { id, node: node.clone() });
                }
                self.coordinator.nodes.insert(party, node);
            }
            Said::Tunnel(agent) => {
                self.coordinator.tunnels.insert((party, agent));
                for (to, about) in [(agent, party), (party, agent)] {
                    if let Some(node) = self.coordinator.nodes.get(&about).cloned() {
                        self.tell(to, Command::Node { id: self.parties[about.0].id, node });
                    }
                }
            }
            Said::NoTunnel(agent) => {
                if self.coordinator.tunnels.remove(&(party, agent)) {
                    self.tell(agent, Command::Disconnected(self.parties[party.0].id));
                }
            }
            Said::Ready(client) => {
                let others = self.counterparts(party);
                if let Some(other) = others.into_iter().find(|other| self.parties[other.0].id == client) {
                    self.tell(other, Command::ReadyForHandshake(self.parties[party.0].id));
                }
            }
            Said::Goodbye => {
                for other in self.counterparts(party) {
                    self.tell(other, Command::Disconnected(self.parties[party.0].id));
                }
                self.coordinator.nodes.remove(&party);
            }
        }
    }

    /// It no longer hears a party.
    pub(crate) fn lost(&mut self, party: PartyId) {
        if self.coordinator.nodes.remove(&party).is_some() {
            for other in self.counterparts(party) {
                self.tell(other, Command::Lost(self.parties[party.0].id));
            }
        }
    }

    fn counterparts(&self, party: PartyId) -> Vec<PartyId> {
        let other = |(client, agent): &(PartyId, PartyId)| match party {
            _ if *client == party => Some(*agent),
            _ if *agent == party => Some(*client),
            _ => None,
        };
        self.coordinator.tunnels.iter().filter_map(other).collect()
    }

    fn tell(&mut self, party: PartyId, command: Command) {
        let p = &mut self.parties[party.0];
        if p.uncoordinated {
            return;
        }
        let delay = self.network.delay_of(p.host) + DELAY;
        let at = (self.now + delay).max(p.last_told);
        p.last_told = at;
        let generation = p.generation;
        self.queue.push(at, What::Tell { party, generation, command });
    }

    /// The stream to the coordinator breaks: as the control client tells it.
    pub fn cut_coordinator(&mut self, party: PartyId) {
        self.note(format_args!("{party:?} loses the coordinator"));
        self.parties[party.0].uncoordinated = true;
        self.command(party, Command::AllLost);
        self.lost(party);
    }

    /// It stands again: everything is said anew.
    pub fn restore_coordinator(&mut self, party: PartyId) {
        self.note(format_args!("{party:?} has the coordinator again"));
        self.parties[party.0].uncoordinated = false;
        self.introduce(party);
    }

    /// What a party says on a new connection.
    pub(crate) fn introduce(&mut self, party: PartyId) {
        if let Some(node) = self.parties[party.0].engine.self_node(std::time::SystemTime::UNIX_EPOCH) {
            self.say(party, Said::Node(Box::new(node)));
        }
        let wanted: Vec<PartyId> =
            self.wanted.iter().filter(|(client, _)| *client == party).map(|(_, agent)| *agent).collect();
        for agent in wanted {
            self.say(party, Said::Tunnel(agent));
        }
        // An agent gets the nodes of all its clients again, a client those of all its agents.
        for other in self.counterparts(party) {
            if let Some(node) = self.coordinator.nodes.get(&other).cloned() {
                let id = self.parties[other.0].id;
                self.tell(party, Command::Node { id, node });
            }
        }
    }
}
