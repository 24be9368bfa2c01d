//! Underlay against real servers on the loopback interface.

// Helpers of a test are not themselves marked as tests.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod http;
mod portmap;
mod relays;
mod support;
mod tls;
mod websocket;
