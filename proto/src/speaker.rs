//! Speaks CoderVPN over any reader and writer, in any of the four roles.
//!
//! [`connect`] exchanges headers and starts two tasks. The reading task sorts
//! what arrives: replies go straight to the request that waits for them,
//! whatever the other handlers do; requests and one-way messages go to
//! the [`Inbox`]. The writing task alone writes, one frame in one piece, so that
//! a cancelled caller never leaves half a frame behind.
//!
//! Nothing here grows with a peer that does not read or writes too much:
//!
//! * Outgoing requests, replies and one-way messages wait for room in a bounded
//!   queue. Status-like messages do not wait: they are published into a [`Slot`],
//!   where a newer one replaces the older.
//! * A peer that takes nothing for a while is disconnected.
//! * A peer with too many unanswered requests is disconnected; of one-way
//!   messages that nobody fetches, the oldest are dropped and counted.
//!
//! The connection closes when it is told to, when the peer ends it, or when the
//! last [`Speaker`], [`Inbox`] and [`Request`] of it are gone. What was accepted
//! before an orderly close is still written.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use crate::frame::{self, EncodeError, FrameError, MAX_BODY, MAX_CLIENT_BODY};
use crate::handshake::HandshakeError;
use crate::ids::RequestId;
use crate::rpc::{self, Body as _, End, Kind, ReceiveBody, SendBody};
use crate::version::Version;
use shared::{Arrived, Guard, Shared};

mod greet;
mod read;
mod shared;
#[cfg(test)]
mod tests;
mod write;

/// Bounds of one connection.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Largest body accepted from the peer.
    pub max_body: usize,
    /// Outgoing frames that wait for the writer, besides one for each [`Slot`].
    /// Senders wait beyond. A peer that reads never lets so many wait.
    pub queued_frames: usize,
    /// Requests of the peer that are not answered yet. No known program has more
    /// than a handful; one above this is disconnected.
    pub open_requests: usize,
    /// One-way messages nobody has fetched from the [`Inbox`], by number and by
    /// bytes on the wire. The oldest are dropped beyond. Enough for a burst of a
    /// few hundred log lines.
    pub unread_messages: usize,
    pub unread_bytes: usize,
    /// How long the peer may take nothing while something is to be written.
    pub write_stall: Duration,
    /// How long an orderly close may go on writing.
    pub close_within: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body: MAX_BODY,
            queued_frames: 64,
            open_requests: 64,
            unread_messages: 1024,
            unread_bytes: 2 * MAX_BODY,
            write_stall: Duration::from_secs(10),
            close_within: Duration::from_secs(3),
        }
    }
}

impl Limits {
    /// For a service, whose clients are not trusted.
    #[must_use]
    pub fn service() -> Self {
        Self {
            max_body: MAX_CLIENT_BODY,
            open_requests: 16,
            unread_messages: 16,
            unread_bytes: 2 * MAX_CLIENT_BODY,
            ..Self::default()
        }
    }
}

/// Exchanges headers within [`crate::handshake::TIMEOUT`] and starts speaking.
///
/// Must be called within a tokio runtime. On failure reader and writer are
/// dropped, which closes the connection.
pub async fn connect<E, R, W>(reader: R, writer: W, limits: Limits) -> Result<(Speaker<E>, Inbox<E>), ConnectError>
where
    E: End,
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let (mut reader, mut writer) = (reader, writer);
    let (version, decoder) = greet::greet::<E, R, W>(&mut reader, &mut writer, &limits).await?;
    let shared = Arc::new(Shared::new(version, limits));
    tokio::spawn(read::run(reader, decoder, Arc::clone(&shared)));
    tokio::spawn(write::run(writer, Arc::clone(&shared)));
    let guard = Arc::new(Guard(shared));
    let inbox = Inbox { guard: Arc::clone(&guard) };
    Ok((Speaker { guard }, inbox))
}

/// Why no conversation came about.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// A service closes before it has written anything when it refuses the user.
    #[error("the other end closed the connection before it introduced itself")]
    Closed,
    #[error("the other end did not introduce itself in time: \"{header}\"")]
    TimedOut { header: String },
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
}

/// The sending half of a conversation. Clones share it.
pub struct Speaker<E: End> {
    guard: Arc<Guard<E>>,
}

