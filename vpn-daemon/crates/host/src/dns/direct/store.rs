//! The files of direct mode: what is saved before resolv.conf is touched, how it is replaced, and
//! how it comes back.
//!
//! In the state folder stand `resolv.conf.orig` (the bytes before), `resolv.conf.ours` (the bytes
//! we write) and `state.json`. The record is written last and deleted first: while it exists, both
//! others are whole. Each of these files, and resolv.conf itself wherever possible, appears by
//! rename. So a crash leaves one of three states, and [`restore`] ends all of them:
//! no record (resolv.conf is untouched or already restored), a record beside the untouched
//! original, or a record beside our file.
//!
//! Where resolv.conf is a mount point (containers) it cannot be renamed over and is written in
//! place. A write that a crash cut short is recognised: its beginning is one of the two known
//! texts and the remainder the other.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::net::Ipv6Addr;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Restored;
use crate::dns::resolv_conf::{self, ResolvConf};
use crate::dns::{DnsConfig, Error};
use crate::{Paths, files};

/// Larger files are no resolver configuration (2.6).
const MAX_SIZE: usize = 64 * 1024;

/// The record names one address, one path and two hashes.
const MAX_RECORD: usize = 16 * 1024;

/// Writes in place happen in one call; tests cut them into small ones to crash in between.
const IN_PLACE_CHUNK: usize = if cfg!(test) { 16 } else { MAX_SIZE };

/// What stood at resolv.conf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Regular,
    Symlink,
    Missing,
}

/// `state.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    version: u32,
    kind: Kind,
    link_target: Option<String>,
    mode: u32,
    uid: u32,
    gid: u32,
    original_sha256: String,
    written_sha256: String,
    /// Our server, so that an edited file can be told apart from it.
    server: Ipv6Addr,
    // For people who look at the file.
    boot_id: String,
    pid: u32,
    time: u64,
}

/// resolv.conf as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    kind: Kind,
    link_target: Option<String>,
    mode: u32,
    uid: u32,
    gid: u32,
    /// Through the link, if it is one; empty if there is nothing.
    bytes: Vec<u8>,
}

/// Where everything stands, with the folder locked against a second process.
#[derive(Debug)]
pub(super) struct Store {
    target: PathBuf,
    /// Appears in the target's folder for a moment.
    beside: PathBuf,
    original: PathBuf,
    ours: PathBuf,
    record: PathBuf,
    _lock: Option<File>,
}

