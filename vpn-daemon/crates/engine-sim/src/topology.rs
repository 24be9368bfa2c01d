//! The table of networks: between which two places a direct path must result, and where the relay has to do and why.
//!
//! Each row is played in the same way: a client asks an agent something every second. The first answer comes at once, by
//! relay if need be; where a direct path is possible it is in use at both ends within two seconds of the first packet and
//! stays; after ten idle minutes it is found again.

use codervpn_engine::{Command, Direct, Path, RelayReason};

use crate::network::Passage;
use crate::party::PartyId;
use crate::site::{Family4, Site};
use crate::wire::Wire;
use crate::world::{Flow, World};
use crate::{Nat, Ports, Scope, Time, ms, secs};

/// Issue: a direct path where one is possible is in use this long after the first packet.
const DIRECT_WITHIN: Time = secs(2);
/// First answer, introduction by the coordinator included.
const ANSWERED_WITHIN: Time = secs(1);

/// The path that must result, at both ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    /// To an address of the LAN.
    Lan,
    /// To a public IPv4 address.
    V4,
    V6,
    /// To an address of the provider's network.
    Provider,
    /// For the reason that the client gives.
    Relay(RelayReason),
}

/// A network.
pub struct Row {
    pub name: &'static str,
    pub expected: Expected,
    build: fn(&mut World) -> (PartyId, PartyId),
}

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// From the first packet to the first answer.
    pub answered: Time,
    /// From the first packet to the direct path at both ends.
    pub direct: Option<Time>,
    /// The same after ten idle minutes.
    pub again: Option<Time>,
    pub virtual_time: Time,
}

fn pair(world: &mut World, client: Site, agent: Site) -> (PartyId, PartyId) {
    let (here, there) = (world.add_site(client), world.add_site(agent));
    (world.add_client(here), world.add_agent(there))
}

fn behind(nat: Nat) -> Site {
    Site::behind(nat)
}

/// A site whose line takes packets of this size.
fn narrow(mtu: usize, tells: bool) -> Site {
    let line = Wire { delay: ms(8), mtu, tells_too_big: tells, ..Wire::default() };
    Site { line, ..Site::default() }
}

fn without_udp() -> Site {
    Site { line: Wire { delay: ms(8), udp: false, ..Wire::default() }, ..Site::default() }
}

fn v6_only() -> Site {
    Site { v4: Family4::None, v6: Some(Scope::AddressPort), ..Site::default() }
}

fn firewalled(scope: Scope) -> Site {
    Site { v4: Family4::Firewalled(scope), ..Site::default() }
}

/// Every mapping with every filtering.
fn nat(mapping: Scope, filtering: Scope) -> Nat {
    Nat::new(mapping, filtering, Ports::Random)
}

