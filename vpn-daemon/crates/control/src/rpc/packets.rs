//! Decides how packets get on and off one stream. Both ends survive being cancelled at any await: what was half written
//! is finished by the next write, what was half read by the next read.

use bytes::{Buf, Bytes};
use codervpn_wire::drpc::{Packet, PacketReader};

use super::RpcError;
use crate::mux::{ReadHalf, WriteHalf};

/// Bytes taken from the stream at once.
const READ_SIZE: usize = 16 * 1024;

pub(super) struct PacketSource {
    read: ReadHalf,
    reader: PacketReader,
    input: Bytes,
}

impl PacketSource {
    pub(super) fn new(read: ReadHalf) -> Self {
        Self { read, reader: PacketReader::new(), input: Bytes::new() }
    }

    /// The next packet; `None` at the end of the stream.
    pub(super) async fn next(&mut self) -> Result<Option<Packet>, RpcError> {
        loop {
            let mut rest: &[u8] = &self.input;
            let packet = self.reader.read(&mut rest)?;
            let taken = self.input.len() - rest.len();
            self.input.advance(taken);
            if packet.is_some() {
                return Ok(packet);
            }
            match self.read.chunk(READ_SIZE).await? {
                Some(chunk) => self.input = chunk,
                None => return Ok(None),
            }
        }
    }
}

pub(super) struct PacketSink {
    write: WriteHalf,
    pending: Vec<u8>,
    written: usize,
}

impl PacketSink {
    pub(super) fn new(write: WriteHalf) -> Self {
        Self { write, pending: Vec::new(), written: 0 }
    }

    /// Where packets are put before [`PacketSink::flush`].
    pub(super) fn queue(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    /// Bytes that have not been handed to the session.
    pub(super) fn waiting(&self) -> usize {
        self.pending.len() - self.written
    }

    pub(super) async fn flush(&mut self) -> Result<(), RpcError> {
        while let Some(rest) = self.pending.get(self.written..).filter(|rest| !rest.is_empty()) {
            self.written += self.write.write_some(rest).await?;
        }
        self.pending.clear();
        self.written = 0;
        Ok(())
    }

    /// Our FIN.
    pub(super) fn finish(&mut self) {
        self.write.finish();
    }
}
