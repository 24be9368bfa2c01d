//! The task that writes. Once a frame is begun it is finished, or nothing more
//! is ever written.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::CloseReason;
use super::shared::{Next, Shared};
use crate::rpc::End;

/// After our side is closed: how long to wait for the peer to close its own, so
/// that it can read our last frame before the connection vanishes.
const LINGER: Duration = Duration::from_secs(1);

pub(super) async fn run<E, W>(mut writer: W, shared: Arc<Shared<E>>)
where
    E: End,
    W: AsyncWrite + Unpin,
{
    let reason = tokio::select! {
        reason = write_all(&mut writer, &shared) => reason,
        () = shared.close_is_due() => CloseReason::Stalled,
        _ = shared.ended() => return,
    };
    if reason == CloseReason::Local {
        // The peer may take its time, or has gone already; both are in order.
        let _ = timeout(LINGER, shared.reading_has_ended()).await;
    }
    tracing::debug!(role = %E::ROLE, %reason, "writing ended");
    shared.end(reason);
}

async fn write_all<E, W>(writer: &mut W, shared: &Shared<E>) -> CloseReason
where
    E: End,
    W: AsyncWrite + Unpin,
{
    let stall = shared.limits.write_stall;
    loop {
        let frame = match shared.next_frame().await {
            Next::Frame(frame) => frame,
            Next::Closed => {
                return match timeout(stall, writer.shutdown()).await {
                    Ok(Ok(())) => CloseReason::Local,
                    Ok(Err(error)) => CloseReason::Lost(error.to_string()),
                    Err(_) => CloseReason::Stalled,
                };
            }
        };
        let mut rest = &frame[..];
        while !rest.is_empty() {
            // Every write that takes something starts the time anew.
            match timeout(stall, writer.write(rest)).await {
                Ok(Ok(0)) => return CloseReason::Peer,
                Ok(Ok(written)) => rest = rest.get(written..).unwrap_or_default(),
                Ok(Err(error)) => return CloseReason::Lost(error.to_string()),
                Err(_) => return CloseReason::Stalled,
            }
        }
        match timeout(stall, writer.flush()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return CloseReason::Lost(error.to_string()),
            Err(_) => return CloseReason::Stalled,
        }
    }
}
