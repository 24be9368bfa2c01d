//! Runs a test in namespaces of its own, so that nothing of this machine is touched.

#![allow(dead_code, reason = "each test program uses its part")]

use std::process::Command;

pub(crate) mod bus;

const INSIDE: &str = "CODERVPN_HOST_TEST_INSIDE";

/// Runs `body` in new network and mount namespaces (and as mapped root in a user namespace where
/// we are not root): the test program starts itself again, asking for this one test.
///
/// `body` runs inside only. Where namespaces cannot be had the test says so; in CI that fails.
pub(crate) fn in_namespaces(test: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        run("ip", &["link", "set", "lo", "up"]);
        return body();
    }
    let mut flags = vec!["--net", "--mount"];
    if !rustix::process::geteuid().is_root() {
        flags.extend(["--user", "--map-root-user"]);
    }
    let possible =
        Command::new("unshare").args(&flags).args(["sh", "-c", "ip link set lo up && exec 3<>/dev/net/tun"]).output();
    match possible {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            return skip(&format!("no namespaces with /dev/net/tun here: {}", String::from_utf8_lossy(&output.stderr)));
        }
        Err(error) => return skip(&format!("cannot run unshare: {error}")),
    }
    let status = Command::new("unshare")
        .args(&flags)
        .arg("--")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{test} failed inside: {status}");
}

/// Says why a test cannot run here; CI must be able to run all of them.
pub(crate) fn skip(reason: &str) {
    assert!(std::env::var_os("CI").is_none(), "skipped in CI: {reason}");
    println!("skipped: {reason}");
}

/// Runs a program that must succeed; its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// `ip` with its arguments in one string.
pub(crate) fn ip(arguments: &str) -> String {
    run("ip", &arguments.split_whitespace().collect::<Vec<_>>())
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}
