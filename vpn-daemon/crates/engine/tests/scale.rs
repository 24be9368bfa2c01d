//! A thousand agents: what idling costs, and that no call looks at all of them.

mod sim;

use codervpn_engine::{Command, PeerState};
use sim::{DESKTOP, Party, World, secs};
use uuid::Uuid;

fn id(n: usize) -> Uuid {
    Uuid::from_u128(0xabcd_0000_0000_4000_8000_0000_0000_0000 + n as u128)
}

#[test]
fn t42_a_thousand_connected_agents_idle_within_their_budget() {
    const AGENTS: usize = 1000;
    let mut world = World::new(|now| vec![Party::client(1, now)]);
    let now = world.now;
    world.client().online(now);
    let client = world.client().node();
    let mut agents = Vec::new();
    for n in 0..AGENTS {
        let mut agent = Party::agent(id(n), 1000 + n as u64, now);
        agent.online(now);
        agent.apply(Command::Node { id: DESKTOP, node: client.clone() }, now);
        let node = agent.node();
        world.client().apply(Command::AddDestination(id(n)), now);
        world.client().apply(Command::Node { id: id(n), node }, now);
        agents.push(agent);
    }
    world.parties.extend(agents);
    for n in 0..AGENTS {
        world.client().apply(Command::ReadyForHandshake(id(n)), now);
    }
    world.run(secs(1));
    let now = world.now;
    let up = world.client().engine.peers(now).filter(|peer| peer.state == PeerState::Up).count();
    assert_eq!(up, AGENTS);

    // From here on nobody answers, so only the desktop's own doing is counted; its agents stay up for a while.
    world.parties.truncate(1);
    let party = world.client();
    party.out.sent.clear();
    let (mut wakes, mut bytes) = (0u32, 0usize);
    let end = now + secs(90);
    while let Some(at) = party.engine.poll_timeout().filter(|at| *at <= end) {
        party.engine.handle_timeout(at, &mut party.out);
        party.drain();
        wakes += 1;
        bytes += party.out.sent.drain(..).map(|(_, bytes)| bytes.len()).sum::<usize>();
    }
    let per_agent = bytes as f64 / 90.0 / AGENTS as f64;
    assert!(per_agent < 60.0, "{per_agent} bytes a second for each idle agent; 5.11 allows 700");
    assert!(wakes < 50_000, "{wakes} wakes in 90 s for a thousand agents");
}

#[test]
fn a_thousand_agents_that_were_never_used_cost_nothing() {
    let mut world = World::new(|now| vec![Party::client(1, now)]);
    let now = world.now;
    world.client().online(now);
    for n in 0..1000 {
        world.client().apply(Command::AddDestination(id(n)), now);
    }
    // The first net report ends, and no other follows without peers.
    world.run(secs(30));
    assert_eq!(world.client().engine.poll_timeout(), None, "no timer at all");
}
