//! What answers at the far end of a tunnel that ends in a TUN device: the services that Coder's agents in `tests/foreign`
//! have, and datagrams in both directions. A process of its own in the agent's namespace.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::figures::inner_udp_overflows;
use super::generator::PAYLOAD;
use crate::report::say;

/// It counts what it gets until that is over, then says so.
pub(super) const DISCARD: u16 = 9;
/// It sends without end.
pub(super) const SOURCE: u16 = 19;
/// Orders for datagrams.
pub(super) const UDP: u16 = 5001;

/// What a socket may hold: the limit that most machines allow without privileges is smaller, then that is it.
const UDP_BUFFER: usize = 7 << 20;
/// A sender that could not run for a while does not make up for more than so many packets at once.
const BURST: u64 = 256;
const PAUSE: Duration = Duration::from_millis(1);
/// A stuck peer does not hold a thread for ever.
const LIMIT: Duration = Duration::from_secs(60);

/// Datagrams that a program got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Packets {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    /// Lost at the program's own socket, which is not the tunnel's fault.
    pub(super) overflows: u64,
}

/// Serves until stdin ends.
pub(super) fn run() -> anyhow::Result<()> {
    serve(DISCARD, discard)?;
    serve(SOURCE, source)?;
    serve(UDP, datagrams)?;
    say("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn serve(port: u16, answer: fn(TcpStream) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).with_context(|| format!("port {port}"))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                // A peer that goes away ends its connection, nothing else.
                let _ = stream.set_read_timeout(Some(LIMIT));
                let _ = stream.set_write_timeout(Some(LIMIT));
                let _ = answer(stream);
            });
        }
    });
    Ok(())
}

fn discard(mut stream: TcpStream) -> anyhow::Result<()> {
    let mut block = vec![0; 256 * 1024];
    let mut bytes = 0;
    loop {
        match stream.read(&mut block)? {
            0 => break,
            length => bytes += length as u64,
        }
    }
    writeln!(stream, "{{\"bytes\":{bytes}}}")?;
    Ok(())
}

fn source(mut stream: TcpStream) -> anyhow::Result<()> {
    let block = vec![0; 256 * 1024];
    loop {
        stream.write_all(&block)?;
    }
}

fn datagrams(mut stream: TcpStream) -> anyhow::Result<()> {
    let mut orders = BufReader::new(stream.try_clone()?);
    let mut order = String::new();
    orders.read_line(&mut order)?;
    let words: Vec<&str> = order.split_whitespace().collect();
    match words.as_slice() {
        ["receive"] => {
            let socket = datagram_socket()?;
            writeln!(stream, "{}", socket.local_addr()?.port())?;
            let stop = AtomicBool::new(false);
            let packets = thread::scope(|scope| {
                let receiver = scope.spawn(|| receive_datagrams(&socket, &stop));
                let _ = orders.read_line(&mut order);
                stop.store(true, Ordering::Relaxed);
                receiver.join().expect("the receiver does not panic")
            })?;
            writeln!(stream, "{}", serde_json::to_string(&packets)?)?;
        }
        ["send", rate, seconds] => {
            let from: IpAddr = stream.local_addr()?.ip();
            let socket = UdpSocket::bind((from, 0))?;
            socket.set_read_timeout(Some(LIMIT))?;
            writeln!(stream, "{}", socket.local_addr()?.port())?;
            // Clients take only what answers something of theirs.
            let (_, to) = socket.recv_from(&mut [0; 64])?;
            let begin = Instant::now();
            let sent = send_datagrams(&socket, to, rate.parse()?, Duration::from_secs_f64(seconds.parse()?))?;
            writeln!(stream, "{sent} {}", begin.elapsed().as_secs_f64())?;
        }
        _ => anyhow::bail!("no such order"),
    }
    Ok(())
}

/// A socket whose buffer does not hide the tunnel's losses behind its own.
pub(super) fn datagram_socket() -> anyhow::Result<UdpSocket> {
    use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
    if set_socket_recv_buffer_size_force(&socket, UDP_BUFFER).is_err() {
        set_socket_recv_buffer_size(&socket, UDP_BUFFER)?;
    }
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    Ok(socket)
}

/// Counts what comes until `stop` is set and nothing is left.
pub(super) fn receive_datagrams(socket: &UdpSocket, stop: &AtomicBool) -> anyhow::Result<Packets> {
    let before = inner_udp_overflows()?;
    let mut packets = Packets::default();
    let mut buffer = [0; 2048];
    loop {
        match socket.recv(&mut buffer) {
            Ok(length) => {
                packets.packets += 1;
                packets.bytes += length as u64;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    packets.overflows = inner_udp_overflows()? - before;
    Ok(packets)
}

/// Sends so many datagrams in a second, one a call as programs do; how many the kernel took.
pub(super) fn send_datagrams(socket: &UdpSocket, to: SocketAddr, rate: f64, time: Duration) -> anyhow::Result<u64> {
    let payload = [0x5a; PAYLOAD];
    let begin = Instant::now();
    let mut sent = 0;
    // What was missed by not running is not made up for.
    let mut missed = 0;
    loop {
        let elapsed = begin.elapsed();
        if elapsed >= time {
            return Ok(sent);
        }
        let due = (elapsed.as_secs_f64() * rate) as u64 - missed;
        missed += due.saturating_sub(sent + BURST);
        let burst = due.min(sent + BURST).saturating_sub(sent);
        for _ in 0..burst {
            match socket.send_to(&payload, to) {
                Ok(_) => sent += 1,
                // A full queue of the device: the kernel did not take it.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => missed += 1,
                Err(error) => return Err(error).context("cannot send datagrams"),
            }
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_are_paced_and_counted() {
        let receiver = datagram_socket().unwrap();
        let to = (Ipv6Addr::LOCALHOST, receiver.local_addr().unwrap().port()).into();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let received = scope.spawn(|| receive_datagrams(&receiver, &stop).unwrap());
            let socket = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
            let sent = send_datagrams(&socket, to, 10_000.0, Duration::from_millis(200)).unwrap();
            stop.store(true, Ordering::Relaxed);
            let received = received.join().unwrap();
            assert!(sent <= 2_000 && sent > 200, "{sent}");
            assert_eq!(received.packets + received.overflows, sent);
            assert_eq!(received.bytes, received.packets * PAYLOAD as u64);
        });
    }
}
