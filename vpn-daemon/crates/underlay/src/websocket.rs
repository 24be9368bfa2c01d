//! A WebSocket as a byte stream, for the control plane.
//!
//! Decides how message and byte boundaries meet (WS-4, WS-5: one write is one
//! binary message, payloads are concatenated), what ends the stream and how
//! the end is told (2.5), when a silent connection is lost (WS-11) and when a
//! blocked write is (WS-12). Pings of the other side are answered before data.
//!
//! The upgrade itself is made by [`Dialer::websocket`]; the testbed puts the
//! server's role on a stream it accepted with [`WebSocket::accepted`].

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::http::header;
use ::http::{HeaderMap, HeaderValue};
use bytes::Bytes;
use futures_util::{Sink, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error as WsError, Utf8Bytes};
use url::Url;

use crate::certificate::bounded;
use crate::dialer::Dialer;
use crate::http::{HttpError, RESPONSE_LIMIT, append_user_headers, shown, target, upgrade};
use crate::stream::Connection;

/// Longest message accepted (WS-7).
const MAX_MESSAGE: usize = 4 * 1024 * 1024;
/// Longest message sent: one yamux frame (WS-7).
const MAX_WRITE: usize = 262_156;
/// Unflushed bytes after which a write waits for the socket. One more message
/// may be added on top, so the memory is bounded by twice this.
const HIGH_WATER: usize = 256 * 1024;
/// WS-11: no byte for so long means that the connection is lost.
const SILENCE: Duration = Duration::from_secs(45);
/// WS-12: a write that makes no progress for so long ends the connection.
const STALL: Duration = Duration::from_secs(10);
/// How long a close waits for its echo (2.5).
const ECHO: Duration = Duration::from_secs(1);
/// Text of the close frame that answers a text message (WS-4).
const TEXT_REASON: &str = "unexpected frame type read (expected MessageBinary): MessageText";

/// How a connection ended; said once, kept for the status (WS-13).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Closed {
    /// A close frame arrived.
    ByPeer { code: u16, reason: String },
    /// The stream ended without a close frame.
    Cut,
    /// Nothing was received for the watchdog's time, or a write hung.
    Lost(&'static str),
    /// We closed it.
    ByUs,
    /// The other side broke the protocol, or the socket failed.
    Failed(String),
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Closed::ByPeer { code, reason } if reason.is_empty() => {
                write!(f, "websocket closed: {code}")
            }
            Closed::ByPeer { code, reason } => write!(f, "websocket closed: {code} {reason}"),
            Closed::Cut => f.write_str("the connection ended without a close frame"),
            Closed::Lost(why) => write!(f, "the connection is lost: {why}"),
            Closed::ByUs => f.write_str("closed by us"),
            Closed::Failed(why) => write!(f, "the connection failed: {why}"),
        }
    }
}

impl std::error::Error for Closed {}

/// Outlives the stream and says how it ended. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct CloseWatch(Arc<Mutex<Option<Closed>>>);

impl CloseWatch {
    /// `None` while the connection stands.
    pub fn closed(&self) -> Option<Closed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The first cause stays.
    fn set(&self, closed: Closed) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(closed);
    }
}

/// Timing of one WebSocket.
#[derive(Debug, Clone)]
pub struct Keepalive {
    /// `None`: silence is no reason to end.
    pub silence: Option<Duration>,
    pub stall: Duration,
    /// Send pings so often, with a counter as payload (WS-9, the server's part).
    pub ping: Option<Duration>,
}

impl Default for Keepalive {
    fn default() -> Keepalive {
        Keepalive { silence: Some(SILENCE), stall: STALL, ping: None }
    }
}

/// The byte stream. End of stream after close 1000, 1001 or a cut connection;
/// any other end is an [`io::Error`] whose inner error is a [`Closed`].
pub struct WebSocket<S = Connection> {
    inner: WebSocketStream<Watched<S>>,
    /// What is left of the last message.
    rest: Bytes,
    /// Bytes given to the inner buffer since it was last flushed.
    unflushed: usize,
    watch: CloseWatch,
    end: End,
    ping: Option<Pinger>,
    answer_headers: HeaderMap,
}

/// Where a connection stands on its way to the end.
enum End {
    Open,
    /// A text message came: send 1003, then fail.
    Rejecting,
    /// Our close frame is queued; the time the echo may take starts when it
    /// is flushed.
    Closing,
    Echo(Pin<Box<Sleep>>),
    /// Nothing more to read or write.
    Over,
}

