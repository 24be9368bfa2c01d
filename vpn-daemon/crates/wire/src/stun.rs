//! Decides how binding requests and answers look, for the client that asks for its address and the server that tells.
//!
//! Only what Coder's and Tailscale's servers speak: one request form, one response attribute. A datagram counts as STUN
//! only if its type is a binding request or success. That also rules WireGuard out, whose second byte is always zero and
//! whose first is never zero, although its receiver index may collide with the cookie.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rand_core::CryptoRngCore;

/// Bytes of our request.
pub const REQUEST_LEN: usize = 40;
/// Bytes of the longest response that we write.
pub const MAX_RESPONSE_LEN: usize = 44;

const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
const HEADER_LEN: usize = 20;
const BINDING_REQUEST: [u8; 2] = [0, 1];
const BINDING_SUCCESS: [u8; 2] = [1, 1];
const ATTR_MAPPED: u16 = 0x0001;
const ATTR_XOR_MAPPED: u16 = 0x0020;
/// An old draft's number for the same attribute.
const ATTR_XOR_MAPPED_ALT: u16 = 0x8020;
const ATTR_SOFTWARE: u16 = 0x8022;
const ATTR_FINGERPRINT: u16 = 0x8028;
const SOFTWARE: &[u8; 8] = b"tailnode";
const FINGERPRINT_XOR: u32 = 0x5354_554e;

/// Names one request; its answer repeats it.
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

/// A binding success response: where the server saw us. IPv4 is un-mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Response {
    /// From the request. Accept only one that is outstanding, from the server that was asked (T-35).
    pub tx: TxId,
    /// Our address as seen by the server.
    pub mapped: SocketAddr,
}

/// Whether a responder insists on our own client's marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// Only requests with the software name and a right final fingerprint, as upstream's servers do. Keeps scanners away.
    Strict,
    /// Every binding request.
    Lenient,
}

/// Whether a datagram is a STUN binding message. WireGuard never is (see above).
pub fn looks_like_stun(datagram: &[u8]) -> bool {
    is_header(datagram, BINDING_REQUEST) || is_header(datagram, BINDING_SUCCESS)
}

/// The request that asks a server for our address.
pub fn binding_request(tx: &TxId) -> [u8; REQUEST_LEN] {
    let mut out = [0; REQUEST_LEN];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        for byte in bytes {
            if let Some(room) = out.get_mut(at) {
                *room = *byte;
            }
            at += 1;
        }
    };
    put(&BINDING_REQUEST);
    put(&20u16.to_be_bytes());
    put(&COOKIE);
    put(&tx.0);
    put(&ATTR_SOFTWARE.to_be_bytes());
    put(&8u16.to_be_bytes());
    put(SOFTWARE);
    put(&ATTR_FINGERPRINT.to_be_bytes());
    put(&4u16.to_be_bytes());
    let (covered, _) = out.split_at(REQUEST_LEN - 8);
    let print = fingerprint(covered).to_be_bytes();
    if let Some(room) = out.last_chunk_mut::<4>() {
        *room = print;
    }
    out
}

/// Reads a request, for a server. `None`: not one that deserves an answer.
pub fn parse_binding_request(datagram: &[u8], strictness: Strictness) -> Option<TxId> {
    if !is_header(datagram, BINDING_REQUEST) {
        return None;
    }
    let tx = tx_id(datagram)?;
    let attributes = Attributes::of(datagram)?;
    if strictness == Strictness::Lenient {
        return Some(tx);
    }
    let mut software = false;
    let mut last = None;
    for (kind, value) in attributes {
        software |= kind == ATTR_SOFTWARE && value == SOFTWARE;
        last = Some((kind, value));
    }
    let (ATTR_FINGERPRINT, value) = last? else { return None };
    let print = u32::from_be_bytes(value.try_into().ok()?);
    // The fingerprint stands last and covers everything before it.
    let end = HEADER_LEN + usize::from(attribute_bytes(datagram)?);
    let covered = datagram.get(..end.checked_sub(8)?)?;
    (software && print == fingerprint(covered)).then_some(tx)
}

