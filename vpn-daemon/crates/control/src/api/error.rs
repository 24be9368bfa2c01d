//! Decides what a failed call means and how a person is told: what happened, and what to do.
//!
//! The reading of a 401 is the delicate part (HTTP-23): coderd answers 401 also while its database is down, so only
//! certain texts mean "signed out". Texts are compared up to the first full stop, so that later wording survives.

use std::fmt;
use std::time::Duration;

use codervpn_underlay::dialer::DialError;
use codervpn_underlay::http::{HttpError, Response};

use super::json;

/// Longest `Retry-After` that is honoured (HTTP-15).
const RETRY_AFTER_CAP: Duration = Duration::from_secs(60);

/// Bytes of a body shown when it is not JSON (HTTP-9).
const SHOWN_BODY: usize = 2048;

/// What kept us from talking to the deployment at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// Its host name has no address.
    Name,
    /// Nobody accepts the connection, or it broke.
    Connection,
    Timeout,
    /// Its certificate is not trusted, or TLS failed otherwise.
    Tls,
}

impl Obstacle {
    fn of(error: &DialError) -> Self {
        match error {
            DialError::Resolve { .. } | DialError::NoAddress { .. } => Self::Name,
            DialError::Timeout { .. } => Self::Timeout,
            DialError::Tls { .. } => Self::Tls,
            DialError::Refused { .. } | DialError::Connect { .. } | DialError::OwnNetwork { .. } => Self::Connection,
        }
    }
}

/// Why a call or a dial brought nothing of use. The text is for users and never holds a token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The deployment URL cannot be used.
    #[error("this is not a deployment URL: {reason}; it looks like https://coder.example.com")]
    Url {
        /// What is wrong with it.
        reason: String,
    },
    /// The token cannot be a header value.
    #[error("the session token contains characters that no token has; log in again with a fresh one")]
    TokenForm,
    /// No connection, no TLS, no answer in time.
    #[error("{text}")]
    Unreachable {
        /// What kind of failure it was.
        obstacle: Obstacle,
        /// The dialer's own words, which name the host and the remedy.
        text: String,
    },
    /// The other side talks, but not like coderd.
    #[error("{url} does not answer like a Coder server ({found}); is this the deployment's URL?")]
    NotCoder {
        /// The call, without its query.
        url: String,
        /// What came instead.
        found: String,
        /// Its status, if it was HTTP at all.
        status: Option<u16>,
    },
    /// The server sends us elsewhere; the token is not sent there (HTTP-18).
    #[error("{url} redirects to {location}; use that as the deployment URL")]
    Redirect {
        /// The call.
        url: String,
        /// Where to.
        location: String,
    },
    /// A 401, by class.
    #[error("{}", unauthorized_text(.reply, .class))]
    Unauthorized {
        /// What it said.
        reply: Box<Reply>,
        /// What it means.
        class: Unauthorized,
    },
    /// The server has not what we need.
    #[error("the server is too old: {detail}; the deployment must be upgraded to Coder 2.18 or newer")]
    ServerTooOld {
        /// The server's words.
        detail: String,
    },
    /// The server no longer speaks our version.
    #[error("this program is too old for the server: {detail}; install a newer version of it")]
    ClientTooOld {
        /// The server's words.
        detail: String,
    },
    /// The deployment lets only browsers in.
    #[error("the deployment allows no connections but those of browsers ({})", .0.message)]
    BrowserOnly(Box<Reply>),
    /// Too many requests.
    #[error("{}; it will be tried again later", .0)]
    RateLimited(Box<Reply>),
    /// Any other status.
    #[error("{}", status_text(.0))]
    Status(Box<Reply>),
    /// A Coder server whose answer cannot be used.
    #[error("the answer of {url} cannot be used: {reason}")]
    Broken {
        /// The call.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// What a 401 means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unauthorized {
    /// The session token is no longer good.
    SignedOut,
    /// The user was suspended or is otherwise inactive.
    Inactive,
    /// The server itself is in trouble; nothing is said about the token.
    Outage,
    /// The resume token was refused; the next dial goes without.
    ResumeToken,
    /// Cannot be told.
    Unknown,
}

/// An answer that was no success, as far as it is of interest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Method and URL of the call, the URL without its query.
    pub method: String,
    /// See above.
    pub url: String,
    /// HTTP status.
    pub status: u16,
    /// The server's message, or ours about its absence (HTTP-9).
    pub message: String,
    /// Further text.
    pub detail: String,
    /// Field and detail of each complaint.
    pub validations: Vec<(String, String)>,
    /// When to come back at the earliest, at most a minute.
    pub retry_after: Option<Duration>,
}

/// The calls whose answers are read differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    BuildInfo,
    UsersMe,
    Connection,
    /// `/tailnet` and the agents' `/workspaceagents/me/rpc`.
    Dial,
}

