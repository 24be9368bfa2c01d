//! `login`: takes a token, lets the service try it with the one dialer it has, and stores it.

use std::path::Path;
use std::time::Duration;

use codervpn_proto::ext::client_ext::Request;
use codervpn_proto::ext::service_ext::Reply;
use codervpn_proto::ext::{CheckReply, CheckRequest};

use crate::args;
use crate::connect::{Service, not_ours};
use crate::deployment;
use crate::output::Output;
use crate::problem::{Exit, Problem};
use crate::session::{Session, Store};
use crate::token::{Source, Token};

/// The service has limits of its own for each step, which tell more; this one is for a service that hangs.
const CHECK_LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct LoggedIn {
    pub(crate) url: String,
    /// What the deployment said; `None` when it was not asked.
    pub(crate) checked: Option<CheckReply>,
}

pub(crate) async fn run(socket: &Path, args: &args::Login, output: &mut Output) -> Result<LoggedIn, Problem> {
    let url = deployment::parse(&args.url)?;
    let store = Store::of_this_user()?;
    if deployment::is_readable_by_others(&url) {
        output.warning(&format!("{url} is plain http: everybody on the way can read the session token"));
    }
    // Before the person is asked for anything: it would be in vain.
    let mut service = if args.no_check { None } else { Some(reach(socket).await?) };
    let source = Source::given(args.token_file.as_deref()).unwrap_or(Source::Prompt);
    let shown = deployment::shown(url.as_str());
    if source == Source::Prompt {
        output.note(&format!("Open {shown}/cli-auth in a browser, copy the session token and paste it here."));
    }
    let token = source.read(shown).await?;
    let (url, checked) = match &mut service {
        None => (url.to_string(), None),
        Some(service) => {
            // A person may take longer than the service lives.
            if service.is_closed() {
                *service = reach(socket).await?;
            }
            output.progress(&format!("asking {shown} …"));
            let reply = check(service, url.as_str(), &token).await?;
            for warning in &reply.warnings {
                output.warning(warning);
            }
            let stored = if reply.url.is_empty() { url.to_string() } else { reply.url.clone() };
            (stored, Some(reply))
        }
    };
    let session = Session { url, token };
    store.save(&session)?;
    Ok(LoggedIn { url: session.url, checked })
}

/// A service that can check, and may be told the token.
async fn reach(socket: &Path) -> Result<Service, Problem> {
    let service = Service::connect(socket).await.map_err(|problem| match problem.exit {
        Exit::Unreachable => {
            Problem { remedy: format!("{}; or store the login unchecked with --no-check", problem.remedy), ..problem }
        }
        _ => problem,
    })?;
    if service.ext().is_none() {
        let problem = not_ours("check a login");
        return Err(Problem { remedy: format!("{}; or use --no-check", problem.remedy), ..problem });
    }
    service.may_have_the_token()?;
    Ok(service)
}

async fn check(service: &Service, url: &str, token: &Token) -> Result<CheckReply, Problem> {
    let request = CheckRequest { url: url.to_owned(), token: token.expose().to_owned(), headers: Vec::new() };
    match service.requests().ask(Request::Check(request), CHECK_LIMIT).await? {
        Reply::Check(reply) => Ok(reply),
        _ => Err(not_ours("check a login")),
    }
}
