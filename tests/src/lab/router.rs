//! Routers between a site and the internet: what they do to addresses, and whom they let in.
//!
//! All of them let in what belongs to something that went out before. What nobody asked for is dropped before it is
//! tracked: a tracked stray would occupy the very mapping that the inside needs for punching a hole.

use std::net::Ipv4Addr;

use crate::netns::Namespace;

/// The router's interface towards the internet.
pub(super) const OUTSIDE: &str = "to-net";

/// What a router does to IPv4. IPv6 is never translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nat {
    /// Nothing.
    Routed,
    /// Keeps ports, so that every destination sees the same one.
    Easy,
    /// As easy, and everything that comes for the router goes to the one machine inside.
    Open(Ipv4Addr),
    /// Another port for every destination.
    Hard,
}

pub(super) struct Rules {
    pub(super) nat: Nat,
    pub(super) udp: bool,
}

impl Rules {
    pub(super) fn load(&self, router: &Namespace) -> anyhow::Result<()> {
        router.sysctl("net/ipv4/ip_forward=1 net/ipv6/conf/all/forwarding=1")?;
        router.nft(&self.text())
    }

    fn text(&self) -> String {
        let masquerade = match self.nat {
            Nat::Routed => String::new(),
            Nat::Easy | Nat::Open(_) => format!("oifname {OUTSIDE} meta nfproto ipv4 masquerade"),
            Nat::Hard => format!("oifname {OUTSIDE} meta nfproto ipv4 masquerade fully-random"),
        };
        let (inwards, admit) = match self.nat {
            Nat::Open(inside) => (
                format!("iifname {OUTSIDE} meta l4proto udp dnat ip to {inside}"),
                format!("iifname {OUTSIDE} ct status dnat accept"),
            ),
            _ => (String::new(), String::new()),
        };
        let block = if self.udp { "" } else { "meta l4proto udp drop" };
        format!(
            "table inet lab {{
                chain input {{
                    type filter hook input priority filter; policy accept;
                    ct state established,related accept
                    iifname {OUTSIDE} meta l4proto {{ tcp, udp }} drop
                }}
                chain through {{
                    type filter hook forward priority filter; policy accept;
                    {block}
                    ct state established,related accept
                    {admit}
                    iifname {OUTSIDE} meta l4proto {{ tcp, udp }} drop
                }}
                chain outwards {{
                    type nat hook postrouting priority srcnat; policy accept;
                    {masquerade}
                }}
                chain inwards {{
                    type nat hook prerouting priority dstnat; policy accept;
                    {inwards}
                }}
            }}"
        )
    }
}
