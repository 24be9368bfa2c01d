//! Decides how the demo looks: comment lines, each command as it would be typed, and what it printed. Every command is
//! also a check: what it should give is asked of [`Shown`], and a wrong answer ends the demo.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::process::Command;
use tokio::time::timeout;

/// No command of the demo takes longer, on a loaded machine either.
const PATIENCE: Duration = Duration::from_secs(15);

const DIM: &str = "2";
const BOLD: &str = "1";

/// Writes the transcript and runs what stands in it.
#[derive(Debug)]
pub(super) struct Transcript {
    colours: bool,
    environment: Vec<(&'static str, OsString)>,
    home: PathBuf,
}

impl Transcript {
    /// Commands find `programs` first, have `home` as home and working folder, and nothing else of the caller's
    /// environment: proxies, sockets and tokens set there belong to the real machine.
    pub(super) fn new(programs: &Path, home: &Path) -> anyhow::Result<Self> {
        let inherited = std::env::var_os("PATH").unwrap_or_default();
        let folders = [programs.to_owned(), home.join("bin")]
            .into_iter()
            .chain(std::env::split_paths(&inherited))
            // Where a user's PATH lacks the folders for administration.
            .chain(["/usr/sbin".into(), "/sbin".into()]);
        let path = std::env::join_paths(folders).context("a folder in PATH")?;
        let mut environment =
            vec![("PATH", path), ("HOME", home.into()), ("LC_ALL", "C.UTF-8".into()), ("SHELL", "/bin/sh".into())];
        if let Some(terminal) = std::env::var_os("TERM") {
            environment.push(("TERM", terminal));
        }
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if plain {
            environment.push(("NO_COLOR", "1".into()));
        }
        Ok(Self { colours: io::stdout().is_terminal() && !plain, environment, home: home.to_owned() })
    }

    /// A comment line, after a blank one.
    pub(super) fn note(&self, text: &str) -> anyhow::Result<()> {
        self.write("")?;
        self.more(text)
    }

    /// A comment line that belongs to the one before.
    pub(super) fn more(&self, text: &str) -> anyhow::Result<()> {
        self.write(&self.paint(DIM, &format!("# {text}")))
    }

    /// Shows a command that somebody else runs.
    pub(super) fn typed(&self, line: &str) -> anyhow::Result<()> {
        self.write(&self.paint(BOLD, &format!("$ {line}")))
    }

    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env_clear().envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.current_dir(&self.home).stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Shows one simple command, runs it and shows what it printed.
    pub(super) async fn run(&self, line: &str) -> anyhow::Result<Shown> {
        self.typed(line)?;
        let shown = self.ask(line).await?;
        for line in shown.output.lines() {
            self.write(line)?;
        }
        match shown.code {
            Some(0) => {}
            Some(code) => self.write(&self.paint(DIM, &format!("(exit status {code})")))?,
            None => self.write(&self.paint(DIM, "(ended by a signal)"))?,
        }
        Ok(shown)
    }

    /// Runs a command out of sight.
    pub(super) async fn ask(&self, line: &str) -> anyhow::Result<Shown> {
        let mut command = self.command("sh");
        // One pipe, so that output and error text keep their order.
        let (mut output, both) = io::pipe()?;
        let mut child = command
            .args(["-c", &format!("exec {line}")])
            .stdout(both.try_clone()?)
            .stderr(both)
            .spawn()
            .with_context(|| format!("{line:?} cannot be run"))?;
        // It holds the other ends of the pipe.
        drop(command);
        let text = tokio::task::spawn_blocking(move || {
            let mut bytes = Vec::new();
            output.read_to_end(&mut bytes).map(|_| String::from_utf8_lossy(&bytes).into_owned())
        });
        let Ok(status) = timeout(PATIENCE, child.wait()).await else {
            // The text is still being read; it has to end first.
            child.kill().await?;
            let text = text.await??;
            bail!("`{line}` did not end within {PATIENCE:?}; it printed: {}", text.trim_end());
        };
        let status = status?;
        Ok(Shown { line: line.to_owned(), output: text.await??, code: status.code() })
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn write(&self, line: &str) -> anyhow::Result<()> {
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{line}").and_then(|()| stdout.flush()).context("the transcript cannot be written")
    }
}

/// A command that has ended, with its output.
#[derive(Debug)]
pub(super) struct Shown {
    line: String,
    pub(super) output: String,
    code: Option<i32>,
}

impl Shown {
    pub(super) fn succeeds(self) -> anyhow::Result<Self> {
        self.ends_with(0)
    }

    /// With that exit status.
    pub(super) fn ends_with(self, code: i32) -> anyhow::Result<Self> {
        ensure!(self.code == Some(code), "`{}` should have ended with exit status {code}", self.line);
        Ok(self)
    }

    pub(super) fn says(self, part: &str) -> anyhow::Result<Self> {
        ensure!(self.output.contains(part), "`{}` should have printed {part:?}", self.line);
        Ok(self)
    }

    pub(super) fn keeps_quiet_about(self, part: &str) -> anyhow::Result<Self> {
        ensure!(!self.output.contains(part), "`{}` should not have printed {part:?}", self.line);
        Ok(self)
    }
}
