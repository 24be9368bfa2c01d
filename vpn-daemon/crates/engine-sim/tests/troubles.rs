//! One trouble each, under a request every 50 ms: how long nothing is answered, and what becomes of the path.

use codervpn_engine::{Direct, Path};
use codervpn_engine_sim::{Family4, Flow, Nat, PartyId, Scope, Site, Time, Wire, World, ms, secs};

const SEEDS: std::ops::Range<u64> = 0..20;

/// A client and an agent with requests between them, after the first ten seconds.
fn talking(name: &str, seed: u64, client: Site, agent: Site) -> (World, PartyId, PartyId) {
    let mut world = World::new(&format!("{name}, seed {seed}"), seed);
    world.add_usual_servers();
    let (here, there) = (world.add_site(client), world.add_site(agent));
    let (client, agent) = (world.add_client(here), world.add_agent(there));
    world.run(secs(5));
    world.connect(client, agent);
    world.flow(Flow { from: client, to: agent, every: ms(50), size: 200, left: u64::MAX, answered: true });
    // Not always the same distance from the last pong.
    world.run(secs(10) + ms(seed * 157));
    world.forget_gaps(client, agent);
    (world, client, agent)
}

fn line(delay_ms: u64) -> Site {
    Site { line: Wire::with_delay(delay_ms), ..Site::default() }
}

fn easy(name: &str, seed: u64) -> (World, PartyId, PartyId) {
    let (world, client, agent) = talking(name, seed, line(8), line(8));
    assert_direct(&world, client, agent);
    (world, client, agent)
}

fn assert_direct(world: &World, client: PartyId, agent: PartyId) {
    for (one, other) in [(client, agent), (agent, client)] {
        let path = world.path(one, other);
        assert!(matches!(path, Some(Path::Direct(_))), "{}: {path:?}\n{}", world.name, world.notes());
    }
}

fn gap_within(world: &World, client: PartyId, agent: PartyId, limit: Time) -> Time {
    let gap = world.observed(client, agent).longest_gap;
    assert!(gap <= limit, "{}: nothing came for {gap:?}, {limit:?} are allowed\n{}", world.name, world.notes());
    gap
}

fn set_udp(world: &mut World, party: PartyId, on: bool) {
    world.note(format_args!("UDP of {party:?}: {on}"));
    let router = world.router(party);
    world.network.routers[router].wire.udp = on;
    world.disturbed();
}

#[test]
fn udp_that_is_cut_silently_costs_at_most_a_second_and_a_half() {
    let mut longest = Time::ZERO;
    for delay in [1, 8, 60] {
        for seed in SEEDS {
            for cut_at_agent in [false, true] {
                let name = format!("UDP cut, {delay} ms lines, at the agent: {cut_at_agent}");
                let (mut world, client, agent) = talking(&name, seed, line(delay), line(delay));
                assert_direct(&world, client, agent);
                let party = if cut_at_agent { agent } else { client };
                set_udp(&mut world, party, false);
                world.run(secs(20));
                longest = longest.max(gap_within(&world, client, agent, ms(1500)));
                set_udp(&mut world, party, true);
                world.forget_gaps(client, agent);
                let both = |w: &World| {
                    [(client, agent), (agent, client)]
                        .iter()
                        .all(|(a, b)| matches!(w.path(*a, *b), Some(Path::Direct(_))))
                };
                let back = world.run_until(secs(15), both);
                assert!(back.is_some(), "{}: not direct again\n{}", world.name, world.notes());
                world.run(secs(5));
                gap_within(&world, client, agent, ms(400));
            }
        }
    }
    println!("longest gap {longest:?}");
}

#[test]
fn a_relay_that_starts_anew_is_not_noticed_on_a_direct_path() {
    for seed in SEEDS {
        let (mut world, client, agent) = easy("relay restart, direct", seed);
        let region = world.regions()[0];
        world.stop_relay(region);
        world.run(secs(10));
        world.start_relay(region);
        world.run(secs(10));
        gap_within(&world, client, agent, ms(150));
        assert_direct(&world, client, agent);
    }
}

#[test]
fn a_relay_that_starts_anew_costs_a_relayed_pair_less_than_three_seconds() {
    for seed in SEEDS {
        let hard = || Site::behind(Nat::hard());
        let (mut world, client, agent) = talking("relay restart, relayed", seed, hard(), hard());
        let region = world.regions()[0];
        world.stop_relay(region);
        world.run(ms(300));
        world.start_relay(region);
        world.run(secs(10));
        gap_within(&world, client, agent, secs(3));
    }
}

