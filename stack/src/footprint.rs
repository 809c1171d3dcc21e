//! What an engine holds: the amount of everything that grows and shrinks while it works.

use crate::any::AnyQp;
use crate::cm::CmFootprint;
use crate::engine::Engine;

/// What an engine holds now. Its configuration, its queue pairs and its address handles bound all
/// of it, whatever peers send.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Queue pairs.
    pub qps: usize,
    /// Shared receive queues.
    pub srqs: usize,
    /// Address handles.
    pub handles: usize,
    /// Queue pairs and address handles that share the receiver credit of peers.
    pub pool_users: usize,
    /// Packets in flight that take receiver credit.
    pub charged_packets: u64,
    /// Queue pairs that wait for a peer's credit, or were granted it and have not run yet.
    pub waiting: usize,
    /// Deadlines that are filed.
    pub timers: usize,
    /// Queue pairs with something to send.
    pub queued: usize,
    /// Events that the caller has not polled yet, also of shared receive queues.
    pub events: usize,
    /// Packets that arrived out of order and wait for those missing before them.
    pub held_packets: usize,
    /// Memory for such packets, in packets: all that was allocated.
    pub held_blocks: usize,
    /// The part of [`held_blocks`](Self::held_blocks) that is unused now.
    pub spare_blocks: usize,
    /// Queue pairs that have in-flight lists.
    pub lists: usize,
    /// Unused in-flight lists.
    pub spare_lists: usize,
    /// Responder resources: responses to READs, atomics and the like, kept for duplicate requests.
    pub records: usize,
    /// Reserved queue pair numbers.
    pub kept_qpns: usize,
}

impl Engine {
    /// What the connection manager holds now, if there is one.
    #[must_use]
    pub fn cm_footprint(&self) -> Option<CmFootprint> {
        self.gsi.cm.as_ref().map(|cm| cm.footprint())
    }

    /// What the engine holds now. This looks at every queue pair.
    #[must_use]
    pub fn footprint(&self) -> Footprint {
        let shared = &self.shared;
        let (pool_users, charged_packets, waiting) = shared.pools.held();
        let mut footprint = Footprint {
            qps: self.qp_count(),
            srqs: self.srq_count(),
            handles: shared.handles.count(),
            pool_users,
            charged_packets,
            waiting,
            timers: shared.timers.count(),
            queued: shared.dirty.len(),
            events: shared.events.len() + shared.srqs.event_count(),
            held_packets: 0,
            held_blocks: shared.store.blocks(shared.config.held_packets_max),
            spare_blocks: shared.store.spare(),
            lists: shared.lists.lent(),
            spare_lists: shared.lists.spare(),
            records: 0,
            kept_qpns: self.kept_qpns(),
        };
        for qp in self.qps.iter().flatten() {
            if let AnyQp::Rc(qp) = qp {
                let (held, records) = qp.holds();
                footprint.held_packets += held;
                footprint.records += records;
            }
        }
        footprint
    }
}
