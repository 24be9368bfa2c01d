//! Decides what a message is: one-way, a request, or a reply, who may send
//! which, and which reply belongs to which request.

use std::fmt::Debug;

use crate::ext;
use crate::handshake::Role;
use crate::ids::RequestId;
use crate::version::Version;
use crate::vpn::{
    self, client_message as client, manager_message as manager, service_message as service, tunnel_message as tunnel,
};

/// One end of a connection: what it sends, what it receives, what it is, and
/// what it expects at the other end.
pub trait End: Debug + Send + Sync + 'static {
    type Send: Message;
    type Receive: Message;
    type Peer: End<Send = Self::Receive, Receive = Self::Send>;
    const ROLE: Role;
}

macro_rules! end {
    ($name:ident, $send:ident, $receive:ident, $peer:ident) => {
        #[derive(Debug)]
        pub enum $name {}

        impl End for $name {
            type Send = vpn::$send;
            type Receive = vpn::$receive;
            type Peer = $peer;
            const ROLE: Role = Role::$name;
        }
    };
}

end!(Manager, ManagerMessage, TunnelMessage, Tunnel);
end!(Tunnel, TunnelMessage, ManagerMessage, Manager);
end!(Client, ClientMessage, ServiceMessage, Service);
end!(Service, ServiceMessage, ClientMessage, Client);

/// What this end puts into its messages.
pub type SendBody<E> = <<E as End>::Send as Message>::Body;
/// What this end gets out of the peer's.
pub type ReceiveBody<E> = <<E as End>::Receive as Message>::Body;

/// A top-level message: an optional `rpc` and one member of a oneof.
pub trait Message: prost::Message + Default + 'static {
    type Body: Body;
    fn new(rpc: Option<vpn::Rpc>, body: Self::Body) -> Self;
    fn into_parts(self) -> (Option<vpn::Rpc>, Option<Self::Body>);
    fn has_body(&self) -> bool;
}

macro_rules! message {
    ($name:ident, $body:path) => {
        impl Message for vpn::$name {
            type Body = $body;

            fn new(rpc: Option<vpn::Rpc>, body: $body) -> Self {
                Self { rpc, msg: Some(body) }
            }

            fn into_parts(self) -> (Option<vpn::Rpc>, Option<$body>) {
                (self.rpc, self.msg)
            }

            fn has_body(&self) -> bool {
                self.msg.is_some()
            }
        }
    };
}

message!(ManagerMessage, manager::Msg);
message!(TunnelMessage, tunnel::Msg);
message!(ClientMessage, client::Msg);
message!(ServiceMessage, service::Msg);

/// What a message is about, whoever sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    GetPeerUpdate,
    PeerUpdate,
    NetworkSettings,
    Start,
    Stop,
    Wake,
    Status,
    StartProgress,
    Log,
    Check,
    Ping,
    Diagnostics,
    Workspaces,
    /// The reply that refuses a request of the extension.
    Failed,
    /// Something newer in the extension.
    UnknownExt,
}

impl Kind {
    /// The least version in which a request of this kind may be sent (2.6).
    #[must_use]
    pub fn since(self) -> Version {
        match self {
            Self::Wake => Version::WAKE,
            _ => Version::new(1, 0),
        }
    }
}

/// The content of a top-level message.
pub trait Body: Debug + Clone + PartialEq + Send + Sync + 'static {
    fn kind(&self) -> Kind;

    /// May be sent with a `msg_id`.
    fn may_be_request(&self) -> bool;

    /// May be sent without `rpc`.
    fn may_be_one_way(&self) -> bool;

    /// Belongs, as a reply, to a request of that kind (4.1).
    fn answers(&self, request: Kind) -> bool;

    /// The failure to send instead of this reply when it exceeds a frame.
    fn too_large(&self) -> Option<Self>;
}

const TOO_LARGE: &str = "the reply is too large for the protocol";

