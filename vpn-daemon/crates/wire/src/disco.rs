//! Decides how path messages look: who sealed one, and the ping, pong or call-me-maybe inside.
//!
//! On the wire: `magic[6] || sender's disco key[32] || nonce[24] || tag[16] || ciphertext`. Inside: `type || version ||
//! body`. Readers ignore surplus bytes and the version of pings and pongs, because agents in the field send both the
//! short form (version 0) and the padded one (version 1). Padding makes a ping prove that its path carries full-size
//! WireGuard packets.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use rand_core::CryptoRngCore;

use crate::keys::{DiscoPublic, KEY_LEN, NONCE_LEN, NodePublic, Nonce, OpenError, SEAL_OVERHEAD, SharedKey};

/// "TS💬".
pub const MAGIC: [u8; 6] = [0x54, 0x53, 0xf0, 0x9f, 0x92, 0xac];
/// Magic and sender key: the least that makes a datagram disco.
pub const MIN_LEN: usize = MAGIC.len() + KEY_LEN;
/// Everything before the ciphertext.
pub const OVERHEAD: usize = MIN_LEN + SEAL_OVERHEAD;
/// Coder's agents pad pings and pongs to this datagram size.
pub const PADDED_LEN: usize = 1310;
/// The size a WireGuard packet of a full inner packet (1280 bytes) really has; ours are padded to it (T-13).
pub const FULL_LEN: usize = 1312;
/// Bytes of one address in a call-me-maybe.
const ENDPOINT_LEN: usize = 18;
/// Room that suffices for every ping, pong, and call-me-maybe of up to 64 endpoints.
pub const MAX_SEALED_LEN: usize = FULL_LEN;

const PING: u8 = 1;
const PONG: u8 = 2;
const CALL_ME_MAYBE: u8 = 3;

/// Names one ping; its pong repeats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TxId(pub [u8; 12]);

impl TxId {
    /// A transaction that nobody can guess.
    pub fn random(rng: &mut impl CryptoRngCore) -> Self {
        let mut id = [0; 12];
        rng.fill_bytes(&mut id);
        Self(id)
    }
}

/// A message that came out of a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// "Do you hear me?"
    Ping(Ping),
    /// The answer.
    Pong(Pong),
    /// "Ping me at these."
    CallMeMaybe(CallMeMaybe<'a>),
    /// Sealed rightly, but of a type that we do not know or too short for its type: ignore it.
    Unknown(u8),
}

/// A ping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ping {
    /// Repeated by the pong.
    pub tx: TxId,
    /// Who says to be the sender; a hint, not proof. Very old senders leave it out.
    pub node_key: Option<NodePublic>,
    /// The sender pads, so it wants a padded pong. A short ping gets a short pong (T-08).
    pub padded: bool,
}

/// A pong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pong {
    /// From the ping.
    pub tx: TxId,
    /// Where the ping came from, as its receiver saw it. IPv4 is un-mapped.
    pub source: SocketAddr,
}

/// A call-me-maybe: the addresses where its sender listens. Not filtered: see `node::is_usable_endpoint`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallMeMaybe<'a> {
    body: &'a [u8],
}

impl<'a> CallMeMaybe<'a> {
    /// The endpoints in order. One message may hold thousands: take only as many as you want (T-05).
    pub fn endpoints(&self) -> impl ExactSizeIterator<Item = SocketAddr> + use<'a> {
        self.body.chunks_exact(ENDPOINT_LEN).map(|chunk| {
            let endpoint = chunk.first_chunk::<ENDPOINT_LEN>().expect("chunks have exactly this length");
            read_endpoint(endpoint)
        })
    }
}

/// Whether a datagram claims to be disco.
pub fn looks_like_disco(datagram: &[u8]) -> bool {
    datagram.len() >= MIN_LEN && datagram.starts_with(&MAGIC)
}

/// A disco datagram that is not opened yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope<'a> {
    sender: DiscoPublic,
    sealed: &'a [u8],
}

impl<'a> Envelope<'a> {
    /// Reads the outside. `None`: not disco.
    pub fn parse(datagram: &'a [u8]) -> Option<Self> {
        let rest = datagram.strip_prefix(&MAGIC)?;
        let (sender, sealed) = rest.split_first_chunk::<KEY_LEN>()?;
        Some(Self { sender: DiscoPublic::from_wire(*sender), sealed })
    }

    /// Who claims to have sealed it. Look it up before you open: strangers must not cost us anything.
    pub fn sender(&self) -> DiscoPublic {
        self.sender
    }

    /// Bytes that `open` needs in its scratch.
    pub fn content_len(&self) -> usize {
        self.sealed.len().saturating_sub(SEAL_OVERHEAD)
    }

    /// Opens it into `scratch` with the box between us and [`Envelope::sender`].
    ///
    /// # Errors
    /// Another key, altered, or longer than `scratch`.
    pub fn open<'s>(&self, key: &SharedKey, scratch: &'s mut [u8]) -> Result<Message<'s>, OpenError> {
        let content = key.open_into(self.sealed, scratch)?;
        Ok(parse_message(content))
    }
}

/// Reads what came out of a box.
pub fn parse_message(content: &[u8]) -> Message<'_> {
    let [kind, version, body @ ..] = content else {
        return Message::Unknown(content.first().copied().unwrap_or(0));
    };
    let parsed = match *kind {
        PING => parse_ping(*version, body).map(Message::Ping),
        PONG => parse_pong(body).map(Message::Pong),
        CALL_ME_MAYBE => Some(Message::CallMeMaybe(parse_call_me_maybe(*version, body))),
        _ => None,
    };
    parsed.unwrap_or(Message::Unknown(*kind))
}

