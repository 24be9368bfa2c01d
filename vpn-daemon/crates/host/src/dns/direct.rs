//! Mode `direct`: resolv.conf names only our server (`dns-and-os.md` 2.6).
//!
//! The only mode that leaves the machine without names after a crash. Hence: the original is on
//! disk before the file is touched, [`restore`] needs nothing but the file system, and what
//! somebody else wrote in the meantime is never overwritten by it.
//!
//! While the tunnel is up, [`Direct::check`] compares the file with ours. Another program's version
//! becomes the new original (with the servers of the network we are in now) and ours is written
//! again, at most three times a minute; then we stop fighting for five minutes.

use std::collections::VecDeque;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;

use super::resolv_conf::ResolvConf;
use super::{Backend, DnsConfig, Error, Mode, State};
use crate::Paths;
use store::Store;

mod store;

/// How often ours is written again within [`FIGHT_WINDOW`] before we give up (2.6).
const MAX_REWRITES: usize = 3;
const FIGHT_WINDOW: Duration = Duration::from_secs(60);
/// After giving up.
const RETRY_AFTER: Duration = Duration::from_secs(300);

/// Edits resolv.conf.
#[derive(Debug)]
pub struct Direct {
    paths: Paths,
    config: Option<DnsConfig>,
    upstreams: Vec<SocketAddr>,
    state: State,
    /// When ours was written again, the last [`MAX_REWRITES`] times.
    rewrites: VecDeque<Instant>,
    gave_up: Option<Instant>,
}

/// What [`restore`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restored {
    /// The file, link or absence of before is back.
    Original,
    /// Our file had been edited by hand: the edits stay, our server is out.
    Edited,
    /// The backup was lost; the original that our file carried along is back.
    Carried,
    /// Somebody has replaced our file; theirs was left alone.
    LeftAlone,
}

impl std::fmt::Display for Restored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Restored::Original => "restored resolv.conf",
            Restored::Edited => "took our server out of resolv.conf, which had been edited, and kept the edits",
            Restored::Carried => "restored resolv.conf from its own comments, since the backup was lost",
            Restored::LeftAlone => "left resolv.conf alone: another program has replaced ours",
        })
    }
}

impl Direct {
    pub fn new(paths: &Paths) -> Self {
        Direct {
            paths: paths.clone(),
            config: None,
            upstreams: Vec::new(),
            state: State::Off,
            rewrites: VecDeque::new(),
            gave_up: None,
        }
    }

    fn install(&mut self, config: &DnsConfig) -> Result<(), Error> {
        let original = Store::lock(&self.paths)?.install(config)?;
        self.upstreams = servers_of(&original, config);
        if self.upstreams.is_empty() {
            tracing::warn!("resolv.conf named no server that we could forward to: only workspace names will resolve");
        }
        self.config = Some(config.clone());
        self.state = State::Applied;
        Ok(())
    }

    fn check_at(&mut self, now: Instant) -> Result<State, Error> {
        let Some(config) = self.config.clone() else {
            return Ok(State::Off);
        };
        match self.gave_up {
            Some(since) if now.duration_since(since) < RETRY_AFTER => return Ok(self.state),
            Some(_) => {
                self.gave_up = None;
                self.rewrites.clear();
            }
            None => {
                if Store::without_lock(&self.paths).is_installed()? {
                    self.state = State::Applied;
                    return Ok(self.state);
                }
            }
        }
        while self.rewrites.front().is_some_and(|at| now.duration_since(*at) > FIGHT_WINDOW) {
            self.rewrites.pop_front();
        }
        if self.rewrites.len() >= MAX_REWRITES {
            tracing::warn!("another program keeps replacing resolv.conf: workspace names do not resolve for now");
            // Theirs stays, and there is nothing left for us to restore.
            Store::lock(&self.paths)?.restore()?;
            self.gave_up = Some(now);
            self.state = State::Overwritten;
            return Ok(self.state);
        }
        self.rewrites.push_back(now);
        tracing::info!("another program replaced resolv.conf: taking its servers and writing ours again");
        self.install(&config)?;
        self.state = State::Repaired;
        Ok(self.state)
    }
}

/// The servers the machine has now: where [`Direct`] will want everything else forwarded to.
pub fn current_servers(paths: &Paths, config: &DnsConfig) -> Vec<SocketAddr> {
    // A file that cannot be read is an error for the one who replaces it.
    servers_of(&std::fs::read(&paths.resolv_conf).unwrap_or_default(), config)
}

/// Puts the original back if a daemon, dead or alive, has replaced it; `None` when there was
/// nothing to do. Synchronous, and repeating it is harmless.
pub fn restore(paths: &Paths) -> Result<Option<Restored>, Error> {
    // On a machine that never used this mode nothing is created either.
    if !paths.dns_dir().exists() && !Store::without_lock(paths).is_marked() {
        return Ok(None);
    }
    Store::lock(paths)?.restore()
}

/// The same for a process about to abort: the thread that failed may be the one that holds the
/// lock, so none is taken.
pub fn restore_while_aborting(paths: &Paths) -> Result<Option<Restored>, Error> {
    Store::without_lock(paths).restore()
}

fn servers_of(original: &[u8], config: &DnsConfig) -> Vec<SocketAddr> {
    ResolvConf::parse(original).base_servers(config.server, config.tunnel_prefix, zone_index, has_listener)
}

/// The zone of a link-local server is an interface name or number.
fn zone_index(zone: &str) -> Option<u32> {
    #[cfg(target_os = "linux")]
    if let Some(index) = crate::tun::interface_index(zone) {
        return Some(index);
    }
    zone.parse().ok()
}

