//! `start`: asks for the tunnel and waits until names and control connection are up.
//!
//! The service owns the start: when this program gives up waiting, the start goes on. Only Ctrl-C takes it back.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use codervpn_proto::ext::ControlState;
use codervpn_proto::vpn::{StartProgress, StartProgressStage, StartRequest, StartResponse, Status, status::Lifecycle};
use tokio::time::{Instant, timeout_at};

use super::stop;
use crate::connect::{News, Service};
use crate::deployment;
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::problem::{Exit, LOOK_AT_LOG, Problem};
use crate::report::Report;
use crate::session::{Session, Store, not_logged_in};
use crate::token::Source;

pub(crate) struct Started {
    /// It ran before, with the same parameters.
    pub(crate) already: bool,
    /// False of a foreign service, which does not tell.
    pub(crate) connected: bool,
    pub(crate) report: Report,
}

pub(crate) async fn run(
    socket: &Path,
    limit: Duration,
    interrupt: &mut Interrupt,
    output: &mut Output,
) -> Result<Started, Problem> {
    let deadline = Instant::now() + limit;
    let session = login(output).await?;
    let mut service = tokio::select! {
        service = Service::connect(socket) => service?,
        () = interrupt.next() => return Err(Problem::interrupted()),
    };
    if service.is_anothers() {
        return Err(Problem::started_by_another());
    }
    service.may_have_the_token()?;

    let requests = service.requests();
    // What ran before this call is not for Ctrl-C to end.
    let already = Cell::new(false);
    let interrupted = tokio::select! {
        started = bring_up(&mut service, session, deadline, limit, &already, output) => return started,
        () = interrupt.next() => Problem::interrupted(),
    };
    if already.get() {
        return Err(interrupted);
    }
    output.note("interrupted, stopping the tunnel again");
    tokio::select! {
        stopped = stop::stop(&requests, true) => match stopped {
            Ok(_) => Err(interrupted),
            Err(problem) => Err(Problem {
                exit: Exit::Interrupted,
                what: format!("interrupted, and the stop failed: {}", problem.what),
                remedy: "stop it with `codervpn stop`".into(),
                ..problem
            }),
        },
        () = interrupt.next() => Err(Problem::new(
            Exit::Interrupted,
            "interrupted while stopping",
            "see `codervpn status`; stop the tunnel with `codervpn stop`",
        )),
    }
}

/// The stored login, with the token of the environment's file or credential if there is one.
async fn login(output: &mut Output) -> Result<Session, Problem> {
    let store = Store::of_this_user()?;
    let session = store.load()?.ok_or_else(not_logged_in)?;
    if store.is_open_to_others() {
        output.warning(&format!(
            "others can read your session token; run `chmod 600 {}` and log in again",
            store.path().display()
        ));
    }
    match Source::given(None) {
        Some(source) => Ok(Session { token: source.read(deployment::shown(&session.url)).await?, ..session }),
        None => Ok(session),
    }
}

async fn bring_up(
    service: &mut Service,
    session: Session,
    deadline: Instant,
    limit: Duration,
    already: &Cell<bool>,
    output: &mut Output,
) -> Result<Started, Problem> {
    output.progress("starting …");
    let asked = timeout_at(deadline, ask(service, session, output)).await;
    let response = asked.map_err(|_| {
        Problem::failed(
            format!("not started yet: the service did not answer within {}; it is still trying", seconds(limit)),
            "see `codervpn status`, or stop it with `codervpn stop`",
        )
    })??;
    if !response.success {
        return Err(failure(&response));
    }
    already.set(response.ext.as_ref().is_some_and(|ext| ext.already_started));
    // What arrived before the reply may be older than it.
    let mut is_fresh = true;
    service.refresh().await?;
    loop {
        let reason = match judge(service.status()) {
            Judgement::Connected => return Ok(started(service, already.get(), true)),
            Judgement::CannotTell => return Ok(started(service, already.get(), false)),
            Judgement::Failed(problem) if is_fresh => return Err(problem),
            Judgement::Failed(_) => {
                service.refresh().await?;
                is_fresh = true;
                continue;
            }
            Judgement::Waiting(reason) => reason,
        };
        output.progress(&format!("connecting: {reason} …"));
        match timeout_at(deadline, service.news()).await {
            Ok(news) => {
                news?;
                is_fresh = false;
            }
            Err(_) => {
                return Err(Problem::failed(
                    format!("started, not connected yet: {reason}; still trying"),
                    "see `codervpn status`, or stop it with `codervpn stop`",
                ));
            }
        }
    }
}

