//! No service, no right to it, or something else at the socket: product contract 1, codervpn-protocol 2 and 3.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;

use super::support::{Act, Fake, finish, is_root};

#[tokio::test]
async fn without_a_service_the_text_says_how_to_start_it() {
    let fake = Fake::nobody();
    for command in ["status", "stop", "workspaces"] {
        fake.run(&[command]).await.failed(2, &["does not run", "sudo codervpnd serve --allow-user", "systemctl start"]);
    }
    fake.log_in();
    fake.run(&["start"]).await.failed(2, &["does not run"]);
    // The flag wins over the variable.
    fake.run(&["status", "--socket", "/nowhere/vpn.sock"]).await.failed(2, &["/nowhere/vpn.sock"]);
    // A variable set to nothing is not set; whatever is at the usual place, it is not a usage error.
    let done = finish(fake.codervpn(&["status"]).env("CODER_DESKTOP_RPC_SOCKET_PATH", "").spawn().unwrap()).await;
    assert_ne!(done.code, 64, "{done:?}");
}

#[tokio::test]
async fn a_socket_left_by_a_dead_service_is_no_service() {
    let fake = Fake::nobody();
    drop(UnixListener::bind(fake.socket()).unwrap());
    fake.run(&["status"]).await.failed(2, &["nobody answers", "sudo codervpnd serve"]);
}

#[tokio::test]
async fn without_right_to_the_socket_the_text_names_the_group() {
    let fake = Fake::raw(b"", false);
    let mut command = fake.codervpn(&["status"]);
    std::fs::set_permissions(fake.socket(), std::fs::Permissions::from_mode(0o000)).unwrap();
    std::fs::set_permissions(fake.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
    if is_root() {
        command.uid(54_321).gid(54_321);
    }
    let done = finish(command.spawn().unwrap()).await;
    done.failed(5, &["you may not use the socket", "usermod -aG codervpn", "--allow-user"]);
}

#[tokio::test]
async fn a_service_that_hangs_up_before_its_header_refuses_the_user() {
    let fake = Fake::raw(b"", true);
    fake.run(&["status"]).await.failed(5, &["not admitted", "usermod -aG codervpn", "--allow-user"]);
}

#[tokio::test]
async fn r22_other_headers_are_no_service() {
    for (header, text) in [
        (&b"HTTP/1.1 400 Bad Request\r\n"[..], "does not speak CoderVPN"),
        (b"codervpn tunnel 1.3\n", "is not a CoderVPN service"),
        (b"codervpn service 1.x\n", "malformed version"),
        (&[b'x'; 4096], "no end of line"),
        (b"\x1b]0;owned\x07\n", "does not speak CoderVPN"),
    ] {
        let fake = Fake::raw(header, false);
        fake.run(&["status"]).await.failed(3, &[text, "--socket"]);
    }
}

#[tokio::test]
async fn version_9_0_is_a_mismatch() {
    let fake = Fake::raw(b"codervpn service 9.0\n", false);
    fake.run(&["status"]).await.failed(3, &["we speak 1.3", "9.0", "update the older one"]);
}

#[tokio::test]
async fn a_silent_service_is_given_up() {
    let fake = Fake::raw(b"codervpn ser", false);
    fake.run(&["status"]).await.failed(3, &["did not introduce itself in time"]);
}

#[tokio::test]
async fn broken_frames_are_a_mismatch() {
    // A frame of 2 GiB, and one that is no protobuf.
    for bytes in [&b"codervpn service 1.3\n\x80\x00\x00\x00"[..], b"codervpn service 1.3\n\x00\x00\x00\x02\xff\xff"] {
        let fake = Fake::raw(bytes, false);
        fake.run(&["status"]).await.failed(3, &["breaks the protocol"]);
    }
}

#[tokio::test]
async fn a_service_that_dies_is_gone() {
    let fake = Fake::serve(|_, _| Act::HangUp);
    fake.run(&["status"]).await.failed(2, &["the service is gone", "journalctl"]);
    let half = Fake::raw(b"codervpn service 1.3\n\x00\x00\x00\x10half", true);
    half.run(&["status"]).await.failed(2, &["the service is gone"]);
}

#[tokio::test]
async fn usage_errors_are_64() {
    let fake = Fake::nobody();
    for args in [
        &[][..],
        &["fly"],
        &["status", "--wings"],
        &["status", "--watch", "--check"],
        &["start", "--timeout", "soon"],
        &["start", "--timeout", "0"],
        &["login"],
        &["login", "ftp://coder.example.com"],
        &["login", "https://"],
        &["ping"],
        &["ping", "dev", "-c", "0"],
    ] {
        let done = fake.run(args).await;
        assert_eq!((done.code, done.stdout.as_str()), (64, ""), "{args:?}: {done:?}");
    }
    let long = "x".repeat(200);
    fake.run(&["status", "--socket", &long]).await.failed(64, &["cannot be a socket"]);
}

#[tokio::test]
async fn help_and_version_need_no_service() {
    let fake = Fake::nobody();
    for args in [&["--help"][..], &["start", "--help"], &["--version"], &["version"]] {
        assert!(!fake.run(args).await.succeeded().is_empty());
    }
    assert_eq!(fake.run(&["version"]).await.succeeded(), concat!("codervpn ", env!("CARGO_PKG_VERSION"), "\n"));
    let json = fake.run(&["version", "--output", "json"]).await;
    let version: serde_json::Value = serde_json::from_str(json.succeeded()).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}
