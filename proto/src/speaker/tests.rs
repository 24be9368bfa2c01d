//! Conversations over in-memory pipes, real time only where a limit is tested.

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};

use super::*;
use crate::handshake::Role;
use crate::rpc::{Client, Manager, Service, Tunnel};
use crate::vpn::{self, client_message, manager_message, service_message, tunnel_message};

const SECOND: Duration = Duration::from_secs(1);

/// Both ends of one connection.
async fn pair<E: End>() -> ((Speaker<E>, Inbox<E>), (Speaker<E::Peer>, Inbox<E::Peer>)) {
    let (a, b) = duplex(4096);
    let ((ar, aw), (br, bw)) = (split(a), split(b));
    let (a, b) = tokio::join!(
        connect::<E, _, _>(ar, aw, Limits::default()),
        connect::<E::Peer, _, _>(br, bw, Limits::default()),
    );
    (a.unwrap(), b.unwrap())
}

type Raw = (ReadHalf<DuplexStream>, WriteHalf<DuplexStream>);

/// Ours, and the bare bytes of a peer that has introduced itself.
async fn against_raw<E: End>(header: &str, limits: Limits) -> (Result<(Speaker<E>, Inbox<E>), ConnectError>, Raw) {
    let (ours, theirs) = duplex(4096);
    let (reader, writer) = split(ours);
    let (mut their_reader, mut their_writer) = split(theirs);
    their_writer.write_all(header.as_bytes()).await.unwrap();
    let result = connect::<E, _, _>(reader, writer, limits).await;
    let mut line = vec![0; format!("codervpn {} 1.3\n", E::ROLE).len()];
    their_reader.read_exact(&mut line).await.unwrap();
    (result, (their_reader, their_writer))
}

fn status_request() -> client_message::Msg {
    client_message::Msg::Status(vpn::StatusRequest {})
}

fn status(text: &str) -> service_message::Msg {
    service_message::Msg::Status(vpn::Status {
        error_message: text.into(),
        peer_update: Some(vpn::PeerUpdate::default()),
        ..Default::default()
    })
}

fn log(text: &str) -> tunnel_message::Msg {
    tunnel_message::Msg::Log(vpn::Log { message: text.into(), ..Default::default() })
}

fn stop_reply() -> tunnel_message::Msg {
    tunnel_message::Msg::Stop(vpn::StopResponse { success: true, ..Default::default() })
}

async fn next_request<E: End>(inbox: &mut Inbox<E>) -> Request<E> {
    match inbox.next().await.unwrap() {
        Incoming::Request(request) => request,
        Incoming::OneWay(body) => panic!("{body:?}"),
    }
}

async fn next_one_way<E: End>(inbox: &mut Inbox<E>) -> ReceiveBody<E> {
    match inbox.next().await.unwrap() {
        Incoming::OneWay(body) => body,
        Incoming::Request(request) => panic!("{request:?}"),
    }
}

#[tokio::test]
async fn a_request_gets_its_reply_among_broadcasts() {
    let ((client, mut heard), (service, mut asked)) = pair::<Client>().await;
    let answer = tokio::spawn(async move {
        let request = next_request(&mut asked).await;
        let news = Broadcast::new(status("broadcast")).unwrap();
        service.publish(Slot::Status, &news).unwrap();
        request.reply(status("reply")).await.unwrap();
        (service, asked)
    });
    let reply = client.request(status_request(), Some(SECOND)).await;
    assert_eq!(reply, Ok(status("reply")));
    assert_eq!(next_one_way(&mut heard).await, status("broadcast"));
    assert_eq!(client.guard.requests_waiting(), 0);
    let _ends = answer.await.unwrap();
}

