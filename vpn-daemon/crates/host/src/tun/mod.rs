//! The TUN device: up to 64 KiB of packets a read and a write, never blocking.
//!
//! The device lives as long as its descriptor: when the process ends, however it ends, the kernel
//! removes device, addresses and routes (`dns-and-os.md` 0.14).

use std::path::PathBuf;

mod checksum;
#[cfg(target_os = "linux")]
mod linux;
pub mod offload;
#[cfg(target_os = "linux")]
pub use linux::Tun;
#[cfg(target_os = "linux")]
pub(crate) use linux::interface_index;

#[cfg(not(target_os = "linux"))]
mod unsupported;
#[cfg(not(target_os = "linux"))]
pub use unsupported::Tun;

pub use offload::Frame;

/// What became of packets that were committed to a device.
#[derive(Debug, Default)]
pub struct Written {
    /// System calls that succeeded.
    pub writes: u64,
    pub packets: u64,
    /// Packets that the device did not take.
    pub dropped: u64,
    /// Why, if it did not take some.
    pub error: Option<std::io::Error>,
}

impl Written {
    /// One write moved `packets`.
    pub fn note(&mut self, packets: u64) {
        self.writes += 1;
        self.packets += packets;
    }

    /// One write of `packets` failed.
    pub fn fail(&mut self, packets: u64, error: std::io::Error) {
        self.dropped += packets;
        self.error = Some(error);
    }
}

/// Payload bytes of a full segment with the options that every segment has (time stamps).
const FULL_PAYLOAD: u32 = MTU - IP_AND_TCP;
const IP_AND_TCP: u32 = 40 + 32;
/// Full packets of the tunnel that one UDP send carries: each grows by 32 bytes when sealed.
pub(crate) const SEGMENTS_PER_SEND: u32 = 65_507 / (MTU + 32);
/// A super-packet of the kernel becomes one send, not one and a small rest (`fast-path.md` 4.2).
pub(crate) const GSO_MAX_SIZE: u32 = IP_AND_TCP + SEGMENTS_PER_SEND * FULL_PAYLOAD;

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
