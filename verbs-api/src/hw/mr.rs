//! Registered regions.
#![allow(unsafe_code)]

use rocinante_stack::mem::{Access, AccessError};
use rocinante_stack::types::Key;
use rustix::io::Errno;

use super::{Pd, convert, error, ffi};
use crate::error::VerbsError;
use crate::memory::Range;

/// A registered region.
#[derive(Debug)]
pub(crate) struct Registration {
    raw: ffi::Mr,
    range: Range,
    access: Access,
}

impl Registration {
    /// # Safety
    /// As `Pd::register` of the API.
    pub(crate) unsafe fn insert(pd: &Pd, range: Range, access: Access) -> Result<Self, VerbsError> {
        // SAFETY: the caller's promise is passed on.
        let raw = unsafe { ffi::Mr::register(pd.raw()?, range, convert::access_flags(access)) };
        let raw =
            raw.map_err(|error| error::locked("ibv_reg_mr", Some(range.len as u64), error))?;
        Ok(Self { raw, range, access })
    }

    pub(crate) fn lkey(&self) -> Key {
        Key(self.raw.lkey)
    }

    pub(crate) fn rkey(&self) -> Key {
        Key(self.raw.rkey)
    }

    /// Deregisters the region, unless the device says that it is in use.
    pub(crate) fn remove(&mut self) -> Result<(), VerbsError> {
        self.raw.deregister().map_err(|error| match error.raw_os_error() {
            Some(errno) if errno == Errno::BUSY.raw_os_error() => {
                VerbsError::Busy("the device still uses the region")
            }
            _ => error::failed("ibv_dereg_mr", error),
        })
    }

    /// Why an access of a peer would be refused, as far as the region decides it.
    pub(crate) fn check(&self, address: u64, len: u32, need: Access) -> Result<(), AccessError> {
        let inside = address.checked_sub(self.range.address).is_some_and(|offset| {
            offset.checked_add(u64::from(len)).is_some_and(|end| end <= self.range.len as u64)
        });
        match (inside, self.access.admits(need)) {
            (false, _) => Err(AccessError::Range),
            (true, false) => Err(AccessError::Permission),
            (true, true) => Ok(()),
        }
    }
}
