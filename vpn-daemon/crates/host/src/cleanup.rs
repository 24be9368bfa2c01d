//! Undoing what a dead daemon left: `codervpnd cleanup`, and the first step of every start.
//!
//! Synchronous, repeatable, and in need of neither daemon nor bus nor network. Device, addresses
//! and routes vanish with the process that held the device; what remains is the resolver file,
//! the policy rule and the socket file. The resolver comes first: with it broken, nothing on the
//! machine resolves.

use std::path::Path;

use crate::Paths;
use crate::lock::{self, InstanceLock};

/// What was found and undone; empty when there was nothing.
#[derive(Debug, Default)]
pub struct Report {
    /// One sentence per thing undone.
    pub done: Vec<String>,
    /// One sentence per thing that could not be undone, with its reason.
    pub failed: Vec<String>,
}

impl Report {
    pub fn is_ok(&self) -> bool {
        self.failed.is_empty()
    }

    #[cfg(target_os = "linux")]
    fn note(&mut self, outcome: Result<Option<crate::dns::direct::Restored>, crate::dns::Error>) {
        match outcome {
            Ok(None) => {}
            Ok(Some(done)) => self.done.push(done.to_string()),
            Err(error) => self.failed.push(error.to_string()),
        }
    }
}

/// The command: refuses while a live daemon holds the lock, unless `force`.
pub fn cleanup(paths: &Paths, socket: Option<&Path>, force: bool) -> Result<Report, lock::Error> {
    let _lock = match InstanceLock::acquire(paths) {
        Ok(lock) => Some(lock),
        Err(error @ lock::Error::Held { .. }) if !force => return Err(error),
        // A runtime folder that cannot be made (read-only, not root) must not keep the resolver
        // from being restored; whatever else is not permitted ends up in the report.
        Err(_) => None,
    };
    let mut report = undo_leftovers(paths);
    if let Some(socket) = socket {
        remove_stale_socket(socket, &mut report);
    }
    Ok(report)
}

/// The same without the lock, for a daemon that holds it: call it before the first look-up.
pub fn undo_leftovers(paths: &Paths) -> Report {
    let mut report = Report::default();
    restore_resolver(paths, &mut report);
    match crate::routes::remove_leftovers(paths) {
        Ok(0) => {}
        Ok(count) => report.done.push(format!("removed {count} routing rules of a dead daemon")),
        Err(error) => report.failed.push(error.to_string()),
    }
    report
}

/// Only the resolver file, for a panic hook or a second SIGTERM: takes no lock, since the thread
/// that failed may hold it, and waits for nothing.
pub fn restore_while_aborting(paths: &Paths) -> Report {
    #[cfg(target_os = "linux")]
    let report = {
        let mut report = Report::default();
        report.note(crate::dns::direct::restore_while_aborting(paths));
        report
    };
    #[cfg(not(target_os = "linux"))]
    let report = {
        let _ = paths;
        Report::default()
    };
    report
}

fn restore_resolver(paths: &Paths, report: &mut Report) {
    #[cfg(target_os = "linux")]
    report.note(crate::dns::direct::restore(paths));
    #[cfg(not(target_os = "linux"))]
    let _ = (paths, report);
}

/// A socket file that nobody listens on any more.
fn remove_stale_socket(path: &Path, report: &mut Report) {
    match stale_socket(path) {
        Ok(false) => {}
        Ok(true) => match std::fs::remove_file(path) {
            Ok(()) => report.done.push(format!("removed the stale socket {}", path.display())),
            Err(error) => report.failed.push(format!("cannot remove {}: {error}", path.display())),
        },
        Err(error) => report.failed.push(format!("cannot look at {}: {error}", path.display())),
    }
}

#[cfg(unix)]
fn stale_socket(path: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::FileTypeExt as _;
    let kind = match std::fs::symlink_metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    // Anything but a socket was put there by somebody else.
    if !kind.is_socket() {
        return Ok(false);
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) => Ok(error.kind() == std::io::ErrorKind::ConnectionRefused),
        Ok(_) => Ok(false),
    }
}

#[cfg(not(unix))]
fn stale_socket(_path: &Path) -> std::io::Result<bool> {
    Ok(false)
}
