//! Decides what may be asked on the command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Where frontends of Coder Desktop look for the service on Linux.
pub(crate) const DEFAULT_SOCKET: &str = "/run/coder-desktop/vpn.sock";

const EXIT_CODES: &str = "\
Exit codes: 0 success, 1 the service reported failure, 2 service unreachable, 3 handshake or version, \
4 `status --check`: not started, 5 permission refused, 64 usage, 130 interrupted.";

/// Reach your Coder workspaces by name, from any program on this machine.
#[derive(Debug, Parser)]
#[command(name = "codervpn", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// Socket of the service
    #[arg(long, global = true, value_name = "PATH", env = "CODER_DESKTOP_RPC_SOCKET_PATH", default_value = DEFAULT_SOCKET,
        value_parser = OsStringValueParser::new().map(socket_path))]
    pub(crate) socket: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Log in to a deployment: asks for a session token, checks it and stores it
    Login(Login),
    /// Forget the stored session token and stop the tunnel
    Logout,
    /// Start the tunnel; returns when workspaces are reachable by name
    #[command(visible_alias = "up")]
    Start(Start),
    /// Stop the tunnel and take back all changes to this machine
    #[command(visible_alias = "down")]
    Stop,
    /// Show the tunnel, workspaces and agents
    Status(Status),
    /// List workspaces with their agents and names
    Workspaces(Workspaces),
    /// Measure the way to an agent and say which it is
    Ping(Ping),
    /// Print the version of this program
    Version(Version),
}

#[derive(Debug, Args)]
pub(crate) struct Login {
    /// Address of the deployment, for example https://coder.example.com; without a scheme https is meant
    #[arg(value_name = "URL")]
    pub(crate) url: String,
    /// Read the session token from a file, or from standard input with "-"
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Store the token without asking the service to check it
    #[arg(long)]
    pub(crate) no_check: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Start {
    /// How long to wait until connected, such as 20s, 2m or 500ms
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Print JSON; its form is stable
    #[arg(long)]
    pub(crate) json: bool,
    /// Go on and show every change until interrupted
    #[arg(long, conflicts_with = "check")]
    pub(crate) watch: bool,
    /// Exit with 4 when the tunnel is not started
    #[arg(long)]
    pub(crate) check: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Workspaces {
    /// Only the workspace of this name
    #[arg(value_name = "NAME", default_value = "", hide_default_value = true)]
    pub(crate) name: String,
    /// Print JSON, in the form of "workspaces" of `status --json`
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Ping {
    /// Any name of the agent: dev, main.dev, main.dev.me.coder
    #[arg(value_name = "AGENT")]
    pub(crate) agent: String,
    /// How many pings to send, one a second; without it until Ctrl-C
    #[arg(short = 'c', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: Option<u32>,
    /// Print one JSON object for each ping, and one that sums up
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Version {
    /// Form of the output
    #[arg(long, value_enum, default_value_t = Form::Text)]
    pub(crate) output: Form,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Form {
    Text,
    Json,
}

/// A variable that is set to nothing counts as not set.
fn socket_path(path: OsString) -> PathBuf {
    if path.is_empty() { DEFAULT_SOCKET.into() } else { path.into() }
}

/// A number with a unit; without one, seconds.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a time such as 20s, 2m or 500ms");
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let duration = match unit {
        "ms" => Duration::from_millis(number),
        "" | "s" => Duration::from_secs(number),
        "m" => Duration::from_secs(number.checked_mul(60).ok_or_else(bad)?),
        "h" => Duration::from_secs(number.checked_mul(3600).ok_or_else(bad)?),
        _ => return Err(bad()),
    };
    // Deadlines are computed from it, so it must stay far from the end of time.
    if duration.is_zero() || duration > Duration::from_secs(7 * 24 * 3600) {
        return Err(format!("{text:?} is not between 1ms and a week"));
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn times_have_units() {
        for (text, expected) in [
            ("20s", Duration::from_secs(20)),
            ("500ms", Duration::from_millis(500)),
            ("2m", Duration::from_secs(120)),
            ("1h", Duration::from_secs(3600)),
            ("7", Duration::from_secs(7)),
        ] {
            assert_eq!(parse_duration(text), Ok(expected));
        }
        for text in ["", "s", "0s", "-1s", "1d", "1.5s", "999999999999h", "18446744073709551615", "20 s", "２s"] {
            assert!(parse_duration(text).is_err(), "{text:?}");
        }
    }
}
