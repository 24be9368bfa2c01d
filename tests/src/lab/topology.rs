//! The networks of the labs, and the path that must result in each.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context as _;
use codervpn_wire::derp_map::DerpMap;
use codervpn_wire::stun::Strictness;
use serde_json::Value;

use super::Machine;
use super::machine::NO_DUPLICATE_DETECTION;
use super::router::{Nat, OUTSIDE, Rules};
use crate::agent::WorkspaceAgent;
use crate::coderd::{Agent, Deployment, derp_map};
use crate::foreign::{self, Coordinator, CoordinatorOptions, EngineOptions, Process};
use crate::netns::{self, Namespace, ip};
use crate::relay::{Relay, RelayOptions, StunServer};

/// A network between client and agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// Both behind one router, on one switch.
    SameLan,
    /// A router that keeps ports on either side; both let in only what was called.
    EasyNat,
    /// As [`Topology::EasyNat`], with IPv6 behind firewalls beside it.
    DualStack,
    /// The client's router gives each destination another port; the agent's lets everybody in.
    HardNatAtClient,
    /// The other way round.
    HardNatAtAgent,
    /// The agent's router gives each destination another port, and the client's lets in only what was called.
    HardNatAgainstFilter,
    /// Other ports on both sides.
    HardNatBoth,
    /// The client's router drops UDP without a word.
    UdpBlocked,
    /// No IPv4; firewalls on both sides.
    Ipv6Only,
    /// IPv6 is switched off on every real interface; firewalls on both sides.
    Ipv4Only,
    /// The client's link to the internet takes 1,300 bytes: full-size packets of ours do not fit.
    SmallPath,
    /// Somebody else's VPN is the client's only way out.
    SecondVpn,
}

/// The path that must result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    Direct,
    Relay,
}

impl Topology {
    pub const ALL: [Self; 12] = [
        Self::SameLan,
        Self::EasyNat,
        Self::DualStack,
        Self::HardNatAtClient,
        Self::HardNatAtAgent,
        Self::HardNatAgainstFilter,
        Self::HardNatBoth,
        Self::UdpBlocked,
        Self::Ipv6Only,
        Self::Ipv4Only,
        Self::SmallPath,
        Self::SecondVpn,
    ];

    pub fn expected(self) -> Expected {
        match self {
            Self::HardNatAgainstFilter | Self::HardNatBoth | Self::UdpBlocked | Self::SmallPath => Expected::Relay,
            _ => Expected::Direct,
        }
    }

    fn client_router(self) -> Rules {
        let nat = match self {
            Self::HardNatAtClient | Self::HardNatBoth => Nat::Hard,
            Self::HardNatAtAgent => Nat::Open(CLIENT),
            Self::Ipv6Only | Self::Ipv4Only => Nat::Routed,
            _ => Nat::Easy,
        };
        Rules { nat, udp: self != Self::UdpBlocked }
    }

    fn agent_router(self) -> Rules {
        let nat = match self {
            Self::HardNatAtAgent | Self::HardNatAgainstFilter | Self::HardNatBoth => Nat::Hard,
            Self::HardNatAtClient => Nat::Open(AGENT),
            Self::Ipv6Only | Self::Ipv4Only => Nat::Routed,
            _ => Nat::Easy,
        };
        Rules { nat, udp: true }
    }

    fn has_v4(self) -> bool {
        self != Self::Ipv6Only
    }

    fn has_v6(self) -> bool {
        matches!(self, Self::Ipv6Only | Self::DualStack)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::SameLan => "same LAN",
            Self::EasyNat => "easy NAT both sides",
            Self::DualStack => "easy NAT and IPv6",
            Self::HardNatAtClient => "hard NAT at client",
            Self::HardNatAtAgent => "hard NAT at agent",
            Self::HardNatAgainstFilter => "hard NAT against filter",
            Self::HardNatBoth => "hard NAT both sides",
            Self::UdpBlocked => "UDP blocked",
            Self::Ipv6Only => "IPv6 only",
            Self::Ipv4Only => "IPv4 only",
            Self::SmallPath => "1,300-byte path",
            Self::SecondVpn => "second VPN",
        })
    }
}

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const AGENT: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
/// Deployment, relay and one STUN server; the other has an address of its own, so that mappings can be compared.
const SERVERS_V4: [&str; 2] = ["192.0.2.10", "192.0.2.11"];
const SERVERS_V6: [&str; 2] = ["2001:db8::10", "2001:db8::11"];
const STUN_PORT: u16 = 3478;
/// Ports of the deployments and of the relay of its own.
const OUR_PORT: u16 = 8080;
const GO_PORT: u16 = 8081;
const RELAY_PORT: u16 = 8082;
const SMALL: u32 = 1300;
/// Somebody else's VPN: outer addresses, and room inside for full-size packets of ours.
const VPN_SERVER: &str = "198.51.100.66";
const VPN_PORT: u16 = 5000;
const VPN_MTU: u32 = 1400;
/// Region of the relay of its own.
const RELAY_REGION: i64 = 7;

