//! A port of the gateway that leads to our IPv4 socket (`data-plane.md` 3.5).
//!
//! Phases: (1) nothing is known: PCP, NAT-PMP and UPnP are asked in this order, the first that maps wins; (2) mapped:
//! renewed at half of its life by the same protocol, asking for the same external port; a renewal that fails goes back to
//! (1); (3) nobody maps: asked again after ten minutes, or when gateway or port change. Whoever stops, unmaps.
//!
//! Only the gateway of the default route is believed: answers from other addresses do not reach the sockets, which are
//! connected to it, and a UPnP description has to lie on it (T-37). An external address that is not public would be a NAT
//! behind a NAT, where the mapping leads nowhere: it is not taken. While there is no target nothing is sent (T-54).

mod gateway;
mod upnp;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use rand::RngExt as _;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::dialer::Dialer;

/// Asked for, in seconds (Go: `pmpMapLifetimeSec`).
const LIFETIME: u32 = 7200;
/// A gateway that gives less is asked again no sooner than this.
const SHORTEST_LIFE: Duration = Duration::from_secs(120);
/// One attempt over all protocols.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);
/// A gateway that maps nothing is asked again after this (Go: `trustServiceStillAvailableDuration`).
const AGAIN: Duration = Duration::from_secs(600);
/// Unmapping on the way out must not hold up a stop.
const RELEASE_LIMIT: Duration = Duration::from_millis(300);

/// What is to be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapTarget {
    pub gateway: Ipv4Addr,
    /// Our address towards the gateway.
    pub own: Ipv4Addr,
    /// The port our IPv4 socket is bound to.
    pub port: u16,
}

/// How the mapper works; the defaults are the right ones outside of tests.
#[derive(Debug, Clone, Copy)]
pub struct MapperOptions {
    /// Take external addresses that are not public, too: laboratories have no others.
    pub allow_private: bool,
    /// Where gateways listen for PCP and NAT-PMP, and for SSDP.
    pub port: u16,
    pub ssdp_port: u16,
}

impl Default for MapperOptions {
    fn default() -> Self {
        Self { allow_private: false, port: 5351, ssdp_port: 1900 }
    }
}

/// Keeps a mapping. Dropping it ends the task and leaves the mapping to expire; [`PortMapper::close`] takes it back.
#[derive(Debug)]
pub struct PortMapper {
    target: watch::Sender<Option<MapTarget>>,
    mapped: watch::Receiver<Option<SocketAddrV4>>,
    task: JoinHandle<()>,
}

impl Drop for PortMapper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PortMapper {
    /// To be called inside a runtime. Nothing is sent before there is a target.
    pub fn spawn(dialer: Dialer, options: MapperOptions) -> PortMapper {
        let (target, targets) = watch::channel(None);
        let (mapped_sender, mapped) = watch::channel(None);
        let mapper = Mapper { dialer, options, nonce: rand::rng().random(), mapped: mapped_sender };
        PortMapper { target, mapped, task: tokio::spawn(mapper.run(targets)) }
    }

    /// Another target; `None` takes the mapping back and ends all traffic.
    pub fn set_target(&self, target: Option<MapTarget>) {
        self.target.send_if_modified(|present| std::mem::replace(present, target) != target);
    }

    /// Waits for the mapping to change and returns it. May be dropped while it waits.
    pub async fn changed(&mut self) -> Option<SocketAddr> {
        if self.mapped.changed().await.is_err() {
            // Only while the runtime ends.
            std::future::pending::<()>().await;
        }
        (*self.mapped.borrow_and_update()).map(SocketAddr::V4)
    }

    /// Takes the mapping back, for a moment at most.
    pub async fn close(mut self) {
        self.set_target(None);
        let _ = timeout(RELEASE_LIMIT, async {
            while self.mapped.borrow_and_update().is_some() {
                if self.mapped.changed().await.is_err() {
                    return;
                }
            }
        })
        .await;
    }
}

/// By which protocol a mapping was made.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Protocol {
    Pcp,
    NatPmp,
    Upnp(upnp::Service),
}

/// A mapping as the gateway granted it.
#[derive(Debug, Clone)]
struct Mapping {
    external: SocketAddrV4,
    life: Duration,
    protocol: Protocol,
}

struct Mapper {
    dialer: Dialer,
    options: MapperOptions,
    /// Names our mappings to PCP servers: who knows it may change them.
    nonce: [u8; 12],
    mapped: watch::Sender<Option<SocketAddrV4>>,
}

