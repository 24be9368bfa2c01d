//! The UDP sockets that carry WireGuard, path messages and STUN: one for IPv4 and one for IPv6, on the wildcard address,
//! so that routing alone decides where a datagram leaves.
//!
//! Decides how few system calls a batch costs (fast path 4.3, 4.4): a run of equal datagrams to one destination leaves
//! in one call ([`SendGroup`], [`UdpSockets::send`]), and one call brings either one long train of datagrams or up to 32
//! short ones ([`UdpSockets::receive`]). Nothing here blocks but a send that finds the socket's buffer full, and that
//! for a bounded time. Datagrams are never fragmented: one that does not fit the path is reported as
//! [`SendError::TooBig`].

mod bind;
mod group;
mod receive;

#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, SocketAddr};
#[cfg(unix)]
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use codervpn_wire::node::{Family, is_tunnel_address};
use quinn_udp::{Transmit, UdpSockRef, UdpSocketState};

pub use group::SendGroup;
pub use receive::{Datagrams, ReceiveBuffer};

/// Datagrams of one send. The kernel's limit until 6.8, and more does not gain anything: 49 full ones fill a send.
pub const MAX_SEGMENTS: usize = 64;
/// Bytes of one send. An IPv4 datagram carries 65,507.
pub const MAX_SEND: usize = 65_500;
/// How long a send waits for room in the socket's buffer before its datagrams are dropped. About what a link of
/// 1 Gbit/s needs for four sends; on slower links the loss tells the senders inside to slow down.
const LONGEST_WAIT: Duration = Duration::from_millis(2);

/// The ports that the sockets are bound to; `None`: no socket of this family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ports {
    pub v4: Option<u16>,
    pub v6: Option<u16>,
}

/// There is no UDP at all on this machine at the moment.
#[derive(Debug, thiserror::Error)]
#[error("cannot open a UDP socket: IPv4: {v4}; IPv6: {v6}")]
pub struct BindError {
    pub v4: io::Error,
    pub v6: io::Error,
}

/// Why datagrams were not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The path to this destination does not carry datagrams of this size.
    #[error("the path does not carry datagrams of this size")]
    TooBig,
    /// A local firewall.
    #[error("not permitted by this machine's firewall")]
    Blocked,
    /// No route, no network, or no socket of this family.
    #[error("there is no way to this address")]
    Unreachable,
    /// The destination lies inside the tunnel (T-44).
    #[error("the address lies inside the tunnel")]
    InsideTunnel,
    /// The socket's buffer stayed full. Says nothing about the destination.
    #[error("the network does not keep up")]
    Busy,
}

/// What went through the sockets since they were first bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UdpCounters {
    /// System calls that sent something.
    pub sends: u64,
    pub sent_datagrams: u64,
    pub sent_bytes: u64,
    /// System calls that brought something.
    pub receives: u64,
    /// System calls that found nothing.
    pub empty_receives: u64,
    pub received_datagrams: u64,
    pub received_bytes: u64,
    pub receive_errors: u64,
    /// Messages dropped because they did not fit a slot: their end, and so their number, is unknown.
    pub truncated: u64,
    /// Sends that had to wait for room.
    pub waits: u64,
    /// Sockets that turned out not to send several datagrams a call.
    pub gso_disabled: u64,
    /// Datagrams dropped, by cause.
    pub dropped_busy: u64,
    pub dropped_too_big: u64,
    pub dropped_blocked: u64,
    pub dropped_unreachable: u64,
    pub dropped_inside_tunnel: u64,
}

/// Both sockets. Owned by the data thread.
#[derive(Debug)]
pub struct UdpSockets {
    v4: Option<Socket>,
    v6: Option<Socket>,
    counters: UdpCounters,
}

#[derive(Debug)]
struct Socket {
    inner: socket2::Socket,
    state: UdpSocketState,
    port: u16,
    /// Several datagrams can be sent in one call.
    gso: bool,
    /// The last message was a long train: the next probably is, too.
    trains: bool,
}

impl UdpSockets {
    /// Binds both families, to `port` if it is free and not 0, both to the same port if that can be. One family is
    /// enough.
    pub fn bind(port: u16) -> Result<Self, BindError> {
        let (v4, v6) = bind::both(port, port)?;
        Ok(Self { v4, v6, counters: UdpCounters::default() })
    }

    /// None at all, until `rebind` succeeds.
    pub fn unbound() -> Self {
        Self { v4: None, v6: None, counters: UdpCounters::default() }
    }

