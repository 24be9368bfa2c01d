//! The tunnel: a thread that moves packets, and the handle by which the rest of the daemon talks to it.
//!
//! Generic over the packet device, so that the testbed's workspace agent runs the same loop.

mod counters;
mod data_loop;
mod device;
mod nap;
mod network;
mod outbox;
mod wake;

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use codervpn_dns::{BaseServers, ForwardId, ForwardReply, ForwardRequest, Responder};
use codervpn_engine::{self as engine, Engine, Path, PeerId, PeerStatus, Ping, PingError, RelayLatency};
use codervpn_underlay::relays::RegionId;
use codervpn_underlay::{Ports, Relays, UdpCounters, UdpSockets};
use codervpn_wire::node::Node;
use tokio::sync::{mpsc, oneshot};

pub use counters::{Counters, of_relays};
pub use device::PacketDevice;
pub use wake::Wake;

use data_loop::DataLoop;
use nap::Naps;
use network::Network;
use outbox::Outbox;

/// Commands that may wait. Each is a whole list; the thread takes all of them in every turn.
const COMMANDS: usize = 64;
/// Events that may wait. What does not fit stays in the engine, whose queue holds at most one change per peer.
const EVENTS: usize = 256;

/// What the data thread is told.
enum Command {
    Engine(Vec<engine::Command>),
    /// Answered when everything before it has been done.
    Reached(oneshot::Sender<()>),
    Snapshot(oneshot::Sender<Snapshot>),
    Forwarding(Option<BaseServers>),
    ForwardAnswer {
        id: ForwardId,
        message: Vec<u8>,
        taken: oneshot::Sender<ForwardReply>,
    },
    ForwardFailure(ForwardId),
    Stop,
}

/// What the data thread tells.
#[derive(Debug)]
pub enum TunnelEvent {
    /// Our node, to be published.
    SelfNode(Box<Node>),
    /// Something that a user can see changed.
    PeerChanged(PeerId),
    /// The peer can shake hands with us from now on.
    Programmed(PeerId),
    PingDone {
        id: PeerId,
        result: Result<Ping, PingError>,
    },
    EchoDone {
        id: PeerId,
        token: u64,
        result: Result<Duration, PingError>,
        path: Option<Path>,
    },
    /// Measure the relays and resolve the STUN servers now; `party::Survey` does.
    MeasureRelays,
    /// A lookup for the machine's own name servers.
    Forward(ForwardRequest),
    /// The device is gone; this is the last event.
    DeviceLost(String),
}

/// Everything that can be shown, at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub peers: Vec<PeerStatus>,
    pub home: Option<RegionId>,
    pub latencies: Vec<RelayLatency>,
    /// The network we are in.
    pub net: engine::NetReport,
    pub engine: engine::Counters,
    pub tunnel: Counters,
    pub udp: UdpCounters,
    /// Ports that the UDP sockets are bound to.
    pub ports: Ports,
    pub dns: codervpn_dns::Stats,
    /// When; instants in it are relative to this.
    pub taken: Instant,
}

/// The data thread has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the tunnel has ended")]
pub struct Ended;

/// The running tunnel. Dropping it ends the thread and closes the device.
#[derive(Debug)]
pub struct Tunnel {
    handle: TunnelHandle,
    thread: Option<JoinHandle<()>>,
}

/// Talks to the data thread. Clones share it.
#[derive(Debug, Clone)]
pub struct TunnelHandle {
    commands: mpsc::Sender<Command>,
    wake: Wake,
}

impl Tunnel {
    /// Binds the UDP sockets and starts the thread. `wake` must be the one that the relays wake. Without any UDP the
    /// tunnel works by relays, and binding is tried again now and then.
    pub fn start(
        device: impl PacketDevice,
        engine: Engine,
        responder: Option<Responder>,
        relays: Relays,
        wake: Wake,
    ) -> std::io::Result<(Self, mpsc::Receiver<TunnelEvent>)> {
        let (commands, commands_rx) = mpsc::channel(COMMANDS);
        let (events, events_rx) = mpsc::channel(EVENTS);
        let udp = UdpSockets::bind(0).unwrap_or_else(|error| {
            tracing::warn!(%error, "no direct connections");
            UdpSockets::unbound()
        });
        let data_loop = DataLoop {
            engine,
            responder,
            out: Outbox::new(device, relays, udp),
            network: Network::new(),
            naps: Naps::default(),
            bind_at: None,
            wake: wake.clone(),
            commands: commands_rx,
            events,
            failed_reads: 0,
            untold: false,
        };
        let thread = std::thread::Builder::new().name("tunnel".into()).spawn(move || data_loop.run())?;
        Ok((Self { handle: TunnelHandle { commands, wake }, thread: Some(thread) }, events_rx))
    }

    pub fn handle(&self) -> &TunnelHandle {
        &self.handle
    }

    /// Ends the thread and closes the device; returns when both are done.
    pub async fn stop(mut self) {
        let _ = self.handle.send(Command::Stop).await;
        if let Some(thread) = self.thread.take() {
            // The thread ends within one turn of its loop.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        if self.handle.commands.try_send(Command::Stop).is_ok() {
            self.handle.wake.wake();
        }
    }
}

impl TunnelHandle {
    /// Commands for the engine, in order.
    pub async fn apply(&self, commands: Vec<engine::Command>) -> Result<(), Ended> {
        if commands.is_empty() {
            return Ok(());
        }
        self.send(Command::Engine(commands)).await
    }

    /// As `apply`, and waits until the engine has done them: what is said to programs afterwards is true for them.
    pub async fn applied(&self, commands: Vec<engine::Command>) -> Result<(), Ended> {
        if commands.is_empty() {
            return Ok(());
        }
        self.apply(commands).await?;
        let (reached, done) = oneshot::channel();
        self.send(Command::Reached(reached)).await?;
        done.await.map_err(|_| Ended)
    }

    /// What can be shown now. The round trip also proves that the thread is alive.
    pub async fn snapshot(&self) -> Result<Snapshot, Ended> {
        let (reply, snapshot) = oneshot::channel();
        self.send(Command::Snapshot(reply)).await?;
        snapshot.await.map_err(|_| Ended)
    }

    /// Makes the responder the machine's only server, with these to ask for the rest; `None` ends that.
    pub async fn forwarding(&self, servers: Option<BaseServers>) -> Result<(), Ended> {
        self.send(Command::Forwarding(servers)).await
    }

    /// What a name server sent. Says whether the lookup wants more from it.
    pub async fn forward_answer(&self, id: ForwardId, message: Vec<u8>) -> Result<ForwardReply, Ended> {
        let (taken, reply) = oneshot::channel();
        self.send(Command::ForwardAnswer { id, message, taken }).await?;
        reply.await.map_err(|_| Ended)
    }

    pub async fn forward_failure(&self, id: ForwardId) -> Result<(), Ended> {
        self.send(Command::ForwardFailure(id)).await
    }

    async fn send(&self, command: Command) -> Result<(), Ended> {
        self.commands.send(command).await.map_err(|_| Ended)?;
        self.wake.wake();
        Ok(())
    }
}
