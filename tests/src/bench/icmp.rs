//! Echo requests at a fixed pace, timed by the kernel: from just before a request is handed over until the reply was
//! received by the network stack, so that a generator that waits for a processor does not lengthen what it measures.

use std::io::{self, IoSliceMut};
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn6, recvmsg, sendto,
    setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeSpec, TimeVal};
use serde::{Deserialize, Serialize};

const ECHO_REQUEST: u8 = 128;
const ECHO_REPLY: u8 = 129;
/// As `ping` sends: 8 bytes of header and 56 of data.
const LENGTH: usize = 64;
/// A reply that takes longer is lost.
const LOST: Duration = Duration::from_secs(1);
/// How often the receiver looks whether it is over.
const LOOK: Duration = Duration::from_millis(50);

/// Round trips of a series, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Trips {
    pub(super) sent: u64,
    pub(super) lost: u64,
    pub(super) min: f64,
    pub(super) average: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

pub(super) struct Pinger {
    socket: OwnedFd,
    to: SockaddrIn6,
    id: u16,
}

#[derive(Default)]
struct Series {
    /// By sequence number: when it was sent, and how long the answer took.
    sent: Vec<(SystemTime, Option<Duration>)>,
}

impl Pinger {
    pub(super) fn new(to: Ipv6Addr) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Inet6, SockType::Raw, flags, SockProtocol::IcmpV6)?;
        setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::from(micros(LOOK)))?;
        // Process ids differ within a run, and so do series of different generators.
        let id = std::process::id() as u16;
        Ok(Self { socket, to: SockaddrIn6::from(SocketAddrV6::new(to, 0, 0, 0)), id })
    }

    /// Pings every `interval`, `count` times or until `stop` is set, and waits for what is on its way.
    pub(super) fn series(&self, count: u64, interval: Duration, stop: &AtomicBool) -> Trips {
        let series = Mutex::new(Series::default());
        let sent_all = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| self.receive(&series, &sent_all));
            let begin = Instant::now();
            for number in 0..count {
                let due = interval * u32::try_from(number).unwrap_or(u32::MAX);
                std::thread::sleep(due.saturating_sub(begin.elapsed()));
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                self.send(number as u16, &series);
            }
            sent_all.store(true, Ordering::Relaxed);
            // It ends by itself, a second after the last request at the latest.
            let _ = receiver.join();
        });
        trips(&series.into_inner().unwrap_or_default())
    }

    /// Pings until the first answer comes; the time that took.
    pub(super) fn until_answered(&self, interval: Duration, limit: Duration) -> Option<Duration> {
        let begin = Instant::now();
        let series = Mutex::new(Series::default());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0_u16;
                while !over.load(Ordering::Relaxed) {
                    // There may be no route yet.
                    self.send(number, &series);
                    number = number.wrapping_add(1);
                    std::thread::sleep(interval);
                }
            });
            let mut answered = None;
            while answered.is_none() && begin.elapsed() < limit {
                answered = self.reply().map(|_| begin.elapsed());
            }
            over.store(true, Ordering::Relaxed);
            answered
        })
    }

    fn send(&self, number: u16, series: &Mutex<Series>) {
        let mut packet = [0x5a; LENGTH];
        let [a, b] = self.id.to_be_bytes();
        let [c, d] = number.to_be_bytes();
        // The kernel fills the checksum in.
        packet[..8].copy_from_slice(&[ECHO_REQUEST, 0, 0, 0, a, b, c, d]);
        let Ok(mut series) = series.lock() else { return };
        series.sent.push((SystemTime::now(), None));
        drop(series);
        // Without a route it counts as lost.
        let _ = sendto(self.socket.as_raw_fd(), &packet, &self.to, MsgFlags::empty());
    }

    fn receive(&self, series: &Mutex<Series>, sent_all: &AtomicBool) {
        let mut since = None;
        loop {
            if let Some((number, at)) = self.reply()
                && let Ok(mut series) = series.lock()
                && let Some((sent, took)) = series.sent.get_mut(usize::from(number))
            {
                // Duplicates do not count.
                took.get_or_insert(at.duration_since(*sent).unwrap_or_default());
            }
            if sent_all.load(Ordering::Relaxed) {
                let since = *since.get_or_insert_with(Instant::now);
                let done = series.lock().is_ok_and(|series| series.sent.iter().all(|(_, took)| took.is_some()));
                if done || since.elapsed() > LOST {
                    return;
                }
            }
        }
    }

    /// Number of one reply to us and when it was received; `None` when there was none for a moment.
    fn reply(&self) -> Option<(u16, SystemTime)> {
        let mut buffer = [0; 256];
        let mut control = cmsg_space!(TimeSpec);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let message =
            recvmsg::<SockaddrIn6>(self.socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty()).ok()?;
        let at = message.cmsgs().ok()?.find_map(|part| match part {
            ControlMessageOwned::ScmTimestampns(at) => Some(SystemTime::UNIX_EPOCH + Duration::from(at)),
            _ => None,
        });
        let source = message.address.map(|address| address.ip());
        let [kind, _, _, _, a, b, c, d, ..] = buffer;
        let ours = kind == ECHO_REPLY && u16::from_be_bytes([a, b]) == self.id && source == Some(self.to.ip());
        ours.then_some((u16::from_be_bytes([c, d]), at.unwrap_or_else(SystemTime::now)))
    }
}

fn micros(duration: Duration) -> nix::libc::timeval {
    nix::libc::timeval { tv_sec: duration.as_secs() as i64, tv_usec: i64::from(duration.subsec_micros()) }
}

fn trips(series: &Series) -> Trips {
    let millis = |took: &Duration| took.as_secs_f64() * 1e3;
    let mut took: Vec<f64> = series.sent.iter().filter_map(|(_, took)| took.as_ref().map(millis)).collect();
    took.sort_by(f64::total_cmp);
    let at = |index: usize| took.get(index).copied().unwrap_or(f64::NAN);
    Trips {
        sent: series.sent.len() as u64,
        lost: (series.sent.len() - took.len()) as u64,
        min: at(0),
        average: took.iter().sum::<f64>() / took.len() as f64,
        p99: at(took.len().saturating_sub(1) * 99 / 100),
        max: at(took.len().saturating_sub(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_tells_what_was_lost_and_how_long_the_rest_took() {
        let at = SystemTime::UNIX_EPOCH;
        let took = |ms| (at, Some(Duration::from_millis(ms)));
        let trips = trips(&Series { sent: vec![took(3), (at, None), took(1), took(2)] });
        assert_eq!((trips.sent, trips.lost, trips.min, trips.average, trips.max), (4, 1, 1.0, 2.0, 3.0));
    }

    #[test]
    fn own_echo_requests_are_answered() {
        crate::netns::isolated(async || {
            let pinger = Pinger::new(Ipv6Addr::LOCALHOST).unwrap();
            let trips = pinger.series(20, Duration::from_millis(2), &AtomicBool::new(false));
            assert_eq!((trips.sent, trips.lost), (20, 0));
            assert!(trips.min > 0.0 && trips.max < 100.0, "{trips:?}");
            assert!(pinger.until_answered(Duration::from_millis(2), LOST).is_some());
        });
    }
}
