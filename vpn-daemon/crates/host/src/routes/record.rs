//! The note on disk that says which rule is ours, written before the rule is made.

use serde::{Deserialize, Serialize};

use super::{Error, Prefix, RouteConfig};
use crate::{Paths, files};

/// Far more than the record ever needs.
const MAX_RECORD: usize = 4096;

/// What must be undone after a crash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) version: u32,
    pub(super) table: u32,
    pub(super) rule_priority: u32,
    pub(super) prefix: Prefix,
}

impl Record {
    pub(super) fn of(config: &RouteConfig) -> Self {
        Record { version: 1, table: config.table, rule_priority: config.rule_priority, prefix: config.prefix }
    }

    pub(super) fn save(&self, paths: &Paths) -> Result<(), Error> {
        let path = paths.routes_record();
        let write = || {
            files::create_private_dir(&paths.state_dir)?;
            files::write_durably(&path, &serde_json::to_vec(self)?)
        };
        write().map_err(|source| Error::Record { path, source })
    }

    /// `None` when there is none, or one that cannot be read: rules with our usual numbers are
    /// removed anyway, and a file of another version must not keep the daemon from starting.
    pub(super) fn load(paths: &Paths) -> Option<Self> {
        let bytes = files::read_if_present(&paths.routes_record(), MAX_RECORD).ok().flatten()?;
        serde_json::from_slice::<Record>(&bytes).ok().filter(|record| record.version == 1)
    }

    pub(super) fn delete(paths: &Paths) -> Result<(), Error> {
        let path = paths.routes_record();
        files::remove_if_present(&path).map_err(|source| Error::Record { path, source })
    }
}
