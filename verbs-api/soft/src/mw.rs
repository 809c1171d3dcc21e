//! Windows in the region table.

use std::sync::Arc;

use rocinante_stack::mem::MwType;
use rocinante_stack::types::Key;

use super::charge::Charge;
use super::faults::Verb;
use super::mr::no_memory;
use super::{Device, Pd};
use crate::model::error::VerbsError;
use crate::provider::random::random;

/// A memory window; dropping it deallocates it.
#[derive(Debug)]
pub struct Window {
    device: Arc<Device>,
    first: Key,
    _charge: Charge,
}

impl Window {
    pub fn alloc(pd: &Pd, mw_type: MwType) -> Result<Self, VerbsError> {
        pd.admitted()?;
        pd.device.called(Verb::AllocMw)?;
        let random = random()?;
        let device = pd.device.clone();
        if device.shards.count() > 1 {
            let why = "a binding is one shard's, and a peer may come to any: for memory windows open the device with one shard";
            return Err(VerbsError::Invalid(why.into()));
        }
        let charge = Charge::object(device.hca())?;
        let mut shard = device.shards.first().hold();
        shard.host.regions.reserve().map_err(no_memory)?;
        let first = shard.host.regions.insert_window(pd.id, mw_type, random);
        drop(shard);
        let first = first.ok_or(VerbsError::Limit {
            what: "memory regions and windows",
            max: u64::from(device.limits.max_mr),
        })?;
        Ok(Self { device, first, _charge: charge })
    }

    pub fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// The first key of the window.
    pub fn first_key(&self) -> Key {
        self.first
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.device.shards.first().hold().host.regions.remove_window(self.first);
    }
}
