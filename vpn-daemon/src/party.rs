//! What every party of a tunnel does in the same way, the daemon as well as the testbed's workspace agent: pass on what the
//! coordinator says, measure relays, leave.

use std::time::Duration;

use codervpn_control::{ControlEvent, Handle, PeerUpdate, PeerUpdateKind};
use codervpn_engine::{self as engine, RelayLatency};
use codervpn_underlay::Relays;
use codervpn_wire::node::Family;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Latencies of the relays are measured so often.
pub const PROBE_EVERY: Duration = Duration::from_secs(30);
/// Longest measurement.
const PROBE_LIMIT: Duration = Duration::from_secs(3);

/// The engine's words for the coordinator's.
pub fn commands_of(updates: Vec<PeerUpdate>) -> Vec<engine::Command> {
    let command = |PeerUpdate { id, kind, .. }| match kind {
        PeerUpdateKind::Node(node) => engine::Command::Node { id, node },
        PeerUpdateKind::Disconnected => engine::Command::Disconnected(id),
        PeerUpdateKind::Lost => engine::Command::Lost(id),
        PeerUpdateKind::ReadyForHandshake => engine::Command::ReadyForHandshake(id),
    };
    updates.into_iter().map(command).collect()
}

/// Latencies of the relays that answer.
pub async fn measure(relays: Relays) -> Vec<RelayLatency> {
    let latency = |(region, answer)| match answer {
        Ok(codervpn_underlay::RegionLatency { latency, address }) => {
            let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
            Some(RelayLatency { region, family, latency })
        }
        Err(error) => {
            tracing::debug!(%region, %error, "relay not measured");
            None
        }
    };
    relays.probe(PROBE_LIMIT).await.into_iter().filter_map(latency).collect()
}

/// Says Disconnect and waits for the controller's end, at most for `limit`. Its events must flow until then.
pub async fn leave(control: Handle, events: &mut mpsc::Receiver<ControlEvent>, limit: Duration) {
    tokio::select! {
        _ = timeout(limit, control.shutdown()) => {}
        () = async { while events.recv().await.is_some() {} std::future::pending().await } => {}
    }
}
