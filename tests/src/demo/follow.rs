//! Waits for changes that the deployment makes, by `codervpn status --json --watch` as any script would.

use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout};
use tokio::time::timeout;

use super::transcript::Transcript;

const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(super) struct Follow {
    lines: Lines<BufReader<ChildStdout>>,
    /// Ends with this value.
    _child: Child,
}

impl Follow {
    pub(super) fn start(transcript: &Transcript) -> anyhow::Result<Self> {
        let mut command = transcript.command("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "codervpn", "status", "--json", "--watch"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let stdout = child.stdout.take().context("stdout is piped")?;
        Ok(Self { lines: BufReader::new(stdout).lines(), _child: child })
    }

    /// Until that workspace has that status and that many agents.
    pub(super) async fn workspace(&mut self, name: &str, status: &str, agents: usize) -> anyhow::Result<()> {
        let wait = async {
            while let Some(line) = self.lines.next_line().await? {
                let report: Value = serde_json::from_str(&line).context("status --json")?;
                let found = report["workspaces"].as_array().into_iter().flatten().find(|entry| entry["name"] == name);
                let fits = |entry: &Value| {
                    entry["status"] == status && entry["agents"].as_array().map_or(0, Vec::len) == agents
                };
                if found.is_some_and(fits) {
                    return Ok(());
                }
            }
            anyhow::bail!("`codervpn status --watch` ended")
        };
        timeout(PATIENCE, wait).await.with_context(|| format!("{name:?} is not shown as {status}"))?
    }
}
