//! The data thread: one loop that owns device, engine and responder and shows the way of a packet top to bottom.
//!
//! It drains what is there, in turns short enough that neither direction starves, and sleeps in one `poll` when a turn
//! left nothing behind: asking in vain is cheaper than a `poll` a turn (fast path 4.5). Nothing in it blocks but a send that
//! finds a full socket, and that for two milliseconds: relays take and give whole batches over bounded queues, the slow
//! side talks over a bounded queue of commands and is told over a bounded queue of events. While a relay does not keep up
//! the device is not read, so that packets wait in the kernel's queue, where they count as one delay and not as two.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime};

use codervpn_dns::{DNS_ADDRESS, Responder};
use codervpn_engine::{self as engine, Engine};
use codervpn_host::tun::Frame;
use codervpn_underlay::{Incoming, Ports, RelayEvent};
use codervpn_wire::node::Family;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

use super::device::PacketDevice;
use super::nap::{NAP, Naps};
use super::network::Network;
use super::outbox::{self, Outbox};
use super::wake::Wake;
use super::{Command, Snapshot, TunnelEvent};

/// Reads of the device before the network is looked at again.
const DEVICE_TURN: usize = 64;
/// Bytes read from the device before the network is looked at again: half a millisecond of sealing, so that what comes in
/// does not wait behind what goes out.
const DEVICE_TURN_BYTES: usize = 256 * 1024;
/// Receives on the UDP sockets before the device is looked at again.
const NETWORK_TURN: usize = 4;
/// Batches taken from the relays before the device is looked at again.
const RELAY_TURN: usize = 4;
/// A read of more than this fills a send by itself: it leaves at once.
const LARGE_READ: usize = 16 * 1024;
/// So many failed reads in a row mean that the device is lost.
const FAILED_READS: u32 = 64;
/// Longest sleep. Nothing depends on it: it only bounds the damage of a timer that somebody forgot.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);
/// How soon sockets that could not be bound are tried again.
const BIND_AGAIN: Duration = Duration::from_secs(5);
/// How soon events that did not fit are offered again.
const RETELL: Duration = Duration::from_millis(5);

pub(super) struct DataLoop<D> {
    pub(super) engine: Engine,
    /// The names inside the tunnel; an agent has none.
    pub(super) responder: Option<Responder>,
    pub(super) out: Outbox<D>,
    pub(super) network: Network,
    pub(super) naps: Naps,
    /// When to bind the sockets again.
    pub(super) bind_at: Option<Instant>,
    pub(super) wake: Wake,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) events: mpsc::Sender<TunnelEvent>,
    /// Reads that failed one after the other.
    pub(super) failed_reads: u32,
    /// Something to tell did not fit; nobody wakes us when it would.
    pub(super) untold: bool,
}

/// Whether the loop goes on.
enum Turn {
    Idle,
    Busy,
    Over,
}

impl<D: PacketDevice> DataLoop<D> {
    /// Runs until it is told to stop, every handle is gone, or the device is lost.
    pub(super) fn run(mut self) {
        let mut frame = Frame::default();
        self.tell_ports(Instant::now());
        loop {
            let now = Instant::now();
            let from_network = self.take_from_network(now);
            let from_relays = self.take_from_relays(now);
            let from_device = match self.take_from_device(&mut frame, now) {
                Ok(full) => full,
                Err(error) => return self.report_loss(&error),
            };
            match self.take_commands(now) {
                Turn::Over => return,
                Turn::Busy => {}
                Turn::Idle if !from_network && !from_relays && !from_device => self.sleep(),
                Turn::Idle => {}
            }
        }
    }

    /// True when there may be more.
    fn take_from_network(&mut self, now: Instant) -> bool {
        self.network.next_turn();
        let (mut receives, before) = (0, self.out.udp.counters().received_bytes);
        while receives < NETWORK_TURN && self.receive(now) {
            receives += 1;
            self.out.flush_device();
        }
        if receives > 0 {
            self.out.flush_datagrams();
        }
        if self.out.udp.counters().received_bytes - before > LARGE_READ as u64 {
            self.naps.note();
        }
        receives == NETWORK_TURN
    }

