//! A device that has opened nothing yet.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_netdev::{Backend, Interface};
use rocinante_stack::types::Mtu;

use super::wishes::Wishes;
use super::{Device, GidTable, Inbox, active_mtu, attributes};
use crate::model::device::DeviceAttr;
use crate::model::error::VerbsError;

/// A device that has opened nothing yet: no socket, no ring, no thread. Only the descriptors of its
/// asynchronous events exist: it follows its port already.
#[derive(Debug)]
pub struct Prepared {
    wishes: Wishes,
    backend: Option<Backend>,
    shards: Option<usize>,
    /// Its interface, as it was when this value was made.
    pub iface: Interface,
    pub gids: Vec<IpAddr>,
    /// Whether these are all of the interface.
    are_all: bool,
    active_mtu: Mtu,
    pub events: Arc<Inbox>,
}

impl Prepared {
    pub(super) fn new(
        wishes: Wishes,
        (backend, shards): (Option<Backend>, Option<usize>),
        iface: &Interface,
        (gids, are_all): (&[IpAddr], bool),
    ) -> Result<Self, VerbsError> {
        let (iface, gids) = (iface.clone(), gids.to_vec());
        let active_mtu = active_mtu(&iface.name, iface.mtu)?;
        let table = GidTable::new(&gids, are_all);
        let events = Arc::new(Inbox::of(iface.index, table)?);
        Ok(Self { wishes, backend, shards, iface, gids, are_all, active_mtu, events })
    }

    pub fn gid_table(&self) -> Vec<Option<IpAddr>> {
        self.events.gids().unwrap_or_default()
    }

    /// The attributes; those of the port are known only once it is open.
    pub fn query(&self) -> DeviceAttr {
        DeviceAttr {
            active_mtu: self.active_mtu,
            chosen_because: "nothing is open yet".into(),
            ..attributes(self.wishes.limits, self.shards.unwrap_or(1))
        }
    }

    /// The addresses to open: those that the table has now, and those of before that are there.
    fn addresses(&self) -> Vec<IpAddr> {
        if self.are_all {
            self.gid_table().into_iter().flatten().collect()
        } else {
            self.gids.clone()
        }
    }

    /// Opens the device, or joins the contexts of this process that have it open. Error: a later
    /// call may succeed.
    pub fn open(&self) -> Result<Arc<Device>, VerbsError> {
        let (choice, events) = ((self.backend, self.shards), self.events.clone());
        self.wishes.start(&self.iface, (&self.addresses(), self.are_all), choice, events)
    }
}
