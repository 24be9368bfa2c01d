//! Rules of the tree that neither compiler nor clippy can hold: who may use
//! whom, which crate alone may name a library, and what no file may contain.

#![allow(clippy::unwrap_used, reason = "helpers of tests count as tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use codervpn_testbed::{binaries::workspace, report::announce};
use serde_json::Value;

/// Which of our crates a crate may use; nothing may use `codervpn-testbed`.
const FLOORS: [(&str, &[&str]); 10] = [
    ("codervpn-proto", &[]),
    ("codervpn-wire", &[]),
    ("codervpn-engine", &["codervpn-wire"]),
    ("codervpn-dns", &["codervpn-wire"]),
    ("codervpn-underlay", &["codervpn-wire"]),
    ("codervpn-control", &["codervpn-proto", "codervpn-wire", "codervpn-underlay"]),
    ("codervpn-host", &[]),
    (
        "vpn-daemon",
        &[
            "codervpn-proto",
            "codervpn-wire",
            "codervpn-engine",
            "codervpn-dns",
            "codervpn-underlay",
            "codervpn-control",
            "codervpn-host",
        ],
    ),
    ("vpn-cli", &["codervpn-proto"]),
    (
        "codervpn-testbed",
        &[
            "codervpn-proto",
            "codervpn-wire",
            "codervpn-engine",
            "codervpn-dns",
            "codervpn-underlay",
            "codervpn-control",
            "codervpn-host",
            "vpn-daemon",
        ],
    ),
];

/// Libraries that only these crates may depend on.
const EXCLUSIVE: [(&str, &[&str]); 8] = [
    ("boringtun", &["codervpn-engine"]),
    ("hickory-proto", &["codervpn-dns", "codervpn-underlay"]),
    ("hickory-server", &["codervpn-dns"]),
    ("hickory-resolver", &["codervpn-underlay"]),
    ("yamux", &["codervpn-control", "codervpn-testbed"]),
    ("tun", &["codervpn-host"]),
    ("rtnetlink", &["codervpn-host"]),
    ("zbus", &["codervpn-host"]),
];

/// Where alone the code may name a library.
const NAMED_ONLY_IN: [(&str, &[&str]); 2] = [
    ("boringtun", &["vpn-daemon/crates/engine/src/session.rs"]),
    ("hickory_", &["vpn-daemon/crates/dns/", "vpn-daemon/crates/underlay/src/resolve.rs"]),
];

const WARN_LINES: usize = 600;
const MAX_LINES: usize = 1000;

/// One package of the workspace: its dependencies with their kinds.
struct Package {
    manifest: String,
    dependencies: Vec<(String, String)>,
    roots: Vec<String>,
}

