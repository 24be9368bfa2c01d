//! Where packets of local programs come from and go to.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use codervpn_host::tun::{Frame, Tun, Written};

/// IPv6 packets in and out, never blocking. The daemon's is a TUN device, which moves many a call; the testbed's workspace
/// agent has one of its own, with a network stack in user space behind it.
pub trait PacketDevice: Send + 'static {
    /// Reads what there is next into `frame`, or `WouldBlock`.
    fn recv(&mut self, frame: &mut Frame) -> io::Result<()>;

    /// Room for one packet of up to `room` bytes.
    fn room(&mut self, room: usize) -> Option<&mut [u8]>;

    /// The first `length` bytes of the last room are a packet; it may wait for the next flush.
    fn commit(&mut self, length: usize);

    /// Passes everything on, and says what became of it since the last flush.
    fn flush(&mut self) -> Written;

    /// Readable when `recv` has something.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

impl PacketDevice for Tun {
    fn recv(&mut self, frame: &mut Frame) -> io::Result<()> {
        Tun::recv(self, frame)
    }

    fn room(&mut self, room: usize) -> Option<&mut [u8]> {
        Tun::room(self, room)
    }

    fn commit(&mut self, length: usize) {
        Tun::commit(self, length);
    }

    fn flush(&mut self) -> Written {
        Tun::flush(self)
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(self)
    }
}