impl Endpoint {
    pub(crate) fn of(path: &str) -> Self {
        match path {
            "/api/v2/buildinfo" => Self::BuildInfo,
            "/api/v2/users/me" => Self::UsersMe,
            "/api/v2/workspaceagents/connection" => Self::Connection,
            _ => Self::Dial,
        }
    }
}

impl ApiError {
    pub(crate) fn not_coder(reply: &Response, found: &str) -> Self {
        Self::NotCoder { url: reply.url.clone(), found: found.to_owned(), status: Some(reply.status.as_u16()) }
    }

    /// The underlay's errors in our terms.
    pub(crate) fn from_http(error: HttpError, endpoint: Endpoint) -> Self {
        match error {
            HttpError::Dial(error) => {
                Self::Unreachable { obstacle: Obstacle::of(&error), text: unreachable_text(&error) }
            }
            HttpError::Redirect { url, location } => Self::Redirect { url, location },
            HttpError::Status(reply) => classify(endpoint, &reply).unwrap_or_else(|| Self::NotCoder {
                url: reply.url.clone(),
                found: format!("status {} to a WebSocket upgrade", reply.status.as_u16()),
                status: Some(reply.status.as_u16()),
            }),
            HttpError::Protocol { url, reason } => Self::NotCoder { url, found: reason, status: None },
            HttpError::TooLong { url, limit } => {
                Self::NotCoder { url, found: format!("an answer longer than {limit} bytes"), status: Some(200) }
            }
            HttpError::Timeout { .. } | HttpError::Broken { .. } | HttpError::Url { .. } => {
                let timed_out = matches!(error, HttpError::Timeout { .. });
                Self::Unreachable {
                    obstacle: if timed_out { Obstacle::Timeout } else { Obstacle::Connection },
                    text: format!("{error}; is the deployment up, and is its URL right?"),
                }
            }
        }
    }

    /// Whether a dial with this outcome in the first phase ends the whole start (table of 1.8).
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Url { .. }
            | Self::TokenForm
            | Self::Redirect { .. }
            | Self::ServerTooOld { .. }
            | Self::ClientTooOld { .. }
            | Self::BrowserOnly(_) => true,
            Self::Unauthorized { class, .. } => matches!(class, Unauthorized::SignedOut | Unauthorized::Inactive),
            Self::Status(reply) => matches!(reply.status, 400 | 403 | 404 | 409 | 500),
            Self::NotCoder { status, .. } => matches!(status, Some(400 | 403 | 404 | 409)),
            Self::Unreachable { .. } | Self::RateLimited(_) | Self::Broken { .. } => false,
        }
    }

    /// The session token is no longer good, or its user is not.
    pub fn is_signed_out(&self) -> bool {
        matches!(self, Self::Unauthorized { class: Unauthorized::SignedOut | Unauthorized::Inactive, .. })
    }

    /// The resume token was refused (HTTP-16).
    pub fn is_refused_resume_token(&self) -> bool {
        matches!(self, Self::Unauthorized { class: Unauthorized::ResumeToken, .. })
    }

    /// When the server wants us back at the earliest.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited(reply) | Self::Status(reply) => reply.retry_after,
            _ => None,
        }
    }
}

/// Reads an answer; `None` for a success.
pub(crate) fn classify(endpoint: Endpoint, response: &Response) -> Option<ApiError> {
    if response.status.is_success() {
        return None;
    }
    let reply = Box::new(Reply::read(response));
    let json = json::ErrorBody::find(response, endpoint == Endpoint::Dial).is_some();
    let ours = json || response.headers.contains_key(super::BUILD_VERSION);
    Some(match reply.status {
        401 if json || ours => ApiError::Unauthorized { class: read_401(endpoint, &reply), reply },
        400 if endpoint == Endpoint::Dial => match reply.validations.iter().find(|(field, _)| field == "version") {
            Some((_, detail)) if detail.contains("no longer supported") => {
                ApiError::ClientTooOld { detail: detail.clone() }
            }
            Some((_, detail)) => ApiError::ServerTooOld { detail: detail.clone() },
            None => ApiError::Status(reply),
        },
        404 if ours && sentence(&reply.message) == "Route not found" => {
            ApiError::ServerTooOld { detail: format!("it has no {}", path_of(&reply.url)) }
        }
        409 if endpoint == Endpoint::Dial => ApiError::BrowserOnly(reply),
        429 => ApiError::RateLimited(reply),
        // coderd says who it is on every answer. A proxy in front of it may fail with anything (5xx); everything else
        // that is neither marked nor JSON comes from another kind of server.
        status if !ours && status < 500 => ApiError::NotCoder {
            url: reply.url,
            found: format!("status {status}, {}", what_is(response)),
            status: Some(status),
        },
        _ => ApiError::Status(reply),
    })
}

