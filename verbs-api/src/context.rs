//! Devices (open, query) and protection domains.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_netdev::{Backend, Capabilities, PortStats};
use rocinante_stack::Budget;
use rocinante_stack::stats::{CmCounters, Counters, Drops};
use rocinante_stack::types::Mtu;

use crate::cq::{CompChannel, Cq, CqKind};
use crate::hw::HardwareAttr;
use crate::model::error::VerbsError;
use crate::model::event::AsyncEvent;
use crate::model::qp::QpCaps;
use crate::model::resources::Resources;
use crate::open::OpenOptions;
use crate::qp::QpBuilder;
use crate::{hw, soft};

/// Limits of a device (`struct ibv_device_attr`); [`Context::query_device`] reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs, at most 65,000.
    pub max_qp: u32,
    /// Memory regions; in the device in software, regions and windows together.
    pub max_mr: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Depth of a send or receive queue.
    pub max_qp_wr: u32,
    /// Scatter-gather elements of a request.
    pub max_sge: u32,
    /// Bytes of inline data. `u32::MAX` if the device does not report its limit, which then applies
    /// when a queue pair is made.
    pub max_inline_data: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Depth of a shared receive queue.
    pub max_srq_wr: u32,
    /// Scatter-gather elements of a shared receive.
    pub max_srq_sge: u32,
    /// READs and atomics that a queue pair may have outstanding, in either direction.
    pub max_qp_rd_atom: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_qp: 16_384,
            max_mr: 65_536,
            max_mw: 65_536,
            max_cq: 16_384,
            max_cqe: 1 << 20,
            max_qp_wr: 1 << 16,
            max_sge: 32,
            max_inline_data: 4096,
            max_srq: 4096,
            max_srq_wr: 1 << 16,
            max_srq_sge: 32,
            max_qp_rd_atom: 128,
        }
    }
}

impl Limits {
    pub(crate) fn check(&self, caps: &QpCaps) -> Result<(), VerbsError> {
        let checks = [
            ("max_send_wr", caps.max_send_wr, self.max_qp_wr),
            ("max_recv_wr", caps.max_recv_wr, self.max_qp_wr),
            ("max_send_sge", caps.max_send_sge, self.max_sge),
            ("max_recv_sge", caps.max_recv_sge, self.max_sge),
            ("max_inline_data", caps.max_inline_data, self.max_inline_data),
        ];
        for (name, wanted, max) in checks {
            if wanted > max {
                return Err(VerbsError::Invalid(format!(
                    "{name} is {wanted}, the device takes {max} at most"
                )));
            }
        }
        Ok(())
    }
}

/// Optional operations of a device (bits of `device_cap_flags_ex` of `ibv_query_device_ex(3)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionalOperations {
    /// FLUSH for [`Placement::GLOBAL`](rocinante_stack::mem::Placement::GLOBAL).
    pub flush_global: bool,
    /// FLUSH for [`Placement::PERSISTENT`](rocinante_stack::mem::Placement::PERSISTENT), of
    /// persistent memory.
    pub flush_persistent: bool,
    /// ATOMIC WRITE.
    pub atomic_write: bool,
}

impl OptionalOperations {
    /// Those of the device in software, which knows of no persistent memory.
    const SOFTWARE: Self = Self { flush_global: true, flush_persistent: false, atomic_write: true };
}

/// What a device can do (`struct ibv_device_attr`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttr {
    /// The limits.
    pub limits: Limits,
    /// The optional operations that it answers. To request one, the library must support it as
    /// well: see `PostError::Unsupported`.
    pub optional: OptionalOperations,
    /// The types of memory windows.
    pub windows: MwSupport,
    /// What the port of a device in software can do.
    pub port: Option<Capabilities>,
    /// Attributes that only a device of the kernel has.
    pub hardware: Option<HardwareAttr>,
    /// The largest path MTU that fits the link.
    pub active_mtu: Mtu,
    /// What carries the packets, and why that was chosen.
    pub chosen_because: String,
}

/// Which memory windows a device has (`IBV_DEVICE_MEM_WINDOW` and the like).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MwSupport {
    /// Type 1.
    pub type_1: bool,
    /// Type 2A: all queue pairs of its domain with the same peer may use the window.
    pub type_2a: bool,
    /// Type 2B: only the queue pair that bound the window may use it. Windows of type 2 of the
    /// device in software are of this kind.
    pub type_2b: bool,
}

/// What carries the packets of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// The device in software, over this backend.
    Software(Backend),
    /// A device of the kernel, through `libibverbs`.
    Hardware,
}

impl Provider {
    /// The name used on the command line and in JSON: `udp`, `packet`, `afxdp`, `sim`, `hw`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Software(backend) => backend.name(),
            Self::Hardware => "hw",
        }
    }
}

