//! What all peers share while one of them is at work: our identity, the relays, clocks, counters and the event queue.

use std::collections::VecDeque;
use std::net::{Ipv6Addr, SocketAddr};

use codervpn_wire::keys::{DiscoPrivate, DiscoPublic, NodePublic};
use rand_core::CryptoRngCore;

use crate::addresses::Addresses;
use crate::echo::Echoes;
use crate::event::Event;
use crate::held::HeldTotal;
use crate::limits::Bucket;
use crate::net_report::Net;
use crate::relays::Relays;
use crate::session::Sessions;
use crate::stats::Counters;
use crate::timers::Timers;

/// Room for the largest inner packet and its padding.
pub(crate) const PLAIN_ROOM: usize = 2048;

/// Who we are.
pub(crate) struct Own {
    pub(crate) node_key: NodePublic,
    pub(crate) disco_private: DiscoPrivate,
    pub(crate) disco_key: DiscoPublic,
    pub(crate) addresses: Vec<Ipv6Addr>,
    pub(crate) status_pings: bool,
    pub(crate) answer_echo: bool,
}

pub(crate) struct Common {
    pub(crate) own: Own,
    pub(crate) rng: Box<dyn CryptoRngCore + Send>,
    pub(crate) sessions: Sessions,
    pub(crate) relays: Relays,
    /// The network we are in, and our endpoints.
    pub(crate) net: Net,
    /// Whose UDP addresses we know.
    pub(crate) addresses: Addresses,
    /// There is a network.
    pub(crate) link_up: bool,
    /// Families that a socket is bound for.
    pub(crate) has_v4: bool,
    pub(crate) has_v6: bool,
    pub(crate) allow_loopback: bool,
    /// Discovery pings over all peers (T-05).
    pub(crate) discovery: Bucket,
    /// Where a datagram is sealed that leaves by two ways.
    pub(crate) sealed: Box<[u8; PLAIN_ROOM]>,
    pub(crate) echoes: Echoes,
    pub(crate) held: HeldTotal,
    pub(crate) timers: Timers,
    pub(crate) events: VecDeque<Event>,
    pub(crate) counters: Counters,
    /// Pongs over all peers (T-08).
    pub(crate) pongs: Bucket,
    /// Where packets are padded and path messages opened.
    pub(crate) scratch: Box<[u8; PLAIN_ROOM]>,
}

impl Common {
    pub(crate) fn event(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// Whether anything may go to peers by UDP now.
    #[inline]
    pub(crate) fn may_go_direct(&self) -> bool {
        self.link_up && self.net.is_direct_allowed()
    }

    pub(crate) fn has_socket(&self, address: SocketAddr) -> bool {
        if address.is_ipv4() { self.has_v4 } else { self.has_v6 }
    }

    pub(crate) fn jitter(&mut self) -> u32 {
        self.rng.next_u32()
    }

    pub(crate) fn is_own(&self, address: Ipv6Addr) -> bool {
        self.own.addresses.contains(&address)
    }
}
