//! HTTP/1.1 over the dialer: bounded requests for the REST calls, and the
//! upgrade with which WebSocket and relay connections begin.
//!
//! Decides the limits of HTTP-20, that no redirect is followed except the same
//! URL over https (HTTP-18), which of the user's headers may be sent (HTTP-6,
//! HTTP-7), and that no body is read without a bound.

use std::fmt;
use std::time::Duration;

use ::http::header::{self, HeaderName};
use ::http::{HeaderMap, HeaderValue, Method, StatusCode};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout_at};
use url::Url;

use crate::certificate::bounded;
use crate::dialer::{DialError, Dialer, Phase, Target};
use crate::stream::Connection;

/// Head of the answer (HTTP-20).
pub const RESPONSE_LIMIT: Duration = Duration::from_secs(30);
/// A whole REST call (HTTP-20).
pub const CALL_LIMIT: Duration = Duration::from_secs(60);
/// Successful answers are a DERP map at most; 4 MiB is far above 256 regions.
pub const BODY_LIMIT: usize = 4 * 1024 * 1024;
/// Bodies of errors (HTTP-9).
pub const ERROR_BODY_LIMIT: usize = 64 * 1024;
/// Redirects of one call (HTTP-18).
const MAX_REDIRECTS: usize = 3;
/// The head of an answer may use this much memory.
const HEAD_LIMIT: usize = 64 * 1024;

/// Why a request brought no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("{url}: only http and https URLs with a host can be used")]
    Url { url: String },
    #[error("{url}: timed out after {} s while {phase}", .after.as_secs_f32())]
    Timeout { url: String, phase: Phase, after: Duration },
    /// An answer arrived, with a status that the caller did not want.
    #[error("{}", .0)]
    Status(Box<Response>),
    #[error("{url} redirects to {location}; use that as deployment URL")]
    Redirect { url: String, location: String },
    #[error("{url}: {reason}; is this a Coder server?")]
    Protocol { url: String, reason: String },
    #[error("{url}: the connection broke: {reason}")]
    Broken { url: String, reason: String },
    #[error("{url}: the answer is longer than {limit} bytes")]
    TooLong { url: String, limit: usize },
}

/// One call.
#[derive(Clone)]
pub struct Request {
    pub method: Method,
    pub url: Url,
    /// The caller's headers, the session token among them.
    pub headers: HeaderMap,
    pub body: Bytes,
    /// Add the user's headers (`network.headers`) behind the caller's.
    pub user_headers: bool,
    /// Limit of the whole call.
    pub limit: Duration,
    /// Longest acceptable body of a success.
    pub body_limit: usize,
}

impl Request {
    pub fn get(url: Url) -> Request {
        Request {
            method: Method::GET,
            url,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            user_headers: true,
            limit: CALL_LIMIT,
            body_limit: BODY_LIMIT,
        }
    }

    #[must_use]
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Request {
        self.headers.append(name, value);
        self
    }
}

/// Headers hold the token, the query may hold another (HTTP-8).
impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({} {})", self.method, shown(&self.url))
    }
}

/// An answer with its body, which is cut at a bound when it is an error.
#[derive(Clone)]
pub struct Response {
    /// The call it answers, for texts; the URL without its query (HTTP-10).
    pub method: Method,
    pub url: String,
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// The body was longer than what is kept of it.
    pub cut: bool,
}

impl Response {
    /// Turns every status but 2xx into [`HttpError::Status`].
    pub fn success(self) -> Result<Response, HttpError> {
        if self.status.is_success() { Ok(self) } else { Err(HttpError::Status(Box::new(self))) }
    }

    /// Whether `Content-Type` says JSON.
    pub fn is_json(&self) -> bool {
        self.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).is_some_and(|value| {
            let kind = value.split(';').next().unwrap_or_default().trim();
            kind.eq_ignore_ascii_case("application/json")
        })
    }
}

/// For texts of callers that have nothing better to say.
impl fmt::Display for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: unexpected status code {}", self.method, self.url, self.status.as_u16())?;
        let text = bounded(&String::from_utf8_lossy(&self.body));
        if !text.trim().is_empty() {
            write!(f, ": {}", text.trim())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Response({self})")
    }
}