impl std::fmt::Display for Provider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// All counters of a device. A device of the kernel counts for all its users together, and only
/// what its driver shows in `hw_counters`; the other counters are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCounters {
    /// What the transport did.
    pub transport: Counters,
    /// What was dropped, by reason.
    pub drops: Drops,
    /// What the port did.
    pub port: PortStats,
    /// Datagrams that the kernel refused, and its last errno.
    pub refused: (u64, i32),
    /// Datagrams that arrived at the port of another shard: the number handed over to their shard,
    /// and the number lost because that shard had no room. See [`OpenOptions::shards`].
    pub handed_over: (u64, u64),
}

impl DeviceCounters {
    /// Adds what another shard counted.
    pub(crate) fn add(&mut self, other: &Self) {
        self.transport.add(&other.transport);
        self.drops.add(&other.drops);
        self.port.add(&other.port);
        self.refused.0 += other.refused.0;
        if other.refused.0 > 0 {
            self.refused.1 = other.refused.1;
        }
        self.handed_over.0 += other.handed_over.0;
        self.handed_over.1 += other.handed_over.1;
    }
}

/// An open device (`struct ibv_context`). Cheap to clone. It closes when the last clone and the
/// last of its objects are gone.
#[derive(Debug, Clone)]
pub struct Context {
    pub(crate) device: Device,
}

/// A device of one of the providers.
#[derive(Debug, Clone)]
pub(crate) enum Device {
    Soft(Arc<soft::Device>),
    Hw(Arc<hw::Device>),
}

impl Device {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Soft(device) => &device.name,
            Self::Hw(device) => &device.name,
        }
    }

    /// Whether both are the same device from one `open` call.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Soft(device), Self::Soft(other)) => Arc::ptr_eq(device, other),
            (Self::Hw(device), Self::Hw(other)) => Arc::ptr_eq(device, other),
            _ => false,
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        match self {
            Self::Soft(device) => &device.limits,
            Self::Hw(device) => &device.limits,
        }
    }

    pub(crate) fn gids(&self) -> &[IpAddr] {
        match self {
            Self::Soft(device) => &device.gids,
            Self::Hw(device) => &device.gids,
        }
    }

    pub(crate) fn active_mtu(&self) -> Mtu {
        match self {
            Self::Soft(device) => device.active_mtu,
            Self::Hw(device) => device.active_mtu,
        }
    }

    /// The receive budget that peers learn.
    pub(crate) fn advertised(&self) -> Budget {
        match self {
            Self::Soft(device) => device.advertised,
            Self::Hw(device) => device.advertised(),
        }
    }

    /// Whether the completion queue belongs to this device.
    pub(crate) fn has(&self, cq: &Cq) -> bool {
        match (self, &cq.kind) {
            (Self::Soft(device), CqKind::Soft(cq)) => Arc::ptr_eq(device, cq.device()),
            (Self::Hw(device), CqKind::Hw(cq)) => Arc::ptr_eq(device, cq.device()),
            _ => false,
        }
    }
}

impl Context {
    /// Opens the device of the interface that has `address`, with the defaults of [`OpenOptions`].
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open(address: IpAddr) -> Result<Self, VerbsError> {
        OpenOptions::new().open(address)
    }

