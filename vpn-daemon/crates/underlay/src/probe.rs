//! Latency of relays by HTTP, which decides the home region (data plane 3.3).
//!
//! A probe opens a fresh connection as a relay connection would, sends
//! `GET /derp/latency-check` and takes only the time from the written request
//! to the first byte of the answer, so that neither DNS nor TLS counts.

use std::net::SocketAddr;
use std::time::Duration;

use ::http::{HeaderMap, StatusCode};
use codervpn_wire::derp_map::{Region, RegionId, RelayNode};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};

use crate::dialer::{DialError, Dialer};
use crate::relay::{RelayAccess, node_url};
use crate::stream::Connection;

/// Bytes of an answer that are looked at: its status line comes first.
const HEAD: usize = 8 * 1024;

/// What one region's probe measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionLatency {
    pub latency: Duration,
    /// Whom we reached; its family says which latency this is.
    pub address: SocketAddr,
}

/// Why a region has no latency.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("the region has no relay to probe")]
    NoNode,
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the relay answered the probe with status {0}")]
    Status(u16),
    #[error("the answer to the probe is not HTTP")]
    NotHttp,
    #[error("the connection broke during the probe: {0}")]
    Broken(#[from] std::io::Error),
    #[error("no answer to the probe within {} s", .0.as_secs_f32())]
    Timeout(Duration),
}

/// All regions at the same time.
pub(crate) async fn probe_all(
    dialer: &Dialer,
    access: &RelayAccess,
    regions: &[Region],
    limit: Duration,
) -> Vec<(RegionId, Result<RegionLatency, ProbeError>)> {
    let probes = regions.iter().map(|region| async move {
        let result = match timeout(limit, probe_region(dialer, access, region)).await {
            Ok(result) => result,
            Err(_) => Err(ProbeError::Timeout(limit)),
        };
        (region.id, result)
    });
    join_all(probes).await
}

/// The first node in order that answers, as a connection would choose it.
async fn probe_region(dialer: &Dialer, access: &RelayAccess, region: &Region) -> Result<RegionLatency, ProbeError> {
    let mut last = ProbeError::NoNode;
    for node in region.relays() {
        match probe_node(dialer, access, region, node).await {
            Ok(latency) => return Ok(latency),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn probe_node(
    dialer: &Dialer,
    access: &RelayAccess,
    region: &Region,
    node: &RelayNode,
) -> Result<RegionLatency, ProbeError> {
    let target = access.target(node).ok_or(ProbeError::NoNode)?;
    let url = node_url(&target, "/derp/latency-check").ok_or(ProbeError::NoNode)?;
    let headers = access.headers(region, node, dialer.headers());
    let mut stream = dialer.connect(&target).await?;
    let address = stream.peer_address().ok_or(ProbeError::NoNode)?;

    let host = match (url.host_str(), url.port()) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        (Some(host), None) => host.to_owned(),
        (None, _) => return Err(ProbeError::NoNode),
    };
    stream.write_all(&request(&host, &headers)).await?;
    stream.flush().await?;
    let written = Instant::now();
    let (latency, status) = first_byte(&mut stream, written).await?;
    // T-22: a redirect is a failure too.
    if status.is_success() { Ok(RegionLatency { latency, address }) } else { Err(ProbeError::Status(status.as_u16())) }
}

fn request(host: &str, headers: &HeaderMap) -> Vec<u8> {
    let mut out = format!("GET /derp/latency-check HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n").into_bytes();
    for (name, value) in headers {
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
    out
}

async fn first_byte(stream: &mut Connection, written: Instant) -> Result<(Duration, StatusCode), ProbeError> {
    let mut head = Vec::with_capacity(256);
    let mut latency = None;
    loop {
        let read = stream.read_buf(&mut head).await?;
        let latency = *latency.get_or_insert_with(|| written.elapsed());
        if let Some(status) = status_line(&head)? {
            return Ok((latency, status));
        }
        if read == 0 || head.len() > HEAD {
            return Err(ProbeError::NotHttp);
        }
    }
}

/// `HTTP/1.x NNN …`; `None` while it is not complete.
fn status_line(head: &[u8]) -> Result<Option<StatusCode>, ProbeError> {
    const PREFIX: &[u8] = b"HTTP/1.";
    let seen = head.len().min(PREFIX.len());
    if head.get(..seen) != PREFIX.get(..seen) {
        return Err(ProbeError::NotHttp);
    }
    let Some(code) = head.get(9..12) else { return Ok(None) };
    StatusCode::from_bytes(code).map(Some).map_err(|_| ProbeError::NotHttp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines() {
        assert_eq!(status_line(b"HTTP/1.1 200 OK\r\n").unwrap(), Some(StatusCode::OK));
        assert_eq!(status_line(b"HTTP/1.1 20").unwrap(), None);
        assert!(status_line(b"SSH-2.0").is_err());
        assert!(status_line(b"HTTP/1.1 xyz").is_err());
    }
}
