//! Decides how queries are read and answers are written: the few fixed parts of RFC 1035 and 6891 that a zone of
//! host names and a relay of raw messages need.

/// Fixed part of every message.
pub(crate) const HEADER: usize = 12;
/// An OPT record without options.
const OPT: usize = 11;
const MAX_NAME: usize = 255;
/// A compression pointer to the name of the question, which stands right behind the header.
const POINTER_TO_QUESTION: u16 = 0xc000 | HEADER as u16;
/// What fits into one packet of 1280 bytes, so that nothing is ever fragmented.
pub(crate) const MAX_UDP: usize = 1232;
/// What every client takes over UDP.
const MIN_UDP: usize = 512;
/// The length prefix of TCP has 16 bits.
pub(crate) const MAX_TCP: usize = 65535;

pub(crate) mod flag {
    pub(crate) const QR: u16 = 0x8000;
    pub(crate) const OPCODE: u16 = 0x7800;
    pub(crate) const AA: u16 = 0x0400;
    pub(crate) const TC: u16 = 0x0200;
    pub(crate) const RD: u16 = 0x0100;
    pub(crate) const RA: u16 = 0x0080;
    pub(crate) const CD: u16 = 0x0010;
    pub(crate) const RCODE: u16 = 0x000f;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Rcode {
    NoError = 0,
    FormErr = 1,
    ServFail = 2,
    NxDomain = 3,
    NotImp = 4,
    Refused = 5,
    /// Has its upper eight bits in the OPT record.
    BadVers = 16,
}

pub(crate) mod rtype {
    pub(crate) const A: u16 = 1;
    pub(crate) const NS: u16 = 2;
    pub(crate) const SOA: u16 = 6;
    pub(crate) const PTR: u16 = 12;
    pub(crate) const AAAA: u16 = 28;
    pub(crate) const OPT: u16 = 41;
    pub(crate) const IXFR: u16 = 251;
    pub(crate) const AXFR: u16 = 252;
    pub(crate) const ANY: u16 = 255;
}

pub(crate) const CLASS_IN: u16 = 1;

/// A query whose question could be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query<'m> {
    pub(crate) message: &'m [u8],
    pub(crate) id: u16,
    pub(crate) flags: u16,
    pub(crate) question: Question<'m>,
    pub(crate) edns: Option<Edns>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Question<'m> {
    /// Wire form with the final zero, spelled as asked.
    pub(crate) name: &'m [u8],
    pub(crate) rtype: u16,
    pub(crate) class: u16,
    /// Name, type and class.
    pub(crate) bytes: &'m [u8],
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Edns {
    pub(crate) payload: u16,
    pub(crate) version: u8,
    pub(crate) dnssec_ok: bool,
}

/// Why a message is no query we go on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Too short to be answered, or itself an answer.
    Silent,
    /// Answered with the header alone.
    Refused { id: u16, flags: u16, rcode: Rcode },
}