#[test]
fn t51_a_killed_agent_is_reached_a_second_after_its_new_node() {
    let mut longest = Time::ZERO;
    for seed in SEEDS {
        let (mut world, client, agent) = easy("agent restart", seed);
        let pause = ms(200);
        world.crash(agent, pause, ms(100));
        world.run(secs(20));
        // Its first node is announced once it has a relay connection: three round trips and a net report.
        longest = longest.max(gap_within(&world, client, agent, pause + ms(400) + secs(1)));
        assert_direct(&world, client, agent);
    }
    println!("longest gap {longest:?}, 200 ms of which the agent was away");
}

#[test]
fn t38_a_machine_that_wakes_up_is_back_within_two_seconds() {
    for seed in SEEDS {
        for asleep in [secs(20), secs(600), secs(7200)] {
            let (mut world, client, agent) = easy(&format!("asleep for {asleep:?}"), seed);
            world.suspend(client, asleep);
            world.run(asleep + ms(50));
            world.forget_gaps(client, agent);
            world.run(secs(15));
            gap_within(&world, client, agent, secs(2));
            assert_direct(&world, client, agent);
        }
    }
}

#[test]
fn t39_in_another_network_the_relay_carries_until_a_direct_path_is_proven() {
    for seed in SEEDS {
        let (mut world, client, agent) = easy("move", seed);
        let other = world.add_site(Site { subnet: 7, ..line(15) });
        world.move_to(client, other);
        world.run(secs(15));
        // The change is noticed after 250 ms, and a relay connection takes six crossings.
        gap_within(&world, client, agent, ms(250) + ms(400) + secs(1));
        assert_direct(&world, client, agent);
    }
}

#[test]
fn t40_forbidden_direct_paths_cost_no_packet() {
    for seed in SEEDS {
        let (mut world, client, agent) = easy("direct off and on", seed);
        let asked = world.observed(client, agent);
        world.set_direct(client, Direct::DisabledByUser);
        world.run(secs(10));
        assert!(matches!(world.path(client, agent), Some(Path::Relay(_))));
        gap_within(&world, client, agent, ms(200));
        world.set_direct(client, Direct::Allowed);
        world.run(secs(10));
        assert_direct(&world, client, agent);
        gap_within(&world, client, agent, ms(200));
        let now = world.observed(client, agent);
        let lost = (now.asked - asked.asked) as i64 - (now.answered - asked.answered) as i64;
        assert!(lost <= 3, "{}: {lost} lost\n{}", world.name, world.notes());
    }
}

#[test]
fn t10_when_the_fast_path_dies_the_slower_one_is_used() {
    for seed in SEEDS {
        let site = || Site { v6: Some(Scope::Any), ..line(8) };
        let (mut world, client, agent) = talking("two paths", seed, site(), site());
        let Some(Path::Direct(first)) = world.path(client, agent) else { panic!("{}", world.notes()) };
        world.note(format_args!("{first} is severed"));
        world.sever(client, agent, first.is_ipv4());
        world.run(secs(7));
        let Some(Path::Direct(second)) = world.path(client, agent) else { panic!("{}", world.notes()) };
        assert_ne!(first.is_ipv4(), second.is_ipv4());
        gap_within(&world, client, agent, ms(1500));
    }
}

#[test]
fn t12_a_line_that_takes_smaller_packets_now_is_left() {
    for seed in SEEDS {
        for tells in [true, false] {
            let (mut world, client, agent) = easy(&format!("narrower, told: {tells}"), seed);
            world.flow(Flow { from: client, to: agent, every: ms(100), size: 1280, left: u64::MAX, answered: true });
            world.run(secs(5));
            let router = world.router(client);
            world.network.routers[router].wire.mtu = 1300;
            world.network.routers[router].wire.tells_too_big = tells;
            world.disturbed();
            let left = world.run_until(secs(10), |w| {
                [(client, agent), (agent, client)].iter().all(|(a, b)| matches!(w.path(*a, *b), Some(Path::Relay(_))))
            });
            let limit = if tells { secs(4) } else { secs(5) };
            assert!(left.is_some_and(|left| left < limit), "{}: {left:?}\n{}", world.name, world.notes());
        }
    }
}