/// A lab that stands. Its client is the namespace in which it was built.
#[derive(Debug)]
pub struct Lab {
    pub topology: Topology,
    /// Where deployments and relays run.
    pub internet: Machine,
    pub agent: Machine,
    client_router: Namespace,
    server: IpAddr,
    stun: Vec<StunServer>,
    _agent_router: Option<Namespace>,
    _vpn: Option<(Namespace, Process, Process)>,
}

impl Lab {
    pub async fn build(topology: Topology) -> anyhow::Result<Self> {
        let (v4, v6) = (topology.has_v4(), topology.has_v6());
        netns::sysctl(NO_DUPLICATE_DETECTION)?;
        let (internet, agent) = (Machine::new("net")?, Machine::new("agt")?);
        let client_router = Namespace::new("crt")?;
        for namespace in [internet.namespace(), agent.namespace(), &client_router] {
            namespace.sysctl(NO_DUPLICATE_DETECTION)?;
        }
        let net = internet.namespace();
        net.sysctl("net/ipv4/ip_forward=1 net/ipv6/conf/all/forwarding=1")?;
        for address in SERVERS_V4.iter().filter(|_| v4).chain(SERVERS_V6.iter().filter(|_| v6)) {
            net.ip(&format!("addr add {address} dev lo"))?;
        }

        uplink(&client_router, net, "198.51.100.1", "2001:db8:a", topology)?;
        let agent_router = if topology == Topology::SameLan {
            switch(&client_router, &agent)?;
            None
        } else {
            client_cable(&client_router, topology)?;
            let router = Namespace::new("art")?;
            router.sysctl(NO_DUPLICATE_DETECTION)?;
            uplink(&router, net, "198.51.100.33", "2001:db8:b", topology)?;
            agent_cable(&router, &agent, topology)?;
            topology.agent_router().load(&router)?;
            Some(router)
        };
        topology.client_router().load(&client_router)?;
        let vpn = if topology == Topology::SecondVpn { Some(second_vpn(net).await?) } else { None };

        let servers: Vec<IpAddr> = SERVERS_V4
            .iter()
            .filter(|_| v4)
            .chain(SERVERS_V6.iter().filter(|_| v6))
            .map(|address| address.parse())
            .collect::<Result<_, _>>()?;
        let server = *servers.first().context("there is a server")?;
        let start = async move {
            let start = |ip| StunServer::start(SocketAddr::new(ip, STUN_PORT), Strictness::Strict);
            servers.into_iter().map(start).collect::<anyhow::Result<Vec<_>>>()
        };
        let stun = internet.run(start).await??;
        Ok(Self { topology, internet, agent, client_router, server, stun, _agent_router: agent_router, _vpn: vpn })
    }

    fn stun_servers(&self) -> Vec<SocketAddr> {
        self.stun.iter().map(StunServer::address).collect()
    }

    /// How many STUN requests were answered so far.
    pub fn stun_answers(&self) -> u64 {
        self.stun.iter().map(StunServer::answered).sum()
    }

    /// A deployment of ours in the internet.
    pub async fn deployment(&self) -> anyhow::Result<Arc<Deployment>> {
        let mut builder = Deployment::builder().listen(SocketAddr::new(self.server, OUR_PORT));
        for server in self.stun_servers() {
            builder = builder.stun(server);
        }
        Ok(Arc::new(self.internet.run(builder.start()).await??))
    }

    /// An agent of ours, on its machine; ready.
    pub async fn run_agent(&self, deployment: &Arc<Deployment>, agent: &Agent) -> anyhow::Result<WorkspaceAgent> {
        let (deployment, agent) = (Arc::clone(deployment), agent.clone());
        self.agent.run(async move { deployment.run_agent(&agent).await }).await?
    }

