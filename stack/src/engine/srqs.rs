//! Calls of an engine for its receives: its shared queues, and datagrams that find no receive.

use super::Engine;
use crate::ingress::Datagram;
use crate::mem::Memory;
use crate::qp::post::PostError;
use crate::srq::{SrqAttr, SrqChange, SrqError, SrqInit};
use crate::types::Time;
use crate::verbs::{Completions, QpState, RecvWr, SrqId};
use crate::wire::Packet;

/// Shared receive queues. The number of a destroyed queue may be given out again.
impl Engine {
    /// Makes a shared receive queue (`ibv_create_srq(3)`); `None` if the depth is 0.
    pub fn create_srq(&mut self, init: &SrqInit) -> Option<SrqId> {
        self.shared.srqs.insert(init)
    }

    /// Changes depth or limit (`ibv_modify_srq(3)`). Error: [`SrqError`]; nothing has changed then.
    pub fn modify_srq(&mut self, id: SrqId, change: &SrqChange) -> Result<(), SrqError> {
        self.shared.srqs.modify(id, change)
    }

    /// Its attributes (`ibv_query_srq(3)`).
    #[must_use]
    pub fn query_srq(&self, id: SrqId) -> Option<SrqAttr> {
        self.shared.srqs.query(id)
    }

    /// Appends a receive request. Error: [`PostError`]; nothing has changed then.
    #[inline]
    pub fn post_srq_recv(&mut self, id: SrqId, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.shared.srqs.post(id, wr)
    }

    /// Destroys a shared receive queue; posted receives never complete (`ibv_destroy_srq(3)`).
    /// Error: [`SrqError::InUse`] while a queue pair uses it, [`SrqError::Unknown`].
    pub fn destroy_srq(&mut self, id: SrqId) -> Result<(), SrqError> {
        self.shared.srqs.remove(id)
    }

    /// Number of shared receive queues.
    #[must_use]
    pub fn srq_count(&self) -> usize {
        self.shared.srqs.count()
    }

    /// The next shared receive queue that reached its limit (`IBV_EVENT_SRQ_LIMIT_REACHED`).
    pub fn poll_srq_event(&mut self) -> Option<SrqId> {
        self.shared.srqs.events.pop_front()
    }
}

impl Engine {
    /// Takes one datagram, as [`handle_datagram`](Self::handle_datagram) does, while its queue pair
    /// has no receive to fill: for faults that users ask for. A message that needs one is answered
    /// as if none was posted.
    #[cold]
    pub fn handle_unready<H: Memory + Completions>(
        &mut self,
        now: Time,
        datagram: &Datagram<'_>,
        host: &mut H,
    ) {
        let to = Packet::parse(datagram.bytes).ok().map(|packet| packet.bth().dest_qpn);
        let slot = to.and_then(|qpn| self.slot(qpn));
        let mut hidden = (0, None);
        if let Some(qp) = slot.and_then(|slot| self.qps[slot].as_mut()) {
            let core = qp.core_mut();
            hidden = (core.rq.hide(), core.init.srq.take());
        }
        // A message that came too early would be executed later, with the receives that are there.
        let memory = self.shared.reorder_slab.close();
        self.handle_datagram(now, datagram, host);
        self.shared.reorder_slab.open(memory);
        if let Some(qp) = slot.and_then(|slot| self.qps[slot].as_mut()) {
            let core = qp.core_mut();
            core.rq.show(hidden.0);
            core.init.srq = hidden.1;
            // The queue pair broke while its receives were hidden: they are yet to be flushed.
            if core.state == QpState::Err {
                core.flush(&mut self.shared.srqs, &mut self.shared.events, host);
            }
        }
    }
}
