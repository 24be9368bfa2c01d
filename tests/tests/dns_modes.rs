//! How the machine comes to know the names: `direct` and `resolved` with the machine's own look-ups, and `auto`'s choice.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::{DnsMode, DnsState};
use codervpn_proto::vpn;
use codervpn_testbed::daemon::{Client, Daemon, Options, System, World, link_resolv_conf};
use codervpn_testbed::netns::{Setup, ip, own_file};
use codervpn_testbed::{report, rootfs, skip};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::UdpSocket;
use tokio::process::{Child, Command};

type Result<T = ()> = anyhow::Result<T>;

/// What the name server of the test knows.
const WWW: (&str, Ipv4Addr) = ("www.example.net", Ipv4Addr::new(192, 0, 2, 7));

/// The user that systemd-resolved becomes.
const RESOLVE_UID: u32 = 991;

fn setup() -> Setup {
    Setup::new().programs().tun()
}

/// The machine's own name server before we come: one name, everything else does not exist.
struct BaseServer {
    asked: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl BaseServer {
    async fn start(address: SocketAddr) -> Result<Self> {
        let socket = UdpSocket::bind(address).await.with_context(|| format!("name server on {address}"))?;
        let asked = Arc::<AtomicUsize>::default();
        let count = asked.clone();
        let task = tokio::spawn(async move {
            let mut buffer = [0; 1500];
            while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                count.fetch_add(1, Ordering::Relaxed);
                if let Some(answer) = answer(&buffer[..length]) {
                    let _ = socket.send_to(&answer, from).await;
                }
            }
        });
        Ok(Self { asked, task })
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for BaseServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let mut name = String::new();
    let mut at = 12;
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        name += std::str::from_utf8(query.get(at..at + length)?).ok()?;
        name.push('.');
        at += length;
    }
    let is_a = query.get(at..at + 2)? == [0, 1];
    let known = name.trim_end_matches('.').eq_ignore_ascii_case(WWW.0);
    let mut answer = query.get(..2)?.to_vec();
    answer.extend([0x81, if known { 0x80 } else { 0x83 }, 0, 1, 0, u8::from(known && is_a), 0, 0, 0, 0]);
    answer.extend(query.get(12..at + 4)?);
    if known && is_a {
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4]);
        answer.extend(WWW.1.octets());
    }
    Some(answer)
}

/// The addresses that any program of this machine gets.
async fn getent(database: &str, name: &str) -> Result<Vec<String>> {
    let out = Command::new("getent").args([database, name]).stdin(Stdio::null()).output().await?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let mut found: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    found.dedup();
    Ok(found)
}

/// Waits until the daemon itself has seen a name resolve through the machine's resolver.
async fn settled(client: &Client, mode: DnsMode) -> Result<vpn::Status> {
    let dns = |status: &vpn::Status| status.ext.as_ref().and_then(|ext| ext.dns.clone()).unwrap_or_default();
    let status = client.await_status("names in use", |status| dns(status).state() == DnsState::Ok).await?;
    ensure!(dns(&status).mode() == mode, "{:?}", dns(&status));
    Ok(status)
}

