//! Crashes at every step, and everybody else's hands on the file.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::*;
use crate::dns::direct::restore;
use crate::routes::Prefix;

thread_local! {
    /// How many checkpoints to pass before the "crash".
    static FUSE: Cell<Option<u32>> = const { Cell::new(None) };
    /// How many were passed in all.
    static PASSED: Cell<u32> = const { Cell::new(0) };
}

struct Crash;

pub(super) fn checkpoint() {
    PASSED.set(PASSED.get() + 1);
    match FUSE.get() {
        None => {}
        Some(0) => {
            FUSE.set(None);
            // No destructor of ours touches a file, so unwinding leaves what a kill leaves.
            resume_unwind(Box::new(Crash));
        }
        Some(left) => FUSE.set(Some(left - 1)),
    }
}

/// Runs `action` with a crash at checkpoint `at`; false when it ended before.
fn crashes(at: u32, action: impl FnOnce()) -> bool {
    FUSE.set(Some(at));
    let crashed = catch_unwind(AssertUnwindSafe(action)).is_err_and(|cause| {
        assert!(cause.is::<Crash>(), "a real panic at checkpoint {at}");
        true
    });
    FUSE.set(None);
    crashed
}

struct Machine {
    dir: tempfile::TempDir,
    paths: Paths,
}

/// What a user would compare: kind, bytes, mode, owner.
#[derive(Debug, PartialEq)]
struct Seen(Option<(Option<PathBuf>, Vec<u8>, u32, u32)>);

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut paths = Paths::new(dir.path().join("state"), dir.path().join("run"));
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        paths.resolv_conf = dir.path().join("etc/resolv.conf");
        Machine { dir, paths }
    }

    fn with_file(bytes: &[u8], mode: u32) -> Self {
        let machine = Machine::new();
        std::fs::write(&machine.paths.resolv_conf, bytes).unwrap();
        std::fs::set_permissions(&machine.paths.resolv_conf, std::fs::Permissions::from_mode(mode)).unwrap();
        machine
    }

    fn with_link(target: &str, bytes: Option<&[u8]>) -> Self {
        let machine = Machine::new();
        if let Some(bytes) = bytes {
            std::fs::write(machine.dir.path().join("etc").join(target), bytes).unwrap();
        }
        std::os::unix::fs::symlink(target, &machine.paths.resolv_conf).unwrap();
        machine
    }

    fn see(&self) -> Seen {
        let path = &self.paths.resolv_conf;
        Seen(std::fs::symlink_metadata(path).ok().map(|metadata| {
            (
                std::fs::read_link(path).ok(),
                std::fs::read(path).unwrap_or_default(),
                metadata.mode() & 0o7777,
                metadata.uid(),
            )
        }))
    }

    fn install(&self) -> Vec<u8> {
        Store::lock(&self.paths).unwrap().install(&config()).unwrap()
    }

    fn text(&self) -> Vec<u8> {
        std::fs::read(&self.paths.resolv_conf).unwrap()
    }

    /// Nothing of ours, hidden files included.
    fn assert_clean(&self) {
        let left: Vec<_> = [self.paths.dns_dir(), self.dir.path().join("etc")]
            .iter()
            .filter_map(|folder| std::fs::read_dir(folder).ok())
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "resolv.conf" && name != "stub")
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

fn config() -> DnsConfig {
    DnsConfig {
        interface_index: 7,
        server: "fd60:627a:a42b::53".parse().unwrap(),
        suffixes: vec!["coder".to_owned()],
        reverse_zone: String::new(),
        search: false,
        tunnel_prefix: Prefix::new("fd60:627a:a42b::".parse().unwrap(), 48),
    }
}

const ORIGINAL: &[u8] = b"# by hand\nsearch corp.example\nnameserver 192.0.2.1\noptions trust-ad\n";

fn machines() -> Vec<Machine> {
    vec![
        Machine::with_file(ORIGINAL, 0o644),
        Machine::with_file(ORIGINAL, 0o600),
        Machine::with_file(b"", 0o644),
        Machine::with_file(b"nameserver 192.0.2.1", 0o644),
        Machine::with_link("stub", Some(ORIGINAL)),
        Machine::with_link("stub", None),
        Machine::new(),
    ]
}

