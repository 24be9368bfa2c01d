//! Servers for the tests: raw TCP with a handler per connection, TLS with a CA
//! made for the test, and a small relay on the server side of `wire`.

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use codervpn_wire::derp::greeting::{ServerInfo, open_client_info};
use codervpn_wire::derp::{self, Frame, FrameBuffer, Side};
use codervpn_wire::derp_map::{DerpMap, DerpMapFields, RegionFields, RegionId, RelayNodeFields};
use codervpn_wire::keys::{NodePrivate, NodePublic, random_nonce};
use rand_core::OsRng;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// Long enough for a loaded machine, short enough to fail.
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("this should have happened by now")
}

/// Runs `handler` for every connection; ends with the guard.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) async fn serve<F, Fut>(handler: F) -> Server
where
    F: Fn(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    serve_at("127.0.0.1:0".parse().unwrap(), handler).await
}

pub(crate) async fn serve_at<F, Fut>(address: SocketAddr, handler: F) -> Server
where
    F: Fn(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    let listener: TcpListener = socket.listen(64).unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        // Dropping the set ends every connection with the server.
        let mut connections = tokio::task::JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    if let Ok((stream, _)) = accepted {
                        connections.spawn(handler(stream));
                    }
                }
                Some(_) = connections.join_next() => {}
            }
        }
    });
    Server { address, task }
}

/// Reads the head of a request, up to and with the empty line.
pub(crate) async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).unwrap()
}

/// A server that answers every request with these bytes and closes.
pub(crate) async fn canned(answer: impl Into<Vec<u8>>) -> Server {
    let answer: Arc<Vec<u8>> = Arc::new(answer.into());
    serve(move |mut stream| {
        let answer = answer.clone();
        async move {
            read_head(&mut stream).await;
            let _ = stream.write_all(&answer).await;
            let _ = stream.shutdown().await;
        }
    })
    .await
}

/// A CA for one test.
pub(crate) struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

impl Ca {
    pub(crate) fn new(name: &str) -> Ca {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Ca { issuer: Issuer::new(params, key), pem }
    }

    /// The CA as a file for `network.extra_ca`.
    pub(crate) fn file(&self) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &self.pem).unwrap();
        file
    }

    /// A server certificate for `name`, valid in these years.
    pub(crate) fn acceptor(&self, name: &str, years: (i32, i32)) -> TlsAcceptor {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        acceptor(certificate.der().clone(), &key)
    }
}

/// A certificate that is its own CA, and its PEM form.
pub(crate) fn self_signed_ca(name: &str) -> (TlsAcceptor, String) {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    let key = KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap();
    (acceptor(certificate.der().clone(), &key), certificate.pem())
}

fn acceptor(certificate: CertificateDer<'static>, key: &KeyPair) -> TlsAcceptor {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

/// What the relay saw and how it misbehaves.
#[derive(Default)]
pub(crate) struct RelayLog {
    pub(crate) heads: Mutex<Vec<String>>,
    pub(crate) preferred: Mutex<Vec<bool>>,
}

type Clients = Arc<Mutex<HashMap<[u8; 32], mpsc::UnboundedSender<Vec<u8>>>>>;

/// A relay that forwards packets between its clients.
pub(crate) struct Relay {
    pub(crate) server: Server,
    pub(crate) log: Arc<RelayLog>,
    clients: Clients,
}

impl Relay {
    pub(crate) async fn start() -> Relay {
        Relay::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    pub(crate) async fn start_at(address: SocketAddr) -> Relay {
        let log = Arc::new(RelayLog::default());
        let clients = Clients::default();
        let (handler_log, handler_clients) = (log.clone(), clients.clone());
        let server = serve_at(address, move |stream| {
            let (log, clients) = (handler_log.clone(), handler_clients.clone());
            async move {
                let _ = relay_client(stream, &log, &clients).await;
            }
        })
        .await;
        Relay { server, log, clients }
    }

    /// Writes raw bytes to a connected client.
    pub(crate) fn write_raw(&self, to: &NodePublic, bytes: Vec<u8>) {
        let clients = self.clients.lock().unwrap();
        clients[to.as_bytes()].send(bytes).unwrap();
    }
}

async fn relay_client<S>(mut stream: S, log: &RelayLog, clients: &Clients) -> std::io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let head = read_head(&mut stream).await;
    let probe = head.starts_with("GET /derp/latency-check");
    log.heads.lock().unwrap().push(head);
    if probe {
        return stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    }
    let private = NodePrivate::generate(&mut OsRng);
    // Head and greeting in one segment: nothing behind the head may get lost.
    let mut out = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n\r\n".to_vec();
    derp::write_server_key(&mut out, &private.public());
    stream.write_all(&out).await?;

    let mut frames = FrameBuffer::new(Side::Server);
    let (me, shared) = loop {
        let read = stream.read(frames.space()).await?;
        if read == 0 {
            return Ok(());
        }
        frames.filled(read);
        if let Some(Frame::ClientInfo { key, sealed }) = frames.next_frame().unwrap() {
            let (_, shared) = open_client_info(&private, &key, sealed).unwrap();
            break (key, shared);
        }
    };
    let mut out = Vec::new();
    derp::greeting::write_server_info(&mut out, &shared, &random_nonce(&mut OsRng), &ServerInfo::default());
    stream.write_all(&out).await?;
    let (sender, mut receiver) = mpsc::unbounded_channel::<Vec<u8>>();
    clients.lock().unwrap().insert(*me.as_bytes(), sender);
    loop {
        loop {
            match frames.next_frame().unwrap() {
                None => break,
                Some(Frame::SendPacket { to, packet }) => {
                    let mut out = Vec::new();
                    derp::write_recv_packet(&mut out, &me, packet).unwrap();
                    if let Some(peer) = clients.lock().unwrap().get(to.as_bytes()) {
                        let _ = peer.send(out);
                    }
                }
                Some(Frame::NotePreferred(home)) => log.preferred.lock().unwrap().push(home),
                Some(Frame::Ping(data)) => {
                    let mut out = Vec::new();
                    derp::write_pong(&mut out, &data);
                    stream.write_all(&out).await?;
                }
                Some(_) => {}
            }
        }
        tokio::select! {
            read = stream.read(frames.space()) => match read? {
                0 => return Ok(()),
                read => frames.filled(read),
            },
            Some(bytes) = receiver.recv() => stream.write_all(&bytes).await?,
        }
    }
}

pub(crate) fn region(id: i64) -> RegionId {
    RegionId::new(id).unwrap()
}

/// A map of one region per address; only the first is the embedded one.
pub(crate) fn map_of(relays: &[(i64, SocketAddr)]) -> DerpMap {
    let regions = relays
        .iter()
        .map(|(id, address)| {
            let node = RelayNodeFields {
                name: format!("{id}a"),
                region_id: *id,
                host_name: address.ip().to_string(),
                derp_port: address.port().into(),
                stun_port: -1,
                force_http: true,
                ..RelayNodeFields::default()
            };
            let region = RegionFields {
                region_id: *id,
                region_code: format!("r{id}"),
                nodes: vec![node],
                ..RegionFields::default()
            };
            (*id, region)
        })
        .collect();
    let (map, warnings) = DerpMap::from_fields(&DerpMapFields { region_scores: Vec::new(), regions });
    assert!(warnings.is_empty(), "{warnings:?}");
    map
}
