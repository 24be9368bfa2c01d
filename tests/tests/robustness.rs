//! The daemon when something breaks under it: its device, its routes, the machine's resolver, a refused dial.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::FailureCode;
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_testbed::coderd::{Fault, Route};
use codervpn_testbed::daemon::{Daemon, Options, System, World, start_request};
use codervpn_testbed::netns::{Setup, ip, own_file};

type Result<T = ()> = anyhow::Result<T>;

fn setup() -> Setup {
    Setup::new().programs().tun()
}

/// dns-and-os 6.5: a device that another program removes is made anew once, with the same address; one that is removed
/// again at once ends the tunnel, and the status says so.
#[test]
fn a_vanished_device_is_made_anew_once() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let daemon = Daemon::start(&Options::default()).await?;
        let before = System::now()?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        let first = client.connected().await?.ext.context("ext")?;
        world.echo().await?;
        ip("link del coder0")?;
        daemon.log().line("the device is made anew").await?;
        let second = client.connected().await?;
        ensure!(second.lifecycle() == Lifecycle::Started, "{second:?}");
        ensure!(second.ext.context("ext")?.address == first.address, "the address is another");
        world.echo().await?;
        ip("link del coder0")?;
        let end = client.await_lifecycle(Lifecycle::Stopped).await?;
        let failure = end.ext.context("ext")?.last_failure.context("a failure")?;
        ensure!(failure.code() == FailureCode::Tun, "{failure:?}");
        ensure!(before.rules == System::now()?.rules, "a rule is left behind");
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        world.echo().await?;
        Ok(())
    });
}

/// N-02, N-05: what others take away is back soon.
#[test]
fn routes_that_others_remove_come_back() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let daemon = Daemon::start(&Options::default()).await?;
        let before = System::now()?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        client.connected().await?;
        let way = format!("-6 route get {}", world.address());
        // Fails where there is no way at all.
        let whole = || {
            let (way, link, rules) = (ip(&way).unwrap_or_default(), ip("link show coder0")?, ip("-6 rule show")?);
            Ok::<_, anyhow::Error>(
                way.contains("dev coder0") && link.contains("mtu 1280") && rules.matches("12861").count() == 1,
            )
        };
        ensure!(whole()?, "not whole from the start");
        for damage in ["-6 rule del priority 5100", "-6 route flush table 12861", "link set coder0 mtu 1200"] {
            ip(damage)?;
            ensure!(!whole()?, "{damage} harms nothing");
            let broken = Instant::now();
            while !whole()? {
                let waited = broken.elapsed();
                ensure!(waited < Duration::from_secs(5), "{damage} is not repaired: {:#?}", System::now()?);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            world.echo().await?;
        }
        client.stopped().await?;
        ensure!(before == System::now()?, "something is left behind");
        Ok(())
    });
}

/// A start whose first dial is refused fails with the server's reason, and nothing is left (6.2, R-25).
#[test]
fn a_refused_dial_says_why() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let refusal = Fault::Status { status: 403, message: "no tunnels for you".to_owned() };
        world.deployment.faults().set(Route::Tailnet, refusal);
        let daemon = Daemon::start(&Options::default()).await?;
        let before = System::now()?;
        let client = daemon.client().await?;
        for _ in 0..5 {
            let reply = client.start(world.url(), world.token()).await?;
            let failure = reply.ext.context("ext")?.failure.context("a failure")?;
            ensure!(failure.code() == FailureCode::Forbidden, "{failure:?}");
            ensure!(failure.message.contains("no tunnels for you"), "{failure:?}");
        }
        ensure!(before == System::now()?, "something is left behind");
        Ok(())
    });
}

/// R-29, S-07: a resolver that never answers delays neither a stop nor the end of the daemon.
#[test]
fn a_silent_resolver_does_not_hold_the_daemon() {
    setup().run(async || -> Result {
        // A link without neighbours takes every packet and answers none.
        ip("link add quiet0 type veth peer name quiet1")?;
        ip("addr add 192.0.2.1/24 dev quiet0")?;
        ip("neigh add 192.0.2.53 lladdr 02:00:00:00:00:53 dev quiet0")?;
        ip("link set quiet0 up")?;
        ip("link set quiet1 up")?;
        own_file("/etc/resolv.conf", "nameserver 192.0.2.53\n")?;
        let daemon = Daemon::start(&Options::default()).await?;
        let client = daemon.client().await?;
        let starter = client.clone();
        let request = start_request("http://coder.example.com/", "token");
        let start = tokio::spawn(async move { starter.start_with(request).await });
        client.await_lifecycle(Lifecycle::Starting).await?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let began = Instant::now();
        ensure!(daemon.terminate().await?.success(), "the daemon fails at its end");
        ensure!(began.elapsed() < Duration::from_secs(3), "the end took {:?}", began.elapsed());
        drop(start.await?);
        Ok(())
    });
}
