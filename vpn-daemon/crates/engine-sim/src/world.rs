//! The world: parties on a network, relays, a coordinator, and the time. Decides what happens next: the earliest event of
//! the queue or the earliest timer of an engine. After every call of an engine its output is put on its way and checked.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use codervpn_engine::{Command, Engine, Event, LinkChange, Path, RelayLatency, Role, Route, SendFailure, StunServer};
use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RegionId, RelayNodeFields};
use codervpn_wire::node;
use mock_instant::MockClock;
use uuid::Uuid;

use crate::coordinator::{Coordinator, Said};
use crate::invariants::{Extremes, Packets, Pair};
use crate::network::{Hop, HostId, INTERNET, Network, Passage};
use crate::party::{Out, Party, PartyId};
use crate::queue::Queue;
use crate::relay::{Frame, Relay};
use crate::rng::Rng;
use crate::site::{Site, SiteId, Sites, add_provider};
use crate::wire::Wire;
use crate::{Nat, SegmentId, Time, ms, secs};

/// What is remembered of what happened, for those who ask why it went wrong.
const NOTES: usize = 80;

/// Packets of one conversation.
#[derive(Clone, Debug)]
pub struct Flow {
    pub from: PartyId,
    pub to: PartyId,
    pub every: Time,
    pub size: usize,
    /// Packets to come; the flow ends with the last.
    pub left: u64,
    pub answered: bool,
}

pub(crate) enum What {
    Hop(Hop),
    ToRelay {
        generation: u32,
        frame: Frame,
    },
    FromRelay {
        generation: u32,
        frame: Frame,
    },
    Connected {
        party: PartyId,
        generation: u32,
        region: RegionId,
        link: u32,
    },
    Closed {
        party: PartyId,
        generation: u32,
        region: RegionId,
        link: u32,
    },
    Sweep {
        party: PartyId,
        generation: u32,
        region: RegionId,
        link: u32,
    },
    /// The coordinator or the slow side tells a party something.
    Tell {
        party: PartyId,
        generation: u32,
        command: Command,
    },
    Said {
        party: PartyId,
        generation: u32,
        said: Box<Said>,
    },
    Measured {
        party: PartyId,
        generation: u32,
    },
    Bind {
        party: PartyId,
        generation: u32,
    },
    LinksChanged {
        party: PartyId,
        generation: u32,
        change: LinkChange,
    },
    Flow(usize),
    Do(Box<dyn FnOnce(&mut World)>),
}

/// See the crate's documentation.
pub struct World {
    pub name: String,
    pub now: Time,
    pub(crate) base: Instant,
    pub(crate) rng: Rng,
    pub network: Network,
    pub(crate) sites: Sites,
    pub(crate) parties: Vec<Party>,
    pub(crate) queue: Queue<What>,
    pub(crate) relays: BTreeMap<RegionId, Relay>,
    map: DerpMap,
    pub(crate) coordinator: Coordinator,
    /// Which client wants which agent.
    pub(crate) wanted: Vec<(PartyId, PartyId)>,
    flows: Vec<Flow>,
    pub(crate) pairs: BTreeMap<(PartyId, PartyId), Pair>,
    pub(crate) packets: Packets,
    /// Last change of the network: what depends on it has some time to settle.
    pub(crate) disturbed_at: Time,
    pub(crate) steps: u64,
    pub extremes: Extremes,
    trace: DefaultHasher,
    notes: VecDeque<String>,
    /// Seconds between which every datagram is noted.
    watched: Option<(u64, u64)>,
    /// Ports are lost at a rebind now and then.
    pub rebind_changes_port: bool,
}

