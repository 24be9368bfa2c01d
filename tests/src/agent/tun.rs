//! A real device for an agent: opened and routed as the daemon does it, so that both ends of a benchmark are alike.

use std::net::Ipv6Addr;

use anyhow::Context as _;
use codervpn_host::Paths;
use codervpn_host::routes::{Prefix, RouteConfig, Routes};
use codervpn_host::tun::{MTU, Tun};
use codervpn_wire::node::CODER_PREFIX;
use tempfile::TempDir;

/// What goes with the device: to be kept as long as it is.
#[derive(Debug)]
pub(super) struct Link {
    _routes: Routes,
    _records: TempDir,
}

/// In the network namespace of the caller. The link's address, rule and route end with the device or the namespace.
pub(super) async fn open(name: &str, address: Ipv6Addr) -> anyhow::Result<(Tun, Link)> {
    let tun = Tun::open(name, MTU).context("cannot open the TUN device")?;
    let records = tempfile::tempdir().context("cannot make a folder")?;
    let paths = Paths::new(records.path(), records.path());
    let mut octets = [0; 16];
    octets[..CODER_PREFIX.len()].copy_from_slice(&CODER_PREFIX);
    let wanted = RouteConfig::new(address, Prefix::new(Ipv6Addr::from(octets), 48));
    let routes = Routes::apply(&tun, &wanted, &paths).await.context("cannot route to the TUN device")?;
    Ok((tun, Link { _routes: routes, _records: records }))
}
