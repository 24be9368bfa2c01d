//! Decides when telemetry is posted: one event a call, dropped without a connection, no more of it on a connection whose
//! server has no such call (6.10). The daemon sends none by itself.

use std::time::Duration;

use codervpn_proto::tailnet as pb;
use tokio::time::timeout;

use crate::rpc::RpcError;
use crate::tailnet::TailnetClient;

/// Limit of one call.
const LIMIT: Duration = Duration::from_secs(5);

/// Telemetry on one connection.
#[derive(Debug, Default)]
pub(crate) struct Telemetry {
    unavailable: bool,
}

/// What became of a post.
#[derive(Debug)]
pub(crate) struct Posted(Result<(), Option<RpcError>>);

impl Telemetry {
    pub(crate) fn is_available(&self) -> bool {
        !self.unavailable
    }

    pub(crate) async fn post(client: TailnetClient, event: pb::TelemetryEvent) -> Posted {
        Posted(match timeout(LIMIT, client.post_telemetry(vec![event])).await {
            Ok(result) => result.map_err(Some),
            Err(_) => Err(None),
        })
    }

    pub(crate) fn posted(&mut self, result: &Posted) {
        match &result.0 {
            Ok(()) => {}
            Err(Some(error)) if error.is_unimplemented() => {
                tracing::debug!("the server takes no telemetry");
                self.unavailable = true;
            }
            Err(Some(error)) => tracing::warn!(%error, "telemetry was not taken"),
            Err(None) => tracing::warn!("telemetry was not taken in time"),
        }
    }
}
