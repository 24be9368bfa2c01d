//! `cargo simulate`: scenarios from seeds, as many hours of them as are asked for, on every core.
//!
//! ```text
//! cargo simulate -- [--hours N] [--seed N]     many, from this seed on; 200 hours if nothing is said
//! cargo simulate -- --only N                   the scenario of one seed
//! cargo simulate -- --table [PART]             the table of networks, or the rows whose names have this part
//! ```
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use codervpn_engine_sim::{scenario, topology};

#[derive(Default)]
struct Args {
    hours: Option<u64>,
    seed: u64,
    only: Option<u64>,
    table: Option<String>,
}

fn main() -> ExitCode {
    let Some(args) = parse(std::env::args().skip(1)) else {
        say("usage: cargo simulate -- [--hours N] [--seed N] | --only SEED | --table [PART]");
        return ExitCode::from(2);
    };
    match args {
        Args { table: Some(part), .. } => table(&part, args.seed),
        Args { only: Some(seed), .. } => {
            let outcome = scenario::play(seed);
            say(&format!("{outcome:#?}"));
            ExitCode::SUCCESS
        }
        Args { hours, seed, .. } => many(hours.unwrap_or(200), seed),
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Option<Args> {
    let mut args = Args::default();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--hours" => args.hours = Some(words.next()?.parse().ok()?),
            "--seed" => args.seed = words.next()?.parse().ok()?,
            "--only" => args.only = Some(words.next()?.parse().ok()?),
            "--table" => args.table = Some(words.next().unwrap_or_default()),
            _ => return None,
        }
    }
    Some(args)
}

fn table(part: &str, seed: u64) -> ExitCode {
    let mut failed = 0;
    for row in topology::table().into_iter().filter(|row| row.name.contains(part)) {
        match std::panic::catch_unwind(|| row.play(seed)) {
            Ok(outcome) => say(&format!(
                "{:75} {:?}: answered after {:?}, direct after {:?}, again after {:?}",
                row.name, row.expected, outcome.answered, outcome.direct, outcome.again
            )),
            Err(_) => failed += 1,
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn many(hours: u64, first: u64) -> ExitCode {
    let begin = Instant::now();
    let many = scenario::many(hours, first, |seed| {
        say(&format!("seed {seed} failed; repeat it with: cargo simulate -- --only {seed}"));
    });
    let (recovery, seed) = many.slowest;
    say(&format!("slowest recovery {recovery:?} in seed {seed}, most path messages in seed {}", many.loudest.1));
    say(&format!("{many} in {:.1} s", begin.elapsed().as_secs_f64()));
    if many.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The one door for output.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