#[tokio::test]
async fn r08_replies_pass_a_busy_handler() {
    let ((manager, mut manager_inbox), (tunnel, mut tunnel_inbox)) = pair::<Manager>().await;
    let start = manager_message::Msg::Start(vpn::StartRequest::default());
    let update = manager_message::Msg::GetPeerUpdate(vpn::GetPeerUpdate {});
    let starting = tokio::spawn({
        let manager = manager.clone();
        async move { manager.request(start, Some(SECOND)).await }
    });
    let a = next_request(&mut tunnel_inbox).await;
    // The handler of A asks B; C arrives before the reply to B.
    let b = tokio::spawn({
        let tunnel = tunnel.clone();
        let settings = vpn::NetworkSettingsRequest::default();
        async move {
            let body = tunnel_message::Msg::NetworkSettings(settings);
            tunnel.request(body, Some(SECOND)).await
        }
    });
    let b_asked = next_request(&mut manager_inbox).await;
    let c = tokio::spawn({
        let manager = manager.clone();
        async move { manager.request(update, Some(SECOND)).await }
    });
    tokio::task::yield_now().await;
    let applied = manager_message::Msg::NetworkSettings(vpn::NetworkSettingsResponse::default());
    b_asked.reply(applied.clone()).await.unwrap();
    assert_eq!(b.await.unwrap(), Ok(applied));
    let started = tunnel_message::Msg::Start(vpn::StartResponse::default());
    a.reply(started.clone()).await.unwrap();
    assert_eq!(starting.await.unwrap(), Ok(started));
    let c_asked = next_request(&mut tunnel_inbox).await;
    let none = tunnel_message::Msg::PeerUpdate(vpn::PeerUpdate::default());
    c_asked.reply(none.clone()).await.unwrap();
    assert_eq!(c.await.unwrap(), Ok(none));
}

#[tokio::test]
async fn r01_r04_the_stop_reply_is_the_last_frame_behind_all_accepted_ones() {
    let ((manager, mut heard), (tunnel, mut asked)) = pair::<Manager>().await;
    let senders: Vec<_> = (0..32)
        .map(|_| {
            let tunnel = tunnel.clone();
            tokio::spawn(async move {
                let mut accepted = 0;
                while tunnel.notify(log("busy")).await.is_ok() {
                    accepted += 1;
                }
                accepted
            })
        })
        .collect();
    let stop = tokio::spawn({
        let manager = manager.clone();
        async move {
            let stop = manager_message::Msg::Stop(vpn::StopRequest {});
            manager.request(stop, Some(10 * SECOND)).await
        }
    });
    let asked = next_request(&mut asked).await;
    for _ in 0..100 {
        next_one_way(&mut heard).await;
    }
    asked.reply_last(stop_reply()).unwrap();
    let mut received = 100;
    while let Some(Incoming::OneWay(_)) = heard.next().await {
        received += 1;
    }
    assert_eq!(stop.await.unwrap(), Ok(stop_reply()));
    let mut accepted = 0;
    for sender in senders {
        accepted += sender.await.unwrap();
    }
    assert_eq!(heard.dropped() + received, accepted);
    assert_eq!(manager.closed().await, CloseReason::Peer);
    assert_eq!(tunnel.closed().await, CloseReason::Local);
}

#[tokio::test(start_paused = true)]
async fn r13_a_client_that_never_reads_blocks_nobody_and_costs_nothing() {
    let (connected, _raw) = against_raw::<Service>("codervpn client 1.1\n", Limits::service()).await;
    let (service, _asked) = connected.unwrap();
    assert_eq!(service.version(), Version::new(1, 1));
    let mut refused = 0;
    for i in 0..10_000 {
        let news = Broadcast::new(status(&"x".repeat(1000 + i % 7))).unwrap();
        refused += usize::from(service.publish(Slot::Status, &news).is_err());
        let news = Broadcast::new(service_message::Msg::StartProgress(vpn::StartProgress::default()));
        refused += usize::from(service.publish(Slot::Progress, &news.unwrap()).is_err());
        tokio::task::yield_now().await;
        let (frames, bytes) = service.guard.queued();
        assert!(frames <= 2 && bytes < 1100, "{frames} frames, {bytes} bytes");
    }
    assert_eq!(refused, 0);
    // And is disconnected after 10 s of taking nothing.
    let before = tokio::time::Instant::now();
    assert_eq!(service.closed().await, CloseReason::Stalled);
    assert!(before.elapsed() <= 10 * SECOND);
    let late = Broadcast::new(status("late")).unwrap();
    assert_eq!(service.publish(Slot::Status, &late), Err(SendError::Closed(CloseReason::Stalled)));
}

