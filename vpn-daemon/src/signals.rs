//! What signals mean: end, end now, read the configuration again, write the state to the log (dns-and-os 7.5).

use std::path::PathBuf;

use codervpn_host::{Paths, cleanup};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Flag, SharedConfig};
use crate::daemon::{DaemonHandle, Request};
use crate::deployment;
use crate::logging::Level;
use crate::supervisor;

/// What is read again on SIGHUP, and where it goes.
pub(crate) struct Reload {
    pub(crate) file: Option<PathBuf>,
    pub(crate) flags: Vec<Flag>,
    pub(crate) config: SharedConfig,
    pub(crate) level: Level,
}

pub(crate) fn spawn(
    reload: Reload,
    paths: Paths,
    daemon: DaemonHandle,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let terminate = signal(SignalKind::terminate())?;
    let interrupt = signal(SignalKind::interrupt())?;
    let hang_up = signal(SignalKind::hangup())?;
    let dump = signal(SignalKind::user_defined1())?;
    tokio::spawn(end(terminate, interrupt, paths, shutdown));
    tokio::spawn(answer(hang_up, dump, reload, daemon));
    Ok(())
}

async fn end(mut terminate: Signal, mut interrupt: Signal, paths: Paths, shutdown: CancellationToken) {
    let mut told = async || tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} };
    told().await;
    tracing::info!("told to end");
    shutdown.cancel();
    told().await;
    tracing::warn!("told to end at once");
    let left = cleanup::restore_while_aborting(&paths);
    std::process::exit(if left.is_ok() { 0 } else { 1 });
}

async fn answer(mut hang_up: Signal, mut dump: Signal, reload: Reload, daemon: DaemonHandle) {
    loop {
        tokio::select! {
            _ = hang_up.recv() => {
                supervisor::tell_reloading();
                read_again(&reload);
                let _ = daemon.send(Request::Deployment(deployment::Request::Reloaded)).await;
                supervisor::tell_ready();
            }
            _ = dump.recv() => tracing::info!(status = ?*daemon.status.borrow(), "state"),
        }
    }
}

/// A configuration that is wrong changes nothing.
fn read_again(reload: &Reload) {
    let read = Config::load(reload.file.as_deref(), &reload.flags)
        .map_err(anyhow::Error::from)
        .and_then(|config| reload.level.set(&config.daemon.log).map(|()| config));
    match read {
        Ok(config) => {
            reload.config.store(config.into());
            tracing::info!("configuration read again: `paths` applies at once, the rest at the next start");
        }
        Err(error) => tracing::error!("the configuration stays as it was: {error:#}"),
    }
}
