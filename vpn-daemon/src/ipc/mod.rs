//! The local socket: who may connect, and one task for each who does.

pub mod access;
mod check;
mod client;
mod listener;

pub use listener::{Listener, Open};