// D-01, D-06, D-08
#[test]
fn start_and_stop_leave_the_machine_as_it_was() {
    for machine in machines() {
        let before = machine.see();
        machine.install();
        let ours = machine.text();
        assert!(resolv_conf::is_marked(&ours));
        assert!(!machine.paths.resolv_conf.is_symlink());
        // Any user's program must be able to read it, whatever the original allowed.
        assert_eq!(std::fs::metadata(&machine.paths.resolv_conf).unwrap().mode() & 0o777, 0o644);
        assert_eq!(restore(&machine.paths).unwrap(), Some(Restored::Original));
        assert_eq!(machine.see(), before);
        machine.assert_clean();
        assert_eq!(restore(&machine.paths).unwrap(), None);
        assert_eq!(machine.see(), before);
    }
}

// D-01: kill -9 at any moment of a start, then cleanup, which may be killed as well.
#[test]
fn a_crash_at_any_step_is_undone() {
    let mut steps = 0;
    for case in 0..machines().len() {
        for at in 0.. {
            let machine = machines().remove(case);
            let before = machine.see();
            if !crashes(at, || {
                machine.install();
            }) {
                break;
            }
            steps += 1;
            restore(&machine.paths).unwrap();
            assert_eq!(machine.see(), before, "case {case}, crash at {at}");
            machine.assert_clean();
        }
        for at in 0.. {
            let machine = machines().remove(case);
            let before = machine.see();
            machine.install();
            if !crashes(at, || {
                restore(&machine.paths).unwrap();
            }) {
                break;
            }
            steps += 1;
            restore(&machine.paths).unwrap();
            assert_eq!(machine.see(), before, "case {case}, crash of restore at {at}");
            machine.assert_clean();
        }
    }
    assert!(steps > 150, "the checkpoints are gone: {steps}");
}

// D-01: the next start repairs first, and takes the true original for its own backup.
#[test]
fn a_crash_at_any_step_followed_by_a_start_keeps_the_true_original() {
    for at in 0.. {
        let machine = Machine::with_file(ORIGINAL, 0o644);
        let before = machine.see();
        if !crashes(at, || {
            machine.install();
        }) {
            break;
        }
        assert_eq!(machine.install(), ORIGINAL, "crash at {at}");
        restore(&machine.paths).unwrap();
        assert_eq!(machine.see(), before);
    }
}

/// In place, as on a mount point, where rename is refused.
fn install_in_place(machine: &Machine) {
    let store = Store::lock(&machine.paths).unwrap();
    store.install(&config()).unwrap();
    let ours = machine.text();
    std::fs::write(&machine.paths.resolv_conf, ORIGINAL).unwrap();
    store.write_in_place(&ours).unwrap();
}

// D-05, D-01: torn writes of both directions are recognised.
#[test]
fn a_torn_write_in_place_is_undone() {
    let mut torn = 0;
    for at in 0.. {
        let machine = Machine::with_file(ORIGINAL, 0o644);
        let before = machine.see();
        if !crashes(at, || install_in_place(&machine)) {
            break;
        }
        torn += usize::from(machine.text() != ORIGINAL);
        restore(&machine.paths).unwrap();
        assert_eq!(machine.see(), before, "crash at {at}");
    }
    for at in 0.. {
        let machine = Machine::with_file(ORIGINAL, 0o644);
        let before = machine.see();
        machine.install();
        if !crashes(at, || {
            Store::lock(&machine.paths).unwrap().write_in_place(ORIGINAL).unwrap();
        }) {
            break;
        }
        torn += 1;
        restore(&machine.paths).unwrap();
        assert_eq!(machine.see(), before, "crash of restore at {at}");
    }
    assert!(torn > 20, "{torn}");
}

#[test]
fn torn_is_a_beginning_of_one_and_the_rest_of_the_other() {
    assert!(is_torn(b"NEold!", b"olold!", b"NEW"));
    assert!(is_torn(b"NEW!", b"old!", b"NEW"));
    assert!(is_torn(b"NEWER", b"old", b"NEWER STILL"));
    assert!(!is_torn(b"old!", b"old!", b"NEW"));
    assert!(!is_torn(b"NEW", b"old!", b"NEW"));
    assert!(!is_torn(b"NExld!", b"olold!", b"NEW"));
    assert!(!is_torn(b"", b"", b""));
}

