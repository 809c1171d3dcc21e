//! Calls of an engine for its shared receive queues.

use super::Engine;
use crate::qp::post::PostError;
use crate::srq::{SrqAttr, SrqChange, SrqError, SrqInit};
use crate::verbs::{RecvWr, SrqId};

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
