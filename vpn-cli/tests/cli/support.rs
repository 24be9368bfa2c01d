//! A service that does what a test tells it, and the real program run against it.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use codervpn_proto::ext::{self, ControlState, DnsMode, DnsState, FailureCode, PathKind, StatusExt};
use codervpn_proto::rpc::Body as _;
pub(crate) use codervpn_proto::rpc::Kind;
use codervpn_proto::rpc::Service;
use codervpn_proto::speaker::{Incoming, Limits, Speaker, connect};
pub(crate) use codervpn_proto::vpn::client_message::Msg as Asked;
pub(crate) use codervpn_proto::vpn::service_message::Msg as Answer;
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_proto::vpn::{self, Status};
use prost_types::Timestamp;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixListener;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::timeout;

/// Marks what must never be seen again outside of the stored login.
pub(crate) const TOKEN: &str = "MARKERsecret-token";
pub(crate) const URL: &str = "https://coder.example.com/";

/// Far more than anything here takes; reached only by a bug.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the service does with a request.
pub(crate) enum Act {
    Reply(Box<Answer>),
    /// Lets it wait for ever.
    Ignore,
    HangUp,
}

impl Act {
    pub(crate) fn reply(answer: Answer) -> Self {
        Self::Reply(Box::new(answer))
    }
}

pub(crate) struct Fake {
    dir: TempDir,
    asked: Arc<Mutex<Vec<Asked>>>,
    count: watch::Receiver<usize>,
}

impl Fake {
    /// Serves every connection with `act`, which may send more by the speaker.
    pub(crate) fn serve(act: impl Fn(&Speaker<Service>, &Asked) -> Act + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("vpn.sock")).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (counter, count) = watch::channel(0);
        let log = Arc::clone(&asked);
        tokio::spawn(Self::serve_on(listener, move |speaker, asked| {
            log.lock().unwrap().push(asked.clone());
            let act = act(speaker, asked);
            counter.send_modify(|count| *count += 1);
            act
        }));
        Self { dir, asked, count }
    }

    pub(crate) async fn serve_on(
        listener: UnixListener,
        act: impl Fn(&Speaker<Service>, &Asked) -> Act + Send + Sync + 'static,
    ) {
        let act = Arc::new(act);
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let act = Arc::clone(&act);
            tokio::spawn(async move {
                let (reader, writer) = stream.into_split();
                let Ok((speaker, mut inbox)) = connect::<Service, _, _>(reader, writer, Limits::service()).await else {
                    return;
                };
                // Requests that are never answered stay open until the client goes.
                let mut ignored = Vec::new();
                while let Some(incoming) = inbox.next().await {
                    let Incoming::Request(mut request) = incoming else { panic!("a client has no one-way message") };
                    match act(&speaker, &request.take_body().unwrap()) {
                        Act::Reply(answer) => request.reply(*answer).await.unwrap(),
                        Act::Ignore => ignored.push(request),
                        Act::HangUp => speaker.abort(),
                    }
                }
            });
        }
    }

    /// Answers requests for the status with this one, other requests by `act`.
    pub(crate) fn with(status: Status, act: impl Fn(&Asked) -> Act + Send + Sync + 'static) -> Self {
        Self::serve(move |_, asked| match asked {
            Asked::Status(_) => Act::reply(Answer::Status(status.clone())),
            other => act(other),
        })
    }

    /// Only shows this status.
    pub(crate) fn showing(status: Status) -> Self {
        Self::with(status, |asked| panic!("{asked:?} was not expected"))
    }

    /// Writes these bytes to everybody and closes.
    pub(crate) fn raw(bytes: &'static [u8], close: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("vpn.sock")).unwrap();
        tokio::spawn(async move {
            let mut open = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(bytes).await.unwrap();
                if !close {
                    open.push(stream);
                } else if !bytes.is_empty() {
                    // Closing with the client's header unread would look like a refusal.
                    let mut header = String::new();
                    BufReader::new(stream).read_line(&mut header).await.unwrap();
                }
            }
        });
        Self { dir, asked: Arc::default(), count: watch::channel(0).1 }
    }

    /// A folder with nobody in it.
    pub(crate) fn nobody() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), asked: Arc::default(), count: watch::channel(0).1 }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("vpn.sock")
    }

    pub(crate) fn session(&self) -> PathBuf {
        self.dir.path().join("config/codervpn/session")
    }

    /// As a login would have left it.
    pub(crate) fn log_in(&self) {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::create_dir_all(self.session().parent().unwrap()).unwrap();
        std::fs::write(self.session(), format!("{{\"url\":\"{URL}\",\"token\":\"{TOKEN}\"}}")).unwrap();
        std::fs::set_permissions(self.session(), std::fs::Permissions::from_mode(0o600)).unwrap();
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    pub(crate) fn kinds(&self) -> Vec<Kind> {
        self.asked().iter().map(Asked::kind).collect()
    }

    /// Waits until so many requests have come.
    pub(crate) async fn asked_for(&self, count: usize) {
        let mut counted = self.count.clone();
        timeout(PATIENCE, counted.wait_for(|now| *now >= count)).await.unwrap().unwrap();
    }

    pub(crate) fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.dir.path())
            .env("XDG_CONFIG_HOME", self.dir.path().join("config"))
            .env("CODER_DESKTOP_RPC_SOCKET_PATH", self.socket())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    pub(crate) fn codervpn(&self, args: &[&str]) -> Command {
        self.command(PROGRAM, args)
    }

    pub(crate) async fn run(&self, args: &[&str]) -> Done {
        finish(self.codervpn(args).spawn().unwrap()).await
    }

    /// With this on standard input.
    pub(crate) async fn run_fed(&self, args: &[&str], input: &str) -> Done {
        let mut child = self.codervpn(args).stdin(Stdio::piped()).spawn().unwrap();
        // A program that fails before it comes to read is gone already.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes()).await;
        finish(child).await
    }
}

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_codervpn");

