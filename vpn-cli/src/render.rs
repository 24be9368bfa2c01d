//! What people read on standard output.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use comfy_table::{ContentArrangement, Table, presets};

use crate::commands::login::LoggedIn;
use crate::commands::ping::{Pinged, Summary};
use crate::commands::start::Started;
use crate::commands::stop::Stopped;
use crate::deployment;
use crate::output::{Colour, Style, clean};
use crate::report::{Agent, Path, Report, Time, Workspace};

pub(crate) fn version() -> String {
    format!("codervpn {}", env!("CARGO_PKG_VERSION"))
}

pub(crate) fn logged_in(login: &LoggedIn) -> String {
    let url = clean(deployment::shown(&login.url));
    match &login.checked {
        None => format!("stored the login for {url} without checking it"),
        Some(checked) => {
            let mut text = format!("logged in to {url} as {}", clean(&checked.user));
            if !checked.server_version.is_empty() {
                let _ = write!(text, " (Coder {})", clean(&checked.server_version));
            }
            text
        }
    }
}

pub(crate) fn started(started: &Started, style: Style) -> String {
    let report = &started.report;
    if !started.connected {
        return style.paint(Colour::Green, "started");
    }
    let mut text = style.paint(Colour::Green, "connected");
    if let Some(deployment) = &report.deployment {
        let _ = write!(text, " to {}", clean(deployment::shown(deployment)));
    }
    if let Some(user) = &report.user {
        let _ = write!(text, " as {}", clean(user));
    }
    if started.already {
        text.push_str(", as before");
    }
    if let Some(suffix) = &report.suffix {
        let _ = write!(text, "\nsuffix      {}", clean(suffix));
    }
    let workspaces = report.workspaces.as_deref().unwrap_or_default();
    let running = workspaces.iter().filter(|workspace| workspace.is_running()).count();
    let _ = write!(text, "\nworkspaces  {}", workspaces.len());
    if !workspaces.is_empty() {
        let _ = write!(text, " ({running} running)");
    }
    text
}

pub(crate) fn stopped(stopped: &Stopped) -> &'static str {
    match stopped {
        Stopped::Now => "stopped",
        Stopped::Before => "was not running",
    }
}

pub(crate) fn status(report: &Report, now: SystemTime, style: Style) -> String {
    let mut text = String::new();
    headline(&mut text, report, now, style);
    // Without right to see the tunnel there is no more; an empty list would be a lie.
    let Some(workspaces) = &report.workspaces else { return text };
    if report.is_started() {
        facts(&mut text, report, style);
    }
    if workspaces.is_empty() {
        if report.is_connected() {
            text.push_str("\nno workspaces");
        }
        return text;
    }
    text.push('\n');
    text.push_str(&table(workspaces, now));
    text
}

/// The state in one line.
fn headline(text: &mut String, report: &Report, now: SystemTime, style: Style) {
    let lifecycle = report.lifecycle.unwrap_or("unknown");
    let anothers = report.workspaces.is_none();
    match report.control {
        _ if anothers => text.push_str(&style.paint(Colour::Yellow, &format!("{lifecycle} by another user"))),
        Some("off") | None => {
            let colour = if report.is_started() { Colour::Green } else { Colour::Yellow };
            text.push_str(&style.paint(colour, lifecycle));
        }
        Some(control) => {
            let colour = match control {
                "connected" => Colour::Green,
                "refused" => Colour::Red,
                _ => Colour::Yellow,
            };
            let _ = write!(text, "{lifecycle}, {}", style.paint(colour, control));
        }
    }
    // In this order the words fit any other lifecycle too.
    if anothers && lifecycle != "started" {
        *text = style.paint(Colour::Yellow, &format!("{lifecycle}; started by another user"));
    }
    if let Some(since) = report.since {
        let _ = write!(text, " (for {})", span(since.age(now)));
    }
    if let Some(error) = &report.error {
        let label =
            if report.is_started() || report.lifecycle == Some("starting") { "problem" } else { "last failure" };
        let _ = write!(text, "\n{}  {}", style.paint(Colour::Red, label), clean(error));
    }
}

