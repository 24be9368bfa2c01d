//! Super-packets: one read or write of the device moves up to 64 KiB (`fast-path.md` 4).
//!
//! Reading, the kernel hands over one TCP or UDP packet far larger than the MTU and says where to cut it; [`Frame`] cuts
//! it and completes the checksums. Writing, [`Runs`] joins consecutive packets of one conversation to one such packet,
//! without copying their payloads. What is joined is exactly what a cut would have made, so nothing is reordered, no
//! header field is invented, and both ends of a conversation see the packets they would have seen.
//!
//! Nothing here trusts a length: a header that does not fit its packet makes the packet bad, and bad packets are counted.

use super::checksum::Sum;

/// `struct virtio_net_hdr` without the number of buffers.
pub(super) const VNET_HEADER: usize = 10;
/// The longest IP packet there is.
const LONGEST: usize = 65_535;
/// Longest segment: more than any MTU the tunnel can have.
const SEGMENT_ROOM: usize = 2048;

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

const IPV6_HEADER: usize = 40;
const TCP: u8 = 6;
const UDP: u8 = 17;
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;
const UDP_HEADER: usize = 8;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const CWR: u8 = 0x80;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VnetHeader {
    flags: u8,
    gso_type: u8,
    hdr_len: u16,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

impl VnetHeader {
    fn read(bytes: &[u8; VNET_HEADER]) -> Self {
        let [flags, gso_type, a, b, c, d, e, f, g, h] = *bytes;
        let number = |low, high| u16::from_ne_bytes([low, high]);
        Self {
            flags,
            gso_type,
            hdr_len: number(a, b),
            gso_size: number(c, d),
            csum_start: number(e, f),
            csum_offset: number(g, h),
        }
    }

    fn write(self) -> [u8; VNET_HEADER] {
        let mut out = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        let numbers = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset];
        for (room, number) in out.get_mut(2..).unwrap_or_default().chunks_exact_mut(2).zip(numbers) {
            room.copy_from_slice(&number.to_ne_bytes());
        }
        out
    }
}

/// One read of the device, and the packets in it.
pub struct Frame {
    /// What was read: the header of the device if it has one, then the packet. It is cut where it lies: each segment's
    /// headers are written before its payload, over what the segment before has done with.
    buffer: Box<[u8]>,
    packet: std::ops::Range<usize>,
    plan: Plan,
    /// The headers of the super-packet, without its checksum.
    headers: Box<[u8; SEGMENT_ROOM]>,
    bad: u64,
}

enum Plan {
    Done,
    /// The packet as it lies.
    Whole,
    Cut(Cut),
}

/// How to cut a super-packet.
#[derive(Clone, Copy)]
struct Cut {
    transport: usize,
    headers: usize,
    size: usize,
    is_tcp: bool,
    /// Checksum of what the segments have in common.
    common: Sum,
    /// Payload handed out so far.
    at: usize,
}

impl Default for Frame {
    fn default() -> Self {
        Self {
            buffer: vec![0; VNET_HEADER + LONGEST].into_boxed_slice(),
            packet: 0..0,
            plan: Plan::Done,
            headers: Box::new([0; SEGMENT_ROOM]),
            bad: 0,
        }
    }
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frame({} bytes)", self.packet.len())
    }
}

impl Frame {
    /// Bytes of the packet that was read.
    pub fn len(&self) -> usize {
        self.packet.len()
    }

    pub fn is_empty(&self) -> bool {
        self.packet.is_empty()
    }

    /// Packets so far whose headers made no sense.
    pub fn bad(&self) -> u64 {
        self.bad
    }

