//! `login`: where the token comes from, who checks it, where it is kept. Product contract 1, dns-and-os 5.4.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use codervpn_proto::ext::client_ext::Request;
use codervpn_proto::ext::service_ext::Reply;
use codervpn_proto::ext::{self, FailureCode};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

use super::support::{
    Act, Asked, Fake, Kind, PROGRAM, TOKEN, URL, ext_reply, failure, finish, foreign, is_root, stopped,
};

fn checking(reply: fn() -> Reply) -> Fake {
    Fake::with(stopped(), move |asked| match asked {
        Asked::Ext(ext::ClientExt { request: Some(Request::Check(_)) }) => ext_reply(reply()),
        other => panic!("{other:?}"),
    })
}

fn accepted() -> Reply {
    Reply::Check(ext::CheckReply {
        url: URL.into(),
        server_version: "v2.30.0".into(),
        user: "alice".into(),
        warnings: vec!["the certificate expires in 3 days".into()],
    })
}

fn stored(fake: &Fake) -> Value {
    serde_json::from_slice(&std::fs::read(fake.session()).unwrap()).unwrap()
}

fn sent(fake: &Fake) -> ext::CheckRequest {
    match fake.asked().pop() {
        Some(Asked::Ext(ext::ClientExt { request: Some(Request::Check(check)) })) => check,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_checked_login_is_stored_for_its_user_alone() {
    let fake = checking(accepted);
    let done = fake.run_fed(&["login", "coder.example.com", "--token-file", "-"], &format!("{TOKEN}\n")).await;
    assert_eq!(done.succeeded(), "logged in to https://coder.example.com as alice (Coder v2.30.0)\n");
    assert!(done.stderr.contains("warning: the certificate expires"), "{done:?}");
    let check = sent(&fake);
    assert_eq!((check.url.as_str(), check.token.as_str()), (URL, TOKEN));
    assert_eq!(stored(&fake), serde_json::json!({"url": URL, "token": TOKEN}));
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&fake.session()), mode(fake.session().parent().unwrap())), (0o600, 0o700));
    assert_eq!(std::fs::read_dir(fake.session().parent().unwrap()).unwrap().count(), 1);
}

#[tokio::test]
async fn the_token_comes_from_flag_environment_or_credential() {
    let fake = checking(accepted);
    let file = fake.dir().join("coder-session-token");
    std::fs::write(&file, format!("{TOKEN}\r\n")).unwrap();
    let path = file.to_str().unwrap();
    fake.run(&["login", URL, "--token-file", path]).await.succeeded();
    assert_eq!(sent(&fake).token, TOKEN);
    for (variable, value) in
        [("CODER_SESSION_TOKEN_FILE", path), ("CREDENTIALS_DIRECTORY", fake.dir().to_str().unwrap())]
    {
        std::fs::remove_file(fake.session()).unwrap();
        finish(fake.codervpn(&["login", URL]).env(variable, value).spawn().unwrap()).await.succeeded();
        assert_eq!(stored(&fake)["token"], TOKEN);
    }
}

#[tokio::test]
async fn bad_tokens_do_not_reach_the_service() {
    let fake = Fake::showing(stopped());
    for (input, text) in [
        ("", "holds no session token"),
        ("\n", "holds no session token"),
        ("two MARKERsecret-token words", "characters that no token has"),
    ] {
        fake.run_fed(&["login", URL, "--token-file", "-"], input).await.failed(1, &[text]);
    }
    fake.run(&["login", URL, "--token-file", "/nowhere"])
        .await
        .failed(1, &["cannot read the session token", "/nowhere"]);
    let big = "x".repeat(64 * 1024);
    fake.run_fed(&["login", URL, "--token-file", "-"], &big).await.failed(1, &["too large"]);
    assert!(!fake.session().exists());
}