/// All rows.
#[must_use]
pub fn table() -> Vec<Row> {
    use Expected::{Lan, Provider, Relay, V4, V6};
    use RelayReason as Why;
    let row = |name, expected, build| Row { name, expected, build };
    vec![
        row("same LAN", Lan, |w| {
            let site = w.add_site(Site::default());
            (w.add_client(site), w.add_agent(site))
        }),
        row("same LAN, dual stack", Lan, |w| {
            let site = w.add_site(Site::default().with_v6());
            (w.add_client(site), w.add_agent(site))
        }),
        row("same LAN without a way out for UDP", Lan, |w| {
            let site = w.add_site(without_udp());
            (w.add_client(site), w.add_agent(site))
        }),
        row("same LAN behind a hard NAT", Lan, |w| {
            let site = w.add_site(behind(Nat::hard()));
            (w.add_client(site), w.add_agent(site))
        }),
        row("two public hosts", V4, |w| pair(w, Site::public(), Site::public())),
        row("easy NAT at both ends", V4, |w| pair(w, behind(Nat::easy()), behind(Nat::easy()))),
        row("easy NATs with random ports", V4, |w| {
            let nat = || nat(Scope::Any, Scope::AddressPort);
            pair(w, behind(nat()), behind(nat()))
        }),
        row("same private subnet at both ends", V4, |w| {
            let site = || Site { subnet: 0, ..behind(Nat::easy()) };
            pair(w, site(), site())
        }),
        row("container bridges with the same address", V4, |w| {
            let site = || Site { bridge: Some([172, 17, 0, 1].into()), ..behind(Nat::easy()) };
            pair(w, site(), site())
        }),
        row("endpoint-independent filtering at the agent, hard NAT at the client", V4, |w| {
            pair(w, behind(Nat::hard()), behind(nat(Scope::Any, Scope::Any)))
        }),
        row("address-dependent filtering at the agent, hard NAT at the client", V4, |w| {
            pair(w, behind(Nat::hard()), behind(nat(Scope::Any, Scope::Address)))
        }),
        row("address-dependent filtering at the client, hard NAT at the agent", V4, |w| {
            pair(w, behind(nat(Scope::Any, Scope::Address)), behind(Nat::hard()))
        }),
        row("address-dependent mapping at the client, easy NAT at the agent", Relay(Why::HardNat), |w| {
            pair(w, behind(nat(Scope::Address, Scope::AddressPort)), behind(Nat::easy()))
        }),
        row("address-dependent mapping and filtering against endpoint-independent filtering", V4, |w| {
            pair(w, behind(nat(Scope::Address, Scope::Address)), behind(nat(Scope::Any, Scope::Any)))
        }),
        row("hard NAT at the client, port-restricted at the agent", Relay(Why::HardNat), |w| {
            pair(w, behind(Nat::hard()), behind(Nat::easy()))
        }),
        row("hard NAT at the agent, port-restricted at the client", Relay(Why::NoAnswer), |w| {
            pair(w, behind(Nat::easy()), behind(Nat::hard()))
        }),
        row("hard NAT at both ends", Relay(Why::HardNat), |w| pair(w, behind(Nat::hard()), behind(Nat::hard()))),
        row("hard NATs that count ports up", Relay(Why::HardNat), |w| {
            let nat = || Nat::new(Scope::AddressPort, Scope::AddressPort, Ports::Sequential);
            pair(w, behind(nat()), behind(nat()))
        }),
        row("hard NATs that preserve ports, as Linux does", V4, |w| {
            let nat = || Nat::new(Scope::AddressPort, Scope::AddressPort, Ports::Preserving);
            pair(w, behind(nat()), behind(nat()))
        }),
        row("hard NAT and a public host", V4, |w| pair(w, behind(Nat::hard()), Site::public())),
        row("public host and a hard NAT", V4, |w| pair(w, Site::public(), behind(Nat::hard()))),
        row("hard NAT and a host behind a firewall", Relay(Why::HardNat), |w| {
            pair(w, behind(Nat::hard()), firewalled(Scope::AddressPort))
        }),
        row("hard NAT with a mapped port at both ends", V4, |w| {
            let (client, agent) = pair(w, behind(Nat::hard()), behind(Nat::hard()));
            w.map_port(client);
            w.map_port(agent);
            (client, agent)
        }),
        row("hard NAT at both ends, a mapped port at the agent", V4, |w| {
            let (client, agent) = pair(w, behind(Nat::hard()), behind(Nat::hard()));
            w.map_port(agent);
            (client, agent)
        }),
        row("firewalls at both ends", V4, |w| pair(w, firewalled(Scope::AddressPort), firewalled(Scope::AddressPort))),
        row("UDP blocked at the client", Relay(Why::UdpBlocked), |w| pair(w, without_udp(), behind(Nat::easy()))),
        row("UDP blocked at the agent", Relay(Why::NoAnswer), |w| pair(w, behind(Nat::easy()), without_udp())),
        row("UDP refused by a local firewall", Relay(Why::UdpBlocked), |w| {
            let (client, agent) = pair(w, behind(Nat::easy()), behind(Nat::easy()));
            let host = w.host(client);
            w.network.hosts[host.0].blocked = true;
            (client, agent)
        }),
        row("IPv6 only", V6, |w| pair(w, v6_only(), v6_only())),
        row("dual stack at both ends, hard NATs", V6, |w| {
            pair(w, behind(Nat::hard()).with_v6(), behind(Nat::hard()).with_v6())
        }),
        row("IPv6 only and IPv4 only", Relay(Why::NoAnswer), |w| pair(w, v6_only(), behind(Nat::easy()))),
        row("IPv6 only and dual stack", V6, |w| pair(w, v6_only(), behind(Nat::hard()).with_v6())),
        row("1,300-byte line at the client", Relay(Why::PathTooSmall), |w| {
            pair(w, narrow(1300, true), behind(Nat::easy()))
        }),
        row("1,300-byte line at the client, silent", Relay(Why::NoAnswer), |w| {
            pair(w, narrow(1300, false), behind(Nat::easy()))
        }),
        row("1,300-byte line at the agent", Relay(Why::PathTooSmall), |w| {
            pair(w, behind(Nat::easy()), narrow(1300, true))
        }),
        row("T-13: a byte too small", Relay(Why::PathTooSmall), |w| pair(w, narrow(1339, true), behind(Nat::easy()))),
        row("T-13: just large enough", V4, |w| pair(w, narrow(1340, true), behind(Nat::easy()))),
        row("neighbours behind one provider's NAT with hairpin", V4, |w| {
            let provider = w.add_provider(Nat::easy().with_hairpin());
            let (here, there) =
                (w.add_site_behind(Site::default(), provider), w.add_site_behind(Site::default(), provider));
            (w.add_client(here), w.add_agent(there))
        }),
        row("neighbours behind one provider's NAT without hairpin", Relay(Why::NoAnswer), |w| {
            let provider = w.add_provider(Nat::easy());
            let (here, there) =
                (w.add_site_behind(Site::default(), provider), w.add_site_behind(Site::default(), provider));
            (w.add_client(here), w.add_agent(there))
        }),
        row("neighbours behind one provider's NAT, one attached to it", Provider, |w| {
            let provider = w.add_provider(Nat::easy());
            let public = Site { v4: Family4::Provider, ..Site::default() };
            let (here, there) = (w.add_site_behind(Site::default(), provider), w.add_site_behind(public, provider));
            (w.add_client(here), w.add_agent(there))
        }),
        row("provider's NAT behind a NAT, easy at the other end", V4, |w| {
            let twice =
                Site { v4: Family4::TwiceTranslated { own: Nat::easy(), provider: Nat::easy() }, ..Site::default() };
            pair(w, twice, behind(Nat::easy()))
        }),
        row("hard provider's NAT behind a NAT, easy at the other end", Relay(Why::HardNat), |w| {
            let twice =
                Site { v4: Family4::TwiceTranslated { own: Nat::easy(), provider: Nat::hard() }, ..Site::default() };
            pair(w, twice, behind(Nat::easy()))
        }),
        row("direct paths off by the user", Relay(Why::DisabledByUser), |w| {
            let (client, agent) = pair(w, behind(Nat::easy()), behind(Nat::easy()));
            w.set_direct(client, Direct::DisabledByUser);
            (client, agent)
        }),
        row("direct paths off by the deployment", Relay(Why::DisabledByDeployment), |w| {
            let (client, agent) = pair(w, behind(Nat::easy()), behind(Nat::easy()));
            w.set_direct(client, Direct::DisabledByDeployment);
            w.set_direct(agent, Direct::DisabledByDeployment);
            (client, agent)
        }),
        row("no STUN server answers, the agent is public", V4, |w| {
            for server in &mut w.network.stun {
                server.up = false;
            }
            pair(w, behind(Nat::easy()), Site::public())
        }),
        row("one of three STUN servers answers", V4, |w| {
            for server in w.network.stun.iter_mut().skip(2) {
                server.up = false;
            }
            pair(w, behind(Nat::easy()), behind(Nat::easy()))
        }),
        row("5 % loss and jitter at both ends", V4, |w| {
            let line =
                Wire { delay: ms(20), jitter: ms(15), ordered: false, loss: 0.025, duplicate: 0.01, ..Wire::default() };
            let site = || Site { line: line.clone(), ..Site::default() };
            pair(w, site(), site())
        }),
        row("far apart", V4, |w| {
            let site = || Site { line: Wire { delay: ms(120), ..Wire::default() }, ..Site::default() };
            pair(w, site(), site())
        }),
    ]
}

