//! Decides whether `wire` speaks the bytes that real programs speak, and survives those that nobody should send.

#![forbid(unsafe_code)]
// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod limits;
mod properties;
mod replay;
mod tunnel;
mod vectors;

/// Bytes of hex digits.
fn hex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "odd number of hex digits");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// A vector by its name.
fn vector(name: &str) -> Vec<u8> {
    let line = vector_lines().find(|(line, _)| *line == name);
    hex(line.unwrap_or_else(|| panic!("no vector {name}")).1)
}

fn vector_lines() -> impl Iterator<Item = (&'static str, &'static str)> {
    include_str!("../data/vectors.txt").lines().filter_map(|line| line.split_once(" = "))
}

fn array<const N: usize>(text: &str) -> [u8; N] {
    hex(text).try_into().unwrap()
}
