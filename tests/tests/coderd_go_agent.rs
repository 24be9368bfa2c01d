//! A Go agent on our coordinator and relay.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use codervpn_testbed::coderd::{Agent, Deployment, User};
use codervpn_testbed::foreign::{self, Client, EngineOptions};
use codervpn_testbed::netns::Setup;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

const AGENT: Uuid = Uuid::from_u128(0xaaaa_aaaa_bbbb_4ccc_8ddd_eeee_eeee_eeee);

/// Longer than the 75 s after which a Go session ends when a stream of it has not been acknowledged.
const ALONE: Duration = Duration::from_secs(80);

fn workspace(deployment: &Deployment) -> anyhow::Result<User> {
    let user = deployment.add_user("anna");
    deployment.create_workspace_with(&user, "dev", &[Agent { id: AGENT, name: "main".into() }])?;
    Ok(user)
}

/// A silent Coordinate stream is acknowledged, pings are answered: it stays (YX-2, WS-9).
#[test]
fn a_go_agent_alone_stays_connected() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let deployment = Deployment::start().await?;
        workspace(&deployment)?;
        let agent = foreign::Agent::start(None, deployment.url().as_str(), AGENT, &EngineOptions::default()).await?;
        deployment.agent_appears(AGENT).await?;
        tokio::select! {
            () = sleep(ALONE) => {}
            gone = deployment.until("the agent goes", |deployment| deployment.sessions().is_empty()) => {
                // `until` gives up earlier than we do; only a loss is an error.
                ensure!(gone.is_err(), "the agent has lost its connection");
                sleep(ALONE - Duration::from_secs(30)).await;
            }
        }
        let lost = agent.process.take("control-lost", |_| true);
        ensure!(lost.is_none(), "the agent has lost its connection: {lost:?}");
        ensure!(deployment.sessions_opened(AGENT) == 1, "the agent has reconnected");
        ensure!(deployment.sessions().len() == 1, "the agent is gone");
        ensure!(deployment.violations().is_empty(), "{:?}", deployment.violations());
        agent.process.quit().await
    });
}

/// Go on both ends, everything between is ours: DISCONNECTED and LOST, a new process with a new key (6.12).
#[test]
fn go_agent_and_go_client_meet_on_our_coordinator_and_relay() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let deployment = Deployment::start().await?;
        let user = workspace(&deployment)?;
        let by_relay = EngineOptions { block_direct: true, ..EngineOptions::default() };
        let url = deployment.url().as_str();
        let mut agent = foreign::Agent::start(None, url, AGENT, &by_relay).await?;
        agent.process.relay_up().await?;
        let ip = agent.address().into();
        let mut client = Client::start(None, url, user.token(), &by_relay).await?;
        client.agent_ready(AGENT).await?;
        timeout(Duration::from_secs(60), client.process.echo(ip, 10 << 20)).await.context("10 MiB both ways")??;

        agent.process.kill().await?;
        client.process.event_where("peer-update", |event| event["kind"] == "LOST").await?;
        let mut agent = foreign::Agent::start(None, url, AGENT, &by_relay).await?;
        agent.process.relay_up().await?;
        client.agent_ready(AGENT).await?;
        client.process.echo(ip, 1000).await?;
        agent.process.quit().await?;
        client.process.event_where("peer-update", |event| event["kind"] == "DISCONNECTED").await?;
        client.process.quit().await?;
        ensure!(deployment.violations().is_empty(), "{:?}", deployment.violations());
        Ok(())
    });
}

/// Our agent over a relay that we did not write.
#[test]
fn our_agent_uses_a_go_relay() {
    use codervpn_control::api::parse_derp_map;
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let relay = foreign::Relay::start(foreign::RelayOptions::default()).await?;
        let deployment = Deployment::start().await?;
        deployment.set_derp_map(parse_derp_map(&relay.derp_map.to_string())?);
        let user = workspace(&deployment)?;
        let agent = deployment.run_agent(&Agent { id: AGENT, name: "main".into() }).await?;
        let mut client =
            Client::start(None, deployment.url().as_str(), user.token(), &EngineOptions::default()).await?;
        client.agent_ready(AGENT).await?;
        timeout(Duration::from_secs(60), client.process.echo(agent.address().into(), 10 << 20))
            .await
            .context("10 MiB both ways")??;
        ensure!(deployment.relay().counters().forwarded == 0, "our own relay was used");
        client.process.quit().await?;
        agent.stop().await;
        Ok(())
    });
}
