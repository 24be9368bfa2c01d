//! What our deployment answers over HTTP, byte by byte where it matters (control-plane 1.4 to 1.7, 2.1).

use anyhow::{Context as _, ensure};
use codervpn_testbed::coderd::{Deployment, Fault, Route, Standing};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

type Result<T = ()> = anyhow::Result<T>;

/// Status, head in lower case, body.
struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("no JSON: {:?}", self.body))
    }

    fn message(&self) -> Result<String> {
        Ok(self.json()?["message"].as_str().unwrap_or_default().to_owned())
    }
}

/// Sends a request line and headers as they are.
async fn ask(deployment: &Deployment, line: &str, headers: &[(&str, &str)]) -> Result<Reply> {
    let mut stream = TcpStream::connect(deployment.address()).await?;
    let mut request = format!("{line} HTTP/1.1\r\nHost: {}\r\n", deployment.address());
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    if !headers.iter().any(|(name, _)| *name == "Connection") {
        request.push_str("Connection: close\r\n");
    }
    stream.write_all((request + "\r\n").as_bytes()).await?;
    let mut reply = Vec::new();
    while !is_whole(&reply) && stream.read_buf(&mut reply).await? > 0 {}
    let text = String::from_utf8_lossy(&reply).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").with_context(|| format!("no answer: {text:?}"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("a status")?;
    Ok(Reply { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}

/// An upgraded connection stays open, and so does one whose `Connection` does not say `close`.
fn is_whole(reply: &[u8]) -> bool {
    let text = String::from_utf8_lossy(reply);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let head = head.to_ascii_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse::<usize>().ok());
    head.starts_with("http/1.1 101") || length.is_some_and(|length| body.len() >= length)
}

const WEBSOCKET: [(&str, &str); 4] = [
    ("Connection", "keep-alive, Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

fn with<'a>(token: &'a str, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut headers = vec![("Coder-Session-Token", token)];
    headers.extend_from_slice(more);
    headers
}

/// 1.2: what the three calls say, and HTTP-4.
#[tokio::test]
async fn good_answers() -> Result {
    let deployment = Deployment::builder().disable_direct().hostname_suffix(Some("ws.example")).start().await?;
    let user = deployment.add_user("anna");
    let me = ask(&deployment, "GET /api/v2/users/me", &with(user.token(), &[])).await?;
    ensure!((me.status, me.json()?["username"].as_str()) == (200, Some("anna")));
    ensure!(me.json()?["id"] == user.id.to_string());
    ensure!(me.head.contains("x-coder-build-version: v2."), "{}", me.head);
    let bearer = format!("Bearer {}", user.token());
    ensure!(ask(&deployment, "GET /api/v2/users/me", &[("Authorization", &bearer)]).await?.status == 200);

    let connection = ask(&deployment, "GET /api/v2/workspaceagents/connection", &with(user.token(), &[])).await?;
    let connection = connection.json()?;
    ensure!(connection["disable_direct_connections"] == true && connection["derp_force_websockets"] == false);
    ensure!(connection["hostname_suffix"] == "ws.example");
    let region = &connection["derp_map"]["Regions"]["999"];
    ensure!(region["EmbeddedRelay"] == true && region["RegionCode"] == "coder");
    let node = &region["Nodes"][0];
    ensure!(node["DERPPort"] == deployment.address().port() && node["ForceHTTP"] == true && node["STUNPort"] == -1);
    ensure!(node.get("STUNOnly").is_none(), "members that are zero are left out: {node}");

    let info = ask(&deployment, "GET /api/v2/buildinfo", &[]).await?.json()?;
    ensure!(info["agent_api_version"] == "1.0", "{info}");
    let check = ask(&deployment, "GET /derp/latency-check", &[]).await?;
    ensure!((check.status, check.body.as_str()) == (200, ""));
    Ok(())
}

/// The texts of 1.6, row by row.
#[tokio::test]
async fn refusals_say_the_right_words() -> Result {
    const SIGNED_OUT: &str = "You are signed out or your session has expired. Please sign in again to continue.";
    const NO_KEY: &str = "API key or external proxy authentication required, but none provided";
    const OUTAGE: &str = "An internal error occurred. Please try again or contact the system administrator.";
    let deployment = Deployment::start().await?;
    let user = deployment.add_user("anna");
    let (me, connection, tailnet) =
        ("GET /api/v2/users/me", "GET /api/v2/workspaceagents/connection", "GET /api/v2/tailnet?version=2.3");
    let id = user.token().split('-').next().context("a token has an id")?;
    let wrong_secret = format!("{id}-{}", "x".repeat(22));
    for (token, detail) in [
        ("", "Cookie \"coder_session_token\" or query parameter must be provided."),
        ("nonsense", "Invalid API key format: incorrect amount of API key parts, expected 2"),
        ("0123456789-0123456789012345678901", "API key is invalid."),
        (wrong_secret.as_str(), "API key secret is invalid."),
    ] {
        for line in [me, tailnet] {
            let reply = ask(&deployment, line, &with(token, &[])).await?;
            ensure!((reply.status, reply.message()?.as_str()) == (401, SIGNED_OUT), "{}", reply.body);
            ensure!(reply.json()?["detail"] == detail, "{}", reply.body);
            ensure!(reply.head.contains("www-authenticate:"), "{}", reply.head);
        }
        let reply = ask(&deployment, connection, &with(token, &[])).await?;
        ensure!((reply.status, reply.message()?.as_str()) == (401, NO_KEY), "{}", reply.body);
        ensure!(!reply.head.contains("www-authenticate:") && reply.json()?.get("detail").is_none());
    }
    deployment.set_standing(&user, &Standing::Inactive("suspended".into()));
    for line in [me, connection, tailnet] {
        let reply = ask(&deployment, line, &with(user.token(), &[])).await?;
        ensure!(reply.message()?.starts_with("User is not active (status = \"suspended\")."), "{}", reply.body);
    }
    deployment.set_standing(&user, &Standing::Active);
    deployment.set_database_down(true);
    for (line, message) in [(me, OUTAGE), (connection, NO_KEY), (tailnet, OUTAGE)] {
        let reply = ask(&deployment, line, &with(user.token(), &[])).await?;
        ensure!((reply.status, reply.message()?.as_str()) == (401, message), "{}", reply.body);
    }
    deployment.set_database_down(false);
    let reply = ask(&deployment, "GET /api/v2/none", &[]).await?;
    ensure!((reply.status, reply.message()?.as_str()) == (404, "Route not found."));
    ensure!(reply.head.contains("content-type: application/json; charset=utf-8"), "{}", reply.head);
    Ok(())
}

/// 1.5 and 1.7: the order of 401, 400, 401, and the upgrade's own refusals.
#[tokio::test]
async fn the_control_dial_is_judged_in_order() -> Result {
    let deployment = Deployment::start().await?;
    let user = deployment.add_user("anna");
    let bad_everything = "GET /api/v2/tailnet?version=3.0&resume_token=x";
    ensure!(ask(&deployment, bad_everything, &WEBSOCKET).await?.status == 401);
    let reply = ask(&deployment, bad_everything, &with(user.token(), &WEBSOCKET)).await?;
    ensure!((reply.status, reply.message()?.as_str()) == (400, "Unknown or unsupported API version"));
    let validation = &reply.json()?["validations"][0];
    ensure!(validation["field"] == "version", "{validation}");
    ensure!(validation["detail"] == "server is at version 2.6, behind requested major version 3.0", "{validation}");
    let bad_resume = "GET /api/v2/tailnet?version=2.3&resume_token=x";
    let reply = ask(&deployment, bad_resume, &with(user.token(), &WEBSOCKET)).await?;
    ensure!((reply.status, reply.message()?.as_str()) == (401, "Invalid resume token"));
    ensure!(reply.json()?["validations"][0]["field"] == "resume_token", "{}", reply.body);

    let good = "GET /api/v2/tailnet?version=2.3";
    let reply = ask(&deployment, good, &with(user.token(), &[])).await?;
    ensure!(reply.status == 426 && reply.head.contains("upgrade: websocket"), "{}", reply.head);
    // HTTP-24: a line, then JSON.
    let (_, rest) = reply.body.split_once('\n').context("two lines")?;
    ensure!(serde_json::from_str::<Value>(rest)?["message"].is_string() && reply.head.contains("text/plain"));
    let foreign = with(user.token(), &[WEBSOCKET.as_slice(), &[("Origin", "https://evil.example")]].concat());
    ensure!(ask(&deployment, good, &foreign).await?.status == 403);
    let reply = ask(&deployment, "POST /api/v2/tailnet?version=2.3", &with(user.token(), &WEBSOCKET)).await?;
    ensure!(reply.status == 405 && reply.head.contains("allow: get") && reply.body.is_empty(), "{}", reply.head);
    let reply = ask(&deployment, good, &with(user.token(), &WEBSOCKET)).await?;
    // RFC 6455's own example.
    ensure!(reply.status == 101 && reply.head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="));
    Ok(())
}

/// SV-3: each fault is what it says, for as long as it says.
#[tokio::test]
async fn faults_show_and_end() -> Result {
    let deployment = Deployment::start().await?;
    let line = "GET /api/v2/buildinfo";
    deployment.faults().times(Route::BuildInfo, 2, Fault::Html { status: 200 });
    for _ in 0..2 {
        let reply = ask(&deployment, line, &[]).await?;
        ensure!(reply.head.contains("text/html") && reply.body.contains("<html>"), "{}", reply.body);
    }
    ensure!(ask(&deployment, line, &[]).await?.json()?["version"].is_string());
    deployment.faults().set(Route::Any, Fault::RateLimited { retry_after: 60 });
    let reply = ask(&deployment, line, &[]).await?;
    ensure!(reply.status == 429 && reply.head.contains("retry-after: 60"), "{}", reply.head);
    deployment.faults().set(Route::Any, Fault::Drop);
    ensure!(ask(&deployment, line, &[]).await.is_err(), "an answer in spite of everything");
    deployment.faults().clear();
    ensure!(ask(&deployment, line, &[]).await?.status == 200);
    Ok(())
}
