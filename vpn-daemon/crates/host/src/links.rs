//! Whether this machine's networks have changed so that what was learnt through them is void.
//!
//! The kernel tells that something about links, addresses or routes changed; what that means is decided by looking, after
//! a pause in which a burst of changes ends (`dns-and-os.md` 6.2): another way out or other addresses are *major*,
//! anything else *minor*, no way out at all is *down*. A machine that slept has perhaps been carried elsewhere: *major*,
//! too, found by comparing clocks, since neither bus nor login manager need be there (6.1). No other daemon is asked.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant, SystemTime};

use crate::addresses;
use crate::routes::{Error, Watch};

/// Changes come in bursts.
const DEBOUNCE: Duration = Duration::from_millis(300);
/// After a change minor ones are kept back for so long: where containers come and go there is one every second.
const QUIET: Duration = Duration::from_secs(20);
/// How often clocks are compared.
const CLOCK_TICK: Duration = Duration::from_secs(5);
/// More than this of the time since the last look was slept away.
const SLEPT: Duration = Duration::from_secs(5);
/// The wall clock ran ahead by more than this: on systems whose other clocks do not show sleep (Go: `netmon`).
const JUMPED: Duration = Duration::from_millis(22_500);

/// What happened to the networks of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Another way out, other addresses, or a sleep.
    Major,
    Minor,
    /// There is no way out any more.
    Down,
    /// There is one again.
    Up,
}

/// The ways out and the addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Networks {
    /// The address that packets to the Internet leave from, of each family.
    v4: Option<IpAddr>,
    v6: Option<IpAddr>,
    /// The lines of the routing table that say where default routes lead.
    defaults: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
}

impl Networks {
    /// Addresses that cannot be listed at the moment are those that were `known`.
    async fn now(known: &BTreeSet<IpAddr>) -> Networks {
        let listed = match addresses::of_this_machine().await {
            Ok(listed) => listed.into_iter().filter(|address| is_of_a_network(*address)).collect(),
            Err(_) => known.clone(),
        };
        Networks {
            v4: source(SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 9))),
            v6: source(SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9))),
            defaults: default_routes(),
            addresses: listed,
        }
    }

    /// A network without a way out may still have the deployment on it.
    fn is_up(&self) -> bool {
        self.v4.is_some() || self.v6.is_some() || !self.addresses.is_empty()
    }
}

/// The addresses of our own devices and of agents: they are there as long as we run, and no way out.
const OURS: [u16; 3] = [0xfd60, 0x627a, 0xa42b];

/// Addresses that come and go with links that lead nowhere (those of containers) are none.
fn is_of_a_network(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.segments().starts_with(&OURS),
    }
}

/// What the kernel would send from; nothing is sent.
fn source(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Interface and gateway of the default routes of both families, as the kernel writes them. Empty where it does not.
fn default_routes() -> BTreeSet<String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let mut found = BTreeSet::new();
    for line in read("/proc/net/route").lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // Interface, destination, gateway, flags, two counters, metric, mask: half a network is no default.
        if let [interface, "00000000", gateway, _, _, _, _, "00000000", ..] = fields[..] {
            found.insert(format!("{interface} {gateway}"));
        }
    }
    for line in read("/proc/net/ipv6_route").lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // Destination, its length, source, its length, gateway, metric, three counters, interface.
        if let [destination, "00", _, _, gateway, .., interface] = fields[..]
            && destination.bytes().all(|digit| digit == b'0')
            && interface != "lo"
        {
            found.insert(format!("{interface} {gateway}"));
        }
    }
    found
}

/// The IPv4 gateway of the default route, and our address towards it.
pub fn gateway() -> Option<(Ipv4Addr, Ipv4Addr)> {
    let table = std::fs::read_to_string("/proc/net/route").ok()?;
    let gateway = table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "00000000", gateway, _, _, _, _, "00000000", ..] = fields[..] else { return None };
        // In the machine's byte order.
        let address = Ipv4Addr::from(u32::from_str_radix(gateway, 16).ok()?.to_ne_bytes());
        (!address.is_unspecified()).then_some(address)
    })?;
    match source(SocketAddr::from((gateway, 9)))? {
        IpAddr::V4(own) => Some((gateway, own)),
        IpAddr::V6(_) => None,
    }
}

/// Clocks that differ while a machine sleeps.
#[derive(Debug, Clone, Copy)]
struct Clocks {
    /// Stands still.
    monotonic: Duration,
    /// Goes on.
    boot: Duration,
    wall: SystemTime,
}

impl Clocks {
    #[cfg(target_os = "linux")]
    fn now() -> Clocks {
        let read = |clock| {
            let time = rustix::time::clock_gettime(clock);
            Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
        };
        use rustix::time::ClockId;
        Clocks { monotonic: read(ClockId::Monotonic), boot: read(ClockId::Boottime), wall: SystemTime::now() }
    }

    #[cfg(not(target_os = "linux"))]
    fn now() -> Clocks {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        let since = START.get_or_init(Instant::now).elapsed();
        Clocks { monotonic: since, boot: since, wall: SystemTime::now() }
    }

    fn slept_until(self, now: Clocks) -> bool {
        let passed = now.monotonic.saturating_sub(self.monotonic);
        let asleep = now.boot.saturating_sub(self.boot).saturating_sub(passed);
        let wall = now.wall.duration_since(self.wall).unwrap_or_default();
        asleep > SLEPT || wall.saturating_sub(passed) > JUMPED
    }
}

