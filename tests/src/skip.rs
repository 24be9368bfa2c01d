//! Decides what a test does that cannot run here: on a developer's machine it
//! says so and passes, in CI (environment variable `CI` set) it fails, so that
//! a proof can never vanish unnoticed.

use std::fmt::Display;

/// True when skips are failures.
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|v| !v.is_empty() && v != "false")
}

/// Reports that the calling test is skipped; the caller returns afterwards.
///
/// # Panics
/// In CI.
#[track_caller]
pub fn skip(reason: impl Display) {
    assert!(!in_ci(), "skipped: {reason} (a skip is a failure in CI)");
    crate::report::announce(&format!("skipped: {reason}"));
}
