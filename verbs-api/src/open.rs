//! Finds and opens devices.

mod prepared;

use std::ffi::OsStr;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

#[cfg(any(test, feature = "internals"))]
use rocinante_netdev::AnyPort;
pub use rocinante_netdev::handed::AGENT_VARIABLE;
use rocinante_netdev::handed::Agent;
use rocinante_netdev::{Backend, Interface, PortConfig, Unusable, auto};

pub use self::prepared::PreparedContext;
use crate::choice::BackendChoice;
use crate::context::Context;
use crate::device::Device;
use crate::tuning::connections::KEEP_ALIVE;
use rocinante_kernel as kernel;
use rocinante_soft::model::device::Limits;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::trace;
use rocinante_soft::{self as soft, Settings};

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
    netdev: BackendChoice,
    port: PortConfig,
    limits: Limits,
    window_max: Option<u32>,
    background: Option<bool>,
    advertise_credits: bool,
    whole_writes: bool,
    no_recognition: bool,
    cm_retries: Option<u8>,
    refuses_late: bool,
    shards: Option<usize>,
    cpus: Vec<usize>,
}

/// The environment variable that names the backend if the program does not: `afxdp`, `packet`,
/// `udp` or `auto`.
pub const NETDEV_VARIABLE: &str = "ROCINANTE_NETDEV";

/// The environment variable that names the device if the program does not: see
/// [`OpenOptions::device`].
pub const DEVICE_VARIABLE: &str = "ROCINANTE_DEVICE";

/// The environment variable that sets the number of shards of a device in software if the program
/// does not: see [`OpenOptions::shards`].
pub const SHARDS_VARIABLE: &str = "ROCINANTE_SHARDS";

/// The environment variable with the seconds of silence after which the peer of a connection is
/// asked whether it is still there, if the program does not set them: see
/// [`cm::Params::keep_alive`](crate::cm::Params::keep_alive). `0` or `off` for never.
pub const KEEP_ALIVE_VARIABLE: &str = "ROCINANTE_KEEP_ALIVE";

impl OpenOptions {
    /// The defaults: Rocinante chooses the backend, buffers are large, and a background thread
    /// drives the device.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the device of this name.
    ///
    /// The name of an RDMA device of the kernel (`mlx5_0`, `rxe0`; `mlx5_0:2` is its second port)
    /// selects that device, through the system's `libibverbs`. `hw` selects the kernel's device
    /// that has the address. The name of a network interface selects the device in software over
    /// that interface. Without a name, here and in the variable `ROCINANTE_DEVICE`, the device is
    /// the one in software.
    #[must_use]
    pub fn device(mut self, name: &str) -> Self {
        self.device = Some(name.to_owned());
        self
    }

    /// Takes this backend, whatever [`NETDEV_VARIABLE`] names and even if it bypasses rules of the
    /// network namespace. If it cannot be opened, opening fails with [`VerbsError::Open`]; no other
    /// is tried. Only the device in software has backends: opening a device of the kernel fails
    /// with [`VerbsError::Invalid`].
    ///
    /// One case takes another backend: [`Backend::Xdp`] while another process has it on one of the
    /// addresses, because an interface has one XDP program. Then the device is opened on `packet`,
    /// or else on `udp`. [`Context::backend`] returns the backend that it has, and
    /// [`DeviceAttr::instead_of`] the one that was named.
    ///
    /// [`DeviceAttr::instead_of`]: crate::device::DeviceAttr::instead_of
    #[must_use]
    pub fn netdev(mut self, backend: Backend) -> Self {
        self.netdev = BackendChoice::Only(backend);
        self
    }

    /// Takes the best backend that the process may open, or that an agent opens for it
    /// ([`AGENT_VARIABLE`]), and that bypasses no rule of the network namespace, even if
    /// [`NETDEV_VARIABLE`] names another. This is the default if that variable is not set.
    #[must_use]
    pub fn netdev_auto(mut self) -> Self {
        self.netdev = BackendChoice::Auto;
        self
    }

    /// The sizes of socket buffers (bytes) and of rings (frames), and options of each backend. By
    /// default a socket has 4 MiB to send and 4 MiB to receive, and a ring 256 frames:
    /// [`PortConfig`] has the unit, range and default of each field, and the kernel's caps on them.
    /// This option and those below apply only to the device in software.
    #[must_use]
    pub fn port(mut self, config: PortConfig) -> Self {
        self.port = config;
        self
    }

