//! Finds and opens devices.

mod prepared;

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use rocinante_kernel as kernel;
use rocinante_netdev::AnyPort;
pub use rocinante_netdev::handed::AGENT_VARIABLE;
use rocinante_netdev::{Backend, Interface, PortConfig, Unusable};
use rocinante_soft::model::device::Limits;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::trace;
use rocinante_soft::{BackendChoice, Wishes};

pub use self::prepared::PreparedContext;
use crate::context::Context;
use crate::device::Device;

/// Options for opening a device.
///
/// ```no_run
/// use rocinante::device::Backend;
/// use rocinante::{OpenOptions, VerbsError};
///
/// fn main() -> Result<(), VerbsError> {
///     let ctx = OpenOptions::new().netdev(Backend::Udp).open_interface("eth0")?;
///     println!("{} on {}", ctx.name(), ctx.provider());
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    device: Option<String>,
    wishes: Wishes,
}

/// The environment variable that names the device if the program does not: see
/// [`OpenOptions::device`].
pub const DEVICE_VARIABLE: &str = "ROCINANTE_DEVICE";

impl OpenOptions {
    /// The defaults: Rocinante chooses the backend, buffers are large, and a background thread
    /// drives the device.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

setters! { OpenOptions:
    /// Takes the device of this name.
    ///
    /// The name of an RDMA device of the kernel (`mlx5_0`, `rxe0`; `mlx5_0:2` is its second port)
    /// selects that device, through the system's `libibverbs`. `hw` selects the kernel's device
    /// that has the address. The name of a network interface selects the device in software over
    /// that interface. Without a name, here and in the variable `ROCINANTE_DEVICE`, the device is
    /// the one in software.
    device(name: &str) { device = Some(name.to_owned()) }
    /// Takes this backend, whatever [`NETDEV_VARIABLE`](crate::device::NETDEV_VARIABLE) names and
    /// even if it bypasses rules of the network namespace. If it cannot be opened, opening fails
    /// with [`VerbsError::Open`]; no other is tried. Only the device in software has backends:
    /// opening a device of the kernel fails with [`VerbsError::Invalid`].
    ///
    /// One case takes another backend: [`Backend::Xdp`] while another process has it on one of the
    /// addresses, because an interface has one XDP program. Then the device is opened on `packet`,
    /// or else on `udp`. [`Context::backend`] returns the backend that it has, and
    /// [`DeviceAttr::instead_of`] the one that was named.
    ///
    /// [`DeviceAttr::instead_of`]: crate::device::DeviceAttr::instead_of
    netdev(backend: Backend) { wishes.netdev = BackendChoice::Only(backend) }
    /// The sizes of socket buffers (bytes) and of rings (frames), and options of each backend. By
    /// default a socket has 4 MiB to send and 4 MiB to receive, and a ring 256 frames:
    /// [`PortConfig`] has the unit, range and default of each field, and the kernel's caps on them.
    /// This option and those below apply only to the device in software.
    port(config: PortConfig) { wishes.port = config }
    /// The limits that the device enforces and reports: numbers of objects, depths of queues in
    /// requests or completions, elements of a request, inline bytes. The defaults include 16,384
    /// queue pairs, 65,536 regions, queues of 65,536 requests, completion queues of 1,048,576:
    /// [`Limits::default`](crate::device::Limits) has all.
    /// `Limits::default().max_qp(8)` sets one. A call beyond a limit fails with
    /// [`VerbsError::Limit`] or [`VerbsError::Invalid`].
    limits(limits: Limits) { wishes.limits = limits }
    /// The most packets that a queue pair may have unacknowledged; 512 by default. The peer's
    /// receive budget limits it further.
    window_max(packets: u32) { wishes.window_max = Some(packets) }
    /// Whether acknowledgements announce the number of posted receives to the peer (end-to-end
    /// credits), as those of hardware do. By default they set no limit, as those of Soft-RoCE, and
    /// a peer that finds no receive gets an RNR NAK.
    advertise_credits(yes: bool) { wishes.advertise_credits = yes }
    /// Whether a WRITE of several packets may be split into that many messages of one packet each.
    /// By default it may.
    ///
    /// The device splits a WRITE if the port sends super-packets (`udp` and `packet`), if other
    /// requests to the same peer are not acknowledged yet or the peer has admitted a WRITE to the
    /// same range before, and if that saves a tenth of the super-packets. Whether it saves a tenth
    /// depends on the length; it never does for a WRITE that fills more than about seventeen
    /// super-packets (1 MiB at a path MTU of 4096). A WRITE with immediate is never split.
    /// Splitting raises throughput up to four times, and makes a WRITE of 8 to 64 KiB a tenth
    /// faster.
    ///
    /// The peer sees consecutive WRITEs of at most a path MTU: the same bytes in the same order.
    /// The program sees one completion. If the peer refuses a part of the range, the bytes before
    /// that part have been written. Take `false` if each request must be one message.
    cut_writes(yes: bool) { wishes.whole_writes = !yes }
    /// Whether the device asks peers whether they are Rocinantes, unless a program states it. By
    /// default it does.
    ///
    /// Programs that exchange queue pair numbers themselves do not state the peer's kind. After the
    /// first packet to such a peer, the device asks it once, by a management datagram that other
    /// implementations drop, and again after ten minutes at the earliest. Nothing waits for the
    /// answer. Two Rocinantes then use each other's whole receive queue, and retransmit lost
    /// packets only. With `false` the device neither asks nor answers.
    recognise_peers(yes: bool) { wishes.no_recognition = !yes }
    /// Whether a background thread drives the device while the program does not call it. By default
    /// it does. Without it, the device serves one-sided operations of peers only inside `poll`,
    /// retransmits nothing on time, and may hold back the last of several consecutive datagrams
    /// until then.
    background(yes: bool) { wishes.background = Some(yes) }
    /// How often the connection manager repeats a message without an answer, 0.4 s apart, before it
    /// gives up: 0 to 15 times, 15 by default. A request tells the peer the same number
    /// (`max_cm_retries` of Linux's `struct ib_cm_req_param`). Only for the device in software.
    cm_retries(times: u8) { wishes.cm_retries = Some(times) }
    /// Makes a device in software of `count` shards, 1 to 64. Each shard has its own engine, port,
    /// lock and background thread, so each shard may run on a processor of its own. The default is
    /// [`SHARDS_VARIABLE`](crate::device::SHARDS_VARIABLE), or else one shard.
    ///
    /// The device spreads queue pairs over the shards in turn, or as
    /// [`QpBuilder::shard`](crate::QpBuilder::shard) says. A shared receive queue and its queue
    /// pairs are on one shard. The connection manager works on the first shard. A device of several
    /// shards has no memory windows. All other objects belong to the device as usual.
    ///
    /// A completion queue may serve queue pairs of all shards. But a thread that polls it drives
    /// these shards one after the other, so one queue and one thread per shard scale better. The
    /// kernel steers datagrams to the shard of their queue pair as far as it can; the others are
    /// [handed over](crate::stats::DeviceCounters::handed_over).
    shards(count: usize) { wishes.shards = Some(count) }
    /// Lets the device and its datagrams meet faults, as they arrive and as they leave, on any
    /// backend and without a right. By default the variable
    /// [`FAULT_VARIABLE`](crate::device::FAULT_VARIABLE) says which.
    ///
    /// `words` is a list such as `"loss=2%,reorder=1%,delay=100us,seed=7"`, the path of a schedule
    /// that ends in `.toml`, or `"off"`. Several rules stand between semicolons. `docs/cli.md`
    /// lists the words, under "Faults". With a seed, chance decides alike of the n-th call, or
    /// datagram of one port and direction, that a rule is for, at the same address of the device.
    /// The order of both may depend on time and threads, and so do rates, full queues, and the
    /// beginning and end of a rule. [`DeviceAttr::chosen_because`] has the faults and their
    /// seed, which is random if none is given. Opening fails with [`VerbsError::Invalid`] for words
    /// that make no sense. Only for the device in software.
    ///
    /// [`DeviceAttr::chosen_because`]: crate::device::DeviceAttr::chosen_because
    fault(words: &str) { wishes.fault.words = Some(words.to_owned()) }
    /// Appends a line of JSON to this file for each fault: the datagram or call, and the effect. By
    /// default to the file that
    /// [`FAULT_LOG_VARIABLE`](crate::device::FAULT_LOG_VARIABLE) names, or to none.
    fault_log(path: impl Into<PathBuf>) { wishes.fault.log = Some(path.into()) }
    /// Keeps the background threads on these processors, by their numbers (`sched_setaffinity(2)`):
    /// the first shard's on the first, and so on, starting again from the first processor. Opening
    /// fails with [`VerbsError::Invalid`] if the process may not use one. By default the scheduler
    /// places them.
    cpus(cpus: impl IntoIterator<Item = usize>) { wishes.cpus = cpus.into_iter().collect() }
}

impl OpenOptions {
    /// Takes the best backend that the process may open, or that an agent opens for it
    /// ([`AGENT_VARIABLE`]), and that bypasses no rule of the network namespace, even if
    /// [`NETDEV_VARIABLE`](crate::device::NETDEV_VARIABLE) names another. This is the default if
    /// that variable is not set.
    #[must_use]
    pub fn netdev_auto(mut self) -> Self {
        self.wishes.netdev = BackendChoice::Auto;
        self
    }

