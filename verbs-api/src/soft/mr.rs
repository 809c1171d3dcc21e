//! Entries of the region table.

use std::sync::Arc;

use rocinante_stack::mem::{Access, AccessError, PdId, Region};
use rocinante_stack::types::Key;

use super::{Device, Pd};
use crate::error::VerbsError;
use crate::memory::Range;

/// A region that peers can address until this is dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    device: Arc<Device>,
    pd: PdId,
    key: Key,
    removed: bool,
}

impl Registration {
    pub(crate) fn insert(pd: &Pd, range: Range, access: Access) -> Result<Self, VerbsError> {
        let random = crate::context::random()?;
        let region = Region {
            pd: pd.id,
            start: range.address,
            len: range.len as u64,
            host: range.address,
            access,
        };
        let device = &pd.device;
        let key = device.core.hold().host.regions.insert(region, random);
        let key = key.ok_or(VerbsError::Limit {
            what: "memory regions",
            max: u64::from(device.limits.max_mr),
        })?;
        Ok(Self { device: device.clone(), pd: pd.id, key, removed: false })
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// Removes the region, unless a posted request names it.
    pub(crate) fn remove(&mut self) -> Result<(), VerbsError> {
        let core = &self.device.core;
        let mut shard = core.hold();
        // Requests that wait to be posted name regions too.
        core.take_staged(&mut shard);
        let now = shard.now();
        shard.transmit(now);
        shard.deliver();
        if shard.engine.uses_key(self.key) {
            return Err(VerbsError::Busy("a posted work request names the region"));
        }
        shard.host.regions.remove(self.key);
        self.removed = true;
        Ok(())
    }

    /// Why an access of a peer would be refused.
    pub(crate) fn check(&self, address: u64, len: u32, need: Access) -> Result<(), AccessError> {
        let shard = self.device.core.hold();
        shard.host.regions.check(self.key, self.pd, address, len, need).map(|_| ())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.removed {
            self.device.core.hold().host.regions.remove(self.key);
        }
    }
}
