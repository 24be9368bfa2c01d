//! The task that reads: frames in, replies to their requests, the rest to the
//! inbox. It never waits for a handler.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt};

use super::CloseReason;
use super::shared::Shared;
use crate::frame::{self, Decoder, FrameError};
use crate::rpc::{self, End, Inbound};

/// Room for one read. Larger frames make the buffer grow as their bytes arrive.
const CHUNK: usize = 8 * 1024;

pub(super) async fn run<E, R>(mut reader: R, mut decoder: Decoder, shared: Arc<Shared<E>>)
where
    E: End,
    R: AsyncRead + Unpin,
{
    let reason = tokio::select! {
        reason = read_all(&mut reader, &mut decoder, &shared) => reason,
        _ = shared.ended() => return,
    };
    tracing::debug!(role = %E::ROLE, %reason, "reading ended");
    shared.reading_ended(reason);
}

async fn read_all<E, R>(reader: &mut R, decoder: &mut Decoder, shared: &Shared<E>) -> CloseReason
where
    E: End,
    R: AsyncRead + Unpin,
{
    loop {
        if let Err(reason) = take_frames(decoder, shared) {
            return reason;
        }
        let buffer = decoder.buffer();
        buffer.reserve(CHUNK);
        match reader.read_buf(buffer).await {
            Ok(0) => {
                return match decoder.finish() {
                    Ok(()) => CloseReason::Peer,
                    Err(error) => CloseReason::Lost(error.to_string()),
                };
            }
            Ok(_) => {}
            Err(error) => return CloseReason::Lost(error.to_string()),
        }
    }
}

/// Handles every complete frame.
fn take_frames<E: End>(decoder: &mut Decoder, shared: &Shared<E>) -> Result<(), CloseReason> {
    loop {
        let body = match decoder.next_body() {
            Ok(Some(body)) => body,
            Ok(None) => return Ok(()),
            Err(error) => return Err(violation::<E>(error)),
        };
        if body.is_empty() {
            tracing::warn!(role = %E::ROLE, "empty frame ignored");
            continue;
        }
        let message = frame::decode::<E::Receive>(&body).map_err(violation::<E>)?;
        match rpc::sort(message) {
            Inbound::Reply(id, body) => shared.replied(id, body),
            Inbound::Request(id, request) => shared.requested(id, request)?,
            Inbound::OneWay(message) => shared.notified(message, body.len()),
            Inbound::Ignored(what) => tracing::warn!(role = %E::ROLE, %what, "ignored"),
        }
    }
}

fn violation<E: End>(error: FrameError) -> CloseReason {
    tracing::error!(role = %E::ROLE, %error, "the other end breaks the protocol");
    CloseReason::Protocol(error)
}
