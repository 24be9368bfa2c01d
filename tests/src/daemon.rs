//! Decides how tests run the real `codervpnd` and speak to it: always inside namespaces of the test's own, with a
//! configuration of the test's own, and with its whole log kept, so that a test can also say what must not be in it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::binaries;
use crate::netns::{Inside, ip};

mod client;
mod resolve;
mod world;

pub use client::{Broadcast, Client, control, start_request};
pub use resolve::{Answer, Lookup, ask, ask_for, await_answer};
pub use world::{World, echo, echo_within};

/// How long anything is awaited that ought to be there within a second; the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Configuration of a daemon under test.
#[derive(Debug, Clone)]
pub struct Options {
    /// `dns.mode`.
    pub dns: &'static str,
    /// PEM file for `network.extra_ca`.
    pub extra_ca: Option<PathBuf>,
    /// `auth.allow_users`, by number.
    pub allow: Vec<u32>,
    /// `daemon.log`.
    pub log: &'static str,
    /// More lines of the file, sections included.
    pub more: String,
    /// More environment.
    pub env: BTreeMap<String, String>,
    /// The program; default: `codervpnd` in the profile of the test.
    pub program: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            dns: "none",
            extra_ca: None,
            allow: Vec::new(),
            log: "debug",
            more: String::new(),
            env: BTreeMap::new(),
            program: None,
        }
    }
}

impl Options {
    fn to_toml(&self, folder: &Path) -> String {
        let mut text = format!(
            "[daemon]\nruntime_dir = {:?}\nstate_dir = {:?}\nlog = {:?}\n[socket]\npath = {:?}\n[dns]\nmode = {:?}\n",
            folder.join("runtime"),
            state_dir(),
            self.log,
            folder.join("vpn.sock"),
            self.dns,
        );
        let _ = writeln!(text, "[auth]\nallow_users = {:?}", self.allow);
        if let Some(file) = &self.extra_ca {
            let _ = writeln!(text, "[network]\nextra_ca = {file:?}");
        }
        text + &self.more
    }
}

fn state_dir() -> PathBuf {
    "/var/lib/codervpn".into()
}

/// A running `codervpnd serve`; ends with this value.
pub struct Daemon {
    child: Child,
    config: PathBuf,
    socket: PathBuf,
    log: Log,
}

impl Daemon {
    /// Starts one and waits until its socket accepts.
    pub async fn start(options: &Options) -> anyhow::Result<Self> {
        // Elsewhere it would edit the files of this machine.
        Inside::check()?;
        let folder = PathBuf::from("/run/codervpn-test");
        fs::create_dir_all(&folder)?;
        let config = folder.join("config.toml");
        fs::write(&config, options.to_toml(&folder))?;
        let program = options.program.clone().map_or_else(binaries::codervpnd, Ok)?;
        let mut child = Command::new(program)
            .args(["serve", "--config"])
            .arg(&config)
            .env_remove("CODERVPN_LOG")
            .env_remove("CODER_DESKTOP_RPC_SOCKET_PATH")
            .envs(&options.env)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("codervpnd serve")?;
        let log = Log::follow(child.stderr.take().context("stderr is piped")?);
        let daemon = Self { child, config, socket: folder.join("vpn.sock"), log };
        // The whole beginning: at trace the libraries say such words, too.
        daemon.log.line("INFO ready version=").await?;
        Ok(daemon)
    }

    pub fn id(&self) -> anyhow::Result<u32> {
        self.child.id().context("the daemon has ended")
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    /// A client of this process' uid.
    pub async fn client(&self) -> anyhow::Result<Client> {
        Client::connect(&self.socket).await
    }

    /// Ends it without a word, as a crash or the kernel does.
    pub async fn kill(mut self) -> anyhow::Result<Left> {
        self.child.kill().await?;
        Ok(Left { config: self.config, log: self.log })
    }

    /// Asks it to end and waits for that.
    pub async fn terminate(mut self) -> anyhow::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        let status = timeout(PATIENCE, self.child.wait()).await.context("SIGTERM does not end the daemon")??;
        ensure!(!self.socket.exists(), "the socket file is left behind");
        Ok(status)
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = Pid::from_raw(self.id()?.try_into()?).context("a process id is not 0")?;
        Ok(kill_process(id, signal)?)
    }

    /// Writes another configuration and has it read.
    pub fn reconfigure(&self, options: &Options) -> anyhow::Result<()> {
        let folder = self.config.parent().context("the file is in a folder")?;
        fs::write(&self.config, options.to_toml(folder))?;
        self.signal(Signal::HUP)
    }

    /// `Err` when it has ended.
    pub fn check_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the daemon has ended ({status}); its log:\n{}", self.log.text()),
        }
    }

    /// Open descriptors.
    pub fn descriptors(&self) -> anyhow::Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/fd", self.id()?))?.count())
    }

    pub fn threads(&self) -> anyhow::Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/task", self.id()?))?.count())
    }

    /// Resident memory in bytes.
    pub fn resident(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id()?))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kib * 1024)
    }

    /// CPU time used so far, by all threads, user and system.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let mut total = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.id()?))? {
            // Nanoseconds on the CPU; clock ticks of `stat` would be too coarse for an idle process.
            let text = fs::read_to_string(task?.path().join("schedstat"))?;
            total += text.split(' ').next().context("schedstat")?.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(total))
    }
}

