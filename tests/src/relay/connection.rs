//! One client of the relay: the greeting with its deadlines, a reader that passes packets on, a writer that empties the
//! client's queue with as few writes as possible.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use codervpn_wire::derp::greeting::{GreetingError, ServerInfo, open_client_info, write_server_info};
use codervpn_wire::derp::{
    Frame, FrameBuffer, FrameError, GoneReason, MAGIC, Side, write_keep_alive, write_recv_packet, write_server_key,
};
use codervpn_wire::disco;
use codervpn_wire::keys::{NodePrivate, NodePublic, random_nonce};
use rand::RngExt as _;
use rand_core::OsRng;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio::time::{Instant, sleep_until, timeout};

use super::queue::{Frames, Queue};
use super::registry::{Entry, Registry};
use crate::coderd::listener::Wire;

/// For writing the key, then again for reading the client's greeting.
const GREETING: Duration = Duration::from_secs(10);
/// A client that does not take a write within this is cut.
const WRITE: Duration = Duration::from_secs(2);
const KEEP_ALIVE: Duration = Duration::from_secs(60);
/// Added to it, once for each connection.
const JITTER_MILLIS: u64 = 5000;
/// Bytes of one write: what one read of a fast client brings.
const BATCH: usize = 128 * 1024;
/// PeerGone(not here) to one client: at most so many at once, one more each second.
const HINTS: u32 = 3;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("too slow")]
    Slow,
    #[error("closed by the client")]
    Closed,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Greeting(#[from] GreetingError),
    #[error("a frame that is not allowed here")]
    NotAllowed,
}

/// A client that has proved its key.
pub(super) struct Greeted<S> {
    key: NodePublic,
    reader: ReadHalf<S>,
    writer: WriteHalf<S>,
    buffer: FrameBuffer,
}

/// The greeting, from our key to our answer.
pub(super) async fn greet<S: Wire>(stream: S, private: &NodePrivate) -> Result<Greeted<S>, Error> {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut out = Vec::with_capacity(128);
    write_server_key(&mut out, &private.public());
    debug_assert!(out.windows(MAGIC.len()).any(|part| part == MAGIC));
    timeout(GREETING, send(&mut writer, &out)).await.map_err(|_| Error::Slow)??;
    let mut buffer = FrameBuffer::new(Side::Server);
    let (key, shared) = timeout(GREETING, async {
        loop {
            match buffer.next_frame()? {
                Some(Frame::ClientInfo { key, sealed }) => {
                    let (_, shared) = open_client_info(private, &key, sealed)?;
                    return Ok((key, shared));
                }
                Some(_) => return Err(Error::NotAllowed),
                None => fill(&mut reader, &mut buffer).await?,
            }
        }
    })
    .await
    .map_err(|_| Error::Slow)??;
    out.clear();
    write_server_info(&mut out, &shared, &random_nonce(&mut OsRng), &ServerInfo::default());
    timeout(WRITE, send(&mut writer, &out)).await.map_err(|_| Error::Slow)??;
    Ok(Greeted { key, reader, writer, buffer })
}

/// Serves a client until it ends. `entered` is called when it can be reached.
pub(super) async fn serve<S: Wire>(client: Greeted<S>, registry: &Registry, entered: impl FnOnce()) {
    let Greeted { key, reader, writer, buffer } = client;
    let place = Place { registry, entry: registry.enter(key) };
    entered();
    let end = tokio::select! {
        end = read(reader, buffer, &place) => end,
        end = write(writer, &place) => end,
    };
    if let Err(error) = end {
        tracing::debug!(client = %place.entry.key.short(), %error, "relay client gone");
    }
}

/// Gives the place up however the connection ends.
struct Place<'a> {
    registry: &'a Registry,
    entry: Entry,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.registry.leave(&self.entry);
    }
}

