//! The one dialer. Decides how a host name becomes a connected stream.
//!
//! Addresses come from [`crate::resolve`], are ordered with the families
//! alternating (RFC 8305) and tried with a short head start for the earlier
//! ones; the first TCP connection wins and gets TLS if the target asks for it.
//! Every phase has a limit, so a dial always ends (HTTP-20). Addresses inside
//! our own tunnel are refused (T-44): dialling them would loop.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderMap;
use codervpn_wire::node::is_coder_address;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use url::{Host, Url};

use crate::config::{ConfigError, DialerConfig};
use crate::proxy::Route;
use crate::resolve::Resolve;
use crate::stream::Connection;
use crate::tls::{TlsClient, TlsError, TlsParameters};

/// Time for name resolution and all connection attempts together (HTTP-20).
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Time for the TLS handshake (HTTP-20).
const TLS_LIMIT: Duration = Duration::from_secs(10);
/// RFC 8305 "Connection Attempt Delay".
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// TCP keepalive of every connection (HTTP-20).
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Unsent bytes the kernel may hold before it reports the socket as full; more
/// would only be delay (fast path, relay-shaped part).
const NOTSENT_LOWAT: u32 = 256 * 1024;
/// More addresses than this are not tried; a hostile zone cannot make us scan.
const MAX_ADDRESSES: usize = 16;

/// Where a dial stood when its time was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Resolve,
    Connect,
    Tls,
    /// The request was sent, the head of the answer did not come.
    Response,
    /// The body did not come.
    Body,
    /// The relay did not greet.
    Greeting,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Resolve => "resolving the name",
            Phase::Connect => "connecting",
            Phase::Tls => "the TLS handshake",
            Phase::Response => "waiting for the answer",
            Phase::Body => "reading the answer",
            Phase::Greeting => "waiting for the relay's greeting",
        })
    }
}

/// Why no stream came about.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("cannot resolve {host}: {reason}")]
    Resolve { host: String, reason: String },
    #[error("{host} has no usable address")]
    NoAddress { host: String },
    #[error("{target} refused the connection: nothing listens there")]
    Refused { target: String },
    #[error("{target}: timed out after {} s while {phase}", .after.as_secs_f32())]
    Timeout { target: String, phase: Phase, after: Duration },
    #[error("cannot connect to {target}: {source}")]
    Connect {
        target: String,
        #[source]
        source: io::Error,
    },
    #[error("{address} lies inside the tunnel's own network and cannot be reached through it")]
    OwnNetwork { address: IpAddr },
    #[error("{target}: {source}")]
    Tls {
        target: String,
        #[source]
        source: TlsError,
    },
}

/// Which kinds of addresses a target may be dialled by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Families {
    pub v4: bool,
    pub v6: bool,
}

impl Families {
    pub const BOTH: Families = Families { v4: true, v6: true };

    fn contain(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(_) => self.v4,
            IpAddr::V6(_) => self.v6,
        }
    }
}

/// What to dial and how to prove that it is the right one.
#[derive(Debug, Clone)]
pub struct Target {
    /// Name or address without brackets.
    pub host: String,
    pub port: u16,
    /// `None` means clear text.
    pub tls: Option<TlsParameters>,
    /// Addresses to use instead of asking DNS.
    pub addresses: Option<Vec<IpAddr>>,
    /// Families that may be used.
    pub families: Families,
    /// Limit of a single address, within the limit of the whole.
    pub per_address: Duration,
}

impl Target {
    /// The host of an `http`, `https`, `ws` or `wss` URL.
    pub fn from_url(url: &Url) -> Option<Target> {
        let secure = matches!(url.scheme(), "https" | "wss");
        let host = match url.host()? {
            Host::Domain(name) => name.to_owned(),
            Host::Ipv4(address) => address.to_string(),
            Host::Ipv6(address) => address.to_string(),
        };
        let port = url.port().unwrap_or(if secure { 443 } else { 80 });
        let tls = secure.then(|| TlsParameters::for_host(&host));
        Some(Target { host, port, tls, addresses: None, families: Families::BOTH, per_address: CONNECT_LIMIT })
    }

