//! Why a queue pair sends nothing more: the reasons, and how often each applied.

macro_rules! limits {
    ($($(#[doc = $doc:literal])* $variant:ident $name:literal,)*) => {
        /// Why a queue pair that had its turn sent nothing more. Of several, the one that was asked
        /// about first counts: `permit` has the order.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Limit {
            $($(#[doc = $doc])* $variant,)*
        }

        impl Limit {
            /// All of them.
            pub const ALL: [Self; limits!(@count $($variant)*)] = [$(Self::$variant),*];

            /// Its name in lower case, as counters have it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
    (@count $($variant:ident)*) => { [$(limits!(@one $variant)),*].len() };
    (@one $variant:ident) => { () };
}

limits! {
    /// All requests that were posted have left.
    SendQueueEmpty "send_queue_empty",
    /// The queue pair is in SQD and begins no request (IBTA volume 1, 10.3.1 \[M\]).
    Draining "draining",
    /// The peer had no receive, and named a time to wait (RNR NAK).
    Rnr "rnr",
    /// A request waits for all before it: one with a fence, or an invalidation.
    Fence "fence",
    /// The number of outstanding READs and atomics is at `max_rd_atomic`.
    RdAtomic "rd_atomic",
    /// The responder has no receive for a further message (end-to-end credits).
    Credits "credits",
    /// Lost packets must arrive first.
    Recovering "recovering",
    /// The packets in flight fill the congestion window.
    CongestionWindow "congestion_window",
    /// More may leave as time passes: after a loss, or for an unreliable receiver.
    Pacing "pacing",
    /// The packets of READ responses in flight fill the read window.
    ReadWindow "read_window",
    /// More packets are awaited, so that a super-packet is filled.
    Batch "batch",
    /// Our own receive queue has no credit for the responses.
    AckRoom "ack_room",
    /// The peer's receive queue has no credit for the packet.
    PeerRoom "peer_room",
    /// Other queue pairs have their turn.
    Turn "turn",
    /// The port takes no more packets.
    Port "port",
}

/// How often each [`Limit`] applied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitsHit([u64; Limit::ALL.len()]);

impl LimitsHit {
    /// How often this one applied.
    #[must_use]
    pub fn of(&self, limit: Limit) -> u64 {
        self.0[limit as usize]
    }

    /// All limits with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Limit, u64)> + use<> {
        Limit::ALL.into_iter().zip(self.0)
    }

    /// Adds the counts of another set.
    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, count)| *sum += count);
    }

    #[inline]
    pub(crate) fn hit(&mut self, limit: Limit) {
        self.0[limit as usize] += 1;
    }
}

/// The same of one queue pair, which keeps few bytes for it: modulo 2^32.
#[derive(Debug, Default)]
pub(crate) struct Hits([u32; Limit::ALL.len()]);

impl Hits {
    #[inline]
    pub(crate) fn hit(&mut self, limit: Limit) {
        let count = &mut self.0[limit as usize];
        *count = count.wrapping_add(1);
    }

    pub(crate) fn get(&self) -> LimitsHit {
        LimitsHit(self.0.map(u64::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_a_count_and_a_name_of_its_own() {
        let (mut hits, mut all) = (Hits::default(), LimitsHit::default());
        for (at, limit) in Limit::ALL.into_iter().enumerate() {
            for _ in 0..=at {
                hits.hit(limit);
                all.hit(limit);
            }
        }
        assert_eq!(hits.get(), all);
        let mut sum = all;
        sum.add(&all);
        assert!(all.iter().all(|(limit, count)| sum.of(limit) == 2 * count));
        for (at, (limit, count)) in all.iter().enumerate() {
            assert_eq!((limit, count), (Limit::ALL[at], at as u64 + 1));
            assert_eq!(all.of(limit), count);
            let same = Limit::ALL.into_iter().filter(|other| other.name() == limit.name());
            assert_eq!(same.count(), 1, "{}", limit.name());
        }
    }
}
