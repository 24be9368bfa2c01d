//! The virtual machines of a benchmark and the cables between them, whose offloads can be switched off: most real links
//! have less of them, and a tunnel that leans on them alone shows only then.
//!
//! The server is in the body's own namespace. Client and agent each have a cable to it, which carries relayed packets,
//! and one to each other, which carries direct ones. Nobody forwards.

use std::process::Stdio;

use anyhow::{Context as _, ensure};

use crate::netns::{Namespace, ip};

/// Where servers listen, reached from both sides.
pub(super) const SERVER: &str = "10.99.0.1";

pub(super) struct Links {
    pub(super) client: Namespace,
    pub(super) agent: Namespace,
}

/// What `ethtool -K` switches.
const OFFLOADS: [&str; 5] = ["tso", "gso", "gro", "tx-udp-segmentation", "tx-gso-list"];
/// What `ethtool -k` calls them.
const NAMES: [&str; 5] = [
    "tcp-segmentation-offload",
    "generic-segmentation-offload",
    "generic-receive-offload",
    "tx-udp-segmentation",
    "tx-gso-list",
];

impl Links {
    pub(super) fn new() -> anyhow::Result<Self> {
        let (client, agent) = (Namespace::new("client")?, Namespace::new("agent")?);
        ip(&format!("addr add {SERVER}/32 dev lo"))?;
        client.join("10.99.1.1/24", "10.99.1.2/24")?;
        agent.join("10.99.2.1/24", "10.99.2.2/24")?;
        client.default_route([10, 99, 1, 1].into())?;
        agent.default_route([10, 99, 2, 1].into())?;
        client.join_to(&agent, "10.99.3.1/24", "10.99.3.2/24")?;
        Ok(Self { client, agent })
    }

    /// Switches segmentation of the direct cable, at both ends. GRO is off in both cases, as such cables come.
    pub(super) async fn set_offloads(&self, on: bool) -> anyhow::Result<()> {
        let state = |offload| if on && offload != "gro" { "on" } else { "off" };
        for (place, device) in self.direct() {
            let mut command = place.command("ethtool");
            command.args(["-K", device]);
            for offload in OFFLOADS {
                command.args([offload, state(offload)]);
            }
            let out = command.stdin(Stdio::null()).output().await.context("ethtool cannot be run")?;
            ensure!(out.status.success(), "ethtool: {}", String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(())
    }

    /// How both ends of the direct cable are set, for the reader of the figures.
    pub(super) async fn offloads(&self) -> anyhow::Result<String> {
        let mut ends = Vec::new();
        for (place, device) in self.direct() {
            let out = place.command("ethtool").args(["-k", device]).output().await.context("ethtool cannot be run")?;
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            let state = |name: &&str| {
                let line = text.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(": "));
                format!("{name} {}", line.and_then(|line| line.split(' ').next()).unwrap_or("unknown"))
            };
            ends.push(NAMES.iter().map(state).collect::<Vec<_>>().join(", "));
        }
        ends.dedup();
        Ok(ends.join(" / "))
    }

    fn direct(&self) -> [(&Namespace, &'static str); 2] {
        [(&self.client, "to-agent"), (&self.agent, "to-client")]
    }
}
