//! `stop`: takes the tunnel down. Stopping what does not run is a success.

use std::path::Path;

use codervpn_proto::vpn::{self, status::Lifecycle};

use crate::connect::{Requests, Service};
use crate::problem::Problem;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    Now,
    /// Nothing ran.
    Before,
}

pub(crate) async fn run(socket: &Path) -> Result<Stopped, Problem> {
    let service = Service::connect(socket).await?;
    let ran = service.lifecycle() != Lifecycle::Stopped;
    stop(&service.requests(), ran).await
}

/// `ran`: whether there was something to stop, for a service that does not say.
pub(crate) async fn stop(requests: &Requests, ran: bool) -> Result<Stopped, Problem> {
    let response = requests.stop().await?;
    if !response.success {
        return Err(failure(&response));
    }
    let already = response.ext.map_or(!ran, |ext| ext.already_stopped);
    Ok(if already { Stopped::Before } else { Stopped::Now })
}

fn failure(response: &vpn::StopResponse) -> Problem {
    match response.ext.as_ref().and_then(|ext| ext.failure.as_ref()) {
        Some(failure) => Problem::reported(failure),
        None => Problem::reported_text(&response.error_message),
    }
}
