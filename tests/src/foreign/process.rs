//! One Go process: its events with deadlines, its commands with their answers,
//! and what it last said when something goes wrong.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;

use super::program;
use crate::netns::Namespace;

/// How long an event is awaited unless told otherwise: several times the
/// longest known wait, the 5 s that a lost WireGuard initiation costs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// One event: a JSON object with `event` and `t`.
pub type Event = Value;

/// A running subcommand.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    seen: Arc<Mutex<Seen>>,
    changed: watch::Receiver<()>,
    tags: u64,
}

/// What the process has said so far.
#[derive(Debug, Default)]
struct Seen {
    /// Events that nobody has taken yet, oldest first.
    events: VecDeque<Event>,
    ended: bool,
    /// The newest lines of stderr, for error messages.
    log: VecDeque<String>,
}

/// Events kept for later waits; more than that is a test that never looks.
const MAX_EVENTS: usize = 10_000;
const MAX_LOG: usize = 60;

impl Process {
    /// Starts `foreign SUBCOMMAND ARGS`, inside `namespace` if one is given.
    pub fn spawn<S: AsRef<OsStr>>(
        namespace: Option<&Namespace>,
        subcommand: &str,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<Self> {
        Self::spawn_with(namespace, subcommand, args, |_| {})
    }

    /// As [`Process::spawn`]; `adjust` may set environment variables.
    pub fn spawn_with<S: AsRef<OsStr>>(
        namespace: Option<&Namespace>,
        subcommand: &str,
        args: impl IntoIterator<Item = S>,
        adjust: impl FnOnce(&mut Command),
    ) -> anyhow::Result<Self> {
        let program = program()?;
        let mut command = match namespace {
            Some(namespace) => namespace.command(program),
            None => Command::new(program),
        };
        command.arg(subcommand).args(args);
        adjust(&mut command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("foreign {subcommand}"))?;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (tell, changed) = watch::channel(());
        let stdout = BufReader::new(child.stdout.take().context("stdout is piped")?);
        let stderr = BufReader::new(child.stderr.take().context("stderr is piped")?);
        tokio::spawn(read_events(stdout, Arc::clone(&seen), tell));
        tokio::spawn(read_log(stderr, Arc::clone(&seen)));
        let stdin = child.stdin.take();
        Ok(Self { name: format!("foreign {subcommand}"), child, stdin, seen, changed, tags: 0 })
    }

    /// Process id; `None` once it has been waited for. (With a namespace it is
    /// the same process: `nsenter` replaces itself.)
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Takes the oldest event of that name, waiting for it if need be.
    pub async fn event(&mut self, name: &str) -> anyhow::Result<Event> {
        self.event_where(name, |_| true).await
    }

    /// Takes the oldest event of that name for which `fits` holds; the others
    /// stay for later waits.
    pub async fn event_where(&mut self, name: &str, fits: impl FnMut(&Event) -> bool) -> anyhow::Result<Event> {
        self.event_within(PATIENCE, name, fits).await
    }

    /// As [`Process::event_where`] with a deadline of its own.
    pub async fn event_within(
        &mut self,
        limit: Duration,
        name: &str,
        mut fits: impl FnMut(&Event) -> bool,
    ) -> anyhow::Result<Event> {
        let mut changed = self.changed.clone();
        let wait = async {
            loop {
                changed.borrow_and_update();
                if let Some(event) = self.take(name, &mut fits) {
                    return Ok(event);
                }
                if self.seen().ended || changed.changed().await.is_err() {
                    // The last line and the end may have come together.
                    return self.take(name, &mut fits).context("it ended before");
                }
            }
        };
        match tokio::time::timeout(limit, wait).await {
            Ok(result) => result,
            Err(_) => Err(anyhow::anyhow!("not within {limit:?}")),
        }
        .with_context(|| format!("{}: waiting for {name:?}; {}", self.name, self.story()))
    }

    /// Takes the oldest event of that name if it has come already.
    pub fn take(&self, name: &str, mut fits: impl FnMut(&Event) -> bool) -> Option<Event> {
        let mut seen = self.seen();
        let at = seen.events.iter().position(|e| e["event"] == name && fits(e))?;
        seen.events.remove(at)
    }

    /// Forgets what has come so far, so that a wait sees only what is new.
    pub fn forget(&self, name: &str) {
        self.seen().events.retain(|e| e["event"] != name);
    }

    /// Sends a command without waiting for an answer.
    pub async fn send(&mut self, cmd: &str, members: Value) -> anyhow::Result<()> {
        let mut line = members;
        ensure!(line.is_null() || line.is_object(), "members are an object");
        line["cmd"] = cmd.into();
        let stdin = self.stdin.as_mut().context("stdin is closed")?;
        stdin.write_all(format!("{line}\n").as_bytes()).await.with_context(|| format!("{}: {cmd}", self.name))?;
        stdin.flush().await?;
        Ok(())
    }

    /// Sends a command and returns its answer; an `error` event is an error.
    pub async fn call(&mut self, cmd: &str, members: Value) -> anyhow::Result<Event> {
        self.tags += 1;
        let tag = format!("#{}", self.tags);
        let mut members = members;
        ensure!(members.is_null() || members.is_object(), "members are an object");
        members["tag"] = tag.as_str().into();
        self.send(cmd, members).await?;
        let mut changed = self.changed.clone();
        let wait = async {
            loop {
                changed.borrow_and_update();
                for name in [cmd, "error"] {
                    if let Some(event) = self.take(name, |e| e["tag"] == tag.as_str()) {
                        return Some(event);
                    }
                }
                if self.seen().ended || changed.changed().await.is_err() {
                    return None;
                }
            }
        };
        let answer = tokio::time::timeout(PATIENCE * 5, wait).await.ok().flatten();
        let answer = answer.with_context(|| format!("{}: no answer to {cmd}; {}", self.name, self.story()))?;
        ensure!(answer["event"] != "error", "{}: {cmd}: {}", self.name, answer["error"]);
        Ok(answer)
    }

    /// Closes stdin, which makes agents and clients say Disconnect, and waits for the end.
    pub async fn quit(mut self) -> anyhow::Result<()> {
        self.stdin = None;
        let status = tokio::time::timeout(PATIENCE, self.child.wait())
            .await
            .with_context(|| format!("{}: does not end; {}", self.name, self.story()))??;
        ensure!(status.success(), "{}: {status}; {}", self.name, self.story());
        Ok(())
    }

    /// Ends it without a word, as a crash does.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("no reader panics with the lock")
    }

