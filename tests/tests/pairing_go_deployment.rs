//! Our daemon against a deployment we did not write: the Go coordinator, its relay and a Go agent.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::FailureCode;
use codervpn_testbed::daemon::{self, Daemon, Options, System};
use codervpn_testbed::foreign::{Agent, Coordinator, CoordinatorOptions, EngineOptions, Tls};
use codervpn_testbed::netns::Setup;
use rand::RngExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use uuid::Uuid;

const AGENT: Uuid = Uuid::from_u128(0xaaaa_aaaa_bbbb_4ccc_8ddd_eeee_eeee_eeee);
const WORKSPACE: Uuid = Uuid::from_u128(0x1111_1111_2222_4333_8444_5555_5555_5555);
const MIB: usize = 1 << 20;
const BLOCK: usize = 32 * 1024;
/// Bytes on their way to the echo and back.
const IN_FLIGHT: usize = 512 * 1024;

fn setup() -> Setup {
    Setup::new().programs().foreign().tun()
}

/// A deployment with one workspace `dev` and its agent `main`.
async fn deployment(options: CoordinatorOptions<'_>, engine: EngineOptions) -> anyhow::Result<(Coordinator, Agent)> {
    let mut coordinator = Coordinator::start(options).await?;
    let mut agent = Agent::start(None, &coordinator.url, AGENT, &engine).await?;
    agent.process.relay_up().await?;
    coordinator.add_workspace(WORKSPACE, "dev", &[(AGENT, "main")]).await?;
    Ok((coordinator, agent))
}

/// Sends `bytes` random bytes to the agent's echo service and compares what comes back.
async fn echo(agent: &Agent, bytes: usize) -> anyhow::Result<()> {
    let mut sent = vec![0; bytes];
    rand::rng().fill(&mut sent[..]);
    let mut stream = TcpStream::connect((agent.address(), 7)).await?;
    let (mut reader, mut writer) = stream.split();
    let mut back = vec![0; bytes];
    // Both directions at once, but never so much that the echo's buffers fill up: two ends that both wait for the other
    // to read are the echo's own deadlock.
    let room = Semaphore::new(IN_FLIGHT);
    let send = async {
        for block in sent.chunks(BLOCK) {
            room.acquire_many(block.len() as u32).await?.forget();
            writer.write_all(block).await?;
        }
        anyhow::Ok(())
    };
    let receive = async {
        for block in back.chunks_mut(BLOCK) {
            reader.read_exact(block).await?;
            room.add_permits(block.len());
        }
        anyhow::Ok(())
    };
    tokio::try_join!(send, receive)?;
    ensure!(sent == back, "what came back is not what was sent");
    Ok(())
}

async fn get(agent: &Agent) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect((agent.address(), 80)).await?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: dev\r\n\r\n").await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    Ok(page)
}

/// From the start to a stop that leaves nothing, with everything a user does in between.
async fn use_it(daemon: &Daemon, coordinator: &Coordinator, agent: &Agent) -> anyhow::Result<()> {
    let before = System::now()?;
    let client = daemon.client().await?;
    client.started(&coordinator.url, &coordinator.token).await?;
    for name in ["dev.coder", "main.dev.me.coder", "main.dev.tester.coder"] {
        let (address, _) = daemon::await_answer(name).await?;
        ensure!(address == agent.address(), "{name} is {address}");
    }
    ensure!(daemon::ask("other.coder").await?.code == 3, "an unknown name exists");
    timeout(daemon::PATIENCE, echo(agent, 5)).await.context("first connection")??;
    ensure!(get(agent).await?.contains("hello from"), "HTTP through the tunnel");
    timeout(Duration::from_secs(60), echo(agent, 10 * MIB)).await.context("10 MiB both ways")??;
    let status = client.connected().await?;
    let peers = status.peer_update.context("peers are always present")?;
    ensure!(peers.upserted_workspaces.len() == 1 && peers.upserted_agents.len() == 1, "{peers:?}");
    ensure!(peers.upserted_agents[0].last_handshake.is_some(), "a handshake took place");
    let ext = status.ext.context("our service says more")?;
    ensure!((ext.suffix.as_str(), ext.user.as_str()) == ("coder", "tester"), "{ext:?}");
    client.stopped().await?;
    let after = System::now()?;
    ensure!(before == after, "before {before:#?}, after {after:#?}");
    Ok(())
}

#[test]
fn names_and_bytes_over_plain_http() {
    setup().run(async || -> anyhow::Result<()> {
        let (coordinator, agent) = deployment(CoordinatorOptions::default(), EngineOptions::default()).await?;
        let daemon = Daemon::start(&Options::default()).await?;
        use_it(&daemon, &coordinator, &agent).await.with_context(|| daemon.log().tail())?;
        ensure!(daemon.terminate().await?.success(), "an ordinary end");
        Ok(())
    });
}

#[test]
fn names_and_bytes_over_tls_with_an_extra_authority() {
    setup().run(async || -> anyhow::Result<()> {
        let certificate = "/run/server.pem";
        let tls = Tls { host: None, certificate: certificate.into() };
        let options = CoordinatorOptions { tls: Some(tls), ..CoordinatorOptions::default() };
        let engine = EngineOptions { trust: Some(certificate.into()), ..EngineOptions::default() };
        let (coordinator, agent) = deployment(options, engine).await?;
        let options = Options { extra_ca: Some(certificate.into()), ..Options::default() };
        let daemon = Daemon::start(&options).await?;
        use_it(&daemon, &coordinator, &agent).await.with_context(|| daemon.log().tail())?;
        Ok(())
    });
}

/// A certificate that nobody vouches for: the text names its issuer and the key that would help.
#[test]
fn a_foreign_authority_is_refused_with_a_text_that_helps() {
    setup().run(async || -> anyhow::Result<()> {
        let tls = Tls { host: None, certificate: "/run/server.pem".into() };
        let coordinator =
            Coordinator::start(CoordinatorOptions { tls: Some(tls), ..CoordinatorOptions::default() }).await?;
        let other = Tls { host: None, certificate: "/run/other.pem".into() };
        let _other =
            Coordinator::start(CoordinatorOptions { tls: Some(other), ..CoordinatorOptions::default() }).await?;
        ensure!(fs::read("/run/server.pem")? != fs::read("/run/other.pem")?, "two authorities");
        for extra_ca in [None, Some("/run/other.pem".into())] {
            let before = System::now()?;
            let daemon = Daemon::start(&Options { extra_ca, ..Options::default() }).await?;
            let client = daemon.client().await?;
            let reply = client.start(&coordinator.url, &coordinator.token).await?;
            let failure = reply.ext.and_then(|ext| ext.failure).context("a start with a wrong authority fails")?;
            let text = &reply.error_message;
            ensure!(failure.code() == FailureCode::Tls, "{failure:?}");
            ensure!(text.contains("network.extra_ca"), "{text}");
            ensure!(text.contains("issue"), "{text}");
            ensure!(!daemon.log().contains(&coordinator.token), "the token is in the log");
            ensure!(before == System::now()?, "a failed start leaves something");
            daemon.terminate().await?;
        }
        Ok(())
    });
}
