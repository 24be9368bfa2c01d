//! Echo requests through the tunnel at a fixed pace, each remembered with its answer, so that what a person would notice
//! while something breaks can be told in numbers.

use std::net::{Ipv6Addr, SocketAddrV6};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

/// Between two requests, unless said otherwise.
pub const PACE: Duration = Duration::from_millis(50);
const ECHO_REQUEST: u8 = 128;
const ECHO_REPLY: u8 = 129;
/// As `ping` sends: 8 bytes of header and 56 of data.
const LENGTH: usize = 64;

/// Requests to one address, from now until this value is dropped.
#[derive(Debug)]
pub struct Probes {
    sent: Arc<Mutex<Vec<Probe>>>,
    task: JoinHandle<()>,
}

#[derive(Debug, Clone, Copy)]
struct Probe {
    sent: Instant,
    answered: Option<Instant>,
}

/// What happened in a span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// The longest time without any answer.
    pub longest: Duration,
    pub sent: usize,
    /// Requests that were never answered.
    pub lost: usize,
}

impl Probes {
    /// Needs the right to open raw sockets, as every isolated body has.
    pub fn start(target: Ipv6Addr) -> anyhow::Result<Self> {
        Self::start_every(PACE, target)
    }

    pub fn start_every(pace: Duration, target: Ipv6Addr) -> anyhow::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET6, SocketType::RAW, flags, Some(ipproto::ICMPV6))?;
        // Sending to and receiving from an address is all that is done with it, as with a UDP socket.
        let socket = UdpSocket::from_std(std::net::UdpSocket::from(socket))?;
        let sent = Arc::<Mutex<Vec<Probe>>>::default();
        let task = tokio::spawn(run(socket, pace, SocketAddrV6::new(target, 0, 0, 0), Arc::clone(&sent)));
        Ok(Self { sent, task })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Probe>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What happened from then on; a request without answer counts as lost only if it has had `patience`.
    pub fn since(&self, begin: Instant, patience: Duration) -> Gap {
        self.between(begin, Instant::now(), patience)
    }

    pub fn between(&self, begin: Instant, end: Instant, patience: Duration) -> Gap {
        let now = Instant::now();
        let probes = self.lock();
        let mut answers: Vec<_> = probes.iter().filter_map(|probe| probe.answered).collect();
        answers.sort_unstable();
        let inside = answers.into_iter().filter(|answer| (begin..end).contains(answer));
        let mut longest = Duration::ZERO;
        let mut last = begin;
        for answer in inside.chain([end]) {
            longest = longest.max(answer.duration_since(last));
            last = answer;
        }
        let spanned = probes.iter().filter(|probe| (begin..end).contains(&probe.sent));
        let (mut sent, mut lost) = (0, 0);
        for probe in spanned.filter(|probe| probe.answered.is_some() || now.duration_since(probe.sent) > patience) {
            sent += 1;
            lost += usize::from(probe.answered.is_none());
        }
        Gap { longest, sent, lost }
    }

    /// When the first answer came to a request sent after `begin`; waits for it.
    pub async fn answer_after(&self, begin: Instant) -> Instant {
        loop {
            let found = self.lock().iter().filter(|probe| probe.sent >= begin).filter_map(|probe| probe.answered).min();
            if let Some(found) = found {
                return found;
            }
            tokio::time::sleep(PACE / 10).await;
        }
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(socket: UdpSocket, pace: Duration, target: SocketAddrV6, probes: Arc<Mutex<Vec<Probe>>>) {
    let lock = || probes.lock().unwrap_or_else(PoisonError::into_inner);
    let mut pace = interval(pace);
    // A late one does not hurry those that follow.
    pace.set_missed_tick_behavior(MissedTickBehavior::Skip);
    // Other probes may run beside and hear the same answers.
    let id: u16 = rand::random();
    let mut answer = [0; 256];
    loop {
        tokio::select! {
            _ = pace.tick() => {
                let number = {
                    let mut probes = lock();
                    probes.push(Probe { sent: Instant::now(), answered: None });
                    probes.len() - 1
                };
                // Without a route or with a full queue it is lost, as it would be for any program.
                let _ = socket.send_to(&request(id, number), target).await;
            }
            received = socket.recv(&mut answer) => {
                let Ok(length) = received else { continue };
                let now = Instant::now();
                let number = answer.get(..length).and_then(|answer| parse(answer, id));
                let mut probes = lock();
                if let Some(probe) = number.and_then(|number| probes.get_mut(number)) {
                    probe.answered.get_or_insert(now);
                }
            }
        }
    }
}

/// The kernel fills in the checksum.
fn request(id: u16, number: usize) -> [u8; LENGTH] {
    let mut request = [0; LENGTH];
    request[0] = ECHO_REQUEST;
    request[4..6].copy_from_slice(&id.to_be_bytes());
    request[6..8].copy_from_slice(&(number as u16).to_be_bytes());
    // The whole number: sequence numbers of the protocol come round again.
    request[8..16].copy_from_slice(&(number as u64).to_be_bytes());
    request
}

fn parse(answer: &[u8], id: u16) -> Option<usize> {
    let fits = answer.first() == Some(&ECHO_REPLY) && answer.get(4..6)? == id.to_be_bytes();
    let number = u64::from_be_bytes(answer.get(8..16)?.try_into().ok()?);
    fits.then_some(number)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::Setup;

    #[test]
    fn answers_are_matched_to_requests() {
        let mut answer = request(7, 70_000);
        assert_eq!(parse(&answer, 7), None, "a request is no answer");
        answer[0] = ECHO_REPLY;
        assert_eq!(parse(&answer, 7), Some(70_000));
        assert_eq!(parse(&answer, 8), None);
    }

    #[test]
    fn a_silent_while_is_seen() {
        Setup::new().run(async || -> anyhow::Result<()> {
            let patience = Duration::from_millis(20);
            let probes = Probes::start(Ipv6Addr::LOCALHOST)?;
            let begin = probes.answer_after(Instant::now()).await;
            tokio::time::sleep(Duration::from_millis(400)).await;
            let calm = probes.since(begin, patience);
            anyhow::ensure!(calm.lost == 0 && calm.sent > 4, "{calm:?}");
            crate::netns::ip("link set lo down")?;
            tokio::time::sleep(Duration::from_millis(400)).await;
            let gap = probes.since(begin, patience);
            anyhow::ensure!(gap.lost > 4 && gap.longest >= Duration::from_millis(300), "{gap:?}");
            Ok(())
        });
    }
}
