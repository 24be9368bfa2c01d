//! One attachment to a network: a host's to its LAN, a router's to its provider. Decides what becomes of a datagram that
//! crosses it, either way: when it comes out at the other end, how often, or not at all.

use std::net::SocketAddr;

use crate::rng::Rng;
use crate::{Time, ms};

/// How an attachment treats datagrams.
#[derive(Clone, Debug)]
pub struct Wire {
    /// One way.
    pub delay: Time,
    /// Added at random up to this much; datagrams overtake each other unless `ordered`.
    pub jitter: Time,
    /// Part that is lost.
    pub loss: f64,
    /// Part that arrives twice.
    pub duplicate: f64,
    /// Jitter delays, but nothing overtakes.
    pub ordered: bool,
    /// Largest IP packet.
    pub mtu: usize,
    /// Whoever sent one that is too large is told so.
    pub tells_too_big: bool,
    /// False: the cable is out.
    pub up: bool,
    /// False: UDP is swallowed, relays stay reachable.
    pub udp: bool,
    #[doc(hidden)]
    pub last_arrival: [Time; 2],
}

impl Default for Wire {
    fn default() -> Self {
        Self {
            delay: Time::from_micros(100),
            jitter: Time::ZERO,
            loss: 0.0,
            duplicate: 0.0,
            ordered: true,
            mtu: 1500,
            tells_too_big: true,
            up: true,
            udp: true,
            last_arrival: [Time::ZERO; 2],
        }
    }
}

/// What became of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Crossing {
    /// It comes out at this time, and perhaps once more.
    Through(Time, Option<Time>),
    Lost,
    /// Too large; the sender learns it.
    TooBig,
}

/// Size of the IP packet that carries a datagram with this payload.
pub(crate) fn packet_size(to: SocketAddr, payload: usize) -> usize {
    payload + if to.is_ipv4() { 28 } else { 48 }
}

impl Wire {
    /// A line with this delay, one way.
    #[must_use]
    pub fn with_delay(delay_ms: u64) -> Self {
        Self { delay: ms(delay_ms), ..Self::default() }
    }

    pub(crate) fn cross(&mut self, outward: bool, size: usize, now: Time, rng: &mut Rng) -> Crossing {
        if !self.up || !self.udp || rng.chance(self.loss) {
            return Crossing::Lost;
        }
        if size > self.mtu {
            return if self.tells_too_big { Crossing::TooBig } else { Crossing::Lost };
        }
        let first = self.arrival(outward, now, rng);
        let second = rng.chance(self.duplicate).then(|| self.arrival(outward, now, rng));
        Crossing::Through(first, second)
    }

    fn arrival(&mut self, outward: bool, now: Time, rng: &mut Rng) -> Time {
        let mut at = now + self.delay + rng.between(Time::ZERO, self.jitter);
        let last = &mut self.last_arrival[usize::from(outward)];
        if self.ordered {
            at = at.max(*last);
        }
        *last = at.max(*last);
        at
    }
}
