//! The words of a real server: error bodies with their exact texts, and the headers of every answer (1.6).

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::{Value, json};

pub(crate) type Answer = Response<Full<Bytes>>;

/// An error answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Problem {
    pub(crate) status: u16,
    pub(crate) message: String,
    pub(crate) detail: String,
    /// Field and detail.
    pub(crate) validation: Option<(String, String)>,
    pub(crate) challenge: bool,
}

pub(crate) const SIGNED_OUT: &str = "You are signed out or your session has expired. Please sign in again to continue.";
pub(crate) const NO_KEY: &str = "API key or external proxy authentication required, but none provided";
pub(crate) const INTERNAL: &str = "An internal error occurred. Please try again or contact the system administrator.";

impl Problem {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), ..Self::default() }
    }

    pub(crate) fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = detail.into();
        self
    }

    pub(crate) fn validation(mut self, field: &str, detail: impl Into<String>) -> Self {
        self.validation = Some((field.to_owned(), detail.into()));
        self
    }

    /// A 401 that says who it was asked by.
    pub(crate) fn signed_out(detail: impl Into<String>) -> Self {
        Self { challenge: true, ..Self::new(401, SIGNED_OUT).detail(detail) }
    }

    pub(crate) fn answer(&self) -> Answer {
        let mut body = json!({ "message": self.message });
        if let Some(members) = body.as_object_mut() {
            if !self.detail.is_empty() {
                members.insert("detail".into(), self.detail.as_str().into());
            }
            if let Some((field, detail)) = &self.validation {
                members.insert("validations".into(), json!([{ "field": field, "detail": detail }]));
            }
        }
        let mut answer = json_answer(self.status, &body);
        if self.challenge {
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"coder\""));
        }
        answer
    }
}

pub(crate) fn json_answer(status: u16, body: &Value) -> Answer {
    let mut text = body.to_string();
    // As Go's encoder ends it.
    text.push('\n');
    let mut answer = plain(status, text);
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    answer
}

pub(crate) fn plain(status: u16, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

/// A refused WebSocket upgrade: the library's line, then coderd's JSON, all as text (HTTP-24).
pub(crate) fn refused_upgrade(status: u16, reason: &str) -> Answer {
    let message = json!({ "message": "Failed to accept websocket.", "detail": reason });
    let mut answer = plain(status, format!("{reason}\n{message}\n"));
    if status == 426 {
        answer.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    }
    answer
}
