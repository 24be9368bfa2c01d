//! Decides how a region of the DERP map becomes an open relay connection:
//! which node is dialled how, which headers it may see, and the greeting.
//!
//! Nodes are tried in order (data plane 2.6). The session token goes to the
//! deployment's own relay only, and never over clear HTTP unless the
//! deployment itself is clear HTTP (T-23); redirects are failures (T-22).

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use ::http::header::{self, HeaderName};
use ::http::{HeaderMap, HeaderValue};
use codervpn_wire::derp::greeting::{GreetingError, write_client_info};
use codervpn_wire::derp::{Frame, FrameError, Side, split_frame};
use codervpn_wire::derp_map::{Reach, Region, RegionClass, RelayNode};
use codervpn_wire::keys::{NodePrivate, SharedKey, random_nonce};
use rand_core::OsRng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use url::Url;

use crate::certificate::bounded_to;
use crate::dialer::{DialError, Dialer, Families, Phase, Target};
use crate::http::{HttpError, append_user_headers, shown, upgrade};
use crate::stream::Connection;
use crate::tls::TlsParameters;

/// DNS, TCP, TLS, HTTP and greeting of all nodes together (data plane 2.6).
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// TCP to one address of a node (data plane 2.6).
const PER_ADDRESS: Duration = Duration::from_millis(1500);
/// Bytes the kernel may hold unsent: two batches, so that one is there while
/// we are woken to bring the next. More would only be delay, in a queue that
/// nobody can look into (fast path, relay-shaped part).
const UNSENT: u32 = 128 * 1024;
/// Body kept of a refused upgrade (data plane 2.4, T-21).
const REASON_LIMIT: usize = 512;

/// Why a relay connection did not come about or ended.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("the region has no relay to connect to")]
    NoNode,
    /// DERP over WebSocket would be needed.
    #[error("the server or a proxy before it refuses the DERP upgrade: {reason}")]
    UpgradeRefused { reason: String },
    #[error("timed out after {} s while {phase}", .after.as_secs())]
    Timeout { phase: Phase, after: Duration },
    #[error("the server does not greet like a relay: {reason}")]
    Greeting { reason: String },
    #[error(transparent)]
    SealedGreeting(#[from] GreetingError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("the relay closed the connection")]
    Closed,
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
    #[error("the relay has been silent for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the relay stopped reading for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("the relay is restarting")]
    Restarting { reconnect_in: Duration, try_for: Duration },
    #[error("not used any more")]
    Idle,
    #[error("no longer wanted")]
    Stopped,
}

/// What relays may know about us, and how strictly they are checked.
#[derive(Clone, Default)]
pub struct RelayAccess {
    /// The deployment as the user wrote it; embedded relays are reached there.
    pub access_url: Option<Url>,
    /// Value of `Coder-Session-Token`, for the embedded relay only.
    pub session_token: Option<HeaderValue>,
    /// Honour `InsecureForTests` of a map (T-24).
    pub allow_insecure: bool,
}

impl RelayAccess {
    /// Headers a region's servers may see (data plane 2.7).
    pub(crate) fn headers(&self, region: &Region, node: &RelayNode, user: &HeaderMap) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let class = region.class();
        if class == RegionClass::Embedded {
            let clear = self.access_url.as_ref().is_some_and(|url| url.scheme() == "http");
            if let (Some(token), true) = (&self.session_token, clear || !node.force_http) {
                let mut token = token.clone();
                token.set_sensitive(true);
                headers.insert(HeaderName::from_static("coder-session-token"), token);
            }
        }
        if class != RegionClass::Foreign {
            append_user_headers(&mut headers, user);
        }
        headers
    }

    pub(crate) fn target(&self, node: &RelayNode) -> Option<Target> {
        let mut fixed: Vec<IpAddr> = Vec::new();
        if let Reach::At(address) = node.ipv6 {
            fixed.push(address.into());
        }
        if let Reach::At(address) = node.ipv4 {
            fixed.push(address.into());
        }
        let host = match (node.host.is_empty(), fixed.first()) {
            (true, Some(address)) => address.to_string(),
            _ => node.host.clone(),
        };
        let tls = (!node.force_http).then(|| TlsParameters {
            server_name: host.clone(),
            certificate_name: node.cert_name.clone(),
            insecure: self.allow_insecure && node.insecure_for_tests,
        });
        Some(Target {
            host,
            port: node.derp_port?,
            tls,
            addresses: (!fixed.is_empty()).then_some(fixed),
            families: Families { v4: node.ipv4 != Reach::Disabled, v6: node.ipv6 != Reach::Disabled },
            per_address: PER_ADDRESS,
        })
    }
}

