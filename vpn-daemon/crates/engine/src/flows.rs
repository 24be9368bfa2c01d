//! Which conversations we started: the memory of the packet filter.
//!
//! A fixed table of sets of eight entries. Only packets of this machine create an entry, so no agent can fill it; a full
//! set gives up what is expired first, then the least recently used entry that is not TCP, then the least recently used
//! of all. No entry is ever allocated, a lookup touches one set. A conversation whose entry was given up is remembered
//! again by the next packet we send.

use std::time::{Duration, Instant};

use codervpn_wire::ip::{TCP, UDP};

/// 1024 sets of 8: as many conversations as a desktop holds to its workspaces at once, 320 KiB when all are used.
const SETS: usize = 1024;
const WAYS: usize = 8;

/// A TCP connection may be silent for long (an idle shell); RFC 5382 asks for at least 124 minutes.
const TCP_LIFE: Duration = Duration::from_secs(24 * 60 * 60);
/// RFC 4787 recommends five minutes.
const UDP_LIFE: Duration = Duration::from_secs(5 * 60);
/// An echo reply comes at once or not at all.
const OTHER_LIFE: Duration = Duration::from_secs(60);

/// One conversation from our point of view. For ICMPv6 echo both ports are the identifier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flow {
    pub(crate) remote: u128,
    pub(crate) protocol: u8,
    pub(crate) local_port: u16,
    pub(crate) remote_port: u16,
}

#[derive(Clone, Copy)]
struct Entry {
    flow: Flow,
    /// Milliseconds since the table was made, plus one; 0 = free.
    used: u64,
}

const FREE: Entry = Entry { flow: Flow { remote: 0, protocol: 0, local_port: 0, remote_port: 0 }, used: 0 };

pub(crate) struct Flows {
    entries: Vec<[Entry; WAYS]>,
    /// Random, so that set numbers cannot be predicted.
    seed: u64,
    start: Instant,
    /// Packets come in runs: the entry that was used last, and its stamp.
    last: (Flow, u64),
    /// The moment that was made a stamp of last.
    stamped: (Instant, u64),
}

impl Flows {
    pub(crate) fn new(seed: u64, start: Instant) -> Self {
        let entries = vec![[FREE; WAYS]; SETS];
        Self { entries, seed: seed | 1, start, last: (FREE.flow, FREE.used), stamped: (start, 1) }
    }

    /// A packet of ours went out: its answers may come in.
    pub(crate) fn sent(&mut self, flow: Flow, now: Instant) {
        let stamp = self.stamp(now);
        if self.last == (flow, stamp) {
            return;
        }
        self.last = (flow, stamp);
        let Some(set) = self.set(&flow) else { return };
        let mut victim = 0;
        let mut victim_rank = (u8::MAX, u64::MAX);
        for (i, entry) in set.iter().enumerate() {
            if entry.used != 0 && entry.flow == flow {
                victim = i;
                break;
            }
            let kind = if entry.used == 0 || expired(entry, stamp) {
                0
            } else if entry.flow.protocol != TCP {
                1
            } else {
                2
            };
            if (kind, entry.used) < victim_rank {
                victim_rank = (kind, entry.used);
                victim = i;
            }
        }
        if let Some(entry) = set.get_mut(victim) {
            *entry = Entry { flow, used: stamp };
        }
    }

    /// Whether an arriving packet belongs to a conversation of ours; keeps it alive if so.
    pub(crate) fn admits(&mut self, flow: &Flow, now: Instant) -> bool {
        let stamp = self.stamp(now);
        if self.last == (*flow, stamp) {
            return true;
        }
        let Some(set) = self.set(flow) else { return false };
        for entry in set.iter_mut() {
            if entry.used != 0 && entry.flow == *flow {
                if expired(entry, stamp) {
                    return false;
                }
                entry.used = stamp;
                self.last = (*flow, stamp);
                return true;
            }
        }
        false
    }

    fn stamp(&mut self, now: Instant) -> u64 {
        if self.stamped.0 != now {
            self.stamped = (now, now.saturating_duration_since(self.start).as_millis() as u64 + 1);
        }
        self.stamped.1
    }

    fn set(&mut self, flow: &Flow) -> Option<&mut [Entry; WAYS]> {
        let ports = u64::from(flow.local_port) << 32 | u64::from(flow.remote_port) << 8 | u64::from(flow.protocol);
        let mut hash = self.seed;
        for word in [flow.remote as u64, (flow.remote >> 64) as u64, ports] {
            hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^= hash >> 29;
        }
        self.entries.get_mut((hash >> 32) as usize % SETS)
    }
}

fn expired(entry: &Entry, stamp: u64) -> bool {
    let life = match entry.flow.protocol {
        TCP => TCP_LIFE,
        UDP => UDP_LIFE,
        _ => OTHER_LIFE,
    };
    u128::from(stamp.saturating_sub(entry.used)) > life.as_millis()
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn flow(protocol: u8, local_port: u16) -> Flow {
        Flow { remote: 0xfd60_627a_a42b << 80 | 5, protocol, local_port, remote_port: 8080 }
    }

    #[test]
    fn t30_only_what_we_started_is_admitted_and_only_for_its_life() {
        let start = Instant::now();
        let mut flows = Flows::new(1, start);
        assert!(!flows.admits(&flow(TCP, 1), start));
        flows.sent(flow(TCP, 1), start);
        flows.sent(flow(UDP, 1), start);
        assert!(flows.admits(&flow(TCP, 1), start));
        assert!(!flows.admits(&flow(TCP, 2), start), "another port");
        assert!(!flows.admits(&Flow { remote: 1, ..flow(TCP, 1) }, start), "another agent");
        assert!(flows.admits(&flow(UDP, 1), start + Duration::from_secs(200)), "in time, and renewed");
        assert!(flows.admits(&flow(UDP, 1), start + Duration::from_secs(400)));
        assert!(!flows.admits(&flow(UDP, 1), start + Duration::from_secs(800)));
        assert!(flows.admits(&flow(TCP, 1), start + Duration::from_secs(7500)), "an idle shell stays");
    }

    #[test]
    fn a_flood_of_datagrams_never_pushes_out_a_connection() {
        let start = Instant::now();
        let mut flows = Flows::new(99, start);
        flows.sent(flow(TCP, 22), start);
        for port in 0..=u16::MAX {
            flows.sent(flow(UDP, port), start + Duration::from_secs(1));
        }
        assert!(flows.admits(&flow(TCP, 22), start + Duration::from_secs(2)));
    }
}
