//! Decides which answer a request gets, in the order of checks of a real server (1.5), and what goes on after an upgrade.

use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use http::{HeaderMap, HeaderValue, Method, Request, header};
use hyper::body::Incoming;
use serde_json::json;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use uuid::Uuid;

use super::answers::{Answer, Problem, json_answer, plain, refused_upgrade};
use super::authorization::Authorization;
use super::faults::Route;
use super::listener::{Dropped, Front, Wire, after_upgrade};
use super::resume::Verdict;
use super::service::TailnetService;
use super::session::{self, SessionFacts};
use super::users::{self, Asker};
use super::{RequestRecord, Shared, derp_map};

/// Requests remembered for tests.
const RECORDS: usize = 4096;

impl Front for Shared {
    async fn answer(self: Arc<Self>, mut request: Request<Incoming>, remote: SocketAddr) -> Result<Answer, Dropped> {
        self.record(&request);
        let path = request.uri().path().to_owned();
        let route = route(&path);
        if let Some(route) = route
            && let Some(answer) = self.faults.answer(route).await?
        {
            return Ok(self.stamped(answer));
        }
        let answer = match route {
            Some(Route::Tailnet) => Arc::clone(&self).tailnet(&mut request),
            Some(Route::AgentRpc) => Arc::clone(&self).agent_rpc(&mut request),
            Some(Route::Derp) => self.relay.answer(&mut request, remote, self.stop_token()),
            Some(Route::LatencyCheck) => Ok(plain(200, "")),
            Some(_) if request.method() != Method::GET => {
                let mut answer = plain(405, "");
                answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
                Ok(answer)
            }
            Some(Route::BuildInfo) => Ok(self.build_info()),
            Some(Route::UsersMe) => self.users_me(request.headers()),
            Some(Route::Connection) => self.connection(request.headers()),
            Some(Route::Any) | None => Err(Problem::new(404, "Route not found.")),
        };
        Ok(self.stamped(answer.unwrap_or_else(|problem| problem.answer())))
    }

    async fn fast_start(self: Arc<Self>, stream: Box<dyn Wire>, remote: SocketAddr) {
        self.relay.serve(stream, remote).await;
    }
}

fn route(path: &str) -> Option<Route> {
    Some(match path {
        "/api/v2/buildinfo" => Route::BuildInfo,
        "/api/v2/users/me" => Route::UsersMe,
        "/api/v2/workspaceagents/connection" => Route::Connection,
        "/api/v2/tailnet" => Route::Tailnet,
        "/api/v2/workspaceagents/me/rpc" => Route::AgentRpc,
        "/derp" | "/derp/" => Route::Derp,
        "/derp/latency-check" => Route::LatencyCheck,
        _ => return None,
    })
}

impl Shared {
    /// HTTP-4.
    fn stamped(&self, mut answer: Answer) -> Answer {
        if let Ok(version) = HeaderValue::from_str(&self.config.build_version) {
            answer.headers_mut().insert("x-coder-build-version", version);
        }
        answer
    }

    fn record(&self, request: &Request<Incoming>) {
        let headers = request.headers();
        let mut names: Vec<String> = headers.keys().map(|name| name.as_str().to_owned()).collect();
        names.sort();
        if request.uri().query().is_some_and(|query| query.contains("coder_session_token")) {
            self.violations.add("HTTP-8: the session token in a query");
        }
        let mut records = super::lock(&self.requests);
        if records.len() == RECORDS {
            records.pop_front();
        }
        records.push_back(RequestRecord {
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            header_names: names,
            has_token: users::token(headers).is_some(),
        });
    }

    fn build_info(&self) -> Answer {
        let url = self.url();
        json_answer(
            200,
            &json!({
                "external_url": "https://example.invalid", "version": self.config.build_version,
                "dashboard_url": url.as_str().trim_end_matches('/'), "telemetry": false, "workspace_proxy": false,
                "agent_api_version": "1.0", "provisioner_api_version": "1.9", "upgrade_message": "",
                "deployment_id": self.id.to_string(),
            }),
        )
    }

    fn user(&self, headers: &HeaderMap, asker: Asker) -> Result<users::User, Problem> {
        super::lock(&self.users).authenticate(headers, asker, self.faults.database_down()).cloned()
    }

    fn users_me(&self, headers: &HeaderMap) -> Result<Answer, Problem> {
        let user = self.user(headers, Asker::User)?;
        let (id, name) = (user.id.to_string(), user.name);
        Ok(json_answer(
            200,
            &json!({
                "id": id, "username": name, "name": name, "email": format!("{name}@example.invalid"),
                "status": "active", "login_type": "password", "organization_ids": [], "roles": [],
            }),
        ))
    }

    fn connection(&self, headers: &HeaderMap) -> Result<Answer, Problem> {
        self.user(headers, Asker::UserOrProxy)?;
        let mut body = json!({
            "derp_map": derp_map::to_json(&self.derp_map.borrow()),
            "derp_force_websockets": self.config.force_websockets,
            "disable_direct_connections": self.config.disable_direct.load(std::sync::atomic::Ordering::Relaxed),
        });
        if let (Some(suffix), Some(members)) = (&self.config.hostname_suffix, body.as_object_mut()) {
            members.insert("hostname_suffix".into(), suffix.as_str().into());
        }
        Ok(json_answer(200, &body))
    }

