//! `codervpn`, the command line of the tunnel daemon.
//!
//! `args` decides what may be asked, `commands` do it and return data, `render` and `json` decide how that looks,
//! `output` is the one door through which it leaves. `connect` is the conversation with the daemon, `session` the
//! stored login, `problem` the failures with their exit codes.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod connect;
mod deployment;
mod interrupt;
mod json;
mod output;
mod problem;
mod render;
mod report;
mod session;
mod token;
mod watch;

use std::process::ExitCode;

use clap::Parser as _;

use args::Cli;
use output::Output;
use problem::{Exit, Problem};

fn main() -> ExitCode {
    let mut output = Output::new();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version come this way too. clap's own exit code would collide with "service unreachable".
        Err(error) => {
            let asked_for = !error.use_stderr();
            return if error.print().is_ok() && asked_for { Exit::Success } else { Exit::Usage }.into();
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output.problem(&Problem::failed(format!("cannot set up the program: {error}"), "try again"));
            return Exit::Failed.into();
        }
    };
    let exit = runtime.block_on(commands::run(cli, &mut output)).unwrap_or_else(|problem| {
        output.problem(&problem);
        problem.exit
    });
    // A prompt that was interrupted still waits for its terminal in a thread of its own.
    runtime.shutdown_background();
    exit.into()
}
