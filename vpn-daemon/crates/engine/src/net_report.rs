//! What network we are in: whether UDP works, under which addresses others see us, and whether our NAT gives every
//! destination another port. The relays' latencies are measured at the same times, but by the slow side.
//!
//! One *run* after the other (`data-plane.md` 3.3). A run begins when something asks for it: the start, another map, a
//! change of links, sockets or port mapping, a relay that failed, the first peer, a call-me-maybe that wants fresh
//! endpoints; and every 20 to 26 s while there is a peer and packets flowed in the last 45 s. Requests during a run make
//! one more run. It sends a STUN request to some servers of each family from the sockets that carry WireGuard, so that
//! the mapping found is the one that peers will hit, repeats it twice where nothing comes back, and ends when two
//! servers of each family answered, when no more answers are likely, or after 2 s.
//!
//! An answer counts only with the transaction and from the server that we asked, and only if it names an address that
//! may be pinged (T-35). While direct paths are not allowed no STUN leaves (T-54) and nothing is advertised (T-40); runs
//! go on for the relays' sake.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use codervpn_wire::derp_map::RegionId;
use codervpn_wire::node;
use codervpn_wire::stun::{self, TxId};
use rand_core::CryptoRngCore;

use crate::command::{Direct, StunServer};
use crate::endpoints::{Endpoints, Mapped};
use crate::event::NetReport;
use crate::sink::{Route, Sink};
use crate::stats::Counters;

/// A run ends at the latest after this (Go: `netcheck` is given 2 s by magicsock).
const RUN_LIMIT: Duration = Duration::from_secs(2);
/// Between requests to one server: short enough that one loss is not noticed, long enough for a far server.
const REPEAT: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(200)];
/// After the last request an answer still comes within this time, or hardly ever.
const LAST_WAIT: Duration = Duration::from_millis(400);
/// Two answers tell whether the mapping varies.
const ENOUGH: usize = 2;
/// Servers asked in one run and family: two answer even if two do not.
const SERVERS_PER_FAMILY: usize = 4;
/// Servers kept of what the slow side resolved; a map has up to 256 regions.
const MAX_SERVERS: usize = 128;
/// A run at a time, and not in a row without a pause whatever asks for them.
const BETWEEN_STARTS: Duration = Duration::from_millis(500);
/// Go: `magicsock.Conn.periodicReSTUN`, uniform.
const PERIOD: Duration = Duration::from_secs(20);
const PERIOD_SPREAD_MS: u64 = 6000;
/// Without packets for this long the period pauses (Go: `sessionActiveTimeout`).
const ACTIVE: Duration = Duration::from_secs(45);
/// Age up to which endpoints may be sent in a call-me-maybe (Go: `endpointsFreshEnoughDuration`).
const FRESH: Duration = Duration::from_secs(27);

/// What the last run found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Facts {
    udp: Option<bool>,
    mapped: Mapped,
    varies: Option<bool>,
}

/// What came of one call.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Progress {
    /// A run began: tell the slow side to measure.
    pub(crate) started: bool,
    /// A run ended: endpoints are fresh and may have changed.
    pub(crate) finished: bool,
}

/// How much a server can be relied on, best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Record {
    Answered,
    New,
    Silent,
}

struct Server {
    region: RegionId,
    address: SocketAddr,
    record: Record,
}

struct Probe {
    server: SocketAddr,
    tx: TxId,
    sent: usize,
    /// The next request, or, after the last one, when an answer is no longer waited for.
    next: Instant,
    mapped: Option<SocketAddr>,
    /// Nothing more is sent or waited for; an answer that comes all the same counts.
    given_up: bool,
}

impl Probe {
    fn is_over(&self) -> bool {
        self.mapped.is_some() || self.given_up
    }
}

struct Run {
    started: Instant,
    /// The servers were told during this run, or known before it.
    servers_known: bool,
    probes: Vec<Probe>,
    /// Answers in the order they came, by server.
    v4_answers: Vec<SocketAddr>,
    v6_answer: Option<SocketAddr>,
    any_answer: bool,
}

pub(crate) struct Net {
    direct: Direct,
    allow_loopback: bool,
    /// A map is known: before that there is nothing to measure.
    has_map: bool,
    link_up: bool,
    servers: Vec<Server>,
    endpoints: Endpoints,
    facts: Facts,
    run: Option<Run>,
    /// A run is wanted since.
    wanted: Option<Instant>,
    last_start: Option<Instant>,
    finished: Option<Instant>,
    periodic: Option<Instant>,
    /// The period pauses: the next packet or peer starts a run.
    dormant: bool,
    active_at: Option<Instant>,
    /// A peer's answer proves that UDP works, whatever STUN servers do.
    udp_from_peer: bool,
}

