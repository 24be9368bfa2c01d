//! Bulk transfer through a relay: our daemon and Coder's Go client, each as a service with a TUN device, in turn against
//! the same Go agent through the same Go relay. One generator outside of both moves the data.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use codervpn_proto::rpc::Client as ClientRole;
use codervpn_proto::speaker::{self, Limits, Speaker};
use codervpn_proto::vpn::{self, client_message, service_message};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::Options;
use super::figures::{Spread, cpu_of, cpu_of_all, memory_of};
use crate::binaries;
use crate::foreign::{Agent, Client, Coordinator, CoordinatorOptions, EngineOptions};
use crate::netns::Namespace;
use crate::report::say;

/// Ports of the agent: it counts what it gets, it sends without end.
const SINK: u16 = 9;
const SOURCE: u16 = 19;
/// How long a client may take until the agent can be reached.
const READY: Duration = Duration::from_secs(20);

/// Who is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Ours,
    Go,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// One transfer.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    side: Side,
    direction: Direction,
    gbit_s: f64,
    client_cpu_per_gb: f64,
    all_cpu_per_gb: f64,
    memory: f64,
}

/// What is read off a transfer.
type Figure = fn(&Transfer) -> f64;

pub(super) async fn run(options: &Options) -> anyhow::Result<()> {
    let server = Namespace::new("server")?;
    server.join("10.99.0.1/24", "10.99.0.2/24")?;
    let listen: SocketAddr = "10.99.0.2:8080".parse()?;
    let mut coordinator = Coordinator::start(CoordinatorOptions {
        namespace: Some(&server),
        listen: Some(listen),
        disable_direct: true,
        ..CoordinatorOptions::default()
    })
    .await?;
    let agent = Uuid::new_v4();
    coordinator.add_workspace(Uuid::new_v4(), "dev", &[(agent, "main")]).await?;
    let relay_only = EngineOptions { block_direct: true, ..EngineOptions::default() };
    let mut agent = Agent::start(Some(&server), &coordinator.url, agent, &relay_only).await?;
    agent.process.relay_up().await?;

    let congestion = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    say(&format!(
        "relay: one TCP stream over the client's TUN, {} runs of {} s each way, congestion control {}",
        options.runs,
        options.seconds,
        congestion.trim()
    ));
    let mut transfers = Vec::new();
    for round in 0..options.runs {
        // Who begins alternates, so that a machine that warms up favours nobody.
        let order = if round % 2 == 0 { [Side::Ours, Side::Go] } else { [Side::Go, Side::Ours] };
        for side in order {
            let service = Service::start(side, &coordinator.url, &coordinator.token).await?;
            reachable(agent.address()).await.with_context(|| format!("{side:?}"))?;
            for direction in [Direction::Up, Direction::Down] {
                let seconds = Duration::from_secs_f64(options.seconds);
                let transfer = measure(&service, side, direction, agent.address(), seconds).await?;
                say(&format!(
                    "  run {} {side:?} {direction:?}: {:.3} Gbit/s, client {:.2} CPU-s/GB",
                    round + 1,
                    transfer.gbit_s,
                    transfer.client_cpu_per_gb
                ));
                transfers.push(transfer);
            }
            service.stop().await?;
        }
    }
    report(&transfers);
    Ok(())
}

/// A client that runs.
enum Service {
    Ours { process: Child, speaker: Speaker<ClientRole> },
    Go(Client),
}

impl Service {
    async fn start(side: Side, url: &str, token: &str) -> anyhow::Result<Self> {
        match side {
            Side::Ours => start_daemon(url, token).await,
            Side::Go => {
                let tun = Some("coder0".to_owned());
                let options = EngineOptions { block_direct: true, tun, ..EngineOptions::default() };
                Ok(Self::Go(Client::start(None, url, token, &options).await?))
            }
        }
    }

    fn pid(&self) -> anyhow::Result<u32> {
        match self {
            Self::Ours { process, .. } => process.id(),
            Self::Go(client) => client.process.id(),
        }
        .context("the client has ended")
    }

    async fn stop(self) -> anyhow::Result<()> {
        match self {
            Self::Ours { mut process, speaker } => {
                let stop = client_message::Msg::Stop(vpn::StopRequest {});
                speaker.request(stop, Some(READY)).await?;
                let pid =
                    rustix::process::Pid::from_raw(process.id().context("ended")?.cast_signed()).context("pid")?;
                rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
                let status = timeout(READY, process.wait()).await??;
                ensure!(status.success(), "the daemon ended with {status}");
                Ok(())
            }
            Self::Go(client) => client.process.quit().await,
        }
    }
}

