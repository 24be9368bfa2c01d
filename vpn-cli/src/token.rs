//! The session token while it is in this program, and the places it may come from (dns-and-os 5.4).
//!
//! Never the command line, which every user can read, and never an environment variable, which is inherited.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal as _, Read};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::problem::Problem;

/// Longest file that is looked at for a token. Tokens have a few dozen characters.
const MAX_TOKEN: u64 = 16 * 1024;

const TOKEN_FILE: &str = "CODER_SESSION_TOKEN_FILE";
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";
const CREDENTIAL: &str = "coder-session-token";

/// Neither `Debug` nor `Display`: it must have no way into a log or an error text.
pub(crate) struct Token(Zeroizing<String>);

impl Token {
    /// Takes what a file, a pipe or a person gave, with or without an end of line.
    pub(crate) fn parse(text: &str, origin: &str) -> Result<Self, Problem> {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Err(Problem::failed(format!("{origin} holds no session token"), "copy a fresh one and try again"));
        }
        if !trimmed.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Problem::failed(
                format!("{origin} does not hold a session token: there are characters that no token has"),
                "give the token alone, on one line",
            ));
        }
        Ok(Self(Zeroizing::new(trimmed.to_owned())))
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

/// Where a token is to be read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    File(PathBuf),
    Stdin,
    Prompt,
}

impl Source {
    /// The first that applies of: the flag, the environment's file, the credential of a systemd unit.
    pub(crate) fn given(flag: Option<&Path>) -> Option<Self> {
        Self::choose(flag, |name| env::var_os(name))
    }

    fn choose(flag: Option<&Path>, var: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        if let Some(path) = flag {
            // Typing into a plain terminal would show the token.
            return Some(match path.to_str() {
                Some("-") if io::stdin().is_terminal() => Self::Prompt,
                Some("-") => Self::Stdin,
                _ => Self::File(path.to_owned()),
            });
        }
        let var = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(path) = var(TOKEN_FILE) {
            return Some(Self::File(path));
        }
        let credential = var(CREDENTIALS)?.join(CREDENTIAL);
        credential.is_file().then_some(Self::File(credential))
    }

    /// `url` is where the person can get a token.
    pub(crate) async fn read(&self, url: &str) -> Result<Token, Problem> {
        match self {
            Self::File(path) => {
                let origin = path.display().to_string();
                let cannot = |error: io::Error| {
                    Problem::failed(format!("cannot read the session token from {origin}: {error}"), "check the path")
                };
                Token::parse(&read_limited(File::open(path).map_err(cannot)?).map_err(cannot)?, &origin)
            }
            Self::Stdin => {
                let text = read_limited(io::stdin().lock()).map_err(|error| {
                    Problem::failed(format!("cannot read the session token from standard input: {error}"), "")
                })?;
                Token::parse(&text, "standard input")
            }
            Self::Prompt => prompt(url).await,
        }
    }
}

fn read_limited(reader: impl Read) -> io::Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::new());
    reader.take(MAX_TOKEN + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_TOKEN {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too large to be a token"));
    }
    Ok(text)
}

/// Asks without echo, on the terminal even when standard input is something else.
async fn prompt(url: &str) -> Result<Token, Problem> {
    let terminal = terminal::Silent::open().map_err(|_| {
        Problem::usage(
            "there is no terminal to ask for a session token",
            format!("get one at {url}/cli-auth and pass it with --token-file FILE, or --token-file - for a pipe"),
        )
    })?;
    let cannot = |why: &dyn std::fmt::Display| {
        Problem::failed(format!("cannot read from the terminal: {why}"), "pass the token with --token-file")
    };
    // Whoever drops this future, as Ctrl-C does, gets a terminal back that echoes.
    let line = terminal.ask("Session token: ").map_err(|error| cannot(&error))?.await;
    drop(terminal);
    match line {
        Ok(line) => Token::parse(&line.map_err(|error| cannot(&error))?, "your answer"),
        Err(error) => Err(cannot(&error)),
    }
}

