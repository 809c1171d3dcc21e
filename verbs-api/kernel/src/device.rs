//! A device of the kernel: the choice of its port, and its protection domains.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use rocinante_netdev::PortStats;
use rocinante_soft::model::device::{
    DeviceAttr, DeviceCounters, HardwareAttr, Limits, MwSupport, OptionalOperations,
};
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::event::AsyncEvent;
use rocinante_soft::provider::listeners::Listeners;
use rocinante_soft::provider::trace;
use rocinante_soft::provider::wakers::Wakers;
use rocinante_stack::Budget;
use rocinante_stack::stats::Counters;
use rocinante_stack::types::{Mtu, Qpn, QueueKind};
use rocinante_stack::verbs::AhId;

use super::ffi::Library;
use super::known::Known;
use super::sysfs::{self, HardwareDevice, HardwarePort, hardware_devices};
use super::watch::{Source, Watcher};
use super::{cm, convert, error, ffi};

/// A channel, and the tasks that wait for its queues.
type Quiet = (Arc<ffi::Channel>, Arc<Listeners<Wakers>>);

/// An open device, and its port in use.
#[derive(Debug)]
pub struct Device {
    /// The connection manager, once it is used. Declared before the device, so that it drops first.
    pub(super) cm: Mutex<Option<cm::Cm>>,
    /// The thread that wakes tasks.
    pub(super) watcher: Watcher,
    /// The channel of the queues that have none of the program's, and their tasks.
    quiet: OnceLock<Quiet>,
    /// Tasks that wait for asynchronous events.
    tasks: Arc<Wakers>,
    /// Address handles by number. Declared before the device, so that they drop first.
    pub(super) ahs: RwLock<HashMap<AhId, ffi::Ah>>,
    /// Windows, which likewise drop first.
    pub(super) windows: RwLock<ffi::Windows>,
    /// Whether there ever was a window.
    pub(super) has_windows: AtomicBool,
    pub(super) known: Known,
    mw_support: MwSupport,
    pub(super) context: Arc<ffi::Context>,
    pub name: String,
    pub limits: Limits,
    pub(super) optional: OptionalOperations,
    pub active_mtu: Mtu,
    pub gids: Vec<IpAddr>,
    pub(super) attr: HardwareAttr,
}

/// Splits a name from a command line into a device and, after a colon, its port.
fn split(name: &str) -> (&str, Option<u8>) {
    let split = name.rsplit_once(':').and_then(|(name, port)| Some((name, port.parse().ok()?)));
    split.map_or((name, None), |(name, port)| (name, Some(port)))
}

/// Whether the kernel has such a device.
pub fn exists(name: &str) -> bool {
    name == ANY || hardware_devices().iter().any(|device| device.name == split(name).0)
}

/// The name for any device.
const ANY: &str = "hw";

/// There is no RDMA device and no interface of this name.
pub fn no_device(name: &str) -> VerbsError {
    error::no_device(name)
}

/// The device of this name, or any device, and a usable port of it: the named port, or the first
/// one. The port has the address, if one is given.
fn choose<'a>(
    devices: &'a [HardwareDevice],
    name: &str,
    address: Option<IpAddr>,
) -> Result<(&'a HardwareDevice, &'a HardwarePort), VerbsError> {
    let (wanted, number) = split(name);
    let named = |device: &&HardwareDevice| wanted == ANY || device.name == wanted;
    let candidates: Vec<&HardwareDevice> = devices.iter().filter(named).collect();
    let [first, ..] = candidates[..] else { return Err(error::no_device(name)) };
    let ports =
        candidates.iter().flat_map(|device| device.ports.iter().map(|port| (*device, port)));
    let usable: Vec<_> = ports
        .filter(|(_, port)| number.is_none_or(|number| number == port.number))
        .filter(|(_, port)| port.is_usable())
        .collect();
    let has = |port: &HardwarePort, address| port.gids.iter().any(|gid| gid.address == address);
    match (usable.first(), address) {
        (None, _) => Err(error::bad_port(first, number)),
        (Some(found), None) => Ok(*found),
        (Some(_), Some(address)) => {
            usable.iter().find(|(_, port)| has(port, address)).copied().ok_or_else(|| {
                error::no_address((wanted != ANY).then_some(wanted), devices, address)
            })
        }
    }
}

