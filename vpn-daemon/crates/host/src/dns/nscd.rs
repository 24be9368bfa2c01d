//! Telling the name service cache daemon that the hosts it remembers as absent may exist now
//! (D-23). Whoever runs none loses nothing.

use std::path::Path;
use std::process::{Command, Stdio};

/// Only from here, never by a search path (`dns-and-os.md` 3.5).
const FOLDERS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// Asks it to forget. Does not wait: a hung cache must not hold up a stop.
pub(super) fn invalidate() {
    if !Path::new("/run/nscd/socket").exists() {
        return;
    }
    let Some(program) = FOLDERS.iter().map(|folder| Path::new(folder).join("nscd")).find(|path| path.exists()) else {
        return;
    };
    let spawned = Command::new(program)
        .args(["-i", "hosts"])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    match spawned {
        // Reaped by a thread that ends with the child.
        Ok(mut child) => {
            let _ = std::thread::Builder::new().name("nscd".to_owned()).spawn(move || child.wait());
        }
        Err(error) => tracing::debug!(%error, "cannot run nscd"),
    }
}
