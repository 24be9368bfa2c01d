//! The stored login: `codervpn/session` in the user's configuration folder, readable by nobody else.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::problem::Problem;
use crate::token::Token;

/// A file of ours is far below.
const MAX_FILE: u64 = 64 * 1024;

pub(crate) struct Session {
    pub(crate) url: String,
    pub(crate) token: Token,
}

/// Where the login of this user is kept.
pub(crate) struct Store {
    folder: PathBuf,
}

#[derive(Serialize)]
struct Written<'a> {
    url: &'a str,
    token: &'a str,
}

#[derive(Deserialize)]
struct Read {
    url: String,
    token: String,
}

impl Store {
    pub(crate) fn of_this_user() -> Result<Self, Problem> {
        // The XDG rules: only an absolute path counts.
        let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
        match config {
            Some(config) => Ok(Self { folder: config.join("codervpn") }),
            None => Err(Problem::failed(
                "there is no place for your login: neither XDG_CONFIG_HOME nor HOME is set",
                "set HOME to your home folder",
            )),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join("session")
    }

    /// `None` when nobody is logged in.
    pub(crate) fn load(&self) -> Result<Option<Session>, Problem> {
        let path = self.path();
        let cannot = |error: &dyn std::fmt::Display| {
            Problem::failed(
                format!("cannot read the stored login {}: {error}", path.display()),
                "log in again with `codervpn login URL`",
            )
        };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(cannot(&error)),
        };
        let mut text = Zeroizing::new(String::new());
        file.take(MAX_FILE).read_to_string(&mut text).map_err(|error| cannot(&error))?;
        // serde's own words may quote what they do not like; it may be the token.
        let read: Read = serde_json::from_str(&text).map_err(|_| cannot(&"it is damaged"))?;
        let token = Token::parse(&Zeroizing::new(read.token), &path.display().to_string())?;
        Ok(Some(Session { url: read.url, token }))
    }

    /// Replaces the login in one step: others see the old file or the new one, never a part.
    pub(crate) fn save(&self, session: &Session) -> Result<(), Problem> {
        let cannot = |error: io::Error| {
            Problem::failed(
                format!("cannot store the login in {}: {error}", self.path().display()),
                "check the rights of that folder, and that the disk is not full",
            )
        };
        make_private_folder(&self.folder).map_err(cannot)?;
        let written = Written { url: &session.url, token: session.token.expose() };
        // Room for all of it, so that no copy is left behind by growing.
        let mut json = Zeroizing::new(Vec::with_capacity(2 * (session.url.len() + session.token.expose().len()) + 64));
        serde_json::to_writer(&mut *json, &written).map_err(|error| cannot(error.into()))?;
        json.push(b'\n');
        // Created for its owner only, whatever the umask.
        let mut file = tempfile::Builder::new().prefix(".session-").tempfile_in(&self.folder).map_err(cannot)?;
        file.write_all(&json).map_err(cannot)?;
        file.as_file().sync_all().map_err(cannot)?;
        file.persist(self.path()).map_err(|error| cannot(error.error))?;
        Ok(())
    }

    /// Whether there was one.
    pub(crate) fn delete(&self) -> Result<bool, Problem> {
        match fs::remove_file(self.path()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Problem::failed(
                format!("cannot delete the stored login {}: {error}", self.path().display()),
                "delete that file yourself",
            )),
        }
    }

    /// Whether others than the owner may read the login.
    #[cfg(unix)]
    pub(crate) fn is_open_to_others(&self) -> bool {
        use std::os::unix::fs::PermissionsExt as _;
        fs::metadata(self.path()).is_ok_and(|metadata| metadata.permissions().mode() & 0o077 != 0)
    }

    #[cfg(not(unix))]
    pub(crate) fn is_open_to_others(&self) -> bool {
        false
    }
}

/// What to say to somebody without a login.
pub(crate) fn not_logged_in() -> Problem {
    if runs_under_sudo() {
        return Problem::failed("root is not logged in", "log in as root, or run without sudo");
    }
    Problem::failed("you are not logged in", "log in with `codervpn login URL`")
}

#[cfg(unix)]
fn runs_under_sudo() -> bool {
    rustix::process::geteuid().is_root() && env::var_os("SUDO_UID").is_some()
}

#[cfg(not(unix))]
fn runs_under_sudo() -> bool {
    false
}

#[cfg(unix)]
fn make_private_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    // Folders above it that are missing are created private too.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700))
}

#[cfg(not(unix))]
fn make_private_folder(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn session(token: &str) -> Session {
        let token = Token::parse(token, "test").unwrap();
        Session { url: "https://coder.example.com/".into(), token }
    }

    #[test]
    fn a_login_is_private_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store { folder: dir.path().join("config/codervpn") };
        assert!(store.load().unwrap().is_none());
        store.save(&session("first")).unwrap();
        // A folder and a file that somebody opened are closed again.
        fs::set_permissions(&store.folder, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(store.path(), fs::Permissions::from_mode(0o644)).unwrap();
        assert!(store.is_open_to_others());
        store.save(&session("sec\"ond")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&store.folder), mode(&store.path())), (0o700, 0o600));
        assert!(!store.is_open_to_others());
        let loaded = store.load().unwrap().unwrap();
        assert_eq!((loaded.url.as_str(), loaded.token.expose()), ("https://coder.example.com/", "sec\"ond"));
        assert_eq!(fs::read_dir(&store.folder).unwrap().count(), 1, "no temporary file is left");
        assert!(store.delete().unwrap());
        assert!(!store.delete().unwrap());
    }

    #[test]
    fn a_damaged_login_is_an_error_that_does_not_quote_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store { folder: dir.path().to_owned() };
        for text in ["SECRET", "{\"url\":\"x\",\"token\":SECRET}", "{\"token\":\"SECRET\"}", "[\"SECRET\"]"] {
            fs::write(store.path(), text).unwrap();
            let problem = store.load().map(|_| ()).unwrap_err();
            assert!(!format!("{problem:?}").contains("SECRET"), "{problem:?}");
        }
    }
}
