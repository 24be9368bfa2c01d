//! Bad input from a deployment: a server that is none, and updates that make no sense.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::{DnsState, FailureCode};
use codervpn_proto::tailnet::calls;
use codervpn_proto::tailnet::workspace::Status;
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_testbed::cli::Cli;
use codervpn_testbed::coderd::{Deployment, Fault, Route, RpcFault, WorkspaceState};
use codervpn_testbed::daemon::{self, Daemon, Options, System, World};
use codervpn_testbed::netns::Setup;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use uuid::Uuid;

type Result<T = ()> = anyhow::Result<T>;

fn setup() -> Setup {
    Setup::new().programs().tun()
}

/// A web server that has nothing to do with Coder: says `answer` to whatever it is asked.
async fn stranger(answer: &'static [u8]) -> Result<(String, tokio::task::JoinHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let task = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer).await;
            });
        }
    });
    Ok((url, task))
}

/// Not Coder at all: the text asks whether the URL is right.
#[test]
fn another_kind_of_server() {
    setup().run(async || -> Result {
        let mut daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        let cli = Cli::new(daemon.socket())?;
        let answers: [&[u8]; 6] = [
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>",
            b"HTTP/1.1 404 Not Found\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>",
            b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]",
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"",
        ];
        for answer in answers {
            let what = String::from_utf8_lossy(answer);
            let (url, task) = stranger(answer).await?;
            let reply = client.start(&url, "some-token").await?;
            let failure = reply.ext.and_then(|ext| ext.failure).with_context(|| format!("{what}: a start succeeds"))?;
            let codes = [FailureCode::NotCoder, FailureCode::Unreachable];
            ensure!(codes[..if answer.is_empty() { 2 } else { 1 }].contains(&failure.code()), "{what}: {failure:?}");
            ensure!(failure.message.contains("URL"), "{what}: {failure:?}");
            let login = cli.login(&url, "some-token").await?;
            ensure!(login.code == Some(1) && login.stderr.contains("URL"), "{what}: {login:?}");
            task.abort();
            daemon.check_alive()?;
        }
        Ok(())
    });
}

/// Each gives a failure with a code and a text that a person understands, at the start as at the login.
#[test]
fn a_server_that_fails() {
    setup().limit(Duration::from_secs(300)).run(async || -> Result {
        let world = World::new().await?;
        let mut daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        let cli = Cli::new(daemon.socket())?;
        let before = System::now()?;
        let faults = world.deployment.faults();
        let raw =
            |body: &[u8]| Fault::Raw { status: 200, content_type: "application/json".into(), body: body.to_vec() };
        use FailureCode as Code;
        let cases: [(&str, Fault, &[FailureCode]); 11] = [
            ("HTML", Fault::Html { status: 200 }, &[Code::NotCoder]),
            // It says that it is Coder, whatever else it says.
            ("HTML with 404", Fault::Html { status: 404 }, &[Code::NotCoder, Code::ServerError]),
            ("HTML with 502", Fault::Html { status: 502 }, &[Code::NotCoder, Code::ServerError]),
            ("401", Fault::status(401, "You are signed out or your session has expired."), &[Code::Unauthorized]),
            ("403", Fault::status(403, "Forbidden."), &[Code::Forbidden]),
            ("404", Fault::status(404, "Route not found."), &[Code::NotCoder, Code::ServerTooOld, Code::ServerError]),
            ("500", Fault::status(500, "Internal error."), &[Code::ServerError]),
            ("half JSON", raw(b"{\"username\":\"an"), &[Code::NotCoder]),
            ("deep JSON", raw(&[b'['; 60_000]), &[Code::NotCoder]),
            ("cut", Fault::Drop, &[Code::Unreachable, Code::NotCoder]),
            ("elsewhere", Fault::Redirect { location: "https://elsewhere.example/login".into() }, &[Code::NotCoder]),
        ];
        for (what, fault, codes) in cases {
            faults.set(Route::Any, fault);
            let reply = client.start(world.url(), world.token()).await.context(what)?;
            let failure = reply.ext.and_then(|ext| ext.failure).with_context(|| format!("{what}: a start succeeds"))?;
            ensure!(codes.contains(&failure.code()), "{what}: {failure:?}");
            ensure!(reply.error_message.len() > 20 && reply.error_message.len() < 3000, "{what}: {failure:?}");
            let login = cli.login(world.url(), world.token()).await.context(what)?;
            ensure!(login.code == Some(1) && !login.stderr.is_empty(), "{what}: {login:?}");
            ensure!(!login.stderr.contains("panicked"), "{what}: {login:?}");
            daemon.check_alive().context(what)?;
            faults.clear();
        }
        let nobody = client.start("http://127.0.0.1:1", world.token()).await?;
        ensure!(nobody.ext.and_then(|ext| ext.failure).context("failure")?.code() == Code::Unreachable, "refused");
        client.await_lifecycle(Lifecycle::Stopped).await?;
        ensure!(System::now()? == before, "a failed start leaves something");
        ensure!(!daemon.log().contains(world.token()), "the token is in the log");
        client.started(world.url(), world.token()).await?;
        Ok(())
    });
}

