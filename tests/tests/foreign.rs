//! The Go peers among themselves: every subcommand works here and our harness
//! drives it. What a later test against our own code shows is then ours.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, ensure};
use codervpn_testbed::foreign::{
    self, Agent, Client, Coordinator, CoordinatorOptions, EngineOptions, ListedAgent, Node, PingKind, Process, Relay,
    RelayOptions, Tls, agent_address,
};
use codervpn_testbed::netns::{self, Setup};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

const AGENT: Uuid = Uuid::from_u128(0xaaaa_aaaa_bbbb_cccc_dddd_eeee_eeee_eeee);
const WORKSPACE: Uuid = Uuid::from_u128(0x1111_1111_2222_3333_4444_5555_5555_5555);
const STUN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// One pair of engines: what they send, and by which path.
async fn pair(relay: &mut Relay, options: EngineOptions, direct: bool, transport: &str) -> anyhow::Result<()> {
    let options = EngineOptions { derp_map: Some(relay.derp_map.clone()), ..options };
    let mut a = Node::start(None, &options).await?;
    let mut b = Node::start(None, &options).await?;
    // A WireGuard initiation that gets lost costs 5 s, so: both relays up
    // first, then the passive side, and traffic from one side only.
    a.process.relay_up().await?;
    b.process.relay_up().await?;
    let (node_a, node_b) = (a.process.node().await?, b.process.node().await?);
    b.process.add_peer("a", &node_a, false).await?;
    a.process.add_peer("b", &node_b, true).await?;
    let ip = *b.addresses.first().context("an engine has addresses")?;

    let body = a.process.get(&format!("http://[{ip}]/")).await?;
    ensure!(body.starts_with("hello from"), "{body}");
    a.process.echo(ip, 10 << 20).await?;
    for kind in [PingKind::Tsmp, PingKind::Icmp] {
        a.process.ping(ip, kind).await?;
    }
    // Paths change on their own; each ping asks for the one in use now.
    tokio::time::timeout(Duration::from_secs(20), async {
        while a.process.ping(ip, PingKind::Disco).await?.endpoint.is_empty() == direct {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    })
    .await
    .context("the wanted path is never taken")??;
    for _ in 0..2 {
        relay.process.event_where("relay-open", |e| e["transport"] == transport && e["session_token"] == false).await?;
    }
    a.process.quit().await?;
    b.process.quit().await
}

#[test]
fn engines_reach_each_other_directly_and_by_relay() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let certificate = tempfile::NamedTempFile::new_in("/run")?;
        let tls = Tls { host: None, certificate: certificate.path().into() };
        let mut relay =
            Relay::start(RelayOptions { tls: Some(tls), stun: Some(STUN), ..RelayOptions::default() }).await?;
        ensure!(std::fs::read_to_string(certificate.path())?.contains("BEGIN CERTIFICATE"));
        pair(&mut relay, EngineOptions::default(), true, "raw").await?;
        let by_relay = EngineOptions { block_direct: true, ..EngineOptions::default() };
        pair(&mut relay, by_relay.clone(), false, "raw").await?;
        pair(&mut relay, EngineOptions { force_websocket: true, ..by_relay }, false, "websocket").await?;
        relay.drop_connections().await?;
        relay.process.quit().await
    });
}

#[test]
fn fixed_keys_give_the_same_identity() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let mut node = Process::spawn(
            None,
            "node",
            [
                "--key",
                "privkey:c063a88a6c3108a7b5f7df4e204d57b62cfb88b39d6390e00a7ffb2a771b7256",
                "--disco-key",
                "70f44076c98f7b39781d5af96b521ba3adaf0ec2902d0c681eb175e613b2956a",
            ],
        )?;
        let ready = node.event("ready").await?;
        assert_eq!(ready["key"], "nodekey:18cd4e736272e0b5562aa51983db0152d3a2568bb62168175412d70a22403d42");
        assert_eq!(ready["disco"], "discokey:717a061b0f503295b4a1ba733393d83ee79327b25a902cacef8f4f3d6ceace73");
        node.quit().await
    });
}

