//! The choice behind `dns.mode = auto` (`dns-and-os.md` 2.1): facts are gathered first, then a
//! pure function decides.
//!
//! What decides is who is *consulted*, not what is installed: systemd-resolved often runs unused
//! (D-10), and comments in resolv.conf outlive their authors. A resolver of another program that
//! we cannot talk to yet means `none` and a text. Editing its file would start a fight in which
//! the machine's names are at stake.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use super::{Choice, Mode};
use crate::Paths;

/// Larger files are not looked at.
#[cfg(target_os = "linux")]
const MAX_FILE: usize = 64 * 1024;

/// What was found on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Who claims resolv.conf in its leading comments.
    pub owner: Option<Owner>,
    /// Where resolv.conf links to.
    pub link_target: Option<PathBuf>,
    pub name_servers: Vec<IpAddr>,
    /// nsswitch.conf asks systemd-resolved for hosts before it asks DNS servers.
    pub nss_resolve: bool,
    /// systemd-resolved, if it answers on the system bus.
    pub resolved: Option<ResolvedFacts>,
    /// NetworkManager, if it answers on the system bus.
    pub network_manager: Option<NetworkManagerFacts>,
    /// A `resolvconf` program that is not systemd-resolved's.
    pub has_resolvconf: bool,
    /// Why resolv.conf cannot be replaced, if so.
    pub not_replaceable: Option<String>,
}

/// Programs that write their name into resolv.conf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Resolved,
    NetworkManager,
    Resolvconf,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResolvedFacts {
    /// `ResolvConfMode`: stub, static, uplink, foreign, missing; empty before systemd 247.
    pub resolv_conf_mode: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkManagerFacts {
    pub version: String,
    /// `DnsManager.Mode`.
    pub dns_mode: String,
}

impl Facts {
    /// Looks; changes nothing, and takes three seconds at most when the bus hangs (D-11).
    #[cfg(target_os = "linux")]
    pub async fn gather(paths: &Paths) -> Facts {
        let mut facts = Facts {
            link_target: std::fs::read_link(&paths.resolv_conf).ok(),
            nss_resolve: read(&paths.nsswitch_conf).is_some_and(|text| asks_resolve_before_dns(&text)),
            has_resolvconf: has_own_resolvconf(),
            not_replaceable: super::direct::is_possible(paths).err().map(|error| error.to_string()),
            ..Facts::default()
        };
        if let Some(text) = read(&paths.resolv_conf) {
            facts.owner = owner(&text);
            facts.name_servers = super::resolv_conf::ResolvConf::parse(text.as_bytes())
                .name_servers
                .iter()
                .map(|server| server.address)
                .collect();
        }
        (facts.resolved, facts.network_manager) = super::resolved::ask_who_is_there().await;
        facts
    }

    /// There is nothing to look at yet.
    #[cfg(not(target_os = "linux"))]
    pub async fn gather(_paths: &Paths) -> Facts {
        Facts::default()
    }

    /// resolv.conf leads to systemd-resolved's stub and nowhere else.
    fn names_only_the_stub(&self) -> bool {
        const STUBS: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(127, 0, 0, 53)), IpAddr::V4(Ipv4Addr::new(127, 0, 0, 54))];
        !self.name_servers.is_empty() && self.name_servers.iter().all(|s| STUBS.contains(s))
    }

    /// Programs on this machine ask systemd-resolved.
    fn uses_resolved(&self, resolved: &ResolvedFacts) -> bool {
        let link_agrees = match resolved.resolv_conf_mode.as_str() {
            "stub" => self.links_to("stub-resolv.conf"),
            // A link to the static file of the package.
            "static" => self.links_to("resolv.conf") && !self.links_to("resolve/resolv.conf"),
            _ => false,
        };
        self.names_only_the_stub() || link_agrees || self.nss_resolve
    }

    fn links_to(&self, end: &str) -> bool {
        self.link_target.as_ref().is_some_and(|target| target.ends_with(end))
    }
}

