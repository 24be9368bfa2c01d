//! The Linux device: `/dev/net/tun`, single queue (a second queue would let another process
//! attach to the same device and split the traffic), never persistent, offload switched off.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::Errno;
use tun::AbstractDevice as _;

use super::{Error, is_valid_name};

/// An open TUN device. `recv` and `send` never block; wait with `poll(2)` on [`AsFd`].
#[derive(Debug)]
pub struct Tun {
    fd: OwnedFd,
    name: String,
    index: u32,
    mtu: u32,
}

impl Tun {
    /// Creates the device `name`. It stays down, without address and with the kernel's default
    /// MTU, until [`crate::routes::Routes::apply`] has set it up; `mtu` is what will be set then.
    pub fn open(name: &str, mtu: u32) -> Result<Self, Error> {
        if !is_valid_name(name) {
            return Err(Error::BadName { name: name.to_owned() });
        }
        // A persistent device that nobody holds would be attached to instead of refused, and would
        // outlive us.
        if interface_index(name).is_some() {
            return Err(Error::NameTaken { name: name.to_owned() });
        }

        let mut configuration = tun::Configuration::default();
        configuration.tun_name(name);
        // Without this the crate configures IPv4 settings that we do not have.
        configuration.platform_config(|platform| {
            platform.ensure_root_privileges(false);
        });
        let device = tun::create(&configuration).map_err(|error| open_error(name, error))?;
        let io = |source: io::Error| Error::Io { name: name.to_owned(), source };
        let index = device
            .tun_index()
            .ok()
            .and_then(|index| u32::try_from(index).ok())
            .ok_or_else(|| io(io::Error::other("it has no index")))?;

        // SAFETY: `device` owns this descriptor and outlives the borrow, which ends with the
        // duplication in the same statement.
        let borrowed = unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) };
        // Our own duplicate, so that reads and writes are plain safe calls on an `OwnedFd`.
        let fd = rustix::io::fcntl_dupfd_cloexec(borrowed, 3).map_err(|e| io(e.into()))?;
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(|e| io(e.into()))?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK).map_err(|e| io(e.into()))?;

        Ok(Tun { fd, name: name.to_owned(), index, mtu })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The interface index, as netlink and systemd-resolved want it.
    pub fn index(&self) -> u32 {
        self.index
    }

    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Reads one packet. `WouldBlock` when there is none; any other error means that the device
    /// is gone (`dns-and-os.md` 6.5). A packet longer than `buffer` is cut: give at least the MTU.
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.fd, &mut *buffer) {
                Err(Errno::INTR) => {}
                result => return result.map_err(io::Error::from),
            }
        }
    }

    /// Hands one packet to the kernel. `WouldBlock` when it takes none at the moment (drop it and
    /// count), `InvalidInput` when it is not an IP packet, EIO while the device is down.
    pub fn send(&self, packet: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.fd, packet) {
                Err(Errno::INTR) => {}
                result => return result.map_err(io::Error::from),
            }
        }
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The index of an existing interface of this network namespace.
pub(crate) fn interface_index(name: &str) -> Option<u32> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .ok()?;
    rustix::net::netdevice::name_to_index(&socket, name).ok()
}

fn open_error(name: &str, error: tun::Error) -> Error {
    let source = match error {
        tun::Error::Io(source) => source,
        other => io::Error::other(other.to_string()),
    };
    match Errno::from_io_error(&source) {
        Some(Errno::BUSY | Errno::EXIST) => Error::NameTaken { name: name.to_owned() },
        Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Error::NoDeviceNode { path: PathBuf::from("/dev/net/tun") },
        Some(Errno::PERM | Errno::ACCESS) => Error::NotPermitted,
        _ => Error::Io { name: name.to_owned(), source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_patterns_or_too_long_are_refused() {
        for bad in ["", "coder%d", "a/b", "sixteen-letters-", ".", "..", "a b", "ü"] {
            assert!(matches!(Tun::open(bad, 1280), Err(Error::BadName { .. })), "{bad:?}");
        }
        assert!(is_valid_name("coder0"));
        assert!(is_valid_name("fifteen-letters"));
    }
}
