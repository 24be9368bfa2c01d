//! Counters of what was dropped and why, and of what cost something. Plain integers on the data path.

/// Every packet that is not passed on is counted in exactly one of these.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Counters {
    /// Packets from the device that were sealed and sent.
    pub tun_sent: u64,
    /// Packets from the device that were held for a session.
    pub tun_held: u64,
    /// Not IPv6, or cut short.
    pub tun_malformed: u64,
    /// Source is not our address.
    pub tun_foreign_source: u64,
    /// Multicast, link-local, TSMP, the DNS address, or outside both prefixes.
    pub tun_not_for_peers: u64,
    /// Larger than 1280 bytes; answered with Packet Too Big.
    pub tun_too_big: u64,
    /// No such agent; answered with Destination Unreachable.
    pub tun_unknown_peer: u64,
    /// The agent has not been heard for 30 s; answered with Destination Unreachable.
    pub tun_unreachable: u64,
    /// The session ended in this very moment.
    pub tun_no_session: u64,
    /// A bound of the packets held was reached.
    pub held_overflow: u64,
    /// Held for 3 s without a session.
    pub held_expired: u64,
    /// The agent was removed while its packets were held.
    pub held_discarded: u64,
    /// ICMPv6 errors written to the device.
    pub icmp_sent: u64,
    /// ICMPv6 errors not written because of their rate limit.
    pub icmp_limited: u64,

    /// Packets from peers that were delivered to the device.
    pub peer_delivered: u64,
    /// From a relay, sender is no peer of ours.
    pub relay_stranger: u64,
    /// Neither WireGuard nor disco.
    pub relay_garbage: u64,
    /// WireGuard for a session that does not exist.
    pub wg_no_session: u64,
    pub wg_malformed: u64,
    pub wg_not_authentic: u64,
    pub wg_replay: u64,
    pub wg_flood: u64,
    /// What was inside is not IPv6.
    pub inner_malformed: u64,
    /// Source is not an address of the peer that sent it.
    pub inner_foreign_source: u64,
    /// Destination is not our address.
    pub inner_foreign_destination: u64,
    /// A conversation that we did not start.
    pub inner_filtered: u64,
    /// TSMP that was answered or consumed.
    pub tsmp: u64,
    /// ICMPv6 echo requests answered by the engine itself.
    pub echo_answered: u64,

    pub disco_pings: u64,
    pub disco_pongs: u64,
    /// Pings not answered because of their rate limit, or seen before.
    pub disco_pings_limited: u64,
    /// Pongs without a ping of ours.
    pub disco_stray_pongs: u64,
    pub disco_call_me_maybe: u64,
    /// Call-me-maybes by UDP, too many, or while direct paths are not allowed.
    pub disco_calls_ignored: u64,
    pub disco_calls_sent: u64,
    /// Discovery pings not sent because of their rate limits.
    pub discovery_limited: u64,
    /// Disco that is not the sender's, does not open or is of an unknown type.
    pub disco_refused: u64,

    /// UDP from an address that is no peer's.
    pub udp_stranger: u64,
    /// UDP path messages of strangers, or while direct paths are not allowed.
    pub udp_ignored: u64,

    /// STUN requests of ours, repetitions included.
    pub stun_sent: u64,
    pub stun_answers: u64,
    /// STUN that answers no request of ours, comes from another server or names an impossible address (T-35).
    pub stun_refused: u64,

    /// Packets sealed for a proven address, and for an address and a relay at once.
    pub sent_direct: u64,
    pub sent_both: u64,
    /// How often a peer's address in use became another one, or stopped to be used.
    pub path_changes: u64,
    pub paths_lost: u64,
    /// Datagrams refused because they do not fit the path (T-12).
    pub paths_too_small: u64,

    /// The sink had no room for an outgoing datagram.
    pub sink_full: u64,
    /// The sink had no room for an incoming packet.
    pub device_full: u64,
    /// No relay connection that reaches the peer.
    pub no_route: u64,
    /// NODE updates that were refused: unusable addresses, our own key, another peer's key or address.
    pub node_refused: u64,
    /// NODE updates for parties that are no destinations.
    pub node_stray: u64,
    pub initiations_sent: u64,
    pub sessions_established: u64,
}
