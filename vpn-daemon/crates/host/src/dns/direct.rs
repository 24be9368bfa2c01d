//! Mode `direct`: resolv.conf names only our server (`dns-and-os.md` 2.6).

use std::net::SocketAddr;

use futures_util::future::BoxFuture;

use super::{Backend, DnsConfig, Error, Mode, State};
use crate::Paths;

/// Edits resolv.conf.
#[derive(Debug)]
pub struct Direct {
    paths: Paths,
}

/// What [`restore`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restored {
    Original,
    /// Somebody replaced the file; it was left alone.
    LeftAlone,
}

impl std::fmt::Display for Restored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("resolv.conf")
    }
}

impl Direct {
    pub fn new(paths: &Paths) -> Self {
        Direct { paths: paths.clone() }
    }
}

/// The servers the machine had before, from the saved original.
pub fn upstreams(_paths: &Paths, _config: &DnsConfig) -> Vec<SocketAddr> {
    Vec::new()
}

/// Puts the original back if a daemon, dead or alive, has replaced it. Synchronous.
pub fn restore(_paths: &Paths) -> Result<Option<Restored>, Error> {
    Ok(None)
}

impl Backend for Direct {
    fn mode(&self) -> Mode {
        Mode::Direct
    }

    fn apply<'a>(&'a mut self, _config: &'a DnsConfig) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Unsupported(Mode::Direct)) })
    }

    fn check(&mut self) -> BoxFuture<'_, Result<State, Error>> {
        Box::pin(async { Ok(State::Off) })
    }

    fn revert(&mut self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async { restore(&self.paths).map(|_| ()) })
    }

    fn state(&self) -> State {
        State::Off
    }

    fn upstreams(&self) -> Vec<SocketAddr> {
        Vec::new()
    }
}
