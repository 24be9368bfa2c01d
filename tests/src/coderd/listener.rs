//! Accepts connections, speaks TLS and HTTP on them, and can end them all at once. Serves a deployment and a relay of
//! its own alike.
//!
//! A relay client that already knows the relay's key sends `Derp-Fast-Start` and no answer may come back. So the head of
//! the first request is looked at before HTTP takes over.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// Longest head of a first request that is looked at for fast start.
const HEAD: usize = 16 * 1024;
/// A client that has not finished TLS and its first head by then is gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// A byte stream, whatever is below.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// No answer: the connection is cut.
#[derive(Debug)]
pub(crate) struct Dropped;

impl std::fmt::Display for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("dropped on purpose")
    }
}

impl std::error::Error for Dropped {}

/// What is done with requests.
pub(crate) trait Front: Send + Sync + 'static {
    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        remote: SocketAddr,
    ) -> impl Future<Output = Result<Response<Full<bytes::Bytes>>, Dropped>> + Send;

    /// A relay client that wants no answer.
    fn fast_start(self: Arc<Self>, stream: Box<dyn Wire>, remote: SocketAddr) -> impl Future<Output = ()> + Send;
}

/// A running listener. Dropping it cuts every connection.
#[derive(Debug)]
pub(crate) struct Running {
    /// Cancelled when everything has to end.
    pub(crate) stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start<F: Front>(listener: TcpListener, tls: Option<Arc<ServerConfig>>, front: Arc<F>) -> Self {
        let tls = tls.map(TlsAcceptor::from);
        let stop = CancellationToken::new();
        let task = tokio::spawn(accept(listener, tls, front, stop.clone()));
        Self { stop, task }
    }

    /// Cuts every connection without a word and frees the address.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        // Ends as soon as it sees the token; a panic in it would have been reported.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn accept<F: Front>(listener: TcpListener, tls: Option<TlsAcceptor>, front: Arc<F>, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((stream, remote)) = accepted else {
            // Out of descriptors: accepting again at once would spin.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (tls, front, stop) = (tls.clone(), Arc::clone(&front), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = serve(stream, remote, tls, front) => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn serve<F: Front>(stream: TcpStream, remote: SocketAddr, tls: Option<TlsAcceptor>, front: Arc<F>) {
    // Small frames both ways; a failure costs latency only.
    let _ = stream.set_nodelay(true);
    let opened = async {
        let stream: Box<dyn Wire> = match tls {
            Some(tls) => Box::new(tls.accept(stream).await?),
            None => Box::new(stream),
        };
        Peeked::read(stream).await
    };
    let (stream, fast) = match tokio::time::timeout(PATIENCE, opened).await {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => return tracing::debug!(%remote, %error, "connection ended before a request"),
        Err(_) => return tracing::debug!(%remote, "no request in time"),
    };
    if fast {
        return front.fast_start(Box::new(stream), remote).await;
    }
    let service = service_fn(move |request| {
        let front = Arc::clone(&front);
        async move { front.answer(request, remote).await }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = connection.await {
        tracing::trace!(%remote, %error, "connection ended");
    }
}

/// A stream whose first bytes have been looked at.
struct Peeked {
    first: BytesMut,
    stream: Box<dyn Wire>,
}

impl Peeked {
    /// Reads the first head. True: it is a fast start, and the head has been consumed.
    async fn read(mut stream: Box<dyn Wire>) -> io::Result<(Self, bool)> {
        let mut first = BytesMut::with_capacity(1024);
        loop {
            let end = first.windows(4).position(|four| four == b"\r\n\r\n");
            if let Some(end) = end {
                let fast = is_fast_start(first.get(..end).unwrap_or_default());
                if fast {
                    first.advance(end + 4);
                }
                return Ok((Self { first, stream }, fast));
            }
            if first.len() >= HEAD || stream.read_buf(&mut first).await? == 0 {
                // HTTP knows best what to make of it.
                return Ok((Self { first, stream }, false));
            }
        }
    }
}

fn is_fast_start(head: &[u8]) -> bool {
    let Ok(head) = std::str::from_utf8(head) else { return false };
    let mut lines = head.split("\r\n");
    let path = lines.next().and_then(|line| line.strip_prefix("GET "));
    let is_relay = path.is_some_and(|rest| rest.starts_with("/derp ") || rest.starts_with("/derp/ "));
    let has_header = |line: &str| {
        line.split_once(':')
            .is_some_and(|(name, value)| name.eq_ignore_ascii_case("derp-fast-start") && value.trim() == "1")
    };
    is_relay && lines.any(has_header)
}

impl AsyncRead for Peeked {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let length = self.first.len().min(buffer.remaining());
            buffer.put_slice(&self.first.split_to(length));
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Peeked {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Waits for the upgrade of a request that was answered with 101, then hands the stream over; ends with `stop`.
pub(crate) fn after_upgrade<Fut>(
    request: &mut Request<Incoming>,
    stop: CancellationToken,
    then: impl FnOnce(TokioIo<hyper::upgrade::Upgraded>) -> Fut + Send + 'static,
) where
    Fut: Future<Output = ()> + Send,
{
    let upgrade = hyper::upgrade::on(request);
    tokio::spawn(async move {
        let run = async {
            match upgrade.await {
                Ok(stream) => then(TokioIo::new(stream)).await,
                Err(error) => tracing::debug!(%error, "upgrade failed"),
            }
        };
        tokio::select! {
            () = run => {}
            () = stop.cancelled() => {}
        }
    });
}