/// HTTP-23. "Unknown" of the connection endpoint is for the caller to ask `users/me` about.
fn read_401(endpoint: Endpoint, reply: &Reply) -> Unauthorized {
    if endpoint == Endpoint::Dial && reply.validations.iter().any(|(field, _)| field == "resume_token") {
        return Unauthorized::ResumeToken;
    }
    let text = sentence(&reply.message);
    if text.starts_with("An internal error occurred") {
        Unauthorized::Outage
    } else if text.starts_with("User is not active") {
        Unauthorized::Inactive
    } else if text.starts_with("You are signed out") && endpoint != Endpoint::Connection {
        Unauthorized::SignedOut
    } else {
        Unauthorized::Unknown
    }
}

/// A text up to its first full stop.
fn sentence(text: &str) -> &str {
    text.split('.').next().unwrap_or_default().trim()
}

impl Reply {
    /// HTTP-9, HTTP-24.
    fn read(response: &Response) -> Self {
        let mut reply = Self {
            method: response.method.to_string(),
            url: response.url.clone(),
            status: response.status.as_u16(),
            message: String::new(),
            detail: String::new(),
            validations: Vec::new(),
            retry_after: retry_after(response),
        };
        let text = String::from_utf8_lossy(&response.body);
        match json::ErrorBody::find(response, true) {
            Some(body) if body.message.is_empty() => {
                reply.message = format!("unexpected status code {}, response has no message", reply.status);
                reply.detail = cut(&text, 1024);
            }
            Some(body) => {
                reply.message = body.message;
                reply.detail = body.detail;
                reply.validations = body.validations.into_iter().map(|v| (v.field, v.detail)).collect();
            }
            None if response.is_json() && text.trim().is_empty() => reply.message = "empty response body".into(),
            None => {
                reply.message = "unexpected non-JSON response".into();
                reply.detail =
                    if text.trim().is_empty() { "no response body".into() } else { cut(text.trim(), SHOWN_BODY) };
            }
        }
        reply
    }
}

/// HTTP-10.
impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: unexpected status code {}: {}", self.method, self.url, self.status, self.message)?;
        if !self.detail.is_empty() {
            write!(f, "\nError: {}", self.detail)?;
        }
        for (field, detail) in &self.validations {
            write!(f, "\n{field}: {detail}")?;
        }
        Ok(())
    }
}

fn unauthorized_text(reply: &Reply, class: &Unauthorized) -> String {
    let detail = if reply.detail.is_empty() { String::new() } else { format!(" ({})", reply.detail) };
    match class {
        Unauthorized::SignedOut => {
            format!("the server does not accept the session token: {}{detail}; log in again", reply.message)
        }
        Unauthorized::Inactive => format!("the server does not accept this user: {}", reply.message),
        Unauthorized::Outage => format!(
            "the server cannot check sessions at the moment: {}{detail}; this says nothing about your login, try again \
             in a while",
            reply.message
        ),
        Unauthorized::ResumeToken => format!("the server refused to resume the session: {}{detail}", reply.message),
        Unauthorized::Unknown => format!("{reply}\nIf this stays so, log in again."),
    }
}

fn status_text(reply: &Reply) -> String {
    match reply.status {
        500 => format!("{reply}\nThe server failed; its administrator finds the cause in its log."),
        502..=504 => format!("{reply}\nThe server, or a proxy in front of it, is not available at the moment."),
        _ => reply.to_string(),
    }
}

fn unreachable_text(error: &DialError) -> String {
    match error {
        DialError::Resolve { .. } | DialError::NoAddress { .. } => {
            format!("{error}; check the deployment URL and this machine's name resolution")
        }
        DialError::Refused { .. } => format!("{error}; check the deployment URL and its port"),
        DialError::Timeout { .. } | DialError::Connect { .. } => format!(
            "{error}; check the network and the deployment URL (a deployment behind a proxy cannot be reached yet: \
             network.proxy comes with a later version)"
        ),
        DialError::OwnNetwork { .. } | DialError::Tls { .. } => error.to_string(),
    }
}

fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.headers.get(http::header::RETRY_AFTER)?.to_str().ok()?;
    let seconds = text.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(RETRY_AFTER_CAP))
}

fn what_is(response: &Response) -> &'static str {
    match response.body.iter().find(|byte| !byte.is_ascii_whitespace()) {
        None => "an empty page",
        Some(b'<') => "a web page",
        Some(b'{') => "JSON of another kind",
        Some(_) => "some text",
    }
}

fn path_of(url: &str) -> String {
    url::Url::parse(url).map_or_else(|_| url.to_owned(), |url| url.path().to_owned())
}

fn cut(text: &str, limit: usize) -> String {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().to_owned()
}
