//! The Linux device: `/dev/net/tun`, single queue (a second queue would let another process
//! attach to the same device and split the traffic), never persistent, with segmentation offload
//! where the kernel has it (`fast-path.md` 4.1): decided when it is opened, and again when a write
//! is refused.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::Errno;
use tun::AbstractDevice as _;

use super::offload::{Frame, Joined, Kind, Piece, Runs};
use super::{Error, Written, is_valid_name};

/// Packets that wait to be written. More than the largest super-packet, small enough for the cache; a full arena is
/// written early.
const ARENA: usize = 256 * 1024;
/// The header of the device, the headers of the packet, and its pieces.
const SLICES: usize = 66;

const TUN_F_CSUM: libc::c_uint = 0x01;
const TUN_F_TSO4: libc::c_uint = 0x02;
const TUN_F_TSO6: libc::c_uint = 0x04;
const TUN_F_USO4: libc::c_uint = 0x20;
const TUN_F_USO6: libc::c_uint = 0x40;
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0_u32 as libc::Ioctl;

/// An open TUN device. Nothing in it blocks; wait with `poll(2)` on [`AsFd`].
#[derive(Debug)]
pub struct Tun {
    fd: OwnedFd,
    name: String,
    index: u32,
    mtu: u32,
    /// Packets have the device's header in front.
    has_header: bool,
    outgoing: Outgoing,
}

/// Packets on their way to the kernel.
struct Outgoing {
    arena: Box<[u8]>,
    used: usize,
    runs: Runs,
    written: Written,
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outgoing({} bytes)", self.used)
    }
}

impl Tun {
    /// Creates the device `name`. It stays down, without address and with the kernel's default
    /// MTU, until [`crate::routes::Routes::apply`] has set it up; `mtu` is what will be set then.
    pub fn open(name: &str, mtu: u32) -> Result<Self, Error> {
        if !is_valid_name(name) {
            return Err(Error::BadName { name: name.to_owned() });
        }
        // A persistent device that nobody holds would be attached to instead of refused, and would
        // outlive us.
        if interface_index(name).is_some() {
            return Err(Error::NameTaken { name: name.to_owned() });
        }

        let (device, has_header) = match create(name, true) {
            // Kernels and sandboxes that do not know the header refuse it with EINVAL.
            Err(error) if is_invalid(&error) => (create(name, false), false),
            result => (result, true),
        };
        let device = device.map_err(|error| open_error(name, error))?;
        let io = |source: io::Error| Error::Io { name: name.to_owned(), source };
        let index = device
            .tun_index()
            .ok()
            .and_then(|index| u32::try_from(index).ok())
            .ok_or_else(|| io(io::Error::other("it has no index")))?;

        // SAFETY: `device` owns this descriptor and outlives the borrow, which ends with the
        // duplication in the same statement.
        let borrowed = unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) };
        // Our own duplicate, so that reads and writes are plain safe calls on an `OwnedFd`.
        let fd = rustix::io::fcntl_dupfd_cloexec(borrowed, 3).map_err(|e| io(e.into()))?;
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(|e| io(e.into()))?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK).map_err(|e| io(e.into()))?;

        let offload = has_header && set_offload(&fd);
        tracing::debug!(name, has_header, offload, "TUN device");
        let outgoing = Outgoing {
            arena: vec![0; ARENA].into_boxed_slice(),
            used: 0,
            runs: Runs::new(offload),
            written: Written::default(),
        };
        Ok(Tun { fd, name: name.to_owned(), index, mtu, has_header, outgoing })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The interface index, as netlink and systemd-resolved want it.
    pub fn index(&self) -> u32 {
        self.index
    }

    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Switches super-packets off in both directions, as on a system that has none.
    pub fn without_offload(&mut self) {
        set_offload_flags(&self.fd, 0);
        (self.outgoing.runs.join_tcp, self.outgoing.runs.join_udp) = (false, false);
    }

    /// Reads what the kernel has next, up to 64 KiB of packets at once. `WouldBlock` when there is
    /// nothing; any other error means that the device is gone (`dns-and-os.md` 6.5).
    pub fn recv(&mut self, frame: &mut Frame) -> io::Result<()> {
        let fd = &self.fd;
        let read = |buffer: &mut [u8]| loop {
            match rustix::io::read(fd, &mut *buffer) {
                Err(Errno::INTR) => {}
                result => return result.map_err(io::Error::from),
            }
        };
        if self.has_header { frame.fill_with_header(read) } else { frame.fill(read) }
    }

    /// Room for a packet of up to `room` bytes that [`Tun::commit`] completes.
    pub fn room(&mut self, room: usize) -> Option<&mut [u8]> {
        if self.outgoing.arena.len() - self.outgoing.used < room {
            self.write_out();
        }
        let used = self.outgoing.used;
        self.outgoing.arena.get_mut(used..used + room)
    }

    /// The first `length` bytes of the last room are one packet. It leaves with the next flush, or
    /// before it when too much waits.
    pub fn commit(&mut self, length: usize) {
        let Outgoing { arena, used, runs, .. } = &mut self.outgoing;
        let piece = Piece { at: *used, length: length.min(arena.len() - *used) };
        *used += piece.length;
        if runs.add(arena, piece) {
            return;
        }
        // What waits is written; this packet stays where it is and begins anew.
        self.write_runs();
        let Outgoing { arena, runs, .. } = &mut self.outgoing;
        runs.add(arena, piece);
    }

    /// Hands everything committed to the kernel and says what came of it since the last flush.
    pub fn flush(&mut self) -> Written {
        self.write_out();
        std::mem::take(&mut self.outgoing.written)
    }

    fn write_out(&mut self) {
        self.write_runs();
        self.outgoing.used = 0;
    }

    fn write_runs(&mut self) {
        let Outgoing { arena, runs, written, .. } = &mut self.outgoing;
        if runs.is_empty() {
            return;
        }
        let mut refused = None;
        let (fd, has_header) = (&self.fd, self.has_header);
        runs.flush(arena, |joined| {
            let packets = joined.pieces.len() as u64;
            match write_joined(fd, has_header, arena, &joined) {
                Ok(()) => written.note(packets),
                Err(Errno::INVAL) if packets > 1 => {
                    refused = Some(joined.kind);
                    for piece in joined.pieces {
                        let single = Joined::single(std::slice::from_ref(piece));
                        match write_joined(fd, has_header, arena, &single) {
                            Ok(()) => written.note(1),
                            Err(error) => written.fail(1, error.into()),
                        }
                    }
                }
                Err(error) => written.fail(packets, error.into()),
            }
        });
        match refused {
            None => return,
            Some(Kind::Udp) => runs.join_udp = false,
            Some(_) => runs.join_tcp = false,
        }
        tracing::info!(name = self.name, kind = ?refused, "the kernel takes no joined packets of this kind");
    }
}