impl World {
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "an instant has to begin somewhere")]
    pub fn new(name: &str, seed: u64) -> Self {
        MockClock::set_time(Time::ZERO);
        Self {
            name: name.to_owned(),
            now: Time::ZERO,
            base: Instant::now(),
            rng: Rng::new(seed),
            network: Network::default(),
            sites: Sites::default(),
            parties: Vec::new(),
            queue: Queue::default(),
            relays: BTreeMap::new(),
            map: DerpMap::default(),
            coordinator: Coordinator::default(),
            wanted: Vec::new(),
            flows: Vec::new(),
            pairs: BTreeMap::new(),
            packets: Packets::default(),
            disturbed_at: Time::ZERO,
            steps: 0,
            extremes: Extremes::default(),
            trace: DefaultHasher::new(),
            notes: VecDeque::new(),
            watched: watched(),
            rebind_changes_port: false,
        }
    }

    // Building.

    /// A relay region, `delay` from the middle of the Internet; to be added before parties.
    pub fn add_relay(&mut self, id: i64, delay: Time) -> RegionId {
        let id = RegionId::new(id).expect("a region's number");
        self.relays.insert(id, Relay::new(delay));
        let number = i64::from(id.get());
        let node =
            RelayNodeFields { name: format!("{id}a"), host_name: "relay.test".into(), ..RelayNodeFields::default() };
        let region = RegionFields {
            region_id: number,
            embedded_relay: self.map.regions.is_empty(),
            region_code: format!("region-{id}"),
            region_name: format!("Region {id}"),
            nodes: vec![node],
            ..RegionFields::default()
        };
        let fields = DerpMapFields { regions: vec![(number, region)], ..DerpMapFields::default() };
        self.map.regions.extend(DerpMap::from_fields(&fields).0.regions);
        id
    }

    /// A STUN server with an address of each family.
    pub fn add_stun(&mut self, delay: Time) {
        let number = self.network.stun.len() as u16 / 2 + 1;
        let v4 = std::net::Ipv4Addr::new(74, 125, 250, number as u8);
        let v6 = std::net::Ipv6Addr::new(0x2a00, 0x1450, 0, 0, 0, 0, 0, number);
        self.network.add_stun((v4, 19302).into(), delay);
        self.network.add_stun((v6, 19302).into(), delay);
    }

    /// Three servers: two would suffice, one may be out of order.
    pub fn add_usual_servers(&mut self) {
        self.add_relay(1, ms(10));
        for _ in 0..3 {
            self.add_stun(ms(5));
        }
    }

    pub fn add_site(&mut self, site: Site) -> SiteId {
        self.sites.add(site, None, &mut self.network)
    }

    /// A site behind a provider's NAT.
    pub fn add_site_behind(&mut self, site: Site, provider: SegmentId) -> SiteId {
        self.sites.add(site, Some(provider), &mut self.network)
    }

    /// A NAT of a provider that sites can be put behind.
    pub fn add_provider(&mut self, nat: Nat) -> SegmentId {
        let number = 200 + self.network.routers.len() as u8;
        let outer = std::net::Ipv4Addr::new(5, 9, number, 1).into();
        let wire = Wire { delay: ms(2), ..Wire::default() };
        add_provider(&mut self.network, nat, Passage::Closed, outer, wire)
    }

    /// A client on a machine of its own. Its engine starts at once.
    pub fn add_client(&mut self, site: SiteId) -> PartyId {
        self.add_party(Role::Client, site)
    }

    pub fn add_agent(&mut self, site: SiteId) -> PartyId {
        self.add_party(Role::Agent, site)
    }

    fn add_party(&mut self, role: Role, site: SiteId) -> PartyId {
        let host = self.sites.add_host(site, &mut self.network);
        let party = PartyId(self.parties.len());
        let id = Uuid::from_u128(0x7f3c_9a52_1d4e_4b86_8000_0000_0000_0000 + party.0 as u128 * 0x0101_0101);
        let at = self.base + self.now;
        let p = Party::new(role, host, id, &mut self.rng, at);
        self.parties.push(p);
        self.start(party);
        party
    }

    /// What a process does first.
    pub(crate) fn start(&mut self, party: PartyId) {
        let port = 41_000 + self.rng.below(20_000) as u16;
        let p = &mut self.parties[party.0];
        (p.v4, p.v6) = (Some(port), Some(port));
        let (v4, v6, direct, host) = (p.v4, p.v6, p.direct, p.host);
        self.command(party, Command::Direct(direct));
        self.command(party, Command::SocketsBound { v4, v6 });
        let addresses = self.network.addresses(host);
        self.command(party, Command::LocalAddresses(addresses));
        let map = self.map.clone();
        self.command(party, Command::DerpMap(map));
    }

    /// A client wants to reach an agent.
    pub fn connect(&mut self, client: PartyId, agent: PartyId) {
        let id = self.parties[agent.0].id;
        self.wanted.push((client, agent));
        self.pairs.insert((client, agent), Pair::new(self.now));
        self.command(client, Command::AddDestination(id));
        self.say(client, Said::Tunnel(agent));
        self.disturbed();
    }

    pub fn disconnect(&mut self, client: PartyId, agent: PartyId) {
        let id = self.parties[agent.0].id;
        self.wanted.retain(|wanted| *wanted != (client, agent));
        self.pairs.remove(&(client, agent));
        self.command(client, Command::RemoveDestination(id));
        self.say(client, Said::NoTunnel(agent));
        self.disturbed();
    }

    /// Starts a conversation.
    pub fn flow(&mut self, flow: Flow) {
        self.flows.push(flow);
        self.queue.push(self.now, What::Flow(self.flows.len() - 1));
    }

    /// Something to be done later.
    pub fn at(&mut self, delay: Time, what: impl FnOnce(&mut World) + 'static) {
        self.push(delay, What::Do(Box::new(what)));
    }

    // Time.

    pub(crate) fn push(&mut self, delay: Time, what: What) {
        self.queue.push(self.now + delay, what);
    }

    /// Lets time pass.
    pub fn run(&mut self, time: Time) {
        let end = self.now + time;
        loop {
            let timer = self.parties.iter().filter_map(|party| party.wake).min();
            let Some(next) = [timer, self.queue.next()].into_iter().flatten().min().filter(|at| *at <= end) else {
                break;
            };
            self.now = self.now.max(next);
            MockClock::set_time(self.now);
            while let Some(what) = self.queue.pop_due(self.now) {
                self.step(what);
            }
            for index in 0..self.parties.len() {
                if self.parties[index].wake.is_some_and(|at| at <= self.now) {
                    self.timeout(PartyId(index));
                }
            }
        }
        self.now = end;
        MockClock::set_time(self.now);
        self.check_all();
    }

    /// Lets time pass until something is the case, at most for `limit`. Returns how long it took.
    pub fn run_until(&mut self, limit: Time, mut reached: impl FnMut(&Self) -> bool) -> Option<Time> {
        let begin = self.now;
        while self.now < begin + limit {
            if reached(self) {
                return Some(self.now - begin);
            }
            let timer = self.parties.iter().filter_map(|party| party.wake).min();
            let next = [timer, self.queue.next()].into_iter().flatten().min().unwrap_or(begin + limit);
            self.run(next.saturating_sub(self.now));
        }
        reached(self).then(|| self.now - begin)
    }

    fn step(&mut self, what: What) {
        self.steps += 1;
        let current = |parties: &[Party], party: PartyId, generation: u32| {
            parties[party.0].alive && parties[party.0].generation == generation
        };
        match what {
            What::Hop(hop) => self.hop(hop),
            What::ToRelay { generation, frame } => {
                if current(&self.parties, frame.party, generation) {
                    self.at_relay(frame);
                }
            }
            What::FromRelay { generation, frame } => {
                if current(&self.parties, frame.party, generation)
                    && let Some(frame) = self.at_party(frame)
                {
                    self.call(frame.party, |engine, now, out| {
                        engine.handle_relay(frame.region, frame.other, &frame.bytes, now, out);
                    });
                }
            }
            What::Connected { party, generation, region, link } => {
                if current(&self.parties, party, generation) {
                    self.relay_connected(party, region, link);
                }
            }
            What::Closed { party, generation, region, link } => {
                let same = self.parties[party.0].links.get(&region).is_some_and(|l| l.number == link);
                if current(&self.parties, party, generation) && same {
                    self.drop_link(party, region);
                }
            }
            What::Sweep { party, generation, region, link } => {
                if current(&self.parties, party, generation) {
                    self.sweep_relay(party, region, link);
                }
            }
            What::Tell { party, generation, command } => {
                if current(&self.parties, party, generation) {
                    let p = &mut self.parties[party.0];
                    if p.asleep.is_some() || !self.network.is_online(p.host) {
                        p.mailbox.push(command);
                    } else if !p.uncoordinated {
                        self.command(party, command);
                    }
                }
            }
            What::Said { party, generation, said } => {
                if current(&self.parties, party, generation) {
                    self.said(party, *said);
                }
            }
            What::Measured { party, generation } => {
                if current(&self.parties, party, generation) {
                    self.measured(party);
                }
            }
            What::Bind { party, generation } => {
                if current(&self.parties, party, generation) {
                    self.bind(party);
                }
            }
            What::LinksChanged { party, generation, change } => {
                if current(&self.parties, party, generation) && self.parties[party.0].asleep.is_none() {
                    self.links_changed(party, change);
                }
            }
            What::Flow(index) => self.flow_step(index),
            What::Do(what) => what(self),
        }
    }

    fn hop(&mut self, hop: Hop) {
        let arrived = self.network.hop(hop, self.now, &mut self.rng);
        self.take_hops();
        let Some((host, datagram)) = arrived else { return };
        let port = Some(datagram.destination.port());
        let v4 = datagram.destination.is_ipv4();
        let party = self.parties.iter().position(|p| p.host == host && (if v4 { p.v4 } else { p.v6 }) == port);
        let Some(party) = party.map(PartyId).filter(|party| self.parties[party.0].is_awake()) else { return };
        if self.is_watched() {
            let (len, source) = (datagram.bytes.len(), datagram.source);
            self.note(format_args!("{party:?} gets {len} bytes from {source}"));
        }
        self.call(party, |engine, now, out| engine.handle_udp(datagram.source, &datagram.bytes, now, out));
    }

    fn take_hops(&mut self) {
        for (at, hop) in self.network.next.drain(..) {
            self.queue.push(at, What::Hop(hop));
        }
    }

    fn timeout(&mut self, party: PartyId) {
        self.parties[party.0].meter.wakes += 1;
        let at = self.now;
        self.call(party, Engine::handle_timeout);
        let wake = self.parties[party.0].wake;
        assert!(wake.is_none_or(|wake| wake > at), "{party:?}: a timer that does not move on");
    }

    // Engines.

    /// What the engine's clock says when the world's says `now`.
    pub(crate) fn instant(&self, party: PartyId) -> Instant {
        self.base + (self.now - self.parties[party.0].slept)
    }

    pub(crate) fn command(&mut self, party: PartyId, command: Command) {
        if self.parties[party.0].is_awake() {
            self.call(party, |engine, now, out| engine.apply(command, now, out));
        }
    }

    /// The only way to an engine.
    pub(crate) fn call(&mut self, party: PartyId, call: impl FnOnce(&mut Engine, Instant, &mut Out)) {
        let now = self.instant(party);
        let p = &mut self.parties[party.0];
        if !p.is_awake() {
            return;
        }
        let mut out = std::mem::take(&mut p.out);
        call(&mut p.engine, now, &mut out);
        loop {
            for packet in std::mem::take(&mut out.delivered) {
                self.delivered(party, &packet);
            }
            for (route, bytes) in std::mem::take(&mut out.sent) {
                self.send(party, route, &bytes, &mut out);
            }
            // A datagram that cannot be sent may have others sent.
            if !out.sent.is_empty() {
                continue;
            }
            let Some(event) = self.parties[party.0].engine.poll_event() else { break };
            self.event(party, event);
        }
        self.take_hops();
        let p = &mut self.parties[party.0];
        p.out = out;
        let slept = p.slept;
        let base = self.base;
        p.wake = p.engine.poll_timeout().map(|at| at.saturating_duration_since(base) + slept);
    }

    fn send(&mut self, party: PartyId, route: Route, bytes: &[u8], out: &mut Out) {
        self.check_output(party, &route, bytes);
        (self.now, party, bytes.len(), matches!(route, Route::Udp(_))).hash(&mut self.trace);
        match route {
            Route::Relay { region, peer } => self.send_by_relay(party, region, peer, bytes),
            Route::Udp(to) => {
                let p = &mut self.parties[party.0];
                p.meter.udp += 1;
                p.meter.bytes += bytes.len() as u64 + 28;
                let port = if to.is_ipv4() { p.v4 } else { p.v6 };
                let sent = match port {
                    Some(port) => self.network.send(p.host, port, to, bytes, self.now, &mut self.rng),
                    None => Err(SendFailure::Unreachable),
                };
                if let Err(failure) = sent {
                    let now = self.instant(party);
                    self.parties[party.0].engine.handle_send_failure(to, failure, now, out);
                }
            }
        }
    }

    fn event(&mut self, party: PartyId, event: Event) {
        let generation = self.parties[party.0].generation;
        match event {
            Event::SelfNodeChanged => {
                if let Some(node) = self.parties[party.0].engine.self_node(std::time::SystemTime::UNIX_EPOCH) {
                    self.say(party, Said::Node(Box::new(node)));
                }
            }
            Event::HomeRelayChanged(region) => {
                self.parties[party.0].home = Some(region);
                self.want_relay(party, region);
            }
            Event::RelayWanted(region) => self.want_relay(party, region),
            Event::PeerChanged(id) => self.peer_changed(party, id),
            Event::Programmed(client) => {
                self.programmed(party, client);
            }
            Event::MeasureRelays => {
                self.measure(party);
            }
            Event::RebindSockets => {
                let takes = self.rng.between(ms(0), ms(3));
                self.push(takes, What::Bind { party, generation });
            }
            Event::PingDone { .. } => {}
            #[allow(unreachable_patterns, reason = "events that no party here asks for")]
            _ => {}
        }
    }

    fn programmed(&mut self, party: PartyId, client: Uuid) {
        if self.parties[party.0].role == Role::Agent {
            self.say(party, Said::Ready(client));
        }
    }

    fn measure(&mut self, party: PartyId) {
        let generation = self.parties[party.0].generation;
        if !std::mem::replace(&mut self.parties[party.0].measuring, true) {
            let farthest = self.relays.keys().map(|region| self.relay_delay(party, *region) * 4).max();
            let online = self.network.is_online(self.parties[party.0].host);
            let takes = if online { farthest.unwrap_or_default() } else { secs(3) };
            self.push(takes, What::Measured { party, generation });
        }
    }

    fn measured(&mut self, party: PartyId) {
        self.parties[party.0].measuring = false;
        let host = self.parties[party.0].host;
        let online = self.network.is_online(host);
        let v6_only = self.network.hosts[host.0].v4.is_none();
        let family = if v6_only { node::Family::V6 } else { node::Family::V4 };
        let regions: Vec<RegionId> =
            self.relays.iter().filter(|(_, relay)| relay.up && online).map(|(id, _)| *id).collect();
        let mut latencies = Vec::new();
        for region in regions {
            let latency = self.relay_delay(party, region) * 2 + self.rng.between(ms(0), ms(2));
            latencies.push(RelayLatency { region, family, latency });
        }
        self.command(party, Command::RelayLatencies(latencies));
        let first = self.relays.keys().next().copied();
        let Some(region) = first.filter(|_| online) else { return };
        let servers = self.network.stun.iter().map(|server| StunServer { region, address: server.address }).collect();
        self.command(party, Command::StunServers(servers));
    }

    fn bind(&mut self, party: PartyId) {
        let other = self.rebind_changes_port && self.rng.chance(0.5);
        let port = 41_000 + self.rng.below(20_000) as u16;
        let p = &mut self.parties[party.0];
        if other {
            (p.v4, p.v6) = (Some(port), Some(port));
        }
        let (v4, v6) = (p.v4, p.v6);
        self.command(party, Command::SocketsBound { v4, v6 });
    }

    // Looking.

    pub fn host(&self, party: PartyId) -> HostId {
        self.parties[party.0].host
    }

    /// How `party` reaches `other`.
    pub fn path(&self, party: PartyId, other: PartyId) -> Option<Path> {
        let now = self.instant(party);
        self.parties[party.0].engine.peer(self.parties[other.0].id, now).and_then(|status| status.path)
    }

    /// The router next to a party.
    #[must_use]
    pub fn router(&self, party: PartyId) -> usize {
        self.network.routers_of(self.host(party))[0].0
    }

    #[must_use]
    pub fn regions(&self) -> Vec<RegionId> {
        self.relays.keys().copied().collect()
    }

    /// Bytes that a party sent so far, and how often its timers fired.
    #[must_use]
    pub fn spent(&self, party: PartyId) -> (u64, u64) {
        let meter = &self.parties[party.0].meter;
        (meter.bytes, meter.wakes)
    }

    pub fn engine(&self, party: PartyId) -> &Engine {
        &self.parties[party.0].engine
    }

    pub fn status(&self, party: PartyId, other: PartyId) -> Option<codervpn_engine::PeerStatus> {
        self.parties[party.0].engine.peer(self.parties[other.0].id, self.instant(party))
    }

    /// Two runs from one seed have the same.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.trace.clone().finish()
    }

    pub fn note(&mut self, what: fmt::Arguments<'_>) {
        if self.notes.len() >= NOTES && self.watched.is_none() {
            self.notes.pop_front();
        }
        self.notes.push_back(format!("{:>12.3} {what}", self.now.as_secs_f64()));
    }

    /// Shows what was watched, by the only way out there is.
    pub(crate) fn show_watched(&self) {
        if self.watched.is_some() {
            self.fail(format_args!("nothing is wrong, but somebody watches"));
        }
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched.is_some_and(|(from, to)| (from..to).contains(&self.now.as_secs()))
    }

    /// What happened lately.
    #[must_use]
    pub fn notes(&self) -> String {
        self.notes.iter().map(|note| format!("    {note}\n")).collect()
    }

    /// Something does not hold.
    #[track_caller]
    pub(crate) fn fail(&self, what: fmt::Arguments<'_>) -> ! {
        panic!("{} at {:.3} s: {what}\n{}", self.name, self.now.as_secs_f64(), self.notes());
    }

    fn flow_step(&mut self, index: usize) {
        let flow = &mut self.flows[index];
        if flow.left == 0 {
            return;
        }
        flow.left -= 1;
        let flow = flow.clone();
        self.send_packet(&flow);
        if flow.left > 0 {
            self.push(flow.every, What::Flow(index));
        }
    }

    /// The Internet itself, for those who attach more to it.
    #[must_use]
    pub fn internet() -> SegmentId {
        INTERNET
    }
}

/// `SIM_WATCH=100-110` has every datagram of those seconds noted.
fn watched() -> Option<(u64, u64)> {
    let text = std::env::var("SIM_WATCH").ok()?;
    let (from, to) = text.split_once('-')?;
    Some((from.parse().ok()?, to.parse().ok()?))
}
