//! The footprint of an engine: the amount of everything that grows and shrinks while it works.

use crate::any::AnyQp;
use crate::cm::CmFootprint;
use crate::engine::Engine;

/// The footprint of an engine. Its configuration, its queue pairs and its address handles bound all
/// of it. Packets from peers cannot exceed the bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Queue pairs.
    pub qps: usize,
    /// Shared receive queues.
    pub srqs: usize,
    /// Address handles.
    pub address_handles: usize,
    /// Queue pairs and address handles that share the receiver credit of peers.
    pub credit_users: usize,
    /// Packets in flight that take receiver credit.
    pub in_flight_packets: u64,
    /// Queue pairs that wait for a peer's credit, or were granted it and have not run yet.
    pub waiting_for_credit: usize,
    /// Queue pairs that could send, but do not because the engine forgot them: always 0, unless the
    /// engine is wrong.
    pub forgotten: usize,
    /// Deadlines that are filed.
    pub timers: usize,
    /// Queue pairs with something to send.
    pub queued: usize,
    /// Events that the caller has not polled yet, also of shared receive queues.
    pub events: usize,
    /// Packets that arrived out of order and wait for those missing before them.
    pub reordered_packets: usize,
    /// Memory for such packets, in packets: all that was allocated.
    pub reorder_slots: usize,
    /// The part of [`reorder_slots`](Self::reorder_slots) that is unused now.
    pub spare_reorder_slots: usize,
    /// Queue pairs that have in-flight lists.
    pub in_flight_lists: usize,
    /// Unused in-flight lists.
    pub spare_in_flight_lists: usize,
    /// Responder resources: responses to READs, atomics and the like, kept for duplicate requests.
    pub responder_resources: usize,
    /// Reserved queue pair numbers.
    pub reserved_qpns: usize,
    /// Multicast groups with queue pairs.
    pub groups: usize,
    /// Peers that were probed, and are remembered.
    pub known_peers: usize,
}

impl Engine {
    /// The current footprint of the connection manager, if there is one.
    #[must_use]
    pub fn cm_footprint(&self) -> Option<CmFootprint> {
        self.gsi.cm.as_ref().map(|cm| cm.footprint())
    }

    /// The current footprint of the engine. This looks at every queue pair.
    #[must_use]
    pub fn footprint(&self) -> Footprint {
        let shared = &self.shared;
        let (credit_users, in_flight_packets, waiting) = shared.peers.held();
        let mut footprint = Footprint {
            qps: self.qp_count(),
            srqs: self.srq_count(),
            address_handles: shared.handles.count(),
            credit_users,
            in_flight_packets,
            waiting_for_credit: waiting,
            forgotten: self.forgotten(waiting),
            timers: shared.timers.count(),
            queued: shared.dirty.len(),
            events: shared.events.len() + shared.srqs.events.len(),
            reordered_packets: 0,
            reorder_slots: shared.reorder_slab.blocks(shared.config.reorder_packets_max),
            spare_reorder_slots: shared.reorder_slab.spare(),
            in_flight_lists: shared.lists.lent(),
            spare_in_flight_lists: shared.lists.spare(),
            responder_resources: 0,
            reserved_qpns: self.reserved_qpns(),
            groups: self.group_count(),
            known_peers: self.gsi.recognition.table.len(),
        };
        for qp in self.qps.iter().flatten() {
            if let AnyQp::Rc(qp) = qp {
                let (held, records) = qp.holds();
                footprint.reordered_packets += held;
                footprint.responder_resources += records;
            }
        }
        footprint
    }

    /// Queue pairs that were forgotten, if `waiting` are in wait queues or were granted credit.
    fn forgotten(&self, waiting: usize) -> usize {
        let core = |slot: u32| Some(self.qps.get(slot as usize)?.as_ref()?.core());
        let waits_for = |slot: u32| core(slot)?.waiting;
        let has_turn = |slot: u32| core(slot).is_some_and(|core| core.queued);
        let all = || self.qps.iter().flatten();
        let waiters = all().filter(|qp| qp.core().waiting.is_some()).count();
        let idle = |qp: &&AnyQp| matches!(qp, AnyQp::Rc(qp) if qp.is_forgotten());
        self.shared.peers.forgotten(waits_for, has_turn)
            + waiters.abs_diff(waiting)
            + all().filter(idle).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::mem::PdId;
    use crate::peer::PeerKind;
    use crate::qp::attr::{PeerAddress, QpAttr, QpInit};
    use crate::shared::EngineConfig;
    use crate::types::{Mtu, Psn, Qpn};
    use crate::verbs::{Completions, CqId, Cqe, QpState, QpType, SendData, SendWr};

    struct Nothing;

    impl Completions for Nothing {
        fn complete(&mut self, _: CqId, _: Cqe) {}

        fn send_retired(&mut self, _: u32, _: u32) {}

        fn recv_retired(&mut self, _: u32, _: u32) {}
    }

    /// An engine with one queue pair in RTS.
    fn connected() -> (Engine, Qpn) {
        let mut engine = Engine::new(EngineConfig::default());
        let init = QpInit {
            qp_type: QpType::Rc,
            pd: PdId(1),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            srq: None,
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 8,
            sq_sig_all: false,
            cookie: 0,
            context: 0,
        };
        let qpn = engine.create_qp(&init, 5).expect("room");
        let (local, remote) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
        let attr = QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(crate::mem::Access::ALL),
            peer: Some(PeerAddress { local, remote, path: 0, budget, kind }),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qpn: Some(Qpn::new(7)),
            rq_psn: Some(Psn::new(0)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            sq_psn: Some(Psn::new(0)),
            max_rd_atomic: Some(1),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            timeout: Some(14),
            ..QpAttr::default()
        };
        for attr in attr.steps(QpType::Rc) {
            engine.modify_qp(qpn, &attr, &mut Nothing).expect("a legal change");
        }
        (engine, qpn)
    }

    #[test]
    fn a_queue_pair_that_could_send_and_gets_no_turn_counts_as_forgotten() {
        let (mut engine, qpn) = connected();
        assert_eq!(engine.footprint().forgotten, 0, "it has nothing to send");
        let wr = SendWr::send(SendData::Inline(&[1; 8]));
        engine.post_send(qpn, &wr, &mut Nothing).expect("a good request");
        assert_eq!(engine.footprint().forgotten, 0, "it has its turn");
        // As if the engine had lost it.
        engine.shared.dirty.clear();
        let qp = engine.qps[0].as_mut().expect("a queue pair");
        qp.core_mut().queued = false;
        assert_eq!(engine.footprint().forgotten, 1);
        let drain = QpAttr { state: Some(QpState::Sqd), ..QpAttr::default() };
        engine.modify_qp(qpn, &drain, &mut Nothing).expect("from RTS");
        engine.shared.dirty.clear();
        let qp = engine.qps[0].as_mut().expect("a queue pair");
        qp.core_mut().queued = false;
        assert_eq!(engine.footprint().forgotten, 0, "a drained queue begins no request");
    }
}