    /// The limits that the device enforces and reports: numbers of objects, depths of queues in
    /// requests or completions, elements of a request, inline bytes. The defaults include 16,384
    /// queue pairs, 65,536 regions, queues of 65,536 requests, completion queues of 1,048,576:
    /// [`Limits::default`](crate::device::Limits) has all.
    /// `Limits::default().max_qp(8)` sets one. A call beyond a limit fails with
    /// [`VerbsError::Limit`] or [`VerbsError::Invalid`].
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The most packets that a queue pair may have unacknowledged; 512 by default. The peer's
    /// receive budget limits it further.
    #[must_use]
    pub fn window_max(mut self, packets: u32) -> Self {
        self.window_max = Some(packets);
        self
    }

    /// Whether acknowledgements announce the number of posted receives to the peer (end-to-end
    /// credits), as those of hardware do. By default they set no limit, as those of Soft-RoCE, and
    /// a peer that finds no receive gets an RNR NAK.
    #[must_use]
    pub fn advertise_credits(mut self, yes: bool) -> Self {
        self.advertise_credits = yes;
        self
    }

    /// Whether a WRITE of several packets may be split into that many messages of one packet each.
    /// By default it may.
    ///
    /// The device splits a WRITE if the port sends super-packets (`udp` and `packet`), if other
    /// requests to the same peer are not acknowledged yet, and if that saves a tenth of the
    /// super-packets. Whether it saves a tenth depends on the length; it never does for a WRITE
    /// that fills more than about seventeen super-packets (1 MiB at a path MTU of 4096). A WRITE
    /// with immediate is never split. Splitting raises throughput up to four times.
    ///
    /// The peer sees consecutive WRITEs of at most a path MTU: the same bytes in the same order.
    /// The program sees one completion. If the peer refuses a part of the range, the bytes before
    /// that part have been written. Take `false` if each request must be one message.
    #[must_use]
    pub fn cut_writes(mut self, yes: bool) -> Self {
        self.whole_writes = !yes;
        self
    }

    /// Whether the device asks peers whether they are Rocinantes, unless a program states it. By
    /// default it does.
    ///
    /// Programs that exchange queue pair numbers themselves do not state the peer's kind. After the
    /// first packet to such a peer, the device asks it once, by a management datagram that other
    /// implementations drop, and again after ten minutes at the earliest. Nothing waits for the
    /// answer. Two Rocinantes then use each other's whole receive queue, and retransmit lost
    /// packets only. With `false` the device neither asks nor answers.
    #[must_use]
    pub fn recognise_peers(mut self, yes: bool) -> Self {
        self.no_recognition = !yes;
        self
    }

    /// Whether a background thread drives the device while the program does not call it. By default
    /// it does. Without it, the device serves one-sided operations of peers only inside `poll`,
    /// retransmits nothing on time, and may hold back the last of several consecutive datagrams
    /// until then.
    #[must_use]
    pub fn background(mut self, yes: bool) -> Self {
        self.background = Some(yes);
        self
    }

    /// How often the connection manager repeats a message without an answer, 0.4 s apart, before it
    /// gives up: 0 to 15 times, 15 by default. A request tells the peer the same number
    /// (`max_cm_retries` of Linux's `struct ib_cm_req_param`). Only for the device in software.
    #[must_use]
    pub fn cm_retries(mut self, times: u8) -> Self {
        self.cm_retries = Some(times);
        self
    }

    /// Refuses a connection request only after 0.5 s if its port has no
    /// [`cm::Listener`](crate::cm::Listener). If one is bound to the port meanwhile, it gets the
    /// request at once. By default such a request is refused at once. Nothing else is delayed:
    /// neither requests that find their listener, nor its program's rejections.
    ///
    /// For programs that tell their peers that they listen before they do, as perftest and qperf:
    /// a peer that is refused then ends.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    #[must_use]
    pub fn refuse_late(mut self) -> Self {
        self.refuses_late = true;
        self
    }

    /// Makes a device in software of `count` shards, 1 to 64. Each shard has its own engine, port,
    /// lock and background thread, so each shard may run on a processor of its own. The default is
    /// [`SHARDS_VARIABLE`], or else one shard.
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
    #[must_use]
    pub fn shards(mut self, count: usize) -> Self {
        self.shards = Some(count);
        self
    }

