//! The account of packets that are in flight or queued, of which nothing but the time is known.

use super::Pacing;
use crate::budget::{Budget, Cost};
use crate::types::Time;

/// The account of one receiver, or of the packets that one connection sent in vain.
#[derive(Debug, Default)]
pub(crate) struct Pacer {
    /// The assumed contents of the queue at `at`, and the time that the receiver takes for them.
    held: Cost,
    takes_ns: u64,
    at: Time,
    /// It was full: nothing leaves before it has room for a run.
    closed: Time,
}

impl Pacer {
    /// Takes note of the time, before [`admit`](Self::admit).
    #[inline]
    pub(crate) fn tick(&mut self, now: Time) {
        if now >= self.closed {
            self.pass(now);
        }
    }

    /// Whether a packet of `charge` may leave now for a receiver whose queue holds `limit`; if not,
    /// when it may: [`put_off`](Self::put_off) then holds to that.
    #[inline]
    pub(crate) fn admit(
        &self,
        pacing: &Pacing,
        now: Time,
        charge: Cost,
        limit: Budget,
    ) -> Result<(), Time> {
        if now < self.closed {
            return Err(self.closed);
        }
        let least = pacing.queue_min;
        let bytes = u64::from((limit.bytes / 2).max(least.bytes / 2));
        let datagrams = (limit.datagrams / 2).max(least.datagrams / 2);
        let fits = self.held.bytes + charge.bytes <= bytes
            && self.held.datagrams + charge.datagrams <= datagrams;
        if fits || self.takes_ns == 0 {
            return Ok(());
        }
        // With room for one packet they would trickle, and each would cost as much as a run.
        Err(now.after(self.takes_ns.div_ceil(2)))
    }

    /// A packet waits: nothing leaves before `until`.
    pub(crate) fn put_off(&mut self, until: Time) {
        self.closed = until;
    }

    /// A packet with `payload` bytes of payload left.
    #[inline]
    pub(crate) fn sent(&mut self, pacing: &Pacing, charge: Cost, payload: u32) {
        self.held.add(charge);
        self.takes_ns += u64::from(pacing.packet_ns);
        self.takes_ns += u64::from(payload) * u64::from(pacing.kib_ns) / 1024;
    }

    /// Assumes that `packets` packets were sent in vain, are in flight, and will be gone in
    /// `takes_ns` nanoseconds.
    pub(crate) fn fill(&mut self, now: Time, packets: u32, takes_ns: u64) {
        let held = Cost { bytes: 0, datagrams: packets };
        *self = Self { held, takes_ns, at: now, closed: Time::default() };
    }

    /// Packets that are taken to be in flight.
    pub(crate) fn held(&mut self, now: Time) -> u32 {
        let passed = now.since(self.at);
        if passed >= self.takes_ns {
            self.pass(now);
            return 0;
        }
        // A part of the first number, so that asking often does not round often.
        let left = u64::from(self.held.datagrams) * (self.takes_ns - passed);
        left.div_ceil(self.takes_ns) as u32
    }

    /// Nanoseconds from [`fill`](Self::fill) until the packets in flight are gone.
    pub(crate) fn takes_ns(&self) -> u64 {
        self.takes_ns
    }

