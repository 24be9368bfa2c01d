//! Decides how one byte stream carries many: yamux, both roles, as hashicorp/yamux v0.1.2 speaks it.
//!
//! Written by hand, because the `yamux` crate cannot keep the rules that Go peers enforce: it acknowledges a stream only
//! with the first byte it sends (a Go agent ends the session when its silent Coordinate stream stays unacknowledged for
//! 75 s), lets receive windows grow beyond the 262144 bytes Go expects, has no keepalive of its own and takes a go-away
//! 0 for the end of the session.
//!
//! Parts: [`frame`] knows the header, `session` is the state machine (bytes and time in, bytes and wakes out),
//! [`Driver`] moves bytes between it and a transport, [`MuxStream`] is what users read and write.
//!
//! Safety against the peer: a stream buffers at most its window; a session holds at most [`MAX_STREAMS`] streams and
//! [`MuxConfig::accept_backlog`] unaccepted ones; the output buffer takes data up to [`OUTPUT_LIMIT`] and reading stops
//! when answers to the peer fill it to twice that.

mod driver;
mod frame;
mod session;
mod stream;
#[cfg(test)]
mod tests;

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use lock::Lock;
use tokio::io::{AsyncRead, AsyncWrite};

pub use driver::Driver;
pub use stream::{MuxStream, ReadHalf, WriteHalf};

use session::Session;

/// Initial and largest receive window of a stream, the protocol's constant.
pub const WINDOW: u32 = 262_144;

/// Streams a session may hold at once, open or half-closed. A daemon uses four; a Go peer has at most 256 waiting to be
/// accepted. Twice that keeps the memory a hostile peer can claim at 128 MiB, and only on the server role.
pub const MAX_STREAMS: usize = 512;

/// Bytes of data frames that may wait for the transport before stream writers are held back: one window, so that a
/// single stream can be in full flight.
pub const OUTPUT_LIMIT: usize = WINDOW as usize;

/// Which side of the session we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The dialling side: odd stream ids.
    Client,
    /// The accepting side: even stream ids (never used by this protocol).
    Server,
}

/// Limits and times of a session. The defaults are those of hashicorp/yamux.
#[derive(Debug, Clone)]
pub struct MuxConfig {
    /// Streams acknowledged but not yet taken by [`Connection::accept`]; more are reset. The client role accepts none:
    /// a server of ours never opens streams.
    pub accept_backlog: usize,
    /// Interval of our pings (upstream `KeepAliveInterval`).
    pub keepalive: Duration,
    /// How long a write may block and a ping may stay unanswered (upstream `ConnectionWriteTimeout`).
    pub write_limit: Duration,
    /// How long a stream we opened may stay unacknowledged (upstream `StreamOpenTimeout`).
    pub open_limit: Duration,
    /// How long a stream we closed may stay open at the peer before we reset it (upstream `StreamCloseTimeout`).
    pub close_limit: Duration,
    /// How long an orderly shutdown of the transport may take.
    pub shutdown_limit: Duration,
}

impl MuxConfig {
    /// Defaults for one role.
    pub fn for_role(role: Role) -> Self {
        Self {
            accept_backlog: match role {
                Role::Client => 0,
                Role::Server => 256,
            },
            keepalive: Duration::from_secs(30),
            write_limit: Duration::from_secs(10),
            open_limit: Duration::from_secs(75),
            close_limit: Duration::from_secs(300),
            shutdown_limit: Duration::from_secs(1),
        }
    }
}

/// Why a session or a stream is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MuxError {
    /// [`Connection::close`] was called or the driver was dropped.
    #[error("the session was closed on our side")]
    Closed,
    /// The transport ended.
    #[error("the other side closed the connection")]
    RemoteClosed,
    /// The transport failed; the text is the transport's.
    #[error("{0}")]
    Transport(String),
    /// The peer broke the protocol.
    #[error("yamux protocol error: {0}")]
    Protocol(String),
    /// The peer did not answer a ping in time.
    #[error("keepalive timeout: the other side has not answered for {} s", .0.as_secs())]
    KeepaliveTimeout(Duration),
    /// The transport took no bytes for too long.
    #[error("the connection took no data for {} s", .0.as_secs())]
    WriteTimeout(Duration),
    /// A stream we opened was not acknowledged in time.
    #[error("stream {stream} was not acknowledged within {} s", .after.as_secs())]
    OpenTimeout {
        /// Its id.
        stream: u32,
        /// The limit.
        after: Duration,
    },
    /// The peer ended the session with a go-away code.
    #[error("the other side ended the session (go-away {0})")]
    GoAway(u32),
    /// The peer asked for no new streams.
    #[error("the other side is not accepting streams")]
    NotAccepting,
    /// No more stream ids, or [`MAX_STREAMS`] reached.
    #[error("no more streams can be opened")]
    Exhausted,
    /// The peer reset this stream.
    #[error("stream reset by the other side")]
    StreamReset,
}

/// Handle on one session; clones share it. The session lives as long as its [`Driver`] runs.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Lock<Session>>,
}

impl Connection {
    /// Starts a session over `transport`. Nothing happens until the returned driver is polled.
    pub fn new<T>(role: Role, config: MuxConfig, transport: T) -> (Self, Driver<T>)
    where
        T: AsyncRead + AsyncWrite + Unpin,
    {
        let shared = Arc::new(Lock::new(Session::new(role, config)));
        let driver = Driver::new(Arc::clone(&shared), transport);
        (Self { shared }, driver)
    }

    /// A client session with the default limits.
    pub fn client<T: AsyncRead + AsyncWrite + Unpin>(transport: T) -> (Self, Driver<T>) {
        Self::new(Role::Client, MuxConfig::for_role(Role::Client), transport)
    }

    /// A server session with the default limits.
    pub fn server<T: AsyncRead + AsyncWrite + Unpin>(transport: T) -> (Self, Driver<T>) {
        Self::new(Role::Server, MuxConfig::for_role(Role::Server), transport)
    }

    /// Opens a stream: SYN is queued at once, data may follow without waiting for the acknowledgement (YX-1).
    pub fn open(&self) -> Result<MuxStream, MuxError> {
        let id = self.shared.lock().open()?;
        Ok(MuxStream::new(Arc::clone(&self.shared), id))
    }

    /// Waits for the next stream of the peer. It has been acknowledged already, at the arrival of its SYN.
    pub async fn accept(&self) -> Result<MuxStream, MuxError> {
        let id = poll_fn(|cx| self.shared.lock().poll_accept(cx)).await?;
        Ok(MuxStream::new(Arc::clone(&self.shared), id))
    }

    /// Ends the session in an orderly way: what is queued is written, then the transport is shut down. No go-away is
    /// sent (YX-18). Returns at once; [`Connection::ended`] waits.
    pub fn close(&self) {
        self.shared.lock().start_close();
    }

    /// Waits until the session has ended and says why.
    pub async fn ended(&self) -> MuxError {
        poll_fn(|cx| self.shared.lock().poll_ended(cx)).await
    }

    /// Streams known to the session right now.
    pub fn stream_count(&self) -> usize {
        self.shared.lock().stream_count()
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("streams", &self.stream_count()).finish_non_exhaustive()
    }
}

/// A mutex that ignores poisoning: a panic of one task while it held the lock must not take every stream with it, and
/// the session has no invariant that a half-done call could break for memory safety.
mod lock {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    pub(crate) struct Lock<T>(Mutex<T>);

    impl<T> Lock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}
