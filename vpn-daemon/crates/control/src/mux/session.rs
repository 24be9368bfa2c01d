//! Decides what every yamux frame means: the state of a session and of its streams.
//!
//! No sockets here. Bytes go in through [`Session::handle_input`], bytes come out of [`Session::take_output`], time
//! comes as an argument from the driver, and whoever waits leaves a waker. All of it happens under one short lock.
//!
//! Life of a stream: SYN (ours or theirs) → both directions open → FIN once per direction (YX-12) → forgotten when both
//! have been sent, or at once on RST (YX-14). Frames for streams that are not known are dropped without a word (YX-15),
//! so nothing has to be remembered about the dead.

use std::collections::{HashMap, VecDeque};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use tokio::time::Instant;

use super::frame::{ACK, FIN, HEADER_LEN, Header, Kind, RST, SYN};
use super::{MAX_STREAMS, MuxConfig, MuxError, OUTPUT_LIMIT, Role, WINDOW};

/// Largest body of one data frame that we write. Smaller than the window so that streams take turns.
const MAX_BODY: usize = 65_536;

/// State of one session.
pub(crate) struct Session {
    config: MuxConfig,
    streams: HashMap<u32, Stream>,
    /// Next id to open; wider than an id so that exhaustion shows.
    next_id: u64,
    /// Acknowledged streams nobody has taken yet, at most `config.accept_backlog`.
    backlog: VecDeque<u32>,
    input: Input,
    output: BytesMut,
    refuses_streams: bool,
    closing: bool,
    ended: Option<MuxError>,
    next_ping: u32,
    /// Our ping under way: id and the time its answer is due.
    ping: Option<(u32, Instant)>,
    keepalive_at: Option<Instant>,
    driver: Option<Waker>,
    /// Waiting for `accept` or `ended`; few, so a list will do.
    waiting: Vec<Waker>,
    /// Writers held back by a full output buffer.
    held_writers: Vec<Waker>,
}

/// What the decoder is in the middle of.
struct Input {
    header: [u8; HEADER_LEN],
    have: usize,
    /// Body of a data frame still to come.
    body: Option<Body>,
}

#[derive(Clone, Copy)]
struct Body {
    stream: u32,
    missing: usize,
    /// The frame carried FIN: the end comes after the body.
    fin: bool,
}

struct Stream {
    received: BytesMut,
    receive_window: u32,
    /// Bytes read by the user since the last window update.
    consumed: u32,
    send_window: u32,
    acknowledged: bool,
    opened_at: Instant,
    sent_fin: Option<Instant>,
    got_fin: bool,
    /// No user holds it any more: what arrives is dropped.
    orphan: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Session {
    pub(crate) fn new(role: Role, config: MuxConfig) -> Self {
        Self {
            config,
            streams: HashMap::new(),
            next_id: match role {
                Role::Client => 1,
                Role::Server => 2,
            },
            backlog: VecDeque::new(),
            input: Input { header: [0; HEADER_LEN], have: 0, body: None },
            output: BytesMut::new(),
            refuses_streams: false,
            closing: false,
            ended: None,
            next_ping: 0,
            ping: None,
            keepalive_at: None,
            driver: None,
            waiting: Vec::new(),
            held_writers: Vec::new(),
        }
    }

    pub(crate) fn config(&self) -> &MuxConfig {
        &self.config
    }

    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len()
    }

    // ---- for users ----

