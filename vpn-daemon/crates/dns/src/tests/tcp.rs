//! DNS over TCP (`dns-and-os.md` 1.6), against another instance of a TCP stack, with hand-made time.

use std::collections::VecDeque;

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as StackInstant;
use smoltcp::wire::{HardwareAddress, IpCidr};

use super::{OWN, at, decode, query, responder};
use crate::{BaseServers, DNS_ADDRESS, Responder};

const AAAA: u16 = 28;

/// Programs of this machine and the responder, joined by two queues and a clock.
struct Machine {
    responder: Responder,
    interface: Interface,
    sockets: SocketSet<'static>,
    wire: Wire,
    now: u64,
}

#[derive(Default)]
struct Wire {
    to_client: VecDeque<Vec<u8>>,
    to_server: VecDeque<Vec<u8>>,
    longest: usize,
}

impl Machine {
    fn new() -> Machine {
        let mut wire = Wire::default();
        let mut interface = Interface::new(Config::new(HardwareAddress::Ip), &mut wire, StackInstant::ZERO);
        interface.update_ip_addrs(|addresses| addresses.push(IpCidr::new(OWN.into(), 48)).unwrap());
        Machine { responder: responder().0, interface, sockets: SocketSet::new(Vec::new()), wire, now: 0 }
    }

    fn connect(&mut self, port: u16) -> SocketHandle {
        let buffer = || SocketBuffer::new(vec![0; 70_000]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.connect(self.interface.context(), (DNS_ADDRESS, 53), port).unwrap();
        let handle = self.sockets.add(socket);
        self.run();
        handle
    }

    /// Exchanges packets until both sides are silent.
    fn run(&mut self) {
        loop {
            let time = StackInstant::from_millis(self.now as i64);
            self.interface.poll(time, &mut self.wire, &mut self.sockets);
            let arrived: Vec<_> = self.wire.to_server.drain(..).collect();
            let mut out = |packet: &[u8]| {
                self.wire.longest = packet.len().max(self.wire.longest);
                self.wire.to_client.push_back(packet.to_vec());
            };
            for packet in &arrived {
                self.responder.handle_packet(packet, at(self.now), &mut out);
            }
            if self.responder.poll_timeout().is_some_and(|due| due <= at(self.now)) {
                self.responder.handle_timeout(at(self.now), &mut out);
            }
            if arrived.is_empty() && self.wire.to_client.is_empty() {
                break;
            }
        }
        assert!(self.wire.longest <= 1280);
    }

    /// Lets time pass, in steps of what either side wants.
    fn pass(&mut self, millis: u64) {
        let end = self.now + millis;
        while self.now < end {
            self.now = (self.now + 50).min(end);
            self.run();
        }
    }

    fn send(&mut self, socket: SocketHandle, bytes: &[u8]) {
        self.sockets.get_mut::<Socket<'_>>(socket).send_slice(bytes).unwrap();
        self.run();
    }

    /// Complete answers received so far.
    fn answers(&mut self, socket: SocketHandle) -> Vec<Vec<u8>> {
        let socket = self.sockets.get_mut::<Socket<'_>>(socket);
        let mut answers = Vec::new();
        let mut length = [0; 2];
        while socket.recv_queue() >= 2 {
            socket.peek_slice(&mut length).unwrap();
            let mut answer = vec![0; 2 + usize::from(u16::from_be_bytes(length))];
            if socket.recv_queue() < answer.len() {
                break;
            }
            socket.recv_slice(&mut answer).unwrap();
            answers.push(answer.split_off(2));
        }
        answers
    }

    fn state(&self, socket: SocketHandle) -> State {
        self.sockets.get::<Socket<'_>>(socket).state()
    }

    fn forward_to(&mut self, server: &str) {
        let (servers, _) = BaseServers::select(&[server.parse().unwrap()], OWN, |_| false);
        self.responder.apply_forwarding(Some(servers));
    }
}

impl phy::Device for Wire {
    type RxToken<'t> = Received;
    type TxToken<'t> = Sent<'t>;

    fn receive(&mut self, _: StackInstant) -> Option<(Received, Sent<'_>)> {
        Some((Received(self.to_client.pop_front()?), Sent(&mut self.to_server)))
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Sent<'_>> {
        Some(Sent(&mut self.to_server))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1280;
        capabilities
    }
}

struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

struct Sent<'t>(&'t mut VecDeque<Vec<u8>>);

impl phy::TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        let mut packet = vec![0; length];
        let result = fill(&mut packet);
        self.0.push_back(packet);
        result
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u16).to_be_bytes(), message].concat()
}

