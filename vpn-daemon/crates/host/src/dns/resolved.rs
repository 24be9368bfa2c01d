//! Mode `resolved`: true split DNS by systemd-resolved over D-Bus (`dns-and-os.md` 2.2).
//!
//! Our link gets our server, our suffixes as routing-only domains, and no default route: the
//! system asks us for our names and nobody else for them, and us for nothing else (D-12, D-13).
//! If this process dies, resolved forgets the link together with the interface.

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::timeout;
use zbus::wire::as_variant;
use zbus::{Connection, DBusError as _, DynamicType, OwnedObjectPath, Type};

use super::detect::{NetworkManagerFacts, ResolvedFacts};
use super::{Backend, DnsConfig, Error, Mode, State};

const NAME: &str = "org.freedesktop.resolve1";
const PATH: &str = "/org/freedesktop/resolve1";
const MANAGER: &str = "org.freedesktop.resolve1.Manager";
const LINK: &str = "org.freedesktop.resolve1.Link";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// For each call and for connecting: a stopped bus must not hold up a start or a stop (D-11).
const CALL: Duration = Duration::from_secs(1);

const AF_INET6: i32 = 10;

/// One server as `SetLinkDNSEx` takes it: family, address, port (0 for 53), TLS name.
type ServerEx = (i32, Vec<u8>, u16, String);
/// The same for `SetLinkDNS`.
type Server = (i32, Vec<u8>);
/// A domain, and whether it only routes.
type Domain = (String, bool);

/// Settings of one link in systemd-resolved.
#[derive(Debug, Default)]
pub struct Resolved {
    /// Another bus than the system's, for tests.
    address: Option<String>,
    bus: Option<Connection>,
    config: Option<DnsConfig>,
    state: State,
}

impl Resolved {
    /// On the system bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// On the bus at this address.
    pub fn at(address: impl Into<String>) -> Self {
        Resolved { address: Some(address.into()), ..Self::default() }
    }

    async fn bus(&mut self) -> Result<Bus, Error> {
        if let Some(bus) = &self.bus {
            return Ok(Bus(bus.clone()));
        }
        let bus = Bus::connect(self.address.as_deref()).await?;
        self.bus = Some(bus.0.clone());
        Ok(bus)
    }

    async fn install(&mut self, config: &DnsConfig) -> Result<(), Error> {
        let bus = self.bus().await?;
        match bus.configure(config).await {
            Ok(()) => {}
            Err(error) => {
                // The connection may be what is broken.
                self.bus = None;
                return Err(error);
            }
        }
        self.config = Some(config.clone());
        self.state = State::Applied;
        Ok(())
    }

    async fn look_and_repair(&mut self) -> Result<State, Error> {
        let Some(config) = self.config.clone() else {
            return Ok(State::Off);
        };
        let bus = self.bus().await?;
        match bus.is_configured(&config).await {
            Ok(true) => {
                self.state = State::Applied;
                return Ok(self.state);
            }
            Ok(false) => tracing::info!("systemd-resolved lost our settings: setting them again"),
            Err(error) => {
                tracing::debug!(%error, "cannot read our settings in systemd-resolved");
                self.bus = None;
            }
        }
        self.install(&config).await?;
        self.state = State::Repaired;
        Ok(self.state)
    }
}

impl Backend for Resolved {
    fn mode(&self) -> Mode {
        Mode::Resolved
    }

    fn apply<'a>(&'a mut self, config: &'a DnsConfig) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async {
            // Also after a failure half way there is something to revert.
            self.config = Some(config.clone());
            self.install(config).await
        })
    }

    fn check(&mut self) -> BoxFuture<'_, Result<State, Error>> {
        Box::pin(self.look_and_repair())
    }

    fn revert(&mut self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            let Some(config) = self.config.take() else {
                return Ok(());
            };
            self.state = State::Off;
            let bus = self.bus().await?;
            let result = bus.revert(config.interface_index).await;
            self.bus = None;
            result
        })
    }

    fn state(&self) -> State {
        self.state
    }

    fn upstreams(&self) -> Vec<SocketAddr> {
        Vec::new()
    }
}

/// A connection and what we say on it.
struct Bus(Connection);

