//! Receiving from both UDP sockets. Decides which of them are asked at all: one that has been silent for a while is asked
//! only now and then, so that the family that nobody uses does not cost a system call a turn. `poll` watches both anyway.

use std::net::SocketAddr;

use codervpn_underlay::{ReceiveBuffer, UdpSockets};
use codervpn_wire::node::Family;

/// So many vain calls in a row make a socket a silent one.
const SILENT: u32 = 16;
/// A silent socket is asked every so many turns. Under load a turn is well below a millisecond.
const SKIPPED: u32 = 8;

pub(super) struct Network {
    buffer: ReceiveBuffer,
    turn: u32,
    /// Calls in a row that found nothing, of both families.
    in_vain: [u32; 2],
    /// Nothing more is there in this turn, of both families.
    drained: [bool; 2],
}

impl Network {
    pub(super) fn new() -> Self {
        Self { buffer: ReceiveBuffer::new(), turn: 0, in_vain: [0; 2], drained: [false; 2] }
    }

    pub(super) fn next_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
        self.drained = [false; 2];
    }

    /// The socket of `family`, or both, may have something.
    pub(super) fn expect(&mut self, family: Option<Family>) {
        match family {
            Some(Family::V4) => self.in_vain[0] = 0,
            Some(Family::V6) => self.in_vain[1] = 0,
            None => self.in_vain = [0; 2],
        }
    }

    /// One receive on the socket of `family`, unless it has told that nothing is left; how many datagrams came.
    pub(super) fn receive(&mut self, family: Family, udp: &mut UdpSockets) -> usize {
        let at = match family {
            Family::V4 => 0,
            Family::V6 => 1,
        };
        let (in_vain, drained) = (&mut self.in_vain[at], &mut self.drained[at]);
        if *drained || *in_vain >= SILENT && !self.turn.is_multiple_of(SKIPPED) {
            return 0;
        }
        let received = udp.receive(family, &mut self.buffer);
        *in_vain = if received == 0 { in_vain.saturating_add(1) } else { 0 };
        *drained = !self.buffer.may_be_more();
        received
    }

    /// What the last receive brought.
    pub(super) fn datagrams(&mut self) -> impl Iterator<Item = (SocketAddr, &mut [u8])> {
        self.buffer.datagrams()
    }
}