    /// Whether nothing was taken to be in flight at the last update.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.takes_ns == 0
    }

    /// The receiver has taken some by now.
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
        let datagrams = (u64::from(self.held.datagrams) * left).div_ceil(self.takes_ns) as u32;
        self.held.datagrams = datagrams;
        self.takes_ns = left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const PACING: Pacing = Pacing {
        packet_ns: 800,
        kib_ns: 300,
        queue_min: Budget { bytes: 212_992, datagrams: 256 },
    };

    #[test]
    fn the_pace_is_configured() {
        assert_eq!(Pacing::default(), PACING);
        let charge = Cost::of(1, Budget::cost(100));
        let sent = |pacing: &Pacing| {
            let mut pace = Pacer::default();
            let admitted = (0..2000).take_while(|_| {
                let admits = admit(&mut pace, pacing, Time(MS), charge, Budget::STANDARD).is_ok();
                pace.sent(pacing, charge, 64);
                admits
            });
            admitted.count()
        };
        let larger = Budget { bytes: 1 << 20, datagrams: 1000 };
        assert_eq!(sent(&Pacing { queue_min: larger, ..PACING }), 500);
        assert_eq!(sent(&Pacing { packet_ns: 0, kib_ns: 0, ..PACING }), 2000);
    }

    /// Asks, and holds to the answer.
    fn admit(
        pace: &mut Pacer,
        pacing: &Pacing,
        now: Time,
        charge: Cost,
        limit: Budget,
    ) -> Result<(), Time> {
        pace.tick(now);
        pace.admit(pacing, now, charge, limit).inspect_err(|until| pace.put_off(*until))
    }

    /// Number of packets of a size that leave from `from` until `until`; each leaves when it may.
    fn sent(pace: &mut Pacer, limit: Budget, payload: u32, from: u64, until: u64) -> u32 {
        let charge = Cost::of(1, Budget::cost(payload + 36));
        let (mut now, mut count) = (Time(from), 0);
        while now.0 < until {
            match admit(pace, &PACING, now, charge, limit) {
                Ok(()) => {
                    pace.sent(&PACING, charge, payload);
                    count += 1;
                }
                Err(later) => {
                    assert!(later > now, "it returns the time to wait");
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
            // The assumed size of any socket.
            (Budget::STANDARD, 64, 128),
            (Budget::STANDARD, 1024, 106_496 / Budget::cost(1060)),
            (Budget { bytes: 0, datagrams: 0 }, 4096, 12),
        ] {
            assert_eq!(sent(&mut Pacer::default(), limit, payload, MS, MS + 1), expected);
        }
    }

    #[test]
    fn the_rate_is_one_that_a_receiver_in_software_takes() {
        for (payload, each_ns) in [(0, 800), (64, 818), (1024, 1100), (4096, 2000)] {
            for limit in [Budget::STANDARD, Budget { bytes: 8 << 20, datagrams: 10_000 }] {
                let mut pace = Pacer::default();
                sent(&mut pace, limit, payload, MS, 100 * MS);
                let count = sent(&mut pace, limit, payload, 100 * MS, 1100 * MS);
                let expected = 1000 * MS / each_ns;
                assert!(u64::from(count).abs_diff(expected) < expected / 50, "{payload}: {count}");
            }
        }
    }

    #[test]
    fn after_a_wait_a_run_leaves() {
        let (mut pace, limit) = (Pacer::default(), Budget::STANDARD);
        let charge = Cost::of(1, Budget::cost(100));
        sent(&mut pace, limit, 64, MS, MS + 1);
        let Err(later) = admit(&mut pace, &PACING, Time(MS + 1), charge, limit) else {
            panic!("it is full")
        };
        // Not a nanosecond earlier, and then for half of the former room.
        assert_eq!(admit(&mut pace, &PACING, Time(later.0 - 1), charge, limit), Err(later));
        let run = sent(&mut pace, limit, 64, later.0, later.0 + 1);
        assert!((60..=64).contains(&run), "{run}");
    }

    #[test]
    fn after_a_pause_everything_is_as_in_the_beginning() {
        let (mut pace, limit) = (Pacer::default(), Budget::STANDARD);
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
        let mut pace = Pacer::default();
        assert_eq!(admit(&mut pace, &PACING, Time(5), huge, nothing), Ok(()));
        pace.sent(&PACING, huge, 1 << 16);
        let Err(later) = admit(&mut pace, &PACING, Time(5), huge, nothing) else {
            panic!("it is full")
        };
        let Err(last) = admit(&mut pace, &PACING, later, huge, nothing) else {
            panic!("it still is")
        };
        assert!(last > later && last < Time(5).after(MS));
        assert_eq!(admit(&mut pace, &PACING, Time(5).after(MS), huge, nothing), Ok(()));
    }
}
