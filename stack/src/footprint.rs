//! What an engine holds: of everything that grows and shrinks while it works, how much there is.

use crate::any::AnyQp;
use crate::cm::CmFootprint;
use crate::engine::Engine;

/// What an engine holds now. All of it is bounded by its configuration, its queue pairs and its address handles, whatever peers send.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Queue pairs.
    pub qps: usize,
    /// Shared receive queues.
    pub srqs: usize,
    /// Address handles.
    pub handles: usize,
    /// Queue pairs and address handles that share the rooms of peers.
    pub pool_users: usize,
    /// Packets charged to peers: those that are under way.
    pub charged_packets: u64,
    /// Queue pairs that wait for a peer's room, or have been called.
    pub waiting: usize,
    /// Deadlines that are filed.
    pub timers: usize,
    /// Queue pairs with something to send.
    pub queued: usize,
    /// Events that nobody has asked for, of shared receive queues too.
    pub events: usize,
    /// Packets that came too early and are held for what is missing before them.
    pub held_packets: usize,
    /// Memory for such packets, in packets: all that was allocated, and what of it waits for the next.
    pub held_blocks: usize,
    /// See [`held_blocks`](Self::held_blocks).
    pub spare_blocks: usize,
    /// Queue pairs that have lists of what is under way; and such lists that wait for the next.
    pub lists: usize,
    /// See [`lists`](Self::lists).
    pub spare_lists: usize,
    /// Responses to READs, atomics and the like that are kept for duplicates.
    pub records: usize,
    /// Queue pair numbers that are kept from use.
    pub kept_qpns: usize,
}

impl Engine {
    /// What its connection manager holds now, if it has one.
    #[must_use]
    pub fn cm_footprint(&self) -> Option<CmFootprint> {
        self.gsi.cm.as_ref().map(|cm| cm.footprint())
    }

    /// What it holds now. This looks at every queue pair.
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
