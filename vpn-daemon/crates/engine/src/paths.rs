//! Which way packets of one peer take: directly while that is proven, else directly and by relay, else by relay alone.
//!
//! Pure: told of pongs, sends and arrivals, asked for the way. The rules are upstream's (`data-plane.md` 5), so that
//! agents see what they expect, with four improvements:
//!
//! * an address that is no longer trusted never keeps another that answers from being used (T-10);
//! * *doubt*: packets went out and nothing authentic came back for a moment, or full-size datagrams went out and no
//!   full-size pong came for a second. Pings follow at once; if none is answered, trust ends after about a second instead
//!   of up to 6.5 s, and packets take the relay too. A peer that merely has nothing to say answers the ping, so this costs
//!   one round of pings and changes nothing (T-12, T-13);
//! * an address whose pongs flow while data does not is not used for 30 s (T-11);
//! * an address that full-size datagrams do not reach is left at once (T-12).

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// A pong proves an address for this long (Go: `trustUDPAddrDuration`).
pub(crate) const TRUST: Duration = Duration::from_millis(6500);
/// Go: `heartbeatInterval`.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(3);
/// Go: `upgradeInterval`.
const UPGRADE: Duration = Duration::from_secs(60);
/// At or below this nothing better is looked for (Go: `goodEnoughLatency`).
const GOOD_ENOUGH: Duration = Duration::from_millis(5);
/// Sent and not heard for this long: doubt begins. Longer than most answers take, short enough that what follows ends
/// within the second that a person waits without noticing.
const SILENCE: Duration = Duration::from_millis(350);
/// Full-size datagrams sent and no full-size pong for this long: doubt begins.
const UNPROVEN: Duration = Duration::from_secs(1);
/// Between the pings of one doubt.
const DOUBT_PING: Duration = Duration::from_millis(120);
/// Pings of one doubt. With one loss in five a path that works answers none of them once in 160 doubts.
const DOUBT_PINGS: u32 = 4;
/// After the last ping its pong is waited for at least this long.
const LAST_WAIT: Duration = Duration::from_millis(250);
/// While other traffic of the peer arrives the path is alive and perhaps slow: its pongs may queue behind data.
const LAST_WAIT_ALIVE: Duration = Duration::from_millis(1500);
/// Data that is not answered while pongs are (T-11).
const ONLY_PONGS: Duration = Duration::from_secs(15);
pub(crate) const SHUN: Duration = Duration::from_secs(30);
/// From this size a datagram proves nothing about small ones and the other way round.
const LARGE: usize = 1000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Best {
    pub(crate) address: SocketAddr,
    pub(crate) latency: Duration,
    pub(crate) at: Instant,
}

/// A look whether the path still carries anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Doubt {
    next: Instant,
    pings: u32,
    /// Something else arrives from the peer: only the size is in doubt.
    alive: bool,
}

/// What a doubt wants done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Check {
    Nothing,
    /// Ping the address in use.
    Ping(SocketAddr),
    /// None was answered: trust is over.
    Failed,
}

#[derive(Default)]
pub(crate) struct Paths {
    best: Option<Best>,
    trust_until: Option<Instant>,
    /// First datagram to `best` since anything authentic came from there.
    unanswered_since: Option<Instant>,
    /// First large one since a pong came from there.
    unproven_since: Option<Instant>,
    /// First data to `best` since WireGuard was heard from the peer at all (T-11).
    data_unheard_since: Option<Instant>,
    doubt: Option<Doubt>,
    /// When to look whether there is reason to doubt; one entry in the table of deadlines serves many packets.
    look_at: Option<Instant>,
}

impl Paths {
    pub(crate) fn best(&self) -> Option<Best> {
        self.best
    }

    /// The address that packets take alone.
    #[inline]
    pub(crate) fn trusted(&self, now: Instant) -> Option<SocketAddr> {
        let best = self.best?;
        self.trust_until.is_some_and(|until| now <= until).then_some(best.address)
    }

    pub(crate) fn is_doubted(&self) -> bool {
        self.doubt.is_some() || (self.best.is_some() && self.trust_until.is_none())
    }

    pub(crate) fn trust_until(&self) -> Option<Instant> {
        self.trust_until
    }

    /// A pong came from `address`. True if the way of packets changed.
    pub(crate) fn pong(&mut self, address: SocketAddr, latency: Duration, now: Instant) -> bool {
        let trusted = self.trusted(now);
        // T-10: what is not trusted has no latency to compare with.
        let present = self.best.filter(|_| trusted.is_some());
        if better((address, latency), present.map(|best| (best.address, best.latency))) {
            if self.best.is_none_or(|best| best.address != address) {
                self.forget_doubt();
            }
            self.best = Some(Best { address, latency, at: now });
        }
        let Some(best) = self.best.as_mut().filter(|best| best.address == address) else { return false };
        best.latency = latency;
        best.at = now;
        self.trust_until = Some(now + TRUST);
        self.doubt = None;
        self.unanswered_since = None;
        self.unproven_since = None;
        trusted != Some(address)
    }

