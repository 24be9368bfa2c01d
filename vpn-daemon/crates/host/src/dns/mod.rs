//! Pointing the system's resolver at the server inside the tunnel.
//!
//! One mechanism is one file behind [`Backend`]: `resolved` (systemd-resolved over D-Bus, true
//! split DNS), `direct` (we become the only server in resolv.conf and forward the rest) and
//! `none`. [`detect`] chooses among them; a machine whose resolver needs a mechanism that is not
//! built yet gets `none` and a text, never `direct`, because two programs would fight over the
//! file.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use futures_util::future::BoxFuture;

use crate::Paths;

pub mod detect;
#[cfg(target_os = "linux")]
pub mod direct;
pub mod none;
#[cfg(target_os = "linux")]
mod nscd;
#[cfg_attr(
    not(target_os = "linux"),
    allow(dead_code, reason = "only Linux writes the file; its reader is for everyone")
)]
pub mod resolv_conf;
#[cfg(target_os = "linux")]
pub mod resolved;

/// Mechanisms that exist in this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    Resolved,
    Direct,
    None,
}

impl Mode {
    /// As it stands in the configuration and in `status --json`.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Resolved => "resolved",
            Mode::Direct => "direct",
            Mode::None => "none",
        }
    }

    /// Whether the system sends us only our own names. If not, we are its only server and must
    /// forward everything else to [`Backend::upstreams`].
    pub fn can_split(self) -> bool {
        !matches!(self, Mode::Direct)
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The key `dns.mode` of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConfiguredMode {
    #[default]
    Auto,
    Fixed(Mode),
}

/// A `dns.mode` that cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadMode {
    #[error(
        "dns.mode = \"{0}\" is not built into this version yet; use \"auto\", \"resolved\", \"direct\" or \"none\""
    )]
    NotBuilt(String),
    #[error("dns.mode = {0:?} is unknown; use \"auto\", \"resolved\", \"direct\" or \"none\"")]
    Unknown(String),
}

impl FromStr for ConfiguredMode {
    type Err = BadMode;

    fn from_str(text: &str) -> Result<Self, BadMode> {
        match text {
            "auto" => Ok(ConfiguredMode::Auto),
            "resolved" => Ok(ConfiguredMode::Fixed(Mode::Resolved)),
            "direct" => Ok(ConfiguredMode::Fixed(Mode::Direct)),
            "none" => Ok(ConfiguredMode::Fixed(Mode::None)),
            "network-manager" | "dnsmasq" | "resolvconf" => Err(BadMode::NotBuilt(text.to_owned())),
            _ => Err(BadMode::Unknown(text.to_owned())),
        }
    }
}

/// What the system shall know: a full desired state, so that applying it again repairs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsConfig {
    /// The tunnel's interface.
    pub interface_index: u32,
    /// Our server inside the tunnel, port 53.
    pub server: Ipv6Addr,
    /// Suffixes that are ours, normalised, without dots at the ends; the first is the main one.
    pub suffixes: Vec<String>,
    /// The reverse zone of the tunnel's network, without trailing dot; empty for none.
    pub reverse_zone: String,
    /// Whether single labels are tried below our suffix (`dns.search`).
    pub search: bool,
    /// The tunnel's network: a base server inside it would be a loop and is left out.
    pub tunnel_prefix: crate::routes::Prefix,
}

/// What a back end knows about its own work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum State {
    /// Nothing is installed: not applied yet, reverted, or mode `none`.
    #[default]
    Off,
    /// The system's resolver has our settings.
    Applied,
    /// The settings had been lost or replaced and were put back.
    Repaired,
    /// Another program replaces our settings again and again; we gave up (2.6) and the names do
    /// not resolve until the next start.
    Overwritten,
}

/// One way to configure the system's resolver.
///
/// `apply` and `revert` may be repeated. Dropping a back end changes nothing: what a crash leaves
/// behind is undone by [`crate::cleanup`].
pub trait Backend: Send {
    fn mode(&self) -> Mode;

    /// Installs the settings.
    fn apply<'a>(&'a mut self, config: &'a DnsConfig) -> BoxFuture<'a, Result<(), Error>>;

    /// Looks whether they still stand and puts them back if not, within the mechanism's limits.
    /// Call it every 30 seconds and whenever the self-test fails.
    fn check(&mut self) -> BoxFuture<'_, Result<State, Error>>;

    /// Takes the settings back. Call it before the device closes.
    fn revert(&mut self) -> BoxFuture<'_, Result<(), Error>>;

