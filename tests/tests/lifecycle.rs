//! The life of the daemon as users and frontends see it: starts, stops, owners, crashes of everybody else.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::{ControlState, FailureCode};
use codervpn_proto::vpn::StartResponse;
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_testbed::cli::Cli;
use codervpn_testbed::coderd::{Fault, Route};
use codervpn_testbed::daemon::{self, Daemon, Options, System, World, control, echo_within, start_request};
use codervpn_testbed::netns::Setup;

type Result<T = ()> = anyhow::Result<T>;

fn setup() -> Setup {
    Setup::new().programs().tun()
}

fn code(reply: &StartResponse) -> FailureCode {
    let failure = reply.ext.as_ref().and_then(|ext| ext.failure.as_ref());
    failure.map_or(FailureCode::None, codervpn_proto::ext::Failure::code)
}

/// Whether a start found the tunnel running.
fn already(reply: &StartResponse) -> bool {
    reply.ext.as_ref().is_some_and(|ext| ext.already_started)
}

#[test]
fn an_equal_start_does_nothing_and_another_replaces() {
    setup().run(async || -> Result {
        let (world, second) = (World::new().await?, World::new().await?);
        let daemon = Daemon::start(&Options::default()).await?;
        let before = System::now()?;
        let client = daemon.client().await?;
        let first = client.start(world.url(), world.token()).await?;
        ensure!(first.success && !already(&first), "{first:?}");
        client.connected().await?;
        world.echo().await?;
        let since = client.status().await?.ext.context("ext")?.since;
        let again = client.start(world.url(), world.token()).await?;
        ensure!(again.success && already(&again), "{again:?}");
        ensure!(client.status().await?.ext.context("ext")?.since == since, "an equal start begins anew");
        world.echo().await?;

        // 11.4: the last start wins.
        let other = client.start(second.url(), second.token()).await?;
        ensure!(other.success && !already(&other), "{other:?}");
        let status = client.connected().await?;
        let deployment = status.ext.context("ext")?.deployment;
        ensure!(deployment.trim_end_matches('/') == second.url().trim_end_matches('/'), "{deployment}");
        second.echo().await?;
        client.stopped().await?;
        let reply = client.stop().await?;
        ensure!(reply.success && reply.ext.is_some_and(|ext| ext.already_stopped), "a second stop");
        let after = System::now()?;
        ensure!(before == after, "before {before:#?} after {after:#?}");
        Ok(())
    });
}

/// A stop interrupts a start instead of failing (11.4); both get their reply, and nothing is left.
#[test]
fn a_stop_ends_a_start_that_hangs() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        world.deployment.faults().set(Route::UsersMe, Fault::Hang);
        let daemon = Daemon::start(&Options::default()).await?;
        let before = System::now()?;
        let client = daemon.client().await?;
        let starter = client.clone();
        let request = start_request(world.url(), world.token());
        let start = tokio::spawn(async move { starter.start_with(request).await });
        client.await_lifecycle(Lifecycle::Starting).await?;
        client.stopped().await?;
        let reply = start.await??;
        ensure!(!reply.success && code(&reply) == FailureCode::Cancelled, "{reply:?}");
        client.await_lifecycle(Lifecycle::Stopped).await?;
        let after = System::now()?;
        ensure!(before == after, "before {before:#?} after {after:#?}");
        world.deployment.faults().clear();
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        Ok(())
    });
}

/// a start belongs to the daemon, whoever asked for it and goes.
#[test]
fn a_client_that_leaves_stops_nothing() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        world.deployment.faults().times(Route::UsersMe, 1, Fault::Delay(Duration::from_millis(300)));
        let daemon = Daemon::start(&Options::default()).await?;
        let watcher = daemon.client().await?;
        let starter = daemon.client().await?;
        let request = start_request(world.url(), world.token());
        let start = tokio::spawn({
            let starter = starter.clone();
            async move { starter.start_with(request).await }
        });
        watcher.await_lifecycle(Lifecycle::Starting).await?;
        // In the middle of its start.
        starter.speaker.abort();
        ensure!(start.await?.is_err(), "the connection is gone");
        watcher.connected().await?;
        world.echo().await?;
        watcher.speaker.abort();
        let later = daemon.client().await?;
        ensure!(later.status().await?.lifecycle() == Lifecycle::Started, "the tunnel stays");
        world.echo().await?;
        Ok(())
    });
}

