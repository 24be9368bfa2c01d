//! Where the files stand that this crate reads and writes. Tests point them elsewhere; nothing
//! else in the crate names an absolute path of a file that it changes.

use std::path::{Path, PathBuf};

/// Files and folders of one daemon instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// Survives a reboot: records of what must be undone (`/var/lib/codervpn`).
    pub state_dir: PathBuf,
    /// Gone after a reboot: the instance lock (`/run/codervpn`).
    pub runtime_dir: PathBuf,
    /// The resolver configuration that direct mode edits.
    pub resolv_conf: PathBuf,
    /// Read only, to see whether programs ask systemd-resolved without `resolv_conf`.
    pub nsswitch_conf: PathBuf,
}

impl Paths {
    /// The system's own files, with this state and runtime folder.
    pub fn new(state_dir: impl Into<PathBuf>, runtime_dir: impl Into<PathBuf>) -> Self {
        Paths {
            state_dir: state_dir.into(),
            runtime_dir: runtime_dir.into(),
            resolv_conf: PathBuf::from("/etc/resolv.conf"),
            nsswitch_conf: PathBuf::from("/etc/nsswitch.conf"),
        }
    }

    /// Records of direct mode.
    #[cfg(target_os = "linux")]
    pub(crate) fn dns_dir(&self) -> PathBuf {
        self.state_dir.join("dns")
    }

    /// Record of the policy rule.
    #[cfg(target_os = "linux")]
    pub(crate) fn routes_record(&self) -> PathBuf {
        self.state_dir.join("routes.json")
    }

    pub(crate) fn lock_file(&self) -> PathBuf {
        self.runtime_dir.join("codervpnd.lock")
    }
}

impl Default for Paths {
    fn default() -> Self {
        Paths::new(Path::new("/var/lib/codervpn"), Path::new("/run/codervpn"))
    }
}
