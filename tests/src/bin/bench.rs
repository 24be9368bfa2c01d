//! Benchmarks, as a program: `cargo bench-paths`, `cargo bench-relay`, `cargo bench-idle`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use codervpn_testbed::bench::{self, Options};

fn main() -> anyhow::Result<ExitCode> {
    bench::run(&Options::parse())
}
