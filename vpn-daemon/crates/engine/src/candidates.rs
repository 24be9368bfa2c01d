//! The UDP addresses under which one peer might be reached, and what is known of each.
//!
//! They come from three sources: the peer's node, its call-me-maybe, and the source of a ping that it sealed
//! (`data-plane.md` 5.7). All of them pass the same filter, so that nobody can have us send to local services, multicast
//! or into our own tunnel (T-06). Their number is bounded (T-05): one message could name thousands, each of which would
//! be sent 1,312 bytes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use codervpn_wire::node;

/// Per peer (T-05; Go prunes above the same number).
pub(crate) const MAX_CANDIDATES: usize = 100;
/// Known only from pings: one captured ping, repeated from many sources, must not take the places of the peer's own words.
const MAX_REFLEXIVE: usize = 32;
/// Taken from one call-me-maybe (T-05).
const MAX_CALLED: usize = 32;
/// A candidate that is known only because it pinged us is forgotten this long after its last ping
/// (Go: `sessionActiveTimeout`).
const REFLEXIVE_LIFE: Duration = Duration::from_secs(45);

pub(crate) struct Candidate {
    pub(crate) address: SocketAddr,
    pub(crate) from_node: bool,
    /// Named by the peer's last call-me-maybe.
    called: bool,
    /// When it last pinged us, if that is how we know it.
    pinged_us: Option<Instant>,
    pub(crate) last_ping: Option<Instant>,
    /// When we last pinged it because it had pinged us.
    pub(crate) pinged_back: Option<Instant>,
    /// A full-size datagram did not fit.
    pub(crate) too_small: bool,
    /// Its pongs flow and data does not (T-11): not to be used before this.
    pub(crate) shunned_until: Option<Instant>,
}

impl Candidate {
    pub(crate) fn is_shunned(&self, now: Instant) -> bool {
        self.shunned_until.is_some_and(|until| until > now)
    }
}

#[derive(Default)]
pub(crate) struct Candidates {
    list: Vec<Candidate>,
}

