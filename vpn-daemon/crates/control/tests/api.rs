//! REST and dials against small servers on loopback: every outcome of `control-plane.md` 1.6 to 1.8, and its text.
#![allow(clippy::unwrap_used)] // a test that cannot go on fails

use std::sync::{Arc, Mutex};
use std::time::Duration;

use codervpn_control::api::{Api, ApiError, BuildInfo, Deployment, Telemetry, Unauthorized};
use codervpn_control::controller::Dial;
use codervpn_control::{ControllerRole, WebSocketDialer};
use codervpn_underlay::{Dialer, DialerConfig};
use codervpn_wire::derp_map::RegionId;
use secrecy::SecretString;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;
use uuid::Uuid;

const TOKEN: &str = "MARKERaaaa-bbbbbbbbbbbbbbbbbbbbbb";
const SIGNED_OUT: &str = "You are signed out or your session has expired. Please sign in again to continue.";
const INTERNAL: &str = "An internal error occurred. Please try again or contact the system administrator.";

/// Answers of a server by path, and the heads of the requests it got.
struct Site {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Site {
    /// `answers`: beginning of the path, whole response.
    async fn new(answers: Vec<(&'static str, String)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    if stream.read(&mut byte).await.unwrap_or(0) == 0 {
                        break;
                    }
                    head.push(byte[0]);
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                seen.lock().unwrap().push(head);
                let answer =
                    answers.iter().find(|(start, _)| path.starts_with(start)).map(|(_, answer)| answer.clone());
                let answer = answer.unwrap_or_else(|| coder(404, r#"{"message":"Route not found."}"#));
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        });
        Self { url, requests }
    }

