//! WS-1 to WS-14 as far as they concern the client.

use std::time::Duration;

use bytes::Bytes;
use codervpn_underlay::{Closed, Dialer, DialerConfig, HttpError, Keepalive, WebSocket};
use futures_util::{SinkExt, StreamExt};
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use url::Url;

use crate::support::{Server, canned, serve, soon};

/// A server that does `talk` on each accepted WebSocket.
async fn server<F, Fut>(talk: F) -> Server
where
    F: Fn(WebSocketStream<TcpStream>) -> Fut + Send + Clone + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    serve(move |stream| {
        let talk = talk.clone();
        async move {
            if let Ok(socket) = tokio_tungstenite::accept_async(stream).await {
                talk(socket).await;
            }
        }
    })
    .await
}

async fn dial(server: &Server) -> Result<WebSocket, HttpError> {
    let url = Url::parse(&format!("http://{}/api/v2/tailnet?version=2.3", server.address)).unwrap();
    let dialer = Dialer::new(DialerConfig::default()).unwrap();
    soon(dialer.websocket(&url, HeaderMap::new())).await
}

#[tokio::test]
async fn ws_5_messages_are_one_byte_stream() {
    let server = server(|mut socket| async move {
        for piece in [&b"ab"[..], b"", b"cdef"] {
            socket.send(Message::Binary(Bytes::copy_from_slice(piece))).await.unwrap();
        }
        // One write is one message (WS-4).
        let echo = socket.next().await.unwrap().unwrap();
        assert_eq!(echo, Message::Binary(Bytes::from_static(b"one write")));
        socket.send(echo).await.unwrap();
        socket.close(None).await.unwrap();
        while socket.next().await.is_some() {}
    })
    .await;
    let mut socket = dial(&server).await.unwrap();
    let mut bytes = [0; 6];
    soon(socket.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes, b"abcdef");
    socket.write_all(b"one write").await.unwrap();
    socket.flush().await.unwrap();
    let mut rest = Vec::new();
    soon(socket.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, b"one write");
}

#[tokio::test]
async fn ws_4_a_text_message_is_answered_1003_and_ends_the_stream() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let server = server(move |mut socket| {
        let sender = sender.clone();
        async move {
            socket.send(Message::text("hello")).await.unwrap();
            while let Some(Ok(message)) = socket.next().await {
                if let Message::Close(Some(frame)) = message {
                    sender.send((u16::from(frame.code), frame.reason.to_string())).unwrap();
                }
            }
        }
    })
    .await;
    let mut socket = dial(&server).await.unwrap();
    let watch = socket.close_watch();
    let error = soon(socket.read_u8()).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert!(matches!(watch.closed(), Some(Closed::Failed(_))));
    let (code, reason) =
        soon(async { tokio::task::spawn_blocking(move || receiver.recv()).await.unwrap().unwrap() }).await;
    assert_eq!(code, 1003);
    assert!(reason.contains("MessageText"), "{reason}");
}

#[tokio::test]
async fn ws_13_a_close_with_reason_is_surfaced() {
    let server = server(|mut socket| async move {
        let frame = CloseFrame { code: 1011.into(), reason: "coordinator gone".into() };
        socket.close(Some(frame)).await.unwrap();
        while socket.next().await.is_some() {}
    })
    .await;
    let mut socket = dial(&server).await.unwrap();
    let watch = socket.close_watch();
    let error = soon(socket.read_u8()).await.unwrap_err();
    assert_eq!(error.to_string(), "websocket closed: 1011 coordinator gone");
    assert_eq!(watch.closed(), Some(Closed::ByPeer { code: 1011, reason: "coordinator gone".into() }));
}

#[tokio::test]
async fn a_normal_close_and_a_cut_are_the_end_of_the_stream() {
    let server = server(|mut socket| async move {
        socket.close(Some(CloseFrame { code: 1000.into(), reason: "".into() })).await.unwrap();
        while socket.next().await.is_some() {}
    })
    .await;
    let mut socket = dial(&server).await.unwrap();
    let watch = socket.close_watch();
    assert_eq!(soon(socket.read(&mut [0; 8])).await.unwrap(), 0);
    assert_eq!(watch.closed(), Some(Closed::ByPeer { code: 1000, reason: String::new() }));

    let server = self::server(|socket| async move { drop(socket) }).await;
    let mut socket = dial(&server).await.unwrap();
    let watch = socket.close_watch();
    assert_eq!(soon(socket.read(&mut [0; 8])).await.unwrap(), 0);
    assert_eq!(watch.closed(), Some(Closed::Cut));
}

