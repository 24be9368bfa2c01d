//! The rtnetlink side. One handle, one request at a time: the kernel allows one dump per socket
//! and answers a second with EBUSY (N-11), and `&mut self` keeps it that way.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;

use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteType};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion, LinkUnspec, RouteMessageBuilder};
use rustix::io::Errno;
use tokio::task::JoinHandle;

use super::record::Record;
use super::{Error, Prefix, RULE_PRIORITY, RouteConfig, TABLE, TX_QUEUE_LENGTH};
use crate::Paths;
use crate::tun::{GSO_MAX_SIZE, SEGMENTS_PER_SEND, Tun};

/// More copies of one rule than any number of crashes leaves, since each start removes them; a
/// bound so that a kernel that keeps answering "deleted" cannot hold us.
const MAX_RULE_DELETIONS: u32 = 16;

/// What `ip -6 route` shows in no table of its own.
const RT_TABLE_MAIN: u32 = 254;

/// The tunnel's place in the machine's routing. [`Routes::undo`] takes it back; dropping it
/// without leaves the rule, as a crash does.
#[derive(Debug)]
pub struct Routes {
    netlink: Netlink,
    config: RouteConfig,
    interface: String,
    index: u32,
    mtu: u32,
    paths: Paths,
    /// Whether the kernel has policy rules; without, the route stands in table main.
    has_rule: bool,
}

impl Routes {
    /// Sets the link up, gives it our address, and routes the prefix to it. On failure nothing
    /// stays behind.
    pub async fn apply(tun: &Tun, config: &RouteConfig, paths: &Paths) -> Result<Self, Error> {
        if !std::path::Path::new("/proc/net/if_inet6").exists() && std::path::Path::new("/proc/net/dev").exists() {
            return Err(Error::NoIpv6);
        }
        let mut routes = Routes {
            netlink: Netlink::connect()?,
            config: config.clone(),
            interface: tun.name().to_owned(),
            index: tun.index(),
            mtu: tun.mtu(),
            paths: paths.clone(),
            has_rule: true,
        };
        routes.refuse_foreign_routes().await?;
        match routes.repair().await {
            Ok(()) => Ok(routes),
            Err(error) => {
                if let Err(left) = routes.undo().await {
                    tracing::warn!(error = %left, "cannot take back routes");
                }
                Err(error)
            }
        }
    }

    /// Makes everything as it shall be, whatever another program has done to it since.
    pub async fn repair(&mut self) -> Result<(), Error> {
        self.set_up_link().await?;
        self.add_address().await?;
        Record::of(&self.config).save(&self.paths)?;
        self.has_rule = self.replace_rule().await?;
        let table = if self.has_rule { self.config.table } else { RT_TABLE_MAIN };
        self.add_route(table).await
    }

    /// Whether packets for the prefix still take our way; if not, everything is put back and the answer is true. Asks
    /// the kernel two small questions, so it may be called often.
    pub async fn check(&mut self) -> Result<bool, Error> {
        if self.is_link_right().await? && self.is_way_right().await {
            return Ok(false);
        }
        self.repair().await?;
        Ok(true)
    }

    async fn is_link_right(&mut self) -> Result<bool, Error> {
        let mut links = self.netlink.handle.link().get().match_index(self.index).execute();
        let mut right = false;
        while let Some(link) = links.try_next().await.map_err(|error| netlink_error("look at the interface", error))? {
            right |= link.header.flags.contains(LinkFlags::Up)
                && link.attributes.iter().any(|a| matches!(a, LinkAttribute::Mtu(mtu) if *mtu == self.mtu));
        }
        Ok(right)
    }

    /// The kernel's own choice of a way covers rule, route and address at once.
    async fn is_way_right(&mut self) -> bool {
        // The first address of the prefix is nobody's.
        let request =
            RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(self.config.prefix.address, 128).build();
        let mut found = self.netlink.handle.route().get(request).execute();
        let mut right = false;
        // An error says that there is no way at all.
        while let Ok(Some(way)) = found.try_next().await {
            let here = |a: &RouteAttribute| matches!(a, RouteAttribute::Oif(index) if *index == self.index);
            let as_us = |a: &RouteAttribute| matches!(a, RouteAttribute::PrefSource(RouteAddress::Inet6(source)) if *source == self.config.address);
            right = way.attributes.iter().any(here) && way.attributes.iter().any(as_us);
        }
        right
    }