    /// Keeps the background threads on these processors, by their numbers (`sched_setaffinity(2)`):
    /// the first shard's on the first, and so on, starting again from the first processor. Opening
    /// fails with [`VerbsError::Invalid`] if the process may not use one. By default the scheduler
    /// places them.
    #[must_use]
    pub fn cpus(mut self, cpus: impl IntoIterator<Item = usize>) -> Self {
        self.cpus = cpus.into_iter().collect();
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
        let iface = Interface::by_name(name).map_err(|error| {
            unless_missing(error, || VerbsError::NoDevice(format!("the name {name:?}")))
        })?;
        let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(address, _)| *address).collect();
        self.prepare_addresses(&iface, &addresses, true)
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
        if let BackendChoice::Only(backend) = self.netdev {
            return Err(VerbsError::Invalid(format!(
                "{name} is an RDMA device of the kernel, which carries its packets by itself: leave {backend} out, or take the \
                 device in software of an interface"
            )));
        }
        let device = kernel::Device::open(name, address)?;
        trace::opened(&device.name, &device.query());
        Ok(Context { device: Device::Kernel(device) })
    }

    /// Opens a device over a port that the caller made, such as one of the simulator's. The port
    /// decides addresses and MTU; `name` is what [`Context::name`] returns, and `why` the device's
    /// [`chosen_because`](crate::device::DeviceAttr). Contexts never share such a device.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for several [`shards`](Self::shards); [`VerbsError::Io`] if the
    /// operating system has no descriptors or threads left.
    #[cfg(any(test, feature = "internals"))]
    #[doc(hidden)]
    pub fn open_port(self, name: &str, port: AnyPort, why: &str) -> Result<Context, VerbsError> {
        if self.shards.is_some_and(|count| count != 1) {
            return Err(VerbsError::Invalid("a device over one port has one shard".into()));
        }
        let events = Arc::new(soft::Inbox::new()?);
        let hca = soft::Hca::start(
            &self.settings(),
            name,
            (vec![port], None),
            (why.to_owned(), None),
            None,
        )?;
        Ok(context(hca, events))
    }

    fn settings(&self) -> Settings {
        Settings {
            port: self.port.clone(),
            limits: self.limits,
            window_max: self.window_max.unwrap_or(512),
            advertise_credits: self.advertise_credits,
            cut_writes: !self.whole_writes,
            recognises: !self.no_recognition,
            background: self.background.unwrap_or(true),
            cm_retries: self.cm_retries,
            // A wrong value was refused before.
            keep_alive: keep_alive().unwrap_or(KEEP_ALIVE),
            refuses_late: self.refuses_late,
            cpus: self.cpus.clone(),
        }
    }

    /// Whether a device that this process has open already suits these options: those that the
    /// program left at their defaults suit any device.
    fn suit(
        &self,
        device: &soft::Hca,
        backend: Option<Backend>,
        shards: Option<usize>,
    ) -> Result<(), VerbsError> {
        let (is, wanted) = (&device.settings, self.settings());
        let suits = [
            ("netdev", backend.is_none_or(|backend| device.is_taken_as(backend))),
            ("shards", shards.is_none_or(|count| count == device.shard_count())),
            ("port", wanted.port == is.port || self.port == PortConfig::default()),
            ("limits", wanted.limits == is.limits || self.limits == Limits::default()),
            ("window_max", wanted.window_max == is.window_max || self.window_max.is_none()),
            ("advertise_credits", is.advertise_credits || !self.advertise_credits),
            ("cut_writes", !is.cut_writes || !self.whole_writes),
            ("recognise_peers", !is.recognises || !self.no_recognition),
            ("background", wanted.background == is.background || self.background.is_none()),
            ("cm_retries", wanted.cm_retries == is.cm_retries || self.cm_retries.is_none()),
            ("cpus", wanted.cpus == is.cpus || self.cpus.is_empty()),
        ];
        match suits.iter().find(|(_, suits)| !suits) {
            None => Ok(()),
            Some((option, _)) => Err(VerbsError::Invalid(format!(
                "{} is open in this process with another `{option}`: open it with the same, or \
                 close it first",
                device.name
            ))),
        }
    }

    fn prepare_addresses(
        self,
        iface: &Interface,
        addresses: &[IpAddr],
        are_all: bool,
    ) -> Result<PreparedContext, VerbsError> {
        if let Some(times) = self.cm_retries.filter(|times| *times > 15) {
            let why = format!("the connection manager repeats itself 0 to 15 times, not {times}");
            return Err(VerbsError::Invalid(why));
        }
        let backend = self.netdev.settle(std::env::var_os(NETDEV_VARIABLE).as_deref())?;
        keep_alive()?;
        let shards = settle_shards(self.shards, std::env::var_os(SHARDS_VARIABLE).as_deref())?;
        if shards.unwrap_or(1) > 1 && self.background == Some(false) {
            let why = "several shards need their background threads: leave them, or open one shard";
            return Err(VerbsError::Invalid(why.into()));
        }
        PreparedContext::new(self, (backend, shards), iface, (addresses, are_all))
    }

    fn start(
        &self,
        iface: &Interface,
        (addresses, are_all): (&[IpAddr], bool),
        (backend, shards): (Option<Backend>, Option<usize>),
        events: Arc<soft::Inbox>,
    ) -> Result<Context, VerbsError> {
        let agent = Agent::from_environment();
        let start = |claim| {
            let count = shards.unwrap_or(1);
            let (shards, slots) = auto::lease(iface, addresses, &self.port, count)?;
            let sharing = (shards, slots.as_ref());
            let (ports, choice) =
                auto::choose_shards(iface, addresses, backend, &self.port, sharing, &agent)?;
            let parts = (ports, slots);
            let instead_of = backend.filter(|named| *named != choice.backend);
            let why = (choice.to_string(), instead_of);
            soft::Hca::start(&self.settings(), &iface.name, parts, why, claim)
        };
        let key = soft::Key::new(iface.index, addresses, are_all);
        let hca = soft::open(key, |device| self.suit(device, backend, shards), start)?;
        Ok(context(hca, events))
    }
}

