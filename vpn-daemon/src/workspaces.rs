//! The mirror of one user's workspaces: an update goes in, what it changes for the tunnel comes out.
//!
//! Pure state, rebuilt from every snapshot and patched by every delta (control-plane 6.8). Order of one update:
//! workspace upserts, agent deletions, workspace deletions, agent upserts, so that a renamed agent, which comes
//! as deletion and upsert of one id, survives (CC-52).

use std::collections::{BTreeMap, BTreeSet};

use codervpn_control::{Agent, Workspace, WorkspaceUpdate};
use uuid::Uuid;

/// What one update changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diff {
    pub added_agents: Vec<Uuid>,
    pub removed_agents: Vec<Uuid>,
    /// Names or agents changed, so the zone has to be built anew.
    pub names: bool,
    /// Anything that a person sees changed.
    pub any: bool,
}

/// Every workspace of the user, by id; every agent, by id. An agent's workspace is always present.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Workspaces {
    workspaces: BTreeMap<Uuid, Workspace>,
    agents: BTreeMap<Uuid, Agent>,
}

impl Workspaces {
    /// Applies one update. An agent of an unknown workspace is left out: reporting one would break frontends.
    pub fn apply(&mut self, update: WorkspaceUpdate) -> Diff {
        let before = self.clone();
        if update.full {
            *self = Self::default();
        }
        for workspace in update.upserted_workspaces {
            self.workspaces.insert(workspace.id, workspace);
        }
        for agent in update.deleted_agents {
            self.agents.remove(&agent.id);
        }
        for Workspace { id, .. } in update.deleted_workspaces {
            self.workspaces.remove(&id);
            // its agents go with it, also when the server does not list them.
            self.agents.retain(|_, agent| agent.workspace != id);
        }
        for agent in update.upserted_agents {
            if self.workspaces.contains_key(&agent.workspace) {
                self.agents.insert(agent.id, agent);
            } else {
                tracing::warn!("an agent of a workspace that was never announced is left out");
            }
        }
        self.diff(&before)
    }

    fn diff(&self, before: &Self) -> Diff {
        let old: BTreeSet<&Uuid> = before.agents.keys().collect();
        let new: BTreeSet<&Uuid> = self.agents.keys().collect();
        let names = self.agents != before.agents
            || self.workspaces.len() != before.workspaces.len()
            || self.workspaces.values().zip(before.workspaces.values()).any(|(a, b)| a.id != b.id || a.name != b.name);
        Diff {
            added_agents: new.difference(&old).map(|id| **id).collect(),
            removed_agents: old.difference(&new).map(|id| **id).collect(),
            names,
            any: self != before,
        }
    }

    pub fn workspaces(&self) -> impl Iterator<Item = &Workspace> {
        self.workspaces.values()
    }

    pub fn agents(&self) -> impl Iterator<Item = &Agent> {
        self.agents.values()
    }

    /// Each workspace with its agents, in one pass over both.
    pub fn tree(&self) -> impl Iterator<Item = (&Workspace, Vec<&Agent>)> {
        let mut agents: BTreeMap<Uuid, Vec<&Agent>> = BTreeMap::new();
        for agent in self.agents.values() {
            agents.entry(agent.workspace).or_default().push(agent);
        }
        self.workspaces.values().map(move |workspace| (workspace, agents.remove(&workspace.id).unwrap_or_default()))
    }

    pub fn agent(&self, id: Uuid) -> Option<&Agent> {
        self.agents.get(&id)
    }

    pub fn is_empty(&self) -> bool {
        self.workspaces.is_empty()
    }

