//! The features of a run: which faults it meets, which policies its engines and programs have, and
//! which resources are scarce.
//!
//! Usually all faults and policies are there, and nothing is scarce. But one feature can hide the
//! failures of another: where packets are lost, a retransmission wakes a queue pair that was
//! forgotten. So a swarm run (A. Groce and others, "Swarm Testing", ISSTA 2012) omits each feature
//! with probability 1/2.

use crate::network::FaultClasses;
use crate::random::Random;

/// A struct with a switch for each of some features.
macro_rules! switches {
    ($(#[$about:meta])* $switches:ident: $( $(#[$doc:meta])* $name:ident, )*) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $switches {
            $( $(#[$doc])* pub(crate) $name: bool, )*
        }

        impl $switches {
            pub(crate) const fn all(on: bool) -> Self {
                Self { $( $name: on, )* }
            }

            pub(crate) fn drawn(random: &mut crate::random::Random) -> Self {
                Self { $( $name: random.one_in(2), )* }
            }

            /// Names of the features, and whether each is on.
            pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, bool)> + use<> {
                [$( (stringify!($name), self.$name), )*].into_iter()
            }
        }
    };
}
pub(crate) use switches;

switches! {
    /// Policies of engines, and habits of programs that make engines use others.
    Policies:
    /// Packets that came early wait for those before them.
    selective_repeat,
    /// A WRITE may leave as several messages.
    split_writes,
    /// Acknowledgements announce the number of posted receives.
    credits,
    /// Hosts announce the budgets of their receive queues.
    budgets,
    /// Hosts report the number of datagrams in a super-packet to their engines.
    runs,
    /// Programs that post few, short WRITEs, and wait for an answer.
    terse,
    writes,
    reads,
    /// Atomics, and ATOMIC WRITE.
    atomics,
    flushes,
    /// Memory windows, and SEND with invalidate.
    windows,
    shared_receives,
    /// Connections by the connection manager.
    managed,
    /// A host with two engines.
    shards,
    unreliable,
    datagrams,
}

switches! {
    /// Scarce resources, so that queue pairs wait for each other.
    Scarcity:
    /// 64 queue pairs and more for each engine.
    crowd,
    /// Receive queues of 1 to 4 datagrams, or of a few thousand bytes. A host's announcement
    /// changes.
    small_credit,
    /// Windows of 1 to 3 packets, turns of one packet, one READ at a time, and reorder buffers of
    /// at most one packet.
    small_windows,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Features {
    pub(crate) faults: FaultClasses,
    pub(crate) policies: Policies,
    pub(crate) scarcity: Scarcity,
    /// No program gives the kind of its peer: engines recognise each other. A seed does not draw
    /// it, so that earlier seeds keep their course.
    pub(crate) strangers: bool,
}

impl Features {
    /// The features of a run with this seed.
    pub(crate) fn new(seed: u64, swarm: bool, scarce: bool) -> Self {
        // Its own random numbers: a seed without `swarm` keeps its course.
        let mut random = Random::new(!seed);
        let mut features = if swarm {
            Self {
                faults: FaultClasses::drawn(&mut random),
                policies: Policies::drawn(&mut random),
                scarcity: Scarcity::drawn(&mut random),
                strangers: false,
            }
        } else {
            Self {
                faults: FaultClasses::all(true),
                policies: Policies::all(true),
                scarcity: Scarcity::all(false),
                strangers: false,
            }
        };
        if scarce {
            features.scarcity = Scarcity::all(true);
        }
        features
    }

    /// Names of the features that the run does not have.
    pub(crate) fn omitted(&self) -> Vec<&'static str> {
        let all = self.faults.iter().chain(self.policies.iter()).chain(self.scarcity.iter());
        all.filter(|(_, on)| !on).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swarm_omits_each_feature_in_about_half_of_its_seeds() {
        let seeds = 400;
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..seeds {
            for name in Features::new(seed, true, false).omitted() {
                *counts.entry(name).or_insert(0) += 1;
            }
        }
        let all = Features::new(0, false, false);
        let names = all.faults.iter().chain(all.policies.iter()).chain(all.scarcity.iter());
        for (name, _) in names {
            assert!((140..260).contains(&counts[name]), "{name}: {} of {seeds}", counts[name]);
        }
    }

    #[test]
    fn without_a_swarm_only_what_is_asked_for_is_scarce() {
        let scarce = ["crowd", "small_credit", "small_windows"];
        assert_eq!(Features::new(7, false, false).omitted(), scarce);
        assert!(Features::new(7, false, true).omitted().is_empty());
        let both = Features::new(7, true, true).omitted();
        assert!(!both.is_empty() && !scarce.iter().any(|name| both.contains(name)));
    }
}