impl<E: End> Clone for Speaker<E> {
    fn clone(&self) -> Self {
        Self { guard: Arc::clone(&self.guard) }
    }
}

impl<E: End> fmt::Debug for Speaker<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Speaker({}, {})", E::ROLE, self.version())
    }
}

impl<E: End> Speaker<E> {
    /// The negotiated version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.guard.version
    }

    /// Sends a request and waits for its reply, at most for `limit` if given,
    /// the wait for room in the queue included. May be dropped at any time.
    pub async fn request(&self, body: SendBody<E>, limit: Option<Duration>) -> Result<ReceiveBody<E>, RequestError> {
        let exchange = self.exchange(body);
        match limit {
            None => exchange.await,
            Some(limit) => timeout(limit, exchange).await.unwrap_or(Err(RequestError::TimedOut)),
        }
    }

    async fn exchange(&self, body: SendBody<E>) -> Result<ReceiveBody<E>, RequestError> {
        let kind = body.kind();
        if kind.since() > self.version() {
            return Err(RequestError::NotSupported);
        }
        let room = self.guard.room().await?;
        let waiting = self.guard.send_request(body, room)?;
        let body = waiting.reply().await.map_err(RequestError::Closed)?.ok_or(RequestError::NotSupported)?;
        if body.answers(kind) { Ok(body) } else { Err(RequestError::UnexpectedReply(body.kind())) }
    }

    /// Sends a one-way message; waits for room in the queue. `Ok` means that it
    /// will be written unless the connection breaks.
    pub async fn notify(&self, body: SendBody<E>) -> Result<(), SendError> {
        let frame = frame::encode(&rpc::one_way::<E::Send>(body), MAX_BODY)?;
        let room = self.guard.room().await?;
        self.guard.push(frame, room)
    }

    /// Like `notify`, but fails at once when there is no room.
    pub fn try_notify(&self, body: SendBody<E>) -> Result<(), SendError> {
        let room = self.guard.try_room()?;
        let frame = frame::encode(&rpc::one_way::<E::Send>(body), MAX_BODY)?;
        self.guard.push(frame, room)
    }

    /// Puts a message into a slot, in place of the one that may still wait there.
    /// Never waits. It is written after everything that was queued before.
    pub fn publish(&self, slot: Slot, message: &Broadcast<E>) -> Result<(), SendError> {
        self.guard.publish(slot, message.frame.clone())
    }

    /// Begins an orderly close: nothing more is accepted, outstanding requests
    /// of ours fail, what is queued is written within [`Limits::close_within`],
    /// then both directions end. See `closed`.
    pub fn close(&self) {
        self.guard.close();
    }

    /// Ends the connection at once and drops what is queued.
    pub fn abort(&self) {
        self.guard.end(CloseReason::Local);
    }

    /// True as soon as nothing can be sent any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.guard.is_closed()
    }

    /// Waits until the connection has ended, for whatever reason.
    pub async fn closed(&self) -> CloseReason {
        self.guard.ended().await
    }
}

/// A place for a message of which only the newest matters. Each connection holds
/// at most one of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// A service's status; a tunnel's tick.
    Status,
    /// Progress of a start.
    Progress,
}

/// A one-way message encoded once for any number of connections.
pub struct Broadcast<E: End> {
    frame: Bytes,
    end: std::marker::PhantomData<fn(E)>,
}

impl<E: End> Broadcast<E> {
    pub fn new(body: SendBody<E>) -> Result<Self, EncodeError> {
        debug_assert!(body.may_be_one_way(), "{:?} needs a reply", body.kind());
        let frame = frame::encode(&rpc::one_way::<E::Send>(body), MAX_BODY)?;
        Ok(Self { frame, end: std::marker::PhantomData })
    }
}

impl<E: End> Clone for Broadcast<E> {
    fn clone(&self) -> Self {
        Self { frame: self.frame.clone(), end: std::marker::PhantomData }
    }
}

/// What arrives and is not a reply. Dropping it discards further messages; the
/// connection stays for the sake of requests.
pub struct Inbox<E: End> {
    guard: Arc<Guard<E>>,
}

/// Something for the owner of an [`Inbox`] to handle.
#[derive(Debug)]
pub enum Incoming<E: End> {
    Request(Request<E>),
    OneWay(ReceiveBody<E>),
}

