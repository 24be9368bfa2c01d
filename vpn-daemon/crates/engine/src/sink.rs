//! Where the engine's output bytes go. Decides nothing itself: the caller owns every buffer, the engine seals or opens
//! straight into it, so that no packet is copied or allocated on its way out.

use std::net::SocketAddr;

use codervpn_wire::derp_map::RegionId;
use codervpn_wire::keys::NodePublic;

/// The way one outgoing datagram takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// As the payload of a SendPacket frame on the connection to `region`, addressed to `peer`.
    Relay { region: RegionId, peer: NodePublic },
    /// As one UDP datagram.
    Udp(SocketAddr),
}

/// Buffers of the caller. Every `handle_*` and `apply` writes its output here before it returns.
///
/// Each pair works like this: the first call hands out room, the engine writes, the second call says how much of that
/// room is the datagram. Room that is never committed is reused by the next call (a packet that did not open, for
/// instance). The engine holds at most one piece of room of each pair at a time.
pub trait Sink {
    /// Room for at least `room` bytes that will travel along `route`; `None` when that queue is full, which drops the
    /// datagram and counts it.
    fn outgoing(&mut self, route: Route, room: usize) -> Option<&mut [u8]>;

    /// The first `len` bytes of the last `outgoing` room are one datagram for `route`.
    fn send(&mut self, route: Route, len: usize);

    /// Room for at least `room` bytes that may become a packet for the packet device; `None` when there is none left.
    fn incoming(&mut self, room: usize) -> Option<&mut [u8]>;

    /// The first `len` bytes of the last `incoming` room are one IPv6 packet for the packet device. Its source,
    /// destination and the filter have been checked; its checksum has not, the cipher vouches for it.
    fn deliver(&mut self, len: usize);
}
