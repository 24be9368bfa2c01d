//! Benchmarks against the Go peers: what is compared runs in turn in one run of the program, because these figures are
//! worth something only side by side.

mod figures;
mod generator;
mod icmp;
mod idle;
mod instructions;
mod links;
mod paths;
mod responder;
mod roles;
mod sides;
mod table;

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Parser;
use url::Url;
use uuid::Uuid;

use crate::netns::Setup;
use crate::report::say;

pub use instructions::check as check_instructions;
use links::Links;

/// Options of all benchmarks.
#[derive(Debug, Clone, Parser)]
#[command(name = "bench", about = "Benchmarks of the daemon against Coder's Go client")]
pub struct Options {
    #[command(subcommand)]
    which: Which,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Which {
    /// All paths, both ends in all combinations: throughput, processor time, latency, memory, time to connect
    Paths(paths::Options),
    /// Memory and processor time with very many idle agents
    Idle(idle::Options),
    /// Both, one after the other
    All {
        #[command(flatten)]
        paths: paths::Options,
        #[command(flatten)]
        idle: idle::Options,
    },
    /// Instructions that the pieces of the data path need, against the stored baseline
    Micro(instructions::Options),
    #[command(subcommand, hide = true)]
    Generate(generator::Load),
    /// Answers the generator behind an agent's TUN device
    #[command(hide = true)]
    Respond,
    #[command(hide = true)]
    Agent {
        url: Url,
        id: Uuid,
        #[arg(long)]
        tun: Option<String>,
        #[arg(long)]
        relay_only: bool,
    },
    #[command(hide = true)]
    Server {
        listen: SocketAddr,
        #[arg(long, default_value_t = 10)]
        agents: usize,
    },
    #[command(hide = true)]
    Agents { url: Url },
}

/// Runs the benchmark that was asked for in namespaces of its own, or a part of one where that has placed it.
pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let isolated = || Setup::new().tun().release_programs();
    match &options.which {
        Which::Paths(options) => {
            let setup = if options.smoke { Setup::new().tun().programs() } else { isolated() };
            setup.foreign().run_program(async move || paths::run(options, &Links::new()?).await)
        }
        Which::Idle(options) => isolated().run_program(async move || idle::run(options, &Links::new()?).await),
        Which::All { paths, idle } => isolated().foreign().run_program(async move || {
            let links = Links::new()?;
            let idle = idle::run(idle, &links).await;
            if let Err(error) = &idle {
                say(&format!("idle agents FAILED: {error:#}"));
            }
            let paths = paths::run(paths, &links).await?;
            anyhow::Ok(if idle? == ExitCode::SUCCESS { paths } else { ExitCode::FAILURE })
        }),
        Which::Micro(options) => instructions::run(options).map(|()| ExitCode::SUCCESS),
        Which::Generate(load) => generator::run(load).map(|()| ExitCode::SUCCESS),
        Which::Respond => responder::run().map(|()| ExitCode::SUCCESS),
        Which::Agent { url, id, tun, relay_only } => in_runtime(1, roles::agent(url, *id, tun.clone(), *relay_only)),
        Which::Server { listen, agents } => in_runtime(2, roles::server(*listen, *agents)),
        Which::Agents { url } => in_runtime(1, roles::agents(url)),
    }
}

fn in_runtime(threads: usize, role: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    runtime.block_on(role)?;
    // Reading stdin is a call that may never return.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}
