//! Keeps an agent's parts in step: what the coordinator says goes to the data loop, what the data loop says goes to the
//! coordinator. The same abstractions as the daemon's, in the other role.

use std::time::Duration;

use codervpn_control::{ControlEvent, Handle};
use codervpn_engine as engine;
use codervpn_underlay::Relays;
use codervpn_wire::derp_map::RegionId;
use tokio::sync::{mpsc, watch};
use tokio::time::interval;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use vpn_daemon::party::{self, Survey};
use vpn_daemon::tunnel::{Tunnel, TunnelEvent};

/// While the relay is being connected it is looked at so often.
const LOOK: Duration = Duration::from_millis(5);
/// A graceful end may take so long.
const LEAVE: Duration = Duration::from_secs(3);

pub(super) struct Parts {
    pub(super) control: Handle,
    pub(super) control_events: mpsc::Receiver<ControlEvent>,
    pub(super) tunnel: Tunnel,
    pub(super) tunnel_events: mpsc::Receiver<TunnelEvent>,
    pub(super) relays: Relays,
    pub(super) survey: Survey,
    pub(super) progress: watch::Sender<Progress>,
    /// Peers programmed before our own node was published. Told then: said earlier it would reach them before our key,
    /// and a new key voids what was said before it (CC-33).
    pub(super) programmed: Vec<Uuid>,
}

/// How far an agent is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Progress {
    connected: bool,
    home: Option<RegionId>,
    published: bool,
    on_relay: bool,
    /// The last trouble.
    trouble: String,
}

impl Progress {
    pub(super) fn is_ready(&self) -> bool {
        self.connected && self.published && self.on_relay
    }
}

pub(super) async fn run(mut parts: Parts, leave: CancellationToken) {
    let mut look = interval(LOOK);
    loop {
        tokio::select! {
            () = leave.cancelled() => break,
            event = parts.control_events.recv() => match event {
                Some(event) => parts.take_control_event(event).await,
                None => return,
            },
            event = parts.tunnel_events.recv() => match event {
                Some(event) => parts.take_tunnel_event(event).await,
                None => return,
            },
            command = parts.survey.found() => {
                let _ = parts.tunnel.handle().apply(vec![command]).await;
            }
            _ = look.tick(), if !parts.progress.borrow().on_relay => parts.look_at_relay(),
        }
    }
    let Parts { control, mut control_events, tunnel, relays, .. } = parts;
    party::leave(control, &mut control_events, LEAVE).await;
    relays.close();
    tunnel.stop().await;
}

impl Parts {
    async fn take_control_event(&mut self, event: ControlEvent) {
        let commands = match event {
            ControlEvent::PeerUpdates(updates) => party::commands_of(updates),
            ControlEvent::AllPeersLost => vec![engine::Command::AllLost],
            ControlEvent::DerpMap(map) => {
                self.relays.set_map(&map);
                self.survey.set_map(&map);
                vec![engine::Command::DerpMap(map)]
            }
            ControlEvent::Connected { .. } => {
                self.progress.send_modify(|progress| progress.connected = true);
                return;
            }
            ControlEvent::Lost { reason, .. } => {
                tracing::debug!(reason, "agent lost its control connection");
                self.progress.send_modify(|progress| {
                    progress.connected = false;
                    progress.trouble = reason;
                });
                return;
            }
            ControlEvent::Refused { error } => {
                tracing::warn!(%error, "agent refused");
                self.progress.send_modify(|progress| progress.trouble = error.to_string());
                return;
            }
            ControlEvent::CoordinatorError(text) => {
                tracing::warn!(text, "the coordinator complains about an agent");
                self.progress.send_modify(|progress| progress.trouble = text);
                return;
            }
            ControlEvent::Connecting { .. } | ControlEvent::Workspaces(_) => return,
        };
        let _ = self.tunnel.handle().apply(commands).await;
    }

    async fn take_tunnel_event(&mut self, event: TunnelEvent) {
        match event {
            TunnelEvent::SelfNode(node) => {
                let home = node.home;
                self.control.set_self_node(*node);
                // Published when the controller has worked off what was before.
                let _ = self.control.settled().await;
                self.progress.send_modify(|progress| {
                    progress.published = home.is_some();
                    if progress.home != home {
                        progress.home = home;
                        progress.on_relay = false;
                    }
                });
                if home.is_some() && !self.programmed.is_empty() {
                    let _ = self.control.ready_for_handshake(self.programmed.drain(..)).await;
                }
            }
            TunnelEvent::Programmed(id) if !self.progress.borrow().published => self.programmed.push(id),
            TunnelEvent::Programmed(id) => {
                let _ = self.control.ready_for_handshake([id]).await;
            }
            TunnelEvent::DeviceLost(reason) => tracing::error!(reason, "an agent's device is gone"),
            TunnelEvent::MeasureRelays => self.survey.begin(),
            TunnelEvent::PeerChanged(_)
            | TunnelEvent::PingDone { .. }
            | TunnelEvent::EchoDone { .. }
            | TunnelEvent::Forward(_) => {}
        }
    }

    fn look_at_relay(&self) {
        let home = self.progress.borrow().home;
        if home.is_some_and(|home| self.relays.is_connected(home)) {
            self.progress.send_modify(|progress| progress.on_relay = true);
        }
    }
}
