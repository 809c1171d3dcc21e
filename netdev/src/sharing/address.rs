//! An address, as a process shares it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::last_will::LastWill;
use super::leader::Leadership;
use super::locks::Locks;
use super::rendezvous;
use super::socket_table::{Entry, SocketTable};
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::Backend;
use crate::port::error::OpenError;
use crate::port::steering;
use crate::udp::handoff::Outbox;
use crate::udp::{domain_of, open_shared};

/// An address, as a process shares it.
pub(super) struct Shared {
    pub(super) address: IpAddr,
    /// The address in words, and the interface if it is of the link alone, or the VRF.
    pub(super) name: String,
    pub(super) objects: Arc<rendezvous::Objects>,
    pub(super) locks: Locks,
    pub(super) leadership: Arc<AtomicBool>,
    /// Where this process listens: the kernel does not tell a process of its own locks.
    pub(super) listens: Mutex<BTreeSet<u64>>,
    /// The notes of this process here.
    pub(super) last_will: LastWill,
    /// The slots whose notes have been returned, and are there still.
    pub(super) returned: Mutex<BTreeSet<usize>>,
    /// By slot.
    pub(super) writers: Mutex<BTreeMap<u8, Known>>,
}

/// The known state of a neighbour's mailbox.
#[derive(Default)]
pub(super) struct Known {
    pub(super) writer: Option<Outbox>,
    /// When it was looked for last.
    pub(super) asked: Option<Instant>,
}

impl Shared {
    pub(super) fn join(
        iface: &Interface,
        address: IpAddr,
    ) -> Result<(Self, Leadership), OpenError> {
        let scope = match address {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => Some(iface.index),
            _ => domain_of(iface),
        };
        let name = scope.map_or_else(|| address.to_string(), |scope| format!("{address}%{scope}"));
        let fail = |e: rendezvous::Refused| {
            OpenError::os(Backend::Udp, format!("cannot share {name}"), e.error, e.hint)
        };
        let objects = Arc::new(rendezvous::join(&name).map_err(fail)?);
        let locks = Locks::open(&objects.memory).map_err(|e| {
            let hint = "mount /proc in this container";
            OpenError::os(Backend::Udp, format!("cannot share {name}"), e, hint)
        })?;
        let leadership = Leadership::new(&name).map_err(|e| failed("name the leader", e, ""))?;
        let is_ours = leadership.is_ours.clone();
        let it = Self {
            address,
            name,
            objects,
            locks,
            leadership: is_ours,
            listens: Mutex::default(),
            last_will: LastWill::default(),
            returned: Mutex::default(),
            writers: Mutex::default(),
        };
        Ok((it, leadership))
    }

    pub(super) fn is_leader(&self) -> bool {
        self.leadership.load(Ordering::Relaxed)
    }

    pub(super) fn listens(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.listens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn unlisten(&self, place: u64, slot: u8) {
        self.listens().remove(&place);
        self.locks.unlisten(place, slot);
    }

    pub(super) fn sockets(&self) -> &SocketTable {
        &self.objects.sockets
    }

    /// The entry of a slot, under the lock of all.
    pub(super) fn entry(&self, slot: usize) -> io::Result<Entry> {
        self.sockets().get(slot).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidData => {
                io::Error::new(e.kind(), rendezvous::strange_at(&self.name).hint)
            }
            _ => e,
        })
    }

    /// Makes the sockets of slots below `end` that are not there yet. Until a process takes the
    /// slot its socket drops all datagrams.
    pub(super) fn make_sockets(
        &self,
        iface: &Interface,
        config: &PortConfig,
        end: usize,
        selector: u16,
    ) -> Result<(), OpenError> {
        let fail = |what: &str, e: io::Error| {
            let hint = match e.raw_os_error() {
                // Every entry has descriptors, and the table is a pair.
                None | Some(libc::EAGAIN) => rendezvous::strange_at(&self.name).hint,
                _ => String::new(),
            };
            OpenError::os(Backend::Udp, format!("cannot {what} of {}", self.name), e, hint)
        };
        let len = self.sockets().len().map_err(|e| fail("see the sockets", e))?;
        let put = |socket| {
            let entry = Entry::new(socket).map_err(|e| fail("make a mailbox", e))?;
            self.sockets().put(&entry).map_err(|e| fail("keep a socket", e))?;
            Ok(entry.socket)
        };
        let open = |index| open_shared(iface, self.address, config, index == 0);
        let first = match len {
            0 => put(open(0)?)?,
            _ => self.sockets().get(0).map_err(|e| fail("see the first socket", e))?.socket,
        };
        // The program goes first: without it, or with a shorter one, new sockets would get others'
        // datagrams. Each process sets it, because the last one may have died on the way.
        let all = Shards { first: 0, count: end.max(len), selector, shared: true };
        first.steer(&steering::by_socket(all)).map_err(|e| fail("steer the datagrams", e))?;
        for index in len.max(1)..end {
            put(open(index)?)?;
        }
        Ok(())
    }
}

/// The error of a step that the kernel refused.
pub(super) fn failed(what: &str, error: io::Error, hint: &str) -> OpenError {
    OpenError::os(Backend::Udp, format!("cannot {what}"), error, hint)
}
