//! Decides how node, disco and relay keys look as bytes and as text, and what they seal.
//!
//! Four types that cannot be mixed up: a *node* key is a party's WireGuard identity and its address on a relay (relays
//! themselves have one too), a *disco* key seals path messages. Private keys are clamped when made, because the boxes
//! use the scalar as stored; they are wiped on drop and never shown by `Debug`. No error repeats its input: that may
//! have been a private key.

use std::fmt;
use std::str::FromStr;

use crypto_box::aead::AeadInPlace;
use crypto_box::{PublicKey, SalsaBox, SecretKey};
use rand_core::CryptoRngCore;
use zeroize::Zeroize;

/// Bytes of every key.
pub const KEY_LEN: usize = 32;
/// Bytes of a box's nonce.
pub const NONCE_LEN: usize = 24;
/// Bytes of a box's Poly1305 tag.
pub const TAG_LEN: usize = 16;
/// What a sealed message is longer than its content: nonce and tag.
pub const SEAL_OVERHEAD: usize = NONCE_LEN + TAG_LEN;

/// 24 random bytes, new for each message.
pub type Nonce = [u8; NONCE_LEN];

/// A nonce for one message.
pub fn random_nonce(rng: &mut impl CryptoRngCore) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    rng.fill_bytes(&mut nonce);
    nonce
}

/// Why bytes or text are not a key. Never contains the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text or binary form starts with something else.
    #[error("key does not start with \"{0}\"")]
    Prefix(&'static str),
    /// Not 32 bytes or 64 hex digits after the prefix.
    #[error("key has a wrong length")]
    Length,
    /// Something else than hex digits.
    #[error("key contains something else than hex digits")]
    Hex,
    /// All zero, which means "absent".
    #[error("key is all zero")]
    Zero,
    /// A point of small order: everybody knows the shared secret.
    #[error("key is a point of small order")]
    LowOrder,
}

/// A box did not open: wrong key, or altered on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("sealed message does not open")]
pub struct OpenError;

/// Private node key: WireGuard's static key, or the identity of a relay.
#[derive(Clone)]
pub struct NodePrivate([u8; KEY_LEN]);

/// Private disco key.
#[derive(Clone)]
pub struct DiscoPrivate([u8; KEY_LEN]);

/// Public node key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodePublic([u8; KEY_LEN]);

/// Public disco key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiscoPublic([u8; KEY_LEN]);

macro_rules! private_key {
    ($private:ident, $public:ident) => {
        impl $private {
            /// A new key.
            pub fn generate(rng: &mut impl CryptoRngCore) -> Self {
                let mut bytes = [0; KEY_LEN];
                rng.fill_bytes(&mut bytes);
                clamp(&mut bytes);
                Self(bytes)
            }

            /// A key made elsewhere. It is clamped here.
            ///
            /// # Errors
            /// [`KeyError::Zero`]: all zero means "absent".
            pub fn from_bytes(mut bytes: [u8; KEY_LEN]) -> Result<Self, KeyError> {
                if bytes == [0; KEY_LEN] {
                    return Err(KeyError::Zero);
                }
                clamp(&mut bytes);
                Ok(Self(bytes))
            }

            /// The public half. Costs one scalar multiplication.
            pub fn public(&self) -> $public {
                $public(*SecretKey::from_bytes(self.0).public_key().as_bytes())
            }

            /// The raw scalar, for the library that does the handshakes. Never log or store it.
            pub fn expose(&self) -> &[u8; KEY_LEN] {
                &self.0
            }

            /// The box between us and `other`. Costs one scalar multiplication: keep the result per partner.
            ///
            /// # Errors
            /// [`KeyError::Zero`] and [`KeyError::LowOrder`]: nothing can be secret between us and such a key (T-15).
            pub fn shared_key(&self, other: &$public) -> Result<SharedKey, KeyError> {
                check_public(&other.0)?;
                Ok(SharedKey(SalsaBox::new(&PublicKey::from_bytes(other.0), &SecretKey::from_bytes(self.0))))
            }
        }

        impl Drop for $private {
            fn drop(&mut self) {
                self.0.zeroize();
            }
        }

        impl fmt::Debug for $private {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($private), "(..)"))
            }
        }
    };
}

private_key!(NodePrivate, NodePublic);
private_key!(DiscoPrivate, DiscoPublic);

