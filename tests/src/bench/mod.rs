//! Benchmarks against the Go peers: what is compared runs in turn in one run of the program, because these figures are
//! worth something only side by side.

mod figures;
mod relay;

use clap::Parser;

/// Options of all benchmarks.
#[derive(Debug, Clone, Parser)]
#[command(name = "bench", about = "Benchmarks of the daemon against Coder's Go client")]
pub struct Options {
    /// Runs of each side
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Seconds of transfer in each direction of a run
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    #[command(subcommand)]
    which: Which,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Which {
    /// Through a relay: our daemon and the Go client against the same Go agent and relay
    Relay,
}

/// Runs the benchmark that was asked for; must be inside test namespaces.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    match options.which {
        Which::Relay => relay::run(options).await,
    }
}
