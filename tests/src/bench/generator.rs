//! The load: one process in the client's namespace that knows nothing of who carries its packets. It moves TCP and UDP
//! for a given time, pings, prints one line of JSON and ends. Blocking threads, because what is measured is not this.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::icmp::{Pinger, Trips};
use super::responder::{self, DISCARD, Packets, SOURCE, UDP};
use crate::report::say;

/// Longer than anything takes that goes on at all.
const LIMIT: Duration = Duration::from_secs(20);
/// One write or read.
const BLOCK: usize = 256 * 1024;
/// Payload of a UDP datagram that fills the tunnel's MTU: 1280 without the headers of IPv6 and UDP.
pub(super) const PAYLOAD: usize = 1232;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(super) enum Direction {
    Up,
    Down,
}

impl Direction {
    pub(super) const BOTH: [Self; 2] = [Self::Up, Self::Down];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// What to generate.
#[derive(Debug, Clone, clap::Subcommand)]
pub(super) enum Load {
    /// Echo requests at a fixed pace
    Ping {
        address: Ipv6Addr,
        #[arg(long, default_value_t = 200)]
        count: u64,
        #[arg(long, default_value_t = 5)]
        interval_ms: u64,
    },
    /// Echo requests until the first answer, and more of them until stdin ends
    Reach { address: Ipv6Addr },
    /// Bulk transfer
    Tcp {
        address: Ipv6Addr,
        direction: Direction,
        #[arg(long, default_value_t = 1)]
        streams: usize,
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
        /// Ping meanwhile, every so many milliseconds
        #[arg(long)]
        ping_ms: Option<u64>,
    },
    /// Datagrams at a fixed rate
    Udp {
        address: Ipv6Addr,
        direction: Direction,
        /// Payload bits in a second
        #[arg(long, default_value_t = 1e9)]
        bit_s: f64,
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
    },
}

/// A bulk transfer as it was.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Moved {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) trips: Option<Trips>,
}

/// Datagrams as they were.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Datagrams {
    pub(super) sent: u64,
    pub(super) seconds: f64,
    pub(super) received: Packets,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Reached {
    pub(super) seconds: f64,
}

/// Generates it in the current namespace and prints what came of it.
pub(super) fn run(load: &Load) -> anyhow::Result<()> {
    let line = match *load {
        Load::Ping { address, count, interval_ms } => {
            let interval = Duration::from_millis(interval_ms);
            serde_json::to_string(&Pinger::new(address)?.series(count, interval, &AtomicBool::new(false)))
        }
        Load::Reach { address } => return reach(address),
        Load::Tcp { address, direction, streams, seconds, ping_ms } => {
            let seconds = Duration::from_secs_f64(seconds);
            serde_json::to_string(&tcp(address, direction, streams, seconds, ping_ms)?)
        }
        Load::Udp { address, direction, bit_s, seconds } => {
            let rate = bit_s / 8.0 / PAYLOAD as f64;
            serde_json::to_string(&udp(address, direction, rate, Duration::from_secs_f64(seconds))?)
        }
    };
    say(&line?);
    Ok(())
}

fn reach(address: Ipv6Addr) -> anyhow::Result<()> {
    let pinger = Pinger::new(address)?;
    let took = pinger.until_answered(Duration::from_millis(10), LIMIT).context("no answer through the tunnel")?;
    say(&serde_json::to_string(&Reached { seconds: took.as_secs_f64() })?);
    // Packets keep coming, as a better path is looked for only while some do.
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| pinger.series(u64::from(u16::MAX), Duration::from_millis(20), &over));
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        over.store(true, Ordering::Relaxed);
    });
    Ok(())
}