#[test]
fn a_router_that_forgets_its_mappings_costs_at_most_a_second_and_a_half() {
    for seed in SEEDS {
        for nat in [Nat::easy(), Nat::new(Scope::Any, Scope::AddressPort, codervpn_engine_sim::Ports::Random)] {
            let site = || Site { v4: Family4::Translated(nat.clone()), ..line(8) };
            let (mut world, client, agent) = talking("NAT restart", seed, site(), site());
            assert_direct(&world, client, agent);
            world.forget_mappings(client);
            world.run(secs(15));
            gap_within(&world, client, agent, ms(1500));
            assert_direct(&world, client, agent);
        }
    }
}

#[test]
fn nothing_is_lost_when_a_better_path_appears() {
    for seed in SEEDS {
        let (mut world, client, agent) = {
            let blocked = Site { line: Wire { udp: false, ..Wire::with_delay(8) }, ..Site::default() };
            talking("better path", seed, blocked, line(8))
        };
        let before = world.observed(client, agent);
        set_udp(&mut world, client, true);
        let direct = world.run_until(secs(30), |w| matches!(w.path(client, agent), Some(Path::Direct(_))));
        assert!(direct.is_some_and(|after| after < secs(12)), "{}: {direct:?}\n{}", world.name, world.notes());
        world.run(secs(5));
        let now = world.observed(client, agent);
        let lost = (now.asked - before.asked) as i64 - (now.answered - before.answered) as i64;
        assert!(lost <= 3, "{}: {lost} lost\n{}", world.name, world.notes());
    }
}

#[test]
fn random_loss_does_not_make_the_path_flap() {
    let mut changes = Vec::new();
    for seed in SEEDS {
        for loss in [0.005, 0.02, 0.05] {
            let lossy = || Site {
                line: Wire { loss, jitter: ms(20), ordered: false, ..Wire::with_delay(10) },
                ..Site::default()
            };
            let (mut world, client, agent) = talking(&format!("loss {loss}"), seed, lossy(), lossy());
            let before = world.observed(client, agent).changes;
            world.run(secs(300));
            changes.push(world.observed(client, agent).changes - before);
        }
    }
    changes.sort_unstable();
    println!("changes of path in five minutes: {changes:?}");
    assert!(changes.iter().all(|changes| *changes <= 4), "{changes:?}");
    assert!(changes[changes.len() / 2] <= 1, "{changes:?}");
}

#[test]
fn t42_500_idle_agents_cost_no_more_than_their_budget() {
    let mut world = World::new("500 agents", 1);
    world.add_usual_servers();
    let home = world.add_site(Site::default());
    let client = world.add_client(home);
    let mut agents = Vec::new();
    for _ in 0..25 {
        let site = world.add_site(Site::default());
        agents.extend((0..20).map(|_| world.add_agent(site)));
    }
    world.run(secs(3));
    for agent in &agents {
        world.connect(client, *agent);
    }
    world.run(secs(120));
    let (bytes, wakes) = world.spent(client);
    world.run(secs(600));
    let (bytes, wakes) = (world.spent(client).0 - bytes, world.spent(client).1 - wakes);
    let each = bytes / 600 / 500;
    println!("{each} bytes a second for each agent, {} wakes a second in all", wakes / 600);
    assert!(each <= 150, "{each} bytes a second for each idle agent; 5.11 allows 700");
    let direct = agents.iter().filter(|agent| matches!(world.path(client, **agent), Some(Path::Direct(_)))).count();
    println!("{direct} of 500 known as direct");
}

#[test]
fn t41_agents_that_come_and_go_leave_nothing() {
    let mut world = World::new("come and go", 1);
    world.add_usual_servers();
    let (here, there) = (world.add_site(Site::default()), world.add_site(Site::default()));
    let client = world.add_client(here);
    let agents: Vec<_> = (0..10).map(|_| world.add_agent(there)).collect();
    for _ in 0..30 {
        for agent in &agents {
            world.connect(client, *agent);
            world.flow(Flow { from: client, to: *agent, every: ms(200), size: 100, left: 5, answered: true });
        }
        world.run(secs(3));
        for agent in &agents {
            world.disconnect(client, *agent);
        }
        world.run(secs(1));
    }
    assert_eq!(world.engine(client).peer_count(), 0);
    assert!(agents.iter().all(|agent| world.engine(*agent).peer_count() == 0));
    world.run(secs(60));
    let (before, _) = world.spent(client);
    world.run(secs(600));
    assert_eq!(world.spent(client).0, before, "nobody is there to send anything to");
}
