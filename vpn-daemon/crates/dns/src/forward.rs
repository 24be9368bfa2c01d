//! Decides how foreign names are looked up while we are the machine's only name server (`dns-and-os.md` 1.9).
//!
//! A mistake here breaks every lookup of the machine, hence:
//!
//! * messages are relayed raw, only id and spelling of the question are exchanged, so that whatever client and server
//!   agree on survives;
//! * every attempt has a fresh random id and is to have a fresh socket; an answer counts only if id and question match;
//! * a query always gets an answer: the first good one, else the last bad one, else SERVFAIL after five seconds;
//! * equal queries in flight share one lookup. That also ends loops: a query of ours that comes back to us by way of
//!   another resolver of this machine joins itself and expires.
//!
//! Sockets live in the daemon: [`ForwardRequest`]s go out, answers and failures come in, time is an argument.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use codervpn_wire::node::is_coder_address;

use crate::answer::{Transport, server_failure};
use crate::message::{HEADER, MAX_TCP, Query, Question, Rcode, flag, header};

/// As `MAXNS` of the resolvers whose configuration this comes from.
pub const MAX_BASE_SERVERS: usize = 3;
/// Queries in work, `dns-and-os.md` 1.6: more than a desktop ever has, and 256 sockets are affordable.
pub const MAX_QUERIES: usize = 256;
/// How long the next server waits for the one before it.
const NEXT_SERVER_AFTER: Duration = Duration::from_millis(250);
/// All servers are tried again, since a single one would otherwise mean five seconds for a lost packet.
const NEXT_ROUND_AFTER: Duration = Duration::from_millis(1500);
const ROUNDS: usize = 3;
const TOTAL: Duration = Duration::from_secs(5);

/// Names one attempt, so one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ForwardId {
    lookup: u64,
    attempt: usize,
}

/// One message to be sent from a socket of its own: UDP from a fresh ephemeral port, connected; or TCP with the two
/// bytes of length before it. What comes back goes to `handle_answer` (without the length), errors to
/// `handle_failure`. The socket is of no use after `deadline`, nor once the answer was taken.
#[derive(Clone, PartialEq, Eq)]
pub struct ForwardRequest {
    pub id: ForwardId,
    pub server: SocketAddr,
    pub transport: Transport,
    pub message: Vec<u8>,
    pub deadline: Instant,
}

/// What became of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardReply {
    /// The socket has done its work.
    Taken,
    /// Not an answer to this request (forged, late, broken): keep listening until the deadline.
    Ignored,
    /// The lookup is over: close the socket.
    Closed,
}

/// Name servers the machine had before us, in order, without those that would lead back to us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BaseServers(Arc<[SocketAddr]>);

/// Relays queries for clients known by `O`.
pub struct Forwarder<O> {
    servers: BaseServers,
    lookups: BTreeMap<u64, Lookup<O>>,
    next_lookup: u64,
    clients: usize,
    requests: VecDeque<ForwardRequest>,
    replies: VecDeque<(O, Vec<u8>)>,
    random_id: Box<dyn FnMut() -> u16 + Send>,
}

struct Lookup<O> {
    /// The query without its id and in lower case, see [`key`].
    key: Vec<u8>,
    transport: Transport,
    /// As the first client sent it.
    query: Vec<u8>,
    servers: Arc<[SocketAddr]>,
    clients: Vec<Client<O>>,
    attempts: Vec<Attempt>,
    /// Attempts begun at a server's turn; those by TCP after a truncated answer do not count.
    turns: usize,
    started: Instant,
    next_turn: Option<Instant>,
    /// SERVFAIL or REFUSED, the last of them.
    bad: Option<Vec<u8>>,
    /// Truncated, while it is asked again over TCP.
    truncated: Option<Vec<u8>>,
}

struct Client<O> {
    origin: O,
    /// The query as this client sent it.
    query: Vec<u8>,
}

struct Attempt {
    message_id: u16,
    server: SocketAddr,
    transport: Transport,
    open: bool,
}

impl BaseServers {
    /// Takes what the saved configuration lists. `is_dead` tells of an address of this very machine that nothing
    /// answers there; ours and those inside the tunnel are dropped in any case (D-27). Returns the dropped ones too.
    pub fn select(
        listed: &[SocketAddr],
        own_address: Ipv6Addr,
        is_dead: impl Fn(SocketAddr) -> bool,
    ) -> (BaseServers, Vec<SocketAddr>) {
        let (mut kept, mut dropped) = (Vec::new(), Vec::new());
        for &server in listed {
            let unusable = match server.ip().to_canonical() {
                IpAddr::V6(ip) => ip == own_address || is_coder_address(ip),
                IpAddr::V4(_) => false,
            };
            let ip = server.ip().to_canonical();
            if unusable || ip.is_unspecified() || ip.is_multicast() || (ip.is_loopback() && is_dead(server)) {
                dropped.push(server);
            } else if kept.len() < MAX_BASE_SERVERS && !kept.contains(&server) {
                kept.push(server);
            }
        }
        (BaseServers(kept.into()), dropped)
    }

