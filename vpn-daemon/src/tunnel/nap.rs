//! Decides when the loop looks away for a moment instead of waiting to be woken. While a lot comes in, more will be there
//! before long: what is taken in one go costs one wake-up, and the sender, who would have to wake us, is spared its part.

use std::time::Duration;

/// How long; rounding and the system's timers make it up to twice as long. Two trains of datagrams at 5 Gbit/s, and far
/// less than any queue of a loaded path. Half of it was measured to save less.
pub(super) const NAP: Duration = Duration::from_micros(100);
/// So many chances are left out after a nap in which nothing came: the stream is slower than that.
const LEFT_OUT: u32 = 16;

#[derive(Debug, Default)]
pub(super) struct Naps {
    /// A lot has come since the last sleep.
    busy: bool,
    napping: bool,
    left_out: u32,
}

impl Naps {
    /// A lot came.
    pub(super) fn note(&mut self) {
        self.busy = true;
    }

    /// Nothing is left to do: whether to nap rather than to wait.
    pub(super) fn begin(&mut self) -> bool {
        let busy = std::mem::take(&mut self.busy);
        if std::mem::take(&mut self.napping) && !busy {
            self.left_out = LEFT_OUT;
        } else if busy && self.left_out > 0 {
            self.left_out -= 1;
        } else {
            self.napping = busy;
        }
        self.napping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_stream_has_naps_a_slow_one_hardly_any_and_silence_none() {
        let mut naps = Naps::default();
        assert!((0..100).all(|_| !naps.begin()));
        let fast = (0..100).filter(|_| {
            naps.note();
            naps.begin()
        });
        assert_eq!(fast.count(), 100);
        // Nothing has come yet at the end of any nap.
        let mut slow = 0;
        for _ in 0..100 {
            naps.note();
            if naps.begin() {
                slow += 1;
                assert!(!naps.begin());
            }
        }
        assert!((1..10).contains(&slow), "{slow}");
    }
}
