//! A connected stream, clear or encrypted, as one type. Decides nothing but
//! the buffer between kernel and TLS.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, BufReader, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// rustls asks for 4 KiB at a time; the buffer turns that into one read from
/// the kernel for up to four full records.
const TLS_READ_BUFFER: usize = 64 * 1024;

pub(crate) type TlsOverTcp = TlsStream<BufReader<TcpStream>>;

pub(crate) fn buffered(tcp: TcpStream) -> BufReader<TcpStream> {
    BufReader::with_capacity(TLS_READ_BUFFER, tcp)
}

/// What [`crate::Dialer::connect`] returns.
#[derive(Debug)]
pub struct Connection {
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Plain(TcpStream),
    Tls(Box<TlsOverTcp>),
}

impl Connection {
    pub(crate) fn plain(tcp: TcpStream) -> Connection {
        Connection { inner: Inner::Plain(tcp) }
    }

    pub(crate) fn tls(stream: TlsOverTcp) -> Connection {
        Connection { inner: Inner::Tls(Box::new(stream)) }
    }

    fn tcp(&self) -> &TcpStream {
        match &self.inner {
            Inner::Plain(tcp) => tcp,
            Inner::Tls(tls) => tls.get_ref().0.get_ref(),
        }
    }

    pub fn is_tls(&self) -> bool {
        matches!(self.inner, Inner::Tls(_))
    }

    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.tcp().peer_addr().ok()
    }

    /// Has the kernel take no more once so much waits to be sent, so that the rest waits where it can be bounded by time
    /// or dropped. What is on its way unacknowledged does not count: the throughput does not suffer.
    pub(crate) fn limit_unsent(&self, bytes: u32) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        // Without it there is only more delay.
        let _ = socket2::SockRef::from(self.tcp()).set_tcp_notsent_lowat(bytes);
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = bytes;
    }

    /// Whether TLS chose HTTP/2, with which no upgrade is possible.
    pub(crate) fn chose_http2(&self) -> bool {
        match &self.inner {
            Inner::Plain(_) => false,
            Inner::Tls(tls) => tls.get_ref().1.alpn_protocol() == Some(b"h2"),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Inner::Tls(tls) => Pin::new(tls.as_mut()).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.inner {
            Inner::Plain(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Inner::Tls(tls) => Pin::new(tls.as_mut()).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.inner {
            Inner::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, bufs),
            Inner::Tls(tls) => Pin::new(tls.as_mut()).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.inner {
            Inner::Plain(tcp) => tcp.is_write_vectored(),
            Inner::Tls(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Inner::Tls(tls) => Pin::new(tls.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Inner::Tls(tls) => Pin::new(tls.as_mut()).poll_shutdown(cx),
        }
    }
}