    /// WireGuard from the peer opened; `from`: the address if it came directly.
    #[inline]
    pub(crate) fn heard(&mut self, from: Option<SocketAddr>) {
        self.data_unheard_since = None;
        if from.is_some() && from == self.best.map(|best| best.address) {
            self.unanswered_since = None;
            if let Some(doubt) = &mut self.doubt {
                doubt.alive = true;
            }
        }
    }

    /// A datagram was sent to the trusted address. True if `look_at` came to be set and has to be scheduled.
    #[inline]
    pub(crate) fn sent(&mut self, size: usize, now: Instant) -> bool {
        self.unanswered_since.get_or_insert(now);
        self.data_unheard_since.get_or_insert(now);
        if size > LARGE {
            self.unproven_since.get_or_insert(now);
        }
        if self.look_at.is_some() {
            return false;
        }
        self.look_at = Some(now + SILENCE);
        true
    }

    pub(crate) fn next_check(&self) -> Option<Instant> {
        [self.look_at, self.doubt.map(|doubt| doubt.next)].into_iter().flatten().min()
    }

    /// Looks whether the address in use still deserves its trust.
    pub(crate) fn check(&mut self, now: Instant) -> Check {
        let Some(address) = self.trusted(now) else {
            self.forget_doubt();
            return Check::Nothing;
        };
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            let silent = self.unanswered_since.map(|since| since + SILENCE);
            let unproven = self.unproven_since.map(|since| since + UNPROVEN);
            if self.doubt.is_none() {
                if silent.is_some_and(|at| at <= now) {
                    self.doubt = Some(Doubt { next: now, pings: 0, alive: false });
                } else if unproven.is_some_and(|at| at <= now) {
                    self.doubt = Some(Doubt { next: now, pings: 0, alive: true });
                } else {
                    self.look_at = [silent, unproven].into_iter().flatten().min();
                }
            }
        }
        let Some(best) = self.best else { return Check::Nothing };
        let Some(doubt) = self.doubt.as_mut().filter(|doubt| doubt.next <= now) else { return Check::Nothing };
        if doubt.pings >= DOUBT_PINGS {
            self.distrust();
            return Check::Failed;
        }
        doubt.pings += 1;
        let last = doubt.pings == DOUBT_PINGS;
        let wait = if last && doubt.alive { LAST_WAIT_ALIVE } else { LAST_WAIT };
        doubt.next = now + if last { wait.max(best.latency * 2) } else { DOUBT_PING };
        Check::Ping(address)
    }

    /// Pongs flow, data does not: the caller has found that nothing came for long enough (T-11).
    pub(crate) fn carries_only_pongs(&self, now: Instant) -> bool {
        self.trusted(now).is_some()
            && self.data_unheard_since.is_some_and(|since| now.saturating_duration_since(since) >= ONLY_PONGS)
    }

    /// The address stays the best known and is no longer used alone.
    pub(crate) fn distrust(&mut self) {
        self.trust_until = None;
        self.forget_doubt();
    }

    /// `address` is no candidate any more. True if it was in use.
    pub(crate) fn forget(&mut self, address: SocketAddr) -> bool {
        let was_best = self.best.is_some_and(|best| best.address == address);
        if was_best {
            self.best = None;
            self.distrust();
        }
        was_best
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether a heartbeat should look for other addresses (5.5).
    pub(crate) fn wants_discovery(&self, last_discovery: Option<Instant>, now: Instant) -> bool {
        let (Some(best), Some(last)) = (self.best, last_discovery) else { return true };
        self.trusted(now).is_none() || (best.latency > GOOD_ENOUGH && now.saturating_duration_since(last) >= UPGRADE)
    }

    fn forget_doubt(&mut self) {
        self.doubt = None;
        self.look_at = None;
        self.unanswered_since = None;
        self.unproven_since = None;
        self.data_unheard_since = None;
    }
}

type Measured = (SocketAddr, Duration);

