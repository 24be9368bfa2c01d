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

/// The same to the nanosecond, for a process that does hardly anything; what ended threads used is not in it.
pub(super) fn precise_cpu_of(pid: u32) -> anyhow::Result<f64> {
    let mut nanoseconds = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().context("schedstat")?.parse::<u64>()?;
    }
    Ok(nanoseconds as f64 / 1e9)
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

/// Most memory that a process has had so far, in MiB.
pub(super) fn peak_memory_of(pid: u32) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    Ok(kib / 1024.0)
}

/// IPv6 datagrams lost so far because their program did not fetch them, in our own network namespace.
pub(super) fn inner_udp_overflows() -> anyhow::Result<u64> {
    let counters = fs::read_to_string("/proc/self/net/snmp6")?;
    let line = counters.lines().find_map(|line| line.strip_prefix("Udp6RcvbufErrors")).context("Udp6RcvbufErrors")?;
    Ok(line.trim().parse()?)
}

/// IPv4 datagrams lost so far because their program did not fetch them, in the namespace of a process: what carries the
/// tunnel.
pub(super) fn underlay_overflows(pid: u32) -> anyhow::Result<u64> {
    let counters = fs::read_to_string(format!("/proc/{pid}/net/snmp"))?;
    let mut lines = counters.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next().context("snmp")?, lines.next().context("snmp")?);
    let at = names.split(' ').position(|name| name == "RcvbufErrors").context("RcvbufErrors")?;
    Ok(values.split(' ').nth(at).context("RcvbufErrors")?.parse()?)
}

/// Packets for the device that its queue had no room for, so far.
pub(super) fn device_drops(pid: u32, device: &str) -> anyhow::Result<u64> {
    let devices = fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
    let line = devices.lines().find_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':'));
    // Eight counters of what was received come first; of what was sent, the fourth.
    let dropped = line.and_then(|line| line.split_whitespace().nth(8 + 3));
    Ok(dropped.with_context(|| format!("no device {device}"))?.parse()?)
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
        write!(f, "{:9.3} {:9.3} {:9.3}", self.min, self.median, self.max)
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
