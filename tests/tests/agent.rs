//! The workspace agent of the testbed: what it answers through a tunnel made of our own parts.

use std::time::Duration;

use codervpn_testbed::coderd::Deployment;

type Result = anyhow::Result<()>;

/// An agent publishes its node, holds its relay, and leaves with Disconnect (8.3, 6.3).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_appears_and_leaves() -> Result {
    let deployment = Deployment::start().await?;
    let user = deployment.add_user("anna");
    let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
    let entry = workspace.agents.first().expect("one agent");
    let agent = deployment.run_agent(entry).await?;
    deployment.agent_appears(entry.id).await?;
    tokio::time::timeout(Duration::from_secs(5), deployment.relay().connected(agent.key())).await?;
    agent.stop().await;
    deployment.until("the agent has left", |deployment| deployment.coordinator().peers().is_empty()).await?;
    assert_eq!(deployment.violations(), Vec::<String>::new());
    Ok(())
}
