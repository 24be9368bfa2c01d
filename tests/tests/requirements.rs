//! Which test holds which requirement of the data plane (T-01 to T-54). A test names the requirements it holds at the
//! head of its name: `t10_…`, `t03_t08_…`. The list is printed; one without a test and without a reason fails.

#![allow(clippy::unwrap_used, reason = "helpers of tests count as tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use codervpn_testbed::{binaries::workspace, report::announce};

const LAST: u8 = 54;

/// Requirements that nothing here can break yet, and why.
const NOT_YET: [(u8, &str); 0] = [];

/// Tests by requirement, each with the file it stands in.
fn collect(folder: &Path, found: &mut BTreeMap<u8, BTreeSet<String>>) {
    let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()).collect();
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if path.is_dir() {
            if name != "target" && name != "foreign" && !name.starts_with('.') {
                collect(&path, found);
            }
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(&path).unwrap();
            let place = path.strip_prefix(workspace()).unwrap().display();
            for test in tests_of(&text) {
                for id in ids_of(test) {
                    found.entry(id).or_default().insert(format!("{test} ({place})"));
                }
            }
        }
    }
}

/// Names of functions that stand under a test attribute. Attributes and comments may lie between.
fn tests_of(text: &str) -> Vec<&str> {
    let mut marked = false;
    let mut tests = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            marked = true;
        } else if line.starts_with("#[ignore") {
            marked = false;
        } else if let Some(name) = line.strip_prefix("async fn ").or_else(|| line.strip_prefix("fn ")) {
            if std::mem::take(&mut marked) {
                tests.push(name.split(['(', '<']).next().unwrap());
            }
        } else if !(line.starts_with('#') || line.starts_with("//") || line.is_empty()) {
            marked = false;
        }
    }
    tests
}

/// The requirements at the head of a name.
fn ids_of(test: &str) -> Vec<u8> {
    let id = |part: &str| {
        let digits = part.strip_prefix('t').filter(|digits| digits.len() == 2)?;
        digits.parse::<u8>().ok().filter(|id| (1..=LAST).contains(id))
    };
    test.split('_').map_while(id).collect()
}

#[test]
fn names_are_read_as_meant() {
    assert_eq!(ids_of("t03_t08_pings_are_answered"), [3, 8]);
    assert_eq!(ids_of("the_t10_rule"), [0; 0]);
    assert_eq!(ids_of("t99_nothing"), [0; 0]);
    let text = "#[test]\nfn t01_a() {}\nfn t02_b() {}\n#[test]\n#[ignore = \"x\"]\nfn t03_c() {}\n#[tokio::test]\nasync fn t04_d() {}";
    assert_eq!(tests_of(text), ["t01_a", "t04_d"]);
}

#[test]
fn every_requirement_of_the_data_plane_has_a_test() {
    let mut found = BTreeMap::new();
    collect(workspace(), &mut found);
    let mut missing = Vec::new();
    for id in 1..=LAST {
        let reason = NOT_YET.iter().find(|(known, _)| *known == id).map(|(_, reason)| *reason);
        match (found.get(&id), reason) {
            (Some(tests), None) => {
                for test in tests {
                    announce(&format!("T-{id:02} {test}"));
                }
            }
            (None, Some(reason)) => announce(&format!("T-{id:02} does not apply yet: {reason}")),
            (Some(_), Some(_)) => missing.push(format!("T-{id:02} has a test now: take it off the list of exceptions")),
            (None, None) => missing.push(format!("T-{id:02} has no test")),
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
