//! Places where parties live: how a LAN is joined to the Internet. Decides addresses, so that those who describe a network
//! need not.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::ms;
use crate::nat::{Firewall, Nat, Scope};
use crate::network::{HostId, INTERNET, Network, Passage, SegmentId};
use crate::wire::Wire;

/// One of the world's sites.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SiteId(pub(crate) usize);

/// How a site has IPv4.
#[derive(Clone, Debug)]
pub enum Family4 {
    None,
    /// Addresses of its own, nothing between it and the Internet.
    Public,
    /// Addresses of its own behind a firewall.
    Firewalled(Scope),
    /// Addresses of the provider's network: for sites behind a provider's NAT.
    Provider,
    /// Private addresses behind a NAT.
    Translated(Nat),
    /// The same behind the provider's NAT, too.
    TwiceTranslated {
        own: Nat,
        provider: Nat,
    },
}

/// A LAN and what joins it to the Internet.
#[derive(Clone, Debug)]
pub struct Site {
    pub v4: Family4,
    /// `None`: no IPv6. A firewall with endpoint-independent filtering lets everything in.
    pub v6: Option<Scope>,
    /// The line to the provider.
    pub line: Wire,
    /// Each host's attachment to the LAN.
    pub lan: Wire,
    /// Every host of every such site has this address, too.
    pub bridge: Option<Ipv4Addr>,
    /// The third byte of `192.168.x.0`: sites may well have the same.
    pub subnet: u8,
}

impl Default for Site {
    fn default() -> Self {
        Self {
            v4: Family4::Translated(Nat::easy()),
            v6: None,
            line: Wire { delay: ms(8), ..Wire::default() },
            lan: Wire::default(),
            bridge: None,
            subnet: 1,
        }
    }
}

impl Site {
    #[must_use]
    pub fn behind(nat: Nat) -> Self {
        Self { v4: Family4::Translated(nat), ..Self::default() }
    }

    #[must_use]
    pub fn public() -> Self {
        Self { v4: Family4::Public, ..Self::default() }
    }

    #[must_use]
    pub fn with_v6(self) -> Self {
        Self { v6: Some(Scope::AddressPort), ..self }
    }
}

/// A site that has been built.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) segment: SegmentId,
    number: u8,
    v4: bool,
    /// The first three bytes of its IPv4 addresses.
    net: [u8; 3],
    v6: bool,
    lan: Wire,
    bridge: Option<Ipv4Addr>,
    hosts: u8,
}

/// Providers' NATs that several sites share, by name.
#[derive(Debug, Default)]
pub(crate) struct Sites {
    pub(crate) built: Vec<Built>,
}

fn outer_address(number: u8) -> IpAddr {
    Ipv4Addr::new(5, 9, number, 1).into()
}

impl Sites {
    /// Builds a site. With `provider` it is attached to that segment instead of the Internet.
    pub(crate) fn add(&mut self, site: Site, provider: Option<SegmentId>, network: &mut Network) -> SiteId {
        let number = self.built.len() as u8 + 1;
        let Site { v4, v6, line, lan, bridge, subnet } = site;
        let has_v4 = !matches!(v4, Family4::None);
        let net = match v4 {
            Family4::Public | Family4::Firewalled(_) => [5, 10, number],
            Family4::Provider => [100, 64, 100 + number],
            _ => [192, 168, subnet],
        };
        let mut outside = provider.unwrap_or(INTERNET);
        let mut outer: IpAddr = match provider {
            Some(_) => Ipv4Addr::new(100, 64, number, 1).into(),
            None => outer_address(number),
        };
        let v6_passage = |scope: Option<Scope>| match scope {
            None => Passage::Closed,
            Some(Scope::Any) => Passage::Open,
            Some(scope) => Passage::Stateful(Firewall::new(scope)),
        };
        let passage = match v4 {
            Family4::None => Passage::Closed,
            Family4::Public | Family4::Provider => Passage::Open,
            Family4::Firewalled(scope) => Passage::Stateful(Firewall::new(scope)),
            Family4::Translated(nat) => Passage::Translated(nat),
            Family4::TwiceTranslated { own, provider } => {
                let wire = Wire { delay: ms(2), ..Wire::default() };
                let v6 = if v6.is_some() { Passage::Open } else { Passage::Closed };
                outside = add_provider(network, provider, v6, outer, wire);
                outer = Ipv4Addr::new(100, 64, number, 1).into();
                Passage::Translated(own)
            }
        };
        let outer = matches!(passage, Passage::Translated(_)).then_some(outer);
        let (segment, _) = network.add_segment(outside, outer, passage, v6_passage(v6), line);
        self.built.push(Built { segment, number, v4: has_v4, net, v6: v6.is_some(), lan, bridge, hosts: 0 });
        SiteId(self.built.len() - 1)
    }

    /// One more machine on the LAN of a site.
    pub(crate) fn add_host(&mut self, site: SiteId, network: &mut Network) -> HostId {
        let built = &mut self.built[site.0];
        let (v4, v6) = built.next_addresses();
        let host = network.add_host(built.segment, v4, v6, built.lan.clone());
        network.hosts[host.0].bridges = built.bridge.map(IpAddr::from).into_iter().collect();
        host
    }

    /// Takes a machine to another site.
    pub(crate) fn move_host(&mut self, host: HostId, site: SiteId, network: &mut Network) {
        let built = &mut self.built[site.0];
        let (v4, v6) = built.next_addresses();
        network.attach(host, built.segment, v4, v6);
        network.hosts[host.0].wire = built.lan.clone();
    }
}

impl Built {
    fn next_addresses(&mut self) -> (Option<IpAddr>, Option<IpAddr>) {
        let number = 9 + self.hosts;
        self.hosts += 1;
        let [a, b, c] = self.net;
        let v4 = Ipv4Addr::new(a, b, c, number);
        let v6 = Ipv6Addr::new(0x2a01, 0x4f8, u16::from(self.number), 0, 0, 0, 0, u16::from(number));
        (self.v4.then_some(v4.into()), self.v6.then_some(v6.into()))
    }
}

/// A provider's NAT with nothing behind it yet.
pub(crate) fn add_provider(network: &mut Network, nat: Nat, v6: Passage, outer: IpAddr, wire: Wire) -> SegmentId {
    network.add_segment(INTERNET, Some(outer), Passage::Translated(nat), v6, wire).0
}