impl<'m> Query<'m> {
    pub(crate) fn parse(message: &'m [u8]) -> Result<Query<'m>, Unreadable> {
        let Some((id, flags, [questions, answers, authorities, additionals])) = header(message) else {
            return Err(Unreadable::Silent);
        };
        if flags & flag::QR != 0 {
            return Err(Unreadable::Silent);
        }
        let refused = |rcode| Unreadable::Refused { id, flags, rcode };
        if flags & flag::OPCODE != 0 {
            return Err(refused(Rcode::NotImp));
        }
        let malformed = refused(Rcode::FormErr);
        if questions != 1 {
            return Err(malformed);
        }
        let question = Question::parse(message).ok_or(malformed)?;

        let mut rest = &message[HEADER + question.bytes.len()..];
        for _ in 0..u32::from(answers) + u32::from(authorities) {
            (_, rest) = Record::parse(rest).ok_or(malformed)?;
        }
        let mut edns = None;
        for _ in 0..additionals {
            let record;
            (record, rest) = Record::parse(rest).ok_or(malformed)?;
            if record.rtype == rtype::OPT {
                if edns.is_some() || !record.at_root {
                    return Err(malformed);
                }
                edns = Some(Edns {
                    payload: record.class,
                    version: (record.ttl >> 16) as u8,
                    dnssec_ok: record.ttl & 0x8000 != 0,
                });
            }
        }
        Ok(Query { message, id, flags, question, edns })
    }

    /// How much the client takes over UDP.
    pub(crate) fn udp_limit(&self) -> usize {
        self.edns.map_or(MIN_UDP, |edns| usize::from(edns.payload).clamp(MIN_UDP, MAX_UDP))
    }
}

impl<'m> Question<'m> {
    /// The first question of a message. Nothing precedes it that a compression pointer could mean.
    pub(crate) fn parse(message: &'m [u8]) -> Option<Question<'m>> {
        let bytes = message.get(HEADER..)?;
        let name = bytes.get(..name_len(bytes)?)?;
        let bytes = bytes.get(..name.len() + 4)?;
        let &[t1, t0, c1, c0] = bytes.last_chunk::<4>()?;
        Some(Question { name, rtype: u16::from_be_bytes([t1, t0]), class: u16::from_be_bytes([c1, c0]), bytes })
    }

    /// Whether an answer carries this question, in whatever spelling.
    pub(crate) fn matches(&self, other: &Question<'_>) -> bool {
        // Length bytes are below 64 and have no case.
        self.bytes.len() == other.bytes.len()
            && self.name.eq_ignore_ascii_case(other.name)
            && (self.rtype, self.class) == (other.rtype, other.class)
    }
}

/// Id, flags and the four counts.
pub(crate) fn header(message: &[u8]) -> Option<(u16, u16, [u16; 4])> {
    let header = message.first_chunk::<HEADER>()?;
    let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    Some((word(0), word(2), [word(4), word(6), word(8), word(10)]))
}

/// Length of an uncompressed name at the start of `bytes`, its final zero included.
fn name_len(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        match usize::from(*bytes.get(at)?) {
            0 => return (at < MAX_NAME).then_some(at + 1),
            length @ 1..=63 if at + 1 + length < MAX_NAME => at += 1 + length,
            _ => return None,
        }
    }
}

struct Record {
    at_root: bool,
    rtype: u16,
    class: u16,
    ttl: u32,
}

impl Record {
    /// The record at the start of `bytes`, and what follows it. Names are skipped, not followed.
    fn parse(bytes: &[u8]) -> Option<(Record, &[u8])> {
        let mut at = 0;
        loop {
            match *bytes.get(at)? {
                0 => break at += 1,
                length @ 1..=63 => at += 1 + usize::from(length),
                0xc0.. => break at += 2,
                _ => return None,
            }
            if at > MAX_NAME {
                return None;
            }
        }
        let (fixed, rest) = bytes.get(at..)?.split_first_chunk::<10>()?;
        let [t1, t0, c1, c0, l3, l2, l1, l0, n1, n0] = *fixed;
        let rest = rest.get(usize::from(u16::from_be_bytes([n1, n0]))..)?;
        let record = Record {
            at_root: at == 1,
            rtype: u16::from_be_bytes([t1, t0]),
            class: u16::from_be_bytes([c1, c0]),
            ttl: u32::from_be_bytes([l3, l2, l1, l0]),
        };
        Some((record, rest))
    }
}

/// Which section a record set is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Answer,
    Authority,
}

/// An answer being written into an empty buffer.
pub(crate) struct Writer<'b> {
    buffer: &'b mut Vec<u8>,
    flags: u16,
    counts: [u16; 4],
    /// Already without what the OPT record will need.
    limit: usize,
}

/// Extended DNS errors (RFC 8914).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum ExtendedError {
    NotReady = 14,
    NotAuthoritative = 20,
}

/// Four bytes of option header and two of code.
const EXTENDED_ERROR: usize = 6;