    pub(crate) fn open(&mut self) -> Result<u32, MuxError> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        if self.closing {
            return Err(MuxError::Closed);
        }
        if self.refuses_streams {
            return Err(MuxError::NotAccepting);
        }
        if self.streams.len() >= MAX_STREAMS {
            return Err(MuxError::Exhausted);
        }
        let id = u32::try_from(self.next_id).map_err(|_| MuxError::Exhausted)?;
        self.next_id += 2;
        self.streams.insert(id, Stream::new(false));
        self.send(Header::new(Kind::WindowUpdate, SYN, id, 0));
        Ok(id)
    }

    pub(crate) fn poll_accept(&mut self, cx: &Context<'_>) -> Poll<Result<u32, MuxError>> {
        if let Some(id) = self.backlog.pop_front() {
            return Poll::Ready(Ok(id));
        }
        if let Some(error) = &self.ended {
            return Poll::Ready(Err(error.clone()));
        }
        wait(&mut self.waiting, cx);
        Poll::Pending
    }

    pub(crate) fn poll_ended(&mut self, cx: &Context<'_>) -> Poll<MuxError> {
        if let Some(error) = &self.ended {
            return Poll::Ready(error.clone());
        }
        wait(&mut self.waiting, cx);
        Poll::Pending
    }

    pub(crate) fn start_close(&mut self) {
        self.closing = true;
        self.wake_driver();
    }

    /// Hands out received bytes, at most `limit`; `None` is the end of the stream.
    pub(crate) fn poll_read(
        &mut self,
        id: u32,
        limit: usize,
        cx: &Context<'_>,
    ) -> Poll<Result<Option<Bytes>, MuxError>> {
        let Some(stream) = self.streams.get_mut(&id) else {
            return Poll::Ready(Err(self.ended.clone().unwrap_or(MuxError::StreamReset)));
        };
        if stream.received.is_empty() {
            if stream.got_fin {
                return Poll::Ready(Ok(None));
            }
            if let Some(error) = &self.ended {
                return Poll::Ready(Err(error.clone()));
            }
            stream.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let take = limit.min(stream.received.len());
        let bytes = stream.received.split_to(take).freeze();
        // `take` is at most a window.
        stream.consumed += take as u32;
        // YX-8: give credit only after the reader took the data, in steps of half a window.
        if stream.consumed >= WINDOW / 2 && !stream.got_fin && self.ended.is_none() {
            let delta = stream.consumed;
            stream.consumed = 0;
            stream.receive_window += delta;
            self.send(Header::new(Kind::WindowUpdate, 0, id, delta));
        }
        Poll::Ready(Ok(Some(bytes)))
    }

    pub(crate) fn poll_write(&mut self, id: u32, data: &[u8], cx: &Context<'_>) -> Poll<Result<usize, MuxError>> {
        if let Some(error) = &self.ended {
            return Poll::Ready(Err(error.clone()));
        }
        if self.closing {
            return Poll::Ready(Err(MuxError::Closed));
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            return Poll::Ready(Err(MuxError::StreamReset));
        };
        if stream.sent_fin.is_some() {
            return Poll::Ready(Err(MuxError::Closed));
        }
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        if stream.send_window == 0 {
            stream.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if self.output.len() >= OUTPUT_LIMIT {
            wait(&mut self.held_writers, cx);
            return Poll::Pending;
        }
        let take = data.len().min(stream.send_window as usize).min(MAX_BODY);
        let body = data.get(..take).unwrap_or_default();
        // `take` is at most MAX_BODY.
        stream.send_window -= take as u32;
        self.output.extend_from_slice(&Header::new(Kind::Data, 0, id, take as u32).encode());
        self.output.extend_from_slice(body);
        self.wake_driver();
        Poll::Ready(Ok(take))
    }

    /// Sends our FIN, once (YX-12).
    pub(crate) fn finish(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.sent_fin.is_some() || self.ended.is_some() {
            return;
        }
        stream.sent_fin = Some(Instant::now());
        self.send(Header::new(Kind::WindowUpdate, FIN, id, 0));
        self.forget_if_done(id);
    }

    /// The last user of a stream has gone: close our direction and drop what still comes.
    pub(crate) fn abandon(&mut self, id: u32) {
        self.finish(id);
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.orphan = true;
            stream.received = BytesMut::new();
            stream.reader = None;
            stream.writer = None;
        }
        self.forget_if_done(id);
        if self.ended.is_some() {
            self.streams.remove(&id);
        }
    }

    // ---- for the driver ----

    pub(crate) fn register_driver(&mut self, waker: &Waker) {
        match &self.driver {
            Some(old) if old.will_wake(waker) => {}
            _ => self.driver = Some(waker.clone()),
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Moves everything queued into `into` and lets held writers go on.
    pub(crate) fn take_output(&mut self, into: &mut BytesMut) {
        if self.output.is_empty() {
            return;
        }
        std::mem::swap(&mut self.output, into);
        self.output.clear();
        for waker in self.held_writers.drain(..) {
            waker.wake();
        }
    }

    /// True while so many answers wait that reading more would let the peer grow our buffer.
    pub(crate) fn output_is_flooded(&self) -> bool {
        self.output.len() >= 2 * OUTPUT_LIMIT
    }

    /// Decodes bytes of the transport, in any splitting.
    pub(crate) fn handle_input(&mut self, mut bytes: &[u8]) -> Result<(), MuxError> {
        while !bytes.is_empty() {
            if let Some(mut body) = self.input.body {
                let (part, rest) = bytes.split_at(body.missing.min(bytes.len()));
                bytes = rest;
                body.missing -= part.len();
                self.input.body = (body.missing > 0).then_some(body);
                self.handle_body(body, part);
                continue;
            }
            let (part, rest) = bytes.split_at((HEADER_LEN - self.input.have).min(bytes.len()));
            bytes = rest;
            let have = self.input.have;
            if let Some(slot) = self.input.header.get_mut(have..have + part.len()) {
                slot.copy_from_slice(part);
            }
            self.input.have += part.len();
            if self.input.have == HEADER_LEN {
                self.input.have = 0;
                let header = Header::decode(&self.input.header)?;
                self.handle_header(header)?;
            }
        }
        Ok(())
    }

    /// Does what is due at `now` and says when to come back.
    pub(crate) fn handle_timeout(&mut self, now: Instant) -> Result<Instant, MuxError> {
        let keepalive_at = *self.keepalive_at.get_or_insert(now + self.config.keepalive);
        let mut next = keepalive_at;
        match self.ping {
            Some((_, due)) if due <= now => return Err(MuxError::KeepaliveTimeout(self.config.write_limit)),
            Some((_, due)) => next = due,
            None if keepalive_at <= now => {
                let id = self.next_ping;
                self.next_ping = self.next_ping.wrapping_add(1);
                let due = now + self.config.write_limit;
                self.ping = Some((id, due));
                self.keepalive_at = Some(now + self.config.keepalive);
                self.send(Header::new(Kind::Ping, SYN, 0, id));
                next = due;
            }
            None => {}
        }
        let mut expired = Vec::new();
        for (id, stream) in &self.streams {
            if !stream.acknowledged {
                let due = stream.opened_at + self.config.open_limit;
                if due <= now {
                    return Err(MuxError::OpenTimeout { stream: *id, after: self.config.open_limit });
                }
                next = next.min(due);
            }
            if let Some(at) = stream.sent_fin
                && !stream.got_fin
            {
                let due = at + self.config.close_limit;
                if due <= now {
                    expired.push(*id);
                } else {
                    next = next.min(due);
                }
            }
        }
        for id in expired {
            self.send(Header::new(Kind::WindowUpdate, RST, id, 0));
            self.forget(id);
        }
        Ok(next)
    }

    /// Ends the session and wakes everybody (YX-20). Buffered data stays readable.
    pub(crate) fn end(&mut self, error: MuxError) {
        if self.ended.is_some() {
            return;
        }
        self.ended = Some(error);
        self.output.clear();
        self.streams.retain(|_, stream| {
            stream.wake();
            !stream.orphan
        });
        for waker in self.waiting.drain(..).chain(self.held_writers.drain(..)) {
            waker.wake();
        }
    }

    /// Queues a go-away for a protocol error; the session ends right after (YX-21).
    pub(crate) fn queue_go_away(&mut self, code: u32) {
        self.output.extend_from_slice(&Header::new(Kind::GoAway, 0, 0, code).encode());
    }

    // ---- frames ----

    fn handle_header(&mut self, header: Header) -> Result<(), MuxError> {
        match header.kind {
            Kind::Data | Kind::WindowUpdate => self.handle_stream_header(header),
            Kind::Ping => {
                if header.has(SYN) {
                    self.send(Header::new(Kind::Ping, ACK, 0, header.length));
                } else if header.has(ACK) && self.ping.is_some_and(|(id, _)| id == header.length) {
                    self.ping = None;
                }
                Ok(())
            }
            Kind::GoAway if header.length == 0 => {
                self.refuses_streams = true;
                Ok(())
            }
            Kind::GoAway => Err(MuxError::GoAway(header.length)),
        }
    }

    fn handle_stream_header(&mut self, header: Header) -> Result<(), MuxError> {
        let id = header.stream;
        if header.has(SYN) {
            self.handle_syn(id)?;
        }
        if header.kind == Kind::Data && header.length > 0 {
            let missing = header.length as usize;
            self.input.body = Some(Body { stream: id, missing, fin: header.has(FIN) });
        }
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.is_over()) else { return Ok(()) };
        if header.has(ACK) {
            stream.acknowledged = true;
        }
        if header.kind == Kind::WindowUpdate {
            stream.send_window = stream.send_window.saturating_add(header.length);
            if let Some(waker) = stream.writer.take() {
                waker.wake();
            }
        } else {
            // YX-9. The bytes are charged at the header, before any of them is stored.
            let Some(left) = stream.receive_window.checked_sub(header.length) else {
                return Err(MuxError::Protocol(format!(
                    "receive window exceeded on stream {id}: {} bytes, {} allowed",
                    header.length, stream.receive_window
                )));
            };
            if stream.got_fin && header.length > 0 {
                return Err(MuxError::Protocol(format!("data after FIN on stream {id}")));
            }
            stream.receive_window = left;
        }
        if header.has(RST) {
            self.forget(id);
            return Ok(());
        }
        if header.has(FIN) {
            if stream.got_fin {
                return Err(MuxError::Protocol(format!("second FIN on stream {id}")));
            }
            if self.input.body.is_none() {
                self.handle_fin(id);
            }
        }
        Ok(())
    }

    fn handle_fin(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.got_fin = true;
            if let Some(waker) = stream.reader.take() {
                waker.wake();
            }
        }
        self.forget_if_done(id);
    }

    fn handle_syn(&mut self, id: u32) -> Result<(), MuxError> {
        if id == 0 || self.streams.contains_key(&id) {
            return Err(MuxError::Protocol(format!("stream {id} opened twice")));
        }
        if self.backlog.len() >= self.config.accept_backlog || self.streams.len() >= MAX_STREAMS || self.closing {
            self.send(Header::new(Kind::WindowUpdate, RST, id, 0));
            return Ok(());
        }
        self.streams.insert(id, Stream::new(true));
        self.backlog.push_back(id);
        // YX-2, and at once: the accepter may be busy for longer than the opener's patience.
        self.send(Header::new(Kind::WindowUpdate, ACK, id, 0));
        self.wake_waiting();
        Ok(())
    }

    fn handle_body(&mut self, body: Body, part: &[u8]) {
        let Some(stream) = self.streams.get_mut(&body.stream).filter(|stream| !stream.is_over()) else { return };
        if !stream.orphan {
            stream.received.extend_from_slice(part);
            if let Some(waker) = stream.reader.take() {
                waker.wake();
            }
        }
        if body.missing == 0 && body.fin {
            self.handle_fin(body.stream);
        }
    }

    /// Drops a stream of which both directions have ended. A user that still holds it keeps the record (its buffered
    /// data and its end-of-stream) until it lets go; for the peer it is forgotten all the same.
    fn forget_if_done(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.is_over()
            && stream.orphan
        {
            self.streams.remove(&id);
        }
    }

    fn forget(&mut self, id: u32) {
        if let Some(mut stream) = self.streams.remove(&id) {
            stream.wake();
        }
        self.backlog.retain(|waiting| *waiting != id);
    }

    fn send(&mut self, header: Header) {
        if self.ended.is_none() {
            self.output.extend_from_slice(&header.encode());
            self.wake_driver();
        }
    }

    fn wake_driver(&mut self) {
        if let Some(waker) = self.driver.take() {
            waker.wake();
        }
    }

    fn wake_waiting(&mut self) {
        for waker in self.waiting.drain(..) {
            waker.wake();
        }
    }
}

impl Stream {
    /// `theirs`: opened by the peer, hence acknowledged by us at once.
    fn new(theirs: bool) -> Self {
        Self {
            received: BytesMut::new(),
            receive_window: WINDOW,
            consumed: 0,
            send_window: WINDOW,
            acknowledged: theirs,
            opened_at: Instant::now(),
            sent_fin: None,
            got_fin: false,
            orphan: false,
            reader: None,
            writer: None,
        }
    }

    /// Both directions have ended: to the peer it does not exist any more.
    fn is_over(&self) -> bool {
        self.got_fin && self.sent_fin.is_some()
    }

    fn wake(&mut self) {
        for waker in self.reader.take().into_iter().chain(self.writer.take()) {
            waker.wake();
        }
    }
}

/// Leaves a waker, once.
fn wait(list: &mut Vec<Waker>, cx: &Context<'_>) {
    if !list.iter().any(|waker| waker.will_wake(cx.waker())) {
        list.push(cx.waker().clone());
    }
}

/// Drops the first `n` written bytes.
pub(crate) fn advance(buffer: &mut BytesMut, n: usize) {
    buffer.advance(n.min(buffer.len()));
}
