//! The lower-case words by which the extension's enums appear in JSON,
//! configuration and logs. `None` is "unknown", written as `null` in JSON.

use crate::{ext, vpn};

impl vpn::status::Lifecycle {
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        Some(match self {
            Self::Unknown => return None,
            Self::Starting => "starting",
            Self::Started => "started",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        })
    }
}

impl vpn::workspace::Status {
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        Some(match self {
            Self::Unknown => return None,
            Self::Pending => "pending",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Canceling => "canceling",
            Self::Canceled => "canceled",
            Self::Deleting => "deleting",
            Self::Deleted => "deleted",
        })
    }
}

impl ext::ControlState {
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        Some(match self {
            Self::Unknown => return None,
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Reconnecting => "reconnecting",
            Self::Refused => "refused",
            Self::Off => "off",
        })
    }
}

impl ext::DnsMode {
    /// As written for the configuration key `dns.mode`.
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        Some(match self {
            Self::Unknown => return None,
            Self::None => "none",
            Self::Resolved => "resolved",
            Self::NetworkManager => "network-manager",
            Self::Dnsmasq => "dnsmasq",
            Self::Resolvconf => "resolvconf",
            Self::Direct => "direct",
        })
    }
}

impl ext::DnsState {
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        Some(match self {
            Self::Unknown => return None,
            Self::Off => "off",
            Self::Pending => "pending",
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Failed => "failed",
        })
    }
}

impl ext::PathKind {
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        Some(match self {
            Self::None => return None,
            Self::Direct => "direct",
            Self::Relay => "relay",
        })
    }
}

impl ext::FindingLevel {
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        Some(match self {
            Self::Unknown => return None,
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
            Self::Skipped => "skipped",
        })
    }
}

impl ext::Failure {
    pub fn new(code: ext::FailureCode, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), remedy: remedy.into() }
    }

    /// Message and remedy in one text, for `error_message` fields.
    #[must_use]
    pub fn text(&self) -> String {
        match (self.message.as_str(), self.remedy.as_str()) {
            (message, "") => message.to_owned(),
            ("", remedy) => remedy.to_owned(),
            (message, remedy) => format!("{message}; {remedy}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words are those of product.md 2 and 3, and of the schema.
    #[test]
    fn labels_follow_the_schema() {
        for state in [
            ext::ControlState::Connecting,
            ext::ControlState::Reconnecting,
            ext::ControlState::Refused,
            ext::ControlState::Off,
        ] {
            let word = state.label().unwrap();
            assert_eq!(state.as_str_name(), format!("CONTROL_STATE_{}", word.to_uppercase()));
        }
        for number in 1..=6 {
            let mode = ext::DnsMode::try_from(number).unwrap();
            let word = mode.label().unwrap().replace('-', "_");
            assert_eq!(mode.as_str_name(), format!("DNS_MODE_{}", word.to_uppercase()));
        }
        for number in 1..=10 {
            let status = vpn::workspace::Status::try_from(number).unwrap();
            assert_eq!(Some(status.as_str_name().to_lowercase().as_str()), status.label());
        }
        assert_eq!(ext::PathKind::None.label(), None);
    }

    #[test]
    fn a_failure_reads_as_one_text() {
        let failure = ext::Failure::new(ext::FailureCode::Unauthorized, "no", "log in");
        assert_eq!(failure.text(), "no; log in");
        assert_eq!(failure.code(), ext::FailureCode::Unauthorized);
    }
}
