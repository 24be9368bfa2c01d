//! Networks and troubles made up from a seed: who lives where, who talks to whom and when, and what breaks. Whatever comes
//! of it, the invariants of the world must hold.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use codervpn_engine::{Direct, LinkChange};

use crate::invariants::Extremes;
use crate::party::PartyId;
use crate::rng::Rng;
use crate::site::{Family4, Site, SiteId};
use crate::wire::Wire;
use crate::world::{Flow, World};
use crate::{Nat, Ports, RegionId, Scope, Time, ms, secs};

/// Of one scenario.
const LENGTH: Time = secs(2 * 3600);
/// Time passes in steps of this: what no packet makes us look at is looked at then.
const STEP: Time = secs(30);

/// After so many failures the rest would tell nothing new.
const ENOUGH_FAILURES: usize = 8;

/// What a scenario came to.
#[derive(Clone, Copy, Default, Debug)]
pub struct Outcome {
    pub virtual_time: Time,
    pub steps: u64,
    pub asked: u64,
    pub answered: u64,
    pub troubles: u64,
    /// Pairs whose path was direct at the end, and all.
    pub direct: u64,
    pub pairs: u64,
    pub fingerprint: u64,
    pub extremes: Extremes,
}

impl Outcome {
    pub fn add(&mut self, other: &Self) {
        self.virtual_time += other.virtual_time;
        self.steps += other.steps;
        self.asked += other.asked;
        self.answered += other.answered;
        self.troubles += other.troubles;
        self.direct += other.direct;
        self.pairs += other.pairs;
        self.fingerprint ^= other.fingerprint;
        self.extremes = self.extremes.max(other.extremes);
    }
}

/// What many scenarios came to.
#[derive(Debug)]
pub struct Many {
    pub outcome: Outcome,
    /// Seeds from the first up to this one, not included.
    pub seeds: std::ops::Range<u64>,
    pub failed: Vec<u64>,
    /// Slowest recovery and its seed; most path messages and theirs.
    pub slowest: (Time, u64),
    pub loudest: (f64, u64),
}

impl fmt::Display for Many {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { virtual_time, steps, asked, answered, troubles, direct, pairs, extremes, .. } = &self.outcome;
        let (hours, seeds) = (virtual_time.as_secs() / 3600, &self.seeds);
        write!(f, "{hours} simulated hours, seeds {seeds:?}: {troubles} troubles, {steps} events, ")?;
        write!(f, "{answered} of {asked} requests answered, {direct} of {pairs} pairs direct at the end; ")?;
        let Extremes { recovery, pings, wakes } = extremes;
        write!(
            f,
            "slowest recovery {recovery:?}, most path messages {pings:.1} and timers {wakes:.1} a second and peer"
        )?;
        if !self.failed.is_empty() {
            write!(f, "; failed: {:?}", self.failed)?;
        }
        Ok(())
    }
}

