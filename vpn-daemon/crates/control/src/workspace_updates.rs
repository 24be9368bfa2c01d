//! Decides which workspaces and agents a message of the WorkspaceUpdates stream speaks of, and whether client and server
//! still agree.

use std::collections::{HashMap, HashSet};

use codervpn_proto::tailnet as pb;
use uuid::Uuid;

use crate::convert::uuid;

/// State of a workspace as the server sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkspaceStatus {
    /// Unknown, or a status newer than this program.
    Unknown,
    /// Waiting for a provisioner.
    Pending,
    /// Being started.
    Starting,
    /// Started.
    Running,
    /// Being stopped.
    Stopping,
    /// Stopped.
    Stopped,
    /// Its last build failed.
    Failed,
    /// Its build is being cancelled.
    Canceling,
    /// Its build was cancelled.
    Canceled,
    /// Being deleted.
    Deleting,
    /// Deleted.
    Deleted,
}

/// One workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workspace {
    /// Its id.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Its state; meaningless in a deletion (CC-65).
    pub status: WorkspaceStatus,
}

/// One agent of a workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// Its id, also its peer id and the source of its address.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// The workspace it belongs to.
    pub workspace: Uuid,
}

/// One message of the stream. Apply in this order: workspace upserts, agent deletions, workspace deletions (with the
/// agents left in them), agent upserts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WorkspaceUpdate {
    /// A snapshot: what it does not name is gone. The first message after every connect is one.
    pub full: bool,
    /// New or changed workspaces.
    pub upserted_workspaces: Vec<Workspace>,
    /// New or renamed agents.
    pub upserted_agents: Vec<Agent>,
    /// Workspaces that are gone.
    pub deleted_workspaces: Vec<Workspace>,
    /// Agents that are gone; an id that is upserted as well survives (rename).
    pub deleted_agents: Vec<Agent>,
}

/// Agents that one stream may speak of. A deployment with more for one owner is not one; the memory of a hostile server's
/// deltas ends here.
const MAX_AGENTS: usize = 65_536;

/// Client and server disagree; the next snapshot repairs it (CC-49).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// PB-5.
    #[error("workspace update with an id that is not 16 bytes")]
    BadId,
    /// We would not know its names.
    #[error("workspace update with an agent of an unknown workspace")]
    UnknownWorkspace,
    /// See [`MAX_AGENTS`].
    #[error("workspace update with too many agents")]
    TooMany,
}

/// What one stream has said so far; begins empty with every stream.
#[derive(Debug, Default)]
pub(crate) struct UpdateReader {
    workspaces: HashMap<Uuid, HashSet<Uuid>>,
    agents: usize,
    begun: bool,
}

impl UpdateReader {
    /// Checks a message against what came before it and turns it into plain types. Nothing is passed on of a message that
    /// fails (CC-49).
    pub(crate) fn read(&mut self, message: pb::WorkspaceUpdate) -> Result<WorkspaceUpdate, UpdateError> {
        let mut update = WorkspaceUpdate {
            full: !self.begun,
            upserted_workspaces: message.upserted_workspaces.into_iter().map(workspace).collect::<Result<_, _>>()?,
            upserted_agents: message.upserted_agents.into_iter().map(agent).collect::<Result<_, _>>()?,
            deleted_workspaces: message.deleted_workspaces.into_iter().map(workspace).collect::<Result<_, _>>()?,
            deleted_agents: Vec::new(),
        };
        // A deletion needs no workspace: the agent's id says it all.
        for deleted in message.deleted_agents {
            let id = uuid(&deleted.id).ok_or(UpdateError::BadId)?;
            let workspace = uuid(&deleted.workspace_id).unwrap_or_else(Uuid::nil);
            update.deleted_agents.push(Agent { id, name: deleted.name, workspace });
        }
        self.apply(&update)?;
        self.begun = true;
        Ok(update)
    }

    fn apply(&mut self, update: &WorkspaceUpdate) -> Result<(), UpdateError> {
        for workspace in &update.upserted_workspaces {
            self.workspaces.entry(workspace.id).or_default();
        }
        for agent in &update.deleted_agents {
            let known = self.workspaces.get_mut(&agent.workspace).is_some_and(|agents| agents.remove(&agent.id));
            if known {
                self.agents -= 1;
            } else {
                tracing::warn!(agent = %agent.id, "the server deletes an agent that it never named");
            }
        }
        for workspace in &update.deleted_workspaces {
            match self.workspaces.remove(&workspace.id) {
                Some(agents) => self.agents -= agents.len(),
                None => {
                    tracing::warn!(workspace = %workspace.id, "the server deletes a workspace that it never named");
                }
            }
        }
        for agent in &update.upserted_agents {
            let agents = self.workspaces.get_mut(&agent.workspace).ok_or(UpdateError::UnknownWorkspace)?;
            self.agents += usize::from(agents.insert(agent.id));
        }
        if self.agents > MAX_AGENTS || self.workspaces.len() > MAX_AGENTS {
            return Err(UpdateError::TooMany);
        }
        Ok(())
    }
}

fn workspace(message: pb::Workspace) -> Result<Workspace, UpdateError> {
    let status = WorkspaceStatus::from_proto(message.status());
    Ok(Workspace { id: uuid(&message.id).ok_or(UpdateError::BadId)?, name: message.name, status })
}

fn agent(message: pb::Agent) -> Result<Agent, UpdateError> {
    Ok(Agent {
        id: uuid(&message.id).ok_or(UpdateError::BadId)?,
        name: message.name,
        workspace: uuid(&message.workspace_id).ok_or(UpdateError::BadId)?,
    })
}

impl WorkspaceStatus {
    fn from_proto(status: pb::workspace::Status) -> Self {
        use pb::workspace::Status;
        match status {
            Status::Unknown => Self::Unknown,
            Status::Pending => Self::Pending,
            Status::Starting => Self::Starting,
            Status::Running => Self::Running,
            Status::Stopping => Self::Stopping,
            Status::Stopped => Self::Stopped,
            Status::Failed => Self::Failed,
            Status::Canceling => Self::Canceling,
            Status::Canceled => Self::Canceled,
            Status::Deleting => Self::Deleting,
            Status::Deleted => Self::Deleted,
        }
    }

    /// The number of the tailnet and of the CoderVPN protocol alike.
    pub fn number(self) -> i32 {
        self as i32
    }
}
