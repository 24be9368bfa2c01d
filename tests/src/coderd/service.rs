//! The calls of the tailnet service as a server answers them, one connection's view of them.
//!
//! The three stream handlers end their calls themselves, with Close and never with an error, as coderd's do (DR-13).

use std::sync::Arc;
use std::time::Duration;

use codervpn_control::convert::{derp_map_to_proto, uuid};
use codervpn_control::rpc::{ServerCall, Service};
use codervpn_proto::tailnet::{self as pb, calls};
use codervpn_wire::drpc::CallError;
use prost_types::{Duration as ProtoDuration, Timestamp};
use uuid::Uuid;

use super::Shared;
use super::authorization::Authorization;
use super::coordinator::{Coordinator, Membership, Next};
use super::faults::RpcFault;
use super::resume;

/// Telemetry events kept.
const TELEMETRY: usize = 1024;

/// Answers the calls of one connection.
pub(crate) struct TailnetService {
    pub(crate) shared: Arc<Shared>,
    /// The coordinator at the time of the dial.
    pub(crate) coordinator: Arc<Coordinator>,
    pub(crate) peer: Uuid,
    /// Whose client it is; an agent's has none.
    pub(crate) user: Option<Uuid>,
    pub(crate) authorization: Authorization,
}

impl Service for TailnetService {
    async fn call(self: Arc<Self>, call: ServerCall) -> Result<(), CallError> {
        match self.shared.faults.of_rpc(&call.rpc) {
            Some(RpcFault::Unknown) => return Err(CallError::unknown_rpc(&call.rpc)),
            Some(RpcFault::Unimplemented) => return Err(CallError::unimplemented()),
            Some(RpcFault::Error { code, text }) => return Err(CallError { code, text }),
            Some(RpcFault::Close) => return closed(&call).await,
            Some(RpcFault::Silent) => {
                call.closed().await;
                return Ok(());
            }
            None => {}
        }
        match call.rpc.as_str() {
            calls::COORDINATE => self.coordinate(call).await,
            calls::STREAM_DERP_MAPS => self.stream_derp_maps(call).await,
            calls::WORKSPACE_UPDATES if self.user.is_some() => self.workspace_updates(call).await,
            calls::REFRESH_RESUME_TOKEN => self.refresh_resume_token(call).await,
            calls::POST_TELEMETRY => self.post_telemetry(call).await,
            other => {
                self.shared.violations.add(format!("a call that no server has: {other}"));
                Err(CallError::unknown_rpc(other))
            }
        }
    }
}

/// Leaves the coordinator whatever ends the call, also when the connection takes the call along.
struct Left<'a> {
    coordinator: &'a Coordinator,
    membership: Membership,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.coordinator.end(&self.membership, None);
    }
}

impl TailnetService {
    async fn coordinate(&self, call: ServerCall) -> Result<(), CallError> {
        let (membership, mut responses) = self.coordinator.connect(self.peer, self.authorization.clone());
        let left = Left { coordinator: &self.coordinator, membership };
        let ServerCall { mut requests, replies, .. } = call;
        let incoming = async {
            loop {
                match requests.next::<pb::CoordinateRequest>().await {
                    Ok(Some(request)) => {
                        if self.coordinator.request(&left.membership, &request) == Next::Over {
                            break;
                        }
                    }
                    Ok(None) => {
                        self.coordinator.end(&left.membership, None);
                        break;
                    }
                    Err(error) => {
                        self.shared.violations.add(format!("unreadable CoordinateRequest: {}", error.text));
                        self.coordinator.end(&left.membership, Some(&error.text));
                        break;
                    }
                }
            }
            // The end of the responses ends the call (SV-5, SV-13).
            std::future::pending::<()>().await;
        };
        let outgoing = async {
            while let Some(response) = responses.recv().await {
                if replies.send(&response).await.is_err() {
                    return;
                }
            }
            // The client may be gone.
            let _ = replies.close().await;
        };
        tokio::select! {
            () = outgoing => {}
            () = incoming => {}
        }
        Ok(())
    }

    async fn stream_derp_maps(&self, mut call: ServerCall) -> Result<(), CallError> {
        let _: pb::StreamDerpMapsRequest = call.request().await?;
        let mut maps = self.shared.derp_map.subscribe();
        loop {
            let map = derp_map_to_proto(&maps.borrow_and_update());
            if call.replies.send(&map).await.is_err() {
                return Ok(());
            }
            tokio::select! {
                changed = maps.changed() => if changed.is_err() { break },
                () = self.shared.interrupted(calls::STREAM_DERP_MAPS) => break,
                () = call.closed() => break,
            }
        }
        closed(&call).await
    }

    async fn workspace_updates(&self, mut call: ServerCall) -> Result<(), CallError> {
        let request: pb::WorkspaceUpdatesRequest = call.request().await?;
        let owner = uuid(&request.workspace_owner_id);
        let (Some(owner), Some(user)) = (owner, self.user) else {
            self.shared.violations.add("WorkspaceUpdates without an owner's id");
            return closed(&call).await;
        };
        if !self.shared.store.may_follow(user, owner) {
            self.shared.violations.add("WorkspaceUpdates of another user");
            return closed(&call).await;
        }
        let mut updates = self.shared.store.subscribe(owner);
        loop {
            tokio::select! {
                update = updates.next() => {
                    let Some(update) = update else { break };
                    if call.replies.send(&update).await.is_err() {
                        return Ok(());
                    }
                }
                () = self.shared.interrupted(calls::WORKSPACE_UPDATES) => break,
                () = call.closed() => break,
            }
        }
        closed(&call).await
    }

    async fn refresh_resume_token(&self, mut call: ServerCall) -> Result<(), CallError> {
        let _: pb::RefreshResumeTokenRequest = call.request().await?;
        let life = self.shared.resume_life();
        let token = self.shared.resume.issue(self.peer, life);
        let answer = pb::RefreshResumeTokenResponse {
            token,
            refresh_in: Some(to_proto(life / 2)),
            expires_at: Some(Timestamp { seconds: (resume::now() + life).as_secs() as i64, nanos: 0 }),
        };
        // The client may have what it wanted and be gone.
        let _ = call.replies.send(&answer).await;
        Ok(())
    }

    async fn post_telemetry(&self, mut call: ServerCall) -> Result<(), CallError> {
        let request: pb::TelemetryRequest = call.request().await?;
        {
            let mut kept = super::lock(&self.shared.telemetry);
            let room = TELEMETRY.saturating_sub(kept.len());
            kept.extend(request.events.into_iter().take(room));
        }
        let _ = call.replies.send(&pb::TelemetryResponse::default()).await;
        Ok(())
    }
}

async fn closed(call: &ServerCall) -> Result<(), CallError> {
    let _ = call.replies.close().await;
    Ok(())
}

fn to_proto(duration: Duration) -> ProtoDuration {
    ProtoDuration { seconds: duration.as_secs() as i64, nanos: duration.subsec_nanos() as i32 }
}