impl Body for manager::Msg {
    fn kind(&self) -> Kind {
        match self {
            Self::GetPeerUpdate(_) => Kind::GetPeerUpdate,
            Self::NetworkSettings(_) => Kind::NetworkSettings,
            Self::Start(_) => Kind::Start,
            Self::Stop(_) => Kind::Stop,
            Self::Wake(_) => Kind::Wake,
        }
    }

    fn may_be_request(&self) -> bool {
        !matches!(self, Self::NetworkSettings(_))
    }

    fn may_be_one_way(&self) -> bool {
        false
    }

    fn answers(&self, request: Kind) -> bool {
        matches!(self, Self::NetworkSettings(_)) && request == Kind::NetworkSettings
    }

    fn too_large(&self) -> Option<Self> {
        match self {
            Self::NetworkSettings(_) => Some(Self::NetworkSettings(vpn::NetworkSettingsResponse {
                success: false,
                error_message: TOO_LARGE.into(),
            })),
            _ => None,
        }
    }
}

impl Body for tunnel::Msg {
    fn kind(&self) -> Kind {
        match self {
            Self::Log(_) => Kind::Log,
            Self::PeerUpdate(_) => Kind::PeerUpdate,
            Self::NetworkSettings(_) => Kind::NetworkSettings,
            Self::Start(_) => Kind::Start,
            Self::Stop(_) => Kind::Stop,
            Self::Wake(_) => Kind::Wake,
        }
    }

    fn may_be_request(&self) -> bool {
        matches!(self, Self::NetworkSettings(_))
    }

    fn may_be_one_way(&self) -> bool {
        matches!(self, Self::Log(_) | Self::PeerUpdate(_))
    }

    fn answers(&self, request: Kind) -> bool {
        match self {
            Self::PeerUpdate(_) => request == Kind::GetPeerUpdate,
            Self::Start(_) | Self::Stop(_) | Self::Wake(_) => request == self.kind(),
            Self::Log(_) | Self::NetworkSettings(_) => false,
        }
    }

    fn too_large(&self) -> Option<Self> {
        match self {
            Self::PeerUpdate(_) => Some(Self::PeerUpdate(vpn::PeerUpdate::default())),
            Self::Start(_) => Some(Self::Start(too_large_start())),
            Self::Stop(_) => Some(Self::Stop(too_large_stop())),
            _ => None,
        }
    }
}

impl Body for client::Msg {
    fn kind(&self) -> Kind {
        use ext::client_ext::Request;
        match self {
            Self::Start(_) => Kind::Start,
            Self::Stop(_) => Kind::Stop,
            Self::Status(_) => Kind::Status,
            Self::Ext(ext) => match ext.request {
                Some(Request::Check(_)) => Kind::Check,
                Some(Request::Ping(_)) => Kind::Ping,
                Some(Request::Diagnostics(_)) => Kind::Diagnostics,
                Some(Request::Workspaces(_)) => Kind::Workspaces,
                None => Kind::UnknownExt,
            },
        }
    }

    fn may_be_request(&self) -> bool {
        true
    }

    fn may_be_one_way(&self) -> bool {
        false
    }

    fn answers(&self, _request: Kind) -> bool {
        false
    }

    fn too_large(&self) -> Option<Self> {
        None
    }
}

impl Body for service::Msg {
    fn kind(&self) -> Kind {
        use ext::service_ext::Reply;
        match self {
            Self::Start(_) => Kind::Start,
            Self::Stop(_) => Kind::Stop,
            Self::Status(_) => Kind::Status,
            Self::StartProgress(_) => Kind::StartProgress,
            Self::Ext(ext) => match ext.reply {
                Some(Reply::Check(_)) => Kind::Check,
                Some(Reply::Ping(_)) => Kind::Ping,
                Some(Reply::Diagnostics(_)) => Kind::Diagnostics,
                Some(Reply::Workspaces(_)) => Kind::Workspaces,
                Some(Reply::Failed(_)) => Kind::Failed,
                None => Kind::UnknownExt,
            },
        }
    }

    fn may_be_request(&self) -> bool {
        false
    }