impl Net {
    pub(crate) fn new(direct: Direct, allow_loopback: bool) -> Self {
        Self {
            direct,
            allow_loopback,
            has_map: false,
            link_up: true,
            servers: Vec::new(),
            endpoints: Endpoints::new(allow_loopback),
            facts: Facts::default(),
            run: None,
            wanted: None,
            last_start: None,
            finished: None,
            periodic: None,
            dormant: false,
            active_at: None,
            udp_from_peer: false,
        }
    }

    // What others may ask.

    /// What we advertise, in our node and in call-me-maybe. Empty while direct paths are not allowed.
    pub(crate) fn endpoints(&self) -> &[SocketAddr] {
        self.endpoints.list()
    }

    /// Whether the endpoints may go into a call-me-maybe. If not: `request` a run and send it when that is finished.
    pub(crate) fn is_fresh(&self, now: Instant) -> bool {
        !self.is_direct_allowed() || self.finished.is_some_and(|at| now.saturating_duration_since(at) <= FRESH)
    }

    pub(crate) fn direct(&self) -> Direct {
        self.direct
    }

    pub(crate) fn is_direct_allowed(&self) -> bool {
        self.direct == Direct::Allowed
    }

    /// No server and no peer answers by UDP. False while that is not known.
    pub(crate) fn is_udp_blocked(&self) -> bool {
        self.facts.udp == Some(false) && !self.udp_from_peer
    }

    /// Our NAT gives every destination another port. False while that is not known.
    pub(crate) fn is_nat_hard(&self) -> bool {
        self.facts.varies == Some(true)
    }

    pub(crate) fn report(&self) -> NetReport {
        NetReport {
            udp: if self.udp_from_peer { Some(true) } else { self.facts.udp },
            v4: self.facts.mapped.v4,
            v6: self.facts.mapped.v6,
            mapping_varies: self.facts.varies,
            port_mapped: self.endpoints.port_mapped(),
            endpoints: self.endpoints.list().to_vec(),
        }
    }

    // What others tell. Each may make a run due; `tick` does the work.

    /// Asks for a run; during a run, for one more.
    pub(crate) fn request(&mut self, now: Instant) {
        self.wanted.get_or_insert(now);
    }

    /// As `request`, unless a run is under way or its result is still fresh.
    pub(crate) fn request_unless_fresh(&mut self, now: Instant) {
        if self.run.is_none() && self.finished.is_none_or(|at| now.saturating_duration_since(at) > FRESH) {
            self.request(now);
        }
    }

    /// A packet of a conversation went in or out.
    pub(crate) fn note_active(&mut self, now: Instant) {
        self.active_at = Some(now);
        if self.dormant {
            self.dormant = false;
            self.request(now);
        }
    }

    /// A peer answered by UDP.
    pub(crate) fn note_udp_works(&mut self) {
        self.udp_from_peer = true;
    }

    pub(crate) fn map_changed(&mut self, now: Instant) {
        self.has_map = true;
        self.request(now);
    }

    /// Returns whether the endpoints changed.
    pub(crate) fn set_direct(&mut self, direct: Direct, now: Instant) -> bool {
        let allowed_before = self.is_direct_allowed();
        self.direct = direct;
        if allowed_before == self.is_direct_allowed() {
            return false;
        }
        self.facts = Facts::default();
        self.udp_from_peer = false;
        if let Some(run) = &mut self.run {
            run.probes.clear();
            run.v4_answers.clear();
            run.v6_answer = None;
        }
        if self.is_direct_allowed() {
            self.finished = None;
            self.request(now);
        }
        self.rebuild(now)
    }

    /// The sockets were bound (again). What was learnt through other ones is void.
    /// The endpoints follow at the end of the run.
    pub(crate) fn set_ports(&mut self, v4: Option<u16>, v6: Option<u16>, now: Instant) {
        // Even the same port is another socket, perhaps on another network.
        self.endpoints.set_ports(v4, v6);
        self.facts = Facts::default();
        self.finished = None;
        self.udp_from_peer = false;
        match &mut self.run {
            // The slow side measures already: only STUN begins again.
            Some(run) => {
                run.probes.clear();
                run.v4_answers.clear();
                run.v6_answer = None;
            }
            None => self.request(now),
        }
        self.rebuild(now);
    }

    /// Returns whether the endpoints changed, as the two below.
    pub(crate) fn set_local_addresses(&mut self, addresses: Vec<IpAddr>, now: Instant) -> bool {
        self.endpoints.set_local(addresses) && self.rebuild(now)
    }

    pub(crate) fn set_port_mapped(&mut self, address: Option<SocketAddr>, now: Instant) -> bool {
        if !self.endpoints.set_port_mapped(address) {
            return false;
        }
        self.request(now);
        self.rebuild(now)
    }

