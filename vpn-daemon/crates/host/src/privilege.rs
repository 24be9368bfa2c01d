//! Who we are, who asks, and who may open the socket: the calls that need `libc` or a look-up in
//! the system's user database, offered safely.
//!
//! Peers are judged by uid and groups only, as the kernel recorded them at `connect`
//! (`dns-and-os.md` 5.2); a pid may be reused and is for messages.

#[cfg(unix)]
pub use imp::*;

/// Credentials of the process that connected to a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    pub uid: u32,
    pub gid: u32,
    pub pid: Option<u32>,
}

/// uids the kernel shows for "nobody I can name here" in a user namespace: never trusted.
pub const OVERFLOW_UID: u32 = 65_534;

#[cfg(unix)]
mod imp {
    use std::ffi::CString;
    use std::io;
    use std::path::Path;

    /// Largest buffer for one entry of the user database: an entry that needs more (a group with
    /// some ten thousand members) is an error instead of unbounded memory.
    const MAX_ENTRY: usize = 1 << 20;

    /// The gid of a group, `None` when there is no such group.
    pub fn group_id(name: &str) -> io::Result<Option<u32>> {
        let Ok(name) = CString::new(name) else {
            return Ok(None);
        };
        with_growing_buffer(|buffer| {
            // SAFETY: all-zero is a valid `group`: integers and null pointers.
            let mut entry: libc::group = unsafe { std::mem::zeroed() };
            let mut found = std::ptr::null_mut();
            // SAFETY: every pointer is valid for the call and `buffer.len()` is its true length;
            // only `gr_gid`, an integer, is read afterwards, while the buffer is still alive.
            let code = unsafe {
                libc::getgrnam_r(
                    name.as_ptr(),
                    &raw mut entry,
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    &raw mut found,
                )
            };
            (code, (!found.is_null()).then_some(entry.gr_gid))
        })
    }

    /// The uid of a user by name, or by number when the text is one; `None` when there is none.
    pub fn user_id(name: &str) -> io::Result<Option<u32>> {
        if let Ok(uid) = name.parse() {
            return Ok(Some(uid));
        }
        let Ok(name) = CString::new(name) else {
            return Ok(None);
        };
        with_growing_buffer(|buffer| {
            // SAFETY: all-zero is a valid `passwd`: integers and null pointers.
            let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
            let mut found = std::ptr::null_mut();
            // SAFETY: as in `group_id`; only `pw_uid`, an integer, is read afterwards.
            let code = unsafe {
                libc::getpwnam_r(
                    name.as_ptr(),
                    &raw mut entry,
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    &raw mut found,
                )
            };
            (code, (!found.is_null()).then_some(entry.pw_uid))
        })
    }

    /// Calls a `…_r` function with more and more room until its entry fits.
    fn with_growing_buffer(mut call: impl FnMut(&mut [u8]) -> (libc::c_int, Option<u32>)) -> io::Result<Option<u32>> {
        let mut buffer = vec![0; 1024];
        loop {
            match call(&mut buffer) {
                (0, found) => return Ok(found),
                (libc::ERANGE, _) if buffer.len() < MAX_ENTRY => {
                    let longer = buffer.len() * 4;
                    buffer.resize(longer, 0);
                }
                // Systems without the entry may say so by one of these (getpwnam_r(3)).
                (libc::ENOENT | libc::ESRCH, _) => return Ok(None),
                (code, _) => return Err(io::Error::from_raw_os_error(code)),
            }
        }
    }

    /// Gives a socket file to `group` and sets its mode. Create it strict (0600) and call this
    /// afterwards: `bind` applies the umask, and going from stricter to wider leaves no window.
    pub fn set_socket_access(path: &Path, group: Option<u32>, mode: u32) -> io::Result<()> {
        use std::os::unix::fs::PermissionsExt as _;
        if let Some(group) = group {
            std::os::unix::fs::lchown(path, None, Some(group))?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode & 0o777))
    }

    #[cfg(target_os = "linux")]
    pub use super::linux::*;
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::fd::{AsFd, AsRawFd as _};

    use rustix::process::{DumpableBehavior, Resource, Rlimit};
    use rustix::thread::CapabilitySet;

    use super::PeerCredentials;

    /// A process is in at most NGROUPS_MAX groups.
    const MAX_GROUPS: usize = 65_536;

    /// uid, gid and pid of the process that connected.
    pub fn peer_credentials(socket: impl AsFd) -> io::Result<PeerCredentials> {
        let peer = rustix::net::sockopt::socket_peercred(socket)?;
        Ok(PeerCredentials {
            uid: peer.uid.as_raw(),
            gid: peer.gid.as_raw(),
            pid: u32::try_from(peer.pid.as_raw_nonzero().get()).ok(),
        })
    }

    /// The supplementary groups of the process that connected, without asking a user database
    /// (SO_PEERGROUPS). Its primary group is in [`peer_credentials`].
    pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
        let socket = socket.as_fd();
        let mut groups = vec![0_u32; 64];
        loop {
            let mut length = libc::socklen_t::try_from(std::mem::size_of_val(&groups[..])).map_err(io::Error::other)?;
            // SAFETY: `groups` is a live buffer of `length` bytes whose elements accept any bits,
            // `length` is a valid in-out pointer, and the descriptor is borrowed for the call.
            let code = unsafe {
                libc::getsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_PEERGROUPS,
                    groups.as_mut_ptr().cast(),
                    &raw mut length,
                )
            };
            // The kernel writes the length that is needed into `length` in both cases.
            let needed = usize::try_from(length).unwrap_or(usize::MAX) / size_of::<u32>();
            if code == 0 {
                groups.truncate(needed);
                return Ok(groups);
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::ERANGE) || needed <= groups.len() || needed > MAX_GROUPS {
                return Err(error);
            }
            groups.resize(needed, 0);
        }
    }

    /// Whether the kernel will let us create devices, routes and rules in this namespace.
    pub fn has_net_admin() -> bool {
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN))
    }

    /// Our own effective uid.
    pub fn effective_uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    /// Keeps the token out of core files and away from `ptrace`, and closes set-uid programs as a
    /// way up (`dns-and-os.md` 3.5). Call it first in `main`, before any thread starts: the last
    /// of the three holds for the calling thread and the threads it starts.
    pub fn harden_process() -> io::Result<()> {
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
        rustix::thread::set_no_new_privs(true)?;
        Ok(())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn names_are_looked_up_and_absent_ones_are_none() {
        assert_eq!(user_id("root").unwrap(), Some(0));
        assert_eq!(user_id("1234").unwrap(), Some(1234));
        assert_eq!(user_id("no-such-user-here").unwrap(), None);
        assert_eq!(user_id("nul\0byte").unwrap(), None);
        assert_eq!(group_id("root").unwrap(), Some(0));
        assert_eq!(group_id("no-such-group-here").unwrap(), None);
    }

    #[test]
    fn a_peer_is_who_connected() {
        let (left, _right) = UnixStream::pair().unwrap();
        let peer = peer_credentials(&left).unwrap();
        assert_eq!(peer.uid, effective_uid());
        assert_eq!(peer.pid, Some(std::process::id()));
        let groups = peer_groups(&left).unwrap();
        let mut ours: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|gid| gid.as_raw()).collect();
        ours.sort_unstable();
        let mut theirs = groups;
        theirs.sort_unstable();
        assert_eq!(theirs, ours);
    }

    // S-01: the mode is the configured one whatever the umask was.
    #[test]
    fn socket_mode_is_exact() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vpn.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        set_socket_access(&path, None, 0o660).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
    }
}
