//! Lets an agent crash: from then on not a byte of it reaches the deployment, whatever its controller still wants to say
//! when it is dropped.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use codervpn_control::controller::{Dial, DialFuture, Dialed, Transport};
use secrecy::SecretString;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Dials like another, over transports that can be cut.
#[derive(Debug)]
pub(super) struct Severable<D> {
    dialer: D,
    crashed: Crash,
}

/// Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Crash(Arc<AtomicBool>);

impl Crash {
    pub(super) fn crash(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn check(&self) -> io::Result<()> {
        if self.0.load(Ordering::SeqCst) { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }
}

impl<D> Severable<D> {
    pub(super) fn new(dialer: D, crashed: Crash) -> Self {
        Self { dialer, crashed }
    }
}

impl<D: Dial> Dial for Severable<D> {
    fn dial<'a>(&'a self, resume_token: Option<&'a SecretString>) -> DialFuture<'a> {
        Box::pin(async move {
            let dialed = self.dialer.dial(resume_token).await?;
            let transport = Severed { transport: dialed.transport, crashed: self.crashed.clone() };
            Ok(Dialed { transport: Box::new(transport), ..dialed })
        })
    }
}

struct Severed {
    transport: Box<dyn Transport>,
    crashed: Crash,
}

impl AsyncRead for Severed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.crashed.check()?;
        Pin::new(&mut self.transport).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Severed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.crashed.check()?;
        Pin::new(&mut self.transport).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.crashed.check()?;
        Pin::new(&mut self.transport).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.crashed.check()?;
        Pin::new(&mut self.transport).poll_shutdown(cx)
    }
}