/// Watches the networks of this machine.
#[derive(Debug)]
pub struct Monitor {
    watch: Watch,
    networks: Networks,
    clocks: Clocks,
    /// When clocks are compared next.
    tick: Instant,
    /// Until when the burst lasts of which something was heard.
    burst: Option<Instant>,
    /// A sleep that nobody was told of yet.
    slept: bool,
    /// Minor changes are told again from then on.
    quiet_until: Instant,
}

impl Monitor {
    /// Must be called within a runtime.
    pub async fn new() -> Result<Monitor, Error> {
        let watch = Watch::networks()?;
        let networks = Networks::now(&BTreeSet::new()).await;
        Ok(Monitor {
            watch,
            networks,
            clocks: Clocks::now(),
            tick: Instant::now() + CLOCK_TICK,
            burst: None,
            slept: false,
            quiet_until: Instant::now(),
        })
    }

    /// Resolves when something has happened. May be dropped while it waits: what was heard is kept for the next call.
    pub async fn changed(&mut self) -> Change {
        loop {
            match self.burst {
                // A sleep does not wait for a burst to end, nor does a burst move the tick.
                Some(end) => tokio::time::sleep_until(end.min(self.tick).into()).await,
                None => tokio::select! {
                    () = self.watch.changed() => {
                        self.burst = Some(Instant::now() + DEBOUNCE);
                        continue;
                    }
                    () = tokio::time::sleep_until(self.tick.into()) => {}
                },
            }
            let heard = self.burst.is_some();
            if heard {
                self.watch.clear();
            }
            let clocks = Clocks::now();
            self.slept |= std::mem::replace(&mut self.clocks, clocks).slept_until(clocks);
            // Looked at with every tick, too: a change whose message was lost must not stay unseen.
            let networks = Networks::now(&self.networks.addresses).await;
            // From here to the return nothing waits, so that what is taken is told.
            self.burst = None;
            self.tick = Instant::now() + CLOCK_TICK;
            let slept = std::mem::take(&mut self.slept);
            let before = std::mem::replace(&mut self.networks, networks);
            let now = Instant::now();
            let change = judge(&before, &self.networks, slept, heard)
                .filter(|change| *change != Change::Minor || now >= self.quiet_until);
            if let Some(change) = change {
                self.quiet_until = now + QUIET;
                tracing::debug!(?change, slept, "networks");
                return change;
            }
        }
    }
}

fn judge(before: &Networks, now: &Networks, slept: bool, heard: bool) -> Option<Change> {
    match (before.is_up(), now.is_up()) {
        (true, false) => Some(Change::Down),
        (false, true) => Some(Change::Up),
        (false, false) => None,
        (true, true) if slept || before != now => Some(Change::Major),
        (true, true) => heard.then_some(Change::Minor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clocks(monotonic: u64, boot: u64, wall: u64) -> Clocks {
        let secs = Duration::from_secs;
        Clocks { monotonic: secs(monotonic), boot: secs(boot), wall: SystemTime::UNIX_EPOCH + secs(wall) }
    }

    #[test]
    fn t38_sleep_is_seen_by_clocks_and_ordinary_delays_are_none() {
        let start = clocks(100, 100, 1_000_000);
        assert!(!start.slept_until(clocks(105, 105, 1_000_005)));
        assert!(!start.slept_until(clocks(160, 160, 1_000_060)), "a busy machine is late, not asleep");
        assert!(start.slept_until(clocks(105, 3705, 1_003_605)));
        assert!(start.slept_until(clocks(115, 115, 1_000_060)), "clocks that do not show it");
        assert!(!start.slept_until(clocks(105, 105, 900_000)), "the wall clock was put back");
        assert!(!start.slept_until(clocks(105, 109, 1_000_010)));
    }

    #[test]
    fn what_a_change_means() {
        let at = |v4: Option<[u8; 4]>, addresses: &[[u8; 4]]| Networks {
            v4: v4.map(IpAddr::from),
            v6: None,
            defaults: BTreeSet::new(),
            addresses: addresses.iter().map(|address| IpAddr::from(*address)).collect(),
        };
        let home = at(Some([10, 0, 0, 1]), &[[10, 0, 0, 1]]);
        let cafe = at(Some([192, 168, 1, 7]), &[[192, 168, 1, 7]]);
        let none = Networks::default();
        assert_eq!(judge(&home, &cafe, false, true), Some(Change::Major));
        assert_eq!(judge(&home, &home, true, false), Some(Change::Major));
        assert_eq!(judge(&home, &home, false, true), Some(Change::Minor));
        assert_eq!(judge(&home, &home, false, false), None);
        assert_eq!(judge(&home, &none, false, true), Some(Change::Down));
        assert_eq!(judge(&none, &home, false, false), Some(Change::Up));
        assert_eq!(judge(&none, &none, true, true), None);
    }

    #[tokio::test]
    async fn t38_a_sleep_is_told_though_the_first_wait_was_dropped() {
        use std::future::Future as _;
        let mut monitor = Monitor::new().await.unwrap();
        monitor.clocks.boot = monitor.clocks.boot.saturating_sub(Duration::from_secs(60));
        monitor.tick = Instant::now() - Duration::from_millis(10);
        {
            let mut waiting = std::pin::pin!(monitor.changed());
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(waiting.as_mut().poll(&mut context).is_pending());
        }
        let told = async { while monitor.changed().await != Change::Major {} };
        tokio::time::timeout(Duration::from_secs(7), told).await.expect("the sleep is told");
    }
}
