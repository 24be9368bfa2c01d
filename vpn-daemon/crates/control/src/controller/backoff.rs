//! Decides how long to wait before a dial (CC-1).

use std::time::Duration;

/// Factor between two waits (upstream `coder/retry`).
const FACTOR: f64 = 1.618_033_988_749_895;
/// Never a wait itself, only what the first wait grows from.
const SEED: Duration = Duration::from_millis(50);
/// Longest wait.
pub(crate) const CEILING: Duration = Duration::from_secs(10);

/// Waits 0, 80.9 ms, 130.9 ms, 211.8 ms … 10 s, without jitter.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backoff {
    last: Duration,
}

impl Backoff {
    /// The next wait.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.last.mul_f64(FACTOR).min(CEILING);
        self.last = delay.max(SEED);
        delay
    }

    /// The next wait is 0 again.
    pub fn reset(&mut self) {
        self.last = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TR-64.
    #[test]
    fn tr_64_series_of_waits() {
        let mut backoff = Backoff::default();
        let expected =
            [0.0, 80.9, 130.9, 211.8, 342.7, 554.5, 897.2, 1451.7, 2348.9, 3800.6, 6149.5, 9950.1, 10_000.0, 10_000.0];
        for wanted in expected {
            let wait = backoff.next_delay().as_secs_f64() * 1000.0;
            assert!((wait - wanted).abs() < 0.2, "{wait} instead of {wanted}");
        }
        backoff.reset();
        assert_eq!(backoff.next_delay(), Duration::ZERO);
        assert!(backoff.next_delay() > SEED);
    }
}