    fn api(&self) -> Api {
        api(&self.url)
    }
}

fn api(url: &str) -> Api {
    let dialer = Dialer::new(DialerConfig::default()).unwrap();
    Api::new(Deployment::parse(url).unwrap(), SecretString::from(TOKEN), dialer)
}

fn response(status: u16, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status} X\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

fn coder(status: u16, body: &str) -> String {
    let headers = "Content-Type: application/json; charset=utf-8\r\nX-Coder-Build-Version: v2.26.0-devel+f80a7ca04\r\n";
    response(status, headers, body)
}

fn html(status: u16) -> String {
    response(status, "Content-Type: text/html\r\n", "<!doctype html><title>Welcome</title>")
}

fn message(text: &str) -> String {
    coder(401, &serde_json::json!({"message": text, "detail": "why"}).to_string())
}

const USER: &str = r#"{"id":"a774ba76-d665-4271-8dc1-106fc8d4b9eb","username":"alice","later":1}"#;

async fn dial(api: Api) -> ApiError {
    let dialer = WebSocketDialer::new(Arc::new(api), ControllerRole::Client { owner: Uuid::nil() });
    dialer.dial(Some(&SecretString::from("RESUME-MARKER"))).await.err().expect("refused")
}

/// The recorded answers of a real server.
#[tokio::test]
async fn recorded_answers_are_read() {
    let trace = include_str!("data/a2-rest-calls.txt");
    let answers: Vec<String> = trace
        .lines()
        .filter(|line| line.contains(" S>C hex="))
        .map(|line| {
            let hex = line.split("hex=").nth(1).unwrap().as_bytes();
            let bytes = hex.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap());
            String::from_utf8(bytes.collect()).unwrap()
        })
        .collect();
    let site =
        Site::new(vec![("/api/v2/users/me", answers[0].clone()), ("/api/v2/workspaceagents", answers[1].clone())])
            .await;
    let api = site.api().with_telemetry(Telemetry { device_id: "d1".into(), ..Default::default() });
    let user = api.user().await.unwrap();
    assert_eq!(
        (user.id.to_string().as_str(), user.username.as_str()),
        ("a774ba76-d665-4271-8dc1-106fc8d4b9eb", "alice")
    );
    let settings = api.connection_settings().await.unwrap();
    assert_eq!(settings.hostname_suffix, "coder");
    assert!(!settings.disable_direct_connections && !settings.derp_force_websockets);
    // CC-46: the relay is reached as the deployment is.
    let node = &settings.derp_map.regions[&RegionId::new(999).unwrap()].nodes[0];
    let port: u16 = site.url.rsplit(':').next().unwrap().parse().unwrap();
    assert_eq!((node.host.as_str(), node.derp_port, node.force_http), ("127.0.0.1", Some(port), true));
    assert_eq!(api.server_version().as_deref(), Some("v2.26.0-devel+f80a7ca04"));
    let heads = site.requests.lock().unwrap().join("\n").to_ascii_lowercase();
    assert_eq!(heads.matches(&format!("coder-session-token: {}", TOKEN.to_ascii_lowercase())).count(), 2);
    assert!(heads.contains(r#"coder-desktop-telemetry: {"device_id":"d1","device_os":"","coder_desktop_version":""}"#));
    assert!(!format!("{api:?}").contains("MARKER"));
}

/// 1.2.2: member names in any case, unknown members, the second region of the specification's example.
#[tokio::test]
async fn connection_settings_tolerate_what_go_tolerates() {
    let body = r#"{"derp_map":{"HOMEPARAMS":{"regionScore":{"7":0.5}},"regions":{"7":{"regionid":7,"RegionCODE":"x","New":1,
        "Nodes":[{"Name":"7a","RegionID":7,"HostName":"relay.example.com","DERPPort":8443,"STUNPort":-1}]},"broken":1}},
        "hostname_suffix":""}"#;
    let site = Site::new(vec![("/", coder(200, body))]).await;
    let settings = site.api().connection_settings().await.unwrap();
    let region = &settings.derp_map.regions[&RegionId::new(7).unwrap()];
    assert_eq!((region.code.as_str(), region.nodes[0].host.as_str()), ("x", "relay.example.com"));
    assert_eq!((region.nodes[0].derp_port, region.nodes[0].stun_port), (Some(8443), None));
    assert_eq!(settings.derp_map.score(region.id), 0.5);
    assert_eq!(settings.hostname_suffix, "coder");
    let site = Site::new(vec![("/", coder(200, r#"{"derp_map":null}"#))]).await;
    let error = site.api().connection_settings().await.unwrap_err();
    assert!(error.to_string().contains("no relay map"), "{error}");
}

/// What is not coderd is called so, whatever it says.
#[tokio::test]
async fn other_servers_are_recognised() {
    let answers = [
        html(200),
        html(404),
        html(401),
        response(200, "", ""),
        response(200, "Content-Type: application/json\r\n", r#"{"users":[]}"#),
        response(200, "Content-Type: application/json\r\n", "42"),
        coder(200, r#"{"id":"no uuid","username":"x"}"#),
        "SSH-2.0-OpenSSH_9.9\r\n".to_owned(),
    ];
    for answer in answers {
        let site = Site::new(vec![("/", answer.clone())]).await;
        let error = site.api().user().await.unwrap_err();
        assert!(matches!(error, ApiError::NotCoder { .. }), "{answer}\n{error:?}");
        assert!(error.to_string().contains("does not answer like a Coder server"), "{error}");
        assert!(!format!("{error} {error:?}").contains("MARKER"));
    }
}

/// TR-59, HTTP-23: the table of 1.6 over the three endpoints.
#[tokio::test]
async fn tr_59_a_401_is_read_by_text_and_endpoint() {
    let inactive = "User is not active (status = \"suspended\"). Contact an admin to reactivate your account.";
    let other = "API key or external proxy authentication required, but none provided";
    let table = [
        (SIGNED_OUT, Unauthorized::SignedOut),
        ("You are signed out. Come back.", Unauthorized::SignedOut),
        (inactive, Unauthorized::Inactive),
        (INTERNAL, Unauthorized::Outage),
        (other, Unauthorized::Unknown),
        ("something new", Unauthorized::Unknown),
    ];
    for (text, wanted) in table {
        let site = Site::new(vec![("/api/v2/", message(text))]).await;
        let user = site.api().user().await.unwrap_err();
        let dialed = dial(site.api()).await;
        for error in [user, dialed] {
            let ApiError::Unauthorized { class, .. } = &error else { panic!("{error:?}") };
            assert_eq!(*class, wanted, "{text}");
            assert_eq!(error.is_permanent(), matches!(wanted, Unauthorized::SignedOut | Unauthorized::Inactive));
            if wanted == Unauthorized::Outage {
                assert!(!error.to_string().contains("log in"), "{error}");
            }
        }
    }
    // The connection endpoint's own text says nothing: users/me is asked, once.
    for (user, wanted) in [
        (coder(200, USER), Unauthorized::Unknown),
        (message(SIGNED_OUT), Unauthorized::SignedOut),
        (message(INTERNAL), Unauthorized::Outage),
        (html(502), Unauthorized::Unknown),
    ] {
        let site = Site::new(vec![("/api/v2/users/me", user), ("/api/v2/workspaceagents", message(other))]).await;
        let error = site.api().connection_settings().await.unwrap_err();
        assert!(matches!(&error, ApiError::Unauthorized { class, .. } if *class == wanted), "{wanted:?}: {error:?}");
        assert_eq!(site.requests.lock().unwrap().len(), 2);
    }
    let refused = r#"{"message":"Invalid resume token","detail":"d","validations":[{"field":"resume_token","detail":"Invalid resume token"}]}"#;
    let site = Site::new(vec![("/api/v2/tailnet", coder(401, refused))]).await;
    let error = dial(site.api()).await;
    assert!(error.is_refused_resume_token() && !error.is_permanent());
    let head = site.requests.lock().unwrap()[0].clone();
    assert!(head.starts_with("GET /api/v2/tailnet?resume_token=RESUME-MARKER&version=2.3 HTTP/1.1"), "{head}");
    assert!(!format!("{error} {error:?}").contains("MARKER"), "HTTP-8");
}

/// TR-26, HTTP-12, HTTP-14, HTTP-15 and the rest of 1.8.
#[tokio::test]
async fn tr_26_statuses_of_a_dial() {
    let version = |detail: &str| {
        coder(
            400,
            &serde_json::json!({"message": "Unknown or unsupported API version",
            "validations": [{"field": "version", "detail": detail}]})
            .to_string(),
        )
    };
    let too_old = "server is at version 2.2, behind requested minor version 2.3";
    let limited = response(
        429,
        "Content-Type: application/json\r\nX-Coder-Build-Version: v2\r\nRetry-After: 600\r\n",
        r#"{"message":"You've been rate limited for sending more than 512 requests in 1m0s."}"#,
    );
    let table = [
        (version(too_old), true, "2.18"),
        (version(too_old), true, too_old),
        (version("version 2.3 is no longer supported"), true, "install a newer version"),
        (coder(403, r#"{"message":"Forbidden."}"#), true, "Forbidden."),
        (coder(404, r#"{"message":"Route not found."}"#), true, "too old: it has no /api/v2/tailnet"),
        (coder(409, r#"{"message":"Non-browser connections are disabled for your deployment."}"#), true, "browsers"),
        (coder(500, r#"{"message":"Internal error preparing sql filter."}"#), true, "sql filter"),
        (limited, false, "rate limited"),
        (html(502), false, "not available at the moment"),
        (html(503), false, "unexpected status code 503"),
        (html(404), true, "does not answer like a Coder server"),
        (html(200), false, "does not answer like a Coder server"),
    ];
    for (answer, permanent, text) in table {
        let site = Site::new(vec![("/", answer.clone())]).await;
        let error = dial(site.api()).await;
        assert_eq!(error.is_permanent(), permanent, "{answer}\n{error:?}");
        assert!(error.to_string().contains(text), "{text:?} not in {error}");
        assert_eq!(error.retry_after(), answer.contains(" 429 ").then_some(Duration::from_secs(60)));
    }
}

/// TR-66, HTTP-24: the library's text line, then coderd's JSON, all as text/plain.
#[tokio::test]
async fn tr_66_a_refused_upgrade_is_read_behind_its_first_line() {
    let headers = "Content-Type: text/plain; charset=utf-8\r\nX-Coder-Build-Version: v2\r\n";
    let body = "WebSocket protocol violation: Connection header does not contain Upgrade\n{\"message\":\"Failed to accept websocket.\",\"detail\":\"more\"}";
    let site = Site::new(vec![("/", response(426, headers, body))]).await;
    let text = dial(site.api()).await.to_string();
    assert!(text.contains("unexpected status code 426: Failed to accept websocket.\nError: more"), "{text}");
    let site = Site::new(vec![("/", response(403, headers, "request Origin is not authorized\n"))]).await;
    let error = dial(site.api()).await;
    assert!(error.is_permanent() && error.to_string().contains("Origin is not authorized"), "{error}");
}

/// TR-44, HTTP-18.
#[tokio::test]
async fn tr_44_a_foreign_redirect_never_sees_the_token() {
    let elsewhere = Site::new(vec![("/", coder(200, USER))]).await;
    let redirect = response(307, &format!("Location: {}\r\n", elsewhere.url), "");
    let site = Site::new(vec![("/", redirect)]).await;
    for error in [site.api().user().await.unwrap_err(), dial(site.api()).await] {
        assert!(matches!(error, ApiError::Redirect { .. }), "{error:?}");
        assert!(error.to_string().contains(elsewhere.url.as_str()), "{error}");
        assert!(error.is_permanent());
    }
    assert!(elsewhere.requests.lock().unwrap().is_empty());
}

/// TR-68, HTTP-20: a server that takes the connection and never answers, on REST and on the dial.
#[tokio::test(start_paused = true)]
async fn tr_68_a_server_that_hangs_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let user = timeout(Duration::from_secs(31), api(&url).user()).await.expect("within the header limit").unwrap_err();
    let dialed = timeout(Duration::from_secs(31), dial(api(&url))).await.expect("within the header limit");
    for error in [user, dialed] {
        assert!(matches!(error, ApiError::Unreachable { .. }) && !error.is_permanent(), "{error:?}");
        assert!(error.to_string().contains("timed out"), "{error}");
        assert!(!error.to_string().contains("MARKER"));
    }
}

#[tokio::test]
async fn nothing_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = api(&url).user().await.unwrap_err();
    assert!(error.to_string().contains("nothing listens there; check the deployment URL"), "{error}");
}

#[test]
fn http_1_2_urls() {
    let table = [
        ("https://h/base?x=1#f", "https://h", "wss://h/api/v2/tailnet"),
        (" http://h:3000/ ", "http://h:3000", "ws://h:3000/api/v2/tailnet"),
        ("https://h:443", "https://h", "wss://h/api/v2/tailnet"),
        ("http://[::1]:80/a", "http://[::1]", "ws://[::1]/api/v2/tailnet"),
    ];
    for (text, shown, websocket) in table {
        let deployment = Deployment::parse(text).unwrap();
        assert_eq!(deployment.to_string(), shown);
        assert_eq!(deployment.websocket_url("/api/v2/tailnet").as_str(), websocket);
    }
    assert_eq!(Deployment::parse("http://[::1]:80/a").unwrap().host(), "::1");
    assert_eq!(Deployment::parse("https://h").unwrap().port(), 443);
    for text in ["", "coder.example.com", "ftp://h", "https://", "https://user:secret@h", "https://user@h"] {
        let error = Deployment::parse(text).unwrap_err();
        assert!(error.to_string().contains("https://"), "{text}: {error}");
        assert!(!error.to_string().contains("secret"));
    }
}

#[test]
fn http_3_the_hint_about_versions() {
    let info = |version: &str| BuildInfo { version: version.into(), upgrade_message: String::new() };
    for (version, old) in [
        ("v2.17.9", true),
        ("v2.18.0", false),
        ("v2.26.0-devel+f80a7ca04", false),
        ("v0.27.1", true),
        ("v3.0", false),
        ("devel", false),
        ("", false),
    ] {
        assert_eq!(info(version).is_too_old(), old, "{version}");
    }
}