/// The decision.
pub fn choose(facts: &Facts) -> Choice {
    let none = |reason: &str, what_to_do: &str| Choice {
        mode: Mode::None,
        reason: reason.to_owned(),
        warning: Some(format!("names of workspaces do not resolve system-wide: {what_to_do}")),
    };

    if let Some(resolved) = &facts.resolved
        && facts.uses_resolved(resolved)
    {
        if let Some(manager) = &facts.network_manager
            && manager.dns_mode == "systemd-resolved"
            && overrides_resolved(&manager.version)
        {
            return none(
                &format!("NetworkManager {} controls systemd-resolved", manager.version),
                "NetworkManager 1.26.0 to 1.26.5 replaces the settings of others in systemd-resolved, and mode network-manager is not built yet; update NetworkManager, or set dns.mode",
            );
        }
        return Choice {
            mode: Mode::Resolved,
            reason: "systemd-resolved answers and is asked".to_owned(),
            warning: None,
        };
    }
    if facts.names_only_the_stub() {
        return none(
            "resolv.conf names systemd-resolved, which does not answer on the system bus",
            "resolv.conf leads to systemd-resolved, but it does not answer on D-Bus; start it (systemctl start systemd-resolved) and start the VPN again, or set dns.mode",
        );
    }
    if let Some(manager) = &facts.network_manager
        && manager.dns_mode == "dnsmasq"
    {
        return none(
            "NetworkManager runs dnsmasq",
            "NetworkManager's dnsmasq is the resolver, and mode dnsmasq is not built yet; let NetworkManager use systemd-resolved, or set dns.mode = \"direct\"",
        );
    }
    if facts.owner == Some(Owner::Resolvconf) && facts.has_resolvconf {
        return none(
            "resolvconf writes resolv.conf",
            "resolvconf writes resolv.conf, and mode resolvconf is not built yet; set dns.mode = \"direct\" to let codervpnd edit the file all the same",
        );
    }
    if let Some(obstacle) = &facts.not_replaceable {
        return none(
            "resolv.conf cannot be replaced",
            &format!("{obstacle}; make it writable, or add a rule for the VPN's server to your own resolver"),
        );
    }
    let reason = match (&facts.owner, &facts.resolved) {
        (_, Some(_)) => "systemd-resolved runs, but resolv.conf does not lead to it",
        (Some(Owner::NetworkManager), _) => "NetworkManager writes resolv.conf without a resolver",
        _ if facts.name_servers.is_empty() => "resolv.conf names no server",
        _ => "nobody manages resolv.conf",
    };
    // Confined programs (snaps) may read only the link's usual targets.
    let in_run = facts.link_target.as_ref().filter(|target| target.components().any(|part| part.as_os_str() == "run"));
    Choice {
        mode: Mode::Direct,
        reason: reason.to_owned(),
        warning: in_run.map(|target| {
            format!(
                "resolv.conf was a link to {} and is a file while the VPN runs; confined programs may not see it",
                target.display()
            )
        }),
    }
}

/// NetworkManager 1.26.0 to 1.26.5: its own settings win over ours in systemd-resolved.
fn overrides_resolved(version: &str) -> bool {
    let mut numbers = version.split('.').map(|part| {
        let digits = part.split(|c: char| !c.is_ascii_digit()).next();
        digits.and_then(|digits| digits.parse::<u32>().ok())
    });
    let mut next = || numbers.next().flatten();
    (next(), next()) == (Some(1), Some(26)) && next().is_none_or(|patch| patch <= 5)
}

/// Among the leading comments, the last one that names a program.
#[cfg(target_os = "linux")]
fn owner(resolv_conf: &str) -> Option<Owner> {
    resolv_conf
        .lines()
        .take_while(|line| line.starts_with('#') || line.trim().is_empty())
        .filter_map(|line| {
            if line.contains("systemd-resolved") {
                Some(Owner::Resolved)
            } else if line.contains("NetworkManager") {
                Some(Owner::NetworkManager)
            } else if line.contains("resolvconf") {
                Some(Owner::Resolvconf)
            } else {
                None
            }
        })
        .last()
}

