//! Where the engine writes: datagrams into the open group of the UDP sockets or into one batch per relay region, packets
//! straight to the device.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use codervpn_engine::{Route, SendFailure, Sink};
use codervpn_underlay::relays::{RegionId, Relays, Sent};
use codervpn_underlay::{SendBatch, SendError, SendGroup, UdpSockets};

use super::Counters;
use super::device::PacketDevice;

/// Regions with a batch in the making at the same time. One is the rule; beyond, the first is sent early.
const OPEN_BATCHES: usize = 8;
/// Destinations whose failure waits to be told to the engine, which is told after every run of packets. One of more is
/// forgotten: its next datagram fails, too.
const FAILURES: usize = 16;

/// One relay that hardly moves must not hold up the agents behind others: after this its packets are dropped instead.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// So long after a packet of the device went directly, a slow relay holds up nothing: that flow would suffer for it.
const DIRECT_IN_USE: Duration = Duration::from_secs(1);

pub(super) struct Outbox<D> {
    pub(super) device: D,
    pub(super) relays: Relays,
    pub(super) udp: UdpSockets,
    pub(super) counters: Counters,
    datagrams: Datagrams,
    /// Frames committed for relays so far.
    relay_committed: u64,
    /// Regions whose queue asked us to pause reading from the device, and until when we do.
    congested: Vec<(RegionId, Instant)>,
    batches: Vec<(RegionId, SendBatch)>,
    /// The device is gone.
    lost: Option<io::Error>,
}

/// Datagrams on their way to the sockets.
struct Datagrams {
    group: SendGroup,
    failures: Vec<(SocketAddr, SendFailure)>,
    /// Datagrams committed so far; tells whether a packet of the device went directly.
    committed: u64,
    direct_until: Option<Instant>,
}

impl Datagrams {
    fn send(
        failures: &mut Vec<(SocketAddr, SendFailure)>,
        udp: &mut UdpSockets,
        to: SocketAddr,
        segment: usize,
        bytes: &[u8],
    ) {
        let Err(error) = udp.send(to, segment, bytes) else { return };
        let failure = match error {
            SendError::TooBig => SendFailure::TooBig,
            SendError::Blocked => SendFailure::Blocked,
            SendError::Unreachable | SendError::InsideTunnel => SendFailure::Unreachable,
            // Says nothing about the destination.
            SendError::Busy => return,
        };
        if failures.len() < FAILURES && !failures.contains(&(to, failure)) {
            failures.push((to, failure));
        }
    }

    fn room(&mut self, udp: &mut UdpSockets, to: SocketAddr, room: usize) -> Option<&mut [u8]> {
        let Self { group, failures, .. } = self;
        group.room(to, room, |to, segment, bytes| Self::send(failures, udp, to, segment, bytes))
    }

    fn commit(&mut self, udp: &mut UdpSockets, len: usize) {
        self.committed += 1;
        let Self { group, failures, .. } = self;
        group.commit(len, |to, segment, bytes| Self::send(failures, udp, to, segment, bytes));
    }

    fn flush(&mut self, udp: &mut UdpSockets) {
        let Self { group, failures, .. } = self;
        group.flush(|to, segment, bytes| Self::send(failures, udp, to, segment, bytes));
    }
}

impl<D: PacketDevice> Outbox<D> {
    pub(super) fn new(device: D, relays: Relays, udp: UdpSockets) -> Self {
        Self {
            device,
            relays,
            udp,
            counters: Counters::default(),
            datagrams: Datagrams {
                group: SendGroup::new(),
                failures: Vec::with_capacity(FAILURES),
                committed: 0,
                direct_until: None,
            },
            relay_committed: 0,
            congested: Vec::with_capacity(OPEN_BATCHES),
            batches: Vec::with_capacity(OPEN_BATCHES),
            lost: None,
        }
    }

    /// Sends the open group of datagrams.
    pub(super) fn flush_datagrams(&mut self) {
        self.datagrams.flush(&mut self.udp);
    }

    /// Hands every batch to its relay.
    pub(super) fn flush_batches(&mut self) {
        while let Some((region, batch)) = self.batches.pop() {
            self.hand_over(region, batch);
        }
    }

    /// A destination that datagrams could not be sent to.
    pub(super) fn take_failure(&mut self) -> Option<(SocketAddr, SendFailure)> {
        self.datagrams.failures.pop()
    }

