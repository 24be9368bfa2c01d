//! What an agent answers on its ports: echo 7, discard 9, source 19, HTTP 80 and 8080, as the Go peers do.
//!
//! Each connection is a small state machine, stepped whenever its socket may have changed.

use std::fmt::Write as _;
use std::time::Instant;

use smoltcp::socket::tcp::Socket;

use super::http::Http;

/// Kinds of services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Echo,
    Discard,
    Source,
    Http,
}

pub(super) fn kind_of_port(port: u16) -> Option<Kind> {
    Some(match port {
        7 => Kind::Echo,
        9 => Kind::Discard,
        19 => Kind::Source,
        80 | 8080 => Kind::Http,
        _ => return None,
    })
}

/// One connection's service.
pub(super) enum Service {
    Echo,
    Discard { bytes: u64, since: Option<Instant> },
    Source,
    Http(Box<Http>),
}

impl Service {
    pub(super) fn new(kind: Kind) -> Self {
        match kind {
            Kind::Echo => Self::Echo,
            Kind::Discard => Self::Discard { bytes: 0, since: None },
            Kind::Source => Self::Source,
            Kind::Http => Self::Http(Box::default()),
        }
    }

    /// True when something moved, so that another step may find more to do.
    pub(super) fn step(&mut self, socket: &mut Socket<'_>, name: &str, scratch: &mut [u8]) -> bool {
        let moved = match self {
            Self::Echo => {
                let room = room(socket).min(scratch.len());
                let received = receive(socket, scratch.get_mut(..room).unwrap_or_default());
                send(socket, scratch.get(..received).unwrap_or_default());
                received > 0
            }
            Self::Discard { bytes, since } => {
                let received = receive(socket, scratch);
                if socket.is_active() {
                    since.get_or_insert_with(Instant::now);
                }
                *bytes += received as u64;
                if let (true, Some(begin)) = (has_ended(socket), *since) {
                    let mut report = String::new();
                    // Writing to a string does not fail.
                    let _ = writeln!(
                        report,
                        "{{\"bytes\":{bytes},\"seconds\":{:.6},\"cpu_seconds\":{:.6}}}",
                        begin.elapsed().as_secs_f64(),
                        cpu_seconds()
                    );
                    send(socket, report.as_bytes());
                    socket.close();
                }
                received > 0
            }
            Self::Source => {
                // What the peer says is of no interest, but its end is.
                while receive(socket, scratch) > 0 {}
                scratch.fill(0);
                send(socket, scratch) > 0
            }
            Self::Http(http) => http.step(socket, name, scratch),
        };
        let waits_for_answer = matches!(self, Self::Http(http) if http.is_busy());
        if !moved && has_ended(socket) && !waits_for_answer {
            // FIN goes out behind what is queued.
            socket.close();
        }
        moved
    }
}

/// Room for sending.
pub(super) fn room(socket: &Socket<'_>) -> usize {
    if socket.may_send() { socket.send_capacity() - socket.send_queue() } else { 0 }
}

pub(super) fn receive(socket: &mut Socket<'_>, buffer: &mut [u8]) -> usize {
    if socket.can_recv() { socket.recv_slice(buffer).unwrap_or(0) } else { 0 }
}

/// How much of it the socket took.
pub(super) fn send(socket: &mut Socket<'_>, data: &[u8]) -> usize {
    if socket.can_send() && !data.is_empty() { socket.send_slice(data).unwrap_or(0) } else { 0 }
}

/// The peer will send no more and everything was read.
pub(super) fn has_ended(socket: &Socket<'_>) -> bool {
    socket.is_active() && !socket.may_recv() && socket.recv_queue() == 0 && socket.may_send()
}

/// CPU time of this process so far.
pub(super) fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
