//! A client of the daemon's socket that keeps what it is told.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use codervpn_proto::ext::{self, ControlState, client_ext, service_ext};
use codervpn_proto::rpc::Client as Role;
use codervpn_proto::speaker::{self, ConnectError, Inbox, Incoming, Limits, Speaker};
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_proto::vpn::{self, StartProgressStage, StartRequest, StopRequest, client_message, service_message};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::PATIENCE;

/// Longest wait for the reply to a start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// One connection to the daemon.
#[derive(Debug, Clone)]
pub struct Client {
    pub speaker: Speaker<Role>,
    status: watch::Receiver<Option<vpn::Status>>,
    told: Arc<Mutex<Told>>,
}

/// Broadcasts, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Broadcast {
    Lifecycle(Lifecycle),
    Progress(StartProgressStage),
}

type Told = Vec<Broadcast>;

/// A start with nothing but what a frontend fills in.
pub fn start_request(url: &str, token: &str) -> StartRequest {
    StartRequest { coder_url: url.to_owned(), api_token: token.to_owned(), ..StartRequest::default() }
}

impl Client {
    pub async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(socket).await.with_context(|| socket.display().to_string())?;
        Ok(Self::greet(stream).await?)
    }

    /// Over a connection that is there already.
    pub async fn greet(stream: UnixStream) -> Result<Self, ConnectError> {
        let (reader, writer) = stream.into_split();
        let (speaker, inbox) = speaker::connect::<Role, _, _>(reader, writer, Limits::default()).await?;
        let (tell, status) = watch::channel(None);
        let told = Arc::default();
        tokio::spawn(listen(inbox, tell, Arc::clone(&told)));
        Ok(Self { speaker, status, told })
    }

    pub async fn start(&self, url: &str, token: &str) -> anyhow::Result<vpn::StartResponse> {
        self.start_with(start_request(url, token)).await
    }

    pub async fn start_with(&self, request: StartRequest) -> anyhow::Result<vpn::StartResponse> {
        match self.speaker.request(client_message::Msg::Start(request), Some(START_LIMIT)).await? {
            service_message::Msg::Start(reply) => Ok(reply),
            other => anyhow::bail!("not a reply to start: {other:?}"),
        }
    }

    /// As [`Client::start`], and the start has to succeed.
    pub async fn started(&self, url: &str, token: &str) -> anyhow::Result<()> {
        let reply = self.start(url, token).await?;
        anyhow::ensure!(reply.success, "start: {}", reply.error_message);
        Ok(())
    }

    pub async fn stop(&self) -> anyhow::Result<vpn::StopResponse> {
        let limit = Some(Duration::from_secs(8));
        match self.speaker.request(client_message::Msg::Stop(StopRequest {}), limit).await? {
            service_message::Msg::Stop(reply) => Ok(reply),
            other => anyhow::bail!("not a reply to stop: {other:?}"),
        }
    }

    /// As [`Client::stop`], and the stop has to succeed.
    pub async fn stopped(&self) -> anyhow::Result<()> {
        let reply = self.stop().await?;
        anyhow::ensure!(reply.success, "stop: {}", reply.error_message);
        Ok(())
    }

    /// Asks for the status.
    pub async fn status(&self) -> anyhow::Result<vpn::Status> {
        let request = client_message::Msg::Status(vpn::StatusRequest {});
        match self.speaker.request(request, Some(PATIENCE)).await? {
            service_message::Msg::Status(reply) => Ok(reply),
            other => anyhow::bail!("not a reply to status: {other:?}"),
        }
    }

    /// A request of our extension.
    pub async fn extension(&self, request: client_ext::Request) -> anyhow::Result<service_ext::Reply> {
        let request = client_message::Msg::Ext(ext::ClientExt { request: Some(request) });
        match self.speaker.request(request, Some(PATIENCE)).await? {
            service_message::Msg::Ext(ext::ServiceExt { reply: Some(reply) }) => Ok(reply),
            other => anyhow::bail!("not a reply to a request of the extension: {other:?}"),
        }
    }

    /// Waits for a broadcast status for which `fits` holds; the last one counts too.
    pub async fn await_status(&self, what: &str, fits: impl Fn(&vpn::Status) -> bool) -> anyhow::Result<vpn::Status> {
        // Broadcasts tell changes; what was so before the connection has to be asked for.
        let asked = self.status().await?;
        if fits(&asked) {
            return Ok(asked);
        }
        let mut status = self.status.clone();
        let wait = status.wait_for(|status| status.as_ref().is_some_and(&fits));
        match timeout(PATIENCE, wait).await {
            Ok(Ok(status)) => status.clone().context("a status was waited for"),
            Ok(Err(_)) => anyhow::bail!("the connection ended while waiting for {what}"),
            Err(_) => anyhow::bail!("not within {PATIENCE:?}: {what}; the last status: {:#?}", self.status().await),
        }
    }

    /// Waits until names and control connection are up.
    pub async fn connected(&self) -> anyhow::Result<vpn::Status> {
        self.await_status("connected", |status| control(status) == ControlState::Connected).await
    }

    pub async fn await_lifecycle(&self, lifecycle: Lifecycle) -> anyhow::Result<vpn::Status> {
        self.await_status(lifecycle.as_str_name(), |status| status.lifecycle() == lifecycle).await
    }

    /// What was broadcast so far; a repeated lifecycle is listed once.
    pub fn told(&self) -> Vec<Broadcast> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The state of the control connection in a status.
pub fn control(status: &vpn::Status) -> ControlState {
    status.ext.as_ref().map_or(ControlState::Unknown, ext::StatusExt::control)
}

async fn listen(mut inbox: Inbox<Role>, tell: watch::Sender<Option<vpn::Status>>, told: Arc<Mutex<Told>>) {
    while let Some(incoming) = inbox.next().await {
        let Incoming::OneWay(message) = incoming else { continue };
        let broadcast = match message {
            service_message::Msg::Status(status) => {
                let lifecycle = status.lifecycle();
                tell.send_replace(Some(status));
                Broadcast::Lifecycle(lifecycle)
            }
            service_message::Msg::StartProgress(progress) => Broadcast::Progress(progress.stage()),
            _ => continue,
        };
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        let last = told.iter().rev().find(|one| matches!(one, Broadcast::Lifecycle(_)));
        if matches!(broadcast, Broadcast::Progress(_)) || last != Some(&broadcast) {
            told.push(broadcast);
        }
    }
}
