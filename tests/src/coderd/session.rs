//! One control connection on the server's side: a WebSocket as a byte stream with yamux on it, its pings, the ways it
//! ends (2.5), and what tests do to it.
//!
//! Output is cut at random places, since message boundaries mean nothing and clients must not rely on them (WS-5).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use codervpn_control::mux::{Connection, MuxError};
use codervpn_control::rpc;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use rand::RngExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error as WsError, Message};
use uuid::Uuid;

use super::listener::Wire;
use super::violations::Violations;

/// Between WebSocket and yamux: one yamux window, so that neither waits for the other with data at hand.
const PIPE: usize = 256 * 1024;
/// What coderd accepts in a message (WS-7).
const MAX_MESSAGE: usize = 4 * 1024 * 1024;
/// Orders of a test that may wait; they are taken at once.
const ORDERS: usize = 16;
/// How long the echo of our close may take.
const ECHO: Duration = Duration::from_secs(1);
const TEXT_REASON: &str = "unexpected frame type read (expected MessageBinary): MessageText";

/// Times of control connections.
#[derive(Debug, Clone)]
pub struct SessionTimes {
    /// Interval of WebSocket pings (WS-9).
    pub ping: Duration,
    /// A pong missing for so long ends the connection (WS-10); `None` never, as real servers do.
    pub pong_limit: Option<Duration>,
}

impl Default for SessionTimes {
    fn default() -> Self {
        Self { ping: Duration::from_secs(15), pong_limit: Some(Duration::from_secs(15)) }
    }
}

/// What can be done to a connection from outside.
#[derive(Debug, Clone)]
pub enum Order {
    /// TCP ends without a close frame.
    Cut,
    /// Ends with this close frame.
    Close { code: u16, reason: String },
    /// A text message, which no server sends.
    Text(String),
    /// These bytes between what yamux sends.
    Bytes(Vec<u8>),
    /// Nothing is read (true), or reading goes on.
    Stall(bool),
}

/// Which connections there are.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    open: Mutex<Table>,
    count: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    sessions: BTreeMap<u64, (SessionFacts, mpsc::Sender<Order>)>,
    opened: BTreeMap<Uuid, u32>,
}

/// What is known of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionFacts {
    pub peer: Uuid,
    pub is_agent: bool,
    /// Version asked for, as sent.
    pub version: Option<String>,
    /// It came with a resume token.
    pub resumed: bool,
}

impl Sessions {
    pub(crate) fn facts(&self) -> Vec<SessionFacts> {
        self.lock().sessions.values().map(|(facts, _)| facts.clone()).collect()
    }

    /// Connections of that peer so far, ended ones included.
    pub(crate) fn opened(&self, peer: Uuid) -> u32 {
        self.lock().opened.get(&peer).copied().unwrap_or(0)
    }

    pub(crate) fn count(&self) -> watch::Receiver<usize> {
        self.count.subscribe()
    }

    /// Gives an order to every connection that fits; says to how many.
    pub(crate) fn order(&self, order: &Order, mut fits: impl FnMut(&SessionFacts) -> bool) -> usize {
        let table = self.lock();
        let chosen = table.sessions.values().filter(|(facts, _)| fits(facts));
        chosen.filter(|(_, orders)| orders.try_send(order.clone()).is_ok()).count()
    }

