//! Where a deployment is, and what follows from it for URLs and relays.

use std::fmt;

use codervpn_wire::derp_map::DerpMap;
use url::Url;

use super::ApiError;

/// Where a deployment is: scheme, host and port of the URL that a user gave. Its path, query and fragment are dropped as
/// upstream drops them (HTTP-1), user and password in it are refused.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Deployment {
    root: Url,
}

impl Deployment {
    /// Reads a deployment URL.
    pub fn parse(text: &str) -> Result<Self, ApiError> {
        let wrong = |reason: &str| ApiError::Url { reason: reason.to_owned() };
        let mut root = Url::parse(text.trim()).map_err(|error| wrong(&error.to_string()))?;
        if !matches!(root.scheme(), "http" | "https") {
            return Err(wrong("it must begin with https:// or http://"));
        }
        if root.host_str().is_none_or(str::is_empty) {
            return Err(wrong("it names no host"));
        }
        if !root.username().is_empty() || root.password().is_some() {
            return Err(wrong("it must not contain a user name or password"));
        }
        root.set_path("/");
        root.set_query(None);
        root.set_fragment(None);
        Ok(Self { root })
    }

    /// The URL of an API path, which begins with a slash (HTTP-1).
    pub fn url(&self, path: &str) -> Url {
        let mut url = self.root.clone();
        url.set_path(path);
        url
    }

    /// The URL of a WebSocket: `https` becomes `wss` (HTTP-2).
    pub fn websocket_url(&self, path: &str) -> Url {
        let mut url = self.url(path);
        let scheme = if self.is_https() { "wss" } else { "ws" };
        // http to ws and https to wss are always allowed.
        let _ = url.set_scheme(scheme);
        url
    }

    /// Host without brackets and port.
    pub fn host(&self) -> String {
        self.root.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned()
    }

    /// Its port, the scheme's default if the URL names none.
    pub fn port(&self) -> u16 {
        self.root.port_or_known_default().unwrap_or(443)
    }

    /// TLS or clear text.
    pub fn is_https(&self) -> bool {
        self.root.scheme() == "https"
    }

    /// CC-46: the embedded relay is reached under the URL that we use, whatever the deployment calls itself.
    pub fn rewrite_embedded(&self, map: &mut DerpMap) {
        map.rewrite_embedded(&self.host(), self.port(), !self.is_https());
    }
}

/// `https://host:port`, as a user would write it.
impl fmt::Display for Deployment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.root.as_str().trim_end_matches('/'))
    }
}

impl fmt::Debug for Deployment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Deployment({self})")
    }
}