/// A context of the device.
fn context(device: Arc<soft::Hca>, events: Arc<soft::Inbox>) -> Context {
    let device = soft::Device::new(device, events);
    trace::opened(&device.name, &device.query());
    Context { device: Device::Soft(device) }
}

/// The number of shards: the program's, else the variable's.
fn settle_shards(
    said: Option<usize>,
    variable: Option<&OsStr>,
) -> Result<Option<usize>, VerbsError> {
    let most = soft::SHARDS_MAX;
    let (source, count) = match (said, variable.filter(|text| !text.is_empty())) {
        (Some(count), _) => ("shards".to_owned(), Some(count)),
        (None, None) => return Ok(None),
        (None, Some(text)) => {
            let count = text.to_str().and_then(|text| text.parse().ok());
            (format!("{SHARDS_VARIABLE}={}", text.to_string_lossy()), count)
        }
    };
    match count {
        Some(count) if (1..=most).contains(&count) => Ok(Some(count)),
        Some(count) => Err(VerbsError::Invalid(format!(
            "{source}: a device has 1 to {most} shards, not {count}"
        ))),
        None => Err(VerbsError::Invalid(format!("{source}: a device has 1 to {most} shards"))),
    }
}

/// The keep-alive time of the environment.
fn keep_alive() -> Result<Duration, VerbsError> {
    settle_keep_alive(std::env::var_os(KEEP_ALIVE_VARIABLE).as_deref())
}

fn settle_keep_alive(variable: Option<&OsStr>) -> Result<Duration, VerbsError> {
    let Some(text) = variable.filter(|text| !text.is_empty()) else { return Ok(KEEP_ALIVE) };
    let text = text.to_string_lossy();
    if text == "off" {
        return Ok(Duration::ZERO);
    }
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| {
        VerbsError::Invalid(format!("{KEEP_ALIVE_VARIABLE}={text}: give it seconds, or `off`"))
    })
}

/// The error of an interface that is not found: there is none, or the kernel refuses the question.
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
    Err(VerbsError::Invalid(format!("{name} has not the address {address}: it has {known}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_how_long_a_peer_may_be_silent() {
        let settled = |text: Option<&str>| settle_keep_alive(text.map(OsStr::new));
        for (text, seconds) in [
            (None, 10.0),
            (Some(""), 10.0),
            (Some("0"), 0.0),
            (Some("off"), 0.0),
            (Some("30"), 30.0),
            (Some("2.5"), 2.5),
        ] {
            assert_eq!(settled(text).unwrap(), Duration::from_secs_f64(seconds), "{text:?}");
        }
        for text in ["-1", "NaN", "inf", "1e30", "10s", "on"] {
            let error = settled(Some(text)).unwrap_err().to_string();
            assert!(error.contains("ROCINANTE_KEEP_ALIVE") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn the_program_says_of_how_many_shards_it_is_or_else_the_environment() {
        let settled = |said, variable: Option<&str>| settle_shards(said, variable.map(OsStr::new));
        for (said, variable, count) in [
            (None, None, None),
            (None, Some(""), None),
            (None, Some("3"), Some(3)),
            (Some(64), Some("x"), Some(64)),
        ] {
            assert_eq!(settled(said, variable).unwrap(), count);
        }
        for (said, variable, words) in [
            (None, Some("0"), "ROCINANTE_SHARDS=0: a device has 1 to 64 shards, not 0"),
            (None, Some("two"), "ROCINANTE_SHARDS=two: a device has 1 to 64 shards"),
            (Some(65), None, "shards: a device has 1 to 64 shards, not 65"),
        ] {
            let error = settled(said, variable).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
