//! `ping` and `workspaces`.

use std::process::Stdio;

use codervpn_proto::ext::client_ext::Request;
use codervpn_proto::ext::ping_request::Target;
use codervpn_proto::ext::service_ext::Reply;
use codervpn_proto::ext::{self, FailureCode, PathKind};
use codervpn_proto::vpn::Status;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::support::{Act, Asked, Fake, connected, ext_reply, failure, interrupt, seconds_ago, stopped};

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
        echo: true,
        bytes: 64,
        path_latency: Some(prost_types::Duration { seconds: 0, nanos: 11_000_000 }),
        ..ext::PingReply::default()
    })
}

#[tokio::test]
async fn ping_shows_time_and_path_and_sums_up() {
    let fake = answering(pong);
    let done = fake.run(&["ping", "dev", "-c", "1"]).await;
    let expected = "\
64 bytes from dev.coder: seq=1 relay Frankfurt time=12.3 ms
--- dev.coder ---
1 sent, 1 answered, 0% loss
min 12.3 ms, avg 12.3 ms, max 12.3 ms
";
    assert_eq!(done.succeeded(), expected);
    let done = fake.run(&["ping", "dev", "-c", "1", "--json"]).await;
    let lines: Vec<serde_json::Value> =
        done.succeeded().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        lines,
        [
            serde_json::json!({"seq": 1, "name": "dev.coder", "latency_ms": 12.34, "path": "relay", "endpoint": null,
                               "relay": "Frankfurt", "echo": true, "bytes": 64, "path_latency_ms": 11.0,
                               "error": null}),
            serde_json::json!({"summary": {"name": "dev.coder", "sent": 1, "answered": 1, "loss_percent": 0.0,
                                           "min_ms": 12.34, "avg_ms": 12.34, "max_ms": 12.34}}),
        ]
    );
}

#[tokio::test]
async fn a_direct_path_is_named_and_so_is_an_agent_whose_network_is_silent() {
    let fake = answering(|_| {
        Reply::Ping(ext::PingReply {
            name: "dev.coder".into(),
            latency: Some(prost_types::Duration { seconds: 0, nanos: 800_000 }),
            path: PathKind::Direct.into(),
            endpoint: "192.0.2.1:41641".into(),
            ..ext::PingReply::default()
        })
    });
    let done = fake.run(&["ping", "dev", "-c", "1"]).await;
    let first = done.succeeded().lines().next().unwrap();
    assert_eq!(
        first,
        "reply from dev.coder: seq=1 direct 192.0.2.1:41641 time=0.80 ms (only the tunnel answers, not the agent's network)"
    );
}

#[tokio::test]
async fn ping_of_a_silent_agent_goes_on_and_fails_in_the_end() {
    let fake =
        answering(|_| Reply::Failed(failure(FailureCode::AgentUnreachable, "main does not answer", "is it running?")));
    let done = fake.run(&["ping", "dev", "-c", "2"]).await;
    assert_eq!(done.code, 1, "{done:?}");
    let lines: Vec<&str> = done.stdout.lines().collect();
    assert_eq!(lines[0], "no reply: seq=1 main does not answer");
    assert_eq!(lines[2..], ["--- dev ---", "2 sent, 0 answered, 100% loss"]);
}

#[tokio::test]
async fn without_a_count_ping_goes_on_until_ctrl_c_and_then_sums_up() {
    let fake = answering(pong);
    let mut child = fake.codervpn(&["ping", "dev"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for seq in 1..=2 {
        let line = lines.next_line().await.unwrap().unwrap();
        assert!(line.contains(&format!("seq={seq} ")), "{line}");
    }
    interrupt(&child).await;
    let mut rest = Vec::new();
    while let Some(line) = lines.next_line().await.unwrap() {
        rest.push(line);
    }
    assert!(rest.contains(&"--- dev.coder ---".to_owned()), "{rest:?}");
    assert!(rest.last().unwrap().starts_with("min 12.3 ms"), "{rest:?}");
    assert_eq!(child.wait().await.unwrap().code(), Some(0), "something answered");
}

#[tokio::test]
async fn counts_that_are_none_are_refused() {
    let fake = answering(pong);
    for count in ["0", "-1", "x", "", "4294967296"] {
        let done = fake.run(&["ping", "dev", "-c", count]).await;
        assert_eq!(done.code, 64, "{count:?}: {done:?}");
    }
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