    /// False on kernels without policy routing: another VPN's default route may then win.
    pub fn has_rule(&self) -> bool {
        self.has_rule
    }

    /// Removes rule and route. Addresses go with the device.
    pub async fn undo(mut self) -> Result<(), Error> {
        self.netlink.delete_rules(self.config.rule_priority, self.config.table).await?;
        let table = if self.has_rule { self.config.table } else { RT_TABLE_MAIN };
        let route = self.route(table);
        match self.netlink.handle.route().del(route).execute().await {
            Ok(()) => {}
            // Gone with its device or never made.
            Err(error) if has_code(&error, &[Errno::SRCH, Errno::NODEV, Errno::NOENT]) => {}
            Err(error) => return Err(netlink_error("remove the route", error)),
        }
        Record::delete(&self.paths)
    }

    /// No link-local address (hence no router solicitations, no reports), IPv6 on for this link
    /// only, MTU, queue, up: in this order, because the first must precede the last.
    async fn set_up_link(&mut self) -> Result<(), Error> {
        let mode = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
        let message = LinkUnspec::new_with_index(self.index)
            .append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![mode]))
            .build();
        // Refused while the link's IPv6 is off on some kernels; the address then still works and
        // only noise on the link is the price.
        if let Err(error) = self.netlink.handle.link().set(message).execute().await {
            tracing::debug!(%error, "the link keeps its automatic link-local address");
        }
        self.enable_ipv6()?;
        let message = LinkUnspec::new_with_index(self.index)
            .mtu(self.mtu)
            .append_extra_attribute(LinkAttribute::TxQueueLen(TX_QUEUE_LENGTH))
            .up()
            .build();
        self.netlink
            .handle
            .link()
            .set(message)
            .execute()
            .await
            .map_err(|error| netlink_error("set the network interface up", error))?;
        // Old kernels cannot be told; then a super-packet takes two sends.
        let message = LinkUnspec::new_with_index(self.index)
            .append_extra_attribute(LinkAttribute::GsoMaxSize(GSO_MAX_SIZE))
            .append_extra_attribute(LinkAttribute::GsoMaxSegs(SEGMENTS_PER_SEND))
            .build();
        if let Err(error) = self.netlink.handle.link().set(message).execute().await {
            tracing::debug!(%error, "super-packets keep their size");
        }
        Ok(())
    }

    /// The switch of this one link; the machine's own setting is never touched (3.2).
    fn enable_ipv6(&self) -> Result<(), Error> {
        let path: PathBuf = ["/proc/sys/net/ipv6/conf", &self.interface, "disable_ipv6"].iter().collect();
        match std::fs::read(&path) {
            Ok(value) if value.starts_with(b"0") => return Ok(()),
            // Without /proc the address call below will say what is wrong.
            Err(_) => return Ok(()),
            Ok(_) => {}
        }
        std::fs::write(&path, "0").map_err(|source| Error::Ipv6Disabled {
            interface: self.interface.clone(),
            path,
            source,
        })
    }

    async fn add_address(&mut self) -> Result<(), Error> {
        let mut request = self.netlink.handle.address().add(self.index, IpAddr::V6(self.config.address), 128).replace();
        // No duplicate detection: nobody else is on this link, and a tentative address cannot be
        // used yet. No prefix route: ours is the one below.
        request
            .message_mut()
            .attributes
            .push(AddressAttribute::Flags(AddressFlags::Nodad | AddressFlags::Noprefixroute));
        match request.execute().await {
            Ok(()) => Ok(()),
            Err(error) if has_code(&error, &[Errno::AFNOSUPPORT, Errno::OPNOTSUPP]) => Err(Error::NoIpv6),
            Err(error) => Err(netlink_error("set the tunnel's address", error)),
        }
    }

    async fn add_route(&mut self, table: u32) -> Result<(), Error> {
        let route = self.route(table);
        self.netlink
            .handle
            .route()
            .add(route)
            .replace()
            .execute()
            .await
            .map_err(|error| netlink_error("set the tunnel's route", error))
    }

    fn route(&self, table: u32) -> RouteMessage {
        RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(self.config.prefix.address, self.config.prefix.length)
            .output_interface(self.index)
            .pref_source(self.config.address)
            .table_id(table)
            .protocol(RouteProtocol::Static)
            .build()
    }

    /// Exactly one rule of ours, also after crashes. False when the kernel has no rules.
    async fn replace_rule(&mut self) -> Result<bool, Error> {
        match self.netlink.delete_rules(self.config.rule_priority, self.config.table).await {
            Ok(0) => {}
            Ok(count) => tracing::debug!(count, "removed older routing rules of ours"),
            Err(Error::Netlink { source, .. }) if no_rules(&source) => {
                tracing::warn!(
                    "this kernel has no policy routing: the tunnel's route is in table main, where another VPN's may win"
                );
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        let mut request = self
            .netlink
            .handle
            .rule()
            .add()
            .v6()
            .destination_prefix(self.config.prefix.address, self.config.prefix.length)
            .table_id(self.config.table)
            .priority(self.config.rule_priority)
            .action(RuleAction::ToTable);
        // systemd-networkd deletes rules of strangers on restart, but not the kernel's (0.10).
        request.message_mut().attributes.push(RuleAttribute::Protocol(RouteProtocol::Kernel));
        match request.execute().await {
            Ok(()) => Ok(true),
            Err(error) if has_code(&error, &[Errno::EXIST]) => Ok(true),
            Err(error) if has_code(&error, &[Errno::OPNOTSUPP, Errno::AFNOSUPPORT]) => {
                tracing::warn!(
                    "this kernel has no policy routing: the tunnel's route is in table main, where another VPN's may win"
                );
                Ok(false)
            }
            Err(error) => Err(netlink_error("add the routing rule", error)),
        }
    }

    /// A route to somewhere inside our prefix over another link means that another product (or a
    /// second tunnel of ours) uses the same network.
    async fn refuse_foreign_routes(&mut self) -> Result<(), Error> {
        let request = RouteMessageBuilder::<Ipv6Addr>::new().build();
        let mut found = self.netlink.handle.route().get(request).execute();
        let mut taken = None;
        // Read to the end: a dump that is left half read blocks the next one.
        while let Some(route) = found.try_next().await.map_err(|error| netlink_error("list routes", error))? {
            taken = taken.or_else(|| self.foreign(&route));
        }
        let Some((prefix, index, table)) = taken else {
            return Ok(());
        };
        Err(Error::RouteTaken { route: prefix, interface: interface_name(index), table })
    }

    fn foreign(&self, route: &RouteMessage) -> Option<(Prefix, u32, u32)> {
        if matches!(route.header.kind, RouteType::Multicast | RouteType::BlackHole | RouteType::Unreachable) {
            return None;
        }
        let mut table = u32::from(route.header.table);
        let (mut destination, mut link) = (None, None);
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Destination(RouteAddress::Inet6(address)) => {
                    destination = Some(*address);
                }
                RouteAttribute::Oif(index) => link = Some(*index),
                RouteAttribute::Table(number) => table = *number,
                _ => {}
            }
        }
        let prefix = Prefix::new(destination?, route.header.destination_prefix_length);
        let link = link?;
        (link != self.index && self.config.prefix.contains(&prefix)).then_some((prefix, link, table))
    }
}