/// How the program ended. S-03: no test ever sees the token in what it prints.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) async fn finish(child: Child) -> Done {
    let output = timeout(PATIENCE, child.wait_with_output()).await.expect("the program hangs").unwrap();
    let done = Done {
        code: output.status.code().unwrap_or_else(|| panic!("killed by signal {:?}", output.status.signal())),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    };
    assert!(!done.stdout.contains(TOKEN) && !done.stderr.contains(TOKEN), "{done:?}");
    assert!(!done.stderr.contains("panicked"), "{done:?}");
    done
}

impl Done {
    /// Checks the exit code, that nothing is on standard output, and that each text is on standard error.
    #[track_caller]
    pub(crate) fn failed(&self, code: i32, texts: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{self:?}");
        for text in texts {
            assert!(self.stderr.contains(text), "{text:?} is missing: {self:?}");
        }
        assert!(!self.stderr.contains('\x1b'), "colours without a terminal: {self:?}");
    }

    #[track_caller]
    pub(crate) fn succeeded(&self) -> &str {
        assert_eq!(self.code, 0, "{self:?}");
        assert!(!self.stdout.contains('\x1b'), "colours without a terminal: {self:?}");
        &self.stdout
    }
}

pub(crate) async fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

/// Of our service, with nothing in it yet.
pub(crate) fn status(lifecycle: Lifecycle, control: ControlState) -> Status {
    Status {
        lifecycle: lifecycle.into(),
        peer_update: Some(vpn::PeerUpdate::default()),
        ext: Some(StatusExt {
            revision: 1,
            service_version: "0.1.0".into(),
            control: control.into(),
            ..StatusExt::default()
        }),
        ..Status::default()
    }
}

pub(crate) fn stopped() -> Status {
    status(Lifecycle::Stopped, ControlState::Off)
}

pub(crate) fn seconds_ago(seconds: i64) -> Timestamp {
    let now = Timestamp::from(std::time::SystemTime::now());
    Timestamp { seconds: now.seconds - seconds, nanos: 0 }
}

