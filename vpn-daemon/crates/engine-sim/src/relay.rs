//! Relays and the connections to them, as the daemon's slow side keeps them: home always, others for a minute after their
//! last use, lost ones again with a growing pause. TCP loses nothing and keeps order; while a line is dead its bytes wait.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use codervpn_engine::Command;
use codervpn_wire::classify::{self, Datagram};
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::NodePublic;

use crate::party::PartyId;
use crate::world::{What, World};
use crate::{Time, ms, secs};

/// A connection that nothing was sent on for this long is closed, unless it is home's.
const IDLE: Time = secs(60);
const SWEEP: Time = secs(15);
/// TCP repeats what was lost after about this long.
const RETRANSMIT: Time = ms(200);
/// Bytes wait this long for a dead line, then the connection counts as broken.
const PATIENCE: Time = secs(20);

#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) up: bool,
    /// From the middle of the Internet to it.
    pub(crate) delay: Time,
    clients: BTreeMap<NodePublic, Client>,
    /// Who sent to whom since both are here.
    routes: BTreeSet<(NodePublic, NodePublic)>,
}

#[derive(Clone, Copy, Debug)]
struct Client {
    party: PartyId,
    link: u32,
}

/// Bytes on their way to or from a relay.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) party: PartyId,
    pub(crate) region: RegionId,
    pub(crate) link: u32,
    /// The other one: receiver on the way to the relay, sender on the way back.
    pub(crate) other: NodePublic,
    pub(crate) bytes: Rc<[u8]>,
    pub(crate) sent: Time,
}

impl Relay {
    pub(crate) fn new(delay: Time) -> Self {
        Self { up: true, delay, clients: BTreeMap::new(), routes: BTreeSet::new() }
    }
}

impl World {
    pub(crate) fn relay_delay(&self, party: PartyId, region: RegionId) -> Time {
        let relay = self.relays.get(&region).map_or(Time::ZERO, |relay| relay.delay);
        self.network.delay_of(self.parties[party.0].host) + relay
    }

    fn can_reach(&self, party: PartyId, region: RegionId) -> bool {
        self.network.is_online(self.parties[party.0].host) && self.relays.get(&region).is_some_and(|relay| relay.up)
    }

    /// The engine wants a connection.
    pub(crate) fn want_relay(&mut self, party: PartyId, region: RegionId) {
        if !self.relays.contains_key(&region) {
            return;
        }
        let now = self.now;
        let link = self.parties[party.0].links.entry(region).or_default();
        link.used = now;
        self.connect_relay(party, region);
    }

    pub(crate) fn connect_relay(&mut self, party: PartyId, region: RegionId) {
        // Three round trips: TCP, TLS and the upgrade, and the greeting.
        let takes = self.relay_delay(party, region) * 6 + ms(2);
        let p = &mut self.parties[party.0];
        let link = p.links.entry(region).or_default();
        if link.up || link.connecting {
            return;
        }
        link.connecting = true;
        link.number += 1;
        let n = u64::from(link.failures);
        let pause = ms((n * n * 10).min(5000)).mul_f64(0.5 + self.rng.below(1000) as f64 / 1000.0);
        let (number, generation) = (link.number, p.generation);
        self.push(pause + takes, What::Connected { party, generation, region, link: number });
    }

    pub(crate) fn relay_connected(&mut self, party: PartyId, region: RegionId, number: u32) {
        let (reachable, now) = (self.can_reach(party, region), self.now);
        let p = &mut self.parties[party.0];
        let (key, is_home) = (p.key(), p.home == Some(region));
        let Some(link) = p.links.get_mut(&region).filter(|link| link.number == number && link.connecting) else {
            return;
        };
        link.connecting = false;
        if !reachable {
            link.failures += 1;
            if is_home || now < link.used + IDLE {
                self.connect_relay(party, region);
            }
            return;
        }
        link.failures = 0;
        link.up = true;
        link.used = now;
        (link.last_to_relay, link.last_from_relay) = (now, now);
        if let Some(relay) = self.relays.get_mut(&region) {
            relay.clients.insert(key, Client { party, link: number });
        }
        self.command(party, Command::RelayUp(region));
        if !is_home {
            let generation = self.parties[party.0].generation;
            self.push(SWEEP, What::Sweep { party, generation, region, link: number });
        }
    }

