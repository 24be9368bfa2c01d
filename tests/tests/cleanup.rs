//! kill -9 at any moment: afterwards `codervpnd cleanup`, or a new start, leaves the machine as it was.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_testbed::coderd::{Fault, Route};
use codervpn_testbed::daemon::{Daemon, Options, System, World, link_resolv_conf};
use codervpn_testbed::netns::{Setup, own_file};

type Result = anyhow::Result<()>;

fn setup() -> Setup {
    Setup::new().programs().tun()
}

fn same(before: &System, after: &System, when: &str) -> Result {
    ensure!(before == after, "{when}: before {before:#?} after {after:#?}");
    Ok(())
}

async fn killed_and_cleaned(dns: &'static str) -> Result {
    let world = World::new().await?;
    let options = Options { dns, ..Options::default() };
    let before = System::now()?;
    let daemon = Daemon::start(&options).await?;
    let client = daemon.client().await?;
    client.started(world.url(), world.token()).await?;
    client.connected().await?;
    world.echo().await?;
    ensure!(System::now()? != before, "a running tunnel can be seen");
    let left = daemon.kill().await?;
    left.cleanup().await?;
    same(&before, &System::now()?, "killed, cleaned")?;
    let again = left.cleanup().await?;
    ensure!(again.stdout.is_empty(), "a second clean-up finds something: {again:?}");

    // A new start repairs by itself, and stops as clean as any.
    let daemon = Daemon::start(&options).await?;
    let client = daemon.client().await?;
    client.started(world.url(), world.token()).await?;
    client.connected().await?;
    drop(daemon.kill().await?);
    let daemon = Daemon::start(&options).await?;
    same(&before, &System::now()?, "killed, started again")?;
    let client = daemon.client().await?;
    client.started(world.url(), world.token()).await?;
    client.connected().await?;
    world.echo().await?;
    client.stopped().await?;
    same(&before, &System::now()?, "started over a dead daemon, stopped")
}

#[test]
fn killed_in_mode_none() {
    setup().run(async || killed_and_cleaned("none").await);
}

#[test]
fn killed_in_mode_direct() {
    setup().run(async || {
        own_file("/etc/resolv.conf", "# mine\nsearch example.net\nnameserver 127.0.0.1\noptions ndots:2\n")?;
        killed_and_cleaned("direct").await
    });
}

#[test]
fn killed_in_mode_direct_with_a_link() {
    setup().run(async || {
        fs::create_dir_all("/run/other")?;
        fs::write("/run/other/resolv.conf", "nameserver 127.0.0.1\n")?;
        link_resolv_conf("../run/other/resolv.conf")?;
        killed_and_cleaned("direct").await?;
        ensure!(fs::read_to_string("/run/other/resolv.conf")? == "nameserver 127.0.0.1\n", "the link's target changed");
        Ok(())
    });
}

/// At moments spread over a start, a run and a stop.
#[test]
fn killed_at_any_moment() {
    setup().limit(Duration::from_secs(240)).run(async || -> Result {
        let world = World::new().await?;
        let options = Options { dns: "direct", ..Options::default() };
        let before = System::now()?;
        for step in 0..12_u32 {
            let daemon = Daemon::start(&options).await?;
            let client = daemon.client().await?;
            let starting = client.start(world.url(), world.token());
            // No event marks these moments: they are meant to lie anywhere.
            let _ = tokio::time::timeout(Duration::from_millis(u64::from(step * step) * 3), starting).await;
            let left = daemon.kill().await?;
            left.cleanup().await?;
            same(&before, &System::now()?, &format!("killed at moment {step}"))?;
        }
        for step in 0..6_u32 {
            let daemon = Daemon::start(&options).await?;
            let client = daemon.client().await?;
            client.started(world.url(), world.token()).await?;
            client.connected().await?;
            let _ = tokio::time::timeout(Duration::from_millis(u64::from(step * step) * 2), client.stop()).await;
            let left = daemon.kill().await?;
            left.cleanup().await?;
            same(&before, &System::now()?, &format!("killed while stopping, moment {step}"))?;
        }
        Ok(())
    });
}

/// A clean-up beside a running daemon would take its resolver away.
#[test]
fn cleanup_leaves_a_running_daemon_alone() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let daemon = Daemon::start(&Options { dns: "direct", ..Options::default() }).await?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        let running = System::now()?;
        let out = tokio::process::Command::new(codervpn_testbed::binaries::codervpnd()?)
            .args(["cleanup", "--config", "/run/codervpn-test/config.toml"])
            .output()
            .await?;
        ensure!(!out.status.success(), "{out:?}");
        same(&running, &System::now()?, "refused clean-up")?;
        world.deployment.faults().set(Route::Any, Fault::Drop);
        ensure!(client.status().await?.lifecycle() == Lifecycle::Started, "the tunnel runs");
        drop(client);
        daemon.terminate().await.context("end")?;
        Ok(())
    });
}
