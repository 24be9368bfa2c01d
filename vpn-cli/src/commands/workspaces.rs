//! `workspaces`: the tree of workspaces and agents, those without a usable name included.

use std::path::Path;
use std::time::Duration;

use codervpn_proto::ext::WorkspacesRequest;
use codervpn_proto::ext::client_ext::Request;
use codervpn_proto::ext::service_ext::Reply;
use codervpn_proto::vpn::status::Lifecycle;

use crate::connect::{Service, not_ours};
use crate::problem::Problem;
use crate::report::{Report, Workspace};

/// The service knows the answer.
const LIMIT: Duration = Duration::from_secs(10);

/// `name`: only this workspace; empty for all.
pub(crate) async fn run(socket: &Path, name: &str) -> Result<Vec<Workspace>, Problem> {
    let service = Service::connect(socket).await?;
    if service.is_anothers() {
        return Err(Problem::started_by_another());
    }
    if service.lifecycle() == Lifecycle::Stopped {
        return Err(Problem::failed("the tunnel is not started", "start it with `codervpn start`"));
    }
    let workspaces: Vec<Workspace> = if service.ext().is_some() {
        match service.requests().ask(Request::Workspaces(WorkspacesRequest { name: name.to_owned() }), LIMIT).await? {
            Reply::Workspaces(reply) => reply.workspaces.iter().map(Workspace::of_tree).collect(),
            _ => return Err(not_ours("list workspaces")),
        }
    } else {
        let all = Report::of(service.status()).workspaces.unwrap_or_default();
        all.into_iter().filter(|workspace| name.is_empty() || workspace.name == name).collect()
    };
    if workspaces.is_empty() && !name.is_empty() {
        return Err(Problem::failed(
            format!("there is no workspace {name:?}"),
            "`codervpn workspaces` lists those there are",
        ));
    }
    Ok(workspaces)
}