    pub(crate) fn limits(&self) -> &Limits {
        self.device.limits()
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

    /// What carries the packets.
    #[must_use]
    pub fn provider(&self) -> Provider {
        match &self.device {
            Device::Soft(device) => Provider::Software(device.capabilities.backend),
            Device::Hw(_) => Provider::Hardware,
        }
    }

    /// The backend that carries the packets, unless hardware does.
    #[must_use]
    pub fn backend(&self) -> Option<Backend> {
        match self.provider() {
            Provider::Software(backend) => Some(backend),
            Provider::Hardware => None,
        }
    }

    /// Its addresses, IPv4 first: the GID table of port 1 (`ibv_query_gid(3)`). An IPv4 address
    /// stands for its IPv4-mapped GID.
    #[must_use]
    pub fn gids(&self) -> &[IpAddr] {
        self.device.gids()
    }

    /// What the device can do (`ibv_query_device(3)`, `ibv_query_port(3)`).
    #[must_use]
    pub fn query_device(&self) -> DeviceAttr {
        match &self.device {
            Device::Soft(device) => DeviceAttr {
                limits: Limits { max_mw: device.limits.max_mr, ..device.limits },
                windows: match device.shard_count() {
                    1 => MwSupport { type_1: true, type_2a: false, type_2b: true },
                    _ => MwSupport { type_1: false, type_2a: false, type_2b: false },
                },
                optional: OptionalOperations::SOFTWARE,
                port: Some(device.capabilities.clone()),
                hardware: None,
                active_mtu: device.active_mtu,
                chosen_because: device.why.clone(),
            },
            Device::Hw(device) => DeviceAttr {
                limits: device.limits,
                optional: device.optional,
                windows: device.mw_support,
                port: None,
                hardware: Some(device.attr.clone()),
                active_mtu: device.active_mtu,
                chosen_because: "the kernel's RDMA device, through libibverbs".to_owned(),
            },
        }
    }

    /// The number of shards (see [`OpenOptions::shards`]); 1 for a device of the kernel.
    #[must_use]
    pub fn shards(&self) -> usize {
        match &self.device {
            Device::Soft(device) => device.shard_count(),
            Device::Hw(_) => 1,
        }
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> DeviceCounters {
        match &self.device {
            Device::Soft(device) => device.counters(),
            Device::Hw(device) => device.counters(),
        }
    }

    /// What the connection manager did and dropped. `None` for a device of the kernel: its
    /// connection manager counts in `/sys/class/infiniband/*/ports/*/cm_*`.
    #[must_use]
    pub fn cm_counters(&self) -> Option<CmCounters> {
        match &self.device {
            Device::Soft(device) => Some(device.cm_counters()),
            Device::Hw(_) => None,
        }
    }

    /// The objects of the device in use, counting all clones of this context in the process. `None`
    /// for a device of the kernel: `rdma resource show` reports it.
    #[must_use]
    pub fn resources(&self) -> Option<Resources> {
        match &self.device {
            Device::Soft(device) => Some(device.resources()),
            Device::Hw(_) => None,
        }
    }

    /// How often the background threads of the device have woken or looked at it again; `None` for
    /// a device of the kernel. The number stands still while the device is idle.
    #[must_use]
    pub fn background_rounds(&self) -> Option<u64> {
        match &self.device {
            Device::Soft(device) => Some(device.background_rounds()),
            Device::Hw(_) => None,
        }
    }

    /// Makes a protection domain (`ibv_alloc_pd(3)`). If a device of the kernel has none left, the
    /// calls that make objects in the domain report it.
    #[must_use]
    pub fn alloc_pd(&self) -> Pd {
        let kind = match &self.device {
            Device::Soft(device) => PdKind::Soft(soft::Pd::new(device)),
            Device::Hw(device) => PdKind::Hw(hw::Pd::new(device)),
        };
        Pd { inner: Arc::new(PdInner { kind, device: self.device.clone() }) }
    }

    /// Makes a completion queue of `depth` entries (`ibv_create_cq(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a depth out of range, [`VerbsError::Limit`] if there are too
    /// many; [`VerbsError::Hardware`] if the kernel's device refuses.
    pub fn create_cq(&self, depth: u32) -> Result<Cq, VerbsError> {
        Cq::create(self, depth, None)
    }

    /// Makes a completion queue with a channel that announces its completions.
    ///
    /// # Errors
    /// As [`create_cq`](Self::create_cq).
    pub fn create_cq_with(&self, depth: u32, channel: &CompChannel) -> Result<Cq, VerbsError> {
        Cq::create(self, depth, Some(channel))
    }

    /// Makes a completion channel (`ibv_create_comp_channel(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Io`] if there are no descriptors left, or [`VerbsError::Hardware`].
    pub fn create_comp_channel(&self) -> Result<CompChannel, VerbsError> {
        CompChannel::create(self)
    }

    /// Drives the device on this thread: receives, runs expired timers, sends. For programs that
    /// wait on memory instead of a completion queue.
    pub fn progress(&self) {
        match &self.device {
            Device::Soft(device) => device.progress(),
            // The kernel's device drives itself.
            Device::Hw(_) => {}
        }
    }

    /// The next asynchronous event, if there is one (`ibv_get_async_event(3)`, without waiting).
    #[must_use]
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        match &self.device {
            Device::Soft(device) => device.next_event(),
            Device::Hw(device) => device.next_event(),
        }
    }

    /// A descriptor that is readable while there are asynchronous events.
    #[must_use]
    pub fn async_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.device {
            Device::Soft(device) => device.event_fd(),
            Device::Hw(device) => device.event_fd(),
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
    Hw(hw::Pd),
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
    pub fn dealloc(self) -> Result<(), (Self, VerbsError)> {
        match Arc::try_unwrap(self.inner) {
            Ok(_) => Ok(()),
            Err(inner) => {
                let why =
                    VerbsError::Busy("a region, a queue pair or another handle uses the domain");
                Err((Self { inner }, why))
            }
        }
    }
}

/// Four random bytes that a peer cannot guess.
pub(crate) fn random() -> Result<u32, VerbsError> {
    getrandom::u32().map_err(|error| VerbsError::Io(std::io::Error::other(error)))
}
