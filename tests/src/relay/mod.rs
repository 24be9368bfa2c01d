//! A DERP relay as coderd embeds one: keys that connect, packets that pass between them (data-plane 2.8).
//!
//! [`RelayServer`] is the relay itself; a [`Deployment`](crate::coderd::Deployment) has one inside, [`Relay`] puts one
//! behind an address of its own. [`registry`] decides who receives what, [`queue`] what waits for whom, [`connection`]
//! moves the bytes of one client. [`StunServer`] is the responder that stands beside relays.

mod connection;
mod queue;
mod registry;
mod stun;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use codervpn_underlay::{Keepalive, WebSocket};
use codervpn_wire::derp_map::DerpMap;
use codervpn_wire::keys::{NodePrivate, NodePublic};
use http::Request;
use hyper::body::Incoming;
use rand_core::OsRng;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use url::Url;

use crate::coderd::derp_map;
use crate::coderd::listener::{Dropped, Front, Running, Wire, after_upgrade};
use crate::coderd::routes::{accept_websocket, switching};
use crate::coderd::tls::{self, Authority};
use crate::coderd::{Answer, Problem};

pub use registry::RelayCounters;
pub use stun::StunServer;

use registry::Registry;

/// Handshakes that may be under way from one address (T-17).
const PENDING_PER_ADDRESS: u32 = 64;

/// A relay without an address. Clones share it.
#[derive(Clone, Debug)]
pub struct RelayServer {
    inner: Arc<Inner>,
}

struct Inner {
    key: NodePrivate,
    registry: Arc<Registry>,
    pending: Mutex<HashMap<IpAddr, u32>>,
    refusing: AtomicBool,
    /// Cancelled to end all connections; then replaced.
    drop_all: Mutex<CancellationToken>,
    changed: watch::Sender<u64>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").finish_non_exhaustive()
    }
}

impl Default for RelayServer {
    fn default() -> Self {
        Self::new()
    }
}

impl RelayServer {
    /// With a new key.
    pub fn new() -> Self {
        Self {
            inner: Arc::new(Inner {
                key: NodePrivate::generate(&mut OsRng),
                registry: Arc::default(),
                pending: Mutex::default(),
                refusing: AtomicBool::new(false),
                drop_all: Mutex::default(),
                changed: watch::Sender::new(0),
            }),
        }
    }

    pub fn key(&self) -> NodePublic {
        self.inner.key.public()
    }

    /// Cuts every connection; clients may come back.
    pub fn drop_connections(&self) {
        let token = std::mem::take(&mut *self.inner.drop_all.lock().unwrap_or_else(PoisonError::into_inner));
        token.cancel();
    }

    /// New connections are answered with 503 from now on, or no longer.
    pub fn refuse(&self, refuse: bool) {
        self.inner.refusing.store(refuse, Ordering::Relaxed);
    }

    /// Keys with a connection.
    pub fn clients(&self) -> Vec<NodePublic> {
        self.inner.registry.clients()
    }

    pub fn counters(&self) -> RelayCounters {
        self.inner.registry.counters()
    }

    /// Changes when clients come and go.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changed.subscribe()
    }

    /// Waits until that key is connected.
    pub async fn connected(&self, key: NodePublic) {
        let mut changes = self.changes();
        while !self.clients().contains(&key) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// The answer to a request of `/derp`; serves the connection after an upgrade.
    pub(crate) fn answer(
        &self,
        request: &mut Request<Incoming>,
        remote: SocketAddr,
        stop: CancellationToken,
    ) -> Result<Answer, Problem> {
        if self.inner.refusing.load(Ordering::Relaxed) {
            return Err(Problem::new(503, "relay is shutting down"));
        }
        let headers = request.headers();
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let upgrade = header("upgrade").to_ascii_lowercase();
        let offers_derp = header("sec-websocket-protocol").split(',').any(|offer| offer.trim() == "derp");
        let relay = self.clone();
        match upgrade.as_str() {
            "websocket" if offers_derp => {
                // Origin is not checked here.
                let accept = match accept_websocket(request, false) {
                    Ok(accept) => accept,
                    Err(answer) => return Ok(*answer),
                };
                after_upgrade(request, stop, move |stream| async move {
                    let keepalive = Keepalive { silence: None, ..Keepalive::default() };
                    let socket = WebSocket::accepted(stream, bytes::Bytes::new(), keepalive).await;
                    relay.serve(socket, remote).await;
                });
                Ok(switching("websocket", &[("sec-websocket-accept", &accept), ("sec-websocket-protocol", "derp")]))
            }
            // A WebSocket without the subprotocol is taken for the plain upgrade, too.
            "derp" | "websocket" => {
                after_upgrade(request, stop, move |stream| async move { relay.serve(stream, remote).await });
                let key = self.key().to_hex();
                Ok(switching("DERP", &[("derp-version", "2"), ("derp-public-key", &key)]))
            }
            _ => Err(Problem::new(426, "DERP requires connection upgrade")),
        }
    }

    /// Serves one client on a stream that carries DERP, until it ends.
    pub(crate) async fn serve(&self, stream: impl Wire, remote: SocketAddr) {
        let stop = self.inner.drop_all.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(pending) = Pending::enter(&self.inner, remote.ip()) else {
            return tracing::debug!(%remote, "too many relay handshakes from this address");
        };
        let serve = async {
            let client = match connection::greet(stream, &self.inner.key).await {
                Ok(client) => client,
                Err(error) => return tracing::debug!(%remote, %error, "relay handshake failed"),
            };
            drop(pending);
            let changed = self.inner.changed.clone();
            connection::serve(client, &self.inner.registry, || changed.send_modify(|count| *count += 1)).await;
        };
        tokio::select! {
            () = serve => {}
            () = stop.cancelled() => {}
        }
        self.inner.changed.send_modify(|count| *count += 1);
    }
}