fn packages() -> BTreeMap<String, Package> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .current_dir(workspace())
        .args(["metadata", "--no-deps", "--format-version", "1", "--locked"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: Value = serde_json::from_slice(&out.stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    list(&metadata["packages"])
        .iter()
        .map(|package| {
            let dependencies = list(&package["dependencies"])
                .iter()
                .map(|d| (text(&d["name"]), d["kind"].as_str().unwrap_or("normal").to_owned()))
                .collect();
            let roots = list(&package["targets"])
                .iter()
                .filter(|t| list(&t["kind"]).iter().any(|k| k == "lib" || k == "bin"))
                .map(|t| text(&t["src_path"]))
                .collect();
            (text(&package["name"]), Package { manifest: text(&package["manifest_path"]), dependencies, roots })
        })
        .collect()
}

/// Tracked files, as paths from the top of the tree.
fn tracked() -> Vec<String> {
    let out = Command::new("git").current_dir(workspace()).args(["ls-files", "-z"]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let names = String::from_utf8(out.stdout).unwrap();
    // A file that was deleted but not committed yet is still listed.
    names.split('\0').filter(|n| !n.is_empty() && workspace().join(n).is_file()).map(str::to_owned).collect()
}

fn rust_files() -> Vec<(String, String)> {
    tracked()
        .into_iter()
        .filter(|name| Path::new(name).extension().is_some_and(|e| e == "rs"))
        .map(|name| {
            let text = fs::read_to_string(workspace().join(&name)).unwrap();
            (name, text)
        })
        .collect()
}

/// Lines that are neither comments nor empty.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"))
}

fn none(violations: &[String]) {
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

#[test]
fn crates_use_only_lower_floors() {
    let packages = packages();
    let floors = BTreeMap::from(FLOORS);
    let known: BTreeSet<_> = floors.keys().map(|k| (*k).to_owned()).collect();
    assert_eq!(packages.keys().cloned().collect::<BTreeSet<_>>(), known, "give a new crate its floor here");
    let mut violations = Vec::new();
    for (name, package) in &packages {
        let allowed = floors[name.as_str()];
        for (dependency, kind) in &package.dependencies {
            if packages.contains_key(dependency) && !allowed.contains(&dependency.as_str()) {
                violations.push(format!("{name} must not use {dependency} ({kind})"));
            }
        }
    }
    none(&violations);
}

#[test]
fn some_libraries_have_one_home() {
    let exclusive = BTreeMap::from(EXCLUSIVE);
    let mut violations = Vec::new();
    for (name, package) in packages() {
        for (dependency, _) in &package.dependencies {
            if exclusive.get(dependency.as_str()).is_some_and(|homes| !homes.contains(&name.as_str())) {
                violations.push(format!("{name} must not use {dependency}"));
            }
        }
    }
    for (file, text) in rust_files() {
        if file == "tests/tests/tidy.rs" {
            continue;
        }
        for (library, homes) in NAMED_ONLY_IN {
            if !homes.iter().any(|home| file.starts_with(home)) && code(&text).any(|line| line.contains(library)) {
                violations.push(format!("{file} must not name {library}"));
            }
        }
    }
    none(&violations);
}

/// The simulation sets boringtun's clock, the product must not be able to; and both have to use the same boringtun.
#[test]
fn only_the_simulation_has_a_mocked_clock() {
    let boringtun = |folder: &Path| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let out = Command::new(cargo)
            .current_dir(folder)
            .args(["tree", "--locked", "--target", "all", "-e", "normal,build,dev", "-f", "{p} {f}", "-i", "boringtun"])
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = String::from_utf8(out.stdout).unwrap();
        text.lines().next().unwrap().to_owned()
    };
    let (product, simulation) = (boringtun(workspace()), boringtun(&workspace().join("vpn-daemon/crates/engine-sim")));
    assert!(product.starts_with("boringtun v"), "{product}");
    assert!(!product.contains("mock"), "{product}");
    assert!(simulation.contains("mock-instant"), "{simulation}");
    let version = |line: &str| line.split(' ').nth(1).unwrap().to_owned();
    assert_eq!(version(&product), version(&simulation), "bring the simulation's Cargo.lock up to date");
    let lock = fs::read_to_string(workspace().join("Cargo.lock")).unwrap();
    assert!(!lock.contains("mock_instant"), "nothing of the workspace may depend on it");
}

/// A workspace-wide `forbid` could not be lifted in `host`, so each root has its own.
#[test]
fn unsafe_code_is_only_in_host() {
    let mut violations = Vec::new();
    for (name, package) in packages() {
        for root in &package.roots {
            let text = fs::read_to_string(root).unwrap();
            if name != "codervpn-host" && !code(&text).any(|line| line == "#![forbid(unsafe_code)]") {
                violations.push(format!("{root} lacks #![forbid(unsafe_code)]"));
            }
        }
    }
    none(&violations);
}

/// Time and randomness are arguments in the lower floors; the nearest
/// clippy.toml wins and nothing merges.
#[test]
fn clocks_are_fenced_off() {
    for name in ["codervpn-wire", "codervpn-engine", "codervpn-dns"] {
        let manifest = packages()[name].manifest.clone();
        let fence = fs::read_to_string(Path::new(&manifest).with_file_name("clippy.toml")).unwrap();
        for call in ["std::time::Instant::now", "std::time::SystemTime::now", "std::thread::sleep"] {
            assert!(fence.contains(call), "{name}/clippy.toml does not forbid {call}");
        }
    }
}

/// Lints apply to every package, and none is switched off quietly.
#[test]
fn lints_are_not_dodged() {
    const NEVER: [&str; 6] =
        ["unwrap_used", "todo", "unimplemented", "dbg_macro", "undocumented_unsafe_blocks", "unused_must_use"];
    let mut violations = Vec::new();
    for (name, package) in packages() {
        let manifest = fs::read_to_string(&package.manifest).unwrap();
        let table: toml::Table = manifest.parse().unwrap();
        if table.get("lints").and_then(|l| l.get("workspace")).and_then(toml::Value::as_bool) != Some(true) {
            violations.push(format!("{name} does not take the workspace's lints"));
        }
    }
    // One door for output in each package.
    let mut doors: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, text) in rust_files() {
        if file == "tests/tests/tidy.rs" {
            continue;
        }
        for line in code(&text).filter(|l| l.contains("allow(") || l.contains("expect(clippy")) {
            // clippy counts functions with `#[test]` as tests, not the helpers beside them.
            let test_program = file.starts_with("tests/tests/") || file.contains("/tests/");
            let is_never = |lint: &&str| line.contains(*lint) && !(test_program && *lint == "unwrap_used");
            if line.starts_with('#') && NEVER.iter().any(is_never) {
                violations.push(format!("{file}: {line}"));
            }
        }
        if code(&text).any(|l| l.contains("clippy::print_std") || l.contains("clippy::print_err")) {
            let package = file.split("/src/").next().unwrap_or(&file).to_owned();
            doors.entry(package).or_default().push(file);
        }
    }
    for (package, files) in doors {
        if files.len() > 1 {
            violations.push(format!("{package} prints in more than one file: {}", files.join(", ")));
        }
    }
    none(&violations);
}

/// One idea, one file; tests do not count.
#[test]
fn files_stay_readable() {
    let mut violations = Vec::new();
    for (file, text) in rust_files() {
        if file.contains("/tests/") && !file.starts_with("tests/src/") || file.ends_with("/tests.rs") {
            continue;
        }
        let lines = text.lines().position(|line| line.starts_with("#[cfg(test)]")).unwrap_or(text.lines().count());
        if lines > MAX_LINES {
            violations.push(format!("{file} has {lines} lines without its tests: split it"));
        } else if lines > WARN_LINES {
            announce(&format!("tidy: {file} has {lines} lines without its tests"));
        }
    }
    none(&violations);
}

/// The code map cannot rot: it lists exactly the crates that exist.
#[test]
fn architecture_lists_every_crate() {
    let text = fs::read_to_string(workspace().join("ARCHITECTURE.md")).unwrap();
    let listed: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("### `"))
        .filter_map(|rest| rest.split_once("` (")?.1.split('`').nth(1))
        .map(str::to_owned)
        .collect();
    assert_eq!(listed, packages().into_keys().collect::<BTreeSet<_>>());
}