    /// Closes a connection that is not home's and not used.
    pub(crate) fn sweep_relay(&mut self, party: PartyId, region: RegionId, number: u32) {
        let now = self.now;
        let p = &self.parties[party.0];
        let (is_home, generation) = (p.home == Some(region), p.generation);
        let Some(link) = p.links.get(&region).filter(|link| link.number == number && link.up) else { return };
        if is_home || now < link.used + IDLE {
            self.push(SWEEP, What::Sweep { party, generation, region, link: number });
            return;
        }
        self.drop_link(party, region);
    }

    /// The connection ends at our side.
    pub(crate) fn drop_link(&mut self, party: PartyId, region: RegionId) {
        let key = self.parties[party.0].key();
        let Some(link) = self.parties[party.0].links.get_mut(&region) else { return };
        link.connecting = false;
        link.number += 1;
        if !std::mem::replace(&mut link.up, false) {
            return;
        }
        let number = link.number;
        self.unregister(party, region, key, number);
        if self.parties[party.0].is_awake() {
            self.command(party, Command::RelayDown(region));
            if self.parties[party.0].home == Some(region) {
                self.connect_relay(party, region);
            }
        }
    }

    /// The relay notices that a client is gone, and tells those who spoke to it.
    fn unregister(&mut self, party: PartyId, region: RegionId, key: NodePublic, newer: u32) {
        let Some(relay) = self.relays.get_mut(&region) else { return };
        if relay.clients.get(&key).is_none_or(|client| client.party != party || client.link >= newer) {
            return;
        }
        relay.clients.remove(&key);
        let told: Vec<NodePublic> = relay.routes.iter().filter(|(_, to)| *to == key).map(|(from, _)| *from).collect();
        relay.routes.retain(|(from, to)| *from != key && *to != key);
        for other in told {
            self.tell_gone(region, other, key);
        }
    }

    fn tell_gone(&mut self, region: RegionId, told: NodePublic, gone: NodePublic) {
        let client = self.relays.get(&region).and_then(|relay| relay.clients.get(&told)).copied();
        let Some(client) = client else { return };
        let delay = self.relay_delay(client.party, region);
        let generation = self.parties[client.party.0].generation;
        let command = Command::RelayPeerGone { region, peer: gone };
        self.push(delay, What::Tell { party: client.party, generation, command });
    }

    /// A process ended: its connections break.
    pub(crate) fn drop_links_of_dead(&mut self, party: PartyId) {
        let key = self.parties[party.0].key();
        for region in self.relays.keys().copied().collect::<Vec<_>>() {
            if let Some(link) = self.parties[party.0].links.get_mut(&region) {
                link.up = false;
                link.connecting = false;
                link.number += 1;
            }
            self.unregister(party, region, key, u32::MAX);
        }
    }

    /// An engine sends by a relay.
    pub(crate) fn send_by_relay(&mut self, party: PartyId, region: RegionId, to: NodePublic, bytes: &[u8]) {
        let (now, delay) = (self.now, self.relay_delay(party, region));
        let p = &mut self.parties[party.0];
        p.meter.relayed += 1;
        p.meter.bytes += bytes.len() as u64 + 37;
        let generation = p.generation;
        let link = p.links.entry(region).or_default();
        link.used = now;
        if !link.up {
            self.connect_relay(party, region);
            return;
        }
        let at = (now + delay).max(link.last_to_relay);
        link.last_to_relay = at;
        let frame = Frame { party, region, link: link.number, other: to, bytes: bytes.into(), sent: now };
        self.queue.push(at, What::ToRelay { generation, frame });
    }

