//! Bad input at the local socket: each kind costs its sender the connection, and nobody else anything.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_testbed::cli::Cli;
use codervpn_testbed::daemon::{Client, Daemon, Options, World};
use codervpn_testbed::netns::Setup;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

type Result<T = ()> = anyhow::Result<T>;

const HEADER: &[u8] = b"codervpn client 1.0\n";
/// A handshake may last 5 s (11.5.4); the machine may be busy.
const CLOSED_WITHIN: Duration = Duration::from_secs(15);

fn setup() -> Setup {
    Setup::new().programs().tun()
}

/// Sends `bytes` and returns what came until the daemon closed the connection; an error when it does not.
async fn closes(socket: &Path, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).await?;
    // The daemon may close before everything was written.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    match timeout(CLOSED_WITHIN, stream.read_to_end(&mut answer)).await {
        Ok(Ok(_)) => Ok(answer),
        // Closed with our bytes unread.
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(answer),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => anyhow::bail!("the daemon keeps the connection of {:?}", String::from_utf8_lossy(bytes)),
    }
}

fn frame(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("a small frame");
    [&length.to_be_bytes()[..], body].concat()
}

fn greeted(rest: &[u8]) -> Vec<u8> {
    [HEADER, rest].concat()
}

#[test]
fn each_garbage_closes_its_own_connection_alone() {
    setup().run(async || -> Result {
        let mut daemon = Daemon::start(&Options::default()).await?;
        let honest = daemon.client().await?;
        let memory = daemon.resident()?;
        let rubbish = vec![0xa5; 4096];
        let cases: Vec<(&str, Vec<u8>)> = vec![
            ("nothing that is a header", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
            ("binary garbage", [&rubbish[..], b"\n"].concat()),
            ("a header without end", vec![b'c'; 4096]),
            ("wrong role", b"codervpn manager 1.3\n".to_vec()),
            ("our own role", b"codervpn service 1.3\n".to_vec()),
            ("version 9.0", b"codervpn client 9.0\n".to_vec()),
            ("no version", b"codervpn client\n".to_vec()),
            ("frame of 2 GiB", greeted(&[0x80, 0, 0, 0, 1, 2, 3])),
            ("frame of 4 GiB", greeted(&[0xff; 4])),
            ("frame over the limit for clients", greeted(&[0, 0x20, 0, 0, 1])),
            ("undecodable frame", greeted(&frame(&rubbish))),
        ];
        for (what, bytes) in cases {
            closes(daemon.socket(), &bytes).await.context(what)?;
            daemon.check_alive().context(what)?;
        }
        // Half frames: the sender goes in the middle.
        for cut in [1, 3, 4, 5] {
            let mut stream = UnixStream::connect(daemon.socket()).await?;
            stream.write_all(&greeted(&frame(&[0x22; 64]))[..HEADER.len() + cut]).await?;
            drop(stream);
        }
        // A client that never speaks is cut off.
        closes(daemon.socket(), b"").await.context("silence")?;
        closes(daemon.socket(), &HEADER[..7]).await.context("half a header")?;
        daemon.check_alive()?;
        ensure!(honest.status().await?.lifecycle() == Lifecycle::Stopped, "the honest client is not served");
        let grown = daemon.resident()?.saturating_sub(memory);
        ensure!(grown < 8 << 20, "{grown} bytes more");
        Ok(())
    });
}

/// An empty frame and an unknown message are ignored, not punished.
#[test]
fn what_a_newer_client_might_send_is_ignored() {
    setup().run(async || -> Result {
        let mut daemon = Daemon::start(&Options::default()).await?;
        let mut stream = UnixStream::connect(daemon.socket()).await?;
        let unknown = [0xa2, 0x38, 2, 1, 2];
        // Status request with id 1: rpc { msg_id: 1 }, status {}.
        let status = [0x0a, 2, 8, 1, 0x22, 0];
        for bytes in [HEADER.to_vec(), frame(&[]), frame(&unknown), frame(&status)] {
            stream.write_all(&bytes).await?;
        }
        let mut header = Vec::new();
        while !header.ends_with(b"\n") {
            header.push(stream.read_u8().await?);
        }
        ensure!(header.starts_with(b"codervpn service 1."), "{}", String::from_utf8_lossy(&header));
        let reply = async {
            loop {
                let length = stream.read_u32().await?;
                let mut body = vec![0; length.try_into()?];
                stream.read_exact(&mut body).await?;
                // rpc { response_to: 1 }
                if body.starts_with(&[0x0a, 2, 0x10, 1]) {
                    return anyhow::Ok(());
                }
            }
        };
        timeout(CLOSED_WITHIN, reply).await.context("no reply after what is to be ignored")??;
        daemon.check_alive()
    });
}

/// 11.5.4: eight connections for each user; the ninth is closed before a header is written, others are served.
#[test]
fn a_ninth_connection_of_one_user_is_refused() {
    setup().uids().run(async || -> Result {
        let mut daemon = Daemon::start(&Options { allow: vec![1000], ..Options::default() }).await?;
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(daemon.client().await?);
        }
        let ninth = closes(daemon.socket(), b"").await?;
        ensure!(ninth.is_empty(), "the ninth is greeted: {ninth:?}");
        daemon.log().line("too many connections").await?;
        Cli::as_user(daemon.socket(), 1000)?.succeeds("status").await?;
        for client in &held {
            client.status().await?;
        }
        held.pop().context("eight clients")?.speaker.abort();
        let begin = Instant::now();
        while daemon.client().await.is_err() {
            ensure!(begin.elapsed() < CLOSED_WITHIN, "its place is not free again");
        }
        daemon.check_alive()
    });
}

