//! The commands, one file each. They return data; this file hands it to the form that was asked for.

use std::path::Path;
use std::time::SystemTime;

use crate::args::{self, Cli, Command, Form};
use crate::connect::Service;
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::problem::{Exit, Problem};
use crate::report::Report;
use crate::{json, render, watch};

pub(crate) mod login;
pub(crate) mod logout;
pub(crate) mod ping;
pub(crate) mod start;
pub(crate) mod status;
pub(crate) mod stop;
pub(crate) mod workspaces;

pub(crate) async fn run(cli: Cli, output: &mut Output) -> Result<Exit, Problem> {
    let mut interrupt =
        Interrupt::new().map_err(|error| Problem::failed(format!("cannot listen for Ctrl-C: {error}"), "try again"))?;
    match cli.command {
        // It has something to undo.
        Command::Start(args) => start(&cli.socket, &args, &mut interrupt, output).await,
        // It has something to sum up.
        Command::Ping(args) => ping(&cli.socket, &args, &mut interrupt, output).await,
        command => tokio::select! {
            done = other(&cli.socket, command, output) => done,
            () = interrupt.next() => Err(Problem::interrupted()),
        },
    }
}

async fn other(socket: &Path, command: Command, output: &mut Output) -> Result<Exit, Problem> {
    match command {
        Command::Start(_) | Command::Ping(_) => unreachable!("have their own way"),
        Command::Login(args) => {
            let login = login::run(socket, &args, output).await?;
            output.result(&render::logged_in(&login))?;
        }
        Command::Logout => {
            let text = match logout::run(socket, output).await? {
                true => "logged out",
                false => "was not logged in",
            };
            output.result(text)?;
        }
        Command::Stop => {
            let stopped = stop::run(socket).await?;
            output.result(render::stopped(&stopped))?;
        }
        Command::Status(args) => return show_status(socket, &args, output).await,
        Command::Workspaces(args) => {
            let workspaces = workspaces::run(socket, &args.name).await?;
            let text = if args.json { json::line(&workspaces) } else { render::workspaces(&workspaces) };
            output.result(&text)?;
        }
        Command::Version(args) => {
            let text = match args.output {
                Form::Text => render::version(),
                Form::Json => json::version(),
            };
            output.result(&text)?;
        }
    }
    Ok(Exit::Success)
}

async fn start(
    socket: &Path,
    args: &args::Start,
    interrupt: &mut Interrupt,
    output: &mut Output,
) -> Result<Exit, Problem> {
    let started = start::run(socket, args.timeout, interrupt, output).await?;
    output.result(&render::started(&started, output.style()))?;
    if let Some(trouble) = started.report.dns_trouble() {
        output.warning(&format!("names do not work in every program: {trouble}"));
    }
    Ok(Exit::Success)
}

async fn ping(
    socket: &Path,
    args: &args::Ping,
    interrupt: &mut Interrupt,
    output: &mut Output,
) -> Result<Exit, Problem> {
    let form = if args.json { json::pinged } else { render::pinged };
    let summary = ping::run(socket, args, interrupt, |pinged| output.result(&form(pinged))).await?;
    output.result(&if args.json { json::ping_summary(&summary) } else { render::ping_summary(&summary) })?;
    Ok(summary.exit())
}

async fn show_status(socket: &Path, args: &args::Status, output: &mut Output) -> Result<Exit, Problem> {
    let mut service = Service::connect(socket).await?;
    let form = |report: &Report, output: &Output| match args.json {
        true => json::line(report),
        false => render::status(report, SystemTime::now(), output.style()),
    };
    if args.watch {
        let redraws = !args.json && output.redraws();
        let mut first = true;
        let show = |report: &Report| {
            let text = form(report, output);
            if redraws {
                return output.redraw(&text);
            }
            // A blank line keeps texts apart; JSON is one object a line.
            let gap = if first || args.json { "" } else { "\n" };
            first = false;
            output.result(&format!("{gap}{text}"))
        };
        watch::follow(&mut service, show).await?;
        return Ok(Exit::Success);
    }
    let report = status::run(&service);
    output.result(&form(&report, output))?;
    Ok(if args.check && !report.is_started() { Exit::NotStarted } else { Exit::Success })
}
