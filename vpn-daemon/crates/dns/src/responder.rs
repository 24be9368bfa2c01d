//! Decides what happens to a packet for the DNS address (`dns-and-os.md` 1.8): one IPv6 packet in, packets out.
//!
//! Lives in the data thread and runs to completion; the zone is swapped under it from elsewhere. Nothing is logged per
//! packet, what is dropped is counted in [`Stats`].

use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use codervpn_wire::ip::{self, MTU, Tcp, Unreachable, Upper};
use codervpn_wire::node::DNS_ADDRESS;

use crate::answer::{Transport, Verdict, answer};
use crate::forward::{BaseServers, ForwardId, ForwardReply, ForwardRequest, Forwarder};
use crate::packet::{self, Unusable};
use crate::tcp::{ConnectionId, TcpService};
use crate::zone::ZoneHandle;

const PORT: u16 = 53;
/// RFC 4443 wants errors limited; a program that probes ports does not need more than this a second.
const UNREACHABLE_PER_SECOND: u32 = 100;

/// What a responder starts with.
pub struct Config {
    /// The TUN's own address; only it may ask.
    pub own_address: Ipv6Addr,
    pub zone: ZoneHandle,
    /// Random, for TCP sequence numbers.
    pub seed: u64,
    /// Unpredictable ids for forwarded queries.
    pub random_id: Box<dyn FnMut() -> u16 + Send>,
}

/// The DNS server inside the tunnel.
pub struct Responder {
    own_address: Ipv6Addr,
    zone: ZoneHandle,
    tcp: TcpService,
    forwarder: Forwarder<Origin>,
    forwarding: bool,
    unreachable: Allowance,
    stats: Stats,
    message: Vec<u8>,
    /// Where packets of ours are written. None is longer: answers over UDP are cut, and the link's MTU is the same.
    packet: Box<[u8; MTU]>,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub queries_udp: u64,
    pub queries_tcp: u64,
    /// Of them, handed to the machine's own name servers.
    pub forwarded: u64,
    /// Too many queries in work, or replies and fragments of messages.
    pub dropped_queries: u64,
    /// No plain IPv6 packet of a protocol spoken here, or not for the DNS address.
    pub dropped_malformed: u64,
    pub dropped_foreign_source: u64,
    pub dropped_checksum: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Udp { port: u16 },
    Tcp(ConnectionId),
}

impl Responder {
    pub fn new(config: Config, now: Instant) -> Responder {
        Responder {
            own_address: config.own_address,
            zone: config.zone,
            tcp: TcpService::new(config.seed, now),
            forwarder: Forwarder::new(BaseServers::default(), config.random_id),
            forwarding: false,
            unreachable: Allowance { left: UNREACHABLE_PER_SECOND, until: now },
            stats: Stats::default(),
            message: Vec::new(),
            packet: Box::new([0; MTU]),
        }
    }

    /// Makes us the machine's only resolver, with these to ask for foreign names, or (`None`) ends that.
    pub fn apply_forwarding(&mut self, servers: Option<BaseServers>) {
        self.forwarding = servers.is_some();
        self.forwarder.apply_servers(servers.unwrap_or_default());
    }

    /// Takes a packet whose destination is [`crate::DNS_ADDRESS`] and passes the replies to `out`.
    pub fn handle_packet(&mut self, packet: &[u8], now: Instant, out: &mut impl FnMut(&[u8])) {
        self.handle(packet, true, now, out);
    }

    /// The same for a packet that the kernel marked as NEEDS_CSUM: its checksum is not there yet.
    pub fn handle_offloaded_packet(&mut self, packet: &[u8], now: Instant, out: &mut impl FnMut(&[u8])) {
        self.handle(packet, false, now, out);
    }

    /// What to send from a socket of the daemon.
    pub fn poll_forward(&mut self) -> Option<ForwardRequest> {
        self.forwarder.poll_request()
    }

    /// What a server sent back to a request, without the length prefix of TCP.
    pub fn handle_forward_answer(
        &mut self,
        id: ForwardId,
        answer: &[u8],
        now: Instant,
        out: &mut impl FnMut(&[u8]),
    ) -> ForwardReply {
        let reply = self.forwarder.handle_answer(id, answer, now);
        self.relay_replies(now, out);
        reply
    }

    /// A request's socket failed.
    pub fn handle_forward_failure(&mut self, id: ForwardId, now: Instant, out: &mut impl FnMut(&[u8])) {
        self.forwarder.handle_failure(id, now);
        self.relay_replies(now, out);
    }

    /// When [`Responder::handle_timeout`] has something to do; in the past means at once.
    pub fn poll_timeout(&mut self) -> Option<Instant> {
        self.tcp.poll_timeout().into_iter().chain(self.forwarder.poll_timeout()).min()
    }

    pub fn handle_timeout(&mut self, now: Instant, out: &mut impl FnMut(&[u8])) {
        self.forwarder.handle_timeout(now);
        self.tcp.handle_timeout(now, out);
        self.relay_replies(now, out);
    }