/// Removes the rules of a dead daemon; how many there were. Needs no runtime: it brings its own,
/// on a thread of its own so that it may also be called from within one.
pub(crate) fn remove_leftovers(paths: &Paths) -> Result<u32, Error> {
    let record = Record::load(paths);
    let mut wanted = vec![(RULE_PRIORITY, TABLE)];
    if let Some(record) = &record {
        let recorded = (record.rule_priority, record.table);
        if !wanted.contains(&recorded) {
            wanted.push(recorded);
        }
    }
    let worker = std::thread::Builder::new().name("cleanup".to_owned()).spawn(move || -> Result<u32, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(|source| Error::Netlink { what: "look for routing rules", source })?;
        runtime.block_on(async {
            let mut netlink = Netlink::connect()?;
            let mut removed = 0;
            for (priority, table) in wanted {
                removed += match netlink.delete_rules(priority, table).await {
                    Err(Error::Netlink { source, .. }) if no_rules(&source) => 0,
                    other => other?,
                };
            }
            Ok(removed)
        })
    });
    let outcome =
        worker.map_err(|source| Error::Netlink { what: "look for routing rules", source })?.join().unwrap_or_else(
            |_| Err(Error::Netlink { what: "look for routing rules", source: io::Error::other("the worker failed") }),
        );
    let removed = outcome?;
    if record.is_some() {
        Record::delete(paths)?;
    }
    Ok(removed)
}