/// What a killed daemon left.
#[derive(Debug)]
pub struct Left {
    config: PathBuf,
    pub log: Log,
}

impl Left {
    /// `codervpnd cleanup` with the dead daemon's configuration.
    pub async fn cleanup(&self) -> anyhow::Result<Output> {
        let mut command = Command::new(binaries::codervpnd()?);
        command.arg("cleanup").arg("--config").arg(&self.config).stdin(Stdio::null());
        let out = command.output().await?;
        ensure!(out.status.success(), "cleanup: {}", String::from_utf8_lossy(&out.stderr));
        Ok(out)
    }
}

/// Everything that a daemon has logged.
#[derive(Debug, Clone)]
pub struct Log {
    text: Arc<Mutex<String>>,
    changed: watch::Receiver<()>,
}

impl Log {
    fn follow(stream: impl AsyncRead + Send + Unpin + 'static) -> Self {
        let text = Arc::<Mutex<String>>::default();
        let (tell, changed) = watch::channel(());
        let log = Self { text: text.clone(), changed };
        tokio::spawn(async move {
            let mut lines = BufReader::new(stream).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let mut text = text.lock().unwrap_or_else(PoisonError::into_inner);
                text.push_str(&line);
                text.push('\n');
                drop(text);
                tell.send_replace(());
            }
        });
        log
    }

    fn lock(&self) -> MutexGuard<'_, String> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn text(&self) -> String {
        self.lock().clone()
    }

    pub fn contains(&self, part: &str) -> bool {
        self.lock().contains(part)
    }

    /// The newest lines, for error messages.
    pub fn tail(&self) -> String {
        let text = self.lock();
        let lines: Vec<_> = text.lines().rev().take(40).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Waits for a line that contains `part` and returns it.
    pub async fn line(&self, part: &str) -> anyhow::Result<String> {
        let mut changed = self.changed.clone();
        let wait = async {
            loop {
                changed.borrow_and_update();
                let found = self.lock().lines().find(|line| line.contains(part)).map(str::to_owned);
                if found.is_some() || changed.changed().await.is_err() {
                    return found.or_else(|| self.lock().lines().find(|line| line.contains(part)).map(str::to_owned));
                }
            }
        };
        let found = timeout(PATIENCE, wait).await.ok().flatten();
        found.with_context(|| format!("{part:?} is not in the daemon's log:\n{}", self.tail()))
    }
}

/// Everything on this machine that a daemon may change, to be compared before and after.
#[derive(Debug, PartialEq, Eq)]
pub struct System {
    pub links: String,
    pub addresses: String,
    pub routes: String,
    pub rules: String,
    pub resolver: ResolverFile,
    /// Names in `/etc`.
    pub etc: Vec<PathBuf>,
    /// Whether IPv6 is switched off, by interface.
    pub ipv6: BTreeMap<PathBuf, String>,
}

/// `/etc/resolv.conf`.
#[derive(Debug, PartialEq, Eq)]
pub struct ResolverFile {
    pub link_target: Option<PathBuf>,
    pub mode_and_owner: Option<(u32, u32, u32)>,
    pub content: Option<Vec<u8>>,
}

/// The resolver's file, byte for byte.
#[derive(Debug, PartialEq, Eq)]
pub struct Resolver {
    /// Where it leads, if it is a link.
    pub target: Option<PathBuf>,
    /// Mode, uid and gid of the file or link itself.
    pub owner: Option<(u32, u32, u32)>,
    pub content: Option<Vec<u8>>,
}

impl System {
    pub fn now() -> anyhow::Result<Self> {
        let file = Path::new("/etc/resolv.conf");
        let found = fs::symlink_metadata(file).ok();
        let link = found.as_ref().is_some_and(fs::Metadata::is_symlink);
        let mut etc: Vec<_> = fs::read_dir("/etc")?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
        etc.sort();
        let mut ipv6 = BTreeMap::new();
        for entry in fs::read_dir("/proc/sys/net/ipv6/conf")? {
            let path = entry?.path();
            ipv6.insert(path.clone(), fs::read_to_string(path.join("disable_ipv6"))?);
        }
        Ok(Self {
            links: ip("-o link show")?,
            addresses: ip("-o -6 addr show")?,
            routes: ip("-6 route show table all")?,
            rules: format!("{}{}", ip("-6 rule show")?, ip("rule show")?),
            resolver: ResolverFile {
                link_target: if link { Some(fs::read_link(file)?) } else { None },
                mode_and_owner: found.map(|found| (found.mode(), found.uid(), found.gid())),
                content: fs::read(file).ok(),
            },
            etc,
            ipv6,
        })
    }
}

/// Makes `/etc/resolv.conf` a link to `target`.
pub fn link_resolv_conf(target: impl AsRef<Path>) -> anyhow::Result<()> {
    Inside::check()?;
    let file = Path::new("/etc/resolv.conf");
    if fs::symlink_metadata(file).is_ok() {
        fs::remove_file(file)?;
    }
    Ok(symlink(target, file)?)
}
