//! Instructions that the pieces of the data path need, counted by valgrind: the same on every run and hardly different
//! between machines, so that ten per cent more are a fault and no noise. Compared with a stored baseline.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use crate::report::say;
use crate::{binaries, packages};

/// Each piece, how often it is done, and how many packets one time handles.
const PIECES: [(&str, u64, u64); 6] = [
    ("seal", 10, 49),
    ("open", 200, 1),
    ("split", 20, 49),
    ("coalesce", 40, 49),
    ("classify", 2000, 2),
    ("derp", 40, 49),
];
/// More than this above the baseline is a fault.
const TOLERANCE: f64 = 0.10;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Options {
    /// Store what is counted as the new baseline
    #[arg(long)]
    save: bool,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let counted = count()?;
    let stored = read_baseline()?;
    for (piece, instructions) in &counted {
        let before = stored.get(piece);
        let change = before.map(|before| (instructions / before - 1.0) * 100.0);
        let change = change.map_or_else(|| "new".to_owned(), |change| format!("{change:+.1} %"));
        say(&format!("{piece:9} {instructions:9.1} instructions a packet  {change}"));
    }
    if options.save {
        let lines: String = counted.iter().map(|(piece, count)| format!("{piece} {count:.1}\n")).collect();
        return std::fs::write(baseline(), format!("{HEAD}{lines}")).context("cannot store the baseline");
    }
    compare(&counted, &stored)
}

const HEAD: &str = "# Instructions a packet, counted by valgrind in the release profile. `cargo bench-micro --save` writes this file;\n\
                    # a change of toolchain or of ring is a reason, a slower data path needs a better one.\n";

fn baseline() -> PathBuf {
    binaries::workspace().join("tests/benches/instructions.txt")
}

type Counts = BTreeMap<String, f64>;

fn compare(counted: &Counts, stored: &Counts) -> anyhow::Result<()> {
    for (piece, count) in counted {
        let before =
            stored.get(piece).with_context(|| format!("{piece} has no baseline: run cargo bench-micro --save"))?;
        ensure!(
            *count <= before * (1.0 + TOLERANCE),
            "{piece} takes {count:.1} instructions a packet, {before:.1} before: find out why, or store a new baseline \
             with cargo bench-micro --save and say why in the commit"
        );
    }
    Ok(())
}

/// Compares with the baseline; `None` when valgrind is not there.
pub fn check() -> anyhow::Result<Option<()>> {
    if packages::find_program("valgrind").is_none() {
        return Ok(None);
    }
    compare(&count()?, &read_baseline()?).map(Some)
}

fn read_baseline() -> anyhow::Result<Counts> {
    let text = std::fs::read_to_string(baseline()).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines
        .map(|line| {
            let (piece, count) = line.split_once(' ').with_context(|| format!("{line:?} in the baseline"))?;
            Ok((piece.to_owned(), count.trim().parse()?))
        })
        .collect()
}

fn count() -> anyhow::Result<Counts> {
    let program = binaries::release_example("instructions")?;
    let counted = PIECES.into_iter().map(|(piece, times, packets)| {
        let more = instructions(&program, piece, times * 2)?;
        let less = instructions(&program, piece, times)?;
        ensure!(more > less, "{piece}: {more} instructions for twice of what takes {less}");
        Ok((piece.to_owned(), (more - less) as f64 / (times * packets) as f64))
    });
    counted.collect()
}

fn instructions(program: &std::path::Path, piece: &str, times: u64) -> anyhow::Result<u64> {
    let out = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args([piece, &times.to_string()])
        .stdin(Stdio::null())
        .output()
        .context("valgrind cannot be run")?;
    let text = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "valgrind: {text}");
    let line = text.lines().find_map(|line| line.split_once("Collected :")).context("valgrind counts nothing")?;
    Ok(line.1.trim().parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_per_cent_more_fail_and_less_passes() {
        let counts = |count: f64| Counts::from([("seal".to_owned(), count)]);
        assert!(compare(&counts(1099.0), &counts(1000.0)).is_ok());
        assert!(compare(&counts(10.0), &counts(1000.0)).is_ok());
        let error = compare(&counts(1101.0), &counts(1000.0)).unwrap_err().to_string();
        assert!(error.contains("--save"), "{error}");
        assert!(compare(&counts(1.0), &Counts::new()).is_err());
    }
}
