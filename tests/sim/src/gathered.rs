//! How datagrams arrive at a host, and leave it: as super-packets, of which one slot of the receive
//! queue holds many datagrams, or one by one. That changes without notice.

use rocinante_stack::Engine;

use crate::random::Random;

/// Datagrams that arrived at one host since the last report to its engine.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// Its own random numbers: how datagrams are gathered changes nothing else in a world.
    random: Random,
    /// Whether the host ever reports.
    reports: bool,
    /// The average number of datagrams in a run.
    together: u64,
    datagrams: u32,
    bytes: u64,
}

/// With 0 the host reports nothing.
const TOGETHER: [u64; 6] = [0, 1, 1, 4, 15, 60];

impl Gathered {
    pub(crate) fn new(random: Random, reports: bool) -> Self {
        Self { random, reports, together: 0, datagrams: 0, bytes: 0 }
    }

    /// `engine` took another datagram, of `len` bytes.
    pub(crate) fn add(&mut self, engine: &mut Engine, len: usize) {
        self.turn();
        self.datagrams += 1;
        self.bytes += len as u64;
        if self.random.one_in(self.together) {
            engine.arrived(1, self.datagrams, self.bytes);
            (self.datagrams, self.bytes) = (0, 0);
        }
    }

    /// `engine` handed over `datagrams`, of `bytes` in all.
    pub(crate) fn departed(&mut self, engine: &mut Engine, datagrams: usize, bytes: usize) {
        self.turn();
        if self.together > 0 {
            let runs = (datagrams as u64).div_ceil(self.together);
            engine.departed(runs as u32, datagrams as u32, bytes as u64);
        }
    }

    /// Now and then changes the length of the runs.
    fn turn(&mut self) {
        if self.reports && self.random.one_in(300) {
            self.together = self.random.of(&TOGETHER);
            (self.datagrams, self.bytes) = (0, 0);
        }
    }
}
