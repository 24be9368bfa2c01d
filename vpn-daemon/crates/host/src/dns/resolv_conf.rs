//! resolv.conf: reading it as leniently as the resolvers do, and writing the one that names our
//! server alone.
//!
//! Lines are kept as bytes: what we do not understand is carried over unread (D-07).

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use super::DnsConfig;
use crate::routes::Prefix;

/// How our file begins; who finds it knows whose it is and how to get rid of it.
pub(crate) const MARKER: &[u8] = b"# codervpn managed";

/// Prefix of the lines that carry the original inside our own file, should our records be lost.
const CARRIED: &[u8] = b"#~ ";

/// Originals up to this size are carried along; a longer one is only in the records.
const MAX_CARRIED: usize = 8 * 1024;

/// glibc and musl read three servers and ignore the rest; so do we.
const MAX_SERVERS: usize = 3;

/// A name server line, its zone still a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameServer {
    pub address: IpAddr,
    pub zone: Option<String>,
}

/// What a resolv.conf says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResolvConf {
    pub name_servers: Vec<NameServer>,
    /// Of the last `search` or `domain` line, as the resolvers take it.
    pub search: Vec<String>,
    /// Everything that is neither name server nor comment, unread.
    kept: Vec<Vec<u8>>,
    /// Options one by one.
    options: Vec<Vec<u8>>,
}

impl ResolvConf {
    /// Never fails: a line that makes no sense to us may make sense to somebody.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut found = ResolvConf::default();
        for line in bytes.split(|&b| b == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
            let Some(keyword) = words.next() else {
                continue;
            };
            match keyword {
                _ if matches!(keyword.first(), Some(b'#' | b';')) => {}
                b"nameserver" => found.name_servers.extend(words.next().and_then(name_server)),
                b"options" => found.options.extend(words.map(<[u8]>::to_vec)),
                b"search" | b"domain" => {
                    found.search = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
                    found.kept.push(line.to_vec());
                }
                _ => found.kept.push(line.to_vec()),
            }
        }
        found
    }

    /// The servers a forwarder may ask, at most three, in order: not our own and none inside the
    /// tunnel, which would be a loop, nor a local one where nobody answers (`answers`).
    pub fn base_servers(
        &self,
        own: Ipv6Addr,
        tunnel: Prefix,
        zone_index: impl Fn(&str) -> Option<u32>,
        answers: impl Fn(SocketAddr) -> bool,
    ) -> Vec<SocketAddr> {
        let mut servers = Vec::new();
        for server in &self.name_servers {
            let address = match (server.address, &server.zone) {
                (IpAddr::V6(ip), Some(zone)) => {
                    let Some(index) = zone_index(zone) else {
                        tracing::warn!(%ip, zone, "left out a name server of an unknown interface");
                        continue;
                    };
                    SocketAddr::V6(SocketAddrV6::new(ip, 53, 0, index))
                }
                (ip, _) => SocketAddr::new(ip, 53),
            };
            let loops = match address.ip() {
                IpAddr::V6(ip) => ip == own || tunnel.contains(&Prefix::new(ip, 128)),
                IpAddr::V4(_) => false,
            };
            if loops || address.ip().is_unspecified() {
                tracing::warn!(server = %address.ip(), "left out a name server that leads back to us");
            } else if address.ip().is_loopback() && !answers(address) {
                tracing::warn!(server = %address.ip(), "left out a local name server that does not answer");
            } else if !servers.contains(&address) && servers.len() < MAX_SERVERS {
                servers.push(address);
            }
        }
        servers
    }

    /// Our file: our server only (two side by side would race, D-16), everything else as before.
    pub(crate) fn render(&self, original: &[u8], saved_in: &str, config: &DnsConfig) -> Vec<u8> {
        let mut out = Vec::with_capacity(original.len() * 2 + 512);
        let mut line = |parts: &[&[u8]]| {
            for part in parts {
                out.extend_from_slice(part);
            }
            out.push(b'\n');
        };
        line(&[MARKER, b"; original saved in ", saved_in.as_bytes()]);
        line(&[b"# To get it back while the VPN is not running: sudo codervpnd cleanup"]);
        line(&[b"nameserver ", config.server.to_string().as_bytes()]);
        let search = config
            .search
            .then(|| {
                let mut all = self.search.clone();
                all.extend(config.suffixes.first().filter(|suffix| !self.search.contains(suffix)).cloned());
                all
            })
            .filter(|all| !all.is_empty());
        for kept in &self.kept {
            let is_search = kept.starts_with(b"search") || kept.starts_with(b"domain");
            if search.is_none() || !is_search {
                line(&[kept]);
            }
        }
        if let Some(search) = search {
            line(&[b"search ", search.join(" ").as_bytes()]);
        }
        let options: Vec<&[u8]> = self
            .options
            .iter()
            .map(Vec::as_slice)
            // Useless with one server.
            .filter(|option| *option != b"rotate")
            .collect();
        if !options.is_empty() {
            line(&[b"options ", &options.join(&b' ')]);
        }
        if !original.is_empty() && original.len() <= MAX_CARRIED {
            line(&[b"# What this file said before:"]);
            for old in original.split_inclusive(|&b| b == b'\n') {
                line(&[CARRIED, old.strip_suffix(b"\n").unwrap_or(old)]);
            }
        }
        out
    }
}

/// Whether a file was written by us, perhaps edited since.
pub(crate) fn is_marked(bytes: &[u8]) -> bool {
    bytes.starts_with(MARKER)
}

/// The original that our file carries. `None` if it carries none.
pub(crate) fn carried_original(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut original = Vec::new();
    for line in bytes.split(|&b| b == b'\n') {
        if let Some(old) = line.strip_prefix(CARRIED) {
            original.extend_from_slice(old);
            original.push(b'\n');
        }
    }
    (!original.is_empty()).then_some(original)
}

