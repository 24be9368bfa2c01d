//! What a deployment does wrong on purpose: whole answers by route, and wrongs inside the control protocol.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::answers::{Answer, Problem, plain};
use super::listener::Dropped;

/// The routes that faults are given to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// Every one of the others.
    Any,
    BuildInfo,
    UsersMe,
    /// `workspaceagents/connection`.
    Connection,
    /// A client's control connection.
    Tailnet,
    /// An agent's control connection.
    AgentRpc,
    Derp,
    LatencyCheck,
}

/// What happens instead of the right answer.
#[derive(Debug, Clone)]
pub enum Fault {
    /// An error in coderd's form.
    Status {
        status: u16,
        message: String,
    },
    /// The same with a validation.
    Validation {
        status: u16,
        message: String,
        field: String,
        detail: String,
    },
    /// 429 with `Retry-After`.
    RateLimited {
        retry_after: u64,
    },
    /// A web page.
    Html {
        status: u16,
    },
    /// Any body.
    Raw {
        status: u16,
        content_type: String,
        body: Vec<u8>,
    },
    Redirect {
        location: String,
    },
    /// Never answers.
    Hang,
    /// Cuts the connection instead of answering.
    Drop,
    /// Answers rightly, but late.
    Delay(Duration),
}

impl Fault {
    pub fn status(status: u16, message: &str) -> Self {
        Self::Status { status, message: message.to_owned() }
    }
}

/// What happens to calls of one RPC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RpcFault {
    /// "unknown rpc", as servers say that are older than the call.
    Unknown,
    /// Code 12.
    Unimplemented,
    /// An error of the server.
    Error { code: u64, text: String },
    /// Ends at once with Close.
    Close,
    /// Never answers.
    Silent,
}

/// How often a fault shows.
#[derive(Debug, Clone, Copy)]
enum Left {
    Times(u32),
    Always,
}

/// The faults of a deployment; empty at first.
#[derive(Debug, Default)]
pub struct Faults {
    routes: Mutex<HashMap<Route, (Fault, Left)>>,
    rpcs: Mutex<HashMap<String, RpcFault>>,
    database_down: AtomicBool,
}

impl Faults {
    /// From now on, until [`Faults::clear`].
    pub fn set(&self, route: Route, fault: Fault) {
        lock(&self.routes).insert(route, (fault, Left::Always));
    }

    /// The next `count` requests.
    pub fn times(&self, route: Route, count: u32, fault: Fault) {
        lock(&self.routes).insert(route, (fault, Left::Times(count)));
    }

    /// Every fault of routes and calls ends.
    pub fn clear(&self) {
        lock(&self.routes).clear();
        lock(&self.rpcs).clear();
        self.database_down.store(false, Ordering::Relaxed);
    }

    /// For calls made from now on; `rpc` is the full name.
    pub fn rpc(&self, rpc: &str, fault: RpcFault) {
        lock(&self.rpcs).insert(rpc.to_owned(), fault);
    }

    pub(super) fn of_rpc(&self, rpc: &str) -> Option<RpcFault> {
        lock(&self.rpcs).get(rpc).cloned()
    }

    pub(super) fn set_database_down(&self, down: bool) {
        self.database_down.store(down, Ordering::Relaxed);
    }

    pub(super) fn database_down(&self) -> bool {
        self.database_down.load(Ordering::Relaxed)
    }

    /// `Ok(None)`: the right answer.
    pub(super) async fn answer(&self, route: Route) -> Result<Option<Answer>, Dropped> {
        let Some(fault) = self.take(route).or_else(|| self.take(Route::Any)) else { return Ok(None) };
        let answer = match fault {
            Fault::Status { status, message } => Problem::new(status, message).answer(),
            Fault::Validation { status, message, field, detail } => {
                Problem::new(status, message).validation(&field, detail).answer()
            }
            Fault::RateLimited { retry_after } => {
                let text = "You've been rate limited for sending more than 512 requests in 1m0s.";
                let mut answer = Problem::new(429, text).answer();
                answer.headers_mut().insert(http::header::RETRY_AFTER, retry_after.into());
                answer
            }
            Fault::Html { status } => {
                page(status, "text/html; charset=utf-8", b"<!doctype html><html><body>Welcome</body></html>".to_vec())
            }
            Fault::Raw { status, content_type, body } => page(status, &content_type, body),
            Fault::Redirect { location } => {
                let mut answer = plain(307, "");
                if let Ok(location) = location.parse() {
                    answer.headers_mut().insert(http::header::LOCATION, location);
                }
                answer
            }
            Fault::Hang => std::future::pending().await,
            Fault::Drop => return Err(Dropped),
            Fault::Delay(time) => {
                tokio::time::sleep(time).await;
                return Ok(None);
            }
        };
        Ok(Some(answer))
    }

    fn take(&self, route: Route) -> Option<Fault> {
        let mut routes = lock(&self.routes);
        let (fault, left) = routes.get_mut(&route)?;
        let fault = fault.clone();
        if let Left::Times(count) = left {
            *count = count.saturating_sub(1);
            if *count == 0 {
                routes.remove(&route);
            }
        }
        Some(fault)
    }
}

fn page(status: u16, content_type: &str, body: Vec<u8>) -> Answer {
    let mut answer = plain(status, body);
    if let Ok(content_type) = content_type.parse() {
        answer.headers_mut().insert(http::header::CONTENT_TYPE, content_type);
    }
    answer
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
