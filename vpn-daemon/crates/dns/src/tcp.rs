//! Decides how DNS over TCP is served inside the tunnel: connections of a user-space stack, frames in, frames out.
//!
//! A socket is made when a SYN arrives and freed when its connection ends, so that an idle daemon holds no buffers.
//! The clients are programs of this machine, but any of them: connections, buffers, queries and time are bounded.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use codervpn_wire::ip::{MTU, Tcp};
use codervpn_wire::node::DNS_ADDRESS;
use smoltcp::iface::{Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, Checksum, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as StackInstant;
use smoltcp::wire::{HardwareAddress, IpCidr};

const PORT: u16 = 53;
/// As `dns-and-os.md` 1.6. Stub resolvers keep one each, and only after a truncated answer.
const MAX_CONNECTIONS: usize = 16;
const MAX_OUTSTANDING: usize = 16;
const MAX_REQUEST: usize = 4096;
const IDLE: Duration = Duration::from_secs(45);
/// For a client that does not answer our FIN.
const CLOSING: Duration = Duration::from_secs(5);
/// A whole request with its length has to fit.
const RECEIVE_BUFFER: usize = MAX_REQUEST + 512;
const SEND_BUFFER: usize = 4096;
/// Answers that wait for a slow reader, over all connections: sixteen of the largest possible.
const MAX_WAITING: usize = 1 << 20;

/// Names a connection; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConnectionId(u64);

pub(crate) struct TcpService {
    interface: Interface,
    sockets: SocketSet<'static>,
    connections: Vec<Connection>,
    next_id: u64,
    epoch: Instant,
    request: Vec<u8>,
}

struct Connection {
    id: ConnectionId,
    /// The client's port, which names the connection: all other addresses and ports are fixed.
    port: u16,
    handle: SocketHandle,
    /// Of the last data in either direction.
    active: Instant,
    closing: bool,
    /// Queries that were handed out and not answered yet.
    outstanding: usize,
    /// Answers that the socket had no room for.
    waiting: VecDeque<u8>,
}

impl TcpService {
    /// `seed` keeps sequence numbers apart between runs.
    pub(crate) fn new(seed: u64, now: Instant) -> TcpService {
        let mut config = smoltcp::iface::Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut unconnected = Device { incoming: None, out: &mut |_| {} };
        let mut interface = Interface::new(config, &mut unconnected, StackInstant::ZERO);
        interface.update_ip_addrs(|addresses| {
            // Clients are inside the prefix, hence reachable without a route.
            addresses.push(IpCidr::new(DNS_ADDRESS.into(), 48)).expect("an interface holds at least one address");
        });
        TcpService {
            interface,
            sockets: SocketSet::new(Vec::new()),
            connections: Vec::new(),
            next_id: 0,
            epoch: now,
            request: vec![0; MAX_REQUEST],
        }
    }

    /// Takes a segment and the packet around it; to be followed by [`TcpService::next_query`] until `None` and [`TcpService::flush`].
    pub(crate) fn handle_segment(
        &mut self,
        packet: &[u8],
        segment: &Tcp<'_>,
        now: Instant,
        out: &mut dyn FnMut(&[u8]),
    ) {
        if segment.destination() == PORT && segment.syn() && !segment.ack() && !segment.rst() {
            self.accept(segment.source(), now, out);
        }
        if segment.destination() == PORT
            && !segment.payload().is_empty()
            && let Some(connection) = self.connections.iter_mut().find(|c| c.port == segment.source())
        {
            connection.active = now;
        }
        let at = self.stack_time(now);
        let mut device = Device { incoming: Some(packet), out };
        self.interface.poll_ingress_single(at, &mut device, &mut self.sockets);
        // A SYN the stack did not like leaves its socket listening.
        self.reap(|state| matches!(state, State::Closed | State::Listen));
    }

    /// The next whole request, from connections that may have another one outstanding.
    pub(crate) fn next_query(&mut self) -> Option<(ConnectionId, &[u8])> {
        let mut found = None;
        for connection in &mut self.connections {
            let socket = self.sockets.get_mut::<Socket<'_>>(connection.handle);
            // One that does not read its answers gets no more of them.
            if connection.outstanding >= MAX_OUTSTANDING || !connection.waiting.is_empty() {
                continue;
            }
            let mut prefix = [0; 2];
            if socket.recv_queue() < 2 || socket.peek_slice(&mut prefix) != Ok(2) {
                continue;
            }
            let length = usize::from(u16::from_be_bytes(prefix));
            let Some(request) = self.request.get_mut(..length) else {
                socket.abort();
                continue;
            };
            if socket.recv_queue() >= 2 + length {
                let whole = socket.recv_slice(&mut prefix) == Ok(2) && socket.recv_slice(request) == Ok(length);
                if whole || length == 0 {
                    connection.outstanding += 1;
                    found = Some((connection.id, length));
                    break;
                }
            }
        }
        let (id, length) = found?;
        Some((id, self.request.get(..length)?))
    }

    /// Queues the answer to one query of a connection, `None` if it gets none.
    pub(crate) fn answer(&mut self, id: ConnectionId, answer: Option<&[u8]>, now: Instant) {
        let waiting: usize = self.connections.iter().map(|c| c.waiting.len()).sum();
        let Some(connection) = self.connections.iter_mut().find(|c| c.id == id) else { return };
        connection.outstanding = connection.outstanding.saturating_sub(1);
        let Some(answer) = answer else { return };
        let Ok(length) = u16::try_from(answer.len()) else { return };
        if waiting + answer.len() > MAX_WAITING {
            self.sockets.get_mut::<Socket<'_>>(connection.handle).abort();
            return;
        }
        connection.active = now;
        connection.waiting.extend(length.to_be_bytes());
        connection.waiting.extend(answer);
        connection.fill(self.sockets.get_mut(connection.handle));
    }

    /// Sends what there is to send and ends what has ended.
    pub(crate) fn flush(&mut self, now: Instant, out: &mut dyn FnMut(&[u8])) {
        if self.connections.is_empty() {
            return;
        }
        for connection in &mut self.connections {
            let socket = self.sockets.get_mut::<Socket<'_>>(connection.handle);
            connection.fill(socket);
            // The client has said everything and heard everything.
            let done = connection.outstanding == 0 && connection.waiting.is_empty() && socket.recv_queue() < 2;
            if socket.state() == State::CloseWait && done {
                socket.close();
            }
        }
        self.poll(now, out);
        self.reap(|state| state == State::Closed);
    }

    pub(crate) fn poll_timeout(&mut self) -> Option<Instant> {
        let idle = self.connections.iter().map(Connection::expires).min()?;
        // The stack answers with the moment, or with any past one for "at once".
        let stack = self.interface.poll_at(StackInstant::ZERO, &self.sockets);
        let stack = stack.map(|at| self.epoch + Duration::from_micros(at.total_micros().max(0) as u64));
        Some(stack.map_or(idle, |at| at.min(idle)))
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant, out: &mut dyn FnMut(&[u8])) {
        for connection in self.connections.iter_mut().filter(|c| c.expires() <= now) {
            let socket = self.sockets.get_mut::<Socket<'_>>(connection.handle);
            if connection.closing || !connection.waiting.is_empty() || connection.outstanding > 0 {
                socket.abort();
            } else {
                connection.closing = true;
                socket.close();
            }
        }
        self.flush(now, out);
    }

    /// Makes a socket for a SYN; if all are taken, the one that has been idle for longest ends.
    fn accept(&mut self, port: u16, now: Instant, out: &mut dyn FnMut(&[u8])) {
        if let Some(at) = self.connections.iter().position(|c| c.port == port) {
            let state = self.sockets.get::<Socket<'_>>(self.connections[at].handle).state();
            if state != State::TimeWait {
                return;
            }
            self.sockets.remove(self.connections.swap_remove(at).handle);
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            let idle = self.connections.iter().filter(|c| c.outstanding == 0 && c.waiting.is_empty());
            let Some(oldest) = idle.min_by_key(|c| c.active) else { return };
            self.sockets.get_mut::<Socket<'_>>(oldest.handle).abort();
            self.poll(now, out);
            self.reap(|state| state == State::Closed);
        }
        let mut socket =
            Socket::new(SocketBuffer::new(vec![0; RECEIVE_BUFFER]), SocketBuffer::new(vec![0; SEND_BUFFER]));
        socket.set_nagle_enabled(false);
        // A client with Nagle's algorithm holds the end of a request until the beginning is acknowledged.
        socket.set_ack_delay(None);
        socket.set_timeout(Some(smoltcp::time::Duration::from_micros(IDLE.as_micros() as u64)));
        if socket.listen((DNS_ADDRESS, PORT)).is_ok() {
            let (id, handle) = (ConnectionId(self.next_id), self.sockets.add(socket));
            self.next_id += 1;
            self.connections.push(Connection {
                id,
                port,
                handle,
                active: now,
                closing: false,
                outstanding: 0,
                waiting: VecDeque::new(),
            });
        }
    }

    fn poll(&mut self, now: Instant, out: &mut dyn FnMut(&[u8])) {
        let at = self.stack_time(now);
        self.interface.poll(at, &mut Device { incoming: None, out }, &mut self.sockets);
    }

    fn reap(&mut self, ended: impl Fn(State) -> bool) {
        self.connections.retain(|connection| {
            // A closed socket that still has to say so keeps its peer's address.
            let socket = self.sockets.get::<Socket<'_>>(connection.handle);
            let gone = ended(socket.state()) && (socket.state() == State::Listen || socket.remote_endpoint().is_none());
            if gone {
                self.sockets.remove(connection.handle);
            }
            !gone
        });
    }

    fn stack_time(&self, now: Instant) -> StackInstant {
        let elapsed = now.saturating_duration_since(self.epoch).as_micros();
        StackInstant::from_micros(i64::try_from(elapsed).unwrap_or(i64::MAX))
    }
}

impl Connection {
    /// Moves what waits into the socket, as far as it has room.
    fn fill(&mut self, socket: &mut Socket<'_>) {
        while socket.can_send() {
            match socket.send_slice(self.waiting.as_slices().0) {
                Ok(sent) if sent > 0 => drop(self.waiting.drain(..sent)),
                _ => break,
            }
        }
    }

    fn expires(&self) -> Instant {
        self.active + if self.closing { IDLE + CLOSING } else { IDLE }
    }
}

/// The stack's view of the tunnel: at most one packet to take, any number to give.
struct Device<'d> {
    incoming: Option<&'d [u8]>,
    out: &'d mut dyn FnMut(&[u8]),
}

impl phy::Device for Device<'_> {
    type RxToken<'t>
        = Incoming<'t>
    where
        Self: 't;
    type TxToken<'t>
        = Outgoing<'t>
    where
        Self: 't;

    fn receive(&mut self, _: StackInstant) -> Option<(Incoming<'_>, Outgoing<'_>)> {
        Some((Incoming(self.incoming.take()?), Outgoing(self.out)))
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Outgoing<'_>> {
        Some(Outgoing(self.out))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        // What comes was checked before, unless its checksum was left for us to complete.
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}

struct Incoming<'t>(&'t [u8]);

impl phy::RxToken for Incoming<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(self.0)
    }
}

struct Outgoing<'t>(&'t mut dyn FnMut(&[u8]));

impl phy::TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        let mut packet = vec![0; length];
        let result = fill(&mut packet);
        (self.0)(&packet);
        result
    }
}
