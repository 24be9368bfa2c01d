//! S-03, R-26: the session token is in memory and on the way to the deployment, and nowhere else.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use codervpn_proto::ext::{DiagnosticsRequest, client_ext};
use codervpn_testbed::cli::Cli;
use codervpn_testbed::coderd::{Deployment, Fault, Route};
use codervpn_testbed::daemon::{Daemon, Options, start_request};
use codervpn_testbed::netns::Setup;
use rustix::process::Signal;
use uuid::Uuid;

type Result<T = ()> = anyhow::Result<T>;

/// In no other file of this machine.
const MARKER: &str = "Zm4rk3rXq7-T0k3nThatMustNotLeakAnywhereAtAll";
const HEADER: &str = "H3aderValueThatIsSecretToo";

fn clean(what: &str, text: &str) -> Result {
    for secret in [MARKER, HEADER] {
        ensure!(!text.contains(secret), "a secret is in {what}: {text}");
    }
    Ok(())
}

/// Arguments and environments of every process that we may look at.
fn search_processes() -> Result<usize> {
    let mut seen = 0;
    for entry in fs::read_dir("/proc")? {
        let folder = entry?.path();
        if folder.file_name().and_then(|name| name.to_str()).is_none_or(|name| name.parse::<u32>().is_err()) {
            continue;
        }
        for file in ["cmdline", "environ"] {
            // Others end meanwhile, or are not ours to read.
            if let Ok(text) = fs::read(folder.join(file)) {
                clean(&format!("{}", folder.join(file).display()), &String::from_utf8_lossy(&text))?;
                seen += 1;
            }
        }
    }
    Ok(seen)
}

/// Files below `folder` with the marker in them.
fn search_files(folder: &Path, found: &mut Vec<PathBuf>) -> Result {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() && entry.path() != Path::new("/run/host") {
            search_files(&entry.path(), found)?;
        } else if kind.is_file() {
            let text = fs::read(entry.path())?;
            if text.windows(MARKER.len()).any(|part| part == MARKER.as_bytes()) {
                found.push(entry.path());
            }
        }
    }
    Ok(())
}

#[test]
fn s03_the_token_is_nowhere() {
    Setup::new().programs().tun().run(async || -> Result {
        let deployment = Deployment::start().await?;
        let user = deployment.add_user_with(Uuid::new_v4(), "anna", MARKER);
        let workspace = deployment.create_workspace(&user, "dev", &["main"])?;
        let agent = deployment.run_agent(workspace.agents.first().context("an agent")?).await?;
        let url = deployment.url().as_str();
        // Everything that any component would say at all.
        let options = Options { log: "trace", dns: "direct", ..Options::default() };
        let daemon = Daemon::start(&options).await?;
        let client = daemon.client().await?;
        let mut texts = Vec::new();

        // Failures first: their texts are the likeliest place.
        for fault in [
            Fault::status(401, "no"),
            Fault::status(500, "no"),
            Fault::Html { status: 200 },
            Fault::Drop,
            Fault::Redirect { location: "https://elsewhere.example/".into() },
        ] {
            deployment.faults().set(Route::UsersMe, fault);
            let reply = client.start(url, MARKER).await?;
            ensure!(!reply.success, "a start that must fail");
            texts.push(format!("{reply:?}"));
        }
        deployment.faults().clear();
        for wrong in
            [format!("{url}?token={MARKER}"), format!("ftp://u:{MARKER}@127.0.0.1"), "http://127.0.0.1:1".into()]
        {
            let mut request = start_request(&wrong, MARKER);
            request
                .headers
                .push(codervpn_proto::vpn::start_request::Header { name: "X-Secret\n".into(), value: HEADER.into() });
            texts.push(format!("{:?}", client.start_with(request).await?).replace(&wrong, "URL"));
        }

        let cli = Cli::new(daemon.socket())?;
        let login = cli.login(url, MARKER).await?;
        ensure!(login.code == Some(0), "{login:?}");
        texts.push(format!("{login:?}"));
        let mut request = start_request(url, MARKER);
        request
            .headers
            .push(codervpn_proto::vpn::start_request::Header { name: "X-Secret".into(), value: HEADER.into() });
        ensure!(client.start_with(request).await?.success, "start");
        client.connected().await?;
        codervpn_testbed::daemon::echo(agent.address()).await?;
        deployment.drop_connections();
        daemon.signal(Signal::USR1)?;
        daemon.log().line("state").await?;
        for command in ["status", "status --json", "workspaces --json", "version"] {
            texts.push(format!("{:?}", cli.succeeds(command).await?));
        }
        texts.push(format!("{:?}", client.status().await?));
        let dump = client.extension(client_ext::Request::Diagnostics(DiagnosticsRequest::default())).await?;
        texts.push(format!("{dump:?}"));
        ensure!(search_processes()? > 3, "no process was looked at");
        // While it runs, and after a crash.
        let mut found = Vec::new();
        for folder in ["/run", "/var/lib/codervpn"] {
            search_files(Path::new(folder), &mut found)?;
        }
        ensure!(found == [Path::new("/run/home-0/config/codervpn/session")], "{found:?}");
        client.stopped().await?;
        texts.push(daemon.log().text());
        for text in &texts {
            clean("a text", text)?;
        }
        // `trace` was on, so this proves something.
        ensure!(daemon.log().contains("DEBUG"), "the log is not detailed");
        Ok(())
    });
}
