//! `codervpn ping`, and the path it shows: found, forbidden and found again, by the user and by the deployment.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::PathKind;
use codervpn_testbed::agent::WorkspaceAgent;
use codervpn_testbed::cli::Cli;
use codervpn_testbed::daemon::{Client, Daemon, Options};
use codervpn_testbed::lab::{Lab, Topology};
use codervpn_testbed::netns::Setup;
use codervpn_testbed::report::announce;
use serde_json::Value;
use tokio::time::sleep;

type Result<T = ()> = anyhow::Result<T>;

fn setup() -> Setup {
    Setup::new().programs().tun().nft()
}

/// A lab with an agent of ours, and a daemon that is connected.
struct World {
    lab: Lab,
    deployment: std::sync::Arc<codervpn_testbed::coderd::Deployment>,
    agent: WorkspaceAgent,
    daemon: Daemon,
    client: Client,
    cli: Cli,
}

async fn world(topology: Topology, options: &Options) -> Result<World> {
    let lab = Lab::build(topology).await?;
    let deployment = lab.deployment().await?;
    let user = deployment.add_user("anna");
    let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
    let agent = lab.run_agent(&deployment, workspace.agents.first().context("one agent")?).await?;
    let daemon = Daemon::start(options).await?;
    let client = daemon.client().await?;
    let cli = Cli::new(daemon.socket())?;
    client.started(deployment.url().as_str(), user.token()).await?;
    client.connected().await?;
    Ok(World { lab, deployment, agent, daemon, client, cli })
}

fn options(direct: bool) -> Options {
    Options { more: format!("[paths]\ndirect = {direct}\nportmap = false\n"), ..Options::default() }
}

/// Replies and the summary of `ping --json`.
fn read(stdout: &str) -> Result<(Vec<Value>, Value)> {
    let mut lines: Vec<Value> = stdout.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>()?;
    let last = lines.pop().context("a summary")?;
    let summary = last.get("summary").with_context(|| stdout.to_owned())?.clone();
    Ok((lines, summary))
}

/// UDP datagrams that left this network namespace so far, by any socket.
fn udp_sent() -> Result<u64> {
    let snmp = fs::read_to_string("/proc/thread-self/net/snmp")?;
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next().context("names")?, lines.next().context("values")?);
    let v4 = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "OutDatagrams").context("a counter")?.1;
    let snmp6 = fs::read_to_string("/proc/thread-self/net/snmp6")?;
    let v6 = snmp6.lines().find_map(|line| line.strip_prefix("Udp6OutDatagrams")).context("a counter")?.trim();
    Ok(v4.parse::<u64>()? + v6.parse::<u64>()?)
}

async fn await_path(client: &Client, kind: PathKind, reason: &str) -> Result {
    let what = format!("path {kind:?} {reason:?}");
    let fits = |status: &codervpn_proto::vpn::Status| {
        let agents = status.ext.as_ref().map(|ext| &ext.agents[..]).unwrap_or_default();
        agents.first().is_some_and(|agent| agent.kind() == kind && agent.reason == reason)
    };
    client.await_status(&what, fits).await?;
    Ok(())
}

