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

    /// Its addresses, IPv4 first: the GID table of port 1 (`ibv_query_gid(3)`). An IPv4 address
    /// stands for its IPv4-mapped GID. They are those that the device was opened with, each at its
    /// index; [`gid_table`](Self::gid_table) says what became of them.
    #[must_use]
    pub fn gids(&self) -> &[IpAddr] {
        self.device.gids()
    }

    /// The GID table as it is now. An address keeps its index until it is removed, which leaves a
    /// hole, `None`. An address that is added takes the first hole, or else the end; a device in
    /// software that is open already does not send from there: it must be opened anew. The table
    /// of a device of the kernel is that of when it was opened.
    #[must_use]
    pub fn gid_table(&self) -> Vec<Option<IpAddr>> {
        self.device.gid_table()
    }

    /// The attributes of the device (`ibv_query_device(3)`, `ibv_query_port(3)`).
    #[must_use]
    pub fn query_device(&self) -> DeviceAttr {
        match &self.device {
            Device::Soft(device) => device.query(),
            Device::Kernel(device) => device.query(),
        }
    }

    /// The number of shards (see [`OpenOptions::shards`]); 1 for a device of the kernel.
    #[must_use]
    pub fn shards(&self) -> usize {
        match &self.device {
            Device::Soft(device) => device.shard_count(),
            Device::Kernel(_) => 1,
        }
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> DeviceCounters {
        match &self.device {
            Device::Soft(device) => device.counters(),
            Device::Kernel(device) => device.counters(),
        }
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

    /// How often the background threads of the device have woken or looked at it again; `None` for
    /// a device of the kernel. The number stands still while the device is idle.
    #[must_use]
    pub fn background_rounds(&self) -> Option<u64> {
        match &self.device {
            Device::Soft(device) => Some(device.background_rounds()),
            Device::Kernel(_) => None,
        }
    }

    /// Makes a protection domain (`ibv_alloc_pd(3)`). If a device of the kernel has none left, the
    /// calls that make objects in the domain report it.
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

    /// Drives the device on this thread: receives, runs expired timers, sends. For programs that
    /// wait on memory instead of a completion queue.
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
            Device::Soft(device) => device.next_event(),
            Device::Kernel(device) => device.next_event(),
        }
    }

    /// A descriptor that is readable while there are asynchronous events. A change of the port that
    /// was taken back, or is of no GID of this context, makes it readable for nothing: then
    /// [`poll_async_event`](Self::poll_async_event) returns `None`, and it is readable no longer.
    #[must_use]
    pub fn async_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.device {
            Device::Soft(device) => device.event_fd(),
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