/// Whether something listens on a local UDP port. On loopback the refusal of a datagram is there
/// as soon as it is sent. What is sent is a DNS header that asks nothing.
fn has_listener(address: SocketAddr) -> bool {
    let local: SocketAddr = if address.is_ipv4() {
        (std::net::Ipv4Addr::LOCALHOST, 0).into()
    } else {
        (std::net::Ipv6Addr::LOCALHOST, 0).into()
    };
    let probe = || -> std::io::Result<()> {
        let socket = UdpSocket::bind(local)?;
        socket.set_nonblocking(true)?;
        socket.connect(address)?;
        socket.send(&[0; 12])?;
        match socket.recv(&mut [0; 12]) {
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    };
    probe().is_ok()
}

// A few small files are written and synced; the calls are made in place, since a runtime with two
// workers serves them well enough and a `revert` must also work while it shuts down.
impl Backend for Direct {
    fn mode(&self) -> Mode {
        Mode::Direct
    }

    fn apply<'a>(&'a mut self, config: &'a DnsConfig) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async {
            self.rewrites.clear();
            self.gave_up = None;
            self.install(config)?;
            super::nscd::invalidate();
            Ok(())
        })
    }

    fn check(&mut self) -> BoxFuture<'_, Result<State, Error>> {
        Box::pin(async { self.check_at(Instant::now()) })
    }

    fn revert(&mut self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            let done = restore(&self.paths)?;
            if let Some(done) = done {
                tracing::debug!("{done}");
                super::nscd::invalidate();
            }
            self.config = None;
            self.upstreams.clear();
            self.state = State::Off;
            Ok(())
        })
    }

    fn state(&self) -> State {
        self.state
    }

    fn upstreams(&self) -> Vec<SocketAddr> {
        self.upstreams.clone()
    }
}

/// Whether this process could replace resolv.conf, without changing anything: for the choice.
pub(super) fn is_possible(paths: &Paths) -> Result<(), Error> {
    Store::without_lock(paths).is_replaceable()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::Prefix;

    fn config() -> DnsConfig {
        DnsConfig {
            interface_index: 7,
            server: "fd60:627a:a42b::53".parse().unwrap(),
            suffixes: vec!["coder".to_owned()],
            reverse_zone: String::new(),
            search: false,
            tunnel_prefix: Prefix::new("fd60:627a:a42b::".parse().unwrap(), 48),
        }
    }

    fn paths(dir: &tempfile::TempDir) -> Paths {
        let mut paths = Paths::new(dir.path().join("state"), dir.path().join("run"));
        paths.resolv_conf = dir.path().join("etc/resolv.conf");
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        paths
    }

    // D-03: adopt, re-apply, bounded; then theirs stays.
    #[test]
    fn we_adopt_what_others_write_and_stop_fighting_after_three_rounds() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(&dir);
        std::fs::write(&paths.resolv_conf, "nameserver 192.0.2.1\n").unwrap();
        let mut direct = Direct::new(&paths);
        direct.install(&config()).unwrap();
        assert_eq!(direct.upstreams(), ["192.0.2.1:53".parse().unwrap()]);
        let start = Instant::now();
        assert_eq!(direct.check_at(start).unwrap(), State::Applied);

        for round in 1..=3_u32 {
            let theirs = format!("nameserver 192.0.2.1{round}\n");
            std::fs::write(&paths.resolv_conf, theirs).unwrap();
            let now = start + Duration::from_secs(round.into());
            assert_eq!(direct.check_at(now).unwrap(), State::Repaired);
            assert_eq!(direct.upstreams(), [format!("192.0.2.1{round}:53").parse().unwrap()]);
            assert_eq!(direct.check_at(now).unwrap(), State::Applied);
        }
        std::fs::write(&paths.resolv_conf, "nameserver 192.0.2.99\n").unwrap();
        let now = start + Duration::from_secs(5);
        assert_eq!(direct.check_at(now).unwrap(), State::Overwritten);
        assert_eq!(std::fs::read(&paths.resolv_conf).unwrap(), b"nameserver 192.0.2.99\n");
        assert_eq!(direct.check_at(now).unwrap(), State::Overwritten);

        // Five minutes later we try again, and a stop leaves their file.
        let now = now + RETRY_AFTER;
        assert_eq!(direct.check_at(now).unwrap(), State::Repaired);
        assert_eq!(restore(&paths).unwrap(), Some(Restored::Original));
        assert_eq!(std::fs::read(&paths.resolv_conf).unwrap(), b"nameserver 192.0.2.99\n");
    }

    // D-03: one rewrite per connection event is the normal case and never counts as a fight.
    #[test]
    fn rare_rewrites_go_on_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(&dir);
        std::fs::write(&paths.resolv_conf, "nameserver 192.0.2.1\n").unwrap();
        let mut direct = Direct::new(&paths);
        direct.install(&config()).unwrap();
        let start = Instant::now();
        for round in 1..10 {
            std::fs::write(&paths.resolv_conf, "nameserver 192.0.2.2\n").unwrap();
            let now = start + Duration::from_secs(round * 31);
            assert_eq!(direct.check_at(now).unwrap(), State::Repaired, "{round}");
        }
    }

    #[test]
    fn a_machine_that_never_used_this_mode_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(&dir);
        assert_eq!(restore(&paths).unwrap(), None);
        assert!(!paths.state_dir.exists());
    }

    #[test]
    fn local_servers_are_asked_whether_they_are_there() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        assert!(has_listener(address));
        drop(server);
        assert!(!has_listener(address));
    }
}