    /// One receive on each socket. True when something came.
    fn receive(&mut self, now: Instant) -> bool {
        let mut came = false;
        for family in [Family::V4, Family::V6] {
            if self.network.receive(family, &mut self.out.udp) == 0 {
                continue;
            }
            came = true;
            for (source, datagram) in self.network.datagrams() {
                self.engine.handle_udp(source, datagram, now, &mut self.out);
            }
        }
        came
    }

    /// True when there may be more.
    fn take_from_relays(&mut self, now: Instant) -> bool {
        for _ in 0..RELAY_TURN {
            let Some(incoming) = self.out.relays.receive() else { return false };
            match incoming {
                Incoming::Packets(mut batch) => {
                    let region = batch.region;
                    for packet in batch.packets() {
                        self.engine.handle_relay(region, packet.source, packet.payload, now, &mut self.out);
                    }
                    self.out.flush_device();
                }
                Incoming::Event(event) => self.take_relay_event(event, now),
            }
        }
        true
    }

    fn take_relay_event(&mut self, event: RelayEvent, now: Instant) {
        let command = match event {
            RelayEvent::Connected { region } => engine::Command::RelayUp(region),
            RelayEvent::Disconnected { region, reason } => {
                tracing::info!(%region, reason, "relay connection lost");
                self.out.drained(region);
                engine::Command::RelayDown(region)
            }
            RelayEvent::Failed { region, reason } => {
                tracing::warn!(%region, reason, "cannot connect to relay");
                self.out.drained(region);
                return;
            }
            RelayEvent::PeerGone { region, peer, .. } => engine::Command::RelayPeerGone { region, peer },
            RelayEvent::Health { region, text: Some(text) } => {
                tracing::warn!(%region, text, "the relay complains");
                return;
            }
            RelayEvent::Health { .. } => return,
            RelayEvent::Drained { region } => return self.out.drained(region),
        };
        self.engine.apply(command, now, &mut self.out);
    }

