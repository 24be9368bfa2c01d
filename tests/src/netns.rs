//! Decides where tests and the demo may touch network and system files: in
//! namespaces of their own, never on the host.
//!
//! A test re-executes its own binary for just that test under `unshare`, with
//! new network, mount and (where the kernel allows) process namespaces, and a
//! user namespace in which it is root. Inside, `/run` is empty, `/etc` and
//! `/var/lib` are writable copies made of links to the real ones, and `lo` is
//! up. With the process namespace ends everything that runs in it, so neither
//! a hanging test nor Ctrl-C leaves a process, device or route behind.
//!
//! ```no_run
//! use codervpn_testbed::netns;
//! # /*
//! #[test]
//! # */
//! fn names_resolve() {
//!     netns::isolated(async || {
//!         netns::ip("link show lo").unwrap();
//!     });
//! }
//! ```

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio, Termination};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use anyhow::{Context, bail, ensure};
use rustix::mount::{MountFlags, mount, mount_bind_recursive};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::report::say;
use crate::skip::skip;
use crate::{binaries, foreign, packages, rootfs};

/// Holds the host's mount namespace as `/proc/self/ns/mnt` names it; set only
/// in the isolated child.
const HOST_MOUNTS: &str = "CODERVPN_TEST_HOST_MOUNTS";
/// A file the child writes when the body has run, so that a child which found
/// no test of that name cannot pass.
const DONE: &str = "CODERVPN_TEST_DONE";

/// Runs `body` inside new namespaces with the default [`Setup`]. Call it from a
/// plain `#[test]` function, with a closure written in that function: its path
/// tells which test the child has to run.
#[track_caller]
pub fn isolated<F, T>(body: F)
where
    F: AsyncFnOnce() -> T,
    T: Termination,
{
    Setup::new().run(body);
}

/// What an isolated body needs besides the namespaces.
#[derive(Debug, Clone)]
pub struct Setup {
    uids: bool,
    programs: bool,
    release_programs: bool,
    foreign: bool,
    resolved: bool,
    tun: bool,
    nft: bool,
    limit: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Self::new()
    }
}

impl Setup {
    /// No programs built, uid 0 only, 120 s.
    pub fn new() -> Self {
        Self {
            uids: false,
            programs: false,
            release_programs: false,
            foreign: false,
            resolved: false,
            tun: false,
            nft: false,
            limit: Duration::from_secs(120),
        }
    }

    /// Several real uids are needed: no user namespace, so only as real root.
    #[must_use]
    pub fn uids(mut self) -> Self {
        self.uids = true;
        self
    }

    /// `codervpnd` and `codervpn` are needed: built before entering, since
    /// there is no network inside. [`binaries`] then gives their paths.
    #[must_use]
    pub fn programs(mut self) -> Self {
        self.programs = true;
        self
    }

    /// The same in the release profile, for figures and benchmarks: see [`binaries::release_folder`].
    #[must_use]
    pub fn release_programs(mut self) -> Self {
        self.release_programs = true;
        self
    }

    /// The Go peers are needed: built before entering; without Go the test is skipped.
    #[must_use]
    pub fn foreign(mut self) -> Self {
        self.foreign = true;
        self
    }

    /// systemd-resolved is needed: unpacked before entering, see [`rootfs`].
    #[must_use]
    pub fn resolved(mut self) -> Self {
        self.resolved = true;
        self
    }

    /// A TUN device is needed; without access to `/dev/net/tun` the test is skipped.
    #[must_use]
    pub fn tun(mut self) -> Self {
        self.tun = true;
        self
    }

    /// Routers are needed: without nft the test is skipped.
    #[must_use]
    pub fn nft(mut self) -> Self {
        self.nft = true;
        self
    }

    /// The body is killed, and the test fails, after this time.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs `body` as one test; see [`isolated`].
    ///
    /// # Panics
    /// When the body fails or runs out of time, or when it cannot run in CI.
    #[track_caller]
    pub fn run<F, T>(self, body: F)
    where
        F: AsyncFnOnce() -> T,
        T: Termination,
    {
        if let Some(done) = env::var_os(DONE) {
            assert!(run_inside(body) == ExitCode::SUCCESS, "the isolated body failed");
            fs::write(done, "done").expect("the parent waits for this file");
            return;
        }
        let command = match self.prepare() {
            Ok(command) => command,
            Err(reason) => return skip(format!("{reason:#}")),
        };
        let test = test_name(std::any::type_name::<F>());
        if let Err(err) = run_test_child(command, &test, self.limit) {
            panic!("{test}: {err:#}");
        }
    }