/// Our file with somebody's edits, less what we had put there; an unknown `own` address is the
/// first one, where we write it. `None` when no name server remains: then the edits cannot stand
/// alone.
pub(crate) fn without_ours(bytes: &[u8], own: Option<Ipv6Addr>) -> Option<Vec<u8>> {
    let mut rest = Vec::new();
    let mut servers = false;
    let mut own = own.map(IpAddr::V6);
    for line in bytes.split_inclusive(|&b| b == b'\n') {
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        let parsed = ResolvConf::parse(text);
        let is_ours = text.starts_with(MARKER)
            || text.starts_with(CARRIED)
            || text.starts_with(b"# To get it back while the VPN")
            || text == b"# What this file said before:"
            || parsed.name_servers.iter().any(|server| *own.get_or_insert(server.address) == server.address);
        if !is_ours {
            servers |= !parsed.name_servers.is_empty();
            rest.extend_from_slice(line);
        }
    }
    servers.then_some(rest)
}

fn name_server(word: &[u8]) -> Option<NameServer> {
    let word = std::str::from_utf8(word).ok()?;
    let (address, zone) = match word.split_once('%') {
        Some((address, zone)) => (address, Some(zone.to_owned())),
        None => (word, None),
    };
    Some(NameServer { address: address.parse().ok()?, zone })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(search: bool) -> DnsConfig {
        DnsConfig {
            interface_index: 7,
            server: "fd60:627a:a42b::53".parse().unwrap(),
            suffixes: vec!["coder".to_owned()],
            reverse_zone: String::new(),
            search,
            tunnel_prefix: Prefix::new("fd60:627a:a42b::".parse().unwrap(), 48),
        }
    }

    fn render(original: &str, search: bool) -> String {
        let bytes = original.as_bytes();
        let out = ResolvConf::parse(bytes).render(bytes, "/s/dns/resolv.conf.orig", &config(search));
        String::from_utf8(out).unwrap()
    }

    fn effective(text: &str) -> Vec<&str> {
        text.lines().filter(|line| !line.starts_with('#')).collect()
    }

    // D-07, D-16
    #[test]
    fn ours_is_the_only_server_and_the_rest_survives() {
        let original = "# Generated by NetworkManager\nsearch corp.example  lab.example\nnameserver 192.0.2.1\nnameserver 2001:db8::1\noptions edns0 trust-ad rotate\noptions ndots:2\nsortlist 192.0.2.0/24\nlookup file bind\n; old style\n";
        let text = render(original, false);
        assert!(text.starts_with("# codervpn managed; original saved in /s/dns/resolv.conf.orig\n"));
        assert!(text.contains("codervpnd cleanup"));
        assert_eq!(
            effective(&text),
            [
                "nameserver fd60:627a:a42b::53",
                "search corp.example  lab.example",
                "sortlist 192.0.2.0/24",
                "lookup file bind",
                "options edns0 trust-ad ndots:2",
            ]
        );
        assert_eq!(carried_original(text.as_bytes()).unwrap(), original.as_bytes());
    }

    #[test]
    fn search_is_added_on_request_only() {
        assert_eq!(
            effective(&render("domain a.example\nsearch b.example\n", true)),
            ["nameserver fd60:627a:a42b::53", "search b.example coder"]
        );
        assert_eq!(effective(&render("", true)), ["nameserver fd60:627a:a42b::53", "search coder"]);
        assert_eq!(effective(&render("search coder\n", true)), ["nameserver fd60:627a:a42b::53", "search coder"]);
    }

    #[test]
    fn parsing_survives_anything() {
        for strange in [
            &b"\xff\xfe\0nameserver"[..],
            b"nameserver\nnameserver not-an-address\nnameserver 192.0.2.1#comment\n",
            b"options\nsearch\n",
            b"\r\n\r\nnameserver 192.0.2.1\r\n",
        ] {
            let parsed = ResolvConf::parse(strange);
            let _ = parsed.render(strange, "x", &config(true));
        }
        assert_eq!(ResolvConf::parse(b"nameserver 192.0.2.1\r\n").name_servers.len(), 1);
    }

    // D-27
    #[test]
    fn base_servers_never_lead_back_to_us() {
        let parsed = ResolvConf::parse(
            b"nameserver fd60:627a:a42b::53\nnameserver fd60:627a:a42b:1::9\nnameserver 127.0.0.53\nnameserver 0.0.0.0\nnameserver fe80::1%eth9\nnameserver fe80::2%eth0\nnameserver 192.0.2.1\nnameserver 192.0.2.1\nnameserver 127.0.0.1\nnameserver 192.0.2.2\n",
        );
        let servers = parsed.base_servers(
            config(false).server,
            config(false).tunnel_prefix,
            |zone| (zone == "eth0").then_some(2),
            |address| address.ip().to_string() == "127.0.0.1",
        );
        let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["[fe80::2%2]:53", "192.0.2.1:53", "127.0.0.1:53"]);
    }

    // D-02
    #[test]
    fn edits_of_our_file_stand_alone_only_with_a_server() {
        let own = Some(config(false).server);
        let ours = render("nameserver 192.0.2.1\nsearch a.example\n", false);
        assert_eq!(without_ours(ours.as_bytes(), own), None);
        let edited =
            ours.replace("nameserver fd60:627a:a42b::53\n", "nameserver fd60:627a:a42b::53\nnameserver 192.0.2.9\n");
        assert_eq!(without_ours(edited.as_bytes(), own).unwrap(), b"nameserver 192.0.2.9\nsearch a.example\n");
    }
}
