//! Decides how tests run the real `codervpn`: with a home of its own, as any user, its streams and exit code kept.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;

use crate::binaries;
use crate::netns::Inside;

/// No command waits longer by itself than a start does.
const LIMIT: Duration = Duration::from_secs(60);

/// One user at the command line.
#[derive(Debug, Clone)]
pub struct Cli {
    socket: PathBuf,
    home: PathBuf,
    uid: Option<u32>,
}

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Cli {
    /// The user of this process.
    pub fn new(socket: &Path) -> anyhow::Result<Self> {
        Self::of(socket, None)
    }

    /// Another user, without any group but its own.
    pub fn as_user(socket: &Path, uid: u32) -> anyhow::Result<Self> {
        Self::of(socket, Some(uid))
    }

    fn of(socket: &Path, uid: Option<u32>) -> anyhow::Result<Self> {
        // Homes are made in `/run`, which is ours alone there.
        Inside::check()?;
        let home = PathBuf::from(format!("/run/home-{}", uid.unwrap_or(0)));
        fs::create_dir_all(&home)?;
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700))?;
        if uid.is_some() {
            chown(&home, uid, uid)?;
        }
        Ok(Self { socket: socket.to_owned(), home, uid })
    }

    /// Runs `codervpn ARGS`; arguments are separated by blanks.
    pub async fn run(&self, args: &str) -> anyhow::Result<Ran> {
        let mut command = self.command()?;
        let out = command.args(args.split_whitespace()).kill_on_drop(true).output();
        let out = timeout(LIMIT, out).await.with_context(|| format!("codervpn {args} does not end"))??;
        Ok(out.into())
    }

    /// As [`Cli::run`], and it has to succeed.
    pub async fn succeeds(&self, args: &str) -> anyhow::Result<Ran> {
        let ran = self.run(args).await?;
        ensure!(ran.code == Some(0), "codervpn {args}: {ran:?}");
        Ok(ran)
    }

    /// Stores URL and token as `codervpn login` does after a check by the daemon.
    pub async fn login(&self, url: &str, token: &str) -> anyhow::Result<Ran> {
        let file = self.home.join("token");
        fs::write(&file, token)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        if self.uid.is_some() {
            chown(&file, self.uid, self.uid)?;
        }
        let ran = self.run(&format!("login {url} --token-file {}", file.display())).await?;
        fs::remove_file(file)?;
        Ok(ran)
    }

    /// `codervpn status --json`.
    pub async fn status(&self) -> anyhow::Result<Value> {
        let ran = self.succeeds("status --json").await?;
        serde_json::from_str(&ran.stdout).with_context(|| ran.stdout.clone())
    }

    /// The command without arguments, for tests that do more with it.
    pub fn command(&self) -> anyhow::Result<Command> {
        let program = binaries::codervpn()?;
        let mut command = match self.uid {
            None => Command::new(program),
            Some(uid) => {
                let mut command = Command::new("setpriv");
                command.arg(format!("--reuid={uid}")).arg(format!("--regid={uid}"));
                command.args(["--clear-groups", "--"]).arg(program);
                command
            }
        };
        command
            .env("HOME", &self.home)
            .env("XDG_CONFIG_HOME", self.home.join("config"))
            .env("CODER_DESKTOP_RPC_SOCKET_PATH", &self.socket)
            .env_remove("SUDO_USER")
            .env_remove("SUDO_UID")
            .env_remove("CODER_SESSION_TOKEN")
            .stdin(Stdio::null());
        Ok(command)
    }
}

impl From<Output> for Ran {
    fn from(out: Output) -> Self {
        Self {
            code: out.status.code(),
            stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        }
    }
}
