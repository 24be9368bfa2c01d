//! Decides what the owner of workspaces is told while they are created, built, stopped and deleted: which lists, in
//! which message, and when nothing at all (8.8, CC-65).
//!
//! The store keeps the truth. What an owner hears are snapshots of it, taken at each change event; renames and the
//! coming and going of agent processes are no events, so they show with the next one. Each stream of updates compares
//! the snapshots it gets and sends the difference.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use codervpn_proto::tailnet::{Agent, Workspace, WorkspaceUpdate, workspace::Status};
use rand::seq::SliceRandom as _;
use tokio::sync::broadcast;
use uuid::Uuid;

/// Events that may wait for one stream. One that falls behind gets the newest state instead, which merges messages as
/// real servers do.
const EVENTS: usize = 256;

/// What an owner has, as of one event.
pub type Snapshot = Arc<BTreeMap<Uuid, WorkspaceState>>;

/// A workspace as its owner hears of it.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkspaceState {
    pub name: String,
    pub status: Status,
    /// Agents of the newest build that has completed; id and name.
    pub agents: BTreeMap<Uuid, String>,
}

/// What a build does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    Start,
    Stop,
    Delete,
}

/// All workspaces of a deployment.
#[derive(Debug, Default)]
pub struct WorkspaceStore {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    workspaces: BTreeMap<Uuid, Entry>,
    /// Every agent there ever was, with its owner: the look-up for tunnels finds them all (SV-14).
    owners: BTreeMap<Uuid, Uuid>,
    /// Users with the owner role.
    admins: BTreeSet<Uuid>,
    refused: BTreeSet<Uuid>,
    database_down: bool,
    streams: BTreeMap<Uuid, broadcast::Sender<Snapshot>>,
    /// Events are collected while this is positive.
    held: u32,
    waiting: BTreeSet<Uuid>,
}

#[derive(Debug, Clone)]
struct Entry {
    owner: Uuid,
    state: WorkspaceState,
    /// The build under way and what it will bring.
    build: Option<Transition>,
}

/// No such workspace, or not in a state for that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkspaceError {
    #[error("no such workspace")]
    NotFound,
    #[error("the owner has a workspace of that name")]
    NameTaken,
    #[error("no build is under way")]
    NoBuild,
}

impl WorkspaceStore {
    /// A new workspace whose first build has been created.
    pub fn create(&self, owner: Uuid, name: &str) -> Result<Uuid, WorkspaceError> {
        let mut state = self.lock();
        if state.workspaces.values().any(|entry| entry.owner == owner && entry.state.name == name) {
            return Err(WorkspaceError::NameTaken);
        }
        let id = Uuid::new_v4();
        let workspace = WorkspaceState { name: name.to_owned(), status: Status::Starting, agents: BTreeMap::new() };
        state.workspaces.insert(id, Entry { owner, state: workspace, build: Some(Transition::Start) });
        state.event(owner);
        Ok(id)
    }

    /// Creates a build: the agents of the one before vanish at once. `busy`: no provisioner is free, so it is pending
    /// first.
    pub fn create_build(&self, id: Uuid, transition: Transition, busy: bool) -> Result<(), WorkspaceError> {
        self.change(id, |entry| {
            entry.build = Some(transition);
            entry.state.agents.clear();
            entry.state.status = if busy { Status::Pending } else { running(transition) };
            Ok(())
        })
    }

    /// A provisioner takes the pending build.
    pub fn run_build(&self, id: Uuid) -> Result<(), WorkspaceError> {
        self.change(id, |entry| {
            entry.state.status = running(entry.build.ok_or(WorkspaceError::NoBuild)?);
            Ok(())
        })
    }

    /// The build has succeeded. A start brings these agents.
    pub fn finish_build(&self, id: Uuid, agents: &[(Uuid, String)]) -> Result<(), WorkspaceError> {
        {
            let mut state = self.lock();
            let entry = state.workspaces.get(&id).ok_or(WorkspaceError::NotFound)?;
            let owner = entry.owner;
            if entry.build == Some(Transition::Delete) {
                state.workspaces.remove(&id);
                state.event(owner);
                return Ok(());
            }
            state.owners.extend(agents.iter().map(|(agent, _)| (*agent, owner)));
        }
        self.change(id, |entry| {
            match entry.build.take().ok_or(WorkspaceError::NoBuild)? {
                Transition::Start => {
                    entry.state.status = Status::Running;
                    entry.state.agents = agents.iter().cloned().collect();
                }
                Transition::Stop | Transition::Delete => entry.state.status = Status::Stopped,
            }
            Ok(())
        })
    }

