//! Which packets of peers may reach this machine.
//!
//! By default only what answers us: replies within conversations that we started, ICMPv6 errors about packets that we
//! sent, and echo requests. An agent cannot open a connection to the desktop (T-30). Whose address a packet may carry is
//! checked before, by the peer; what the conversations are is remembered by `flows.rs`.

use std::net::Ipv6Addr;
use std::time::Instant;

use codervpn_wire::ip::{self, Ipv6Packet, Upper};

use crate::flows::{Flow, Flows};

/// What peers may open towards us.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Inbound {
    /// Nothing but echo requests: for a desktop.
    #[default]
    Replies,
    /// Anything: for a workspace agent, and for users who want it.
    All,
}

/// Fragmented packets whose first fragment was admitted; a reply of several fragments comes in one go.
const FRAGMENTED: usize = 16;

pub(crate) struct Filter {
    inbound: Inbound,
    flows: Flows,
    fragmented: [Option<(Ipv6Addr, u32)>; FRAGMENTED],
    next_fragmented: usize,
}

impl Filter {
    pub(crate) fn new(inbound: Inbound, seed: u64, now: Instant) -> Self {
        Self { inbound, flows: Flows::new(seed, now), fragmented: [None; FRAGMENTED], next_fragmented: 0 }
    }

    pub(crate) fn set_inbound(&mut self, inbound: Inbound) {
        self.inbound = inbound;
    }

    /// A packet of ours leaves.
    pub(crate) fn outgoing(&mut self, packet: &Ipv6Packet<'_>, now: Instant) {
        if self.inbound == Inbound::All {
            return;
        }
        let remote = packet.destination();
        let flow = match packet.upper() {
            Some(Upper::Tcp(tcp)) => flow(ip::TCP, remote, tcp.source(), tcp.destination()),
            Some(Upper::Udp(udp)) => flow(ip::UDP, remote, udp.source(), udp.destination()),
            Some(Upper::Icmpv6(icmp)) if icmp.kind() == ip::ICMPV6_ECHO_REQUEST => {
                flow(ip::ICMPV6, remote, icmp.echo_id(), icmp.echo_id())
            }
            Some(Upper::Fragment { .. }) => match FirstFragment::parse(packet) {
                Some(first) => flow(first.protocol, remote, first.source, first.destination),
                None => return,
            },
            Some(Upper::Other { protocol, .. }) => flow(protocol, remote, 0, 0),
            _ => return,
        };
        self.flows.sent(flow, now);
    }

    /// Whether a packet of the peer that owns `addresses` may come in.
    pub(crate) fn admits(&mut self, packet: &Ipv6Packet<'_>, addresses: &[Ipv6Addr], now: Instant) -> bool {
        if self.inbound == Inbound::All {
            return true;
        }
        let remote = packet.source();
        match packet.upper() {
            Some(Upper::Tcp(tcp)) => self.flows.admits(&flow(ip::TCP, remote, tcp.destination(), tcp.source()), now),
            Some(Upper::Udp(udp)) => self.flows.admits(&flow(ip::UDP, remote, udp.destination(), udp.source()), now),
            Some(Upper::Icmpv6(icmp)) => match icmp.kind() {
                ip::ICMPV6_ECHO_REQUEST => true,
                ip::ICMPV6_ECHO_REPLY => {
                    self.flows.admits(&flow(ip::ICMPV6, remote, icmp.echo_id(), icmp.echo_id()), now)
                }
                _ => icmp.quoted().is_some_and(|quoted| {
                    let ours = quoted.source == packet.destination() && addresses.contains(&quoted.destination);
                    let (local, far) = match quoted.next_header {
                        ip::ICMPV6 => {
                            let id = quoted.payload.get(4..6).map_or(0, |id| u16::from_be_bytes([id[0], id[1]]));
                            (id, id)
                        }
                        ip::TCP | ip::UDP => quoted.ports.unwrap_or((0, 0)),
                        _ => (0, 0),
                    };
                    ours && self.flows.admits(&flow(quoted.next_header, quoted.destination, local, far), now)
                }),
            },
            Some(Upper::Fragment { .. }) => self.admits_fragment(packet, now),
            Some(Upper::Other { protocol, .. }) => self.flows.admits(&flow(protocol, remote, 0, 0), now),
            None => false,
        }
    }

    /// The first fragment is judged by its ports, the others follow it.
    fn admits_fragment(&mut self, packet: &Ipv6Packet<'_>, now: Instant) -> bool {
        let remote = packet.source();
        let Some(id) = fragment_id(packet) else { return false };
        if let Some(first) = FirstFragment::parse(packet) {
            let admitted = self.flows.admits(&flow(first.protocol, remote, first.destination, first.source), now);
            if admitted && let Some(entry) = self.fragmented.get_mut(self.next_fragmented) {
                *entry = Some((remote, id));
                self.next_fragmented = (self.next_fragmented + 1) % FRAGMENTED;
            }
            return admitted;
        }
        self.fragmented.contains(&Some((remote, id)))
    }
}

fn flow(protocol: u8, remote: Ipv6Addr, local_port: u16, remote_port: u16) -> Flow {
    Flow { remote: remote.into(), protocol, local_port, remote_port }
}

const FRAGMENT_HEADER: u8 = 44;

/// The fragment header directly behind the fixed one; other orders are not sent by anybody and not admitted.
fn fragment_id(packet: &Ipv6Packet<'_>) -> Option<u32> {
    if packet.next_header() != FRAGMENT_HEADER {
        return None;
    }
    packet.payload().get(4..8)?.try_into().ok().map(u32::from_be_bytes)
}

struct FirstFragment {
    protocol: u8,
    source: u16,
    destination: u16,
}

impl FirstFragment {
    fn parse(packet: &Ipv6Packet<'_>) -> Option<Self> {
        fragment_id(packet)?;
        let [protocol, _, high, low, _, _, _, _, a, b, c, d, rest @ ..] = packet.payload() else { return None };
        let offset = u16::from_be_bytes([*high, *low]) & !7;
        // A first fragment that ends within the ports' header would let a later one fill it in.
        let whole = match *protocol {
            ip::TCP => rest.len() >= 16,
            ip::UDP => rest.len() >= 4,
            _ => false,
        };
        (offset == 0 && whole).then(|| Self {
            protocol: *protocol,
            source: u16::from_be_bytes([*a, *b]),
            destination: u16::from_be_bytes([*c, *d]),
        })
    }
}
