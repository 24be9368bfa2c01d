//! The conversation with the service: the way to it, who it is, and what its failures mean for a user.
//!
//! Every conversation begins with the status (codervpn-protocol 11.1). It tells whether the service is ours, which
//! decides what may be asked, and whether this user may see the tunnel.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use codervpn_proto::ext::client_ext::Request as ExtRequest;
use codervpn_proto::ext::service_ext::Reply as ExtReply;
use codervpn_proto::ext::{self, StatusExt};
use codervpn_proto::handshake::HandshakeError;
use codervpn_proto::rpc::Client;
use codervpn_proto::speaker::{self, CloseReason, ConnectError, Inbox, Incoming, Limits, RequestError, Speaker};
use codervpn_proto::vpn::client_message::Msg as Asked;
use codervpn_proto::vpn::service_message::Msg as Answered;
use codervpn_proto::vpn::{self, status::Lifecycle};

use crate::problem::{Exit, LOOK_AT_LOG, Problem};

/// For requests that need nothing but the service itself (codervpn-protocol 4).
const QUICK: Duration = Duration::from_secs(10);

const UPDATE: &str = "codervpn and the service are of different versions; update the older one";

/// An open conversation.
pub(crate) struct Service {
    speaker: Speaker<Client>,
    inbox: Inbox<Client>,
    status: vpn::Status,
    socket: PathBuf,
    peer: Peer,
}

/// News the service sends by itself.
#[derive(Debug)]
pub(crate) enum News {
    /// Replaces what was known; see `Service::status`.
    Status,
    Progress(vpn::StartProgress),
}

impl Service {
    pub(crate) async fn connect(socket: &Path) -> Result<Self, Problem> {
        let stream = transport::dial(socket).await.map_err(|error| cannot_dial(socket, &error))?;
        let peer = Peer(transport::peer_uid(&stream));
        let (reader, writer) = transport::split(stream);
        let (speaker, inbox) = speaker::connect::<Client, _, _>(reader, writer, Limits::default())
            .await
            .map_err(|error| cannot_greet(socket, &error))?;
        let status = ask_status(&speaker).await?;
        Ok(Self { speaker, inbox, status, socket: socket.to_owned(), peer })
    }

    /// The newest status that is known.
    pub(crate) fn status(&self) -> &vpn::Status {
        &self.status
    }

    pub(crate) fn lifecycle(&self) -> Lifecycle {
        self.status.lifecycle()
    }

    /// What our own service tells beyond the protocol; `None` of a foreign one.
    pub(crate) fn ext(&self) -> Option<&StatusExt> {
        self.status.ext.as_ref()
    }

    /// A tunnel runs, and this user may not see it.
    pub(crate) fn is_anothers(&self) -> bool {
        self.lifecycle() != Lifecycle::Stopped && self.ext().is_some_and(|ext| ext.restricted)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.speaker.is_closed()
    }

    /// To be called before a token is sent: anybody could have put a socket there.
    pub(crate) fn may_have_the_token(&self) -> Result<(), Problem> {
        if self.peer.may_have_the_token(transport::own_uid()) {
            return Ok(());
        }
        let who = self.peer.0.map_or_else(|| "an unknown user".to_owned(), |uid| format!("the user with uid {uid}"));
        Err(Problem::new(
            Exit::Refused,
            format!(
                "the socket {} belongs to {who}, who is neither root nor you; the session token was not sent",
                self.socket.display()
            ),
            "use the socket of the service that root runs: leave out --socket and CODER_DESKTOP_RPC_SOCKET_PATH",
        ))
    }

    /// Asks for the status anew.
    pub(crate) async fn refresh(&mut self) -> Result<&vpn::Status, Problem> {
        self.status = ask_status(&self.speaker).await?;
        Ok(&self.status)
    }

    /// Waits for what the service sends by itself. May be dropped at any time.
    pub(crate) async fn news(&mut self) -> Result<News, Problem> {
        loop {
            match self.inbox.next().await {
                Some(Incoming::OneWay(Answered::Status(status))) => {
                    self.status = status;
                    return Ok(News::Status);
                }
                Some(Incoming::OneWay(Answered::StartProgress(progress))) => return Ok(News::Progress(progress)),
                // A service sends nothing else by itself.
                Some(_) => {}
                None => return Err(lost(&self.speaker.closed().await)),
            }
        }
    }

