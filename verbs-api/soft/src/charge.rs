//! The limits that an agent sets for a container, over all its processes: each context, object and
//! registered byte is charged as long as it is there.

use std::fmt;
use std::sync::Arc;

use rocinante_netdev::Slots;
use rocinante_netdev::handed::page::{Amounts, Exceeded, NO_LIMIT, RESOURCES};

use super::Hca;
use crate::model::device::Limits;
use crate::model::error::VerbsError;

const OBJECT: Amounts = [0, 1, 0];

/// The charge of an object, until it is dropped.
pub(super) struct Charge {
    /// Of the device. Without slots there is no agent, and no limit.
    slots: Option<Arc<Slots>>,
    amounts: Amounts,
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Charge({:?})", self.amounts)
    }
}

impl Charge {
    /// Of a context, unless it is none of the program's. A device that opens charges it before its
    /// ports are there.
    pub(super) fn context(slots: Option<&Arc<Slots>>, counts: bool) -> Result<Self, Exceeded> {
        Self::new(slots, [counts.into(), 0, 0])
    }

    /// Of an object: a protection domain, a queue, a handle, a window.
    pub(super) fn object(hca: &Hca) -> Result<Self, Exceeded> {
        Self::new(hca.slots.as_ref(), OBJECT)
    }

    /// Of a region.
    pub(super) fn region(hca: &Hca, bytes: usize) -> Result<Self, Exceeded> {
        Self::new(hca.slots.as_ref(), [0, 1, bytes as u64])
    }

    fn new(slots: Option<&Arc<Slots>>, amounts: Amounts) -> Result<Self, Exceeded> {
        if let Some(slots) = slots {
            slots.account().charge(&amounts)?;
        }
        Ok(Self { slots: slots.cloned(), amounts })
    }

    /// A charge for what a region of this length has more, for [`resized`](Self::resized).
    pub(super) fn room(&self, bytes: usize) -> Result<Self, Exceeded> {
        Self::new(self.slots.as_ref(), [0, 0, (bytes as u64).saturating_sub(self.amounts[2])])
    }

    /// The region has another length. The bytes that it has less are given back.
    pub(super) fn resized(&mut self, room: Self, bytes: usize) {
        self.amounts[2] = self.amounts[2].saturating_add(room.keep()[2]);
        let less = self.amounts[2].saturating_sub(bytes as u64);
        drop(Self { slots: self.slots.clone(), amounts: [0, 0, less] });
        self.amounts[2] -= less;
    }

    /// It stays until it is given back in another way.
    pub(super) fn keep(mut self) -> Amounts {
        std::mem::take(&mut self.amounts)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let (Some(slots), true) = (&self.slots, self.amounts != Amounts::default()) {
            slots.account().refund(&self.amounts);
        }
    }
}

impl Hca {
    /// Gives back an object whose charge was [kept](Charge::keep).
    pub(super) fn refund_object(&self) {
        if let Some(slots) = &self.slots {
            slots.account().refund(&OBJECT);
        }
    }

    /// The limits of the container, in the order of [`RESOURCES`].
    pub fn quota(&self) -> Amounts {
        let slots = self.slots.as_ref();
        slots.map_or([NO_LIMIT; RESOURCES.len()], |slots| slots.account().limits())
    }
}

/// A device's limits, or its container's number of objects where that is less.
pub fn least(of: Limits, quota: &Amounts) -> Limits {
    let objects = u32::try_from(quota[1]).unwrap_or(u32::MAX);
    Limits {
        max_qp: of.max_qp.min(objects),
        max_mr: of.max_mr.min(objects),
        max_mw: of.max_mw.min(objects),
        max_cq: of.max_cq.min(objects),
        max_srq: of.max_srq.min(objects),
        ..of
    }
}

impl From<Exceeded> for VerbsError {
    fn from(Exceeded { resource, limit }: Exceeded) -> Self {
        Self::Quota { resource: RESOURCES[resource], limit }
    }
}
