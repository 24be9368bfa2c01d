//! Tries a URL and a token against a deployment, with the daemon's own proxies, authorities and headers. Changes nothing.

use std::time::Duration;

use codervpn_control::Api;
use codervpn_proto::ext::{CheckReply, CheckRequest, FailureCode};
use secrecy::SecretString;
use tokio::time::timeout;

use crate::config::Config;
use crate::deployment::{api_failure, dialer};
use crate::failure::Failure;
use crate::parameters::{check_headers, parse_deployment};

/// A person waits.
const LIMIT: Duration = Duration::from_secs(30);

pub(super) async fn check(config: &Config, request: CheckRequest) -> Result<CheckReply, Failure> {
    let CheckRequest { url, token, headers } = request;
    let token = (!token.is_empty()).then(|| SecretString::from(token));
    let deployment = parse_deployment(&url)?;
    check_headers(headers.iter().map(|header| (header.name.as_str(), header.value.as_str())))?;
    let headers: Vec<_> = headers.into_iter().map(|header| (header.name, header.value)).collect();
    let has_token = token.is_some();
    let api = Api::new(deployment.clone(), token.unwrap_or_default(), dialer(config, &headers)?);
    let ask = async {
        let build = api.build_info().await.map_err(|error| api_failure(&error))?;
        if build.is_too_old() {
            return Err(Failure::new(
                FailureCode::ServerTooOld,
                format!("the server is too old: it is Coder {}", build.version),
            )
            .remedy("the deployment must be upgraded to Coder 2.18 or newer"));
        }
        let user = match has_token {
            true => api.user().await.map_err(|error| api_failure(&error))?.username,
            false => String::new(),
        };
        Ok(CheckReply { url: deployment.to_string(), server_version: build.version, user, warnings: Vec::new() })
    };
    timeout(LIMIT, ask).await.unwrap_or_else(|_| {
        Err(Failure::new(FailureCode::Timeout, format!("{deployment} does not answer"))
            .remedy("check the URL and your network; this version cannot go through a proxy"))
    })
}