macro_rules! public_key {
    ($public:ident, $prefix:literal) => {
        impl $public {
            /// The text form's prefix.
            pub const TEXT_PREFIX: &'static str = $prefix;

            /// A key that may become a partner.
            ///
            /// # Errors
            /// [`KeyError::Zero`] and [`KeyError::LowOrder`] (T-15).
            pub fn from_bytes(bytes: [u8; KEY_LEN]) -> Result<Self, KeyError> {
                check_public(&bytes)?;
                Ok(Self(bytes))
            }

            /// A key as it stands in a message, good for comparing and looking up. It may be zero or of small order;
            /// `shared_key` checks again before anything is sealed to it.
            pub const fn from_wire(bytes: [u8; KEY_LEN]) -> Self {
                Self(bytes)
            }

            /// The raw 32 bytes.
            pub const fn as_bytes(&self) -> &[u8; KEY_LEN] {
                &self.0
            }

            /// Bare 64 hex digits, lower case.
            pub fn to_hex(&self) -> String {
                hex_encode(&self.0)
            }

            /// Bare 64 hex digits of either case.
            ///
            /// # Errors
            /// See [`KeyError`].
            pub fn from_hex(text: &str) -> Result<Self, KeyError> {
                Self::from_bytes(hex_decode(text.as_bytes())?)
            }
        }

        /// The whole text form, e.g. for messages; `{:?}` is the short form for logs.
        impl fmt::Display for $public {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($prefix)?;
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl FromStr for $public {
            type Err = KeyError;

            fn from_str(text: &str) -> Result<Self, KeyError> {
                let digits = text.strip_prefix($prefix).ok_or(KeyError::Prefix($prefix))?;
                Self::from_hex(digits)
            }
        }
    };
}

public_key!(NodePublic, "nodekey:");
public_key!(DiscoPublic, "discokey:");

impl NodePrivate {
    /// The text form's prefix.
    pub const TEXT_PREFIX: &'static str = "privkey:";

    /// `privkey:` and 64 hex digits. Only for a person who asks for it: never log it.
    pub fn to_secret_text(&self) -> String {
        format!("{}{}", Self::TEXT_PREFIX, hex_encode(&self.0))
    }
}

impl FromStr for NodePrivate {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let digits = text.strip_prefix(Self::TEXT_PREFIX).ok_or(KeyError::Prefix(Self::TEXT_PREFIX))?;
        Self::from_bytes(hex_decode(digits.as_bytes())?)
    }
}

/// What the binary form of a node key starts with.
const NODE_BINARY_PREFIX: [u8; 2] = *b"np";

impl NodePublic {
    /// The form inside the coordinator's `Node`: `np` and 32 bytes.
    pub fn to_binary(&self) -> [u8; 34] {
        let mut out = [0; 34];
        let (prefix, key) = out.split_at_mut(2);
        prefix.copy_from_slice(&NODE_BINARY_PREFIX);
        key.copy_from_slice(&self.0);
        out
    }

    /// Reads the form of [`NodePublic::to_binary`].
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn from_binary(bytes: &[u8]) -> Result<Self, KeyError> {
        let key = bytes.strip_prefix(&NODE_BINARY_PREFIX).ok_or(KeyError::Prefix("np"))?;
        Self::from_bytes(key.try_into().map_err(|_| KeyError::Length)?)
    }

    /// The log form: five characters of base64 in brackets.
    pub fn short(&self) -> ShortNode {
        ShortNode(*self)
    }
}

impl DiscoPublic {
    /// The log form: `d:` and the first eight bytes.
    pub fn short(&self) -> ShortDisco {
        ShortDisco(*self)
    }
}

/// [`NodePublic::short`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ShortNode(NodePublic);

/// [`DiscoPublic::short`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ShortDisco(DiscoPublic);

impl fmt::Display for ShortNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0.0;
        let bits = u32::from_be_bytes([a, b, c, d]);
        f.write_str("[")?;
        for group in 0..5 {
            write!(f, "{}", base64_digit((bits >> (26 - 6 * group)) & 63))?;
        }
        f.write_str("]")
    }
}

impl fmt::Display for ShortDisco {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("d:")?;
        self.0.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NodePublic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.short().fmt(f)
    }
}

impl fmt::Debug for DiscoPublic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.short().fmt(f)
    }
}

impl fmt::Debug for ShortNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for ShortDisco {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The precomputed box of two parties ("beforenm"): the same in both directions.
///
/// Sealed bytes are always `nonce[24] || tag[16] || ciphertext`. Wiped on drop.
pub struct SharedKey(SalsaBox);

impl SharedKey {
    /// Encrypts `content` in place and returns its tag.
    pub fn seal_detached(&self, nonce: &Nonce, content: &mut [u8]) -> [u8; TAG_LEN] {
        self.0
            .encrypt_in_place_detached(nonce.into(), &[], content)
            .expect("Salsa20 of less than 2^70 bytes without associated data cannot fail")
            .into()
    }

