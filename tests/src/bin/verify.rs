//! `cargo verify`: everything that has to pass, set-up included, with one line
//! and a time for each step. Steps after a failed one still run, so that one
//! run shows all there is to mend.
#![forbid(unsafe_code)]

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use codervpn_testbed::{binaries, foreign, packages, report, rootfs, skip};

/// Installs what is missing, builds, lints and runs every test.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo verify")]
struct Args {
    /// Install nothing: print the command for what is missing and end with status 1.
    #[arg(long)]
    no_install: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let begin = Instant::now();
    let mut failed = Vec::new();
    let steps: &[(&str, &dyn Fn() -> anyhow::Result<()>)] = &[
        ("disk", &disk),
        ("system packages", &|| packages::provide(!args.no_install)),
        ("format", &|| cargo(&["fmt", "--all", "--check"])),
        ("lints", &|| cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])),
        ("programs", &|| binaries::folder().map(drop)),
        ("one crypto provider", &no_aws_lc),
        ("foreign peers", &foreign_peers),
        ("systemd-resolved", &resolved),
        ("tests", &|| cargo(&["test", "--workspace", "--locked", "--no-fail-fast"])),
        ("tests that need root", &privileged),
        ("simulation", &simulation),
    ];
    for (name, step) in steps {
        report::say(&format!("==> {name}"));
        let start = Instant::now();
        let result = step();
        let took = start.elapsed().as_secs_f32();
        match result {
            Ok(()) => report::say(&format!("    {name}: ok, {took:.1} s")),
            Err(err) => {
                report::say(&format!("    {name}: FAILED, {took:.1} s: {err:#}"));
                failed.push(*name);
                if matches!(*name, "disk" | "system packages") {
                    break;
                }
            }
        }
    }
    let took = begin.elapsed().as_secs();
    if failed.is_empty() {
        report::say(&format!("verify: all {} steps passed in {took} s", steps.len()));
        return ExitCode::SUCCESS;
    }
    report::say(&format!("verify: FAILED in {took} s: {}", failed.join(", ")));
    ExitCode::FAILURE
}

fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(binaries::workspace()).args(args).stdin(Stdio::null());
    command
}

fn cargo(args: &[&str]) -> anyhow::Result<()> {
    run(&mut cargo_command(args))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("{:?} cannot be run", command.get_program()))?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// What a build from nothing and all tests leave in the target folder, with some room: 5 GB were measured.
const ROOM_FOR_BUILD: u64 = 6 << 30;
/// What the tests themselves write when everything is built.
const ROOM_FOR_TESTS: u64 = 1 << 30;