#[tokio::test]
async fn what_the_deployment_says_is_passed_on() {
    for (reply, code, texts) in [
        (
            (|| Reply::Failed(failure(FailureCode::Unauthorized, "the deployment does not accept the token", "")))
                as fn() -> Reply,
            1,
            &["does not accept the token", "codervpn login"][..],
        ),
        (
            || Reply::Failed(failure(FailureCode::NotCoder, "it is a web page", "")),
            1,
            &["it is a web page", "check the URL"],
        ),
        (
            || Reply::Failed(failure(FailureCode::ServerTooOld, "2.10 lacks updates", "")),
            1,
            &["2.10 lacks updates", "upgraded"],
        ),
        (
            || Reply::Failed(failure(FailureCode::Tls, "issued by CN=Corp", "set network.extra_ca = FILE")),
            1,
            &["issued by CN=Corp", "what to do: set network.extra_ca = FILE"],
        ),
        (|| Reply::Failed(failure(FailureCode::PermissionDenied, "not for you", "")), 5, &["not for you"]),
    ] {
        let fake = checking(reply);
        fake.run_fed(&["login", URL, "--token-file", "-"], TOKEN).await.failed(code, texts);
        assert!(!fake.session().exists());
    }
}

#[tokio::test]
async fn without_a_service_only_no_check_stores() {
    let fake = Fake::nobody();
    let args = ["login", "https://coder.example.com/?x=y", "--token-file", "-", "--no-check"];
    fake.run_fed(&args[..4], "").await.failed(2, &["does not run", "--no-check"]);
    assert!(!fake.session().exists());
    let done = fake.run_fed(&args, TOKEN).await;
    assert_eq!(done.succeeded(), "stored the login for https://coder.example.com without checking it\n");
    assert_eq!(stored(&fake), serde_json::json!({"url": URL, "token": TOKEN}));
}

#[tokio::test]
async fn plain_http_is_warned_about_beyond_this_machine() {
    let fake = Fake::nobody();
    let args = |url| ["login", url, "--no-check", "--token-file", "-"];
    let done = fake.run_fed(&args("http://coder.example.com"), TOKEN).await;
    done.succeeded();
    assert!(done.stderr.contains("warning: http://coder.example.com/ is plain http"), "{done:?}");
    let done = fake.run_fed(&args("http://127.0.0.1:3000"), TOKEN).await;
    done.succeeded();
    assert_eq!(done.stderr, "");
}

#[tokio::test]
async fn a_foreign_service_cannot_check() {
    let fake = Fake::showing(foreign(stopped()));
    fake.run_fed(&["login", URL, "--token-file", "-"], TOKEN).await.failed(3, &["not codervpnd", "--no-check"]);
    assert_eq!(fake.kinds(), [Kind::Status]);
}

#[tokio::test]
async fn a_service_that_dies_while_checking_stores_nothing() {
    let fake = Fake::with(stopped(), |_| Act::HangUp);
    fake.run_fed(&["login", URL, "--token-file", "-"], TOKEN).await.failed(2, &["the service is gone"]);
    assert!(!fake.session().exists());
}

#[tokio::test]
async fn a_full_or_forbidden_store_is_told() {
    let fake = checking(accepted);
    std::fs::write(fake.dir().join("config"), "in the way").unwrap();
    fake.run_fed(&["login", URL, "--token-file", "-"], TOKEN).await.failed(1, &["cannot store the login in"]);
}

#[tokio::test]
async fn without_a_terminal_the_text_names_the_flag() {
    let fake = Fake::showing(stopped());
    let done = finish(fake.command("setsid", &["-w", PROGRAM, "login", URL]).spawn().unwrap()).await;
    done.failed(64, &["no terminal", "--token-file", "https://coder.example.com/cli-auth"]);
}

