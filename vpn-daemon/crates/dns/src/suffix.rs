//! Decides whether the suffix a server names may be served on this machine.
//!
//! The suffix comes from the server, and everything below it is answered by us. A hostile or careless value (`com`,
//! or the parent of the deployment's own host) would take over or lock out the machine, so it becomes a [`Suffix`]
//! only after the checks of `dns-and-os.md` 1.2; every other part of this crate takes a `Suffix` and trusts it.

use std::fmt;

use crate::suffix_tlds::TOP_LEVEL_DOMAINS;

/// Suffix of a deployment that names none.
pub const DEFAULT_SUFFIX: &str = "coder";

/// Leaves room for `agent.workspace.owner.` (64 + 33 + 33 bytes) within the 253 of a name.
const MAX_SUFFIX_BYTES: usize = 120;
const MAX_LABEL_BYTES: usize = 63;

/// A checked suffix: lower case, no dot at either end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Suffix(String);

/// What this machine knows beyond the suffix itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct SuffixRules<'a> {
    /// `dns.allow_suffix`: public suffixes the administrator wants to be taken over nevertheless.
    pub allow: &'a [String],
    /// Hosts we have to reach: deployment, workspace proxies, relays. Host names without port; addresses are ignored.
    pub own_hosts: &'a [String],
    /// Search domains of the machine, as far as known.
    pub search_domains: &'a [String],
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuffixError {
    #[error(
        "the server's workspace suffix {0} is not a legal domain name; names are not served. Ask the administrator to correct CODER_WORKSPACE_HOSTNAME_SUFFIX"
    )]
    Malformed(String),
    #[error(
        "the server's workspace suffix {0:?} is reserved for other uses; names are not served. Ask the administrator to choose another CODER_WORKSPACE_HOSTNAME_SUFFIX"
    )]
    Reserved(String),
    #[error(
        "the server's workspace suffix {0:?} is a public domain; serving it would take over names of the Internet. If that is wanted, add it to dns.allow_suffix in the configuration"
    )]
    Public(String),
    #[error(
        "the server's workspace suffix {suffix:?} contains {host:?}, which this machine has to reach; names are not served. Ask the administrator to choose another CODER_WORKSPACE_HOSTNAME_SUFFIX"
    )]
    OwnHost { suffix: String, host: String },
    #[error(
        "the server's workspace suffix {suffix:?} contains this machine's search domain {domain:?}; names are not served. Ask the administrator to choose another CODER_WORKSPACE_HOSTNAME_SUFFIX"
    )]
    SearchDomain { suffix: String, domain: String },
}

impl Suffix {
    /// Normalises and checks what the server sent; empty means the default.
    pub fn parse(raw: &str, rules: &SuffixRules<'_>) -> Result<Suffix, SuffixError> {
        let name = normalise(raw).ok_or_else(|| SuffixError::Malformed(shown(raw)))?;
        let last = name.rsplit('.').next().unwrap_or(&name);
        if RESERVED.contains(&last) {
            return Err(SuffixError::Reserved(name));
        }
        let allowed = rules.allow.iter().any(|a| normalise(a).as_ref() == Some(&name));
        if !allowed && is_public(&name) {
            return Err(SuffixError::Public(name));
        }
        let suffix = Suffix(name);
        if let Some(host) = rules.own_hosts.iter().find(|host| suffix.contains(host)) {
            return Err(SuffixError::OwnHost { suffix: suffix.0, host: host.clone() });
        }
        if let Some(domain) = rules.search_domains.iter().find(|d| suffix.contains(d)) {
            return Err(SuffixError::SearchDomain { suffix: suffix.0, domain: domain.clone() });
        }
        Ok(suffix)
    }

    /// Without a dot at the end.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether `host` is this domain or lies below it.
    pub fn contains(&self, host: &str) -> bool {
        let Some(host) = ascii(host) else { return false };
        host.strip_suffix(&self.0).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }
}

impl Default for Suffix {
    fn default() -> Suffix {
        Suffix(DEFAULT_SUFFIX.to_owned())
    }
}

impl fmt::Display for Suffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A suffix as we write it, the default for an empty one; `None` if it is no domain name.
fn normalise(raw: &str) -> Option<String> {
    let name = ascii(raw)?;
    if name.is_empty() {
        return Some(DEFAULT_SUFFIX.to_owned());
    }
    (name.len() <= MAX_SUFFIX_BYTES && name.split('.').all(is_label)).then_some(name)
}

/// Lower case, one dot off either end, `xn--` where needed.
fn ascii(raw: &str) -> Option<String> {
    let name = raw.trim_matches(|c: char| c.is_ascii_whitespace());
    let name = name.strip_prefix('.').unwrap_or(name);
    let name = name.strip_suffix('.').unwrap_or(name);
    // A hostile megabyte is not worth a conversion; a name has 253 bytes, a character of it at most four.
    if name.len() > 4 * 253 {
        return None;
    }
    if name.is_ascii() { Some(name.to_ascii_lowercase()) } else { idna::domain_to_ascii(name).ok() }
}

/// A label that names of ours may consist of (`dns-and-os.md` 1.5).
pub(crate) fn is_label(label: &str) -> bool {
    (1..=MAX_LABEL_BYTES).contains(&label.len())
        && label.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
}

/// Text from a server, made safe for a log line.
pub(crate) fn shown(raw: &str) -> String {
    let mut text: String = raw.chars().take(64).collect();
    if text.len() < raw.len() {
        text.push('…');
    }
    format!("{text:?}")
}

/// A name that somebody else owns on the Internet, as far as a short list can tell.
fn is_public(name: &str) -> bool {
    match name.split('.').collect::<Vec<_>>().as_slice() {
        [tld] => *tld != DEFAULT_SUFFIX && is_top_level_domain(tld),
        // `co.uk` and its like are as public as `com`.
        [second, tld] => tld.len() == 2 && REGISTRY_LABELS.contains(second),
        _ => false,
    }
}

fn is_top_level_domain(label: &str) -> bool {
    // Two letters are countries, `xn--` are their native spellings and new ones alike.
    (label.len() == 2 && label.bytes().all(|b| b.is_ascii_lowercase()))
        || label.starts_with("xn--")
        || TOP_LEVEL_DOMAINS.binary_search(&label).is_ok()
}

/// RFC 6761, 7686 and 6762: other software treats these specially, so names below them would resolve at random.
const RESERVED: [&str; 6] = ["arpa", "example", "invalid", "local", "localhost", "onion"];

/// Labels below which country registries sell names.
const REGISTRY_LABELS: [&str; 16] =
    ["ac", "co", "com", "edu", "go", "gob", "gouv", "gov", "govt", "gv", "mil", "ne", "net", "or", "org", "sch"];
