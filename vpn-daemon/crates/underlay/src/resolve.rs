//! Decides who is asked for the address of a host we dial.
//!
//! Usually the system's resolver. When the daemon is itself the system's
//! resolver it hands over the servers that were configured before, and they
//! are asked directly: a lookup of ours must never come back to us.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;

/// Waiting time per server and try.
const QUERY_LIMIT: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 2;

/// Who is asked.
#[derive(Clone)]
enum Source {
    System,
    Servers(Arc<TokioResolver>),
    /// Servers were given but cannot be used. Asking the system's resolver
    /// instead could loop through ourselves.
    Unusable(String),
}

pub(crate) struct Resolve {
    source: RwLock<Source>,
}

impl Resolve {
    pub(crate) fn new(servers: Vec<SocketAddr>) -> Resolve {
        let resolve = Resolve { source: RwLock::new(Source::System) };
        resolve.set_servers(servers);
        resolve
    }

    pub(crate) fn set_servers(&self, servers: Vec<SocketAddr>) {
        let source = build(servers);
        *self.source.write().unwrap_or_else(PoisonError::into_inner) = source;
    }

    /// All addresses of the host, best first; never an empty list.
    pub(crate) async fn lookup(&self, host: &str) -> Result<Vec<IpAddr>, String> {
        let source = self.source.read().unwrap_or_else(PoisonError::into_inner).clone();
        let addresses: Vec<IpAddr> = match source {
            Source::Unusable(reason) => return Err(reason),
            Source::Servers(resolver) => {
                // A trailing dot keeps the search list out of it.
                let name = format!("{}.", host.trim_end_matches('.'));
                let answer = resolver.lookup_ip(name).await.map_err(|e| e.to_string())?;
                answer.iter().collect()
            }
            Source::System => tokio::net::lookup_host((host, 0))
                .await
                .map_err(|e| e.to_string())?
                .map(|address| address.ip())
                .collect(),
        };
        if addresses.is_empty() {
            return Err("the name exists but has no address".into());
        }
        Ok(addresses)
    }
}

fn build(servers: Vec<SocketAddr>) -> Source {
    if servers.is_empty() {
        return Source::System;
    }
    let servers = servers
        .into_iter()
        .map(|server| {
            let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()]
                .into_iter()
                .map(|mut connection| {
                    connection.port = server.port();
                    connection
                })
                .collect();
            NameServerConfig::new(server.ip(), true, connections)
        })
        .collect();
    let config = ResolverConfig::from_parts(None, Vec::new(), servers);
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    let options = builder.options_mut();
    options.timeout = QUERY_LIMIT;
    options.attempts = ATTEMPTS;
    options.ip_strategy = LookupIpStrategy::Ipv6AndIpv4;
    match builder.build() {
        Ok(resolver) => Source::Servers(Arc::new(resolver)),
        Err(error) => Source::Unusable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UdpSocket;

    /// Answers every A question with 127.0.0.9 and everything else with nothing.
    async fn name_server() -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(async move {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query).await {
                // The question ends four bytes behind the name's root label.
                let name_end = 12 + query[12..length].iter().position(|byte| *byte == 0).unwrap();
                let question = &query[12..name_end + 5];
                let is_a = question[question.len() - 4..] == [0, 1, 0, 1];
                let mut answer = query[..2].to_vec();
                answer.extend([0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
                answer.extend(question);
                if is_a {
                    answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 9]);
                }
                let _ = socket.send_to(&answer, from).await;
            }
        });
        address
    }

    #[tokio::test]
    async fn base_servers_are_asked_instead_of_the_system() {
        let resolve = Resolve::new(vec![name_server().await]);
        let wanted: Vec<IpAddr> = vec!["127.0.0.9".parse().unwrap()];
        assert_eq!(resolve.lookup("coder.example").await.unwrap(), wanted);
        resolve.set_servers(Vec::new());
        assert!(resolve.lookup("localhost").await.unwrap().iter().all(IpAddr::is_loopback));
    }
}