impl Candidates {
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Candidate> {
        self.list.iter_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Candidate> {
        self.list.iter()
    }

    pub(crate) fn find(&mut self, address: SocketAddr) -> Option<&mut Candidate> {
        self.list.iter_mut().find(|candidate| candidate.address == address)
    }

    fn add(&mut self, address: SocketAddr) -> Option<&mut Candidate> {
        let known = self.list.iter().position(|candidate| candidate.address == address);
        if known.is_none() && self.list.len() >= MAX_CANDIDATES {
            return None;
        }
        let at = known.unwrap_or_else(|| {
            self.list.push(Candidate {
                address,
                from_node: false,
                called: false,
                pinged_us: None,
                last_ping: None,
                pinged_back: None,
                too_small: false,
                shunned_until: None,
            });
            self.list.len() - 1
        });
        self.list.get_mut(at)
    }

    /// The endpoints of the peer's newest node. True if one of them is new.
    pub(crate) fn set_node(&mut self, endpoints: &[SocketAddr], allow_loopback: bool) -> bool {
        for candidate in &mut self.list {
            candidate.from_node = false;
        }
        let mut news = false;
        for endpoint in endpoints.iter().filter(|endpoint| node::is_usable_endpoint(endpoint, allow_loopback)) {
            let before = self.list.len();
            if let Some(candidate) = self.add(*endpoint) {
                candidate.from_node = true;
            }
            news |= self.list.len() > before;
        }
        news
    }

    /// The endpoints of a call-me-maybe: what the one before named and this one does not is forgotten, and everything may
    /// be pinged again at once, since the sender has just opened its firewall (5.6).
    pub(crate) fn set_called(&mut self, endpoints: impl Iterator<Item = SocketAddr>, allow_loopback: bool) {
        let before: Vec<SocketAddr> = self.list.iter().filter(|c| c.called).map(|c| c.address).collect();
        for candidate in &mut self.list {
            candidate.called = false;
            candidate.last_ping = None;
        }
        for endpoint in endpoints.take(MAX_CALLED).filter(|e| node::is_usable_endpoint(e, allow_loopback)) {
            if let Some(candidate) = self.add(endpoint) {
                candidate.called = true;
            }
        }
        self.list.retain(|candidate| candidate.called || !before.contains(&candidate.address));
    }

    /// A ping that the peer sealed came from here. `None`: not a usable address, or there are too many.
    pub(crate) fn pinged_us(&mut self, from: SocketAddr, allow_loopback: bool, now: Instant) -> Option<&mut Candidate> {
        if !node::is_usable_endpoint(&from, allow_loopback) {
            return None;
        }
        let is_known = self.list.iter().any(|candidate| candidate.address == from);
        let reflexive = self.list.iter().filter(|c| c.pinged_us.is_some() && !c.from_node && !c.called).count();
        if !is_known && reflexive >= MAX_REFLEXIVE {
            return None;
        }
        let candidate = self.add(from)?;
        candidate.pinged_us = Some(now);
        Some(candidate)
    }

    /// Forgets what nobody stands for any more (5.5), except `keep`; `gone` is told of each.
    pub(crate) fn prune(&mut self, keep: Option<SocketAddr>, now: Instant, mut gone: impl FnMut(SocketAddr)) {
        self.list.retain(|candidate| {
            let fresh = candidate.pinged_us.is_some_and(|at| now.saturating_duration_since(at) < REFLEXIVE_LIFE);
            let stays = candidate.from_node || candidate.called || fresh || Some(candidate.address) == keep;
            if !stays {
                gone(candidate.address);
            }
            stays
        });
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn address(i: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], i))
    }

    #[test]
    fn t05_one_call_me_maybe_adds_at_most_32_and_all_sources_together_100() {
        let now = Instant::now();
        let mut candidates = Candidates::default();
        candidates.set_called((1..=3600).map(address), false);
        assert_eq!(candidates.len(), MAX_CALLED);
        let many: Vec<SocketAddr> = (5000..5064).map(address).collect();
        assert!(candidates.set_node(&many, false));
        for i in 0..50 {
            candidates.pinged_us(address(6000 + i), false, now);
        }
        assert_eq!(candidates.len(), MAX_CANDIDATES, "32 called, 64 of the node, and pings for the rest");
        let mut pinged = Candidates::default();
        for i in 0..50 {
            pinged.pinged_us(address(6000 + i), false, now);
        }
        assert_eq!(pinged.len(), MAX_REFLEXIVE);
    }

    #[test]
    fn t06_every_source_is_filtered() {
        let now = Instant::now();
        let forbidden = [
            "0.0.0.0:1",
            "224.0.0.1:1",
            "255.255.255.255:1",
            "127.0.0.1:1",
            "127.3.3.40:999",
            "192.0.2.1:0",
            "[::]:1",
            "[fe80::1]:1",
            "[ff02::1]:1",
            "[fd60:627a:a42b::1]:1",
            "[fd7a:115c:a1e0::1]:1",
        ];
        let forbidden = forbidden.map(|text| text.parse().unwrap());
        let mut candidates = Candidates::default();
        assert!(!candidates.set_node(&forbidden, false));
        candidates.set_called(forbidden.into_iter(), false);
        assert!(forbidden.into_iter().all(|from| candidates.pinged_us(from, false, now).is_none()));
        assert!(candidates.is_empty());
    }

    #[test]
    fn a_later_call_me_maybe_drops_what_the_earlier_named_and_a_node_what_it_lists_no_more() {
        let now = Instant::now();
        let mut candidates = Candidates::default();
        candidates.set_node(&[address(1), address(2)], false);
        candidates.set_called([address(3), address(4), address(1)].into_iter(), false);
        candidates.set_called([address(4)].into_iter(), false);
        let addresses = |candidates: &Candidates| candidates.iter().map(|c| c.address.port()).collect::<Vec<_>>();
        assert_eq!(addresses(&candidates), [2, 4], "1 was called too, so it goes as Go lets it go");
        candidates.set_node(&[address(5)], false);
        let mut gone = Vec::new();
        candidates.prune(None, now, |address| gone.push(address.port()));
        assert_eq!((addresses(&candidates), gone), (vec![4, 5], vec![2]));
        candidates.pinged_us(address(9), false, now);
        candidates.prune(None, now + REFLEXIVE_LIFE, |_| {});
        assert_eq!(addresses(&candidates), [4, 5]);
    }
}
