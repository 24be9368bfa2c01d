//! The one door for output: results to standard output, everything else to standard error.
//!
//! Colours only for a terminal, and never with `NO_COLOR`. Texts come from servers and files, so control characters,
//! which could steer the terminal, are taken out here.

use std::env;
use std::io::{self, IsTerminal as _, Write};

use crate::problem::{Exit, Problem};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Colour {
    Green,
    Yellow,
    Red,
}

/// How text for one stream may look.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    colours: bool,
}

impl Style {
    pub(crate) fn paint(self, colour: Colour, text: &str) -> String {
        let code = match colour {
            Colour::Green => 32,
            Colour::Yellow => 33,
            Colour::Red => 31,
        };
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

pub(crate) struct Output {
    results: Style,
    diagnostics: Style,
    /// Standard error is a terminal: what goes on may be shown there.
    live: bool,
    /// A line of progress stands there and is to be wiped.
    progress: bool,
}

impl Output {
    pub(crate) fn new() -> Self {
        let colours = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let live = io::stderr().is_terminal();
        Self {
            results: Style { colours: colours && io::stdout().is_terminal() },
            diagnostics: Style { colours: colours && live },
            live,
            progress: false,
        }
    }

    pub(crate) fn style(&self) -> Style {
        self.results
    }

    /// Whether a watched status may be drawn over the one before.
    pub(crate) fn redraws(&self) -> bool {
        io::stdout().is_terminal()
    }

    /// Lines made by `render` or `json`. Whoever read them may be gone: nothing is left to be done then.
    pub(crate) fn result(&mut self, text: &str) -> Result<(), Problem> {
        self.wipe();
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.write_all(b"\n")).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Problem::new(Exit::Success, "", "")),
            Err(error) => Err(Problem::failed(format!("cannot write the result: {error}"), "")),
        }
    }

    /// Clears the screen first, so that the newest state stays in place.
    pub(crate) fn redraw(&mut self, text: &str) -> Result<(), Problem> {
        self.result(&format!("\x1b[H\x1b[2J{text}"))
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.diagnose(&clean(text));
    }

    pub(crate) fn warning(&mut self, text: &str) {
        let label = self.diagnostics.paint(Colour::Yellow, "warning:");
        self.diagnose(&format!("{label} {}", clean(text)));
    }

    pub(crate) fn problem(&mut self, problem: &Problem) {
        if problem.what.is_empty() {
            return;
        }
        let label = self.diagnostics.paint(Colour::Red, "error:");
        self.diagnose(&format!("{label} {}", clean(&problem.what)));
        if !problem.remedy.is_empty() {
            self.diagnose(&format!("what to do: {}", clean(&problem.remedy)));
        }
    }

    /// What goes on at the moment; only for somebody who watches.
    pub(crate) fn progress(&mut self, text: &str) {
        if self.live {
            self.progress = true;
            let _ = write!(io::stderr(), "\r\x1b[K{}", clean(text).replace('\n', " "));
        }
    }

    fn wipe(&mut self) {
        if self.progress {
            self.progress = false;
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }

    /// When standard error cannot be written, nobody can be told.
    fn diagnose(&mut self, text: &str) {
        self.wipe();
        let _ = writeln!(io::stderr(), "{text}");
    }
}

/// Without control characters but line feeds.
pub(crate) fn clean(text: &str) -> String {
    text.chars().filter(|c| *c == '\n' || !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_steers_the_terminal() {
        assert_eq!(clean("a\x1b[2Jb\r\u{9b}31mc\nd\u{7f}"), "a[2Jb31mc\nd");
        assert_eq!(Style { colours: false }.paint(Colour::Red, "x"), "x");
        assert_eq!(Style { colours: true }.paint(Colour::Red, "x"), "\x1b[31mx\x1b[0m");
    }
}