impl Device {
    /// Opens the device of this name, or any, with all its addresses or only one.
    pub fn open(name: &str, address: Option<IpAddr>) -> Result<Arc<Self>, VerbsError> {
        let devices = hardware_devices();
        let (device, port) = choose(&devices, name, address)?;
        let library = Library::get().map_err(error::no_library)?;
        let context = Self::open_context(library, device)?;
        let attr =
            context.query_device().map_err(|error| error::failed("ibv_query_device", error))?;
        let port_attr = context
            .query_port(port.number)
            .map_err(|error| error::failed("ibv_query_port", error))?;
        let active_mtu = convert::mtu(port_attr.active_mtu)
            .ok_or_else(|| error::bad_port(device, Some(port.number)))?;
        let gids = port.gids.iter().filter(|gid| address.is_none_or(|only| only == gid.address));
        let (gids, gid_indices) = gids.map(|gid| (gid.address, gid.index)).unzip();
        Ok(Arc::new(Self {
            cm: Mutex::default(),
            watcher: Watcher::default(),
            quiet: OnceLock::new(),
            tasks: Arc::default(),
            ahs: RwLock::default(),
            optional: convert::optional(context.capabilities()),
            windows: RwLock::default(),
            has_windows: AtomicBool::new(false),
            known: Known::default(),
            mw_support: convert::windows(&attr),
            context: Arc::new(context),
            name: device.name.clone(),
            limits: convert::limits(&attr),
            active_mtu,
            gids,
            attr: convert::hardware_attr(&attr, &port_attr, (port.number, gid_indices)),
        }))
    }

    fn open_context(
        library: &'static Library,
        device: &HardwareDevice,
    ) -> Result<ffi::Context, VerbsError> {
        match ffi::Context::open(library, &device.name) {
            Ok(Some(context)) => Ok(context),
            Ok(None) => Err(error::not_listed(device)),
            Err(ffi::OpenError::List(error)) => Err(error::cannot_list(error)),
            Err(ffi::OpenError::Open(error)) => Err(error::cannot_open(device, error)),
        }
    }

    /// The device's attributes.
    pub fn query(&self) -> DeviceAttr {
        let (limits, optional) = (self.limits, self.optional);
        let why = "the kernel's RDMA device, through libibverbs";
        let mut attr = DeviceAttr::new(limits, optional, self.mw_support, self.active_mtu, why);
        attr.hardware = Some(self.attr.clone());
        attr
    }

    /// Where the peer of a queue pair is.
    pub fn peer_of(&self, qpn: Qpn) -> Option<IpAddr> {
        self.known.peer_of(qpn)
    }

    /// The announcement of the receive queue to peers: none, so they take it for a standard peer's.
    pub fn advertised(&self) -> (Budget, Option<QueueKind>) {
        (Budget::STANDARD, None)
    }

    pub fn counters(&self) -> DeviceCounters {
        let mut transport = Counters::default();
        let mut port = PortStats::default();
        for (name, value) in sysfs::counters(&self.name, self.attr.port) {
            convert::count(&name, value, &mut transport, &mut port);
        }
        let mut counters = DeviceCounters::default();
        (counters.transport, counters.port) = (transport, port);
        counters
    }

