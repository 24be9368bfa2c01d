//! Ctrl-C as something to wait for. A signal that arrives while nobody waits is kept.

use std::io;

#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};

/// From its creation on, Ctrl-C no longer ends the program by itself.
pub(crate) struct Interrupt(#[cfg(unix)] Signal, #[cfg(windows)] tokio::signal::windows::CtrlC);

impl Interrupt {
    pub(crate) fn new() -> io::Result<Self> {
        #[cfg(unix)]
        return Ok(Self(signal(SignalKind::interrupt())?));
        #[cfg(windows)]
        return Ok(Self(tokio::signal::windows::ctrl_c()?));
    }

    pub(crate) async fn next(&mut self) {
        // The stream of signals does not end; if it did, nobody could interrupt.
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}