impl Row {
    /// Plays the row and panics where it does not go as it must.
    pub fn play(&self, seed: u64) -> Outcome {
        let mut world = World::new(self.name, seed);
        world.add_usual_servers();
        let (client, agent) = (self.build)(&mut world);
        // The processes have been running for a while.
        world.run(secs(5));
        let begin = world.now;
        world.connect(client, agent);
        world.flow(asking(client, agent, 20));
        let answered = world.run_until(secs(30), |w| w.observed(client, agent).answered > 0);
        let answered = answered.unwrap_or_else(|| world.fail(format_args!("no answer at all")));
        let direct = self.wait_for_path(&mut world, client, agent, begin);
        world.run(secs(20));
        self.check_path(&world, client, agent);
        let limit = if self.name == "far apart" { ANSWERED_WITHIN * 2 } else { ANSWERED_WITHIN };
        if answered > limit {
            world.fail(format_args!("the first answer came after {answered:?}"));
        }
        // Nothing to say, then something again.
        for _ in 0..20 {
            world.run(secs(30));
        }
        let begin = world.now;
        world.flow(asking(client, agent, 20));
        let again = self.wait_for_path(&mut world, client, agent, begin);
        world.run(secs(20));
        self.check_path(&world, client, agent);
        world.show_watched();
        Outcome { answered, direct, again, virtual_time: world.now }
    }

