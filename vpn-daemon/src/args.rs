//! The command line of `codervpnd`. Every key of the configuration is also a flag, named section-key.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use toml::{Table, Value};

use crate::config::Flag;

#[derive(Debug, Parser)]
#[command(
    name = "codervpnd",
    version,
    about = "Tunnel daemon: makes Coder workspaces reachable by name from every program"
)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the daemon; a client such as `codervpn start` then starts the VPN
    Serve(ServeArgs),
    /// Undo what a dead daemon left behind; needs no daemon, bus or network
    Cleanup(CleanupArgs),
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration file [default: /etc/codervpn/config.toml where it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Args)]
pub struct CleanupArgs {
    /// Configuration file [default: /etc/codervpn/config.toml where it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Clean up although a daemon is running
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub settings: Settings,
}

/// The keys of the configuration, as flags.
#[derive(Debug, Default, Args)]
pub struct Settings {
    /// Folder of locks
    #[arg(long, visible_alias = "runtime-dir", value_name = "DIR", help_heading = "Settings")]
    daemon_runtime_dir: Option<String>,
    /// Folder of what must survive a crash
    #[arg(long, visible_alias = "state-dir", value_name = "DIR", help_heading = "Settings")]
    daemon_state_dir: Option<String>,
    /// Log filter: error, warn, info, debug, trace or a tracing directive
    #[arg(long, visible_alias = "log", value_name = "FILTER", env = "CODERVPN_LOG", help_heading = "Settings")]
    daemon_log: Option<String>,
    /// Socket of the daemon
    #[arg(
        long,
        visible_alias = "socket",
        value_name = "PATH",
        env = "CODER_DESKTOP_RPC_SOCKET_PATH",
        help_heading = "Settings"
    )]
    socket_path: Option<String>,
    /// Group that may use the socket
    #[arg(long, value_name = "GROUP", help_heading = "Settings")]
    socket_group: Option<String>,
    /// Mode of the socket, octal
    #[arg(long, value_name = "MODE", help_heading = "Settings")]
    socket_mode: Option<String>,
    /// User admitted without the group, by name or uid; may be repeated
    #[arg(long = "auth-allow-users", visible_alias = "allow-user", value_name = "NAME", help_heading = "Settings")]
    auth_allow_users: Vec<String>,
    /// Let every local user see whether the VPN runs
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Settings")]
    auth_public_status: Option<bool>,
    /// PEM file of authorities trusted beside the system's
    #[arg(long, visible_alias = "extra-ca", value_name = "FILE", help_heading = "Settings")]
    network_extra_ca: Option<String>,
    /// Proxy on the way to the deployment
    #[arg(long, value_name = "URL", help_heading = "Settings")]
    network_proxy: Option<String>,
    /// Header for every request to the deployment, NAME=VALUE; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = header, help_heading = "Settings")]
    network_headers: Vec<(String, String)>,
    /// Name of the TUN device
    #[arg(long, value_name = "NAME", help_heading = "Settings")]
    tun_name: Option<String>,
    /// How the system learns the names: auto, resolved, direct or none
    #[arg(long, value_name = "MODE", help_heading = "Settings")]
    dns_mode: Option<String>,
    /// Make the suffix a search domain too
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Settings")]
    dns_search: Option<bool>,
    /// Suffix allowed although it is a public top-level domain; may be repeated
    #[arg(long, value_name = "SUFFIX", help_heading = "Settings")]
    dns_allow_suffix: Vec<String>,
    /// Honour relays that waive certificate checks
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Settings")]
    relay_allow_insecure: Option<bool>,
    /// Direct paths over UDP
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Settings")]
    paths_direct: Option<bool>,
    /// Port mapping on the gateway
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Settings")]
    paths_portmap: Option<bool>,
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write NAME=VALUE".into()),
    }
}

impl Settings {
    /// The flags that were given, as entries of the file.
    pub fn flags(self) -> Vec<Flag> {
        let mut flags = Vec::new();
        let mut put = |section, key, value: Option<Value>| {
            if let Some(value) = value {
                flags.push(Flag { section, key, value });
            }
        };
        put("daemon", "runtime_dir", self.daemon_runtime_dir.map(Value::from));
        put("daemon", "state_dir", self.daemon_state_dir.map(Value::from));
        put("daemon", "log", self.daemon_log.map(Value::from));
        put("socket", "path", self.socket_path.map(Value::from));
        put("socket", "group", self.socket_group.map(Value::from));
        put("socket", "mode", self.socket_mode.map(Value::from));
        put("auth", "allow_users", list(self.auth_allow_users.into_iter().map(user)));
        put("auth", "public_status", self.auth_public_status.map(Value::from));
        put("network", "extra_ca", self.network_extra_ca.map(Value::from));
        put("network", "proxy", self.network_proxy.map(Value::from));
        let headers: Table = self.network_headers.into_iter().map(|(name, value)| (name, Value::from(value))).collect();
        put("network", "headers", (!headers.is_empty()).then_some(Value::Table(headers)));
        put("tun", "name", self.tun_name.map(Value::from));
        put("dns", "mode", self.dns_mode.map(Value::from));
        put("dns", "search", self.dns_search.map(Value::from));
        put("dns", "allow_suffix", list(self.dns_allow_suffix.into_iter().map(Value::from)));
        put("relay", "allow_insecure", self.relay_allow_insecure.map(Value::from));
        put("paths", "direct", self.paths_direct.map(Value::from));
        put("paths", "portmap", self.paths_portmap.map(Value::from));
        flags
    }
}

fn user(text: String) -> Value {
    text.parse::<u32>().map_or(Value::from(text), |uid| Value::from(i64::from(uid)))
}

fn list(values: impl Iterator<Item = Value>) -> Option<Value> {
    let values: Vec<Value> = values.collect();
    (!values.is_empty()).then_some(Value::Array(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, UserRef};
    use clap::CommandFactory;
    use codervpn_host::dns::{ConfiguredMode, Mode};

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_reaches_its_key() {
        let line = "codervpnd serve --runtime-dir /r --state-dir /s --log debug --socket /x --socket-group g --socket-mode 0600 \
            --allow-user alice --allow-user 7 --auth-public-status --extra-ca /ca --network-headers A=b=c --tun-name t0 \
            --dns-mode none --dns-search=true --dns-allow-suffix dev --relay-allow-insecure --paths-direct=false --paths-portmap=false";
        let Verb::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().verb else { panic!("serve") };
        let missing = tempfile::NamedTempFile::new().unwrap();
        let config = Config::load(Some(missing.path()), &args.settings.flags()).unwrap();
        assert_eq!(config.daemon.runtime_dir, PathBuf::from("/r"));
        assert_eq!(config.daemon.state_dir, PathBuf::from("/s"));
        assert_eq!(config.daemon.log, "debug");
        assert_eq!(
            (config.socket.path, config.socket.group.as_str(), config.socket.mode.as_str()),
            ("/x".into(), "g", "0600")
        );
        assert_eq!(config.auth.allow_users, [UserRef::Name("alice".into()), UserRef::Uid(7)]);
        assert!(config.auth.public_status && config.dns.search && config.relay.allow_insecure);
        assert_eq!(config.network.extra_ca, Some("/ca".into()));
        assert_eq!(config.network.headers["A"], "b=c");
        assert_eq!((config.tun.name.as_str(), config.dns.mode), ("t0", ConfiguredMode::Fixed(Mode::None)));
        assert_eq!(config.dns.allow_suffix, ["dev"]);
        assert!(!config.paths.direct && !config.paths.portmap);
    }
}