    /// A handle for requests beside `news`.
    pub(crate) fn requests(&self) -> Requests {
        Requests(self.speaker.clone())
    }
}

/// What can be asked. Clones share the conversation.
#[derive(Clone)]
pub(crate) struct Requests(Speaker<Client>);

impl Requests {
    /// Without a limit of its own: it takes as long as the deployment takes.
    pub(crate) async fn start(&self, request: vpn::StartRequest) -> Result<vpn::StartResponse, Problem> {
        match self.0.request(Asked::Start(request), None).await {
            Ok(Answered::Start(response)) => Ok(response),
            other => Err(no_reply(other.err(), "the start")),
        }
    }

    pub(crate) async fn stop(&self) -> Result<vpn::StopResponse, Problem> {
        match self.0.request(Asked::Stop(vpn::StopRequest {}), Some(QUICK)).await {
            Ok(Answered::Stop(response)) => Ok(response),
            other => Err(no_reply(other.err(), "the stop")),
        }
    }

    /// A request of our own, only for a service whose status carried the extension.
    pub(crate) async fn ask(&self, request: ExtRequest, limit: Duration) -> Result<ExtReply, Problem> {
        let asked = Asked::Ext(ext::ClientExt { request: Some(request) });
        match self.0.request(asked, Some(limit)).await {
            Ok(Answered::Ext(ext::ServiceExt { reply: Some(ExtReply::Failed(failure)) })) => {
                Err(Problem::reported(&failure))
            }
            Ok(Answered::Ext(ext::ServiceExt { reply: Some(reply) })) => Ok(reply),
            other => Err(no_reply(other.err(), "the request")),
        }
    }
}

/// A service that is not ours cannot do what is asked.
pub(crate) fn not_ours(what: &str) -> Problem {
    Problem::new(
        Exit::Handshake,
        format!("the service at the socket is not codervpnd and cannot {what}"),
        "stop that service and start codervpnd",
    )
}

async fn ask_status(speaker: &Speaker<Client>) -> Result<vpn::Status, Problem> {
    match speaker.request(Asked::Status(vpn::StatusRequest {}), Some(QUICK)).await {
        Ok(Answered::Status(status)) => Ok(status),
        other => Err(no_reply(other.err(), "the request for its status")),
    }
}

/// Who is at the other end, by uid.
#[derive(Debug, Clone, Copy)]
struct Peer(Option<u32>);

impl Peer {
    fn may_have_the_token(self, own: u32) -> bool {
        self.0.is_some_and(|uid| uid == 0 || uid == own)
    }
}

const HOW_TO_START: &str = "start it with `sudo codervpnd serve --allow-user \"$USER\"`, or `sudo systemctl start codervpn` where it is installed";

const HOW_TO_BE_ADMITTED: &str = "join its group with `sudo usermod -aG codervpn \"$USER\"` and log in to this machine again, or \
     start the service with `codervpnd serve --allow-user \"$USER\"`";

fn cannot_dial(socket: &Path, error: &io::Error) -> Problem {
    let path = socket.display();
    match error.kind() {
        io::ErrorKind::NotFound => Problem::new(
            Exit::Unreachable,
            format!("the service does not run: there is no socket {path}"),
            HOW_TO_START,
        ),
        io::ErrorKind::ConnectionRefused => {
            Problem::new(Exit::Unreachable, format!("the service does not run: nobody answers at {path}"), HOW_TO_START)
        }
        io::ErrorKind::PermissionDenied => {
            Problem::new(Exit::Refused, format!("you may not use the socket {path}"), HOW_TO_BE_ADMITTED)
        }
        io::ErrorKind::InvalidInput => Problem::usage(
            format!("{path} cannot be a socket: {error}"),
            "give the path of the service's socket; it has at most 107 bytes",
        ),
        _ => Problem::new(Exit::Unreachable, format!("cannot connect to {path}: {error}"), LOOK_AT_LOG),
    }
}

