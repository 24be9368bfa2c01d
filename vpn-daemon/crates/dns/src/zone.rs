//! Decides what exists: an immutable snapshot of all names, and the handle through which it is swapped.
//!
//! A query sees one snapshot and never half an update. A snapshot is built by whoever learns of a change, on its own
//! thread, and takes effect with the next query: the data thread only loads a pointer.
//!
//! Names are keys in lower-case wire form, because a label may contain a dot and joined strings would lie. Empty
//! non-terminals (`ws.me.coder`) are entries without addresses, so a miss costs one hash like a hit. The reverse
//! zone is a sorted list: an ancestor of a pointer is a non-empty range in it.

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use codervpn_wire::node::{CODER_PREFIX, DNS_ADDRESS};

use crate::names::{self, Assignment, ZoneInput};
use crate::suffix::Suffix;

/// `b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa.`, the /48 in wire form.
pub(crate) const REVERSE_APEX: &[u8] =
    b"\x01b\x012\x014\x01a\x01a\x017\x012\x016\x010\x016\x01d\x01f\x03ip6\x04arpa\x00";
const NIBBLES: usize = 32;
const PREFIX_NIBBLES: usize = 2 * CODER_PREFIX.len();

/// One state of all names.
#[derive(Debug, Default)]
pub struct Zone {
    /// The apex in wire form; `None` until a suffix is known, then nothing but the reverse zone is ours.
    apex: Option<Box<[u8]>>,
    /// Wire form → addresses; none means that the name exists without any.
    names: HashMap<Box<[u8]>, Vec<Ipv6Addr>>,
    /// Sorted by address; the longest name of each, in wire form.
    pointers: Vec<(Ipv6Addr, Box<[u8]>)>,
    serial: u32,
}

/// What a name is. Records of other types than asked for are the answerer's business.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup<'z> {
    /// Neither zone has authority.
    Outside,
    Missing(Authority),
    /// Exists, and has an answer for AAAA unless empty.
    Host(&'z [Ipv6Addr]),
    Apex,
    Pointer(&'z [u8]),
    /// Above an existing pointer, or the reverse apex.
    PointerAncestor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Authority {
    Forward,
    Reverse,
}

impl Zone {
    /// Before the first workspace update, and without a usable suffix: refuses everything.
    pub fn unset() -> Zone {
        Zone::default()
    }

    /// The tunnel is going down: authority without any name, so that lookups fail at once and nothing is asked
    /// elsewhere (D-18).
    pub fn withdrawn(suffix: &Suffix) -> Zone {
        Zone { apex: wire(suffix.as_str()), ..Zone::default() }
    }

    /// All names of one moment, the "enabled right now" name included even when there is no agent.
    pub fn build(input: &ZoneInput) -> Zone {
        Zone::from_assignment(&input.suffix, &names::assign(input))
    }

    /// As [`Zone::build`], for a caller that needs the assignment too.
    pub fn from_assignment(suffix: &Suffix, assignment: &Assignment) -> Zone {
        let mut zone = Zone::withdrawn(suffix);
        zone.add_pointed(&names::own_name(suffix), DNS_ADDRESS);
        for agent in &assignment.agents {
            for name in &agent.fqdn {
                zone.add(name, agent.address);
            }
            // `A.W.U.S.` is the longest but for owners with names as short as `me`.
            let mine = format!(".me.{suffix}.");
            let longest = agent.fqdn.iter().rev().find(|name| !name.ends_with(&mine)).or(agent.fqdn.last());
            if let Some(target) = longest.and_then(|name| wire(name)) {
                zone.pointers.push((agent.address, target));
            }
        }
        // A workspace called `ns` is worth more than the name server's name, which nobody asks for.
        let server = format!("ns.{suffix}.");
        if wire(&server).is_some_and(|server| zone.names.get(&server).is_none_or(Vec::is_empty)) {
            zone.add(&server, DNS_ADDRESS);
        }
        zone.pointers.sort();
        zone
    }

    /// Whether there is any content, be it the "enabled right now" name alone.
    pub fn is_ready(&self) -> bool {
        !self.names.is_empty()
    }

    pub fn serial(&self) -> u32 {
        self.serial
    }

    /// Addresses of a name in text form, as a query would get them.
    pub fn addresses(&self, name: &str) -> &[Ipv6Addr] {
        let name = wire(&name.to_ascii_lowercase());
        name.and_then(|name| self.names.get(&name)).map_or(&[], Vec::as_slice)
    }

    /// `name` in lower-case wire form.
    pub(crate) fn lookup(&self, name: &[u8]) -> Lookup<'_> {
        if let Some(apex) = &self.apex
            && let Some(above) = below(name, apex)
        {
            return match self.names.get(name) {
                _ if above.is_empty() => Lookup::Apex,
                Some(addresses) => Lookup::Host(addresses),
                None => Lookup::Missing(Authority::Forward),
            };
        }
        match below(name, REVERSE_APEX) {
            Some(nibbles) => self.lookup_pointer(nibbles),
            None => Lookup::Outside,
        }
    }

    /// Length of the apex in wire form; 0 without a suffix.
    pub(crate) fn apex_len(&self) -> usize {
        self.apex().len()
    }

    /// The apex in wire form, the root without a suffix.
    pub(crate) fn apex(&self) -> &[u8] {
        self.apex.as_deref().unwrap_or(&[0])
    }

    /// `labels`: what precedes the reverse apex, least significant nibble first.
    fn lookup_pointer(&self, labels: &[u8]) -> Lookup<'_> {
        const MISSING: Lookup<'_> = Lookup::Missing(Authority::Reverse);
        let (pairs, []) = labels.as_chunks::<2>() else { return MISSING };
        let count = PREFIX_NIBBLES + pairs.len();
        if count > NIBBLES {
            return MISSING;
        }
        let mut prefix = CODER_PREFIX.iter().fold(0u128, |bits, byte| bits << 8 | u128::from(*byte));
        for [length, digit] in pairs.iter().rev() {
            match (length, (*digit as char).to_digit(16)) {
                (1, Some(nibble)) => prefix = prefix << 4 | u128::from(nibble),
                _ => return MISSING,
            }
        }
        let free = 4 * (NIBBLES - count);
        let (first, last) = (prefix << free, prefix << free | ((1u128 << free) - 1));
        let start = self.pointers.partition_point(|(address, _)| u128::from(*address) < first);
        match self.pointers.get(start) {
            Some((address, target)) if free == 0 && u128::from(*address) == first => Lookup::Pointer(target),
            Some((address, _)) if free > 0 && u128::from(*address) <= last => Lookup::PointerAncestor,
            _ if pairs.is_empty() => Lookup::PointerAncestor,
            _ => MISSING,
        }
    }

    fn add_pointed(&mut self, name: &str, address: Ipv6Addr) {
        self.add(name, address);
        if let Some(target) = wire(name) {
            self.pointers.push((address, target));
        }
    }

    /// Adds an address and, as empty entries, every name between it and the apex.
    fn add(&mut self, name: &str, address: Ipv6Addr) {
        let Some(name) = wire(name) else { return };
        let depth = name.len().saturating_sub(self.apex_len());
        let mut at = name.first().map_or(0, |length| 1 + usize::from(*length));
        while at <= depth {
            let Some(ancestor) = name.get(at..) else { break };
            if self.names.contains_key(ancestor) {
                break;
            }
            self.names.insert(ancestor.into(), Vec::new());
            at += ancestor.first().map_or(1, |length| 1 + usize::from(*length));
        }
        let addresses = self.names.entry(name).or_default();
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }

    /// For record sets that no input produces.
    #[cfg(test)]
    pub(crate) fn with_records(suffix: &Suffix, name: &str, addresses: impl Iterator<Item = Ipv6Addr>) -> Zone {
        let mut zone = Zone::withdrawn(suffix);
        addresses.for_each(|address| zone.add(name, address));
        zone
    }
}

