//! Decides how remote calls are cut into packets and frames on one stream, for both sides of a call.
//!
//! A frame is `control byte || stream id || message id || length || data` with varints; a packet is one or more frames
//! with the same ids. [`PacketReader`] joins them under the rules DR-3 to DR-6, [`PacketWriter`] splits and numbers
//! them, [`CallError`] is the payload of an error packet. What a packet means for a call is the caller's matter.

/// Longest packet (DR-6).
pub const MAX_PACKET_LEN: usize = 4 << 20;
/// Longest data of a frame that we write (DR-7).
pub const MAX_FRAME_DATA: usize = 64 << 10;
/// Control byte and three varints of ten bytes.
const MAX_HEADER_LEN: usize = 1 + 3 * MAX_VARINT_LEN;
const MAX_VARINT_LEN: usize = 10;
/// The id of the only call that we make on a stream of the multiplexer (DR-1).
pub const FIRST_STREAM: u64 = 1;

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Starts a call: the name of the RPC.
    Invoke,
    /// One protobuf message.
    Message,
    /// The call failed: a [`CallError`].
    Error,
    /// The caller lost interest.
    Cancel,
    /// Both directions are done.
    Close,
    /// No more messages from this side.
    CloseSend,
    /// Key-value pairs before an invoke; ignored (DR-17).
    InvokeMetadata,
    /// Of a later version: without the control flag an error, with it to be ignored (DR-9).
    Unknown(u8),
}

impl Kind {
    fn from_bits(bits: u8) -> Self {
        match bits {
            1 => Self::Invoke,
            2 => Self::Message,
            3 => Self::Error,
            4 => Self::Cancel,
            5 => Self::Close,
            6 => Self::CloseSend,
            7 => Self::InvokeMetadata,
            other => Self::Unknown(other),
        }
    }

    fn bits(self) -> u8 {
        match self {
            Self::Invoke => 1,
            Self::Message => 2,
            Self::Error => 3,
            Self::Cancel => 4,
            Self::Close => 5,
            Self::CloseSend => 6,
            Self::InvokeMetadata => 7,
            Self::Unknown(bits) => bits & 0x3f,
        }
    }
}

/// One packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Which call on this stream, from 1.
    pub stream: u64,
    /// Which packet of the call in this direction, from 1.
    pub message: u64,
    /// What it is.
    pub kind: Kind,
    /// "Ignore me if you do not know me."
    pub control: bool,
    /// Its payload.
    pub data: Vec<u8>,
}

/// Why a stream of packets cannot be read any further. Ends this stream, not the session (DR-19).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// DR-3.
    #[error("protocol error: varint of more than ten bytes")]
    Varint,
    /// DR-4.
    #[error("protocol error: stream or message id is zero")]
    ZeroId,
    /// DR-5.
    #[error("protocol error: ids go backwards")]
    IdOrder,
    /// DR-5.
    #[error("protocol error: packet changes its kind")]
    KindChange,
    /// DR-6.
    #[error("protocol error: data overflow")]
    Overflow,
}

/// Joins frames to packets. Holds one unfinished packet of at most [`MAX_PACKET_LEN`] bytes, which grows only with
/// bytes that really came.
#[derive(Debug, Default)]
pub struct PacketReader {
    /// The lowest acceptable pair; (0, 0) means nothing was read yet.
    next: (u64, u64),
    header: Header,
    /// The frame whose data is coming.
    frame: Option<OpenFrame>,
    /// The packet whose frames are coming.
    packet: Option<Packet>,
    failed: Option<ProtocolError>,
}

#[derive(Debug, Default)]
struct Header {
    bytes: [u8; MAX_HEADER_LEN],
    len: usize,
}

#[derive(Debug)]
struct OpenFrame {
    missing: usize,
    done: bool,
}

