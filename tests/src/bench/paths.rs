//! The comparisons of `fast-path` and of data-plane 9.5: what is measured for which pair of ends, in which order.
//!
//! Both sides run in turn within each round and who begins alternates, so that a machine that warms up or is busy
//! favours nobody. A pair is started anew in every round, which also measures how long it takes to connect. A pair that
//! does not take the path that is measured fails the run; the others go on.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};

use super::figures::{cpu_of, cpu_of_all, device_drops, memory_of, peak_memory_of, underlay_overflows};
use super::generator::{Datagrams, Direction, Moved, PAYLOAD};
use super::icmp::Trips;
use super::links::Links;
use super::sides::{AGENT_DEVICE, Behind, CLIENT_DEVICE, Helper, Maker, PATIENCE, Pair, Places, Recipe, Server, Way};
use super::table::{Side, Table};
use crate::report::say;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Options {
    /// Runs of each side
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Seconds of one transfer
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Only these comparisons
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Comparison>,
    /// Only one side
    #[arg(long, value_enum)]
    side: Option<OneSide>,
    /// What our programs counted during each transfer
    #[arg(long)]
    counters: bool,
    /// Succeed although a bar is missed
    #[arg(long)]
    no_bars: bool,
    /// Everything once and shortly, with the programs of the tests, whatever the figures are
    #[arg(long, conflicts_with_all = ["runs", "seconds"])]
    pub(super) smoke: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OneSide {
    Ours,
    Go,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Comparison {
    /// TUN devices at both ends, directly: ours and ours, Go and Go
    TunDirect,
    /// The same through our and the Go relay
    TunRelay,
    /// Our client and the Go client against the Go agent with its stack in user space, directly
    AgentDirect,
    /// The same through the Go relay
    AgentRelay,
}

impl Comparison {
    const ALL: [Self; 4] = [Self::TunDirect, Self::TunRelay, Self::AgentDirect, Self::AgentRelay];

    fn name(self) -> &'static str {
        match self {
            Self::TunDirect => "tun-direct",
            Self::TunRelay => "tun-relay",
            Self::AgentDirect => "agent-direct",
            Self::AgentRelay => "agent-relay",
        }
    }

    fn recipe(self, side: Side) -> Recipe {
        let client = match side {
            Side::Ours => Maker::Ours,
            Side::Go => Maker::Go,
        };
        let (agent, behind) = match self {
            Self::TunDirect | Self::TunRelay => (client, Behind::Tun),
            Self::AgentDirect | Self::AgentRelay => (Maker::Go, Behind::Stack),
        };
        let way = match self {
            Self::TunDirect | Self::AgentDirect => Way::Direct,
            Self::TunRelay | Self::AgentRelay => Way::Relay,
        };
        Recipe { client, agent, behind, way }
    }
}

/// Deployments that run all the time.
struct Servers {
    direct: Server,
    relay: Server,
    ours: Server,
}

impl Servers {
    async fn start() -> anyhow::Result<Self> {
        Ok(Self {
            direct: Server::start(Maker::Go, Way::Direct, 8080).await.context("the Go deployment")?,
            relay: Server::start(Maker::Go, Way::Relay, 8081).await.context("the Go relay")?,
            ours: Server::start(Maker::Ours, Way::Relay, 8082).await.context("our deployment")?,
        })
    }

    /// Ours is measured with a relay of ours, unless the agent is Go's.
    fn of(&self, recipe: Recipe) -> &Server {
        match (recipe.way, recipe.agent) {
            (Way::Direct, _) => &self.direct,
            (Way::Relay, Maker::Go) => &self.relay,
            (Way::Relay, Maker::Ours) => &self.ours,
        }
    }
}

pub(super) async fn run(options: &Options, links: &Links) -> anyhow::Result<ExitCode> {
    let options = &match options.smoke {
        true => Options { runs: 1, seconds: 0.3, no_bars: true, ..options.clone() },
        false => options.clone(),
    };
    let begin = Instant::now();
    let mut responder = Helper::start(Some(&links.agent), &["respond"])?;
    responder.line().await?;
    let servers = Servers::start().await?;
    let chosen: Vec<Comparison> =
        Comparison::ALL.into_iter().filter(|c| options.only.is_empty() || options.only.contains(c)).collect();
    introduce(options, links).await?;
    let mut bench = Bench { options, links, servers: &servers, table: Table::default() };
    let mut failures = Vec::new();
    for round in 0..options.runs {
        for comparison in chosen.iter().copied() {
            let order = if round % 2 == 0 { [Side::Ours, Side::Go] } else { [Side::Go, Side::Ours] };
            for side in order.into_iter().filter(|side| options.measures(*side)) {
                let what = format!("run {} {} {}", round + 1, comparison.name(), side.name());
                say(&format!("{what}, machine load {}", load_average()));
                if let Err(error) = bench.measure(comparison, side).await {
                    say(&format!("{what} FAILED: {error:#}"));
                    failures.push(what);
                }
                // Whatever failed, the next side finds the links as they were.
                links.set_offloads(true).await?;
            }
        }
    }
    responder.end().await?;
    let holds = bench.table.print();
    say(&format!("\n{:.0} s, {} failed", begin.elapsed().as_secs_f64(), failures.len()));
    for failure in &failures {
        say(&format!("FAILED: {failure}"));
    }
    Ok(if failures.is_empty() && (holds || options.no_bars) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn introduce(options: &Options, links: &Links) -> anyhow::Result<()> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    say(&format!(
        "{} runs of {} s a transfer; TCP congestion control {}, queue {}; kernel {}; {} processors; machine load {}",
        options.runs,
        options.seconds,
        read("/proc/sys/net/ipv4/tcp_congestion_control"),
        read("/proc/sys/net/core/default_qdisc"),
        read("/proc/sys/kernel/osrelease"),
        std::thread::available_parallelism().map_or(0, usize::from),
        load_average(),
    ));
    say(&format!("direct link, both ends: {}", links.offloads().await?));
    links.set_offloads(false).await?;
    say(&format!("\"plain links\": {}", links.offloads().await?));
    links.set_offloads(true).await
}

fn load_average() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

impl Options {
    fn measures(&self, side: Side) -> bool {
        match self.side {
            None => true,
            Some(OneSide::Ours) => side == Side::Ours,
            Some(OneSide::Go) => side == Side::Go,
        }
    }
}

struct Bench<'a> {
    options: &'a Options,
    links: &'a Links,
    servers: &'a Servers,
    table: Table,
}

/// A pair that runs, and where its figures belong.
struct Run<'a> {
    comparison: Comparison,
    side: Side,
    pair: Pair,
    server: &'a Server,
}

