//! `status` in all its forms: product contract 3, codervpn-protocol 11.3 and 11.5.3.

use std::process::Stdio;

use codervpn_proto::ext::{ControlState, FailureCode};
use codervpn_proto::vpn::status::Lifecycle;
use prost_types::Timestamp;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::support::{
    Act, Answer, Asked, Fake, anothers, connected, failure, finish, foreign, interrupt, seconds_ago, status, stopped,
};

fn at(seconds: i64) -> Timestamp {
    Timestamp { seconds, nanos: 0 }
}

async fn json_of(fake: &Fake) -> Value {
    let done = fake.run(&["status", "--json"]).await;
    assert_eq!(done.succeeded().lines().count(), 1);
    serde_json::from_str(&done.stdout).unwrap()
}

#[tokio::test]
async fn json_is_that_of_the_contract() {
    let fake = Fake::showing(connected(at(1_700_000_000), at(1_700_000_100)));
    let id = |byte: u8| uuid::Uuid::from_bytes([byte; 16]).to_string();
    let expected = json!({
        "schema": 1, "lifecycle": "started", "control": "connected", "error": null, "since": "2023-11-14T22:13:20Z",
        "deployment": "https://coder.example.com/", "user": "alice", "suffix": "coder", "interface": "coder0",
        "dns": {"mode": "direct", "state": "ok"}, "server_version": "v2.30.0", "restricted": false,
        "workspaces": [
            {"id": id(1), "name": "dev", "status": "running", "agents": [
                {"id": id(4), "name": "gpu", "fqdn": ["gpu.dev.me.coder", "gpu.dev.alice.coder"],
                 "addresses": ["fd60:627a:a42b::2"], "path": null, "endpoint": null, "relay": null,
                 "reason": "offline", "latency_ms": null, "last_handshake": null, "rx_bytes": 0, "tx_bytes": 0},
                {"id": id(3), "name": "main", "fqdn": ["main.dev.me.coder", "main.dev.alice.coder"],
                 "addresses": ["fd60:627a:a42b::1"], "path": "relay", "endpoint": null, "relay": "Frankfurt",
                 "reason": "disabled", "latency_ms": 1.2, "last_handshake": "2023-11-14T22:15:00Z",
                 "rx_bytes": 10, "tx_bytes": 20},
            ]},
            {"id": id(2), "name": "off", "status": "stopped", "agents": []},
        ],
    });
    assert_eq!(json_of(&fake).await, expected);
}