    /// Runs `body` for a whole program (the demo) instead of a test: the same
    /// program is executed again inside with the same arguments and the
    /// terminal of its caller, and without a time limit. `Err` says why
    /// namespaces are not to be had here.
    pub fn run_program<F, T>(self, body: F) -> anyhow::Result<ExitCode>
    where
        F: AsyncFnOnce() -> T,
        T: Termination,
    {
        if env::var_os(HOST_MOUNTS).is_some() {
            return Ok(run_inside(body));
        }
        let status = self.prepare()?.args(env::args_os().skip(1)).status()?;
        Ok(ExitCode::from(status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1)))
    }

    /// Builds what is needed and returns the command that runs this very
    /// executable inside. Its arguments are still to be given.
    fn prepare(&self) -> anyhow::Result<Command> {
        let flags = unshare_flags(self.uids)?;
        if self.tun {
            tun_available()?;
        }
        if self.nft {
            packages::find_program("nft").context("nft is not installed (package nftables)")?;
        }
        let mut command = Command::new("setpriv");
        // Whatever ends this process also ends the namespaces.
        command.args(["--pdeathsig", "KILL", "--", "unshare"]).args(flags).arg("--");
        command.arg(env::current_exe()?);
        command.env(HOST_MOUNTS, mount_namespace()?);
        command.env_remove("XDG_RUNTIME_DIR");
        if self.programs {
            command.env(binaries::BUILT, binaries::folder()?);
        }
        if self.release_programs {
            command.env(binaries::BUILT_RELEASE, binaries::release_folder()?);
        }
        if self.foreign {
            command.env(foreign::BUILT, foreign::program()?);
        }
        if self.resolved {
            command.env(rootfs::UNPACKED, rootfs::folder()?);
        }
        Ok(command)
    }
}

/// Proof of being inside; whoever starts something that edits system files
/// asks for it first.
#[derive(Debug, Clone, Copy)]
pub struct Inside(());

impl Inside {
    /// `Err` on the host, where a daemon would edit the real `/etc/resolv.conf`.
    pub fn check() -> anyhow::Result<Self> {
        let host = env::var(HOST_MOUNTS).ok().context("not inside a test namespace: use netns::isolated")?;
        ensure!(host != mount_namespace()?, "still in the host's mount namespace");
        Ok(Self(()))
    }
}

/// `Err` says why no TUN device can be made here.
pub fn tun_available() -> anyhow::Result<()> {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map(drop)
        .context("/dev/net/tun cannot be opened")
}

/// Runs `ip ARGS` in the current namespace; arguments are separated by blanks.
pub fn ip(args: &str) -> anyhow::Result<String> {
    output(Command::new("ip").args(args.split_whitespace()), &format!("ip {args}"))
}

/// Sets kernel parameters of the current namespace, see [`Namespace::sysctl`].
pub fn sysctl(settings: &str) -> anyhow::Result<()> {
    Inside::check()?;
    output(Command::new("sh").args(["-c", &sysctl_script(settings)?]), settings).map(drop)
}

/// `/proc/sys/net` shows the namespace of whoever looks, so the shell looks itself.
fn sysctl_script(settings: &str) -> anyhow::Result<String> {
    let writes = settings.split_whitespace().map(|setting| {
        let (name, value) = setting.split_once('=').with_context(|| format!("no value in {setting:?}"))?;
        ensure!(name.starts_with("net/"), "{name} is not the namespace's own");
        Ok(format!("echo {value} > /proc/sys/{name}"))
    });
    Ok(writes.collect::<anyhow::Result<Vec<_>>>()?.join(" && "))
}

/// One more network namespace, for a machine that is not the daemon's. Mounts
/// and processes are shared with the isolated body.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    /// Lives in the namespace and keeps it; ends with its stdin.
    holder: Child,
}

