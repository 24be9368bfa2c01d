//! Decides how the demo runs `codervpnd`: with the defaults that a user gets, its log in a file that is shown when
//! something goes wrong, and never longer than the demo itself.

use std::fs::{self, File};
use std::os::unix::net::UnixDatagram as Datagram;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::UnixDatagram;
use tokio::process::Child;
use tokio::time::timeout;

use super::transcript::Transcript;
use crate::netns::Inside;

const PATIENCE: Duration = Duration::from_secs(15);
/// Lines of the log that are shown after a failure.
const SHOWN: usize = 30;

#[derive(Debug)]
pub(super) struct Daemon {
    child: Child,
}

/// Where the log is.
fn log(home: &Path) -> PathBuf {
    home.join("codervpnd.log")
}

impl Daemon {
    /// Waits until it says to be ready, as systemd would.
    pub(super) async fn start(transcript: &Transcript, home: &Path) -> anyhow::Result<Self> {
        // Elsewhere it would edit the files of this machine.
        Inside::check()?;
        let socket = home.join("notify");
        let notices = Datagram::bind(&socket)?;
        notices.set_nonblocking(true)?;
        let notices = UnixDatagram::from_std(notices)?;
        // It has to end with us even where there is no process namespace to end it.
        let mut command = transcript.command("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "codervpnd", "serve"]).env("NOTIFY_SOCKET", &socket);
        let log = File::create(log(home))?;
        let mut child =
            command.stdout(Stdio::null()).stderr(log).spawn().context("setpriv (package util-linux) cannot be run")?;
        let ready = async {
            let mut notice = [0; 1024];
            loop {
                let length = notices.recv(&mut notice).await?;
                let text = String::from_utf8_lossy(notice.get(..length).unwrap_or_default()).into_owned();
                if text.lines().any(|line| line == "READY=1") {
                    return anyhow::Ok(());
                }
            }
        };
        tokio::select! {
            ready = timeout(PATIENCE, ready) => ready.context("the daemon does not become ready")??,
            status = child.wait() => bail!("the daemon ended at once ({})", status?),
        }
        Ok(Self { child })
    }

    /// As `kill` does it; it takes back whatever is still up.
    pub(super) async fn terminate(mut self) -> anyhow::Result<()> {
        let id = self.child.id().context("the daemon has ended before")?;
        kill_process(Pid::from_raw(id.try_into()?).context("a process id is not 0")?, Signal::TERM)?;
        let status = timeout(PATIENCE, self.child.wait()).await.context("the daemon does not end")??;
        ensure!(status.success(), "the daemon ended with {status}");
        Ok(())
    }
}

/// The newest lines of its log, if there are any.
pub(super) fn log_tail(home: &Path) -> String {
    let text = fs::read_to_string(log(home)).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines.get(lines.len().saturating_sub(SHOWN)..).unwrap_or_default().join("\n")
}
