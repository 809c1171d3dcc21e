//! Shared receive queues of the engine.

use std::sync::Arc;

use rocinante_stack::verbs::{RecvWr, SrqId};
use rocinante_stack::{SrqAttr, SrqChange, SrqInit};

use super::{Device, Pd};
use crate::error::VerbsError;
use crate::event::AsyncEvent;
use crate::qp::PostListError;

/// A shared receive queue; dropping it destroys it, when no queue pair uses it any more.
#[derive(Debug)]
pub(crate) struct Srq {
    device: Arc<Device>,
    id: SrqId,
}

impl Srq {
    pub(crate) fn create(pd: &Pd, max_wr: u32, max_sge: u32) -> Result<Self, VerbsError> {
        let device = pd.device.clone();
        let mut shard = device.core.hold();
        let max = device.limits.max_srq;
        let init = SrqInit { pd: pd.id, max_wr, max_sge };
        let room = shard.engine.srq_count() < max as usize;
        let Some(id) = room.then(|| shard.engine.create_srq(&init)).flatten() else {
            return Err(VerbsError::Limit { what: "shared receive queues", max: max.into() });
        };
        drop(shard);
        Ok(Self { device, id })
    }

    pub(crate) fn id(&self) -> SrqId {
        self.id
    }

    /// Waits for whoever drives the device: nothing is staged, so a receive that was posted is there for the next packet.
    #[inline]
    pub(crate) fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let mut shard = self.device.core.hold();
        for (index, wr) in list.iter().enumerate() {
            let posted = shard.engine.post_srq_recv(self.id, wr);
            posted.map_err(|error| PostListError { index, error })?;
        }
        Ok(())
    }

    pub(crate) fn modify(&self, change: &SrqChange) -> Result<(), VerbsError> {
        let modified = self.device.core.hold().engine.modify_srq(self.id, change);
        modified.map_err(|error| VerbsError::Invalid(error.to_string()))
    }

    pub(crate) fn query(&self) -> SrqAttr {
        let attr = self.device.core.hold().engine.query_srq(self.id);
        attr.expect("it is destroyed when it is dropped")
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let core = &self.device.core;
        let mut shard = core.hold();
        let gone = shard.engine.destroy_srq(self.id);
        debug_assert!(gone.is_ok());
        // Its number is given again.
        core.forget_events(
            |event| matches!(event, AsyncEvent::SrqLimitReached { srq } if *srq == self.id.0),
        );
    }
}
