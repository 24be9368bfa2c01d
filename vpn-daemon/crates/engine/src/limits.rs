//! Token buckets: how often something that others can provoke is done.

use std::net::Ipv6Addr;
use std::time::Instant;

/// Holds up to `capacity` tokens and gains `per_second`.
pub(crate) struct Bucket {
    capacity: u32,
    per_second: u32,
    /// In thousandths, so that a refill by the millisecond loses nothing.
    millitokens: u64,
    filled_at: Instant,
}

impl Bucket {
    pub(crate) fn per_second(capacity: u32, now: Instant) -> Self {
        Self::new(capacity, capacity, now)
    }

    /// `capacity` at once, then `per_second`.
    pub(crate) fn new(capacity: u32, per_second: u32, now: Instant) -> Self {
        Self { capacity, per_second, millitokens: u64::from(capacity) * 1000, filled_at: now }
    }

    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.filled_at).as_millis() as u64;
        if elapsed > 0 {
            let full = u64::from(self.capacity) * 1000;
            self.millitokens =
                self.millitokens.saturating_add(elapsed.saturating_mul(self.per_second.into())).min(full);
            self.filled_at = now;
        }
        if self.millitokens < 1000 {
            return false;
        }
        self.millitokens -= 1000;
        true
    }
}

/// ICMPv6 errors: ten per second for each destination (`dns-and-os.md` 1.7), and a limit for all of them.
pub(crate) struct IcmpLimit {
    all: Bucket,
    /// Direct-mapped by destination: a collision shares a bucket, nothing grows.
    by_destination: Vec<(u128, Bucket)>,
}

const PER_DESTINATION: u32 = 10;
/// A scan of the prefix by local software is answered this fast at most.
const ALL: u32 = 500;
const DESTINATIONS: usize = 128;

impl IcmpLimit {
    pub(crate) fn new(now: Instant) -> Self {
        let by_destination = (0..DESTINATIONS).map(|_| (0, Bucket::per_second(PER_DESTINATION, now))).collect();
        Self { all: Bucket::per_second(ALL, now), by_destination }
    }

    pub(crate) fn take(&mut self, destination: Ipv6Addr, now: Instant) -> bool {
        let key = u128::from(destination);
        let folded = (key as u64) ^ (key >> 64) as u64;
        let place = (folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % DESTINATIONS;
        let Some((owner, bucket)) = self.by_destination.get_mut(place) else { return false };
        if *owner != key {
            *owner = key;
            *bucket = Bucket::per_second(PER_DESTINATION, now);
        }
        bucket.take(now) && self.all.take(now)
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ten_errors_per_second_and_destination() {
        let start = Instant::now();
        let mut limit = IcmpLimit::new(start);
        let to: Ipv6Addr = "fd60:627a:a42b::1".parse().unwrap();
        let count = |limit: &mut IcmpLimit, at| (0..1000).filter(|_| limit.take(to, at)).count();
        assert_eq!(count(&mut limit, start), 10);
        assert_eq!(count(&mut limit, start + Duration::from_millis(100)), 1);
        assert_eq!(count(&mut limit, start + Duration::from_secs(60)), 10);
        let other = "fd60:627a:a42b::2".parse().unwrap();
        assert!(limit.take(other, start + Duration::from_secs(60)));
    }
}