/// Writes the answer to `tx` into `out` and returns its length: 32 for IPv4, 44 for IPv6.
pub fn binding_response(tx: &TxId, mapped: SocketAddr, out: &mut [u8; MAX_RESPONSE_LEN]) -> usize {
    let ip = mapped.ip().to_canonical();
    let (len, family): (u16, u8) = if ip.is_ipv4() { (12, 1) } else { (24, 2) };
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        for byte in bytes {
            if let Some(room) = out.get_mut(at) {
                *room = *byte;
            }
            at += 1;
        }
    };
    put(&BINDING_SUCCESS);
    put(&len.to_be_bytes());
    put(&COOKIE);
    put(&tx.0);
    put(&ATTR_XOR_MAPPED.to_be_bytes());
    put(&(len - 4).to_be_bytes());
    put(&[0, family]);
    put(&(mapped.port() ^ port_mask()).to_be_bytes());
    match ip {
        IpAddr::V4(v4) => put(&xor(v4.octets(), tx)),
        IpAddr::V6(v6) => put(&xor(v6.octets(), tx)),
    }
    at
}

/// Reads an answer, for a client. `None`: not a success response with an address.
pub fn parse_binding_response(datagram: &[u8]) -> Option<Response> {
    if !is_header(datagram, BINDING_SUCCESS) {
        return None;
    }
    let tx = tx_id(datagram)?;
    let mut fallback = None;
    for (kind, value) in Attributes::of(datagram)? {
        match kind {
            ATTR_XOR_MAPPED | ATTR_XOR_MAPPED_ALT => {
                if let Some(mapped) = read_address(value, Some(&tx)) {
                    return Some(Response { tx, mapped });
                }
            }
            ATTR_MAPPED => fallback = fallback.or_else(|| read_address(value, None)),
            _ => {}
        }
    }
    fallback.map(|mapped| Response { tx, mapped })
}

fn is_header(datagram: &[u8], kind: [u8; 2]) -> bool {
    datagram.len() >= HEADER_LEN && datagram.starts_with(&kind) && datagram.get(4..8) == Some(&COOKIE)
}

fn tx_id(datagram: &[u8]) -> Option<TxId> {
    datagram.get(8..)?.first_chunk().map(|id| TxId(*id))
}

fn attribute_bytes(datagram: &[u8]) -> Option<u16> {
    datagram.get(2..)?.first_chunk().map(|len| u16::from_be_bytes(*len))
}

fn port_mask() -> u16 {
    u16::from_be_bytes([COOKIE[0], COOKIE[1]])
}

/// XOR with the cookie and the transaction, as far as the address goes.
fn xor<const N: usize>(mut address: [u8; N], tx: &TxId) -> [u8; N] {
    for (byte, mask) in address.iter_mut().zip(COOKIE.iter().chain(&tx.0)) {
        *byte ^= mask;
    }
    address
}

fn read_address(value: &[u8], tx: Option<&TxId>) -> Option<SocketAddr> {
    let [_, family, high, low, rest @ ..] = value else { return None };
    let port = u16::from_be_bytes([*high, *low]);
    let ip = match family {
        1 => {
            let raw = *rest.first_chunk::<4>()?;
            IpAddr::V4(Ipv4Addr::from(tx.map_or(raw, |tx| xor(raw, tx))))
        }
        2 => {
            let raw = *rest.first_chunk::<16>()?;
            IpAddr::V6(Ipv6Addr::from(tx.map_or(raw, |tx| xor(raw, tx))))
        }
        _ => return None,
    };
    let port = if tx.is_some() { port ^ port_mask() } else { port };
    Some(SocketAddr::new(ip.to_canonical(), port))
}

/// Walks the attributes, each padded to four bytes. Ends at the first that does not fit.
struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    /// `None`: the header promises more than the datagram has. More than it promises is fine and not looked at.
    fn of(datagram: &'a [u8]) -> Option<Self> {
        let len = usize::from(attribute_bytes(datagram)?);
        datagram.get(HEADER_LEN..HEADER_LEN + len).map(Self)
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (head, rest) = self.0.split_first_chunk::<4>()?;
        let [kind_high, kind_low, len_high, len_low] = *head;
        let len = usize::from(u16::from_be_bytes([len_high, len_low]));
        let value = rest.get(..len)?;
        // The last one's padding may be missing.
        self.0 = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_be_bytes([kind_high, kind_low]), value))
    }
}

/// CRC-32/IEEE with STUN's mask.
fn fingerprint(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let carry = 0u32.wrapping_sub(crc & 1);
            crc = crc >> 1 ^ (0xedb8_8320 & carry);
        }
    }
    !crc ^ FINGERPRINT_XOR
}