fn write_joined(fd: &OwnedFd, has_header: bool, arena: &[u8], joined: &Joined<'_>) -> Result<(), Errno> {
    let mut slices = [IoSlice::new(&[]); SLICES];
    let headers = joined.headers();
    let mut parts = 0;
    let mut add = |bytes| {
        if let Some(place) = slices.get_mut(parts) {
            *place = IoSlice::new(bytes);
            parts += 1;
        }
    };
    if has_header {
        add(&joined.vnet);
    }
    if !headers.is_empty() {
        add(headers);
    }
    for piece in joined.pieces {
        add(arena.get(piece.at + headers.len()..piece.at + piece.length).unwrap_or_default());
    }
    loop {
        match rustix::io::writev(fd, slices.get(..parts).unwrap_or_default()) {
            Err(Errno::INTR) => {}
            result => return result.map(drop),
        }
    }
}

fn create(name: &str, has_header: bool) -> Result<tun::Device, tun::Error> {
    let mut configuration = tun::Configuration::default();
    configuration.tun_name(name);
    // Without the first the crate configures IPv4 settings that we do not have.
    configuration.platform_config(|platform| {
        platform.ensure_root_privileges(false);
        platform.vnet_hdr(has_header);
    });
    tun::create(&configuration)
}

fn is_invalid(error: &tun::Error) -> bool {
    matches!(error, tun::Error::Io(source) if Errno::from_io_error(source) == Some(Errno::INVAL))
}

/// Asks for super-packets; without the header there is nowhere to say where they are to be cut.
fn set_offload(fd: &OwnedFd) -> bool {
    let tcp = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
    // Kernels before 6.2 know no UDP segmentation and refuse all for it.
    [tcp | TUN_F_USO4 | TUN_F_USO6, tcp].into_iter().any(|flags| set_offload_flags(fd, flags))
}

fn set_offload_flags(fd: &OwnedFd, flags: libc::c_uint) -> bool {
    // SAFETY: the request takes its argument by value and touches no memory of ours; `fd` is open
    // for the whole call.
    unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, libc::c_ulong::from(flags)) == 0 }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The index of an existing interface of this network namespace.
pub(crate) fn interface_index(name: &str) -> Option<u32> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .ok()?;
    rustix::net::netdevice::name_to_index(&socket, name).ok()
}

fn open_error(name: &str, error: tun::Error) -> Error {
    let source = match error {
        tun::Error::Io(source) => source,
        other => io::Error::other(other.to_string()),
    };
    match Errno::from_io_error(&source) {
        Some(Errno::BUSY | Errno::EXIST) => Error::NameTaken { name: name.to_owned() },
        Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Error::NoDeviceNode { path: PathBuf::from("/dev/net/tun") },
        Some(Errno::PERM | Errno::ACCESS) => Error::NotPermitted,
        _ => Error::Io { name: name.to_owned(), source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_patterns_or_too_long_are_refused() {
        for bad in ["", "coder%d", "a/b", "sixteen-letters-", ".", "..", "a b", "ü"] {
            assert!(matches!(Tun::open(bad, 1280), Err(Error::BadName { .. })), "{bad:?}");
        }
        assert!(is_valid_name("coder0"));
        assert!(is_valid_name("fifteen-letters"));
    }
}