    /// A frame reaches the relay, if the line is alive.
    pub(crate) fn at_relay(&mut self, frame: Frame) {
        let Frame { party, region, link, other, .. } = frame;
        if self.parties[party.0].links.get(&region).is_none_or(|l| l.number != link || !l.up) {
            return;
        }
        if !self.network.is_online(self.parties[party.0].host) {
            self.wait_for_line(frame, true);
            return;
        }
        let from = self.parties[party.0].key();
        let Some(relay) = self.relays.get_mut(&region).filter(|relay| relay.up) else { return };
        if let Some(client) = relay.clients.get(&other).copied() {
            relay.routes.insert((from, other));
            let delay = self.relay_delay(client.party, region);
            let now = self.now;
            let generation = self.parties[client.party.0].generation;
            let Some(target) = self.parties[client.party.0].links.get_mut(&region) else { return };
            let at = (now + delay).max(target.last_from_relay);
            target.last_from_relay = at;
            let frame =
                Frame { party: client.party, region, link: client.link, other: from, bytes: frame.bytes, sent: now };
            self.queue.push(at, What::FromRelay { generation, frame });
        } else if matches!(classify::datagram(&frame.bytes), Datagram::Disco(_)) {
            self.tell_gone(region, from, other);
        }
    }

    /// A frame reaches the party, if the line is alive. Returns it when it may be read.
    pub(crate) fn at_party(&mut self, frame: Frame) -> Option<Frame> {
        let party = &self.parties[frame.party.0];
        let same = party.links.get(&frame.region).is_some_and(|link| link.number == frame.link && link.up);
        if !same {
            return None;
        }
        if !self.network.is_online(party.host) || party.asleep.is_some() {
            self.wait_for_line(frame, false);
            return None;
        }
        Some(frame)
    }

    fn wait_for_line(&mut self, frame: Frame, to_relay: bool) {
        let now = self.now;
        if now > frame.sent + PATIENCE {
            if self.parties[frame.party.0].asleep.is_none() {
                self.drop_link(frame.party, frame.region);
            }
            return;
        }
        let at = now + RETRANSMIT;
        let party = &mut self.parties[frame.party.0];
        let generation = party.generation;
        let Some(link) = party.links.get_mut(&frame.region) else { return };
        let (last, what) = if to_relay {
            (&mut link.last_to_relay, What::ToRelay { generation, frame })
        } else {
            (&mut link.last_from_relay, What::FromRelay { generation, frame })
        };
        *last = at.max(*last);
        self.queue.push(at, what);
    }

    /// The relay goes down and takes all connections along.
    pub fn stop_relay(&mut self, region: RegionId) {
        self.note(format_args!("relay {region} stops"));
        let Some(relay) = self.relays.get_mut(&region) else { return };
        relay.up = false;
        relay.routes.clear();
        let clients = std::mem::take(&mut relay.clients);
        for client in clients.into_values() {
            let delay = self.relay_delay(client.party, region);
            let generation = self.parties[client.party.0].generation;
            self.push(delay, What::Closed { party: client.party, generation, region, link: client.link });
        }
        self.disturbed();
    }

    pub fn start_relay(&mut self, region: RegionId) {
        self.note(format_args!("relay {region} is back"));
        if let Some(relay) = self.relays.get_mut(&region) {
            relay.up = true;
        }
        self.disturbed();
    }

    /// Every connection is tried at once, as after a change of networks.
    pub(crate) fn check_links(&mut self, party: PartyId) {
        let links = &mut self.parties[party.0].links;
        let regions: Vec<RegionId> = links.keys().copied().collect();
        for link in links.values_mut() {
            link.failures = 0;
            if link.connecting {
                link.connecting = false;
                link.number += 1;
            }
        }
        for region in regions {
            if self.parties[party.0].home == Some(region) {
                self.connect_relay(party, region);
            }
        }
    }
}
