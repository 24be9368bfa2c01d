//! Decides when the next attempt to reach a relay may begin: later with every
//! failure in a row, never in a storm (data plane 2.9, T-45).

use std::time::Duration;

use tokio::time::Instant;

/// Attempts to one region are at least so far apart (T-45).
const ATTEMPT_SPACING: Duration = Duration::from_millis(250);
/// Longest wait between two attempts (before the jitter).
const BACKOFF_LIMIT: Duration = Duration::from_secs(5);
/// A relay that announces a restart is believed up to these (data plane 2.9).
const RESTART_WAIT: Duration = Duration::from_secs(10);
const RESTART_TRY: Duration = Duration::from_secs(30);

/// When the next attempt may begin (data plane 2.9, T-45).
#[derive(Default)]
pub(crate) struct Backoff {
    failures: u32,
    last_attempt: Option<Instant>,
    wait_until: Option<Instant>,
    /// Until then failures do not make the waits longer.
    patient_until: Option<Instant>,
}

impl Backoff {
    pub(crate) fn attempt(&mut self) {
        self.last_attempt = Some(Instant::now());
        self.wait_until = None;
    }

    pub(crate) fn heard(&mut self) {
        self.failures = 0;
    }

    pub(crate) fn failed(&mut self) {
        let patient = self.patient_until.is_some_and(|until| Instant::now() < until);
        if !patient || self.failures == 0 {
            self.failures = self.failures.saturating_add(1);
        }
        self.wait_until = Some(Instant::now() + jittered(self.delay()));
    }

    pub(crate) fn restarting(&mut self, reconnect_in: Duration, try_for: Duration) {
        let now = Instant::now();
        self.failures = 0;
        self.wait_until = Some(now + jittered(reconnect_in.min(RESTART_WAIT)));
        self.patient_until = Some(now + reconnect_in.min(RESTART_WAIT) + try_for.min(RESTART_TRY));
    }

    /// `min(n² × 10 ms, 5 s)`.
    fn delay(&self) -> Duration {
        let squared = self.failures.saturating_mul(self.failures);
        (Duration::from_millis(10).saturating_mul(squared)).min(BACKOFF_LIMIT)
    }

    pub(crate) fn next_attempt(&self) -> Instant {
        let now = Instant::now();
        let spaced = self.last_attempt.map_or(now, |last| last + ATTEMPT_SPACING);
        spaced.max(self.wait_until.unwrap_or(now))
    }
}

/// Uniform from half to one and a half, so that clients do not come back together.
fn jittered(delay: Duration) -> Duration {
    delay.mul_f64(rand::random_range(0.5..1.5))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data plane 2.9: `min(n² × 10 ms, 5 s)` with jitter, and T-45.
    #[tokio::test(start_paused = true)]
    async fn t45_back_off_grows_and_is_spaced() {
        let mut backoff = Backoff::default();
        for n in 1..40u64 {
            let start = Instant::now();
            backoff.attempt();
            backoff.failed();
            let wait = backoff.next_attempt() - start;
            let base = Duration::from_millis((n * n * 10).min(5000));
            assert!(wait >= base / 2 && wait >= ATTEMPT_SPACING, "{n}: {wait:?}");
            assert!(wait <= (base * 3 / 2).max(ATTEMPT_SPACING), "{n}: {wait:?}");
            tokio::time::advance(wait).await;
        }
        backoff.heard();
        backoff.failed();
        assert!(backoff.next_attempt() - Instant::now() <= Duration::from_millis(15));
    }
}
