//! 200 hours made up from seeds. A seed that fails is named together with the command that repeats it.

use codervpn_engine_sim::scenario;

#[test]
fn two_hundred_hours_of_networks_and_troubles() {
    let many =
        scenario::many(200, 0, |seed| println!("seed {seed} failed; repeat it with: cargo simulate -- --only {seed}"));
    println!("{many}");
    assert!(many.failed.is_empty(), "cargo simulate -- --only {}", many.failed[0]);
}

#[test]
fn a_seed_repeats_itself() {
    for seed in 0..3 {
        let (one, other) = (scenario::play(seed), scenario::play(seed));
        assert_eq!((one.fingerprint, one.steps), (other.fingerprint, other.steps), "seed {seed}");
    }
}