    fn state(&self) -> State;

    /// The servers the machine had before, in order, at most three: where the forwarder sends what
    /// is not ours. Empty for modes that split. May change after `check`.
    fn upstreams(&self) -> Vec<SocketAddr>;
}

/// A mode together with why it was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub mode: Mode,
    /// The facts that decided, one line for the log.
    pub reason: String,
    /// What the user should know and can do about it; for `status` and the log.
    pub warning: Option<String>,
}

/// What [`install`] did.
pub struct Installed {
    pub backend: Box<dyn Backend>,
    pub choice: Choice,
}

impl std::fmt::Debug for Installed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Installed").field("choice", &self.choice).field("state", &self.backend.state()).finish()
    }
}

/// Why the system's resolver could not be configured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("systemd-resolved: {what}: {source}")]
    Resolved { what: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("systemd-resolved does not answer on the system bus within {0:?}")]
    ResolvedTimeout(std::time::Duration),
    #[error(
        "systemd-resolved refuses {0}: run codervpnd as root, or grant its user org.freedesktop.resolve1.* by polkit"
    )]
    ResolvedRefuses(&'static str),
    #[error(
        "systemd-networkd manages the tunnel's interface and refuses settings by others; add a .network file with [Match] Name=<interface> and [Link] Unmanaged=yes"
    )]
    LinkBusy,
    #[error("cannot {what} {}: {source}", .path.display())]
    File { what: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{} is no resolver configuration: {reason}", .path.display())]
    NotResolvConf { path: PathBuf, reason: &'static str },
    #[error("mode {0} is unsupported on this platform yet")]
    Unsupported(Mode),
}

/// Chooses a mode, installs the settings, and says what was done.
///
/// With [`ConfiguredMode::Auto`] this never fails: what goes wrong becomes mode `none` with a
/// warning, because a tunnel without names is better than none. A fixed mode that fails is an
/// error for the caller to show; nothing is left half done.
pub async fn install(mode: ConfiguredMode, paths: &Paths, config: &DnsConfig) -> Result<Installed, Error> {
    let choice = match mode {
        ConfiguredMode::Fixed(mode) => Choice { mode, reason: format!("dns.mode = {mode}"), warning: None },
        ConfiguredMode::Auto => detect::choose(&detect::Facts::gather(paths).await),
    };
    let failure = match open(choice.mode, paths) {
        Ok(mut backend) => match backend.apply(config).await {
            Ok(()) => return Ok(Installed { backend, choice }),
            Err(error) => {
                // `apply` may have got half way.
                if let Err(error) = backend.revert().await {
                    tracing::warn!(%error, "cannot take back DNS settings");
                }
                error
            }
        },
        Err(error) => error,
    };
    if mode != ConfiguredMode::Auto {
        return Err(failure);
    }
    Ok(Installed {
        backend: Box::new(none::NoChanges),
        choice: Choice {
            mode: Mode::None,
            reason: format!("{}; mode {} failed", choice.reason, choice.mode),
            warning: Some(format!("names resolve only when asked at {}: {failure}", config.server)),
        },
    })
}

/// The back end of a mode, nothing applied yet.
pub fn open(mode: Mode, paths: &Paths) -> Result<Box<dyn Backend>, Error> {
    match mode {
        Mode::None => Ok(Box::new(none::NoChanges)),
        #[cfg(target_os = "linux")]
        Mode::Direct => Ok(Box::new(direct::Direct::new(paths))),
        #[cfg(target_os = "linux")]
        Mode::Resolved => Ok(Box::new(resolved::Resolved::new())),
        #[allow(unreachable_patterns, reason = "every mode exists on Linux")]
        other => {
            let _ = paths;
            Err(Error::Unsupported(other))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // product.md 2: a mode that is not built yet is refused by name.
    #[test]
    fn modes_of_the_configuration() {
        assert_eq!("auto".parse(), Ok(ConfiguredMode::Auto));
        assert_eq!("direct".parse(), Ok(ConfiguredMode::Fixed(Mode::Direct)));
        for later in ["network-manager", "dnsmasq", "resolvconf"] {
            let error = later.parse::<ConfiguredMode>().unwrap_err();
            assert!(error.to_string().contains(later), "{error}");
            assert!(error.to_string().contains("not built"), "{error}");
        }
        assert!(matches!("Auto".parse::<ConfiguredMode>(), Err(BadMode::Unknown(_))));
    }
}
