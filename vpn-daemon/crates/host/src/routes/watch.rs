//! Hears that something about links, addresses, routes or rules has changed, ours or not: what exactly is cheaper to
//! look up ([`super::Routes::check`]) than to tell apart, and a queue that overran says the same.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tokio::io::unix::AsyncFd;

use super::Error;

/// Links, and IPv6 addresses, routes and rules: bit n−1 for group n.
const GROUPS: u32 = 1 | 1 << (9 - 1) | 1 << (11 - 1) | 1 << (19 - 1);

/// As above without rules, and IPv4 addresses and routes.
const NETWORKS: u32 = 1 | 1 << (5 - 1) | 1 << (7 - 1) | 1 << (9 - 1) | 1 << (11 - 1);

/// A netlink socket that only listens.
#[derive(Debug)]
pub struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    /// Must be called within a runtime.
    pub fn new() -> Result<Self, Error> {
        Self::to(GROUPS)
    }

    /// Hears of links, and of addresses and routes of both families. Must be called within a runtime.
    pub(crate) fn networks() -> Result<Self, Error> {
        Self::to(NETWORKS)
    }

    fn to(groups: u32) -> Result<Self, Error> {
        let open = || -> io::Result<Self> {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            // NETLINK_ROUTE is protocol 0, the default.
            let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
            bind(&socket, &SocketAddrNetlink::new(0, groups))?;
            // SAFETY: an `OwnedFd` is open, always names the same socket, and lives as long as the `AsyncFd` that owns it.
            Ok(Self(unsafe { AsyncFd::register(socket) }?))
        };
        open().map_err(|source| Error::Netlink { what: "watch routes", source })
    }

    /// Resolves after a change. May be dropped while it waits.
    pub async fn changed(&self) {
        loop {
            let Ok(mut ready) = self.0.readable().await else {
                // Only while the runtime ends.
                return std::future::pending().await;
            };
            // What is left of a longer message is dropped by the kernel; nobody reads it.
            let heard = ready.try_io(|socket| {
                recv(socket.get_ref(), &mut [0_u8; 16][..], RecvFlags::empty()).map_err(io::Error::from)
            });
            // An error, such as a queue that overran, means that changes were missed.
            if heard.is_ok() {
                return;
            }
        }
    }

    /// Forgets what was heard so far, since what follows looks at everything.
    pub fn clear(&self) {
        // Bounded: a machine whose routes change all the time must not hold us.
        for _ in 0..1024 {
            if recv(self.0.get_ref(), &mut [0_u8; 16][..], RecvFlags::empty()).is_err() {
                return;
            }
        }
    }
}