struct Pinger {
    every: Duration,
    count: u64,
    next: Pin<Box<Sleep>>,
}

impl Dialer {
    /// Opens a WebSocket. `headers` are the caller's (session token,
    /// telemetry); the user's own are appended. No `Origin`, no subprotocol, no
    /// extension is offered (HTTP-7, WS-1).
    pub async fn websocket(&self, url: &Url, headers: HeaderMap) -> Result<WebSocket, HttpError> {
        let connection = self.connect(&target(url)?).await?;
        let key = generate_key();
        let mut all = headers;
        append_user_headers(&mut all, self.headers());
        all.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        all.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        all.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        let key_value = HeaderValue::from_str(&key).map_err(|_| HttpError::Url { url: shown(url) })?;
        all.insert(header::SEC_WEBSOCKET_KEY, key_value);
        let upgraded = upgrade(connection, url, all, RESPONSE_LIMIT).await?;
        verify(&upgraded.headers, &key).map_err(|reason| HttpError::Protocol { url: shown(url), reason })?;
        let mut socket = WebSocket::new(upgraded.stream, upgraded.leftover, Role::Client, Keepalive::default()).await;
        socket.answer_headers = upgraded.headers;
        Ok(socket)
    }
}

/// WS-2.
fn verify(headers: &HeaderMap, key: &str) -> Result<(), String> {
    let has_token = |name: header::HeaderName, wanted: &str| {
        headers
            .get_all(name)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .any(|token| token.trim().eq_ignore_ascii_case(wanted))
    };
    if !has_token(header::UPGRADE, "websocket") || !has_token(header::CONNECTION, "upgrade") {
        return Err("the answer to the WebSocket upgrade upgrades to something else".into());
    }
    let accept = headers.get(header::SEC_WEBSOCKET_ACCEPT);
    if accept.map(HeaderValue::as_bytes) != Some(derive_accept_key(key.as_bytes()).as_bytes()) {
        return Err("the answer to the WebSocket upgrade does not match our key".into());
    }
    if headers.contains_key(header::SEC_WEBSOCKET_PROTOCOL) || headers.contains_key(header::SEC_WEBSOCKET_EXTENSIONS) {
        return Err("the server chose a WebSocket subprotocol or extension we did not offer".into());
    }
    Ok(())
}

impl<S: AsyncRead + AsyncWrite + Unpin> WebSocket<S> {
    /// The server's end of a stream that was already upgraded.
    pub async fn accepted(stream: S, leftover: Bytes, keepalive: Keepalive) -> WebSocket<S> {
        WebSocket::new(stream, leftover, Role::Server, keepalive).await
    }

    async fn new(stream: S, leftover: Bytes, role: Role, keepalive: Keepalive) -> WebSocket<S> {
        let watch = CloseWatch::default();
        let ping = keepalive.ping.map(|every| Pinger { every, count: 0, next: Box::pin(sleep(every)) });
        let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
        let watched = Watched::new(stream, &keepalive, watch.clone());
        let inner = WebSocketStream::from_partially_read(watched, leftover.to_vec(), role, Some(config)).await;
        WebSocket {
            inner,
            rest: Bytes::new(),
            unflushed: 0,
            watch,
            end: End::Open,
            ping,
            answer_headers: HeaderMap::new(),
        }
    }

    /// Says how the connection ended, also after the stream was given away.
    pub fn close_watch(&self) -> CloseWatch {
        self.watch.clone()
    }

    /// Headers of the 101 answer.
    pub fn answer_headers(&self) -> &HeaderMap {
        &self.answer_headers
    }

    /// Closes with a code: 1000 in the ordinary case, 1011 when the streams on
    /// top could not be opened (2.5). Waits at most one second for the echo.
    pub async fn close(mut self, code: u16, reason: &str) {
        self.queue_close(code, reason);
        let _ = std::future::poll_fn(|cx| self.poll_end(cx)).await;
    }

    fn queue_close(&mut self, code: u16, reason: &str) {
        if !matches!(self.end, End::Open) {
            return;
        }
        self.watch.set(Closed::ByUs);
        self.end = End::Closing;
        self.send_close(code, reason);
    }

