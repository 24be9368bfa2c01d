//! Decides whether names work for the programs of this machine (`dns-and-os.md` 1.12, R-30).
//!
//! The daemon does the two look-ups, through the operating system and straight into the tunnel; this says when, what to
//! look up and what the results mean. A failed test is shown and never stops the tunnel.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use codervpn_wire::node::DNS_ADDRESS;

use crate::message::{CLASS_IN, Question, flag, header, rtype};
use crate::names;
use crate::suffix::Suffix;
use crate::zone;

/// Time for either look-up.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Link changes come in bursts.
const AT_MOST_EVERY: Duration = Duration::from_secs(10);

/// `dns` in the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DnsState {
    /// Names are not served, or not tested yet.
    #[default]
    Off,
    Ok,
    /// The tunnel answers, the system's resolver does not ask it.
    DegradedOs,
    /// The tunnel does not answer.
    DegradedTun,
}

/// When to test, and the last result.
#[derive(Debug, Default)]
pub struct SelfTest {
    state: DnsState,
    wanted: bool,
    running: bool,
    started: Option<Instant>,
}

impl SelfTest {
    pub fn state(&self) -> DnsState {
        self.state
    }

    /// Something changed: configuration, a link, a resume.
    pub fn request(&mut self) {
        self.wanted = true;
    }

    /// The system is no longer pointed at us.
    pub fn handle_off(&mut self) {
        *self = SelfTest { started: self.started, ..SelfTest::default() };
    }

    /// When [`SelfTest::poll_start`] has something to start.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let due = self.started.map_or(now, |started| started + AT_MOST_EVERY);
        (self.wanted && !self.running).then_some(due)
    }

    /// Whether to do the look-ups now.
    pub fn poll_start(&mut self, now: Instant) -> bool {
        let due = self.poll_timeout(now).is_some_and(|at| at <= now);
        if due {
            *self = SelfTest { state: self.state, wanted: false, running: true, started: Some(now) };
        }
        due
    }

    /// What the look-ups brought. Returns the state if it is a new one.
    pub fn handle_result(&mut self, through_os: bool, through_tun: bool) -> Option<DnsState> {
        // A result that comes after we were switched off says nothing any more.
        if !std::mem::take(&mut self.running) {
            return None;
        }
        let state = match (through_os, through_tun) {
            (true, true) => DnsState::Ok,
            (_, false) => DnsState::DegradedTun,
            (false, true) => DnsState::DegradedOs,
        };
        (std::mem::replace(&mut self.state, state) != state).then_some(state)
    }
}

impl DnsState {
    pub fn as_str(self) -> &'static str {
        match self {
            DnsState::Off => "off",
            DnsState::Ok => "ok",
            DnsState::DegradedOs => "degraded(os)",
            DnsState::DegradedTun => "degraded(tun)",
        }
    }
}

impl fmt::Display for DnsState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What to ask the operating system for, as a full name.
pub fn name(suffix: &Suffix) -> String {
    names::own_name(suffix)
}

/// Whether what the operating system found is ours.
pub fn is_ours(found: impl IntoIterator<Item = IpAddr>) -> bool {
    found.into_iter().any(|address| address == IpAddr::V6(DNS_ADDRESS))
}

/// What to send to port 53 of [`DNS_ADDRESS`].
pub fn query(suffix: &Suffix, id: u16) -> Vec<u8> {
    let mut query = Vec::new();
    query.extend_from_slice(&id.to_be_bytes());
    query.extend_from_slice(&flag::RD.to_be_bytes());
    query.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
    query.extend_from_slice(&zone::wire(&name(suffix)).unwrap_or_default());
    query.extend_from_slice(&rtype::AAAA.to_be_bytes());
    query.extend_from_slice(&CLASS_IN.to_be_bytes());
    query
}

/// Whether `answer` answers [`query`] with the address of the server it went to.
pub fn is_right(answer: &[u8], query: &[u8]) -> bool {
    let (Some((id, flags, [1, 1, ..])), Some((asked, ..))) = (header(answer), header(query)) else { return false };
    let same = match (Question::parse(answer), Question::parse(query)) {
        (Some(answered), Some(question)) => answered.matches(&question),
        _ => false,
    };
    // One AAAA record is the whole rest: a pointer, type, class, TTL, length and the address at the end.
    id == asked && same && flags & (flag::QR | flag::RCODE) == flag::QR && answer.ends_with(&DNS_ADDRESS.octets())
}