impl PacketReader {
    /// For a fresh stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes off the front of `input` until a packet is whole; call it again with what is left. `None`: all of
    /// `input` is taken and more is needed.
    ///
    /// # Errors
    /// See [`ProtocolError`]; the same again on every later call.
    pub fn read(&mut self, input: &mut &[u8]) -> Result<Option<Packet>, ProtocolError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let result = self.read_on(input);
        self.failed = result.as_ref().err().copied();
        result
    }

    /// Whether the stream ends cleanly here: no half frame and no half packet is waiting.
    pub fn is_idle(&self) -> bool {
        self.header.len == 0 && self.frame.is_none() && self.packet.is_none()
    }

    fn read_on(&mut self, input: &mut &[u8]) -> Result<Option<Packet>, ProtocolError> {
        loop {
            if self.frame.is_none() && !self.read_header(input)? {
                return Ok(None);
            }
            if let Some(packet) = self.read_data(input) {
                self.next = match packet.message.checked_add(1) {
                    Some(message) => (packet.stream, message),
                    None => (packet.stream.saturating_add(1), 0),
                };
                return Ok(Some(packet));
            }
            if self.frame.is_some() {
                return Ok(None);
            }
        }
    }

    /// Collects a header byte by byte. True when it is whole and accepted.
    fn read_header(&mut self, input: &mut &[u8]) -> Result<bool, ProtocolError> {
        while let Some((byte, rest)) = input.split_first() {
            *input = rest;
            // A header that fills its room is whole or was refused below.
            let room = self.header.bytes.get_mut(self.header.len).ok_or(ProtocolError::Varint)?;
            *room = *byte;
            self.header.len += 1;
            if let Some(header) = parse_header(self.header.bytes.get(..self.header.len).unwrap_or_default())? {
                self.header.len = 0;
                self.accept(&header)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn accept(&mut self, header: &FrameHeader) -> Result<(), ProtocolError> {
        let FrameHeader { stream, message, kind, control, done, len } = *header;
        if stream == 0 || message == 0 {
            return Err(ProtocolError::ZeroId);
        }
        let id = (stream, message);
        if id < self.next {
            return Err(ProtocolError::IdOrder);
        }
        if id > self.next {
            self.packet = None;
            self.next = id;
        }
        let packet = self.packet.get_or_insert_with(|| Packet { stream, message, kind, control, data: Vec::new() });
        if packet.kind != kind {
            return Err(ProtocolError::KindChange);
        }
        let missing = usize::try_from(len).map_err(|_| ProtocolError::Overflow)?;
        if missing > MAX_PACKET_LEN.saturating_sub(packet.data.len()) {
            return Err(ProtocolError::Overflow);
        }
        packet.control |= control;
        self.frame = Some(OpenFrame { missing, done });
        Ok(())
    }

    /// Takes data of the open frame; returns the packet if that was its last frame.
    fn read_data(&mut self, input: &mut &[u8]) -> Option<Packet> {
        let (frame, packet) = (self.frame.as_mut()?, self.packet.as_mut()?);
        let (now, later) = input.split_at(frame.missing.min(input.len()));
        packet.data.extend_from_slice(now);
        *input = later;
        frame.missing -= now.len();
        if frame.missing > 0 {
            return None;
        }
        let done = frame.done;
        self.frame = None;
        if done { self.packet.take() } else { None }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FrameHeader {
    stream: u64,
    message: u64,
    kind: Kind,
    control: bool,
    done: bool,
    len: u64,
}

/// `None`: more bytes are needed.
fn parse_header(bytes: &[u8]) -> Result<Option<FrameHeader>, ProtocolError> {
    let Some((control, mut rest)) = bytes.split_first() else { return Ok(None) };
    let (Some(stream), Some(message), Some(len)) =
        (read_varint(&mut rest)?, read_varint(&mut rest)?, read_varint(&mut rest)?)
    else {
        return Ok(None);
    };
    Ok(Some(FrameHeader {
        stream,
        message,
        kind: Kind::from_bits(control >> 1 & 0x3f),
        control: control & 0x80 != 0,
        done: control & 1 != 0,
        len,
    }))
}

/// `None`: more bytes are needed.
fn read_varint(bytes: &mut &[u8]) -> Result<Option<u64>, ProtocolError> {
    let mut value = 0;
    for (at, byte) in bytes.iter().enumerate() {
        if at >= MAX_VARINT_LEN {
            return Err(ProtocolError::Varint);
        }
        // Bits beyond 64 of a tenth byte fall away, as in Go.
        value |= u64::from(byte & 0x7f).checked_shl(7 * at as u32).unwrap_or(0);
        if byte & 0x80 == 0 {
            *bytes = bytes.get(at + 1..).unwrap_or_default();
            return Ok(Some(value));
        }
    }
    if bytes.len() >= MAX_VARINT_LEN { Err(ProtocolError::Varint) } else { Ok(None) }
}

fn write_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Numbers the packets of one direction of one call and splits them into frames.
#[derive(Debug, Clone)]
pub struct PacketWriter {
    stream: u64,
    next_message: u64,
}

impl Default for PacketWriter {
    fn default() -> Self {
        Self::new(FIRST_STREAM)
    }
}

impl PacketWriter {
    /// For the call `stream`: the id that the client chose.
    pub fn new(stream: u64) -> Self {
        Self { stream, next_message: 1 }
    }

    /// Appends one packet to `out`. Several packets may share one write.
    pub fn write(&mut self, kind: Kind, data: &[u8], out: &mut Vec<u8>) {
        let control = if kind == Kind::Cancel { 0x80 } else { 0 } | kind.bits() << 1;
        let mut rest = data;
        loop {
            let (now, later) = rest.split_at(rest.len().min(MAX_FRAME_DATA));
            out.push(control | u8::from(later.is_empty()));
            write_varint(self.stream, out);
            write_varint(self.next_message, out);
            write_varint(now.len() as u64, out);
            out.extend_from_slice(now);
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        self.next_message = self.next_message.saturating_add(1);
    }

    /// Appends the start of a call.
    pub fn invoke(&mut self, rpc: &str, out: &mut Vec<u8>) {
        self.write(Kind::Invoke, rpc.as_bytes(), out);
    }

    /// Appends one message.
    pub fn message(&mut self, message: &[u8], out: &mut Vec<u8>) {
        self.write(Kind::Message, message, out);
    }

    /// Appends "no more messages from this side".
    pub fn close_send(&mut self, out: &mut Vec<u8>) {
        self.write(Kind::CloseSend, &[], out);
    }

    /// Appends "done in both directions".
    pub fn close(&mut self, out: &mut Vec<u8>) {
        self.write(Kind::Close, &[], out);
    }

    /// Appends a failure.
    pub fn error(&mut self, error: &CallError, out: &mut Vec<u8>) {
        self.write(Kind::Error, &error.encode(), out);
    }
}

/// Code of "this server does not have that RPC".
pub const CODE_UNIMPLEMENTED: u64 = 12;
/// What the text of the same answer contains when the server does not even know the name.
const UNKNOWN_RPC: &str = "unknown rpc: ";

/// The payload of an error packet: how a call failed at the other side.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} (code {code})")]
pub struct CallError {
    /// 0: no code.
    pub code: u64,
    /// For logs; cut and without control characters.
    pub text: String,
}

impl CallError {
    /// An error without a code.
    pub fn new(text: impl Into<String>) -> Self {
        Self { code: 0, text: text.into() }
    }

    /// The answer to a call of an RPC that we do not know.
    pub fn unknown_rpc(name: &str) -> Self {
        Self::new(format!("protocol error: {UNKNOWN_RPC}\"{name}\""))
    }

    /// The answer to a call of an RPC that we know and do not serve.
    pub fn unimplemented() -> Self {
        Self { code: CODE_UNIMPLEMENTED, text: "Unimplemented".into() }
    }

    /// Reads a payload. Anything is one: less than eight bytes are a text without code.
    pub fn decode(data: &[u8]) -> Self {
        match data.split_first_chunk::<8>() {
            Some((code, text)) => Self { code: u64::from_be_bytes(*code), text: crate::text::foreign(text) },
            None => Self { code: 0, text: crate::text::foreign(data) },
        }
    }

    /// Writes the payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.code.to_be_bytes().to_vec();
        out.extend_from_slice(self.text.as_bytes());
        out
    }

    /// DR-18: the server is too old for that call.
    pub fn is_unimplemented(&self) -> bool {
        self.code == CODE_UNIMPLEMENTED || self.text.contains(UNKNOWN_RPC)
    }
}
