//! Outgoing datagrams between the engine and the socket. Decides which of them leave together (fast path 4.3): those to
//! one destination, of equal size but for a shorter one at the end, as many as one send takes.

use std::fmt;
use std::net::SocketAddr;

use super::{MAX_SEGMENTS, MAX_SEND};

/// Room for a whole group and for the datagram that turns out not to fit it.
const CAPACITY: usize = 128 * 1024;

/// The open group. Datagrams are sealed where they are sent from, back to back.
pub struct SendGroup {
    buffer: Box<[u8]>,
    to: Option<SocketAddr>,
    start: usize,
    end: usize,
    /// Of every datagram but perhaps the last.
    segment: usize,
    count: usize,
}

impl SendGroup {
    pub fn new() -> Self {
        Self { buffer: vec![0; CAPACITY].into_boxed_slice(), to: None, start: 0, end: 0, segment: 0, count: 0 }
    }

    /// Room for the next datagram, which goes to `to`. `None` for more than any datagram has. What cannot wait for it
    /// is given to `send`, with its destination and the size of its datagrams.
    pub fn room(
        &mut self,
        to: SocketAddr,
        room: usize,
        send: impl FnMut(SocketAddr, usize, &[u8]),
    ) -> Option<&mut [u8]> {
        if self.to != Some(to) || self.end + room > self.buffer.len() {
            self.flush(send);
            self.to = Some(to);
        }
        self.buffer.get_mut(self.end..self.end + room)
    }

    /// The first `len` bytes of the last room are a datagram.
    pub fn commit(&mut self, len: usize, mut send: impl FnMut(SocketAddr, usize, &[u8])) {
        if len == 0 {
            return;
        }
        if self.count > 0 && len > self.segment {
            // It begins a group where it lies.
            let (to, end) = (self.to, self.end);
            self.flush(&mut send);
            (self.to, self.start, self.end) = (to, end, end);
        }
        if self.count == 0 {
            self.segment = len;
        }
        self.end += len;
        self.count += 1;
        let full = self.count == MAX_SEGMENTS || self.end - self.start + self.segment > MAX_SEND;
        if len < self.segment || full {
            let to = self.to;
            self.flush(send);
            self.to = to;
        }
    }

    /// Sends what waits.
    pub fn flush(&mut self, mut send: impl FnMut(SocketAddr, usize, &[u8])) {
        if let Some(to) = self.to.take()
            && self.count > 0
        {
            send(to, self.segment, self.buffer.get(self.start..self.end).unwrap_or_default());
        }
        (self.start, self.end, self.count) = (0, 0, 0);
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl Default for SendGroup {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SendGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendGroup({} datagrams)", self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(port: u16) -> SocketAddr {
        ([192, 0, 2, 1], port).into()
    }

    #[derive(Default)]
    struct Sent(Vec<(u16, usize, Vec<u8>)>);

    impl Sent {
        fn put(&mut self, group: &mut SendGroup, port: u16, len: usize, byte: u8) {
            let mut send = |to: SocketAddr, segment, bytes: &[u8]| self.0.push((to.port(), segment, bytes.to_vec()));
            group.room(to(port), len + 100, &mut send).unwrap()[..len].fill(byte);
            group.commit(len, &mut send);
        }

        fn flush(&mut self, group: &mut SendGroup) -> Vec<(u16, usize, usize)> {
            group.flush(|to, segment, bytes| self.0.push((to.port(), segment, bytes.to_vec())));
            self.0.iter().map(|(port, segment, bytes)| (*port, *segment, bytes.len())).collect()
        }
    }

    #[test]
    fn equal_datagrams_join_a_shorter_one_closes_and_a_longer_one_flushes() {
        let (mut group, mut sent) = (SendGroup::new(), Sent::default());
        for (len, byte) in [(100, 1), (100, 2), (60, 3), (60, 4), (90, 5), (90, 6)] {
            sent.put(&mut group, 1, len, byte);
        }
        sent.put(&mut group, 2, 90, 7);
        assert_eq!(sent.flush(&mut group), [(1, 100, 260), (1, 60, 60), (1, 90, 180), (2, 90, 90)]);
        let bytes: Vec<u8> = sent.0.iter().flat_map(|(_, _, bytes)| bytes.clone()).collect();
        let wanted: Vec<u8> = [(100, 1), (100, 2), (60, 3), (60, 4), (90, 5), (90, 6), (90, 7)]
            .into_iter()
            .flat_map(|(len, byte)| vec![byte; len])
            .collect();
        assert_eq!(bytes, wanted);
        assert!(group.is_empty());
    }

    /// Fast path 4.2: 49 full datagrams fill a send, 64 small ones too.
    #[test]
    fn a_group_ends_where_one_send_does() {
        let (mut group, mut sent) = (SendGroup::new(), Sent::default());
        for _ in 0..100 {
            sent.put(&mut group, 1, 1312, 1);
        }
        assert_eq!(sent.flush(&mut group), [(1, 1312, 49 * 1312), (1, 1312, 49 * 1312), (1, 1312, 2 * 1312)]);
        let (mut group, mut sent) = (SendGroup::new(), Sent::default());
        for _ in 0..130 {
            sent.put(&mut group, 1, 112, 1);
        }
        assert_eq!(sent.flush(&mut group), [(1, 112, 64 * 112), (1, 112, 64 * 112), (1, 112, 2 * 112)]);
    }

    /// Room that is not used leaves no trace, and the buffer never runs out, whatever the sizes.
    #[test]
    fn any_sequence_of_sizes_arrives_whole() {
        let (mut group, mut sent) = (SendGroup::new(), Sent::default());
        let mut total = 0;
        for turn in 0..3000_usize {
            let len = 1 + turn * 7919 % 1312;
            sent.put(&mut group, (turn / 700) as u16, len, 1);
            total += len;
            assert!(group.room(to((turn / 700) as u16), 2048, |_, _, _| {}).is_some());
        }
        let sizes = sent.flush(&mut group);
        assert_eq!(sizes.iter().map(|(_, _, len)| len).sum::<usize>(), total);
        assert!(sizes.iter().all(|(_, segment, len)| *len <= MAX_SEND && len.div_ceil(*segment) <= MAX_SEGMENTS));
    }
}
