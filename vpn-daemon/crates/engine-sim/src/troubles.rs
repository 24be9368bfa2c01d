//! What can happen to parties and their networks while everything runs, and what the slow side of a party does then.

use codervpn_engine::{Command, Direct, Engine, LinkChange, Role};

use crate::coordinator::Said;
use crate::network::Passage;
use crate::party::PartyId;
use crate::site::SiteId;
use crate::world::{What, World};
use crate::{Time, ms, secs};

/// The slow side notices a change of interfaces after this long (5.2: `link debounce`).
const LINK_DEBOUNCE: Time = ms(250);

impl World {
    /// Who depends on the network has some time to settle from now on.
    pub fn disturbed(&mut self) {
        self.disturbed_at = self.now;
        let now = self.now;
        for party in &mut self.parties {
            party.meter.active = now;
            party.meter.quiet = None;
        }
    }

    /// The slow side notices that interfaces or addresses changed.
    pub fn links_change(&mut self, party: PartyId, change: LinkChange) {
        let generation = self.parties[party.0].generation;
        self.push(LINK_DEBOUNCE, What::LinksChanged { party, generation, change });
        self.disturbed();
    }

    pub(crate) fn links_changed(&mut self, party: PartyId, change: LinkChange) {
        self.note(format_args!("{party:?}: links {change:?}"));
        let addresses = self.network.addresses(self.parties[party.0].host);
        self.command(party, Command::LocalAddresses(addresses));
        self.command(party, Command::Link(change));
        if change == LinkChange::Down {
            for region in self.relays.keys().copied().collect::<Vec<_>>() {
                self.drop_link(party, region);
            }
        } else {
            self.check_links(party);
            self.read_mailbox(party);
        }
    }

    fn read_mailbox(&mut self, party: PartyId) {
        for command in std::mem::take(&mut self.parties[party.0].mailbox) {
            self.command(party, command);
        }
        self.introduce(party);
    }

    /// The cable is pulled, or plugged in again.
    pub fn set_cable(&mut self, party: PartyId, up: bool) {
        self.note(format_args!("{party:?}: cable {}", if up { "in" } else { "out" }));
        let host = self.parties[party.0].host;
        self.network.hosts[host.0].wire.up = up;
        self.links_change(party, if up { LinkChange::Up } else { LinkChange::Down });
    }

    /// The machine is carried to another place.
    pub fn move_to(&mut self, party: PartyId, site: SiteId) {
        self.note(format_args!("{party:?} moves to {site:?}"));
        let host = self.parties[party.0].host;
        self.sites.move_host(host, site, &mut self.network);
        for region in self.relays.keys().copied().collect::<Vec<_>>() {
            // Their addresses are gone: what is under way is lost.
            self.drop_link(party, region);
        }
        self.links_change(party, LinkChange::Major);
    }

    /// The machine is suspended for a while. The engine's clock stands still meanwhile, boringtun's does not.
    pub fn suspend(&mut self, party: PartyId, time: Time) {
        self.note(format_args!("{party:?} sleeps for {time:?}"));
        let p = &mut self.parties[party.0];
        if !p.is_awake() {
            return;
        }
        p.asleep = Some(self.now);
        p.wake = None;
        self.disturbed();
        self.at(time, move |world| world.resume(party));
    }

    fn resume(&mut self, party: PartyId) {
        self.note(format_args!("{party:?} wakes up"));
        let now = self.now;
        let p = &mut self.parties[party.0];
        let Some(since) = p.asleep.take() else { return };
        p.slept += now - since;
        let slept_long = now - since > secs(30);
        self.disturbed();
        self.call(party, Engine::handle_timeout);
        let generation = self.parties[party.0].generation;
        // Relays have given up connections that took nothing for so long.
        for region in self.relays.keys().copied().filter(|_| slept_long).collect::<Vec<_>>() {
            let round_trip = self.relay_delay(party, region) * 2;
            if let Some(link) = self.parties[party.0].links.get(&region).filter(|link| link.up).map(|link| link.number)
            {
                self.push(round_trip, What::Closed { party, generation, region, link });
            }
        }
        self.links_change(party, LinkChange::Major);
    }

    /// The process is killed, and another one with a new key starts after `pause`; the coordinator notices after `notice`.
    pub fn crash(&mut self, party: PartyId, pause: Time, notice: Time) {
        self.note(format_args!("{party:?} crashes"));
        let p = &mut self.parties[party.0];
        if !p.alive || p.asleep.is_some() {
            return;
        }
        self.drop_links_of_dead(party);
        let p = &mut self.parties[party.0];
        p.alive = false;
        p.wake = None;
        self.disturbed();
        let generation = self.parties[party.0].generation;
        self.at(notice, move |world| {
            if world.parties[party.0].generation == generation {
                world.lost(party);
            }
        });
        self.at(pause, move |world| world.restart(party));
    }

    /// As `crash`, but the process says goodbye first.
    pub fn leave(&mut self, party: PartyId, pause: Time) {
        if self.parties[party.0].is_awake() {
            self.push(ms(20), What::Do(Box::new(move |world| world.said(party, Said::Goodbye))));
            self.crash(party, pause.max(ms(50)), secs(3600));
        }
    }

    fn restart(&mut self, party: PartyId) {
        self.note(format_args!("{party:?} starts again"));
        self.lost(party);
        let at = self.instant(party);
        let mut rng = self.rng.fork();
        self.parties[party.0].restart(&mut rng, at);
        self.start(party);
        if self.parties[party.0].role == Role::Client {
            let wanted: Vec<_> = self.wanted.iter().filter(|(client, _)| *client == party).map(|(_, a)| *a).collect();
            for agent in wanted {
                let id = self.parties[agent.0].id;
                self.command(party, Command::AddDestination(id));
            }
        }
        self.introduce(party);
        self.disturbed();
    }

    /// The routers of a party start anew.
    pub fn forget_mappings(&mut self, party: PartyId) {
        self.note(format_args!("the routers of {party:?} forget their mappings"));
        for router in self.network.routers_of(self.host(party)) {
            if let Passage::Translated(nat) = &mut self.network.routers[router.0].v4 {
                nat.forget();
            }
        }
        self.disturbed();
    }

    /// Nothing passes between both by one family any more.
    pub fn sever(&mut self, one: PartyId, other: PartyId, v4: bool) {
        let outer = |party: PartyId| {
            let host = &self.network.hosts[self.host(party).0];
            let routers = self.network.routers_of(self.host(party));
            let translated = routers.last().and_then(|router| self.network.routers[router.0].outer_v4());
            if v4 { translated.or(host.v4) } else { host.v6 }
        };
        if let (Some(one), Some(other)) = (outer(one), outer(other)) {
            self.network.severed.push((one, other));
        }
        self.disturbed();
    }

    /// Direct paths are forbidden or allowed while everything runs.
    pub fn set_direct(&mut self, party: PartyId, direct: Direct) {
        self.note(format_args!("{party:?}: {direct:?}"));
        let now = self.now;
        let p = &mut self.parties[party.0];
        p.direct = direct;
        p.direct_off = (direct != Direct::Allowed).then_some(now);
        self.command(party, Command::Direct(direct));
        self.disturbed();
    }
}
