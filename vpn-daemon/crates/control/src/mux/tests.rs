//! What is held here: the YX rules of `control-plane.md` 3 and the yamux vectors of 9.3 as input.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::frame::{ACK, FIN, HEADER_LEN, Header, Kind, RST, SYN};
use super::{Connection, MuxConfig, MuxError, Role, WINDOW};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// A session of ours against a peer played by hand.
struct Raw {
    session: Connection,
    driver: JoinHandle<MuxError>,
    peer: DuplexStream,
}

fn raw(role: Role) -> Raw {
    raw_with(role, MuxConfig::for_role(role))
}

fn raw_with(role: Role, config: MuxConfig) -> Raw {
    let (ours, peer) = duplex(1 << 20);
    let (session, driver) = Connection::new(role, config, ours);
    Raw { session, driver: tokio::spawn(driver), peer }
}

impl Raw {
    async fn send(&mut self, header: Header, body: &[u8]) {
        self.peer.write_all(&header.encode()).await.unwrap();
        self.peer.write_all(body).await.unwrap();
    }

    async fn frame(&mut self) -> (Header, Vec<u8>) {
        let mut bytes = [0; HEADER_LEN];
        self.peer.read_exact(&mut bytes).await.unwrap();
        let header = Header::decode(&bytes).unwrap();
        let mut body = Vec::new();
        if header.kind == Kind::Data {
            body.resize(header.length as usize, 0);
            self.peer.read_exact(&mut body).await.unwrap();
        }
        (header, body)
    }

    async fn header(&mut self) -> Header {
        self.frame().await.0
    }

    /// Every further byte up to the end of the transport.
    async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.peer.read_to_end(&mut rest).await.unwrap();
        rest
    }
}

fn window(flags: u16, stream: u32, delta: u32) -> Header {
    Header::new(Kind::WindowUpdate, flags, stream, delta)
}

fn data(flags: u16, stream: u32, length: usize) -> Header {
    Header::new(Kind::Data, flags, stream, length as u32)
}