impl Bus {
    async fn connect(address: Option<&str>) -> Result<Self, Error> {
        let builder = match address {
            Some(address) => zbus::connection::Builder::address(address),
            None => zbus::connection::Builder::system(),
        };
        match timeout(CALL, builder.build()).await {
            Err(_) => Err(Error::ResolvedTimeout(CALL)),
            Ok(Err(error)) => Err(failure("connect to the system bus", error)),
            Ok(Ok(connection)) => Ok(Bus(connection)),
        }
    }

    /// The calls of 2.2 in their order.
    async fn configure(&self, config: &DnsConfig) -> Result<(), Error> {
        let index = interface(config.interface_index)?;
        let ex: Vec<ServerEx> = vec![(AF_INET6, octets(config.server), 0, String::new())];
        match self.call("SetLinkDNSEx", &(index, ex)).await {
            Ok(_) => {}
            // Before systemd 246.
            Err(Called::Failed(error)) if is_unknown_method(&error) => {
                let plain: Vec<Server> = vec![(AF_INET6, octets(config.server))];
                self.call("SetLinkDNS", &(index, plain)).await.map_err(|error| error.to("SetLinkDNS"))?;
            }
            Err(error) => return Err(error.to("SetLinkDNSEx")),
        }
        self.call("SetLinkDomains", &(index, domains(config))).await.map_err(|error| error.to("SetLinkDomains"))?;
        match self.call("SetLinkDefaultRoute", &(index, false)).await {
            // Before systemd 240.
            Err(Called::Failed(error)) if is_unknown_method(&error) => {}
            other => {
                other.map_err(|error| error.to("SetLinkDefaultRoute"))?;
            }
        }
        for method in ["SetLinkLLMNR", "SetLinkMulticastDNS", "SetLinkDNSSEC", "SetLinkDNSOverTLS"] {
            self.optional(method, &(index, "no")).await?;
        }
        self.optional("FlushCaches", &()).await
    }

    /// Whether the link has our server and our domains.
    async fn is_configured(&self, config: &DnsConfig) -> Result<bool, Error> {
        let index = interface(config.interface_index)?;
        let reply = self.call("GetLink", &(index,)).await.map_err(|error| error.to("GetLink"))?;
        let path: OwnedObjectPath = reply.body().deserialize().map_err(|error| failure("GetLink", error))?;
        let servers: Vec<Server> = self
            .property(path.as_str(), LINK, "DNS")
            .await
            .map_err(|error| error.to("read its servers of our link"))?;
        let found: Vec<Domain> = self
            .property(path.as_str(), LINK, "Domains")
            .await
            .map_err(|error| error.to("read its domains of our link"))?;
        let same = |list: Vec<Domain>| -> BTreeSet<Domain> {
            list.into_iter().map(|(name, routes)| (name.trim_end_matches('.').to_ascii_lowercase(), routes)).collect()
        };
        Ok(servers == [(AF_INET6, octets(config.server))] && same(found) == same(domains(config)))
    }

    async fn revert(&self, index: u32) -> Result<(), Error> {
        match self.call("RevertLink", &(interface(index)?,)).await {
            Ok(_) => Ok(()),
            // Gone with its device.
            Err(Called::Failed(error)) if error_name(&error).ends_with("NoSuchLink") => Ok(()),
            Err(error) => Err(error.to("RevertLink")),
        }
    }

