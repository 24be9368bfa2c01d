//! One open relay connection. Decides how bytes become batches and back: few
//! large reads, all frames of a read in one hand-over, all queued batches in
//! one vectored write, control frames between batches and never inside one.
//!
//! It is one state machine polled by the region's task, so that reading,
//! writing and timers need neither locks nor further tasks.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use codervpn_wire::derp::greeting::{RateLimit, ServerInfo, open_server_info};
use codervpn_wire::derp::{self, Frame, FrameError, GoneReason, HEADER_LEN, Side, kind, split_frame};
use codervpn_wire::keys::{NodePublic, SharedKey};
use tokio::io::AsyncWrite;
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::io::poll_read_buf;
use tracing::debug;

use crate::batch::{FrameHead, MAX_PACKET_FRAME, RelayBatch};
use crate::inbox::RelayEvent;
use crate::region::{Queued, RegionState};
use crate::relay::{Greeted, RelayError};
use crate::stream::Connection;

/// No frame for so long ends the connection; the server sends a keepalive
/// every 60 to 65 s.
const SILENCE: Duration = Duration::from_secs(120);
/// A write without progress for so long ends the connection.
const STALL: Duration = Duration::from_secs(10);
/// A link check must be answered within this.
const PING_LIMIT: Duration = Duration::from_secs(3);
/// How often idleness is looked at.
const TICK: Duration = Duration::from_secs(15);
/// Batches in one vectored write. More do not make the call cheaper.
const GATHER: usize = 8;
/// A read with less room than this is not worth its system call.
const MIN_READ: usize = 64 * 1024;
/// Control frames that may wait to be written: a relay that pings without
/// reading our pongs gets no more of them.
const MAX_CONTROL: usize = 16 * 1024;