    /// Fills the frame with one plain packet that `read` writes.
    pub fn fill<E>(&mut self, read: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<(), E> {
        self.plan = Plan::Done;
        self.packet = 0..0;
        let length = read(&mut self.buffer)?.min(self.buffer.len());
        self.packet = 0..length;
        self.plan = Plan::Whole;
        Ok(())
    }

    /// Fills the frame with a packet behind the device's header that `read` writes.
    pub fn fill_with_header<E>(&mut self, read: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<(), E> {
        self.fill(read)?;
        let length = self.packet.end;
        self.packet = VNET_HEADER.min(length)..length;
        self.plan = match self.plan_of(length) {
            Some(plan) => plan,
            None => {
                self.bad += 1;
                Plan::Done
            }
        };
        Ok(())
    }

    fn plan_of(&mut self, length: usize) -> Option<Plan> {
        let (header, packet) = self.buffer.get_mut(..length)?.split_first_chunk_mut::<VNET_HEADER>()?;
        let header = VnetHeader::read(header);
        let transport = usize::from(header.csum_start);
        let kind = header.gso_type & !GSO_ECN;
        if kind == GSO_NONE {
            if header.flags & NEEDS_CSUM != 0 {
                complete_checksum(packet, transport, usize::from(header.csum_offset))?;
            }
            return Some(Plan::Whole);
        }
        let is_tcp = match kind {
            GSO_TCPV4 | GSO_TCPV6 => true,
            GSO_UDP_L4 => false,
            _ => return None,
        };
        // `hdr_len` is only a hint.
        let headers = transport + if is_tcp { usize::from(packet.get(transport + 12)? >> 4) * 4 } else { UDP_HEADER };
        let size = usize::from(header.gso_size);
        let fits = size > 0 && headers < packet.len() && headers + size <= SEGMENT_ROOM && transport >= 20;
        let version = packet.first()? >> 4;
        let network_fits = match version {
            6 => transport >= IPV6_HEADER,
            4 => usize::from(packet.first()? & 0xf) * 4 == transport,
            _ => false,
        };
        let transport_fits = headers >= transport + if is_tcp { 20 } else { UDP_HEADER };
        if !(fits && network_fits && transport_fits) {
            return None;
        }
        let template = self.headers.get_mut(..headers)?;
        template.copy_from_slice(packet.get(..headers)?);
        let common = common_sum(template, transport, is_tcp)?;
        Some(Plan::Cut(Cut { transport, headers, size, is_tcp, common, at: 0 }))
    }

    /// The next packet of this read.
    #[allow(clippy::should_implement_trait, reason = "what it lends lives only until the next call")]
    pub fn next(&mut self) -> Option<&[u8]> {
        match &mut self.plan {
            Plan::Done => None,
            Plan::Whole => {
                self.plan = Plan::Done;
                self.buffer.get(self.packet.clone())
            }
            Plan::Cut(cut) => {
                let packet = self.buffer.get_mut(self.packet.clone())?;
                let at = cut.at;
                let length = cut_segment(packet, *cut, self.headers.get(..cut.headers)?)?;
                cut.at += cut.size;
                if cut.headers + cut.at >= packet.len() {
                    self.plan = Plan::Done;
                }
                packet.get(at..at + length)
            }
        }
    }
}

/// The field holds the sum of the pseudo-header; what it covers begins at `start`.
fn complete_checksum(packet: &mut [u8], start: usize, offset: usize) -> Option<()> {
    let checksum = Sum::default().add(packet.get(start..)?).checksum();
    let field = packet.get_mut(start..)?.get_mut(offset..offset + 2)?;
    field.copy_from_slice(&checksum);
    Some(())
}

/// Sum of the addresses of a packet, version 4 or 6.
fn addresses(packet: &[u8]) -> Option<Sum> {
    let range = if packet.first()? >> 4 == 6 { 8..40 } else { 12..20 };
    Some(Sum::default().add(packet.get(range)?))
}

/// Checksum of what all segments have in common: addresses, protocol, and of the transport header all but sequence number
/// and flags (TCP) or length (UDP). The checksum's own field becomes zero.
fn common_sum(headers: &mut [u8], transport: usize, is_tcp: bool) -> Option<Sum> {
    let (network, above) = headers.split_at_mut(transport);
    let (protocol, checksum_at) = if is_tcp { (TCP, TCP_CHECKSUM) } else { (UDP, UDP_CHECKSUM) };
    put(above, checksum_at, [0, 0])?;
    let sum = addresses(network)?.add_number(protocol.into()).add(above.get(..4)?);
    Some(if is_tcp { sum.add(above.get(8..12)?).add(above.get(14..)?) } else { sum })
}

/// Writes the headers of the segment at `cut.at` before its payload and returns its length.
fn cut_segment(packet: &mut [u8], cut: Cut, template: &[u8]) -> Option<usize> {
    let Cut { transport, headers, size, is_tcp, common, at } = cut;
    let rest = packet.get_mut(at..)?;
    let is_last = rest.len() <= headers + size;
    let length = rest.len().min(headers + size);
    let (head, body) = rest.get_mut(..length)?.split_at_mut_checked(headers)?;
    head.copy_from_slice(template);
    let (network, above) = head.split_at_mut_checked(transport)?;
    if network.first()? >> 4 == 6 {
        put(network, 4, u16::try_from(length - IPV6_HEADER).ok()?.to_be_bytes())?;
    } else {
        put(network, 2, u16::try_from(length).ok()?.to_be_bytes())?;
        let id = u16::from_be_bytes([*network.get(4)?, *network.get(5)?]);
        put(network, 4, id.wrapping_add((at / size) as u16).to_be_bytes())?;
        put(network, 10, [0, 0])?;
        let checksum = Sum::default().add(network).checksum();
        put(network, 10, checksum)?;
    }
    let mut sum = common.add_number(u32::try_from(length - transport).ok()?);
    let checksum_at = if is_tcp {
        let sequence = u32::from_be_bytes(*above.get(4..8)?.first_chunk()?).wrapping_add(at as u32);
        above.get_mut(4..8)?.copy_from_slice(&sequence.to_be_bytes());
        let flags = above.get_mut(13)?;
        if !is_last {
            *flags &= !(FIN | PSH);
        }
        if at > 0 {
            *flags &= !CWR;
        }
        sum = sum.add_number(sequence).add_number(u16::from_be_bytes(*above.get(12..14)?.first_chunk()?).into());
        TCP_CHECKSUM
    } else {
        let length = u16::try_from(UDP_HEADER + body.len()).ok()?;
        put(above, 4, length.to_be_bytes())?;
        sum = sum.add_number(length.into());
        UDP_CHECKSUM
    };
    put(above, checksum_at, sum.add(body).checksum())?;
    Some(length)
}

fn put(bytes: &mut [u8], at: usize, value: [u8; 2]) -> Option<()> {
    bytes.get_mut(at..at + 2)?.copy_from_slice(&value);
    Some(())
}

/// Packets that one run joins: as many as fill a super-packet of the tunnel's MTU.
const PIECES: usize = 64;
/// Runs between two flushes; more flush early. A receive brings at most a few conversations and their acknowledgements.
const RUNS: usize = 64;
/// Conversations that a packet is compared with: those that were heard last.
const OPEN: usize = 8;
/// Headers of one packet: IPv6 and the longest TCP header.
const HEADERS: usize = IPV6_HEADER + 60;

/// Where a packet lies in the arena.
#[derive(Debug, Clone, Copy, Default)]
pub struct Piece {
    pub at: usize,
    pub length: usize,
}

/// Consecutive packets of one conversation that one write can carry, or one packet.
struct Run {
    pieces: [Piece; PIECES],
    count: usize,
    kind: Kind,
    /// Nothing can follow any more.
    closed: bool,
    headers: usize,
    payload: usize,
    /// Payload of all pieces.
    total: usize,
    next_sequence: u32,
    push: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Tcp,
    Udp,
    Other,
}

/// What can be joined at all: kind, length of the headers, sequence number, PSH.
struct Joinable {
    kind: Kind,
    headers: usize,
    sequence: u32,
    push: bool,
}

/// Packets waiting to be written, in the order they came, joined where that is possible.
pub struct Runs {
    runs: Vec<Run>,
    used: usize,
    /// Kinds that the device takes joined.
    pub join_tcp: bool,
    pub join_udp: bool,
}

impl Runs {
    pub fn new(join: bool) -> Self {
        let empty = || Run {
            pieces: [Piece::default(); PIECES],
            count: 0,
            kind: Kind::Other,
            closed: true,
            headers: 0,
            payload: 0,
            total: 0,
            next_sequence: 0,
            push: false,
        };
        Self { runs: (0..RUNS).map(|_| empty()).collect(), used: 0, join_tcp: join, join_udp: join }
    }

    /// Adds the packet that lies at `piece`. False: there is no room, write what there is first.
    pub fn add(&mut self, arena: &[u8], piece: Piece) -> bool {
        let Some(packet) = arena.get(piece.at..piece.at + piece.length) else { return true };
        let joinable = joinable(packet);
        let waiting = self.runs.get_mut(..self.used).unwrap_or_default();
        if !matches!(packet.get(6), Some(&(TCP | UDP))) {
            // The ports of a fragment are hidden: it may be of any conversation of its two ends, and none may overtake it.
            for run in waiting.iter_mut().rev().take(OPEN).filter(|run| run.has_ends_of(arena, packet)) {
                run.closed = true;
            }
        } else if let Some(run) = waiting.iter_mut().rev().take(OPEN).find(|run| run.is_of(arena, packet)) {
            // Only the last run of a conversation: anything else would overtake it.
            if let Some(joinable) = &joinable
                && run.join(arena, packet, piece, joinable)
            {
                return true;
            }
            run.closed = true;
        }
        let Some(run) = self.runs.get_mut(self.used) else { return false };
        self.used += 1;
        run.begin(piece, joinable, self.join_tcp, self.join_udp);
        true
    }

    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Writes every run by `write`, in order, and empties the list. `write` gets the device's header, the headers of the
    /// packet and the pieces of which the first is to be taken without its headers.
    pub fn flush(&mut self, arena: &[u8], mut write: impl FnMut(Joined<'_>)) {
        for run in self.runs.get(..self.used).unwrap_or_default() {
            if let Some(joined) = run.joined(arena) {
                write(joined);
            }
        }
        self.used = 0;
    }
}

/// One write.
pub struct Joined<'a> {
    pub kind: Kind,
    pub vnet: [u8; VNET_HEADER],
    /// Headers of the joined packet; empty for a single one.
    headers: [u8; HEADERS],
    header_length: usize,
    pub pieces: &'a [Piece],
}

impl<'a> Joined<'a> {
    /// One packet by itself.
    pub fn single(pieces: &'a [Piece]) -> Self {
        // The cipher vouches for its checksum.
        let vnet = VnetHeader {
            flags: DATA_VALID,
            gso_type: GSO_NONE,
            hdr_len: 0,
            gso_size: 0,
            csum_start: 0,
            csum_offset: 0,
        };
        Self { kind: Kind::Other, vnet: vnet.write(), headers: [0; HEADERS], header_length: 0, pieces }
    }

    pub fn headers(&self) -> &[u8] {
        self.headers.get(..self.header_length).unwrap_or_default()
    }
}

impl Run {
    fn begin(&mut self, piece: Piece, joinable: Option<Joinable>, join_tcp: bool, join_udp: bool) {
        if let Some(first) = self.pieces.first_mut() {
            *first = piece;
        }
        self.count = 1;
        self.kind = Kind::Other;
        self.closed = true;
        let Some(joinable) = joinable else { return };
        self.kind = joinable.kind;
        self.headers = joinable.headers;
        self.payload = piece.length - joinable.headers;
        self.total = self.payload;
        self.next_sequence = joinable.sequence.wrapping_add(self.payload as u32);
        self.push = joinable.push;
        let wanted = match joinable.kind {
            Kind::Tcp => join_tcp,
            Kind::Udp => join_udp,
            Kind::Other => false,
        };
        self.closed = !wanted || joinable.push;
    }

    fn first<'a>(&self, arena: &'a [u8]) -> Option<&'a [u8]> {
        let piece = self.pieces.first()?;
        arena.get(piece.at..piece.at + piece.length)
    }