    /// Notes whether what `work` does, with a packet of the device, sends datagrams directly.
    pub(super) fn while_from_device<R>(&mut self, now: Instant, work: impl FnOnce(&mut Self) -> R) -> R {
        let before = (self.datagrams.committed, self.relay_committed);
        let result = work(self);
        // What goes both ways is a path in doubt: then the relay counts.
        if self.datagrams.committed != before.0 && self.relay_committed == before.1 {
            self.datagrams.direct_until = Some(now + DIRECT_IN_USE);
        }
        result
    }

    /// Until when packets should wait in the device's queue rather than in ours.
    pub(super) fn paused_until(&mut self, now: Instant) -> Option<Instant> {
        if self.congested.is_empty() {
            return None;
        }
        self.congested.retain(|(_, until)| *until > now);
        if self.datagrams.direct_until.is_some_and(|until| until > now) {
            return None;
        }
        self.congested.iter().map(|(_, until)| *until).max()
    }

    pub(super) fn drained(&mut self, region: RegionId) {
        self.congested.retain(|(other, _)| *other != region);
    }

    pub(super) fn take_loss(&mut self) -> Option<io::Error> {
        self.lost.take()
    }

    /// A packet of ours, not of a peer: an answer of the responder.
    pub(super) fn answer(&mut self, packet: &[u8]) {
        match self.device.room(packet.len()) {
            Some(room) => {
                room.copy_from_slice(packet);
                self.device.commit(packet.len());
            }
            None => self.counters.device_dropped += 1,
        }
    }

    /// Hands what was delivered to the device.
    pub(super) fn flush_device(&mut self) {
        let written = self.device.flush();
        self.counters.device_writes += written.writes;
        self.counters.device_packets += written.packets;
        self.counters.device_dropped += written.dropped;
        if let Some(error) = written.error.filter(is_loss) {
            self.lost.get_or_insert(error);
        }
    }

    /// Where the batch for `region` stands.
    fn open_batch(&mut self, region: RegionId) -> usize {
        if let Some(at) = self.batches.iter().position(|(open, _)| *open == region) {
            return at;
        }
        if self.batches.len() == OPEN_BATCHES {
            let (region, batch) = self.batches.remove(0);
            self.hand_over(region, batch);
        }
        self.batches.push((region, self.relays.batch()));
        self.batches.len() - 1
    }

    fn hand_over(&mut self, region: RegionId, batch: SendBatch) {
        if batch.is_empty() {
            return;
        }
        let frames = batch.frames() as u64;
        self.counters.relay_batches += 1;
        match self.relays.send(region, batch) {
            Sent::Queued => {}
            Sent::Congested => {
                self.drained(region);
                self.congested.push((region, Instant::now() + LONGEST_PAUSE));
            }
            Sent::Dropped | Sent::NoSuchRegion => self.counters.relay_dropped += frames,
        }
    }
}

/// Whether a device that failed like this will never work again (dns-and-os 6.5).
pub(super) fn is_loss(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let gone = [Errno::BADFD, Errno::BADF, Errno::NODEV, Errno::NXIO].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| gone.contains(&code)) || error.kind() == io::ErrorKind::UnexpectedEof
}

impl<D: PacketDevice> Sink for Outbox<D> {
    fn outgoing(&mut self, route: Route, room: usize) -> Option<&mut [u8]> {
        match route {
            Route::Relay { region, peer } => {
                let batch = self.open_batch(region);
                self.batches.get_mut(batch)?.1.room(&peer, room)
            }
            Route::Udp(to) => self.datagrams.room(&mut self.udp, to, room),
        }
    }

    fn send(&mut self, route: Route, len: usize) {
        let region = match route {
            Route::Relay { region, .. } => region,
            Route::Udp(_) => return self.datagrams.commit(&mut self.udp, len),
        };
        let batch = self.open_batch(region);
        let Some((_, open)) = self.batches.get_mut(batch) else { return };
        open.commit(len);
        self.relay_committed += 1;
        if open.is_full() {
            let (region, batch) = self.batches.swap_remove(batch);
            self.hand_over(region, batch);
        }
    }

    fn incoming(&mut self, room: usize) -> Option<&mut [u8]> {
        self.device.room(room)
    }

    fn deliver(&mut self, len: usize) {
        self.device.commit(len);
    }
}
