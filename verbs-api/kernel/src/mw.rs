//! Memory windows of the kernel's devices.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rocinante_soft::model::error::VerbsError;
use rocinante_stack::PostError;
use rocinante_stack::mem::MwType;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::SendWr;
use rustix::io::Errno;

use super::{Device, Pd, Qp, convert, error, ffi};

/// A memory window; dropping it deallocates it.
#[derive(Debug)]
pub struct Window {
    device: Arc<Device>,
    first: Key,
}

impl Window {
    pub fn alloc(pd: &Pd, mw_type: MwType) -> Result<Self, VerbsError> {
        let raw = ffi::Mw::alloc(pd.raw()?, convert::mw_type_number(mw_type));
        let raw = raw.map_err(|error| error::failed("ibv_alloc_mw", error))?;
        let (device, first) = (pd.device.clone(), raw.rkey());
        device.windows.write().mws.insert(first.0 >> 8, raw);
        device.has_windows.store(true, Ordering::Release);
        Ok(Self { device, first })
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
        // The lock is released before the call to the device.
        let gone = self.device.windows.write().mws.remove(&(self.first.0 >> 8));
        drop(gone);
    }
}

impl Qp {
    /// Binds a window of type 1 by a request with `SendOp::BindMw`. Returns its new key.
    pub fn bind_mw(&self, wr: &SendWr<'_>) -> Result<Key, PostError> {
        if !self.state.get().takes_sends() {
            return Err(PostError::State);
        }
        self.rules.check(wr)?;
        let refused = PostError::Refused(Errno::INVAL.raw_os_error());
        let bind = wr.op.bind().ok_or(refused)?;
        self.raw.bind_mw(wr, &bind, &mut self.device.windows.write())
    }
}