    pub fn len(&self) -> usize {
        self.workspaces.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codervpn_control::WorkspaceStatus;

    fn id(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    fn workspace(n: u128, name: &str) -> Workspace {
        Workspace { id: id(n), name: name.into(), status: WorkspaceStatus::Running }
    }

    fn agent(n: u128, name: &str, of: u128) -> Agent {
        Agent { id: id(n), name: name.into(), workspace: id(of) }
    }

    fn filled() -> Workspaces {
        let mut mirror = Workspaces::default();
        mirror.apply(WorkspaceUpdate {
            full: true,
            upserted_workspaces: vec![workspace(1, "dev"), workspace(2, "web")],
            upserted_agents: vec![agent(11, "main", 1), agent(21, "main", 2)],
            ..WorkspaceUpdate::default()
        });
        mirror
    }

    #[test]
    fn a_snapshot_replaces_what_was_known_cc54() {
        let mut mirror = filled();
        let diff = mirror.apply(WorkspaceUpdate {
            full: true,
            upserted_workspaces: vec![workspace(1, "dev")],
            upserted_agents: vec![agent(12, "main", 1)],
            ..WorkspaceUpdate::default()
        });
        assert_eq!(
            diff,
            Diff { added_agents: vec![id(12)], removed_agents: vec![id(11), id(21)], names: true, any: true }
        );
        let diff = mirror.apply(WorkspaceUpdate { full: true, ..WorkspaceUpdate::default() });
        assert_eq!(diff.removed_agents, [id(12)]);
        assert!(mirror.is_empty(), "CC-55");
    }

    #[test]
    fn an_equal_snapshot_changes_nothing() {
        let mut mirror = filled();
        let diff = mirror.apply(WorkspaceUpdate {
            full: true,
            upserted_workspaces: vec![workspace(2, "web"), workspace(1, "dev")],
            upserted_agents: vec![agent(21, "main", 2), agent(11, "main", 1)],
            ..WorkspaceUpdate::default()
        });
        assert_eq!(diff, Diff::default());
        assert_eq!(mirror.apply(WorkspaceUpdate::default()), Diff::default(), "CC-56");
    }

    #[test]
    fn a_renamed_agent_survives_cc52_r15() {
        let mut mirror = filled();
        let diff = mirror.apply(WorkspaceUpdate {
            deleted_agents: vec![agent(11, "main", 1)],
            upserted_agents: vec![agent(11, "renamed", 1)],
            ..WorkspaceUpdate::default()
        });
        assert_eq!(diff, Diff { names: true, any: true, ..Diff::default() });
        assert_eq!(mirror.agent(id(11)).unwrap().name, "renamed");
    }

    #[test]
    fn a_deleted_workspace_takes_its_agents_along_r16() {
        let mut mirror = filled();
        let diff = mirror.apply(WorkspaceUpdate {
            deleted_workspaces: vec![workspace(1, "dev"), workspace(77, "x")],
            ..WorkspaceUpdate::default()
        });
        assert_eq!(diff.removed_agents, [id(11)]);
        assert_eq!(mirror.len(), 1);
    }

    #[test]
    fn an_upserted_workspace_keeps_its_agents_and_a_status_alone_is_no_new_name() {
        let mut mirror = filled();
        let stopping = Workspace { status: WorkspaceStatus::Stopping, ..workspace(1, "dev") };
        let diff = mirror.apply(WorkspaceUpdate { upserted_workspaces: vec![stopping], ..WorkspaceUpdate::default() });
        assert_eq!(diff, Diff { any: true, ..Diff::default() });
        assert_eq!(mirror.tree().next().map(|(_, agents)| agents.len()), Some(1));
        let diff = mirror
            .apply(WorkspaceUpdate { upserted_workspaces: vec![workspace(1, "devel")], ..WorkspaceUpdate::default() });
        assert!(diff.names);
    }

    #[test]
    fn an_agent_of_an_unknown_workspace_is_left_out_r18() {
        let mut mirror = filled();
        let diff = mirror
            .apply(WorkspaceUpdate { upserted_agents: vec![agent(99, "ghost", 9)], ..WorkspaceUpdate::default() });
        assert_eq!(diff, Diff::default());
    }
}
