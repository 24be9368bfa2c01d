//! Decides how a control connection is dialled: which URL, with which headers, and what a refusal is.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use secrecy::{ExposeSecret, SecretString};
use tokio::io::{AsyncRead, AsyncWrite};
use url::Url;

use super::ControllerRole;
use crate::api::{Api, ApiError, Endpoint};

/// Version that a client asks for: the lowest with everything it needs, so that no server is refused needlessly (HTTP-11).
const CLIENT_VERSION: &str = codervpn_proto::TAILNET_VERSION;
/// The same for an agent, which needs Coordinate and StreamDERPMaps only.
const AGENT_VERSION: &str = "2.0";

/// A byte stream to the server.
pub trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// A dial that succeeded.
pub struct Dialed {
    /// Carries yamux.
    pub transport: Box<dyn Transport>,
    /// The server's build version.
    pub server_version: Option<String>,
}

/// A dial that failed.
pub type DialFailure = ApiError;

/// Future of a dial.
pub type DialFuture<'a> = Pin<Box<dyn Future<Output = Result<Dialed, DialFailure>> + Send + 'a>>;

/// Opens control connections. Dropping the future must abandon the dial (CC-8).
pub trait Dial: Send + Sync + 'static {
    /// One dial, with a resume token if there is one.
    fn dial<'a>(&'a self, resume_token: Option<&'a SecretString>) -> DialFuture<'a>;

    /// Asks the server whether the session itself is good. "No" and "cannot say" are the same.
    fn session_is_good(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(std::future::ready(false))
    }
}

/// Dials a deployment.
pub struct WebSocketDialer {
    api: Arc<Api>,
    role: ControllerRole,
}

impl WebSocketDialer {
    /// For the role's endpoint of the deployment that `api` talks to.
    pub fn new(api: Arc<Api>, role: ControllerRole) -> Self {
        Self { api, role }
    }

    /// Parameters in the order of Go. The result is a secret when it has a resume token (HTTP-8).
    fn url(&self, resume_token: Option<&SecretString>) -> Url {
        let (path, version) = match self.role {
            ControllerRole::Client { .. } => ("/api/v2/tailnet", CLIENT_VERSION),
            ControllerRole::Agent => ("/api/v2/workspaceagents/me/rpc", AGENT_VERSION),
        };
        let mut url = self.api.deployment().websocket_url(path);
        {
            let mut query = url.query_pairs_mut();
            if let Some(token) = resume_token {
                query.append_pair("resume_token", token.expose_secret());
            }
            query.append_pair("version", version);
        }
        url
    }

    async fn connect(&self, resume_token: Option<&SecretString>) -> Result<Dialed, ApiError> {
        let headers = self.api.headers()?;
        let socket = self
            .api
            .dialer()
            .websocket(&self.url(resume_token), headers)
            .await
            .map_err(|error| ApiError::from_http(error, Endpoint::Dial))?;
        self.api.remember_version(socket.answer_headers());
        Ok(Dialed { transport: Box::new(socket), server_version: self.api.server_version() })
    }
}

impl Dial for WebSocketDialer {
    fn dial<'a>(&'a self, resume_token: Option<&'a SecretString>) -> DialFuture<'a> {
        Box::pin(self.connect(resume_token))
    }

    fn session_is_good(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async { self.api.user().await.is_ok() })
    }
}

impl std::fmt::Debug for WebSocketDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WebSocketDialer({})", self.api.deployment())
    }
}