    /// A Go deployment in the internet, with a relay inside unless `derp_map` says otherwise.
    pub async fn go_coordinator(&self, derp_map: Option<Value>) -> anyhow::Result<Coordinator> {
        let mut flags = Vec::new();
        if derp_map.is_none() {
            let stun = derp_map::to_json(&derp_map::stun(&self.stun_servers()));
            flags.extend(["--derp-map".to_owned(), stun.to_string()]);
        }
        Coordinator::start(CoordinatorOptions {
            namespace: Some(self.internet.namespace()),
            listen: Some(SocketAddr::new(self.server, GO_PORT)),
            derp_map,
            flags,
            ..CoordinatorOptions::default()
        })
        .await
    }

    /// A Go agent on the agent's machine, on its relay.
    pub async fn go_agent(&self, url: &str, id: uuid::Uuid) -> anyhow::Result<foreign::Agent> {
        let mut agent = self.start_go_agent(url, id).await?;
        agent.process.relay_up().await?;
        Ok(agent)
    }

    /// The same, which may still be on its way to its relay.
    pub async fn start_go_agent(&self, url: &str, id: uuid::Uuid) -> anyhow::Result<foreign::Agent> {
        foreign::Agent::start(Some(self.agent.namespace()), url, id, &EngineOptions::default()).await
    }

    /// A relay that can be stopped alone, and a map with it and the STUN servers.
    pub async fn relay(&self) -> anyhow::Result<(Arc<Relay>, DerpMap)> {
        let listen = SocketAddr::new(self.server, RELAY_PORT);
        let options = RelayOptions { listen, region: RELAY_REGION, ..RelayOptions::default() };
        let relay = self.internet.run(Relay::start(options)).await??;
        let map = derp_map::joined([&relay.derp_map(), &derp_map::stun(&self.stun_servers())]);
        Ok((Arc::new(relay), map))
    }

    /// The client's router forwards no UDP any more; nobody is told.
    pub fn cut_udp(&self) -> anyhow::Result<()> {
        self.client_router.nft(
            "table inet cut {
                chain through { type filter hook forward priority -10; policy accept; meta l4proto udp drop; }
            }",
        )
    }

    pub fn restore_udp(&self) -> anyhow::Result<()> {
        self.client_router.nft("delete table inet cut")
    }
}

/// The cable between a router and the internet. `outer` is the internet's end, the router has the next address.
fn uplink(router: &Namespace, net: &Namespace, outer: &str, outer_v6: &str, topology: Topology) -> anyhow::Result<()> {
    let (near, far) = (OUTSIDE, format!("to-{}", router.name()));
    if topology.has_v4() {
        let first: Ipv4Addr = outer.parse()?;
        let second = Ipv4Addr::from(u32::from(first) + 1);
        router.join_to(net, &format!("{second}/30"), &format!("{first}/30"))?;
        router.default_route(first.into())?;
        if topology.has_v6() {
            router.ip(&format!("addr add {outer_v6}::2/64 dev {near} nodad"))?;
            net.ip(&format!("addr add {outer_v6}::1/64 dev {far} nodad"))?;
        }
    } else {
        router.join_to(net, &format!("{outer_v6}::2/64"), &format!("{outer_v6}::1/64"))?;
    }
    if topology.has_v6() {
        router.default_route(format!("{outer_v6}::1").parse()?)?;
    }
    if topology == Topology::SmallPath && router.name() == "crt" {
        router.ip(&format!("link set {near} mtu {SMALL}"))?;
        net.ip(&format!("link set {far} mtu {SMALL}"))?;
    }
    // Without translation the internet has to know what lies behind.
    let behind =
        if router.name() == "crt" { ("10.1.0.0/24", "2001:db8:1::/64") } else { ("10.2.0.0/24", "2001:db8:2::/64") };
    if topology == Topology::Ipv4Only {
        let first: Ipv4Addr = outer.parse()?;
        net.ip(&format!("route add {} via {}", behind.0, Ipv4Addr::from(u32::from(first) + 1)))?;
        no_v6(router, near)?;
        no_v6(net, &far)?;
    }
    if topology.has_v6() {
        net.ip(&format!("route add {} via {outer_v6}::2", behind.1))?;
    }
    Ok(())
}

fn no_v6(namespace: &Namespace, interface: &str) -> anyhow::Result<()> {
    namespace.sysctl(&format!("net/ipv6/conf/{interface}/disable_ipv6=1"))
}

