//! One direction of a link, or the port of a switch.

use std::collections::VecDeque;

/// Ethernet, its preamble and gap, IPv4 and UDP.
const FRAMING: u64 = 38 + 20 + 8;

/// Nanoseconds after which a window that began at the receiver's size has settled.
pub(crate) const SETTLED: u64 = 20_000_000;

/// Properties of the link.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    /// Bits per second.
    pub(crate) rate: u64,
    /// One way, in nanoseconds.
    pub(crate) delay: u64,
    /// Most bytes that wait.
    pub(crate) queue: u64,
    /// Packets of a million that are lost.
    pub(crate) loss: u64,
    /// Packets are marked while more bytes than this wait.
    pub(crate) marks: u64,
}

/// One direction of a link.
pub(crate) struct Lane {
    link: Link,
    random: u64,
    /// When the last accepted packet has left.
    busy_until: u64,
    /// Arrival times, packets and their TOS.
    pub(crate) arrivals: VecDeque<(u64, Vec<u8>, u8)>,
    /// Packets that came.
    pub(crate) taken: u64,
    pub(crate) overflowed: u64,
    /// The most bytes that waited after the window had settled.
    pub(crate) longest: u64,
}

impl Lane {
    pub(crate) fn new(link: Link, seed: u64) -> Self {
        Self {
            link,
            random: seed,
            busy_until: 0,
            arrivals: VecDeque::new(),
            taken: 0,
            overflowed: 0,
            longest: 0,
        }
    }

    /// xorshift64*.
    fn chance(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33
    }

    /// The next packet that has arrived, with its TOS.
    pub(crate) fn next(&mut self, now: u64) -> Option<(Vec<u8>, u8)> {
        let (time, ..) = self.arrivals.front()?;
        let due = *time <= now;
        let (_, packet, tos) = due.then(|| self.arrivals.pop_front())??;
        Some((packet, tos))
    }

    pub(crate) fn take(&mut self, now: u64, packet: Vec<u8>) {
        self.taken += 1;
        let begin = self.busy_until.max(now);
        let waiting = (begin - now) * self.link.rate / 8_000_000_000;
        if waiting + packet.len() as u64 > self.link.queue {
            self.overflowed += 1;
            return;
        }
        if now > SETTLED {
            self.longest = self.longest.max(waiting);
        }
        let bits = (packet.len() as u64 + FRAMING) * 8;
        self.busy_until = begin + bits * 1_000_000_000 / self.link.rate;
        if self.chance() % 1_000_000 >= self.link.loss {
            let tos = if waiting > self.link.marks { 3 } else { 2 };
            self.arrivals.push_back((self.busy_until + self.link.delay, packet, tos));
        }
    }
}