    /// Whether a packet is of the same conversation: protocol, addresses and ports.
    fn is_of(&self, arena: &[u8], packet: &[u8]) -> bool {
        let Some(first) = self.first(arena) else { return false };
        first.get(6) == packet.get(6) && same::<36>(first, packet, 8)
    }

    /// Whether a packet has the same addresses.
    fn has_ends_of(&self, arena: &[u8], packet: &[u8]) -> bool {
        self.first(arena).is_some_and(|first| first.get(8..40) == packet.get(8..40))
    }

    /// Appends the packet if it is what a cut of the joined packet would give.
    fn join(&mut self, arena: &[u8], packet: &[u8], piece: Piece, joinable: &Joinable) -> bool {
        let payload = piece.length - joinable.headers;
        let length = joinable.headers - IPV6_HEADER + self.total + payload;
        if self.closed
            || self.kind != joinable.kind
            || self.headers != joinable.headers
            || payload > self.payload
            || self.count == PIECES
            || length > LONGEST - IPV6_HEADER
        {
            return false;
        }
        let Some(first) = self.first(arena) else { return false };
        // Version, class, flow label; hop limit.
        if !same::<4>(first, packet, 0) || first.get(7) != packet.get(7) {
            return false;
        }
        if self.kind == Kind::Tcp {
            // Acknowledgement; length of the header; window; urgent pointer and options.
            let fits = joinable.sequence == self.next_sequence
                && same::<4>(first, packet, 48)
                && first.get(52) == packet.get(52)
                && same::<2>(first, packet, 54)
                && first.get(58..self.headers) == packet.get(58..self.headers);
            if !fits {
                return false;
            }
        }
        let Some(place) = self.pieces.get_mut(self.count) else { return false };
        *place = piece;
        self.count += 1;
        self.total += payload;
        self.next_sequence = joinable.sequence.wrapping_add(payload as u32);
        self.push |= joinable.push;
        self.closed = joinable.push || payload < self.payload;
        true
    }