#[tokio::test]
async fn r13_the_newest_of_a_slot_is_what_arrives() {
    let ((_client, mut heard), (service, _asked)) = pair::<Client>().await;
    // No yield in between: the writer sees only the last.
    for text in ["old", "older", "newest"] {
        let news = Broadcast::new(status(text)).unwrap();
        service.publish(Slot::Status, &news).unwrap();
    }
    assert_eq!(next_one_way(&mut heard).await, status("newest"));
    service.close();
    assert!(heard.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn r03_r05_a_close_ends_although_the_peer_does_not_read() {
    let (connected, _raw) = against_raw::<Tunnel>("codervpn manager 1.3\n", Limits::default()).await;
    let (tunnel, _asked) = connected.unwrap();
    while tunnel.try_notify(log(&"x".repeat(1000))).is_ok() {}
    let blocked = tokio::spawn({
        let tunnel = tunnel.clone();
        async move {
            loop {
                if let Err(error) = tunnel.notify(log(&"x".repeat(1000))).await {
                    return error;
                }
            }
        }
    });
    tokio::task::yield_now().await;
    let before = tokio::time::Instant::now();
    tunnel.close();
    let error = blocked.await.unwrap();
    assert_eq!(error, SendError::Closed(CloseReason::Local));
    assert!(before.elapsed() < SECOND);
    assert_eq!(tunnel.closed().await, CloseReason::Stalled);
    assert!(before.elapsed() <= 3 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn r19_requests_that_were_given_up_leave_nothing_behind() {
    let ((client, _heard), (_service, mut asked)) = pair::<Client>().await;
    tokio::spawn(async move { while asked.next().await.is_some() {} });
    for i in 0..10_000 {
        let mut request = Box::pin(client.request(status_request(), None));
        if i % 2 == 0 {
            assert!(timeout(Duration::ZERO, &mut request).await.is_err());
        }
        drop(request);
    }
    assert_eq!(client.guard.requests_waiting(), 0);
    let late = client.request(status_request(), Some(SECOND)).await;
    assert_eq!(late, Err(RequestError::TimedOut));
    assert_eq!(client.guard.requests_waiting(), 0);
}

#[tokio::test]
async fn r20_a_lost_connection_fails_what_waits() {
    let (connected, raw) = against_raw::<Client>("codervpn service 1.3\n", Limits::default()).await;
    let (client, mut heard) = connected.unwrap();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.request(status_request(), None).await }
    });
    let (mut reader, writer) = raw;
    let mut c1 = [0; 10];
    reader.read_exact(&mut c1).await.unwrap();
    assert_eq!(c1, [0, 0, 0, 6, 0x0a, 2, 8, 1, 0x22, 0]);
    drop((reader, writer));
    assert_eq!(waiting.await.unwrap(), Err(RequestError::Closed(CloseReason::Peer)));
    assert!(heard.next().await.is_none());
}

/// What becomes of a tunnel's connection whose manager sends these bytes.
async fn ended_by(bytes: &[u8]) -> CloseReason {
    let (connected, (_reader, mut writer)) = against_raw::<Tunnel>("codervpn manager 1.3\n", Limits::default()).await;
    let (tunnel, mut asked) = connected.unwrap();
    writer.write_all(bytes).await.unwrap();
    writer.shutdown().await.unwrap();
    assert!(asked.next().await.is_none());
    tunnel.closed().await
}

#[tokio::test]
async fn frames_of_9_3_end_a_connection_as_they_should() {
    let x5 = b"\0\0\0\x0a\x0a\x02\x08\x01\x22\x04\x12\x02\xff\xfe";
    assert!(matches!(ended_by(x5).await, CloseReason::Protocol(FrameError::Undecodable(_))));
    let x6 = b"\x01\0\0\x01anything";
    assert!(matches!(ended_by(x6).await, CloseReason::Protocol(FrameError::TooLarge { .. })));
    for truncated in [&b"\x01\0\0\0"[..], b"\0\0\0\x06\x0a\x02"] {
        let reason = ended_by(truncated).await;
        assert!(matches!(reason, CloseReason::Lost(_)), "{reason:?}");
    }
    assert!(matches!(
        ended_by(b"\0\0\0\x06\x08\xff\xff\xff\xff\xff").await,
        CloseReason::Protocol(FrameError::Undecodable(_))
    ));
}

#[tokio::test]
async fn odd_frames_are_ignored_and_x11_is_seen_whole() {
    let ignored = [
        &b"\0\0\0\0"[..],
        b"\0\0\0\x04\x0a\0\x12\0",
        b"\0\0\0\x06\x0a\x02\x08\x09\x7a\0",
        b"\0\0\0\x04\x0a\x02\x08\x09",
        b"\0\0\0\x0a\x0a\x04\x08\x09\x10\x01\x1a\x02\x08\x01",
    ]
    .concat();
    assert_eq!(ended_by(&ignored).await, CloseReason::Peer);

    // M2 in one piece with the header, twice: the second has an id in service.
    let m2 = "\0\0\0\x06\n\x02\x08\x02\x12\0";
    let header = format!("codervpn manager 1.3\n{m2}{m2}");
    let (connected, (mut reader, _writer)) = against_raw::<Tunnel>(&header, Limits::default()).await;
    let (tunnel, mut asked) = connected.unwrap();
    let request = next_request(&mut asked).await;
    assert_eq!(request.kind(), Kind::GetPeerUpdate);
    let none = tunnel_message::Msg::PeerUpdate(vpn::PeerUpdate::default());
    request.reply(none).await.unwrap();
    let mut t7 = [0; 10];
    reader.read_exact(&mut t7).await.unwrap();
    assert_eq!(t7, [0, 0, 0, 6, 0x0a, 2, 0x10, 2, 0x1a, 0]);
    tunnel.close();
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty(), "a second reply: {rest:?}");
}

