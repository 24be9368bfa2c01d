//! Everything asked of this machine's operating system: the TUN device, addresses, routes and
//! rules, the system's resolver, process privileges, and the clean-up after a daemon that died.
//!
//! This is the only crate with `unsafe`, and the only one that names `tun`, `rtnetlink` and
//! `zbus`. It knows nothing of Coder: callers hand in addresses, prefixes and suffixes.
//!
//! Order of use: [`lock::InstanceLock`] → [`cleanup::undo_leftovers`] → [`tun::Tun::open`] →
//! [`routes::Routes::apply`] → [`dns::install`]; to stop, the same backwards, the device last.
//! Everything that could outlive the process leaves a record in [`Paths::state_dir`] before it is
//! done, so that [`cleanup::cleanup`] can undo it without the daemon, a bus or a network.
//!
//! Linux is complete. The other systems type-check and answer "unsupported on this platform yet";
//! what differs per system is chosen at module level only.

pub mod addresses;
pub mod cleanup;
pub mod dns;
#[cfg(target_os = "linux")]
mod files;
pub mod links;
pub mod lock;
mod paths;
pub mod privilege;
pub mod routes;
pub mod tun;

pub use paths::Paths;

/// Said by everything that exists on Linux only so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is unsupported on this platform yet")]
pub struct Unsupported(pub &'static str);