impl Mapper {
    async fn run(self, mut targets: watch::Receiver<Option<MapTarget>>) {
        let mut wished = 0;
        loop {
            let target = *targets.borrow_and_update();
            let Some(target) = target else {
                // What was mapped is taken back, and said to be, by whoever made it.
                if targets.changed().await.is_err() {
                    return;
                }
                continue;
            };
            let changed = tokio::select! {
                changed = targets.changed() => changed,
                () = self.keep(target, &mut wished) => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// Maps and renews until dropped.
    async fn keep(&self, target: MapTarget, wished: &mut u16) {
        let mut release = Release { mapper: self, target, mapping: None };
        loop {
            let known = release.mapping.as_ref().map(|mapping| mapping.protocol.clone());
            let found = timeout(ATTEMPT_LIMIT, self.attempt(target, *wished, known)).await.ok().flatten();
            match found {
                Some(mapping) => {
                    if release.mapping.is_none() {
                        tracing::info!(protocol = ?mapping.protocol, "the gateway maps a port for direct connections");
                    }
                    *wished = mapping.external.port();
                    self.tell(Some(mapping.external));
                    let pause = (mapping.life / 2).max(SHORTEST_LIFE / 2);
                    release.mapping = Some(mapping);
                    sleep(pause).await;
                }
                // It may have restarted: everything is tried anew at once, by any protocol.
                None if release.mapping.take().is_some() => self.tell(None),
                None => {
                    tracing::debug!("the gateway maps no port");
                    self.tell(None);
                    sleep(AGAIN).await;
                }
            }
        }
    }

    fn tell(&self, external: Option<SocketAddrV4>) {
        self.mapped.send_if_modified(|present| std::mem::replace(present, external) != external);
    }

    /// One round: by the protocol that worked, or by all.
    async fn attempt(&self, target: MapTarget, wished: u16, known: Option<Protocol>) -> Option<Mapping> {
        let by_pcp = || gateway::pcp(target, &self.options, &self.nonce, wished, LIFETIME);
        let by_pmp = || gateway::nat_pmp(target, &self.options, wished, LIFETIME);
        let mapping = match known {
            Some(Protocol::Pcp) => by_pcp().await,
            Some(Protocol::NatPmp) => by_pmp().await,
            Some(Protocol::Upnp(service)) => upnp::map(&self.dialer, &service, target, wished, LIFETIME).await,
            None => {
                let mut found = by_pcp().await;
                if found.is_none() {
                    found = by_pmp().await;
                }
                if found.is_none()
                    && let Some(service) = upnp::find(&self.dialer, target, &self.options).await
                {
                    found = upnp::map(&self.dialer, &service, target, wished, LIFETIME).await;
                }
                found
            }
        };
        mapping.filter(|mapping| self.is_usable(*mapping.external.ip()) && mapping.external.port() != 0)
    }

    /// T-37: an address that others can reach.
    fn is_usable(&self, external: Ipv4Addr) -> bool {
        let never =
            external.is_unspecified() || external.is_loopback() || external.is_multicast() || external.is_broadcast();
        let [a, b, ..] = external.octets();
        // Shared address space (RFC 6598), benchmarking, IETF protocols with DS-Lite, 6to4 relays.
        let shared = a == 100 && (64..128).contains(&b)
            || a == 198 && (18..20).contains(&b)
            || a == 192 && b == 0 && matches!(external.octets()[2], 0)
            || external.octets()[..3] == [192, 88, 99];
        let private = external.is_private() || external.is_link_local() || external.is_documentation() || shared;
        // 0.0.0.0/8 and what is reserved beyond multicast.
        !never && a != 0 && a < 240 && (self.options.allow_private || !private)
    }
}

/// Takes the mapping back when the target changes or goes.
struct Release<'a> {
    mapper: &'a Mapper,
    target: MapTarget,
    mapping: Option<Mapping>,
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        let (target, options, nonce, dialer) =
            (self.target, self.mapper.options, self.mapper.nonce, self.mapper.dialer.clone());
        let mapped = self.mapper.mapped.clone();
        tokio::spawn(async move {
            let release = async {
                match mapping.protocol {
                    Protocol::Pcp => drop(gateway::pcp(target, &options, &nonce, 0, 0).await),
                    Protocol::NatPmp => drop(gateway::nat_pmp(target, &options, 0, 0).await),
                    Protocol::Upnp(service) => upnp::unmap(&dialer, &service, mapping.external.port()).await,
                }
            };
            let _ = timeout(RELEASE_LIMIT, release).await;
            mapped.send_if_modified(|present| {
                let ours = *present == Some(mapping.external);
                if ours {
                    *present = None;
                }
                ours
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DialerConfig;

    #[tokio::test]
    async fn t37_only_addresses_that_others_can_reach_are_taken() {
        let (mapped, _) = watch::channel(None);
        let dialer = Dialer::new(DialerConfig::default()).unwrap();
        let mut mapper = Mapper { dialer, options: MapperOptions::default(), nonce: [0; 12], mapped };
        for bad in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.1.1",
            "192.168.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "192.0.2.1",
        ] {
            assert!(!mapper.is_usable(bad.parse().unwrap()), "{bad}");
        }
        assert!(mapper.is_usable("8.8.4.4".parse().unwrap()) && mapper.is_usable("100.128.0.1".parse().unwrap()));
        mapper.options.allow_private = true;
        assert!(mapper.is_usable("10.0.0.1".parse().unwrap()) && !mapper.is_usable("127.0.0.1".parse().unwrap()));
    }
}
