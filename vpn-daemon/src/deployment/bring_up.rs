//! Brings a deployment up: what takes time and does not depend on each other runs at the same time, since a person waits.

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use codervpn_control::api::Unauthorized;
use codervpn_control::{
    Api, ApiError, ConnectionSettings, Controller, ControllerConfig, ControllerRole, Obstacle, User, WebSocketDialer,
};
use codervpn_dns::{Responder, Suffix, SuffixRules, ZoneHandle};
use codervpn_engine::{self as engine, Engine};
use codervpn_host::Paths;
use codervpn_host::links::Monitor;
use codervpn_host::routes::{self, Prefix, RouteConfig, Routes};
use codervpn_host::tun::{self, Tun};
use codervpn_proto::ext::FailureCode;
use codervpn_proto::vpn::StartProgressStage;
use codervpn_underlay::{Dialer, DialerConfig, MapperOptions, PortMapper, RelayAccess, RelayOptions, Relays};
use codervpn_wire::keys::NodePrivate;
use codervpn_wire::node::CODER_PREFIX;
use http::{HeaderName, HeaderValue};
use rand_core::{OsRng, RngCore as _};
use secrecy::ExposeSecret as _;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::keeper::Keeper;
use super::names::{Names, Setup};
use super::pings::Pings;
use super::view::{Facts, View};
use super::{Context, Deployment};
use crate::config::Config;
use crate::failure::Failure;
use crate::forwarder::Forwarder;
use crate::parameters::Parameters;
use crate::party::{self, Survey};
use crate::tunnel::{Tunnel, Wake};
use crate::workspaces::Workspaces;

/// Everything a deployment consists of, running. On failure nothing is left.
pub(super) async fn bring_up(
    context: &Context,
    parameters: &Parameters,
    stop: &CancellationToken,
    known: Option<Known>,
) -> Result<Deployment, Failure> {
    // One configuration for the whole start, whatever is read meanwhile.
    let config = context.config.load_full();
    let dialer = dialer(&config, &parameters.headers)?;
    let api = Api::new(parameters.deployment.clone(), parameters.token.clone(), dialer.clone());
    let api = Arc::new(api.with_telemetry(parameters.telemetry.clone()));
    let mut engine_config = engine::Config::client(OsRng);
    if let Some(known) = &known {
        engine_config.addresses = vec![known.address];
    }
    let Some(address) = engine_config.addresses.first().copied() else {
        return Err(Failure::new(FailureCode::Internal, "the engine has no address"));
    };

    let asked_api = api.clone();
    let asked = async move {
        match known {
            Some(Known { user, settings, .. }) => Ok((user, settings)),
            None => ask(&asked_api).await,
        }
    };
    let mut asked = std::pin::pin!(asked);
    let mut prepared = std::pin::pin!(prepare_system(&config, &context.paths, address));
    let mut answers = None;
    // The device takes milliseconds, the server may take long; a device that cannot be had ends the wait for it.
    let (tun, routes) = loop {
        tokio::select! {
            biased;
            system = &mut prepared => break system?,
            answer = &mut asked, if answers.is_none() => answers = Some(answer),
        }
    };
    let answers = match answers {
        Some(answers) => answers,
        None => tokio::select! {
            () = stop.cancelled() => Err(Failure::new(FailureCode::Cancelled, "the start was cancelled")),
            answers = &mut asked => answers,
        },
    };
    let (user, settings) = match answers {
        Ok(answers) => answers,
        Err(failure) => return Err(undo(routes, failure).await),
    };
    context.report(StartProgressStage::Finalizing);
    let direct = direct(&config, &settings);
    engine_config.direct = direct;
    let suffix = suffix(&config, &context.paths, &settings, parameters);
    let zone = ZoneHandle::new();
    let (interface, interface_index) = (tun.name().to_owned(), tun.index());
    let started = start_tunnel(&config, parameters, &dialer, engine_config, tun, address, zone.clone());
    let (tunnel, tunnel_events, relays) = match started {
        Ok(started) => started,
        Err(failure) => return Err(undo(routes, failure).await),
    };

    let role = ControllerRole::Client { owner: user.id };
    let mut control_config = ControllerConfig::new(role);
    control_config.derp_map = Some(settings.derp_map.clone());
    control_config.deployment = Some(parameters.deployment.clone());
    let server_version = api.server_version();
    let web_socket = WebSocketDialer::new(api.clone(), role);
    let (control, control_events) = Controller::spawn(control_config, Arc::new(web_socket));

    let view = View::new(Facts {
        deployment: parameters.deployment.to_string(),
        user: user.username.clone(),
        suffix: suffix.as_ref().map(|suffix| suffix.as_str().to_owned()).unwrap_or_default(),
        interface,
        address,
        server_version: server_version.unwrap_or_default(),
    });
    let known = Known { user: user.clone(), settings: settings.clone(), address };
    let names = Names::new(Setup {
        mode: config.dns.mode,
        search: config.dns.search,
        paths: context.paths.clone(),
        suffix,
        owner: user.username,
        zone,
        interface_index,
        address,
        tunnel: tunnel.handle().clone(),
        dialer: dialer.clone(),
    });
    let mapper = PortMapper::spawn(dialer.clone(), MapperOptions::default());
    let mut survey = Survey::new(relays.clone(), dialer);
    survey.set_direct(direct == engine::Direct::Allowed);
    let links = match Monitor::new().await {
        Ok(monitor) => Some(monitor),
        Err(error) => {
            tracing::warn!(%error, "changes of networks are not seen");
            None
        }
    };
    let mut deployment = Deployment {
        context: context.clone(),
        tunnel,
        tunnel_events,
        relays,
        routes: Keeper::start(routes),
        known,
        stop: stop.clone(),
        control: Some(control),
        control_events,
        // Replaced by the caller's.
        requests: mpsc::channel(1).1,
        started: None,
        workspaces: Workspaces::default(),
        names,
        view,
        pings: Pings::default(),
        links,
        mapper,
        survey,
        direct,
        api,
        settings: JoinSet::new(),
        map: settings.derp_map.clone(),
        forwarder: Forwarder::default(),
        refresh: None,
        show_takes: Duration::ZERO,
    };
    // Before the map, with which our node may be published.
    if let Some(addresses) = party::local_addresses().await {
        let _ = deployment.tunnel.handle().apply(vec![addresses]).await;
    }
    deployment.take_map(settings.derp_map).await;
    Ok(deployment)
}

