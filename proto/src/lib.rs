//! What the two protobuf protocols of the product look like.
//!
//! * [`vpn`] and [`ext`]: CoderVPN, the local conversation between client and
//!   service or manager and tunnel, with this project's extension.
//! * [`tailnet`]: the messages exchanged with a Coder deployment.
//! * [`version`], [`handshake`], [`frame`], [`ids`] and [`rpc`] decide the bytes
//!   and rules of CoderVPN without any IO.
//! * `speaker` (feature `io`) speaks them over a reader and a writer.
//!
//! Everything read from a peer is untrusted: no input panics, and no length a
//! peer states makes us reserve memory before the bytes are there.

#![forbid(unsafe_code)]

pub mod frame;
pub mod handshake;
pub mod ids;
mod labels;
mod redact;
pub mod rpc;
#[cfg(feature = "io")]
pub mod speaker;
pub mod version;

pub use schema::codervpn_ext as ext;
pub use schema::tailnet;
pub use schema::vpn;

/// What prost generates. The two CoderVPN packages refer to each other as
/// siblings, hence this common parent.
mod schema {
    #![allow(clippy::all, clippy::pedantic, unreachable_pub)]

    /// Messages of `vpn.proto`.
    pub mod vpn {
        include!(concat!(env!("OUT_DIR"), "/vpn.rs"));
    }

    /// Messages of `codervpn_ext.proto`.
    pub mod codervpn_ext {
        include!(concat!(env!("OUT_DIR"), "/codervpn_ext.rs"));
    }

    /// Messages of `tailnet.proto`, and the names of its calls.
    pub mod tailnet {
        include!(concat!(env!("OUT_DIR"), "/coder.tailnet.v2.rs"));

        /// The calls as dRPC names them, to be matched exactly.
        pub mod calls {
            pub const POST_TELEMETRY: &str = "/coder.tailnet.v2.Tailnet/PostTelemetry";
            pub const STREAM_DERP_MAPS: &str = "/coder.tailnet.v2.Tailnet/StreamDERPMaps";
            pub const REFRESH_RESUME_TOKEN: &str = "/coder.tailnet.v2.Tailnet/RefreshResumeToken";
            pub const COORDINATE: &str = "/coder.tailnet.v2.Tailnet/Coordinate";
            pub const WORKSPACE_UPDATES: &str = "/coder.tailnet.v2.Tailnet/WorkspaceUpdates";
        }
    }
}

/// The version of the tailnet protocol we speak: `major.minor` of the request
/// parameter `version`. It is the first with workspace updates.
pub const TAILNET_VERSION: &str = "2.3";
