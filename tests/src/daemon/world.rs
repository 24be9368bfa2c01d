//! The smallest world a daemon can work in: a deployment of ours, one user, one workspace with one running agent.

use std::net::Ipv6Addr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::PATIENCE;
use crate::agent::WorkspaceAgent;
use crate::coderd::{Agent, Builder, Deployment, User, Workspace};

/// Workspace `dev` of user `anna`, with agent `main`.
#[derive(Debug)]
pub struct World {
    pub deployment: Deployment,
    pub user: User,
    pub workspace: Workspace,
    pub entry: Agent,
    pub agent: WorkspaceAgent,
}

impl World {
    pub async fn new() -> anyhow::Result<Self> {
        Self::with(Deployment::builder()).await
    }

    pub async fn with(builder: Builder) -> anyhow::Result<Self> {
        let deployment = builder.start().await?;
        let user = deployment.add_user("anna");
        let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
        let entry = workspace.agents.first().context("one agent")?.clone();
        let agent = deployment.run_agent(&entry).await?;
        Ok(Self { deployment, user, workspace, entry, agent })
    }

    pub fn url(&self) -> &str {
        self.deployment.url().as_str()
    }

    pub fn token(&self) -> &str {
        self.user.token()
    }

    pub fn address(&self) -> Ipv6Addr {
        self.agent.address()
    }

    /// Bytes go there and back through the machine's own stack, the device and the tunnel.
    pub async fn echo(&self) -> anyhow::Result<()> {
        echo(self.address()).await
    }
}

/// One short exchange with the echo service of an agent.
pub async fn echo(address: Ipv6Addr) -> anyhow::Result<()> {
    let exchange = async {
        let mut stream = TcpStream::connect((address, 7)).await?;
        stream.write_all(b"there and back").await?;
        let mut back = [0; 14];
        stream.read_exact(&mut back).await?;
        ensure!(&back == b"there and back", "the echo is another");
        Ok(())
    };
    timeout(PATIENCE, exchange).await.with_context(|| format!("no echo from {address}"))?
}

/// As [`echo`], repeated with short patience until it succeeds within `limit`: for an agent that is just coming back.
pub async fn echo_within(address: Ipv6Addr, limit: Duration) -> anyhow::Result<()> {
    let tries = async {
        while !matches!(timeout(Duration::from_millis(500), echo(address)).await, Ok(Ok(()))) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(limit, tries).await.with_context(|| format!("{address} is not reachable within {limit:?}"))
}
