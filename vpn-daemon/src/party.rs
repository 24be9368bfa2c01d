//! What every party of a tunnel does in the same way, the daemon as well as the testbed's workspace agent: pass on what the
//! coordinator says, look at the network when the engine asks for it, leave.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use codervpn_control::{ControlEvent, Handle, PeerUpdate, PeerUpdateKind};
use codervpn_engine::{self as engine, RelayLatency, StunServer};
use codervpn_underlay::{Dialer, Relays, stun_servers};
use codervpn_wire::derp_map::{DerpMap, RegionId};
use codervpn_wire::node::Family;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Longest measurement.
const PROBE_LIMIT: Duration = Duration::from_secs(3);
/// A name that takes longer misses the run that asked for it (`data-plane.md` 3.3: two seconds).
const RESOLVE_LIMIT: Duration = Duration::from_millis(1500);
/// Names are asked for again after this long, and at once in another network: reports come every 20 s, and a name that
/// moves is found again soon enough.
const RESOLVED_FOR: Duration = Duration::from_secs(300);

/// The engine's words for the coordinator's.
pub fn commands_of(updates: Vec<PeerUpdate>) -> Vec<engine::Command> {
    let command = |PeerUpdate { id, kind, .. }| match kind {
        PeerUpdateKind::Node(node) => engine::Command::Node { id, node },
        PeerUpdateKind::Disconnected => engine::Command::Disconnected(id),
        PeerUpdateKind::Lost => engine::Command::Lost(id),
        PeerUpdateKind::ReadyForHandshake => engine::Command::ReadyForHandshake(id),
    };
    updates.into_iter().map(command).collect()
}

/// The slow half of a net report: latencies of the relays by HTTP, where the STUN servers are, and this machine's own
/// addresses. They take their time beside everything else and are told to the engine as they come.
pub struct Survey {
    relays: Relays,
    dialer: Dialer,
    map: DerpMap,
    /// STUN is not used, so nobody's name is asked for (T-54).
    without_stun: bool,
    resolved: Option<Resolved>,
    work: JoinSet<Found>,
    /// Counts maps and networks: what was asked for another is not kept.
    epoch: u64,
}

struct Resolved {
    at: Instant,
    servers: Vec<StunServer>,
}

enum Found {
    Latencies(Vec<RelayLatency>),
    Addresses(engine::Command),
    Nothing,
    /// `asked`: by DNS just now, not remembered.
    Servers {
        epoch: u64,
        servers: Vec<StunServer>,
        asked: bool,
    },
}

impl Survey {
    pub fn new(relays: Relays, dialer: Dialer) -> Self {
        Self {
            relays,
            dialer,
            map: DerpMap::default(),
            without_stun: false,
            resolved: None,
            work: JoinSet::new(),
            epoch: 0,
        }
    }

    /// To be said before the engine learns the map.
    pub fn set_map(&mut self, map: &DerpMap) {
        if self.map != *map {
            self.map = map.clone();
            self.forget();
        }
    }

    /// Whether direct paths are allowed.
    pub fn set_direct(&mut self, allowed: bool) {
        self.without_stun = !allowed;
    }

    /// Names may mean other addresses from now on: in another network, or with another map.
    pub fn forget(&mut self) {
        self.resolved = None;
        self.epoch += 1;
    }

    /// Whether the deployment's relays offer STUN at all.
    pub fn has_stun(&self) -> bool {
        self.map.regions.values().flat_map(|region| &region.nodes).any(|node| node.stun_port.is_some())
    }

    /// A net report begins.
    pub fn begin(&mut self) {
        self.work.spawn({
            let relays = self.relays.clone();
            async move { Found::Latencies(measure(relays).await) }
        });
        self.work.spawn(async { local_addresses().await.map_or(Found::Nothing, Found::Addresses) });
        if self.without_stun {
            return;
        }
        let epoch = self.epoch;
        let still_true = self.resolved.as_ref().filter(|resolved| resolved.at.elapsed() < RESOLVED_FOR);
        if let Some(resolved) = still_true {
            let servers = resolved.servers.clone();
            self.work.spawn(async move { Found::Servers { epoch, servers, asked: false } });
            return;
        }
        let (dialer, map) = (self.dialer.clone(), self.map.clone());
        self.work.spawn(async move {
            let found = stun_servers(&dialer, &map, RESOLVE_LIMIT).await;
            let server = |(region, address): (RegionId, SocketAddr)| StunServer { region, address };
            Found::Servers { epoch, servers: found.into_iter().map(server).collect(), asked: true }
        });
    }

    /// What the engine is to be told next; never comes while nothing is under way. May be dropped and called again.
    pub async fn found(&mut self) -> engine::Command {
        loop {
            match self.work.join_next().await {
                Some(Ok(Found::Latencies(latencies))) => return engine::Command::RelayLatencies(latencies),
                Some(Ok(Found::Servers { epoch, servers, asked })) => {
                    if epoch != self.epoch {
                        continue;
                    }
                    let servers = match &self.resolved {
                        // Name servers that fail for a while do not undo what they said.
                        Some(known) if servers.is_empty() => known.servers.clone(),
                        _ => servers,
                    };
                    if asked && !servers.is_empty() {
                        self.resolved = Some(Resolved { at: Instant::now(), servers: servers.clone() });
                    }
                    return engine::Command::StunServers(servers);
                }
                Some(Ok(Found::Addresses(command))) => return command,
                Some(Ok(Found::Nothing)) => {}
                // Only what we ended ourselves, or a fault of ours that has been reported.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }

    /// Ends what is under way.
    pub fn close(&mut self) {
        self.work.abort_all();
    }
}

/// This machine's addresses for the engine; `None` if they cannot be had, which leaves those it knows.
pub async fn local_addresses() -> Option<engine::Command> {
    match codervpn_host::addresses::of_this_machine().await {
        Ok(addresses) => Some(engine::Command::LocalAddresses(addresses)),
        Err(error) => {
            tracing::warn!(%error, "cannot list this machine's addresses: other machines of its network are reached indirectly");
            None
        }
    }
}

/// Latencies of the relays that answer.
async fn measure(relays: Relays) -> Vec<RelayLatency> {
    let latency = |(region, answer)| match answer {
        Ok(codervpn_underlay::RegionLatency { latency, address }) => {
            let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
            Some(RelayLatency { region, family, latency })
        }
        Err(error) => {
            tracing::debug!(%region, %error, "relay not measured");
            None
        }
    };
    relays.probe(PROBE_LIMIT).await.into_iter().filter_map(latency).collect()
}

/// Says Disconnect and waits for the controller's end, at most for `limit`. Its events must flow until then.
pub async fn leave(control: Handle, events: &mut mpsc::Receiver<ControlEvent>, limit: Duration) {
    tokio::select! {
        _ = timeout(limit, control.shutdown()) => {}
        () = async { while events.recv().await.is_some() {} std::future::pending().await } => {}
    }
}