    #[doc = include_str!("open/open.md")]
    /// # Errors
    /// [`VerbsError::NoDevice`] if there is none; [`VerbsError::Io`] if that cannot be known, or if
    /// its interface cannot use the address yet; [`VerbsError::Invalid`] for an option out of
    /// range, and for options or addresses that the open device does not have;
    /// [`VerbsError::Busy`] if the interface of an open device is gone; [`VerbsError::Open`] and
    /// [`VerbsError::Hardware`] name the missing part and the remedy.
    pub fn open(self, address: IpAddr) -> Result<Context, VerbsError> {
        match self.wanted()? {
            Some(name) if kernel::exists(&name) => self.open_hardware(&name, Some(address)),
            name => Ok(self.prepare_named(name, address)?.open()?),
        }
    }

    /// Opens the device of this name (see [`device`](Self::device)), with all its addresses.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_device(self, name: &str) -> Result<Context, VerbsError> {
        if kernel::exists(name) {
            return self.open_hardware(name, None);
        }
        Interface::by_name(name)
            .map_err(|error| unless_missing(error, || kernel::no_device(name)))?;
        self.open_interface(name)
    }

    /// Opens the device in software over an interface, with all its addresses.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_interface(self, name: &str) -> Result<Context, VerbsError> {
        Ok(self.prepare_interface(name)?.open()?)
    }

    /// As [`open`](Self::open), but opens nothing: [`PreparedContext::open`] does. It checks the
    /// options and finds the interface, which takes no privilege and disturbs no other process.
    ///
    /// # Errors
    /// [`VerbsError::NoDevice`] if no interface has the address; [`VerbsError::Invalid`] for an
    /// option out of range, for an interface whose MTU is too small, and for a device of the
    /// kernel; [`VerbsError::Io`] if there are no descriptors left.
    pub fn prepare(self, address: IpAddr) -> Result<PreparedContext, VerbsError> {
        match self.wanted()? {
            Some(name) if kernel::exists(&name) => Err(VerbsError::Invalid(format!(
                "{name} is an RDMA device of the kernel, which answers only once it is open: open \
                 it, or take the device in software of an interface"
            ))),
            name => self.prepare_named(name, address),
        }
    }

    /// As [`prepare`](Self::prepare), for an interface with all its addresses.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_interface(self, name: &str) -> Result<PreparedContext, VerbsError> {
        Ok(PreparedContext { prepared: self.wishes.prepare_interface(name)? })
    }

    fn prepare_named(
        self,
        name: Option<String>,
        address: IpAddr,
    ) -> Result<PreparedContext, VerbsError> {
        let iface = match name {
            Some(name) => Interface::by_name(&name)
                .map_err(|error| unless_missing(error, || kernel::no_device(&name)))
                .and_then(|iface| has_address(iface, address))?,
            None => Interface::by_address(address).map_err(|error| {
                unless_missing(error, || VerbsError::NoDevice(format!("the address {address}")))
            })?,
        };
        self.prepare_addresses(&iface, &[address], false)
    }

    fn wanted(&self) -> Result<Option<String>, VerbsError> {
        let name = match &self.device {
            Some(name) => Some(name.clone()),
            None => std::env::var_os(DEVICE_VARIABLE)
                .map(|name| {
                    name.into_string().map_err(|name| {
                        VerbsError::Invalid(format!(
                            "{DEVICE_VARIABLE}={name:?}: no device has such a name"
                        ))
                    })
                })
                .transpose()?,
        };
        Ok(name.filter(|name| !name.is_empty()))
    }

    fn open_hardware(self, name: &str, address: Option<IpAddr>) -> Result<Context, VerbsError> {
        if let BackendChoice::Only(backend) = self.wishes.netdev {
            return Err(VerbsError::Invalid(format!(
                "{name} is an RDMA device of the kernel, which carries its packets by itself: leave {backend} out, or take the \
                 device in software of an interface"
            )));
        }
        let device = kernel::Device::open(name, address)?;
        trace::opened(&device.name, &device.query());
        Ok(Context { device: Device::Kernel(device) })
    }

    /// Checks the variables that these options leave a choice to, and opens nothing.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a value that a variable cannot have.
    #[doc(hidden)]
    pub fn check_environment(&self) -> Result<(), VerbsError> {
        self.wishes.settle().map(drop)
    }

    /// Whether a device meets faults by these words of [`fault`](Self::fault). Error: a line that
    /// says what to change.
    #[doc(hidden)]
    pub fn check_fault(words: &str) -> Result<bool, String> {
        rocinante_soft::faults::plan(words).map(|plan| !plan.is_harmless())
    }

    /// When each rule of a schedule's text begins. Error: a line that says what to change.
    #[doc(hidden)]
    pub fn check_schedule(text: &str) -> Result<Vec<Duration>, String> {
        rocinante_soft::faults::schedule(text).map(|plan| plan.beginnings().collect())
    }

    /// Opens a device over a port that the caller made, such as one of the simulator's. The port
    /// decides addresses and MTU; `name` is what [`Context::name`] returns, and `why` the device's
    /// [`chosen_because`](crate::device::DeviceAttr). Contexts never share such a device.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for several [`shards`](Self::shards); [`VerbsError::Io`] if the
    /// operating system has no descriptors or threads left.
    #[doc(hidden)]
    pub fn open_port(self, name: &str, port: AnyPort, why: &str) -> Result<Context, VerbsError> {
        let device = self.wishes.open_port(name, port, why)?;
        Ok(Context { device: Device::Soft(device) })
    }

    fn prepare_addresses(
        self,
        iface: &Interface,
        addresses: &[IpAddr],
        are_all: bool,
    ) -> Result<PreparedContext, VerbsError> {
        let prepared = self.wishes.prepare(iface, addresses, are_all)?;
        Ok(PreparedContext { prepared })
    }
}

/// Why an interface is not found: there is none, or whatever else the kernel says.
fn unless_missing(error: io::Error, missing: impl FnOnce() -> VerbsError) -> VerbsError {
    if error.kind() == io::ErrorKind::NotFound { missing() } else { VerbsError::Io(error) }
}

/// Returns the interface if it has the address.
fn has_address(iface: Interface, address: IpAddr) -> Result<Interface, VerbsError> {
    if iface.addresses.iter().any(|(other, _)| *other == address) {
        return Ok(iface);
    }
    let is_it = |it: &Unusable| it.address == address && it.interface == iface.name;
    if let Some(it) = Unusable::all().unwrap_or_default().into_iter().find(is_it) {
        let error = io::Error::new(io::ErrorKind::AddrNotAvailable, it.to_string());
        return Err(VerbsError::Io(error));
    }
    let known: Vec<String> = iface.addresses.iter().map(|(other, _)| other.to_string()).collect();
    let (name, known) = (&iface.name, known.join(", "));
    Err(VerbsError::Invalid(format!("{name} does not have the address {address}: it has {known}")))
}