/// A netlink socket and the task that reads it.
#[derive(Debug)]
struct Netlink {
    handle: Handle,
    reader: JoinHandle<()>,
}

impl Netlink {
    /// Must be called within a runtime.
    fn connect() -> Result<Self, Error> {
        let (connection, handle, _) =
            rtnetlink::new_connection().map_err(|source| Error::Netlink { what: "open a netlink socket", source })?;
        Ok(Netlink { handle, reader: tokio::spawn(connection) })
    }

    /// Deletes every IPv6 rule with this priority *and* table; how many there were.
    async fn delete_rules(&mut self, priority: u32, table: u32) -> Result<u32, Error> {
        let rules: Vec<RuleMessage> = self
            .handle
            .rule()
            .get(IpVersion::V6)
            .execute()
            .try_collect()
            .await
            .map_err(|error| netlink_error("list routing rules", error))?;
        let mut deleted = 0;
        for rule in rules {
            if deleted == MAX_RULE_DELETIONS || !is_rule(&rule, priority, table) {
                continue;
            }
            match self.handle.rule().del(rule).execute().await {
                Ok(()) => deleted += 1,
                // Somebody else was faster.
                Err(error) if has_code(&error, &[Errno::NOENT, Errno::SRCH]) => {}
                Err(error) => return Err(netlink_error("remove a routing rule", error)),
            }
        }
        Ok(deleted)
    }
}

impl Drop for Netlink {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn is_rule(rule: &RuleMessage, priority: u32, table: u32) -> bool {
    let mut rule_table = u32::from(rule.header.table);
    let mut rule_priority = None;
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Table(number) => rule_table = *number,
            RuleAttribute::Priority(number) => rule_priority = Some(*number),
            _ => {}
        }
    }
    rule_priority == Some(priority) && rule_table == table
}

fn interface_name(index: u32) -> String {
    rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .and_then(|socket| rustix::net::netdevice::index_to_name(&socket, index))
    .unwrap_or_else(|_| format!("interface {index}"))
}

/// The errno inside a netlink error.
fn errno(error: &rtnetlink::Error) -> Option<Errno> {
    match error {
        rtnetlink::Error::NetlinkError(message) => {
            message.code.map(|code| Errno::from_raw_os_error(code.get().saturating_abs()))
        }
        _ => None,
    }
}

fn has_code(error: &rtnetlink::Error, codes: &[Errno]) -> bool {
    errno(error).is_some_and(|code| codes.contains(&code))
}

fn no_rules(source: &io::Error) -> bool {
    matches!(Errno::from_io_error(source), Some(Errno::OPNOTSUPP | Errno::AFNOSUPPORT))
}

fn netlink_error(what: &'static str, error: rtnetlink::Error) -> Error {
    match errno(&error) {
        Some(Errno::PERM | Errno::ACCESS) => Error::NotPermitted { what },
        Some(Errno::NODEV) => Error::InterfaceGone,
        Some(code) => Error::Netlink { what, source: code.into() },
        None => Error::Netlink { what, source: io::Error::other(error) },
    }
}
