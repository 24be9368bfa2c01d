//! Where the engine writes: datagrams into one batch per relay region, packets straight to the device.

use std::io;
use std::time::{Duration, Instant};

use codervpn_engine::{Route, Sink};
use codervpn_underlay::SendBatch;
use codervpn_underlay::relays::{RegionId, Relays, Sent};

use super::Counters;
use super::device::PacketDevice;

/// More than any packet or datagram of the engine needs.
const ROOM: usize = 2048;
/// Regions with a batch in the making at the same time. One is the rule; beyond, the first is sent early.
const OPEN_BATCHES: usize = 8;

/// One relay that hardly moves must not hold up the agents behind others: after this its packets are dropped instead.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

pub(super) struct Outbox<D> {
    pub(super) device: D,
    pub(super) relays: Relays,
    pub(super) counters: Counters,
    /// Regions whose queue asked us to pause reading from the device, and until when we do.
    congested: Vec<(RegionId, Instant)>,
    batches: Vec<(RegionId, SendBatch)>,
    sealed: Box<[u8; ROOM]>,
    opened: Box<[u8; ROOM]>,
    /// The device is gone.
    lost: Option<io::Error>,
}

impl<D: PacketDevice> Outbox<D> {
    pub(super) fn new(device: D, relays: Relays) -> Self {
        Self {
            device,
            relays,
            counters: Counters::default(),
            congested: Vec::with_capacity(OPEN_BATCHES),
            batches: Vec::with_capacity(OPEN_BATCHES),
            sealed: Box::new([0; ROOM]),
            opened: Box::new([0; ROOM]),
            lost: None,
        }
    }

    /// Hands every batch to its relay.
    pub(super) fn flush(&mut self) {
        while let Some((region, batch)) = self.batches.pop() {
            self.hand_over(region, batch);
        }
    }

    /// Until when packets should wait in the device's queue rather than in ours.
    pub(super) fn paused_until(&mut self, now: Instant) -> Option<Instant> {
        self.congested.retain(|(_, until)| *until > now);
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
        let sent = self.device.send(packet);
        self.count_write(sent);
    }

    fn hand_over(&mut self, region: RegionId, batch: SendBatch) {
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

    fn count_write(&mut self, sent: io::Result<()>) {
        match sent {
            Ok(()) => self.counters.device_writes += 1,
            Err(error) => {
                self.counters.device_dropped += 1;
                if is_loss(&error) {
                    self.lost.get_or_insert(error);
                }
            }
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
            Route::Relay { .. } => self.sealed.get_mut(..room),
            // There is no socket before there are direct paths.
            Route::Udp(_) => None,
        }
    }

    fn send(&mut self, route: Route, len: usize) {
        let Route::Relay { region, peer } = route else { return };
        let batch = match self.batches.iter_mut().position(|(open, _)| *open == region) {
            Some(at) => at,
            None => {
                if self.batches.len() == OPEN_BATCHES {
                    let (region, batch) = self.batches.remove(0);
                    self.hand_over(region, batch);
                }
                self.batches.push((region, self.relays.batch()));
                self.batches.len() - 1
            }
        };
        let Some((_, open)) = self.batches.get_mut(batch) else { return };
        // The engine never commits more than it was given room for.
        open.push(&peer, self.sealed.get(..len).unwrap_or_default());
        if open.is_full() {
            let (region, batch) = self.batches.swap_remove(batch);
            self.hand_over(region, batch);
        }
    }

    fn incoming(&mut self, room: usize) -> Option<&mut [u8]> {
        self.opened.get_mut(..room)
    }

    fn deliver(&mut self, len: usize) {
        let Some(packet) = self.opened.get(..len) else { return };
        let sent = self.device.send(packet);
        self.count_write(sent);
    }
}
