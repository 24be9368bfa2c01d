//! Keeps what was measured, for both sides next to each other, and says which of the bars that we set ourselves hold.

use super::figures::Spread;
use crate::report::say;

/// Whose figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Ours,
    Go,
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Go => "Go",
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    comparison: &'static str,
    load: String,
    figure: &'static str,
    ours: Vec<f64>,
    go: Vec<f64>,
}

/// What a figure has to be: the ratio of medians to Go's, or our median itself.
#[derive(Debug, Clone, Copy)]
enum Bar {
    RatioAtLeast(f64, f64),
    RatioAtMost(f64, f64),
    AtLeast(f64, f64),
    AtMost(f64, f64),
}

/// Comparison, beginning of the load, figure; what must be and what we aim at.
const BARS: &[(&str, &str, &str, Bar)] = &[
    ("tun-direct", "tcp x1", "Gbit/s", Bar::RatioAtLeast(1.4, 1.8)),
    ("tun-direct", "tcp x1", "CPU-s/GB both ends", Bar::RatioAtMost(0.6, 0.5)),
    ("tun-direct", "plain links tcp x1", "Gbit/s", Bar::RatioAtLeast(2.2, 3.2)),
    ("tun-direct", "plain links tcp x1", "CPU-s/GB both ends", Bar::RatioAtMost(0.45, 0.3)),
    ("tun-direct", "udp", "% lost in the tunnel", Bar::AtMost(0.1, 0.0)),
    ("tun-direct", "ping", "average ms", Bar::AtMost(0.2, 0.15)),
    ("tun-direct", "tcp x1", "ping average ms", Bar::AtMost(4.0, 2.0)),
    ("tun-relay", "tcp x1", "Gbit/s", Bar::AtLeast(2.0, 4.0)),
    ("agent-relay", "tcp x1", "Gbit/s", Bar::RatioAtLeast(1.1, 1.3)),
    ("agent-direct", "tcp x1 up", "Gbit/s", Bar::RatioAtLeast(1.0, 1.2)),
    ("agent-direct", "tcp x1 down", "Gbit/s", Bar::RatioAtLeast(1.2, 1.4)),
    ("agent-", "tcp x1", "CPU-s/GB client", Bar::RatioAtMost(0.5, 0.3)),
    ("", "tcp", "RSS MiB client", Bar::AtMost(25.0, 15.0)),
    ("", "idle", "RSS MiB client", Bar::AtMost(15.0, 10.0)),
];

impl Table {
    pub(super) fn add(&mut self, comparison: &'static str, load: &str, figure: &'static str, side: Side, value: f64) {
        let same = |row: &Row| row.comparison == comparison && row.load == load && row.figure == figure;
        let at = self.rows.iter().position(same).unwrap_or_else(|| {
            self.rows.push(Row { comparison, load: load.to_owned(), figure, ours: Vec::new(), go: Vec::new() });
            self.rows.len() - 1
        });
        if let Some(row) = self.rows.get_mut(at) {
            match side {
                Side::Ours => row.ours.push(value),
                Side::Go => row.go.push(value),
            }
        }
    }

    /// Prints everything; false when something that must be is not.
    pub(super) fn print(&self) -> bool {
        let mut holds = true;
        let mut printed = "";
        for row in &self.rows {
            if row.comparison != printed {
                printed = row.comparison;
                say(&format!(
                    "\n{printed:51} ours:   min    median       max    Go:   min    median       max  ours/Go  bar"
                ));
            }
            let (verdict, met) = row.verdict();
            holds &= met;
            say(&row.line(&verdict));
        }
        holds
    }
}

impl Row {
    fn line(&self, verdict: &str) -> String {
        let side = |values: &[f64]| match values {
            [] => format!("{:>29}", "-"),
            values => Spread::of(values.iter().copied()).to_string(),
        };
        let ratio = self.ratio().map_or_else(|| format!("{:>8}", "-"), |ratio| format!("{ratio:8.3}"));
        let (ours, go) = (side(&self.ours), side(&self.go));
        format!("  {:24} {:24} {ours}  {go} {ratio}  {verdict}", self.load, self.figure)
    }

    fn median(values: &[f64]) -> Option<f64> {
        (!values.is_empty()).then(|| Spread::of(values.iter().copied()).median)
    }

    fn ratio(&self) -> Option<f64> {
        let ratio = Self::median(&self.ours)? / Self::median(&self.go)?;
        ratio.is_finite().then_some(ratio)
    }

    fn verdict(&self) -> (String, bool) {
        let fits = |(comparison, load, figure, _): &&(&str, &str, &str, Bar)| {
            self.comparison.starts_with(comparison) && self.load.starts_with(load) && self.figure == *figure
        };
        let Some((_, _, _, bar)) = BARS.iter().find(fits) else { return (String::new(), true) };
        let (value, sign, must, goal) = match *bar {
            Bar::RatioAtLeast(must, goal) => (self.ratio(), ">=", must, goal),
            Bar::RatioAtMost(must, goal) => (self.ratio(), "<=", must, goal),
            Bar::AtLeast(must, goal) => (Self::median(&self.ours), ">=", must, goal),
            Bar::AtMost(must, goal) => (Self::median(&self.ours), "<=", must, goal),
        };
        let Some(value) = value else { return (String::new(), true) };
        let meets = |bar: f64| if sign == ">=" { value >= bar } else { value <= bar };
        let word = match (meets(must), meets(goal)) {
            (_, true) => "goal met",
            (true, false) => "met",
            (false, _) => "MISSED",
        };
        (format!("{word} (must {sign} {must}, goal {goal})"), meets(must))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(ours: f64, go: f64) -> Table {
        let mut table = Table::default();
        for (side, value) in [(Side::Ours, ours), (Side::Go, go)] {
            table.add("tun-direct", "tcp x1 up", "Gbit/s", side, value);
        }
        table
    }

    #[test]
    fn bars_are_ratios_of_medians() {
        let verdict = |ours, go| table(ours, go).rows[0].verdict();
        assert_eq!(verdict(5.4, 3.0), ("goal met (must >= 1.4, goal 1.8)".into(), true));
        assert_eq!(verdict(4.5, 3.0), ("met (must >= 1.4, goal 1.8)".into(), true));
        assert_eq!(verdict(3.0, 3.0), ("MISSED (must >= 1.4, goal 1.8)".into(), false));
    }

    #[test]
    fn a_missing_side_misses_no_bar() {
        let mut table = Table::default();
        table.add("tun-direct", "tcp x1 up", "Gbit/s", Side::Ours, 1.0);
        assert_eq!(table.rows[0].verdict(), (String::new(), true));
    }
}