    pub fn as_slice(&self) -> &[SocketAddr] {
        &self.0
    }
}

impl<O: Copy + PartialEq> Forwarder<O> {
    /// `random_id` must not be predictable: it is half of what keeps forged answers out.
    pub fn new(servers: BaseServers, random_id: Box<dyn FnMut() -> u16 + Send>) -> Forwarder<O> {
        Forwarder {
            servers,
            lookups: BTreeMap::new(),
            next_lookup: 0,
            clients: 0,
            requests: VecDeque::new(),
            replies: VecDeque::new(),
            random_id,
        }
    }

    /// For lookups that begin from now on.
    pub fn apply_servers(&mut self, servers: BaseServers) {
        self.servers = servers;
    }

    /// Whether another query would be accepted.
    pub fn has_room(&self) -> bool {
        self.clients < MAX_QUERIES
    }

    /// Takes a query that [`crate::answer()`] left to us. `false`: full, nothing will be answered.
    pub fn handle_query(&mut self, origin: O, message: &[u8], transport: Transport, now: Instant) -> bool {
        let Ok(query) = Query::parse(message) else { return false };
        let key = key(&query);
        let joined = self.lookups.values_mut().find(|l| l.transport == transport && l.key == key);
        if let Some(lookup) = joined {
            // A client that asks again with the same id is still waiting for the same answer.
            if lookup.clients.iter().any(|c| c.origin == origin && c.query.first_chunk::<2>() == message.first_chunk())
            {
                return true;
            }
            if self.clients >= MAX_QUERIES {
                return false;
            }
            lookup.clients.push(Client { origin, query: message.to_vec() });
            self.clients += 1;
            return true;
        }
        if self.clients >= MAX_QUERIES {
            return false;
        }
        let id = self.next_lookup;
        self.next_lookup += 1;
        self.clients += 1;
        self.lookups.insert(
            id,
            Lookup {
                key,
                transport,
                query: message.to_vec(),
                servers: Arc::clone(&self.servers.0),
                clients: vec![Client { origin, query: message.to_vec() }],
                attempts: Vec::new(),
                turns: 0,
                started: now,
                next_turn: Some(now),
                bad: None,
                truncated: None,
            },
        );
        self.advance(id, now);
        true
    }

    pub fn poll_request(&mut self) -> Option<ForwardRequest> {
        loop {
            let request = self.requests.pop_front()?;
            // One that nobody waits for any more need not be sent.
            if self.lookups.contains_key(&request.id.lookup) {
                return Some(request);
            }
        }
    }

    /// What to send to which client.
    pub fn poll_reply(&mut self) -> Option<(O, Vec<u8>)> {
        self.replies.pop_front()
    }

    pub fn handle_answer(&mut self, id: ForwardId, answer: &[u8], now: Instant) -> ForwardReply {
        let Some(lookup) = self.lookups.get_mut(&id.lookup) else { return ForwardReply::Closed };
        let Some(attempt) = lookup.attempts.get_mut(id.attempt) else { return ForwardReply::Closed };
        if !attempt.open {
            return ForwardReply::Closed;
        }
        let Some(flags) = accepted(answer, &lookup.query, attempt.message_id) else { return ForwardReply::Ignored };
        attempt.open = false;
        let (server, over) = (attempt.server, attempt.transport);

        const SERVFAIL: u16 = Rcode::ServFail as u16;
        const REFUSED: u16 = Rcode::Refused as u16;
        match flags & flag::RCODE {
            SERVFAIL | REFUSED => {
                lookup.bad = Some(answer.to_vec());
                self.attempt_failed(id, now);
            }
            _ if flags & flag::TC != 0 && over == Transport::Udp => {
                lookup.truncated = Some(answer.to_vec());
                self.start_attempt(id.lookup, server, Transport::Tcp);
            }
            _ => self.finish(id.lookup, Some(answer)),
        }
        ForwardReply::Taken
    }

    /// The socket reported an error: unreachable, refused, closed early.
    pub fn handle_failure(&mut self, id: ForwardId, now: Instant) {
        let attempt = self.lookups.get_mut(&id.lookup).and_then(|lookup| lookup.attempts.get_mut(id.attempt));
        if let Some(attempt) = attempt.filter(|attempt| attempt.open) {
            attempt.open = false;
            self.attempt_failed(id, now);
        }
    }

    pub fn poll_timeout(&self) -> Option<Instant> {
        self.lookups.values().map(Lookup::due).min()
    }

    pub fn handle_timeout(&mut self, now: Instant) {
        let due: Vec<u64> = self.lookups.iter().filter(|(_, l)| l.due() <= now).map(|(id, _)| *id).collect();
        for id in due {
            self.advance(id, now);
        }
    }

    /// The next server at once if the latest was the one that failed; the end if none is left.
    fn attempt_failed(&mut self, id: ForwardId, now: Instant) {
        let Some(lookup) = self.lookups.get_mut(&id.lookup) else { return };
        let round_over = lookup.turns.is_multiple_of(lookup.servers.len().max(1));
        if !round_over && id.attempt + 1 == lookup.attempts.len() {
            lookup.next_turn = Some(now);
            self.advance(id.lookup, now);
        } else if round_over && lookup.attempts.iter().all(|attempt| !attempt.open) {
            self.finish(id.lookup, None);
        }
    }

