//! `stop` and `logout`.

use codervpn_proto::ext::FailureCode;
use codervpn_proto::vpn;

use super::support::{
    Act, Answer, Asked, Fake, Kind, anothers, connected, failure, foreign, seconds_ago, stop_reply, stopped,
};

fn running() -> vpn::Status {
    connected(seconds_ago(1), seconds_ago(1))
}

fn answering(status: vpn::Status, reply: fn() -> Act) -> Fake {
    Fake::with(status, move |asked| match asked {
        Asked::Stop(_) => reply(),
        other => panic!("{other:?}"),
    })
}

#[tokio::test]
async fn stop_tells_what_it_did() {
    let fake = answering(running(), || stop_reply(None, false));
    assert_eq!(fake.run(&["stop"]).await.succeeded(), "stopped\n");
    assert_eq!(fake.kinds(), [Kind::Status, Kind::Stop]);
    let fake = answering(stopped(), || stop_reply(None, true));
    assert_eq!(fake.run(&["down"]).await.succeeded(), "was not running\n");
}

#[tokio::test]
async fn a_refused_stop_is_5_and_a_failed_one_1() {
    let fake = answering(anothers(), || {
        stop_reply(Some(failure(FailureCode::StartedByOtherUser, "started by another user", "")), false)
    });
    fake.run(&["stop"]).await.failed(5, &["started by another user", "what to do"]);
    let fake = answering(running(), || stop_reply(Some(failure(FailureCode::Dns, "resolver stuck", "")), false));
    fake.run(&["stop"]).await.failed(1, &["resolver stuck"]);
}

#[tokio::test]
async fn a_foreign_service_is_stopped_too() {
    let fake = answering(foreign(running()), || {
        Act::reply(Answer::Stop(vpn::StopResponse { success: true, ..Default::default() }))
    });
    assert_eq!(fake.run(&["stop"]).await.succeeded(), "stopped\n");
    let fake = answering(foreign(running()), || {
        Act::reply(Answer::Stop(vpn::StopResponse { error_message: "stuck".into(), ..Default::default() }))
    });
    fake.run(&["stop"]).await.failed(1, &["stuck"]);
}

#[tokio::test]
async fn a_service_that_dies_while_stopping_is_gone() {
    let fake = answering(running(), || Act::HangUp);
    fake.run(&["stop"]).await.failed(2, &["the service is gone"]);
}

#[tokio::test]
async fn logout_forgets_the_token_and_stops_the_tunnel() {
    let fake = answering(running(), || stop_reply(None, false));
    fake.log_in();
    assert_eq!(fake.run(&["logout"]).await.succeeded(), "logged out\n");
    assert!(!fake.session().exists());
    assert_eq!(fake.kinds(), [Kind::Status, Kind::Stop]);
    assert_eq!(fake.run(&["logout"]).await.succeeded(), "was not logged in\n");
}

#[tokio::test]
async fn logout_needs_no_service_and_spares_the_tunnel_of_others() {
    let fake = Fake::nobody();
    fake.log_in();
    assert_eq!(fake.run(&["logout"]).await.succeeded(), "logged out\n");
    assert!(!fake.session().exists());

    let mut elsewhere = running();
    elsewhere.ext.as_mut().unwrap().deployment = "https://other.example.com/".into();
    for status in [anothers(), stopped(), elsewhere] {
        let fake = Fake::showing(status);
        fake.log_in();
        fake.run(&["logout"]).await.succeeded();
        assert_eq!(fake.kinds(), [Kind::Status]);
    }
}
