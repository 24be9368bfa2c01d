//! One daemon per runtime folder: an `flock` that the kernel drops with the process, so that a
//! crash never leaves a lock behind.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::Paths;

/// Why the lock could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "another codervpnd{} is running (it holds {}); stop it first, or give this one its own runtime folder",
        .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default(),
        .path.display()
    )]
    Held { path: PathBuf, pid: Option<u32> },
    #[error("cannot lock {}: {source}; is the folder writable, are we root?", .path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

/// Held for the life of the daemon; dropping it lets the next one start.
#[derive(Debug)]
pub struct InstanceLock {
    _file: File,
}

impl InstanceLock {
    /// Takes the lock or says who has it. Creates the runtime folder.
    pub fn acquire(paths: &Paths) -> Result<Self, Error> {
        let path = paths.lock_file();
        let file = imp::try_lock(&path, &paths.runtime_dir)?;
        Ok(InstanceLock { _file: file })
    }
}

#[cfg(unix)]
mod imp {
    use super::{Error, File, Path};
    use std::io::{Read as _, Seek as _, Write as _};
    use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};

    pub(super) fn try_lock(path: &Path, folder: &Path) -> Result<File, Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(io)?;
        let mut file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                let mut text = String::new();
                // A pid has at most ten digits; the file is only ever written below.
                let _ = (&mut file).take(16).read_to_string(&mut text);
                return Err(Error::Held { path: path.to_owned(), pid: text.trim().parse().ok() });
            }
            Err(std::fs::TryLockError::Error(source)) => return Err(io(source)),
        }
        // The number only serves the message above, so a full disk must not prevent a start.
        let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", std::process::id()));
        Ok(file)
    }
}

#[cfg(not(unix))]
mod imp {
    use super::{Error, File, Path};

    pub(super) fn try_lock(path: &Path, _folder: &Path) -> Result<File, Error> {
        Err(Error::Io { path: path.to_owned(), source: std::io::Error::other(crate::Unsupported("the instance lock")) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_instance_is_told_who_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::new(dir.path().join("state"), dir.path().join("run"));
        let first = InstanceLock::acquire(&paths).unwrap();
        let error = InstanceLock::acquire(&paths).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
        drop(first);
        InstanceLock::acquire(&paths).unwrap();
    }
}
