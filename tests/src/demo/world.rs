//! Decides what the demo's deployment holds: one user with workspaces of every kind, another one beside her, and an
//! agent process for each agent of a running workspace.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, ensure};

use crate::agent::WorkspaceAgent;
use crate::coderd::{Deployment, User, Workspace};

/// As a Coder server listens when nothing else is configured.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 3000);

/// The deployment, its relay and everything that runs on it.
#[derive(Debug)]
pub(super) struct World {
    deployment: Deployment,
    /// The user whose machine this is.
    pub(super) alice: User,
    /// Hers, by name.
    workspaces: BTreeMap<&'static str, Entry>,
    /// Of the other user.
    _others: Vec<WorkspaceAgent>,
}

#[derive(Debug)]
struct Entry {
    workspace: Workspace,
    /// Agents that a start brings.
    agents: &'static [&'static str],
    running: Vec<WorkspaceAgent>,
}

impl World {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let deployment = Deployment::builder().listen(LISTEN).start().await?;
        let (alice, bob) = (deployment.add_user("alice"), deployment.add_user("bob"));
        let dev = deployment.create_workspace(&alice, "dev", &["main"])?;
        let web = deployment.create_workspace(&alice, "web", &["app", "db"])?;
        let old = deployment.create_stopped_workspace(&alice, "old")?;
        let lab = deployment.create_workspace(&bob, "lab", &["main"])?;
        let (dev_agents, web_agents, others) =
            tokio::try_join!(run(&deployment, &dev), run(&deployment, &web), run(&deployment, &lab))?;
        let workspaces = BTreeMap::from([
            ("dev", Entry { workspace: dev, agents: &["main"], running: dev_agents }),
            ("web", Entry { workspace: web, agents: &["app", "db"], running: web_agents }),
            ("old", Entry { workspace: old, agents: &["main"], running: Vec::new() }),
        ]);
        Ok(Self { deployment, alice, workspaces, _others: others })
    }

    pub(super) fn url(&self) -> String {
        self.deployment.url().as_str().trim_end_matches('/').to_owned()
    }

    /// What the button in the dashboard does: a build that brings new agents, then their processes.
    pub(super) async fn start_workspace(&mut self, name: &str) -> anyhow::Result<()> {
        let entry = self.workspaces.get_mut(name).with_context(|| format!("alice has no workspace {name:?}"))?;
        ensure!(entry.running.is_empty(), "{name:?} is running");
        entry.workspace = self.deployment.start_workspace(&entry.workspace, entry.agents)?;
        entry.running = run(&self.deployment, &entry.workspace).await?;
        Ok(())
    }

    /// Its agents are taken off the list, then their processes end.
    pub(super) async fn stop_workspace(&mut self, name: &str) -> anyhow::Result<()> {
        let entry = self.workspaces.get_mut(name).with_context(|| format!("alice has no workspace {name:?}"))?;
        ensure!(!entry.running.is_empty(), "{name:?} is not running");
        self.deployment.stop_workspace(&entry.workspace)?;
        for agent in entry.running.drain(..) {
            agent.stop().await;
        }
        Ok(())
    }

    /// The deployment remembers what no client may do.
    pub(super) fn check_manners(&self) -> anyhow::Result<()> {
        let violations = self.deployment.violations();
        ensure!(violations.is_empty(), "rules of the control connection were broken: {violations:?}");
        Ok(())
    }
}

/// Agent processes of a running workspace, ready to be talked to.
async fn run(deployment: &Deployment, workspace: &Workspace) -> anyhow::Result<Vec<WorkspaceAgent>> {
    let mut running = Vec::new();
    for agent in &workspace.agents {
        let mut options = deployment.agent_options(agent);
        options.name = format!("{} in {}", agent.name, workspace.name);
        running.push(WorkspaceAgent::start(options).await?);
    }
    for agent in &running {
        agent.ready().await?;
    }
    Ok(running)
}