/// The current zone, shared between the one who changes names and the one who answers.
#[derive(Clone, Debug)]
pub struct ZoneHandle(Arc<ArcSwap<Zone>>);

impl ZoneHandle {
    /// Starts with [`Zone::unset`].
    pub fn new() -> ZoneHandle {
        ZoneHandle(Arc::new(ArcSwap::from_pointee(Zone::unset())))
    }

    /// Builds and swaps; names are answered from the return on. `unix_seconds` becomes the serial, or the next higher.
    pub fn publish(&self, input: &ZoneInput, unix_seconds: u64) -> Assignment {
        let assignment = names::assign(input);
        self.store(Zone::from_assignment(&input.suffix, &assignment), unix_seconds);
        assignment
    }

    /// Takes all names away at the start of a stop.
    pub fn withdraw(&self, suffix: &Suffix, unix_seconds: u64) {
        self.store(Zone::withdrawn(suffix), unix_seconds);
    }

    pub fn store(&self, mut zone: Zone, unix_seconds: u64) {
        // Serial numbers are 32 bits by the RFC and wrap in 2106; a lower one is only a comment to us.
        let after = self.0.load().serial.wrapping_add(1);
        zone.serial = after.max(unix_seconds as u32);
        self.0.store(Arc::new(zone));
    }

    pub fn load(&self) -> Guard<Arc<Zone>> {
        self.0.load()
    }
}

impl Default for ZoneHandle {
    fn default() -> ZoneHandle {
        ZoneHandle::new()
    }
}

/// What precedes `apex` in `name` if `name` ends in it at a label boundary; both in wire form.
fn below<'n>(name: &'n [u8], apex: &[u8]) -> Option<&'n [u8]> {
    let depth = name.len().checked_sub(apex.len())?;
    let mut at = 0;
    while at < depth {
        at += 1 + usize::from(*name.get(at)?);
    }
    let (above, rest) = name.split_at_checked(depth)?;
    (at == depth && rest == apex).then_some(above)
}

/// Text to wire form; `None` if it is no name. A final dot may be missing.
pub(crate) fn wire(name: &str) -> Option<Box<[u8]>> {
    let mut bytes = Vec::with_capacity(name.len() + 2);
    for label in name.strip_suffix('.').unwrap_or(name).split('.') {
        bytes.push(u8::try_from(label.len()).ok().filter(|length| (1..=63).contains(length))?);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    (bytes.len() <= 255).then(|| bytes.into_boxed_slice())
}
