//! Shared receive queues of the engine.

use std::sync::Arc;

use rocinante_stack::verbs::{RecvWr, SrqId};
use rocinante_stack::{SrqAttr, SrqChange, SrqInit};

use super::charge::Charge;
use super::events::Owner;
use super::faults::Verb;
use super::progress::Core;
use super::{Counted, Device, Pd};
use crate::model::error::VerbsError;
use crate::model::event::AsyncEvent;
use crate::model::qp::PostListError;

/// A shared receive queue; dropping it destroys it, when no queue pair uses it any more.
#[derive(Debug)]
pub struct Srq {
    device: Arc<Device>,
    core: Arc<Core>,
    /// The shard of the queue and of all queue pairs that use it.
    shard: usize,
    id: SrqId,
    number: u32,
    _counted: Counted,
    _charge: Charge,
}

impl Srq {
    pub fn create(pd: &Pd, max_wr: u32, max_sge: u32) -> Result<Self, VerbsError> {
        pd.admitted()?;
        let device = &pd.device;
        device.called(Verb::CreateSrq)?;
        let index = device.next_shard();
        let core = device.shards.get(index).expect("one of them").clone();
        let limit = ("shared receive queues", device.limits.max_srq);
        let counted = Counted::new(device, |hca| &hca.srqs, limit)?;
        let charge = Charge::object(device.hca())?;
        let mut shard = core.hold();
        let init = SrqInit { pd: pd.id, max_wr, max_sge };
        let Some(id) = shard.engine.create_srq(&init) else {
            let (what, max) = limit;
            return Err(VerbsError::Limit { what, max: max.into() });
        };
        let number = shard.router.number_of(id);
        device.add_owner(Owner::Srq(number));
        drop(shard);
        Ok(Self {
            device: device.clone(),
            core,
            shard: index,
            id,
            number,
            _counted: counted,
            _charge: charge,
        })
    }

    pub(super) fn id(&self) -> SrqId {
        self.id
    }

    pub fn shard(&self) -> usize {
        self.shard
    }

    /// Its number on the device.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Waits for the shard's lock and stages nothing, so a posted receive is there for the next
    /// packet.
    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let mut shard = self.core.hold();
        for (index, wr) in list.iter().enumerate() {
            let posted = shard.engine.post_srq_recv(self.id, wr);
            posted.map_err(|error| PostListError { index, error })?;
        }
        Ok(())
    }

    pub fn modify(&self, change: &SrqChange) -> Result<(), VerbsError> {
        let modified = self.core.hold().engine.modify_srq(self.id, change);
        modified.map_err(|error| VerbsError::Invalid(error.to_string()))
    }

    pub fn query(&self) -> SrqAttr {
        let attr = self.core.hold().engine.query_srq(self.id);
        attr.expect("it is destroyed when it is dropped")
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let mut shard = self.core.hold();
        let gone = shard.engine.destroy_srq(self.id);
        debug_assert!(gone.is_ok());
        let number = self.number;
        let is_of = |event: &AsyncEvent| matches!(event, AsyncEvent::SrqLimitReached { srq } if *srq == number);
        self.device.remove_owner(Owner::Srq(number), is_of);
    }
}
