//! Echo requests of our own: what `ping` would send, without a socket of this machine, so that every user may ask for one
//! and the answer says by which path it came.
//!
//! They travel inside the session like any packet and wait for it like any packet. An answer is ours if it comes from the
//! peer that was asked, with the number and the random bytes of the request; it goes no further. Every other echo reply
//! is somebody else's and is judged by the filter.

use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use codervpn_wire::ip::{self, Icmpv6};
use rand_core::CryptoRngCore;

use crate::command::PeerId;
use crate::event::PingError;

/// As for the other kind of ping.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Over all peers: one a second for as long as one waits, for a dozen users.
const MAX_OUTSTANDING: usize = 64;
/// What `ping` sends.
const BODY: usize = 56;
const NONCE: usize = 8;
/// IPv6 header, ICMPv6 header, body.
pub(crate) const PACKET_LEN: usize = 40 + 8 + BODY;

struct Outstanding {
    peer: PeerId,
    token: u64,
    sequence: u16,
    nonce: [u8; NONCE],
    sent: Instant,
}

/// In the order they were sent.
#[derive(Default)]
pub(crate) struct Echoes {
    outstanding: Vec<Outstanding>,
    sequence: u16,
}

impl Echoes {
    /// Writes a request and notes that its answer is waited for.
    pub(crate) fn request(
        &mut self,
        peer: PeerId,
        token: u64,
        (from, to): (Ipv6Addr, Ipv6Addr),
        rng: &mut impl CryptoRngCore,
        now: Instant,
    ) -> Result<[u8; PACKET_LEN], PingError> {
        if self.outstanding.len() >= MAX_OUTSTANDING {
            return Err(PingError::Busy);
        }
        let mut nonce = [0; NONCE];
        rng.fill_bytes(&mut nonce);
        let mut body = [0; BODY];
        if let Some(room) = body.first_chunk_mut() {
            *room = nonce;
        }
        self.sequence = self.sequence.wrapping_add(1);
        let id = u16::from_be_bytes([nonce[0], nonce[1]]);
        let mut packet = [0; PACKET_LEN];
        ip::write_echo_request(from, to, id, self.sequence, &body, &mut packet).ok_or(PingError::NoPath)?;
        self.outstanding.push(Outstanding { peer, token, sequence: self.sequence, nonce, sent: now });
        Ok(packet)
    }

    /// An echo reply of `peer`. `Some`: token and round trip of a request of ours.
    pub(crate) fn answer(&mut self, peer: PeerId, icmp: &Icmpv6<'_>, now: Instant) -> Option<(u64, Duration)> {
        let is_ours = |request: &Outstanding| {
            request.peer == peer && request.sequence == icmp.echo_sequence() && icmp.body().starts_with(&request.nonce)
        };
        let found = self.outstanding.iter().position(is_ours)?;
        let request = self.outstanding.remove(found);
        Some((request.token, now.saturating_duration_since(request.sent)))
    }

    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.outstanding.first().map(|request| request.sent + TIMEOUT)
    }

    /// One request whose time is over.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<(PeerId, u64)> {
        self.next_timeout().filter(|at| *at <= now)?;
        let request = self.outstanding.remove(0);
        Some((request.peer, request.token))
    }
}
