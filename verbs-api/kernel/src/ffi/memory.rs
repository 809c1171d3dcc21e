//! Handles of regions and windows, and the requests that bind windows.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rocinante_soft::provider::memory::Range;
use rocinante_stack::PostError;
use rocinante_stack::mem::Bind;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::SendWr;
use rustix::io::Errno;

use super::abi;
use super::objects::{Pd, Qp, done, made};
use crate::convert;

/// A registered range of memory.
#[derive(Debug)]
pub(crate) struct Mr {
    /// The domains of the region, past and present. They stay as long as any of them may be the
    /// region's.
    pds: Vec<Arc<Pd>>,
    /// `None` once it is deregistered.
    pointer: Option<NonNull<abi::Mr>>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

// SAFETY: the library's objects may be used from any thread (ibv_alloc_td(3)).
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers memory, with flags of `enum ibv_access_flags`. Work requests and peers name its
    /// first byte by `start`.
    ///
    /// # Safety
    /// The range must be valid memory of the process until the handle is dropped, and accessed only
    /// as memory that others change at any time.
    pub(crate) unsafe fn register(
        pd: &Arc<Pd>,
        range: Range,
        start: u64,
        access: c_int,
    ) -> io::Result<Self> {
        let (library, at) = (pd.context.library, range.address as *mut c_void);
        let pointer = if start == range.address {
            // SAFETY: the domain is allocated; the caller vouches for the memory.
            unsafe { (library.ibv_reg_mr)(pd.pointer.as_ptr(), at, range.len, access) }
        } else {
            let register = library.ibv_reg_mr_iova2.ok_or(io::ErrorKind::Unsupported)?;
            // SAFETY: as above.
            unsafe { register(pd.pointer.as_ptr(), at, range.len, start, access as c_uint) }
        };
        let mut mr =
            Self { pds: vec![pd.clone()], pointer: Some(made(pointer)?), lkey: 0, rkey: 0 };
        mr.read_keys();
        Ok(mr)
    }

    fn read_keys(&mut self) {
        if let Some(pointer) = self.pointer {
            // SAFETY: it is registered.
            (self.lkey, self.rkey) =
                unsafe { ((*pointer.as_ptr()).lkey, (*pointer.as_ptr()).rkey) };
        }
    }

    /// Changes the given properties. Returns the code of `enum ibv_rereg_mr_err_code` if that
    /// fails.
    ///
    /// # Safety
    /// As [`register`](Self::register), for the new range.
    pub(crate) unsafe fn change(
        &mut self,
        pd: Option<&Arc<Pd>>,
        range: Option<Range>,
        access: Option<c_int>,
    ) -> Result<(), (c_int, io::Error)> {
        let gone = || (-1, io::Error::from(Errno::INVAL));
        let (pointer, Some(library)) =
            (self.pointer.ok_or_else(gone)?, self.pds.first().map(|pd| pd.context.library))
        else {
            return Err(gone());
        };
        let bits = [
            (range.is_some(), abi::REREG_TRANSLATION),
            (pd.is_some(), abi::REREG_PD),
            (access.is_some(), abi::REREG_ACCESS),
        ];
        let flags = bits.iter().filter(|(wanted, _)| *wanted).map(|(_, bit)| bit).sum();
        let raw = pd.map_or(ptr::null_mut(), |pd| pd.pointer.as_ptr());
        let (at, len) =
            range.map_or((ptr::null_mut(), 0), |range| (range.address as *mut c_void, range.len));
        // SAFETY: the region is registered and the domain allocated; the caller vouches for the
        // memory.
        let result = unsafe {
            (library.ibv_rereg_mr)(pointer.as_ptr(), flags, raw, at, len, access.unwrap_or(0))
        };
        let failed = (result != 0).then(io::Error::last_os_error);
        self.pds.extend(pd.cloned());
        self.read_keys();
        failed.map_or(Ok(()), |error| Err((result, error)))
    }

    /// Deregisters it: after this call the device no longer uses the memory. If the device refuses,
    /// it stays registered.
    pub(crate) fn deregister(&mut self) -> io::Result<()> {
        let (Some(pointer), Some(pd)) = (self.pointer, self.pds.first()) else { return Ok(()) };
        // SAFETY: it is registered.
        done(unsafe { (pd.context.library.ibv_dereg_mr)(pointer.as_ptr()) })?;
        self.pointer = None;
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let _ = self.deregister();
    }
}

/// The name of a region in a request that binds a window to it.
#[derive(Debug)]
struct MrName(NonNull<abi::Mr>);

// SAFETY: it is followed only while its region exists: see `Windows`.
unsafe impl Send for MrName {}
// SAFETY: as above.
unsafe impl Sync for MrName {}

/// A memory window.
#[derive(Debug)]
pub(crate) struct Mw {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Mw>,
}

// SAFETY: as for `Mr`; its members change only while `Windows` is locked for writing.
unsafe impl Send for Mw {}
// SAFETY: as above.
unsafe impl Sync for Mw {}

impl Mw {
    /// Allocates a window of a type of `enum ibv_mw_type`.
    pub(crate) fn alloc(pd: &Arc<Pd>, mw_type: c_int) -> io::Result<Self> {
        // SAFETY: the device is open, and its operations do not change.
        let ops = unsafe { &(*pd.context.pointer.as_ptr()).ops };
        let (Some(alloc), Some(_)) = (ops.alloc_mw, ops.dealloc_mw) else {
            return Err(Errno::OPNOTSUPP.into());
        };
        // SAFETY: the domain is allocated.
        let pointer = made(unsafe { alloc(pd.pointer.as_ptr(), mw_type) })?;
        Ok(Self { pd: pd.clone(), pointer })
    }

