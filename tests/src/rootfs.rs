//! Decides how tests get a real systemd-resolved: its packages are downloaded
//! and unpacked into `target/rootfs`, never installed, because their
//! installation replaces `/etc/resolv.conf` of the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, bail, ensure};

use crate::binaries;

/// In an isolated child: the folder that its parent has unpacked into.
pub const UNPACKED: &str = "CODERVPN_TEST_ROOTFS";

/// Debian's and Ubuntu's names. The shared library is tied to the exact version.
const PACKAGES: [&str; 3] = ["systemd-resolved", "libsystemd-shared", "libnss-resolve"];

/// Where the parts of systemd-resolved lie.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The daemon.
    pub daemon: PathBuf,
    /// `resolvectl`.
    pub resolvectl: PathBuf,
    /// Put this into `LD_LIBRARY_PATH` of both.
    pub libraries: PathBuf,
    /// Who may own and call `org.freedesktop.resolve1`; for the bus's `<includedir>`.
    pub bus_policy: PathBuf,
    /// `libnss_resolve.so.2`, for the `resolve` entry of nsswitch.conf.
    pub nss: PathBuf,
}

/// Paths of the unpacked systemd-resolved; downloaded on the first call.
pub fn systemd_resolved() -> anyhow::Result<Resolved> {
    let root = folder()?;
    let find = |name: &str| find_file(root, name).with_context(|| format!("{name} is not in {}", root.display()));
    let parent = |path: PathBuf| path.parent().map(Path::to_owned).context("a file lies in a folder");
    Ok(Resolved {
        daemon: find("systemd-resolved")?,
        resolvectl: find("resolvectl")?,
        libraries: parent(find_prefix(root, "libsystemd-shared-").context("libsystemd-shared is not unpacked")?)?,
        bus_policy: parent(find("org.freedesktop.resolve1.conf")?)?,
        nss: find("libnss_resolve.so.2")?,
    })
}

/// The root of the unpacked packages.
pub fn folder() -> anyhow::Result<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let unpacked = FOLDER.get_or_init(|| match std::env::var_os(UNPACKED) {
        Some(folder) => Ok(folder.into()),
        None => unpack().map_err(|err| format!("{err:#}")),
    });
    unpacked.as_deref().map_err(|err| anyhow::anyhow!("{err}"))
}

fn unpack() -> anyhow::Result<PathBuf> {
    let root = binaries::target()?.folder.join("rootfs");
    fs::create_dir_all(&root)?;
    let lock = fs::File::create(root.join(".lock"))?;
    lock.lock()?;
    let done = root.join(".done");
    if done.exists() {
        return Ok(root);
    }
    let archives = root.join(".archives");
    fs::create_dir_all(&archives)?;
    run(Command::new("apt-get").current_dir(&archives).args(["-q", "download"]).args(PACKAGES)).context(
        "systemd-resolved cannot be downloaded (on Debian and Ubuntu `apt-get update` may help; elsewhere it is not tried)",
    )?;
    for entry in fs::read_dir(&archives)? {
        run(Command::new("dpkg-deb").arg("-x").arg(entry?.path()).arg(&root))?;
    }
    fs::remove_dir_all(&archives)?;
    fs::write(done, "")?;
    Ok(root)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let out = command.stdin(Stdio::null()).output().with_context(|| format!("{name} cannot be run"))?;
    ensure!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr).trim());
    Ok(())
}

fn find_file(folder: &Path, name: &str) -> Option<PathBuf> {
    find(folder, &|found| found == name)
}

fn find_prefix(folder: &Path, prefix: &str) -> Option<PathBuf> {
    find(folder, &|found| found.starts_with(prefix))
}

/// Packages differ in `/lib` and `/usr/lib` from release to release.
fn find(folder: &Path, fits: &dyn Fn(&str) -> bool) -> Option<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(folder).ok()?.filter_map(Result::ok).collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    entries.iter().find_map(|entry| {
        let kind = entry.file_type().ok()?;
        if kind.is_dir() {
            return find(&entry.path(), fits);
        }
        (kind.is_file() && entry.file_name().to_str().is_some_and(fits)).then(|| entry.path())
    })
}

/// Downloads what [`systemd_resolved`] needs and shows that it runs.
pub fn check() -> anyhow::Result<String> {
    let resolved = systemd_resolved()?;
    let out = Command::new(&resolved.daemon)
        .arg("--version")
        .env("LD_LIBRARY_PATH", &resolved.libraries)
        .stdin(Stdio::null())
        .output()?;
    if !out.status.success() {
        bail!("systemd-resolved does not run: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).lines().next().unwrap_or_default().to_owned())
}