    /// A refusal is logged; silence is an error, so that a hanging service costs one second and
    /// not one for each call.
    async fn optional<B>(&self, method: &'static str, body: &B) -> Result<(), Error>
    where
        B: serde::Serialize + DynamicType + Sync,
    {
        match self.call(method, body).await {
            Ok(_) => Ok(()),
            Err(Called::Failed(error)) => {
                tracing::debug!(method, %error, "systemd-resolved keeps its setting");
                Ok(())
            }
            Err(error) => Err(error.to(method)),
        }
    }

    async fn call<B>(&self, method: &'static str, body: &B) -> Result<zbus::Message, Called>
    where
        B: serde::Serialize + DynamicType + Sync,
    {
        let call = self.0.call_method(Some(NAME), PATH, Some(MANAGER), method, body);
        within(call).await
    }

    async fn property<T>(&self, path: &str, interface: &str, name: &str) -> Result<T, Called>
    where
        T: serde::de::DeserializeOwned + Type,
    {
        self.property_of(NAME, path, interface, name).await
    }

    async fn property_of<T>(&self, service: &str, path: &str, interface: &str, name: &str) -> Result<T, Called>
    where
        T: serde::de::DeserializeOwned + Type,
    {
        let arguments = (interface, name);
        let call = self.0.call_method(Some(service), path, Some(PROPERTIES), "Get", &arguments);
        let reply = within(call).await?;
        let body = reply.body();
        let value: as_variant::Deserialize<'_, T> = body.deserialize().map_err(Called::Failed)?;
        Ok(value.0)
    }
}

/// How a call went wrong.
enum Called {
    Failed(zbus::Error),
    TimedOut,
}

impl Called {
    fn to(self, what: &'static str) -> Error {
        match self {
            Called::TimedOut => Error::ResolvedTimeout(CALL),
            Called::Failed(error) => failure(what, error),
        }
    }
}

async fn within(call: impl Future<Output = zbus::Result<zbus::Message>>) -> Result<zbus::Message, Called> {
    match timeout(CALL, call).await {
        Err(_) => Err(Called::TimedOut),
        Ok(result) => result.map_err(Called::Failed),
    }
}

/// systemd-resolved and NetworkManager, as far as they answer on the system bus.
pub(super) async fn ask_who_is_there() -> (Option<ResolvedFacts>, Option<NetworkManagerFacts>) {
    let bus = match Bus::connect(None).await {
        Ok(bus) => bus,
        Err(error) => {
            tracing::debug!(%error, "no system bus");
            return (None, None);
        }
    };
    (bus.ask_resolved().await, bus.ask_network_manager().await)
}

impl Bus {
    /// May start it, as any program that asks it does.
    async fn ask_resolved(&self) -> Option<ResolvedFacts> {
        let ping = self.0.call_method(Some(NAME), PATH, Some("org.freedesktop.DBus.Peer"), "Ping", &());
        within(ping).await.ok()?;
        Some(ResolvedFacts {
            resolv_conf_mode: self.property(PATH, MANAGER, "ResolvConfMode").await.unwrap_or_default(),
        })
    }

    /// Never starts it: an installed but unused one decides nothing.
    async fn ask_network_manager(&self) -> Option<NetworkManagerFacts> {
        const MANAGER: &str = "org.freedesktop.NetworkManager";
        let has_owner = self.0.call_method(
            Some("org.freedesktop.DBus"),
            "/org/freedesktop/DBus",
            Some("org.freedesktop.DBus"),
            "NameHasOwner",
            &MANAGER,
        );
        let there: bool = within(has_owner).await.ok()?.body().deserialize().ok()?;
        if !there {
            return None;
        }
        let version = self.property_of(MANAGER, "/org/freedesktop/NetworkManager", MANAGER, "Version").await.ok()?;
        let dns_mode = self
            .property_of(
                MANAGER,
                "/org/freedesktop/NetworkManager/DnsManager",
                "org.freedesktop.NetworkManager.DnsManager",
                "Mode",
            )
            .await
            .unwrap_or_default();
        Some(NetworkManagerFacts { version, dns_mode })
    }
}

/// Our suffixes, routing-only unless `search`, and the reverse zone, which never searches.
fn domains(config: &DnsConfig) -> Vec<Domain> {
    let mut domains: Vec<Domain> = config
        .suffixes
        .iter()
        .enumerate()
        .map(|(position, suffix)| (suffix.clone(), position > 0 || !config.search))
        .collect();
    if !config.reverse_zone.is_empty() {
        domains.push((config.reverse_zone.clone(), true));
    }
    domains
}

fn octets(address: Ipv6Addr) -> Vec<u8> {
    address.octets().to_vec()
}

fn interface(index: u32) -> Result<i32, Error> {
    i32::try_from(index).map_err(|error| Error::Resolved { what: "the interface index", source: error.into() })
}

fn failure(what: &'static str, error: zbus::Error) -> Error {
    let name = error_name(&error);
    if name.ends_with(".LinkBusy") {
        Error::LinkBusy
    } else if name.ends_with(".AccessDenied") || name.ends_with(".InteractiveAuthorizationRequired") {
        Error::ResolvedRefuses(what)
    } else {
        Error::Resolved { what, source: error.into() }
    }
}

fn is_unknown_method(error: &zbus::Error) -> bool {
    error_name(error).ends_with(".UnknownMethod")
}

/// The D-Bus name of an error, empty for one that did not come from the other side.
fn error_name(error: &zbus::Error) -> String {
    match error {
        zbus::Error::MethodError(name, ..) => name.to_string(),
        zbus::Error::FDO(error) => error.name().to_string(),
        _ => String::new(),
    }
}