    fn enter(self: &Arc<Self>, facts: SessionFacts) -> (Entered, mpsc::Receiver<Order>) {
        let (sender, orders) = mpsc::channel(ORDERS);
        let mut table = self.lock();
        table.next += 1;
        let number = table.next;
        *table.opened.entry(facts.peer).or_default() += 1;
        table.sessions.insert(number, (facts, sender));
        self.count.send_replace(table.sessions.len());
        (Entered { sessions: Arc::clone(self), number }, orders)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Entered {
    sessions: Arc<Sessions>,
    number: u64,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut table = self.sessions.lock();
        table.sessions.remove(&self.number);
        self.sessions.count.send_replace(table.sessions.len());
    }
}

/// Why a connection ends, and so how.
#[derive(Debug)]
enum End {
    /// The client has gone or has said so.
    Gone,
    /// It broke the rules of yamux or of WebSocket.
    Violation(String),
    Text,
    /// It did not answer.
    Silent,
    Cut,
    Close(u16, String),
}

/// Serves a connection that has been upgraded, to its end.
pub(crate) async fn serve<S: rpc::Service>(
    stream: impl Wire,
    facts: SessionFacts,
    sessions: Arc<Sessions>,
    times: SessionTimes,
    service: Arc<S>,
    violations: Arc<Violations>,
) {
    let (_entered, orders) = sessions.enter(facts.clone());
    let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
    let socket = WebSocketStream::from_raw_socket(stream, Role::Server, Some(config)).await;
    let (mut sink, mut source) = socket.split();
    let (mux_side, our_side) = tokio::io::duplex(PIPE);
    let (from_mux, to_mux) = tokio::io::split(our_side);
    let (session, driver) = Connection::server(mux_side);
    let (stalled, stall) = watch::channel(false);
    let (pongs, pong) = watch::channel(0);
    let calls = async {
        let why = tokio::select! {
            why = rpc::serve(session, service) => why,
            why = driver => why,
        };
        match why {
            MuxError::Protocol(text) => End::Violation(text),
            MuxError::KeepaliveTimeout(_) | MuxError::WriteTimeout(_) => End::Silent,
            _ => End::Gone,
        }
    };
    let end = tokio::select! {
        end = calls => end,
        end = read(&mut source, to_mux, stall, pongs) => end,
        end = write(&mut sink, from_mux, orders, stalled, pong, times) => end,
    };
    tracing::debug!(peer = %facts.peer, ?end, "control connection ends");
    let (code, reason) = match end {
        End::Cut | End::Silent => return,
        End::Gone => (1000, String::new()),
        End::Violation(text) => {
            violations.add(format!("control connection: {text}"));
            (1000, String::new())
        }
        End::Text => {
            violations.add("WS-4: a text message");
            (1003, TEXT_REASON.to_owned())
        }
        End::Close(code, reason) => (code, reason),
    };
    let frame = CloseFrame { code: CloseCode::from(code), reason: reason.into() };
    let close = async {
        // The client may be gone already.
        if sink.send(Message::Close(Some(frame))).await.is_ok() {
            while let Some(Ok(_)) = source.next().await {}
        }
    };
    let _ = timeout(ECHO, close).await;
}

type Socket<S> = WebSocketStream<S>;

async fn read<S: Wire>(
    source: &mut SplitStream<Socket<S>>,
    mut to_mux: WriteHalf<DuplexStream>,
    mut stall: watch::Receiver<bool>,
    pongs: watch::Sender<u64>,
) -> End {
    loop {
        if stall.wait_for(|stalled| !stalled).await.is_err() {
            return End::Gone;
        }
        match source.next().await {
            Some(Ok(Message::Binary(data))) => {
                if to_mux.write_all(&data).await.is_err() {
                    // The session has ended and knows why.
                    return std::future::pending().await;
                }
            }
            Some(Ok(Message::Text(_))) => return End::Text,
            Some(Ok(Message::Pong(_))) => pongs.send_modify(|count| *count += 1),
            Some(Ok(Message::Close(_))) | None => return End::Gone,
            Some(Ok(_)) => {}
            Some(Err(WsError::Protocol(error))) => {
                use tokio_tungstenite::tungstenite::error::ProtocolError;
                return match error {
                    ProtocolError::ResetWithoutClosingHandshake => End::Gone,
                    error => End::Violation(error.to_string()),
                };
            }
            Some(Err(WsError::Capacity(error))) => return End::Violation(error.to_string()),
            Some(Err(_)) => return End::Gone,
        }
    }
}

async fn write<S: Wire>(
    sink: &mut SplitSink<Socket<S>, Message>,
    mut from_mux: ReadHalf<DuplexStream>,
    mut orders: mpsc::Receiver<Order>,
    stalled: watch::Sender<bool>,
    pongs: watch::Receiver<u64>,
    times: SessionTimes,
) -> End {
    let mut ping = interval_at(Instant::now() + times.ping, times.ping);
    let mut sent = 0_u64;
    let mut asked = Instant::now();
    let mut buffer = BytesMut::with_capacity(16 * 1024);
    loop {
        tokio::select! {
            read = from_mux.read_buf(&mut buffer) => {
                if !matches!(read, Ok(1..)) {
                    // The session has ended and knows why.
                    return std::future::pending().await;
                }
                for piece in cut(buffer.split().freeze()) {
                    if sink.feed(Message::Binary(piece)).await.is_err() {
                        return End::Gone;
                    }
                }
                if sink.flush().await.is_err() {
                    return End::Gone;
                }
            }
            _ = ping.tick() => {
                // Asked now and not where something else woke us: on a quiet connection nothing does.
                if *pongs.borrow() >= sent {
                    sent += 1;
                    asked = Instant::now();
                    if sink.send(Message::Ping(sent.to_string().into())).await.is_err() {
                        return End::Gone;
                    }
                } else if times.pong_limit.is_some_and(|limit| asked.elapsed() >= limit) {
                    return End::Cut;
                }
                // After one missing pong a server never pings again.
            }
            order = orders.recv() => {
                let message = match order {
                    Some(Order::Cut) => return End::Cut,
                    None => return End::Gone,
                    Some(Order::Close { code, reason }) => return End::Close(code, reason),
                    Some(Order::Stall(stall)) => {
                        stalled.send_replace(stall);
                        continue;
                    }
                    Some(Order::Text(text)) => Message::Text(text.into()),
                    Some(Order::Bytes(bytes)) => Message::Binary(bytes.into()),
                };
                if sink.send(message).await.is_err() {
                    return End::Gone;
                }
            }
        }
    }
}

/// Sometimes whole, sometimes in two, sometimes with an empty message between: all the same to a good client.
fn cut(data: Bytes) -> Vec<Bytes> {
    let mut rng = rand::rng();
    let at = rng.random_range(0..=data.len());
    match rng.random_range(0..4) {
        0 => vec![data],
        1 => vec![data.slice(..at), Bytes::new(), data.slice(at..)],
        _ => vec![data.slice(..at), data.slice(at..)],
    }
}