/// What a deployment that lost its device goes on with.
#[derive(Clone)]
pub(super) struct Known {
    user: User,
    pub(super) settings: ConnectionSettings,
    address: Ipv6Addr,
}

/// Whether packets may go to agents directly, and who does not want it.
pub(super) fn direct(config: &Config, settings: &ConnectionSettings) -> engine::Direct {
    match (config.paths.direct, settings.disable_direct_connections) {
        (false, _) => engine::Direct::DisabledByUser,
        (true, true) => engine::Direct::DisabledByDeployment,
        (true, false) => engine::Direct::Allowed,
    }
}

/// The dialer for everything that goes to a deployment.
pub(crate) fn dialer(config: &Config, extra_headers: &[(String, String)]) -> Result<Dialer, Failure> {
    let configured = config.network.headers.iter();
    let mut headers = Vec::new();
    for (name, value) in configured.chain(extra_headers.iter().map(|(name, value)| (name, value))) {
        // Both were checked where they came in.
        if let (Ok(name), Ok(mut value)) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(value)) {
            value.set_sensitive(true);
            headers.push((name, value));
        }
    }
    let config = DialerConfig { extra_ca: config.network.extra_ca.clone(), headers, proxy: None, base_dns: Vec::new() };
    Dialer::new(config).map_err(|error| Failure::new(FailureCode::BadRequest, error.to_string()))
}

async fn ask(api: &Api) -> Result<(User, ConnectionSettings), Failure> {
    let (user, settings) = tokio::join!(api.user(), api.connection_settings());
    // A server that refuses the token says so best at `users/me`.
    let user = user.map_err(|error| api_failure(&error))?;
    Ok((user, settings.map_err(|error| api_failure(&error))?))
}

async fn prepare_system(config: &Config, paths: &Paths, address: Ipv6Addr) -> Result<(Tun, Routes), Failure> {
    let name = config.tun.name.clone();
    // The kernel waits for a grace period in here, which may take tens of milliseconds.
    let tun = tokio::task::spawn_blocking(move || Tun::open(&name, tun::MTU)).await;
    let tun = tun
        .map_err(|_| Failure::new(FailureCode::Internal, "opening the TUN device failed"))?
        .map_err(|error| Failure::new(FailureCode::Tun, error.to_string()))?;
    let wanted = RouteConfig::new(address, service_prefix());
    let routes = Routes::apply(&tun, &wanted, paths).await.map_err(|error| {
        let code = match error {
            routes::Error::NoIpv6 | routes::Error::Ipv6Disabled { .. } => FailureCode::Ipv6Disabled,
            _ => FailureCode::Routes,
        };
        Failure::new(code, error.to_string())
    })?;
    Ok((tun, routes))
}

async fn undo(routes: Routes, failure: Failure) -> Failure {
    if let Err(error) = routes.undo().await {
        tracing::warn!(%error, "cannot take back routes");
    }
    failure
}