impl<'b> Writer<'b> {
    /// Header and question of the answer to `query`, at most `limit` bytes in the end.
    pub(crate) fn new(buffer: &'b mut Vec<u8>, query: &Query<'_>, limit: usize) -> Writer<'b> {
        buffer.clear();
        buffer.extend_from_slice(&query.id.to_be_bytes());
        buffer.resize(HEADER, 0);
        buffer.extend_from_slice(query.question.bytes);
        let reserve = if query.edns.is_some() { OPT + EXTENDED_ERROR } else { 0 };
        Writer { buffer, flags: reply_flags(query.flags), counts: [1, 0, 0, 0], limit: limit.saturating_sub(reserve) }
    }

    /// A record set of one owner and type, or none of it and TC if it does not fit.
    pub(crate) fn record_set<R>(
        &mut self,
        section: Section,
        owner: u16,
        rtype: u16,
        ttl: u32,
        records: impl IntoIterator<Item = R>,
        mut write: impl FnMut(R, &mut Vec<u8>),
    ) {
        let (start, counts) = (self.buffer.len(), self.counts);
        for record in records {
            self.buffer.extend_from_slice(&owner.to_be_bytes());
            self.buffer.extend_from_slice(&rtype.to_be_bytes());
            self.buffer.extend_from_slice(&CLASS_IN.to_be_bytes());
            self.buffer.extend_from_slice(&ttl.to_be_bytes());
            let length_at = self.buffer.len();
            self.buffer.extend_from_slice(&[0, 0]);
            write(record, self.buffer);
            let length = (self.buffer.len() - length_at - 2) as u16;
            self.buffer[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
            self.counts[match section {
                Section::Answer => 1,
                Section::Authority => 2,
            }] += 1;
            if self.buffer.len() > self.limit {
                self.buffer.truncate(start);
                self.counts = counts;
                self.flags |= flag::TC;
                return;
            }
        }
    }

    pub(crate) fn authoritative(&mut self) {
        self.flags |= flag::AA;
    }

    /// Ends the message; an OPT record only if the query had one.
    pub(crate) fn finish(mut self, query: &Query<'_>, rcode: Rcode, extended: Option<ExtendedError>) {
        let rcode = rcode as u16;
        if let Some(edns) = query.edns {
            let dnssec_ok = if edns.dnssec_ok { 0x80 } else { 0 };
            let option = if extended.is_some() { EXTENDED_ERROR as u8 } else { 0 };
            self.buffer.push(0);
            self.buffer.extend_from_slice(&rtype::OPT.to_be_bytes());
            self.buffer.extend_from_slice(&(MAX_UDP as u16).to_be_bytes());
            self.buffer.extend_from_slice(&[(rcode >> 4) as u8, 0, dnssec_ok, 0, 0, option]);
            if let Some(extended) = extended {
                self.buffer.extend_from_slice(&[0, 15, 0, 2]);
                self.buffer.extend_from_slice(&(extended as u16).to_be_bytes());
            }
            self.counts[3] += 1;
        }
        self.flags |= rcode & flag::RCODE;
        finish_header(self.buffer, self.flags, self.counts);
    }
}

/// The owner of every record of ours in an answer: the question's name or, `skip` bytes in, one of its ancestors.
pub(crate) fn owner(skip: usize) -> u16 {
    POINTER_TO_QUESTION + skip as u16
}

/// An answer without a question.
pub(crate) fn header_only(buffer: &mut Vec<u8>, id: u16, query_flags: u16, rcode: Rcode) {
    buffer.clear();
    buffer.extend_from_slice(&id.to_be_bytes());
    buffer.resize(HEADER, 0);
    finish_header(buffer, reply_flags(query_flags) | rcode as u16 & flag::RCODE, [0; 4]);
}

/// What follows from the query: opcode, RD and CD as asked, recursion "available" exactly if desired.
fn reply_flags(query: u16) -> u16 {
    let available = if query & flag::RD != 0 { flag::RA } else { 0 };
    flag::QR | available | query & (flag::OPCODE | flag::RD | flag::CD)
}

fn finish_header(buffer: &mut [u8], flags: u16, counts: [u16; 4]) {
    let words = std::iter::once(flags).chain(counts);
    for (place, word) in buffer[2..HEADER].as_chunks_mut::<2>().0.iter_mut().zip(words) {
        *place = word.to_be_bytes();
    }
}