/// Reading and restoring are in one hand here: a helper that put the settings back by itself, in the thread that
/// reads, would race with Ctrl-C and could leave the terminal silent.
#[cfg(unix)]
mod terminal {
    use std::fs::File;
    use std::io::{self, Read as _, Write as _};

    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
    use tokio::task::{JoinHandle, spawn_blocking};
    use zeroize::Zeroizing;

    /// The longest line the kernel gathers.
    const MAX_LINE: usize = 4096;

    /// A terminal that does not echo, from before the prompt is seen: whoever pastes at once is not shown the token
    /// either. Its settings are put back on every way out.
    pub(super) struct Silent {
        tty: File,
        settings: Termios,
    }

    impl Silent {
        pub(super) fn open() -> io::Result<Self> {
            let tty = File::options().read(true).write(true).open("/dev/tty")?;
            let settings = tcgetattr(&tty)?;
            let mut silent = settings.clone();
            silent.local_modes.remove(LocalModes::ECHO | LocalModes::ECHONL);
            tcsetattr(&tty, OptionalActions::Flush, &silent)?;
            Ok(Self { tty, settings })
        }

        /// One line, read in a thread of its own, since a terminal cannot be waited for otherwise.
        pub(super) fn ask(&self, prompt: &str) -> io::Result<JoinHandle<io::Result<Zeroizing<String>>>> {
            (&self.tty).write_all(prompt.as_bytes())?;
            let mut tty = self.tty.try_clone()?;
            Ok(spawn_blocking(move || {
                let mut line = Zeroizing::new(vec![0; MAX_LINE]);
                let read = tty.read(&mut line)?;
                line.truncate(read);
                let text = std::str::from_utf8(&line).map_err(|_| io::Error::other("this is not text"))?;
                Ok(Zeroizing::new(text.to_owned()))
            }))
        }
    }

    impl Drop for Silent {
        fn drop(&mut self) {
            // Nothing can be done about a terminal that is gone. What was pasted beyond the line is thrown away, or
            // the shell would run it. The line feed of the answer was not shown.
            let _ = tcsetattr(&self.tty, OptionalActions::Flush, &self.settings);
            let _ = self.tty.write_all(b"\n");
        }
    }
}

#[cfg(not(unix))]
mod terminal {
    use std::io;

    use tokio::task::JoinHandle;
    use zeroize::Zeroizing;

    pub(super) struct Silent;

    impl Silent {
        pub(super) fn open() -> io::Result<Self> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub(super) fn ask(&self, _prompt: &str) -> io::Result<JoinHandle<io::Result<Zeroizing<String>>>> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Token, Problem> {
        Token::parse(text, "the file")
    }

    #[test]
    fn ends_of_line_are_no_part_of_a_token() {
        for text in ["abc-DEF", "abc-DEF\n", "abc-DEF\r\n", "  abc-DEF \n"] {
            assert_eq!(parse(text).map(|token| token.expose().to_owned()), Ok("abc-DEF".to_owned()));
        }
    }

    #[test]
    fn a_bad_token_is_refused_without_repeating_it() {
        for text in ["", "\n", "SECRET SECRET", "SECRET\nSECRET", "SECRÉT", "SECRET\u{7}"] {
            let problem = parse(text).map(|_| ()).unwrap_err();
            assert!(!format!("{problem:?}").contains("SECR"), "{problem:?}");
        }
    }

    #[test]
    fn sources_have_an_order() {
        let dir = tempfile::tempdir().unwrap();
        let credential = dir.path().join(CREDENTIAL);
        let credentials = dir.path().as_os_str().to_owned();
        let only_credentials = |name: &str| (name == CREDENTIALS).then(|| credentials.clone());
        assert_eq!(Source::choose(None, |_| None), None);
        assert_eq!(Source::choose(None, only_credentials), None, "the file is not there");
        std::fs::write(&credential, "x").unwrap();
        assert_eq!(Source::choose(None, only_credentials), Some(Source::File(credential)));
        let both = |name: &str| Some(if name == TOKEN_FILE { "/t".into() } else { credentials.clone() });
        assert_eq!(Source::choose(None, both), Some(Source::File("/t".into())));
        assert_eq!(Source::choose(Some(Path::new("/flag")), both), Some(Source::File("/flag".into())));
    }
}
