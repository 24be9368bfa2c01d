//! Asks the machine's own name servers on behalf of programs, in direct mode (dns-and-os 1.9). What to ask, whom and
//! when again is decided in `codervpn-dns`; here is one socket per question.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use codervpn_dns::{ForwardReply, ForwardRequest, Transport};
use codervpn_engine::RelayLatency;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout_at;

use crate::tunnel::TunnelHandle;

/// The longest message DNS knows.
const MESSAGE: usize = 65_535;

/// One attempt. Always `None`: it shares a queue of tasks with others that have a result.
pub(crate) async fn ask(request: ForwardRequest, tunnel: TunnelHandle) -> Option<Vec<RelayLatency>> {
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
    None
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
    let mut answer = vec![0; MESSAGE];
    loop {
        let length = socket.recv(&mut answer).await?;
        let message = answer.get(..length).unwrap_or_default().to_vec();
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
