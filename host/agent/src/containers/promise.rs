//! The memory for rings: a part that each container is promised, and the rest.
//!
//! Half of the memory is promised in equal parts, one for each expected container, or one for each
//! that has ports if they are more. The other half is for those that want more than their part.
//!
//! A request takes half of what is left of its container's part, or a 64th of what the container
//! may take beyond it if that is more; a container's first request takes no more than the part. So
//! all that ask for the same get the same, and a container that asks without end takes nothing that
//! another one is promised.

use crate::config::Config;

/// A request takes no more of the memory beyond a promise than one part in this many. More: later
/// ports are larger. Less: the first ports leave them little.
const SHARES: usize = 64;

/// The bounds, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// Of all containers.
    total: usize,
    /// Of one container.
    own_max: usize,
    /// The number of containers that the promised half is divided by, at least.
    expected: usize,
}

/// The bytes that a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Allowed {
    /// If it can do with so little.
    pub(super) fair: usize,
    /// If its least ports take more than that.
    pub(super) most: usize,
}

impl Memory {
    /// For a container that may have this many MiB itself.
    pub(super) fn new(config: &Config, ring_mib_max: usize) -> Self {
        Self {
            total: config.ring_bytes_total(),
            own_max: ring_mib_max << 20,
            expected: config.containers_expected,
        }
    }

    /// The bytes of all, and those that each is promised where this number of containers has ports.
    pub(super) fn promised(&self, with_ports: usize) -> (usize, usize) {
        (self.total, self.total / 2 / self.expected.max(with_ports))
    }

