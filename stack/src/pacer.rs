//! When what nobody acknowledges may leave.
//!
//! A sender in hardware sends such packets at the speed of its link, and so may we: there is no
//! telling what becomes of them, and what a receiver has no receive for is lost at any speed. But a
//! receiver in software has to run to take them, on a processor that it shares. So two things are
//! bounded: what leaves at once, by half of what the receiver's queue holds, so that it may be late
//! by that; and what leaves in the long run, by what a receiver like this one takes with time to
//! spare, so that after having been late it catches up.
//!
//! Both are one account: what the receiver is reckoned to hold, which shrinks while time passes.

use crate::peer::{Budget, Cost};
use crate::types::Time;

/// What is assumed of the queue of a peer that did not say: Linux's sockets have so much unless
/// they ask for more (`net.core.rmem_default`). Hardware and Linux's own RDMA in software have no
/// such queue.
const STRANGER: Budget = Budget { bytes: 212_992, datagrams: 212_992 / Budget::cost(0) };

/// How long a receiver is given for a packet, and for 1,024 bytes of its payload: twice to two and
/// a half times what it was measured to need, since its processor has other things to do, too: 3.1,
/// 2.0 and 1.2 million packets of 64, 1,024 and 4,096 bytes in a second between two of ours, with a
/// processor each, over a veth and UDP sockets.
const PACKET_NS: u64 = 800;
const KIB_NS: u64 = 300;

/// The account of one receiver.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// What it holds, as of `at`, and how long it will take for that.
    held: Cost,
    takes_ns: u64,
    at: Time,
    /// It was full: nothing leaves before there is room for a run.
    closed: Time,
}

impl Pace {
    /// Whether a packet of `charge` may leave now for a receiver whose queue holds `limit`; if not,
    /// when it may.
    #[inline]
    pub(crate) fn admit(&mut self, now: Time, charge: Cost, limit: Budget) -> Result<(), Time> {
        if now < self.closed {
            return Err(self.closed);
        }
        self.pass(now);
        let bytes = u64::from((limit.bytes / 2).max(STRANGER.bytes / 2));
        let datagrams = (limit.datagrams / 2).max(STRANGER.datagrams / 2);
        let fits = self.held.bytes + charge.bytes <= bytes
            && self.held.datagrams + charge.datagrams <= datagrams;
        if fits || self.takes_ns == 0 {
            return Ok(());
        }
        // Room for one would let them trickle, and each would cost as much as a run.
        self.closed = now.after(self.takes_ns.div_ceil(2));
        Err(self.closed)
    }

    /// A packet with so many bytes of payload left.
    #[inline]
    pub(crate) fn left(&mut self, charge: Cost, payload: u32) {
        self.held.add(charge);
        self.takes_ns += PACKET_NS + u64::from(payload) * KIB_NS / 1024;
    }

    /// It has taken some by now.
    #[inline]
    fn pass(&mut self, now: Time) {
        let passed = now.since(self.at);
        if passed == 0 {
            return;
        }
        self.at = now;
        if passed >= self.takes_ns {
            (self.held, self.takes_ns) = (Cost::default(), 0);
            return;
        }
        let left = self.takes_ns - passed;
        self.held.bytes = self.held.bytes * left / self.takes_ns;
        #[allow(clippy::cast_possible_truncation)]
        let datagrams = (u64::from(self.held.datagrams) * left).div_ceil(self.takes_ns) as u32;
        self.held.datagrams = datagrams;
        self.takes_ns = left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// How many packets of a size leave from `from` until `until`, asked for as often as may be.
    fn sent(pace: &mut Pace, limit: Budget, payload: u32, from: u64, until: u64) -> u32 {
        let charge = Cost::of(1, Budget::cost(payload + 36));
        let (mut now, mut count) = (Time(from), 0);
        while now.0 < until {
            match pace.admit(now, charge, limit) {
                Ok(()) => {
                    pace.left(charge, payload);
                    count += 1;
                }
                Err(later) => {
                    assert!(later > now, "the time to wait is told");
                    now = later;
                }
            }
        }
        count
    }

    #[test]
    fn at_once_leaves_half_of_what_the_receiver_holds() {
        let limit = Budget { bytes: 4 << 20, datagrams: 1000 };
        for (limit, payload, expected) in [
            (limit, 64, 500),
            (limit, 4096, (2 << 20) / Budget::cost(4132)),
            // What a stranger's socket holds.
            (Budget::STANDARD, 64, 128),
            (Budget::STANDARD, 1024, 106_496 / Budget::cost(1060)),
            (Budget { bytes: 0, datagrams: 0 }, 4096, 12),
        ] {
            assert_eq!(sent(&mut Pace::default(), limit, payload, MS, MS + 1), expected);
        }
    }

    #[test]
    fn the_rate_is_one_that_a_receiver_in_software_takes() {
        for (payload, each_ns) in [(0, 800), (64, 818), (1024, 1100), (4096, 2000)] {
            for limit in [Budget::STANDARD, Budget { bytes: 8 << 20, datagrams: 10_000 }] {
                let mut pace = Pace::default();
                sent(&mut pace, limit, payload, MS, 100 * MS);
                let count = sent(&mut pace, limit, payload, 100 * MS, 1100 * MS);
                let expected = 1000 * MS / each_ns;
                assert!(u64::from(count).abs_diff(expected) < expected / 50, "{payload}: {count}");
            }
        }
    }

    #[test]
    fn whoever_waited_sends_a_run() {
        let (mut pace, limit) = (Pace::default(), Budget::STANDARD);
        let charge = Cost::of(1, Budget::cost(100));
        sent(&mut pace, limit, 64, MS, MS + 1);
        let Err(later) = pace.admit(Time(MS + 1), charge, limit) else { panic!("it is full") };
        // Not a nanosecond earlier, and then for half of what there was room for.
        assert_eq!(pace.admit(Time(later.0 - 1), charge, limit), Err(later));
        let run = sent(&mut pace, limit, 64, later.0, later.0 + 1);
        assert!((60..=64).contains(&run), "{run}");
    }

    #[test]
    fn after_a_pause_everything_is_as_in_the_beginning() {
        let (mut pace, limit) = (Pace::default(), Budget::STANDARD);
        for round in 1..5 {
            let now = round * 10 * MS;
            assert_eq!(sent(&mut pace, limit, 64, now, now + 1), 128);
        }
    }

    /// A program that sends now and then, and time that does not pass.
    #[test]
    fn no_packet_waits_for_ever() {
        let nothing = Budget { bytes: 0, datagrams: 0 };
        let huge = Cost::of(1, u32::MAX);
        let mut pace = Pace::default();
        assert_eq!(pace.admit(Time(5), huge, nothing), Ok(()));
        pace.left(huge, 1 << 16);
        let Err(later) = pace.admit(Time(5), huge, nothing) else { panic!("it is full") };
        let Err(last) = pace.admit(later, huge, nothing) else { panic!("it still is") };
        assert!(last > later && last < Time(5).after(MS));
        assert_eq!(pace.admit(Time(5).after(MS), huge, nothing), Ok(()));
    }
}