    /// Replaces both sockets, preferring their present ports. What waits in the old ones is lost. After a failure there
    /// are none, every send is [`SendError::Unreachable`], and a later call may succeed.
    pub fn rebind(&mut self) -> Result<(), BindError> {
        let Ports { v4, v6 } = self.ports();
        let (v4, v6) = (v4.or(v6).unwrap_or(0), v6.or(v4).unwrap_or(0));
        // A port is free again once its socket is closed.
        self.v4 = None;
        self.v6 = None;
        (self.v4, self.v6) = bind::both(v4, v6)?;
        Ok(())
    }

    pub fn ports(&self) -> Ports {
        let port = |socket: &Option<Socket>| socket.as_ref().map(|socket| socket.port);
        Ports { v4: port(&self.v4), v6: port(&self.v6) }
    }

    pub fn counters(&self) -> &UdpCounters {
        &self.counters
    }

    /// The descriptors to wait for: each is readable when `receive` has something for its family.
    #[cfg(unix)]
    pub fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.v4.as_ref(), self.v6.as_ref()].map(|socket| socket.map(|socket| socket.inner.as_fd()))
    }

    /// Sends `bytes` as datagrams of `segment` bytes, the last of which may be shorter; one call for up to
    /// [`MAX_SEGMENTS`] and [`MAX_SEND`]. After an error some of them may have been sent.
    pub fn send(&mut self, to: SocketAddr, segment: usize, bytes: &[u8]) -> Result<(), SendError> {
        let segment = segment.clamp(1, MAX_SEND);
        let one_send = (MAX_SEND / segment).clamp(1, MAX_SEGMENTS) * segment;
        let mut result = Ok(());
        for part in bytes.chunks(one_send) {
            let sent = self.send_part(to, segment, part);
            self.count(part.len().div_ceil(segment), part.len(), sent);
            result = result.and(sent);
        }
        result
    }

    fn send_part(&mut self, to: SocketAddr, segment: usize, bytes: &[u8]) -> Result<(), SendError> {
        // The IPv6 socket takes no IPv4 addresses in IPv6 clothes.
        let to = match to.ip().to_canonical() {
            IpAddr::V6(address) if is_tunnel_address(address) => return Err(SendError::InsideTunnel),
            IpAddr::V6(_) => to,
            v4 @ IpAddr::V4(_) => SocketAddr::new(v4, to.port()),
        };
        let socket = if to.is_ipv4() { &mut self.v4 } else { &mut self.v6 };
        let Some(socket) = socket else { return Err(SendError::Unreachable) };
        socket.send(to, segment, bytes, &mut self.counters)
    }

    fn count(&mut self, datagrams: usize, bytes: usize, sent: Result<(), SendError>) {
        let counters = &mut self.counters;
        let datagrams = datagrams as u64;
        match sent {
            Ok(()) => {
                counters.sent_datagrams += datagrams;
                counters.sent_bytes += bytes as u64;
            }
            Err(SendError::TooBig) => counters.dropped_too_big += datagrams,
            Err(SendError::Blocked) => counters.dropped_blocked += datagrams,
            Err(SendError::Unreachable) => counters.dropped_unreachable += datagrams,
            Err(SendError::InsideTunnel) => counters.dropped_inside_tunnel += datagrams,
            Err(SendError::Busy) => counters.dropped_busy += datagrams,
        }
    }

    /// One system call on the socket of `family`; how many datagrams came, 0 when nothing is there. They lie in `buffer`
    /// until its next use.
    pub fn receive(&mut self, family: Family, buffer: &mut ReceiveBuffer) -> usize {
        buffer.clear();
        let socket = match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        };
        socket.as_mut().map_or(0, |socket| socket.receive(buffer, &mut self.counters))
    }
}

impl Socket {
    fn send(
        &mut self,
        to: SocketAddr,
        segment: usize,
        bytes: &[u8],
        counters: &mut UdpCounters,
    ) -> Result<(), SendError> {
        if bytes.len() <= segment {
            return self.send_one(to, bytes, counters).map_err(|error| classify(&error));
        }
        if !self.gso {
            return self.send_singly(to, segment, bytes, counters);
        }
        let whole = Transmit { destination: to, ecn: None, contents: bytes, segment_size: Some(segment), src_ip: None };
        match self.transmit(&whole, counters) {
            Ok(()) => Ok(()),
            // A driver that cannot do it says EIO. EINVAL may mean that, or, before Linux 6.14, that the path has
            // become too small for the segments: only single datagrams can tell, and a small path to one peer must not
            // cost all the others their speed.
            Err(error) if is_gso_refusal(&error) => {
                let sent = self.send_singly(to, segment, bytes, counters);
                if sent.is_ok() {
                    self.gso = false;
                    counters.gso_disabled += 1;
                    tracing::info!(%error, "UDP segmentation offload does not work here, sending datagrams singly");
                }
                sent
            }
            Err(error) => Err(classify(&error)),
        }
    }

