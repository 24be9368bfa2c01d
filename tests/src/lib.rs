//! A Coder deployment in miniature and everything that proves the programs
//! against it: test harnesses, foreign peers, the demo and `cargo verify`.
#![forbid(unsafe_code)]

pub mod agent;
pub mod bench;
pub mod binaries;
pub mod cli;
pub mod coderd;
pub mod daemon;
pub mod demo;
pub mod foreign;
pub mod lab;
pub mod netns;
pub mod packages;
pub mod relay;
pub mod report;
pub mod rootfs;
pub mod skip;