impl Dialer {
    /// Sends one request on a connection of its own. Every status is an
    /// `Ok`; a redirect is followed only to the same URL over https.
    pub async fn request(&self, request: &Request) -> Result<Response, HttpError> {
        let deadline = Instant::now() + request.limit;
        let mut url = request.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.request_once(request, &url, deadline).await?;
            if !response.status.is_redirection() {
                return Ok(response);
            }
            url = follow(&url, &response)?;
        }
        Err(HttpError::Redirect { url: shown(&request.url), location: shown(&url) })
    }

    async fn request_once(&self, request: &Request, url: &Url, deadline: Instant) -> Result<Response, HttpError> {
        let name = shown(url);
        let late = |phase| HttpError::Timeout { url: name.clone(), phase, after: request.limit };
        let target = target(url)?;
        let connection = timeout_at(deadline, self.connect(&target)).await.map_err(|_| late(Phase::Connect))??;
        let mut message = ::http::Request::new(Full::new(request.body.clone()));
        *message.method_mut() = request.method.clone();
        *message.uri_mut() = origin_form(url)?;
        *message.headers_mut() = request.headers.clone();
        set_host(message.headers_mut(), url)?;
        message.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        if request.user_headers {
            append_user_headers(message.headers_mut(), self.headers());
        }
        let (mut sender, driver) = handshake(connection, &name).await?;
        let driver = Driver(tokio::spawn(async move {
            let _ = driver.await;
        }));
        let head_deadline = deadline.min(Instant::now() + RESPONSE_LIMIT);
        let response = timeout_at(head_deadline, sender.send_request(message))
            .await
            .map_err(|_| late(Phase::Response))?
            .map_err(|error| broken(&name, &error))?;
        let limit = if response.status().is_success() { request.body_limit } else { ERROR_BODY_LIMIT };
        let response = timeout_at(deadline, collect(response, request.method.clone(), name.clone(), limit))
            .await
            .map_err(|_| late(Phase::Body))??;
        drop(driver);
        if response.cut && response.status.is_success() {
            return Err(HttpError::TooLong { url: name, limit });
        }
        Ok(response)
    }
}

/// Ends the connection's task with the call.
struct Driver(tokio::task::JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A stream that left HTTP, and what had already been read of it.
pub(crate) struct Upgraded {
    pub(crate) stream: Connection,
    pub(crate) leftover: Bytes,
    pub(crate) headers: HeaderMap,
}

/// Asks for an upgrade on a fresh connection. Anything but 101 is a
/// [`HttpError::Status`] with its body, a redirect a [`HttpError::Redirect`]
/// (HTTP-18, T-22). `limit` covers sending and the head of the answer.
pub(crate) async fn upgrade(
    connection: Connection,
    url: &Url,
    headers: HeaderMap,
    limit: Duration,
) -> Result<Upgraded, HttpError> {
    let name = shown(url);
    let deadline = Instant::now() + limit;
    let late = || HttpError::Timeout { url: name.clone(), phase: Phase::Response, after: limit };
    let mut message = ::http::Request::new(Full::new(Bytes::new()));
    *message.uri_mut() = origin_form(url)?;
    *message.headers_mut() = headers;
    set_host(message.headers_mut(), url)?;

    let (mut sender, driver) = handshake(connection, &name).await?;
    let driver = Driver(tokio::spawn(async move {
        let _ = driver.with_upgrades().await;
    }));
    let mut response = timeout_at(deadline, sender.send_request(message))
        .await
        .map_err(|_| late())?
        .map_err(|error| broken(&name, &error))?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let response = timeout_at(deadline, collect(response, Method::GET, name.clone(), ERROR_BODY_LIMIT))
            .await
            .map_err(|_| late())??;
        if response.status.is_redirection()
            && let Some(location) = location(url, &response)
        {
            return Err(HttpError::Redirect { url: name, location: shown(&location) });
        }
        return Err(HttpError::Status(Box::new(response)));
    }
    let upgraded = timeout_at(deadline, hyper::upgrade::on(&mut response))
        .await
        .map_err(|_| late())?
        .map_err(|error| broken(&name, &error))?;
    drop(driver);
    let parts = upgraded.downcast::<TokioIo<Connection>>().map_err(|_| HttpError::Protocol {
        url: name,
        reason: "the upgraded stream is not the one we opened".into(),
    })?;
    Ok(Upgraded {
        stream: parts.io.into_inner(),
        leftover: parts.read_buf,
        headers: std::mem::take(response.headers_mut()),
    })
}

type Sender = http1::SendRequest<Full<Bytes>>;
type Wire = http1::Connection<TokioIo<Connection>, Full<Bytes>>;

async fn handshake(connection: Connection, name: &str) -> Result<(Sender, Wire), HttpError> {
    http1::Builder::new()
        .max_buf_size(HEAD_LIMIT)
        .handshake(TokioIo::new(connection))
        .await
        .map_err(|error| broken(name, &error))
}

async fn collect(
    response: ::http::Response<Incoming>,
    method: Method,
    url: String,
    limit: usize,
) -> Result<Response, HttpError> {
    let (head, mut body) = response.into_parts();
    let mut bytes = BytesMut::new();
    let mut cut = false;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| broken(&url, &error))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        let room = limit - bytes.len();
        bytes.extend_from_slice(data.get(..room).unwrap_or(&data));
        if data.len() > room {
            cut = true;
            break;
        }
    }
    Ok(Response { method, url, status: head.status, headers: head.headers, body: bytes.freeze(), cut })
}

