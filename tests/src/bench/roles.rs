//! Processes of a benchmark that are made of the testbed's parts: our agent, and our deployment with its relay. Each is a
//! process of its own, so that what it uses is seen, prints one line when it is ready, and ends with its stdin.

use std::net::SocketAddr;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use secrecy::SecretString;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin};
use url::Url;
use uuid::Uuid;

use super::sides::ready;
use crate::agent::{AgentOptions, WorkspaceAgent};
use crate::coderd::Deployment;
use crate::report::say;

fn orders() -> Lines<BufReader<Stdin>> {
    BufReader::new(tokio::io::stdin()).lines()
}

/// Our agent; asked for `counters` it tells them.
pub(super) async fn agent(url: &Url, id: Uuid, tun: Option<String>, relay_only: bool) -> anyhow::Result<()> {
    let agent = start(url, id, tun, relay_only).await?;
    say(&ready());
    let mut orders = orders();
    while let Some(order) = orders.next_line().await? {
        if order == "counters" {
            let snapshot = agent.snapshot().await?;
            say(&serde_json::to_string(&snapshot.counters().collect::<Vec<_>>())?);
        }
    }
    agent.stop().await;
    Ok(())
}

/// Very many of our agents in one process: told a list of ids, it has them connect and says so.
pub(super) async fn agents(url: &Url) -> anyhow::Result<()> {
    let mut orders = orders();
    let ids = orders.next_line().await?.context("a list of agents")?;
    let ids: Vec<Uuid> = serde_json::from_str(&ids)?;
    let mut agents = Vec::new();
    for some in ids.chunks(TOGETHER) {
        agents.extend(try_join_all(some.iter().map(|id| start(url, *id, None, false))).await?);
    }
    say(&ready());
    while orders.next_line().await?.is_some() {}
    // Thousands of farewells are not what is measured.
    drop(agents);
    Ok(())
}

/// Agents that connect at the same time.
const TOGETHER: usize = 10;

/// An agent that is connected.
async fn start(url: &Url, id: Uuid, tun: Option<String>, relay_only: bool) -> anyhow::Result<WorkspaceAgent> {
    let agent = WorkspaceAgent::start(AgentOptions {
        url: url.clone(),
        id,
        name: "bench".into(),
        token: SecretString::from(format!("agent-{id}")),
        extra_ca: None,
        tun,
        relay_only,
    })
    .await?;
    agent.ready().await?;
    Ok(agent)
}

/// Our deployment, with the relay inside and so many agents; asked for `tunnels` it answers when a client has
/// one to each of them.
pub(super) async fn server(listen: SocketAddr, count: usize) -> anyhow::Result<()> {
    let deployment = Deployment::builder().listen(listen).start().await?;
    let user = deployment.add_user("bench");
    let mut agents = Vec::new();
    for number in 0..count {
        let workspace = deployment.create_workspace(&user, &format!("dev{number}"), &["main"])?;
        agents.push(workspace.agents.first().context("a workspace has agents")?.id);
    }
    say(&json!({"url": deployment.url().as_str(), "token": user.token(), "agents": agents}).to_string());
    let mut orders = orders();
    while let Some(order) = orders.next_line().await? {
        if order == "tunnels" {
            deployment.until("a tunnel to every agent", |d| d.coordinator().tunnels().len() >= count).await?;
            say(&ready());
        }
    }
    deployment.stop().await;
    Ok(())
}