    fn send_close(&mut self, code: u16, reason: &str) {
        // A control frame holds 125 bytes, two of them the code.
        let mut end = reason.len().min(123);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let frame =
            CloseFrame { code: CloseCode::from(code), reason: Utf8Bytes::from(reason.get(..end).unwrap_or_default()) };
        // An error here is an already broken stream, which the flush reports.
        let _ = Pin::new(&mut self.inner).start_send(Message::Close(Some(frame)));
    }

    /// Flushes our close frame, waits for the echo, then ends the socket.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match &mut self.end {
                End::Open | End::Rejecting | End::Over => return Poll::Ready(Ok(())),
                End::Closing => match ready!(Pin::new(&mut self.inner).poll_flush(cx)) {
                    Ok(()) => self.end = End::Echo(Box::pin(sleep(ECHO))),
                    Err(_) => self.end = End::Over,
                },
                End::Echo(limit) => {
                    let late = limit.as_mut().poll(cx).is_ready();
                    match Pin::new(&mut self.inner).poll_next(cx) {
                        Poll::Ready(Some(Ok(_))) if !late => continue,
                        Poll::Pending if !late => return Poll::Pending,
                        _ => self.end = End::Over,
                    }
                    let socket = self.inner.get_mut();
                    let _ = Pin::new(&mut socket.inner).poll_shutdown(cx);
                }
            }
        }
    }

    /// The next payload; empty at the end of the stream.
    fn poll_payload(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        loop {
            match self.end {
                End::Open => {}
                End::Rejecting => {
                    let _ = ready!(Pin::new(&mut self.inner).poll_flush(cx));
                    self.end = End::Over;
                    return Poll::Ready(Err(self.error()));
                }
                End::Closing | End::Echo(_) | End::Over => return Poll::Ready(Ok(Bytes::new())),
            }
            self.poll_ping(cx);
            let message = match ready!(Pin::new(&mut self.inner).poll_next(cx)) {
                Some(Ok(message)) => message,
                Some(Err(error)) => return Poll::Ready(self.failed(error)),
                None => {
                    self.watch.set(Closed::Cut);
                    self.end = End::Over;
                    return Poll::Ready(Ok(Bytes::new()));
                }
            };
            match message {
                Message::Binary(payload) if payload.is_empty() => {}
                Message::Binary(payload) => return Poll::Ready(Ok(payload)),
                Message::Text(_) => {
                    self.watch.set(Closed::Failed("a text message was received".into()));
                    self.send_close(1003, TEXT_REASON);
                    self.end = End::Rejecting;
                }
                Message::Close(frame) => return Poll::Ready(self.closed_by_peer(frame, cx)),
                // Pings are answered by the next read or flush below us.
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }

    fn poll_ping(&mut self, cx: &mut Context<'_>) {
        let Some(ping) = &mut self.ping else { return };
        while ping.next.as_mut().poll(cx).is_ready() {
            ping.count += 1;
            let payload = Bytes::from(ping.count.to_string());
            ping.next.as_mut().reset(Instant::now() + ping.every);
            let _ = Pin::new(&mut self.inner).start_send(Message::Ping(payload));
            let _ = Pin::new(&mut self.inner).poll_flush(cx);
        }
    }

    fn closed_by_peer(&mut self, frame: Option<CloseFrame>, cx: &mut Context<'_>) -> io::Result<Bytes> {
        // RFC 6455: 1005 stands for a close frame without a code.
        let (code, reason) =
            frame.map_or((1005, String::new()), |frame| (u16::from(frame.code), bounded(&frame.reason)));
        self.watch.set(Closed::ByPeer { code, reason });
        self.end = End::Over;
        // The echo is queued; one try to get it out is enough.
        let _ = Pin::new(&mut self.inner).poll_flush(cx);
        match code {
            1000 | 1001 | 1005 => Ok(Bytes::new()),
            _ => Err(self.error()),
        }
    }

    fn failed(&mut self, error: WsError) -> io::Result<Bytes> {
        self.end = End::Over;
        let closed = match error {
            WsError::ConnectionClosed | WsError::AlreadyClosed => Closed::Cut,
            WsError::Io(error) if is_cut(&error) => Closed::Cut,
            WsError::Protocol(tokio_tungstenite::tungstenite::error::ProtocolError::ResetWithoutClosingHandshake) => {
                Closed::Cut
            }
            other => Closed::Failed(bounded(&other.to_string())),
        };
        self.watch.set(closed);
        match self.watch.closed() {
            Some(Closed::Cut | Closed::ByUs) => Ok(Bytes::new()),
            _ => Err(self.error()),
        }
    }

    fn error(&self) -> io::Error {
        let closed = self.watch.closed().unwrap_or(Closed::Cut);
        let kind = match closed {
            Closed::Lost(_) => io::ErrorKind::TimedOut,
            Closed::Failed(_) => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::ConnectionAborted,
        };
        io::Error::new(kind, closed)
    }

    fn write_failed(&mut self, error: WsError) -> io::Error {
        // A cut seen by a write is an error, unlike one seen by a read.
        let _ = self.failed(error);
        self.error()
    }
}

fn is_cut(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionAborted
    )
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for WebSocket<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.rest.is_empty() {
            self.rest = ready!(self.poll_payload(cx))?;
        }
        let length = self.rest.len().min(buf.remaining());
        buf.put_slice(&self.rest.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for WebSocket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if !matches!(self.end, End::Open) {
            return Poll::Ready(Err(self.error()));
        }
        if self.unflushed >= HIGH_WATER {
            ready!(self.as_mut().poll_flush(cx))?;
        }
        if let Err(error) = ready!(Pin::new(&mut self.inner).poll_ready(cx)) {
            return Poll::Ready(Err(self.write_failed(error)));
        }
        let piece = buf.get(..MAX_WRITE).unwrap_or(buf);
        let message = Message::Binary(Bytes::copy_from_slice(piece));
        if let Err(error) = Pin::new(&mut self.inner).start_send(message) {
            return Poll::Ready(Err(self.write_failed(error)));
        }
        self.unflushed += piece.len();
        Poll::Ready(Ok(piece.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match ready!(Pin::new(&mut self.inner).poll_flush(cx)) {
            Ok(()) => {
                self.unflushed = 0;
                Poll::Ready(Ok(()))
            }
            Err(error) => Poll::Ready(Err(self.write_failed(error))),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.queue_close(1000, "");
        self.poll_end(cx)
    }
}

impl<S> fmt::Debug for WebSocket<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WebSocket")
    }
}

/// The socket below the WebSocket, with both clocks: silence and stalled
/// writes (WS-11, WS-12). Every received byte counts, also of pings.
struct Watched<S> {
    inner: S,
    silence: Option<Duration>,
    stall: Duration,
    silent_until: Option<Pin<Box<Sleep>>>,
    stalled_until: Option<Pin<Box<Sleep>>>,
    last_read: Instant,
    watch: CloseWatch,
}

impl<S> Watched<S> {
    fn new(inner: S, keepalive: &Keepalive, watch: CloseWatch) -> Watched<S> {
        Watched {
            inner,
            silence: keepalive.silence,
            stall: keepalive.stall,
            silent_until: keepalive.silence.map(|silence| Box::pin(sleep(silence))),
            stalled_until: None,
            last_read: Instant::now(),
            watch,
        }
    }

    /// Called when a read has to wait.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let (Some(silence), Some(timer)) = (self.silence, &mut self.silent_until) else {
            return Poll::Pending;
        };
        // The timer is moved only when it fires, not with every read.
        while timer.as_mut().poll(cx).is_ready() {
            let deadline = self.last_read + silence;
            if deadline <= Instant::now() {
                self.watch.set(Closed::Lost("the server has been silent"));
                return Poll::Ready(io::ErrorKind::TimedOut.into());
            }
            timer.as_mut().reset(deadline);
        }
        Poll::Pending
    }

    /// Called when a write has to wait.
    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let stall = self.stall;
        let timer = self.stalled_until.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + stall)));
        ready!(timer.as_mut().poll(cx));
        self.watch.set(Closed::Lost("the server stopped reading"));
        Poll::Ready(io::ErrorKind::TimedOut.into())
    }

    fn writing<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stalled_until = None;
            return result;
        }
        self.poll_stall(cx).map(Err)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.inner).poll_read(cx, buf) {
            Poll::Pending => self.poll_silence(cx).map(Err),
            Poll::Ready(result) => {
                if buf.filled().len() > before {
                    self.last_read = Instant::now();
                }
                Poll::Ready(result)
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.writing(cx, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(cx);
        self.writing(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
