//! Where packets of local programs come from and go to.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use codervpn_host::tun::Tun;

/// One IPv6 packet a call, never blocking. The daemon's is a TUN device; the testbed's workspace agent has one of its
/// own, with a network stack in user space behind it.
pub trait PacketDevice: Send + 'static {
    /// The next packet, or `WouldBlock`.
    fn recv(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Passes a packet on. `WouldBlock` means that it was dropped.
    fn send(&mut self, packet: &[u8]) -> io::Result<()>;

    /// Readable when `recv` has something.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

impl PacketDevice for Tun {
    fn recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Tun::recv(self, buffer)
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        Tun::send(self, packet).map(drop)
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(self)
    }
}