    fn joined(&self, arena: &[u8]) -> Option<Joined<'_>> {
        let pieces = self.pieces.get(..self.count)?;
        let mut joined = Joined { kind: self.kind, ..Joined::single(pieces) };
        if self.count < 2 {
            return Some(joined);
        }
        let is_tcp = self.kind == Kind::Tcp;
        let checksum_at = if is_tcp { TCP_CHECKSUM } else { UDP_CHECKSUM };
        let vnet = VnetHeader {
            flags: NEEDS_CSUM,
            gso_type: if is_tcp { GSO_TCPV6 } else { GSO_UDP_L4 },
            hdr_len: self.headers as u16,
            gso_size: self.payload as u16,
            csum_start: IPV6_HEADER as u16,
            csum_offset: checksum_at as u16,
        };
        joined.vnet = vnet.write();
        joined.header_length = self.headers;
        let headers = joined.headers.get_mut(..self.headers)?;
        headers.copy_from_slice(self.first(arena)?.get(..self.headers)?);
        let length = self.headers - IPV6_HEADER + self.total;
        put(headers, 4, u16::try_from(length).ok()?.to_be_bytes())?;
        if !is_tcp {
            put(headers, IPV6_HEADER + 4, u16::try_from(length).ok()?.to_be_bytes())?;
        } else if self.push {
            *headers.get_mut(IPV6_HEADER + 13)? |= PSH;
        }
        let protocol = if is_tcp { TCP } else { UDP };
        let sum = addresses(headers)?.add_number(length as u32).add_number(protocol.into());
        put(headers, IPV6_HEADER + checksum_at, sum.folded())?;
        Some(joined)
    }
}