/// The client and its router.
fn client_cable(router: &Namespace, topology: Topology) -> anyhow::Result<()> {
    let (v4, v6) = (("10.1.0.2/24", "10.1.0.1/24"), ("2001:db8:1::2/64", "2001:db8:1::1/64"));
    if topology.has_v4() {
        router.join(v4.0, v4.1)?;
        if topology != Topology::SecondVpn {
            ip("route add default via 10.1.0.1")?;
        }
        if topology.has_v6() {
            ip(&format!("addr add {} dev to-crt nodad", v6.0))?;
            router.ip(&format!("addr add {} dev eth0 nodad", v6.1))?;
        }
    } else {
        router.join(v6.0, v6.1)?;
    }
    if topology.has_v6() {
        ip("route add default via 2001:db8:1::1")?;
    }
    if topology == Topology::Ipv4Only {
        netns::sysctl("net/ipv6/conf/to-crt/disable_ipv6=1")?;
        no_v6(router, "eth0")?;
    }
    Ok(())
}

fn agent_cable(router: &Namespace, agent: &Machine, topology: Topology) -> anyhow::Result<()> {
    let agent = agent.namespace();
    let (v4, v6) = (("10.2.0.2/24", "10.2.0.1/24"), ("2001:db8:2::2/64", "2001:db8:2::1/64"));
    if topology.has_v4() {
        agent.join_to(router, v4.0, v4.1)?;
        agent.default_route("10.2.0.1".parse()?)?;
        if topology.has_v6() {
            agent.ip(&format!("addr add {} dev to-art nodad", v6.0))?;
            router.ip(&format!("addr add {} dev to-agt nodad", v6.1))?;
        }
    } else {
        agent.join_to(router, v6.0, v6.1)?;
    }
    if topology.has_v6() {
        agent.default_route("2001:db8:2::1".parse()?)?;
    }
    if topology == Topology::Ipv4Only {
        no_v6(agent, "to-art")?;
        no_v6(router, "to-agt")?;
    }
    Ok(())
}

/// Client and agent on one switch, which is the router's.
fn switch(router: &Namespace, agent: &Machine) -> anyhow::Result<()> {
    router.ip("link add br0 type bridge forward_delay 0")?;
    router.ip("addr add 10.1.0.1/24 dev br0")?;
    router.ip("link set br0 up")?;
    router.join("10.1.0.2/24", "10.1.0.200/32")?;
    router.ip("link set eth0 master br0")?;
    ip("route add default via 10.1.0.1")?;
    let agent = agent.namespace();
    agent.join_to(router, "10.1.0.3/24", "10.1.0.201/32")?;
    router.ip("link set to-agt master br0")?;
    agent.default_route("10.1.0.1".parse()?)
}

/// The client reaches the VPN's server and nothing else by its cable; everything goes through the VPN.
async fn second_vpn(net: &Namespace) -> anyhow::Result<(Namespace, Process, Process)> {
    let server = Namespace::new("vpn")?;
    uplink(&server, net, "198.51.100.65", "2001:db8:c", Topology::SecondVpn)?;
    ip(&format!("route add {VPN_SERVER} via 10.1.0.1"))?;
    let mtu = VPN_MTU.to_string();
    let far = ["--tun", "corp1", "--mtu", &mtu, "--listen", &format!("{VPN_SERVER}:{VPN_PORT}")];
    let mut far = Process::spawn(Some(&server), "vpn", far)?;
    let peer = format!("{VPN_SERVER}:{VPN_PORT}");
    let near = ["--tun", "corp0", "--mtu", &mtu, "--listen", "10.1.0.2:5000", "--peer", &peer];
    let mut near = Process::spawn(None, "vpn", near)?;
    far.event("ready").await?;
    near.event("ready").await?;
    server.ip("addr add 10.8.0.1/24 dev corp1")?;
    server.ip("link set corp1 up")?;
    ip("addr add 10.8.0.2/24 dev corp0")?;
    ip("link set corp0 up")?;
    ip("route add default dev corp0")?;
    server.sysctl("net/ipv4/ip_forward=1")?;
    server.nft(&format!(
        "table inet lab {{
            chain outwards {{ type nat hook postrouting priority srcnat; policy accept; iifname corp1 oifname {OUTSIDE} masquerade; }}
            chain input {{
                type filter hook input priority filter; policy accept;
                ct state established,related accept
                iifname {OUTSIDE} udp dport != {VPN_PORT} drop
            }}
        }}"
    ))?;
    Ok((server, far, near))
}