impl Namespace {
    /// `name` (at most eight characters) is also the suffix of its interfaces.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        Inside::check()?;
        ensure!(name.len() <= 8 && !name.is_empty(), "interface names would be too long");
        let mut holder = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", "ip link set lo up && echo up && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare --net")?;
        let mut line = [0; 3];
        let stdout = holder.stdout.as_mut().context("stdout is piped")?;
        stdout.read_exact(&mut line).context("the namespace did not come up")?;
        Ok(Self { name: name.to_owned(), holder })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path that `nsenter --net=` and `ip` accept.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.holder.id()))
    }

    /// A command that will run `program` inside.
    pub fn command(&self, program: impl AsRef<Path>) -> tokio::process::Command {
        let mut command = tokio::process::Command::new("nsenter");
        let mut net = OsString::from("--net=");
        net.push(self.path());
        command.arg(net).arg("--").arg(program.as_ref());
        command
    }

    /// Runs `ip ARGS` inside.
    pub fn ip(&self, args: &str) -> anyhow::Result<String> {
        let mut command = self.command("ip").into_std();
        output(command.args(args.split_whitespace()), &format!("{}: ip {args}", self.name))
    }

    /// Runs `body` on a thread that has entered this namespace: sockets made
    /// there, and by threads it starts, belong to it. Give it a runtime of its own.
    pub fn thread<T, F>(&self, body: F) -> thread::JoinHandle<anyhow::Result<T>>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let path = self.path();
        thread::spawn(move || {
            let file = fs::File::open(&path)?;
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(body())
        })
    }

    /// Joins this namespace by a virtual cable to the body's own one and gives
    /// both ends an address with prefix length, `10.99.0.1/24` or an IPv6 one.
    pub fn join(&self, here: &str, there: &str) -> anyhow::Result<()> {
        let (near, far) = (format!("to-{}", self.name), "eth0");
        ip(&format!("link add {near} type veth peer name {far} netns {}", self.holder.id()))?;
        ip(&format!("addr add {here} dev {near}{}", nodad(here)))?;
        ip(&format!("link set {near} up"))?;
        self.ip(&format!("addr add {there} dev {far}{}", nodad(there)))?;
        self.ip(&format!("link set {far} up"))?;
        Ok(())
    }

    /// Joins two namespaces directly; each end is named after the other.
    pub fn join_to(&self, other: &Self, here: &str, there: &str) -> anyhow::Result<()> {
        let (near, far) = (format!("to-{}", other.name), format!("to-{}", self.name));
        let (a, b) = (self.holder.id(), other.holder.id());
        ip(&format!("link add {near} netns {a} type veth peer name {far} netns {b}"))?;
        self.ip(&format!("addr add {here} dev {near}{}", nodad(here)))?;
        self.ip(&format!("link set {near} up"))?;
        other.ip(&format!("addr add {there} dev {far}{}", nodad(there)))?;
        other.ip(&format!("link set {far} up"))?;
        Ok(())
    }

    /// Sets kernel parameters inside, `net/ipv4/ip_forward=1` and the like, separated by blanks.
    pub fn sysctl(&self, settings: &str) -> anyhow::Result<()> {
        let mut command = self.command("sh").into_std();
        output(command.args(["-c", &sysctl_script(settings)?]), settings).map(drop)
    }

    /// Loads rules of nft inside.
    pub fn nft(&self, rules: &str) -> anyhow::Result<()> {
        let nft = packages::find_program("nft").context("nft is not installed (package nftables)")?;
        let mut command = self.command(nft).into_std();
        output(command.arg(rules), rules).map(drop)
    }

    /// Sends what has no other route to `gateway`.
    pub fn default_route(&self, gateway: IpAddr) -> anyhow::Result<()> {
        self.ip(&format!("route add default via {gateway}")).map(drop)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Duplicate address detection would hold an IPv6 address back for a second.
fn nodad(address: &str) -> &'static str {
    if address.contains(':') { " nodad" } else { "" }
}

