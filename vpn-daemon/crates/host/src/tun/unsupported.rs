//! The shape of the device on systems that have no back end yet.

use std::io;

use super::{Error, Frame, Written};
use crate::Unsupported;

/// Never exists: [`Tun::open`] fails here.
#[derive(Debug)]
pub struct Tun(std::convert::Infallible);

impl Tun {
    pub fn open(_name: &str, _mtu: u32) -> Result<Self, Error> {
        Err(Unsupported("the tunnel device").into())
    }

    pub fn name(&self) -> &str {
        match self.0 {}
    }

    pub fn index(&self) -> u32 {
        match self.0 {}
    }

    pub fn mtu(&self) -> u32 {
        match self.0 {}
    }

    pub fn without_offload(&mut self) {
        match self.0 {}
    }

    pub fn recv(&mut self, _frame: &mut Frame) -> io::Result<()> {
        match self.0 {}
    }

    pub fn room(&mut self, _room: usize) -> Option<&mut [u8]> {
        match self.0 {}
    }

    pub fn commit(&mut self, _length: usize) {
        match self.0 {}
    }

    pub fn flush(&mut self) -> Written {
        match self.0 {}
    }
}

#[cfg(unix)]
impl std::os::fd::AsFd for Tun {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self.0 {}
    }
}
