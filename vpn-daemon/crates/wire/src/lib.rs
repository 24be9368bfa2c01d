//! Decides what bytes mean: the frames of relays (`derp`), path messages (`disco`), address discovery (`stun`),
//! remote calls (`drpc`), liveness inside the tunnel (`tsmp`), IPv6 packets (`ip`), what a datagram is (`classify`),
//! keys and their text forms (`keys`), and the validated form of what the control plane says about a party (`node`)
//! and about relays (`derp_map`).
//!
//! Everything here is a function from bytes to values or back. There is no socket, no clock and no source of
//! randomness: both are arguments. No parser panics, whatever its input; on the data path (`derp`, `disco`, `stun`,
//! `tsmp`, `ip`, `classify`) nothing allocates either, parsers borrow from their input and builders write into a
//! buffer of the caller.
#![forbid(unsafe_code)]

pub mod classify;
pub mod derp;
pub mod derp_map;
pub mod disco;
pub mod drpc;
pub mod ip;
pub mod keys;
pub mod node;
pub mod stun;
pub mod tsmp;

mod text;