#[test]
fn queries_are_answered_in_pieces_pipelined_and_after_a_half_close() {
    let mut machine = Machine::new();
    let socket = machine.connect(40000);
    assert_eq!(machine.state(socket), State::Established);
    for byte in framed(&query("main.ws.me.coder", AAAA)) {
        assert!(machine.answers(socket).is_empty());
        machine.send(socket, &[byte]);
    }
    assert_eq!(decode(&machine.answers(socket)[0]).answers.len(), 1);

    let many: Vec<u8> = (0..50).flat_map(|_| framed(&query("ws.coder", AAAA))).collect();
    machine.send(socket, &many);
    assert_eq!(machine.answers(socket).len(), 50);

    // AXFR is refused (1.13); an answer or a stump is passed over; the client may have closed its half.
    let mut reply = query("ws.coder", AAAA);
    reply[2] |= 0x80;
    let mixed = [framed(&reply), framed(&[]), framed(&[1]), framed(&query("coder", 252))].concat();
    machine.sockets.get_mut::<Socket<'_>>(socket).send_slice(&mixed).unwrap();
    machine.sockets.get_mut::<Socket<'_>>(socket).close();
    machine.run();
    let answers = machine.answers(socket);
    assert_eq!((answers.len(), answers[0][3] & 15), (1, 5));
    assert_eq!(machine.state(socket), State::TimeWait, "closed by both");
    machine.pass(50);
    assert_eq!(machine.responder.poll_timeout(), None, "nothing is left");
    assert_eq!(machine.responder.stats().dropped_queries, 3);
}

#[test]
fn idle_connections_are_closed_and_cost_no_wake_ups() {
    let mut machine = Machine::new();
    let socket = machine.connect(40000);
    machine.send(socket, &framed(&query("ws.coder", AAAA)));
    machine.pass(1000);
    assert!(machine.responder.poll_timeout().unwrap() > at(40_000), "one timer, far away");
    machine.pass(43_000);
    assert_eq!(machine.state(socket), State::Established);
    machine.pass(2_000);
    assert_eq!(machine.state(socket), State::CloseWait);
    // It never closes its half: reset.
    machine.pass(6_000);
    assert_eq!(machine.state(socket), State::Closed);
    assert_eq!(machine.responder.poll_timeout(), None);
}

#[test]
fn seventeenth_connection_ends_the_longest_idle_one() {
    let mut machine = Machine::new();
    let sockets: Vec<_> = (0..16)
        .map(|n| {
            machine.now += 10;
            machine.connect(40000 + n)
        })
        .collect();
    machine.send(sockets[0], &framed(&query("ws.coder", AAAA)));
    machine.now += 10;
    let last = machine.connect(41000);
    let states: Vec<_> = sockets.iter().map(|socket| machine.state(*socket)).collect();
    assert_eq!((states[0], states[1], states[2]), (State::Established, State::Closed, State::Established));
    machine.send(last, &framed(&query("ws.coder", AAAA)));
    assert_eq!(machine.answers(last).len(), 1);
}

#[test]
fn oversized_requests_are_reset() {
    let mut machine = Machine::new();
    let socket = machine.connect(40000);
    let mut largest = query("ws.coder", AAAA);
    largest.resize(4096, 0);
    machine.send(socket, &framed(&largest));
    assert_eq!(machine.answers(socket).len(), 1);
    machine.send(socket, &4097u16.to_be_bytes());
    assert_eq!(machine.state(socket), State::Closed);
}

/// Direct mode: at most 16 outstanding queries, answers out of order, of any size.
#[test]
fn forwarded_queries_are_bounded_and_may_be_large() {
    let mut machine = Machine::new();
    machine.forward_to("192.0.2.1:53");
    let socket = machine.connect(40000);
    let asked: Vec<u8> = (0..20).flat_map(|n| framed(&query(&format!("h{n}.example.com"), AAAA))).collect();
    machine.send(socket, &asked);
    let mut requests: Vec<_> = std::iter::from_fn(|| machine.responder.poll_forward()).collect();
    assert_eq!(requests.len(), 16);
    let last = requests.pop().unwrap();
    let mut reply = last.message.clone();
    reply[2] |= 0x80;
    reply.resize(60_000, 7);
    let mut out = Vec::new();
    machine.responder.handle_forward_answer(last.id, &reply, at(0), &mut |p: &[u8]| out.push(p.to_vec()));
    machine.wire.to_client.extend(out);
    machine.run();
    let answers = machine.answers(socket);
    assert_eq!((answers.len(), answers[0].len(), &answers[0][12..16]), (1, 60_000, b"\x03h15".as_slice()));
    assert!(machine.responder.poll_forward().is_some(), "the seventeenth follows");
    // Nobody answers the others: SERVFAIL for all 19.
    for _ in 0..8 {
        machine.pass(2500);
    }
    let rest = machine.answers(socket);
    assert!(rest.len() == 19 && rest.iter().all(|answer| answer[3] & 15 == 2));
}

/// A client that never reads holds its own answers only, within the bound, and not for ever.
#[test]
fn client_that_never_reads_is_reset() {
    let mut machine = Machine::new();
    machine.forward_to("192.0.2.1:53");
    let socket = machine.connect(40000);
    for n in 0..3 {
        machine.send(socket, &framed(&query(&format!("h{n}.example.com"), AAAA)));
        while let Some(request) = machine.responder.poll_forward() {
            let mut reply = request.message.clone();
            reply[2] |= 0x80;
            reply.resize(60_000, 7);
            let mut out = Vec::new();
            machine.responder.handle_forward_answer(request.id, &reply, at(machine.now), &mut |p: &[u8]| {
                out.push(p.to_vec());
            });
            machine.wire.to_client.extend(out);
            machine.run();
        }
    }
    machine.pass(50_000);
    assert_eq!(machine.state(socket), State::Closed);
    assert_eq!(machine.responder.poll_timeout(), None);
}
