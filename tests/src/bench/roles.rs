//! Processes of a benchmark that are made of the testbed's parts: our agent, and our deployment with its relay. Each is a
//! process of its own, so that what it uses is seen, prints one line when it is ready, and ends with its stdin.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use codervpn_proto::tailnet::coordinate_request::UpdateSelf;
use codervpn_proto::tailnet::{CoordinateRequest, Node};
use codervpn_wire::keys::{DiscoPrivate, NodePrivate};
use codervpn_wire::node::{coder_address, tailscale_address};
use rand_core::OsRng;
use secrecy::SecretString;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin};
use url::Url;
use uuid::Uuid;

use super::sides::ready;
use crate::agent::{AgentOptions, WorkspaceAgent};
use crate::coderd::{Authorization, Deployment};
use crate::report::say;

fn orders() -> Lines<BufReader<Stdin>> {
    BufReader::new(tokio::io::stdin()).lines()
}

/// Our agent; asked for `counters` it tells them.
pub(super) async fn agent(url: &Url, id: Uuid, tun: Option<String>, relay_only: bool) -> anyhow::Result<()> {
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

/// Our deployment, with the relay inside; told to `wake` it has `idle` agents that are there and do nothing.
pub(super) async fn server(listen: SocketAddr, idle: usize) -> anyhow::Result<()> {
    let deployment = Deployment::builder().listen(listen).start().await?;
    let user = deployment.add_user("bench");
    let mut agents = Vec::new();
    for number in 0..10.max(idle) {
        let workspace = deployment.create_workspace(&user, &format!("dev{number}"), &["main"])?;
        agents.push(workspace.agents.first().context("a workspace has agents")?.id);
    }
    say(&json!({"url": deployment.url().as_str(), "token": user.token(), "agents": agents}).to_string());
    let mut orders = orders();
    while let Some(order) = orders.next_line().await? {
        if order == "wake" {
            // As machines come up, after the client has asked for them and not all in one moment: the coordinator's queue
            // for a client is short.
            deployment.until("a tunnel to every agent", |d| d.coordinator().tunnels().len() >= idle).await?;
            for some in agents.get(..idle).unwrap_or_default().chunks(50) {
                for id in some {
                    sleeper(&deployment, *id);
                }
                tokio::time::sleep(Duration::from_millis(25)).await;
            }
            say(&ready());
        }
    }
    deployment.stop().await;
    Ok(())
}

/// An agent that the coordinator knows and whose node it passes on; nobody is behind its keys.
fn sleeper(deployment: &Deployment, id: Uuid) {
    let addresses: Vec<String> = [coder_address(id), tailscale_address(id)].map(|ip| format!("{ip}/128")).into();
    let node = Node {
        id: (id.as_u128() as i64).checked_abs().unwrap_or(i64::MAX).max(1),
        as_of: Some(std::time::SystemTime::now().into()),
        key: [b"np".as_slice(), NodePrivate::generate(&mut OsRng).public().as_bytes()].concat(),
        disco: DiscoPrivate::generate(&mut OsRng).public().to_string(),
        preferred_derp: 999,
        addresses: addresses.clone(),
        allowed_ips: addresses,
        endpoints: vec!["192.0.2.1:41641".into()],
        ..Node::default()
    };
    let coordinator = deployment.coordinator();
    let (membership, mut responses) = coordinator.connect(id, Authorization::Agent(id));
    let update =
        CoordinateRequest { update_self: Some(UpdateSelf { node: Some(node) }), ..CoordinateRequest::default() };
    coordinator.request(&membership, &update);
    tokio::spawn(async move {
        while let Some(response) = responses.recv().await {
            let ready = response.peer_updates.into_iter().filter(|update| update.node.is_some());
            let ready_for_handshake = ready
                .map(|update| codervpn_proto::tailnet::coordinate_request::ReadyForHandshake { id: update.id })
                .collect();
            let answer = CoordinateRequest { ready_for_handshake, ..CoordinateRequest::default() };
            coordinator.request(&membership, &answer);
        }
    });
}
