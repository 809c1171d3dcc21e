//! When packets may leave that no peer acknowledges.
//!
//! Hardware sends such packets at the speed of its link. No response tells their fate, and without
//! a posted receive they are lost at any speed. A receiver in software also has to run to take
//! them, on a processor that it shares. So two amounts are bounded:
//!
//! - The packets that leave at once: half of the receiver's queue, so that the receiver may run
//!   late by that.
//! - The packets that leave in the long run: the rate of a receiver in software, with time to
//!   spare, so that it catches up after having run late.
//!
//! Both are one account: the assumed contents of the receiver's queue, which shrink as time passes.
//! A reliable connection has such an account, too: of the packets that it sent in vain before it
//! went back.

mod pacer;

pub(crate) use self::pacer::Pacer;
use crate::budget::{Budget, Cost};
use crate::tuning::pacing::{KIB_NS, PACKET_NS, PACKET_NS_MIN, QUEUE_BYTES};
use crate::types::Time;

/// How fast packets leave that no peer acknowledges: those of unreliable connections, and
/// datagrams. With both times 0 they leave at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pacing {
    /// Nanoseconds that a receiver gets for a packet.
    pub packet_ns: u32,
    /// Nanoseconds that it gets for 1,024 bytes of payload besides.
    pub kib_ns: u32,
    /// The assumed size of any receiver's queue, even if it announced less or nothing. At most half
    /// of the queue leaves at once.
    pub queue_min: Budget,
}

impl Default for Pacing {
    /// The times are 2 to 2.5 times the measured need of a receiver, because its processor has
    /// other work: 3.1, 2.0 and 1.2 million packets of 64, 1,024 and 4,096 bytes in a second
    /// between two Rocinantes, with a processor each, over a veth and UDP sockets. The queue is a
    /// socket of Linux with its default buffer (`net.core.rmem_default`). Hardware and Soft-RoCE
    /// have no such queue.
    fn default() -> Self {
        let (bytes, datagrams) = (QUEUE_BYTES, QUEUE_BYTES / Budget::cost(0));
        Self { packet_ns: PACKET_NS, kib_ns: KIB_NS, queue_min: Budget { bytes, datagrams } }
    }
}

impl Pacing {
    /// The pace that a receiver announced, but no slower than `usual`, nor without a limit.
    pub(crate) fn at_most(self, usual: &Self) -> Self {
        let queue = |bytes: u32, datagrams: u32| Budget { bytes, datagrams };
        let (least, said) = (usual.queue_min, self.queue_min);
        Self {
            packet_ns: self.packet_ns.max(PACKET_NS_MIN).min(usual.packet_ns),
            kib_ns: self.kib_ns.min(usual.kib_ns),
            queue_min: queue(said.bytes.max(least.bytes), said.datagrams.max(least.datagrams)),
        }
    }
}

/// The packets that leave for one receiver and that no peer acknowledges.
#[derive(Debug)]
pub(crate) struct Pace {
    pacer: Pacer,
    pacing: Pacing,
    /// The budget of the receiver's queue.
    queue: Budget,
}

impl Pace {
    pub(crate) fn new(pacing: Pacing, queue: Budget) -> Self {
        Self { pacer: Pacer::default(), pacing, queue }
    }

    /// The receiver's queue has this budget.
    pub(crate) fn fit(&mut self, queue: Budget) {
        self.queue = queue;
    }

    /// Packets leave like this from now on.
    pub(crate) fn follow(&mut self, pacing: Pacing) {
        self.pacing = pacing;
    }

    /// Takes note of the time, before [`admit`](Self::admit).
    #[inline]
    pub(crate) fn tick(&mut self, now: Time) {
        self.pacer.tick(now);
    }

    /// Whether a packet of `charge` may leave now; if not, when it may.
    #[inline]
    pub(crate) fn admit(&self, now: Time, charge: Cost) -> Result<(), Time> {
        self.pacer.admit(&self.pacing, now, charge, self.queue)
    }

    /// A packet waits: none leaves before `until`.
    pub(crate) fn put_off(&mut self, until: Time) {
        self.pacer.put_off(until);
    }

    /// A packet of `charge` left, with `payload` bytes of payload.
    #[inline]
    pub(crate) fn sent(&mut self, charge: Cost, payload: u32) {
        self.pacer.sent(&self.pacing, charge, payload);
    }

    #[cfg(test)]
    pub(crate) fn packet_ns(&self) -> u32 {
        self.pacing.packet_ns
    }
}
