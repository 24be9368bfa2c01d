//! Asks the machine's own name servers on behalf of programs, in direct mode (dns-and-os 1.9). What to ask, whom and
//! when again is decided in `codervpn-dns`; here is one socket per question.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use codervpn_dns::{ForwardReply, ForwardRequest, Transport};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout_at;

use crate::tunnel::TunnelHandle;

/// The longest message DNS knows.
const MESSAGE: usize = 65_535;
/// Questions under way, each with a socket of its own. The responder lets up to nine attempts live for each of many
/// lookups; together they must not use up the descriptors that relays and clients need.
const SOCKETS: usize = 256;

/// Asks name servers. Dropping it ends all questions.
#[derive(Default)]
pub(crate) struct Forwarder {
    asking: JoinSet<()>,
}

impl Forwarder {
    /// One attempt. When too many are under way it fails at once, so that the next server or a failure follows.
    pub(crate) fn ask(&mut self, request: ForwardRequest, tunnel: &TunnelHandle) {
        while self.asking.try_join_next().is_some() {}
        let tunnel = tunnel.clone();
        if self.asking.len() < SOCKETS {
            self.asking.spawn(ask(request, tunnel));
        } else if self.asking.len() < 2 * SOCKETS {
            tracing::debug!(server = %request.server, "too many lookups are under way");
            self.asking.spawn(async move {
                let _ = tunnel.forward_failure(request.id).await;
            });
        }
        // Beyond, the responder's own timer notices.
    }
}

async fn ask(request: ForwardRequest, tunnel: TunnelHandle) {
    let id = request.id;
    let deadline = request.deadline.into();
    let asked = match request.transport {
        Transport::Udp => timeout_at(deadline, over_udp(&request, &tunnel)).await,
        Transport::Tcp => timeout_at(deadline, over_tcp(&request, &tunnel)).await,
    };
    // Silence until the deadline is noticed by the responder's own timer.
    if let Ok(Err(error)) = asked {
        tracing::debug!(server = %request.server, %error, "name server failed");
        let _ = tunnel.forward_failure(id).await;
    }
}

async fn over_udp(request: &ForwardRequest, tunnel: &TunnelHandle) -> std::io::Result<()> {
    let any: SocketAddr = match request.server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    // A fresh port for every question, so that an answer has to be guessed in full.
    let socket = UdpSocket::bind(any).await?;
    socket.connect(request.server).await?;
    socket.send(&request.message).await?;
    loop {
        // Room only once there is an answer: most of many questions wait.
        socket.readable().await?;
        let mut message = vec![0; MESSAGE];
        match socket.try_recv(&mut message) {
            Ok(length) => message.truncate(length),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        message.shrink_to_fit();
        match tunnel.forward_answer(request.id, message).await {
            Ok(ForwardReply::Ignored) => {}
            Ok(ForwardReply::Taken | ForwardReply::Closed) | Err(_) => return Ok(()),
        }
    }
}

async fn over_tcp(request: &ForwardRequest, tunnel: &TunnelHandle) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(request.server).await?;
    let length = u16::try_from(request.message.len()).map_err(std::io::Error::other)?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend_from_slice(&request.message);
    stream.write_all(&framed).await?;
    loop {
        let length = stream.read_u16().await?;
        let mut message = vec![0; length.into()];
        stream.read_exact(&mut message).await?;
        match tunnel.forward_answer(request.id, message).await {
            Ok(ForwardReply::Ignored) => {}
            Ok(ForwardReply::Taken | ForwardReply::Closed) | Err(_) => return Ok(()),
        }
    }
}
