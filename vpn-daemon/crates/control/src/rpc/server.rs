//! Decides the server's half of calls. Used by test deployments; the daemon serves nothing over dRPC.
//!
//! One stream carries one call after the other (DR-2). Each is a future of the [`Service`], run by the same task that
//! reads the stream, so a call that ends takes everything of it along.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codervpn_wire::drpc::{CallError, Kind, Packet, PacketWriter};
use prost::Message;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::RpcError;
use super::packets::{PacketSink, PacketSource};
use crate::mux::{Connection, MuxError, MuxStream};

/// Requests of one call that wait for its handler; then the stream's window fills (DR-14).
const REQUEST_QUEUE: usize = 16;

/// How long a handler may go on after the client has ended its call, to finish with what it had received.
const AFTERLIFE: Duration = Duration::from_secs(5);

/// Answers calls.
pub trait Service: Send + Sync + 'static {
    /// Runs one call. `Ok` ends it with CloseSend, unless the call was closed through its [`Replies`]; `Err` with an
    /// Error packet. Unknown names: [`CallError::unknown_rpc`]. It should end soon after [`ServerCall::closed`].
    fn call(self: Arc<Self>, call: ServerCall) -> impl Future<Output = Result<(), CallError>> + Send;
}

/// One call as its handler sees it.
pub struct ServerCall {
    /// Full name of the RPC.
    pub rpc: String,
    /// Requests in order, undecoded; `None` after the client's last.
    pub requests: Requests,
    /// Where answers go.
    pub replies: Replies,
    /// True when the client has ended the call or is gone.
    closed: watch::Receiver<bool>,
}

/// Requests of a call.
pub struct Requests(mpsc::Receiver<Bytes>);

impl Requests {
    /// The next request; `None` after the last.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, CallError> {
        match self.0.recv().await {
            Some(bytes) => M::decode(bytes).map(Some).map_err(|error| CallError::new(error.to_string())),
            None => Ok(None),
        }
    }
}

impl ServerCall {
    /// Resolves when the client has ended the call or is gone. Requests received before are still delivered.
    pub async fn closed(&self) {
        let mut closed = self.closed.clone();
        let _ = closed.wait_for(|closed| *closed).await;
    }

    /// The same as a value of its own, for another task or a select beside the other members.
    pub fn closed_signal(&self) -> watch::Receiver<bool> {
        self.closed.clone()
    }

    /// The only request of a unary or server-streaming call.
    pub async fn request<M: Message + Default>(&mut self) -> Result<M, CallError> {
        self.requests.next().await?.ok_or_else(|| CallError::new("the call ended without a request"))
    }
}

/// Sends answers of one call; clones share it.
#[derive(Clone)]
pub struct Replies {
    shared: Arc<Mutex<Sender>>,
    stream: u64,
}

struct Sender {
    sink: PacketSink,
    packets: PacketWriter,
    stream: u64,
    over: bool,
}

impl Replies {
    /// Sends one message.
    pub async fn send<M: Message>(&self, message: &M) -> Result<(), RpcError> {
        self.write(Kind::Message, &message.encode_to_vec(), false).await
    }

    /// Ends the call with Close, as coderd's stream handlers do (DR-13).
    pub async fn close(&self) -> Result<(), RpcError> {
        self.write(Kind::Close, &[], true).await
    }

    async fn write(&self, kind: Kind, data: &[u8], terminal: bool) -> Result<(), RpcError> {
        let mut sender = self.shared.lock().await;
        let sender = &mut *sender;
        if sender.over || sender.stream != self.stream {
            return Err(RpcError::Ended);
        }
        sender.over = terminal;
        sender.packets.write(kind, data, sender.sink.queue());
        sender.sink.flush().await
    }
}

/// Serves every stream of a session until it ends; says why it did.
pub async fn serve<S: Service>(session: Connection, service: Arc<S>) -> MuxError {
    let mut streams = JoinSet::new();
    loop {
        tokio::select! {
            stream = session.accept() => match stream {
                Ok(stream) => {
                    streams.spawn(serve_stream(stream, Arc::clone(&service)));
                }
                Err(error) => break error,
            },
            Some(_) = streams.join_next() => {}
        }
    }
}

type Handler = Pin<Box<dyn Future<Output = Result<(), CallError>> + Send>>;

/// Serves the calls of one stream.
pub async fn serve_stream<S: Service>(stream: MuxStream, service: Arc<S>) {
    let (read, write) = stream.into_split();
    let mut source = PacketSource::new(read);
    let shared = Arc::new(Mutex::new(Sender {
        sink: PacketSink::new(write),
        packets: PacketWriter::new(0),
        stream: 0,
        over: true,
    }));
    let mut current: Option<Running> = None;
    // A protocol error or the end of the stream: nothing more is read.
    let mut input_over = false;
    loop {
        let running = current.as_mut();
        let deliverable = running.as_ref().is_some_and(|running| running.waiting.is_some());
        let deadline = running.as_ref().and_then(|running| running.deadline);
        if input_over && running.is_none() {
            break;
        }
        let (handler, requests) = match running {
            Some(running) => (Some(&mut running.handler), running.requests.as_ref()),
            None => (None, None),
        };
        let event = tokio::select! {
            result = wait_for(handler) => Event::Done(result),
            permit = reserve(requests), if deliverable => Event::Deliver(permit),
            packet = source.next(), if !deliverable && !input_over => Event::Packet(packet),
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => Event::Late,
        };
        match event {
            Event::Done(result) => {
                current = None;
                if finish(&shared, result).await.is_err() {
                    break;
                }
            }
            Event::Deliver(permit) => {
                if let Some(running) = &mut current {
                    deliver(running, permit);
                }
            }
            Event::Packet(Ok(Some(packet))) => {
                handle_packet(packet, &mut current, &shared, &service).await;
            }
            Event::Packet(_) => {
                input_over = true;
                if let Some(running) = &mut current {
                    running.close();
                }
            }
            Event::Late => current = None,
        }
    }
    shared.lock().await.sink.finish();
}