/// Plays scenarios from a seed on, on every core, until they last so many hours together or enough have failed.
pub fn many(hours: u64, first: u64, failed: impl Fn(u64) + Sync) -> Many {
    let next = AtomicU64::new(first);
    let sum = Mutex::new((Outcome::default(), Vec::new(), (Time::ZERO, 0), (0.0, 0)));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let lock = || sum.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        loop {
            {
                let sum = lock();
                if sum.0.virtual_time >= secs(hours * 3600) || sum.1.len() >= ENOUGH_FAILURES {
                    return;
                }
            }
            let seed = next.fetch_add(1, Ordering::Relaxed);
            match std::panic::catch_unwind(|| play(seed)) {
                Ok(outcome) => {
                    let mut sum = lock();
                    sum.0.add(&outcome);
                    let Extremes { recovery, pings, .. } = outcome.extremes;
                    if recovery > sum.2.0 {
                        sum.2 = (recovery, seed);
                    }
                    if pings > sum.3.0 {
                        sum.3 = (pings, seed);
                    }
                }
                Err(_) => {
                    failed(seed);
                    lock().1.push(seed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let (outcome, failed, slowest, loudest) = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    Many { outcome, seeds: first..next.into_inner(), failed, slowest, loudest }
}

struct Scenario {
    world: World,
    /// Who was moved elsewhere.
    moved: BTreeSet<PartyId>,
    /// Which pairs had a direct path before anything happened.
    direct: BTreeSet<(PartyId, PartyId)>,
    rng: Rng,
    sites: Vec<SiteId>,
    clients: Vec<PartyId>,
    agents: Vec<PartyId>,
    regions: Vec<RegionId>,
    pairs: Vec<(PartyId, PartyId)>,
}

/// Plays the scenario of a seed; panics where something does not hold.
pub fn play(seed: u64) -> Outcome {
    let mut scenario = Scenario::new(seed);
    scenario.direct = scenario.all_talk();
    let mut troubles = 0;
    let mut next_trouble = secs(60);
    let mut next_talk = secs(0);
    while scenario.world.now < LENGTH {
        let now = scenario.world.now;
        // The last ten minutes are quiet, so that every trouble is followed by peace once.
        if now >= next_trouble && now + secs(600) < LENGTH {
            troubles += 1;
            let lasts = scenario.trouble();
            next_trouble = now + lasts + scenario.rng.between(secs(20), secs(900));
        }
        if now >= next_talk {
            let lasts = scenario.talk();
            let pause = if scenario.rng.chance(0.5) { secs(60) } else { secs(1200) };
            next_talk = now + lasts + scenario.rng.between(secs(0), pause);
        }
        let next = next_trouble.min(next_talk).min(now + STEP).max(now + ms(1));
        scenario.world.run(next - now);
    }
    let direct = scenario.all_talk();
    for (client, agent) in scenario.direct.difference(&direct) {
        if !scenario.moved.contains(client) && !scenario.moved.contains(agent) {
            scenario.world.fail(format_args!("{client:?} -> {agent:?}: direct before all troubles, not after them"));
        }
    }
    scenario.world.show_watched();
    scenario.outcome(troubles)
}

impl Scenario {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5ce0_a210);
        let mut world = World::new(&format!("scenario {seed}"), seed);
        world.rebind_changes_port = rng.chance(0.3);
        let mut regions = Vec::new();
        for number in 0..1 + rng.below(3) {
            regions.push(world.add_relay(number as i64 + 1, rng.between(ms(2), ms(80))));
        }
        for _ in 0..3 {
            world.add_stun(rng.between(ms(1), ms(40)));
        }
        for index in 0..world.network.stun.len() {
            world.network.stun[index].up = !rng.chance(0.15);
        }
        let provider = rng.chance(0.3).then(|| world.add_provider(any_nat(&mut rng)));
        let mut sites = Vec::new();
        for _ in 0..2 + rng.below(3) {
            let site = any_site(&mut rng);
            sites.push(match provider.filter(|_| rng.chance(0.4)) {
                Some(provider) => world.add_site_behind(Site { v6: None, ..site }, provider),
                None => world.add_site(site),
            });
        }
        let clients = (0..1 + rng.below(2)).map(|_| world.add_client(rng.pick(&sites))).collect::<Vec<_>>();
        let agents = (0..1 + rng.below(3)).map(|_| world.add_agent(rng.pick(&sites))).collect::<Vec<_>>();
        world.run(rng.between(ms(0), secs(5)));
        let mut pairs = Vec::new();
        for client in &clients {
            for agent in &agents {
                if pairs.is_empty() || rng.chance(0.8) {
                    pairs.push((*client, *agent));
                    world.connect(*client, *agent);
                }
            }
        }
        Self { world, moved: BTreeSet::new(), direct: BTreeSet::new(), rng, sites, clients, agents, regions, pairs }
    }

    /// Every pair talks for a while; returns those with a direct path then.
    fn all_talk(&mut self) -> BTreeSet<(PartyId, PartyId)> {
        for (from, to) in self.pairs.clone() {
            self.world.flow(Flow { from, to, every: ms(500), size: 200, left: 80, answered: true });
        }
        self.world.run(secs(35));
        let is_direct = |(client, agent): &&(PartyId, PartyId)| {
            matches!(self.world.path(*client, *agent), Some(codervpn_engine::Path::Direct(_)))
        };
        self.pairs.iter().filter(is_direct).copied().collect()
    }

    /// Some packets between some pair; returns how long they take.
    fn talk(&mut self) -> Time {
        let (from, to) = self.rng.pick(&self.pairs);
        let every = self.rng.pick(&[ms(100), ms(500), secs(1), secs(1), secs(2)]);
        let left = 5 + self.rng.below(60);
        let size = self.rng.pick(&[80, 200, 1280]);
        self.world.flow(Flow { from, to, every, size, left, answered: true });
        every * left as u32
    }

    fn any_party(&mut self) -> PartyId {
        let count = self.clients.len() + self.agents.len();
        let index = self.rng.below(count as u64) as usize;
        *self.clients.iter().chain(&self.agents).nth(index).expect("one of them")
    }

    /// Breaks something and mends it again; returns how long that takes.
    fn trouble(&mut self) -> Time {
        let party = self.any_party();
        let host = self.world.host(party);
        let router = self.world.network.routers_of(host)[0];
        let mut lasts = self.rng.between(ms(100), secs(60));
        if self.rng.chance(0.2) {
            lasts *= 10;
        }
        let world = &mut self.world;
        match self.rng.below(16) {
            0 => {
                world.forget_mappings(party);
                lasts = Time::ZERO;
            }
            1 | 2 => {
                world.note(format_args!("no UDP for {party:?}"));
                let before = std::mem::replace(&mut world.network.routers[router.0].wire.udp, false);
                world.disturbed();
                world.at(lasts, move |world| {
                    world.note(format_args!("UDP for {party:?} as before"));
                    world.network.routers[router.0].wire.udp = before;
                    world.disturbed();
                });
            }
            3 => {
                world.set_cable(party, false);
                world.at(lasts, move |world| world.set_cable(party, true));
            }
            4 => world.suspend(party, lasts),
            5 | 6 => {
                let agent = self.rng.pick(&self.agents);
                let notice = self.rng.between(ms(50), secs(15));
                lasts = lasts.min(secs(20));
                if self.rng.chance(0.3) {
                    world.leave(agent, lasts);
                } else {
                    world.crash(agent, lasts, notice);
                }
            }
            7 => {
                let client = self.rng.pick(&self.clients);
                lasts = lasts.min(secs(20));
                world.crash(client, lasts, secs(1));
            }
            8 => {
                let region = self.rng.pick(&self.regions);
                world.stop_relay(region);
                world.at(lasts, move |world| world.start_relay(region));
            }
            9 => {
                world.cut_coordinator(party);
                world.at(lasts, move |world| world.restore_coordinator(party));
            }
            10 => {
                let site = self.rng.pick(&self.sites);
                self.moved.insert(party);
                world.move_to(party, site);
                lasts = Time::ZERO;
            }
            11 => {
                let change = self.rng.pick(&[LinkChange::Major, LinkChange::Minor]);
                world.links_change(party, change);
                lasts = Time::ZERO;
            }
            12 => {
                let mtu = 1280 + self.rng.below(80) as usize;
                world.note(format_args!("the line of {party:?} takes {mtu} bytes"));
                let tells = self.rng.chance(0.5);
                let wire = &mut world.network.routers[router.0].wire;
                let before = (wire.mtu, wire.tells_too_big);
                (wire.mtu, wire.tells_too_big) = (mtu.min(before.0), tells);
                world.disturbed();
                world.at(lasts, move |world| {
                    world.note(format_args!("the line of {party:?} as before"));
                    let wire = &mut world.network.routers[router.0].wire;
                    (wire.mtu, wire.tells_too_big) = before;
                    world.disturbed();
                });
            }
            13 => {
                let direct = self.rng.pick(&[Direct::DisabledByUser, Direct::DisabledByDeployment]);
                world.set_direct(party, direct);
                world.at(lasts, move |world| world.set_direct(party, Direct::Allowed));
            }
            14 => {
                let (client, agent) = self.rng.pick(&self.pairs);
                world.disconnect(client, agent);
                world.at(lasts, move |world| world.connect(client, agent));
            }
            _ => {
                world.note(format_args!("bad weather for {party:?}"));
                let loss = self.rng.below(15) as f64 / 100.0;
                let wire = &mut world.network.routers[router.0].wire;
                let before = (wire.loss, wire.jitter, wire.ordered, wire.duplicate);
                (wire.loss, wire.jitter, wire.ordered, wire.duplicate) = (loss, ms(80), false, 0.05);
                world.disturbed();
                world.at(lasts, move |world| {
                    world.note(format_args!("fair weather for {party:?}"));
                    let wire = &mut world.network.routers[router.0].wire;
                    (wire.loss, wire.jitter, wire.ordered, wire.duplicate) = before;
                    world.disturbed();
                });
            }
        }
        lasts
    }

    fn outcome(&self, troubles: u64) -> Outcome {
        let mut outcome = Outcome {
            virtual_time: self.world.now,
            steps: self.world.steps,
            troubles,
            fingerprint: self.world.fingerprint(),
            extremes: self.world.extremes,
            ..Outcome::default()
        };
        for (client, agent) in &self.pairs {
            let seen = self.world.observed(*client, *agent);
            outcome.asked += seen.asked;
            outcome.answered += seen.answered;
            outcome.pairs += 1;
            let path = self.world.path(*client, *agent);
            outcome.direct += u64::from(matches!(path, Some(codervpn_engine::Path::Direct(_))));
        }
        outcome
    }
}

fn any_scope(rng: &mut Rng) -> Scope {
    rng.pick(&[Scope::Any, Scope::Address, Scope::AddressPort, Scope::AddressPort])
}

fn any_nat(rng: &mut Rng) -> Nat {
    let mapping = rng.pick(&[Scope::Any, Scope::Any, Scope::Address, Scope::AddressPort]);
    let mut nat = Nat::new(mapping, any_scope(rng), rng.pick(&[Ports::Preserving, Ports::Random, Ports::Sequential]));
    nat.hairpin = rng.chance(0.5);
    nat.refreshed_from_outside = rng.chance(0.7);
    nat.timeout = rng.pick(&[secs(30), secs(30), secs(120)]);
    nat
}

fn any_site(rng: &mut Rng) -> Site {
    let mut line = Wire { delay: rng.between(ms(1), ms(60)), ..Wire::default() };
    if rng.chance(0.4) {
        line.jitter = rng.between(ms(0), ms(30));
        line.ordered = rng.chance(0.5);
    }
    if rng.chance(0.3) {
        line.loss = rng.below(30) as f64 / 1000.0;
        line.duplicate = rng.below(10) as f64 / 1000.0;
    }
    if rng.chance(0.1) {
        line.mtu = 1280 + rng.below(100) as usize;
        line.tells_too_big = rng.chance(0.5);
    }
    line.udp = !rng.chance(0.1);
    let v6 = rng.chance(0.3).then(|| any_scope(rng));
    let v4 = match rng.below(10) {
        0 => Family4::Public,
        1 => Family4::Firewalled(any_scope(rng)),
        2 if v6.is_some() => Family4::None,
        3 => Family4::TwiceTranslated { own: any_nat(rng), provider: any_nat(rng) },
        _ => Family4::Translated(any_nat(rng)),
    };
    let bridge = rng.chance(0.3).then(|| [172, 17, 0, 1].into());
    Site { v4, v6, line, lan: Wire::default(), bridge, subnet: rng.below(3) as u8 }
}
