//! Address handles. Requests name them by number, so that a request with a destroyed handle fails
//! and no dangling pointer is followed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::PeerPath;
use rocinante_stack::verbs::AhId;

use super::{Device, Pd, convert, error, ffi};

/// An address handle; dropping it destroys it.
#[derive(Debug)]
pub struct Ah {
    device: Arc<Device>,
    id: AhId,
}

impl Ah {
    pub fn create(pd: &Pd, path: &PeerPath) -> Result<Self, VerbsError> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let device = pd.device.clone();
        let attr = &device.attr;
        let mut to = convert::path(path, attr.gid_indices[path.sgid_index], attr.port);
        let raw = ffi::Ah::create(pd.raw()?, &mut to)
            .map_err(|why| error::failed("ibv_create_ah", why))?;
        let mut ahs = device.ahs.write();
        let id = loop {
            let id = AhId(NEXT.fetch_add(1, Ordering::Relaxed));
            if !ahs.contains_key(&id) {
                break id;
            }
        };
        ahs.insert(id, raw);
        drop(ahs);
        Ok(Self { device, id })
    }

    pub fn id(&self) -> AhId {
        self.id
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // Destroyed after the unlock, because that is a call into the kernel.
        let gone = self.device.ahs.write().remove(&self.id);
        drop(gone);
    }
}
