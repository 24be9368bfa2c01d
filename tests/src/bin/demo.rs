//! `cargo demo`: a deployment in miniature and the real programs, in namespaces of their own; see the library's `demo`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use codervpn_testbed::netns::{Inside, Setup, tun_available};
use codervpn_testbed::{binaries, demo, packages, report};

/// Shows codervpn at work against a deployment of its own; nothing of this machine is touched.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo demo")]
struct Args {
    /// Leave me in a shell inside, with the tunnel up, before everything is taken down.
    #[arg(long)]
    shell: bool,
    /// Install nothing: print the command for what is missing and end with status 1.
    #[arg(long)]
    no_install: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(code) => code,
        Err(err) => {
            report::announce(&format!("cargo demo cannot run here: {err:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // The same program runs once outside, to prepare, and once inside.
    if Inside::check().is_err() {
        packages::provide_some(&demo::PACKAGES, !args.no_install)?;
        // Before a build that takes minutes.
        tun_available().context(
            "a TUN device is needed: run as root, or let users open it (sudo chmod 0666 /dev/net/tun); \
             where it is missing, `sudo modprobe tun` or the container's settings bring it",
        )?;
        binaries::folder_in_view()?;
    }
    Setup::new().programs().tun().run_program(async || demo::run(args.shell).await)
}