async fn direct(world: &World) -> Result {
    // Programs that ask for usable addresses alone see IPv4 ones only where the machine has one besides loopback.
    ip("addr add 10.77.0.1/32 dev lo")?;
    let base = BaseServer::start("127.0.0.1:53".parse()?).await?;
    ensure!(getent("ahostsv4", WWW.0).await? == [WWW.1.to_string()], "the test's own name server");
    let before = System::now()?;
    let daemon = Daemon::start(&Options { dns: "direct", ..Options::default() }).await?;
    let client = daemon.client().await?;
    client.started(world.url(), world.token()).await?;
    settled(&client, DnsMode::Direct).await.with_context(|| daemon.log().tail())?;
    let text = fs::read_to_string("/etc/resolv.conf")?;
    ensure!(
        text.contains("nameserver fd60:627a:a42b::53") && !text.lines().any(|line| line.starts_with("nameserver 127")),
        "{text}"
    );
    for name in ["dev.coder", "main.dev.me.coder", "main.dev.anna.coder"] {
        let found = getent("ahostsv6", name).await?;
        ensure!(found == [world.address().to_string()], "{name}: {found:?}");
    }
    ensure!(getent("ahosts", "nobody.coder").await?.is_empty(), "an unknown name of ours");
    let asked = base.asked();
    let found = getent("ahostsv4", WWW.0).await?;
    ensure!(found == [WWW.1.to_string()] && base.asked() > asked, "forwarded: {found:?}");
    ensure!(getent("ahosts", "nothing.example.net").await?.is_empty(), "an unknown name of others");
    let asked = base.asked();
    getent("ahosts", "main.dev.me.coder").await?;
    ensure!(base.asked() == asked, "a name of ours was asked elsewhere");
    client.stopped().await?;
    let after = System::now()?;
    ensure!(before == after, "before {before:#?} after {after:#?}");
    ensure!(getent("ahostsv4", WWW.0).await? == [WWW.1.to_string()], "afterwards all is as before");
    Ok(())
}

#[test]
fn direct_mode_serves_forwards_and_restores_byte_for_byte() {
    setup().run(async || -> Result {
        own_file(
            "/etc/resolv.conf",
            "# by hand\n\nsearch example.net\nnameserver\t127.0.0.1\noptions trust-ad\n; end",
        )?;
        direct(&World::new().await?).await
    });
}

#[test]
fn direct_mode_restores_a_link() {
    setup().run(async || -> Result {
        fs::create_dir_all("/run/other")?;
        fs::write("/run/other/resolv.conf", "nameserver 127.0.0.1\n")?;
        link_resolv_conf("/run/other/resolv.conf")?;
        direct(&World::new().await?).await?;
        ensure!(fs::read_link("/etc/resolv.conf")? == Path::new("/run/other/resolv.conf"), "the link");
        ensure!(fs::read("/run/other/resolv.conf")? == b"nameserver 127.0.0.1\n", "its target");
        Ok(())
    });
}

/// A machine without any resolver service: `auto` edits the file, and says so.
#[test]
fn auto_is_direct_where_nobody_owns_the_file() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let _base = BaseServer::start("127.0.0.1:53".parse()?).await?;
        let daemon = Daemon::start(&Options { dns: "auto", ..Options::default() }).await?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        settled(&client, DnsMode::Direct).await.with_context(|| daemon.log().tail())?;
        client.stopped().await
    });
}

/// A resolver that owns the file and cannot be talked to: none, and a text, never direct (2.1).
#[test]
fn auto_is_none_where_a_resolver_owns_the_file_that_we_cannot_ask() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        own_file("/etc/resolv.conf", "nameserver 127.0.0.53\noptions edns0\n")?;
        let before = System::now()?;
        let daemon = Daemon::start(&Options { dns: "auto", ..Options::default() }).await?;
        let client = daemon.client().await?;
        client.started(world.url(), world.token()).await?;
        let status = client.connected().await?;
        let dns = status.ext.and_then(|ext| ext.dns).context("dns")?;
        ensure!(dns.mode() == DnsMode::None, "{dns:?}");
        ensure!(dns.text.contains("systemd-resolved"), "the text names the tool: {dns:?}");
        ensure!(System::now()?.resolver == before.resolver, "the file was touched");
        world.echo().await
    });
}

/// A bus and a systemd-resolved of our own, unpacked and never installed.
struct Resolved {
    bus: Child,
    service: Child,
    parts: rootfs::Resolved,
}