/// `http(s)://host[:port]/path` of a node.
pub(crate) fn node_url(target: &Target, path: &str) -> Option<Url> {
    let scheme = if target.tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{}{path}", target.name());
    Url::parse(&url).ok()
}

/// A greeted connection, ready for frames in both directions.
pub(crate) struct Greeted {
    pub(crate) stream: Connection,
    /// Bytes behind the greeting.
    pub(crate) received: Vec<u8>,
    /// The box for the server's answer.
    pub(crate) shared: SharedKey,
}

/// Tries the region's nodes in order; the last error is returned.
pub(crate) async fn connect(
    dialer: &Dialer,
    access: &RelayAccess,
    region: &Region,
    key: &NodePrivate,
) -> Result<Greeted, RelayError> {
    let attempt = async {
        let mut last = RelayError::NoNode;
        for node in region.relays() {
            match connect_node(dialer, access, region, node, key).await {
                Ok(greeted) => return Ok(greeted),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    match timeout(CONNECT_LIMIT, attempt).await {
        Ok(result) => result,
        Err(_) => Err(RelayError::Timeout { phase: Phase::Greeting, after: CONNECT_LIMIT }),
    }
}

async fn connect_node(
    dialer: &Dialer,
    access: &RelayAccess,
    region: &Region,
    node: &RelayNode,
    key: &NodePrivate,
) -> Result<Greeted, RelayError> {
    let target = access.target(node).ok_or(RelayError::NoNode)?;
    let url = node_url(&target, "/derp").ok_or(RelayError::NoNode)?;
    let mut headers = access.headers(region, node, dialer.headers());
    headers.insert(header::UPGRADE, HeaderValue::from_static("DERP"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));

    let stream = dialer.connect(&target).await?;
    if stream.chose_http2() {
        return Err(RelayError::UpgradeRefused { reason: "TLS chose HTTP/2, an upgrade needs HTTP/1.1".into() });
    }
    let upgraded = match upgrade(stream, &url, headers, CONNECT_LIMIT).await {
        Ok(upgraded) => upgraded,
        Err(HttpError::Status(response)) if response.status.is_client_error() => {
            let body = String::from_utf8_lossy(&response.body);
            let body = bounded_to(body.trim(), REASON_LIMIT);
            return Err(RelayError::UpgradeRefused {
                reason: format!("{}: status {} {body}", shown(&url), response.status.as_u16()),
            });
        }
        Err(error) => return Err(error.into()),
    };
    greet(upgraded.stream, upgraded.leftover.to_vec(), key).await
}

/// Reads the server's key and proves ours. The server's answer comes later,
/// among the other frames.
async fn greet(mut stream: Connection, mut received: Vec<u8>, key: &NodePrivate) -> Result<Greeted, RelayError> {
    let (server, used) = loop {
        if let Some((frame, used)) = split_frame(Side::Client, &received)? {
            match frame {
                Frame::ServerKey(server) => break (server, used),
                _ => return Err(RelayError::Greeting { reason: "its first frame is not its key".into() }),
            }
        }
        // The only frame taken here is at most 1029 bytes long, and any other
        // is refused once it is whole.
        if received.len() > 64 * 1024 {
            return Err(RelayError::Greeting { reason: "its first frame is too long".into() });
        }
        if stream.read_buf(&mut received).await? == 0 {
            return Err(RelayError::Closed);
        }
    };
    received.drain(..used);
    let mut out = Vec::new();
    let nonce = random_nonce(&mut OsRng);
    let shared = write_client_info(&mut out, key, &server, &nonce).map_err(GreetingError::Key)?;
    stream.write_all(&out).await?;
    stream.flush().await?;
    stream.limit_unsent(UNSENT);
    Ok(Greeted { stream, received, shared })
}