/// What a load used.
struct Usage {
    client: f64,
    agent: f64,
    server: f64,
    /// Share of the machine that went to none of ours: the generator, the responder, and whatever else runs here.
    others: f64,
    client_memory: f64,
    agent_memory: f64,
}

impl Bench<'_> {
    async fn measure(&mut self, comparison: Comparison, side: Side) -> anyhow::Result<()> {
        let recipe = comparison.recipe(side);
        let server = self.servers.of(recipe);
        let at = Comparison::ALL.iter().position(|c| *c == comparison).unwrap_or_default() * 2;
        let id = server.agents.get(at + usize::from(side == Side::Go)).copied().context("agents enough")?;
        let places = Places { client: &self.links.client, agent: &self.links.agent };
        let pair = Pair::start(recipe, server, id, places).await?;
        let mut run = Run { comparison, side, pair, server };
        let measured = self.loads(&mut run, recipe).await;
        // Whatever was measured, the next pair finds the devices gone.
        let stopped = run.pair.stop().await.context("while stopping");
        measured.and(stopped)
    }

    async fn loads(&mut self, run: &mut Run<'_>, recipe: Recipe) -> anyhow::Result<()> {
        self.add(run, "start", "s to first answer", run.pair.started.first_answer);
        self.add(run, "start", "s to this path", run.pair.started.path);
        sleep(Duration::from_millis(300)).await;
        self.add(run, "idle", "RSS MiB client", memory_of(run.pair.client_pid()?)?);
        self.add(run, "idle", "RSS MiB agent", memory_of(run.pair.agent_pid()?)?);
        self.ping(run).await?;
        for direction in Direction::BOTH {
            self.tcp(run, "", direction, 1).await?;
        }
        if recipe.behind == Behind::Stack {
            return Ok(());
        }
        for direction in Direction::BOTH {
            self.tcp(run, "", direction, 4).await?;
        }
        if recipe.way == Way::Relay {
            return Ok(());
        }
        for direction in Direction::BOTH {
            self.udp(run, direction).await?;
        }
        self.links.set_offloads(false).await?;
        for direction in Direction::BOTH {
            self.tcp(run, "plain links ", direction, 1).await?;
        }
        self.links.set_offloads(true).await
    }

    fn add(&mut self, run: &Run<'_>, load: &str, figure: &'static str, value: f64) {
        self.table.add(run.comparison.name(), load, figure, run.side, value);
    }

    async fn ping(&mut self, run: &mut Run<'_>) -> anyhow::Result<()> {
        let (trips, _): (Trips, _) = self.generate(run, &["ping"], &["--count", "200", "--interval-ms", "5"]).await?;
        self.add(run, "ping", "average ms", trips.average);
        self.add(run, "ping", "p99 ms", trips.p99);
        self.add(run, "ping", "% lost", trips.lost as f64 / trips.sent as f64 * 100.0);
        say(&format!(
            "  ping {:.3} ms, at most {:.3}, {} of {} lost",
            trips.average, trips.max, trips.lost, trips.sent
        ));
        Ok(())
    }

    async fn tcp(
        &mut self,
        run: &mut Run<'_>,
        links: &str,
        direction: Direction,
        streams: usize,
    ) -> anyhow::Result<()> {
        let load = format!("{links}tcp x{streams} {}", direction.name());
        let before = run.pair.counters().await?;
        let (streams, seconds) = (streams.to_string(), self.options.seconds.to_string());
        let further = [direction.name(), "--streams", &streams, "--seconds", &seconds, "--ping-ms", "20"];
        let (moved, usage): (Moved, _) = self.generate(run, &["tcp"], &further).await?;
        let gigabytes = moved.bytes as f64 / 1e9;
        let speed = gigabytes * 8.0 / moved.seconds;
        let ends = (usage.client + usage.agent) / gigabytes;
        self.add(run, &load, "Gbit/s", speed);
        self.add(run, &load, "CPU-s/GB both ends", ends);
        self.add(run, &load, "CPU-s/GB client", usage.client / gigabytes);
        self.add(run, &load, "CPU-s/GB agent", usage.agent / gigabytes);
        if matches!(run.comparison, Comparison::TunRelay | Comparison::AgentRelay) {
            self.add(run, &load, "CPU-s/GB relay", usage.server / gigabytes);
        }
        self.add(run, &load, "% machine, others", usage.others * 100.0);
        self.add(run, &load, "RSS MiB client", usage.client_memory);
        self.add(run, &load, "RSS MiB agent", usage.agent_memory);
        let trips = moved.trips.unwrap_or_default();
        self.add(run, &load, "ping average ms", trips.average);
        self.add(run, &load, "ping max ms", trips.max);
        say(&format!(
            "  {load}: {speed:.3} Gbit/s, CPU-s/GB client {:.2} agent {:.2} server {:.2}, ping {:.2} ms, others {:.0} %",
            usage.client / gigabytes,
            usage.agent / gigabytes,
            usage.server / gigabytes,
            trips.average,
            usage.others * 100.0
        ));
        if self.options.counters {
            for (end, (before, after)) in
                ["client", "agent"].into_iter().zip(before.into_iter().zip(run.pair.counters().await?))
            {
                print_counters(end, before, after, gigabytes);
            }
        }
        Ok(())
    }

    async fn udp(&mut self, run: &mut Run<'_>, direction: Direction) -> anyhow::Result<()> {
        let load = format!("udp {}", direction.name());
        let (client, agent) = (run.pair.client_pid()?, run.pair.agent_pid()?);
        let (sender, device, receiver) = match direction {
            Direction::Up => (client, CLIENT_DEVICE, agent),
            Direction::Down => (agent, AGENT_DEVICE, client),
        };
        let drops = |counters: &[Vec<(String, u64)>; 2]| -> u64 {
            counters.iter().flatten().filter(|(name, _)| name.contains("dropped")).map(|(_, value)| value).sum()
        };
        let counters = run.pair.counters().await?;
        let before = (device_drops(sender, device)?, underlay_overflows(receiver)?, drops(&counters));
        let seconds = self.options.seconds.to_string();
        let further = [direction.name(), "--seconds", &seconds];
        let (datagrams, usage): (Datagrams, _) = self.generate(run, &["udp"], &further).await?;
        let counters_after = run.pair.counters().await?;
        let after = (device_drops(sender, device)?, underlay_overflows(receiver)?, drops(&counters_after));
        let Datagrams { sent, seconds, received } = datagrams;
        let percent = |count: u64| count as f64 / sent.max(1) as f64 * 100.0;
        let lost = sent.saturating_sub(received.packets + received.overflows);
        let in_queue = after.0.saturating_sub(before.0);
        let in_underlay = after.1.saturating_sub(before.1);
        let by_us = after.2.saturating_sub(before.2);
        let rate = |packets: u64| packets as f64 * PAYLOAD as f64 * 8.0 / seconds / 1e9;
        let gigabytes = (received.bytes as f64 / 1e9).max(1e-9);
        self.add(run, &load, "Gbit/s offered", rate(sent));
        self.add(run, &load, "Gbit/s delivered", rate(received.packets));
        self.add(run, &load, "% lost in the tunnel", percent(lost));
        self.add(run, &load, "% in the TUN queue", percent(in_queue));
        self.add(run, &load, "% at the UDP socket", percent(in_underlay));
        self.add(run, &load, "% dropped and counted", percent(by_us));
        self.add(run, &load, "% lost at the program", percent(received.overflows));
        self.add(run, &load, "CPU-s/GB both ends", (usage.client + usage.agent) / gigabytes);
        say(&format!(
            "  {load}: {:.3} of {:.3} Gbit/s; {sent} sent, {lost} lost in the tunnel ({in_queue} in the TUN queue, \
             {in_underlay} at its UDP socket, {by_us} counted by us), {} at the program",
            rate(received.packets),
            rate(sent),
            received.overflows,
        ));
        if self.options.counters {
            for (end, (before, after)) in ["client", "agent"].into_iter().zip(counters.into_iter().zip(counters_after))
            {
                print_counters(end, before, after, gigabytes);
            }
        }
        Ok(())
    }

    /// Runs the generator and watches what everybody uses meanwhile.
    async fn generate<T: DeserializeOwned>(
        &self,
        run: &mut Run<'_>,
        kind: &[&str],
        further: &[&str],
    ) -> anyhow::Result<(T, Usage)> {
        let address = run.pair.address().to_string();
        let args = [&["generate"], kind, &[address.as_str()], further].concat();
        let (client, agent, server) = (run.pair.client_pid()?, run.pair.agent_pid()?, run.server.pid()?);
        let cpu = || anyhow::Ok([cpu_of(client)?, cpu_of(agent)?, cpu_of(server)?, cpu_of_all()?]);
        let begin = Instant::now();
        let before = cpu()?;
        let mut memory = (0.0_f64, 0.0_f64);
        let mut generator = Helper::start(Some(&self.links.client), &args)?;
        let limit = PATIENCE + Duration::from_secs_f64(self.options.seconds);
        let told = timeout(limit, async {
            loop {
                memory = (memory.0.max(memory_of(client)?), memory.1.max(memory_of(agent)?));
                tokio::select! {
                    told = generator.told::<T>() => return told,
                    () = sleep(Duration::from_millis(100)) => {}
                }
            }
        })
        .await
        .with_context(|| format!("{kind:?}: not over within {limit:?}"))??;
        let after = cpu()?;
        generator.end().await?;
        run.pair.check().await?;
        let took = begin.elapsed().as_secs_f64() * std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        let [client_cpu, agent_cpu, server_cpu, all] = [0, 1, 2, 3].map(|at| after[at] - before[at]);
        let others = (all - client_cpu - agent_cpu - server_cpu) / took;
        let usage = Usage {
            client: client_cpu,
            agent: agent_cpu,
            server: server_cpu,
            others,
            client_memory: memory.0.max(memory_of(client)?),
            agent_memory: memory.1.max(memory_of(agent)?),
        };
        // A peak between two looks is not load but start-up; it is only told when it is far above.
        let peak = peak_memory_of(client)?;
        if peak > usage.client_memory * 1.5 {
            tracing::debug!(peak, "the client once had much more memory");
        }
        Ok((told, usage))
    }
}

fn print_counters(end: &str, before: Vec<(String, u64)>, after: Vec<(String, u64)>, gigabytes: f64) {
    let before: BTreeMap<String, u64> = before.into_iter().collect();
    let grown = after.into_iter().filter_map(|(name, value)| {
        let grown = value - before.get(&name).copied().unwrap_or_default();
        (grown > 0).then(|| format!("{name} {:.0}", grown as f64 / gigabytes))
    });
    let grown: Vec<String> = grown.collect();
    if !grown.is_empty() {
        say(&format!("    {end}, for each GB: {}", grown.join(", ")));
    }
}