    fn send_one(&mut self, to: SocketAddr, bytes: &[u8], counters: &mut UdpCounters) -> io::Result<()> {
        let one = Transmit { destination: to, ecn: None, contents: bytes, segment_size: None, src_ip: None };
        self.transmit(&one, counters)
    }

    /// One call, and a second one if the first found no room.
    fn transmit(&mut self, transmit: &Transmit<'_>, counters: &mut UdpCounters) -> io::Result<()> {
        let socket = &self.inner;
        let mut sent = self.state.try_send(UdpSockRef::from(socket), transmit);
        if sent.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            counters.waits += 1;
            self.wait();
            sent = self.state.try_send(UdpSockRef::from(socket), transmit);
        }
        counters.sends += u64::from(sent.is_ok());
        sent
    }

    /// `sendmmsg` up to the first datagram that fails.
    #[cfg(target_os = "linux")]
    fn send_singly(
        &mut self,
        to: SocketAddr,
        segment: usize,
        bytes: &[u8],
        counters: &mut UdpCounters,
    ) -> Result<(), SendError> {
        use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, SocketAddrAny, sendmmsg};
        use std::io::IoSlice;

        let address = SocketAddrAny::from(to);
        let mut datagrams = bytes.chunks(segment);
        let count = datagrams.len().min(MAX_SEGMENTS);
        let slices: [_; MAX_SEGMENTS] = std::array::from_fn(|_| [IoSlice::new(datagrams.next().unwrap_or_default())]);
        let mut controls: [_; MAX_SEGMENTS] = std::array::from_fn(|_| SendAncillaryBuffer::default());
        let mut headers = slices.iter().zip(&mut controls);
        let mut messages: [_; MAX_SEGMENTS] = std::array::from_fn(|_| {
            let (slice, control) = headers.next().expect("as many as there are messages");
            MMsgHdr::new_with_addr(&address, slice, control)
        });
        let mut rest = messages.get_mut(..count).unwrap_or_default();
        let mut waited = false;
        while !rest.is_empty() {
            match sendmmsg(&self.inner, rest, SendFlags::empty()) {
                Ok(sent) => {
                    counters.sends += 1;
                    rest = rest.get_mut(sent.max(1)..).unwrap_or_default();
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) if !waited => {
                    counters.waits += 1;
                    waited = true;
                    self.wait();
                }
                Err(error) => return Err(classify(&error.into())),
            }
        }
        Ok(())
    }

    #[cfg(not(target_os = "linux"))]
    fn send_singly(
        &mut self,
        to: SocketAddr,
        segment: usize,
        bytes: &[u8],
        counters: &mut UdpCounters,
    ) -> Result<(), SendError> {
        bytes.chunks(segment).try_for_each(|datagram| self.send_one(to, datagram, counters)).map_err(|e| classify(&e))
    }

    /// Until there is room, at most [`LONGEST_WAIT`].
    #[cfg(target_os = "linux")]
    fn wait(&self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let limit = Timespec { tv_sec: 0, tv_nsec: LONGEST_WAIT.subsec_nanos().into() };
        // The next attempt shows what came of it.
        let _ = poll(&mut [PollFd::new(&self.inner, PollFlags::OUT)], Some(&limit));
    }

    #[cfg(not(target_os = "linux"))]
    fn wait(&self) {
        std::thread::sleep(LONGEST_WAIT);
    }
}

fn is_gso_refusal(error: &io::Error) -> bool {
    // EIO has no `ErrorKind` of its own; its number is the same on every Unix.
    const EIO: i32 = 5;
    cfg!(unix) && error.raw_os_error() == Some(EIO) || error.kind() == io::ErrorKind::InvalidInput
}

fn classify(error: &io::Error) -> SendError {
    if quinn_udp::is_msg_size_err(error) {
        return SendError::TooBig;
    }
    match error.kind() {
        // ENOBUFS is OutOfMemory or uncategorised, depending on the system.
        io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => SendError::Busy,
        io::ErrorKind::PermissionDenied => SendError::Blocked,
        _ if is_no_buffers(error) => SendError::Busy,
        _ => SendError::Unreachable,
    }
}

#[cfg(unix)]
fn is_no_buffers(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error())
}

#[cfg(not(unix))]
fn is_no_buffers(_: &io::Error) -> bool {
    false
}