    pub(crate) fn set_servers(&mut self, servers: &[StunServer], now: Instant) {
        let before = std::mem::take(&mut self.servers);
        for server in servers.iter().take(MAX_SERVERS) {
            let address = SocketAddr::new(server.address.ip().to_canonical(), server.address.port());
            let usable = node::is_usable_endpoint(&address, self.allow_loopback);
            if !usable || self.servers.iter().any(|known| known.address == address) {
                continue;
            }
            let record = before.iter().find(|known| known.address == address).map_or(Record::New, |known| known.record);
            self.servers.push(Server { region: server.region, address, record });
        }
        match &mut self.run {
            Some(run) => run.servers_known = true,
            // A run that knew of none was in vain. Names that resolve to something else every time are no reason.
            None if before.is_empty() && !self.servers.is_empty() => self.request(now),
            None => {}
        }
    }

    pub(crate) fn set_link_up(&mut self, up: bool) {
        self.link_up = up;
        if !up {
            self.run = None;
            self.udp_from_peer = false;
        }
    }

    /// A datagram could not be sent at all.
    pub(crate) fn unreachable(&mut self, destination: SocketAddr) {
        let probes = self.run.iter_mut().flat_map(|run| &mut run.probes);
        for probe in probes.filter(|probe| probe.server == destination) {
            probe.given_up = true;
        }
    }

    /// A STUN datagram came in; `tick` has to follow.
    pub(crate) fn answer(&mut self, source: SocketAddr, datagram: &[u8], counters: &mut Counters) {
        let source = SocketAddr::new(source.ip().to_canonical(), source.port());
        let allow_loopback = self.allow_loopback;
        let accepted = stun::parse_binding_response(datagram)
            .filter(|answer| node::is_usable_endpoint(&answer.mapped, allow_loopback))
            .filter(|answer| answer.mapped.is_ipv4() == source.is_ipv4())
            .and_then(|answer| Some((answer, self.run.as_mut()?)));
        let probe = accepted.and_then(|(answer, run)| {
            let probe =
                run.probes.iter_mut().find(|p| p.tx == answer.tx && p.server == source && p.mapped.is_none())?;
            probe.mapped = Some(answer.mapped);
            run.any_answer = true;
            if answer.mapped.is_ipv4() {
                run.v4_answers.push(answer.mapped);
            } else {
                run.v6_answer = Some(answer.mapped);
            }
            Some(probe.server)
        });
        match probe {
            Some(server) => {
                counters.stun_answers += 1;
                for known in self.servers.iter_mut().filter(|known| known.address == server) {
                    known.record = Record::Answered;
                }
            }
            None => counters.stun_refused += 1,
        }
    }