    pub fn next_event(&self) -> Option<AsyncEvent> {
        loop {
            let event = self.context.next_event()?;
            if convert::port(&event).is_none_or(|port| port == u32::from(self.attr.port)) {
                let event = convert::event(event);
                trace::event(&event);
                return Some(event);
            }
        }
    }

    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.context.async_fd()
    }

    pub fn tasks(&self) -> &Wakers {
        &self.tasks
    }

    /// Announces the next event to the tasks that have registered.
    pub fn announce_to_tasks(&self) -> Result<(), VerbsError> {
        Ok(self.watcher.watch(Source::Events(self.context.clone(), self.tasks.clone()))?)
    }

    /// The channel of the queues that have none of the program's.
    pub(super) fn quiet(&self) -> Result<&Quiet, VerbsError> {
        if self.quiet.get().is_none() {
            let channel = ffi::Channel::create(&self.context)
                .map_err(|error| error::failed("ibv_create_comp_channel", error))?;
            let _ = self.quiet.set((Arc::new(channel), Arc::new(Listeners::new())));
        }
        Ok(self.quiet.get().expect("just made"))
    }
}

/// A protection domain. If the device has none left, the calls that need it report the error.
#[derive(Debug)]
pub struct Pd {
    raw: Result<Arc<ffi::Pd>, i32>,
    pub(super) device: Arc<Device>,
}

impl Pd {
    pub fn new(device: &Arc<Device>) -> Self {
        let raw = ffi::Pd::alloc(&device.context).map(Arc::new);
        let raw = raw.map_err(|error| error.raw_os_error().unwrap_or_default());
        Self { raw, device: device.clone() }
    }

    pub(super) fn raw(&self) -> Result<&Arc<ffi::Pd>, VerbsError> {
        let failed =
            |errno: &i32| error::locked("ibv_alloc_pd", None, io::Error::from_raw_os_error(*errno));
        self.raw.as_ref().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sysfs::HardwareGid;
    use super::*;

    fn device(name: &str, ports: &[(&str, &str, &[[u8; 4]])]) -> HardwareDevice {
        let port = |(index, (state, link_layer, gids)): (usize, &(&str, &str, &[[u8; 4]]))| {
            let gids = gids.iter().enumerate().map(|(index, address)| HardwareGid {
                index: index as u8,
                address: (*address).into(),
                interface: None,
            });
            HardwarePort {
                number: index as u8 + 1,
                state: (*state).to_owned(),
                link_layer: (*link_layer).to_owned(),
                gids: gids.collect(),
            }
        };
        let ports = ports.iter().enumerate().map(port).collect();
        HardwareDevice { name: name.to_owned(), file: None, ports }
    }

    #[test]
    fn a_port_is_chosen_by_name_number_and_address() {
        let (here, there) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let devices = [
            device("ib0", &[("ACTIVE", "InfiniBand", &[here])]),
            device("mlx5_0", &[("DOWN", "Ethernet", &[here]), ("ACTIVE", "Ethernet", &[here])]),
            device("rxe0", &[("ACTIVE", "Ethernet", &[there])]),
        ];
        let chosen = |name: &str, address: Option<[u8; 4]>| {
            let chosen = choose(&devices, name, address.map(IpAddr::from));
            chosen.map(|(device, port)| format!("{} {}", device.name, port.number))
        };
        let refused = |name: &str, address| chosen(name, address).unwrap_err().to_string();
        assert_eq!(chosen("mlx5_0", None).unwrap(), "mlx5_0 2");
        assert_eq!(chosen("mlx5_0:2", Some(here)).unwrap(), "mlx5_0 2");
        assert_eq!(chosen(ANY, Some(there)).unwrap(), "rxe0 1");
        assert_eq!(chosen(ANY, None).unwrap(), "mlx5_0 2");
        assert!(refused("mlx5_0:1", None).contains("port 1 is Ethernet, DOWN"));
        assert!(refused("ib0", None).contains("port 1 is InfiniBand, ACTIVE"));
        assert!(refused("rxe1", None).contains("there is no device \"rxe1\""));
        let elsewhere = refused("rxe0", Some(here));
        assert!(elsewhere.contains("rxe0 has 10.0.0.2"), "{elsewhere}");
        assert!(
            refused(ANY, Some([9; 4])).contains("no RDMA device has the RoCE v2 address 9.9.9.9")
        );
    }
}