impl Store {
    /// With the folder locked. Waiting is useless: whoever holds the lock is about to change what
    /// we are about to change.
    pub(super) fn lock(paths: &Paths) -> Result<Self, Error> {
        let dir = paths.dns_dir();
        files::create_private_dir(&dir).map_err(file_error("create", &dir))?;
        let lock = File::open(&dir).map_err(file_error("open", &dir))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|error| file_error("lock", &dir)(error.into()))?;
        Ok(Store { _lock: Some(lock), ..Store::without_lock(paths) })
    }

    /// For reading, and for a process that is about to abort and may hold the lock itself.
    pub(super) fn without_lock(paths: &Paths) -> Self {
        let dir = paths.dns_dir();
        let target = paths.resolv_conf.clone();
        Store {
            beside: target.with_file_name(".resolv.conf.codervpn"),
            target,
            original: dir.join("resolv.conf.orig"),
            ours: dir.join("resolv.conf.ours"),
            record: dir.join("state.json"),
            _lock: None,
        }
    }

    /// Saves what is there and replaces it by ours. Returns the original's bytes.
    pub(super) fn install(&self, config: &DnsConfig) -> Result<Vec<u8>, Error> {
        self.restore()?;
        let found = self.look()?;
        let written =
            ResolvConf::parse(&found.bytes).render(&found.bytes, &self.original.display().to_string(), config);
        let record = Record {
            version: 1,
            kind: found.kind,
            link_target: found.link_target.clone(),
            mode: found.mode,
            uid: found.uid,
            gid: found.gid,
            original_sha256: sha256(&found.bytes),
            written_sha256: sha256(&written),
            server: config.server,
            boot_id: boot_id(),
            pid: std::process::id(),
            time: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        };
        self.save(&self.original, &found.bytes)?;
        self.save(&self.ours, &written)?;
        let json =
            serde_json::to_vec_pretty(&record).map_err(|error| file_error("encode", &self.record)(error.into()))?;
        self.save(&self.record, &json)?;

        let (uid, gid) = match found.kind {
            Kind::Regular => (found.uid, found.gid),
            Kind::Symlink | Kind::Missing => own_ids(),
        };
        if let Err(error) = self.replace(&written, 0o644, uid, gid, found.kind) {
            // Nothing has changed, so nothing must be remembered.
            self.forget()?;
            return Err(error);
        }
        Ok(found.bytes)
    }

    /// Puts the original back if resolv.conf is still ours. `None`: there was nothing to do.
    pub(super) fn restore(&self) -> Result<Option<Restored>, Error> {
        let found = self.look();
        let outcome = match self.load() {
            Some(record) => self.restore_recorded(&record, &found?)?,
            None => match found {
                Ok(found) if resolv_conf::is_marked(&found.bytes) => Some(self.restore_carried(&found)?),
                // Not ours, whatever it is.
                _ => None,
            },
        };
        self.forget()?;
        Ok(outcome)
    }

    /// Whether resolv.conf is exactly what we wrote.
    pub(super) fn is_installed(&self) -> Result<bool, Error> {
        let Some(record) = self.load() else {
            return Ok(false);
        };
        let found = self.look()?;
        Ok(found.kind == Kind::Regular && sha256(&found.bytes) == record.written_sha256)
    }

    /// Whether [`Store::install`] has a chance, found out without changing anything.
    pub(super) fn is_replaceable(&self) -> Result<(), Error> {
        let found = self.look()?;
        let folder = self.target.parent().unwrap_or(Path::new("/"));
        let writable = rustix::fs::access(folder, rustix::fs::Access::WRITE_OK);
        if found.kind == Kind::Regular {
            // Opening tells of immutable and read-only files, which root's rights hide.
            return OpenOptions::new()
                .append(true)
                .open(&self.target)
                .map(|_| ())
                .map_err(file_error("write", &self.target));
        }
        writable.map_err(|error| file_error("write to", folder)(error.into()))
    }

    /// Whether resolv.conf begins with our marker.
    pub(super) fn is_marked(&self) -> bool {
        self.look().is_ok_and(|found| resolv_conf::is_marked(&found.bytes))
    }

    /// Lets go of the original: resolv.conf belongs to somebody else now.
    pub(super) fn forget(&self) -> Result<(), Error> {
        let unfinished = [&self.record, &self.original].map(|path| path.with_extension("new"));
        for path in [&self.record, &self.ours, &self.original, &self.beside].into_iter().chain(&unfinished) {
            match files::remove_if_present(path) {
                Ok(()) => {}
                // The folder of resolv.conf may be read-only; then we never wrote there either.
                Err(_) if *path == self.beside => {}
                Err(error) => return Err(file_error("remove", path)(error)),
            }
            checkpoint();
        }
        // Without this a power failure could bring the record back; harmless, since the file that
        // it describes would no longer be ours.
        if let Err(error) = files::sync_parent(&self.record)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(%error, "cannot make the removal of DNS records durable");
        }
        Ok(())
    }

    fn restore_recorded(&self, record: &Record, found: &Found) -> Result<Option<Restored>, Error> {
        let original = files::read_if_present(&self.original, MAX_SIZE)
            .map_err(file_error("read", &self.original))?
            .filter(|bytes| sha256(bytes) == record.original_sha256);
        let ours = files::read_if_present(&self.ours, MAX_SIZE * 3)
            .map_err(file_error("read", &self.ours))?
            .unwrap_or_default();
        let Some(original) = original else {
            // Somebody took our backup away.
            return if resolv_conf::is_marked(&found.bytes) {
                self.restore_carried(found).map(Some)
            } else {
                Ok(Some(Restored::LeftAlone))
            };
        };
        // What a link leads to is its owner's business.
        let same_bytes = found.kind == Kind::Symlink || found.bytes == original;
        if found.kind == record.kind && same_bytes && found.link_target == record.link_target {
            // A crash before the first write, or after the last.
            return Ok(None);
        }
        let is_ours = found.kind == Kind::Regular
            && (sha256(&found.bytes) == record.written_sha256
                || is_torn(&found.bytes, &original, &ours)
                || is_torn(&found.bytes, &ours, &original));
        if is_ours {
            self.bring_back(record, &original)?;
            return Ok(Some(Restored::Original));
        }
        if found.kind != Kind::Regular || !resolv_conf::is_marked(&found.bytes) {
            return Ok(Some(Restored::LeftAlone));
        }
        // Ours, but edited by hand. The edit stays if it can, less our dead server.
        if let Some(edited) = resolv_conf::without_ours(&found.bytes, Some(record.server)) {
            self.replace(&edited, found.mode, found.uid, found.gid, found.kind)?;
            return Ok(Some(Restored::Edited));
        }
        let kept = self.original.with_extension("edited");
        self.save(&kept, &found.bytes)?;
        self.bring_back(record, &original)?;
        Ok(Some(Restored::Original))
    }

    /// Our records are gone, but our file carries the original along.
    fn restore_carried(&self, found: &Found) -> Result<Restored, Error> {
        let rest =
            resolv_conf::carried_original(&found.bytes).or_else(|| resolv_conf::without_ours(&found.bytes, None));
        let Some(rest) = rest else {
            return Err(Error::NotResolvConf {
                path: self.target.clone(),
                reason: "a dead codervpnd wrote it and its backup is lost; write the machine's name servers into it",
            });
        };
        self.replace(&rest, found.mode, found.uid, found.gid, found.kind)?;
        Ok(Restored::Carried)
    }

    fn bring_back(&self, record: &Record, original: &[u8]) -> Result<(), Error> {
        match (record.kind, &record.link_target) {
            (Kind::Missing, _) => {
                files::remove_if_present(&self.target).map_err(file_error("remove", &self.target))?;
                checkpoint();
            }
            (Kind::Symlink, Some(link_target)) => {
                files::remove_if_present(&self.beside).map_err(file_error("remove", &self.beside))?;
                checkpoint();
                std::os::unix::fs::symlink(link_target, &self.beside).map_err(file_error("create", &self.beside))?;
                checkpoint();
                std::fs::rename(&self.beside, &self.target).map_err(file_error("replace", &self.target))?;
                checkpoint();
            }
            (Kind::Symlink | Kind::Regular, _) => {
                return self.replace(original, record.mode, record.uid, record.gid, Kind::Regular);
            }
        }
        sync_folder(&self.target);
        Ok(())
    }

    /// Replaces resolv.conf by a file with these bytes: by rename, or in place where only that is
    /// possible and a file (not a link to somebody's) is there.
    fn replace(&self, bytes: &[u8], mode: u32, uid: u32, gid: u32, current: Kind) -> Result<(), Error> {
        let error = match self.replace_by_rename(bytes, mode, uid, gid) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let in_place = matches!(
            Errno::from_io_error(&error),
            Some(Errno::BUSY | Errno::XDEV | Errno::ROFS | Errno::PERM | Errno::ACCESS)
        );
        if !in_place || current != Kind::Regular {
            return Err(file_error("replace", &self.target)(error));
        }
        self.write_in_place(bytes).map_err(file_error("write", &self.target))
    }

    fn replace_by_rename(&self, bytes: &[u8], mode: u32, uid: u32, gid: u32) -> io::Result<()> {
        files::remove_if_present(&self.beside)?;
        checkpoint();
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(nofollow()).open(&self.beside)?;
        checkpoint();
        let filled = file
            .write_all(bytes)
            .and_then(|()| {
                copy_security_context(&self.target, &file);
                // Only root may give files away; for anyone else it is theirs already.
                if let Err(error) = std::os::unix::fs::fchown(&file, Some(uid), Some(gid)) {
                    tracing::debug!(%error, "the new resolv.conf has another owner than the old");
                }
                checkpoint();
                file.set_permissions(std::fs::Permissions::from_mode(mode & 0o7777))
            })
            .and_then(|()| file.sync_all())
            .and_then(|()| {
                checkpoint();
                std::fs::rename(&self.beside, &self.target)
            });
        checkpoint();
        if let Err(error) = filled {
            let _ = files::remove_if_present(&self.beside);
            return Err(error);
        }
        sync_folder(&self.target);
        Ok(())
    }

    fn write_in_place(&self, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).custom_flags(nofollow()).open(&self.target)?;
        for chunk in bytes.chunks(IN_PLACE_CHUNK) {
            file.write_all(chunk)?;
            checkpoint();
        }
        file.set_len(bytes.len() as u64)?;
        checkpoint();
        file.sync_all()
    }

    fn save(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        checkpoint();
        files::write_durably(path, bytes).map_err(file_error("write", path))?;
        checkpoint();
        Ok(())
    }

    /// A record that is missing, damaged or of another version counts as none.
    fn load(&self) -> Option<Record> {
        let bytes = files::read_if_present(&self.record, MAX_RECORD).ok().flatten()?;
        serde_json::from_slice::<Record>(&bytes).ok().filter(|record| record.version == 1)
    }

    fn look(&self) -> Result<Found, Error> {
        let wrong = |reason| Error::NotResolvConf { path: self.target.clone(), reason };
        let metadata = match std::fs::symlink_metadata(&self.target) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Found {
                    kind: Kind::Missing,
                    link_target: None,
                    mode: 0o644,
                    uid: 0,
                    gid: 0,
                    bytes: Vec::new(),
                });
            }
            Err(error) => return Err(file_error("look at", &self.target)(error)),
        };
        let (kind, link_target) = if metadata.is_symlink() {
            let target = std::fs::read_link(&self.target).map_err(file_error("read", &self.target))?;
            let target =
                target.into_os_string().into_string().map_err(|_| wrong("it links to a name that is not UTF-8"))?;
            (Kind::Symlink, Some(target))
        } else if metadata.is_file() {
            (Kind::Regular, None)
        } else {
            return Err(wrong("it is neither a file nor a link to one"));
        };
        // A link may dangle, or lead to what cannot be read as a file.
        if kind == Kind::Symlink
            && let Ok(behind) = std::fs::metadata(&self.target)
            && !behind.is_file()
        {
            return Err(wrong("it links to something that is not a file"));
        }
        let bytes = files::read_if_present(&self.target, MAX_SIZE)
            .map_err(file_error("read", &self.target))?
            .unwrap_or_default();
        Ok(Found { kind, link_target, mode: metadata.mode() & 0o7777, uid: metadata.uid(), gid: metadata.gid(), bytes })
    }
}

