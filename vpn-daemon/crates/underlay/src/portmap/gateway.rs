//! PCP (RFC 6887) and NAT-PMP (RFC 6886): one question, one answer, over a socket that hears the gateway alone.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::time::timeout;

use super::{MapTarget, MapperOptions, Mapping, Protocol};

/// A gateway on the same link answers within a few milliseconds; one whose table is busy is asked twice.
const WAIT: Duration = Duration::from_millis(250);
const TRIES: usize = 2;
const UDP: u8 = 17;
const LONGEST: usize = 1100;

/// Sends `request` and returns what `read` makes of an answer.
async fn ask<T>(
    target: MapTarget,
    options: &MapperOptions,
    request: &[u8],
    read: impl Fn(&[u8]) -> Option<T>,
) -> Option<T> {
    let connect = async {
        let socket = UdpSocket::bind(SocketAddrV4::new(target.own, 0)).await?;
        // From now on the kernel drops what comes from elsewhere (T-37).
        socket.connect(SocketAddrV4::new(target.gateway, options.port)).await?;
        Ok::<_, io::Error>(socket)
    };
    let socket = connect.await.ok()?;
    let mut buffer = [0; LONGEST];
    for _ in 0..TRIES {
        socket.send(request).await.ok()?;
        let answer = async {
            loop {
                // An error is "port unreachable": nobody listens.
                let length = socket.recv(&mut buffer).await.ok()?;
                if let Some(answer) = read(buffer.get(..length)?) {
                    return Some(answer);
                }
            }
        };
        match timeout(WAIT, answer).await {
            Ok(answer) => return answer,
            Err(_) => continue,
        }
    }
    None
}

/// Asks a PCP server for a mapping; a lifetime of 0 takes it back.
pub(super) async fn pcp(
    target: MapTarget,
    options: &MapperOptions,
    nonce: &[u8; 12],
    wished: u16,
    lifetime: u32,
) -> Option<Mapping> {
    let request = pcp_request(target, nonce, wished, lifetime);
    ask(target, options, &request, |answer| read_pcp(answer, target, nonce)).await.flatten()
}

fn pcp_request(target: MapTarget, nonce: &[u8; 12], wished: u16, lifetime: u32) -> [u8; 60] {
    let mut request = [0; 60];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(room) = request.get_mut(at..at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
    };
    // Version 2, MAP.
    put(0, &[2, 1]);
    put(4, &lifetime.to_be_bytes());
    put(8, &target.own.to_ipv6_mapped().octets());
    put(24, nonce);
    put(36, &[UDP]);
    put(40, &target.port.to_be_bytes());
    put(42, &wished.to_be_bytes());
    put(44, &Ipv4Addr::UNSPECIFIED.to_ipv6_mapped().octets());
    request
}

/// `Some(None)`: a refusal. `None`: not an answer to our request.
fn read_pcp(answer: &[u8], target: MapTarget, nonce: &[u8; 12]) -> Option<Option<Mapping>> {
    let version = *answer.first()?;
    if version == 0 {
        // A NAT-PMP server says that it knows no other version.
        return Some(None);
    }
    let is_answer = version == 2 && *answer.get(1)? == 0x81;
    if !is_answer {
        return None;
    }
    if *answer.get(3)? != 0 {
        return Some(None);
    }
    let port = |at: usize| Some(u16::from_be_bytes(*answer.get(at..at + 2)?.first_chunk()?));
    let ours = answer.get(24..36)? == nonce && *answer.get(36)? == UDP && port(40)? == target.port;
    if !ours {
        return None;
    }
    let life = u32::from_be_bytes(*answer.get(4..8)?.first_chunk()?);
    let external: [u8; 16] = *answer.get(44..60)?.first_chunk()?;
    let Some(external) = std::net::Ipv6Addr::from(external).to_ipv4_mapped() else { return Some(None) };
    let external = SocketAddrV4::new(external, port(42)?);
    Some(Some(Mapping { external, life: Duration::from_secs(life.into()), protocol: Protocol::Pcp }))
}