fn facts(text: &mut String, report: &Report, style: Style) {
    if let Some(deployment) = &report.deployment {
        let _ = write!(text, "\ndeployment  {}", clean(deployment::shown(deployment)));
        if let Some(user) = &report.user {
            let _ = write!(text, " as {}", clean(user));
        }
        if let Some(version) = &report.server_version {
            let _ = write!(text, ", Coder {}", clean(version));
        }
    }
    if let Some(suffix) = &report.suffix {
        let _ = write!(text, "\nnames       *.{}", clean(suffix));
        if let Some(interface) = &report.interface {
            let _ = write!(text, " on {}", clean(interface));
        }
    }
    if let Some(mode) = report.dns.mode {
        let _ = write!(text, "\nresolver    {mode}");
        if let Some(state) = report.dns.state.filter(|_| !report.has_no_resolver()) {
            let colour = match state {
                "ok" => Colour::Green,
                "failed" => Colour::Red,
                _ => Colour::Yellow,
            };
            let _ = write!(text, ", {}", style.paint(colour, state));
        }
        if let Some(trouble) = report.dns_trouble() {
            let _ = write!(text, ": {}", clean(trouble));
        }
    }
}

fn table(workspaces: &[Workspace], now: SystemTime) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let reasons = workspaces.iter().flat_map(|workspace| &workspace.agents).any(|agent| why(&agent.path).is_some());
    let header = ["WORKSPACE", "STATUS", "AGENT", "NAME", "PATH", "LATENCY", "LAST HANDSHAKE", "RECEIVED", "SENT"];
    table.set_header(header.into_iter().chain(reasons.then_some("WHY NOT DIRECT")));
    for workspace in workspaces {
        let name = clean(&workspace.name);
        let status = workspace.status.unwrap_or("-").to_owned();
        if workspace.agents.is_empty() {
            let nothing = header.iter().skip(2).map(|_| "-".to_owned());
            table.add_row([name.clone(), status.clone()].into_iter().chain(nothing));
        }
        for agent in &workspace.agents {
            let cells = [
                name.clone(),
                status.clone(),
                clean(&agent.name),
                agent.fqdn.first().map_or_else(|| "-".into(), |name| clean(name)),
                path(&agent.path),
                agent.path.latency_ms.map_or_else(|| "-".into(), latency),
                handshake(agent.path.last_handshake, now),
                agent.path.rx_bytes.map_or_else(|| "-".into(), amount),
                agent.path.tx_bytes.map_or_else(|| "-".into(), amount),
            ];
            table.add_row(cells.into_iter().chain(why(&agent.path)));
        }
    }
    trimmed(&table.to_string())
}

/// The preset pads every line at both ends.
fn trimmed(table: &str) -> String {
    let lines: Vec<&str> = table.lines().map(|line| line.strip_prefix(' ').unwrap_or(line).trim_end()).collect();
    lines.join("\n")
}

fn path(path: &Path) -> String {
    let (kind, detail) = match path.kind {
        Some("direct") => ("direct", path.endpoint.as_deref()),
        Some(kind) => (kind, path.relay.as_deref()),
        None => return clean(path.reason.as_deref().unwrap_or("-")),
    };
    match detail {
        Some(detail) => format!("{kind} {}", clean(detail)),
        None => kind.to_owned(),
    }
}

/// Why a relay carries what could go directly, in words that say what could be done about it.
fn why(path: &Path) -> Option<String> {
    if path.kind != Some("relay") {
        return None;
    }
    let words = match path.reason.as_deref()? {
        "probing" => "still looking for a direct path",
        "disabled" => "switched off on this machine (paths.direct)",
        "disabled_by_deployment" => "the deployment does not allow it",
        "udp_blocked" => "UDP does not get through this network",
        "hard_nat" => "the NATs at both ends are too strict",
        "path_too_small" => "the direct path does not carry full-size packets",
        "no_endpoints" => "the agent tells no address",
        "no_answer" => "no address of the agent answers",
        "unreachable" => "the agent does not answer at all",
        other => return Some(clean(other)),
    };
    Some(words.to_owned())
}

/// Three digits, as for latencies.
fn amount(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut amount = bytes as f64 / 1024.0;
    let mut unit = UNITS[0];
    for larger in UNITS.into_iter().skip(1) {
        if amount < 999.5 {
            break;
        }
        amount /= 1024.0;
        unit = larger;
    }
    match amount {
        small if small < 9.995 => format!("{small:.2} {unit}"),
        small if small < 99.95 => format!("{small:.1} {unit}"),
        large => format!("{large:.0} {unit}"),
    }
}

