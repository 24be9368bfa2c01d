//! Decides whether a connection goes straight to its target or through a
//! proxy. Only the straight way exists so far; a configured proxy is refused
//! rather than ignored, since ignoring it would leak traffic around it.

use url::Url;

use crate::config::ConfigError;

#[derive(Debug)]
pub(crate) enum Route {
    Direct,
}

impl Route {
    pub(crate) fn new(proxy: Option<&Url>) -> Result<Route, ConfigError> {
        match proxy {
            None => Ok(Route::Direct),
            Some(_) => Err(ConfigError::Proxy {
                reason: "this version cannot use a proxy; remove the key to connect directly".into(),
            }),
        }
    }
}
