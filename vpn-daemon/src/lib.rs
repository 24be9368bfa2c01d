//! The daemon as a library, so that the testbed's workspace agent can run the very same data loop.

#![forbid(unsafe_code)]

pub mod args;
pub mod config;
pub mod daemon;
pub mod deployment;
pub mod failure;
mod forwarder;
pub mod ipc;
mod logging;
pub mod parameters;
pub mod party;
mod run;
mod signals;
pub mod status;
mod supervisor;
pub mod tunnel;
pub mod workspaces;

pub use run::run;