/// The project is whole: it speaks of no particular machine or mirror.
#[test]
fn files_name_no_machine() {
    // Written in pieces, so that this file passes too.
    let patterns = [
        ["/wo", "rk/"],
        ["/ro", "ot/"],
        ["proxy.golang", ".org"],
        ["index.crates", ".io"],
        ["static.crates", ".io"],
        ["deb.debian", ".org"],
        ["registry.npmjs", ".org"],
    ]
    .map(|parts| parts.concat());
    let mut violations = Vec::new();
    for file in tracked() {
        let Ok(text) = fs::read_to_string(workspace().join(&file)) else { continue };
        for (number, line) in text.lines().enumerate() {
            if let Some(pattern) = patterns.iter().find(|p| line.contains(p.as_str())) {
                violations.push(format!("{file}:{}: {pattern}", number + 1));
            }
        }
    }
    none(&violations);
}

/// Generated code is never committed, its schemas are.
#[test]
fn schemas_are_the_source() {
    let files = tracked();
    for schema in ["vpn.proto", "codervpn_ext.proto", "tailnet.proto"] {
        let path = format!("proto/{schema}");
        assert!(files.contains(&path), "{path} is missing");
        let text = fs::read_to_string(workspace().join(&path)).unwrap();
        assert!(text.contains("syntax = \"proto3\";"), "{path} is not proto3");
    }
    none(
        &rust_files()
            .into_iter()
            .filter(|(_, text)| text.contains("@generated"))
            .map(|(f, _)| f)
            .filter(|f| f != "tests/tests/tidy.rs")
            .collect::<Vec<_>>(),
    );
}

/// Each of these settings breaks something that the daemon needs (the device,
/// the network, its per-interface sysctl, renaming over /etc/resolv.conf).
#[test]
fn the_unit_keeps_what_the_daemon_needs() {
    let unit = fs::read_to_string(workspace().join("packaging/systemd/codervpn.service")).unwrap();
    for setting in
        ["PrivateDevices", "PrivateNetwork", "PrivateUsers", "ProtectKernelTunables", "ProcSubset", "DynamicUser"]
    {
        assert!(!unit.contains(setting), "{setting}");
    }
    assert!(!unit.contains("/etc/resolv.conf"));
    assert!(!unit.contains("network-online.target"));
    for line in [
        "CapabilityBoundingSet=CAP_NET_ADMIN",
        "DeviceAllow=/dev/net/tun rw",
        "ReadWritePaths=/etc -/run/resolvconf -/run/nscd",
    ] {
        assert!(unit.lines().any(|l| l == line), "{line}");
    }
}

/// Every file says at its top what it decides.
#[test]
fn files_begin_with_what_they_decide() {
    let silent: Vec<_> = rust_files()
        .into_iter()
        // A module of tests is explained by the file it belongs to.
        .filter(|(file, _)| !file.ends_with("/tests.rs"))
        .filter(|(_, text)| !text.trim_start().starts_with("//"))
        .map(|(file, _)| format!("{file} has no comment at its top"))
        .collect();
    none(&silent);
}