fn output(command: &mut Command, what: &str) -> anyhow::Result<String> {
    let out = command.stdin(Stdio::null()).output().with_context(|| what.to_owned())?;
    if !out.status.success() {
        bail!("{what}: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn mount_namespace() -> anyhow::Result<String> {
    Ok(fs::read_link("/proc/self/ns/mnt")?.to_string_lossy().into_owned())
}

/// The first set of namespaces that this machine gives us. A process namespace
/// is tried first but not insisted on: containers often forbid a fresh `/proc`.
fn unshare_flags(uids: bool) -> anyhow::Result<Vec<&'static str>> {
    const BASE: [&str; 5] = ["--net", "--mount", "--uts", "--fork", "--kill-child=KILL"];
    const PID: [&str; 2] = ["--pid", "--mount-proc"];
    const USER: [&str; 1] = ["--map-root-user"];
    let root = rustix::process::geteuid().is_root();
    ensure!(!uids || root, "several user ids are needed: only root can run this");
    let candidates: &[&[&[&str]]] = match (root, uids) {
        (true, true) => &[&[&BASE, &PID], &[&BASE]],
        (true, false) => &[&[&USER, &BASE, &PID], &[&BASE, &PID], &[&USER, &BASE], &[&BASE]],
        (false, _) => &[&[&USER, &BASE, &PID], &[&USER, &BASE]],
    };
    let mut reason = String::new();
    for parts in candidates {
        let flags = parts.concat();
        let out = Command::new("unshare").args(&flags).args(["--", "true"]).stdin(Stdio::null()).output();
        match out {
            Ok(out) if out.status.success() => return Ok(flags),
            Ok(out) => reason = String::from_utf8_lossy(&out.stderr).trim().to_owned(),
            Err(err) => bail!("unshare (package util-linux) cannot be run: {err}"),
        }
    }
    bail!("this machine gives us no namespaces: {reason}")
}

/// Cuts the closure's path down to the test's: `krate::x::{{closure}}` is `x`.
fn test_name(closure: &str) -> String {
    let path = closure.split("::{{closure}}").next().unwrap_or(closure);
    path.split_once("::").map_or(path, |(_krate, rest)| rest).to_owned()
}

/// Runs one test in the child and passes its output on, line by line.
fn run_test_child(mut command: Command, test: &str, limit: Duration) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let done = folder.path().join("done");
    let mut child = command
        .args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(DONE, &done)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("setpriv (package util-linux) cannot be run")?;
    let (lines, output) = mpsc::channel();
    forward(child.stdout.take().context("stdout is piped")?, lines.clone());
    forward(child.stderr.take().context("stderr is piped")?, lines);

    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match output.recv_timeout(left) {
            // The child's own summary would look like one of the whole run.
            Ok(line) if line.starts_with("running 1 test") || line.starts_with("test result: ") => {}
            Ok(line) => say(&line),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                child.kill()?;
                child.wait()?;
                bail!("killed after {limit:?}");
            }
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "failed inside its namespaces ({status}); output above");
    ensure!(done.exists(), "the child ran no test of this name: call netns::isolated from the test function itself");
    Ok(())
}

fn forward(stream: impl Read + Send + 'static, lines: mpsc::Sender<String>) {
    thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
}

fn run_inside<F, T>(body: F) -> ExitCode
where
    F: AsyncFnOnce() -> T,
    T: Termination,
{
    Inside::check().expect("the parent has unshared the mounts");
    own_files().expect("mounts inside the new namespaces");
    ip("link set lo up").expect("ip works inside the new namespaces");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime can be made");
    let code = runtime.block_on(body()).report();
    // Blocking calls that hang must not keep the test from ending.
    runtime.shutdown_background();
    code
}

/// Empty `/run`, writable `/etc` and `/var/lib`, the new namespace's `/sys`.
fn own_files() -> anyhow::Result<()> {
    tmpfs("/run")?;
    for folder in ["/etc", "/var/lib"] {
        shadow(Path::new(folder)).with_context(|| format!("own {folder}"))?;
    }
    // Shows the interfaces of the new network namespace; some containers forbid it.
    let _ = mount("sysfs", "/sys", "sysfs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None);
    own_file("/etc/resolv.conf", "nameserver 127.0.0.1\n")?;
    own_file("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")?;
    own_file(
        "/etc/nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\n",
    )?;
    for file in ["/etc/passwd", "/etc/group"] {
        let text = fs::read_to_string(file)?;
        own_file(file, &text)?;
    }
    Ok(())
}

/// Replaces a link to the host's file by a file of our own.
pub fn own_file(path: impl AsRef<Path>, text: &str) -> anyhow::Result<()> {
    Inside::check()?;
    let path = path.as_ref();
    match fs::remove_file(path) {
        Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err.into()),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(text.as_bytes())?;
    Ok(())
}

fn tmpfs(target: impl AsRef<Path>) -> anyhow::Result<()> {
    mount("tmpfs", target.as_ref(), "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=0755"))
        .with_context(|| format!("tmpfs on {}", target.as_ref().display()))
}

/// Puts a tmpfs over `folder` whose entries are links to the host's. The
/// folder itself can then be written to, and files in it renamed over, which a
/// bind mount of single files would not allow.
fn shadow(folder: &Path) -> anyhow::Result<()> {
    let host = Path::new("/run/host").join(folder.strip_prefix("/")?);
    fs::create_dir_all(&host)?;
    mount_bind_recursive(folder, &host)?;
    tmpfs(folder)?;
    for entry in fs::read_dir(&host)? {
        let entry = entry?;
        let link = folder.join(entry.file_name());
        // Links keep their text: relative ones are meant from the original place.
        let target = if entry.file_type()?.is_symlink() { fs::read_link(entry.path())? } else { entry.path() };
        symlink(target, link)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_names_come_from_closures() {
        assert_eq!(test_name("names::resolve::{{closure}}"), "resolve");
        assert_eq!(test_name("krate::a::tests::x::{{closure}}::{{closure}}"), "a::tests::x");
    }
}