#[tokio::test]
async fn our_close_is_1000_and_waits_for_the_echo() {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    let server = server(move |mut socket| {
        let sender = sender.clone();
        async move {
            while let Some(Ok(message)) = socket.next().await {
                sender.send(message).unwrap();
            }
        }
    })
    .await;
    let mut receiver = receiver;
    let mut socket = dial(&server).await.unwrap();
    socket.write_all(b"last").await.unwrap();
    soon(socket.shutdown()).await.unwrap();
    assert_eq!(soon(receiver.recv()).await, Some(Message::Binary(Bytes::from_static(b"last"))));
    let Some(Message::Close(Some(frame))) = soon(receiver.recv()).await else { panic!("no close frame") };
    assert_eq!((u16::from(frame.code), frame.reason.as_str()), (1000, ""));
    assert_eq!(socket.close_watch().closed(), Some(Closed::ByUs));
}

/// WS-9: a reader that waits for data answers pings meanwhile.
#[tokio::test]
async fn ws_9_pings_are_answered_with_their_payload() {
    let server = server(|mut socket| async move {
        socket.send(Message::Ping(Bytes::from_static(b"1"))).await.unwrap();
        let pong = socket.next().await.unwrap().unwrap();
        assert_eq!(pong, Message::Pong(Bytes::from_static(b"1")));
        socket.send(Message::Binary(Bytes::from_static(b"x"))).await.unwrap();
        let _ = socket.next().await;
    })
    .await;
    let mut socket = dial(&server).await.unwrap();
    assert_eq!(soon(socket.read_u8()).await.unwrap(), b'x');
}

/// Both ends over a pipe, with hand-made time.
async fn pair(keepalive: Keepalive) -> (WebSocket<DuplexStream>, DuplexStream) {
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    (WebSocket::accepted(ours, Bytes::new(), keepalive).await, theirs)
}

#[tokio::test(start_paused = true)]
async fn ws_11_silence_of_45_seconds_is_a_lost_connection() {
    let (mut socket, _peer) = pair(Keepalive::default()).await;
    let watch = socket.close_watch();
    let start = tokio::time::Instant::now();
    let error = socket.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    assert!(matches!(watch.closed(), Some(Closed::Lost(_))));
    assert_eq!(start.elapsed().as_secs(), 45);
}

/// WS-11: every byte counts, also a server ping.
#[tokio::test(start_paused = true)]
async fn ws_11_any_byte_restarts_the_watchdog() {
    let (mut socket, mut peer) = pair(Keepalive::default()).await;
    let start = tokio::time::Instant::now();
    let speaker = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(40)).await;
        // A masked, empty ping.
        peer.write_all(&[0x89, 0x80, 1, 2, 3, 4]).await.unwrap();
        let mut pong = [0; 2];
        peer.read_exact(&mut pong).await.unwrap();
        assert_eq!(pong, [0x8a, 0]);
        peer
    });
    socket.read_u8().await.unwrap_err();
    assert_eq!(start.elapsed().as_secs(), 85);
    drop(speaker.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn ws_12_a_write_that_hangs_ten_seconds_ends_it() {
    let (mut socket, _peer) = pair(Keepalive::default()).await;
    let start = tokio::time::Instant::now();
    let error = loop {
        if let Err(error) = socket.write_all(&[0; 100_000]).await {
            break error;
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    assert_eq!(start.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn ws_9_the_server_side_sends_counted_pings() {
    let (mut socket, mut peer) = pair(Keepalive { ping: Some(Duration::from_secs(15)), ..Keepalive::default() }).await;
    let reader = tokio::spawn(async move {
        let mut pings = [0; 6];
        peer.read_exact(&mut pings).await.unwrap();
        assert_eq!(pings, [0x89, 1, b'1', 0x89, 1, b'2']);
        peer
    });
    let mut byte = [0];
    tokio::select! {
        _ = socket.read(&mut byte) => panic!("nothing was sent"),
        peer = reader => drop(peer.unwrap()),
    }
}

#[tokio::test]
async fn http_24_a_refused_upgrade_carries_status_and_body() {
    let body = "{\"message\":\"Unknown or unsupported API version\"}";
    let server = canned(
        format!(
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes(),
    )
    .await;
    let Err(HttpError::Status(response)) = dial(&server).await else { panic!("not refused") };
    assert_eq!(response.status, 400);
    assert!(response.is_json());
    assert_eq!(&response.body[..], body.as_bytes());
}

#[tokio::test]
async fn ws_2_a_wrong_accept_key_and_an_ordinary_page_are_refused() {
    let server = canned(
        b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AAAA\r\n\r\n".to_vec(),
    )
    .await;
    assert!(matches!(dial(&server).await, Err(HttpError::Protocol { .. })));
    let server = canned(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>".to_vec()).await;
    assert!(matches!(dial(&server).await, Err(HttpError::Status(_))));
    let server =
        canned(b"HTTP/1.1 307 x\r\nLocation: https://real.example\r\nContent-Length: 0\r\n\r\n".to_vec()).await;
    assert!(matches!(dial(&server).await, Err(HttpError::Redirect { .. })));
}
