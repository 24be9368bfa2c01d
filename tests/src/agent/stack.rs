//! The network stack of an agent, on a thread of its own: packets of the data loop in, connections of the services out.
//!
//! Sockets are made when a SYN arrives for a served port and freed when their connection ends, so that an agent nobody
//! talks to holds no buffers. Other ports are refused by the stack itself.

use std::collections::VecDeque;
use std::io;
use std::net::Ipv6Addr;
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::{Duration as StackDuration, Instant as StackInstant};
use smoltcp::wire::{HardwareAddress, IpCidr};

use super::device::Port;
use super::services::{Service, kind_of_port};

/// MTU of the tunnel.
const MTU: usize = 1280;
/// Connections at once; more are refused.
const MAX_CONNECTIONS: usize = 128;
/// Data on the way to us.
const RECEIVE_BUFFER: usize = 1 << 20;
/// Data on the way from us: less than the 512 packets that a relay queues for a client, since the stack has no
/// congestion control and would not slow down when the relay drops.
const SEND_BUFFER: usize = 400 << 10;
/// A connection whose other end is silent for so long is gone.
const SILENCE: StackDuration = StackDuration::from_secs(120);
/// Longest sleep; nothing depends on it.
const LONGEST_SLEEP: StackDuration = StackDuration::from_secs(10);

pub(super) struct Stack {
    port: Port,
    interface: Interface,
    sockets: SocketSet<'static>,
    connections: Vec<Connection>,
    epoch: Instant,
    name: String,
    scratch: Vec<u8>,
}

struct Connection {
    handle: SocketHandle,
    service: Service,
}

impl Stack {
    /// Runs until the data loop is gone.
    pub(super) fn start(port: Port, addresses: &[Ipv6Addr], name: &str, seed: u64) -> io::Result<JoinHandle<()>> {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut interface = Interface::new(config, &mut Idle, StackInstant::ZERO);
        interface.update_ip_addrs(|own| {
            // Peers have any address of the prefix: no route is needed with a prefix of no bits.
            for address in addresses.iter().take(own.capacity()) {
                let _ = own.push(IpCidr::new((*address).into(), 0));
            }
        });
        let stack = Self {
            port,
            interface,
            sockets: SocketSet::new(Vec::new()),
            connections: Vec::new(),
            epoch: Instant::now(),
            name: name.to_owned(),
            scratch: vec![0; 64 * 1024],
        };
        std::thread::Builder::new().name("agent-stack".into()).spawn(move || stack.run())
    }

    fn run(mut self) {
        while let Some(packets) = self.port.receive() {
            for packet in &packets {
                if let Some(port) = syn_port(packet) {
                    self.listen(port);
                }
            }
            let now = self.now();
            let mut device = Device { port: &self.port, incoming: packets };
            self.interface.poll(now, &mut device, &mut self.sockets);
            if self.serve() {
                // What the services wrote goes out at once.
                let mut device = Device { port: &self.port, incoming: VecDeque::new() };
                self.interface.poll(now, &mut device, &mut self.sockets);
            }
            self.reap();
            self.sleep();
        }
    }

    fn listen(&mut self, port: u16) {
        let Some(kind) = kind_of_port(port) else { return };
        if self.connections.len() >= MAX_CONNECTIONS {
            return;
        }
        let mut socket =
            Socket::new(SocketBuffer::new(vec![0; RECEIVE_BUFFER]), SocketBuffer::new(vec![0; SEND_BUFFER]));
        socket.set_nagle_enabled(false);
        socket.set_timeout(Some(SILENCE));
        if socket.listen(port).is_ok() {
            let handle = self.sockets.add(socket);
            self.connections.push(Connection { handle, service: Service::new(kind) });
        }
    }

    /// True when something was read or written.
    fn serve(&mut self) -> bool {
        let mut any = false;
        for connection in &mut self.connections {
            let socket = self.sockets.get_mut::<Socket<'_>>(connection.handle);
            while connection.service.step(socket, &self.name, &mut self.scratch) {
                any = true;
            }
        }
        any
    }

    /// Frees what has ended. A SYN the stack did not like, or one that came twice, leaves its socket listening.
    fn reap(&mut self) {
        let sockets = &mut self.sockets;
        self.connections.retain(|connection| {
            let state = sockets.get::<Socket<'_>>(connection.handle).state();
            let over = matches!(state, State::Closed | State::Listen | State::TimeWait);
            if over {
                sockets.remove(connection.handle);
            }
            !over
        });
    }

    fn sleep(&mut self) {
        let now = self.now();
        let delay = self.interface.poll_delay(now, &self.sockets).unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP);
        // With data at hand and no room the signal tells when there is some.
        let delay = if delay == StackDuration::ZERO && !self.port.has_room() { LONGEST_SLEEP } else { delay };
        let micros = delay.total_micros();
        let limit = Timespec { tv_sec: (micros / 1_000_000) as i64, tv_nsec: ((micros % 1_000_000) * 1000) as i64 };
        let mut waiting = [PollFd::from_borrowed_fd(self.port.signal(), PollFlags::IN)];
        // Interruptions are wake-ups like any other.
        let _ = poll(&mut waiting, Some(&limit));
    }

    fn now(&self) -> StackInstant {
        StackInstant::from_micros(i64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(i64::MAX))
    }
}

/// The destination port, if the packet opens a TCP connection.
fn syn_port(packet: &[u8]) -> Option<u16> {
    const TCP: u8 = 6;
    const FLAGS: usize = 40 + 13;
    let flags = packet.get(FLAGS)?;
    let is_syn = packet.get(6) == Some(&TCP) && flags & 0x12 == 0x02;
    let port = packet.get(42..44)?.first_chunk::<2>()?;
    is_syn.then(|| u16::from_be_bytes(*port))
}

struct Device<'a> {
    port: &'a Port,
    incoming: VecDeque<Vec<u8>>,
}

struct Received<'a> {
    port: &'a Port,
    packet: Vec<u8>,
}

struct Outgoing<'a>(&'a Port);

impl phy::Device for Device<'_> {
    type RxToken<'b>
        = Received<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = Outgoing<'b>
    where
        Self: 'b;

    fn receive(&mut self, _: StackInstant) -> Option<(Self::RxToken<'_>, Self::TxToken<'_>)> {
        let packet = self.incoming.pop_front()?;
        Some((Received { port: self.port, packet }, Outgoing(self.port)))
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Self::TxToken<'_>> {
        self.port.has_room().then_some(Outgoing(self.port))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities()
    }
}

impl phy::RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        let result = f(&self.packet);
        self.port.recycle(self.packet);
        result
    }
}

impl phy::TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        self.0.send(length, f)
    }
}

fn capabilities() -> DeviceCapabilities {
    let mut capabilities = DeviceCapabilities::default();
    capabilities.medium = Medium::Ip;
    capabilities.max_transmission_unit = MTU;
    capabilities
}

/// For the interface's making, which wants to know capabilities only.
struct Idle;

impl phy::Device for Idle {
    type RxToken<'b> = Never;
    type TxToken<'b> = Never;

    fn receive(&mut self, _: StackInstant) -> Option<(Never, Never)> {
        None
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Never> {
        None
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities()
    }
}

enum Never {}

impl phy::RxToken for Never {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, _: F) -> R {
        match self {}
    }
}

impl phy::TxToken for Never {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, _: usize, _: F) -> R {
        match self {}
    }
}