/// A disk that fills up half-way fails in a different place each time, with texts that say anything but that.
fn disk() -> anyhow::Result<()> {
    let target = binaries::target_folder()?;
    std::fs::create_dir_all(&target).with_context(|| format!("{} cannot be made", target.display()))?;
    let built = target.join("release/deps").exists();
    let needed = if built { ROOM_FOR_TESTS } else { ROOM_FOR_BUILD };
    let stat = rustix::fs::statvfs(&target).with_context(|| format!("{} cannot be asked", target.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    ensure!(
        free >= needed,
        "{} has {} MiB left and {} MiB are needed: make room, or set CARGO_TARGET_DIR to a folder on another disk",
        target.display(),
        free >> 20,
        needed >> 20,
    );
    Ok(())
}

/// ring is the only crypto provider; a second one would add megabytes and doubt.
fn no_aws_lc() -> anyhow::Result<()> {
    let out = cargo_command(&["tree", "--workspace", "--locked", "--target", "all", "-i", "aws-lc-rs"]).output()?;
    let tree = String::from_utf8_lossy(&out.stdout);
    ensure!(tree.trim().is_empty(), "aws-lc-rs is used:\n{tree}");
    // cargo says by an error that there is no such package at all.
    let text = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success() || text.contains("did not match any packages"), "cargo tree: {text}");
    Ok(())
}

fn foreign_peers() -> anyhow::Result<()> {
    if foreign::go().is_err() {
        return unavailable("foreign peers: Go is not installed");
    }
    foreign::program()?;
    run(foreign::go_command()?.args(["vet", "."]))?;
    let out = foreign::go_command()?.args(["run", "cmd/gofmt", "-l", "."]).output()?;
    ensure!(out.status.success(), "gofmt: {}", String::from_utf8_lossy(&out.stderr));
    ensure!(out.stdout.is_empty(), "not formatted: {}", String::from_utf8_lossy(&out.stdout));
    Ok(())
}

fn resolved() -> anyhow::Result<()> {
    match rootfs::check() {
        Ok(version) => {
            report::say(&format!("    {version}"));
            Ok(())
        }
        Err(err) => unavailable(&format!("tests with systemd-resolved: {err:#}")),
    }
}

/// The virtual network: every topology, every trouble, and 200 hours made up from seeds. It lies outside the workspace,
/// since features unify within one, and is only worth its time when optimised.
fn simulation() -> anyhow::Result<()> {
    let target = binaries::target_folder()?;
    let steps: [&[&str]; 3] = [
        &["fmt", "--check"],
        &["clippy", "--release", "--all-targets", "--locked", "--", "-D", "warnings"],
        &["test", "--release", "--locked", "--no-fail-fast"],
    ];
    for args in steps {
        let mut command = cargo_command(args);
        command.current_dir(binaries::workspace().join("vpn-daemon/crates/engine-sim"));
        run(command.env("CARGO_TARGET_DIR", &target))?;
    }
    Ok(())
}

/// What a user's rights did not suffice for runs once more as root, if a person at the terminal agrees. Nothing is built
/// as root: the programs that exist are run.
fn privileged() -> anyhow::Result<()> {
    if rustix::process::geteuid().is_root() {
        report::say("    ran with the others");
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || packages::find_program("sudo").is_none() {
        return unavailable("tests that need root: no terminal or no sudo; run `cargo verify` as root for them");
    }
    let mut listing = cargo_command(&["test", "--no-run", "--locked", "--message-format=json"]);
    listing.args(["-p", "codervpn-testbed", "-p", "codervpn-host"]).stderr(Stdio::inherit());
    let out = listing.output()?;
    ensure!(out.status.success(), "the tests do not build");
    let mut failed = Vec::new();
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let message: serde_json::Value = serde_json::from_str(line)?;
        let is_test = message["profile"]["test"].as_bool() == Some(true);
        let (Some(program), true) = (message["executable"].as_str(), is_test) else { continue };
        let folder = message["manifest_path"].as_str().and_then(|path| Path::new(path).parent());
        let mut command = Command::new("sudo");
        command.current_dir(folder.unwrap_or(binaries::workspace())).arg("env");
        for (name, value) in prepared()? {
            command.arg(format!("{name}={}", value.display()));
        }
        if !command.arg(program).status()?.success() {
            failed.push(program.to_owned());
        }
    }
    ensure!(failed.is_empty(), "failed as root: {}", failed.join(", "));
    Ok(())
}

/// What was built or unpacked as the user, so that nothing of it is made again as root.
fn prepared() -> anyhow::Result<Vec<(&'static str, PathBuf)>> {
    let mut prepared = vec![
        (binaries::BUILT, binaries::folder()?.to_owned()),
        (binaries::BUILT_RELEASE, binaries::release_folder()?.to_owned()),
    ];
    if let Ok(program) = foreign::program() {
        prepared.push((foreign::BUILT, program.to_owned()));
    }
    if let Ok(folder) = rootfs::folder() {
        prepared.push((rootfs::UNPACKED, folder.to_owned()));
    }
    Ok(prepared)
}

/// What tests skip here and CI does not.
fn unavailable(reason: &str) -> anyhow::Result<()> {
    if skip::in_ci() {
        bail!("{reason}");
    }
    report::announce(&format!("    skipped: {reason}"));
    Ok(())
}