/// S-04, R-13: it costs bounded memory and is cut off; others get every change.
#[test]
fn a_client_that_never_reads_disturbs_nobody() {
    setup().run(async || -> Result {
        let world = World::new().await?;
        let mut daemon = Daemon::start(&Options::default()).await?;
        let honest = daemon.client().await?;
        // Asks and asks, and reads nothing.
        let mut deaf = UnixStream::connect(daemon.socket()).await?;
        deaf.write_all(HEADER).await?;
        let deaf = tokio::spawn(async move {
            for id in 1..=u64::MAX {
                let mut body = vec![0x0a, 0, 8];
                let mut rest = id;
                while rest >= 0x80 {
                    body.push(rest as u8 | 0x80);
                    rest >>= 7;
                }
                body.push(rest as u8);
                body[1] = u8::try_from(body.len() - 2).expect("a short number");
                body.extend([0x22, 0]);
                if deaf.write_all(&frame(&body)).await.is_err() {
                    return;
                }
            }
        });
        for _ in 0..3 {
            honest.started(world.url(), world.token()).await?;
            honest.connected().await?;
            honest.stopped().await?;
        }
        timeout(Duration::from_secs(30), deaf).await.context("the deaf client is kept")??;
        ensure!(honest.status().await?.lifecycle() == Lifecycle::Stopped, "the honest client is not served");
        ensure!(daemon.resident()? < 96 << 20, "{} bytes", daemon.resident()?);
        daemon.check_alive()
    });
}

/// A start that makes no sense is refused with a text, and nothing happens.
#[test]
fn starts_that_make_no_sense() {
    setup().run(async || -> Result {
        let mut daemon = Daemon::start(&Options::default()).await?;
        let client: Client = daemon.client().await?;
        let long = "x".repeat(100_000);
        for (url, token) in [
            ("", "token"),
            ("   ", "token"),
            ("coder.example.com:port", "token"),
            ("file:///etc/passwd", "token"),
            ("http://", "token"),
            ("http://127.0.0.1:1", ""),
            ("http://127.0.0.1:1", "to ken"),
            ("http://127.0.0.1:1", "to\r\nX: y"),
            ("http://127.0.0.1:1", "tök"),
            (&long, "token"),
        ] {
            let reply = client.start(url, token).await?;
            ensure!(!reply.success && !reply.error_message.is_empty(), "{url:?} {token:?}: {reply:?}");
        }
        ensure!(client.status().await?.lifecycle() == Lifecycle::Stopped, "something started");
        daemon.check_alive()
    });
}
