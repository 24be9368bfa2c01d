//! The demo: a deployment in miniature and the real programs, in namespaces of their own, with every command and its
//! output shown. It is told as a story, top to bottom, and each step checks what it shows.

mod daemon;
mod follow;
mod shell;
mod transcript;
mod world;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::ensure;
use tokio::signal::unix::{SignalKind, signal};

use crate::binaries;
use crate::daemon::System;
use crate::netns::Inside;
use crate::report::announce;

use daemon::Daemon;
use follow::Follow;
use transcript::Transcript;
use world::World;

/// As a shell reports a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// Home of the demo's user. `/run` is an empty file system of our own, which vanishes with us.
const HOME: &str = "/run/demo";

/// Runs the whole demo; to be called inside the namespaces. With `shell` a person plays before it is taken down.
pub async fn run(shell: bool) -> ExitCode {
    match interruptible(shell).await {
        Ok(code) => code,
        Err(error) => {
            announce(&format!("\ndemo failed: {error:#}"));
            let log = daemon::log_tail(Path::new(HOME));
            if !log.is_empty() {
                announce(&format!("the daemon's log ends with:\n{log}"));
            }
            ExitCode::FAILURE
        }
    }
}

/// Ctrl-C needs no clean-up: everything that we have started or changed ends with the namespaces.
async fn interruptible(shell: bool) -> anyhow::Result<ExitCode> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        biased;
        _ = interrupt.recv() => Ok(ExitCode::from(INTERRUPTED)),
        _ = terminate.recv() => Ok(ExitCode::from(INTERRUPTED)),
        done = Demo::play(shell) => done.map(|()| ExitCode::SUCCESS),
    }
}

struct Demo {
    transcript: Transcript,
    world: World,
    home: PathBuf,
}

impl Demo {
    async fn play(shell: bool) -> anyhow::Result<()> {
        let begin = Instant::now();
        Inside::check()?;
        let home = PathBuf::from(HOME);
        fs::create_dir_all(&home)?;
        shell::prepare(&home)?;
        let transcript = Transcript::new(binaries::folder()?, &home)?;
        transcript.more("A Coder deployment with a relay and workspaces, in namespaces of its own.")?;
        transcript.more("Nothing of this machine is touched.")?;
        transcript.more("  alice has   dev (agent main), web (agents app and db), old (stopped)")?;
        transcript.more("  bob has     lab (agent main)")?;
        let world = World::start().await?;
        fs::write(home.join("token"), world.alice.token())?;
        let mut demo = Self { transcript, world, home };

        let before = System::now()?;
        let daemon = demo.start().await?;
        demo.names().await?;
        demo.status().await?;
        demo.strangers().await?;
        demo.changes().await?;
        if shell {
            shell::run(&demo.transcript, &demo.home, &mut demo.world).await?;
            // A person may have stopped or changed anything: nothing is expected of what is left to be shown.
            demo.transcript.note("Everything goes down.")?;
            return demo.transcript.run("codervpn stop").await.map(drop);
        }
        demo.stop(&before).await?;
        daemon.terminate().await?;
        ensure!(System::now()? == before, "the daemon has left something behind");
        demo.world.check_manners()?;
        demo.transcript.note(&format!("All of it worked, in {:.1} s.", begin.elapsed().as_secs_f32()))
    }

    /// Daemon, login, start.
    async fn start(&self) -> anyhow::Result<Daemon> {
        let show = &self.transcript;
        show.note("alice starts the daemon (as root), logs in with a session token, and starts the tunnel.")?;
        show.typed("codervpnd serve &")?;
        let daemon = Daemon::start(show, &self.home).await?;
        let url = self.world.url();
        show.run(&format!("codervpn login {url} --token-file token")).await?.succeeds()?.says("alice")?;
        show.run("codervpn start").await?.succeeds()?.says("connected")?.says("coder")?;
        Ok(daemon)
    }

