//! Devices (open, query) and protection domains.

mod tasks;

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_kernel as kernel;
use rocinante_netdev::Backend;
use rocinante_soft as soft;
use rocinante_soft::model::device::{DeviceAttr, DeviceCounters, Provider};
use rocinante_soft::model::error::{Refused, VerbsError};
use rocinante_soft::model::event::AsyncEvent;
use rocinante_soft::model::qp::QpInfo;
use rocinante_soft::model::resources::Resources;
use rocinante_stack::stats::CmCounters;

use crate::cq::{CompChannel, Cq};
use crate::device::Device;
use crate::open::OpenOptions;
use crate::qp::QpBuilder;

/// An open device (`struct ibv_context`). Cheap to clone. It closes when the last clone and the
/// last of its objects are gone. A device may be open several times: see [`OpenOptions::open`].
#[derive(Debug, Clone)]
pub struct Context {
    pub(crate) device: Device,
}

impl Context {
    /// Opens the device of the interface that has `address`, with the defaults of [`OpenOptions`].
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open(address: IpAddr) -> Result<Self, VerbsError> {
        OpenOptions::new().open(address)
    }

    /// Opens the device of this name, an RDMA device of the kernel or a network interface: see
    /// [`OpenOptions::device`].
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open_device(name: &str) -> Result<Self, VerbsError> {
        OpenOptions::new().open_device(name)
    }

    /// Its name: the interface's, or that of the kernel's RDMA device.
    #[must_use]
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// The provider, which carries the packets.
    #[must_use]
    pub fn provider(&self) -> Provider {
        match &self.device {
            Device::Soft(device) => Provider::Software(device.capabilities.backend),
            Device::Kernel(_) => Provider::Hardware,
        }
    }

    /// The backend that carries the packets, unless hardware does.
    #[must_use]
    pub fn backend(&self) -> Option<Backend> {
        match self.provider() {
            Provider::Software(backend) => Some(backend),
            _ => None,
        }
    }

    /// The addresses that the device was opened with, IPv4 first: the GID table of its port
    /// (`ibv_query_gid(3)`) at that time. They never change, and a queue pair can only have one of
    /// these. An IPv4 address stands for its IPv4-mapped GID.
    ///
    /// Where no address comes or goes, the place of an address in this slice is its `sgid_index`.
    /// Otherwise its place in [`gid_table`](Self::gid_table) is.
    #[must_use]
    pub fn gids(&self) -> &[IpAddr] {
        self.device.gids()
    }

    /// The GID table as it is now: ask again after
    /// [`AsyncEvent::GidChange`]. An `sgid_index` is a place in it. For a device in software:
    ///
    /// - An address keeps its index until the interface loses it, which leaves a hole, `None`. The
    ///   index of a hole is refused with [`VerbsError::Invalid`].
    /// - With all addresses of the interface
    ///   ([`open_interface`](crate::OpenOptions::open_interface)), an address that is added takes
    ///   the first hole, or else the end. If it is not among [`gids`](Self::gids), its index is
    ///   refused until all contexts of the device are closed and it is opened again.
    /// - With one address ([`open`](crate::OpenOptions::open)), the table has only that entry.
    ///
    /// The table of a device of the kernel stays as it was when it was opened.
    #[must_use]
    pub fn gid_table(&self) -> Vec<Option<IpAddr>> {
        self.device.gid_table()
    }

    /// The attributes of the device (`ibv_query_device(3)`, `ibv_query_port(3)`).
    #[must_use]
    pub fn query_device(&self) -> DeviceAttr {
        on!(Device, &self.device, device => device.query())
    }

    /// The number of shards (see [`OpenOptions::shards`]); 1 for a device of the kernel.
    #[must_use]
    pub fn shards(&self) -> usize {
        match &self.device {
            Device::Soft(device) => device.shards.count(),
            Device::Kernel(_) => 1,
        }
    }

    /// The device's counters, of all its contexts in the process, since it was opened. A device of
    /// the kernel counts for all its users together.
    #[must_use]
    pub fn counters(&self) -> DeviceCounters {
        on!(Device, &self.device, device => device.counters())
    }

    /// The connection manager's counters of messages and drops. `None` for a device of the kernel:
    /// its connection manager counts in `/sys/class/infiniband/*/ports/*/cm_*`.
    #[must_use]
    pub fn cm_counters(&self) -> Option<CmCounters> {
        match &self.device {
            Device::Soft(device) => Some(device.cm_counters()),
            Device::Kernel(_) => None,
        }
    }

    /// The objects of the device in use, of all its contexts in the process. `None` for a device of
    /// the kernel: `rdma resource show` reports it.
    #[must_use]
    pub fn resources(&self) -> Option<Resources> {
        match &self.device {
            Device::Soft(device) => Some(device.resources()),
            Device::Kernel(_) => None,
        }
    }