/// Whether `a` should replace `b` (Go: `betterAddr`, with its integer arithmetic).
fn better(a: Measured, b: Option<Measured>) -> bool {
    let Some(b) = b else { return true };
    if a.0 == b.0 {
        return false;
    }
    let (mut points_a, mut points_b) = (0, 0);
    let (nanos_a, nanos_b) = (a.1.as_nanos(), b.1.as_nanos());
    let share = |fast: u128, slow: u128| (fast * 100).checked_div(slow).map_or(0, |share| 100 - share);
    if nanos_a > nanos_b {
        points_b += share(nanos_b, nanos_a);
    } else {
        points_a += share(nanos_a, nanos_b);
    }
    let place = |address: SocketAddr| match address.ip() {
        ip if ip.is_loopback() => 50,
        IpAddr::V4(v4) if v4.is_private() => 20,
        IpAddr::V6(v6) if v6.is_unique_local() => 20,
        _ => 0,
    };
    points_a += place(a.0);
    points_b += place(b.0);
    points_a += if a.0.is_ipv6() { 10 } else { 0 };
    points_b += if b.0.is_ipv6() { 10 } else { 0 };
    // One per cent is noise.
    if points_a <= 1 && points_b == 0 {
        return false;
    }
    points_a > points_b
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        format!("{text}:1").parse().or_else(|_| format!("[{text}]:1").parse()).unwrap()
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// The table of `data-plane.md` 5.4, row by row.
    #[test]
    fn the_better_address_is_upstreams() {
        let us = Duration::from_micros;
        let rows: [(&str, u64, &str, u64, bool, bool); 11] = [
            ("192.0.2.1", 10_000, "192.0.2.2", 10_000, false, false),
            ("192.0.2.1", 9900, "192.0.2.2", 10_000, false, false),
            ("192.0.2.1", 9800, "192.0.2.2", 10_000, true, false),
            ("10.0.0.1", 12_000, "192.0.2.1", 10_000, true, false),
            ("10.0.0.1", 13_000, "192.0.2.1", 10_000, false, true),
            ("2001:db8::1", 10_000, "192.0.2.1", 10_000, true, false),
            ("2001:db8::1", 11_000, "192.0.2.1", 10_000, false, false),
            ("2001:db8::1", 12_000, "192.0.2.1", 10_000, false, true),
            ("fd00::1", 10_000, "10.0.0.1", 10_000, true, false),
            ("10.0.0.1", 10_000, "2001:db8::1", 10_000, true, false),
            ("127.0.0.1", 2000, "10.0.0.1", 1500, true, false),
        ];
        for (a, a_us, b, b_us, ab, ba) in rows {
            let (a, b) = ((at(a), us(a_us)), (at(b), us(b_us)));
            assert_eq!((better(a, Some(b)), better(b, Some(a))), (ab, ba), "{a:?} {b:?}");
        }
        assert!(better((at("192.0.2.1"), ms(10)), None));
    }

    #[test]
    fn t10_an_address_that_is_not_trusted_does_not_block_a_slower_one() {
        let start = Instant::now();
        let mut paths = Paths::default();
        assert!(paths.pong(at("192.0.2.1"), ms(2), start));
        assert!(!paths.pong(at("192.0.2.2"), ms(15), start + ms(10)), "the faster one stays");
        let later = start + TRUST + ms(1);
        assert_eq!(paths.trusted(later), None);
        assert!(paths.pong(at("192.0.2.2"), ms(15), later));
        assert_eq!(paths.trusted(later), Some(at("192.0.2.2")));
    }

    /// Runs the clock in steps of 10 ms; `answers` says whether pings are answered.
    fn doubt(paths: &mut Paths, from: Instant, time: Duration, answers: bool) -> (u32, Option<Duration>) {
        let mut pings = 0;
        let mut now = from;
        while now < from + time {
            now += ms(10);
            if paths.next_check().is_none_or(|at| at > now) {
                continue;
            }
            match paths.check(now) {
                Check::Ping(address) => {
                    pings += 1;
                    if answers {
                        paths.pong(address, ms(5), now);
                    }
                }
                Check::Failed => return (pings, Some(now - from)),
                Check::Nothing => {}
            }
        }
        (pings, None)
    }

    #[test]
    fn t12_silence_after_sending_ends_trust_within_a_second_and_an_answered_ping_keeps_it() {
        let start = Instant::now();
        let mut paths = Paths::default();
        paths.pong(at("192.0.2.1"), ms(5), start);
        assert!(paths.sent(100, start));
        assert!(!paths.sent(100, start), "scheduled once");
        assert_eq!(doubt(&mut paths, start, ms(3000), true), (1, None));
        paths.sent(100, start + ms(3000));
        let (pings, failed) = doubt(&mut paths, start + ms(3000), ms(3000), false);
        assert_eq!(pings, DOUBT_PINGS);
        assert!(failed.unwrap() <= ms(1000), "{failed:?}");
        assert_eq!(paths.trusted(start + ms(4000)), None);
        assert!(paths.best().is_some(), "it is still tried beside the relay");
    }

    #[test]
    fn t13_small_answers_do_not_hide_that_large_datagrams_are_lost() {
        let start = Instant::now();
        let mut paths = Paths::default();
        let address = at("192.0.2.1");
        paths.pong(address, ms(5), start);
        let mut now = start;
        let mut failed = None;
        while now < start + ms(4000) && failed.is_none() {
            now += ms(10);
            paths.sent(1312, now);
            paths.heard(Some(address));
            if paths.next_check().is_some_and(|at| at <= now) && paths.check(now) == Check::Failed {
                failed = Some(now - start);
            }
        }
        assert!(failed.is_some_and(|after| after < ms(3500)), "{failed:?}");
    }

    #[test]
    fn t11_pongs_without_data_are_noticed() {
        let start = Instant::now();
        let mut paths = Paths::default();
        let address = at("192.0.2.1");
        for second in 0..16 {
            let now = start + ms(second * 1000);
            paths.pong(address, ms(5), now);
            paths.sent(100, now);
            assert_eq!(paths.carries_only_pongs(now), second == 15);
        }
        paths.heard(None);
        assert!(!paths.carries_only_pongs(start + ms(15_000)));
    }
}