/// A handshake under way.
struct Pending {
    inner: Arc<Inner>,
    address: IpAddr,
}

impl Pending {
    fn enter(inner: &Arc<Inner>, address: IpAddr) -> Option<Self> {
        let mut pending = inner.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let count = pending.entry(address).or_default();
        if *count >= PENDING_PER_ADDRESS {
            return None;
        }
        *count += 1;
        Some(Self { inner: Arc::clone(inner), address })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut pending = self.inner.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = pending.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                pending.remove(&self.address);
            }
        }
    }
}

/// How a relay of its own is set up.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    pub listen: SocketAddr,
    pub tls: bool,
    /// Name in URL and certificate instead of the address.
    pub host: Option<String>,
    /// Its region in maps.
    pub region: i64,
}

impl Default for RelayOptions {
    fn default() -> Self {
        Self { listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), tls: false, host: None, region: 1 }
    }
}

/// A relay at an address of its own. Dropping it cuts every connection.
#[derive(Debug)]
pub struct Relay {
    server: RelayServer,
    front: Arc<RelayFront>,
    authority: Option<Authority>,
    tls: Option<Arc<ServerConfig>>,
    url: Url,
    region: i64,
    address: SocketAddr,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct RelayFront {
    server: RelayServer,
    stop: Mutex<CancellationToken>,
}

impl Relay {
    pub async fn start(options: RelayOptions) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(options.listen).await.context("cannot listen")?;
        let address = listener.local_addr().context("a listener has an address")?;
        let authority = options.tls.then(|| Authority::new("testbed relay authority")).transpose()?;
        let further: Vec<String> = options.host.iter().cloned().collect();
        let names = tls::names_of(address.ip(), &further);
        let tls = authority.as_ref().map(|authority| authority.server(&names)).transpose()?;
        let host = match (options.host, address.ip()) {
            (Some(host), _) => host,
            (None, IpAddr::V6(address)) => format!("[{address}]"),
            (None, IpAddr::V4(address)) => address.to_string(),
        };
        let scheme = if options.tls { "https" } else { "http" };
        let url = Url::parse(&format!("{scheme}://{host}:{}", address.port())).context("the host is no host")?;
        let server = RelayServer::new();
        let front = Arc::new(RelayFront { server: server.clone(), stop: Mutex::default() });
        let running = Mutex::default();
        let relay = Self { server, front, authority, tls, url, region: options.region, address, running };
        relay.run(listener);
        Ok(relay)
    }

    pub fn server(&self) -> &RelayServer {
        &self.server
    }

    pub fn url(&self) -> &Url {
        &self.url
    }

    pub fn ca_file(&self) -> Option<&Path> {
        self.authority.as_ref().map(Authority::file)
    }

    /// A map with this relay alone.
    pub fn derp_map(&self) -> DerpMap {
        derp_map::single(&self.url, self.region, false)
    }

    /// Cuts every connection and frees the address.
    pub async fn stop(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(running) = running {
            running.stop().await;
        }
        self.server.drop_connections();
    }

    /// Comes back after [`Relay::stop`], with the same key.
    pub async fn resume(&self) -> anyhow::Result<()> {
        self.run(TcpListener::bind(self.address).await.context("cannot listen again")?);
        Ok(())
    }

    fn run(&self, listener: TcpListener) {
        let running = Running::start(listener, self.tls.clone(), Arc::clone(&self.front));
        *self.front.stop.lock().unwrap_or_else(PoisonError::into_inner) = running.stop.clone();
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
    }
}

impl Front for RelayFront {
    async fn answer(self: Arc<Self>, mut request: Request<Incoming>, remote: SocketAddr) -> Result<Answer, Dropped> {
        let stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let answer = match request.uri().path() {
            "/derp" | "/derp/" => self.server.answer(&mut request, remote, stop),
            "/derp/latency-check" => Ok(crate::coderd::empty_page()),
            _ => Err(Problem::new(404, "not found")),
        };
        Ok(answer.unwrap_or_else(|problem| problem.answer()))
    }

    async fn fast_start(self: Arc<Self>, stream: Box<dyn Wire>, remote: SocketAddr) {
        self.server.serve(stream, remote).await;
    }
}
