//! Decides how remote calls run over streams: dRPC, the client's half ([`Client`]) and the server's ([`serve`]).
//!
//! A client opens one stream for each call and ends it with Close and one FIN (DR-1, DR-16). What arrives after a call
//! has ended is ignored (DR-10); messages that came before its end are delivered first (DR-14), simply because packets are
//! read by whoever wants the next message: nothing is read ahead, and a slow reader fills its stream's window and no more.
//! A protocol error ends its call and its stream, never the session (DR-19).

mod client;
mod packets;
mod server;
#[cfg(test)]
mod tests;

use codervpn_wire::drpc::{CallError, ProtocolError};

use crate::mux::MuxError;

pub use client::{CallReader, CallWriter, Client};
pub use server::{Replies, ServerCall, Service, serve, serve_stream};

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RpcError {
    /// The session or the stream below is gone.
    #[error("{0}")]
    Session(#[from] MuxError),
    /// The other side broke the rules of dRPC.
    #[error("{0}")]
    Protocol(#[from] ProtocolError),
    /// The other side answered with an error.
    #[error("{0}")]
    Remote(CallError),
    /// The other side cancelled.
    #[error("cancelled by the other side")]
    Cancelled,
    /// The call was over before an answer came, or before what is to be sent.
    #[error("the other side ended the call")]
    Ended,
    /// A message is not what it should be.
    #[error("unreadable message: {0}")]
    Decode(#[from] prost::DecodeError),
}

impl RpcError {
    /// DR-18: the server has no such call.
    pub fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Remote(error) if error.is_unimplemented())
    }
}
