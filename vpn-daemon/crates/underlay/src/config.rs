//! What a user may set about reaching the network, and what can be wrong with it.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use ::http::{HeaderName, HeaderValue};
use url::Url;

/// What the user may set about reaching the network.
#[derive(Clone, Default)]
pub struct DialerConfig {
    /// PEM file with further trust roots (`network.extra_ca`).
    pub extra_ca: Option<PathBuf>,
    /// Headers for every request to the deployment (`network.headers`).
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Proxy for every connection (`network.proxy`).
    pub proxy: Option<Url>,
    /// Name servers to ask instead of the system's resolver. The daemon gives
    /// them when it is itself the system's resolver.
    pub base_dns: Vec<SocketAddr>,
}

/// Values of headers may be secrets, so only their names are shown.
impl fmt::Debug for DialerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DialerConfig")
            .field("extra_ca", &self.extra_ca)
            .field("headers", &self.headers.iter().map(|(n, _)| n).collect::<Vec<_>>())
            .field("proxy", &self.proxy.is_some())
            .field("base_dns", &self.base_dns)
            .finish()
    }
}

/// Why a dialer could not be made from its configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("network.extra_ca: cannot read {path}: {reason}")]
    ExtraCa { path: PathBuf, reason: String },
    #[error("network.extra_ca: {path} holds no certificate in PEM form")]
    ExtraCaEmpty { path: PathBuf },
    #[error("network.proxy: {reason}")]
    Proxy { reason: String },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_no_header_value() {
        let config = DialerConfig {
            headers: vec![(HeaderName::from_static("x-pass"), HeaderValue::from_static("secret-value"))],
            ..DialerConfig::default()
        };
        assert!(!format!("{config:?}").contains("secret-value"));
    }
}