/// A running tunnel with one connected agent, one that never connected, and a stopped workspace.
pub(crate) fn connected(since: Timestamp, handshake: Timestamp) -> Status {
    let mut status = status(Lifecycle::Started, ControlState::Connected);
    let (dev, off) = (vec![1; 16], vec![2; 16]);
    let (main, gpu) = (vec![3; 16], vec![4; 16]);
    let workspace = |id: &Vec<u8>, name: &str, status: vpn::workspace::Status| vpn::Workspace {
        id: id.clone(),
        name: name.into(),
        status: status.into(),
    };
    let agent = |id: &Vec<u8>, name: &str, last: u16| vpn::Agent {
        id: id.clone(),
        name: name.into(),
        workspace_id: dev.clone(),
        fqdn: vec![format!("{name}.dev.me.coder."), format!("{name}.dev.alice.coder.")],
        ip_addrs: vec![format!("fd60:627a:a42b::{last:x}")],
        last_handshake: None,
        last_ping: None,
    };
    status.peer_update = Some(vpn::PeerUpdate {
        upserted_workspaces: vec![
            workspace(&dev, "dev", vpn::workspace::Status::Running),
            workspace(&off, "off", vpn::workspace::Status::Stopped),
        ],
        upserted_agents: vec![agent(&gpu, "gpu", 2), agent(&main, "main", 1)],
        ..Default::default()
    });
    let ext = status.ext.as_mut().unwrap();
    ext.since = Some(since);
    ext.deployment = URL.into();
    ext.user = "alice".into();
    ext.suffix = "coder".into();
    ext.interface = "coder0".into();
    ext.server_version = "v2.30.0".into();
    ext.dns =
        Some(ext::DnsStatus { mode: DnsMode::Direct.into(), state: DnsState::Ok.into(), ..ext::DnsStatus::default() });
    ext.agents = vec![
        ext::AgentPath {
            agent_id: main,
            kind: PathKind::Relay.into(),
            relay: "Frankfurt".into(),
            reason: "disabled".into(),
            latency: Some(prost_types::Duration { seconds: 0, nanos: 1_200_000 }),
            last_handshake: Some(handshake),
            rx_bytes: 10,
            tx_bytes: 20,
            online: true,
            ..ext::AgentPath::default()
        },
        ext::AgentPath { agent_id: gpu, reason: "offline".into(), ..ext::AgentPath::default() },
    ];
    status
}

/// As another user's tunnel looks to a member of the group (11.5.3).
pub(crate) fn anothers() -> Status {
    let mut status = status(Lifecycle::Started, ControlState::Unknown);
    status.ext.as_mut().unwrap().restricted = true;
    status
}

/// The same without what only our service says.
pub(crate) fn foreign(mut status: Status) -> Status {
    status.ext = None;
    status
}

pub(crate) fn failure(code: FailureCode, message: &str, remedy: &str) -> ext::Failure {
    ext::Failure::new(code, message, remedy)
}

pub(crate) fn start_reply(failure: Option<ext::Failure>) -> Act {
    Act::reply(Answer::Start(vpn::StartResponse {
        success: failure.is_none(),
        error_message: failure.as_ref().map(ext::Failure::text).unwrap_or_default(),
        ext: Some(ext::StartResponseExt { failure, already_started: false }),
    }))
}

pub(crate) fn stop_reply(failure: Option<ext::Failure>, already_stopped: bool) -> Act {
    Act::reply(Answer::Stop(vpn::StopResponse {
        success: failure.is_none(),
        error_message: failure.as_ref().map(ext::Failure::text).unwrap_or_default(),
        ext: Some(ext::StopResponseExt { failure, already_stopped }),
    }))
}

pub(crate) fn ext_reply(reply: ext::service_ext::Reply) -> Act {
    Act::reply(Answer::Ext(ext::ServiceExt { reply: Some(reply) }))
}

/// Whether this test runs as root, which can play several users.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
