//! What lies between an agent's data loop and its network stack: one bounded queue each way, each with something to
//! `poll`. The stack is told when a full queue has room again and waits until then, so nothing is lost between them in
//! that direction; in the other the queue drops, as a device does.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use codervpn_host::tun::{Frame, Written};
use rustix::event::{EventfdFlags, eventfd};
use vpn_daemon::tunnel::PacketDevice;

/// More than any packet of the engine needs.
const ROOM: usize = 2048;
/// Packets that may wait in each direction: about a window of one fast connection.
const PACKETS: usize = 512;
/// Answers to what has come (acknowledgements) may exceed the bound by so much: the stack cannot hold them back.
const ANSWERS: usize = 1024;

/// The data loop's end.
#[derive(Debug)]
pub(super) struct Device {
    to_stack: Arc<Pipe>,
    to_engine: Arc<Pipe>,
    /// Tells the stack that there is room.
    stack: Signal,
    room: Box<[u8; ROOM]>,
    written: Written,
}

/// The stack's end.
#[derive(Debug)]
pub(super) struct Port {
    from_engine: Arc<Pipe>,
    to_engine: Arc<Pipe>,
    signal: Signal,
}

/// A pair of ends.
pub(super) fn pair() -> io::Result<(Device, Port)> {
    let stack = Signal::new()?;
    let to_stack = Arc::new(Pipe::new(stack.clone()));
    let to_engine = Arc::new(Pipe::new(Signal::new()?));
    let device = Device {
        to_stack: Arc::clone(&to_stack),
        to_engine: Arc::clone(&to_engine),
        stack: stack.clone(),
        room: Box::new([0; ROOM]),
        written: Written::default(),
    };
    Ok((device, Port { from_engine: to_stack, to_engine, signal: stack }))
}

#[derive(Debug)]
struct Pipe {
    state: Mutex<State>,
    reader: Signal,
}

#[derive(Debug, Default)]
struct State {
    packets: VecDeque<Vec<u8>>,
    /// Buffers to use again.
    spare: Vec<Vec<u8>>,
    /// The writer found no room and wants to hear of it.
    blocked: bool,
    closed: bool,
}

impl Pipe {
    fn new(reader: Signal) -> Self {
        Self { state: Mutex::default(), reader }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False: no room.
    fn push(&self, limit: usize, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        let first = {
            let mut state = self.lock();
            if state.packets.len() >= limit {
                return false;
            }
            let mut packet = state.spare.pop().unwrap_or_else(|| Vec::with_capacity(2048));
            packet.clear();
            write(&mut packet);
            state.packets.push_back(packet);
            state.packets.len() == 1
        };
        if first {
            self.reader.raise();
        }
        true
    }

    fn close(&self) {
        self.lock().closed = true;
        self.reader.raise();
    }
}

impl PacketDevice for Device {
    fn recv(&mut self, frame: &mut Frame) -> io::Result<()> {
        let mut state = self.to_engine.lock();
        let Some(packet) = state.packets.pop_front() else {
            if state.closed {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // Under the lock, so that no packet slips in between.
            self.to_engine.reader.clear();
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let filled = frame.fill(|buffer| {
            let room = buffer.get_mut(..packet.len()).ok_or(io::ErrorKind::InvalidData)?;
            room.copy_from_slice(&packet);
            Ok(packet.len())
        });
        state.spare.push(packet);
        if state.blocked && state.packets.len() <= PACKETS / 2 {
            state.blocked = false;
            self.stack.raise();
        }
        filled
    }

    fn room(&mut self, room: usize) -> Option<&mut [u8]> {
        self.room.get_mut(..room)
    }

    fn commit(&mut self, length: usize) {
        let packet = self.room.get(..length).unwrap_or_default();
        match self.to_stack.push(PACKETS, |room| room.extend_from_slice(packet)) {
            true => self.written.note(1),
            false => self.written.fail(1, io::ErrorKind::WouldBlock.into()),
        }
    }

    fn flush(&mut self) -> Written {
        std::mem::take(&mut self.written)
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.to_engine.reader.as_fd()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.to_stack.close();
    }
}

impl Port {
    /// What has come. `None`: the data loop is gone.
    pub(super) fn receive(&self) -> Option<VecDeque<Vec<u8>>> {
        let mut state = self.from_engine.lock();
        if state.closed {
            return None;
        }
        self.signal.clear();
        Some(std::mem::take(&mut state.packets))
    }

    /// Gives buffers back.
    pub(super) fn recycle(&self, buffer: Vec<u8>) {
        let mut state = self.from_engine.lock();
        if state.spare.len() < PACKETS {
            state.spare.push(buffer);
        }
    }

    /// Whether a packet may be sent; when not, the signal is raised as soon as one may.
    pub(super) fn has_room(&self) -> bool {
        let mut state = self.to_engine.lock();
        state.blocked = state.packets.len() >= PACKETS;
        !state.blocked
    }

    /// Sends a packet of this length, written by `write`.
    pub(super) fn send<R>(&self, length: usize, write: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut result = None;
        let mut write = Some(write);
        let mut fill = |packet: &mut Vec<u8>| {
            packet.resize(length, 0);
            result = write.take().map(|write| write(packet));
        };
        if !self.to_engine.push(PACKETS + ANSWERS, &mut fill) {
            fill(&mut Vec::new());
        }
        result.expect("the packet was written by one of the two")
    }

    pub(super) fn signal(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.to_engine.close();
    }
}

/// An eventfd. Clones share it.
#[derive(Clone, Debug)]
struct Signal(Arc<OwnedFd>);

impl Signal {
    fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)))
    }

    fn raise(&self) {
        // The only failure is a full counter, which is readable all the same.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
