//! Decides what real networks look like in tests: namespaces joined by virtual cables, routers of nft's making between
//! them, and on the far side of the routers an "internet" with deployment, relay and STUN servers.
//!
//! ```text
//! client (the test's own namespace) ── router ── internet ── router ── agent
//! ```
//!
//! [`Topology`] lists the networks and which path must result in each; [`Lab`] builds one; [`Machine`] runs parts of the
//! testbed in a namespace of theirs; [`Probes`] counts what is lost while something breaks.

mod machine;
mod probes;
mod router;
mod topology;

pub use machine::Machine;
pub use probes::{Gap, PACE, Probes};
pub use topology::{Expected, Lab, Topology};
