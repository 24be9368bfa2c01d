//! The program as a user runs it, against a service played by the tests.
//!
//! Each test has a socket and a configuration folder of its own. The service speaks through the project's speaker, which
//! is strict about framing and roles.

#![forbid(unsafe_code)]

#[cfg(test)]
mod login;
#[cfg(test)]
mod support;

#[cfg(test)]
mod ping;
#[cfg(test)]
mod start;
#[cfg(test)]
mod status;
#[cfg(test)]
mod stop;
#[cfg(test)]
mod unreachable;
