//! The choice behind `dns.mode = auto` (`dns-and-os.md` 2.1): facts are gathered first, then a
//! pure function decides.

use super::{Choice, Mode};
use crate::Paths;

/// What was found on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {}

impl Facts {
    pub async fn gather(_paths: &Paths) -> Facts {
        Facts {}
    }
}

/// The decision.
pub fn choose(_facts: &Facts) -> Choice {
    Choice { mode: Mode::None, reason: String::new(), warning: None }
}
