//! Decides which relay maps are news.

use codervpn_proto::tailnet as pb;
use codervpn_wire::derp_map::DerpMap;

use crate::api::Deployment;
use crate::convert::derp_map_from_proto;

/// The map in use, over all connections.
#[derive(Debug, Default)]
pub(crate) struct DerpMaps {
    deployment: Option<Deployment>,
    current: Option<DerpMap>,
}

impl DerpMaps {
    pub(crate) fn new(deployment: Option<Deployment>, current: Option<DerpMap>) -> Self {
        Self { deployment, current }
    }

    /// Takes a map of the stream; returns it, rewritten, if it differs in anything from the one in use (CC-47).
    pub(crate) fn receive(&mut self, map: pb::DerpMap) -> Option<DerpMap> {
        let mut map = derp_map_from_proto(map);
        if let Some(deployment) = &self.deployment {
            deployment.rewrite_embedded(&mut map);
        }
        if self.current.as_ref() == Some(&map) {
            return None;
        }
        self.current = Some(map.clone());
        Some(map)
    }
}