type Started = (Tunnel, mpsc::Receiver<crate::tunnel::TunnelEvent>, Relays);

fn start_tunnel(
    config: &Config,
    parameters: &Parameters,
    dialer: &Dialer,
    engine_config: engine::Config,
    tun: Tun,
    address: Ipv6Addr,
    zone: ZoneHandle,
) -> Result<Started, Failure> {
    let now = Instant::now();
    let responder = Responder::new(
        codervpn_dns::Config {
            own_address: address,
            zone,
            seed: OsRng.next_u64(),
            random_id: Box::new(|| OsRng.next_u32() as u16),
        },
        now,
    );
    let wake = Wake::new().map_err(|error| internal("cannot create an eventfd", &error))?;
    let relays = relays(config, parameters, dialer, engine_config.node_key.clone(), wake.clone())?;
    let engine = Engine::new(engine_config, now);
    let (tunnel, events) = Tunnel::start(tun, engine, Some(responder), relays.clone(), wake)
        .map_err(|error| internal("cannot start the data thread", &error))?;
    Ok((tunnel, events, relays))
}

fn relays(
    config: &Config,
    parameters: &Parameters,
    dialer: &Dialer,
    node_key: NodePrivate,
    wake: Wake,
) -> Result<Relays, Failure> {
    let mut token = HeaderValue::from_str(parameters.token.expose_secret())
        .map_err(|_| Failure::new(FailureCode::BadRequest, "the session token has characters that no token has"))?;
    token.set_sensitive(true);
    let access = RelayAccess {
        access_url: Some(parameters.deployment.url("/")),
        session_token: Some(token),
        allow_insecure: config.relay.allow_insecure,
    };
    Ok(Relays::new(dialer.clone(), node_key, RelayOptions { access, wake: Arc::new(move || wake.wake()) }))
}

/// A suffix that must not be served leaves the tunnel without names, and the text says why.
fn suffix(
    config: &Config,
    paths: &Paths,
    settings: &ConnectionSettings,
    parameters: &Parameters,
) -> Result<Suffix, String> {
    let relays = settings.derp_map.regions.values().flat_map(|region| &region.nodes);
    let mut own_hosts: Vec<String> = relays.map(|node| node.host.clone()).collect();
    own_hosts.push(parameters.deployment.host());
    let resolv_conf = std::fs::read(&paths.resolv_conf).unwrap_or_default();
    let rules = SuffixRules {
        allow: &config.dns.allow_suffix,
        own_hosts: &own_hosts,
        search_domains: &codervpn_host::dns::resolv_conf::ResolvConf::parse(&resolv_conf).search,
    };
    Suffix::parse(&settings.hostname_suffix, &rules).map_err(|error| error.to_string())
}

/// `fd60:627a:a42b::/48`, the network of all agents.
pub(super) fn service_prefix() -> Prefix {
    let mut octets = [0; 16];
    octets[..6].copy_from_slice(&CODER_PREFIX);
    Prefix::new(Ipv6Addr::from(octets), 48)
}

/// What a person is told about a failed call. The text already says what to do.
pub(crate) fn api_failure(error: &ApiError) -> Failure {
    let code = match error {
        ApiError::Url { .. } => FailureCode::BadUrl,
        ApiError::TokenForm => FailureCode::BadRequest,
        ApiError::Unreachable { obstacle, .. } => match obstacle {
            Obstacle::Name => FailureCode::HostNotFound,
            Obstacle::Connection => FailureCode::Unreachable,
            Obstacle::Timeout => FailureCode::Timeout,
            Obstacle::Tls => FailureCode::Tls,
        },
        ApiError::NotCoder { .. } | ApiError::Redirect { .. } => FailureCode::NotCoder,
        // coderd answers 401 while its database is down, too; that is no reason to log in again (HTTP-23).
        ApiError::Unauthorized { class: Unauthorized::Outage | Unauthorized::Unknown, .. } => FailureCode::ServerError,
        ApiError::Unauthorized { .. } => FailureCode::Unauthorized,
        ApiError::ServerTooOld { .. } | ApiError::ClientTooOld { .. } => FailureCode::ServerTooOld,
        ApiError::BrowserOnly(_) => FailureCode::Forbidden,
        ApiError::Status(reply) if reply.status == 403 => FailureCode::Forbidden,
        ApiError::RateLimited(_) | ApiError::Broken { .. } | ApiError::Status(_) => FailureCode::ServerError,
    };
    Failure::new(code, error.to_string())
}

fn internal(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(FailureCode::Internal, format!("{what}: {error}"))
}
