//! Scarcity: many queue pairs wait for each other, because receive queues and windows are small.

use rocinante_stack::{Budget, EngineConfig};

use crate::random::Random;
use crate::world::World;

/// Usual connections of a world, on average, and connections for each host of a crowd. A connection
/// has two queue pairs.
const USUAL: u64 = 4;
const CROWD: (u64, u64) = (32, 49);
/// The storm of a crowd has this many times the usual number of steps.
const LONGER: u64 = 4;

/// Connections of a crowd.
pub(crate) fn crowd(hosts: u64, random: &mut Random) -> u64 {
    hosts * random.range(CROWD.0, CROWD.1)
}

/// A receive queue that holds next to nothing.
fn small_budget(random: &mut Random) -> Budget {
    let datagrams = random.range(1, 5) as u32;
    Budget { bytes: random.of(&[2_304, 5_000, 10_000, 40_000]), datagrams }
}

impl World<'_> {
    /// The distance between the numbers of two queue pairs: no number follows another in the
    /// engine's search for a free one.
    pub(crate) fn apart(&self) -> u32 {
        if self.has.scarcity.crowd { 0xa5 } else { 0x111 }
    }

    /// Steps of the storm, if it usually has `length`.
    pub(crate) fn storm_length(&self, length: u64) -> u64 {
        if self.has.scarcity.crowd { LONGER * length } else { length }
    }

    /// The rest of a program, if it usually rests for `pause`: the programs of a crowd together do
    /// the same amount of work as those of other worlds.
    pub(crate) fn rest(&self, pause: u64) -> u64 {
        if self.has.scarcity.crowd { pause * self.connections.len() as u64 / USUAL } else { pause }
    }

    /// The configuration of an engine, with the features that the run has.
    pub(crate) fn configured(&mut self, drawn: EngineConfig) -> EngineConfig {
        let has = self.has;
        let mut config = drawn;
        config.split_writes &= has.policies.split_writes;
        config.advertise_credits &= has.policies.credits;
        if has.scarcity.small_windows {
            let [window, reorder] =
                [(1, 4), (0, 2)].map(|(low, high)| self.random.range(low, high) as u32);
            (config.window_max, config.quantum, config.reorder_packets_max) = (window, 1, reorder);
        }
        if !has.policies.selective_repeat {
            config.reorder_packets_max = 0;
        }
        config
    }

    /// The receive queue of a host that starts.
    pub(crate) fn own_budget(&mut self, host: usize) -> Budget {
        match () {
            () if !self.has.scarcity.small_credit => self.hosts[host].config.own_budget,
            // Shards of one host share one receive queue.
            () if !self.has_manager(host) => self.hosts[0].config.own_budget,
            () => small_budget(&mut self.random),
        }
    }

    /// A host's announcement of its receive queue at this moment.
    pub(crate) fn announced(&mut self, host: usize) -> Budget {
        let own = self.hosts[host].config.own_budget;
        let changes = self.has.scarcity.small_credit;
        match () {
            () if !self.has.policies.budgets || self.has.strangers => Budget::STANDARD,
            () if changes && self.random.one_in(2) => small_budget(&mut self.random),
            () => own,
        }
    }
}