    /// The newest events and log lines, for error messages.
    fn story(&self) -> String {
        let seen = self.seen();
        let events: Vec<_> = seen.events.iter().rev().take(8).rev().map(ToString::to_string).collect();
        let log: Vec<_> = seen.log.iter().map(String::as_str).collect();
        format!("events not taken: [{}], log:\n{}", events.join(", "), log.join("\n"))
    }
}

async fn read_events(
    stdout: BufReader<impl tokio::io::AsyncRead + Unpin>,
    seen: Arc<Mutex<Seen>>,
    tell: watch::Sender<()>,
) {
    let mut lines = stdout.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let event = serde_json::from_str(&line).unwrap_or_else(|_| json!({"event": "garbage", "line": line}));
        {
            let mut seen = seen.lock().expect("no reader panics with the lock");
            if seen.events.len() == MAX_EVENTS {
                seen.events.pop_front();
            }
            seen.events.push_back(event);
        }
        tell.send_replace(());
    }
    seen.lock().expect("no reader panics with the lock").ended = true;
    tell.send_replace(());
}

async fn read_log(stderr: BufReader<impl tokio::io::AsyncRead + Unpin>, seen: Arc<Mutex<Seen>>) {
    let mut lines = stderr.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut seen = seen.lock().expect("no reader panics with the lock");
        if seen.log.len() == MAX_LOG {
            seen.log.pop_front();
        }
        seen.log.push_back(line);
    }
}
