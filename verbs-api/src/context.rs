//! Devices: found, opened, asked; and protection domains.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_netdev::{AnyPort, Backend, Capabilities, Interface, PortConfig, PortStats, auto};
use rocinante_stack::Budget;
use rocinante_stack::stats::{Counters, Drops};
use rocinante_stack::types::Mtu;

use crate::cq::{CompChannel, Cq, CqKind};
use crate::error::VerbsError;
use crate::event::AsyncEvent;
use crate::qp::{QpBuilder, QpCaps};
use crate::soft::{self, Settings};

/// What a device may hold at most (`struct ibv_device_attr`); reported by [`Context::query_device`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs, at most 65,000.
    pub max_qp: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Depth of a send or receive queue.
    pub max_qp_wr: u32,
    /// Scatter-gather elements of a request.
    pub max_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
    /// READs and atomics that a queue pair may have outstanding, in either direction.
    pub max_qp_rd_atom: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_qp: 16_384,
            max_mr: 65_536,
            max_cq: 16_384,
            max_cqe: 1 << 20,
            max_qp_wr: 1 << 16,
            max_sge: 32,
            max_inline_data: 4096,
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

/// How a device is opened.
///
/// ```no_run
/// use rocinante::{Backend, OpenOptions};
///
/// let ctx = OpenOptions::new().netdev(Backend::Udp).open_interface("eth0")?;
/// println!("{} on {}", ctx.name(), ctx.backend());
/// # Ok::<(), rocinante::VerbsError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    netdev: Option<Backend>,
    port: PortConfig,
    limits: Limits,
    window_max: Option<u32>,
    no_background: bool,
    advertise_credits: bool,
}

/// The environment variable that chooses the backend where the program does not: `afxdp`, `packet`, `udp` or `auto`.
pub const NETDEV_VARIABLE: &str = "ROCINANTE_NETDEV";

impl OpenOptions {
    /// The defaults: the backend is chosen, buffers are large, a background thread drives the device.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes this backend or fails, instead of choosing.
    #[must_use]
    pub fn netdev(mut self, backend: Backend) -> Self {
        self.netdev = Some(backend);
        self
    }

    /// How the port is opened: buffer sizes, ring sizes.
    #[must_use]
    pub fn port(mut self, config: PortConfig) -> Self {
        self.port = config;
        self
    }

    /// What the device may hold.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The most packets that a queue pair has unacknowledged, 512 unless said otherwise. The peer's receive budget limits it further.
    #[must_use]
    pub fn window_max(mut self, packets: u32) -> Self {
        self.window_max = Some(packets);
        self
    }

    /// Whether acknowledgements tell the peer how many receives are posted, as hardware does; unless said otherwise they set
    /// no limit, as those of Soft-RoCE, and a peer without a receive is told by RNR NAK.
    #[must_use]
    pub fn advertise_credits(mut self, yes: bool) -> Self {
        self.advertise_credits = yes;
        self
    }

    /// Whether a background thread drives the device while the program does not call it; it does unless said otherwise.
    /// Without it, one-sided operations of peers are served only inside `poll`, and nothing is sent again in time.
    #[must_use]
    pub fn background(mut self, yes: bool) -> Self {
        self.no_background = !yes;
        self
    }

    /// Opens the device of the interface that has `address`, with that address only.
    ///
    /// # Errors
    /// [`VerbsError::NoDevice`] if there is none; [`VerbsError::Open`] says what the backend lacks and what to do.
    pub fn open(self, address: IpAddr) -> Result<Context, VerbsError> {
        let iface = Interface::by_address(address)
            .map_err(|_| VerbsError::NoDevice(format!("the address {address}")))?;
        self.open_addresses(&iface, &[address])
    }

    /// Opens the device of an interface, with all its addresses.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_interface(self, name: &str) -> Result<Context, VerbsError> {
        let iface = Interface::by_name(name)
            .map_err(|_| VerbsError::NoDevice(format!("the name {name:?}")))?;
        let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(address, _)| *address).collect();
        self.open_addresses(&iface, &addresses)
    }

    /// Opens the device over a port made elsewhere, such as one of the simulator's.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if the operating system has no descriptors or threads left.
    pub fn open_port(self, name: &str, port: AnyPort, why: &str) -> Result<Context, VerbsError> {
        self.start(name, port, why.to_owned())
    }

    fn start(&self, name: &str, port: AnyPort, why: String) -> Result<Context, VerbsError> {
        let settings = Settings {
            limits: self.limits,
            window_max: self.window_max.unwrap_or(512),
            advertise_credits: self.advertise_credits,
            background: !self.no_background,
        };
        let device = soft::Device::start(&settings, name, port, why)?;
        Ok(Context { device: Device::Soft(device) })
    }

    fn open_addresses(
        mut self,
        iface: &Interface,
        addresses: &[IpAddr],
    ) -> Result<Context, VerbsError> {
        if self.netdev.is_none()
            && let Some(name) = std::env::var_os(NETDEV_VARIABLE)
        {
            let name = name.to_string_lossy();
            if name != "auto" && !name.is_empty() {
                self.netdev = Some(name.parse().map_err(VerbsError::Invalid)?);
            }
        }
        let (port, choice) = auto::choose(iface, addresses, self.netdev, &self.port)?;
        self.start(&iface.name, port, choice.to_string())
    }
}