    pub(crate) fn name(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Opens streams. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Dialer {
    shared: Arc<Shared>,
}

struct Shared {
    headers: HeaderMap,
    route: Route,
    resolve: Resolve,
    tls: TlsClient,
}

impl Dialer {
    /// Reads the extra CA file at once, so that a wrong one fails early. The
    /// system's roots are loaded at the first TLS connection.
    pub fn new(config: DialerConfig) -> Result<Dialer, ConfigError> {
        let mut headers = HeaderMap::new();
        for (name, value) in config.headers {
            headers.append(name, value);
        }
        Ok(Dialer {
            shared: Arc::new(Shared {
                headers,
                route: Route::new(config.proxy.as_ref())?,
                resolve: Resolve::new(config.base_dns),
                tls: TlsClient::new(config.extra_ca.as_deref())?,
            }),
        })
    }

    /// Replaces the name servers; empty means the system's resolver again.
    pub fn set_base_dns(&self, servers: Vec<SocketAddr>) {
        self.shared.resolve.set_servers(servers);
    }

    /// Addresses of a host, which may be the text of one; for what is not dialled here.
    pub async fn resolve(&self, host: &str) -> Result<Vec<IpAddr>, String> {
        match host.parse() {
            Ok(address) => Ok(vec![address]),
            Err(_) => self.shared.resolve.lookup(host).await,
        }
    }

    /// The user's own headers.
    pub fn headers(&self) -> &HeaderMap {
        &self.shared.headers
    }

    /// Opens a stream to the target, with TLS if it asks for it.
    pub async fn connect(&self, target: &Target) -> Result<Connection, DialError> {
        match &self.shared.route {
            Route::Direct => {}
        }
        let tcp = self.connect_tcp(target).await?;
        let Some(parameters) = &target.tls else {
            return Ok(Connection::plain(tcp));
        };
        let handshake = self.shared.tls.handshake(tcp, parameters);
        match timeout(TLS_LIMIT, handshake).await {
            Ok(Ok(stream)) => Ok(Connection::tls(stream)),
            Ok(Err(source)) => Err(DialError::Tls { target: target.name(), source }),
            Err(_) => Err(DialError::Timeout { target: target.name(), phase: Phase::Tls, after: TLS_LIMIT }),
        }
    }

    async fn connect_tcp(&self, target: &Target) -> Result<TcpStream, DialError> {
        let deadline = Instant::now() + CONNECT_LIMIT;
        let addresses = match &target.addresses {
            Some(addresses) => addresses.clone(),
            None => match target.host.parse::<IpAddr>() {
                Ok(address) => vec![address],
                Err(_) => self.lookup(target, deadline).await?,
            },
        };
        let addresses = usable(addresses, target)?;
        match timeout_at(deadline, race(addresses, target)).await {
            Ok(result) => result,
            Err(_) => Err(DialError::Timeout { target: target.name(), phase: Phase::Connect, after: CONNECT_LIMIT }),
        }
    }

    async fn lookup(&self, target: &Target, deadline: Instant) -> Result<Vec<IpAddr>, DialError> {
        match timeout_at(deadline, self.shared.resolve.lookup(&target.host)).await {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(reason)) => Err(DialError::Resolve { host: target.host.clone(), reason }),
            Err(_) => Err(DialError::Timeout { target: target.name(), phase: Phase::Resolve, after: CONNECT_LIMIT }),
        }
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dialer")
    }
}

/// Drops addresses that must not be dialled and alternates the families,
/// beginning with the family of the first address.
fn usable(addresses: Vec<IpAddr>, target: &Target) -> Result<Vec<IpAddr>, DialError> {
    let mut refused = None;
    let mut first = VecDeque::new();
    let mut second = VecDeque::new();
    let mut leading_v6 = None;
    for address in addresses.into_iter().map(|a| a.to_canonical()) {
        if in_own_network(address) {
            refused = Some(address);
            continue;
        }
        if address.is_unspecified() || address.is_multicast() || !target.families.contain(address) {
            continue;
        }
        let queue =
            if *leading_v6.get_or_insert(address.is_ipv6()) == address.is_ipv6() { &mut first } else { &mut second };
        if !queue.contains(&address) {
            queue.push_back(address);
        }
    }
    let mut ordered = Vec::new();
    while ordered.len() < MAX_ADDRESSES {
        let before = ordered.len();
        ordered.extend(first.pop_front());
        ordered.extend(second.pop_front());
        if ordered.len() == before {
            break;
        }
    }
    match (ordered.is_empty(), refused) {
        (false, _) => Ok(ordered),
        (true, Some(address)) => Err(DialError::OwnNetwork { address }),
        (true, None) => Err(DialError::NoAddress { host: target.host.clone() }),
    }
}

/// Whether the address belongs to agents, other clients or our resolver.
fn in_own_network(address: IpAddr) -> bool {
    match address {
        IpAddr::V6(v6) => is_coder_address(v6),
        IpAddr::V4(_) => false,
    }
}

/// Starts one attempt after the other, each `ATTEMPT_DELAY` after the previous
/// or at once when the previous failed, and takes the first that connects.
async fn race(addresses: Vec<IpAddr>, target: &Target) -> Result<TcpStream, DialError> {
    let mut waiting: VecDeque<IpAddr> = addresses.into();
    let mut attempts = FuturesUnordered::new();
    let mut next_start = Instant::now();
    let mut first_error = None;
    loop {
        tokio::select! {
            () = sleep_until(next_start), if !waiting.is_empty() => {
                if let Some(address) = waiting.pop_front() {
                    attempts.push(attempt(SocketAddr::new(address, target.port), target));
                    next_start = Instant::now() + ATTEMPT_DELAY;
                }
            }
            Some(result) = attempts.next(), if !attempts.is_empty() => match result {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    first_error.get_or_insert(error);
                    next_start = Instant::now();
                }
            },
            else => break,
        }
    }
    Err(first_error.unwrap_or_else(|| DialError::NoAddress { host: target.host.clone() }))
}

