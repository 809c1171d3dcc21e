//! A context that has opened nothing yet.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use rocinante_netdev::Interface;
use rocinante_soft as soft;
use rocinante_soft::model::device::DeviceAttr;
use rocinante_soft::model::error::Refused;
use rocinante_soft::model::event::AsyncEvent;

use crate::context::Context;
use crate::device::Device;

/// A context of a device in software that has opened nothing yet: no socket, no ring, no thread.
/// Only the descriptors of its asynchronous events exist: it follows its port already.
///
/// It answers a program's queries before the first object. [`open`](Self::open) makes the
/// [`Context`] that has objects.
///
/// ```
/// use std::net::IpAddr;
/// use rocinante::{OpenOptions, VerbsError};
///
/// fn main() -> Result<(), VerbsError> {
///     let here = IpAddr::from([127, 0, 0, 1]);
/// #   let (here, _) = rocinante::doc::addresses();
///     let prepared = OpenOptions::new().prepare(here)?;
///     println!("{}: path MTU {}", prepared.name(), prepared.query_device().active_mtu);
///     let _cq = prepared.open()?.create_cq(16)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct PreparedContext {
    pub(super) prepared: soft::Prepared,
}

impl PreparedContext {
    /// The name of its interface.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.prepared.iface.name
    }

    /// Its interface, as it was when this value was made.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        &self.prepared.iface
    }

    /// As [`Context::gids`].
    #[must_use]
    pub fn gids(&self) -> &[IpAddr] {
        &self.prepared.gids
    }

    /// As [`Context::gid_table`].
    #[must_use]
    pub fn gid_table(&self) -> Vec<Option<IpAddr>> {
        self.prepared.gid_table()
    }

    /// As [`Context::query_device`]. The port's capabilities are known only once it is open:
    /// [`DeviceAttr::port`] is `None`.
    #[must_use]
    pub fn query_device(&self) -> DeviceAttr {
        self.prepared.query()
    }

    /// As [`Context::poll_async_event`].
    #[must_use]
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.prepared.events.next()
    }

    /// As [`Context::async_fd`]. The context that [`open`](Self::open) makes has the same
    /// descriptor.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.prepared.events.fd()
    }

    /// Opens the device, or joins the contexts of this process that have it open.
    ///
    /// # Errors
    /// As [`OpenOptions::open`](super::OpenOptions::open), with this value: a later call may
    /// succeed.
    pub fn open(self) -> Result<Context, Refused<Self>> {
        match self.prepared.open() {
            Ok(device) => Ok(Context { device: Device::Soft(device) }),
            Err(error) => Err(Refused::new(self, error)),
        }
    }
}
