//! The one door for what harnesses say to people.

use std::io::Write;

/// One line on stdout, where the test harness captures it.
#[expect(clippy::print_stdout, reason = "the test harness captures print! alone")]
pub fn say(line: &str) {
    println!("{line}");
}

/// One line on stderr that no test harness captures: what has to be seen even
/// when every test passes.
pub fn announce(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
