//! Decides what the user of one stream sees: bytes in, bytes out, one FIN at most, whatever the order of closing,
//! dropping and failing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use std::future::poll_fn;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::MuxError;
use super::lock::Lock;
use super::session::Session;

/// One stream of a session. Dropping it closes our direction and discards what still arrives.
pub struct MuxStream {
    read: ReadHalf,
    write: WriteHalf,
}

/// Reads one stream.
pub struct ReadHalf(Arc<Held>);

/// Writes one stream.
pub struct WriteHalf(Arc<Held>);

/// The user's claim on a stream; the last half to go gives it up.
struct Held {
    session: Arc<Lock<Session>>,
    id: u32,
}

impl MuxStream {
    pub(super) fn new(session: Arc<Lock<Session>>, id: u32) -> Self {
        let held = Arc::new(Held { session, id });
        Self { read: ReadHalf(Arc::clone(&held)), write: WriteHalf(held) }
    }

    /// The stream's number on the wire.
    pub fn id(&self) -> u32 {
        self.read.0.id
    }

    /// Splits into halves that different tasks can own.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }
}

impl ReadHalf {
    /// The next received bytes, at most `limit`; `None` is the end of the stream. Losing the future loses no data.
    pub async fn chunk(&mut self, limit: usize) -> Result<Option<Bytes>, MuxError> {
        poll_fn(|cx| self.poll_chunk(limit, cx)).await
    }

    fn poll_chunk(&mut self, limit: usize, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, MuxError>> {
        self.0.session.lock().poll_read(self.0.id, limit, cx)
    }
}

impl WriteHalf {
    /// Writes a part of `data` and says how much. Losing the future writes nothing.
    pub async fn write_some(&mut self, data: &[u8]) -> Result<usize, MuxError> {
        poll_fn(|cx| self.0.session.lock().poll_write(self.0.id, data, cx)).await
    }

    /// Sends our FIN. Further calls do nothing.
    pub fn finish(&mut self) {
        self.0.session.lock().finish(self.0.id);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.session.lock().abandon(self.id);
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match this.poll_chunk(buffer.remaining(), cx) {
            Poll::Ready(Ok(chunk)) => {
                buffer.put_slice(&chunk.unwrap_or_default());
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(io_error(error))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.0.session.lock().poll_write(self.0.id, data, cx).map_err(io_error)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The driver flushes whatever it has written.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().finish();
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for MuxStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().read).poll_read(cx, buffer)
    }
}

impl AsyncWrite for MuxStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().write).poll_write(cx, data)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().write).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().write).poll_shutdown(cx)
    }
}

fn io_error(error: MuxError) -> io::Error {
    let kind = match error {
        MuxError::StreamReset => io::ErrorKind::ConnectionReset,
        MuxError::Closed => io::ErrorKind::BrokenPipe,
        MuxError::RemoteClosed => io::ErrorKind::UnexpectedEof,
        _ => io::ErrorKind::ConnectionAborted,
    };
    io::Error::new(kind, error)
}
