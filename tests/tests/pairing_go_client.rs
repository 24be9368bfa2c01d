//! The Go client against our coordinator, our relay and our agent: it lists the agent and moves data both ways.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use codervpn_testbed::coderd::Deployment;
use codervpn_testbed::foreign::{Client, EngineOptions, PingKind};
use codervpn_testbed::netns::Setup;
use tokio::time::timeout;

const MIB: u64 = 1 << 20;

/// Lists, names, HTTP, echo of 10 MiB (both ways at once), pings, a restart of the agent.
async fn use_it(deployment: &Deployment, engine: &EngineOptions) -> anyhow::Result<()> {
    let user = deployment.add_user("anna");
    let other = deployment.add_user("ben");
    let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
    deployment.create_workspace(&other, "secret", &["main"])?;
    let entry = workspace.agents.first().context("one agent")?;
    let agent = deployment.run_agent(entry).await?;

    let mut client = Client::start(None, deployment.url().as_str(), user.token(), engine).await?;
    client.agent_ready(entry.id).await?;
    let listed = client.agents().await?;
    ensure!(listed.len() == 1, "another user's agents are listed: {listed:?}");
    let ip = IpAddr::from(agent.address());
    ensure!((listed[0].id, listed[0].address) == (entry.id, ip), "{listed:?}");
    ensure!(listed[0].name == "main", "{listed:?}");

    for port in ["", ":8080"] {
        let page = client.process.get(&format!("http://[{ip}]{port}/")).await?;
        ensure!(page.starts_with("hello from main to "), "{page}");
    }
    let zeros = client.process.get(&format!("http://[{ip}]/bytes?n=50000")).await?;
    ensure!(zeros.len() == 50_000, "{} bytes", zeros.len());
    timeout(Duration::from_secs(60), client.process.echo(ip, 10 * MIB)).await.context("10 MiB both ways")??;
    for kind in [PingKind::Icmp, PingKind::Disco] {
        client.process.ping(ip, kind).await?;
    }
    for up in [true, false] {
        let moved = client.process.throughput(ip, up, 0.5).await?;
        ensure!(moved.bytes > MIB, "{moved:?}");
    }

    // Its crash and return: a new key, the same address.
    agent.kill().await;
    client.process.event_where("peer-update", |event| event["kind"] == "LOST").await?;
    let agent = deployment.run_agent(entry).await?;
    client.agent_ready(entry.id).await?;
    let page = client.process.get(&format!("http://[{ip}]/")).await?;
    ensure!(page.starts_with("hello from main to "), "{page}");
    agent.stop().await;
    client.process.event_where("peer-update", |event| event["kind"] == "DISCONNECTED").await?;
    client.process.quit().await?;
    deployment.until("the client has left", |deployment| deployment.coordinator().peers().is_empty()).await?;
    ensure!(deployment.violations().is_empty(), "{:?}", deployment.violations());
    Ok(())
}

#[test]
fn the_go_client_uses_our_deployment() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let deployment = Deployment::start().await?;
        use_it(&deployment, &EngineOptions::default()).await?;
        ensure!(deployment.relay().counters().forwarded > 0, "nothing went through our relay");
        Ok(())
    });
}

/// The relay's other transport (data-plane 2.5).
#[test]
fn the_go_client_uses_our_relay_over_websocket() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let deployment = Deployment::builder().force_websockets().start().await?;
        use_it(&deployment, &EngineOptions { force_websocket: true, ..EngineOptions::default() }).await
    });
}

#[test]
fn the_go_client_uses_our_deployment_over_tls() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let deployment = Deployment::builder().tls().start().await?;
        let trust = deployment.ca_file().map(std::path::Path::to_owned);
        use_it(&deployment, &EngineOptions { trust, ..EngineOptions::default() }).await
    });
}