impl<E: End> Inbox<E> {
    /// The next message; `None` once the connection has ended and everything that
    /// arrived before was fetched. May be dropped at any time without loss.
    pub async fn next(&mut self) -> Option<Incoming<E>> {
        Some(match self.guard.next_arrived().await? {
            Arrived::OneWay(body) => Incoming::OneWay(body),
            Arrived::Request(id, body) => {
                Incoming::Request(Request { id, kind: body.kind(), body: Some(body), guard: Arc::clone(&self.guard) })
            }
        })
    }

    /// One-way messages dropped because nobody fetched them.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.guard.dropped()
    }
}

impl<E: End> Drop for Inbox<E> {
    fn drop(&mut self) {
        self.guard.discard_incoming();
    }
}

/// A request of the peer. A reply is owed; dropping it without one is for
/// requests that must not be answered.
pub struct Request<E: End> {
    id: RequestId,
    kind: Kind,
    body: Option<ReceiveBody<E>>,
    guard: Arc<Guard<E>>,
}

impl<E: End> fmt::Debug for Request<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({}, {:?})", self.id, self.kind)
    }
}

impl<E: End> Request<E> {
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Takes the content out; there is some exactly the first time.
    pub fn take_body(&mut self) -> Option<ReceiveBody<E>> {
        self.body.take()
    }

    /// Answers; waits for room in the queue. A reply too large for a frame is
    /// replaced by a failure. `Ok` means that it will be written unless the
    /// connection breaks.
    pub async fn reply(self, body: SendBody<E>) -> Result<(), SendError> {
        let frame = self.encode(body)?;
        let room = self.guard.room().await?;
        self.guard.push(frame, room)
    }

    /// Answers and closes: everything accepted before is written, then this as
    /// the very last frame. Does not wait; see [`Speaker::closed`].
    pub fn reply_last(self, body: SendBody<E>) -> Result<(), SendError> {
        let frame = self.encode(body)?;
        self.guard.push_last(frame)
    }

    fn encode(&self, body: SendBody<E>) -> Result<Bytes, SendError> {
        if !body.answers(self.kind) {
            return Err(SendError::NotTheReply(self.kind, body.kind()));
        }
        let substitute = body.too_large();
        let encoded = frame::encode(&rpc::reply::<E::Send>(self.id, body), MAX_BODY);
        match (encoded, substitute) {
            (Err(error @ EncodeError::TooLarge { .. }), Some(substitute)) => {
                tracing::error!(request = %self.id, kind = ?self.kind, %error, "a failure is sent instead");
                Ok(frame::encode(&rpc::reply::<E::Send>(self.id, substitute), MAX_BODY)?)
            }
            (encoded, _) => Ok(encoded?),
        }
    }
}

impl<E: End> Drop for Request<E> {
    fn drop(&mut self) {
        self.guard.end_served(self.id);
    }
}

/// Why a conversation is over.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CloseReason {
    #[error("the connection was closed from this side")]
    Local,
    #[error("the other end closed the connection")]
    Peer,
    #[error("the connection was lost: {0}")]
    Lost(String),
    #[error(transparent)]
    Protocol(#[from] FrameError),
    #[error("the other end does not read")]
    Stalled,
    #[error("the other end sent too many requests at once")]
    TooManyRequests,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SendError {
    #[error(transparent)]
    Closed(CloseReason),
    /// Only where the caller does not wait.
    #[error("the queue is full")]
    Full,
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A mistake of the caller.
    #[error("{1:?} is no reply to {0:?}")]
    NotTheReply(Kind, Kind),
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// The connection ended before the reply came.
    #[error(transparent)]
    Closed(CloseReason),
    #[error("no reply came in time")]
    TimedOut,
    /// The peer is too old for this request, or says that it does not know it.
    #[error("the other end does not support this request")]
    NotSupported,
    #[error("the other end sent an unexpected reply ({0:?})")]
    UnexpectedReply(Kind),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl From<SendError> for RequestError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Closed(reason) => Self::Closed(reason),
            SendError::Encode(error) => Self::Encode(error),
            // Neither can happen to a request, which waits and is no reply.
            SendError::Full | SendError::NotTheReply(..) => Self::NotSupported,
        }
    }
}
