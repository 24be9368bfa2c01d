//! Decides the answer to one query: the table of `dns-and-os.md` 1.3, the header of 1.4, the sizes of 1.6.
//!
//! Bytes in, bytes out, no state: the responder feeds it from packets, anything else from its own socket. The one
//! thing it leaves to the caller is a name that belongs to somebody else while we are the machine's only resolver.

use crate::message::{
    CLASS_IN, ExtendedError, MAX_TCP, Query, Rcode, Section, Unreadable, Writer, header_only, owner, rtype,
};
use crate::zone::{Authority, Lookup, Zone};

/// Two seconds on every record is upstream's deliberate choice: programs take the existence of a name for the state
/// of the tunnel.
const TTL: u32 = 2;

/// Which way a query came, and so how long its answer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    Udp,
    Tcp,
}

/// What became of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The buffer holds the answer.
    Answer,
    /// Not to be answered: too short, or an answer itself.
    Drop,
    /// Somebody else's name; only when `forwarding`.
    Forward,
}

/// Answers `message` from `zone` into `out`, whose former content is discarded. With `forwarding`, names outside the
/// zone are the caller's to relay instead of refused.
pub fn answer(zone: &Zone, message: &[u8], transport: Transport, forwarding: bool, out: &mut Vec<u8>) -> Verdict {
    out.clear();
    let query = match Query::parse(message) {
        Ok(query) => query,
        Err(Unreadable::Silent) => return Verdict::Drop,
        Err(Unreadable::Refused { id, flags, rcode }) => {
            header_only(out, id, flags, rcode);
            return Verdict::Answer;
        }
    };
    let limit = match transport {
        Transport::Udp => query.udp_limit(),
        Transport::Tcp => MAX_TCP,
    };
    let mut writer = Writer::new(out, &query, limit);
    let question = &query.question;

    if query.edns.is_some_and(|edns| edns.version > 0) {
        writer.finish(&query, Rcode::BadVers, None);
        return Verdict::Answer;
    }
    if question.class != CLASS_IN || matches!(question.rtype, rtype::AXFR | rtype::IXFR) {
        writer.finish(&query, Rcode::Refused, None);
        return Verdict::Answer;
    }

    let mut lower = [0; 255];
    let name = &mut lower[..question.name.len()];
    name.copy_from_slice(question.name);
    name.make_ascii_lowercase();
    let name = &*name;

    let not_ready = (!zone.is_ready()).then_some(ExtendedError::NotReady);
    let wants = |rtype| matches!(question.rtype, rtype::ANY) || question.rtype == rtype;
    match zone.lookup(name) {
        Lookup::Outside if forwarding && !is_hopeless(question.rtype, name) => {
            out.clear();
            return Verdict::Forward;
        }
        // Stub resolvers do not ask for single labels either; nobody else is to learn of a mistyped host.
        Lookup::Outside if forwarding => writer.finish(&query, Rcode::NxDomain, None),
        Lookup::Outside => {
            writer.finish(&query, Rcode::Refused, not_ready.or(Some(ExtendedError::NotAuthoritative)));
        }
        Lookup::Missing(authority) => {
            write_soa(&mut writer, Section::Authority, zone, authority, name);
            writer.authoritative();
            writer.finish(&query, Rcode::NxDomain, not_ready);
        }
        found => {
            match found {
                Lookup::Host(addresses) if wants(rtype::AAAA) && !addresses.is_empty() => {
                    writer.record_set(Section::Answer, owner(0), rtype::AAAA, TTL, addresses, |address, out| {
                        out.extend_from_slice(&address.octets());
                    });
                }
                Lookup::Pointer(target) if wants(rtype::PTR) => {
                    writer.record_set(Section::Answer, owner(0), rtype::PTR, TTL, [target], |target, out| {
                        out.extend_from_slice(target);
                    });
                }
                Lookup::Apex if question.rtype == rtype::SOA => {
                    write_soa(&mut writer, Section::Answer, zone, Authority::Forward, name);
                }
                Lookup::Apex if question.rtype == rtype::NS => {
                    writer.record_set(Section::Answer, owner(0), rtype::NS, TTL, [()], |(), out| {
                        write_below_apex(b"\x02ns", zone, Authority::Forward, name, out);
                    });
                }
                Lookup::Host(_) | Lookup::Apex => {
                    write_soa(&mut writer, Section::Authority, zone, Authority::Forward, name);
                }
                _ => write_soa(&mut writer, Section::Authority, zone, Authority::Reverse, name),
            }
            writer.authoritative();
            writer.finish(&query, Rcode::NoError, not_ready);
        }
    }
    Verdict::Answer
}

/// A SERVFAIL to a query that could not be relayed.
pub(crate) fn server_failure(query: &Query<'_>, out: &mut Vec<u8>) {
    Writer::new(out, query, query.udp_limit()).finish(query, Rcode::ServFail, None);
}

/// An address of a name with a single label.
fn is_hopeless(asked: u16, name: &[u8]) -> bool {
    let labels = name.first().map_or(0, |length| usize::from(*length));
    matches!(asked, rtype::A | rtype::AAAA) && labels > 0 && name.len() == labels + 2
}

fn write_soa(writer: &mut Writer<'_>, section: Section, zone: &Zone, authority: Authority, name: &[u8]) {
    let apex = owner(name.len().saturating_sub(apex_len(zone, authority)));
    writer.record_set(section, apex, rtype::SOA, TTL, [()], |(), out| {
        write_below_apex(b"\x02ns", zone, authority, name, out);
        write_below_apex(b"\x0ahostmaster", zone, authority, name, out);
        // Refresh, retry and expire are for secondaries, which do not exist; minimum is the negative TTL.
        for value in [zone.serial(), 3600, 600, 86400, TTL] {
            out.extend_from_slice(&value.to_be_bytes());
        }
    });
}

/// A label and the suffix: by pointer if the question ends in it, else in full.
fn write_below_apex(label: &[u8], zone: &Zone, authority: Authority, name: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(label);
    match authority {
        Authority::Forward => {
            let pointer = owner(name.len().saturating_sub(zone.apex_len()));
            out.extend_from_slice(&pointer.to_be_bytes());
        }
        Authority::Reverse => out.extend_from_slice(zone.apex()),
    }
}

fn apex_len(zone: &Zone, authority: Authority) -> usize {
    match authority {
        Authority::Forward => zone.apex_len(),
        Authority::Reverse => crate::zone::REVERSE_APEX.len(),
    }
}
