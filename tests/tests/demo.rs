//! `cargo demo` as a new user runs it: what it shows, that it says why where it cannot run, and that nothing of it
//! outlives it, however it ends.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use codervpn_testbed::skip::skip;
use codervpn_testbed::{binaries, netns};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

const PATIENCE: Duration = Duration::from_secs(20);

/// The demo, its programs already built; `None` when this machine cannot run it.
fn demo(args: &[&str]) -> anyhow::Result<Option<Command>> {
    if let Err(reason) = netns::tun_available() {
        skip(format!("{reason:#}"));
        return Ok(None);
    }
    binaries::folder()?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command.arg("--no-install").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(Some(command))
}

fn text(out: &Output) -> (String, String) {
    let utf8 = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (utf8(&out.stdout), utf8(&out.stderr))
}

/// Each part after the one before.
fn assert_in_order(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else {
            panic!("{part:?} is not in its place; all of it:\n{text}");
        };
        rest = after;
    }
}

/// Issue part 13, and the README's promise of what `cargo demo` shows.
#[test]
fn names_resolve_and_bytes_flow_and_nothing_is_left() -> anyhow::Result<()> {
    let Some(mut command) = demo(&[])? else { return Ok(()) };
    let begin = Instant::now();
    let out = command.output()?;
    let (stdout, stderr) = text(&out);
    assert!(out.status.success(), "{stdout}\n{stderr}");
    assert!(begin.elapsed() < PATIENCE, "the demo took {:?}", begin.elapsed());
    assert_in_order(
        &stdout,
        &[
            "$ codervpnd serve &\n",
            "$ codervpn login http://127.0.0.1:3000 --token-file token\nlogged in to http://127.0.0.1:3000 as alice",
            "$ codervpn start\nconnected",
            "$ getent hosts main.dev.me.coder\nfd60:627a:a42b:",
            "$ curl -sS http://main.dev.me.coder:8080\nhello from main in dev",
            "$ curl -sS http://dev.coder:8080\nhello from main in dev",
            "$ curl -sS http://db.web.alice.coder:8080\nhello from db in web",
            "10485760 bytes\n",
            "$ codervpn status\nstarted, connected",
            "64 bytes from",
            "$ getent hosts main.old.me.coder\n(exit status 2)\n",
            "$ getent hosts main.lab.bob.coder\n(exit status 2)\n",
            "alice starts old",
            "$ curl -sS http://main.old.me.coder:8080\nhello from main in old",
            "stops web",
            "$ getent hosts app.web.me.coder\n(exit status 2)\n",
            "nameserver fd60:627a:a42b::53\n",
            "$ codervpn stop\nstopped\n",
            "$ ip link show coder0\nDevice \"coder0\" does not exist.\n",
            "$ cat /etc/resolv.conf\nnameserver 127.0.0.1\n",
            "# All of it worked",
        ],
    );
    // A log reads it as it is.
    assert!(!stdout.contains('\x1b'), "{stdout}");
    Ok(())
}

#[test]
fn the_shell_inside_has_programs_and_tunnel() -> anyhow::Result<()> {
    let Some(mut command) = demo(&["--shell"])? else { return Ok(()) };
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    let typed = "curl -sS http://dev.coder:8080\nworkspace stop dev\ngetent hosts dev.coder || echo no dev\n\
                 workspace start dev\nworkspace start dev\ncurl -sS http://dev.coder:8080\ncodervpn status --check\n\
                 codervpn stop\nexit 3\n";
    child.stdin.take().context("stdin is piped")?.write_all(typed.as_bytes())?;
    let out = child.wait_with_output()?;
    let (stdout, stderr) = text(&out);
    assert!(out.status.success(), "the shell's own status is no failure: {stdout}\n{stderr}");
    assert_in_order(
        &stdout,
        &[
            "# A shell inside",
            "\nhello from main in dev",
            "\ndev is stopped\nno dev\ndev is started\ncannot start it",
            "\nhello from main in dev",
            "\nstarted, connected",
            "\nstopped\n",
            "$ codervpn stop\nwas not running\n",
        ],
    );
    Ok(())
}

/// A descendant of the demo, by a descriptor that tells its end.
struct Descendant {
    pid: i32,
    name: String,
    ends: OwnedFd,
}

