//! Decides what a peer may ask the coordinator for, and in which words it is refused.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use codervpn_proto::tailnet::CoordinateRequest;
use codervpn_wire::node::{LEGACY_AGENT_ADDRESS, coder_address, tailscale_address};
use uuid::Uuid;

use super::workspaces::WorkspaceStore;

/// What kind of peer this is.
#[derive(Debug, Clone)]
pub enum Authorization {
    /// A person's client: tunnels to agents that the person may use.
    User {
        /// Who.
        user: Uuid,
        /// Knows whose the agents are.
        store: Arc<WorkspaceStore>,
    },
    /// A workspace agent: its own addresses, no tunnels.
    Agent(Uuid),
}

const NO_AGENT: &str = "workspace agent not found or you do not have permission";

impl Authorization {
    /// Judges a whole request before any of it is done. `Err` is the text without its `authorization: `.
    pub(super) fn check(&self, _peer: Uuid, request: &CoordinateRequest) -> Result<(), String> {
        if let Some(tunnel) = &request.add_tunnel {
            match self {
                Self::Agent(_) => return Err("agents cannot open tunnels".into()),
                Self::User { user, store } => {
                    let agent = Uuid::from_slice(&tunnel.id)
                        .map_err(|_| format!("parse add tunnel id: invalid UUID (got {} bytes)", tunnel.id.len()))?;
                    if !store.may_tunnel(*user, agent) {
                        return Err(NO_AGENT.into());
                    }
                }
            }
        }
        if let Some(node) = request.update_self.as_ref().and_then(|update| update.node.as_ref()) {
            for text in &node.addresses {
                let (address, bits) = parse_prefix(text)?;
                let full = if address.is_ipv4() { 32 } else { 128 };
                if bits != full || full != 128 {
                    return Err(format!("invalid address bits, expected 128, got {bits}"));
                }
                if let Self::Agent(id) = self {
                    let own = [coder_address(*id), tailscale_address(*id), LEGACY_AGENT_ADDRESS];
                    if !own.iter().any(|own| address == *own) {
                        return Err(format!("invalid node address, got {address}"));
                    }
                }
            }
        }
        if !request.ready_for_handshake.is_empty() && matches!(self, Self::User { .. }) {
            return Err("clients may not send ready_for_handshake".into());
        }
        Ok(())
    }
}

/// Prefix text as Go reads it, with Go's complaints as far as a log reader needs them.
fn parse_prefix(text: &str) -> Result<(std::net::IpAddr, u8), String> {
    let complaint = |what: &str| format!("parse node address: netip.ParsePrefix({text:?}): {what}");
    let Some((address, bits)) = text.rsplit_once('/') else { return Err(complaint("no '/'")) };
    let unreadable = || complaint(&format!("ParseAddr({address:?}): unable to parse IP"));
    let address = match (address.parse::<Ipv6Addr>(), address.parse::<Ipv4Addr>()) {
        (Ok(v6), _) => v6.into(),
        (_, Ok(v4)) => std::net::IpAddr::from(v4),
        _ => return Err(unreadable()),
    };
    let digits = !bits.is_empty() && bits.bytes().all(|byte| byte.is_ascii_digit());
    let canonical = digits && (bits == "0" || !bits.starts_with('0'));
    let limit = if address.is_ipv4() { 32 } else { 128 };
    match bits.parse::<u8>() {
        Ok(bits) if canonical && bits <= limit => Ok((address, bits)),
        Ok(_) if canonical => Err(complaint("prefix length out of range")),
        _ => Err(complaint(&format!("bad bits after slash: {bits:?}"))),
    }
}