/// Whether `N` bytes at `at` are there in both, and equal.
#[inline]
fn same<const N: usize>(a: &[u8], b: &[u8], at: usize) -> bool {
    let part = |bytes| <[u8]>::get(bytes, at..).and_then(<[u8]>::first_chunk::<N>);
    part(a).is_some() && part(a) == part(b)
}

/// What of a packet makes it fit for joining: IPv6 without extension headers, whole, with a payload; TCP with no other
/// flags than ACK and PSH, UDP with a checksum.
fn joinable(packet: &[u8]) -> Option<Joinable> {
    let length = usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?]));
    if packet.first()? >> 4 != 6 || length + IPV6_HEADER != packet.len() {
        return None;
    }
    let above = packet.get(IPV6_HEADER..)?;
    match *packet.get(6)? {
        TCP => {
            let headers = IPV6_HEADER + usize::from(above.get(12)? >> 4) * 4;
            let flags = *above.get(13)?;
            let plain = flags & !PSH == ACK && *above.get(12)? & 0xf == 0;
            let fits = plain && headers >= IPV6_HEADER + 20 && headers < packet.len();
            let sequence = u32::from_be_bytes(*above.get(4..8)?.first_chunk()?);
            fits.then_some(Joinable { kind: Kind::Tcp, headers, sequence, push: flags & PSH != 0 })
        }
        UDP => {
            let stated = usize::from(u16::from_be_bytes([*above.get(4)?, *above.get(5)?]));
            let fits = stated == above.len() && stated > UDP_HEADER && above.get(6..8)? != [0, 0];
            fits.then_some(Joinable { kind: Kind::Udp, headers: IPV6_HEADER + UDP_HEADER, sequence: 0, push: false })
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "offload_tests.rs"]
mod tests;
