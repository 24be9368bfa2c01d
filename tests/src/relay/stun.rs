//! A STUN responder as stands beside relays: it tells each sender how the network sees it (data-plane 3.2).
//!
//! It cannot be used to amplify: no answer is longer than 1.1 times its request (T-36), whoever asks.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use codervpn_wire::stun::{MAX_RESPONSE_LEN, Strictness, binding_response, parse_binding_request};
use rustix::net::{AddressFamily, SocketType, bind, ipproto, socket, sockopt};
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

/// More than any request that is answered; the rest of a longer one is of no interest.
const MAX_REQUEST: usize = 1500;

/// A responder at one address. Ends with this value.
#[derive(Debug)]
pub struct StunServer {
    address: SocketAddr,
    answered: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl StunServer {
    /// One socket of the address' own family, so that nobody is told an IPv4 address in IPv6 clothes. Upstream's
    /// servers are [`Strictness::Strict`].
    pub fn start(listen: SocketAddr, strictness: Strictness) -> anyhow::Result<Self> {
        let socket = open(listen).with_context(|| format!("STUN at {listen}"))?;
        let address = socket.local_addr().context("a socket has an address")?;
        let answered = Arc::<AtomicU64>::default();
        let task = tokio::spawn(serve(socket, strictness, Arc::clone(&answered)));
        Ok(Self { address, answered, task })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }
}

impl Drop for StunServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn open(listen: SocketAddr) -> anyhow::Result<UdpSocket> {
    let family = if listen.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = socket(family, SocketType::DGRAM, Some(ipproto::UDP))?;
    if listen.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    bind(&fd, &listen)?;
    let socket = std::net::UdpSocket::from(fd);
    socket.set_nonblocking(true)?;
    Ok(UdpSocket::from_std(socket)?)
}

async fn serve(socket: UdpSocket, strictness: Strictness, answered: Arc<AtomicU64>) {
    let mut request = [0; MAX_REQUEST];
    loop {
        // An error is an ICMP message about somebody's answer.
        let Ok((length, from)) = socket.recv_from(&mut request).await else { continue };
        let mut answer = [0; MAX_RESPONSE_LEN];
        let Some(written) = answer_to(request.get(..length).unwrap_or_default(), from, strictness, &mut answer) else {
            continue;
        };
        if socket.send_to(answer.get(..written).unwrap_or_default(), from).await.is_ok() {
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Length of the answer; `None`: the request deserves none.
fn answer_to(
    request: &[u8],
    from: SocketAddr,
    strictness: Strictness,
    answer: &mut [u8; MAX_RESPONSE_LEN],
) -> Option<usize> {
    let tx = parse_binding_request(request, strictness)?;
    let seen = SocketAddr::new(IpAddr::to_canonical(&from.ip()), from.port());
    let written = binding_response(&tx, seen, answer);
    (written * 10 <= request.len() * 11).then_some(written)
}

#[cfg(test)]
mod tests {
    use codervpn_wire::stun::{TxId, binding_request, parse_binding_response};

    use super::*;

    const V4: &str = "192.0.2.10:41641";
    const V6: &str = "[2001:db8::7]:41641";

    fn answer(request: &[u8], from: &str, strictness: Strictness) -> Option<Vec<u8>> {
        let mut out = [0; MAX_RESPONSE_LEN];
        let length = answer_to(request, from.parse().unwrap(), strictness, &mut out)?;
        Some(out[..length].to_vec())
    }

    /// A request without attributes, followed by nothing or by some that mean nothing.
    fn bare(attribute_bytes: u16) -> Vec<u8> {
        let mut request = binding_request(&TxId([7; 12])).to_vec();
        request.truncate(20);
        request[2..4].copy_from_slice(&attribute_bytes.to_be_bytes());
        if let Some(value) = attribute_bytes.checked_sub(4) {
            request.extend(0x8000_u16.to_be_bytes());
            request.extend(value.to_be_bytes());
            request.resize(20 + usize::from(attribute_bytes), 0);
        }
        request
    }

    #[test]
    fn t36_no_answer_is_longer_than_a_tenth_more_than_its_request() {
        let request = binding_request(&TxId([7; 12]));
        for (from, length) in [(V4, 32), (V6, 44)] {
            let mut lengths = vec![answer(&request, from, Strictness::Strict).unwrap().len()];
            assert_eq!(lengths, [length]);
            for attributes in (0..60).step_by(4) {
                let request = bare(attributes);
                let answer = answer(&request, from, Strictness::Lenient);
                let allowed = request.len() as f64 * 1.1;
                assert!(answer.as_ref().is_none_or(|answer| answer.len() as f64 <= allowed), "{from} {attributes}");
                lengths.extend(answer.map(|answer| answer.len()));
            }
            assert!(lengths.len() > 5, "the lenient one answers most of them: {lengths:?}");
        }
    }

    #[test]
    fn the_strict_one_answers_only_clients_like_ours() {
        let good = binding_request(&TxId([7; 12]));
        let mut bad = good;
        bad[39] ^= 1;
        let other = bare(20);
        for (request, strict, lenient) in [(&good[..], true, true), (&bad, false, true), (&other, false, true)] {
            assert_eq!(answer(request, V4, Strictness::Strict).is_some(), strict);
            assert_eq!(answer(request, V4, Strictness::Lenient).is_some(), lenient);
        }
        assert!(answer(&good[..39], V4, Strictness::Lenient).is_none(), "cut short");
        assert!(answer(b"", V4, Strictness::Lenient).is_none(), "nothing");
        let response = answer(&good, V4, Strictness::Strict).unwrap();
        assert!(answer(&response, V4, Strictness::Lenient).is_none(), "an answer is no question");
    }

    #[tokio::test]
    async fn each_family_is_told_its_own_address() {
        for host in ["127.0.0.1", "::1"] {
            let any = SocketAddr::new(host.parse().unwrap(), 0);
            let server = StunServer::start(any, Strictness::Strict).unwrap();
            let socket = UdpSocket::bind(any).await.unwrap();
            let tx = TxId([9; 12]);
            socket.send_to(&binding_request(&tx), server.address()).await.unwrap();
            let mut answer = [0; 100];
            let (length, from) = socket.recv_from(&mut answer).await.unwrap();
            let response = parse_binding_response(&answer[..length]).unwrap();
            assert_eq!((from, response.tx), (server.address(), tx));
            assert_eq!(response.mapped, socket.local_addr().unwrap());
            assert_eq!(server.answered(), 1);
        }
    }
}
