//! Benchmarks, as a program: `cargo bench-relay`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use codervpn_testbed::bench::{self, Options};
use codervpn_testbed::netns::Setup;

fn main() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    Setup::new().tun().foreign().release_programs().run_program(async move || bench::run(&options).await)
}