    /// The bytes for a request of a container that has `own` already, beside `others` with ports.
    pub(super) fn allowed(&self, own: usize, others: &[usize]) -> Allowed {
        let half = self.total / 2;
        let promise = half / self.expected.max(others.len() + 1);
        let beyond = |bytes: &usize| bytes.saturating_sub(promise);
        let all = || others.iter().chain([&own]);
        let free = self.total.saturating_sub(all().sum());
        let own_left = self.own_max.saturating_sub(own);
        let promised = promise.saturating_sub(own);
        let rest = half.saturating_sub(all().map(beyond).sum());
        let most = (promised + rest).min(free).min(own_left);
        let fair = (promised / 2).max(rest.min(own_left) / SHARES);
        let first_max = if own == 0 { promise } else { usize::MAX };
        Allowed { fair: fair.min(first_max), most }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rocinante_netdev::handed::{RING_FRAMES, Request};
    use rocinante_netdev::{Backend, GiveLimits, Shards};

    use super::*;

    const MIB: usize = 1 << 20;

    /// Containers that ask one after the other.
    struct World {
        memory: Memory,
        /// Bytes of those with ports.
        taken: BTreeMap<usize, usize>,
    }

    impl World {
        fn new(total_mib: usize, expected: usize) -> Self {
            let memory = Memory { total: total_mib * MIB, own_max: 512 * MIB, expected };
            Self { memory, taken: BTreeMap::new() }
        }

        /// The slots of the ring that a container gets which asks for `frames`.
        fn ask(&mut self, container: usize, frames: u32) -> Option<u32> {
            let request = Request {
                backend: Backend::Packet,
                interface: 2,
                addresses: Vec::new(),
                shards: Shards::ONE,
                ring_frames: Some(frames),
                tx_buffer_bytes: None,
                despite_rules: false,
                wait_ms: None,
            };
            let own = self.taken.remove(&container).unwrap_or_default();
            let others: Vec<usize> = self.taken.values().copied().collect();
            let allowed = self.memory.allowed(own, &others);
            let limits = GiveLimits::within(allowed.fair, allowed.most, &request);
            let bytes = limits.as_ref().map_or(0, |limits| limits.memory_bytes(&request));
            if own + bytes > 0 {
                self.taken.insert(container, own + bytes);
            }
            assert!(self.mib() <= self.memory.total / MIB, "more than there is");
            Some(limits?.ring_frames_max.min(frames.next_multiple_of(15)))
        }

        /// The slots of all rings that a container gets until it gets no more.
        fn ask_on(&mut self, container: usize, frames: u32) -> Vec<u32> {
            std::iter::from_fn(|| self.ask(container, frames)).collect()
        }

        fn mib(&self) -> usize {
            self.taken.values().sum::<usize>() / MIB
        }
    }

    #[test]
    fn of_a_hundred_that_ask_the_same_the_last_gets_what_the_first_gets() {
        // Slots of the first, of the hundredth, and of the two hundredth.
        for (total_mib, expected, slots) in [
            (4096, 64, [180, 150, 120]),
            (4096, 100, [150, 150, 120]),
            (4096, 200, [120, 120, 120]),
            (2048, 64, [120, 120, 75]),
            (2048, 100, [120, 120, 75]),
            (1024, 64, [120, 60, 15]),
            (1024, 100, [75, 75, 30]),
            (1024, 200, [30, 30, 30]),
        ] {
            let mut world = World::new(total_mib, expected);
            let all: Vec<u32> =
                (0..200).map(|it| world.ask(it, RING_FRAMES).expect("a ring")).collect();
            assert_eq!([all[0], all[99], all[199]], slots, "{total_mib}, {expected}: {all:?}");
            assert!(all.is_sorted_by(|one, next| one >= next), "{all:?}");
        }
    }

    #[test]
    fn a_promise_is_there_whatever_others_took() {
        for (total_mib, expected, hogs) in [(128, 4, 2), (512, 8, 6), (64, 4, 3)] {
            let (mut world, promised) = (World::new(total_mib, expected), total_mib / 2 / expected);
            // They take turns, and want as much as there is.
            while (0..hogs).filter_map(|hog| world.ask(hog, 256)).count() > 0 {}
            assert_eq!(world.mib(), total_mib / 2 + hogs * promised);
            for victim in hogs..expected {
                assert_eq!(world.ask_on(victim, 15).len(), promised, "{total_mib}: of 1 MiB each");
            }
            assert_eq!(world.mib(), total_mib);
        }
    }

    #[test]
    fn its_own_ports_halve_what_is_left_of_a_promise() {
        let mut world = World::new(256, 8);
        world.ask_on(0, 256);
        world.ask_on(1, 256);
        assert_eq!(world.mib(), 128 + 2 * 16, "all that is promised to none is gone");
        for victim in [2, 3] {
            assert_eq!(world.ask_on(victim, 256), [120, 60, 30, 15, 15]);
        }
    }

    #[test]
    fn more_containers_than_expected_share_the_promised_half() {
        let mut world = World::new(64, 4);
        for (container, slots) in [(0, 60), (1, 60), (2, 60), (3, 60), (4, 45), (5, 30), (6, 30)] {
            assert_eq!(world.ask(container, 256), Some(slots), "{container}");
        }
        // One that asks without end takes the rest, which leaves the others theirs.
        let hog = world.ask_on(7, 256);
        assert!(hog.len() > 8, "{hog:?}");
        for container in 0..7 {
            let own = world.taken[&container] / MIB;
            world.ask_on(container, 15);
            assert_eq!(world.taken[&container] / MIB, own.max(4), "{container}");
        }
    }

    #[test]
    fn nothing_is_left_for_one_more_when_all_is_taken() {
        let mut world = World::new(64, 4);
        (0..4).for_each(|container| assert!(!world.ask_on(container, 256).is_empty()));
        assert_eq!(world.mib(), 64);
        assert_eq!(world.ask(4, 15), None);
    }

    #[test]
    fn room_that_is_given_back_is_for_the_next() {
        let mut world = World::new(128, 2);
        world.ask_on(0, 256);
        assert_eq!(world.mib(), 64 + 32);
        assert_eq!(world.ask_on(1, 15).len(), 32, "no more than its part");
        // A container goes; the other one may have the rest of the half that none is promised.
        world.taken.remove(&0);
        assert_eq!(world.ask_on(1, 15).len(), 64);
        assert_eq!(world.ask_on(2, 15).len(), 32, "the part of a container that comes");
        world.taken.remove(&1);
        world.taken.remove(&2);
        assert_eq!(world.ask(0, 256), World::new(128, 2).ask(0, 256));
    }

    /// Containers that went leave no debt: the promises of those that stay grow again.
    #[test]
    fn promises_hold_when_there_were_more_containers_for_a_while() {
        for expected in [3, 7, 10] {
            let mut world = World::new(100, expected);
            for container in 0..40 {
                world.ask(container, 15);
            }
            world.ask_on(0, 256);
            world.ask_on(1, 256);
            world.taken.retain(|container, _| *container < expected);
            let promised = 50 / expected;
            for container in 2..expected {
                world.ask_on(container, 15);
                let own = world.taken[&container] / MIB;
                assert!(own >= promised, "{expected}, {container}: {own} of {promised}");
            }
        }
    }

    #[test]
    fn a_container_gets_a_hundred_ports_and_two_share_what_there_is() {
        for order in [|nth: usize| nth % 2, |nth: usize| nth / 100] {
            let mut world = World::new(1024, 64);
            let rings: Vec<u32> =
                (0..200).map(|nth| world.ask(order(nth), RING_FRAMES).expect("a ring")).collect();
            assert_eq!((rings[0], rings[199]), (120, 15));
        }
        let mut world = World::new(4096, 64);
        let rings: Vec<u32> = (0..64).map_while(|_| world.ask(0, RING_FRAMES)).collect();
        assert_eq!((rings.len(), rings[0], rings[63]), (64, 180, 45));
    }

    #[test]
    fn a_container_never_has_more_than_its_own_limit() {
        for own_max in [1, 5, 32, 40] {
            let memory = Memory { total: 256 * MIB, own_max: own_max * MIB, expected: 4 };
            let mut world = World { memory, taken: BTreeMap::new() };
            world.ask_on(0, 256);
            assert_eq!(world.mib(), own_max);
        }
    }
}
