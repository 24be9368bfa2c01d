//! Decides what is asked of coderd before a start, and what its answers mean.
//!
//! Three calls: `users/me` says whose workspaces, `workspaceagents/connection` gives relays and settings, `buildinfo` a
//! version for people. None is repeated here (HTTP-23): a failing call is a failing start, with a text that says what
//! happened and what to do ([`ApiError`]).

mod deployment;
mod error;
mod json;

use std::fmt;
use std::sync::{Mutex, PoisonError};

use codervpn_underlay::dialer::Dialer;
use codervpn_underlay::http::{Request, Response};
use codervpn_wire::derp_map::DerpMap;
use http::{HeaderMap, HeaderName, HeaderValue};
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use uuid::Uuid;

pub use deployment::Deployment;
pub use error::{ApiError, Obstacle, Reply, Unauthorized};
pub(crate) use error::{Endpoint, classify};
pub use json::{desktop_telemetry, parse_derp_map};

/// Header that carries the session token.
pub const SESSION_TOKEN: HeaderName = HeaderName::from_static("coder-session-token");

/// Header in which a client says what it is.
pub const DESKTOP_TELEMETRY: HeaderName = HeaderName::from_static("coder-desktop-telemetry");

/// Header of every answer of coderd: its version (HTTP-4).
pub const BUILD_VERSION: HeaderName = HeaderName::from_static("x-coder-build-version");

/// Suffix of servers that name none (1.2.2).
pub const DEFAULT_SUFFIX: &str = "coder";

/// Who the token belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Owner of the workspaces.
    pub id: Uuid,
    /// Part of the names of agents.
    pub username: String,
}

/// Relays and settings of a deployment.
#[derive(Debug, Clone, PartialEq)]
pub struct ConnectionSettings {
    /// Relays, rewritten for the URL we use (CC-46).
    pub derp_map: DerpMap,
    /// Every relay connection must use WebSocket.
    pub derp_force_websockets: bool,
    /// No direct paths (7.5).
    pub disable_direct_connections: bool,
    /// DNS suffix as the server says it, `coder` when it says none; to be validated by who uses it.
    pub hostname_suffix: String,
}

/// What a server tells everybody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildInfo {
    /// Version such as `v2.26.0+abcdef0`.
    pub version: String,
    /// A text for users about upgrading, if there is one.
    pub upgrade_message: String,
}

impl BuildInfo {
    /// Whether the version is known to be older than 2.18, the first with everything we need (HTTP-3). A hint only.
    pub fn is_too_old(&self) -> bool {
        let version = self.version.trim_start_matches('v');
        let version = version.split(['-', '+']).next().unwrap_or_default();
        let mut parts = version.split('.').map(str::parse::<u32>);
        match (parts.next(), parts.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => (major, minor) < (2, 18),
            _ => false,
        }
    }
}

/// The client's description of itself for the server's records (HTTP-5); nothing is sent when all parts are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Telemetry {
    /// Random id of the installation.
    pub device_id: String,
    /// Operating system.
    pub device_os: String,
    /// Version of the program.
    pub version: String,
}

/// Calls to one deployment with one token.
pub struct Api {
    deployment: Deployment,
    token: SecretString,
    telemetry: Telemetry,
    dialer: Dialer,
    server_version: Mutex<Option<String>>,
}

impl Api {
    /// Nothing is sent yet.
    pub fn new(deployment: Deployment, token: SecretString, dialer: Dialer) -> Self {
        Self { deployment, token, telemetry: Telemetry::default(), dialer, server_version: Mutex::new(None) }
    }

    /// Sends the telemetry header along.
    #[must_use]
    pub fn with_telemetry(mut self, telemetry: Telemetry) -> Self {
        self.telemetry = telemetry;
        self
    }

    /// The deployment asked.
    pub fn deployment(&self) -> &Deployment {
        &self.deployment
    }

