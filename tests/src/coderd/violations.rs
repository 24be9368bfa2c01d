//! Remembers what no client of ours may do though real servers let it pass. Tests ask for it at their end.

use std::sync::{Mutex, PoisonError};

/// Violations kept; the first ones are what matters.
const KEPT: usize = 64;

/// What has been noticed so far.
#[derive(Debug, Default)]
pub struct Violations(Mutex<Vec<String>>);

impl Violations {
    pub(crate) fn add(&self, what: impl Into<String>) {
        let what = what.into();
        tracing::warn!(what, "a client broke a rule");
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(what);
        }
    }

    pub fn list(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
