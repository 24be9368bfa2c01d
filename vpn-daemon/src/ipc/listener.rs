//! Opens the socket and admits clients: by what the kernel says of the process that connected, in bounded numbers.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use codervpn_host::privilege;
use interprocess::local_socket::tokio::{Listener as Socket, Stream};
use interprocess::local_socket::traits::tokio::Listener as _;
use interprocess::local_socket::{GenericFilePath, ListenerOptions, ToFsName as _};
use interprocess::os::unix::local_socket::ListenerOptionsExt as _;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::access::{Caller, Policy};
use super::client;
use crate::config::{Config, SharedConfig, UserRef};
use crate::daemon::{Asker, DaemonHandle};

/// Connections of all users, and of one (codervpn-protocol 11.5.4).
const CONNECTIONS: usize = 64;
const CONNECTIONS_PER_UID: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum Open {
    #[error("{} is in use by a running daemon (perhaps Coder Desktop's); stop that one, or set socket.path", .0.display())]
    InUse(PathBuf),
    #[error("cannot listen on {}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("auth.allow_users: there is no user {0:?} on this machine")]
    NoSuchUser(String),
    #[error("cannot look up users and groups: {0}")]
    Lookup(io::Error),
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
}

/// The bound socket.
pub struct Listener {
    socket: Socket,
    path: PathBuf,
    policy: Policy,
    group: Option<u32>,
    places: Arc<Places>,
}

impl Listener {
    /// Binds the socket with its mode and group. Must be called by the holder of the instance lock, who alone may remove
    /// a file that a dead daemon left.
    pub async fn open(config: &Config) -> Result<Self, Open> {
        let path = config.socket.path.clone();
        let group = privilege::group_id(&config.socket.group).map_err(Open::Lookup)?;
        if group.is_none() {
            let group = &config.socket.group;
            tracing::warn!(
                "there is no group {group}: only root and auth.allow_users can use the VPN; to change that run \
                 `groupadd --system {group}` and `usermod --append --groups {group} USER`"
            );
        }
        let allowed = allowed_uids(&config.auth.allow_users)?;
        let fault = |source| Open::Io { path: path.clone(), source };
        if let Some(folder) = path.parent() {
            // 0755 whatever the umask: users have to get at the socket in it.
            create_folder(folder).map_err(fault)?;
        }
        remove_dead(&path).await?;
        let name = path.as_path().to_fs_name::<GenericFilePath>().map_err(fault)?;
        // Strict first: bind applies the umask, and going from strict to wide leaves no window.
        let options = ListenerOptions::new().name(name).mode(0o600).reclaim_name(false);
        let socket = options.create_tokio().map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => Open::InUse(path.clone()),
            _ => fault(source),
        })?;
        let mut mode = config.socket_mode()?;
        if config.auth.public_status || (group.is_none() && !allowed.is_empty()) {
            // Whoever is not admitted is turned away after connecting; without a group the kernel cannot do it.
            mode |= 0o666;
        }
        privilege::set_socket_access(&path, group, mode).map_err(fault)?;
        Ok(Self { socket, path, policy: Policy::new(&config.auth, allowed), group, places: Arc::default() })
    }

    /// Serves clients until `shutdown`, then waits until each has been told the end.
    pub async fn serve(self, config: SharedConfig, daemon: DaemonHandle, shutdown: CancellationToken) {
        let clients = TaskTracker::new();
        loop {
            let stream = tokio::select! {
                () = shutdown.cancelled() => break,
                accepted = self.socket.accept() => match accepted {
                    Ok(stream) => stream,
                    Err(error) => {
                        // Out of descriptors, most likely: wait for some to come back instead of spinning.
                        tracing::warn!(%error, "cannot accept a client");
                        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            if let Some((asker, place)) = self.admit(&stream) {
                let serve = client::serve(stream, asker, config.clone(), daemon.clone(), shutdown.clone());
                clients.spawn(async move {
                    serve.await;
                    drop(place);
                });
            }
        }
        clients.close();
        clients.wait().await;
        let _ = std::fs::remove_file(&self.path);
    }

    /// `None`: the connection is to be closed before a header was written.
    fn admit(&self, stream: &Stream) -> Option<(Asker, Place)> {
        let Stream::UdSocket(socket) = stream;
        let socket = socket.as_fd();
        let peer = privilege::peer_credentials(socket).ok()?;
        let in_group = self.group.is_some_and(|group| {
            peer.gid == group || privilege::peer_groups(socket).is_ok_and(|groups| groups.contains(&group))
        });
        let Some(standing) = self.policy.standing(Caller { uid: peer.uid, in_group }) else {
            tracing::warn!(uid = peer.uid, "client refused: neither root, nor in the group, nor in auth.allow_users");
            return None;
        };
        let Some(place) = Places::take(&self.places, peer.uid) else {
            tracing::warn!(uid = peer.uid, "client refused: too many connections");
            return None;
        };
        Some((Asker { uid: peer.uid, standing }, place))
    }
}

fn allowed_uids(users: &[UserRef]) -> Result<Vec<u32>, Open> {
    users
        .iter()
        .map(|user| match user {
            UserRef::Uid(uid) => Ok(*uid),
            UserRef::Name(name) => {
                privilege::user_id(name).map_err(Open::Lookup)?.ok_or_else(|| Open::NoSuchUser(name.clone()))
            }
        })
        .collect()
}

fn create_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    if folder.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(folder)?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))
}

/// Removes a socket file that nobody answers at.
async fn remove_dead(path: &Path) -> Result<(), Open> {
    let fault = |source| Open::Io { path: path.to_owned(), source };
    match tokio::net::UnixStream::connect(path).await {
        Ok(_) => Err(Open::InUse(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            use std::os::unix::fs::FileTypeExt as _;
            let found = std::fs::symlink_metadata(path).map_err(fault)?;
            if !found.file_type().is_socket() {
                return Err(fault(io::Error::other("the file is no socket; it is left alone")));
            }
            std::fs::remove_file(path).map_err(fault)
        }
        Err(error) => Err(fault(error)),
    }
}

/// Connections by user.
#[derive(Default)]
struct Places(Mutex<HashMap<u32, usize>>);

/// One connection's place; free again when dropped.
struct Place {
    places: Arc<Places>,
    uid: u32,
}

impl Places {
    fn take(places: &Arc<Self>, uid: u32) -> Option<Place> {
        let mut taken = places.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = taken.values().sum();
        let own = taken.entry(uid).or_default();
        if all >= CONNECTIONS || *own >= CONNECTIONS_PER_UID {
            return None;
        }
        *own += 1;
        drop(taken);
        Some(Place { places: places.clone(), uid })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ninth_connection_of_one_user_is_refused_while_others_are_served() {
        let places = Arc::new(Places::default());
        let mut held: Vec<_> = (0..8).map(|_| Places::take(&places, 1000).unwrap()).collect();
        assert!(Places::take(&places, 1000).is_none());
        assert!(Places::take(&places, 1001).is_some());
        held.pop();
        assert!(Places::take(&places, 1000).is_some());
    }

    #[test]
    fn sixty_four_connections_are_the_limit_of_all() {
        let places = Arc::new(Places::default());
        let _held: Vec<_> = (0..64).map(|n| Places::take(&places, n / 8).unwrap()).collect();
        assert!(Places::take(&places, 99).is_none());
    }
}
