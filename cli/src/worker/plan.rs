//! The data that the demo moves. Both sides compute it, so each knows which bytes must arrive.

use std::ops::Range;

/// Messages side by side in an area of memory. The gaps between them must stay unchanged.
#[derive(Debug)]
pub(super) struct MessagePlan {
    pub(super) messages: Vec<Message>,
    /// Payload of all messages.
    pub(super) bytes: u64,
    seed: u64,
    room: usize,
}

/// A message, and its place in the area, which is the same on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// The longest message: 3 bytes more than a power of two, so that it ends in the middle of a
/// packet.
pub(super) const LONGEST: usize = (1 << 20) + 3;
/// The longest gap.
const GAP_MAX: u64 = 63;

impl MessagePlan {
    /// Adds messages of many sizes until they have `wanted` bytes or `room` is full.
    pub(super) fn new(seed: u64, mtu: usize, room: usize, wanted: u64) -> Self {
        let special =
            [0, 1, 7, 8, 64, mtu - 1, mtu, mtu + 1, 2 * mtu, 5 * mtu + 3, 65_536, LONGEST];
        let mut random = Random(seed);
        let mut plan = Self { messages: Vec::new(), bytes: 0, seed, room };
        let mut offset = 0;
        while plan.bytes < wanted {
            offset += random.below(GAP_MAX + 1);
            let len = match plan.messages.len() {
                number if number < special.len() => special[number],
                _ => match random.below(4) {
                    0 => special[random.below(special.len() as u64)],
                    1 => random.below(4096),
                    2 => random.below(65_536),
                    _ => random.below(262_144),
                },
            };
            if offset + len > room {
                break;
            }
            plan.messages.push(Message { offset, len });
            plan.bytes += len as u64;
            offset += len;
        }
        plan
    }

    /// The whole area: the messages' bytes, and `gap` everywhere else.
    pub(super) fn image(&self, gap: u8) -> Vec<u8> {
        let mut image = vec![gap; self.room];
        for (number, message) in self.messages.iter().enumerate() {
            let mut random = Random(self.seed ^ Random(number as u64).next());
            for chunk in image[message.range()].chunks_mut(8) {
                chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
            }
        }
        image
    }

    /// Compares the area with the messages and the gaps. Error: the first difference, as text.
    pub(super) fn compare(&self, area: &[u8], gap: u8) -> Result<(), String> {
        let image = self.image(gap);
        if area == image {
            return Ok(());
        }
        let at = area.iter().zip(&image).position(|(is, due)| is != due).unwrap_or(area.len());
        let (is, due) = (area.get(at), image.get(at));
        let place = self.messages.iter().enumerate().find(|(_, m)| m.range().contains(&at));
        Err(match place {
            Some((number, message)) => format!(
                "byte {} of message {number} ({} bytes at {}) is {is:02x?}, not {due:02x?}",
                at - message.offset,
                message.len,
                message.offset
            ),
            None => format!("byte {at}, between two messages, is {is:02x?}, not {due:02x?}"),
        })
    }
}

impl Message {
    fn range(self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Reproducible pseudo-random numbers: Sebastiano Vigna's splitmix64 (public domain).
#[derive(Debug, Clone)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `bound` − 1.
    fn below(&mut self, bound: u64) -> usize {
        (self.next() % bound) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_fits_and_has_what_was_wanted() {
        let plan = MessagePlan::new(7, 1024, 8 << 20, 6 << 20);
        assert!(plan.bytes >= 6 << 20);
        assert_eq!(plan.bytes, plan.messages.iter().map(|m| m.len as u64).sum::<u64>());
        let mut ends = plan.messages.iter().map(|m| m.offset + m.len);
        assert!(ends.clone().zip(&plan.messages[1..]).all(|(end, next)| end <= next.offset));
        assert!(ends.next_back().unwrap() <= 8 << 20);
        assert!(
            [0, 1, 1023, 1024, 1025, LONGEST]
                .iter()
                .all(|len| plan.messages.iter().any(|m| m.len == *len))
        );
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let plan = MessagePlan::new(3, 256, 1 << 16, 20_000);
        let mut area = plan.image(0xa5);
        assert_eq!(plan.compare(&area, 0xa5), Ok(()));
        for at in [0, 1, 4000, 20_000, (1 << 16) - 1] {
            area[at] ^= 1;
            assert!(plan.compare(&area, 0xa5).unwrap_err().contains("byte"), "{at}");
            area[at] ^= 1;
        }
        assert!(plan.compare(&area[..100], 0xa5).is_err());
        assert!(MessagePlan::new(4, 256, 1 << 16, 20_000).compare(&area, 0xa5).is_err());
    }
}
