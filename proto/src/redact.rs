//! `Debug` for the messages that carry a secret: tokens and header
//! values never reach a log, however a message is printed.

use std::fmt;

use crate::{ext, tailnet, vpn};

/// Stands for a secret; tells only whether there is one.
struct Hidden<'a>(&'a str);

impl fmt::Debug for Hidden<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "\"\"" } else { "<hidden>" })
    }
}

/// A URL may carry credentials before its host.
struct Url<'a>(&'a str);

impl fmt::Debug for Url<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains('@') { f.write_str("<hidden>") } else { fmt::Debug::fmt(self.0, f) }
    }
}

impl fmt::Debug for vpn::StartRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartRequest")
            .field("tunnel_file_descriptor", &self.tunnel_file_descriptor)
            .field("coder_url", &Url(&self.coder_url))
            .field("api_token", &Hidden(&self.api_token))
            .field("headers", &self.headers)
            .field("device_id", &self.device_id)
            .field("device_os", &self.device_os)
            .field("coder_desktop_version", &self.coder_desktop_version)
            .finish()
    }
}

impl fmt::Debug for vpn::start_request::Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {:?}", self.name, Hidden(&self.value))
    }
}

impl fmt::Debug for ext::CheckRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckRequest")
            .field("url", &Url(&self.url))
            .field("token", &Hidden(&self.token))
            .field("headers", &self.headers)
            .finish()
    }
}

impl fmt::Debug for ext::Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {:?}", self.name, Hidden(&self.value))
    }
}

impl fmt::Debug for tailnet::RefreshResumeTokenResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefreshResumeTokenResponse")
            .field("token", &Hidden(&self.token))
            .field("refresh_in", &self.refresh_in)
            .field("expires_at", &self.expires_at)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r26_no_secret_is_ever_printed() {
        let start = vpn::ClientMessage {
            rpc: None,
            msg: Some(vpn::client_message::Msg::Start(vpn::StartRequest {
                coder_url: "https://user:MARKER@coder.example.com".into(),
                api_token: "MARKER".into(),
                headers: vec![vpn::start_request::Header { name: "X-Auth".into(), value: "MARKER".into() }],
                ..Default::default()
            })),
        };
        let check = ext::ClientExt {
            request: Some(ext::client_ext::Request::Check(ext::CheckRequest {
                url: "https://MARKER@coder.example.com".into(),
                token: "MARKER".into(),
                headers: vec![ext::Header { name: "X-Auth".into(), value: "MARKER".into() }],
            })),
        };
        let resume = tailnet::RefreshResumeTokenResponse { token: "MARKER".into(), ..Default::default() };
        let printed = format!("{start:?} {start:#?} {check:?} {check:#?} {resume:?} {resume:#?}");
        assert!(!printed.contains("MARKER"), "{printed}");
        assert!(printed.contains("X-Auth") && printed.contains("<hidden>"));
    }
}
