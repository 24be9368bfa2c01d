//! `codervpnd`: reads the command line and leaves everything else to the library.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use vpn_daemon::args::Cli;

/// `EX_USAGE`; clap's own 2 means something else here.
const USAGE: u8 = 64;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
            // Nobody is left to tell when even that cannot be printed.
            let _ = error.print();
            return code;
        }
    };
    vpn_daemon::run(cli)
}