#[tokio::test]
async fn json_says_null_for_what_is_unknown() {
    let expected = json!({
        "schema": 1, "lifecycle": "stopped", "control": null, "error": null, "since": null, "deployment": null,
        "user": null, "suffix": null, "interface": null, "dns": {"mode": null, "state": null}, "server_version": null,
        "restricted": false, "workspaces": [],
    });
    assert_eq!(json_of(&Fake::showing(foreign(stopped()))).await, expected);
    let mut future = status(Lifecycle::Unknown, ControlState::Unknown);
    future.lifecycle = 77;
    future.peer_update = None;
    let shown = json_of(&Fake::showing(future)).await;
    assert_eq!((&shown["lifecycle"], &shown["control"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn stopped_is_a_success_except_for_check() {
    let fake = Fake::showing(stopped());
    assert_eq!(fake.run(&["status"]).await.succeeded(), "stopped\n");
    let checked = fake.run(&["status", "--check"]).await;
    assert_eq!((checked.code, checked.stdout.as_str()), (4, "stopped\n"));
    let fake = Fake::showing(connected(at(1), at(1)));
    fake.run(&["status", "--check"]).await.succeeded();
    let fake = Fake::showing(status(Lifecycle::Starting, ControlState::Connecting));
    assert_eq!(fake.run(&["status", "--check", "--json"]).await.code, 4);
}

#[tokio::test]
async fn people_see_workspaces_paths_and_times() {
    let fake = Fake::showing(connected(seconds_ago(190), seconds_ago(7)));
    let done = fake.run(&["status"]).await;
    let lines: Vec<&str> = done.succeeded().lines().collect();
    assert_eq!(lines[0], "started, connected (for 3 min)");
    assert_eq!(lines[1], "deployment  https://coder.example.com as alice, Coder v2.30.0");
    assert_eq!(lines[2], "names       *.coder on coder0");
    assert_eq!(lines[3], "resolver    direct, ok");
    let row = |name: &str| lines.iter().find(|line| line.contains(name)).unwrap().split("  ").collect::<Vec<_>>();
    let cells = |name| row(name).into_iter().map(str::trim).filter(|cell| !cell.is_empty()).collect::<Vec<_>>();
    let main = cells("main.dev.me.coder");
    assert_eq!(main[..6], ["dev", "running", "main", "main.dev.me.coder", "relay Frankfurt", "1.20 ms"]);
    assert!(["7 s ago", "8 s ago", "9 s ago"].contains(&main[6]), "{main:?}");
    assert_eq!(main[7..], ["10 B", "20 B", "switched off on this machine (paths.direct)"]);
    assert_eq!(cells("gpu.dev.me.coder")[4..], ["offline", "-", "never", "0 B", "0 B"]);
    assert_eq!(cells("off  ")[..3], ["off", "stopped", "-"]);
}

#[tokio::test]
async fn the_tunnel_of_another_user_is_not_an_empty_list() {
    let fake = Fake::showing(anothers());
    assert_eq!(fake.run(&["status"]).await.succeeded(), "started by another user\n");
    let shown = json_of(&fake).await;
    assert_eq!((&shown["restricted"], &shown["workspaces"]), (&json!(true), &Value::Null));
    fake.run(&["workspaces"]).await.failed(5, &["started by another user"]);
    fake.run(&["ping", "dev"]).await.failed(5, &["started by another user"]);
    let mut starting = anothers();
    starting.lifecycle = Lifecycle::Starting.into();
    assert!(Fake::showing(starting).run(&["status"]).await.succeeded().contains("started by another user"));
}

#[tokio::test]
async fn failures_are_shown_with_what_to_do() {
    let mut failed = stopped();
    failed.ext.as_mut().unwrap().last_failure = Some(failure(FailureCode::Tun, "no TUN", "load the module"));
    let fake = Fake::showing(failed);
    assert!(fake.run(&["status"]).await.succeeded().contains("last failure  no TUN; load the module"));
    assert_eq!(json_of(&fake).await["error"], "no TUN; load the module");

    let mut lost = status(Lifecycle::Started, ControlState::Reconnecting);
    lost.error_message = "the deployment \x1b[2Jis away".into();
    let fake = Fake::showing(lost);
    let done = fake.run(&["status"]).await;
    assert!(done.succeeded().starts_with("started, reconnecting\nproblem  the deployment [2Jis away"), "{done:?}");
}

#[tokio::test]
async fn a_foreign_service_is_shown_too() {
    let mut status = foreign(connected(at(1), at(1)));
    status.peer_update.as_mut().unwrap().upserted_agents[0].last_handshake = Some(at(0));
    let fake = Fake::showing(status);
    let done = fake.run(&["status"]).await;
    assert!(done.succeeded().starts_with("started\nWORKSPACE"), "{done:?}");
    assert!(fake.run(&["workspaces"]).await.succeeded().contains("main.dev.alice.coder"));
    fake.run(&["ping", "dev"]).await.failed(3, &["not codervpnd"]);
}

#[tokio::test]
async fn watch_prints_a_line_a_change_until_interrupted() {
    let fake = Fake::serve(|speaker, asked| {
        let Asked::Status(_) = asked else { panic!("{asked:?}") };
        let speaker = speaker.clone();
        tokio::spawn(async move {
            // The same again is no change.
            for status in [stopped(), status(Lifecycle::Starting, ControlState::Connecting)] {
                speaker.notify(Answer::Status(status)).await.unwrap();
            }
        });
        Act::reply(Answer::Status(stopped()))
    });
    let mut child = fake.codervpn(&["status", "--watch", "--json"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for expected in ["stopped", "starting"] {
        let line = lines.next_line().await.unwrap().unwrap();
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["lifecycle"], expected);
    }
    interrupt(&child).await;
    assert_eq!(lines.next_line().await.unwrap(), None);
    finish(child).await.failed(130, &["interrupted"]);
}

#[tokio::test]
async fn watch_ends_with_the_service() {
    let fake = Fake::serve(|speaker, _| {
        let speaker = speaker.clone();
        tokio::spawn(async move {
            speaker.notify(Answer::Status(connected(at(1), at(1)))).await.unwrap();
            speaker.close();
        });
        Act::reply(Answer::Status(stopped()))
    });
    let done = fake.run(&["status", "--watch"]).await;
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("the service is gone"));
}

#[tokio::test]
async fn a_reader_that_leaves_is_no_error() {
    let fake = Fake::showing(stopped());
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let done = finish(fake.codervpn(&["status"]).stdout(Stdio::from(writer)).spawn().unwrap()).await;
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
}
