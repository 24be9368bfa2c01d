//! Decides what a person finds in the shell inside the demo: both programs in `PATH`, the tunnel up, a text of what can
//! be tried, and `workspace start|stop NAME` for what the dashboard's buttons do.

use std::fs;
use std::io::IsTerminal as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::unix::pipe;

use super::transcript::Transcript;
use super::world::World;
use crate::packages::find_program;

const TRY: [&str; 8] = [
    "getent hosts main.dev.me.coder",
    "curl http://main.dev.me.coder:8080",
    "curl -o /dev/null 'http://main.dev.me.coder:8080/bytes?n=100000000'",
    "codervpn status --watch              (Ctrl-C ends it)",
    "codervpn ping app.web",
    "workspace stop dev                   (and `workspace start dev`: what the dashboard's buttons do)",
    "codervpn stop                        (and `codervpn start`)",
    "ip addr show coder0; ip -6 rule; cat /etc/resolv.conf; less ~/codervpnd.log",
];

/// Sets the file up that the shell's commands need; before anything is shown.
pub(super) fn prepare(home: &Path) -> anyhow::Result<()> {
    for pipe in ["requests", "replies"] {
        mknodat(CWD, home.join(pipe), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    }
    let folder = home.join("bin");
    fs::create_dir_all(&folder)?;
    let program = folder.join("workspace");
    fs::write(&program, SCRIPT)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    fs::write(home.join("bashrc"), "PS1='\\[\\e[1m\\]demo\\$\\[\\e[0m\\] '\n")?;
    Ok(())
}

const SCRIPT: &str = r#"#!/bin/sh
case "$1" in
start | stop) ;;
*) echo "usage: workspace start|stop NAME" >&2; exit 64 ;;
esac
echo "$1 $2" > "$HOME/requests"
read -r answer < "$HOME/replies"
echo "$answer"
case "$answer" in cannot*) exit 1 ;; esac
"#;

/// Returns when the shell has ended, whatever its exit status is.
pub(super) async fn run(transcript: &Transcript, home: &Path, world: &mut World) -> anyhow::Result<()> {
    transcript.note("A shell inside, with the tunnel up. Try:")?;
    for line in TRY {
        transcript.more(&format!("    {line}"))?;
    }
    transcript.more("Ctrl-D or `exit` takes everything down.")?;

    let mut requests =
        BufReader::new(pipe::OpenOptions::new().read_write(true).open_receiver(home.join("requests"))?).lines();
    let mut command = match find_program("bash") {
        Some(bash) => {
            let mut command = transcript.command(&bash.to_string_lossy());
            command.arg("--rcfile").arg(home.join("bashrc"));
            command
        }
        None => transcript.command("sh"),
    };
    if std::io::stdin().is_terminal() {
        command.arg("-i");
    }
    let mut shell = command.stdin(Stdio::inherit()).env("PS1", "demo$ ").spawn().context("no shell can be run")?;
    loop {
        tokio::select! {
            status = shell.wait() => {
                status?;
                return Ok(());
            }
            request = requests.next_line() => {
                let answer = answer(world, &request?.context("we hold the pipe open ourselves")?).await;
                let replies = home.join("replies");
                // Waits for the reader, which may have been interrupted; then nobody waits for this thread.
                tokio::task::spawn_blocking(move || fs::write(replies, answer));
            }
        }
    }
}

async fn answer(world: &mut World, request: &str) -> String {
    let (verb, name) = request.split_once(' ').unwrap_or((request, ""));
    let (done, doing) = match verb {
        "start" => (world.start_workspace(name).await, "started"),
        _ => (world.stop_workspace(name).await, "stopped"),
    };
    match done {
        Ok(()) => format!("{name} is {doing}\n"),
        Err(error) => format!("cannot {verb} it: {error:#}\n"),
    }
}
