//! Every network of the labs, with the path that must result in it: our daemon against our agent and against a Go agent,
//! and for comparison Coder's own client against a Go agent. The times to the first byte and to a direct path are printed.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::PathKind;
use codervpn_testbed::daemon::{self, Client, Daemon, Options};
use codervpn_testbed::foreign::{self, EngineOptions, agent_address};
use codervpn_testbed::lab::{Expected, Lab, Probes, Topology};
use codervpn_testbed::netns::Setup;
use codervpn_testbed::report::announce;
use serde_json::Value;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

type Result<T = ()> = anyhow::Result<T>;

/// From the first answer to a direct path, where one is possible at all.
const DIRECT: Duration = Duration::from_secs(2);
/// How long a path that must stay on the relay is watched.
const WATCH: Duration = Duration::from_secs(4);
/// After so long the status has the reason for the relay.
const REASON: Duration = Duration::from_secs(12);
/// Between two looks at the path.
const LOOK: Duration = Duration::from_millis(5);
/// Between two requests through the tunnel.
const PROBE: Duration = Duration::from_millis(10);

/// What Coder's client has for a reason.
const NOT_TOLD: &str = "(not told)";

/// What a client has come to.
struct Outcome {
    /// From the start of the client to the first answer through the tunnel.
    first: Duration,
    /// From the start of the client to a direct path.
    direct: Option<(Duration, SocketAddr)>,
    /// Why there is none.
    reason: String,
}

/// A path as either client tells it.
struct Path {
    direct: Option<SocketAddr>,
    reason: String,
}

async fn watch(
    topology: Topology,
    begin: Instant,
    probes: Probes,
    mut look: impl AsyncFnMut() -> Result<Path>,
) -> Result<Outcome> {
    let answered = async {
        // Looked at meanwhile, since a path may be direct before anything has asked for it.
        let mut direct = None;
        loop {
            if direct.is_none() {
                direct = look().await?.direct.map(|address| (begin.elapsed(), address));
            }
            if let Ok(first) = timeout(LOOK, probes.answer_after(begin)).await {
                return anyhow::Ok((first.duration_since(begin), direct));
            }
        }
    };
    let (first, mut direct) = timeout(daemon::PATIENCE, answered).await.context("no answer through the tunnel")??;
    let limit = if topology.expected() == Expected::Direct { daemon::PATIENCE } else { WATCH };
    let mut reason = String::new();
    // The reason may take a second round of probes to be known.
    let known =
        |reason: &str| reason == NOT_TOLD || expected_reason(topology).is_none_or(|expected| expected == reason);
    while direct.is_none() && (begin.elapsed() < first + limit || (!known(&reason) && begin.elapsed() < first + REASON))
    {
        let path = look().await?;
        direct = path.direct.map(|address| (begin.elapsed(), address));
        reason = path.reason;
        sleep(LOOK).await;
    }
    Ok(Outcome { first, direct, reason })
}

fn judge(topology: Topology, who: &str, outcome: &Outcome, strict: bool) -> Result {
    let after = outcome.direct.map(|(direct, _)| direct.saturating_sub(outcome.first));
    let path = match (&outcome.direct, after) {
        (Some((direct, address)), Some(after)) => {
            format!("direct after {:4} ms, {:4} after that, {address}", direct.as_millis(), after.as_millis())
        }
        _ => format!("relay: {}", outcome.reason),
    };
    let line = format!("{topology:24} {who:14} first byte after {:4} ms, {path}", outcome.first.as_millis());
    announce(&line);
    match topology.expected() {
        Expected::Relay => ensure!(outcome.direct.is_none(), "{line}: a direct path that cannot be"),
        Expected::Direct => {
            let after = after.with_context(|| format!("{line}: no direct path"))?;
            ensure!(!strict || after <= DIRECT, "{line}: too late");
        }
    }
    Ok(())
}

/// Coder's own client, with a TUN device as ours has.
async fn go_client(topology: Topology, url: &str, token: &str, target: Ipv6Addr) -> Result<Outcome> {
    let options = EngineOptions { tun: Some("coder1".into()), ..EngineOptions::default() };
    let begin = Instant::now();
    let probes = Probes::start_every(PROBE, target)?;
    let mut client = foreign::Client::start(None, url, token, &options).await?;
    let look = async || -> Result<Path> {
        let status = client.process.call("status", Value::Null).await?;
        let path = status["peers"][0]["cur_addr"].as_str().filter(|path| !path.is_empty());
        Ok(Path { direct: path.map(str::parse).transpose()?, reason: NOT_TOLD.into() })
    };
    let outcome = watch(topology, begin, probes, look).await?;
    client.process.quit().await?;
    Ok(outcome)
}