#[tokio::test]
async fn a_service_takes_no_large_frame_and_no_flood_of_requests() {
    let (connected, (_reader, mut writer)) = against_raw::<Service>("codervpn client 1.3\n", Limits::service()).await;
    let (service, _asked) = connected.unwrap();
    writer.write_all(&0x0010_0001_u32.to_be_bytes()).await.unwrap();
    assert!(matches!(service.closed().await, CloseReason::Protocol(FrameError::TooLarge { .. })));

    let (connected, (_reader, mut writer)) = against_raw::<Service>("codervpn client 1.3\n", Limits::service()).await;
    let (service, _asked) = connected.unwrap();
    for id in 1..=17 {
        writer.write_all(&[0, 0, 0, 6, 0x0a, 2, 8, id, 0x22, 0]).await.unwrap();
    }
    assert_eq!(service.closed().await, CloseReason::TooManyRequests);
}

#[tokio::test]
async fn r39_what_an_old_peer_cannot_do_is_not_supported() {
    let (connected, (_reader, mut writer)) = against_raw::<Manager>("codervpn tunnel 1.2\n", Limits::default()).await;
    let (manager, _heard) = connected.unwrap();
    let wake = manager_message::Msg::Wake(vpn::WakeRequest {});
    assert_eq!(manager.request(wake, None).await, Err(RequestError::NotSupported));
    // An empty oneof as the reply to request 1, a wrong one to request 2.
    let empty = b"\0\0\0\x04\x0a\x02\x10\x01".as_slice();
    let wrong = b"\0\0\0\x08\x0a\x02\x10\x02\x2a\x02\x08\x01".as_slice();
    for (reply, expected) in [(empty, RequestError::NotSupported), (wrong, RequestError::UnexpectedReply(Kind::Start))]
    {
        let request = tokio::spawn({
            let manager = manager.clone();
            let update = manager_message::Msg::GetPeerUpdate(vpn::GetPeerUpdate {});
            async move { manager.request(update, Some(SECOND)).await }
        });
        // A reply that comes before its request would be dropped.
        while manager.guard.requests_waiting() == 0 {
            tokio::task::yield_now().await;
        }
        writer.write_all(reply).await.unwrap();
        assert_eq!(request.await.unwrap(), Err(expected));
    }
}

