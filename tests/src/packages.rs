//! Decides what is done about system packages that tests and demo need:
//! `tests/system-packages.txt` names them, what is missing is installed by
//! apt-get. As root at once; as a user on a terminal after showing the list
//! and asking; otherwise the command is printed and nothing is touched.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};

use crate::foreign;
use crate::report::announce;

const LIST: &str = include_str!("../system-packages.txt");

/// One line of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Need {
    package: String,
    /// Without it some tests are skipped, which is a failure only in CI.
    optional: bool,
    programs: Vec<String>,
}

/// Makes sure that every package is there, if `install` allows that.
pub fn provide(install: bool) -> anyhow::Result<()> {
    let all = parse(LIST)?;
    provide_these(&all, install)
}

/// The same for some packages of the list.
pub fn provide_some(packages: &[&str], install: bool) -> anyhow::Result<()> {
    let mut some = parse(LIST)?;
    some.retain(|need| packages.contains(&need.package.as_str()));
    ensure!(some.len() == packages.len(), "the list of packages lacks some of {packages:?}");
    provide_these(&some, install)
}

fn provide_these(needs: &[Need], install: bool) -> anyhow::Result<()> {
    let mut missing = missing_of(needs);
    // What is there but too old does not get newer by being installed again.
    missing.retain(|package| !needs.iter().any(|need| need.package == *package && need.is_outdated()));
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    let root = rustix::process::geteuid().is_root();
    if find_program("apt-get").is_none() {
        bail!("missing programs; install what your distribution calls: {names}");
    }
    let line = format!("{}apt-get install --no-install-recommends {names}", if root { "" } else { "sudo " });
    if !install || !(root || may_ask(&line)?) {
        bail!("missing packages; install them with:\n    {line}");
    }
    announce(&format!("installing {names}"));
    if apt_get(root, &["install"], &missing).is_err() {
        // Package lists of a fresh image are empty or stale.
        apt_get(root, &["update"], &[])?;
        apt_get(root, &["install"], &missing)?;
    }
    let still = missing_of(needs);
    let (optional, needed): (Vec<_>, Vec<_>) =
        needs.iter().filter(|need| still.contains(&need.package)).partition(|need| need.optional);
    for need in optional {
        announce(&format!("{} is still missing or too old; tests that need it are skipped", need.package));
    }
    let needed: Vec<_> = needed.into_iter().map(|need| need.package.as_str()).collect();
    ensure!(needed.is_empty(), "installed, but still without: {}", needed.join(" "));
    Ok(())
}

/// Packages none of whose programs may be missing, but one is.
pub fn missing() -> anyhow::Result<Vec<String>> {
    Ok(missing_of(&parse(LIST)?))
}

fn missing_of(needs: &[Need]) -> Vec<String> {
    needs.iter().filter(|need| !need.present()).map(|need| need.package.clone()).collect()
}

impl Need {
    fn present(&self) -> bool {
        self.programs.iter().all(|program| match program.as_str() {
            // Also when it is too old; a fresh look, since it may just have been installed.
            "go" => foreign::find_go().is_ok(),
            program => find_program(program).is_some(),
        })
    }
}

impl Need {
    fn is_outdated(&self) -> bool {
        self.optional && self.programs.iter().all(|program| find_program(program).is_some())
    }
}

/// The path of a program, also where a user's `PATH` lacks the folders for administration.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

fn parse(list: &str) -> anyhow::Result<Vec<Need>> {
    list.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (package, programs) = line.split_once(':').with_context(|| format!("no programs in {line:?}"))?;
            let programs = programs.split_whitespace().map(str::to_owned).collect();
            let (package, optional) = package.strip_prefix('?').map_or((package, false), |package| (package, true));
            Ok(Need { package: package.to_owned(), optional, programs })
        })
        .collect()
}

/// Asks a person at a terminal who has sudo.
fn may_ask(line: &str) -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() || find_program("sudo").is_none() {
        return Ok(false);
    }
    let mut stderr = std::io::stderr();
    write!(stderr, "Tests and demo need packages that are not installed. Run\n    {line}\nnow? [Y/n] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "" | "y" | "Y" | "yes"))
}

fn apt_get(root: bool, verb: &[&str], packages: &[String]) -> anyhow::Result<()> {
    let mut command = if root {
        Command::new("apt-get")
    } else {
        let mut command = Command::new("sudo");
        command.arg("apt-get");
        command
    };
    command.args(["-q", "-y"]).args(verb);
    if !packages.is_empty() {
        command.arg("--no-install-recommends").args(packages);
    }
    let status = command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null()).status()?;
    ensure!(status.success(), "apt-get {} failed ({status})", verb.join(" "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_well_formed() {
        let needs = parse(LIST).unwrap();
        assert!(needs.iter().any(|need| need.package == "iproute2" && need.programs == ["ip"]));
        assert!(needs.iter().all(|need| !need.programs.is_empty()));
        // Their installation replaces /etc/resolv.conf.
        assert!(needs.iter().all(|need| need.package != "systemd-resolved" && need.package != "resolvconf"));
        assert!(needs.iter().any(|need| need.package == "golang-go" && need.optional));
        assert!(parse("a line without programs").is_err());
    }

    #[test]
    fn programs_are_found_by_path() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program-anywhere").is_none());
        let absent = Need {
            package: "x".into(),
            optional: false,
            programs: vec!["sh".into(), "no-such-program-anywhere".into()],
        };
        assert!(!absent.present());
    }
}
