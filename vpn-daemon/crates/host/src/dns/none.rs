//! Mode `none`: the zone is served inside the tunnel, the system's resolver is left alone.

use std::net::SocketAddr;

use futures_util::future::BoxFuture;

use super::{Backend, DnsConfig, Error, Mode, State};

/// Changes nothing.
#[derive(Debug, Default)]
pub struct NoChanges;

impl Backend for NoChanges {
    fn mode(&self) -> Mode {
        Mode::None
    }

    fn apply<'a>(&'a mut self, _config: &'a DnsConfig) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
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
