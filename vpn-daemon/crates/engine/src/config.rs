//! Who we are: everything the engine is told once. Keys, address and node id are new for every run and never stored.

use std::net::Ipv6Addr;

use codervpn_wire::keys::{DiscoPrivate, NodePrivate};
use codervpn_wire::node;
use rand_core::CryptoRngCore;
use uuid::Uuid;

use crate::command::Direct;
use crate::filter::Inbound;

/// Which side of a tunnel we are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// A desktop: peers are the destinations it names, everybody else is ignored.
    Client,
    /// A workspace agent: everybody whose node the coordinator sends is a peer, and starts the handshakes.
    Agent,
}

pub struct Config {
    pub role: Role,
    /// New for every run, never stored.
    pub node_key: NodePrivate,
    /// New for every run, never stored.
    pub disco_key: DiscoPrivate,
    /// Positive; only informational to others.
    pub node_id: i64,
    /// Our addresses inside the tunnel; packets from the device must come from one of them.
    pub addresses: Vec<Ipv6Addr>,
    pub inbound: Inbound,
    /// Answer ICMPv6 echo requests here instead of delivering them: for devices without a kernel behind them.
    pub answer_echo: bool,
    /// Measure the latency of every destination now and then.
    pub status_pings: bool,
    /// Whether there may be direct paths from the start; `Command::Direct` changes it.
    pub direct: Direct,
    /// Loopback addresses are candidates, too; only for tests.
    pub allow_loopback: bool,
    pub rng: Box<dyn CryptoRngCore + Send>,
}

impl Config {
    /// A desktop with new keys and a new random address.
    pub fn client(mut rng: impl CryptoRngCore + Send + 'static) -> Self {
        let mut id = [0; 16];
        rng.fill_bytes(&mut id);
        let id = uuid::Builder::from_random_bytes(id).into_uuid();
        Self {
            role: Role::Client,
            node_key: NodePrivate::generate(&mut rng),
            disco_key: DiscoPrivate::generate(&mut rng),
            node_id: (rng.next_u64() >> 1).max(1) as i64,
            addresses: vec![node::coder_address(id)],
            inbound: Inbound::Replies,
            answer_echo: false,
            status_pings: true,
            direct: Direct::Allowed,
            allow_loopback: false,
            rng: Box::new(rng),
        }
    }

    /// The workspace agent `id` with new keys.
    pub fn agent(id: Uuid, mut rng: impl CryptoRngCore + Send + 'static) -> Self {
        let [.., a, b, c, d, e, f, g, h] = id.into_bytes();
        let number = i64::from_be_bytes([a, b, c, d, e, f, g, h]);
        Self {
            role: Role::Agent,
            node_key: NodePrivate::generate(&mut rng),
            disco_key: DiscoPrivate::generate(&mut rng),
            node_id: number.checked_abs().unwrap_or(i64::MAX).max(1),
            addresses: vec![node::coder_address(id), node::tailscale_address(id)],
            inbound: Inbound::All,
            answer_echo: true,
            status_pings: false,
            direct: Direct::Allowed,
            allow_loopback: false,
            rng: Box::new(rng),
        }
    }
}
