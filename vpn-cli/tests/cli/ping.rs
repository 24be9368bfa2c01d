//! `ping` and `workspaces`.

use codervpn_proto::ext::client_ext::Request;
use codervpn_proto::ext::ping_request::Target;
use codervpn_proto::ext::service_ext::Reply;
use codervpn_proto::ext::{self, FailureCode, PathKind};
use codervpn_proto::vpn::Status;

use super::support::{Act, Asked, Fake, connected, ext_reply, failure, seconds_ago, stopped};

fn running() -> Status {
    connected(seconds_ago(1), seconds_ago(1))
}

fn answering(reply: fn(&Request) -> Reply) -> Fake {
    Fake::with(running(), move |asked| match asked {
        Asked::Ext(ext::ClientExt { request: Some(request) }) => ext_reply(reply(request)),
        other => panic!("{other:?}"),
    })
}

fn pong(request: &Request) -> Reply {
    let Request::Ping(ping) = request else { panic!("{request:?}") };
    assert_eq!(ping.target, Some(Target::Name("dev".into())));
    Reply::Ping(ext::PingReply {
        name: "dev.coder".into(),
        latency: Some(prost_types::Duration { seconds: 0, nanos: 12_340_000 }),
        path: PathKind::Relay.into(),
        relay: "Frankfurt".into(),
        ..ext::PingReply::default()
    })
}

#[tokio::test]
async fn ping_shows_time_and_path() {
    let fake = answering(pong);
    let done = fake.run(&["ping", "dev", "-c", "1"]).await;
    assert_eq!(done.succeeded(), "pong 1 from dev.coder in 12.3 ms by relay Frankfurt\n");
    let done = fake.run(&["ping", "dev", "-c", "1", "--json"]).await;
    let json: serde_json::Value = serde_json::from_str(done.succeeded()).unwrap();
    assert_eq!(
        json,
        serde_json::json!({"seq": 1, "name": "dev.coder", "latency_ms": 12.34, "path": "relay", "endpoint": null,
                           "relay": "Frankfurt", "error": null})
    );
}

#[tokio::test]
async fn ping_of_a_silent_agent_goes_on_and_fails_in_the_end() {
    let fake =
        answering(|_| Reply::Failed(failure(FailureCode::AgentUnreachable, "main does not answer", "is it running?")));
    let done = fake.run(&["ping", "dev", "-c", "2"]).await;
    assert_eq!((done.code, done.stdout.lines().count()), (1, 2), "{done:?}");
    assert!(done.stdout.starts_with("ping 1: main does not answer"));
}

#[tokio::test]
async fn ping_of_an_unknown_name_ends_at_once() {
    let fake = answering(|_| Reply::Failed(failure(FailureCode::UnknownAgent, "no agent is called dve", "")));
    fake.run(&["ping", "dve"]).await.failed(1, &["no agent is called dve", "codervpn workspaces"]);
    assert_eq!(fake.asked().len(), 2);
}

fn tree(request: &Request) -> Reply {
    let Request::Workspaces(asked) = request else { panic!("{request:?}") };
    let agent = |name: &str| ext::AgentStatus {
        id: vec![3; 16],
        name: name.into(),
        fqdn: vec![format!("{name}.dev.me.coder")],
        addresses: vec!["fd60:627a:a42b::1".into()],
        path: Some(ext::AgentPath { reason: "offline".into(), ..ext::AgentPath::default() }),
    };
    let dev = ext::WorkspaceStatus {
        id: vec![1; 16],
        name: "dev".into(),
        status: 3,
        agents: vec![agent("gpu"), agent("main")],
    };
    let workspaces = if ["", "dev"].contains(&asked.name.as_str()) { vec![dev] } else { Vec::new() };
    Reply::Workspaces(ext::WorkspacesReply { workspaces })
}

#[tokio::test]
async fn workspaces_are_a_tree() {
    let fake = answering(tree);
    let done = fake.run(&["workspaces"]).await;
    let expected = "\
dev  running
├─ gpu  offline
│    gpu.dev.me.coder
│    fd60:627a:a42b::1
└─ main  offline
     main.dev.me.coder
     fd60:627a:a42b::1
";
    assert_eq!(done.succeeded(), expected);
    let json: serde_json::Value =
        serde_json::from_str(fake.run(&["workspaces", "dev", "--json"]).await.succeeded()).unwrap();
    assert_eq!(json[0]["agents"][1]["fqdn"][0], "main.dev.me.coder");
    assert_eq!(json[0]["agents"][1]["latency_ms"], serde_json::Value::Null);
    fake.run(&["workspaces", "dve"]).await.failed(1, &["no workspace \"dve\""]);
}

#[tokio::test]
async fn without_a_tunnel_there_are_no_workspaces_to_list() {
    Fake::showing(stopped()).run(&["workspaces"]).await.failed(1, &["not started", "codervpn start"]);
    let fake = Fake::with(running(), |_| Act::HangUp);
    fake.run(&["workspaces"]).await.failed(2, &["the service is gone"]);
}
