//! Decides when bytes move between a session and its transport, and when a session is given up.
//!
//! One future, polled by whoever owns the connection: write what is queued, read what has come, do what is due. A write
//! that blocks for longer than the limit ends the session (WS-12), so does a ping without an answer. Dropping the driver
//! drops the transport: the abrupt end.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::MuxError;
use super::lock::Lock;
use super::session::{Session, advance};

/// Read size. Control traffic is a few hundred bytes; a snapshot of a thousand agents comes in ten reads.
const READ_SIZE: usize = 16 * 1024;

/// Bytes given to the transport at once, which makes one WebSocket message: well below the limit of any peer (WS-7).
const WRITE_SIZE: usize = 64 * 1024;

/// Rounds of one poll before other tasks get a turn.
const ROUNDS: usize = 32;

/// Runs one session; resolves with the reason when it has ended. Must be polled for anything to happen.
#[must_use = "a session does nothing unless its driver is polled"]
pub struct Driver<T> {
    shared: Arc<Lock<Session>>,
    transport: Option<T>,
    read_buffer: Box<[u8]>,
    writing: BytesMut,
    flush: bool,
    blocked_since: Option<Instant>,
    shutdown_due: Option<Instant>,
    timer: Pin<Box<Sleep>>,
}

enum Step {
    Moved,
    Idle,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Driver<T> {
    pub(super) fn new(shared: Arc<Lock<Session>>, transport: T) -> Self {
        Self {
            shared,
            transport: Some(transport),
            read_buffer: vec![0; READ_SIZE].into_boxed_slice(),
            writing: BytesMut::new(),
            flush: false,
            blocked_since: None,
            shutdown_due: None,
            timer: Box::pin(sleep_until(Instant::now())),
        }
    }

    fn poll_session(&mut self, cx: &mut Context<'_>) -> Poll<MuxError> {
        for _ in 0..ROUNDS {
            let wrote = match self.write(cx) {
                Ok(step) => step,
                Err(error) => return Poll::Ready(error),
            };
            let read = match self.read(cx) {
                Ok(step) => step,
                Err(error) => return Poll::Ready(error),
            };
            if let Poll::Ready(error) = self.poll_shutdown(cx) {
                return Poll::Ready(error);
            }
            let due = match self.poll_timers(cx) {
                Ok(step) => step,
                Err(error) => return Poll::Ready(error),
            };
            if matches!((wrote, read, due), (Step::Idle, Step::Idle, Step::Idle)) {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn write(&mut self, cx: &mut Context<'_>) -> Result<Step, MuxError> {
        if self.writing.is_empty() {
            let mut session = self.shared.lock();
            session.register_driver(cx.waker());
            session.take_output(&mut self.writing);
        } else {
            self.shared.lock().register_driver(cx.waker());
        }
        let Some(transport) = self.transport.as_mut() else { return Err(MuxError::Closed) };
        let mut step = Step::Idle;
        while let Some(part) = self.writing.get(..self.writing.len().min(WRITE_SIZE)).filter(|part| !part.is_empty()) {
            match Pin::new(&mut *transport).poll_write(cx, part) {
                Poll::Ready(Ok(0)) => return Err(MuxError::RemoteClosed),
                Poll::Ready(Ok(n)) => {
                    advance(&mut self.writing, n);
                    self.blocked_since = None;
                    self.flush = true;
                    step = Step::Moved;
                }
                Poll::Ready(Err(error)) => return Err(transport_error(&error)),
                Poll::Pending => {
                    self.blocked_since.get_or_insert_with(Instant::now);
                    return Ok(step);
                }
            }
        }
        if self.flush {
            match Pin::new(transport).poll_flush(cx) {
                Poll::Ready(Ok(())) => {
                    self.flush = false;
                    self.blocked_since = None;
                }
                Poll::Ready(Err(error)) => return Err(transport_error(&error)),
                Poll::Pending => {
                    self.blocked_since.get_or_insert_with(Instant::now);
                }
            }
        }
        Ok(step)
    }

    fn read(&mut self, cx: &mut Context<'_>) -> Result<Step, MuxError> {
        // During the shutdown the transport reads for itself, for instance the echo of a close frame.
        if self.shutdown_due.is_some() || self.shared.lock().output_is_flooded() {
            return Ok(Step::Idle);
        }
        let Some(transport) = self.transport.as_mut() else { return Err(MuxError::Closed) };
        let mut buffer = ReadBuf::new(&mut self.read_buffer);
        match Pin::new(transport).poll_read(cx, &mut buffer) {
            Poll::Ready(Ok(())) if buffer.filled().is_empty() => Err(MuxError::RemoteClosed),
            Poll::Ready(Ok(())) => {
                self.shared.lock().handle_input(buffer.filled())?;
                Ok(Step::Moved)
            }
            Poll::Ready(Err(error)) => Err(transport_error(&error)),
            Poll::Pending => Ok(Step::Idle),
        }
    }

    fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<MuxError> {
        let limit = {
            let session = self.shared.lock();
            if !session.is_closing() {
                return Poll::Pending;
            }
            session.config().shutdown_limit
        };
        let due = *self.shutdown_due.get_or_insert_with(|| Instant::now() + limit);
        if due <= Instant::now() {
            return Poll::Ready(MuxError::Closed);
        }
        if !self.writing.is_empty() || self.flush {
            return Poll::Pending;
        }
        let Some(transport) = self.transport.as_mut() else { return Poll::Ready(MuxError::Closed) };
        let _ = ready!(Pin::new(transport).poll_shutdown(cx));
        Poll::Ready(MuxError::Closed)
    }

    fn poll_timers(&mut self, cx: &mut Context<'_>) -> Result<Step, MuxError> {
        let now = Instant::now();
        let (mut next, limit) = {
            let mut session = self.shared.lock();
            (session.handle_timeout(now)?, session.config().write_limit)
        };
        if let Some(since) = self.blocked_since {
            if now >= since + limit {
                return Err(MuxError::WriteTimeout(limit));
            }
            next = next.min(since + limit);
        }
        if let Some(due) = self.shutdown_due {
            next = next.min(due);
        }
        if self.timer.deadline() != next {
            self.timer.as_mut().reset(next);
        }
        Ok(match self.timer.as_mut().poll(cx) {
            Poll::Ready(()) => Step::Moved,
            Poll::Pending => Step::Idle,
        })
    }

    /// Tells the peer why, as far as that is possible without waiting (YX-21).
    fn say_goodbye(&mut self, cx: &mut Context<'_>, error: &MuxError) {
        if !matches!(error, MuxError::Protocol(_)) || !self.writing.is_empty() {
            return;
        }
        {
            let mut session = self.shared.lock();
            session.queue_go_away(1);
            session.take_output(&mut self.writing);
        }
        if let Some(transport) = self.transport.as_mut()
            && let Poll::Ready(Ok(_)) = Pin::new(&mut *transport).poll_write(cx, &self.writing)
        {
            let _ = Pin::new(transport).poll_flush(cx);
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Future for Driver<T> {
    type Output = MuxError;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<MuxError> {
        let this = self.get_mut();
        let mut error = ready!(this.poll_session(cx));
        if this.shared.lock().is_closing() {
            error = MuxError::Closed;
        }
        this.say_goodbye(cx, &error);
        this.transport = None;
        this.shared.lock().end(error.clone());
        Poll::Ready(error)
    }
}

impl<T> Drop for Driver<T> {
    fn drop(&mut self) {
        self.shared.lock().end(MuxError::Closed);
    }
}

fn transport_error(error: &std::io::Error) -> MuxError {
    use std::io::ErrorKind;
    match error.kind() {
        // An abrupt end is the ordinary way of Go programs to leave (2.5).
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => MuxError::RemoteClosed,
        _ => MuxError::Transport(error.to_string()),
    }
}