pub(crate) struct Session<'a> {
    state: &'a RegionState,
    stream: Connection,
    shared: SharedKey,

    /// Bytes read; those before `scanned` are whole frames.
    received: Vec<u8>,
    scanned: usize,
    /// Packets among them.
    packets: usize,
    /// Bytes still to come of a frame that is too long to keep.
    skip: usize,
    /// A frame arrived since the greeting.
    heard: bool,

    writing: VecDeque<Queued>,
    /// How much of the first of them is written.
    offset: usize,
    control: Vec<u8>,
    flush: bool,
    told_home: bool,
    bucket: Option<TokenBucket>,

    last_received: Instant,
    blocked_since: Option<Instant>,
    pinged: Option<Instant>,
    timer: Pin<Box<Sleep>>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(state: &'a RegionState, greeted: Greeted) -> Session<'a> {
        let mut received = state.shared.receive_pool.take();
        received.extend_from_slice(&greeted.received);
        Session {
            state,
            stream: greeted.stream,
            shared: greeted.shared,
            received,
            scanned: 0,
            packets: 0,
            skip: 0,
            heard: false,
            writing: VecDeque::new(),
            offset: 0,
            control: Vec::new(),
            flush: false,
            told_home: false,
            bucket: None,
            last_received: Instant::now(),
            blocked_since: None,
            pinged: None,
            timer: Box::pin(sleep(TICK)),
        }
    }

    /// Whether the relay said anything after its greeting.
    pub(crate) fn heard(&self) -> bool {
        self.heard
    }

    /// Ready when the connection is over.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<RelayError> {
        self.state.waker.register(cx.waker());
        match self.step(cx) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(error),
        }
    }

    fn step(&mut self, cx: &mut Context<'_>) -> Result<(), RelayError> {
        if self.state.is_stopped() {
            return Err(RelayError::Stopped);
        }
        self.follow_commands();
        let read = self.read(cx);
        // What was read before the end is good.
        self.deliver();
        read?;
        self.write(cx)?;
        self.time(cx)
    }

    fn follow_commands(&mut self) {
        let home = self.state.home.load(Relaxed);
        if home != self.told_home {
            self.told_home = home;
            derp::write_note_preferred(&mut self.control, home);
        }
        if self.state.check.swap(false, Relaxed) && self.pinged.is_none() {
            derp::write_ping(&mut self.control, &rand::random());
            let now = Instant::now();
            self.pinged = Some(now);
            self.wake_by(now + PING_LIMIT);
        }
    }

    // Reading.

    fn read(&mut self, cx: &mut Context<'_>) -> Result<(), RelayError> {
        // What came with the greeting.
        if self.scanned == 0 && !self.received.is_empty() {
            self.scan()?;
        }
        loop {
            if !self.state.shared.inbox.has_room() {
                return Ok(());
            }
            if self.received.capacity() - self.received.len() < MIN_READ {
                self.deliver();
            }
            let before = self.received.len();
            match poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.received) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => return Err(ended(error)),
                Poll::Ready(Ok(0)) => return Err(RelayError::Closed),
                Poll::Ready(Ok(read)) => {
                    count(&self.state.counters.reads, 1);
                    count(&self.state.counters.received_bytes, read);
                    self.last_received = Instant::now();
                    self.pass_over(before, read);
                    self.scan()?;
                }
            }
        }
    }

    /// Cuts the rest of an overlong frame out of what was just read.
    fn pass_over(&mut self, before: usize, read: usize) {
        if self.skip > 0 {
            let skipped = self.skip.min(read);
            self.received.drain(before..before + skipped);
            self.skip -= skipped;
        }
    }

    /// Looks at every whole frame once. Packets stay where they are.
    fn scan(&mut self) -> Result<(), RelayError> {
        loop {
            let rest = self.received.get(self.scanned..).unwrap_or_default();
            let Some(head) = FrameHead::read(rest) else { return Ok(()) };
            let total = HEADER_LEN + head.length;
            if head.is_packet() && total <= MAX_PACKET_FRAME {
                if rest.len() < total {
                    return Ok(());
                }
                self.scanned += total;
                self.packets += 1;
                self.heard = true;
                continue;
            }
            let Some((frame, used)) = split_frame(Side::Client, rest)? else {
                if total > MAX_PACKET_FRAME {
                    if head.kind == kind::SERVER_INFO {
                        let len = u32::try_from(head.length).unwrap_or(u32::MAX);
                        return Err(FrameError::Length { kind: head.kind, len }.into());
                    }
                    // A type of a later version, or a text nobody reads.
                    self.skip = total - rest.len();
                    self.received.truncate(self.scanned);
                }
                return Ok(());
            };
            let heard = Heard::from_frame(&frame, &self.shared)?;
            self.scanned += used;
            self.heard = true;
            self.handle(heard)?;
        }
    }

    fn handle(&mut self, heard: Heard) -> Result<(), RelayError> {
        let region = self.state.id();
        match heard {
            Heard::Nothing => {}
            Heard::Server(info) => self.bucket = info.rate_limit.map(TokenBucket::new),
            Heard::Ping(data) => {
                if self.control.len() < MAX_CONTROL {
                    derp::write_pong(&mut self.control, &data);
                }
            }
            Heard::Pong => self.pinged = None,
            Heard::Gone { peer, reason } => self.state.tell(RelayEvent::PeerGone { region, peer, reason }),
            Heard::Health(text) => {
                if let Some(text) = &text {
                    debug!(%region, text, "the relay complains");
                }
                self.state.set_health(text);
            }
            Heard::Restarting { reconnect_in, try_for } => {
                return Err(RelayError::Restarting { reconnect_in, try_for });
            }
        }
        Ok(())
    }

    /// Hands over all whole frames and keeps the rest.
    fn deliver(&mut self) {
        if self.packets == 0 {
            self.received.drain(..self.scanned);
            self.scanned = 0;
            return;
        }
        let packets = std::mem::take(&mut self.packets);
        let scanned = std::mem::take(&mut self.scanned);
        self.state.touch();
        count(&self.state.counters.received_packets, packets);

        let pool = &self.state.shared.receive_pool;
        let received = &mut self.received;
        let frames = received.get(..scanned).unwrap_or_default();
        let region = self.state.id();
        if self.state.shared.inbox.join(region, frames, packets) {
            received.drain(..scanned);
            return;
        }
        let mut next = pool.take();
        next.extend_from_slice(received.get(scanned..).unwrap_or_default());
        received.truncate(scanned);
        let full = std::mem::replace(received, next);
        self.state.shared.inbox.push_batch(RelayBatch::new(region, full, packets, pool));
    }

    // Writing.

    fn write(&mut self, cx: &mut Context<'_>) -> Result<(), RelayError> {
        loop {
            if self.writing.len() < GATHER {
                self.refill();
            }
            if self.control.is_empty() && self.writing.is_empty() {
                break;
            }
            match self.poll_write(cx) {
                Poll::Ready(Ok(0)) => return Err(RelayError::Closed),
                Poll::Ready(Ok(written)) => {
                    count(&self.state.counters.writes, 1);
                    count(&self.state.counters.sent_bytes, written);
                    self.blocked_since = None;
                    self.flush = true;
                }
                Poll::Ready(Err(error)) => return Err(ended(error)),
                Poll::Pending => {
                    self.blocked();
                    return Ok(());
                }
            }
        }
        if self.flush {
            match Pin::new(&mut self.stream).poll_flush(cx) {
                Poll::Ready(Ok(())) => {
                    self.flush = false;
                    self.blocked_since = None;
                }
                Poll::Ready(Err(error)) => return Err(ended(error)),
                Poll::Pending => self.blocked(),
            }
        }
        Ok(())
    }

    fn refill(&mut self) {
        let before = self.writing.len();
        self.state.take_queued(&mut self.writing, GATHER);
        let Some(bucket) = &mut self.bucket else { return };
        let mut index = before;
        while let Some(queued) = self.writing.get(index) {
            if bucket.take(queued.batch.len()) {
                index += 1;
                continue;
            }
            if let Some(queued) = self.writing.remove(index) {
                count(&self.state.counters.dropped_rate, queued.batch.frames());
                self.state.finished(&queued.batch);
            }
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        // Control frames go between batches, and as a whole before the next.
        if self.offset == 0 && !self.control.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.control))?;
            self.control.drain(..written);
            return Poll::Ready(Ok(written));
        }
        let mut slices = [IoSlice::new(&[]); GATHER];
        let mut used = 0;
        let mut offset = self.offset;
        for (slice, queued) in slices.iter_mut().zip(&self.writing) {
            *slice = IoSlice::new(queued.batch.bytes().get(offset..).unwrap_or_default());
            offset = 0;
            used += 1;
        }
        let slices = slices.get(..used).unwrap_or_default();
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, slices))?;
        self.advance(written);
        Poll::Ready(Ok(written))
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(first) = self.writing.front() {
            let left = first.batch.len() - self.offset;
            if written < left {
                self.offset += written;
                return;
            }
            written -= left;
            self.offset = 0;
            if let Some(done) = self.writing.pop_front() {
                count(&self.state.counters.sent_packets, done.batch.frames());
                self.state.finished(&done.batch);
            }
        }
    }

    fn blocked(&mut self) {
        if self.blocked_since.is_none() {
            let now = Instant::now();
            self.blocked_since = Some(now);
            self.wake_by(now + STALL);
        }
    }

    // Time.

    fn wake_by(&mut self, deadline: Instant) {
        if deadline < self.timer.deadline() {
            self.timer.as_mut().reset(deadline);
        }
    }

    fn time(&mut self, cx: &mut Context<'_>) -> Result<(), RelayError> {
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if now.duration_since(self.last_received) >= SILENCE {
                return Err(RelayError::Silent(SILENCE));
            }
            let waited = |since: Option<Instant>| since.map_or(Duration::ZERO, |since| now.duration_since(since));
            if waited(self.blocked_since) >= STALL {
                return Err(RelayError::Stalled(STALL));
            }
            if waited(self.pinged) >= PING_LIMIT {
                return Err(RelayError::Silent(PING_LIMIT));
            }
            if !self.state.is_needed() {
                return Err(RelayError::Idle);
            }
            self.timer.as_mut().reset(now + TICK);
            self.wake_by(self.last_received + SILENCE);
            if let Some(since) = self.blocked_since {
                self.wake_by(since + STALL);
            }
            if let Some(since) = self.pinged {
                self.wake_by(since + PING_LIMIT);
            }
        }
        Ok(())
    }
}