    /// Seals in place: `buffer` has [`SEAL_OVERHEAD`] bytes of room and then the content. False if it is shorter than
    /// that room; nothing is written then.
    #[must_use]
    pub fn seal_in_place(&self, nonce: &Nonce, buffer: &mut [u8]) -> bool {
        let Some((head, content)) = buffer.split_first_chunk_mut::<SEAL_OVERHEAD>() else { return false };
        let tag = self.seal_detached(nonce, content);
        let (room, tag_room) = head.split_at_mut(NONCE_LEN);
        room.copy_from_slice(nonce);
        tag_room.copy_from_slice(&tag);
        true
    }

    /// Appends the sealed form of `content` to `out`.
    pub fn seal_append(&self, nonce: &Nonce, content: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; SEAL_OVERHEAD]);
        out.extend_from_slice(content);
        let sealed = out.get_mut(start..).unwrap_or_default();
        let done = self.seal_in_place(nonce, sealed);
        debug_assert!(done, "the room was appended just above");
    }

    /// Opens in place and returns the content.
    ///
    /// # Errors
    /// Too short, another key, or altered. The buffer's content is then unspecified.
    pub fn open_in_place<'a>(&self, sealed: &'a mut [u8]) -> Result<&'a mut [u8], OpenError> {
        let (nonce, rest) = sealed.split_first_chunk_mut::<NONCE_LEN>().ok_or(OpenError)?;
        let (tag, content) = rest.split_first_chunk_mut::<TAG_LEN>().ok_or(OpenError)?;
        let (nonce, tag): (&Nonce, &[u8; TAG_LEN]) = (nonce, tag);
        self.0.decrypt_in_place_detached(nonce.into(), &[], content, tag.into()).map_err(|_| OpenError)?;
        Ok(content)
    }

    /// Opens into the front of `scratch`, leaving `sealed` as it is.
    ///
    /// # Errors
    /// As [`SharedKey::open_in_place`], and if `scratch` is shorter than the content.
    pub fn open_into<'a>(&self, sealed: &[u8], scratch: &'a mut [u8]) -> Result<&'a mut [u8], OpenError> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE_LEN>().ok_or(OpenError)?;
        let (tag, cipher) = rest.split_first_chunk::<TAG_LEN>().ok_or(OpenError)?;
        let content = scratch.get_mut(..cipher.len()).ok_or(OpenError)?;
        content.copy_from_slice(cipher);
        self.0.decrypt_in_place_detached(nonce.into(), &[], content, tag.into()).map_err(|_| OpenError)?;
        Ok(content)
    }
}

impl fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedKey(..)")
    }
}

fn clamp(bytes: &mut [u8; KEY_LEN]) {
    bytes[0] &= 0b1111_1000;
    bytes[31] = (bytes[31] & 0b0111_1111) | 0b0100_0000;
}

/// The u-coordinates of small order on Curve25519 and its twist, without bit 255 (which X25519 ignores).
const LOW_ORDER: [[u8; KEY_LEN]; 7] = [
    [0; 32],
    first_byte(1),
    [
        0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4, 0x6a, 0xda, 0x09,
        0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49, 0xb8, 0x00,
    ],
    [
        0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef, 0x5b, 0x04, 0x44,
        0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f, 0x11, 0x57,
    ],
    near_prime(0xec),
    near_prime(0xed),
    near_prime(0xee),
];

const fn first_byte(byte: u8) -> [u8; KEY_LEN] {
    let mut out = [0; KEY_LEN];
    out[0] = byte;
    out
}

const fn near_prime(byte: u8) -> [u8; KEY_LEN] {
    let mut out = [0xff; KEY_LEN];
    out[0] = byte;
    out[31] = 0x7f;
    out
}

fn check_public(bytes: &[u8; KEY_LEN]) -> Result<(), KeyError> {
    let mut masked = *bytes;
    masked[31] &= 0x7f;
    if *bytes == [0; KEY_LEN] {
        return Err(KeyError::Zero);
    }
    if LOW_ORDER.contains(&masked) {
        return Err(KeyError::LowOrder);
    }
    Ok(())
}

fn hex_encode(bytes: &[u8; KEY_LEN]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from_digit(digit.into(), 16).expect("four bits are a hex digit"))
        .collect()
}

fn hex_decode(text: &[u8]) -> Result<[u8; KEY_LEN], KeyError> {
    if text.len() != 2 * KEY_LEN {
        return Err(KeyError::Length);
    }
    let mut out = [0; KEY_LEN];
    for (byte, pair) in out.iter_mut().zip(text.chunks_exact(2)) {
        for digit in pair {
            let value = char::from(*digit).to_digit(16).ok_or(KeyError::Hex)?;
            *byte = *byte << 4 | value as u8;
        }
    }
    Ok(out)
}

fn base64_digit(bits: u32) -> char {
    let bits = bits as u8;
    char::from(match bits {
        0..=25 => b'A' + bits,
        26..=51 => b'a' + bits - 26,
        52..=61 => b'0' + bits - 52,
        62 => b'+',
        _ => b'/',
    })
}
