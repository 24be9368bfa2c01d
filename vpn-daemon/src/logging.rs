//! Where the log goes: to the journal with its fields when systemd reads our stderr, else as text to stderr.

use std::os::linux::fs::MetadataExt as _;

use codervpn_engine::LIBRARY_LOG_TARGET;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

/// Changes what is logged while the daemon runs.
pub(crate) struct Level(reload::Handle<EnvFilter, Registry>);

impl Level {
    pub(crate) fn set(&self, filter: &str) -> anyhow::Result<()> {
        self.0.reload(parse(filter)?)?;
        Ok(())
    }
}

/// Starts logging. A filter that makes no sense is refused rather than guessed at.
pub(crate) fn init(filter: &str) -> anyhow::Result<Level> {
    let (filter, handle) = reload::Layer::new(parse(filter)?);
    let journal = if stderr_is_journal() { tracing_journald::layer().ok() } else { None };
    let text = fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(false);
    let out = match journal {
        Some(journal) => journal.boxed(),
        None => text.boxed(),
    };
    tracing_subscriber::registry().with(filter).with(out).try_init()?;
    Ok(Level(handle))
}

fn parse(filter: &str) -> anyhow::Result<EnvFilter> {
    // It reports ordinary expiries as errors; who wants to see them names it.
    let whole = if filter.contains(LIBRARY_LOG_TARGET) {
        filter.to_owned()
    } else {
        format!("{filter},{LIBRARY_LOG_TARGET}=off")
    };
    EnvFilter::try_new(whole).map_err(|error| {
        anyhow::anyhow!("daemon.log: {filter:?} is no filter ({error}); use error, warn, info, debug or trace")
    })
}

/// systemd names the device and inode of the stream it reads.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stderr) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", stderr.st_dev(), stderr.st_ino())
}
