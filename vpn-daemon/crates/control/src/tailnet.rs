//! The calls of the tailnet service with their types.
//!
//! Requests of a Coordinate stream can only be made through [`CoordinateWriter`]'s methods. That is on purpose: an
//! UpdateSelf without a node crashes whole servers (ND-9), so no function here can make one.

use codervpn_proto::tailnet::{self as pb, calls};
use codervpn_wire::node::Node;
use uuid::Uuid;

use crate::convert::{node_to_proto, now};
use crate::mux::Connection;
use crate::rpc::{CallReader, CallWriter, Client, RpcError};

/// Makes the calls of one connection.
#[derive(Debug, Clone)]
pub struct TailnetClient {
    rpc: Client,
}

/// Answers of Coordinate.
pub type CoordinateReader = CallReader<pb::CoordinateResponse>;

/// A stream of answers and the half that ends it.
pub struct Subscription<Req, Resp> {
    writer: CallWriter<Req>,
    reader: CallReader<Resp>,
}

/// Relay maps.
pub type DerpMapStream = Subscription<pb::StreamDerpMapsRequest, pb::DerpMap>;

/// Workspaces and agents.
pub type WorkspaceStream = Subscription<pb::WorkspaceUpdatesRequest, pb::WorkspaceUpdate>;

impl<Req: prost::Message, Resp: prost::Message + Default> Subscription<Req, Resp> {
    /// The next message; `None` at the end. May be cancelled and called again.
    pub async fn next(&mut self) -> Result<Option<Resp>, RpcError> {
        self.reader.next().await
    }

    /// Ends the subscription.
    pub async fn close(&mut self) -> Result<(), RpcError> {
        self.writer.close().await
    }
}

impl TailnetClient {
    /// Calls go over streams of this session.
    pub fn new(session: Connection) -> Self {
        Self { rpc: Client::new(session) }
    }

    /// Opens Coordinate. Nothing but the stream's SYN is sent before the first [`CoordinateWriter::flush`].
    pub fn coordinate(&self) -> Result<(CoordinateWriter, CoordinateReader), RpcError> {
        let (writer, reader) = self.rpc.open(calls::COORDINATE)?;
        Ok((CoordinateWriter { writer }, reader))
    }

    /// Subscribes to relay maps.
    pub async fn stream_derp_maps(&self) -> Result<DerpMapStream, RpcError> {
        let request = pb::StreamDerpMapsRequest::default();
        let (writer, reader) = self.rpc.server_stream(calls::STREAM_DERP_MAPS, &request).await?;
        Ok(Subscription { writer, reader })
    }

    /// Subscribes to the workspaces of `owner`.
    pub async fn workspace_updates(&self, owner: Uuid) -> Result<WorkspaceStream, RpcError> {
        let request = pb::WorkspaceUpdatesRequest { workspace_owner_id: owner.into_bytes().to_vec() };
        let (writer, reader) = self.rpc.server_stream(calls::WORKSPACE_UPDATES, &request).await?;
        Ok(Subscription { writer, reader })
    }

    /// Asks for a resume token.
    pub async fn refresh_resume_token(&self) -> Result<pb::RefreshResumeTokenResponse, RpcError> {
        self.rpc.unary(calls::REFRESH_RESUME_TOKEN, &pb::RefreshResumeTokenRequest::default()).await
    }

    /// Posts telemetry events.
    pub async fn post_telemetry(&self, events: Vec<pb::TelemetryEvent>) -> Result<(), RpcError> {
        let request = pb::TelemetryRequest { events };
        let _: pb::TelemetryResponse = self.rpc.unary(calls::POST_TELEMETRY, &request).await?;
        Ok(())
    }
}

/// Requests of Coordinate, in order (CC-15): queued by the methods, sent by [`CoordinateWriter::flush`].
pub struct CoordinateWriter {
    writer: CallWriter<pb::CoordinateRequest>,
}

impl CoordinateWriter {
    /// Our node, with the present time as its `as_of` (ND-8). False, and nothing is queued, without a home relay (ND-4).
    pub fn update_self(&mut self, node: &Node) -> bool {
        if node.home.is_none() {
            return false;
        }
        let mut node = node.clone();
        node.as_of = Some(now());
        let update = pb::coordinate_request::UpdateSelf { node: Some(node_to_proto(&node)) };
        self.queue(&pb::CoordinateRequest { update_self: Some(update), ..Default::default() });
        true
    }

    /// A tunnel from us to `id`.
    pub fn add_tunnel(&mut self, id: Uuid) {
        self.queue(&pb::CoordinateRequest { add_tunnel: Some(tunnel(id)), ..Default::default() });
    }

    /// No tunnel to `id` any more.
    pub fn remove_tunnel(&mut self, id: Uuid) {
        self.queue(&pb::CoordinateRequest { remove_tunnel: Some(tunnel(id)), ..Default::default() });
    }

    /// Agents only (CC-23): the nodes of these peers are programmed.
    pub fn ready_for_handshake(&mut self, ids: &[Uuid]) {
        let ids = ids.iter().map(|id| pb::coordinate_request::ReadyForHandshake { id: id.into_bytes().to_vec() });
        self.queue(&pb::CoordinateRequest { ready_for_handshake: ids.collect(), ..Default::default() });
    }

    /// We leave on purpose.
    pub fn disconnect(&mut self) {
        let disconnect = Some(pb::coordinate_request::Disconnect {});
        self.queue(&pb::CoordinateRequest { disconnect, ..Default::default() });
    }

    /// Bytes waiting for [`CoordinateWriter::flush`].
    pub fn waiting(&self) -> usize {
        self.writer.waiting()
    }

    /// Sends what waits; may be cancelled and called again.
    pub async fn flush(&mut self) -> Result<(), RpcError> {
        self.writer.flush().await
    }

    /// Our FIN, without a dRPC Close: what a Go client does after the server's Close, or when it fails.
    pub fn finish(&mut self) {
        self.writer.finish();
    }

    fn queue(&mut self, request: &pb::CoordinateRequest) {
        self.writer.queue(request);
    }
}

fn tunnel(id: Uuid) -> pb::coordinate_request::Tunnel {
    pb::coordinate_request::Tunnel { id: id.into_bytes().to_vec() }
}