    /// The queue pairs of the device, of all its contexts in the process, with their counters. It
    /// takes the device's locks in turn: a program that polls a device often should not call it
    /// often. `None` for a device of the kernel: `rdma resource show qp` reports them.
    #[must_use]
    pub fn qps(&self) -> Option<Vec<QpInfo>> {
        match &self.device {
            Device::Soft(device) => Some(device.qps()),
            Device::Kernel(_) => None,
        }
    }

    /// The number of rounds of the device's background threads, all together: a round begins when
    /// a thread wakes, and again each time that it looks for more work before it sleeps. `None` for
    /// a device of the kernel.
    ///
    /// The difference of two calls shows what an idle device costs: it is 0 while no packet comes,
    /// the program does nothing, and no timer is due.
    #[must_use]
    pub fn background_rounds(&self) -> Option<u64> {
        match &self.device {
            Device::Soft(device) => Some(device.background_rounds()),
            Device::Kernel(_) => None,
        }
    }

    /// Makes a protection domain (`ibv_alloc_pd(3)`). If the container's limit or a device of the
    /// kernel refuses, this call still returns a [`Pd`], and each call that makes an object in it,
    /// such as [`Pd::allocate`] or [`QpBuilder::build`], fails with [`VerbsError::Quota`], or with
    /// [`VerbsError::Hardware`], which names `ibv_alloc_pd` and its errno.
    #[must_use]
    pub fn alloc_pd(&self) -> Pd {
        let kind = match &self.device {
            Device::Soft(device) => PdKind::Soft(soft::Pd::new(device)),
            Device::Kernel(device) => PdKind::Kernel(kernel::Pd::new(device)),
        };
        Pd { inner: Arc::new(PdInner { kind, device: self.device.clone() }) }
    }

    /// Makes a completion queue of `depth` entries (`ibv_create_cq(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a depth out of range, [`VerbsError::Limit`] if there are too
    /// many; [`VerbsError::Hardware`] if the kernel's device refuses.
    pub fn create_cq(&self, depth: u32) -> Result<Cq, VerbsError> {
        Cq::create(&self.device, depth, None)
    }

    /// Makes a completion queue with a channel that announces its completions.
    ///
    /// # Errors
    /// As [`create_cq`](Self::create_cq).
    pub fn create_cq_with(&self, depth: u32, channel: &CompChannel) -> Result<Cq, VerbsError> {
        Cq::create(&self.device, depth, Some(channel))
    }

    /// Makes a completion channel (`ibv_create_comp_channel(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Io`] if there are no descriptors left, or [`VerbsError::Hardware`].
    pub fn create_comp_channel(&self) -> Result<CompChannel, VerbsError> {
        CompChannel::create(&self.device)
    }

    /// Drives the device on this thread: receives, runs expired timers, sends. It does not wait. A
    /// program needs it only if it waits for something else than the library's calls, such as a
    /// byte that a peer writes, or has no [background thread](OpenOptions::background). A device of
    /// the kernel drives itself: there it does nothing.
    pub fn progress(&self) {
        match &self.device {
            Device::Soft(device) => device.progress(),
            // The kernel's device drives itself.
            Device::Kernel(_) => {}
        }
    }

    /// The next asynchronous event, if there is one (`ibv_get_async_event(3)`, without waiting).
    #[must_use]
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        match &self.device {
            Device::Soft(device) => device.events.next(),
            Device::Kernel(device) => device.next_event(),
        }
    }

    /// A descriptor for `poll(2)`, which is readable while there may be asynchronous events: then
    /// call [`poll_async_event`](Self::poll_async_event) until it returns `None`. After that it is
    /// not readable before the next event.
    ///
    /// It may be readable although the first call returns `None`: the kernel announces each change
    /// of the interface, and some make no event. Examples are a link that went down and is up again
    /// when the program looks, and an address that is not one of this context.
    #[must_use]
    pub fn async_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.device {
            Device::Soft(device) => device.events.fd(),
            Device::Kernel(device) => device.event_fd(),
        }
    }
}

/// A protection domain (`struct ibv_pd`): queue pairs reach only its regions. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Pd {
    pub(crate) inner: Arc<PdInner>,
}

#[derive(Debug)]
pub(crate) struct PdInner {
    pub(crate) kind: PdKind,
    device: Device,
}

#[derive(Debug)]
pub(crate) enum PdKind {
    Soft(soft::Pd),
    Kernel(kernel::Pd),
}

impl Pd {
    pub(crate) fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Starts the builder of a queue pair (`ibv_create_qp(3)`).
    #[must_use]
    pub fn qp(&self, send_cq: &Cq, recv_cq: &Cq) -> QpBuilder {
        QpBuilder::new(self, send_cq, recv_cq)
    }

    /// Deallocates the domain (`ibv_dealloc_pd(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Busy`], with the domain, while a region, a queue pair or another clone uses
    /// it.
    pub fn dealloc(self) -> Result<(), Refused<Self>> {
        match Arc::try_unwrap(self.inner) {
            Ok(_) => Ok(()),
            Err(inner) => {
                let why =
                    VerbsError::Busy("a region, a queue pair or another handle uses the domain");
                Err(Refused::new(Self { inner }, why))
            }
        }
    }
}