async fn read<S: Wire>(mut reader: ReadHalf<S>, mut buffer: FrameBuffer, place: &Place<'_>) -> Result<(), Error> {
    let mut hints = Hints { left: HINTS, since: Instant::now() };
    let mut train = Train::default();
    loop {
        let mut any = false;
        while let Some(frame) = buffer.next_frame()? {
            if !any {
                any = true;
                place.registry.spoke(&place.entry);
            }
            take(&frame, place, &mut hints, &mut train)?;
        }
        train.pass_on(place);
        fill(&mut reader, &mut buffer).await?;
    }
}

/// Packets of one read that follow each other to the same client: looked up, passed on and announced once.
#[derive(Default)]
struct Train {
    to: Option<(NodePublic, Arc<Queue>)>,
    data: Frames,
    disco: Frames,
    bytes: usize,
}

impl Train {
    fn pass_on(&mut self, place: &Place<'_>) {
        if let Some((to, queue)) = self.to.take() {
            let packets = (self.data.len() + self.disco.len()) as u64;
            let mut dropped = 0;
            for (frames, is_disco) in [(&mut self.disco, true), (&mut self.data, false)] {
                if frames.len() > 0 {
                    dropped += queue.push(frames, is_disco);
                }
            }
            place.registry.count(packets, self.bytes, dropped, to == place.entry.key);
            self.bytes = 0;
        }
    }
}

fn take(frame: &Frame<'_>, place: &Place<'_>, hints: &mut Hints, train: &mut Train) -> Result<(), Error> {
    let Place { registry, entry } = place;
    match frame {
        Frame::SendPacket { to, packet } => {
            let is_disco = disco::looks_like_disco(packet);
            if train.to.as_ref().is_none_or(|(same, _)| same != to) {
                train.pass_on(place);
                let Some(queue) = registry.route(entry, to) else {
                    if is_disco && hints.allow() {
                        entry.queue.peer_gone(*to, GoneReason::NotHere);
                    }
                    return Ok(());
                };
                train.to = Some((*to, queue));
            }
            train.bytes += packet.len();
            let frames = if is_disco { &mut train.disco } else { &mut train.data };
            // The length was judged with the frame.
            frames.add(|out| {
                let _ = write_recv_packet(out, &entry.key, packet);
            });
        }
        Frame::Ping(data) => entry.queue.pong(*data),
        Frame::NotePreferred(true) => registry.count_home(),
        Frame::ForwardPacket | Frame::WatchConns | Frame::ClosePeer => return Err(Error::NotAllowed),
        _ => {}
    }
    Ok(())
}

struct Hints {
    left: u32,
    since: Instant,
}

impl Hints {
    fn allow(&mut self) -> bool {
        let seconds = self.since.elapsed().as_secs().min(u64::from(HINTS)) as u32;
        if seconds > 0 {
            self.left = (self.left + seconds).min(HINTS);
            self.since = Instant::now();
        }
        let allowed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        allowed
    }
}

async fn write<S: Wire>(mut writer: WriteHalf<S>, place: &Place<'_>) -> Result<(), Error> {
    let period = KEEP_ALIVE + Duration::from_millis(rand::rng().random_range(0..JITTER_MILLIS));
    let mut keep_alive = Instant::now() + period;
    let mut out = Vec::with_capacity(2 * BATCH);
    loop {
        tokio::select! {
            () = place.entry.queue.take(&mut out, BATCH) => {}
            () = sleep_until(keep_alive) => {
                keep_alive += period;
                write_keep_alive(&mut out);
            }
        }
        timeout(WRITE, send(&mut writer, &out)).await.map_err(|_| Error::Slow)??;
        out.clear();
    }
}

async fn send<S: Wire>(writer: &mut WriteHalf<S>, bytes: &[u8]) -> io::Result<()> {
    writer.write_all(bytes).await?;
    writer.flush().await
}

async fn fill<S: Wire>(reader: &mut ReadHalf<S>, buffer: &mut FrameBuffer) -> Result<(), Error> {
    match reader.read(buffer.space()).await? {
        0 => Err(Error::Closed),
        length => {
            buffer.filled(length);
            Ok(())
        }
    }
}