/// What a device can do (`struct ibv_device_attr`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttr {
    /// The limits.
    pub limits: Limits,
    /// What the port can do.
    pub port: Capabilities,
    /// The largest path MTU that fits the link.
    pub active_mtu: Mtu,
    /// Why this backend was chosen.
    pub chosen_because: String,
}

/// All counters of a device.
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
}

/// An open device (`struct ibv_context`). Cheap to clone; it is closed when the last clone and the last object made of it
/// are gone.
#[derive(Debug, Clone)]
pub struct Context {
    pub(crate) device: Device,
}

/// A device of one of the providers.
#[derive(Debug, Clone)]
pub(crate) enum Device {
    Soft(Arc<soft::Device>),
}

impl Device {
    pub(crate) fn limits(&self) -> &Limits {
        match self {
            Self::Soft(device) => &device.limits,
        }
    }

    pub(crate) fn gids(&self) -> &[IpAddr] {
        match self {
            Self::Soft(device) => &device.gids,
        }
    }

    pub(crate) fn active_mtu(&self) -> Mtu {
        match self {
            Self::Soft(device) => device.active_mtu,
        }
    }

    /// What peers are told of its receive queue.
    pub(crate) fn advertised(&self) -> Budget {
        match self {
            Self::Soft(device) => device.advertised,
        }
    }

    /// Whether a completion queue was made of it.
    pub(crate) fn has(&self, cq: &Cq) -> bool {
        match (self, &cq.kind) {
            (Self::Soft(device), CqKind::Soft(cq)) => Arc::ptr_eq(device, cq.device()),
        }
    }
}

impl Context {
    /// Opens the device of the interface that has `address`, with the defaults: see [`OpenOptions`].
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open(address: IpAddr) -> Result<Self, VerbsError> {
        OpenOptions::new().open(address)
    }

    pub(crate) fn limits(&self) -> &Limits {
        self.device.limits()
    }

    /// The interface's name.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.device {
            Device::Soft(device) => &device.name,
        }
    }

    /// The backend that carries the packets.
    #[must_use]
    pub fn backend(&self) -> Backend {
        match &self.device {
            Device::Soft(device) => device.capabilities.backend,
        }
    }

    /// Its addresses, IPv4 first: the GID table of port 1 (`ibv_query_gid(3)`; an IPv4 address stands for its
    /// IPv4-mapped GID).
    #[must_use]
    pub fn gids(&self) -> &[IpAddr] {
        self.device.gids()
    }

    /// What the device can do (`ibv_query_device(3)`, `ibv_query_port(3)`).
    #[must_use]
    pub fn query_device(&self) -> DeviceAttr {
        match &self.device {
            Device::Soft(device) => DeviceAttr {
                limits: device.limits,
                port: device.capabilities.clone(),
                active_mtu: device.active_mtu,
                chosen_because: device.why.clone(),
            },
        }
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> DeviceCounters {
        match &self.device {
            Device::Soft(device) => device.counters(),
        }
    }

    /// Makes a protection domain (`ibv_alloc_pd(3)`).
    #[must_use]
    pub fn alloc_pd(&self) -> Pd {
        let kind = match &self.device {
            Device::Soft(device) => PdKind::Soft(soft::Pd::new(device)),
        };
        Pd { inner: Arc::new(PdInner { kind, device: self.device.clone() }) }
    }

    /// Makes a completion queue of `depth` entries (`ibv_create_cq(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a depth out of range, [`VerbsError::Limit`] if there are too many.
    pub fn create_cq(&self, depth: u32) -> Result<Cq, VerbsError> {
        Cq::create(self, depth, None)
    }

    /// Makes a completion queue whose completions `channel` announces.
    ///
    /// # Errors
    /// As [`create_cq`](Self::create_cq).
    pub fn create_cq_with(&self, depth: u32, channel: &CompChannel) -> Result<Cq, VerbsError> {
        Cq::create(self, depth, Some(channel))
    }

    /// Makes a completion channel (`ibv_create_comp_channel(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Io`] if there are no descriptors left.
    pub fn create_comp_channel(&self) -> Result<CompChannel, VerbsError> {
        CompChannel::create(self)
    }

    /// Drives the device on this thread: receives, does what is due, sends. For programs that wait on memory instead of a
    /// completion queue.
    pub fn progress(&self) {
        match &self.device {
            Device::Soft(device) => device.progress(),
        }
    }

    /// The next asynchronous event, if there is one (`ibv_get_async_event(3)`, without waiting).
    #[must_use]
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        match &self.device {
            Device::Soft(device) => device.next_event(),
        }
    }

    /// A descriptor that is readable while there are asynchronous events.
    #[must_use]
    pub fn async_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.device {
            Device::Soft(device) => device.event_fd(),
        }
    }
}

/// A protection domain (`struct ibv_pd`): queue pairs reach only regions of their own. Cheap to clone.
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
}

impl Pd {
    pub(crate) fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Begins to make a queue pair (`ibv_create_qp(3)`).
    #[must_use]
    pub fn qp(&self, send_cq: &Cq, recv_cq: &Cq) -> QpBuilder {
        QpBuilder::new(self, send_cq, recv_cq)
    }

    /// Deallocates the domain (`ibv_dealloc_pd(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Busy`], with the domain, while a region, a queue pair or another clone uses it.
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

/// Four bytes that nobody can guess.
pub(crate) fn random() -> Result<u32, VerbsError> {
    getrandom::u32().map_err(|error| VerbsError::Io(std::io::Error::other(error)))
}
