//! Registered regions.
#![allow(unsafe_code)]

use std::sync::Arc;

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::memory::Range;
use rocinante_stack::mem::{Access, AccessError};
use rocinante_stack::types::Key;
use rustix::io::Errno;

use super::{Device, Pd, convert, error, ffi};

/// A registered region.
#[derive(Debug)]
pub struct Registration {
    raw: ffi::Mr,
    device: Arc<Device>,
    /// The address by which work requests name it.
    start: u64,
    len: usize,
    access: Access,
}

/// The properties to change.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    pub pd: Option<&'a Pd>,
    pub range: Option<Range>,
    pub access: Option<Access>,
}

impl Registration {
    /// # Safety
    /// As `Pd::register` of the API.
    pub unsafe fn insert(
        pd: &Pd,
        range: Range,
        start: u64,
        access: Access,
    ) -> Result<Self, VerbsError> {
        // SAFETY: the caller's promise is passed on.
        let raw =
            unsafe { ffi::Mr::register(pd.raw()?, range, start, convert::access_flags(access)) };
        let raw =
            raw.map_err(|error| error::locked("ibv_reg_mr", Some(range.len as u64), error))?;
        let it = Self { raw, device: pd.device.clone(), start, len: range.len, access };
        it.tell();
        Ok(it)
    }

    /// Allows windows to be bound to it, by its local key.
    fn tell(&self) {
        if self.access.admits(Access::MW_BIND) {
            self.device.windows.write().tell(&self.raw);
        }
    }

    /// Allows no more windows to be bound to it.
    fn withdraw(&self) {
        if self.access.admits(Access::MW_BIND) {
            self.device.windows.write().withdraw(&self.raw);
        }
    }

    pub fn lkey(&self) -> Key {
        Key(self.raw.lkey)
    }

    pub fn rkey(&self) -> Key {
        Key(self.raw.rkey)
    }

    /// Deregisters the region, unless the device says that it is in use.
    pub fn remove(&mut self) -> Result<(), VerbsError> {
        self.withdraw();
        self.raw.deregister().map_err(|error| {
            self.tell();
            let is = |errno: Errno| error.raw_os_error() == Some(errno.raw_os_error());
            match () {
                () if is(Errno::BUSY) => VerbsError::Busy("the device still uses the region"),
                // Soft-RoCE returns this errno.
                () if is(Errno::INVAL) && self.access.admits(Access::MW_BIND) => {
                    VerbsError::Busy("a memory window is bound to the region")
                }
                () => error::failed("ibv_dereg_mr", error),
            }
        })
    }

    /// Changes domain, memory or permissions. An error says whether the region can still be used.
    ///
    /// # Safety
    /// As `Pd::register` of the API, for the new range.
    pub unsafe fn change(&mut self, change: &Change<'_>) -> Result<(), VerbsError> {
        if change.pd.is_some_and(|pd| !Arc::ptr_eq(&pd.device, &self.device)) {
            return Err(VerbsError::Invalid("the domain belongs to another device".into()));
        }
        let pd = change.pd.map(Pd::raw).transpose()?;
        if change.range.is_some() && change.access.unwrap_or(self.access).admits(Access::ZERO_BASED)
        {
            let why =
                "ibv_rereg_mr(3) names memory by its address: register zero-based memory anew";
            return Err(VerbsError::Invalid(why.into()));
        }
        self.withdraw();
        // SAFETY: the caller's promise is passed on.
        let changed =
            unsafe { self.raw.change(pd, change.range, change.access.map(convert::access_flags)) };
        if changed.is_ok() {
            self.access = change.access.unwrap_or(self.access);
            if let Some(range) = change.range {
                (self.start, self.len) = (range.start(self.access), range.len);
            }
        }
        self.tell();
        changed.map_err(|(code, error)| {
            // `enum ibv_rereg_mr_err_code`, as ibv_rereg_mr(3) explains it.
            let what = match code {
                -1 | -2 => "the region is as it was",
                -3 => "the region is changed all the same",
                _ => "the region must not be used any more: deregister it",
            };
            error::failed(&format!("ibv_rereg_mr ({what})"), error)
        })
    }

    /// Why an access of a peer would be refused, as far as the region decides that.
    pub fn check(&self, address: u64, len: u32, need: Access) -> Result<(), AccessError> {
        let inside = address.checked_sub(self.start).is_some_and(|offset| {
            offset.checked_add(u64::from(len)).is_some_and(|end| end <= self.len as u64)
        });
        match (inside, self.access.admits(need)) {
            (false, _) => Err(AccessError::Range),
            (true, false) => Err(AccessError::Permission),
            (true, true) => Ok(()),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.withdraw();
    }
}
