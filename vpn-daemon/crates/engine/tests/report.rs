//! The net report and what we tell the coordinator because of it, seen from outside: requests, answers, runs, nodes.
#![allow(clippy::unwrap_used)]

mod sim;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use codervpn_engine::{Command, Direct, Event, LinkChange, RelayLatency, Route, SendFailure, StunServer};
use codervpn_wire::node::{Family, coder_address};
use codervpn_wire::stun::{self, Strictness};
use sim::{AGENT, Party, World, map, ms, region, secs, start, udp};

const V4: [&str; 2] = ["192.0.2.1:3478", "192.0.2.2:3478"];
const V6: [&str; 2] = ["[2001:db8::1]:3478", "[2001:db8::2]:3478"];

/// One engine, and STUN servers that answer as `mapped` says, after `delay`.
struct Lab {
    now: Instant,
    party: Party,
    mapped: BTreeMap<SocketAddr, SocketAddr>,
    delay: Duration,
    in_flight: Vec<(Instant, SocketAddr, Vec<u8>)>,
    /// When which server was asked.
    asked: Vec<(Instant, SocketAddr)>,
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

impl Lab {
    /// Sockets and a map are there; nothing has been resolved yet.
    fn new() -> Self {
        let now = start();
        let mut party = Party::client(1, now);
        party.apply(Command::SocketsBound { v4: Some(4001), v6: Some(6001) }, now);
        party.apply(Command::LocalAddresses(vec!["192.168.1.5".parse().unwrap()]), now);
        party.online(now);
        Self { now, party, mapped: BTreeMap::new(), delay: ms(10), in_flight: Vec::new(), asked: Vec::new() }
    }

    /// As `new`, with two servers of each family that see us under one address.
    fn easy() -> Self {
        let mut lab = Self::new();
        for server in V4 {
            lab.mapped.insert(address(server), address("203.0.113.7:1024"));
        }
        for server in V6 {
            lab.mapped.insert(address(server), address("[2001:db8:7::7]:6001"));
        }
        lab.resolve(&[V4[0], V4[1], V6[0], V6[1]]);
        lab
    }

    fn apply(&mut self, command: Command) {
        self.party.apply(command, self.now);
        self.collect();
    }

    fn resolve(&mut self, servers: &[&str]) {
        let server = |text: &&str| StunServer { region: region(1), address: address(text) };
        self.apply(Command::StunServers(servers.iter().map(server).collect()));
    }

    fn collect(&mut self) {
        while let Some((route, bytes)) = self.party.out.sent.pop_front() {
            let Route::Udp(server) = route else { continue };
            let tx = stun::parse_binding_request(&bytes, Strictness::Strict).expect("nothing but STUN by UDP");
            self.asked.push((self.now, server));
            if let Some(mapped) = self.mapped.get(&server) {
                let mut out = [0; stun::MAX_RESPONSE_LEN];
                let len = stun::binding_response(&tx, *mapped, &mut out);
                self.in_flight.push((self.now + self.delay, server, out[..len].to_vec()));
            }
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let arrival = self.in_flight.iter().map(|flight| flight.0).min();
            let timeout = self.party.engine.poll_timeout();
            let Some(next) = [arrival, timeout].into_iter().flatten().min().filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            if let Some(due) = self.in_flight.iter().position(|flight| flight.0 <= self.now) {
                let (_, server, bytes) = self.in_flight.remove(due);
                self.party.engine.handle_udp(server, &bytes, self.now, &mut self.party.out);
            } else {
                self.party.engine.handle_timeout(self.now, &mut self.party.out);
                let next = self.party.engine.poll_timeout();
                assert!(next.is_none_or(|at| at > self.now), "a timer that does not move on");
            }
            self.party.drain();
            self.collect();
        }
        self.now = end;
    }

    /// How often `event` came since the last call of this.
    fn count(&mut self, event: Event) -> usize {
        let (of_kind, others): (Vec<_>, Vec<_>) = self.party.events.drain(..).partition(|e| *e == event);
        self.party.events = others;
        of_kind.len()
    }