    fn wait_for_path(&self, world: &mut World, client: PartyId, agent: PartyId, begin: Time) -> Option<Time> {
        if matches!(self.expected, Expected::Relay(_)) {
            return None;
        }
        let both = |w: &World| self.is_right(w.path(client, agent)) && self.is_right(w.path(agent, client));
        let limit = if self.name.contains("loss") { DIRECT_WITHIN * 5 } else { DIRECT_WITHIN };
        if world.run_until(limit, both).is_none() {
            let report = (world.engine(client).net_report(), world.engine(agent).net_report());
            world.fail(format_args!(
                "no {:?} path within {limit:?} but {:?} and {:?}\n  {report:?}\n  {:?}\n  {:?}",
                self.expected,
                world.path(client, agent),
                world.path(agent, client),
                world.engine(client).counters(),
                world.engine(agent).counters(),
            ));
        }
        Some(world.now - begin)
    }

    fn check_path(&self, world: &World, client: PartyId, agent: PartyId) {
        let (out, back) = (world.path(client, agent), world.path(agent, client));
        if !self.is_right(out) || !self.is_right(back) {
            world.fail(format_args!("the path is {out:?} and back {back:?}, not {:?}", self.expected));
        }
        if let Expected::Relay(reason) = self.expected {
            let said = world.status(client, agent).and_then(|status| status.relay_reason);
            if said != Some(reason) {
                world.fail(format_args!(
                    "relayed because of {said:?}, not {reason:?}\n  {:?}",
                    world.engine(client).net_report()
                ));
            }
        }
    }

    fn is_right(&self, path: Option<Path>) -> bool {
        let Some(path) = path else { return false };
        match (self.expected, path) {
            (Expected::Relay(_), Path::Relay(_)) => true,
            (Expected::V6, Path::Direct(to)) => to.is_ipv6(),
            (Expected::Lan, Path::Direct(to)) => to.to_string().starts_with("192.168."),
            (Expected::Provider, Path::Direct(to)) => to.to_string().starts_with("100.64."),
            (Expected::V4, Path::Direct(to)) => to.is_ipv4() && to.to_string().starts_with("5."),
            _ => false,
        }
    }
}

/// A request every second.
fn asking(from: PartyId, to: PartyId, seconds: u64) -> Flow {
    Flow { from, to, every: secs(1), size: 200, left: seconds, answered: true }
}

impl World {
    /// The nearest router forwards a port to the party, which knows it.
    pub fn map_port(&mut self, party: PartyId) {
        let host = self.host(party);
        let Some(port) = self.parties[party.0].v4 else { return };
        let (Some(inside), Some(router)) =
            (self.network.hosts[host.0].v4, self.network.routers_of(host).first().copied())
        else {
            return;
        };
        let router = &mut self.network.routers[router.0];
        let outer_port = 30_000 + port % 1000;
        if let Passage::Translated(nat) = &mut router.v4 {
            nat.forwards.push((outer_port, (inside, port).into()));
        }
        let mapped = router.outer_v4().map(|ip| (ip, outer_port).into());
        self.command(party, Command::PortMapped(mapped));
    }
}