fn parse_ping(version: u8, body: &[u8]) -> Option<Ping> {
    let (tx, rest) = body.split_first_chunk::<12>()?;
    let node_key = rest.first_chunk::<KEY_LEN>().map(|key| NodePublic::from_wire(*key));
    // Amplification: only what was long itself may ask for a long answer (T-08).
    let padded = version >= 1 && OVERHEAD + 2 + body.len() >= PADDED_LEN;
    Some(Ping { tx: TxId(*tx), node_key, padded })
}

fn parse_pong(body: &[u8]) -> Option<Pong> {
    let (tx, rest) = body.split_first_chunk::<12>()?;
    let source = rest.first_chunk::<ENDPOINT_LEN>()?;
    Some(Pong { tx: TxId(*tx), source: read_endpoint(source) })
}

/// T-49: an odd length or another version is a valid message without endpoints.
fn parse_call_me_maybe(version: u8, body: &[u8]) -> CallMeMaybe<'_> {
    let valid = version == 0 && body.len().is_multiple_of(ENDPOINT_LEN);
    CallMeMaybe { body: if valid { body } else { &[] } }
}

fn read_endpoint(bytes: &[u8; ENDPOINT_LEN]) -> SocketAddr {
    let [address @ .., high, low] = bytes;
    SocketAddr::new(Ipv6Addr::from(*address).to_canonical(), u16::from_be_bytes([*high, *low]))
}

fn write_endpoint(endpoint: &SocketAddr) -> [u8; ENDPOINT_LEN] {
    let address = match endpoint.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut out = [0; ENDPOINT_LEN];
    let (room, port) = out.split_at_mut(16);
    room.copy_from_slice(&address.octets());
    port.copy_from_slice(&endpoint.port().to_be_bytes());
    out
}

/// How long a ping or pong is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// Version 0, no padding: the answer to a ping of that kind.
    None,
    /// Version 1, [`PADDED_LEN`], as Coder's agents do it.
    Coder,
    /// Version 1, [`FULL_LEN`]: what we send.
    Full,
}

/// A message to seal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outgoing<'a> {
    /// See [`Ping`].
    Ping {
        /// Remember it for the pong.
        tx: TxId,
        /// Our own node key.
        node_key: NodePublic,
        /// How long.
        padding: Padding,
    },
    /// See [`Pong`].
    Pong {
        /// From the ping.
        tx: TxId,
        /// Where the ping came from; `127.3.3.40:<region>` for a relay.
        source: SocketAddr,
        /// As the ping had it.
        padding: Padding,
    },
    /// See [`CallMeMaybe`].
    CallMeMaybe(&'a [SocketAddr]),
}

impl Outgoing<'_> {
    /// Bytes of the sealed datagram.
    pub fn sealed_len(&self) -> usize {
        match self {
            Self::Ping { padding, .. } => padded_len(*padding, 12 + KEY_LEN),
            Self::Pong { padding, .. } => padded_len(*padding, 12 + ENDPOINT_LEN),
            Self::CallMeMaybe(endpoints) => OVERHEAD + 2 + endpoints.len() * ENDPOINT_LEN,
        }
    }

    /// Writes the plain content and returns its length. `None`: `out` is too short.
    pub fn write_plain(&self, out: &mut [u8]) -> Option<usize> {
        let out = out.get_mut(..self.sealed_len() - OVERHEAD)?;
        let len = out.len();
        out.fill(0);
        let mut cursor = Cursor(out);
        match self {
            Self::Ping { tx, node_key, padding } => {
                cursor.put(&[PING, version(*padding)])?;
                cursor.put(&tx.0)?;
                cursor.put(node_key.as_bytes())?;
            }
            Self::Pong { tx, source, padding } => {
                cursor.put(&[PONG, version(*padding)])?;
                cursor.put(&tx.0)?;
                cursor.put(&write_endpoint(source))?;
            }
            Self::CallMeMaybe(endpoints) => {
                cursor.put(&[CALL_ME_MAYBE, 0])?;
                for endpoint in *endpoints {
                    cursor.put(&write_endpoint(endpoint))?;
                }
            }
        }
        Some(len)
    }

    /// Writes the sealed datagram into `out` and returns its length. `sender` is our disco key, `key` the box between
    /// us and the receiver. `None`: `out` is shorter than [`Outgoing::sealed_len`].
    pub fn seal(&self, sender: &DiscoPublic, key: &SharedKey, nonce: &Nonce, out: &mut [u8]) -> Option<usize> {
        let out = out.get_mut(..self.sealed_len())?;
        let total = out.len();
        let (head, content) = out.split_first_chunk_mut::<OVERHEAD>()?;
        self.write_plain(content)?;
        let tag = key.seal_detached(nonce, content);
        let mut cursor = Cursor(head);
        cursor.put(&MAGIC)?;
        cursor.put(sender.as_bytes())?;
        cursor.put(nonce)?;
        cursor.put(&tag)?;
        Some(total)
    }
}

fn version(padding: Padding) -> u8 {
    match padding {
        Padding::None => 0,
        Padding::Coder | Padding::Full => 1,
    }
}

fn padded_len(padding: Padding, body: usize) -> usize {
    match padding {
        Padding::None => OVERHEAD + 2 + body,
        Padding::Coder => PADDED_LEN,
        Padding::Full => FULL_LEN,
    }
}

/// The unwritten rest of a buffer.
struct Cursor<'a>(&'a mut [u8]);

impl Cursor<'_> {
    fn put(&mut self, bytes: &[u8]) -> Option<()> {
        let (room, rest) = std::mem::take(&mut self.0).split_at_mut_checked(bytes.len())?;
        room.copy_from_slice(bytes);
        self.0 = rest;
        Some(())
    }
}

const _: () = assert!(OVERHEAD == 78 && NONCE_LEN == 24);