/// A server that hangs is told as such, in time, and can be stopped before.
#[test]
fn a_server_that_hangs() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        world.deployment.faults().set(Route::Any, Fault::Hang);
        let reply = client.start(world.url(), world.token()).await?;
        let failure = reply.ext.and_then(|ext| ext.failure).context("a start succeeds")?;
        ensure!(failure.code() == FailureCode::Timeout, "{failure:?}");
        Ok(())
    });
}

/// A control connection that never comes does not keep the daemon from saying so, and from stopping.
#[test]
fn a_control_connection_that_is_refused_or_broken() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let mut daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        let faults = world.deployment.faults();
        for fault in [Fault::Html { status: 200 }, Fault::status(500, "no"), Fault::Drop, Fault::Hang] {
            faults.set(Route::Tailnet, fault.clone());
            let starter = client.clone();
            let (url, token) = (world.url().to_owned(), world.token().to_owned());
            let start = tokio::spawn(async move { starter.start(&url, &token).await });
            client.await_status("an attempt", |status| status.lifecycle() != Lifecycle::Stopped).await?;
            // Whatever came of it, a stop works.
            client.stopped().await.with_context(|| format!("{fault:?}"))?;
            start.await??;
            client.await_lifecycle(Lifecycle::Stopped).await?;
            faults.clear();
        }
        for rpc in [RpcFault::Unknown, RpcFault::Error { code: 13, text: "broken".into() }, RpcFault::Close] {
            faults.rpc(calls::WORKSPACE_UPDATES, rpc.clone());
            let reply = client.start(world.url(), world.token()).await?;
            ensure!(reply.success || !reply.error_message.is_empty(), "{rpc:?}: {reply:?}");
            client.stopped().await.with_context(|| format!("{rpc:?}"))?;
            faults.clear();
        }
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        daemon.check_alive()
    });
}

fn workspace(name: &str, agents: &[(Uuid, &str)]) -> WorkspaceState {
    WorkspaceState {
        name: name.to_owned(),
        status: Status::Running,
        agents: agents.iter().map(|(id, name)| (*id, (*name).to_owned())).collect::<BTreeMap<_, _>>(),
    }
}

/// Duplicate and impossible names: what is right keeps its names, what is not is left out, said and shown.
#[test]
fn an_update_with_names_that_cannot_be() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let mut daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        let store = world.deployment.workspaces();
        let owner = world.user.id;
        let long = "x".repeat(64);
        let huge = "y".repeat(70_000);
        let put = |name: &str, agents: &[(Uuid, &str)]| store.put(owner, Uuid::new_v4(), workspace(name, agents));
        put("dup", &[(Uuid::new_v4(), "main")]);
        put("dup", &[(Uuid::new_v4(), "main")]);
        put("twins", &[(Uuid::new_v4(), "same"), (Uuid::new_v4(), "same")]);
        for name in ["", ".", "..", "a.b", "white space", "-dash", "ümlaut", "a\0b", "a\nb", &long, &huge, "*", "me"] {
            put(name, &[(Uuid::new_v4(), "main")]);
            put("good", &[(Uuid::new_v4(), name)]);
        }
        put("nil", &[(Uuid::nil(), "main")]);
        put("last", &[(Uuid::new_v4(), "main")]);
        daemon::await_answer("main.last.me.coder").await?;
        ensure!(daemon::ask("main.dev.me.coder").await?.v6 == [world.address()], "an honest workspace lost its name");
        let status = client.status().await?;
        ensure!(status.lifecycle() == Lifecycle::Started, "{status:?}");
        let peers = status.peer_update.context("peers")?;
        ensure!(peers.upserted_agents.iter().all(|agent| !agent.fqdn.is_empty() && agent.id.len() == 16), "R-18");
        daemon.log().line("name left out").await?;
        world.echo().await?;
        daemon.check_alive()?;
        client.stopped().await
    });
}

/// A suffix that would take a part of the public internet away is not served; the tunnel runs, the text says why.
#[test]
fn a_suffix_that_must_not_be() {
    setup().run(async || -> Result {
        for suffix in ["com", "", "a..b", "localhost", "white space", "127.0.0.1"] {
            let world = World::with(Deployment::builder().hostname_suffix(Some(suffix))).await?;
            let mut daemon = Daemon::start(&Options::default()).await?;
            let client = daemon.client().await?;
            client.started(world.url(), world.token()).await?;
            let status = client.connected().await.with_context(|| format!("suffix {suffix:?}"))?;
            if !suffix.is_empty() {
                let dns = status.ext.and_then(|ext| ext.dns).context("dns")?;
                ensure!(dns.state() == DnsState::Failed && !dns.text.is_empty(), "{suffix:?}: {dns:?}");
                ensure!(
                    daemon::ask(&format!("dev.{}", suffix.trim())).await.is_ok_and(|answer| answer.v6.is_empty())
                        || suffix.contains([' ', '.']),
                    "{suffix:?} is served"
                );
            }
            world.echo().await?;
            client.stopped().await?;
            daemon.check_alive()?;
            daemon.terminate().await?;
        }
        Ok(())
    });
}
