//! Decides what to do about a destination that the server refuses (TR-52).
//!
//! The server ends the whole stream for one refused tunnel, with the same text for "no permission", "no such agent" and
//! "database down". So one such destination, asked for on every connection, would keep all others away for ever. After
//! [`STRIKES`] connections ended that way in a row, and if the server says that the session itself is good, destinations
//! are asked for one at a time. Who was refused while another was accepted is left out for a while. If everybody is
//! refused it is an outage, and nobody is (CC-66).

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

/// Connections in a row before anything is done.
const STRIKES: u32 = 3;
/// A connection that lived longer was not ended by its first requests.
const QUICK: Duration = Duration::from_secs(5);
/// Time for the server to refuse one tunnel.
const PROBE: Duration = Duration::from_millis(500);
/// Longest time that a refused destination is left out.
const QUARANTINE: Duration = Duration::from_secs(60);

/// What is known about refusals, over all connections.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    strikes: u32,
    probing: Option<Probing>,
    quarantined: BTreeSet<Uuid>,
    release_at: Option<Instant>,
    /// The present connection is the one that found out. Its own snapshot may come after that.
    fresh: bool,
}

#[derive(Debug, Default)]
struct Probing {
    queue: VecDeque<Uuid>,
    accepted: BTreeSet<Uuid>,
    suspects: BTreeSet<Uuid>,
    /// The suspects had their second chance: an outage may have ended since the first.
    rechecked: bool,
    /// Asked for last, and when it counts as accepted.
    current: Option<(Uuid, Instant)>,
}

impl Refusals {
    /// A connection ended, by a refusal or otherwise.
    pub(crate) fn connection_ended(&mut self, refused: bool, lived: Duration) {
        self.fresh = false;
        if let Some(probing) = &mut self.probing {
            match probing.current.take() {
                Some((id, _)) if refused => {
                    probing.suspects.insert(id);
                }
                Some((id, _)) => probing.queue.push_front(id),
                None => {}
            }
        } else if refused && lived < QUICK {
            self.strikes += 1;
        } else {
            self.strikes = 0;
        }
    }

    /// Whether probing would begin if the session is good.
    pub(crate) fn wants_probing(&self) -> bool {
        self.strikes >= STRIKES && self.probing.is_none()
    }

    pub(crate) fn begin(&mut self, destinations: &BTreeSet<Uuid>) {
        tracing::warn!("the server refuses tunnels; asking for one at a time to find out which");
        self.quarantined.clear();
        self.release_at = None;
        self.probing = Some(Probing { queue: destinations.iter().copied().collect(), ..Probing::default() });
    }

    /// What a new connection asks for at once.
    pub(crate) fn at_connect<'a>(&'a self, destinations: &'a BTreeSet<Uuid>) -> impl Iterator<Item = Uuid> + 'a {
        destinations.iter().copied().filter(|id| match &self.probing {
            Some(probing) => probing.accepted.contains(id),
            None => !self.quarantined.contains(id),
        })
    }

    /// A new destination; true if it is to be asked for at once.
    pub(crate) fn admit(&mut self, id: Uuid) -> bool {
        match &mut self.probing {
            Some(probing) => {
                probing.queue.push_back(id);
                false
            }
            None => !self.quarantined.contains(&id),
        }
    }

    /// No destination any more.
    pub(crate) fn forget(&mut self, id: Uuid) {
        self.quarantined.remove(&id);
        if let Some(probing) = &mut self.probing {
            probing.queue.retain(|queued| *queued != id);
            probing.accepted.remove(&id);
            probing.suspects.remove(&id);
            probing.current = probing.current.filter(|(current, _)| *current != id);
        }
    }

    /// The snapshot of a later connection: quarantine ends (TR-52). What is to be asked for again.
    pub(crate) fn snapshot(&mut self) -> BTreeSet<Uuid> {
        if self.fresh { BTreeSet::new() } else { self.release() }
    }

    fn release(&mut self) -> BTreeSet<Uuid> {
        self.release_at = None;
        std::mem::take(&mut self.quarantined)
    }

    /// When [`Refusals::tick`] has something to do, on a connection.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        match &self.probing {
            Some(probing) => Some(probing.current.map_or(now, |(_, due)| due)),
            None => self.release_at,
        }
    }

    /// Goes on; returns what is to be asked for now.
    pub(crate) fn tick(&mut self, now: Instant) -> BTreeSet<Uuid> {
        let Some(probing) = &mut self.probing else {
            return if self.release_at.is_some_and(|at| at <= now) { self.release() } else { BTreeSet::new() };
        };
        if let Some((id, due)) = probing.current {
            if due > now {
                return BTreeSet::new();
            }
            probing.accepted.insert(id);
            probing.current = None;
        }
        if probing.queue.is_empty() && !probing.accepted.is_empty() && !probing.rechecked {
            probing.rechecked = true;
            probing.queue = std::mem::take(&mut probing.suspects).into_iter().collect();
        }
        if let Some(id) = probing.queue.pop_front() {
            probing.current = Some((id, now + PROBE));
            return [id].into();
        }
        let Probing { accepted, suspects, .. } = self.probing.take().unwrap_or_default();
        self.strikes = 0;
        if accepted.is_empty() {
            return suspects;
        }
        for id in &suspects {
            tracing::warn!(agent = %id, "the server refuses a tunnel to this agent; leaving it out for a while");
        }
        self.release_at = (!suspects.is_empty()).then(|| now + QUARANTINE);
        self.quarantined = suspects;
        self.fresh = true;
        BTreeSet::new()
    }
}