    // Time.

    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        if let Some(run) = &self.run {
            let probes = run.probes.iter().filter(|probe| !probe.is_over()).map(|probe| probe.next);
            return probes.chain([run.started + RUN_LIMIT]).min();
        }
        let wanted = self.wanted.map(|at| self.last_start.map_or(at, |start| at.max(start + BETWEEN_STARTS)));
        [wanted, self.periodic].into_iter().flatten().min().filter(|_| self.has_map && self.link_up)
    }

    /// Does what is due. `latency` tells how far a region is, so that near servers are asked first.
    pub(crate) fn tick(
        &mut self,
        has_peers: bool,
        latency: impl Fn(RegionId) -> Option<Duration>,
        rng: &mut impl CryptoRngCore,
        counters: &mut Counters,
        sink: &mut impl Sink,
        now: Instant,
    ) -> Progress {
        let mut progress = Progress::default();
        if self.run.is_none() && self.has_map && self.link_up {
            if self.periodic.is_some_and(|at| at <= now) {
                self.periodic = None;
                let active = self.active_at.is_some_and(|at| now.saturating_duration_since(at) < ACTIVE);
                if has_peers && active {
                    self.request(now);
                } else {
                    self.dormant = true;
                }
            }
            let pause_over = self.last_start.is_none_or(|start| start + BETWEEN_STARTS <= now);
            if self.wanted.is_some_and(|at| at <= now) && pause_over {
                self.start(now);
                progress.started = true;
            }
        }
        if self.run.is_some() {
            self.plan(latency, rng, now);
            self.send(counters, sink, now);
            progress.finished = self.finish_if_over(rng, now);
        }
        progress
    }

    fn start(&mut self, now: Instant) {
        self.wanted = None;
        self.periodic = None;
        self.dormant = false;
        self.last_start = Some(now);
        // A firewall may have come up since a peer last answered.
        self.udp_from_peer = false;
        self.run = Some(Run {
            started: now,
            servers_known: !self.servers.is_empty(),
            probes: Vec::new(),
            v4_answers: Vec::new(),
            v6_answer: None,
            any_answer: false,
        });
    }

    /// Chooses the servers of this run as soon as they and our sockets are known.
    fn plan(&mut self, latency: impl Fn(RegionId) -> Option<Duration>, rng: &mut impl CryptoRngCore, now: Instant) {
        let Some(run) = self.run.as_mut().filter(|run| run.probes.is_empty()) else { return };
        if self.direct != Direct::Allowed {
            return;
        }
        let mut servers: Vec<&Server> =
            self.servers.iter().filter(|server| self.endpoints.has_socket_for(&server.address)).collect();
        // The sort is stable: servers that are equal stay in the order of the map.
        servers.sort_by_key(|server| (server.record, latency(server.region).unwrap_or(Duration::MAX)));
        for v4 in [true, false] {
            let family = servers.iter().filter(|server| server.address.is_ipv4() == v4);
            run.probes.extend(family.take(SERVERS_PER_FAMILY).map(|server| Probe {
                server: server.address,
                tx: TxId::random(&mut *rng),
                sent: 0,
                next: now,
                mapped: None,
                given_up: false,
            }));
        }
    }

    fn send(&mut self, counters: &mut Counters, sink: &mut impl Sink, now: Instant) {
        let Some(run) = &mut self.run else { return };
        for index in 0..run.probes.len() {
            let Some(probe) = run.probes.get(index) else { return };
            let (v4, server) = (probe.server.is_ipv4(), probe.server);
            let enough = is_enough(&run.probes, v4);
            let Some(probe) = run.probes.get_mut(index) else { return };
            if probe.is_over() || probe.next > now {
                continue;
            }
            // More answers could teach nothing new.
            if enough || probe.sent > REPEAT.len() {
                probe.given_up = true;
                continue;
            }
            probe.next = now + REPEAT.get(probe.sent).copied().unwrap_or(LAST_WAIT);
            probe.sent += 1;
            let request = stun::binding_request(&probe.tx);
            let route = Route::Udp(server);
            match sink.outgoing(route, request.len()).and_then(|out| out.get_mut(..request.len())) {
                Some(out) => {
                    out.copy_from_slice(&request);
                    sink.send(route, request.len());
                    counters.stun_sent += 1;
                }
                None => counters.sink_full += 1,
            }
        }
    }

    fn finish_if_over(&mut self, rng: &mut impl CryptoRngCore, now: Instant) -> bool {
        let Some(run) = &self.run else { return false };
        let out_of_time = run.started + RUN_LIMIT <= now;
        let is_over = |v4| {
            let family = || run.probes.iter().filter(|probe| probe.server.is_ipv4() == v4);
            is_enough(&run.probes, v4) || family().all(Probe::is_over)
        };
        let nothing_to_ask = self.direct != Direct::Allowed || (run.servers_known && run.probes.is_empty());
        let all_over = !run.probes.is_empty() && is_over(true) && is_over(false);
        if !(out_of_time || nothing_to_ask || all_over) {
            return false;
        }
        let Some(run) = self.run.take() else { return false };
        for probe in run.probes.iter().filter(|probe| probe.mapped.is_none() && probe.sent > REPEAT.len()) {
            for server in self.servers.iter_mut().filter(|server| server.address == probe.server) {
                server.record = Record::Silent;
            }
        }
        self.facts = self.facts_of(&run);
        self.finished = Some(now);
        let spread = Duration::from_millis(rng.next_u64() % (PERIOD_SPREAD_MS + 1));
        self.periodic = Some(now + PERIOD + spread);
        self.rebuild(now);
        true
    }

    fn facts_of(&self, run: &Run) -> Facts {
        let asked = run.probes.iter().any(|probe| probe.sent > 0);
        let first = run.v4_answers.first().copied();
        // A hard NAT names another port at every server: the one we told peers of stays the one, while it is among them.
        let present = self.facts.mapped.v4.filter(|known| run.v4_answers.contains(known));
        let varies =
            (run.v4_answers.len() >= ENOUGH).then(|| run.v4_answers.iter().any(|answer| Some(*answer) != first));
        Facts {
            udp: asked.then_some(run.any_answer),
            mapped: Mapped { v4: present.or(first), v6: run.v6_answer },
            varies: varies.or(self.facts.varies),
        }
    }

    fn rebuild(&mut self, now: Instant) -> bool {
        let before = self.endpoints.list().to_vec();
        if self.is_direct_allowed() {
            self.endpoints.rebuild(self.facts.mapped, now);
        } else {
            self.endpoints.clear();
        }
        before != self.endpoints.list()
    }
}

fn is_enough(probes: &[Probe], v4: bool) -> bool {
    probes.iter().filter(|probe| probe.server.is_ipv4() == v4 && probe.mapped.is_some()).count() >= ENOUGH
}