/// All descendants of a process.
fn descendants(of: u32) -> anyhow::Result<Vec<Descendant>> {
    let mut found = Vec::new();
    let mut waiting = vec![i32::try_from(of)?];
    while let Some(parent) = waiting.pop() {
        for entry in std::fs::read_dir("/proc")?.filter_map(Result::ok) {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            // It may have ended meanwhile.
            let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
            let Some((name, rest)) = stat.rsplit_once(')') else { continue };
            if rest.split_whitespace().nth(1).and_then(|ppid| ppid.parse().ok()) != Some(parent) {
                continue;
            }
            let pidfd = Pid::from_raw(pid).context("a process id is not 0")?;
            if let Ok(ends) = pidfd_open(pidfd, PidfdFlags::empty()) {
                found.push(Descendant { pid, name: name.to_owned(), ends });
                waiting.push(pid);
            }
        }
    }
    Ok(found)
}

/// Reads until a line that contains `part`; keeps the pipe open.
fn await_line(child: &mut Child, part: &str) -> anyhow::Result<BufReader<std::process::ChildStdout>> {
    let mut stdout = BufReader::new(child.stdout.take().context("stdout is piped")?);
    let mut line = String::new();
    while stdout.read_line(&mut line)? > 0 {
        if line.contains(part) {
            return Ok(stdout);
        }
        line.clear();
    }
    let mut stderr = String::new();
    child.stderr.take().context("stderr is piped")?.read_to_string(&mut stderr)?;
    anyhow::bail!("{part:?} is never shown; stderr: {stderr}")
}

/// Ctrl-C, a kill, and even a kill that cannot be handled.
#[test]
fn nothing_outlives_it_however_it_ends() -> anyhow::Result<()> {
    let moments: [(&[&str], &str, Signal); 4] = [
        (&[], "$ codervpn start", Signal::INT),
        (&[], "$ codervpn status", Signal::TERM),
        (&["--shell"], "takes everything down", Signal::INT),
        (&["--shell"], "takes everything down", Signal::KILL),
    ];
    for (args, line, signal) in moments {
        let Some(mut command) = demo(args)? else { return Ok(()) };
        let folder = tempfile::tempdir()?;
        let mut child = command.env("TMPDIR", folder.path()).stdin(Stdio::piped()).spawn()?;
        let _stdout = await_line(&mut child, line)?;
        let inside = descendants(child.id())?;
        let names: Vec<_> = inside.iter().map(|process| process.name.as_str()).collect();
        // Namespaces, the demo inside them and at least the daemon.
        ensure!(names.iter().any(|name| name.ends_with("(codervpnd")), "no daemon among {names:?}");
        kill_process(Pid::from_raw(child.id().try_into()?).context("a process id is not 0")?, signal)?;
        child.wait()?;
        let deadline = Instant::now() + PATIENCE;
        for process in &inside {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs().try_into()?, tv_nsec: left.subsec_nanos().into() };
            let mut events = [PollFd::new(&process.ends, PollFlags::IN)];
            let ended = poll(&mut events, Some(&left))?;
            ensure!(ended == 1, "{} {} outlives the demo after {signal:?}", process.pid, process.name);
        }
        let left: Vec<_> = std::fs::read_dir(folder.path())?.collect::<Result<_, _>>()?;
        ensure!(left.is_empty(), "left after {signal:?}: {left:?}");
    }
    Ok(())
}

/// In a mount namespace where `/dev/net` is empty.
#[test]
fn it_says_why_where_it_cannot_run() -> anyhow::Result<()> {
    let flags = ["--map-root-user", "--mount", "--"];
    let hide = "mount -t tmpfs none /dev/net";
    let possible = Command::new("unshare").args(flags).args(["sh", "-c", hide]).output()?;
    if !possible.status.success() {
        skip(format!("/dev/net cannot be hidden: {}", String::from_utf8_lossy(&possible.stderr).trim()));
        return Ok(());
    }
    let script = format!("{hide} && exec \"$0\" --no-install");
    let out = Command::new("unshare").args(flags).args(["sh", "-c", &script, env!("CARGO_BIN_EXE_demo")]).output()?;
    let (stdout, stderr) = text(&out);
    assert_eq!(out.status.code(), Some(1), "{stdout}\n{stderr}");
    assert!(stderr.contains("cargo demo cannot run here: a TUN device is needed"), "{stderr}");
    assert!(stderr.contains("/dev/net/tun cannot be opened") && stdout.is_empty(), "{stdout}\n{stderr}");
    Ok(())
}
