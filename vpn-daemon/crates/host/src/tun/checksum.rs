//! The Internet checksum (RFC 1071) over long runs of bytes, in steps wide enough for the compiler to use vectors.

/// An unfolded sum of 16-bit words in the machine's own byte order; sums of several pieces add up if all but the last have
/// an even length.
#[derive(Clone, Copy, Default)]
pub(super) struct Sum(u64);

impl Sum {
    pub(super) fn add(self, bytes: &[u8]) -> Sum {
        let (wide, rest) = bytes.as_chunks::<32>();
        // Two 32-bit halves in lanes of 64: no carry is lost before 2³² steps.
        let mut lanes = [0_u64; 4];
        for chunk in wide {
            for (lane, eight) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
                let word = u64::from_ne_bytes(*eight);
                *lane += (word & 0xffff_ffff) + (word >> 32);
            }
        }
        let mut sum = self.0 + lanes.iter().sum::<u64>();
        let (words, rest) = rest.as_chunks::<4>();
        for word in words {
            sum += u64::from(u32::from_ne_bytes(*word));
        }
        let (pairs, rest) = rest.as_chunks::<2>();
        for pair in pairs {
            sum += u64::from(u16::from_ne_bytes(*pair));
        }
        if let [last] = rest {
            sum += u64::from(u16::from_ne_bytes([*last, 0]));
        }
        Sum(sum)
    }

    /// Adds a number that stands in the packet in network order.
    pub(super) fn add_number(self, number: u32) -> Sum {
        Sum(self.0 + u64::from(number.to_be()))
    }

    /// Folded to 16 bits, as they stand in a packet.
    pub(super) fn folded(self) -> [u8; 2] {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (sum as u16).to_ne_bytes()
    }

    /// The checksum: inverted, and never zero, which in UDP would mean "none".
    pub(super) fn checksum(self) -> [u8; 2] {
        match self.folded().map(|byte| !byte) {
            [0, 0] => [0xff, 0xff],
            checksum => checksum,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slowly(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn sums_equal_the_slow_ones_for_every_length() {
        let bytes: Vec<u8> = (0..1500_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for length in 0..bytes.len() {
            let sum = Sum::default().add(&bytes[..length]).folded();
            assert_eq!(u16::from_be_bytes(sum), slowly(&bytes[..length]), "{length}");
        }
        let all_ones = vec![0xff; 65_536];
        assert_eq!(Sum::default().add(&all_ones).checksum(), [0xff, 0xff]);
    }
}
