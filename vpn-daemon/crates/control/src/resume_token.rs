//! Decides which resume token the next dial carries, and when a new one is asked for.
//!
//! The token makes the server give us the same peer id again. It is a bearer secret, not bound to the user (CC-44): it
//! stays in memory, in a buffer that is wiped, and ends with the controller.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codervpn_proto::tailnet as pb;
use secrecy::SecretString;

/// Used when the server gives no time for the next refresh.
const FALLBACK_REFRESH: Duration = Duration::from_secs(30 * 60);

/// No refresh sooner than this, whatever the server says: a wrong duration must not become a hot loop.
const MIN_REFRESH: Duration = Duration::from_secs(1);

/// The token over all connections of one controller.
#[derive(Default)]
pub(crate) struct ResumeToken {
    token: Option<(SecretString, SystemTime)>,
    /// The last dial was refused because of the token: the next goes without (HTTP-16).
    skip: bool,
}

impl ResumeToken {
    /// The token for a dial (CC-41).
    pub(crate) fn for_dial(&self, now: SystemTime) -> Option<&SecretString> {
        self.token.as_ref().filter(|(_, expires)| !self.skip && now < *expires).map(|(token, _)| token)
    }

    pub(crate) fn refused(&mut self) {
        self.skip = true;
    }

    /// A dial reached the server's 101.
    pub(crate) fn dial_accepted(&mut self) {
        self.skip = false;
    }

    /// CC-28, and at the end of a session.
    pub(crate) fn forget(&mut self) {
        self.token = None;
    }

    /// Stores an answer and says when to ask again (CC-40).
    pub(crate) fn store(&mut self, answer: pb::RefreshResumeTokenResponse) -> Duration {
        let refresh = answer.refresh_in.and_then(|value| Duration::try_from(value).ok()).filter(|time| !time.is_zero());
        let expires = answer.expires_at.and_then(|at| {
            let since = Duration::new(u64::try_from(at.seconds).ok()?, u32::try_from(at.nanos).ok()?.min(999_999_999));
            UNIX_EPOCH.checked_add(since)
        });
        match expires {
            Some(expires) if !answer.token.is_empty() => {
                self.token = Some((SecretString::from(answer.token), expires));
            }
            _ => tracing::warn!("the server sent a resume token that cannot be used"),
        }
        refresh.unwrap_or(FALLBACK_REFRESH).max(MIN_REFRESH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;

    fn answer(token: &str, refresh_seconds: i64, expires: i64) -> pb::RefreshResumeTokenResponse {
        pb::RefreshResumeTokenResponse {
            token: token.into(),
            refresh_in: Some(prost_types::Duration { seconds: refresh_seconds, nanos: 0 }),
            expires_at: Some(prost_types::Timestamp { seconds: expires, nanos: 0 }),
        }
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn cc_41_a_token_is_used_until_it_expires() {
        let mut resume = ResumeToken::default();
        assert!(resume.for_dial(at(0)).is_none());
        assert_eq!(resume.store(answer("t1", 43_200, 100)), Duration::from_secs(43_200));
        assert_eq!(resume.for_dial(at(99)).map(ExposeSecret::expose_secret), Some("t1"));
        assert!(resume.for_dial(at(100)).is_none());
        resume.forget();
        assert!(resume.for_dial(at(0)).is_none());
    }

    #[test]
    fn http_16_a_refused_token_is_left_out_once() {
        let mut resume = ResumeToken::default();
        resume.store(answer("t1", 1, 100));
        resume.refused();
        assert!(resume.for_dial(at(0)).is_none());
        resume.dial_accepted();
        resume.store(answer("t2", 1, 100));
        assert_eq!(resume.for_dial(at(0)).map(ExposeSecret::expose_secret), Some("t2"));
    }

    #[test]
    fn cc_40_odd_times_fall_back() {
        let mut resume = ResumeToken::default();
        assert_eq!(resume.store(answer("t", 0, 100)), FALLBACK_REFRESH);
        assert_eq!(resume.store(answer("t", -5, 100)), FALLBACK_REFRESH);
        let mut tiny = answer("t", 0, 100);
        tiny.refresh_in = Some(prost_types::Duration { seconds: 0, nanos: 1 });
        assert_eq!(resume.store(tiny), MIN_REFRESH);
        assert_eq!(resume.store(answer("", 5, -1)), Duration::from_secs(5));
        assert_eq!(resume.for_dial(at(0)).map(ExposeSecret::expose_secret), Some("t"));
    }
}
