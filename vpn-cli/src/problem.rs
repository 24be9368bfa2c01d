//! What can go wrong for a user: what happened, what to do, and the exit code (product contract, section 1).

use std::process::ExitCode;

use codervpn_proto::ext::{self, FailureCode};

/// How the program ends. The numbers are a promise to scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Success = 0,
    /// The service reported failure.
    Failed = 1,
    /// The service cannot be reached.
    Unreachable = 2,
    /// Handshake or version.
    Handshake = 3,
    /// Only of `status --check`.
    NotStarted = 4,
    /// Permission refused.
    Refused = 5,
    Usage = 64,
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A failure to tell a person. Never holds a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) exit: Exit,
    /// The service's own name for it.
    pub(crate) code: FailureCode,
    /// What happened.
    pub(crate) what: String,
    /// What to do about it; may be empty.
    pub(crate) remedy: String,
}

impl Problem {
    pub(crate) fn new(exit: Exit, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { exit, code: FailureCode::None, what: what.into(), remedy: remedy.into() }
    }

    pub(crate) fn failed(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Exit::Failed, what, remedy)
    }

    pub(crate) fn usage(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what, remedy)
    }

    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "interrupted", "")
    }

    /// The tunnel of somebody else: said in these words wherever it matters.
    pub(crate) fn started_by_another() -> Self {
        Self::new(
            Exit::Refused,
            "the tunnel was started by another user",
            "only that user and root can see, stop or replace it; ask them, or use sudo",
        )
    }

    /// A failure the service reported.
    pub(crate) fn reported(failure: &ext::Failure) -> Self {
        let exit = match failure.code() {
            FailureCode::PermissionDenied | FailureCode::StartedByOtherUser => Exit::Refused,
            _ => Exit::Failed,
        };
        let what = match failure.message.trim() {
            "" => "the service reported a failure without saying which",
            message => message,
        };
        let remedy = match failure.remedy.trim() {
            "" => remedy(failure.code()),
            remedy => remedy,
        };
        Self { code: failure.code(), ..Self::new(exit, what, remedy) }
    }

    /// A failure of a service that knows no codes.
    pub(crate) fn reported_text(text: &str) -> Self {
        match text.trim() {
            "" => Self::failed("the service reported a failure without saying which", LOOK_AT_LOG),
            text => Self::failed(text, ""),
        }
    }
}

/// Where the other half of the story is.
pub(crate) const LOOK_AT_LOG: &str = "its log tells more: `journalctl -u codervpn`, or the terminal it runs in";

/// What to do where the service has no advice of its own.
fn remedy(code: FailureCode) -> &'static str {
    match code {
        FailureCode::Busy => "wait a moment and try again",
        FailureCode::Unsupported => "codervpn and codervpnd are of different versions; update the older one",
        FailureCode::PermissionDenied | FailureCode::StartedByOtherUser => "ask that user or root, or use sudo",
        FailureCode::OtherParameters => "stop it first with `codervpn stop`",
        FailureCode::NotStarted => "start it with `codervpn start`",
        FailureCode::BadUrl | FailureCode::NotCoder => "check the URL: it is the one you open Coder with in a browser",
        FailureCode::MissingToken | FailureCode::Unauthorized => "log in again with `codervpn login URL`",
        FailureCode::Forbidden => "ask an administrator of the deployment for the right to do this",
        FailureCode::ServerTooOld => "the deployment has to be upgraded by its administrator",
        FailureCode::ServerError => "try again in a while; if it stays so, tell the deployment's administrator",
        FailureCode::HostNotFound => "check the host name in the URL, and that this machine has a network",
        FailureCode::Unreachable | FailureCode::Timeout => {
            "check that the deployment is up and the URL right; proxies are not supported yet"
        }
        FailureCode::Tls => {
            "if the deployment uses a private authority, set `network.extra_ca` in /etc/codervpn/config.toml"
        }
        FailureCode::Proxy => "reach the deployment without a proxy; they are not supported yet",
        FailureCode::BadSuffix => {
            "set `dns.allow_suffix` in /etc/codervpn/config.toml if you trust the deployment with it"
        }
        FailureCode::UnknownAgent => "`codervpn workspaces` lists the names",
        FailureCode::AgentUnreachable => "check that the workspace is running",
        FailureCode::Ipv6Disabled => "switch IPv6 on in this kernel (the tunnel uses it inside only)",
        FailureCode::Internal | FailureCode::Tun | FailureCode::Dns | FailureCode::Routes => LOOK_AT_LOG,
        FailureCode::None | FailureCode::Cancelled | FailureCode::BadRequest => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_an_exit_code_of_their_own() {
        for code in [FailureCode::PermissionDenied, FailureCode::StartedByOtherUser] {
            let problem = Problem::reported(&ext::Failure::new(code, "no", ""));
            assert_eq!(problem.exit, Exit::Refused);
            assert!(!problem.remedy.is_empty());
        }
        assert_eq!(Problem::reported(&ext::Failure::new(FailureCode::Tls, "no", "")).exit, Exit::Failed);
    }

    #[test]
    fn the_services_own_advice_is_preferred() {
        let problem = Problem::reported(&ext::Failure::new(FailureCode::Tls, "issuer X", "set network.extra_ca"));
        assert_eq!((problem.what.as_str(), problem.remedy.as_str()), ("issuer X", "set network.extra_ca"));
        let future = ext::Failure { code: 999, message: " ".into(), remedy: String::new() };
        assert!(!Problem::reported(&future).what.trim().is_empty());
    }
}
