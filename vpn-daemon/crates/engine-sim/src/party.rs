//! One end of tunnels: an engine, its sockets and its relay connections. Holds state; what happens is decided elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv6Addr, SocketAddr};

use codervpn_engine::{Command, Config, Direct, Engine, Role, Route, Sink};
use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::NodePublic;
use uuid::Uuid;

use crate::network::HostId;
use crate::rng::Rng;
use crate::{Time, secs};

/// One of the world's parties.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PartyId(pub(crate) usize);

/// What an engine wrote in one call.
#[derive(Default)]
pub(crate) struct Out {
    pub(crate) sent: Vec<(Route, Vec<u8>)>,
    pub(crate) delivered: Vec<Vec<u8>>,
    room: Vec<u8>,
}

impl Sink for Out {
    fn outgoing(&mut self, _: Route, room: usize) -> Option<&mut [u8]> {
        self.room.resize(room.max(self.room.len()), 0);
        Some(&mut self.room)
    }

    fn send(&mut self, route: Route, len: usize) {
        self.sent.push((route, self.room[..len].to_vec()));
    }

    fn incoming(&mut self, room: usize) -> Option<&mut [u8]> {
        self.room.resize(room.max(self.room.len()), 0);
        Some(&mut self.room)
    }

    fn deliver(&mut self, len: usize) {
        self.delivered.push(self.room[..len].to_vec());
    }
}

/// A connection to a relay, or the wish for one.
#[derive(Default, Debug)]
pub(crate) struct Link {
    /// Counts connections: what belongs to an earlier one is void.
    pub(crate) number: u32,
    pub(crate) up: bool,
    pub(crate) connecting: bool,
    pub(crate) failures: u32,
    pub(crate) used: Time,
    /// TCP keeps order, both ways.
    pub(crate) last_to_relay: Time,
    pub(crate) last_from_relay: Time,
}

pub(crate) struct Party {
    pub(crate) id: Uuid,
    pub(crate) role: Role,
    pub(crate) engine: Engine,
    pub(crate) address: Ipv6Addr,
    /// False: the process is gone.
    pub(crate) alive: bool,
    /// Counts processes: what was for an earlier one is void.
    pub(crate) generation: u32,
    pub(crate) host: HostId,
    /// Ports of both sockets.
    pub(crate) v4: Option<u16>,
    pub(crate) v6: Option<u16>,
    /// Since when the machine sleeps, and how long it did in all: the engine's clock stands still meanwhile.
    pub(crate) asleep: Option<Time>,
    pub(crate) slept: Time,
    /// Until when the coordinator cannot be reached.
    pub(crate) uncoordinated: bool,
    /// What the coordinator said meanwhile.
    pub(crate) mailbox: Vec<Command>,
    pub(crate) last_told: Time,
    pub(crate) direct: Direct,
    /// Since when no datagram may go to a peer.
    pub(crate) direct_off: Option<Time>,
    pub(crate) links: BTreeMap<RegionId, Link>,
    pub(crate) home: Option<RegionId>,
    pub(crate) measuring: bool,
    pub(crate) out: Out,
    pub(crate) wake: Option<Time>,
    /// UDP addresses that a path message went to (T-07).
    pub(crate) pinged: BTreeSet<SocketAddr>,
    pub(crate) meter: Meter,
}

/// How much a party says while nobody asks it to.
#[derive(Default, Debug)]
pub(crate) struct Meter {
    pub(crate) udp: u64,
    pub(crate) relayed: u64,
    pub(crate) bytes: u64,
    /// Last packet of a conversation, or trouble in the network.
    pub(crate) active: Time,
    /// The quiet stretch under way: when it began and what was sent before.
    pub(crate) quiet: Option<(Time, u64)>,
    /// Calls of `handle_timeout`.
    pub(crate) wakes: u64,
    /// Path messages by UDP.
    pub(crate) pings: u64,
    /// When rates were last looked at, and both counts then.
    pub(crate) looked: (Time, u64, u64),
}

/// From so long after the last packet on nothing but upkeep is allowed (5.2: `session_active_timeout`, and what was
/// under way then).
pub(crate) const QUIET_AFTER: Time = secs(60);

impl Party {
    pub(crate) fn new(role: Role, host: HostId, id: Uuid, rng: &mut Rng, at: std::time::Instant) -> Self {
        let (engine, address) = engine(role, id, rng, at);
        Self {
            id,
            role,
            engine,
            address,
            alive: true,
            generation: 0,
            host,
            v4: None,
            v6: None,
            asleep: None,
            slept: Time::ZERO,
            uncoordinated: false,
            mailbox: Vec::new(),
            last_told: Time::ZERO,
            direct: Direct::Allowed,
            direct_off: None,
            links: BTreeMap::new(),
            home: None,
            measuring: false,
            out: Out::default(),
            wake: None,
            pinged: BTreeSet::new(),
            meter: Meter::default(),
        }
    }

    pub(crate) fn key(&self) -> NodePublic {
        self.engine.node_key()
    }

    pub(crate) fn is_awake(&self) -> bool {
        self.alive && self.asleep.is_none()
    }

    /// What a new process begins with.
    pub(crate) fn restart(&mut self, rng: &mut Rng, at: std::time::Instant) {
        (self.engine, self.address) = engine(self.role, self.id, rng, at);
        self.generation += 1;
        self.alive = true;
        self.mailbox.clear();
        // Connections of the new process are counted on: the relay may still know the old ones.
        for link in self.links.values_mut() {
            *link = Link { number: link.number + 1, ..Link::default() };
        }
        self.home = None;
        self.measuring = false;
        self.out = Out::default();
        self.pinged.clear();
    }
}

fn engine(role: Role, id: Uuid, rng: &mut Rng, at: std::time::Instant) -> (Engine, Ipv6Addr) {
    let mut config = match role {
        Role::Client => Config::client(rng.fork()),
        Role::Agent => Config::agent(id, rng.fork()),
    };
    // The parties of this world answer by themselves.
    config.answer_echo = true;
    let address = config.addresses[0];
    (Engine::new(config, at), address)
}
