//! Regions in the region table.

use std::collections::TryReserveError;
use std::io;
use std::sync::Arc;

use rocinante_stack::mem::{Access, AccessError, Accessor, PdId, Region, Sge};
use rocinante_stack::types::{Key, Qpn};

use super::charge::Charge;
use super::faults::Verb;
use super::shards::HeldAll;
use super::{Device, Pd};
use crate::model::error::VerbsError;
use crate::provider::memory::{self, Range};
use crate::provider::random::random;

/// A region that peers can address until this is dropped.
#[derive(Debug)]
pub struct Registration {
    device: Arc<Device>,
    pd: PdId,
    key: Key,
    removed: bool,
    charge: Charge,
}

/// The new properties of a region.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    /// The new domain, if it changes.
    pub pd: Option<&'a Pd>,
    /// The new memory, if it changes: the key changes with it.
    pub range: Option<Range>,
    pub access: Access,
}

impl Registration {
    /// Registers memory that work requests and peers name by `start`.
    pub fn insert(pd: &Pd, range: Range, start: u64, access: Access) -> Result<Self, VerbsError> {
        pd.admitted()?;
        pd.device.called(Verb::RegMr)?;
        check(access)?;
        check_memory(range, access)?;
        memory::faults::watch();
        let random = random()?;
        let device = &pd.device;
        let charge = Charge::region(device.hca(), range.len)?;
        if start.checked_add(range.len as u64).is_none() {
            return Err(wraps());
        }
        let region = region(pd.id, range, start, access);
        let mut shards = device.shards.hold_all();
        for shard in shards.iter_mut() {
            shard.host.regions.reserve().map_err(no_memory)?;
        }
        let key = shards.first().host.regions.insert(region, random);
        let key = key.ok_or(VerbsError::Limit {
            what: "memory regions and windows",
            max: u64::from(device.limits.max_mr),
        })?;
        insert_too(&mut shards, key, region);
        drop(shards);
        Ok(Self { device: device.clone(), pd: pd.id, key, removed: false, charge })
    }

    pub fn key(&self) -> Key {
        self.key
    }

    /// Locks the shards, if no window is bound to the region. Posted requests have been sent as far
    /// as they may be now.
    fn without_windows(&self) -> Result<HeldAll<'_>, VerbsError> {
        let mut shards = self.device.shards.hold_all();
        for shard in shards.iter_mut() {
            // Staged requests name regions, too.
            shard.take_staged();
            shard.send_waiting();
            shard.deliver();
            if shard.host.regions.has_windows(self.key) {
                return Err(VerbsError::Busy("a memory window is bound to the region"));
            }
        }
        Ok(shards)
    }

    /// Removes the region, unless a window is bound to it. If a posted request names it, `force`
    /// decides: that request fails, or the region stays.
    pub fn remove(&mut self, force: bool) -> Result<(), VerbsError> {
        let mut shards = self.without_windows()?;
        if !force && shards.iter_mut().any(|shard| shard.engine.uses_key(self.key)) {
            return Err(VerbsError::Busy("a posted work request names the region"));
        }
        remove_from(&mut shards, self.key);
        drop(shards);
        self.removed = true;
        Ok(())
    }

    /// Changes the region, unless a window is bound to it. With other memory it gets another key,
    /// and posted requests that name the old one fail.
    pub fn change(&mut self, change: &Change<'_>) -> Result<(), VerbsError> {
        self.device.called(Verb::ReregMr)?;
        if change.pd.is_some_and(|pd| !Arc::ptr_eq(&pd.device, &self.device)) {
            return Err(VerbsError::Invalid("the domain belongs to another device".into()));
        }
        check(change.access)?;
        let pd = change.pd.map_or(self.pd, |pd| pd.id);
        let Some(range) = change.range else {
            for shard in self.without_windows()?.iter_mut() {
                let changed = shard.host.regions.change(self.key, pd, change.access);
                debug_assert!(changed);
            }
            self.pd = pd;
            return Ok(());
        };
        check_memory(range, change.access)?;
        let random = random()?;
        let room = self.charge.room(range.len)?;
        let region = region(pd, range, range.start(change.access), change.access);
        let mut shards = self.without_windows()?;
        let key = shards.first().host.regions.replace(self.key, region, random);
        let key = key.ok_or_else(wraps)?;
        for shard in &mut shards.rest {
            shard.host.regions.remove(self.key);
        }
        insert_too(&mut shards, key, region);
        drop(shards);
        self.charge.resized(room, range.len);
        self.key = key;
        self.pd = pd;
        Ok(())
    }

    /// Where the bytes of an element are that a request of the domain may name.
    pub fn locate(pd: &Pd, sge: &Sge, writable: bool) -> Result<u64, AccessError> {
        let shard = pd.device.shards.first().hold();
        let regions = &shard.host.regions;
        match writable {
            true => regions.local_write(pd.id, sge).map(|to| to.host()),
            false => regions.local_read(pd.id, sge).map(|from| from.host()),
        }
    }

    /// Why an access of a peer would be refused.
    pub fn check(&self, address: u64, len: u32, need: Access) -> Result<(), AccessError> {
        let shard = self.device.shards.first().hold();
        // A region admits every queue pair of its domain.
        let by = Accessor { pd: self.pd, qpn: Qpn::default() };
        let checked = shard.host.regions.check(self.key, by, address, len, need)?;
        let writable = need.bits() & !Access::REMOTE_READ.bits() != 0;
        match memory::is_usable(checked.host(), len.into(), writable) {
            true => Ok(()),
            false => Err(AccessError::Memory),
        }
    }
}

/// Registers the first shard's region in the other shards. The key is free there, because all
/// shards have the same regions.
fn insert_too(shards: &mut HeldAll<'_>, key: Key, region: Region) {
    for shard in &mut shards.rest {
        let same = shard.host.regions.insert(region, key.0);
        debug_assert_eq!(same, Some(key));
    }
}

fn wraps() -> VerbsError {
    VerbsError::Invalid("the memory wraps around the address space".into())
}

/// A table of regions cannot grow.
pub(super) fn no_memory(why: TryReserveError) -> VerbsError {
    VerbsError::Io(io::Error::new(io::ErrorKind::OutOfMemory, why))
}

fn remove_from(shards: &mut HeldAll<'_>, key: Key) {
    for shard in shards.iter_mut() {
        shard.host.regions.remove(key);
    }
}

fn region(pd: PdId, range: Range, start: u64, access: Access) -> Region {
    Region { pd, start, len: range.len as u64, host: range.address, access }
}

fn check(access: Access) -> Result<(), VerbsError> {
    if access.admits(Access::FLUSH_PERSISTENT) {
        return Err(VerbsError::Invalid(
            "FLUSH_PERSISTENT is for persistent memory, and this device knows of none: register with FLUSH_GLOBAL".into(),
        ));
    }
    Ok(())
}

fn check_memory(range: Range, access: Access) -> Result<(), VerbsError> {
    let writable = access.admits(Access::LOCAL_WRITE);
    if memory::is_usable(range.address, range.len as u64, writable) {
        return Ok(());
    }
    Err(VerbsError::Fault { address: range.address, len: range.len, writable })
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.removed {
            remove_from(&mut self.device.shards.hold_all(), self.key);
        }
    }
}