#[tokio::test(start_paused = true)]
async fn r22_a_handshake_ends_in_5_seconds_whatever_the_peer_does() {
    let before = tokio::time::Instant::now();
    let (connected, _raw) = against_raw::<Service>("codervpn cli", Limits::service()).await;
    assert!(matches!(
        connected,
        Err(ConnectError::TimedOut { header }) if header == "codervpn cli"
    ));
    assert_eq!(before.elapsed(), 5 * SECOND);

    let (connected, _raw) = against_raw::<Service>("codervpn service 1.3\n", Limits::service()).await;
    assert!(matches!(
        connected,
        Err(ConnectError::Handshake(HandshakeError::WrongRole { expected: Role::Client, .. }))
    ));
    let garbage = "GET / HTTP/1.1 ".repeat(20);
    let (connected, _raw) = against_raw::<Service>(&garbage, Limits::service()).await;
    assert!(matches!(connected, Err(ConnectError::Handshake(HandshakeError::TooLong { .. }))));
    let (connected, _raw) = against_raw::<Service>("codervpn client 9.0\n", Limits::service()).await;
    assert!(matches!(connected, Err(ConnectError::Handshake(HandshakeError::NoCommonVersion { .. }))));
    let (ours, theirs) = duplex(64);
    drop(theirs);
    let (reader, writer) = split(ours);
    let refused = connect::<Client, _, _>(reader, writer, Limits::default()).await;
    assert!(refused.is_err());
}

#[tokio::test]
async fn a_reply_too_large_becomes_a_failure() {
    let ((client, _heard), (_service, mut asked)) = pair::<Client>().await;
    let answer = tokio::spawn(async move {
        let request = next_request(&mut asked).await;
        let huge = status(&"x".repeat(MAX_BODY));
        request.reply(huge).await
    });
    let reply = client.request(status_request(), Some(10 * SECOND)).await;
    answer.await.unwrap().unwrap();
    let Ok(service_message::Msg::Status(status)) = reply else {
        panic!("{reply:?}");
    };
    assert!(status.error_message.contains("too large"));
    assert!(status.peer_update.is_some());
}

#[tokio::test]
async fn the_connection_lives_as_long_as_any_handle_of_it() {
    let ((client, heard), (service, mut asked)) = pair::<Client>().await;
    drop(heard);
    let news = Broadcast::new(status("nobody listens")).unwrap();
    service.publish(Slot::Status, &news).unwrap();
    let waiting = tokio::spawn(async move { client.request(status_request(), None).await });
    let request = next_request(&mut asked).await;
    assert!(matches!(
        request.encode(service_message::Msg::Stop(vpn::StopResponse::default())),
        Err(SendError::NotTheReply(Kind::Status, Kind::Stop))
    ));
    request.reply(status("yes")).await.unwrap();
    assert_eq!(waiting.await.unwrap(), Ok(status("yes")));
    // That was the client's last handle.
    assert!(asked.next().await.is_none());
    assert_eq!(service.closed().await, CloseReason::Peer);
}