    /// Starts what is due.
    fn advance(&mut self, id: u64, now: Instant) {
        while let Some(lookup) = self.lookups.get_mut(&id) {
            if lookup.servers.is_empty() || now >= lookup.started + TOTAL {
                self.finish(id, None);
                return;
            }
            if lookup.next_turn.is_none_or(|at| at > now) {
                return;
            }
            let server = lookup.servers[lookup.turns % lookup.servers.len()];
            lookup.turns += 1;
            let (rounds, within) = (lookup.turns / lookup.servers.len(), lookup.turns % lookup.servers.len());
            lookup.next_turn = match (rounds, within) {
                (ROUNDS, _) => None,
                (_, 0) => Some(lookup.started + NEXT_ROUND_AFTER * rounds as u32),
                _ => Some(now + NEXT_SERVER_AFTER),
            };
            let transport = lookup.transport;
            self.start_attempt(id, server, transport);
        }
    }

    fn start_attempt(&mut self, id: u64, server: SocketAddr, transport: Transport) {
        let Some(lookup) = self.lookups.get_mut(&id) else { return };
        let message_id = (self.random_id)();
        let mut message = lookup.query.clone();
        replace(&mut message, 0, &message_id.to_be_bytes());
        self.requests.push_back(ForwardRequest {
            id: ForwardId { lookup: id, attempt: lookup.attempts.len() },
            server,
            transport,
            message,
            deadline: lookup.started + TOTAL,
        });
        lookup.attempts.push(Attempt { message_id, server, transport, open: true });
    }

    fn finish(&mut self, id: u64, good: Option<&[u8]>) {
        let Some(lookup) = self.lookups.remove(&id) else { return };
        self.clients -= lookup.clients.len();
        // TC tells a client to come back over TCP, where it would mean nothing.
        let truncated = lookup.truncated.as_deref().filter(|_| lookup.transport == Transport::Udp);
        let answer = good.or(truncated).or(lookup.bad.as_deref());
        for client in lookup.clients {
            let Ok(query) = Query::parse(&client.query) else { continue };
            let mut reply = Vec::new();
            match answer {
                Some(answer) => relayed(answer, &query, lookup.transport, &mut reply),
                None => server_failure(&query, &mut reply),
            }
            self.replies.push_back((client.origin, reply));
        }
    }
}

impl<O> Lookup<O> {
    fn due(&self) -> Instant {
        let end = self.started + TOTAL;
        self.next_turn.map_or(end, |turn| turn.min(end))
    }
}

impl fmt::Debug for ForwardRequest {
    /// Without the message: names somebody looks up are not for a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ForwardRequest { id, server, transport, .. } = self;
        f.debug_struct("ForwardRequest")
            .field("id", id)
            .field("server", server)
            .field("transport", transport)
            .finish_non_exhaustive()
    }
}

/// What two queries that may share an answer have in common: all but the id and the spelling of the name.
fn key(query: &Query<'_>) -> Vec<u8> {
    let mut key = query.message.to_vec();
    replace(&mut key, 0, &[0, 0]);
    replace(&mut key, HEADER, &query.question.name.to_ascii_lowercase());
    key
}

/// The flags of an answer to `query`, if it is one.
fn accepted(answer: &[u8], query: &[u8], message_id: u16) -> Option<u16> {
    let (id, flags, [questions, ..]) = header(answer)?;
    let is_reply = id == message_id && flags & flag::QR != 0 && flags & flag::OPCODE == 0 && questions == 1;
    let same = Question::parse(answer)?.matches(&Question::parse(query)?);
    (is_reply && same && answer.len() <= MAX_TCP).then_some(flags)
}

/// `answer` as `query`'s sender would have got it: own id, own spelling, and no longer than it takes.
fn relayed(answer: &[u8], query: &Query<'_>, transport: Transport, reply: &mut Vec<u8>) {
    let fits = match transport {
        Transport::Udp => answer.len() <= query.udp_limit(),
        Transport::Tcp => true,
    };
    let question_end = HEADER + query.question.bytes.len();
    reply.extend_from_slice(answer);
    replace(reply, 0, &query.id.to_be_bytes());
    replace(reply, HEADER, query.question.bytes);
    if !fits {
        // Whole sections go; the client has to come over TCP anyway.
        reply.truncate(question_end);
        let flags = header(answer).map_or(0, |(_, flags, _)| flags) | flag::TC;
        replace(reply, 2, &flags.to_be_bytes());
        replace(reply, 6, &[0; 6]);
        if let Some(edns) = query.edns {
            let dnssec_ok = if edns.dnssec_ok { 0x80 } else { 0 };
            let payload = (crate::message::MAX_UDP as u16).to_be_bytes();
            reply.extend_from_slice(&[0, 0, 41, payload[0], payload[1], 0, 0, dnssec_ok, 0, 0, 0]);
            replace(reply, 10, &[0, 1]);
        }
    }
}

fn replace(message: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = message.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}
