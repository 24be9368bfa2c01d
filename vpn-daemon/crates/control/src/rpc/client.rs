//! Decides the client's half of calls: what is written when (4.3, the packing of Go clients), and what ends them.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use codervpn_wire::drpc::{CallError, FIRST_STREAM, Kind, PacketWriter};
use prost::Message;

use super::RpcError;
use super::packets::{PacketSink, PacketSource};
use crate::mux::Connection;

/// Makes calls over one session.
#[derive(Debug, Clone)]
pub struct Client {
    session: Connection,
}

/// The sending half of a call.
pub struct CallWriter<M> {
    sink: PacketSink,
    packets: PacketWriter,
    /// Something that ends the whole call was sent or received.
    over: Arc<AtomicBool>,
    _message: PhantomData<fn(M)>,
}

/// The receiving half of a call.
pub struct CallReader<M> {
    source: PacketSource,
    over: Arc<AtomicBool>,
    /// The receive side has ended.
    ended: bool,
    _message: PhantomData<fn() -> M>,
}

impl Client {
    /// Calls go over streams of this session.
    pub fn new(session: Connection) -> Self {
        Self { session }
    }

    /// One request, one answer: complete with the first message (DR-12). Bound it in time.
    pub async fn unary<Req: Message, Resp: Message + Default>(
        &self,
        rpc: &str,
        request: &Req,
    ) -> Result<Resp, RpcError> {
        let (mut writer, mut reader) = self.open::<Req, Resp>(rpc)?;
        writer.queue(request);
        writer.queue_close_send();
        writer.sink.flush().await?;
        let answer = reader.next().await;
        // The answer counts, whatever becomes of the goodbye.
        let _ = writer.close().await;
        answer?.ok_or(RpcError::Ended)
    }

    /// One request, many answers.
    pub async fn server_stream<Req: Message, Resp: Message + Default>(
        &self,
        rpc: &str,
        request: &Req,
    ) -> Result<(CallWriter<Req>, CallReader<Resp>), RpcError> {
        let (mut writer, reader) = self.open(rpc)?;
        writer.queue(request);
        writer.sink.flush().await?;
        writer.queue_close_send();
        writer.sink.flush().await?;
        Ok((writer, reader))
    }

    /// Messages both ways. The Invoke travels with the first message or [`CallWriter::flush`].
    pub fn open<Req: Message, Resp: Message + Default>(
        &self,
        rpc: &str,
    ) -> Result<(CallWriter<Req>, CallReader<Resp>), RpcError> {
        let (read, write) = self.session.open()?.into_split();
        let over = Arc::new(AtomicBool::new(false));
        let mut writer = CallWriter {
            sink: PacketSink::new(write),
            packets: PacketWriter::default(),
            over: Arc::clone(&over),
            _message: PhantomData,
        };
        writer.packets.invoke(rpc, writer.sink.queue());
        let reader = CallReader { source: PacketSource::new(read), over, ended: false, _message: PhantomData };
        Ok((writer, reader))
    }
}

impl<M: Message> CallWriter<M> {
    /// Puts a message behind those that wait. Nothing is sent before [`CallWriter::flush`].
    pub fn queue(&mut self, message: &M) {
        self.packets.message(&message.encode_to_vec(), self.sink.queue());
    }

    /// Bytes waiting.
    pub fn waiting(&self) -> usize {
        self.sink.waiting()
    }

    /// Sends what waits. May be cancelled and called again: nothing is lost or sent twice.
    pub async fn flush(&mut self) -> Result<(), RpcError> {
        if self.over.load(Ordering::Relaxed) {
            return Err(RpcError::Ended);
        }
        self.sink.flush().await
    }

    /// Sends one message.
    pub async fn send(&mut self, message: &M) -> Result<(), RpcError> {
        self.queue(message);
        self.flush().await
    }

    /// Ends the call: Close unless it is over already, then FIN (DR-16).
    pub async fn close(&mut self) -> Result<(), RpcError> {
        let mut result = Ok(());
        if !self.over.swap(true, Ordering::Relaxed) {
            self.packets.close(self.sink.queue());
            result = self.sink.flush().await;
        }
        self.sink.finish();
        result
    }

    /// Our FIN alone: after the other side ended the call, or to look like a lost caller.
    pub fn finish(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.sink.finish();
    }

    fn queue_close_send(&mut self) {
        self.packets.close_send(self.sink.queue());
    }
}

impl<M: Message + Default> CallReader<M> {
    /// The next message; `None` at the end of the stream. May be cancelled and called again.
    pub async fn next(&mut self) -> Result<Option<M>, RpcError> {
        while !self.ended {
            let Some(packet) = self.source.next().await.inspect_err(|_| self.ended = true)? else {
                self.ended = true;
                return Ok(None);
            };
            if packet.stream != FIRST_STREAM {
                continue;
            }
            match packet.kind {
                Kind::Message => return Ok(Some(M::decode(packet.data.as_slice())?)),
                Kind::CloseSend => self.ended = true,
                Kind::Close => self.end_call(),
                Kind::Error => {
                    self.end_call();
                    return Err(RpcError::Remote(CallError::decode(&packet.data)));
                }
                Kind::Cancel => {
                    self.end_call();
                    return Err(RpcError::Cancelled);
                }
                // DR-9, DR-10.
                _ if packet.control => {}
                Kind::Invoke | Kind::InvokeMetadata | Kind::Unknown(_) => {
                    self.ended = true;
                    return Err(RpcError::Remote(CallError::new("unexpected packet")));
                }
            }
        }
        Ok(None)
    }

    fn end_call(&mut self) {
        self.ended = true;
        self.over.store(true, Ordering::Relaxed);
    }
}
