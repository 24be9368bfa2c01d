//! `start`: codervpn-protocol 6.2 and 11, product contract 1.

use std::sync::Mutex;

use codervpn_proto::ext::{self, ControlState, FailureCode};
use codervpn_proto::rpc::Service;
use codervpn_proto::speaker::Speaker;
use codervpn_proto::vpn::status::Lifecycle;
use codervpn_proto::vpn::{self, Status};

use super::support::{
    Act, Answer, Asked, Fake, Kind, TOKEN, URL, anothers, connected, failure, finish, foreign, interrupt, is_root,
    seconds_ago, start_reply, status, stop_reply, stopped,
};

fn running() -> Status {
    connected(seconds_ago(1), seconds_ago(1))
}

/// Shows these states, the first until the start, the last from then on.
fn starting(before: Status, after: Status, act: impl Fn(&Speaker<Service>) -> Act + Send + Sync + 'static) -> Fake {
    let now = Mutex::new(before);
    let fake = Fake::serve(move |speaker, asked| match asked {
        Asked::Status(_) => Act::reply(Answer::Status(now.lock().unwrap().clone())),
        Asked::Start(_) => {
            now.lock().unwrap().clone_from(&after);
            act(speaker)
        }
        Asked::Stop(_) => stop_reply(None, false),
        Asked::Ext(_) => panic!("{asked:?}"),
    });
    fake.log_in();
    fake
}

fn later(speaker: &Speaker<Service>, statuses: Vec<Status>) {
    let speaker = speaker.clone();
    tokio::spawn(async move {
        for status in statuses {
            speaker.notify(Answer::Status(status)).await.unwrap();
        }
    });
}

#[tokio::test]
async fn start_returns_when_connected() {
    let connecting = status(Lifecycle::Started, ControlState::Connecting);
    let fake = starting(stopped(), connecting.clone(), move |speaker| {
        let progress = vpn::StartProgress { stage: 0, download_progress: None };
        speaker.try_notify(Answer::StartProgress(progress)).unwrap();
        speaker.try_notify(Answer::Status(status(Lifecycle::Starting, ControlState::Connecting))).unwrap();
        later(speaker, vec![connecting.clone(), running()]);
        start_reply(None)
    });
    let done = fake.run(&["start"]).await;
    let expected = "connected to https://coder.example.com as alice\nsuffix      coder\nworkspaces  2 (1 running)\n";
    assert_eq!((done.succeeded(), done.stderr.as_str()), (expected, ""));
    let Some(Asked::Start(request)) = fake.asked().into_iter().find(|asked| matches!(asked, Asked::Start(_))) else {
        panic!("no start");
    };
    assert_eq!((request.coder_url.as_str(), request.api_token.as_str()), (URL, TOKEN));
    assert_eq!((request.device_id.as_str(), request.tunnel_file_descriptor), ("", 0));
}

#[tokio::test]
async fn a_second_start_is_harmless() {
    let fake = starting(running(), running(), |_| {
        let ext = ext::StartResponseExt { failure: None, already_started: true };
        Act::reply(Answer::Start(vpn::StartResponse { success: true, ext: Some(ext), ..Default::default() }))
    });
    assert!(fake.run(&["up"]).await.succeeded().contains("as alice, as before\n"));
}

#[tokio::test]
async fn without_a_connection_in_time_the_start_goes_on() {
    let mut waiting = status(Lifecycle::Started, ControlState::Connecting);
    waiting.ext.as_mut().unwrap().control_error =
        Some(failure(FailureCode::Unreachable, "coder.example.com refuses connections", ""));
    let fake = starting(stopped(), waiting, |_| start_reply(None));
    let done = fake.run(&["start", "--timeout", "300ms"]).await;
    done.failed(1, &["started, not connected yet: coder.example.com refuses connections; still trying"]);
    assert!(!fake.kinds().contains(&Kind::Stop));

    let fake = starting(stopped(), status(Lifecycle::Starting, ControlState::Connecting), |_| Act::Ignore);
    fake.run(&["start", "--timeout", "300ms"]).await.failed(1, &["did not answer within 0.3 s", "still trying"]);
    assert!(!fake.kinds().contains(&Kind::Stop));
}

#[tokio::test]
async fn failures_of_the_start_have_their_exit_codes() {
    for (code, exit) in [
        (FailureCode::Unauthorized, 1),
        (FailureCode::ServerTooOld, 1),
        (FailureCode::Tun, 1),
        (FailureCode::PermissionDenied, 5),
        (FailureCode::StartedByOtherUser, 5),
    ] {
        let fake =
            starting(stopped(), stopped(), move |_| start_reply(Some(failure(code, "it went wrong", "mend it"))));
        fake.run(&["start"]).await.failed(exit, &["error: it went wrong", "what to do: mend it"]);
    }
}

#[tokio::test]
async fn a_refusal_after_the_reply_ends_the_wait() {
    let mut refused = status(Lifecycle::Started, ControlState::Refused);
    refused.ext.as_mut().unwrap().control_error = Some(failure(FailureCode::Unauthorized, "the token has expired", ""));
    let fake = starting(stopped(), refused, |_| start_reply(None));
    fake.run(&["start"]).await.failed(1, &["the token has expired", "codervpn login"]);

    let mut failed = stopped();
    failed.ext.as_mut().unwrap().last_failure = Some(failure(FailureCode::Tun, "the device is gone", ""));
    let fake = starting(stopped(), failed, |_| start_reply(None));
    fake.run(&["start"]).await.failed(1, &["started and stopped again: the device is gone"]);
}