    /// True when there may be more.
    fn take_from_device(&mut self, frame: &mut Frame, now: Instant) -> io::Result<bool> {
        let mut bytes = 0;
        for _ in 0..DEVICE_TURN {
            if bytes >= DEVICE_TURN_BYTES {
                break;
            }
            if self.out.paused_until(now).is_some() {
                return Ok(false);
            }
            match self.out.device.recv(frame) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if outbox::is_loss(&error) => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, "cannot read from the packet device");
                    // A device that only ever fails would have us try for ever, at full speed.
                    self.failed_reads += 1;
                    return if self.failed_reads < FAILED_READS { Ok(false) } else { Err(error) };
                }
            }
            self.failed_reads = 0;
            self.out.counters.device_reads += 1;
            let mut run = None;
            while let Some(packet) = frame.next() {
                match (&run, &mut self.responder) {
                    // One read is one packet of one conversation, however often it is cut.
                    (Some(run), _) => self.engine.handle_tun_next(run, packet, now, &mut self.out),
                    (None, Some(responder)) if is_for_responder(packet) => {
                        responder.handle_packet(packet, now, &mut |answer| self.out.answer(answer));
                        self.forward();
                    }
                    _ => run = self.out.while_from_device(now, |out| self.engine.handle_tun_first(packet, now, out)),
                }
            }
            bytes += frame.len();
            self.out.counters.device_bad = frame.bad();
            if frame.len() > LARGE_READ {
                self.out.flush_datagrams();
                self.out.flush_batches();
            }
        }
        Ok(true)
    }

    fn take_commands(&mut self, now: Instant) -> Turn {
        let mut turn = Turn::Idle;
        loop {
            match self.commands.try_recv() {
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => {
                    self.flush(now);
                    return Turn::Over;
                }
                Err(TryRecvError::Empty) => break,
                Ok(command) => {
                    turn = Turn::Busy;
                    self.take_command(command, now);
                }
            }
        }
        if self.engine.poll_timeout().is_some_and(|at| at <= now) {
            self.engine.handle_timeout(now, &mut self.out);
        }
        if let Some(responder) = &mut self.responder
            && responder.poll_timeout().is_some_and(|at| at <= now)
        {
            responder.handle_timeout(now, &mut |answer| self.out.answer(answer));
            self.forward();
        }
        if self.bind_at.is_some_and(|at| at <= now) {
            self.bind_again(now);
        }
        self.tell(now);
        self.flush(now);
        if let Some(error) = self.out.take_loss() {
            self.report_loss(&error);
            return Turn::Over;
        }
        turn
    }

    /// Sends everything that waits for company.
    fn flush(&mut self, now: Instant) {
        self.out.flush_device();
        self.out.flush_datagrams();
        self.out.flush_batches();
        let mut answered = false;
        while let Some((destination, failure)) = self.out.take_failure() {
            self.engine.handle_send_failure(destination, failure, now, &mut self.out);
            answered = true;
        }
        if answered {
            // What failed again is told next time.
            self.out.flush_datagrams();
            self.out.flush_batches();
        }
    }

    fn tell_ports(&mut self, now: Instant) {
        let Ports { v4, v6 } = self.out.udp.ports();
        self.bind_at = (v4.is_none() && v6.is_none()).then(|| now + BIND_AGAIN);
        self.engine.apply(engine::Command::SocketsBound { v4, v6 }, now, &mut self.out);
    }

    fn bind_again(&mut self, now: Instant) {
        self.out.flush_datagrams();
        match self.out.udp.rebind() {
            Ok(()) => tracing::debug!(ports = ?self.out.udp.ports(), "UDP sockets bound again"),
            Err(error) => tracing::warn!(%error, "no direct connections"),
        }
        self.network.expect(None);
        self.tell_ports(now);
    }

    fn take_command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Engine(commands) => {
                for command in commands {
                    self.engine.apply(command, now, &mut self.out);
                }
            }
            Command::Reached(reply) => drop(reply.send(())),
            Command::Snapshot(reply) => {
                // Whoever asked may have given up.
                let _ = reply.send(self.snapshot(now));
            }
            Command::Forwarding(servers) => {
                if let Some(responder) = &mut self.responder {
                    responder.apply_forwarding(servers);
                }
            }
            Command::ForwardAnswer { id, message, taken } => {
                if let Some(responder) = &mut self.responder {
                    let reply =
                        responder.handle_forward_answer(id, &message, now, &mut |answer| self.out.answer(answer));
                    let _ = taken.send(reply);
                    self.forward();
                }
            }
            Command::ForwardFailure(id) => {
                if let Some(responder) = &mut self.responder {
                    responder.handle_forward_failure(id, now, &mut |answer| self.out.answer(answer));
                    self.forward();
                }
            }
            // Handled where commands are taken.
            Command::Stop => {}
        }
    }

    /// Passes on what the engine has to say, as far as the slow side has room; the rest waits in the engine.
    fn tell(&mut self, now: Instant) {
        self.untold = true;
        while let Ok(room) = self.events.try_reserve() {
            let Some(event) = self.engine.poll_event() else {
                self.untold = false;
                return;
            };
            let event = match event {
                engine::Event::HomeRelayChanged(region) => {
                    self.out.relays.set_home(Some(region));
                    continue;
                }
                engine::Event::RelayWanted(region) => {
                    self.out.relays.want(region);
                    continue;
                }
                engine::Event::SelfNodeChanged => match self.engine.self_node(SystemTime::now()) {
                    Some(node) => TunnelEvent::SelfNode(Box::new(node)),
                    None => continue,
                },
                engine::Event::PeerChanged(id) => TunnelEvent::PeerChanged(id),
                engine::Event::Programmed(id) => TunnelEvent::Programmed(id),
                engine::Event::PingDone { id, result } => TunnelEvent::PingDone { id, result },
                engine::Event::EchoDone { id, token, result, path } => {
                    TunnelEvent::EchoDone { id, token, result, path }
                }
                engine::Event::MeasureRelays => TunnelEvent::MeasureRelays,
                engine::Event::RebindSockets => {
                    // In the next turn, which comes at once.
                    self.bind_at = Some(now);
                    continue;
                }
            };
            room.send(event);
        }
    }

    /// A lookup that finds the slow side busy is dropped; the responder asks again.
    fn forward(&mut self) {
        let Some(responder) = &mut self.responder else { return };
        while let Some(request) = responder.poll_forward() {
            if self.events.try_send(TunnelEvent::Forward(request)).is_err() {
                self.out.counters.forwards_dropped += 1;
            }
        }
    }

    fn snapshot(&self, now: Instant) -> Snapshot {
        let engine = &self.engine;
        Snapshot {
            peers: engine.peers(now).collect(),
            home: engine.home_relay(),
            latencies: engine.relay_latencies().to_vec(),
            net: engine.net_report(),
            engine: *engine.counters(),
            tunnel: self.out.counters,
            udp: *self.out.udp.counters(),
            ports: self.out.udp.ports(),
            dns: self.responder.as_ref().map(Responder::stats).unwrap_or_default(),
            taken: now,
        }
    }

    fn report_loss(&self, error: &io::Error) {
        tracing::error!(%error, "the packet device is gone");
        // The slow side notices the end of the queue even when this does not fit.
        let _ = self.events.try_send(TunnelEvent::DeviceLost(error.to_string()));
    }

    fn sleep(&mut self) {
        let nap = self.naps.begin();
        let paused = self.out.paused_until(Instant::now());
        let until = [
            self.engine.poll_timeout(),
            self.responder.as_mut().and_then(Responder::poll_timeout),
            self.bind_at,
            paused,
        ];
        let limit = until
            .into_iter()
            .flatten()
            .min()
            .map_or(LONGEST_SLEEP, |at| at.saturating_duration_since(Instant::now()).min(LONGEST_SLEEP));
        let limit = if self.untold { limit.min(RETELL) } else { limit };
        let limit = if nap { limit.min(NAP) } else { limit };
        // Rounded up: waking a little late costs nothing, a little early costs a turn for nothing.
        let limit = limit + Duration::from_micros(if limit.is_zero() { 0 } else { 50 });
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let out = &self.out;
        let fds = out.udp.fds();
        // A missing socket is stood in for by what is watched anyway.
        let [v4, v6] = fds.map(|fd| fd.unwrap_or_else(|| self.wake.as_fd()));
        let mut waiting =
            [self.wake.as_fd(), v4, v6, out.device.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // A nap is ended by commands and relays alone. While paused the device is left out altogether: one that is gone
        // reports errors nobody asked for, at once and again and again.
        let watched = if nap { 1 } else { waiting.len() - usize::from(paused.is_some()) };
        // Interruptions are wake-ups like any other.
        let _ = poll(waiting.get_mut(..watched).unwrap_or_default(), Some(&limit));
        let [woken, v4, v6, _] = waiting.each_ref().map(|fd| !fd.revents().is_empty());
        if woken {
            self.wake.clear();
        }
        for (family, readable) in [(Family::V4, v4), (Family::V6, v6)] {
            if readable {
                self.network.expect(Some(family));
            }
        }
    }
}

/// The DNS address is compared where it stands; a packet too short for it is the engine's to count.
fn is_for_responder(packet: &[u8]) -> bool {
    packet.get(24..40) == Some(&DNS_ADDRESS.octets()[..])
}