fn broken(url: &str, error: &hyper::Error) -> HttpError {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        reason = format!("{reason}: {inner}");
        source = inner.source();
    }
    let reason = bounded(&reason);
    if error.is_parse() {
        HttpError::Protocol { url: url.to_owned(), reason: format!("the answer is not HTTP ({reason})") }
    } else {
        HttpError::Broken { url: url.to_owned(), reason }
    }
}

/// HTTP-18: same host, path and query, from http to https; anything else is an
/// error that names the target.
fn follow(url: &Url, response: &Response) -> Result<Url, HttpError> {
    let Some(next) = location(url, response) else {
        return Err(HttpError::Status(Box::new(response.clone())));
    };
    let same = url.host() == next.host() && url.path() == next.path();
    if same && url.scheme() == "http" && next.scheme() == "https" && url.query() == next.query() {
        return Ok(next);
    }
    Err(HttpError::Redirect { url: shown(url), location: shown(&next) })
}

fn location(url: &Url, response: &Response) -> Option<Url> {
    let location = response.headers.get(header::LOCATION)?.to_str().ok()?;
    url.join(location).ok()
}

/// The URL as it may appear in logs and texts: no user, no query (HTTP-8).
pub fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    let _ = url.set_username("");
    let _ = url.set_password(None);
    bounded(url.as_str())
}

pub(crate) fn target(url: &Url) -> Result<Target, HttpError> {
    let known = matches!(url.scheme(), "http" | "https" | "ws" | "wss");
    match Target::from_url(url) {
        Some(target) if known => Ok(target),
        _ => Err(HttpError::Url { url: shown(url) }),
    }
}

fn origin_form(url: &Url) -> Result<::http::Uri, HttpError> {
    let mut text = url.path().to_owned();
    if let Some(query) = url.query() {
        text.push('?');
        text.push_str(query);
    }
    text.parse().map_err(|_| HttpError::Url { url: shown(url) })
}

fn set_host(headers: &mut HeaderMap, url: &Url) -> Result<(), HttpError> {
    let wrong = || HttpError::Url { url: shown(url) };
    let host = url.host_str().ok_or_else(wrong)?;
    let text = match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    };
    let value = HeaderValue::from_str(&text).map_err(|_| wrong())?;
    headers.insert(header::HOST, value);
    Ok(())
}

/// Appends the user's headers. They replace nothing; what belongs to the
/// protocol or would turn the server against us stays out (HTTP-6, HTTP-7).
pub(crate) fn append_user_headers(headers: &mut HeaderMap, user: &HeaderMap) {
    const OURS: [&str; 10] = [
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "origin",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let token = HeaderName::from_static("coder-session-token");
    let own_token = headers.contains_key(&token);
    for (name, value) in user {
        let text = name.as_str();
        if OURS.contains(&text) || text.starts_with("sec-websocket-") || (*name == token && own_token) {
            continue;
        }
        headers.append(name.clone(), value.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirect(to: &str) -> Response {
        let mut headers = HeaderMap::new();
        headers.insert(header::LOCATION, HeaderValue::from_str(to).unwrap());
        Response {
            method: Method::GET,
            url: "http://h/a".into(),
            status: StatusCode::TEMPORARY_REDIRECT,
            headers,
            body: Bytes::new(),
            cut: false,
        }
    }

    #[test]
    fn http_18_only_the_same_url_over_https_is_followed() {
        let from = Url::parse("http://h.example/api/v2/users/me").unwrap();
        let ok = redirect("https://h.example/api/v2/users/me");
        assert_eq!(follow(&from, &ok).unwrap().scheme(), "https");
        for other in [
            "https://other.example/api/v2/users/me",
            "https://h.example",
            "http://h.example/api/v2/users/me",
            "https://h.example/login",
        ] {
            let result = follow(&from, &redirect(other));
            assert!(matches!(result, Err(HttpError::Redirect { .. })), "{other}: {result:?}");
        }
    }

    #[test]
    fn http_6_and_7_user_headers_replace_nothing() {
        let mut user = HeaderMap::new();
        for (name, value) in [
            ("coder-session-token", "wrong"),
            ("upgrade", "h2c"),
            ("origin", "https://evil.example"),
            ("sec-websocket-protocol", "x"),
            ("x-one", "1"),
            ("x-one", "2"),
        ] {
            user.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let mut headers = HeaderMap::new();
        headers.insert("coder-session-token", HeaderValue::from_static("right"));
        append_user_headers(&mut headers, &user);
        assert_eq!(headers.get_all("coder-session-token").iter().count(), 1);
        assert_eq!(headers["coder-session-token"], "right");
        assert_eq!(headers.get_all("x-one").iter().count(), 2);
        assert_eq!(headers.len(), 3);
    }

    #[test]
    fn http_8_queries_are_not_shown() {
        let url = Url::parse("https://u:p@h.example/x?resume_token=secret").unwrap();
        assert_eq!(shown(&url), "https://h.example/x");
        assert!(!format!("{:?}", Request::get(url)).contains("secret"));
    }
}