/// Sends the request and shows what happens until its reply.
async fn ask(service: &mut Service, session: Session, output: &mut Output) -> Result<StartResponse, Problem> {
    let requests = service.requests();
    let request = StartRequest {
        coder_url: session.url.clone(),
        api_token: session.token.expose().to_owned(),
        ..StartRequest::default()
    };
    drop(session);
    let reply = requests.start(request);
    tokio::pin!(reply);
    loop {
        tokio::select! {
            biased;
            response = &mut reply => return response,
            news = service.news() => match news? {
                News::Progress(progress) => output.progress(&stage(&progress)),
                News::Status => {}
            },
        }
    }
}

fn stage(progress: &StartProgress) -> String {
    match progress.stage() {
        StartProgressStage::Initializing => "starting: asking the deployment …".into(),
        StartProgressStage::Finalizing => "starting: setting up the tunnel …".into(),
        StartProgressStage::Downloading => {
            let download = progress.download_progress.unwrap_or_default();
            match download.bytes_total.filter(|total| *total > 0) {
                Some(total) => {
                    let percent = u128::from(download.bytes_written) * 100 / u128::from(total);
                    format!("starting: downloading, {percent} % …")
                }
                None => format!("starting: downloading, {} KiB …", download.bytes_written / 1024),
            }
        }
    }
}

enum Judgement {
    Connected,
    /// Not yet, and why.
    Waiting(String),
    Failed(Problem),
    /// A foreign service, which knows no state of the control connection.
    CannotTell,
}

fn judge(status: &Status) -> Judgement {
    match status.lifecycle() {
        Lifecycle::Stopped | Lifecycle::Stopping => return Judgement::Failed(stopped_again(status)),
        _ if status.ext.is_none() => return Judgement::CannotTell,
        _ => {}
    }
    let ext = status.ext.clone().unwrap_or_default();
    match ext.control() {
        // Whoever replaced our tunnel hides theirs.
        _ if ext.restricted => Judgement::Failed(Problem::started_by_another()),
        ControlState::Connected => Judgement::Connected,
        ControlState::Refused => Judgement::Failed(match &ext.control_error {
            Some(failure) => Problem::reported(failure),
            None => Problem::failed("the deployment refuses the connection", LOOK_AT_LOG),
        }),
        _ => Judgement::Waiting(match ext.control_error.map(|failure| failure.message) {
            Some(message) if !message.is_empty() => message,
            _ => "the deployment has not sent everything yet".into(),
        }),
    }
}

fn stopped_again(status: &Status) -> Problem {
    let failure = status.ext.as_ref().and_then(|ext| ext.last_failure.as_ref());
    match failure {
        Some(failure) => {
            let problem = Problem::reported(failure);
            Problem { what: format!("the tunnel started and stopped again: {}", problem.what), ..problem }
        }
        None if status.error_message.is_empty() => {
            Problem::failed("the tunnel was stopped while it was starting", "start it again")
        }
        None => Problem::reported_text(&status.error_message),
    }
}

fn failure(response: &StartResponse) -> Problem {
    match response.ext.as_ref().and_then(|ext| ext.failure.as_ref()) {
        Some(failure) => Problem::reported(failure),
        None => Problem::reported_text(&response.error_message),
    }
}

fn started(service: &Service, already: bool, connected: bool) -> Started {
    Started { already, connected, report: Report::of(service.status()) }
}

fn seconds(limit: Duration) -> String {
    format!("{} s", limit.as_secs_f64())
}
