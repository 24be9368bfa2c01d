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