    /// Its key, including the posted bindings.
    pub(crate) fn rkey(&self) -> Key {
        // SAFETY: the window exists.
        Key(unsafe { (*self.pointer.as_ptr()).rkey })
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: the device is open, and its operations do not change.
        let ops = unsafe { &(*self.pd.context.pointer.as_ptr()).ops };
        if let Some(dealloc) = ops.dealloc_mw {
            // SAFETY: it is deallocated once.
            unsafe { dealloc(self.pointer.as_ptr()) };
        }
    }
}

/// The windows of a device, and the regions for them. Requests name them by keys, the library by
/// pointers. A thread holds the lock when it removes a name, so no call still uses that pointer.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// By the upper 24 bits of their keys, which never change.
    pub(crate) mws: HashMap<u32, Mw>,
    /// By their local keys.
    mrs: HashMap<u32, MrName>,
}

impl Windows {
    /// Allows windows to be bound to a region.
    pub(crate) fn tell(&mut self, mr: &Mr) {
        if let Some(pointer) = mr.pointer {
            self.mrs.insert(mr.lkey, MrName(pointer));
        }
    }

    /// Allows no more windows to be bound to a region. Once it is deregistered, another one may
    /// have its key.
    pub(crate) fn withdraw(&mut self, mr: &Mr) {
        if mr.pointer.is_some() {
            self.mrs.remove(&mr.lkey);
        }
    }

    /// Window and region of a request. A binding of length 0 must name a region, too: Soft-RoCE's
    /// library follows the pointer.
    fn find(&self, bind: &Bind) -> Option<(&Mw, *mut abi::Mr)> {
        let mr = self.mrs.get(&bind.region.0)?.0.as_ptr();
        Some((self.mws.get(&(bind.mw.0 >> 8))?, mr))
    }
}

impl Qp {
    /// Posts a request that binds a window of type 2.
    pub(crate) fn post_bind(
        &self,
        wr: &SendWr<'_>,
        bind: &Bind,
        windows: &mut Windows,
    ) -> Result<(), PostError> {
        let invalid = PostError::Refused(Errno::INVAL.raw_os_error());
        let (mw, mr) = windows.find(bind).ok_or(invalid)?;
        let (mut raw, _) = convert::send_wr(wr, 0).ok_or(PostError::Operation)?;
        raw.num_sge = 0;
        raw.bind_mw.mw = mw.pointer.as_ptr();
        raw.bind_mw.info.mr = mr;
        let mut bad = ptr::null_mut();
        // SAFETY: window and region exist while `windows` is locked, and so does the queue pair.
        // The library leaves the key of a window of type 2 to its caller; no other thread reads or
        // writes it now.
        unsafe {
            let before = (*raw.bind_mw.mw).rkey;
            (*raw.bind_mw.mw).rkey = bind.mw.0;
            match (self.ops.post_send)(self.pointer.as_ptr(), &mut raw, &mut bad) {
                0 => (*raw.bind_mw.mw).rkey = bind.rkey.0,
                result => {
                    (*raw.bind_mw.mw).rkey = before;
                    return Err(convert::post_error(result));
                }
            }
        }
        Ok(())
    }

    /// Binds a window of type 1 (`ibv_bind_mw`). Returns its new key.
    pub(crate) fn bind_mw(
        &self,
        wr: &SendWr<'_>,
        bind: &Bind,
        windows: &mut Windows,
    ) -> Result<Key, PostError> {
        let invalid = PostError::Refused(Errno::INVAL.raw_os_error());
        let (mw, mr) = windows.find(bind).ok_or(invalid)?;
        let (raw, _) = convert::send_wr(wr, 0).ok_or(PostError::Operation)?;
        let mut request = abi::MwBind {
            wr_id: raw.wr_id,
            send_flags: raw.send_flags,
            info: abi::MwBindInfo { mr, ..raw.bind_mw.info },
        };
        // SAFETY: the device is open, and its operations do not change.
        let ops = unsafe { &(*self.pd.context.pointer.as_ptr()).ops };
        let post = ops.bind_mw.ok_or(PostError::Refused(Errno::OPNOTSUPP.raw_os_error()))?;
        // SAFETY: as in `post_bind`; here the library changes the key.
        match unsafe { post(self.pointer.as_ptr(), mw.pointer.as_ptr(), &mut request) } {
            0 => Ok(mw.rkey()),
            result => Err(convert::post_error(result)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key of a region that is deregistered goes to the next one before the first is dropped.
    #[test]
    fn a_region_withdraws_no_name_but_its_own() {
        // Without domains they are not the library's.
        let [mut first, next, other] = [7, 7, 8].map(|lkey| {
            let pointer = Some(NonNull::dangling());
            Mr { pds: Vec::new(), pointer, lkey, rkey: lkey }
        });
        let mut windows = Windows::default();
        windows.tell(&first);
        windows.tell(&other);
        windows.withdraw(&first);
        first.pointer = None;
        windows.tell(&next);
        windows.withdraw(&first);
        let names = |windows: &Windows| [7, 8].map(|lkey| windows.mrs.contains_key(&lkey));
        assert_eq!(names(&windows), [true, true]);
        windows.withdraw(&next);
        assert_eq!(names(&windows), [false, true]);
        windows.tell(&first);
        assert_eq!(names(&windows), [false, true], "it is gone");
    }
}