async fn start_daemon(url: &str, token: &str) -> anyhow::Result<Service> {
    let socket = Path::new("/run/bench.sock");
    let mut process = Command::new(binaries::release_folder()?.join("codervpnd"))
        .args(["serve", "--runtime-dir", "/run/bench", "--state-dir", "/run/bench/state", "--dns-mode", "none"])
        .args(["--log", "error", "--socket"])
        .arg(socket)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let stream = timeout(READY, async {
        loop {
            if let Ok(stream) = UnixStream::connect(socket).await {
                return Ok(stream);
            }
            if let Some(status) = process.try_wait()? {
                bail!("the daemon ended with {status}");
            }
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .context("the daemon does not listen")??;
    let (reader, writer) = stream.into_split();
    let (speaker, _) = speaker::connect::<ClientRole, _, _>(reader, writer, Limits::default()).await?;
    let start =
        vpn::StartRequest { coder_url: url.to_owned(), api_token: token.to_owned(), ..vpn::StartRequest::default() };
    let reply = speaker.request(client_message::Msg::Start(start), Some(READY)).await?;
    match reply {
        service_message::Msg::Start(reply) if reply.success => Ok(Service::Ours { process, speaker }),
        service_message::Msg::Start(reply) => bail!("the start failed: {}", reply.error_message),
        _ => bail!("a reply to another request"),
    }
}

/// Waits until the agent answers through the tunnel.
async fn reachable(address: Ipv6Addr) -> anyhow::Result<()> {
    timeout(READY, async {
        loop {
            // The Go client drops the first packets; a fresh attempt is quicker than the kernel's repetition.
            if let Ok(Ok(_)) = timeout(Duration::from_millis(300), TcpStream::connect((address, SINK))).await {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .context("the agent cannot be reached through the tunnel")
}

async fn measure(
    service: &Service,
    side: Side,
    direction: Direction,
    address: Ipv6Addr,
    seconds: Duration,
) -> anyhow::Result<Transfer> {
    let pid = service.pid()?;
    let (client_before, all_before) = (cpu_of(pid)?, cpu_of_all()?);
    let started = Instant::now();
    let bytes = match direction {
        Direction::Up => send(address, seconds).await?,
        Direction::Down => receive(address, seconds).await?,
    };
    let took = started.elapsed().as_secs_f64();
    ensure!(bytes > 0, "nothing was moved");
    let gigabytes = bytes as f64 / 1e9;
    Ok(Transfer {
        side,
        direction,
        gbit_s: gigabytes * 8.0 / took,
        client_cpu_per_gb: (cpu_of(pid)? - client_before) / gigabytes,
        all_cpu_per_gb: (cpu_of_all()? - all_before) / gigabytes,
        memory: memory_of(pid)?,
    })
}

/// Bytes that the agent says it got.
async fn send(address: Ipv6Addr, seconds: Duration) -> anyhow::Result<u64> {
    let mut stream = TcpStream::connect((address, SINK)).await?;
    let block = vec![0x5a; 256 * 1024];
    let until = Instant::now() + seconds;
    while Instant::now() < until {
        timeout(READY, stream.write_all(&block)).await.context("the tunnel stands still")??;
    }
    stream.shutdown().await?;
    let mut answer = String::new();
    timeout(READY, stream.read_to_string(&mut answer)).await.context("no answer")??;
    let answer: serde_json::Value = serde_json::from_str(&answer)?;
    answer["bytes"].as_u64().context("the agent counts bytes")
}

async fn receive(address: Ipv6Addr, seconds: Duration) -> anyhow::Result<u64> {
    let mut stream = TcpStream::connect((address, SOURCE)).await?;
    let mut block = vec![0; 256 * 1024];
    let until = Instant::now() + seconds;
    let mut bytes = 0;
    while Instant::now() < until {
        let length = timeout(READY, stream.read(&mut block)).await.context("the tunnel stands still")??;
        ensure!(length > 0, "the agent ended the transfer");
        bytes += length as u64;
    }
    Ok(bytes)
}

fn report(transfers: &[Transfer]) {
    say("\n                                       min   median      max");
    let figure = |side, direction, of: Figure| {
        let fitting = transfers.iter().filter(|t| t.side == side && t.direction == direction);
        Spread::of(fitting.map(of))
    };
    let figures: [(&str, Figure); 4] = [
        ("Gbit/s", |t| t.gbit_s),
        ("CPU-s/GB client", |t| t.client_cpu_per_gb),
        ("CPU-s/GB all", |t| t.all_cpu_per_gb),
        ("RSS MiB client", |t| t.memory),
    ];
    for direction in [Direction::Up, Direction::Down] {
        for (name, of) in figures {
            let (ours, go) = (figure(Side::Ours, direction, of), figure(Side::Go, direction, of));
            let way = format!("{direction:?}").to_lowercase();
            say(&format!("{way:5} {name:16} ours     {ours}"));
            say(&format!("{way:5} {name:16} Go       {go}"));
            say(&format!("{way:5} {name:16} ours/Go  {:17.3}", ours.median / go.median));
        }
    }
}
