//! Where the STUN servers of a map are: names resolved, at the same time and each within a limit.
//!
//! A map has up to 4096 nodes, a report needs two answers in each family: regions are taken in turn, the first server of
//! each before the second of any, and only so many in all. A fixed address of the map is used without DNS, as for relays.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use codervpn_wire::derp_map::{DerpMap, Reach, RegionId, RelayNode};
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::timeout;

use crate::dialer::Dialer;

/// Servers of one map that are resolved.
const MAX_SERVERS: usize = 48;
/// Names asked for at the same time: the system's resolver takes a thread for each.
const AT_ONCE: usize = 8;
/// Addresses taken of one server and family: a second one for anycast names, which are one server by name only.
const PER_FAMILY: usize = 2;

/// Servers with the region that names them. Whoever does not resolve within `limit` is left out.
pub async fn stun_servers(dialer: &Dialer, map: &DerpMap, limit: Duration) -> Vec<(RegionId, SocketAddr)> {
    let lookups: Vec<_> = chosen(map)
        .into_iter()
        .map(|(region, node, port)| lookup(dialer.clone(), region, node.clone(), port, limit))
        .collect();
    let found: Vec<Vec<(RegionId, SocketAddr)>> = stream::iter(lookups).buffered(AT_ONCE).collect().await;
    found.concat()
}

async fn lookup(
    dialer: Dialer,
    region: RegionId,
    node: RelayNode,
    port: u16,
    limit: Duration,
) -> Vec<(RegionId, SocketAddr)> {
    let addresses = timeout(limit, addresses(&dialer, &node)).await.unwrap_or_default();
    addresses.into_iter().map(|ip| (region, SocketAddr::new(ip, port))).collect()
}

/// Each host and port once.
fn chosen(map: &DerpMap) -> Vec<(RegionId, &RelayNode, u16)> {
    let deepest = map.regions.values().map(|region| region.nodes.len()).max().unwrap_or(0);
    let turns = (0..deepest).flat_map(|turn| {
        map.regions.values().filter_map(move |region| {
            let node = region.nodes.iter().filter(|node| node.stun_port.is_some()).nth(turn)?;
            Some((region.id, node, node.stun_port?))
        })
    });
    let mut seen = HashSet::new();
    turns
        .filter_map(|(region, node, port)| {
            let new = seen.insert((&node.host, port, node.stun_test_ip, v4(node), v6(node)));
            new.then_some((region, node, port))
        })
        .take(MAX_SERVERS)
        .collect()
}

fn v4(node: &RelayNode) -> Option<IpAddr> {
    if let Reach::At(address) = node.ipv4 { Some(address.into()) } else { None }
}

fn v6(node: &RelayNode) -> Option<IpAddr> {
    if let Reach::At(address) = node.ipv6 { Some(address.into()) } else { None }
}

async fn addresses(dialer: &Dialer, node: &RelayNode) -> Vec<IpAddr> {
    if let Some(address) = node.stun_test_ip {
        return vec![address];
    }
    let mut addresses: Vec<IpAddr> = v4(node).into_iter().chain(v6(node)).collect();
    let ask_v4 = node.ipv4 == Reach::Resolve;
    let ask_v6 = node.ipv6 == Reach::Resolve;
    if ask_v4 || ask_v6 {
        match dialer.resolve(&node.host).await {
            Ok(found) => {
                let found = found.into_iter().map(|ip| ip.to_canonical());
                let (found_v4, found_v6): (Vec<_>, Vec<_>) = found.partition(IpAddr::is_ipv4);
                addresses.extend(found_v4.into_iter().filter(|_| ask_v4).take(PER_FAMILY));
                addresses.extend(found_v6.into_iter().filter(|_| ask_v6).take(PER_FAMILY));
            }
            Err(reason) => tracing::debug!(host = node.host, reason, "cannot resolve a STUN server"),
        }
    }
    addresses
}

#[cfg(test)]
mod tests {
    use codervpn_wire::derp_map::{DerpMapFields, RegionFields, RelayNodeFields};

    use super::*;
    use crate::config::DialerConfig;

    fn node(host: &str, stun_port: i32) -> RelayNodeFields {
        RelayNodeFields { name: host.into(), host_name: host.into(), stun_port, ..RelayNodeFields::default() }
    }

    fn map(regions: Vec<Vec<RelayNodeFields>>) -> DerpMap {
        let region = |(index, nodes)| (index as i64 + 1, RegionFields { nodes, ..RegionFields::default() });
        let fields =
            DerpMapFields { regions: regions.into_iter().enumerate().map(region).collect(), ..Default::default() };
        DerpMap::from_fields(&fields).0
    }

    async fn resolved(map: &DerpMap) -> Vec<String> {
        let dialer = Dialer::new(DialerConfig::default()).unwrap();
        let servers = stun_servers(&dialer, map, Duration::from_secs(5)).await;
        servers.into_iter().map(|(region, address)| format!("{region} {address}")).collect()
    }

    #[tokio::test]
    async fn fixed_addresses_need_no_name_and_ports_have_a_default() {
        let mut test_ip = node("nowhere.invalid", 5000);
        test_ip.stun_test_ip = "192.0.2.9".into();
        let mut fixed = node("nowhere.invalid", 0);
        fixed.ipv4 = "192.0.2.1".into();
        fixed.ipv6 = "2001:db8::1".into();
        let mut only_v4 = node("nowhere.invalid", 3479);
        only_v4.ipv4 = "192.0.2.2".into();
        only_v4.ipv6 = "none".into();
        let none = node("127.0.0.1", -1);
        let map = map(vec![vec![none.clone(), fixed, only_v4], vec![test_ip], vec![none]]);
        assert_eq!(
            resolved(&map).await,
            ["1 192.0.2.1:3478", "1 [2001:db8::1]:3478", "2 192.0.2.9:5000", "1 192.0.2.2:3479"]
        );
    }

    #[tokio::test]
    async fn names_are_resolved_and_those_that_are_none_are_left_out() {
        let map = map(vec![vec![node("nowhere.invalid", 0)], vec![node("127.0.0.1", 0)], vec![node("localhost", 7)]]);
        let servers = resolved(&map).await;
        assert!(servers.contains(&"2 127.0.0.1:3478".into()), "{servers:?}");
        assert!(servers.iter().all(|server| !server.starts_with('1')), "{servers:?}");
        assert!(servers.iter().any(|server| server.starts_with('3')), "{servers:?}");
    }

    #[test]
    fn a_huge_map_is_not_resolved_in_full_and_every_region_comes_before_any_second_server() {
        let regions = (0..200).map(|r| (0..16).map(|n| node(&format!("s{r}-{n}.invalid"), 0)).collect()).collect();
        let map = map(regions);
        let chosen = chosen(&map);
        assert_eq!(chosen.len(), MAX_SERVERS);
        let regions: HashSet<_> = chosen.iter().map(|(region, ..)| region).collect();
        assert_eq!(regions.len(), MAX_SERVERS);
    }

    #[test]
    fn one_server_in_many_regions_is_asked_once() {
        let map = map((0..20).map(|_| vec![node("stun.example", 0)]).collect());
        assert_eq!(chosen(&map).len(), 1);
    }
}