async fn attempt(address: SocketAddr, target: &Target) -> Result<TcpStream, DialError> {
    let connect = async {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.connect(address).await
    };
    match timeout(target.per_address, connect).await {
        Ok(Ok(stream)) => {
            tune(&stream);
            Ok(stream)
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Err(DialError::Refused { target: target.name() })
        }
        Ok(Err(source)) => Err(DialError::Connect { target: target.name(), source }),
        Err(_) => Err(DialError::Timeout { target: target.name(), phase: Phase::Connect, after: target.per_address }),
    }
}

/// Options that help but are not needed: failures are ignored.
fn tune(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    let _ = socket.set_tcp_keepalive(&keepalive);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_notsent_lowat(NOTSENT_LOWAT);
    #[cfg(not(target_os = "linux"))]
    let _ = NOTSENT_LOWAT;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target::from_url(&Url::parse("http://relay.example:8080/x").unwrap()).unwrap()
    }

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn families_alternate_and_duplicates_vanish() {
        let list = addresses(&["::1:1", "::1:2", "::1:1", "10.0.0.1", "10.0.0.2", "10.0.0.3"]);
        let wanted = addresses(&["::1:1", "10.0.0.1", "::1:2", "10.0.0.2", "10.0.0.3"]);
        assert_eq!(usable(list, &target()).unwrap(), wanted);
    }

    #[test]
    fn t_44_addresses_of_the_tunnel_are_refused() {
        let list = addresses(&["fd60:627a:a42b:1::5"]);
        assert!(matches!(usable(list, &target()), Err(DialError::OwnNetwork { .. })));
        let list = addresses(&["fd60:627a:a42b:1::5", "fd7a::1"]);
        assert_eq!(usable(list, &target()).unwrap(), addresses(&["fd7a::1"]));
    }

    #[test]
    fn no_address_is_an_error_of_its_own() {
        assert!(matches!(usable(addresses(&["0.0.0.0", "ff02::1"]), &target()), Err(DialError::NoAddress { .. })));
    }

    #[tokio::test]
    async fn refused_is_told_apart() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let url = Url::parse(&format!("http://127.0.0.1:{port}/")).unwrap();
        let dialer = Dialer::new(DialerConfig::default()).unwrap();
        let result = dialer.connect(&Target::from_url(&url).unwrap()).await;
        assert!(matches!(result, Err(DialError::Refused { .. })));
    }

    /// RFC 8305: a dead first address does not cost the whole limit.
    #[tokio::test]
    async fn second_address_is_tried_when_the_first_refuses() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut target = target();
        target.port = listener.local_addr().unwrap().port();
        target.addresses = Some(addresses(&["127.0.0.2", "127.0.0.1"]));
        let dialer = Dialer::new(DialerConfig::default()).unwrap();
        let stream = dialer.connect(&target).await.unwrap();
        assert_eq!(stream.peer_address().map(|a| a.ip()), Some("127.0.0.1".parse().unwrap()));
    }

    #[tokio::test]
    async fn unknown_names_are_resolve_errors() {
        let mut target = target();
        target.host = "no-such-host.invalid".into();
        let dialer = Dialer::new(DialerConfig::default()).unwrap();
        let error = dialer.connect(&target).await.err().unwrap();
        assert!(matches!(error, DialError::Resolve { .. }), "{error}");
    }
}
