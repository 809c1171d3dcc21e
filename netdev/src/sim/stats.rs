//! Counts of the fates of datagrams in a simulated network.

use crate::fault::link::{Fate, Loss};

/// How often each fault has happened since the network was made, in datagrams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Flushed by a port, and not too long for its link.
    pub sent: u64,
    /// Put into a receive queue, duplicates included.
    pub delivered: u64,
    /// Lost one by one.
    pub dropped: u64,
    /// Lost because nothing passes, or nothing of their length.
    pub dropped_by_cut: u64,
    /// Lost in bursts.
    pub dropped_in_bursts: u64,
    /// Lost by the [tap](super::SimNet::set_tap).
    pub dropped_by_tap: u64,
    /// Lost because a rate limiter's queue was full.
    pub dropped_by_rate: u64,
    /// Lost because the receiver's queue was full.
    pub dropped_at_receiver: u64,
    /// Lost because no port has the destination address.
    pub unroutable: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Made late.
    pub reordered: u64,
    /// With a flipped bit.
    pub corrupted: u64,
    /// Cut short.
    pub truncated: u64,
    /// Marked as having met congestion.
    pub marked: u64,
}

impl SimStats {
    /// Counts a datagram of `len` bytes that its link lost, or that has these copies.
    pub(super) fn count(&mut self, len: usize, decided: &Result<(Fate, Option<Fate>), Loss>) {
        let (first, second) = match decided {
            Ok(copies) => copies,
            Err(loss) => {
                let lost = match loss {
                    Loss::Chance | Loss::Every => &mut self.dropped,
                    Loss::Burst => &mut self.dropped_in_bursts,
                    Loss::Rate => &mut self.dropped_by_rate,
                    Loss::Cut | Loss::Mtu | Loss::Full => &mut self.dropped_by_cut,
                };
                *lost += 1;
                return;
            }
        };
        self.duplicated += u64::from(second.is_some());
        for fate in [Some(first), second.as_ref()].into_iter().flatten() {
            self.reordered += u64::from(fate.is_late);
            self.truncated += u64::from(fate.len < len);
            self.corrupted += u64::from(fate.flip.is_some());
            self.marked += u64::from(fate.is_marked);
        }
    }
}