impl Resolved {
    async fn start() -> Result<Self> {
        let parts = rootfs::systemd_resolved()?;
        fs::create_dir_all("/run/dbus")?;
        fs::create_dir_all("/run/systemd/resolve")?;
        // It gives up being root.
        for (file, entry) in [
            ("/etc/passwd", format!("systemd-resolve:x:{RESOLVE_UID}:{RESOLVE_UID}::/:/usr/sbin/nologin\n")),
            ("/etc/group", format!("systemd-resolve:x:{RESOLVE_UID}:\n")),
        ] {
            let text = fs::read_to_string(file)?;
            let others = text.lines().filter(|line| !line.starts_with("systemd-resolve:"));
            let others: String = others.map(|line| format!("{line}\n")).collect();
            own_file(file, &(others + &entry))?;
        }
        chown("/run/systemd/resolve", Some(RESOLVE_UID), Some(RESOLVE_UID))?;
        own_file(
            "/run/dbus/bus.conf",
            r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
    <allow user="*"/>
  </policy>
</busconfig>"#,
        )?;
        let mut bus = Command::new("dbus-daemon")
            .args(["--config-file=/run/dbus/bus.conf", "--nofork", "--nopidfile", "--nosyslog", "--print-address=1"])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("dbus-daemon")?;
        let mut line = String::new();
        BufReader::new(bus.stdout.take().context("stdout is piped")?).read_line(&mut line).await?;
        ensure!(line.starts_with("unix:path="), "the bus says {line:?}");
        let service = Command::new(&parts.daemon)
            .env("LD_LIBRARY_PATH", &parts.libraries)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("systemd-resolved")?;
        let mut resolved = Self { bus, service, parts };
        resolved.until_it_answers().await?;
        Ok(resolved)
    }

    async fn until_it_answers(&mut self) -> Result {
        let begin = std::time::Instant::now();
        while !self.resolvectl("status").await?.contains("Global") {
            ensure!(self.service.try_wait()?.is_none() && self.bus.try_wait()?.is_none(), "it has ended");
            ensure!(begin.elapsed() < codervpn_testbed::daemon::PATIENCE, "systemd-resolved does not come up");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        Ok(())
    }

    async fn resolvectl(&self, args: &str) -> Result<String> {
        let mut command = Command::new(&self.parts.resolvectl);
        command.env("LD_LIBRARY_PATH", &self.parts.libraries).args(args.split_whitespace()).stdin(Stdio::null());
        let out = command.output().await?;
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }
}

#[test]
fn resolved_mode_splits_by_domain_and_leaves_no_setting() {
    setup().resolved().uids().run(async || -> Result {
        // resolved asks servers of links only where a link with an address is up.
        ip("link add up0 type veth peer name up1")?;
        ip("link set up1 up")?;
        ip("addr add 10.77.0.1/24 dev up0")?;
        ip("link set up0 up")?;
        let base = BaseServer::start("10.77.0.1:53".parse()?).await?;
        fs::create_dir_all("/run/systemd/resolved.conf.d")?;
        fs::write("/run/systemd/resolved.conf.d/test.conf", "[Resolve]\nDNS=10.77.0.1\nLLMNR=no\nMulticastDNS=no\n")?;
        let resolved = match Resolved::start().await {
            Ok(resolved) => resolved,
            Err(error) => {
                skip::skip(format!("systemd-resolved: {error:#}"));
                return Ok(());
            }
        };
        link_resolv_conf("/run/systemd/resolve/stub-resolv.conf")?;
        let world = World::new().await?;
        for mode in ["resolved", "auto"] {
            let before = System::now()?;
            let daemon = Daemon::start(&Options { dns: mode, ..Options::default() }).await?;
            let client = daemon.client().await?;
            client.started(world.url(), world.token()).await?;
            settled(&client, DnsMode::Resolved).await.with_context(|| daemon.log().tail())?;
            let found = getent("ahostsv6", "main.dev.me.coder").await?;
            ensure!(found == [world.address().to_string()], "{found:?}");
            let asked = base.asked();
            ensure!(getent("ahostsv4", WWW.0).await? == [WWW.1.to_string()], "other names go where they went");
            report::say(&format!("{mode}: base server asked {} times", base.asked() - asked));
            client.stopped().await?;
            let after = System::now()?;
            ensure!(before == after, "before {before:#?} after {after:#?}");
            ensure!(!resolved.resolvectl("domain").await?.contains("coder"), "a setting is left");
        }
        Ok(())
    });
}
