//! Decides which `codervpnd` and `codervpn` the tests run: those built from
//! this very tree, in the profile and target folder of the running test, by
//! one call of cargo per test process. cargo decides what is up to date, so a
//! stale program cannot be run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, bail};

/// In an isolated child: the folder that its parent has built into. There is
/// no network inside, and the parent waits, so nothing changes meanwhile.
pub const BUILT: &str = "CODERVPN_TEST_PROGRAMS";
/// The same for the release profile.
pub const BUILT_RELEASE: &str = "CODERVPN_TEST_RELEASE_PROGRAMS";

/// Path of `codervpnd`.
pub fn codervpnd() -> anyhow::Result<PathBuf> {
    Ok(folder()?.join("codervpnd"))
}

/// Path of `codervpn`.
pub fn codervpn() -> anyhow::Result<PathBuf> {
    Ok(folder()?.join("codervpn"))
}

static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();

/// The folder that holds both, built on the first call.
pub fn folder() -> anyhow::Result<&'static Path> {
    built_once(&FOLDER, BUILT, View::Quiet, || Ok(target()?.profile))
}

/// As [`folder`], for a person who waits and wants to see what for.
pub fn folder_in_view() -> anyhow::Result<&'static Path> {
    built_once(&FOLDER, BUILT, View::Shown, || Ok(target()?.profile))
}

/// The folder that holds both as users get them, in the release profile: for figures and benchmarks.
pub fn release_folder() -> anyhow::Result<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    built_once(&FOLDER, BUILT_RELEASE, View::Quiet, || Ok("release".to_owned()))
}

/// A program of the daemon's `examples/`, in the release profile.
pub(crate) fn release_example(name: &str) -> anyhow::Result<PathBuf> {
    let folder = target()?.folder;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .current_dir(workspace())
        .args(["build", "--quiet", "--locked", "--release", "-p", "vpn-daemon", "--example", name, "--target-dir"])
        .arg(&folder)
        .stdin(Stdio::null())
        .output()
        .context("cargo cannot be run")?;
    if !out.status.success() {
        bail!("cargo build of the example failed\n{}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(folder.join("release/examples").join(name))
}

fn built_once(
    folder: &'static OnceLock<Result<PathBuf, String>>,
    variable: &str,
    view: View,
    profile: impl FnOnce() -> anyhow::Result<String>,
) -> anyhow::Result<&'static Path> {
    let built = folder.get_or_init(|| match std::env::var_os(variable) {
        Some(folder) => Ok(folder.into()),
        None => profile().and_then(|profile| build(&profile, view)).map_err(|err| format!("{err:#}")),
    });
    built.as_deref().map_err(|err| anyhow::anyhow!("{err}"))
}

/// The folder of the workspace's manifest.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent")
}

/// Where cargo puts what it builds in this run, and for which profile.
pub(crate) struct Target {
    pub(crate) folder: PathBuf,
    pub(crate) profile: String,
}

/// Read off the path of the running program, which is right whatever flags or
/// variables chose it.
pub(crate) fn target() -> anyhow::Result<Target> {
    let exe = std::env::current_exe()?;
    let mut profile = exe.parent().context("a program lies in a folder")?;
    if profile.ends_with("deps") {
        profile = profile.parent().context("deps lies in a profile's folder")?;
    }
    let folder = profile.parent().context("a profile's folder lies in the target folder")?;
    let name = profile.file_name().context("a profile has a name")?.to_string_lossy();
    let profile = if name == "debug" { "dev".into() } else { name.into_owned() };
    Ok(Target { folder: folder.to_owned(), profile })
}

/// Where this run builds: packages outside the workspace share what it has built already.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    Ok(target()?.folder)
}

/// Whether cargo speaks: in tests only of failures.
#[derive(Clone, Copy, PartialEq, Eq)]
enum View {
    Quiet,
    Shown,
}

fn build(profile: &str, view: View) -> anyhow::Result<PathBuf> {
    let target = target()?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(workspace())
        .args(["build", "--locked", "-p", "vpn-daemon", "-p", "vpn-cli", "--profile", profile])
        .arg("--target-dir")
        .arg(&target.folder)
        .stdin(Stdio::null());
    match view {
        View::Quiet => command.arg("--quiet"),
        View::Shown => command.stderr(Stdio::inherit()),
    };
    let out = command.output().context("cargo cannot be run")?;
    if !out.status.success() {
        bail!("cargo build of the programs failed\n{}", String::from_utf8_lossy(&out.stderr));
    }
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(target.folder.join(folder))
}
