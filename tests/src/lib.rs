//! A Coder deployment in miniature and everything that proves the programs
//! against it: test harnesses, foreign peers, the demo and `cargo verify`.
#![forbid(unsafe_code)]

pub mod bench;
pub mod binaries;
pub mod daemon;
pub mod foreign;
pub mod netns;
pub mod packages;
pub mod report;
pub mod rootfs;
pub mod skip;
