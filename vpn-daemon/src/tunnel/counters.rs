//! What the data loop counts: every lost batch shows in the number of system calls for a gigabyte, and every dropped
//! packet has a cause.

use codervpn_underlay::RelayStatus;

use super::Snapshot;

/// Counters of the loop itself; those of the engine and the responder stand beside it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    pub device_reads: u64,
    /// System calls that wrote packets, and how many packets these were.
    pub device_writes: u64,
    pub device_packets: u64,
    /// Packets of the device whose headers made no sense.
    pub device_bad: u64,
    /// Packets that the device did not take.
    pub device_dropped: u64,
    /// Batches handed to relays.
    pub relay_batches: u64,
    /// Datagrams in batches that a relay's queue did not take.
    pub relay_dropped: u64,
    /// Lookups dropped because the slow side was busy.
    pub forwards_dropped: u64,
}

impl Snapshot {
    /// The counters that help to find a fault, under the names that people and scripts see.
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let Self { tunnel, udp, dns, engine, .. } = self;
        [
            ("device.reads", tunnel.device_reads),
            ("device.writes", tunnel.device_writes),
            ("device.packets", tunnel.device_packets),
            ("device.bad", tunnel.device_bad),
            ("device.dropped", tunnel.device_dropped),
            ("udp.sends", udp.sends),
            ("udp.sent_datagrams", udp.sent_datagrams),
            ("udp.sent_bytes", udp.sent_bytes),
            ("udp.receives", udp.receives),
            ("udp.empty_receives", udp.empty_receives),
            ("udp.received_datagrams", udp.received_datagrams),
            ("udp.received_bytes", udp.received_bytes),
            ("udp.receive_errors", udp.receive_errors),
            ("udp.truncated", udp.truncated),
            ("udp.waits", udp.waits),
            ("udp.gso_disabled", udp.gso_disabled),
            ("udp.dropped_busy", udp.dropped_busy),
            ("udp.dropped_too_big", udp.dropped_too_big),
            ("udp.dropped_blocked", udp.dropped_blocked),
            ("udp.dropped_unreachable", udp.dropped_unreachable),
            ("udp.dropped_inside_tunnel", udp.dropped_inside_tunnel),
            ("relay.batches", tunnel.relay_batches),
            ("relay.dropped", tunnel.relay_dropped),
            ("engine.dropped_no_room", engine.sink_full),
            ("engine.dropped_device_full", engine.device_full),
            ("engine.dropped_no_route", engine.no_route),
            ("dns.queries_udp", dns.queries_udp),
            ("dns.queries_tcp", dns.queries_tcp),
            ("dns.forwarded", dns.forwarded),
            ("dns.forwards_dropped", tunnel.forwards_dropped),
            ("engine.sent", engine.tun_sent),
            ("engine.delivered", engine.peer_delivered),
            ("engine.filtered", engine.inner_filtered),
            ("engine.unknown_peer", engine.tun_unknown_peer),
            ("engine.unreachable", engine.tun_unreachable),
            ("engine.held_expired", engine.held_expired),
        ]
        .into_iter()
    }
}

/// The counters of all relay connections together, as [`Snapshot::counters`]. Reads and writes are calls for a whole
/// batch of packets.
pub fn of_relays(relays: &[RelayStatus]) -> impl Iterator<Item = (&'static str, u64)> {
    let sum = |one: fn(&RelayStatus) -> u64| relays.iter().map(one).sum();
    [
        ("relay.reads", sum(|relay| relay.counters.reads)),
        ("relay.writes", sum(|relay| relay.counters.writes)),
        ("relay.sent_packets", sum(|relay| relay.counters.sent_packets)),
        ("relay.sent_bytes", sum(|relay| relay.counters.sent_bytes)),
        ("relay.received_packets", sum(|relay| relay.counters.received_packets)),
        ("relay.received_bytes", sum(|relay| relay.counters.received_bytes)),
        ("relay.dropped_full", sum(|relay| relay.counters.dropped_full)),
        ("relay.dropped_stale", sum(|relay| relay.counters.dropped_stale)),
        ("relay.dropped_rate", sum(|relay| relay.counters.dropped_rate)),
        ("relay.dropped_lost", sum(|relay| relay.counters.dropped_lost)),
    ]
    .into_iter()
}