/// Status and JSON body of one GET.
async fn get(coordinator: &Coordinator, path: &str, token: &str) -> anyhow::Result<(u16, Value)> {
    let host = coordinator.url.strip_prefix("http://").context("plain HTTP")?;
    let mut stream = TcpStream::connect(host).await?;
    let head = format!("GET {path} HTTP/1.0\r\nHost: {host}\r\nCoder-Session-Token: {token}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an HTTP answer")?;
    let status = head.split(' ').nth(1).context("a status line")?.parse()?;
    Ok((status, serde_json::from_str(body)?))
}

#[test]
fn coordinator_answers_rest_calls() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let coordinator = Coordinator::start(CoordinatorOptions::default()).await?;
        let token = coordinator.token.clone();
        assert_eq!(get(&coordinator, "/api/v2/buildinfo", "").await?.1["agent_api_version"], "2.6");
        assert_eq!(get(&coordinator, "/api/v2/users/me", &token).await?.1["username"], "tester");
        assert_eq!(get(&coordinator, "/api/v2/users/me", "wrong").await?.0, 401);
        let (status, body) = get(&coordinator, "/api/v2/tailnet?version=2.7", &token).await?;
        assert_eq!(status, 400);
        assert_eq!(body["validations"][0]["detail"], "server is at version 2.6, behind requested minor version 2.7");
        coordinator.process.quit().await
    });
}

#[test]
fn client_reaches_agent_through_the_coordinator() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let mut coordinator = Coordinator::start(CoordinatorOptions {
            stun: vec![STUN],
            flags: vec!["--token-refresh".into(), "1h".into()],
            ..CoordinatorOptions::default()
        })
        .await?;
        let (url, token) = (coordinator.url.clone(), coordinator.token.clone());
        let mut agent = Agent::start(None, &url, AGENT, &EngineOptions::default()).await?;
        agent.process.relay_up().await?;
        coordinator.add_workspace(WORKSPACE, "dev", &[(AGENT, "main")]).await?;

        let mut client = Client::start(None, &url, &token, &EngineOptions::default()).await?;
        let connected = coordinator.process.event_where("connected", |e| e["agent"] == false).await?;
        client.agent_ready(AGENT).await?;
        let address = IpAddr::from(agent_address(AGENT));
        let listed = ListedAgent { id: AGENT, name: "main".into(), workspace_id: WORKSPACE, address };
        assert_eq!(client.agents().await?, [listed]);
        let page = format!("http://[{address}]/");
        client.process.get(&page).await?;
        client.process.echo(address, 10 << 20).await?;

        // Cut connections: the same peer id again, by its resume token, and the tunnel lives on.
        client.process.event("resume-token").await?;
        client.process.event("control-connected").await?;
        coordinator.drop_connections().await?;
        let again = coordinator.process.event_where("connected", |e| e["agent"] == false).await?;
        assert_eq!(again["id"], connected["id"]);
        assert!(again["query"].as_str().is_some_and(|q| q.contains("resume_token=")), "{again}");
        client.process.event("control-connected").await?;
        client.process.get(&page).await?;

        // A refused dial is dialled again.
        coordinator.refuse(401, 1, "Invalid resume token", "resume_token").await?;
        coordinator.drop_connections().await?;
        coordinator.process.event_where("refused", |e| e["status"] == 401).await?;
        coordinator.process.event_where("connected", |e| e["agent"] == false).await?;

        // A pushed map arrives, and a deleted agent loses its tunnel.
        let mut map = coordinator.derp_map.clone();
        map["HomeParams"] = json!({"RegionScore": {"999": 1.5}});
        coordinator.push_derp_map(&map).await?;
        client.process.event_where("derp-map", |e| e["map"].get("HomeParams").is_some()).await?;
        coordinator
            .workspaces(json!({
                "upserted_workspaces": [{"id": WORKSPACE, "name": "dev", "status": "STOPPED"}],
                "deleted_agents": [{"id": AGENT, "name": "main", "workspace_id": WORKSPACE}],
            }))
            .await?;
        client
            .process
            .event_where("peer-update", |e| e["kind"] == "DISCONNECTED" && e["id"] == AGENT.to_string())
            .await?;
        client.process.quit().await?;
        agent.process.quit().await?;
        coordinator.process.quit().await
    });
}

