//! A network that exists only in memory, with any number of tunnel engines in it: every time, delay, loss and port comes
//! from one seed, so whatever goes wrong can be made to go wrong again.
//!
//! *What is real*: the engine with its cryptography, and all bytes it emits and takes. *What is not*: time, sockets,
//! NATs, relays, STUN servers, the coordinator, and the slow side of a party (measuring, binding, dialling), which does
//! here what the daemon does, with delays of its own.
//!
//! Time jumps from one event to the next, so idle hours are nearly free. Two clocks have to agree: the engine's, which
//! is an argument, and boringtun's, which reads one by itself; its feature `mock-instant` makes that one ours. Features
//! unify within a workspace, so this package stays outside of it and the product never sees the feature. The mocked clock
//! belongs to a thread: one world at a time on each.
//!
//! What must hold is checked after every step by [`World`]: see `invariants.rs`. `topology.rs` is the table of networks
//! and of the path that must result in each; `scenario.rs` makes up networks and troubles from seeds.
#![forbid(unsafe_code)]

mod coordinator;
mod inner;
mod invariants;
mod nat;
mod network;
mod party;
mod queue;
mod relay;
mod rng;
pub mod scenario;
mod site;
pub mod topology;
mod troubles;
mod wire;
mod world;

pub use codervpn_wire::derp_map::RegionId;
pub use invariants::{Extremes, Observed};
pub use nat::{Firewall, Nat, Ports, Scope};
pub use network::{HostId, Network, RouterId, SegmentId};
pub use party::PartyId;
pub use rng::Rng;
pub use site::{Family4, Site, SiteId};
pub use wire::Wire;
pub use world::{Flow, World};

/// Time since the world began.
pub type Time = std::time::Duration;

/// Milliseconds.
#[must_use]
pub const fn ms(n: u64) -> Time {
    Time::from_millis(n)
}

/// Seconds.
#[must_use]
pub const fn secs(n: u64) -> Time {
    Time::from_secs(n)
}