/// Whether `found` is what a write of `new` over `old` leaves when it stops somewhere: a beginning
/// of the one, followed by what the other had from there on.
fn is_torn(found: &[u8], old: &[u8], new: &[u8]) -> bool {
    let written = found.iter().zip(new).take_while(|(found, new)| found == new).count();
    if written == 0 {
        return false;
    }
    if found.len() > old.len() {
        // All that is beyond the old end must come from the write.
        return written == found.len();
    }
    // Any earlier end of the write that fits is as good.
    found.len() == old.len()
        && found.iter().zip(old).rev().take_while(|(found, old)| found == old).count() + written >= found.len()
}

fn file_error<'a>(what: &'static str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |source| Error::File { what, path: path.to_owned(), source }
}

fn nofollow() -> i32 {
    // The bits fit: they are open(2) flags.
    OFlags::NOFOLLOW.bits().cast_signed()
}

fn own_ids() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

/// Some file systems refuse to sync a folder; the rename has happened all the same.
fn sync_folder(target: &Path) {
    if let Err(error) = files::sync_parent(target) {
        tracing::debug!(%error, "cannot sync the folder of resolv.conf");
    }
}

/// SELinux would otherwise label the new file by its folder, and confined programs could not read
/// it. Absent on most systems.
#[cfg(target_os = "linux")]
fn copy_security_context(from: &Path, to: &File) {
    let mut context = [0; 512];
    if let Ok(length) = rustix::fs::lgetxattr(from, c"security.selinux", &mut context[..])
        && let Some(context) = context.get(..length)
        && let Err(error) = rustix::fs::fsetxattr(to, c"security.selinux", context, rustix::fs::XattrFlags::empty())
    {
        tracing::debug!(%error, "cannot keep the security context of resolv.conf");
    }
}

#[cfg(not(target_os = "linux"))]
fn copy_security_context(_from: &Path, _to: &File) {}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

fn sha256(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(64);
    for byte in Sha256::digest(bytes) {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Where a crash is interesting. Tests stop the process here, in a manner of speaking.
#[cfg(not(test))]
fn checkpoint() {}

#[cfg(test)]
fn checkpoint() {
    tests::checkpoint();
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