/// 11.5.3: others see that it runs and nothing else, and may not touch it; root may.
#[test]
fn a_tunnel_belongs_to_the_user_who_started_it() {
    setup().uids().run(async || -> Result {
        let world = World::new().await?;
        let daemon = Daemon::start(&Options { allow: vec![1000, 1001], ..Options::default() }).await?;
        let (alice, bob) = (Cli::as_user(daemon.socket(), 1000)?, Cli::as_user(daemon.socket(), 1001)?);
        let stranger = Cli::as_user(daemon.socket(), 1002)?;
        for user in [&alice, &bob] {
            let login = user.login(world.url(), world.token()).await?;
            ensure!(login.code == Some(0), "{login:?}");
        }
        alice.succeeds("start").await?;
        let own = alice.status().await?;
        ensure!(own["workspaces"][0]["agents"][0]["name"] == "main", "{own}");
        let seen = bob.status().await?;
        ensure!(seen["lifecycle"] == "started" && seen["restricted"] == true, "{seen}");
        ensure!(
            !seen.to_string().contains("dev") && !seen.to_string().contains(world.url().trim_end_matches('/')),
            "{seen}"
        );
        for command in ["start", "stop"] {
            let refused = bob.run(command).await?;
            ensure!(refused.code == Some(5), "{refused:?}");
            ensure!(refused.stderr.contains("another user"), "{refused:?}");
        }
        ensure!(stranger.run("status").await?.code != Some(0), "a stranger is served");
        world.echo().await?;
        Cli::new(daemon.socket())?.succeeds("stop").await?;
        // Free again.
        bob.succeeds("start").await?;
        bob.succeeds("stop").await?;
        ensure!(!daemon.log().contains(world.token()), "the token is in the log");
        Ok(())
    });
}

/// what a failed start took is given back, every time.
#[test]
fn fifty_failing_starts_cost_nothing() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let mut daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        let fail = async |fault: Fault| -> Result {
            world.deployment.faults().set(Route::Connection, fault);
            let reply = client.start(world.url(), world.token()).await?;
            ensure!(!reply.success, "a start that must fail");
            Ok(())
        };
        fail(Fault::status(500, "no")).await?;
        client.await_lifecycle(Lifecycle::Stopped).await?;
        let before = (System::now()?, daemon.threads()?);
        let open = daemon.descriptors()?;
        for turn in 0..50 {
            fail(if turn % 2 == 0 { Fault::status(500, "no") } else { Fault::Drop }).await?;
        }
        client.await_lifecycle(Lifecycle::Stopped).await?;
        daemon.check_alive()?;
        ensure!(System::now()? == before.0, "something of a failed start is left");
        settles("descriptors", open, || daemon.descriptors()).await?;
        ensure!(daemon.threads()? <= before.1 + 1, "threads: {} then {}", before.1, daemon.threads()?);
        Ok(())
    });
}

/// stop completes before the next start begins, and nothing piles up.
#[test]
fn twenty_rounds_of_start_and_stop() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        let before = System::now()?;
        let mut open = None;
        for round in 0..20 {
            client.started(world.url(), world.token()).await.with_context(|| format!("round {round}"))?;
            client.connected().await?;
            if round % 5 == 0 {
                world.echo().await?;
            }
            client.stopped().await?;
            let after = System::now()?;
            ensure!(before == after, "round {round}: before {before:#?} after {after:#?}");
            if open.is_none() {
                open = Some(daemon.descriptors()?);
            }
        }
        settles("descriptors", open.context("twenty rounds")?, || daemon.descriptors()).await?;
        ensure!(world.deployment.violations().is_empty(), "{:?}", world.deployment.violations());
        Ok(())
    });
}

