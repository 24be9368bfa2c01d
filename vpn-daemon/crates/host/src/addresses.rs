//! The addresses of this machine at which others might reach it: those of links that are up, and that the kernel would
//! use. Which of them are worth telling somebody is not decided here.

use std::io;
use std::net::IpAddr;

/// Addresses in the kernel's order, each once.
#[cfg(target_os = "linux")]
pub async fn of_this_machine() -> io::Result<Vec<IpAddr>> {
    linux::addresses().await
}

/// Addresses in the kernel's order, each once.
#[cfg(not(target_os = "linux"))]
pub async fn of_this_machine() -> io::Result<Vec<IpAddr>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, crate::Unsupported("listing addresses")))
}

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::HashSet;
    use std::io;
    use std::net::IpAddr;

    use futures_util::TryStreamExt as _;
    use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
    use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};

    pub(super) async fn addresses() -> io::Result<Vec<IpAddr>> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        let connection = tokio::spawn(connection);
        let found = async {
            // One dump after the other: the kernel allows one for each socket.
            let links: Vec<LinkMessage> =
                handle.link().get().execute().try_collect().await.map_err(io::Error::other)?;
            let addresses: Vec<AddressMessage> =
                handle.address().get().execute().try_collect().await.map_err(io::Error::other)?;
            Ok((links, addresses))
        };
        let found: io::Result<_> = found.await;
        connection.abort();
        let (links, addresses) = found?;
        let up: HashSet<u32> = links.iter().filter(|link| is_usable(link)).map(|link| link.header.index).collect();
        let mut seen = HashSet::new();
        let usable = addresses.iter().filter(|address| up.contains(&address.header.index));
        Ok(usable.filter_map(address_of).filter(|address| seen.insert(*address)).collect())
    }

    /// ZeroTier's own network would carry our packets inside its own (data plane 3.6).
    fn is_usable(link: &LinkMessage) -> bool {
        let foreign_overlay =
            link.attributes.iter().any(|a| matches!(a, LinkAttribute::IfName(name) if name.starts_with("zt")));
        link.header.flags.contains(LinkFlags::Up) && !foreign_overlay
    }

    /// On point-to-point links `Address` is the other end.
    fn address_of(message: &AddressMessage) -> Option<IpAddr> {
        let unusable = AddressHeaderFlags::Tentative | AddressHeaderFlags::Dadfailed;
        if message.header.flags.intersects(unusable) {
            return None;
        }
        let local = message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Local(address) => Some(*address),
            _ => None,
        });
        local.or_else(|| {
            message.attributes.iter().find_map(|a| match a {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            })
        })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[tokio::test]
    async fn every_machine_has_some() {
        let addresses = super::of_this_machine().await.unwrap();
        assert!(!addresses.is_empty(), "{addresses:?}");
    }
}