fn tcp(
    address: Ipv6Addr,
    direction: Direction,
    streams: usize,
    seconds: Duration,
    ping_ms: Option<u64>,
) -> anyhow::Result<Moved> {
    let over = AtomicBool::new(false);
    let pinger = ping_ms.map(|_| Pinger::new(address)).transpose()?;
    std::thread::scope(|scope| {
        let trips = pinger.as_ref().map(|pinger| {
            let interval = Duration::from_millis(ping_ms.unwrap_or(20));
            let over = &over;
            scope.spawn(move || pinger.series(u64::from(u16::MAX), interval, over))
        });
        let begin = Instant::now();
        let streams: Vec<_> = (0..streams)
            .map(|_| {
                scope.spawn(move || match direction {
                    Direction::Up => send(address, seconds),
                    Direction::Down => receive(address, seconds),
                })
            })
            .collect();
        let mut bytes = 0;
        let mut failure = None;
        for stream in streams {
            match stream.join().expect("a stream does not panic") {
                Ok(moved) => bytes += moved,
                Err(error) => failure = Some(error),
            }
        }
        let took = begin.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        let trips = trips.map(|trips| trips.join().expect("the pinger does not panic"));
        if let Some(error) = failure {
            return Err(error);
        }
        ensure!(bytes > 0, "nothing was moved");
        Ok(Moved { bytes, seconds: took, trips })
    })
}

fn connect(address: Ipv6Addr, port: u16) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::from((address, port)), LIMIT).context("cannot connect")?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    Ok(stream)
}

/// Bytes that the agent says it got.
fn send(address: Ipv6Addr, seconds: Duration) -> anyhow::Result<u64> {
    let mut stream = connect(address, DISCARD)?;
    let block = vec![0x5a; BLOCK];
    let until = Instant::now() + seconds;
    while Instant::now() < until {
        stream.write_all(&block).context("the tunnel stands still")?;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("no answer")?;
    let answer: serde_json::Value = serde_json::from_str(&answer)?;
    answer["bytes"].as_u64().context("the agent counts bytes")
}

fn receive(address: Ipv6Addr, seconds: Duration) -> anyhow::Result<u64> {
    let mut stream = connect(address, SOURCE)?;
    let mut block = vec![0; BLOCK];
    let until = Instant::now() + seconds;
    let mut bytes = 0;
    while Instant::now() < until {
        let length = stream.read(&mut block).context("the tunnel stands still")?;
        ensure!(length > 0, "the agent ended the transfer");
        bytes += length as u64;
    }
    Ok(bytes)
}

fn udp(address: Ipv6Addr, direction: Direction, rate: f64, seconds: Duration) -> anyhow::Result<Datagrams> {
    let mut order = connect(address, UDP)?;
    let mut answers = BufReader::new(order.try_clone()?);
    let mut line = String::new();
    match direction {
        Direction::Up => {
            writeln!(order, "receive")?;
            answers.read_line(&mut line).context("the responder does not answer")?;
            let port: u16 = line.trim().parse().context("the responder tells a port")?;
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
            let begin = Instant::now();
            let sent = responder::send_datagrams(&socket, (address, port).into(), rate, seconds)?;
            let took = begin.elapsed().as_secs_f64();
            // What is on its way is not lost yet.
            std::thread::sleep(Duration::from_millis(300));
            writeln!(order, "stop")?;
            line.clear();
            answers.read_line(&mut line).context("the responder does not answer")?;
            Ok(Datagrams { sent, seconds: took, received: serde_json::from_str(&line)? })
        }
        Direction::Down => {
            let socket = responder::datagram_socket()?;
            let stop = AtomicBool::new(false);
            writeln!(order, "send {rate} {}", seconds.as_secs_f64())?;
            answers.read_line(&mut line).context("the responder does not answer")?;
            let port: u16 = line.trim().parse().context("the responder tells a port")?;
            // Nobody may send to us what we did not ask for.
            socket.send_to(b"from here", (address, port))?;
            std::thread::scope(|scope| {
                let receiver = scope.spawn(|| responder::receive_datagrams(&socket, &stop));
                let mut ask = || -> anyhow::Result<(u64, f64)> {
                    line.clear();
                    answers.read_line(&mut line).context("the responder does not answer")?;
                    let (sent, seconds) = line.trim().split_once(' ').context("the responder counts")?;
                    Ok((sent.parse()?, seconds.parse()?))
                };
                let sent = ask();
                std::thread::sleep(Duration::from_millis(300));
                stop.store(true, Ordering::Relaxed);
                let received = receiver.join().expect("the receiver does not panic")?;
                let (sent, seconds) = sent?;
                Ok(Datagrams { sent, seconds, received })
            })
        }
    }
}