#[test]
fn coordinator_can_be_an_older_server() {
    Setup::new().foreign().run(async || -> anyhow::Result<()> {
        let coordinator = Coordinator::start(CoordinatorOptions {
            without: vec!["RefreshResumeToken".into()],
            ..CoordinatorOptions::default()
        })
        .await?;
        let mut client = Client::start(None, &coordinator.url, &coordinator.token, &EngineOptions::default()).await?;
        let event = client.process.event("resume-token").await?;
        assert!(event["error"].as_str().is_some_and(|e| e.contains("unknown rpc")), "{event}");
        client.process.quit().await?;
        coordinator.process.quit().await
    });
}

/// In namespaces of their own joined by cables, as two machines are.
#[test]
fn client_with_a_tun_device_reaches_an_agent_elsewhere() {
    Setup::new().foreign().tun().run(async || -> anyhow::Result<()> {
        let (server, machine) = (netns::Namespace::new("server")?, netns::Namespace::new("agent")?);
        server.join("10.99.1.2/24", "10.99.1.1/24")?;
        machine.join_to(&server, "10.99.2.2/24", "10.99.2.1/24")?;
        machine.default_route(Ipv4Addr::new(10, 99, 2, 1).into())?;
        let mut coordinator = Coordinator::start(CoordinatorOptions {
            namespace: Some(&server),
            listen: Some("10.99.1.1:8080".parse()?),
            ..CoordinatorOptions::default()
        })
        .await?;
        let relay_only = EngineOptions { block_direct: true, ..EngineOptions::default() };
        let mut agent = Agent::start(Some(&machine), &coordinator.url, AGENT, &relay_only).await?;
        agent.process.relay_up().await?;
        coordinator.add_workspace(WORKSPACE, "dev", &[(AGENT, "main")]).await?;
        let with_tun = EngineOptions { tun: Some("fgn0".into()), ..relay_only };
        let mut client = Client::start(None, &coordinator.url, &coordinator.token, &with_tun).await?;
        client.agent_ready(AGENT).await?;
        // Through the kernel's stack and the device.
        let mut echo = TcpStream::connect((agent_address(AGENT), 7)).await?;
        echo.write_all(b"through the device").await?;
        let mut back = [0; 18];
        echo.read_exact(&mut back).await?;
        assert_eq!(&back, b"through the device");
        let peers = coordinator.peers().await?;
        assert_eq!(peers.as_array().map(Vec::len), Some(2), "{peers}");
        client.process.quit().await?;
        agent.process.quit().await?;
        coordinator.process.quit().await
    });
}

/// The committed vectors are what the libraries make. Vectors that were seen on
/// a wire carry fresh randomness, so only the computed ones are compared.
#[test]
fn vectors_are_those_of_the_libraries() -> anyhow::Result<()> {
    if !foreign::available() {
        return Ok(());
    }
    let out = std::process::Command::new(foreign::program()?).arg("vectors").output()?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let committed = std::fs::read_to_string(foreign::sources().join("VECTORS.md"))?;
    let committed: String = committed.split_whitespace().collect();
    let mut compared = 0;
    for line in String::from_utf8(out.stdout)?.lines() {
        let vector: Value = serde_json::from_str(line)?;
        if vector["how"] == "made by the library"
            && let Some(hex) = vector["hex"].as_str()
        {
            ensure!(committed.contains(hex), "{} is not in VECTORS.md", vector["name"]);
            compared += 1;
        }
    }
    ensure!(compared > 20, "only {compared} vectors compared");
    Ok(())
}
