//! A context that has opened nothing yet.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rocinante_netdev::{Backend, Interface};
use rocinante_stack::types::Mtu;

use super::OpenOptions;
use crate::context::Context;
use rocinante_soft as soft;
use rocinante_soft::model::device::DeviceAttr;
use rocinante_soft::model::error::{Refused, VerbsError};
use rocinante_soft::model::event::AsyncEvent;

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
    options: OpenOptions,
    backend: Option<Backend>,
    shards: Option<usize>,
    iface: Interface,
    gids: Vec<IpAddr>,
    /// Whether these are all of the interface.
    are_all: bool,
    active_mtu: Mtu,
    events: Arc<soft::Inbox>,
}

impl PreparedContext {
    pub(super) fn new(
        options: OpenOptions,
        (backend, shards): (Option<Backend>, Option<usize>),
        iface: &Interface,
        (gids, are_all): (&[IpAddr], bool),
    ) -> Result<Self, VerbsError> {
        let (iface, gids) = (iface.clone(), gids.to_vec());
        let active_mtu = soft::active_mtu(&iface.name, iface.mtu)?;
        let table = soft::GidTable::new(&gids, are_all);
        let events = Arc::new(soft::Inbox::of(iface.index, table)?);
        Ok(Self { options, backend, shards, iface, gids, are_all, active_mtu, events })
    }

    /// Has its GIDs in the places that they have for others.
    #[cfg(feature = "internals")]
    pub(crate) fn take_places(&self, gids: &[Option<IpAddr>]) {
        self.events.take_places(gids);
    }

    /// The name of its interface.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.iface.name
    }

    /// Its interface, as it was when this value was made.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        &self.iface
    }

    /// As [`Context::gids`].
    #[must_use]
    pub fn gids(&self) -> &[IpAddr] {
        &self.gids
    }

    /// As [`Context::gid_table`].
    #[must_use]
    pub fn gid_table(&self) -> Vec<Option<IpAddr>> {
        self.events.gids().unwrap_or_default()
    }

    /// As [`Context::query_device`]. The port's capabilities are known only once it is open:
    /// [`DeviceAttr::port`] is `None`.
    #[must_use]
    pub fn query_device(&self) -> DeviceAttr {
        let mut attr = soft::attributes(self.options.limits, self.shards.unwrap_or(1));
        attr.active_mtu = self.active_mtu;
        attr.chosen_because = "nothing is open yet".into();
        attr
    }

    /// The addresses to open: those that the table has now, and those of before that are there.
    fn addresses(&self) -> Vec<IpAddr> {
        if self.are_all {
            self.gid_table().into_iter().flatten().collect()
        } else {
            self.gids.clone()
        }
    }

    /// As [`Context::poll_async_event`].
    #[must_use]
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.events.next()
    }

    /// As [`Context::async_fd`]. The context that [`open`](Self::open) makes has the same
    /// descriptor.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }

    /// Opens the device, or joins the contexts of this process that have it open.
    ///
    /// # Errors
    /// As [`OpenOptions::open`], with this value: a later call may succeed.
    pub fn open(self) -> Result<Context, Refused<Self>> {
        let (choice, events) = ((self.backend, self.shards), self.events.clone());
        match self.options.start(&self.iface, (&self.addresses(), self.are_all), choice, events) {
            Ok(context) => Ok(context),
            Err(error) => Err(Refused::new(self, error)),
        }
    }
}