    /// Names resolve in ordinary programs, and bytes flow.
    async fn names(&self) -> anyhow::Result<()> {
        let show = &self.transcript;
        show.note("Any program resolves the names of agents and reaches them through WireGuard.")?;
        show.run("getent hosts main.dev.me.coder").await?.succeeds()?.says("fd60:627a:a42b:")?;
        let page = show.run("curl -sS http://main.dev.me.coder:8080").await?;
        page.succeeds()?.says("hello from main in dev")?;
        show.note("Names can be shorter where a workspace has one agent, and name the owner.")?;
        show.run("curl -sS http://dev.coder:8080").await?.succeeds()?.says("hello from main in dev")?;
        show.run("curl -sS http://db.web.alice.coder:8080").await?.succeeds()?.says("hello from db in web")?;
        show.note("Not only small answers.")?;
        let line =
            "curl -sS -o /dev/null -w '%{size_download} bytes\\n' 'http://app.web.me.coder:8080/bytes?n=10485760'";
        show.run(line).await?.succeeds()?.says("10485760 bytes")?;
        Ok(())
    }

    async fn status(&self) -> anyhow::Result<()> {
        let show = &self.transcript;
        show.note("How things stand.")?;
        let status = show.run("codervpn status").await?.succeeds()?;
        let status = status.says("connected")?.says("dev")?.says("web")?.says("old")?.says("relay")?;
        status.keeps_quiet_about("lab")?.keeps_quiet_about(self.world.alice.token())?;
        show.run("codervpn ping -c 1 main.dev").await?.succeeds()?.says("bytes from")?;
        Ok(())
    }

    /// What must not resolve.
    async fn strangers(&self) -> anyhow::Result<()> {
        let show = &self.transcript;
        show.note("A stopped workspace has no names, nor has one of another user.")?;
        for name in ["main.old.me.coder", "main.lab.me.coder", "main.lab.bob.coder", "lab.coder"] {
            show.run(&format!("getent hosts {name}")).await?.ends_with(2)?;
        }
        Ok(())
    }

    /// A workspace starts, another one stops, and the names follow.
    async fn changes(&mut self) -> anyhow::Result<()> {
        let show = &self.transcript;
        let mut follow = Follow::start(show)?;
        show.note("In the dashboard alice starts old …")?;
        self.world.start_workspace("old").await?;
        follow.workspace("old", "running", 1).await?;
        show.run("getent hosts main.old.me.coder").await?.succeeds()?.says("fd60:627a:a42b:")?;
        let page = show.run("curl -sS http://main.old.me.coder:8080").await?;
        page.succeeds()?.says("hello from main in old")?;
        show.note("… and stops web.")?;
        self.world.stop_workspace("web").await?;
        follow.workspace("web", "stopped", 0).await?;
        show.run("getent hosts app.web.me.coder").await?.ends_with(2)?;
        show.run("codervpn workspaces").await?.succeeds()?.says("web  stopped")?.says("old  running")?;
        Ok(())
    }

    /// Nothing is left.
    async fn stop(&self, before: &System) -> anyhow::Result<()> {
        let show = &self.transcript;
        show.note("What the tunnel has changed …")?;
        show.run("ip -6 addr show coder0").await?.succeeds()?.says("fd60:627a:a42b:")?;
        show.run("ip -6 rule").await?.succeeds()?.says("from all lookup main")?;
        show.run("cat /etc/resolv.conf").await?.succeeds()?.says("nameserver fd60:627a:a42b::53")?;
        ensure!(System::now()? != *before, "the tunnel has changed nothing");
        show.note("… it takes back when it stops.")?;
        show.run("codervpn stop").await?.succeeds()?;
        show.run("ip link show coder0").await?.ends_with(1)?.says("does not exist")?;
        show.run("ip -6 rule").await?.succeeds()?;
        show.run("cat /etc/resolv.conf").await?.succeeds()?;
        let after = System::now()?;
        ensure!(after == *before, "left behind:\n{after:#?}\nbefore:\n{before:#?}");
        show.more("Links, addresses, routes, rules and resolver are as they were.")?;
        show.run("getent hosts main.dev.me.coder").await?.ends_with(2)?;
        Ok(())
    }
}

/// The programs of the demo alone: neither Go nor a message bus.
pub const PACKAGES: [&str; 4] = ["iproute2", "util-linux", "curl", "libc-bin"];