    pub fn stats(&self) -> Stats {
        self.stats
    }

    fn handle(&mut self, packet: &[u8], verify: bool, now: Instant, out: &mut dyn FnMut(&[u8])) {
        let (packet, upper) = match packet::parse(packet, self.own_address, verify) {
            Ok(parsed) => parsed,
            Err(Unusable::Malformed) => return self.stats.dropped_malformed += 1,
            Err(Unusable::ForeignSource) => return self.stats.dropped_foreign_source += 1,
            Err(Unusable::BadChecksum) => return self.stats.dropped_checksum += 1,
        };
        match upper {
            Upper::Udp(udp) if udp.destination() == PORT => {
                self.handle_datagram(udp.source(), udp.payload(), now, out);
            }
            Upper::Udp(_) => {
                if self.unreachable.take(now) {
                    let len = ip::write_unreachable(&packet, Unreachable::Port, DNS_ADDRESS, self.packet.as_mut());
                    self.emit(len, out);
                }
            }
            Upper::Tcp(tcp) => self.handle_segment(packet.bytes(), &tcp, now, out),
            _ => {
                let len = ip::write_echo_reply(&packet, self.packet.as_mut());
                self.emit(len, out);
            }
        }
    }

    /// Passes on the first `len` bytes of `packet`, if anything was written there.
    fn emit(&self, len: Option<usize>, out: &mut dyn FnMut(&[u8])) {
        if let Some(packet) = len.and_then(|len| self.packet.get(..len)) {
            out(packet);
        }
    }

    fn emit_datagram(&mut self, port: u16, message: &[u8], out: &mut dyn FnMut(&[u8])) {
        let len = ip::write_udp((DNS_ADDRESS, PORT), (self.own_address, port), message, self.packet.as_mut());
        self.emit(len, out);
    }

    fn handle_datagram(&mut self, port: u16, query: &[u8], now: Instant, out: &mut dyn FnMut(&[u8])) {
        self.stats.queries_udp += 1;
        match answer(&self.zone.load(), query, Transport::Udp, self.forwarding, &mut self.message) {
            Verdict::Answer => {
                let message = std::mem::take(&mut self.message);
                self.emit_datagram(port, &message, out);
                self.message = message;
            }
            Verdict::Drop => self.stats.dropped_queries += 1,
            Verdict::Forward => {
                if self.forwarder.handle_query(Origin::Udp { port }, query, Transport::Udp, now) {
                    self.stats.forwarded += 1;
                } else {
                    self.stats.dropped_queries += 1;
                }
                self.relay_replies(now, out);
            }
        }
    }

    fn handle_segment(&mut self, packet: &[u8], segment: &Tcp<'_>, now: Instant, out: &mut dyn FnMut(&[u8])) {
        self.tcp.handle_segment(packet, segment, now, out);
        self.answer_tcp(now);
        self.relay_replies(now, out);
        self.tcp.flush(now, out);
    }

    /// Works off the requests that connections hold. Without room for another lookup they stay unread.
    fn answer_tcp(&mut self, now: Instant) {
        while !self.forwarding || self.forwarder.has_room() {
            let Some((id, query)) = self.tcp.next_query() else { return };
            self.stats.queries_tcp += 1;
            match answer(&self.zone.load(), query, Transport::Tcp, self.forwarding, &mut self.message) {
                Verdict::Answer => self.tcp.answer(id, Some(&self.message), now),
                Verdict::Drop => {
                    self.stats.dropped_queries += 1;
                    self.tcp.answer(id, None, now);
                }
                Verdict::Forward => {
                    if self.forwarder.handle_query(Origin::Tcp(id), query, Transport::Tcp, now) {
                        self.stats.forwarded += 1;
                    } else {
                        self.stats.dropped_queries += 1;
                        self.tcp.answer(id, None, now);
                    }
                }
            }
        }
    }

    fn relay_replies(&mut self, now: Instant, out: &mut dyn FnMut(&[u8])) {
        let mut over_tcp = false;
        loop {
            let mut finished = false;
            while let Some((origin, reply)) = self.forwarder.poll_reply() {
                finished = true;
                match origin {
                    Origin::Udp { port } => {
                        self.emit_datagram(port, &reply, out);
                    }
                    Origin::Tcp(id) => {
                        self.tcp.answer(id, Some(&reply), now);
                        over_tcp = true;
                    }
                }
            }
            if !finished {
                break;
            }
            // Room was made, and requests may have waited for it.
            self.answer_tcp(now);
        }
        if over_tcp {
            self.tcp.flush(now, out);
        }
    }
}

/// So many a second.
struct Allowance {
    left: u32,
    until: Instant,
}

impl Allowance {
    fn take(&mut self, now: Instant) -> bool {
        if now >= self.until {
            *self = Allowance { left: UNREACHABLE_PER_SECOND, until: now + Duration::from_secs(1) };
        }
        let granted = self.left > 0;
        self.left -= u32::from(granted);
        granted
    }
}
