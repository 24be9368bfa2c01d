//! Names of workspace agents and the DNS server inside the tunnel.
//!
//! What is decided here, sans-IO and without a clock:
//!
//! * [`suffix`]: which suffix of a server is acceptable on this machine;
//! * [`names`]: which names and which address an agent has;
//! * [`zone`]: the immutable snapshot that is looked up, and the handle through which it is swapped;
//! * [`answer`]: one DNS query in, one answer out (usable behind any transport);
//! * [`responder`]: one IPv6 packet for `fd60:627a:a42b::53` in, packets out, over UDP and TCP;
//! * [`forward`]: relaying to the machine's own name servers when the system can only have one;
//! * [`self_test`]: whether names resolve for the programs of this machine.
//!
//! # Why no DNS library
//!
//! The zone has four kinds of records, one record set per answer and no dynamic update. `hickory-server`'s catalog
//! is asynchronous (it brings an executor into the data thread), scans all names for a miss and lower-cases owners;
//! the forwarder relays raw messages and so needs the few fixed offsets of a message anyway. With one codec of
//! some three hundred lines (`message`) the question is echoed byte for byte, owners are a pointer to it, nothing is
//! allocated per query, and an answer cannot contain a byte of an earlier one. `hickory-proto` remains as a
//! development dependency: the tests decode every answer with it.
#![forbid(unsafe_code)]

pub mod answer;
pub mod forward;
mod message;
pub mod names;
mod packet;
pub mod responder;
pub mod self_test;
pub mod suffix;
mod suffix_tlds;
mod tcp;
#[cfg(test)]
mod tests;
pub mod zone;

pub use codervpn_wire::node::DNS_ADDRESS;

pub use answer::{Transport, Verdict, answer};
pub use forward::{BaseServers, ForwardId, ForwardReply, ForwardRequest, Forwarder};
pub use names::{Agent, AgentNames, Assignment, Skipped, Workspace, ZoneInput};
pub use responder::{Config, Responder, Stats};
pub use self_test::{DnsState, SelfTest};
pub use suffix::{Suffix, SuffixError, SuffixRules};
pub use zone::{Zone, ZoneHandle};
