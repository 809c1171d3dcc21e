//! Whether the losses at a receiver permit to count on super-packets.
//!
//! Only a loss shows that a router or a bridge on the path takes super-packets apart, so that the
//! receiver's queue overflows. After a loss the queue is taken to hold its announced budget and no
//! more, until enough packets have arrived without another.

use crate::tuning::long_runs::{FIRST_PART, TIMES_MAX};

/// The packets of one receiver since its last loss.
#[derive(Debug)]
pub(super) struct Confidence {
    since_loss: u32,
    /// Number of packets that restore it.
    needed: u32,
    /// The least that `needed` may be.
    stable: u32,
}

impl Confidence {
    /// Restored after `stable` packets without a loss; at first after a part of them.
    pub(super) fn new(stable: u32) -> Self {
        Self { since_loss: stable - stable / FIRST_PART, needed: stable, stable }
    }

    pub(super) fn is_restored(&self) -> bool {
        self.since_loss >= self.needed
    }

    /// `packets` packets arrived. Returns whether that restores the confidence.
    #[inline]
    pub(super) fn arrived(&mut self, packets: u32) -> bool {
        let before = self.is_restored();
        if before && self.needed == self.stable {
            return false;
        }
        self.since_loss = self.since_loss.saturating_add(packets);
        if self.since_loss >= self.needed.saturating_mul(2) {
            // It lasted as long as it took to restore: the earlier losses count no more.
            (self.since_loss, self.needed) = (self.stable, self.stable);
        }
        !before && self.is_restored()
    }

    pub(super) fn lost(&mut self) {
        if self.is_restored() {
            let most = self.stable.saturating_mul(TIMES_MAX);
            self.needed = self.needed.saturating_mul(2).min(most);
        }
        self.since_loss = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::long_runs::STABLE_PACKETS;

    const FIRST: u32 = STABLE_PACKETS / FIRST_PART;
    const MOST: u32 = STABLE_PACKETS * TIMES_MAX;

    #[test]
    fn a_loss_counts_for_two_million_packets() {
        let mut confidence = Confidence::new(STABLE_PACKETS);
        assert!(!confidence.arrived(FIRST - 1) && !confidence.is_restored());
        assert!(confidence.arrived(1) && confidence.is_restored() && !confidence.arrived(1));
        confidence.lost();
        confidence.lost();
        assert!(!confidence.arrived(2 * STABLE_PACKETS - 1) && !confidence.is_restored());
        assert!(confidence.arrived(1) && confidence.is_restored(), "twice as many");
    }

    #[test]
    fn where_packets_are_always_lost_the_attempts_become_rare() {
        let mut confidence = Confidence::new(STABLE_PACKETS);
        let mut attempts = 0;
        for _ in 0..1 << 16 {
            confidence.arrived(STABLE_PACKETS / 16);
            if confidence.is_restored() {
                attempts += 1;
                confidence.lost();
            }
        }
        assert!((10..=16).contains(&attempts), "{attempts} in 2³² packets");
        // Until one lasted.
        confidence.lost();
        assert!(!confidence.arrived(MOST - 1) && confidence.arrived(1));
        assert!(!confidence.arrived(MOST));
        confidence.lost();
        assert!(confidence.arrived(2 * STABLE_PACKETS));
    }
}