/// Sockets are closed by tasks; a moment may pass.
async fn settles(what: &str, at_most: usize, mut now: impl FnMut() -> Result<usize>) -> Result {
    let begin = Instant::now();
    loop {
        let found = now()?;
        if found <= at_most {
            return Ok(());
        }
        ensure!(begin.elapsed() < Duration::from_secs(10), "{what}: {found}, not {at_most}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Must hold: an agent killed and restarted is reachable at most 1 s after its new node arrives.
#[test]
fn an_agent_that_crashed_is_reachable_again_at_once() {
    setup().run(async || -> Result {
        let World { deployment, user, entry, agent, .. } = World::new().await?;
        let daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        client.started(deployment.url().as_str(), user.token()).await?;
        client.connected().await?;
        let address = agent.address();
        daemon::echo(address).await?;
        agent.kill().await;
        let agent = deployment.run_agent(&entry).await?;
        let begin = Instant::now();
        echo_within(address, Duration::from_secs(5)).await.with_context(|| daemon.log().tail())?;
        let took = begin.elapsed();
        codervpn_testbed::report::say(&format!("reachable {took:?} after the agent was back"));
        ensure!(took <= Duration::from_secs(2), "{took:?}; 1 s is the aim, doubled for a busy machine");
        drop(agent);
        Ok(())
    });
}

/// names and tunnels outlive the control connection; afterwards what vanished meanwhile is gone.
#[test]
fn a_deployment_that_restarts_keeps_names_and_tunnels() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let gone = world.deployment.create_workspace(&world.user, "old", &["main"])?;
        let daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        world.echo().await?;
        ensure!(!daemon::ask("old.coder").await?.v6.is_empty(), "old.coder");
        world.deployment.stop().await;
        client.await_status("reconnecting", |status| control(status) == ControlState::Reconnecting).await?;
        ensure!(daemon::ask("dev.coder").await?.v6 == [world.address()], "the name is gone while reconnecting");
        world.deployment.delete_workspace(&gone)?;
        world.deployment.resume().await?;
        let status = client.connected().await?;
        ensure!(status.lifecycle() == Lifecycle::Started, "{status:?}");
        ensure!(daemon::ask("old.coder").await?.code == 3, "a workspace deleted meanwhile is still named");
        echo_within(world.address(), daemon::PATIENCE).await?;
        Ok(())
    });
}

/// Names follow workspaces that come and go while it runs.
#[test]
fn workspaces_come_and_go() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let other = world.deployment.add_user("bert");
        world.deployment.create_workspace(&other, "secret", &["main"])?;
        let daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        ensure!(daemon::ask("secret.coder").await?.code == 3, "another user's workspace has a name");
        let two = world.deployment.create_workspace(&world.user, "two", &["a", "b"])?;
        let (address, _) = daemon::await_answer("a.two.me.coder").await?;
        ensure!(octets(address) == two.agents[0].id.as_bytes()[6..], "{address}");
        ensure!(daemon::ask("two.coder").await?.v6.is_empty(), "the short name of two agents");
        world.deployment.stop_workspace(&two)?;
        let begin = Instant::now();
        while daemon::ask("a.two.me.coder").await?.code != 3 {
            ensure!(begin.elapsed() < daemon::PATIENCE, "a stopped workspace keeps its names");
        }
        let status = client.status().await?;
        let peers = status.peer_update.context("peers")?;
        ensure!(peers.upserted_workspaces.iter().any(|workspace| workspace.name == "two"), "{peers:?}");
        Ok(())
    });
}

fn octets(address: std::net::Ipv6Addr) -> Vec<u8> {
    address.octets()[6..].to_vec()
}

/// SIGTERM takes the tunnel down first; a second daemon on the same socket is refused.
#[test]
fn an_ordinary_end_takes_everything_down_and_one_daemon_is_enough() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let before = System::now()?;
        let daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        let second = Daemon::start(&Options::default()).await;
        ensure!(second.is_err(), "two daemons");
        world.echo().await?;
        ensure!(daemon.terminate().await?.success(), "SIGTERM is an ordinary end");
        let after = System::now()?;
        ensure!(before == after, "before {before:#?} after {after:#?}");
        // 6.3: the coordinator is told, so that agents forget us at once.
        world.deployment.until("we are forgotten", |all| all.coordinator().peers().len() == 1).await?;
        Ok(())
    });
}
