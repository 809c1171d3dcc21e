//! What arrives at a host comes in super-packets, of which one place of the receive queue holds many datagrams, or one by one; and
//! that changes without a word.

use rocinante_stack::Engine;

use crate::random::Random;

/// What arrived at one host since it last told its engine how.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// Its own: how datagrams are gathered changes nothing of what else happens in a world.
    random: Random,
    /// How many of them come together, about.
    together: u64,
    datagrams: u32,
}

/// 0: of these datagrams the host says nothing.
const TOGETHER: [u64; 6] = [0, 1, 1, 4, 15, 60];

impl Gathered {
    pub(crate) fn new(random: Random) -> Self {
        Self { random, together: 0, datagrams: 0 }
    }

    /// `engine` took another datagram.
    pub(crate) fn add(&mut self, engine: &mut Engine) {
        if self.random.one_in(300) {
            (self.together, self.datagrams) = (self.random.of(&TOGETHER), 0);
        }
        self.datagrams += 1;
        if self.random.one_in(self.together) {
            engine.arrived(self.datagrams, 1);
            self.datagrams = 0;
        }
    }
}
