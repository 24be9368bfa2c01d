//! Who may do what on the local socket (dns-and-os 5.3). Pure: the caller brings the facts.
//!
//! The socket's mode and group keep most strangers out; this is the second gate, and the only one between the
//! users who are admitted: a tunnel belongs to the uid that started it.

use crate::config::Auth;

/// The uid that stands for "no such user here" in a container. Never admitted, whatever its groups.
const OVERFLOW_UID: u32 = 65_534;

/// Who connected, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    /// Member of the socket's group.
    pub in_group: bool,
}

/// The configured rules, with names turned into uids.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    pub allow_uids: Vec<u32>,
    pub public_status: bool,
}

/// What one caller may do. `Stranger` is admitted to see the lifecycle and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    Root,
    Member,
    Stranger,
}

/// Why something was refused; the text for the user is made where it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// May not use this daemon at all.
    NotAdmitted,
    /// Another user's tunnel is in the way.
    StartedByAnother,
}

impl Policy {
    pub fn new(auth: &Auth, allow_uids: Vec<u32>) -> Self {
        Self { allow_uids, public_status: auth.public_status }
    }

    /// `None`: close before a header is written.
    pub fn standing(&self, caller: Caller) -> Option<Standing> {
        match caller.uid {
            0 => Some(Standing::Root),
            OVERFLOW_UID => None,
            uid if caller.in_group || self.allow_uids.contains(&uid) => Some(Standing::Member),
            _ if self.public_status => Some(Standing::Stranger),
            _ => None,
        }
    }
}

impl Standing {
    /// Whether this caller sees workspaces, agents and addresses.
    pub fn sees_peers(self, uid: u32, owner: Option<u32>) -> bool {
        match self {
            Self::Root => true,
            // Nobody's tunnel holds nothing that could be hidden.
            Self::Member => owner.is_none_or(|owner| owner == uid),
            Self::Stranger => false,
        }
    }

    /// Whether this caller may start, stop or replace the tunnel of `owner`. A stopped tunnel has none.
    pub fn may_command(self, uid: u32, owner: Option<u32>) -> Result<(), Refusal> {
        match (self, owner) {
            (Self::Root, _) | (Self::Member, None) => Ok(()),
            (Self::Member, Some(owner)) if owner == uid => Ok(()),
            (Self::Member, Some(_)) => Err(Refusal::StartedByAnother),
            (Self::Stranger, _) => Err(Refusal::NotAdmitted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: u32 = 1000;
    const BOB: u32 = 1001;

    fn policy(public_status: bool) -> Policy {
        Policy { allow_uids: vec![ALICE], public_status }
    }

    fn standing(uid: u32, in_group: bool) -> Option<Standing> {
        policy(false).standing(Caller { uid, in_group })
    }

    #[test]
    fn admission_follows_root_group_and_list() {
        assert_eq!(standing(0, false), Some(Standing::Root));
        assert_eq!(standing(ALICE, false), Some(Standing::Member));
        assert_eq!(standing(BOB, true), Some(Standing::Member));
        assert_eq!(standing(BOB, false), None);
        assert_eq!(standing(65_534, true), None);
        assert_eq!(policy(true).standing(Caller { uid: BOB, in_group: false }), Some(Standing::Stranger));
        assert_eq!(policy(true).standing(Caller { uid: 65_534, in_group: false }), None);
    }

    #[test]
    fn a_tunnel_belongs_to_its_starter() {
        let member = Standing::Member;
        assert!(member.sees_peers(ALICE, Some(ALICE)) && member.may_command(ALICE, Some(ALICE)).is_ok());
        assert!(!member.sees_peers(BOB, Some(ALICE)));
        assert_eq!(member.may_command(BOB, Some(ALICE)), Err(Refusal::StartedByAnother));
        assert!(member.may_command(BOB, None).is_ok());
        assert!(Standing::Root.sees_peers(0, Some(ALICE)) && Standing::Root.may_command(0, Some(ALICE)).is_ok());
        assert!(!Standing::Stranger.sees_peers(BOB, None));
        assert_eq!(Standing::Stranger.may_command(BOB, None), Err(Refusal::NotAdmitted));
    }
}