enum Event {
    Done(Result<(), CallError>),
    Deliver(bool),
    Packet(Result<Option<Packet>, RpcError>),
    Late,
}

/// The call under way.
struct Running {
    stream: u64,
    handler: Handler,
    requests: Option<mpsc::Sender<Bytes>>,
    /// A request for which there is no room yet.
    waiting: Option<Bytes>,
    /// No more requests behind the waiting one.
    half_closed: bool,
    closed: watch::Sender<bool>,
    deadline: Option<Instant>,
}

impl Running {
    fn half_close(&mut self) {
        self.half_closed = true;
        if self.waiting.is_none() {
            self.requests = None;
        }
    }

    /// The client is done with the call.
    fn close(&mut self) {
        self.half_close();
        self.closed.send_replace(true);
        self.deadline.get_or_insert_with(|| Instant::now() + AFTERLIFE);
    }
}

async fn wait_for(handler: Option<&mut Handler>) -> Result<(), CallError> {
    match handler {
        Some(handler) => handler.await,
        None => std::future::pending().await,
    }
}

/// True when there is room for a request, false when the handler takes none any more.
async fn reserve(requests: Option<&mpsc::Sender<Bytes>>) -> bool {
    match requests {
        Some(requests) => requests.reserve().await.is_ok(),
        None => false,
    }
}

fn deliver(running: &mut Running, room: bool) {
    let request = running.waiting.take();
    if let (true, Some(request), Some(requests)) = (room, request, &running.requests) {
        // There is room and nobody else sends.
        let _ = requests.try_send(request);
    }
    if running.half_closed {
        running.requests = None;
    }
}

async fn handle_packet<S: Service>(
    packet: Packet,
    current: &mut Option<Running>,
    shared: &Arc<Mutex<Sender>>,
    service: &Arc<S>,
) {
    if packet.kind == Kind::Invoke {
        let known = shared.lock().await.stream;
        if packet.stream > known {
            // A higher id cancels an unfinished earlier call (DR-2).
            *current = Some(start(packet, shared, service).await);
        } else if current.as_ref().is_some_and(|running| running.stream == packet.stream) {
            // DR-8: the call is broken.
            *current = None;
            shared.lock().await.over = true;
        }
        return;
    }
    let Some(running) = current.as_mut().filter(|running| running.stream == packet.stream) else { return };
    match packet.kind {
        Kind::Message if !running.half_closed => running.waiting = Some(packet.data.into()),
        Kind::CloseSend => running.half_close(),
        Kind::Close => running.close(),
        Kind::Cancel | Kind::Error => {
            *current = None;
            shared.lock().await.over = true;
        }
        Kind::Unknown(_) if !packet.control => {
            *current = None;
            let _ = finish(shared, Err(CallError::new("internal error: unknown packet kind"))).await;
        }
        _ => {}
    }
}

async fn start<S: Service>(packet: Packet, shared: &Arc<Mutex<Sender>>, service: &Arc<S>) -> Running {
    {
        let mut sender = shared.lock().await;
        sender.packets = PacketWriter::new(packet.stream);
        sender.stream = packet.stream;
        sender.over = false;
    }
    let (requests, queue) = mpsc::channel(REQUEST_QUEUE);
    let (closed, closed_signal) = watch::channel(false);
    let call = ServerCall {
        rpc: String::from_utf8_lossy(&packet.data).into_owned(),
        requests: Requests(queue),
        replies: Replies { shared: Arc::clone(shared), stream: packet.stream },
        closed: closed_signal,
    };
    Running {
        stream: packet.stream,
        handler: Box::pin(Arc::clone(service).call(call)),
        requests: Some(requests),
        waiting: None,
        half_closed: false,
        closed,
        deadline: None,
    }
}

/// Says the end of a call, unless its handler did. `Err`: the stream is of no more use.
async fn finish(shared: &Mutex<Sender>, result: Result<(), CallError>) -> Result<(), RpcError> {
    let mut sender = shared.lock().await;
    let sender = &mut *sender;
    if sender.over {
        // Closed by the handler: coderd ends the stream then, too.
        sender.sink.flush().await?;
        return Err(RpcError::Ended);
    }
    sender.over = true;
    match result {
        Ok(()) => sender.packets.close_send(sender.sink.queue()),
        Err(error) => sender.packets.error(&error, sender.sink.queue()),
    }
    sender.sink.flush().await
}
