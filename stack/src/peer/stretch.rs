//! The larger capacity of a receive queue for super-packets than for datagrams that come one by
//! one.
//!
//! A budget is the capacity for datagrams that travel in any way. While runs are long and nothing
//! is lost ([`Confidence`](super::confidence::Confidence)), the queue is taken to hold more.

use super::kind::PeerKind;
use super::runs::RunLength;
use crate::budget::Budget;
use crate::tuning::long_runs::{BYTES_STEP, PLACE_EIGHTHS, PLACES_TIMES};
use crate::types::QueueKind;

/// The capacity of a queue of this budget for runs of this length, if no more than `enough` bytes
/// of payload are wanted.
pub(super) fn stretched(budget: Budget, queue: QueueKind, runs: RunLength, enough: u64) -> Budget {
    if runs.datagrams < 2 {
        return budget;
    }
    let (held, eighths) = match queue {
        QueueKind::Places => {
            (budget.datagrams, (runs.datagrams * PLACE_EIGHTHS).min(8 * PLACES_TIMES))
        }
        QueueKind::Memory => (budget.bytes / Budget::cost(runs.bytes), runs.eighths),
        QueueKind::Frames => return budget,
    };
    let payload = u64::from(held) * u64::from(runs.bytes.max(BYTES_STEP));
    let enough = enough.saturating_mul(8) / payload.max(1);
    budget.part(enough.clamp(8, u64::from(eighths.max(8))) as u32, 8)
}

/// The most datagrams that the queue of a peer is ever taken to hold.
pub(crate) fn datagrams_max(budget: Budget, peer: PeerKind) -> u32 {
    match peer.queue() {
        QueueKind::Places => budget.datagrams.saturating_mul(PLACES_TIMES),
        QueueKind::Memory | QueueKind::Frames => budget.datagrams,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::long_runs::ENOUGH;
    use crate::types::QueueKind::{Frames, Memory, Places};

    fn of(datagrams: u32, eighths: u32) -> RunLength {
        RunLength { datagrams, eighths, bytes: 1024 }
    }

    #[test]
    fn a_ring_holds_more_the_longer_runs_are() {
        let ring = Budget { bytes: 150 * 133_118, datagrams: 150 };
        let stretched = |length| stretched(ring, Places, length, ENOUGH).datagrams;
        let datagrams = [1, 2, 3, 4, 5, 8].map(|datagrams| stretched(of(datagrams, 8)));
        assert_eq!(datagrams, [150, 225, 337, 450, 562, 600]);
        assert_eq!(stretched(RunLength { bytes: 4096, ..of(8, 14) }), 150, "enough");
        assert_eq!(datagrams_max(ring, PeerKind::Rocinante(Places)), 600);
    }

    #[test]
    fn a_socket_holds_more_of_runs() {
        let socket = Budget { bytes: 279_552, datagrams: 336 };
        assert_eq!(stretched(socket, Memory, of(8, 8), ENOUGH), socket);
        let more = Budget { bytes: 489_216, datagrams: 588 };
        assert_eq!(stretched(socket, Memory, of(2, 14), ENOUGH), more);
        let large = Budget { bytes: 5 << 20, datagrams: 6301 };
        assert_eq!(stretched(large, Memory, of(8, 14), ENOUGH), large, "enough");
        assert_eq!(stretched(large, Memory, of(8, 14), u64::MAX), large.part(14, 8));
        assert_eq!(datagrams_max(socket, PeerKind::Rocinante(Memory)), 336);
    }

    #[test]
    fn the_queue_of_a_standard_peer_holds_no_more_nor_does_one_of_frames() {
        let chunks = Budget { bytes: 1792 * 8448, datagrams: 1792 };
        for (budget, kind) in
            [(Budget::STANDARD, PeerKind::Standard), (chunks, PeerKind::Rocinante(Frames))]
        {
            assert_eq!(stretched(budget, kind.queue(), of(8, 14), ENOUGH), budget);
            assert_eq!(datagrams_max(budget, kind), budget.datagrams);
        }
    }
}