    /// The build has failed.
    pub fn fail_build(&self, id: Uuid) -> Result<(), WorkspaceError> {
        self.change(id, |entry| {
            entry.build.take().ok_or(WorkspaceError::NoBuild)?;
            entry.state.status = Status::Failed;
            Ok(())
        })
    }

    /// The build is canceled: two events.
    pub fn cancel_build(&self, id: Uuid) -> Result<(), WorkspaceError> {
        self.change(id, |entry| {
            entry.build.ok_or(WorkspaceError::NoBuild)?;
            entry.state.status = Status::Canceling;
            Ok(())
        })?;
        self.change(id, |entry| {
            entry.build = None;
            entry.state.status = Status::Canceled;
            entry.state.agents.clear();
            Ok(())
        })
    }

    /// No event: the new name shows with the next one (CC-52).
    pub fn rename(&self, id: Uuid, name: &str) -> Result<(), WorkspaceError> {
        let mut state = self.lock();
        state.workspaces.get_mut(&id).ok_or(WorkspaceError::NotFound)?.state.name = name.to_owned();
        Ok(())
    }

    /// Puts a state in place as it is, for updates that no build brings (duplicate names, invalid host names).
    pub fn put(&self, owner: Uuid, id: Uuid, workspace: WorkspaceState) {
        let mut state = self.lock();
        state.owners.extend(workspace.agents.keys().map(|agent| (*agent, owner)));
        state.workspaces.insert(id, Entry { owner, state: workspace, build: None });
        state.event(owner);
    }

    /// Takes a workspace away as it is.
    pub fn remove(&self, id: Uuid) -> Result<(), WorkspaceError> {
        let mut state = self.lock();
        let entry = state.workspaces.remove(&id).ok_or(WorkspaceError::NotFound)?;
        state.event(entry.owner);
        Ok(())
    }

    /// Everything that `change` does comes as one event for each owner.
    pub fn merged<T>(&self, change: impl FnOnce(&Self) -> T) -> T {
        self.lock().held += 1;
        let result = change(self);
        let mut state = self.lock();
        state.held -= 1;
        if state.held == 0 {
            for owner in std::mem::take(&mut state.waiting) {
                state.event(owner);
            }
        }
        result
    }

    pub fn workspace(&self, id: Uuid) -> Option<WorkspaceState> {
        self.lock().workspaces.get(&id).map(|entry| entry.state.clone())
    }

    /// What an owner has now.
    pub fn snapshot(&self, owner: Uuid) -> Snapshot {
        self.lock().snapshot(owner)
    }

    /// The present state and all that follow, without a gap between (SV-17).
    pub fn subscribe(&self, owner: Uuid) -> Subscription {
        let mut state = self.lock();
        let events = state.streams.entry(owner).or_insert_with(|| broadcast::Sender::new(EVENTS)).subscribe();
        Subscription { first: Some(state.snapshot(owner)), events, sent: None }
    }

    /// Owners whose updates somebody follows at the moment.
    pub fn followers(&self, owner: Uuid) -> usize {
        self.lock().streams.get(&owner).map_or(0, broadcast::Sender::receiver_count)
    }

    /// Whether an agent may connect: only those of a finished newest build.
    pub(crate) fn is_current_agent(&self, agent: Uuid) -> bool {
        self.lock().workspaces.values().any(|entry| entry.state.agents.contains_key(&agent))
    }

    pub(super) fn may_tunnel(&self, user: Uuid, agent: Uuid) -> bool {
        let state = self.lock();
        let permitted = match state.owners.get(&agent) {
            Some(owner) => *owner == user || state.admins.contains(&user),
            None => false,
        };
        permitted && !state.database_down && !state.refused.contains(&agent)
    }

    /// Tunnels to this agent are refused from now on, or no longer.
    pub fn refuse_agent(&self, agent: Uuid, refuse: bool) {
        let refused = &mut self.lock().refused;
        if refuse {
            refused.insert(agent);
        } else {
            refused.remove(&agent);
        }
    }

    pub(super) fn set_database_down(&self, down: bool) {
        self.lock().database_down = down;
    }

    pub(super) fn set_admin(&self, user: Uuid) {
        self.lock().admins.insert(user);
    }

    pub(super) fn may_follow(&self, user: Uuid, owner: Uuid) -> bool {
        user == owner || self.lock().admins.contains(&user)
    }

