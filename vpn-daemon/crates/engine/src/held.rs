//! First packets of an agent whose session is not up yet: held, in order, for a short while.
//!
//! Names are published before the path is usable; dropping what is sent in between would make the first `connect()`
//! wait for the kernel's retransmission (1 s). Bounds (`data-plane.md` 6.2 step 8): 32 packets and 64 KiB per agent,
//! 1 MiB in all, 3 s. The newest is dropped when full: the oldest is the SYN that the reply depends on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub(crate) const MAX_PACKETS: usize = 32;
pub(crate) const MAX_BYTES: usize = 64 * 1024;
pub(crate) const MAX_BYTES_IN_ALL: usize = 1024 * 1024;
pub(crate) const MAX_AGE: Duration = Duration::from_secs(3);

/// Bytes held over all agents.
#[derive(Default)]
pub(crate) struct HeldTotal(usize);

/// The packets of one agent.
#[derive(Default)]
pub(crate) struct Held {
    packets: VecDeque<(Instant, Box<[u8]>)>,
    bytes: usize,
}

impl Held {
    /// False when a bound is reached; the packet is not taken then.
    pub(crate) fn push(&mut self, packet: &[u8], now: Instant, total: &mut HeldTotal) -> bool {
        if self.packets.len() >= MAX_PACKETS
            || self.bytes + packet.len() > MAX_BYTES
            || total.0 + packet.len() > MAX_BYTES_IN_ALL
        {
            return false;
        }
        self.bytes += packet.len();
        total.0 += packet.len();
        self.packets.push_back((now, packet.into()));
        true
    }

    /// The oldest packet that is young enough; how many older ones were dropped is added to `expired`.
    pub(crate) fn pop(&mut self, now: Instant, total: &mut HeldTotal, expired: &mut u64) -> Option<Box<[u8]>> {
        while let Some((at, packet)) = self.packets.pop_front() {
            self.bytes -= packet.len();
            total.0 -= packet.len();
            if now.saturating_duration_since(at) < MAX_AGE {
                return Some(packet);
            }
            *expired += 1;
        }
        // An agent that has its session needs no room here any more.
        self.packets = VecDeque::new();
        None
    }

    /// Drops what is too old; returns how many.
    pub(crate) fn expire(&mut self, now: Instant, total: &mut HeldTotal) -> u64 {
        let mut dropped = 0;
        while self.packets.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) >= MAX_AGE) {
            if let Some((_, packet)) = self.packets.pop_front() {
                self.bytes -= packet.len();
                total.0 -= packet.len();
                dropped += 1;
            }
        }
        dropped
    }

    /// Drops everything; returns how many.
    pub(crate) fn clear(&mut self, total: &mut HeldTotal) -> u64 {
        let dropped = self.packets.len() as u64;
        total.0 -= self.bytes;
        *self = Self::default();
        dropped
    }

    /// When the oldest packet becomes too old.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.packets.front().map(|(at, _)| *at + MAX_AGE)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn t52_bounds_hold_per_agent_in_all_and_in_time() {
        let start = Instant::now();
        let mut total = HeldTotal::default();
        let mut one = Held::default();
        let taken = (0..10_000).filter(|_| one.push(&[0; 100], start, &mut total)).count();
        assert_eq!(taken, MAX_PACKETS);

        let mut agents: Vec<Held> = (0..200).map(|_| Held::default()).collect();
        for agent in &mut agents {
            for _ in 0..50 {
                agent.push(&[0; 1280], start, &mut total);
            }
            assert!(agent.bytes <= MAX_BYTES);
        }
        assert!(total.0 <= MAX_BYTES_IN_ALL && total.0 > MAX_BYTES_IN_ALL - 1280);

        let mut expired = 0;
        assert!(one.pop(start + MAX_AGE, &mut total, &mut expired).is_none(), "3 s old is too old");
        assert_eq!(expired, MAX_PACKETS as u64);
        for agent in &mut agents {
            agent.clear(&mut total);
        }
        assert_eq!(total.0, 0);
    }

    #[test]
    fn t52_order_is_kept_and_only_old_ones_go() {
        let start = Instant::now();
        let mut total = HeldTotal::default();
        let mut held = Held::default();
        held.push(&[1], start, &mut total);
        held.push(&[2], start + Duration::from_secs(2), &mut total);
        held.push(&[3], start + Duration::from_secs(2), &mut total);
        assert_eq!(held.next_expiry(), Some(start + MAX_AGE));
        assert_eq!(held.expire(start + MAX_AGE, &mut total), 1);
        let mut expired = 0;
        let now = start + MAX_AGE;
        assert_eq!(held.pop(now, &mut total, &mut expired).as_deref(), Some(&[2][..]));
        assert_eq!(held.pop(now, &mut total, &mut expired).as_deref(), Some(&[3][..]));
        assert_eq!(held.pop(now, &mut total, &mut expired), None);
        assert_eq!(expired, 0);
    }
}
