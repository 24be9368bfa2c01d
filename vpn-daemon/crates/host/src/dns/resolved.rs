//! Mode `resolved`: split DNS by systemd-resolved over D-Bus (`dns-and-os.md` 2.2).

use std::net::SocketAddr;

use futures_util::future::BoxFuture;

use super::{Backend, DnsConfig, Error, Mode, State};

/// Settings of one link in systemd-resolved.
#[derive(Debug, Default)]
pub struct Resolved {}

impl Resolved {
    /// On the system bus.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Backend for Resolved {
    fn mode(&self) -> Mode {
        Mode::Resolved
    }

    fn apply<'a>(&'a mut self, _config: &'a DnsConfig) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Unsupported(Mode::Resolved)) })
    }

    fn check(&mut self) -> BoxFuture<'_, Result<State, Error>> {
        Box::pin(async { Ok(State::Off) })
    }

    fn revert(&mut self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }

    fn state(&self) -> State {
        State::Off
    }

    fn upstreams(&self) -> Vec<SocketAddr> {
        Vec::new()
    }
}