#[test]
fn vectors_of_9_3_decode_and_encode() {
    let table = [
        ("000100010000000100000000", window(SYN, 1, 0)),
        ("000100010000000700000000", window(SYN, 7, 0)),
        ("000100020000000500000000", window(ACK, 5, 0)),
        ("000100040000000100000000", window(FIN, 1, 0)),
        ("000100080000000500000000", window(RST, 5, 0)),
        ("000100000000000500020000", window(0, 5, 131_072)),
        ("000200010000000000000000", Header::new(Kind::Ping, SYN, 0, 0)),
        ("000200020000000000000000", Header::new(Kind::Ping, ACK, 0, 0)),
        ("000300000000000000000000", Header::new(Kind::GoAway, 0, 0, 0)),
        ("000300000000000000000001", Header::new(Kind::GoAway, 0, 0, 1)),
        ("000000000000000500000044", data(0, 5, 0x44)),
    ];
    for (text, header) in table {
        let bytes: [u8; HEADER_LEN] = hex(text).try_into().unwrap();
        assert_eq!(Header::decode(&bytes).unwrap(), header, "{text}");
        assert_eq!(header.encode(), bytes, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn yx_1_opening_sends_syn_at_once_and_data_need_not_wait() {
    let mut raw = raw(Role::Client);
    let mut first = raw.session.open().unwrap();
    let _second = raw.session.open().unwrap();
    first.write_all(b"abc").await.unwrap();
    assert_eq!(raw.header().await, window(SYN, 1, 0));
    assert_eq!(raw.header().await, window(SYN, 3, 0));
    assert_eq!(raw.frame().await, (data(0, 1, 3), b"abc".to_vec()));
}

/// Also the duty that a Go agent enforces: the stream is acknowledged although nobody accepts it and nothing is said on it.
#[tokio::test(start_paused = true)]
async fn yx_2_a_stream_is_acknowledged_at_its_arrival() {
    let mut raw = raw(Role::Server);
    raw.send(window(SYN, 1, 0), b"").await;
    assert_eq!(raw.header().await, window(ACK, 1, 0));
    assert_eq!(raw.session.accept().await.unwrap().id(), 1);
}

#[tokio::test(start_paused = true)]
async fn yx_3_flags_count_on_data_frames_too() {
    let mut raw = raw(Role::Server);
    raw.send(data(SYN | FIN, 1, 5), b"hello").await;
    let mut stream = raw.session.accept().await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "hello");
    assert_eq!(raw.header().await, window(ACK, 1, 0));
    drop(stream);
    assert_eq!(raw.header().await, window(FIN, 1, 0));
    assert_eq!(raw.session.stream_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn yx_4_syn_of_a_used_id_ends_the_session() {
    let mut raw = raw(Role::Server);
    raw.send(window(SYN, 1, 0), b"").await;
    raw.send(window(SYN, 1, 0), b"").await;
    assert!(matches!(raw.session.ended().await, MuxError::Protocol(_)));
    assert!(matches!(raw.driver.await.unwrap(), MuxError::Protocol(_)));
}

#[tokio::test(start_paused = true)]
async fn yx_4_more_streams_than_the_backlog_are_reset() {
    let mut config = MuxConfig::for_role(Role::Server);
    config.accept_backlog = 1;
    let mut raw = raw_with(Role::Server, config);
    raw.send(window(SYN, 1, 0), b"").await;
    raw.send(data(SYN, 3, 4), b"lost").await;
    assert_eq!(raw.header().await, window(ACK, 1, 0));
    assert_eq!(raw.header().await, window(RST, 3, 0));
    // The body of the refused stream was skipped, the session goes on.
    raw.send(Header::new(Kind::Ping, SYN, 0, 9), b"").await;
    assert_eq!(raw.header().await, Header::new(Kind::Ping, ACK, 0, 9));
}

/// A server never opens streams; one that does wants our memory.
#[tokio::test(start_paused = true)]
async fn yx_4_the_client_role_refuses_streams() {
    let mut raw = raw(Role::Client);
    raw.send(window(SYN, 2, 0), b"").await;
    assert_eq!(raw.header().await, window(RST, 2, 0));
}

#[tokio::test(start_paused = true)]
async fn yx_7_a_sender_stays_within_the_window() {
    let mut raw = raw(Role::Client);
    let (_read, mut write) = raw.session.open().unwrap().into_split();
    let writer = tokio::spawn(async move {
        write.write_all(&vec![7; WINDOW as usize + 10]).await.unwrap();
        write
    });
    assert_eq!(raw.header().await, window(SYN, 1, 0));
    let mut got = 0;
    while got < WINDOW as usize {
        got += raw.frame().await.1.len();
    }
    assert_eq!(got, WINDOW as usize);
    let nothing = timeout(Duration::from_secs(5), raw.frame()).await;
    assert!(nothing.is_err(), "sent beyond the window: {nothing:?}");
    raw.send(window(0, 1, 4), b"").await;
    assert_eq!(raw.frame().await.1.len(), 4);
    raw.send(window(0, 1, 100), b"").await;
    assert_eq!(raw.frame().await.1.len(), 6);
    writer.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn yx_8_credit_comes_after_reading_in_half_windows() {
    let mut raw = raw(Role::Server);
    raw.send(window(SYN, 1, 0), b"").await;
    raw.send(data(0, 1, WINDOW as usize), &vec![1; WINDOW as usize]).await;
    assert_eq!(raw.header().await, window(ACK, 1, 0));
    let mut stream = raw.session.accept().await.unwrap();
    let mut half = vec![0; WINDOW as usize / 2 - 1];
    stream.read_exact(&mut half).await.unwrap();
    assert!(timeout(Duration::from_secs(5), raw.frame()).await.is_err(), "credit too early");
    stream.read_u8().await.unwrap();
    assert_eq!(raw.header().await, window(0, 1, WINDOW / 2));
}

/// YX-9, YX-21: the overrun ends the session, with a go-away as far as it can be written.
#[tokio::test(start_paused = true)]
async fn yx_9_window_overrun_ends_the_session() {
    let mut raw = raw(Role::Client);
    let mut stream = raw.session.open().unwrap();
    raw.header().await;
    raw.send(data(0, 1, WINDOW as usize + 1), b"").await;
    assert!(matches!(raw.session.ended().await, MuxError::Protocol(text) if text.contains("receive window exceeded")));
    assert_eq!(raw.rest().await, Header::new(Kind::GoAway, 0, 0, 1).encode());
    assert!(stream.read_u8().await.is_err());
    assert!(stream.write_all(b"x").await.is_err());
    assert!(raw.session.open().is_err());
}

/// YX-11: a stream that nobody reads blocks no other.
#[tokio::test(start_paused = true)]
async fn yx_11_streams_are_independent() {
    let mut raw = raw(Role::Server);
    for id in [1, 3] {
        raw.send(window(SYN, id, 0), b"").await;
        raw.header().await;
    }
    let _stalled = raw.session.accept().await.unwrap();
    let mut other = raw.session.accept().await.unwrap();
    raw.send(data(0, 1, WINDOW as usize), &vec![1; WINDOW as usize]).await;
    raw.send(data(0, 3, 2), b"ok").await;
    let mut text = [0; 2];
    other.read_exact(&mut text).await.unwrap();
    assert_eq!(&text, b"ok");
}

/// TR-35: whatever the order of finishing, shutting down and dropping, one FIN.
#[tokio::test(start_paused = true)]
async fn yx_12_one_fin_per_stream() {
    for way in 0..5 {
        let mut raw = raw(Role::Client);
        let stream = raw.session.open().unwrap();
        raw.send(window(ACK, 1, 0), b"").await;
        if way == 4 {
            raw.send(window(FIN, 1, 0), b"").await;
            tokio::task::yield_now().await;
        }
        let (read, mut write) = stream.into_split();
        match way {
            0 => drop((read, write)),
            1 => {
                write.finish();
                write.finish();
                drop((write, read));
            }
            2 => {
                write.shutdown().await.unwrap();
                drop(read);
                drop(write);
            }
            _ => {
                drop(read);
                write.finish();
                write.shutdown().await.unwrap();
                drop(write);
            }
        }
        raw.session.close();
        let rest = raw.rest().await;
        let fins = rest.chunks(HEADER_LEN).filter(|bytes| **bytes == window(FIN, 1, 0).encode()).count();
        assert_eq!(fins, 1, "way {way}: {rest:?}");
        assert_eq!(raw.driver.await.unwrap(), MuxError::Closed);
    }
}

#[tokio::test(start_paused = true)]
async fn yx_13_data_is_delivered_after_our_fin_and_before_theirs() {
    let mut raw = raw(Role::Client);
    let (mut read, mut write) = raw.session.open().unwrap().into_split();
    write.finish();
    assert!(write.write_all(b"x").await.is_err(), "write after FIN");
    raw.send(data(0, 1, 3), b"abc").await;
    raw.send(window(FIN, 1, 0), b"").await;
    // Both directions are over; what still comes for the stream is of no interest (YX-15).
    raw.send(window(FIN, 1, 0), b"").await;
    raw.send(data(0, 1, 3), b"xyz").await;
    raw.send(Header::new(Kind::Ping, SYN, 0, 1), b"").await;
    let mut text = String::new();
    read.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "abc");
    assert_eq!(raw.session.stream_count(), 1);
    drop((read, write));
    assert_eq!(raw.session.stream_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn yx_12_a_second_fin_of_the_peer_ends_the_session() {
    let mut raw = raw(Role::Server);
    raw.send(window(SYN, 1, 0), b"").await;
    raw.send(window(FIN, 1, 0), b"").await;
    raw.send(window(FIN, 1, 0), b"").await;
    assert!(matches!(raw.session.ended().await, MuxError::Protocol(_)));
}

#[tokio::test(start_paused = true)]
async fn yx_14_reset_fails_readers_and_writers_and_close_times_out_to_a_reset() {
    let mut raw = raw(Role::Client);
    let mut stream = raw.session.open().unwrap();
    raw.send(window(RST, 1, 0), b"").await;
    let error = stream.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(stream.write_all(b"x").await.is_err());

    drop(raw.session.open().unwrap());
    raw.send(window(ACK, 3, 0), b"").await;
    assert_eq!(raw.header().await, window(SYN, 1, 0));
    assert_eq!(raw.header().await, window(SYN, 3, 0));
    assert_eq!(raw.header().await, window(FIN, 3, 0));
    // Five minutes without a FIN of the peer, which answers our pings.
    loop {
        match raw.header().await {
            ping @ Header { kind: Kind::Ping, .. } => {
                raw.send(Header::new(Kind::Ping, ACK, 0, ping.length), b"").await;
            }
            other => {
                assert_eq!(other, window(RST, 3, 0));
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn yx_15_frames_of_unknown_streams_are_ignored() {
    let mut raw = raw(Role::Client);
    raw.send(data(0, 9, 4), b"gone").await;
    raw.send(window(0, 9, 1), b"").await;
    raw.send(window(FIN, 9, 0), b"").await;
    raw.send(window(RST, 9, 0), b"").await;
    raw.send(Header::new(Kind::Ping, ACK, 0, 77), b"").await;
    raw.send(Header::new(Kind::Ping, SYN, 0, 3), b"").await;
    assert_eq!(raw.header().await, Header::new(Kind::Ping, ACK, 0, 3));
}

#[tokio::test(start_paused = true)]
async fn yx_16_our_pings_count_from_zero_every_30_s_and_must_be_answered_in_10() {
    let mut raw = raw(Role::Client);
    let start = tokio::time::Instant::now();
    for id in 0..2 {
        assert_eq!(raw.header().await, Header::new(Kind::Ping, SYN, 0, id));
        raw.send(Header::new(Kind::Ping, ACK, 0, id), b"").await;
    }
    assert_eq!(start.elapsed().as_secs(), 60);
    assert_eq!(raw.header().await, Header::new(Kind::Ping, SYN, 0, 2));
    // TR-41: a server that says nothing is noticed within 45 s.
    assert!(matches!(raw.session.ended().await, MuxError::KeepaliveTimeout(_)));
    assert_eq!(start.elapsed().as_secs(), 100);
}

#[tokio::test(start_paused = true)]
async fn yx_17_go_away_0_refuses_new_streams_only() {
    let mut raw = raw(Role::Client);
    let mut stream = raw.session.open().unwrap();
    raw.send(Header::new(Kind::GoAway, 0, 0, 0), b"").await;
    raw.send(data(0, 1, 2), b"hi").await;
    let mut text = [0; 2];
    stream.read_exact(&mut text).await.unwrap();
    assert_eq!(raw.session.open().err(), Some(MuxError::NotAccepting));
    raw.send(Header::new(Kind::GoAway, 0, 0, 2), b"").await;
    assert_eq!(raw.session.ended().await, MuxError::GoAway(2));
}

#[tokio::test(start_paused = true)]
async fn yx_19_wrong_version_or_type_ends_the_session() {
    for bytes in ["010100010000000100000000", "000400000000000000000000"] {
        let mut raw = raw(Role::Server);
        raw.peer.write_all(&hex(bytes)).await.unwrap();
        assert!(matches!(raw.session.ended().await, MuxError::Protocol(_)), "{bytes}");
    }
}

#[tokio::test(start_paused = true)]
async fn yx_20_the_end_wakes_everybody() {
    let raw = raw(Role::Server);
    let acceptor = tokio::spawn({
        let session = raw.session.clone();
        async move { session.accept().await.map(|stream| stream.id()) }
    });
    let client = raw.session.open().unwrap();
    let (mut read, mut write) = client.into_split();
    let reader = tokio::spawn(async move { read.chunk(10).await });
    let writer = tokio::spawn(async move {
        loop {
            if let Err(error) = write.write_some(&[0; 1000]).await {
                return error;
            }
        }
    });
    tokio::task::yield_now().await;
    drop(raw.peer);
    assert_eq!(acceptor.await.unwrap(), Err(MuxError::RemoteClosed));
    assert_eq!(reader.await.unwrap(), Err(MuxError::RemoteClosed));
    assert_eq!(writer.await.unwrap(), MuxError::RemoteClosed);
    assert_eq!(raw.session.ended().await, MuxError::RemoteClosed);
}

#[tokio::test(start_paused = true)]
async fn an_unacknowledged_stream_ends_the_session_after_75_s() {
    let mut raw = raw(Role::Client);
    let start = tokio::time::Instant::now();
    let _stream = raw.session.open().unwrap();
    let session = raw.session.clone();
    let ended = tokio::spawn(async move { session.ended().await });
    while let Ok(Ok(_)) = timeout(Duration::from_secs(200), async {
        let mut bytes = [0; HEADER_LEN];
        raw.peer.read_exact(&mut bytes).await?;
        let header = Header::decode(&bytes).unwrap();
        if header.kind == Kind::Ping {
            raw.peer.write_all(&Header::new(Kind::Ping, ACK, 0, header.length).encode()).await?;
        }
        std::io::Result::Ok(())
    })
    .await
    {}
    assert!(matches!(ended.await.unwrap(), MuxError::OpenTimeout { stream: 1, .. }));
    assert_eq!(start.elapsed().as_secs(), 75);
}

#[tokio::test(start_paused = true)]
async fn ws_12_a_write_that_blocks_for_10_s_ends_the_session() {
    let (ours, _peer) = duplex(64);
    let (session, driver) = Connection::client(ours);
    let driver = tokio::spawn(driver);
    let mut stream = session.open().unwrap();
    stream.write_all(&[0; 1000]).await.unwrap();
    assert!(matches!(driver.await.unwrap(), MuxError::WriteTimeout(_)));
}

/// A peer that pings without reading our answers must not grow our memory: we stop reading.
#[tokio::test(start_paused = true)]
async fn a_flood_of_pings_is_bounded() {
    let (ours, mut peer) = duplex(4096);
    let (_session, driver) = Connection::server(ours);
    let driver = tokio::spawn(driver);
    let ping = Header::new(Kind::Ping, SYN, 0, 0).encode();
    let mut sent = 0_usize;
    while let Ok(Ok(())) = timeout(Duration::from_secs(60), peer.write_all(&ping)).await {
        sent += ping.len();
        assert!(sent < 4 * super::OUTPUT_LIMIT, "never stops reading");
    }
    assert!(matches!(driver.await.unwrap(), MuxError::WriteTimeout(_)));
}

/// TR-36, TR-37: both roles against each other, any splitting, a slow reader, 10 MiB each way.
#[tokio::test]
async fn tr_37_ten_mebibytes_each_way() {
    for pipe in [1, 7, 100_000] {
        let total = if pipe < 100 { 300_000 } else { 10 << 20 };
        let (a, b) = duplex(pipe);
        let (client, client_driver) = Connection::client(a);
        let (server, server_driver) = Connection::server(b);
        let drivers = [tokio::spawn(client_driver), tokio::spawn(server_driver)];
        let ours = client.open().unwrap();
        let theirs = server.accept().await.unwrap();
        let run = |stream: super::MuxStream| async move {
            let (mut read, mut write) = stream.into_split();
            let send = async {
                let mut sent = 0_usize;
                while sent < total {
                    let part: Vec<u8> = (sent..(sent + 60_000).min(total)).map(|n| n as u8).collect();
                    write.write_all(&part).await.unwrap();
                    sent += part.len();
                }
                write.finish();
            };
            let receive = async {
                let mut got = 0_usize;
                while let Some(chunk) = read.chunk(3000).await.unwrap() {
                    for byte in chunk {
                        assert_eq!(byte, got as u8);
                        got += 1;
                    }
                }
                assert_eq!(got, total);
            };
            tokio::join!(send, receive);
        };
        tokio::join!(run(ours), run(theirs));
        assert_eq!((client.stream_count(), server.stream_count()), (0, 0));
        client.close();
        for driver in drivers {
            driver.await.unwrap();
        }
    }
}
