//! Everything that crosses the real network.
//!
//! One [`Dialer`] opens every stream of the daemon: it resolves names (never
//! through ourselves), races the addresses, speaks TLS and adds the headers a
//! deployment's front needs. On top of it stand HTTP requests and upgrades
//! ([`http`]), the WebSocket byte stream of the control plane ([`websocket`]),
//! the relay connections ([`relays`]) and the latency probes of relays
//! ([`probe`]). Beside it stand the UDP sockets of the data thread ([`udp`]).
//!
//! Nothing here knows what the bytes mean beyond that: no control messages, no
//! WireGuard, no operating-system settings.

#![forbid(unsafe_code)]

mod backoff;
pub mod batch;
mod certificate;
mod config;
pub mod dialer;
pub mod http;
mod inbox;
mod lock;
pub mod portmap;
pub mod probe;
mod proxy;
mod region;
mod relay;
mod relay_session;
pub mod relays;
mod resolve;
mod stream;
mod stun_servers;
pub mod tls;
pub mod udp;
pub mod websocket;

pub use batch::{Packet, RelayBatch, SendBatch};
pub use config::{ConfigError, DialerConfig};
pub use dialer::{DialError, Dialer, Families, Phase, Target};
pub use http::{HttpError, Request, Response};
pub use portmap::{MapTarget, MapperOptions, PortMapper};
pub use probe::{ProbeError, RegionLatency};
pub use relay::{RelayAccess, RelayError};
pub use relays::{Incoming, RelayEvent, RelayOptions, RelayPhase, RelayStatus, Relays, Sent};
pub use stream::Connection;
pub use stun_servers::stun_servers;
pub use tls::{Refusal, TlsError, TlsFault};
pub use udp::{Ports, ReceiveBuffer, SendError, SendGroup, UdpCounters, UdpSockets};
pub use websocket::{CloseWatch, Closed, Keepalive, WebSocket};
