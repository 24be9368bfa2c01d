//! Decides how tests talk to the peers we did not write: the Go program in
//! `tests/foreign`, made of the libraries that real Coder servers and agents
//! use. Its README describes events and commands; here they get types.
//!
//! [`program`] builds it once per change of its sources. Every process writes
//! events to stdout, takes commands on stdin and ends when stdin is closed, so
//! none outlives its [`Process`]. Without Go a test says that it is skipped
//! ([`available`]); in CI that fails.

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

use anyhow::{Context, bail};

use crate::{binaries, skip};

mod process;
mod roles;

pub use process::{Event, PATIENCE, Process};
pub use roles::{
    Agent, Client, Coordinator, CoordinatorOptions, EngineOptions, ListedAgent, Node, PingKind, Pong, Relay,
    RelayOptions, Throughput, Tls, agent_address,
};

/// In an isolated child: the program that its parent has built.
pub const BUILT: &str = "CODERVPN_TEST_FOREIGN";

/// True when the Go peers can be used; says that the test is skipped (in CI:
/// fails) when not. Never true after a failed build: that is an error.
pub fn available() -> bool {
    match program() {
        Ok(_) => true,
        Err(err) if go().is_err() => {
            skip::skip(format!("{err:#}"));
            false
        }
        Err(err) => panic!("tests/foreign: {err:#}"),
    }
}

/// Path of the program, built on the first call when sources have changed.
pub fn program() -> anyhow::Result<&'static Path> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = PROGRAM.get_or_init(|| match std::env::var_os(BUILT) {
        Some(path) => Ok(path.into()),
        None => build().map_err(|err| format!("{err:#}")),
    });
    built.as_deref().map_err(|err| anyhow::anyhow!("{err}"))
}

/// The folder of the Go module.
pub fn sources() -> PathBuf {
    binaries::workspace().join("tests/foreign")
}

/// The oldest Go that builds the peers: from 1.21 on `go` fetches the newer toolchain that `go.mod` asks for from its
/// module proxy.
const OLDEST_GO: (u32, u32) = (1, 21);

/// The `go` command, also where its usual folder is not in `PATH`.
pub fn go() -> anyhow::Result<PathBuf> {
    static GO: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    GO.get_or_init(|| find_go().map_err(|err| format!("{err:#}"))).clone().map_err(anyhow::Error::msg)
}

pub(crate) fn find_go() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let go = std::env::split_paths(&path)
        .chain(["/usr/local/go/bin".into(), "/usr/lib/go/bin".into()])
        .map(|folder| folder.join("go"))
        .find(|go| go.is_file())
        .context("Go is not installed (1.24.6 or newer, or 1.21 with access to its module proxy)")?;
    let out = std::process::Command::new(&go).args(["env", "GOVERSION"]).stdin(Stdio::null()).output()?;
    let version = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    match parse_version(&version) {
        Some(found) if found < OLDEST_GO => {
            bail!("{} is {version}, too old; install Go 1.24.6 or newer", go.display())
        }
        _ => Ok(go),
    }
}

/// `go1.24.6` as (1, 24); `None` for development versions, which are new.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (major, rest) = text.strip_prefix("go")?.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A call of `go` in the module's folder.
pub fn go_command() -> anyhow::Result<std::process::Command> {
    let mut command = std::process::Command::new(go()?);
    // The tree may belong to another user than Go's version control stamping likes.
    command.current_dir(sources()).env("GOFLAGS", "-buildvcs=false").stdin(Stdio::null());
    Ok(command)
}

fn build() -> anyhow::Result<PathBuf> {
    let folder = binaries::target()?.folder.join("foreign");
    fs::create_dir_all(&folder)?;
    // Tests of several packages may run at the same time.
    let lock = fs::File::create(folder.join("lock"))?;
    lock.lock()?;
    let (program, stamp) = (folder.join("foreign"), folder.join("stamp"));
    let sources = format!("{:016x}", hash_sources()?);
    if program.exists() && fs::read_to_string(&stamp).is_ok_and(|old| old == sources) {
        return Ok(program);
    }
    let fresh = folder.join("foreign.new");
    let out = go_command()?.arg("build").arg("-o").arg(&fresh).arg(".").output().context("go cannot be run")?;
    if !out.status.success() {
        bail!("go build failed:\n{}", String::from_utf8_lossy(&out.stderr));
    }
    fs::rename(&fresh, &program)?;
    fs::write(&stamp, sources)?;
    Ok(program)
}

fn hash_sources() -> anyhow::Result<u64> {
    let mut files = Vec::new();
    for folder in [sources(), sources().join("tailnetpb")] {
        for entry in fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "go" || e == "mod" || e == "sum") {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut hash = DefaultHasher::new();
    for path in files {
        hash.write(path.as_os_str().as_encoded_bytes());
        hash.write(&fs::read(&path)?);
    }
    Ok(hash.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_go_are_compared_as_numbers() {
        assert_eq!(parse_version("go1.19.8"), Some((1, 19)));
        assert_eq!(parse_version("go1.24rc1"), Some((1, 24)));
        assert_eq!(parse_version("devel +abc"), None);
        assert!(parse_version("go1.9").is_some_and(|old| old < OLDEST_GO));
    }
}
