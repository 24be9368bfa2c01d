//! REST calls: status, bounded bodies, hanging servers, redirects.

use std::time::Duration;

use codervpn_underlay::{Dialer, DialerConfig, HttpError, Phase, Request};
use http::{HeaderName, HeaderValue};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use url::Url;

use crate::support::{Server, canned, read_head, serve, soon};

fn url(server: &Server, path: &str) -> Url {
    Url::parse(&format!("http://{}{path}", server.address)).unwrap()
}

fn dialer() -> Dialer {
    Dialer::new(DialerConfig::default()).unwrap()
}

#[tokio::test]
async fn http_1_to_6_the_request_carries_our_and_the_users_headers() {
    let (sender, mut heads) = mpsc::unbounded_channel();
    let server = serve(move |mut stream| {
        let sender = sender.clone();
        async move {
            sender.send(read_head(&mut stream).await).unwrap();
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        }
    })
    .await;
    let config = DialerConfig {
        headers: vec![(HeaderName::from_static("x-front"), HeaderValue::from_static("yes"))],
        ..DialerConfig::default()
    };
    let request = Request::get(url(&server, "/api/v2/users/me?x=1"))
        .header(HeaderName::from_static("coder-session-token"), HeaderValue::from_static("tok"));
    let response = soon(Dialer::new(config).unwrap().request(&request)).await.unwrap().success().unwrap();
    assert_eq!(&response.body[..], b"ok");
    assert_eq!(response.url, url(&server, "/api/v2/users/me").to_string());
    let head = heads.recv().await.unwrap();
    assert!(head.starts_with("GET /api/v2/users/me?x=1 HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("host: {}\r\n", server.address)), "{head}");
    assert!(head.contains("coder-session-token: tok\r\n") && head.contains("x-front: yes\r\n"), "{head}");
    assert!(!head.to_ascii_lowercase().contains("origin"), "{head}");
}

#[tokio::test]
async fn http_9_error_bodies_are_kept_up_to_a_bound() {
    let body = "x".repeat(200_000);
    let server =
        canned(format!("HTTP/1.1 404 Not Found\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()).await;
    let response = soon(dialer().request(&Request::get(url(&server, "/")))).await.unwrap();
    assert_eq!(response.status, 404);
    assert!(response.cut);
    assert_eq!(response.body.len(), 64 * 1024);
    let error = response.success().unwrap_err();
    assert!(error.to_string().contains("unexpected status code 404"), "{error}");
    assert!(error.to_string().len() < 1000);
}

#[tokio::test]
async fn a_success_that_is_too_long_is_an_error() {
    let server = canned(
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n".iter().copied().chain([b'a'; 100]).collect::<Vec<u8>>(),
    )
    .await;
    let mut request = Request::get(url(&server, "/"));
    request.body_limit = 99;
    let result = soon(dialer().request(&request)).await;
    assert!(matches!(result, Err(HttpError::TooLong { limit: 99, .. })), "{result:?}");
}

#[tokio::test]
async fn http_20_a_server_that_hangs_is_left() {
    let server = serve(|mut stream| async move {
        read_head(&mut stream).await;
        let _ = stream.read(&mut [0; 1]).await;
    })
    .await;
    let mut request = Request::get(url(&server, "/"));
    request.limit = Duration::from_millis(200);
    let result = soon(dialer().request(&request)).await;
    assert!(matches!(result, Err(HttpError::Timeout { phase: Phase::Response, .. })), "{result:?}");
}

#[tokio::test]
async fn what_is_not_http_is_named() {
    let server = canned(b"SSH-2.0-OpenSSH_9.6\r\n".to_vec()).await;
    let result = soon(dialer().request(&Request::get(url(&server, "/")))).await;
    assert!(matches!(result, Err(HttpError::Protocol { .. })), "{result:?}");
    let server = canned(Vec::new()).await;
    let result = soon(dialer().request(&Request::get(url(&server, "/")))).await;
    assert!(matches!(result, Err(HttpError::Broken { .. })), "{result:?}");
}

#[tokio::test]
async fn http_18_a_foreign_redirect_names_its_target() {
    let server =
        canned(b"HTTP/1.1 307 x\r\nLocation: https://real.example\r\nContent-Length: 0\r\n\r\n".to_vec()).await;
    let result = soon(dialer().request(&Request::get(url(&server, "/api/v2/users/me")))).await;
    let Err(HttpError::Redirect { location, .. }) = result else { panic!("{result:?}") };
    assert_eq!(location, "https://real.example/");
}