    pub(crate) fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// Version of the server as its last answer said it (HTTP-4).
    pub fn server_version(&self) -> Option<String> {
        self.server_version.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// `GET /api/v2/users/me`: proves the token and says whose it is.
    pub async fn user(&self) -> Result<User, ApiError> {
        let reply = self.get("/api/v2/users/me", true).await?;
        if let Some(error) = classify(Endpoint::UsersMe, &reply) {
            return Err(error);
        }
        let user: json::User = parse(&reply)?;
        let id = Uuid::parse_str(&user.id).map_err(|_| ApiError::not_coder(&reply, "the user's id is not an id"))?;
        if user.username.is_empty() {
            return Err(ApiError::not_coder(&reply, "the user has no name"));
        }
        Ok(User { id, username: user.username })
    }

    /// `GET /api/v2/workspaceagents/connection`. A 401 of this endpoint does not say why, so `users/me` is asked (HTTP-23).
    pub async fn connection_settings(&self) -> Result<ConnectionSettings, ApiError> {
        let reply = self.get("/api/v2/workspaceagents/connection", true).await?;
        match classify(Endpoint::Connection, &reply) {
            Some(ApiError::Unauthorized { reply, class: Unauthorized::Unknown }) => match self.user().await {
                Err(error @ ApiError::Unauthorized { .. }) => return Err(error),
                _ => return Err(ApiError::Unauthorized { reply, class: Unauthorized::Unknown }),
            },
            Some(error) => return Err(error),
            None => {}
        }
        let settings: json::Connection = parse(&reply)?;
        let Some(map) = settings.derp_map else {
            return Err(ApiError::Broken {
                url: reply.url.clone(),
                reason: "it sent no relay map (derp_map is null); ask its administrator to check the DERP settings"
                    .into(),
            });
        };
        let mut derp_map = map.into_derp_map();
        self.deployment.rewrite_embedded(&mut derp_map);
        let suffix = settings.hostname_suffix.unwrap_or_default();
        Ok(ConnectionSettings {
            derp_map,
            derp_force_websockets: settings.derp_force_websockets,
            disable_direct_connections: settings.disable_direct_connections,
            hostname_suffix: if suffix.is_empty() { DEFAULT_SUFFIX.to_owned() } else { suffix },
        })
    }

    /// `GET /api/v2/buildinfo`, without the token. Must not stop a start when it fails (HTTP-3).
    pub async fn build_info(&self) -> Result<BuildInfo, ApiError> {
        let reply = self.get("/api/v2/buildinfo", false).await?;
        if let Some(error) = classify(Endpoint::BuildInfo, &reply) {
            return Err(error);
        }
        let info: json::BuildInfo = parse(&reply)?;
        Ok(BuildInfo { version: info.version, upgrade_message: info.upgrade_message })
    }

    /// Headers of every call and of the WebSocket dial: the token, marked as sensitive, and the telemetry (1.3).
    pub(crate) fn headers(&self) -> Result<HeaderMap, ApiError> {
        let mut headers = HeaderMap::new();
        let mut token = HeaderValue::from_str(self.token.expose_secret()).map_err(|_| ApiError::TokenForm)?;
        token.set_sensitive(true);
        headers.insert(SESSION_TOKEN, token);
        if let Some(value) = desktop_telemetry(&self.telemetry).and_then(|text| HeaderValue::from_str(&text).ok()) {
            headers.insert(DESKTOP_TELEMETRY, value);
        }
        Ok(headers)
    }

    pub(crate) fn remember_version(&self, headers: &HeaderMap) {
        let Some(version) = headers.get(BUILD_VERSION).and_then(|value| value.to_str().ok()) else { return };
        let mut known = self.server_version.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_deref() != Some(version) {
            tracing::info!(version, "server version");
            *known = Some(version.to_owned());
        }
    }

    async fn get(&self, path: &str, with_token: bool) -> Result<Response, ApiError> {
        let mut request = Request::get(self.deployment.url(path));
        if with_token {
            request.headers = self.headers()?;
        }
        let reply =
            self.dialer.request(&request).await.map_err(|error| ApiError::from_http(error, Endpoint::of(path)))?;
        self.remember_version(&reply.headers);
        Ok(reply)
    }
}

/// Shows the deployment only.
impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Api({})", self.deployment)
    }
}

fn parse<T: DeserializeOwned>(reply: &Response) -> Result<T, ApiError> {
    serde_json::from_slice(&reply.body).map_err(|error| {
        let what = match reply.body.iter().find(|byte| !byte.is_ascii_whitespace()) {
            None => "an empty page".to_owned(),
            Some(b'<') => "a web page instead of JSON".to_owned(),
            Some(b'{') => format!("unexpected JSON: {error}"),
            Some(_) => "something that is not JSON".to_owned(),
        };
        ApiError::not_coder(reply, &what)
    })
}