#[test]
fn ping_shows_each_reply_with_its_path_and_the_direct_one_is_found() {
    setup().run(async || -> Result {
        let world = world(Topology::EasyNat, &options(true)).await?;
        let check = async {
            let began = Instant::now();
            let (replies, summary) = read(&world.cli.succeeds("ping main.dev -c 4 --json").await?.stdout)?;
            ensure!(replies.len() == 4 && summary["answered"] == 4 && summary["loss_percent"] == 0.0, "{summary}");
            ensure!(summary["min_ms"].as_f64() <= summary["avg_ms"].as_f64(), "{summary}");
            ensure!(summary["avg_ms"].as_f64() <= summary["max_ms"].as_f64(), "{summary}");
            for reply in &replies {
                ensure!(reply["echo"] == true && reply["bytes"] == 64 && reply["name"] == "dev.coder", "{reply}");
            }
            let last = replies.last().context("four")?;
            ensure!(last["path"] == "direct", "{replies:?}");
            let endpoint = last["endpoint"].as_str().unwrap_or_default();
            ensure!(endpoint.starts_with("198.51.100.34:"), "the agent's router: {endpoint}");
            announce(&format!("ping through two NATs: {summary} in {} ms", began.elapsed().as_millis()));

            let text = world.cli.succeeds("ping dev -c 1").await?.stdout;
            ensure!(text.starts_with("64 bytes from dev.coder: seq=1 direct 198.51.100.34:"), "{text}");
            ensure!(text.contains("1 sent, 1 answered, 0% loss\nmin "), "{text}");
            let status = world.cli.succeeds("status").await?.stdout;
            ensure!(status.contains("direct 198.51.100.34:") && !status.contains("WHY NOT DIRECT"), "{status}");
            let unknown = world.cli.run("ping nobody -c 1").await?;
            ensure!(unknown.code == Some(1) && unknown.stderr.contains("codervpn workspaces"), "{unknown:?}");
            Ok(())
        };
        check.await.with_context(|| world.daemon.log().tail())?;

        // Nobody there any more: every ping is lost, and that is a failure.
        world.agent.kill().await;
        let lost = world.cli.run("ping dev -c 2 --json").await?;
        let (replies, summary) = read(&lost.stdout)?;
        ensure!(lost.code == Some(1) && summary["answered"] == 0 && summary["loss_percent"] == 100.0, "{lost:?}");
        ensure!(replies.iter().all(|reply| reply["error"].is_string()), "{lost:?}");
        Ok(())
    });
}

#[test]
fn t40_t54_direct_paths_can_be_forbidden_and_allowed_while_the_tunnel_runs() {
    setup().run(async || -> Result {
        let before = udp_sent()?;
        let world = world(Topology::EasyNat, &options(false)).await?;
        let check = async {
            let text = world.cli.succeeds("ping dev -c 2").await?.stdout;
            ensure!(text.contains(" relay ") && !text.contains("direct"), "{text}");
            await_path(&world.client, PathKind::Relay, "disabled").await?;
            let status = world.cli.succeeds("status").await?.stdout;
            ensure!(status.contains("switched off on this machine (paths.direct)"), "{status}");
            ensure!(udp_sent()? == before, "{} datagrams left", udp_sent()? - before);

            world.daemon.reconfigure(&options(true))?;
            await_path(&world.client, PathKind::Direct, "").await?;
            ensure!(world.lab.stun_answers() > 0 && udp_sent()? > before, "STUN was asked");

            world.daemon.reconfigure(&options(false))?;
            await_path(&world.client, PathKind::Relay, "disabled").await?;
            sleep(Duration::from_millis(100)).await;
            let quiet = udp_sent()?;
            world.cli.succeeds("ping dev -c 3").await?;
            ensure!(udp_sent()? == quiet, "{} datagrams left", udp_sent()? - quiet);
            Ok(())
        };
        check.await.with_context(|| world.daemon.log().tail())
    });
}

#[test]
fn t40_the_deployment_may_forbid_direct_paths_while_the_tunnel_runs() {
    setup().run(async || -> Result {
        let world = world(Topology::EasyNat, &options(true)).await?;
        let check = async {
            world.cli.succeeds("ping dev -c 1").await?;
            await_path(&world.client, PathKind::Direct, "").await?;
            world.deployment.set_disable_direct(true);
            // Settings are asked for after a reconnect.
            world.deployment.drop_connections();
            await_path(&world.client, PathKind::Relay, "disabled_by_deployment").await?;
            let text = world.cli.succeeds("ping dev -c 1").await?.stdout;
            ensure!(text.contains(" relay "), "{text}");
            world.deployment.set_disable_direct(false);
            world.deployment.drop_connections();
            await_path(&world.client, PathKind::Direct, "").await
        };
        check.await.with_context(|| world.daemon.log().tail())
    });
}
