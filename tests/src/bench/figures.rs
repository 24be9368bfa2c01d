//! What a run used: CPU time and memory of a process and of the whole machine, as the kernel accounts them.

use std::fs;

use anyhow::Context;

/// CPU seconds that a process has used so far.
pub(super) fn cpu_of(pid: u32) -> anyhow::Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name before may contain blanks and parentheses.
    let (_, fields) = stat.rsplit_once(')').context("/proc/PID/stat")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).context("/proc/PID/stat");
    Ok(seconds(ticks(11)? + ticks(12)?))
}

/// CPU seconds that everything together has used so far.
pub(super) fn cpu_of_all() -> anyhow::Result<f64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat")?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    // user, nice, system, then idle and iowait, then irq and softirq.
    Ok(seconds([0, 1, 2, 5, 6].into_iter().filter_map(|at| ticks.get(at)).sum()))
}

/// Resident memory of a process now, in MiB.
pub(super) fn memory_of(pid: u32) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    Ok(kib / 1024.0)
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Minimum, median and maximum of several runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spread {
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) max: f64,
}

impl Spread {
    /// Zeros for no runs at all.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or_default();
        Self { min: at(0), median: at(values.len() / 2), max: at(values.len().saturating_sub(1)) }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:8.3} {:8.3} {:8.3}", self.min, self.median, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_figures_can_be_read() {
        let me = std::process::id();
        assert!(cpu_of(me).unwrap() >= 0.0 && cpu_of_all().unwrap() > 0.0 && memory_of(me).unwrap() > 0.1);
    }

    #[test]
    fn a_spread_is_ordered() {
        let spread = Spread::of([3.0, 1.0, 2.0]);
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 2.0, 3.0));
        assert_eq!(Spread::of([]).max, 0.0);
    }
}