/// What is on its way is lost with the connection.
impl Drop for Session<'_> {
    fn drop(&mut self) {
        for queued in self.writing.drain(..) {
            count(&self.state.counters.dropped_lost, queued.batch.frames());
            self.state.finished(&queued.batch);
        }
    }
}

/// What a frame asks of us, without borrowing the buffer it lies in.
enum Heard {
    /// Signs of life, mesh frames, short frames and those of later versions.
    Nothing,
    Server(ServerInfo),
    Ping([u8; 8]),
    Pong,
    Health(Option<String>),
    Gone {
        peer: NodePublic,
        reason: GoneReason,
    },
    Restarting {
        reconnect_in: Duration,
        try_for: Duration,
    },
}

impl Heard {
    fn from_frame(frame: &Frame<'_>, shared: &SharedKey) -> Result<Heard, RelayError> {
        Ok(match frame {
            Frame::ServerInfo { sealed } => Heard::Server(open_server_info(shared, sealed)?),
            Frame::Ping(data) => Heard::Ping(*data),
            Frame::Pong(_) => Heard::Pong,
            Frame::Health(raw) => Heard::Health(Some(derp::health_text(raw)).filter(|text| !text.is_empty())),
            Frame::PeerGone { key, reason } => Heard::Gone { peer: *key, reason: *reason },
            Frame::Restarting { reconnect_in, try_for } => {
                Heard::Restarting { reconnect_in: *reconnect_in, try_for: *try_for }
            }
            _ => Heard::Nothing,
        })
    }
}

/// The relay's wish for our rate, in bytes on the wire. A batch may overdraw
/// it once, so that a burst smaller than a batch still lets batches through.
struct TokenBucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    filled: Instant,
}

impl TokenBucket {
    fn new(limit: RateLimit) -> TokenBucket {
        let per_second = limit.bytes_per_second as f64;
        let burst = limit.burst.max(limit.bytes_per_second / 10).max(1) as f64;
        TokenBucket { per_second, burst, tokens: burst, filled: Instant::now() }
    }

    fn take(&mut self, bytes: usize) -> bool {
        let now = Instant::now();
        let gained = now.duration_since(self.filled).as_secs_f64() * self.per_second;
        self.filled = now;
        self.tokens = (self.tokens + gained).min(self.burst);
        if self.tokens <= 0.0 {
            return false;
        }
        self.tokens -= bytes as f64;
        true
    }
}

fn ended(error: io::Error) -> RelayError {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof => RelayError::Closed,
        _ => RelayError::Broken(error),
    }
}

fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Relaxed);
}