    fn change(
        &self,
        id: Uuid,
        change: impl FnOnce(&mut Entry) -> Result<(), WorkspaceError>,
    ) -> Result<(), WorkspaceError> {
        let mut state = self.lock();
        let entry = state.workspaces.get_mut(&id).ok_or(WorkspaceError::NotFound)?;
        change(entry)?;
        let owner = entry.owner;
        state.event(owner);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn snapshot(&self, owner: Uuid) -> Snapshot {
        let own = self.workspaces.iter().filter(|(_, entry)| entry.owner == owner);
        Arc::new(own.map(|(id, entry)| (*id, entry.state.clone())).collect())
    }

    fn event(&mut self, owner: Uuid) {
        if self.held > 0 {
            self.waiting.insert(owner);
        } else if let Some(stream) = self.streams.get(&owner) {
            // Nobody listening is fine.
            let _ = stream.send(self.snapshot(owner));
        }
    }
}

/// What one stream of updates is to send.
#[derive(Debug)]
pub struct Subscription {
    first: Option<Snapshot>,
    events: broadcast::Receiver<Snapshot>,
    sent: Option<Snapshot>,
}

impl Subscription {
    /// The next message: at once the snapshot, even an empty one, later only differences that are any. `None` when the
    /// store is gone.
    pub async fn next(&mut self) -> Option<WorkspaceUpdate> {
        loop {
            let snapshot = match self.first.take() {
                Some(first) => first,
                None => match self.events.recv().await {
                    Ok(snapshot) => snapshot,
                    Err(broadcast::error::RecvError::Lagged(_)) => continue,
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
            };
            let update = difference(self.sent.as_deref().unwrap_or(&BTreeMap::new()), &snapshot);
            let first = self.sent.replace(snapshot).is_none();
            if first || update != WorkspaceUpdate::default() {
                return Some(shuffled(update));
            }
        }
    }
}

/// What has to be said to get from one state to the other.
fn difference(old: &BTreeMap<Uuid, WorkspaceState>, new: &BTreeMap<Uuid, WorkspaceState>) -> WorkspaceUpdate {
    let mut update = WorkspaceUpdate::default();
    for (id, now) in new {
        let before = old.get(id);
        if before.is_none_or(|before| before.name != now.name || before.status != now.status) {
            update.upserted_workspaces.push(workspace(*id, now));
        }
        let none = BTreeMap::new();
        let agents = before.map_or(&none, |before| &before.agents);
        let vanished = agents.iter().filter(|(agent, name)| now.agents.get(*agent) != Some(*name));
        update.deleted_agents.extend(vanished.map(|(agent, name)| agent_entry(*agent, name, *id)));
        let appeared = now.agents.iter().filter(|(agent, name)| agents.get(*agent) != Some(*name));
        update.upserted_agents.extend(appeared.map(|(agent, name)| agent_entry(*agent, name, *id)));
    }
    for (id, before) in old.iter().filter(|(id, _)| !new.contains_key(*id)) {
        update.deleted_workspaces.push(workspace(*id, before));
        update.deleted_agents.extend(before.agents.iter().map(|(agent, name)| agent_entry(*agent, name, *id)));
    }
    update
}

/// Lists have no order; shuffling keeps clients honest (SV-18).
fn shuffled(mut update: WorkspaceUpdate) -> WorkspaceUpdate {
    let mut rng = rand::rng();
    update.upserted_workspaces.shuffle(&mut rng);
    update.upserted_agents.shuffle(&mut rng);
    update.deleted_workspaces.shuffle(&mut rng);
    update.deleted_agents.shuffle(&mut rng);
    update
}

fn workspace(id: Uuid, state: &WorkspaceState) -> Workspace {
    Workspace { id: id.into_bytes().to_vec(), name: state.name.clone(), status: state.status.into() }
}

fn agent_entry(id: Uuid, name: &str, workspace: Uuid) -> Agent {
    Agent { id: id.into_bytes().to_vec(), name: name.to_owned(), workspace_id: workspace.into_bytes().to_vec() }
}

fn running(transition: Transition) -> Status {
    match transition {
        Transition::Start => Status::Starting,
        Transition::Stop => Status::Stopping,
        Transition::Delete => Status::Deleting,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Uuid = Uuid::from_u128(1);
    const OTHER: Uuid = Uuid::from_u128(2);

    /// A message in the notation of CC-65.
    async fn said(updates: &mut Subscription) -> String {
        let update = updates.next().await.unwrap();
        let mut words = Vec::new();
        words.extend(update.upserted_workspaces.iter().map(|w| format!("+{} {:?}", w.name, w.status())));
        words.extend(update.deleted_workspaces.iter().map(|w| format!("-{} {:?}", w.name, w.status())));
        words.extend(update.upserted_agents.iter().map(|a| format!("+@{}", a.name)));
        words.extend(update.deleted_agents.iter().map(|a| format!("-@{}", a.name)));
        words.sort();
        words.join(", ")
    }

    async fn nothing(updates: &mut Subscription) {
        let waiting = tokio::time::timeout(std::time::Duration::ZERO, updates.next()).await;
        assert!(waiting.is_err(), "{waiting:?}");
    }

    fn agents(names: &[&str]) -> Vec<(Uuid, String)> {
        names.iter().map(|name| (Uuid::new_v4(), (*name).to_owned())).collect()
    }

    #[tokio::test]
    async fn cc_65_real_sequences() {
        let store = WorkspaceStore::default();
        let mut updates = store.subscribe(OWNER);
        // CC-55: the snapshot comes even when it is empty.
        assert_eq!(said(&mut updates).await, "");
        let dev = store.create(OWNER, "dev").unwrap();
        store.finish_build(dev, &agents(&["a", "b"])).unwrap();
        assert_eq!(said(&mut updates).await, "+dev Starting");
        assert_eq!(said(&mut updates).await, "+@a, +@b, +dev Running");
        store.create_build(dev, Transition::Stop, false).unwrap();
        store.finish_build(dev, &[]).unwrap();
        assert_eq!(said(&mut updates).await, "+dev Stopping, -@a, -@b");
        assert_eq!(said(&mut updates).await, "+dev Stopped");
        store.create_build(dev, Transition::Start, true).unwrap();
        store.run_build(dev).unwrap();
        store.finish_build(dev, &agents(&["a"])).unwrap();
        for message in ["+dev Pending", "+dev Starting", "+@a, +dev Running"] {
            assert_eq!(said(&mut updates).await, message);
        }
        // A restart by a new start build: new ids, which is why both lists name the agent.
        store.create_build(dev, Transition::Start, false).unwrap();
        store.finish_build(dev, &agents(&["a"])).unwrap();
        assert_eq!(said(&mut updates).await, "+dev Starting, -@a");
        assert_eq!(said(&mut updates).await, "+@a, +dev Running");
        store.create_build(dev, Transition::Stop, false).unwrap();
        store.cancel_build(dev).unwrap();
        for message in ["+dev Stopping, -@a", "+dev Canceling", "+dev Canceled"] {
            assert_eq!(said(&mut updates).await, message);
        }
        store.create_build(dev, Transition::Start, false).unwrap();
        store.fail_build(dev).unwrap();
        assert_eq!(said(&mut updates).await, "+dev Starting");
        assert_eq!(said(&mut updates).await, "+dev Failed");
        // DELETED is never said.
        store.create_build(dev, Transition::Delete, false).unwrap();
        store.finish_build(dev, &[]).unwrap();
        assert_eq!(said(&mut updates).await, "+dev Deleting");
        assert_eq!(said(&mut updates).await, "-dev Deleting");
        nothing(&mut updates).await;
    }

    /// CC-52: a rename is no event and comes with the next one, without agents.
    #[tokio::test]
    async fn a_rename_comes_with_the_next_event() {
        let store = WorkspaceStore::default();
        let dev = store.create(OWNER, "dev").unwrap();
        store.finish_build(dev, &agents(&["a"])).unwrap();
        let mut updates = store.subscribe(OWNER);
        assert_eq!(said(&mut updates).await, "+@a, +dev Running");
        store.rename(dev, "prod").unwrap();
        nothing(&mut updates).await;
        store.create(OWNER, "other").unwrap();
        assert_eq!(said(&mut updates).await, "+other Starting, +prod Running");
    }

    /// Others hear nothing and may not tunnel; changes can be merged.
    #[tokio::test]
    async fn owners_are_apart_and_events_can_be_merged() {
        let store = WorkspaceStore::default();
        let (mut updates, mut others) = (store.subscribe(OWNER), store.subscribe(OTHER));
        assert_eq!((said(&mut updates).await, said(&mut others).await), (String::new(), String::new()));
        let main = agents(&["a"]);
        store.merged(|store| {
            let dev = store.create(OWNER, "dev").unwrap();
            store.finish_build(dev, &main).unwrap();
            store.create(OWNER, "second").unwrap();
        });
        assert_eq!(said(&mut updates).await, "+@a, +dev Running, +second Starting");
        nothing(&mut updates).await;
        nothing(&mut others).await;
        let agent = main[0].0;
        assert!(store.may_tunnel(OWNER, agent) && !store.may_tunnel(OTHER, agent));
        store.set_admin(OTHER);
        assert!(store.may_tunnel(OTHER, agent));
        store.set_database_down(true);
        assert!(!store.may_tunnel(OWNER, agent));
    }
}