    fn endpoints(&self) -> Vec<String> {
        self.party.engine.net_report().endpoints.iter().map(ToString::to_string).collect()
    }

    /// An agent is known and a packet goes to it.
    fn use_the_tunnel(&mut self) {
        self.apply(Command::AddDestination(AGENT));
        let mut agent = Party::agent(AGENT, 2, self.now);
        agent.online(self.now);
        self.apply(Command::Node { id: AGENT, node: agent.node() });
        self.packet();
    }

    fn packet(&mut self) {
        let packet = udp(self.party.address, coder_address(AGENT), 1, 2, b"x");
        self.party.tun(&packet, self.now);
        self.collect();
    }
}

#[test]
fn two_servers_of_each_family_tell_who_we_are_and_our_node_follows() {
    let mut lab = Lab::easy();
    assert_eq!(lab.count(Event::SelfNodeChanged), 1, "the first node does not wait for STUN");
    assert_eq!(lab.party.node().endpoints, [address("192.168.1.5:4001")]);
    lab.run(ms(10));
    let report = lab.party.engine.net_report();
    assert_eq!(report.udp, Some(true));
    assert_eq!(report.v4, Some(address("203.0.113.7:1024")));
    assert_eq!(report.v6, Some(address("[2001:db8:7::7]:6001")));
    assert_eq!(report.mapping_varies, Some(false));
    assert_eq!(lab.endpoints(), ["203.0.113.7:1024", "[2001:db8:7::7]:6001", "192.168.1.5:4001"]);
    assert_eq!(lab.count(Event::SelfNodeChanged), 1);
    assert_eq!(lab.party.node().endpoints, report.endpoints);
    assert_eq!(lab.asked.len(), 4, "nobody is asked twice who answers at once");
}

#[test]
fn a_nat_that_varies_is_recognised_and_the_address_we_told_is_kept() {
    let mut lab = Lab::new();
    lab.mapped.insert(address(V4[0]), address("203.0.113.7:1024"));
    lab.mapped.insert(address(V4[1]), address("203.0.113.7:1025"));
    lab.resolve(&V4);
    lab.run(secs(1));
    assert_eq!(lab.party.engine.net_report().mapping_varies, Some(true));
    let told = lab.party.engine.net_report().v4;
    lab.count(Event::SelfNodeChanged);
    // Whoever answers first in later runs: the node does not change.
    for _ in 0..4 {
        lab.apply(Command::Link(LinkChange::Minor));
        lab.run(secs(3));
        lab.in_flight.reverse();
    }
    assert_eq!(lab.party.engine.net_report().v4, told);
    assert_eq!(lab.count(Event::SelfNodeChanged), 0);
}

#[test]
fn t35_only_the_asked_server_with_our_transaction_counts_and_only_once() {
    let mut lab = Lab::new();
    lab.resolve(&V4);
    let request = |lab: &Lab, server: &str| lab.asked.iter().any(|(_, asked)| *asked == address(server));
    assert!(request(&lab, V4[0]) && request(&lab, V4[1]));
    // Take the transactions from a second look at the same run: repetitions carry them.
    lab.mapped.clear();
    let mut txs = BTreeMap::new();
    lab.now += ms(100);
    lab.party.engine.handle_timeout(lab.now, &mut lab.party.out);
    for (route, bytes) in lab.party.out.sent.drain(..) {
        if let Route::Udp(server) = route {
            txs.insert(server, stun::parse_binding_request(&bytes, Strictness::Strict).unwrap());
        }
    }
    let first = txs[&address(V4[0])];
    let answer = |tx, mapped: &str| {
        let mut out = [0; stun::MAX_RESPONSE_LEN];
        let len = stun::binding_response(&tx, address(mapped), &mut out);
        out[..len].to_vec()
    };
    let mut hostile: Vec<(&str, Vec<u8>)> = vec![
        (V4[1], answer(first, "203.0.113.66:1")),
        ("198.51.100.1:3478", answer(first, "203.0.113.66:1")),
        ("192.0.2.1:3479", answer(first, "203.0.113.66:1")),
        (V4[0], answer(stun::TxId([0; 12]), "203.0.113.66:1")),
        // A v4 server cannot have seen us under a v6 address.
        (V4[0], answer(first, "[2001:db8::66]:1")),
    ];
    let unusable = ["127.0.0.1:5", "0.0.0.0:5", "224.0.0.1:5", "255.255.255.255:5", "127.3.3.40:1", "203.0.113.66:0"];
    for mapped in unusable {
        hostile.push((V4[0], answer(first, mapped)));
    }
    let mut truncated = answer(first, "203.0.113.66:1");
    truncated.truncate(27);
    hostile.push((V4[0], truncated));
    let before = lab.party.engine.counters().stun_refused;
    for (source, datagram) in &hostile {
        lab.party.engine.handle_udp(address(source), datagram, lab.now, &mut lab.party.out);
    }
    assert_eq!(lab.party.engine.counters().stun_refused - before, hostile.len() as u64);
    assert!(lab.party.out.sent.is_empty(), "nobody is answered");
    // The true one counts, and its copy does not make a second answer of it.
    let good = answer(first, "203.0.113.7:1024");
    for _ in 0..2 {
        lab.party.engine.handle_udp(address(V4[0]), &good, lab.now, &mut lab.party.out);
    }
    assert_eq!(lab.party.engine.counters().stun_answers, 1);
    lab.run(secs(2));
    let report = lab.party.engine.net_report();
    assert_eq!((report.v4, report.mapping_varies), (Some(address("203.0.113.7:1024")), None));
    // And none of it counts when the run is over.
    lab.party.engine.handle_udp(address(V4[0]), &good, lab.now, &mut lab.party.out);
    assert_eq!(lab.party.engine.counters().stun_answers, 1);
}

#[test]
fn a_silent_network_ends_the_run_and_is_called_blocked() {
    let mut lab = Lab::new();
    lab.resolve(&V4);
    let began = lab.now;
    lab.run(secs(3));
    assert_eq!(lab.party.engine.net_report().udp, Some(false));
    let of_first: Vec<Duration> =
        lab.asked.iter().filter(|(_, server)| *server == address(V4[0])).map(|(at, _)| *at - began).collect();
    assert_eq!(of_first, [ms(0), ms(100), ms(300)]);
}

#[test]
fn one_lost_request_costs_nothing_but_its_repetition() {
    let mut lab = Lab::new();
    lab.resolve(&V4);
    lab.mapped.insert(address(V4[0]), address("203.0.113.7:1024"));
    lab.mapped.insert(address(V4[1]), address("203.0.113.7:1024"));
    lab.run(ms(110));
    assert_eq!(lab.party.engine.net_report().mapping_varies, Some(false));
}

#[test]
fn a_family_without_a_way_out_delays_nobody() {
    let mut lab = Lab::easy();
    for server in V6 {
        lab.party.engine.handle_send_failure(address(server), SendFailure::Unreachable, lab.now, &mut lab.party.out);
        lab.mapped.remove(&address(server));
    }
    lab.in_flight.retain(|(_, server, _)| server.is_ipv4());
    lab.count(Event::SelfNodeChanged);
    lab.run(ms(10));
    assert_eq!(lab.count(Event::SelfNodeChanged), 1);
    assert_eq!(lab.endpoints(), ["203.0.113.7:1024", "192.168.1.5:4001"]);
}

#[test]
fn t54_without_direct_paths_no_stun_leaves_and_t40_nothing_is_advertised() {
    for direct in [Direct::DisabledByUser, Direct::DisabledByDeployment] {
        let mut lab = Lab::easy();
        lab.run(secs(1));
        assert!(!lab.party.node().endpoints.is_empty());
        lab.count(Event::SelfNodeChanged);
        lab.apply(Command::Direct(direct));
        assert_eq!(lab.count(Event::SelfNodeChanged), 1, "at once");
        assert!(lab.party.node().endpoints.is_empty() && lab.endpoints().is_empty());
        lab.asked.clear();
        lab.use_the_tunnel();
        lab.apply(Command::LocalAddresses(vec!["192.168.1.6".parse().unwrap()]));
        lab.apply(Command::PortMapped(Some(address("203.0.113.9:9"))));
        lab.apply(Command::SocketsBound { v4: Some(4002), v6: None });
        lab.apply(Command::Link(LinkChange::Major));
        lab.resolve(&["192.0.2.9:3478"]);
        for _ in 0..10 {
            lab.packet();
            lab.run(secs(20));
        }
        assert_eq!(lab.asked, []);
        assert!(lab.party.node().endpoints.is_empty());
        assert!(lab.count(Event::MeasureRelays) > 3, "relays are measured all the same");

        lab.mapped.insert(address("192.0.2.9:3478"), address("203.0.113.8:8"));
        lab.apply(Command::Direct(Direct::Allowed));
        lab.run(secs(2));
        assert_eq!(lab.endpoints(), ["203.0.113.9:9", "203.0.113.8:8", "192.168.1.6:4002"]);
        assert_eq!(lab.party.node().endpoints.len(), 3);
    }
}

#[test]
fn runs_go_on_every_20_to_26_seconds_while_the_tunnel_is_used_and_stop_when_it_is_not() {
    let mut lab = Lab::easy();
    lab.run(secs(1));
    lab.count(Event::MeasureRelays);
    lab.run(secs(200));
    assert_eq!(lab.count(Event::MeasureRelays), 0, "without a peer");
    lab.use_the_tunnel();
    lab.run(ms(1));
    assert_eq!(lab.count(Event::MeasureRelays), 1, "the first peer, and what we know is old");

    lab.asked.clear();
    for _ in 0..60 {
        lab.packet();
        lab.run(secs(5));
    }
    let mut starts: Vec<Instant> = lab.asked.iter().map(|(at, _)| *at).collect();
    starts.dedup();
    for pair in starts.windows(2) {
        let apart = pair[1] - pair[0];
        assert!((secs(20)..=ms(26_050)).contains(&apart), "{apart:?}");
    }
    assert!((11..=15).contains(&starts.len()), "{}", starts.len());

    lab.run(secs(80));
    lab.count(Event::MeasureRelays);
    lab.asked.clear();
    lab.run(secs(300));
    assert_eq!((lab.count(Event::MeasureRelays), lab.asked.len()), (0, 0), "idle");
    lab.packet();
    lab.run(ms(1));
    assert_eq!(lab.count(Event::MeasureRelays), 1, "in use again");
}

#[test]
fn requests_during_a_run_make_one_more_and_none_is_stalled_by_silence() {
    let mut lab = Lab::new();
    assert_eq!(lab.count(Event::MeasureRelays), 1, "the map starts a run, which waits for its servers");
    for _ in 0..10 {
        lab.apply(Command::Link(LinkChange::Minor));
        lab.apply(Command::RelayDown(region(1)));
        lab.apply(Command::RelayUp(region(1)));
    }
    lab.run(ms(1999));
    assert_eq!(lab.count(Event::MeasureRelays), 0);
    lab.run(secs(10));
    assert_eq!(lab.count(Event::MeasureRelays), 1, "one for all of them");
}

#[test]
fn what_may_have_changed_the_network_starts_a_run() {
    let changes: [Command; 6] = [
        Command::DerpMap(map(&[1, 2])),
        Command::Link(LinkChange::Minor),
        Command::Link(LinkChange::Major),
        Command::RelayDown(region(1)),
        Command::PortMapped(Some("203.0.113.1:1".parse().unwrap())),
        Command::SocketsBound { v4: Some(5), v6: None },
    ];
    for change in changes {
        let mut lab = Lab::easy();
        lab.run(secs(5));
        lab.count(Event::MeasureRelays);
        let asked = lab.asked.len();
        lab.apply(change.clone());
        lab.run(ms(1));
        assert_eq!(lab.count(Event::MeasureRelays), 1, "{change:?}");
        assert!(lab.asked.len() > asked, "{change:?}");
    }
    let mut lab = Lab::easy();
    lab.run(secs(5));
    lab.count(Event::MeasureRelays);
    lab.apply(Command::DerpMap(map(&[1])));
    lab.run(secs(1));
    assert_eq!(lab.count(Event::MeasureRelays), 0, "the same map");
}

#[test]
fn without_a_network_nothing_is_sent_until_there_is_one() {
    let mut lab = Lab::easy();
    lab.run(secs(5));
    lab.asked.clear();
    lab.apply(Command::Link(LinkChange::Down));
    lab.apply(Command::RelayDown(region(1)));
    lab.run(secs(60));
    assert_eq!(lab.asked, []);
    lab.apply(Command::Link(LinkChange::Up));
    lab.run(ms(1));
    assert_eq!(lab.asked.len(), 4);
}

#[test]
fn our_node_is_published_when_something_but_latency_changed() {
    let mut lab = Lab::easy();
    let measured = |ms1, ms2| {
        let one = |id, ms| RelayLatency { region: region(id), family: Family::V4, latency: Duration::from_millis(ms) };
        Command::RelayLatencies(vec![one(1, ms1), one(2, ms2)])
    };
    lab.apply(Command::DerpMap(map(&[1, 2])));
    lab.apply(measured(20, 30));
    lab.run(secs(1));
    lab.count(Event::SelfNodeChanged);
    lab.apply(measured(25, 31));
    lab.run(secs(1));
    lab.apply(Command::RelayLatencies(vec![RelayLatency { region: region(1), family: Family::V4, latency: ms(20) }]));
    lab.run(secs(1));
    lab.apply(measured(25, 31));
    lab.run(secs(1));
    assert_eq!(lab.count(Event::SelfNodeChanged), 0, "latencies only");

    // The second region is far better: home moves, and the latencies travel along.
    lab.apply(Command::RelayUp(region(2)));
    lab.apply(measured(200, 4));
    assert_eq!(lab.count(Event::SelfNodeChanged), 1);
    let node = lab.party.node();
    assert_eq!(node.home, Some(region(2)));
    assert_eq!(node.derp_latency[&(region(2), Family::V4)], ms(4));

    lab.apply(Command::LocalAddresses(vec!["192.168.1.5".parse().unwrap(), "192.168.2.5".parse().unwrap()]));
    assert_eq!(lab.count(Event::SelfNodeChanged), 1, "another endpoint");
    lab.apply(Command::LocalAddresses(vec!["192.168.2.5".parse().unwrap(), "192.168.1.5".parse().unwrap()]));
    assert_eq!(lab.count(Event::SelfNodeChanged), 0, "another order");
}

#[test]
fn servers_that_answer_are_asked_first_and_silent_ones_last() {
    let mut lab = Lab::new();
    let servers: Vec<String> = (1..=8).map(|n| format!("192.0.2.{n}:3478")).collect();
    let texts: Vec<&str> = servers.iter().map(String::as_str).collect();
    for server in &servers[4..] {
        lab.mapped.insert(address(server), address("203.0.113.7:1024"));
    }
    lab.resolve(&texts);
    lab.run(secs(3));
    assert_eq!(lab.party.engine.net_report().udp, Some(false), "the first four are silent");
    lab.asked.clear();
    lab.apply(Command::Link(LinkChange::Minor));
    lab.run(secs(3));
    assert_eq!(lab.party.engine.net_report().mapping_varies, Some(false));
    assert!(lab.asked.iter().all(|(_, server)| !servers[..4].contains(&server.to_string())));
}

#[test]
fn a_world_of_two_is_undisturbed_by_reports() {
    let mut world = World::connected();
    let now = world.now;
    let packet = world.client_to_agent(b"hello");
    world.client().tun(&packet, now);
    world.run(secs(60));
    assert_eq!(world.agent().out.delivered.len(), 1);
}
