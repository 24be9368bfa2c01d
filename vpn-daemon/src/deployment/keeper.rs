//! Keeps the routes as they shall be while the tunnel runs (dns-and-os 3.3): other programs, systemd-networkd above all,
//! remove what they do not know. A task of its own, since the kernel's answers must not hold up anything else.

use std::time::Duration;

use codervpn_host::routes::{Routes, Watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Changes come in bursts; one look serves all of them.
const SETTLE: Duration = Duration::from_millis(250);
/// Looked at so often even when nothing was heard.
const CHECK_EVERY: Duration = Duration::from_secs(30);
/// Repairs within [`FIGHT_WINDOW`] before we slow down: somebody removes what we put back.
const REPAIRS: usize = 10;
const FIGHT_WINDOW: Duration = Duration::from_secs(5);
const SLOW_DOWN: Duration = Duration::from_secs(5);

/// The task that owns the routes.
pub(super) struct Keeper {
    task: Option<JoinHandle<()>>,
    stop: CancellationToken,
}

impl Keeper {
    pub(super) fn start(routes: Routes) -> Self {
        let stop = CancellationToken::new();
        Self { task: Some(tokio::spawn(run(routes, stop.clone()))), stop }
    }

    /// Takes the routes back. What does not get done within `limit` is left to the next start's clean-up.
    pub(super) async fn close(&mut self, limit: Duration) {
        self.stop.cancel();
        if let Some(task) = self.task.take()
            && timeout(limit, task).await.is_err()
        {
            tracing::error!("taking back routes takes too long; run `codervpnd cleanup` once the daemon has ended");
        }
    }
}

/// Also when a deployment is abandoned the routes are taken back.
impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn run(mut routes: Routes, stop: CancellationToken) {
    // Dropping a look half way is harmless: what follows removes whatever is there.
    tokio::select! {
        () = keep(&mut routes) => {}
        () = stop.cancelled() => {}
    }
    if let Err(error) = routes.undo().await {
        tracing::warn!(%error, "cannot take back routes");
    }
}

async fn keep(routes: &mut Routes) {
    let watch = Watch::new().inspect_err(|error| tracing::warn!(%error, "routes are only looked at now and then")).ok();
    let mut check = interval(CHECK_EVERY);
    let (mut repairs, mut since) = (0, Instant::now());
    loop {
        let changed = async {
            match &watch {
                Some(watch) => watch.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed => sleep(SETTLE).await,
            _ = check.tick() => {}
        }
        if let Some(watch) = &watch {
            watch.clear();
        }
        match routes.check().await {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(
                    "another program (often systemd-networkd) changed the tunnel's interface, route or rule; \
                     it was put back"
                );
                if since.elapsed() > FIGHT_WINDOW {
                    (repairs, since) = (0, Instant::now());
                }
                repairs += 1;
                if repairs >= REPAIRS {
                    sleep(SLOW_DOWN).await;
                }
            }
            // The data thread notices the loss of the device by itself.
            Err(error) => {
                tracing::warn!(%error, "cannot put the tunnel's routes back");
                sleep(SLOW_DOWN).await;
            }
        }
    }
}
