//! Opens the sockets. Decides their ports, their buffers and that they never fragment.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use quinn_udp::{UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Type};

use super::{BindError, Socket};

/// What upstream asks for, too. A train is 64 KiB: smaller buffers lose whole ones whenever we are not scheduled.
const BUFFER: usize = 7 << 20;
/// Attempts to find a port that is free in both families.
const ATTEMPTS: usize = 4;

/// Both families, to the preferred ports if these are free, else both to another port, else to any.
pub(super) fn both(v4_port: u16, v6_port: u16) -> Result<(Option<Socket>, Option<Socket>), BindError> {
    let v4 = one(Domain::IPV4, v4_port).or_else(|_| one(Domain::IPV4, 0));
    let mut v4 = match v4 {
        Ok(v4) => v4,
        Err(v4) => {
            return match one(Domain::IPV6, v6_port).or_else(|_| one(Domain::IPV6, 0)) {
                Ok(v6) => Ok((None, Some(v6))),
                Err(v6) => Err(BindError { v4, v6 }),
            };
        }
    };
    let same = |port| if v6_port == v4_port { port } else { v6_port };
    for attempt in 1.. {
        match one(Domain::IPV6, same(v4.port)) {
            Ok(v6) => return Ok((Some(v4), Some(v6))),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempt < ATTEMPTS => {
                // Rather another port than two: a firewall's rule names one.
                match one(Domain::IPV4, 0) {
                    Ok(other) => v4 = other,
                    Err(_) => break,
                }
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => break,
            Err(error) => {
                tracing::debug!(%error, "no IPv6 socket");
                return Ok((Some(v4), None));
            }
        }
    }
    Ok((Some(v4), one(Domain::IPV6, 0).ok()))
}

fn one(domain: Domain, port: u16) -> io::Result<Socket> {
    let inner = socket2::Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    let address = if domain == Domain::IPV4 {
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))
    } else {
        inner.set_only_v6(true)?;
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))
    };
    inner.bind(&address.into())?;
    let state = UdpSocketState::new(UdpSockRef::from(&inner))?;
    set_buffers(&inner);
    settle(&inner, domain)?;
    let port = inner.local_addr()?.as_socket().map_or(port, |address| address.port());
    let gso = state.max_gso_segments() > 1;
    Ok(Socket { inner, state, port, gso, trains: false })
}

/// With the privilege of a daemon beyond the system's limit; otherwise as much as that allows.
fn set_buffers(socket: &socket2::Socket) {
    #[cfg(target_os = "linux")]
    {
        use rustix::net::sockopt;
        let received = sockopt::set_socket_recv_buffer_size_force(socket, BUFFER);
        let sent = sockopt::set_socket_send_buffer_size_force(socket, BUFFER);
        if received.is_ok() && sent.is_ok() {
            return;
        }
    }
    // Smaller buffers cost speed, not function.
    if let Err(error) = socket.set_recv_buffer_size(BUFFER).and_then(|()| socket.set_send_buffer_size(BUFFER)) {
        tracing::debug!(%error, "cannot enlarge the buffers of a UDP socket");
    }
}

/// `quinn-udp` forbids fragments but also has the kernel disregard what it learnt about the path, as suits QUIC with its
/// own search for the size. We want to be told (T-12): a datagram beyond the path's known MTU fails with EMSGSIZE. It also
/// asks for ECN, the address and the time of arrival of every message, none of which we use and each of which costs when
/// datagrams come singly.
#[cfg(target_os = "linux")]
fn settle(socket: &socket2::Socket, domain: Domain) -> io::Result<()> {
    use nix::sys::socket::{
        setsockopt,
        sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo, ReceiveTimestampns},
    };
    use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
    if domain == Domain::IPV4 {
        sockopt::set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::DO)?;
        sockopt::set_ip_recvtos(socket, false)?;
        setsockopt(socket, Ipv4PacketInfo, &false)?;
    } else {
        sockopt::set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::DO)?;
        sockopt::set_ipv6_recvtclass(socket, false)?;
        setsockopt(socket, Ipv6RecvPacketInfo, &false)?;
    }
    setsockopt(socket, ReceiveTimestampns, &false)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn settle(_: &socket2::Socket, _: Domain) -> io::Result<()> {
    Ok(())
}