/// `hosts: … resolve … dns …`
#[cfg(target_os = "linux")]
fn asks_resolve_before_dns(nsswitch: &str) -> bool {
    nsswitch.lines().filter_map(|line| line.split('#').next()?.trim().strip_prefix("hosts:")).any(|sources| {
        sources.split_whitespace().find(|source| matches!(*source, "resolve" | "dns")) == Some("resolve")
    })
}

/// systemd installs `resolvconf` as another name of `resolvectl`; that one means nothing.
#[cfg(target_os = "linux")]
fn has_own_resolvconf() -> bool {
    ["/usr/sbin", "/sbin", "/usr/bin", "/bin"]
        .iter()
        .filter_map(|folder| std::fs::canonicalize(format!("{folder}/resolvconf")).ok())
        .any(|path| path.file_name().is_some_and(|name| name != "resolvectl"))
}

#[cfg(target_os = "linux")]
fn read(path: &std::path::Path) -> Option<String> {
    let bytes = crate::files::read_if_present(path, MAX_FILE).ok()??;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use super::*;

    fn servers(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|s| s.parse().unwrap()).collect()
    }

    fn resolved(mode: &str) -> Option<ResolvedFacts> {
        Some(ResolvedFacts { resolv_conf_mode: mode.to_owned() })
    }

    fn manager(version: &str, dns_mode: &str) -> Option<NetworkManagerFacts> {
        Some(NetworkManagerFacts { version: version.to_owned(), dns_mode: dns_mode.to_owned() })
    }

    #[allow(clippy::needless_pass_by_value, reason = "the cases read better")]
    fn mode(facts: Facts) -> Mode {
        let choice = choose(&facts);
        // none is never silent, and a text says what to do.
        assert_eq!(
            choice.mode == Mode::None,
            choice.warning.as_ref().is_some_and(|w| w.contains("do not resolve")),
            "{choice:?}"
        );
        choice.mode
    }

    // D-10: who is consulted decides.
    #[test]
    fn resolved_is_used_only_when_it_is_asked() {
        let stub = Facts { name_servers: servers(&["127.0.0.53"]), resolved: resolved("stub"), ..Facts::default() };
        assert_eq!(mode(stub.clone()), Mode::Resolved);
        let bypassed = Facts {
            name_servers: servers(&["192.0.2.53"]),
            owner: Some(Owner::Resolved),
            resolved: resolved("foreign"),
            ..Facts::default()
        };
        assert_eq!(mode(bypassed.clone()), Mode::Direct);
        assert_eq!(mode(Facts { nss_resolve: true, ..bypassed.clone() }), Mode::Resolved);
        let uplink = Facts {
            link_target: Some("../run/systemd/resolve/resolv.conf".into()),
            resolved: resolved("uplink"),
            ..bypassed
        };
        assert_eq!(mode(uplink.clone()), Mode::Direct);
        assert!(choose(&uplink).warning.unwrap().contains("link"));
        // The stub's file with an additional listener address.
        let agreed = Facts {
            name_servers: servers(&["10.0.0.53"]),
            link_target: Some("/run/systemd/resolve/stub-resolv.conf".into()),
            resolved: resolved("stub"),
            ..Facts::default()
        };
        assert_eq!(mode(agreed), Mode::Resolved);
        // Asked, but silent: neither its mode nor an edit of its file.
        assert_eq!(mode(Facts { resolved: None, ..stub }), Mode::None);
    }

    // A resolver whose mode is not built yet gets none and a text, never direct.
    #[test]
    fn modes_that_are_not_built_become_none_with_a_text() {
        let stub = Facts { name_servers: servers(&["127.0.0.53"]), resolved: resolved("stub"), ..Facts::default() };
        for (version, wanted) in [
            ("1.26.0", Mode::None),
            ("1.26.5-2ubuntu1", Mode::None),
            ("1.26.6", Mode::Resolved),
            ("1.25.9", Mode::Resolved),
            ("1.42.4", Mode::Resolved),
            ("", Mode::Resolved),
        ] {
            let facts = Facts { network_manager: manager(version, "systemd-resolved"), ..stub.clone() };
            assert_eq!(mode(facts), wanted, "{version}");
        }
        assert_eq!(
            mode(Facts {
                name_servers: servers(&["127.0.0.1"]),
                network_manager: manager("1.42.4", "dnsmasq"),
                ..Facts::default()
            }),
            Mode::None
        );
        let resolvconf = Facts {
            name_servers: servers(&["192.0.2.1"]),
            owner: Some(Owner::Resolvconf),
            has_resolvconf: true,
            ..Facts::default()
        };
        assert_eq!(mode(resolvconf.clone()), Mode::None);
        // A comment of a program that is gone.
        assert_eq!(mode(Facts { has_resolvconf: false, ..resolvconf }), Mode::Direct);
    }

    #[test]
    fn a_plain_machine_gets_direct_and_a_read_only_one_none() {
        assert_eq!(mode(Facts::default()), Mode::Direct);
        assert_eq!(
            mode(Facts {
                name_servers: servers(&["192.0.2.1"]),
                owner: Some(Owner::NetworkManager),
                network_manager: manager("1.42.4", "default"),
                ..Facts::default()
            }),
            Mode::Direct
        );
        let choice = choose(&Facts {
            not_replaceable: Some("cannot write /etc/resolv.conf: read-only".to_owned()),
            ..Facts::default()
        });
        assert_eq!(choice.mode, Mode::None);
        assert!(choice.warning.unwrap().contains("read-only"));
    }

    #[test]
    fn comments_and_nsswitch_are_read_as_2_1_says() {
        assert_eq!(
            owner(
                "# Dynamic file for glibc resolver(3) generated by resolvconf(8)\n#     DO NOT EDIT\n\nnameserver 192.0.2.1\n# NetworkManager\n"
            ),
            Some(Owner::Resolvconf)
        );
        assert_eq!(owner("nameserver 1.1.1.1\n# NetworkManager\n"), None);
        assert_eq!(
            owner("# by NetworkManager\n# This is managed by man:systemd-resolved(8).\n"),
            Some(Owner::Resolved)
        );
        assert!(asks_resolve_before_dns("passwd: files\nhosts:  files resolve [!UNAVAIL=return] dns\n"));
        assert!(!asks_resolve_before_dns("hosts: files dns resolve\n"));
        assert!(!asks_resolve_before_dns("#hosts: files resolve dns\n"));
        assert!(!asks_resolve_before_dns("hosts: files dns # resolve\n"));
    }

    #[tokio::test]
    async fn gathering_reads_the_files_it_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let mut paths = crate::Paths::new(dir.path().join("s"), dir.path().join("r"));
        paths.resolv_conf = dir.path().join("resolv.conf");
        paths.nsswitch_conf = dir.path().join("nsswitch.conf");
        std::fs::write(dir.path().join("real"), "# NetworkManager\nnameserver 192.0.2.1\n").unwrap();
        std::os::unix::fs::symlink("real", &paths.resolv_conf).unwrap();
        std::fs::write(&paths.nsswitch_conf, "hosts: files resolve dns\n").unwrap();
        let facts = Facts::gather(&paths).await;
        assert_eq!(facts.link_target, Some("real".into()));
        assert_eq!(facts.owner, Some(Owner::NetworkManager));
        assert_eq!(facts.name_servers, servers(&["192.0.2.1"]));
        assert!(facts.nss_resolve);
        assert_eq!(facts.not_replaceable, None);
    }
}