    fn may_be_one_way(&self) -> bool {
        matches!(self, Self::Status(_) | Self::StartProgress(_))
    }

    fn answers(&self, request: Kind) -> bool {
        match self.kind() {
            Kind::StartProgress | Kind::UnknownExt => false,
            Kind::Failed => {
                matches!(request, Kind::Check | Kind::Ping | Kind::Diagnostics | Kind::Workspaces | Kind::UnknownExt)
            }
            kind => kind == request,
        }
    }

    fn too_large(&self) -> Option<Self> {
        match self {
            Self::Start(_) => Some(Self::Start(too_large_start())),
            Self::Stop(_) => Some(Self::Stop(too_large_stop())),
            // Lifecycle and extension stay true; the peers do not fit.
            Self::Status(status) => Some(Self::Status(vpn::Status {
                lifecycle: status.lifecycle,
                error_message: TOO_LARGE.into(),
                peer_update: Some(vpn::PeerUpdate::default()),
                ext: status.ext.clone().map(|ext| ext::StatusExt { agents: Vec::new(), ..ext }),
            })),
            Self::Ext(_) => {
                Some(Self::Ext(ext::ServiceExt { reply: Some(ext::service_ext::Reply::Failed(too_large_failure())) }))
            }
            Self::StartProgress(_) => None,
        }
    }
}

fn too_large_failure() -> ext::Failure {
    ext::Failure::new(ext::FailureCode::Internal, TOO_LARGE, "")
}

fn too_large_start() -> vpn::StartResponse {
    vpn::StartResponse { success: false, error_message: TOO_LARGE.into(), ext: None }
}

fn too_large_stop() -> vpn::StopResponse {
    vpn::StopResponse { success: false, error_message: TOO_LARGE.into(), ext: None }
}

/// What arrived, sorted by the receiving rules of section 4.
#[derive(Debug, PartialEq)]
pub enum Inbound<B> {
    OneWay(B),
    Request(RequestId, B),
    /// Nothing in it means "not supported".
    Reply(RequestId, Option<B>),
    /// To be logged and dropped, without a reply.
    Ignored(Ignored),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Ignored {
    #[error("request {0} of a kind we do not know")]
    UnknownRequest(RequestId),
    #[error("one-way message of a kind we do not know")]
    UnknownOneWay,
    #[error("request {0} of kind {1:?}, which is not a request")]
    NotARequest(RequestId, Kind),
    #[error("one-way message of kind {0:?}, which must not be one")]
    NotOneWay(Kind),
}

/// Sorts a message that was received.
pub fn sort<M: Message>(message: M) -> Inbound<M::Body> {
    let (rpc, body) = message.into_parts();
    let rpc = rpc.unwrap_or_default();
    // With both ids set a message counts as a reply, with both 0 as one-way.
    if let Some(id) = RequestId::new(rpc.response_to) {
        return Inbound::Reply(id, body);
    }
    match (RequestId::new(rpc.msg_id), body) {
        (Some(id), None) => Inbound::Ignored(Ignored::UnknownRequest(id)),
        (Some(id), Some(body)) if body.may_be_request() => Inbound::Request(id, body),
        (Some(id), Some(body)) => Inbound::Ignored(Ignored::NotARequest(id, body.kind())),
        (None, None) => Inbound::Ignored(Ignored::UnknownOneWay),
        (None, Some(body)) if body.may_be_one_way() => Inbound::OneWay(body),
        (None, Some(body)) => Inbound::Ignored(Ignored::NotOneWay(body.kind())),
    }
}

pub fn one_way<M: Message>(body: M::Body) -> M {
    M::new(None, body)
}

pub fn request<M: Message>(id: RequestId, body: M::Body) -> M {
    M::new(Some(vpn::Rpc { msg_id: id.to_u64(), response_to: 0 }), body)
}

pub fn reply<M: Message>(id: RequestId, body: M::Body) -> M {
    M::new(Some(vpn::Rpc { msg_id: 0, response_to: id.to_u64() }), body)
}