fn handshake(time: Option<Time>, now: SystemTime) -> String {
    time.map_or_else(|| "never".to_owned(), |time| ago(time.age(now)))
}

/// Three digits are enough to compare paths.
fn latency(milliseconds: f64) -> String {
    match milliseconds {
        ms if ms < 10.0 => format!("{ms:.2} ms"),
        ms if ms < 100.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.0} ms"),
    }
}

fn ago(age: Duration) -> String {
    if age.as_secs() == 0 { "now".to_owned() } else { format!("{} ago", span(age)) }
}

fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

pub(crate) fn workspaces(workspaces: &[Workspace]) -> String {
    if workspaces.is_empty() {
        return "no workspaces".to_owned();
    }
    let mut lines = Vec::new();
    for workspace in workspaces {
        lines.push(format!("{}  {}", clean(&workspace.name), workspace.status.unwrap_or("unknown")));
        let last = workspace.agents.len().saturating_sub(1);
        for (index, agent) in workspace.agents.iter().enumerate() {
            let (branch, trunk) = if index == last { ("└─", "  ") } else { ("├─", "│ ") };
            lines.push(format!("{branch} {}  {}", clean(&agent.name), summary(agent)));
            for name in agent.fqdn.iter().chain(&agent.addresses) {
                lines.push(format!("{trunk}   {}", clean(name)));
            }
        }
    }
    lines.join("\n")
}

fn summary(agent: &Agent) -> String {
    match agent.path.latency_ms {
        Some(ms) => format!("{}, {}", path(&agent.path), latency(ms)),
        None => path(&agent.path),
    }
}

pub(crate) fn pinged(pinged: &Pinged) -> String {
    match &pinged.result {
        Ok(answer) => {
            let way = Path {
                kind: answer.path,
                endpoint: answer.endpoint.clone(),
                relay: answer.relay.clone(),
                ..Path::default()
            };
            let time = answer.latency_ms.map_or_else(|| "unknown".to_owned(), latency);
            let what = answer.bytes.map_or_else(|| "reply".to_owned(), |bytes| format!("{bytes} bytes"));
            let alone = if answer.echo { "" } else { " (only the tunnel answers, not the agent's network)" };
            format!("{what} from {}: seq={} {} time={time}{alone}", clean(&answer.name), pinged.seq, path(&way))
        }
        Err(problem) => format!("no reply: seq={} {}", pinged.seq, clean(&problem.what)),
    }
}

pub(crate) fn ping_summary(summary: &Summary) -> String {
    let mut text = format!(
        "--- {} ---\n{} sent, {} answered, {}% loss",
        clean(&summary.name),
        summary.sent,
        summary.answered,
        summary.loss_percent()
    );
    if let Some(times) = summary.times() {
        let [least, average, most] = times.map(latency);
        let _ = write!(text, "\nmin {least}, avg {average}, max {most}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_relative() {
        for (seconds, text) in [
            (0, "now"),
            (3, "3 s ago"),
            (59, "59 s ago"),
            (60, "1 min ago"),
            (3599, "59 min ago"),
            (7200, "2 h ago"),
            (90_000, "1 d ago"),
        ] {
            assert_eq!(ago(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn amounts_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (10 * 1024 - 1, "10.0 KiB"),
            (150 * 1024, "150 KiB"),
            (1000 * 1024, "0.98 MiB"),
            (3 << 30, "3.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(amount(bytes), text);
        }
    }

    #[test]
    fn every_reason_of_the_service_has_words() {
        let path = |kind, reason: &str| Path { kind: Some(kind), reason: Some(reason.into()), ..Path::default() };
        for reason in [
            "probing",
            "disabled",
            "disabled_by_deployment",
            "udp_blocked",
            "hard_nat",
            "path_too_small",
            "no_endpoints",
            "no_answer",
            "unreachable",
        ] {
            assert!(why(&path("relay", reason)).unwrap().contains(' '), "{reason}");
        }
        assert_eq!(why(&path("relay", "brand_new")).unwrap(), "brand_new");
        assert_eq!(why(&path("direct", "probing")), None);
    }

    #[test]
    fn latencies_have_three_digits() {
        assert_eq!(latency(1.234), "1.23 ms");
        assert_eq!(latency(12.34), "12.3 ms");
        assert_eq!(latency(1234.4), "1234 ms");
    }
}