fn cannot_greet(socket: &Path, error: &ConnectError) -> Problem {
    let path = socket.display();
    match error {
        // The kernel says reset when the service closed without having read our greeting.
        ConnectError::Closed => refused(socket),
        ConnectError::Io(error)
            if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) =>
        {
            refused(socket)
        }
        ConnectError::Io(error) => {
            Problem::new(Exit::Unreachable, format!("the connection to {path} failed: {error}"), LOOK_AT_LOG)
        }
        ConnectError::Handshake(error @ HandshakeError::NoCommonVersion { .. }) => {
            Problem::new(Exit::Handshake, error.to_string(), UPDATE)
        }
        ConnectError::Handshake(error) => Problem::new(
            Exit::Handshake,
            format!("what answers at {path} is not the service: {error}"),
            "check --socket and CODER_DESKTOP_RPC_SOCKET_PATH",
        ),
        ConnectError::TimedOut { .. } => Problem::new(
            Exit::Handshake,
            format!("what answers at {path} did not introduce itself in time"),
            "check --socket and CODER_DESKTOP_RPC_SOCKET_PATH; if they are right, restart the service",
        ),
    }
}

fn refused(socket: &Path) -> Problem {
    Problem::new(
        Exit::Refused,
        format!(
            "the service at {} hung up at once: you are not admitted, or have too many connections",
            socket.display()
        ),
        HOW_TO_BE_ADMITTED,
    )
}

/// `None`: a reply came, of a kind that must not come.
fn no_reply(error: Option<RequestError>, to: &str) -> Problem {
    match error {
        Some(RequestError::Closed(reason)) => lost(&reason),
        Some(RequestError::TimedOut) => {
            Problem::new(Exit::Unreachable, format!("the service did not answer {to} in time"), LOOK_AT_LOG)
        }
        Some(error @ RequestError::Encode(_)) => Problem::failed(format!("cannot send {to}: {error}"), ""),
        Some(error @ (RequestError::NotSupported | RequestError::UnexpectedReply(_))) => {
            Problem::new(Exit::Handshake, format!("the service did not understand {to}: {error}"), UPDATE)
        }
        None => Problem::new(Exit::Handshake, format!("the service did not understand {to}"), UPDATE),
    }
}

fn lost(reason: &CloseReason) -> Problem {
    match reason {
        CloseReason::Protocol(error) => {
            Problem::new(Exit::Handshake, format!("the service breaks the protocol: {error}"), UPDATE)
        }
        reason => Problem::new(Exit::Unreachable, format!("the service is gone: {reason}"), LOOK_AT_LOG),
    }
}

#[cfg(unix)]
mod transport {
    use std::io;
    use std::path::Path;

    use tokio::net::UnixStream;
    use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

    pub(super) async fn dial(socket: &Path) -> io::Result<UnixStream> {
        UnixStream::connect(socket).await
    }

    /// Of the process that listens there, as the kernel says.
    pub(super) fn peer_uid(stream: &UnixStream) -> Option<u32> {
        stream.peer_cred().ok().map(|credentials| credentials.uid())
    }

    pub(super) fn own_uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    pub(super) fn split(stream: UnixStream) -> (OwnedReadHalf, OwnedWriteHalf) {
        stream.into_split()
    }
}

/// The named pipe of other systems comes with the service for them.
#[cfg(not(unix))]
mod transport {
    use std::io;
    use std::path::Path;

    use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

    pub(super) async fn dial(_socket: &Path) -> io::Result<DuplexStream> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "not supported on this system yet"))
    }

    pub(super) fn peer_uid(_stream: &DuplexStream) -> Option<u32> {
        None
    }

    pub(super) fn own_uid() -> u32 {
        0
    }

    pub(super) fn split(stream: DuplexStream) -> (ReadHalf<DuplexStream>, WriteHalf<DuplexStream>) {
        tokio::io::split(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_oneself_get_the_token() {
        assert!(Peer(Some(0)).may_have_the_token(1000));
        assert!(Peer(Some(1000)).may_have_the_token(1000));
        assert!(!Peer(Some(1001)).may_have_the_token(1000));
        assert!(!Peer(Some(1000)).may_have_the_token(0));
        assert!(!Peer(None).may_have_the_token(0));
    }

    #[test]
    fn failures_of_dialling_have_their_exit_codes() {
        for (kind, exit) in [
            (io::ErrorKind::NotFound, Exit::Unreachable),
            (io::ErrorKind::ConnectionRefused, Exit::Unreachable),
            (io::ErrorKind::PermissionDenied, Exit::Refused),
            (io::ErrorKind::InvalidInput, Exit::Usage),
            (io::ErrorKind::OutOfMemory, Exit::Unreachable),
        ] {
            let problem = cannot_dial(Path::new("/x"), &kind.into());
            assert_eq!(problem.exit, exit);
            assert!(problem.what.contains("/x") && !problem.remedy.is_empty());
        }
    }
}