async fn path_of(client: &Client) -> Result<Path> {
    let ext = client.status().await?.ext.context("our service says more")?;
    let Some(agent) = ext.agents.first() else { return Ok(Path { direct: None, reason: "no agent".into() }) };
    let direct = (agent.kind() == PathKind::Direct).then(|| agent.endpoint.parse()).transpose()?;
    Ok(Path { direct, reason: agent.reason.clone() })
}

async fn our_client(topology: Topology, url: &str, token: &str, target: Ipv6Addr) -> Result<Outcome> {
    let daemon = Daemon::start(&Options::default()).await?;
    let outcome = async {
        let client = daemon.client().await?;
        let begin = Instant::now();
        let probes = Probes::start_every(PROBE, target)?;
        client.started(url, token).await?;
        let outcome = watch(topology, begin, probes, async || path_of(&client).await).await?;
        daemon::echo(target).await?;
        client.stopped().await?;
        anyhow::Ok(outcome)
    };
    let outcome = outcome.await.with_context(|| daemon.log().tail())?;
    daemon.terminate().await?;
    Ok(outcome)
}

/// The word that `codervpn status` has for it.
fn expected_reason(topology: Topology) -> Option<&'static str> {
    match topology {
        Topology::UdpBlocked => Some("udp_blocked"),
        Topology::HardNatBoth => Some("hard_nat"),
        Topology::SmallPath => Some("path_too_small"),
        _ => None,
    }
}

fn check_reason(topology: Topology, outcome: &Outcome) -> Result {
    if let Some(reason) = expected_reason(topology) {
        ensure!(outcome.reason == reason, "{topology}: the relay's reason is {:?}, not {reason:?}", outcome.reason);
    }
    Ok(())
}

/// All three pairs in one network, one after another.
async fn pairs(topology: Topology) -> Result {
    let lab = Lab::build(topology).await?;

    let mut coordinator = lab.go_coordinator(None).await?;
    let id = Uuid::new_v4();
    let agent = lab.go_agent(&coordinator.url, id).await?;
    coordinator.add_workspace(Uuid::new_v4(), "dev", &[(id, "main")]).await?;
    let (url, token) = (coordinator.url.clone(), coordinator.token.clone());
    let outcome = go_client(topology, &url, &token, agent_address(id)).await.context("Go with Go")?;
    judge(topology, "Go, Go", &outcome, false)?;
    ensure!(lab.stun_answers() > 0 || topology == Topology::UdpBlocked, "nobody asked our STUN servers");

    let outcome = our_client(topology, &url, &token, agent_address(id)).await.context("ours with Go")?;
    judge(topology, "ours, Go agent", &outcome, true)?;
    check_reason(topology, &outcome)?;
    drop((coordinator, agent));

    let deployment = lab.deployment().await?;
    let user = deployment.add_user("anna");
    let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
    let agent = lab.run_agent(&deployment, workspace.agents.first().context("one agent")?).await?;
    let outcome = our_client(topology, deployment.url().as_str(), user.token(), agent.address())
        .await
        .context("ours with ours")?;
    judge(topology, "ours, ours", &outcome, true)?;
    check_reason(topology, &outcome)
}

macro_rules! labs {
    ($($name:ident $topology:ident,)*) => {
        $(
            #[test]
            fn $name() {
                Setup::new().programs().foreign().tun().nft().run(async || pairs(Topology::$topology).await);
            }
        )*

        #[test]
        fn no_network_is_left_out() {
            assert_eq!([$(Topology::$topology),*], Topology::ALL);
        }
    };
}

labs! {
    on_one_lan_the_path_is_direct SameLan,
    through_easy_nats_the_path_is_direct EasyNat,
    with_both_families_the_path_is_direct DualStack,
    from_behind_a_hard_nat_the_path_is_direct HardNatAtClient,
    into_a_hard_nat_the_path_is_direct HardNatAtAgent,
    a_hard_nat_against_a_filter_leaves_the_relay HardNatAgainstFilter,
    hard_nats_on_both_sides_leave_the_relay HardNatBoth,
    without_udp_the_relay_is_left UdpBlocked,
    over_ipv6_alone_the_path_is_direct Ipv6Only,
    over_ipv4_alone_the_path_is_direct Ipv4Only,
    t12_t13_a_path_too_small_for_full_packets_is_left_to_the_relay SmallPath,
    through_somebody_elses_vpn_the_path_is_direct SecondVpn,
}