/// Asks a NAT-PMP server for its address and a mapping; a lifetime of 0 takes it back.
pub(super) async fn nat_pmp(target: MapTarget, options: &MapperOptions, wished: u16, lifetime: u32) -> Option<Mapping> {
    let address = ask(target, options, &[0, 0], read_pmp_address).await.flatten()?;
    let mut request = [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (room, bytes) in request.chunks_exact_mut(2).skip(2).zip([target.port.to_be_bytes(), wished.to_be_bytes()]) {
        room.copy_from_slice(&bytes);
    }
    if let Some(room) = request.last_chunk_mut::<4>() {
        *room = lifetime.to_be_bytes();
    }
    let (port, life) = ask(target, options, &request, |answer| read_pmp_mapping(answer, target)).await.flatten()?;
    Some(Mapping { external: SocketAddrV4::new(address, port), life, protocol: Protocol::NatPmp })
}

fn read_pmp_address(answer: &[u8]) -> Option<Option<Ipv4Addr>> {
    let [0, 128, result @ ..] = answer else { return None };
    if result.get(..2)? != [0, 0] {
        return Some(None);
    }
    Some(Some(Ipv4Addr::from(*answer.get(8..12)?.first_chunk::<4>()?)))
}

fn read_pmp_mapping(answer: &[u8], target: MapTarget) -> Option<Option<(u16, Duration)>> {
    let [0, 129, result @ ..] = answer else { return None };
    if result.get(..2)? != [0, 0] {
        return Some(None);
    }
    let port = |at: usize| Some(u16::from_be_bytes(*answer.get(at..at + 2)?.first_chunk()?));
    if port(8)? != target.port {
        return None;
    }
    let life = u32::from_be_bytes(*answer.get(12..16)?.first_chunk()?);
    Some(Some((port(10)?, Duration::from_secs(life.into()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: MapTarget =
        MapTarget { gateway: Ipv4Addr::new(10, 0, 0, 1), own: Ipv4Addr::new(10, 0, 0, 2), port: 41641 };
    const NONCE: [u8; 12] = [7; 12];

    fn answer(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut answer = pcp_request(TARGET, &NONCE, 0, 3600).to_vec();
        answer[1] = 0x81;
        answer[42..44].copy_from_slice(&5000_u16.to_be_bytes());
        answer[44..60].copy_from_slice(&Ipv4Addr::new(8, 8, 4, 4).to_ipv6_mapped().octets());
        change(&mut answer);
        answer
    }

    #[test]
    fn requests_are_laid_out_as_specified() {
        let request = pcp_request(TARGET, &NONCE, 5000, 7200);
        assert_eq!(request[..8], [2, 1, 0, 0, 0, 0, 0x1c, 0x20]);
        assert_eq!(request[18..24], [0xff, 0xff, 10, 0, 0, 2]);
        assert_eq!(request[36..44], [17, 0, 0, 0, 0xa2, 0xa9, 0x13, 0x88]);
    }

    #[test]
    fn t37_a_pcp_answer_counts_only_with_our_nonce_protocol_and_port() {
        let good = read_pcp(&answer(|_| {}), TARGET, &NONCE).unwrap().unwrap();
        assert_eq!((good.external, good.life), ("8.8.4.4:5000".parse().unwrap(), Duration::from_secs(3600)));
        let wrong: [fn(&mut [u8]); 4] = [|a| a[24] ^= 1, |a| a[36] = 6, |a| a[41] ^= 1, |a| a[1] = 1];
        for change in wrong {
            assert!(read_pcp(&answer(change), TARGET, &NONCE).is_none());
        }
        assert!(read_pcp(&answer(|a| a[3] = 2), TARGET, &NONCE).unwrap().is_none(), "a refusal ends the wait");
        for length in 0..60 {
            let _ = read_pcp(&answer(|_| {})[..length], TARGET, &NONCE);
        }
    }

    #[test]
    fn nat_pmp_answers_are_read() {
        assert_eq!(read_pmp_address(&[0, 128, 0, 0, 0, 0, 0, 1, 8, 8, 4, 4]), Some(Some(Ipv4Addr::new(8, 8, 4, 4))));
        let mapping = [0, 129, 0, 0, 0, 0, 0, 1, 0xa2, 0xa9, 0x13, 0x88, 0, 0, 0x1c, 0x20];
        assert_eq!(read_pmp_mapping(&mapping, TARGET), Some(Some((5000, Duration::from_secs(7200)))));
        let mut other = mapping;
        other[9] ^= 1;
        assert_eq!(read_pmp_mapping(&other, TARGET), None);
        other[3] = 2;
        assert_eq!(read_pmp_mapping(&other, TARGET), Some(None));
    }
}
