//! The sizes of a stream of messages.

use crate::{Arrived, Packet};

/// The most bytes of memory for payload at each end, unless one message is larger.
const REGION_MAX: usize = 4 << 20;
/// The number of values of a packet's number.
const NUMBERS: u32 = 1 << 24;

/// Messages of one size, split into packets as a WRITE is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The number of this stream in its run.
    pub(crate) phase: u8,
    /// Bytes of payload of each packet, with its padding.
    payload: usize,
    /// Packets of a message.
    pub(crate) packets: u32,
    /// Messages with memory of their own: later ones reuse it.
    slots: usize,
}

impl Shape {
    /// Messages of `message` bytes in packets of at most `mtu` payload bytes; one divides the
    /// other. Up to `depth` of them have memory of their own, as far as there is enough.
    pub(crate) fn new(phase: u8, message: usize, mtu: usize, depth: usize) -> Self {
        let packets = (message / mtu).max(1) as u32;
        let payload = mtu.min(message).next_multiple_of(4);
        let slots = (REGION_MAX / (payload * packets as usize)).clamp(1, depth.max(1));
        Self { phase, payload, packets, slots }
    }

    /// Memory for this stream.
    pub(crate) fn region(self) -> Vec<u8> {
        let len = self.payload * self.packets as usize * self.slots;
        (0..len).map(|i| ((i * 31) >> 3) as u8).collect()
    }

    /// The number of a message's first packet. Messages are counted from 0 again when packet
    /// numbers run out.
    pub(crate) fn first_of(self, message: u32) -> u32 {
        message % (NUMBERS / self.packets) * self.packets
    }

    /// Packet number `number` of the stream, with the payload from its place in `region`.
    pub(crate) fn packet<'a>(&self, number: u32, region: &'a [u8]) -> Packet<'a> {
        let at = self.place(number, region.len());
        let first = number.is_multiple_of(self.packets);
        Packet::new(self.phase, number, first, &region[at..at + self.payload])
    }

    /// Copies the payload to the place where a WRITE would put it, unless it belongs to another
    /// stream.
    pub(crate) fn take(self, arrived: &Arrived<'_>, region: &mut [u8]) -> bool {
        let fits = arrived.phase == self.phase && arrived.payload.len() == self.payload;
        if fits {
            let at = self.place(arrived.number, region.len());
            region[at..at + self.payload].copy_from_slice(arrived.payload);
        }
        fits
    }

    fn place(self, number: u32, region: usize) -> usize {
        number as usize % (region / self.payload) * self.payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_as_long_as_those_of_a_write() {
        // BTH, RETH, payload, padding, ICRC; only the first packet of a message has a RETH.
        for (message, mtu, packets, first, next) in [
            (2, 4096, 1, 12 + 16 + 4 + 4, 12 + 16 + 4 + 4),
            (64, 1024, 1, 96, 96),
            (4096, 4096, 1, 4096 + 32, 4096 + 32),
            (1 << 20, 1024, 1024, 1024 + 32, 1024 + 16),
        ] {
            let shape = Shape::new(0, message, mtu, 4);
            let region = shape.region();
            assert_eq!(shape.packets, packets);
            assert_eq!(shape.packet(0, &region).len(), first, "{message} at {mtu}");
            assert_eq!(shape.packet(1, &region).len(), next, "{message} at {mtu}");
            assert_eq!(shape.first_of(1), packets);
            assert!(shape.first_of(u32::MAX) + packets <= NUMBERS);
        }
    }

    #[test]
    fn memory_is_what_is_outstanding() {
        for (message, mtu, depth, bytes) in [
            (64, 4096, 512, 512 * 64),
            (2, 4096, 512, 512 * 4),
            (65_536, 4096, 64, 4 << 20),
            (65_536, 1024, 16, 1 << 20),
            (1 << 20, 4096, 8, 4 << 20),
            (8 << 20, 4096, 2, 8 << 20),
            (64, 4096, 1, 64),
        ] {
            let shape = Shape::new(0, message, mtu, depth);
            let region = shape.region();
            assert_eq!(region.len(), bytes, "{message} at {mtu}, {depth} outstanding");
            let place = |message| shape.place(shape.first_of(message), region.len());
            let slots = (bytes / message.max(4)) as u32;
            assert_eq!(place(slots), 0, "the next message begins again");
            assert_eq!(place(slots - 1), bytes - message.max(4));
        }
    }

    #[test]
    fn what_is_of_another_stream_is_not_placed() {
        let shape = Shape::new(3, 64, 1024, 64);
        let mut region = vec![0; 4096];
        let payload = [7; 64];
        let arrived = |phase, payload| Arrived { phase, number: 5, payload };
        assert!(!shape.take(&arrived(2, &payload[..]), &mut region));
        assert!(!shape.take(&arrived(3, &payload[..60]), &mut region));
        assert_eq!(region, vec![0; 4096]);
        assert!(shape.take(&arrived(3, &payload[..]), &mut region));
        assert_eq!(region[5 * 64..6 * 64], payload);
        assert_eq!(region.iter().filter(|byte| **byte == 7).count(), 64);
    }
}