/// `script` gives the program a terminal, and prints what would be seen there.
async fn on_a_terminal(fake: &Fake, command: &str, typed: &str) -> (i32, String) {
    let mut child = fake
        .command("script", &["-q", "-e", "-c", command, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // Typed only when asked, as a person does: until then the terminal echoes.
    fake.asked_for(1).await;
    let mut stdout = child.stdout.take().unwrap();
    let mut seen = String::new();
    while !seen.contains("Session token: ") {
        let mut chunk = [0; 1024];
        let read = stdout.read(&mut chunk).await.unwrap();
        assert_ne!(read, 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&chunk[..read]));
    }
    stdin.write_all(typed.as_bytes()).await.unwrap();
    stdout.read_to_string(&mut seen).await.unwrap();
    let code = child.wait().await.unwrap().code().unwrap();
    (code, seen)
}

#[tokio::test]
async fn the_prompt_does_not_echo_and_says_where_to_get_a_token() {
    let fake = checking(accepted);
    let command = format!("{PROGRAM} login {URL}; stty -a | grep -o -- '-\\?echo '");
    let (code, seen) = on_a_terminal(&fake, &command, &format!("{TOKEN}\r")).await;
    assert_eq!(code, 0, "{seen}");
    assert!(seen.contains("https://coder.example.com/cli-auth"), "{seen}");
    assert!(seen.contains("logged in to https://coder.example.com as alice"), "{seen}");
    assert!(!seen.contains("MARKER"), "{seen}");
    assert!(seen.trim_end().ends_with("echo") && !seen.contains("-echo"), "the terminal echoes again: {seen}");
    assert_eq!(stored(&fake)["token"], TOKEN);
}

#[tokio::test]
async fn ctrl_c_at_the_prompt_leaves_the_terminal_as_it_was() {
    let fake = checking(accepted);
    // The terminal interrupts the shell too, which is to live on.
    let command = format!("trap : INT; {PROGRAM} login {URL}; echo exit=$?; stty -a | grep -o -- '-\\?echo '");
    let (_, seen) = on_a_terminal(&fake, &command, "MARKER\x03").await;
    assert!(seen.contains("exit=130"), "{seen}");
    assert!(seen.trim_end().ends_with("echo") && !seen.contains("-echo"), "{seen}");
    assert!(!seen.contains("MARKER"), "{seen}");
    assert!(!fake.session().exists());
}

/// Plays the service of another user, when the test below runs this program as that user.
#[tokio::test]
async fn service_of_another_user() {
    let Some(socket) = std::env::var_os("CODERVPN_TEST_PLAY_SERVICE") else { return };
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).unwrap();
    println!("listening");
    Fake::serve_on(listener, move |_, asked| match asked {
        Asked::Status(_) => Act::reply(super::support::Answer::Status(stopped())),
        other => {
            std::fs::write(Path::new(&socket).with_extension("sent"), format!("{other:?}")).unwrap();
            Act::HangUp
        }
    })
    .await;
}

#[tokio::test]
async fn the_token_goes_to_root_and_oneself_only() {
    if !is_root() {
        assert!(std::env::var_os("CI").is_none(), "must not be skipped in CI");
        eprintln!("skipped: needs root to play another user");
        return;
    }
    let fake = Fake::nobody();
    std::fs::set_permissions(fake.dir(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let test = std::env::current_exe().unwrap();
    let mut service =
        fake.command(test.to_str().unwrap(), &["--exact", "--nocapture", "login::service_of_another_user"]);
    service.env("CODERVPN_TEST_PLAY_SERVICE", fake.socket()).uid(54_321).gid(54_321);
    let mut service = service.spawn().unwrap();
    let mut said = BufReader::new(service.stdout.take().unwrap()).lines();
    while !said.next_line().await.unwrap().expect("the service ended").contains("listening") {}
    fake.log_in();
    let login = ["login", URL, "--token-file", "-"];
    for done in [fake.run(&["start"]).await, fake.run_fed(&login, TOKEN).await] {
        done.failed(5, &["the user with uid 54321", "neither root nor you", "not sent"]);
    }
    // What needs no token is possible.
    assert_eq!(fake.run(&["status"]).await.succeeded(), "stopped\n");
    assert!(!fake.dir().join("vpn.sent").exists());
}
