//! Every row of the table of networks.

use codervpn_engine_sim::topology;

#[test]
fn every_network_has_the_path_that_must_result() {
    let mut failed = Vec::new();
    let mut rows = 0;
    for row in topology::table() {
        rows += 1;
        for seed in 0..2 {
            match std::panic::catch_unwind(|| row.play(seed)) {
                Ok(outcome) => println!(
                    "{:75} {:?}: answered after {:?}, direct after {:?}, again after {:?}",
                    row.name, row.expected, outcome.answered, outcome.direct, outcome.again
                ),
                Err(_) => failed.push((row.name, seed)),
            }
        }
    }
    println!("{rows} networks");
    assert!(failed.is_empty(), "{} of {}: {failed:#?}", failed.len(), rows * 2);
}
