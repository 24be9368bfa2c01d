//! Very many agents that are there and that nobody talks to: what the daemon needs for keeping them reachable.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::figures::{memory_of, precise_cpu_of};
use super::links::{Links, SERVER};
use super::sides::{Helper, PATIENCE, start_daemon_alone};
use crate::report::say;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Options {
    #[arg(long, default_value_t = 2000)]
    agents: usize,
    /// Seconds of watching
    #[arg(long, default_value_t = 20.0)]
    watch: f64,
}

/// A process may not have so many open files that all fit.
const AGENTS_IN_A_PROCESS: usize = 250;
/// Thousands of agents connect on few processors.
const ALL_UP: Duration = Duration::from_secs(180);
/// What the daemon may need for 2,000 agents: MiB, and per cent of one core.
const MUST: (f64, f64) = (100.0, 3.0);
const GOAL: (f64, f64) = (60.0, 1.0);

pub(super) async fn run(options: &Options, links: &Links) -> anyhow::Result<ExitCode> {
    let count = options.agents.to_string();
    let mut server = Helper::start(None, &["server", &format!("{SERVER}:8083"), "--agents", &count])?;
    let told: Value = server.told().await?;
    let text = |name: &str| told[name].as_str().context("the server tells where it is");
    let begin = Instant::now();
    let (daemon, client) = start_daemon_alone(text("url")?, text("token")?, &links.client).await?;
    let pid = daemon.id().context("the daemon has ended")?;
    // They come up after the client has asked for them: the coordinator's queue for a client is short.
    let _: Value = server.ask("tunnels").await?;
    let ids = told["agents"].as_array().context("the server tells its agents")?;
    let mut machines = Vec::new();
    for ids in ids.chunks(AGENTS_IN_A_PROCESS) {
        let mut machine = Helper::start(Some(&links.agent), &["agents", text("url")?])?;
        machine.tell(&serde_json::to_string(ids)?).await?;
        machines.push(machine);
    }
    for machine in &mut machines {
        let _: Value = timeout(ALL_UP, machine.told_at_last()).await.context("the agents do not come up")??;
    }
    let known = timeout(PATIENCE * 2, async {
        loop {
            let agents = client.status().await?.ext.context("our status")?.agents;
            if agents.iter().filter(|agent| agent.online).count() == options.agents {
                return anyhow::Ok(());
            }
            sleep(Duration::from_millis(100)).await;
        }
    });
    known.await.context("not all agents are known in time")??;
    say(&format!(
        "{count} agents known after {:.1} s, CPU {:.2} s",
        begin.elapsed().as_secs_f64(),
        precise_cpu_of(pid)?
    ));
    // What was asked for at the start is over.
    sleep(Duration::from_secs(10)).await;
    let (before, begin) = (precise_cpu_of(pid)?, Instant::now());
    sleep(Duration::from_secs_f64(options.watch)).await;
    let share = (precise_cpu_of(pid)? - before) / begin.elapsed().as_secs_f64() * 100.0;
    let memory = memory_of(pid)?;
    let word = |value: f64, must: f64, goal: f64| match (value <= must, value <= goal) {
        (_, true) => "goal met",
        (true, false) => "met",
        (false, _) => "MISSED",
    };
    say(&format!("{count} idle agents: RSS {memory:.1} MiB, {}", word(memory, MUST.0, GOAL.0)));
    say(&format!("{count} idle agents: {share:.2} % of one core, {}", word(share, MUST.1, GOAL.1)));
    client.stopped().await?;
    drop((daemon, machines));
    server.end().await?;
    let holds = options.agents > 2000 || (memory <= MUST.0 && share <= MUST.1);
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