#[tokio::test]
async fn an_old_broadcast_is_not_taken_for_a_failure() {
    // a status is repeated 250 ms later, which may be after the reply.
    let fake = starting(stopped(), status(Lifecycle::Started, ControlState::Connecting), |speaker| {
        let speaker = speaker.clone();
        tokio::spawn(async move {
            speaker.notify(Answer::Status(stopped())).await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            speaker.notify(Answer::Status(running())).await.unwrap();
        });
        start_reply(None)
    });
    assert!(fake.run(&["start"]).await.succeeded().starts_with("connected"));
}

#[tokio::test]
async fn the_tunnel_of_another_user_gets_no_token() {
    let fake = Fake::showing(anothers());
    fake.log_in();
    fake.run(&["start"]).await.failed(5, &["started by another user", "root"]);
    assert_eq!(fake.kinds(), [Kind::Status]);
}

#[tokio::test]
async fn without_a_login_nothing_is_asked() {
    let fake = Fake::showing(stopped());
    fake.run(&["start"]).await.failed(1, &["not logged in", "codervpn login URL"]);
    if is_root() {
        let done = finish(fake.codervpn(&["start"]).env("SUDO_UID", "1000").spawn().unwrap()).await;
        done.failed(1, &["log in as root, or run without sudo"]);
    }
    assert_eq!(fake.kinds(), []);
}

#[tokio::test]
async fn a_foreign_service_is_started_by_its_reply() {
    let reply = |success, text: &str| {
        Act::reply(Answer::Start(vpn::StartResponse { success, error_message: text.into(), ext: None }))
    };
    let fake = starting(foreign(stopped()), foreign(running()), move |_| reply(true, ""));
    let done = fake.run(&["start"]).await;
    assert!(done.succeeded().starts_with("started"), "{done:?}");
    let fake = starting(foreign(stopped()), foreign(stopped()), move |_| reply(false, "get user: 401"));
    fake.run(&["start"]).await.failed(1, &["get user: 401"]);
}

#[tokio::test]
async fn ctrl_c_while_starting_sends_stop() {
    let fake = starting(stopped(), status(Lifecycle::Starting, ControlState::Connecting), |_| Act::Ignore);
    let child = fake.codervpn(&["start"]).spawn().unwrap();
    fake.asked_for(2).await;
    interrupt(&child).await;
    finish(child).await.failed(130, &["interrupted"]);
    assert_eq!(fake.kinds(), [Kind::Status, Kind::Start, Kind::Stop]);
}

#[tokio::test]
async fn ctrl_c_while_connecting_sends_stop() {
    let fake = starting(stopped(), status(Lifecycle::Started, ControlState::Connecting), |_| start_reply(None));
    let child = fake.codervpn(&["start"]).spawn().unwrap();
    fake.asked_for(3).await;
    interrupt(&child).await;
    finish(child).await.failed(130, &["interrupted"]);
    assert_eq!(fake.kinds().last(), Some(&Kind::Stop));
}

#[tokio::test]
async fn ctrl_c_spares_a_tunnel_that_ran_before() {
    let reconnecting = || status(Lifecycle::Started, ControlState::Reconnecting);
    let fake = starting(reconnecting(), reconnecting(), |_| {
        let ext = ext::StartResponseExt { failure: None, already_started: true };
        Act::reply(Answer::Start(vpn::StartResponse { success: true, ext: Some(ext), ..Default::default() }))
    });
    let child = fake.codervpn(&["start"]).spawn().unwrap();
    fake.asked_for(3).await;
    interrupt(&child).await;
    finish(child).await.failed(130, &["interrupted"]);
    assert!(!fake.kinds().contains(&Kind::Stop));
}

#[tokio::test]
async fn a_service_that_dies_while_starting_is_gone() {
    let fake = starting(stopped(), stopped(), |_| Act::HangUp);
    fake.run(&["start"]).await.failed(2, &["the service is gone", "journalctl"]);
    // After the reply too.
    let fake = starting(stopped(), status(Lifecycle::Started, ControlState::Connecting), |speaker| {
        let speaker = speaker.clone();
        tokio::spawn(async move {
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            speaker.abort();
        });
        start_reply(None)
    });
    fake.run(&["start"]).await.failed(2, &["the service is gone"]);
}

#[tokio::test]
async fn names_that_do_not_work_are_warned_about() {
    let mut degraded = running();
    let dns = degraded.ext.as_mut().unwrap().dns.as_mut().unwrap();
    dns.state = ext::DnsState::Degraded.into();
    dns.text = "another program rewrites /etc/resolv.conf".into();
    let fake = starting(stopped(), degraded, |_| start_reply(None));
    let done = fake.run(&["start"]).await;
    assert!(done.succeeded().starts_with("connected"));
    assert!(done.stderr.contains("warning: names do not work in every program: another program"), "{done:?}");
}

#[tokio::test]
async fn a_login_others_can_read_is_warned_about() {
    use std::os::unix::fs::PermissionsExt as _;
    let fake = starting(stopped(), running(), |_| start_reply(None));
    std::fs::set_permissions(fake.session(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let done = fake.run(&["start"]).await;
    done.succeeded();
    assert!(done.stderr.contains("warning: others can read your session token"), "{done:?}");
}