// D-02: somebody's newer file, link or removal wins.
#[test]
fn what_others_did_in_between_is_never_overwritten() {
    let theirs = b"nameserver 192.0.2.77\n";

    let machine = Machine::with_file(ORIGINAL, 0o644);
    machine.install();
    std::fs::write(&machine.paths.resolv_conf, theirs).unwrap();
    assert_eq!(restore(&machine.paths).unwrap(), Some(Restored::LeftAlone));
    assert_eq!(machine.text(), theirs);
    machine.assert_clean();

    let machine = Machine::with_file(ORIGINAL, 0o644);
    machine.install();
    std::fs::write(machine.dir.path().join("etc/stub"), theirs).unwrap();
    std::fs::remove_file(&machine.paths.resolv_conf).unwrap();
    std::os::unix::fs::symlink("stub", &machine.paths.resolv_conf).unwrap();
    assert_eq!(restore(&machine.paths).unwrap(), Some(Restored::LeftAlone));
    assert!(machine.paths.resolv_conf.is_symlink());
    machine.assert_clean();

    let machine = Machine::with_file(ORIGINAL, 0o644);
    machine.install();
    std::fs::remove_file(&machine.paths.resolv_conf).unwrap();
    assert_eq!(restore(&machine.paths).unwrap(), Some(Restored::LeftAlone));
    assert_eq!(machine.see(), Seen(None));
    machine.assert_clean();
}

// D-02: an edit of our own file survives if it can work without us, else it is set aside.
#[test]
fn edits_of_our_file_are_kept() {
    let machine = Machine::with_file(ORIGINAL, 0o644);
    machine.install();
    let mut text = machine.text();
    text.extend_from_slice(b"nameserver 192.0.2.77\n");
    std::fs::write(&machine.paths.resolv_conf, &text).unwrap();
    assert_eq!(restore(&machine.paths).unwrap(), Some(Restored::Edited));
    let text = String::from_utf8(machine.text()).unwrap();
    assert!(text.contains("nameserver 192.0.2.77") && !text.contains("fd60"), "{text}");

    let machine = Machine::with_file(ORIGINAL, 0o644);
    machine.install();
    let mut text = machine.text();
    text.extend_from_slice(b"# a note\n");
    std::fs::write(&machine.paths.resolv_conf, &text).unwrap();
    assert_eq!(restore(&machine.paths).unwrap(), Some(Restored::Original));
    assert_eq!(machine.text(), ORIGINAL);
    assert_eq!(std::fs::read(machine.paths.dns_dir().join("resolv.conf.edited")).unwrap(), text);
}

#[test]
fn a_lost_or_damaged_backup_does_not_lose_the_servers() {
    for lose in ["all", "resolv.conf.orig", "state.json"] {
        let machine = Machine::with_file(ORIGINAL, 0o644);
        machine.install();
        if lose == "all" {
            std::fs::remove_dir_all(&machine.paths.state_dir).unwrap();
        } else {
            std::fs::write(machine.paths.dns_dir().join(lose), "damaged").unwrap();
        }
        assert_eq!(restore(&machine.paths).unwrap(), Some(Restored::Carried), "{lose}");
        assert_eq!(machine.text(), ORIGINAL);
    }
}

#[test]
fn what_is_no_resolver_configuration_is_refused_untouched() {
    let machine = Machine::with_file(&vec![b'#'; MAX_SIZE + 1], 0o644);
    assert!(Store::lock(&machine.paths).unwrap().install(&config()).is_err());
    assert_eq!(machine.text().len(), MAX_SIZE + 1);

    let machine = Machine::new();
    std::fs::create_dir(&machine.paths.resolv_conf).unwrap();
    let error = Store::lock(&machine.paths).unwrap().install(&config()).unwrap_err();
    assert!(matches!(error, Error::NotResolvConf { .. }), "{error}");
    assert_eq!(restore(&machine.paths).unwrap(), None);
    machine.assert_clean();
}

// N-11 in spirit: two processes never edit at once.
#[test]
fn the_folder_is_locked_while_we_edit() {
    let machine = Machine::with_file(ORIGINAL, 0o644);
    let held = Store::lock(&machine.paths).unwrap();
    assert!(Store::lock(&machine.paths).is_err());
    drop(held);
    machine.install();
    // The thread that holds the lock may be the one that panics.
    let _held = Store::lock(&machine.paths).unwrap();
    assert!(restore(&machine.paths).is_err());
    crate::dns::direct::restore_while_aborting(&machine.paths).unwrap();
    assert_eq!(machine.text(), ORIGINAL);
}
