//! What an administrator may decide: `/etc/codervpn/config.toml` and the flags over it.
//!
//! The file is strict: an unknown key or a wrong type is an error that names file, line and key, because a
//! setting that silently does nothing is worse than a daemon that refuses to start. Flags are laid over the
//! parsed file before it is given its types, so that both are checked by the same rules.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use codervpn_host::dns::ConfiguredMode;
use serde::Deserialize;
use thiserror::Error;
use toml::{Table, Value};

use crate::parameters::is_legal_header;

/// Where the file is looked for when `--config` is not given.
pub const DEFAULT_PATH: &str = "/etc/codervpn/config.toml";

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// toml's own text names line, column and key.
    #[error("{path}: {message}")]
    Parse { path: PathBuf, message: String },
    #[error("the command line: {message}")]
    Flags { message: String },
    #[error("{key}: {reason}")]
    Value { key: &'static str, reason: String },
}

/// The configuration in force: swapped as a whole when it is read again, taken once by each operation.
pub type SharedConfig = Arc<ArcSwap<Config>>;

/// The whole configuration. Missing sections and keys take the documented defaults.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub daemon: Daemon,
    pub socket: Socket,
    pub auth: Auth,
    pub network: Network,
    pub tun: Tun,
    pub dns: Dns,
    pub relay: Relay,
    pub paths: Paths,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Locks.
    pub runtime_dir: PathBuf,
    /// What must survive a crash: the backup of resolv.conf.
    pub state_dir: PathBuf,
    /// A `tracing` filter: `info`, `debug`, `codervpn_engine=trace,info`.
    pub log: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Socket {
    pub path: PathBuf,
    pub group: String,
    /// Octal digits in a string, as for `chmod`.
    pub mode: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Auth {
    /// Names or uids admitted without the group.
    pub allow_users: Vec<UserRef>,
    /// Lifecycle for every local user.
    pub public_status: bool,
}

/// A user named by name or by number.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum UserRef {
    Uid(u32),
    Name(String),
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// PEM file of authorities trusted beside the system's.
    pub extra_ca: Option<PathBuf>,
    pub proxy: Option<String>,
    /// Headers sent with every request to the deployment.
    pub headers: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tun {
    pub name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dns {
    #[serde(deserialize_with = "dns_mode")]
    pub mode: ConfiguredMode,
    /// Whether the suffix is a search domain too.
    pub search: bool,
    /// Suffixes allowed although they are top-level domains of the public internet.
    pub allow_suffix: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Relay {
    /// Relays whose map entry waives certificate checks are used, and their waiver honoured (T-24).
    pub allow_insecure: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Paths {
    pub direct: bool,
    pub portmap: bool,
}

impl Default for Daemon {
    fn default() -> Self {
        Self { runtime_dir: "/run/codervpn".into(), state_dir: "/var/lib/codervpn".into(), log: "info".into() }
    }
}

impl Default for Socket {
    fn default() -> Self {
        Self { path: "/run/coder-desktop/vpn.sock".into(), group: "codervpn".into(), mode: "0660".into() }
    }
}

impl Default for Tun {
    fn default() -> Self {
        Self { name: "coder0".into() }
    }
}

impl Default for Paths {
    fn default() -> Self {
        Self { direct: true, portmap: true }
    }
}

impl Config {
    /// Reads `path`, lays `flags` over it and checks the result. A missing file means defaults, unless
    /// somebody named it.
    pub fn load(path: Option<&Path>, flags: &[Flag]) -> Result<Self, ConfigError> {
        let named = path.is_some();
        let path = path.unwrap_or(Path::new(DEFAULT_PATH));
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !named => String::new(),
            Err(source) => return Err(ConfigError::Read { path: path.into(), source }),
        };
        Self::parse(path, &text, flags)
    }

    fn parse(path: &Path, text: &str, flags: &[Flag]) -> Result<Self, ConfigError> {
        let in_file = |error: toml::de::Error| ConfigError::Parse {
            path: path.into(),
            message: error.to_string().trim_end().to_owned(),
        };
        // Typed once on its own: only then do errors carry the line.
        let config: Self = toml::from_str(text).map_err(in_file)?;
        let config = if flags.is_empty() {
            config
        } else {
            let mut table: Table = toml::from_str(text).map_err(in_file)?;
            for flag in flags {
                flag.lay_over(&mut table);
            }
            table.try_into().map_err(|error: toml::de::Error| ConfigError::Flags {
                message: error.to_string().trim_end().to_owned(),
            })?
        };
        config.check()?;
        Ok(config)
    }

    /// What types cannot express.
    fn check(&self) -> Result<(), ConfigError> {
        self.socket_mode()?;
        let name = &self.tun.name;
        if !codervpn_host::tun::is_valid_name(name) {
            return Err(ConfigError::Value {
                key: "tun.name",
                reason: format!("{name:?} is no interface name: 1 to 15 letters, digits, '-', '_' or '.'"),
            });
        }
        if self.network.proxy.is_some() {
            return Err(ConfigError::Value { key: "network.proxy", reason: "proxies are not built yet".into() });
        }
        for (name, value) in &self.network.headers {
            if !is_legal_header(name, value) {
                return Err(ConfigError::Value {
                    key: "network.headers",
                    reason: format!("{name:?} is no header: a name of letters, digits and '-', a value on one line"),
                });
            }
        }
        Ok(())
    }

    /// The permission bits of the socket.
    pub fn socket_mode(&self) -> Result<u32, ConfigError> {
        u32::from_str_radix(&self.socket.mode, 8).ok().filter(|mode| *mode <= 0o777).ok_or_else(|| ConfigError::Value {
            key: "socket.mode",
            reason: format!("{:?} is no file mode; write octal digits such as \"0660\"", self.socket.mode),
        })
    }
}

/// A mode that is not built yet is refused by its name, with file and line like any wrong value.
fn dns_mode<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<ConfiguredMode, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// One flag: a key of the file and the value to put there.
#[derive(Debug, Clone)]
pub struct Flag {
    pub section: &'static str,
    pub key: &'static str,
    pub value: Value,
}

impl Flag {
    fn lay_over(&self, table: &mut Table) {
        let section = table.entry(self.section).or_insert_with(|| Value::Table(Table::new()));
        // A section that is not a table is left as it is: typing it reports the fault.
        if let Value::Table(section) = section {
            section.insert(self.key.to_owned(), self.value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codervpn_host::dns::Mode;

    fn parse(text: &str, flags: &[Flag]) -> Result<Config, String> {
        Config::parse(Path::new("/etc/codervpn/config.toml"), text, flags).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_contract() {
        let config = parse("", &[]).unwrap();
        assert_eq!(config.daemon.runtime_dir, Path::new("/run/codervpn"));
        assert_eq!(config.daemon.state_dir, Path::new("/var/lib/codervpn"));
        assert_eq!(config.socket.path, Path::new("/run/coder-desktop/vpn.sock"));
        assert_eq!(config.socket.group, "codervpn");
        assert_eq!(config.socket_mode().unwrap(), 0o660);
        assert_eq!(config.tun.name, "coder0");
        assert_eq!(config.dns.mode, ConfiguredMode::Auto);
        assert!(!config.relay.allow_insecure && !config.auth.public_status && !config.dns.search);
        assert!(config.paths.direct && config.paths.portmap);
    }

    #[test]
    fn an_unknown_key_is_named_with_file_and_line() {
        let error = parse("[dns]\nmode = \"none\"\nserch = true\n", &[]).unwrap_err();
        assert!(error.contains("/etc/codervpn/config.toml"), "{error}");
        assert!(error.contains("line 3") && error.contains("serch"), "{error}");
        let error = parse("[dsn]\nmode = \"none\"\n", &[]).unwrap_err();
        assert!(error.contains("line 1") && error.contains("dsn"), "{error}");
    }

    #[test]
    fn a_wrong_type_is_named_with_its_line() {
        let error = parse("[relay]\nallow_insecure = \"yes\"\n", &[]).unwrap_err();
        assert!(error.contains("line 2") && error.contains("allow_insecure"), "{error}");
    }

    #[test]
    fn modes_that_are_not_built_are_refused_by_name() {
        for mode in ["network-manager", "dnsmasq", "resolvconf"] {
            let error = parse(&format!("[dns]\nmode = \"{mode}\"\n"), &[]).unwrap_err();
            assert!(error.contains(mode) && error.contains("not built") && error.contains("line 2"), "{error}");
        }
        assert!(parse("[dns]\nmode = \"magic\"\n", &[]).unwrap_err().contains("magic"));
    }

    #[test]
    fn flags_win_over_the_file_and_are_checked_alike() {
        let flag = |section, key, value| Flag { section, key, value };
        let text = "[tun]\nname = \"vpn7\"\n[dns]\nmode = \"direct\"\n";
        let config = parse(text, &[flag("dns", "mode", Value::String("none".into()))]).unwrap();
        assert_eq!(config.dns.mode, ConfiguredMode::Fixed(Mode::None));
        assert_eq!(config.tun.name, "vpn7");
        assert!(parse(text, &[flag("tun", "name", Value::String("a/b".into()))]).unwrap_err().contains("tun.name"));
    }

    #[test]
    fn users_are_names_or_numbers() {
        let config = parse("[auth]\nallow_users = [\"alice\", 1001]\n", &[]).unwrap();
        assert_eq!(config.auth.allow_users, [UserRef::Name("alice".into()), UserRef::Uid(1001)]);
    }

    #[test]
    fn bad_modes_and_headers_say_what_is_wanted() {
        assert!(parse("[socket]\nmode = \"rw\"\n", &[]).unwrap_err().contains("socket.mode"));
        assert!(parse("[network.headers]\n\"X Y\" = \"1\"\n", &[]).unwrap_err().contains("X Y"));
        assert!(parse("[network.headers]\nX = \"1\\n2\"\n", &[]).unwrap_err().contains("network.headers"));
    }
}