    fn tailnet(self: Arc<Self>, request: &mut Request<Incoming>) -> Result<Answer, Problem> {
        let user = self.user(request.headers(), Asker::User)?;
        if self.config.browser_only {
            return Err(Problem::new(409, "Non-browser connections are disabled for your deployment."));
        }
        let version = self.version(request)?;
        let mut resumed = false;
        let peer = match parameter(request, "resume_token").filter(|token| !token.is_empty()) {
            None => Uuid::new_v4(),
            Some(token) => match self.resume.verify(&token) {
                Verdict::Ignored => Uuid::new_v4(),
                Verdict::Peer(peer) => {
                    resumed = true;
                    peer
                }
                Verdict::Refused(detail) => {
                    return Err(Problem::new(401, "Invalid resume token")
                        .detail(detail)
                        .validation("resume_token", "Invalid resume token"));
                }
            },
        };
        let authorization = Authorization::User { user: user.id, store: Arc::clone(&self.store) };
        let facts = SessionFacts { peer, is_agent: false, version, resumed };
        Ok(self.upgrade(request, facts, Some(user.id), authorization))
    }

    fn agent_rpc(self: Arc<Self>, request: &mut Request<Incoming>) -> Result<Answer, Problem> {
        if self.faults.database_down() {
            return Err(Problem::new(500, "Internal error checking workspace agent authorization."));
        }
        let token = users::token(request.headers()).unwrap_or_default();
        let agent = token.strip_prefix("agent-").and_then(|id| Uuid::parse_str(id).ok());
        let Some(agent) = agent.filter(|agent| self.store.is_current_agent(*agent)) else {
            return Err(Problem::new(401, "Workspace agent not authorized.").detail(
                "The agent cannot authenticate until the workspace provision job has been completed. If the job is no \
                 longer running, this agent is invalid.",
            ));
        };
        let version = self.version(request)?;
        let facts = SessionFacts { peer: agent, is_agent: true, version, resumed: false };
        Ok(self.upgrade(request, facts, None, Authorization::Agent(agent)))
    }

    fn version(&self, request: &Request<Incoming>) -> Result<Option<String>, Problem> {
        let version = parameter(request, "version");
        self.config
            .api_version
            .check(version.as_deref())
            .map_err(|detail| Problem::new(400, "Unknown or unsupported API version").validation("version", detail))?;
        Ok(version)
    }

    fn upgrade(
        self: Arc<Self>,
        request: &mut Request<Incoming>,
        facts: SessionFacts,
        user: Option<Uuid>,
        authorization: Authorization,
    ) -> Answer {
        let accept = match accept_websocket(request, true) {
            Ok(accept) => accept,
            Err(answer) => return *answer,
        };
        let headers = request.headers();
        for unwanted in ["origin", "sec-websocket-extensions", "sec-websocket-protocol", "cookie"] {
            if headers.contains_key(unwanted) {
                // Go's client offers nothing of it either.
                self.violations.add(format!("HTTP-7: header {unwanted} on a control connection"));
            }
        }
        let coordinator = self.coordinator();
        let service = TailnetService { shared: Arc::clone(&self), coordinator, peer: facts.peer, user, authorization };
        let stop = self.stop_token();
        after_upgrade(request, stop, move |stream| async move {
            let (sessions, times) = (Arc::clone(&self.sessions), self.config.session_times.clone());
            let violations = Arc::clone(&self.violations);
            session::serve(stream, facts, sessions, times, Arc::new(service), violations).await;
        });
        switching("websocket", &[("sec-websocket-accept", &accept)])
    }
}

/// The handshake's checks (WS-3); the value of `Sec-WebSocket-Accept`.
pub(crate) fn accept_websocket(request: &Request<Incoming>, check_origin: bool) -> Result<String, Box<Answer>> {
    let refuse = |status, reason: String| Err(Box::new(refused_upgrade(status, &reason)));
    if request.method() != Method::GET {
        let mut answer = plain(405, "");
        answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        return Err(Box::new(answer));
    }
    let headers = request.headers();
    let has = |name: header::HeaderName, token: &str| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|part| part.trim().eq_ignore_ascii_case(token))
    };
    if !has(header::CONNECTION, "upgrade") {
        return refuse(426, "WebSocket protocol violation: Connection header does not contain Upgrade".into());
    }
    if !has(header::UPGRADE, "websocket") {
        return refuse(426, "WebSocket protocol violation: Upgrade header does not contain websocket".into());
    }
    let version = headers.get(header::SEC_WEBSOCKET_VERSION).and_then(|value| value.to_str().ok());
    if version != Some("13") {
        return refuse(400, format!("unsupported WebSocket protocol version (only 13 is supported): {version:?}"));
    }
    let key = headers.get(header::SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes).unwrap_or_default();
    if BASE64.decode(key).map(|key| key.len()) != Ok(16) {
        return refuse(400, "WebSocket protocol violation: invalid Sec-WebSocket-Key".into());
    }
    if check_origin && let Some(origin) = headers.get(header::ORIGIN).and_then(|value| value.to_str().ok()) {
        let host = headers.get(header::HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if origin.split_once("://").map(|(_, rest)| rest) != Some(host) {
            return refuse(403, format!("request Origin {origin:?} is not authorized for Host {host:?}"));
        }
    }
    Ok(derive_accept_key(key))
}

/// 101.
pub(crate) fn switching(protocol: &'static str, headers: &[(&'static str, &str)]) -> Answer {
    let mut answer = plain(101, "");
    let all = answer.headers_mut();
    all.remove(header::CONTENT_TYPE);
    all.insert(header::UPGRADE, HeaderValue::from_static(protocol));
    all.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    for (name, value) in headers {
        if let Ok(value) = HeaderValue::from_str(value) {
            all.insert(*name, value);
        }
    }
    answer
}

fn parameter(request: &Request<Incoming>, name: &str) -> Option<String> {
    let query = request.uri().query().unwrap_or_default();
    url::form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
}
