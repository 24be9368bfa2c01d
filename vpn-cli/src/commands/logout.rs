//! `logout`: deletes the stored login and stops the tunnel it was for. Needs no service.

use std::path::Path;

use codervpn_proto::vpn::status::Lifecycle;

use super::stop;
use crate::connect::Service;
use crate::deployment;
use crate::output::Output;
use crate::problem::{Exit, Problem};
use crate::session::Store;

/// Whether there was a login.
pub(crate) async fn run(socket: &Path, output: &mut Output) -> Result<bool, Problem> {
    let store = Store::of_this_user()?;
    // A damaged file is deleted all the same.
    let url = store.load().ok().flatten().map(|session| session.url);
    let was_logged_in = store.delete()?;
    match Service::connect(socket).await {
        Ok(service) if is_ours(&service, url.as_deref()) => {
            stop::stop(&service.requests(), true).await.map_err(|problem| Problem {
                what: format!("logged out, but the tunnel still runs: {}", problem.what),
                ..problem
            })?;
            output.note("stopped the tunnel");
        }
        Ok(_) => {}
        // No service, no tunnel. Anything else may leave one running that should be known about.
        Err(problem) if problem.exit == Exit::Unreachable => {}
        Err(problem) => output.warning(&format!("cannot tell whether a tunnel runs: {}", problem.what)),
    }
    Ok(was_logged_in)
}

/// Root sees everybody's tunnel, so where the deployments are known they decide.
fn is_ours(service: &Service, url: Option<&str>) -> bool {
    if service.lifecycle() == Lifecycle::Stopped || service.is_anothers() {
        return false;
    }
    let running = service.ext().map(|ext| deployment::shown(&ext.deployment)).unwrap_or_default();
    match url {
        _ if running.is_empty() => true,
        Some(url) => deployment::shown(url) == running,
        None => false,
    }
}
