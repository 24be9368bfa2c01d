//! What systemd is told: that we are ready, what we are doing, and that we are alive.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::daemon::{DaemonHandle, Request};
use crate::deployment;
use crate::status::Lifecycle;

/// Reports until `down`. Ready means that the socket accepts, not that a tunnel is up.
pub(crate) async fn report(daemon: DaemonHandle, down: CancellationToken) {
    tell_ready();
    let limit = sd_notify::watchdog_enabled();
    let mut alive = interval(limit.map_or(Duration::from_secs(3600), |limit| limit / 2));
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut status = daemon.status.clone();
    let mut shown = None;
    loop {
        tokio::select! {
            () = down.cancelled() => break,
            changed = status.changed() => {
                if changed.is_err() {
                    break;
                }
                let lifecycle = status.borrow_and_update().lifecycle;
                if shown.replace(lifecycle) != Some(lifecycle) {
                    notify(&[NotifyState::Status(word(lifecycle))]);
                }
            }
            _ = alive.tick(), if limit.is_some() => {
                if is_alive(&daemon).await {
                    notify(&[NotifyState::Watchdog]);
                }
            }
        }
    }
    notify(&[NotifyState::Stopping]);
}

/// A round trip through the daemon's task and, where there is a tunnel, through its data thread: a hung one gets no
/// notice out, and systemd kills us.
async fn is_alive(daemon: &DaemonHandle) -> bool {
    let (reply, answer) = oneshot::channel();
    let asked = daemon.send(Request::Deployment(deployment::Request::Diagnostics { reply })).await;
    // Without a tunnel the reply is dropped, which is an answer too.
    asked.is_ok() && timeout(Duration::from_secs(5), answer).await.is_ok()
}

fn word(lifecycle: Lifecycle) -> &'static str {
    match lifecycle {
        Lifecycle::Starting => "starting the VPN",
        Lifecycle::Started => "the VPN runs",
        Lifecycle::Stopping => "stopping the VPN",
        Lifecycle::Stopped => "the VPN is stopped",
    }
}

pub(crate) fn tell_ready() {
    notify(&[NotifyState::Ready]);
}

/// systemd wants to know when, so that it can tell this reload from the next.
pub(crate) fn tell_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(_) => notify(&[NotifyState::Reloading]),
    }
}

/// Without systemd there is nobody to tell.
fn notify(state: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(state);
}
