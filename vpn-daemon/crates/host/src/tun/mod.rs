//! The TUN device: one IPv6 packet a read, one packet a write, never blocking.
//!
//! The device lives as long as its descriptor: when the process ends, however it ends, the kernel
//! removes device, addresses and routes (`dns-and-os.md` 0.14).

use std::path::PathBuf;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub use linux::Tun;
#[cfg(target_os = "linux")]
pub(crate) use linux::interface_index;

#[cfg(not(target_os = "linux"))]
mod unsupported;
#[cfg(not(target_os = "linux"))]
pub use unsupported::Tun;

/// The MTU of the tunnel. The kernel removes every IPv6 address from a device below it.
pub const MTU: u32 = 1280;

/// IFNAMSIZ without its terminating zero.
const MAX_NAME: usize = 15;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the network interface {name} exists already: another VPN (perhaps Coder Desktop) owns it; stop that one, or set tun.name"
    )]
    NameTaken { name: String },
    #[error("{name:?} cannot name a network interface: 1 to 15 letters, digits, '-', '_' or '.'")]
    BadName { name: String },
    #[error(
        "{} does not exist: load the kernel module (modprobe tun); in a container add --device /dev/net/tun",
        .path.display()
    )]
    NoDeviceNode { path: PathBuf },
    #[error(
        "not permitted to create a network interface: run codervpnd as root, or with CAP_NET_ADMIN and access to /dev/net/tun; in a container add --cap-add NET_ADMIN"
    )]
    NotPermitted,
    #[error("cannot create the network interface {name}: {source}")]
    Io { name: String, source: std::io::Error },
    #[error(transparent)]
    Unsupported(#[from] crate::Unsupported),
}

/// What the kernel accepts, less the names that would be patterns (`%d`) or confuse tools.
pub fn is_valid_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name != "."
        && name != ".."
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}
