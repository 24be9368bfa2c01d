//! The benchmark program works: every pair of ends connects, takes the path that is measured, and moves every load.

use std::process::Command;

use codervpn_testbed::{foreign, netns, packages, skip};

/// A minute at most; figures of so short runs say nothing, so none is judged.
#[test]
fn every_part_of_the_benchmark_runs() {
    if let Err(reason) = netns::tun_available() {
        return skip::skip(format!("{reason:#}"));
    }
    if packages::find_program("ethtool").is_none() {
        return skip::skip("ethtool is not installed");
    }
    if !foreign::available() {
        return;
    }
    let program = env!("CARGO_BIN_EXE_bench");
    let out = Command::new(program).args(["paths", "--smoke"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    for part in
        ["tun-direct", "tun-relay", "agent-direct", "agent-relay", "plain links tcp x1 down", "% lost in the tunnel"]
    {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}
