//! The backend or device of a test, and how its devices are opened and connected.

use std::net::IpAddr;

use rocinante::device::{Backend, Limits, PortConfig, SHARDS_VARIABLE};
use rocinante::verbs::Mtu;
use rocinante::{ConnectOptions, Context, OpenOptions};
use rocinante_lab::{Between, Hosts, Lab, LabConfig};

use crate::oracles::{Exception, Oracle};

/// The backend or device of a test of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum On {
    /// The software device over this backend: two of them, in two containers of a lab.
    Software(Backend),
    /// The software device over `udp`, as above, on WireGuard devices of these containers: see
    /// [`tunnel`](crate::tunnel).
    Encrypted,
    /// A device of the kernel, opened twice.
    Kernel(KernelDevice),
}

impl From<Backend> for On {
    fn from(backend: Backend) -> Self {
        Self::Software(backend)
    }
}

/// A device of the kernel that tests run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelDevice {
    /// Its name, as in [`OpenOptions::device`].
    pub name: String,
    /// Its address.
    pub address: IpAddr,
}

/// The environment variable that names the kernel's device that the tests of the API run on, such
/// as `mlx5_0`.
pub const DEVICE_VARIABLE: &str = "ROCINANTE_TEST_DEVICE";

/// The environment variable that gives that device's address.
pub const ADDRESS_VARIABLE: &str = "ROCINANTE_TEST_ADDRESS";

impl KernelDevice {
    /// The device that [`DEVICE_VARIABLE`] and [`ADDRESS_VARIABLE`] name; `None` if they are not
    /// set. Error: only one of them is set, or the address is not valid.
    pub fn from_environment() -> Result<Option<Self>, String> {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        match (variable(DEVICE_VARIABLE), variable(ADDRESS_VARIABLE)) {
            (None, None) => Ok(None),
            (Some(name), Some(address)) => {
                let bad = |_| format!("{ADDRESS_VARIABLE}: {address:?} is no address");
                Ok(Some(Self { name, address: address.parse().map_err(bad)? }))
            }
            _ => Err(format!("set both: {DEVICE_VARIABLE}=mlx5_0 {ADDRESS_VARIABLE}=10.0.0.5")),
        }
    }

    /// Its address of this family: the given one, or the first of the device that is not
    /// link-local. Error: it has none, or the device cannot be opened.
    pub fn address_of(&self, family: Family) -> Result<IpAddr, String> {
        let fits = |address: &IpAddr| match address {
            IpAddr::V4(_) => family == Family::V4,
            IpAddr::V6(v6) => family == Family::V6 && !v6.is_unicast_link_local(),
        };
        if fits(&self.address) {
            return Ok(self.address);
        }
        let ctx = Context::open_device(&self.name).map_err(|error| error.to_string())?;
        let found = ctx.gids().iter().copied().find(fits);
        found.ok_or_else(|| format!("{} has no address of the family {family:?}", self.name))
    }
}

/// Which addresses the devices use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// How the devices are opened and connected.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The kind of device.
    pub on: On,
    /// The address family.
    pub family: Family,
    /// How queue pairs are connected, the path MTU included.
    pub connect: ConnectOptions,
    /// How the ports are opened. This and all that follows is for the software device.
    pub port: PortConfig,
    /// The limits of the devices.
    pub limits: Limits,
    /// Number of containers of the lab; the devices are in the first two.
    pub containers: u8,
    /// The network between two hosts, with a device on each; `None` is one host.
    pub between: Option<Between>,
    /// MTU of the containers' links.
    pub link_mtu: u32,
    /// Whether super-packets leave the containers unsegmented.
    pub segmentation: bool,
    /// Whether background threads drive the devices.
    pub background: bool,
    /// Whether the device may split WRITEs: [`OpenOptions::cut_writes`].
    pub cut_writes: bool,
    /// Number of shards of the devices; `None` leaves it to the environment.
    pub shards: Option<usize>,
    /// How often the connection manager repeats a message; `None` is the default.
    pub cm_retries: Option<u8>,
    /// Which rules the test breaks: see [`breaks`](Self::breaks).
    pub exceptions: Vec<Exception>,
}

impl Setup {
    /// IPv4, the largest path MTU, and the defaults.
    #[must_use]
    pub fn new(on: impl Into<On>) -> Self {
        let on = on.into();
        let encrypted = on == On::Encrypted;
        let setup = Self {
            on,
            family: Family::V4,
            connect: ConnectOptions::default(),
            port: PortConfig::default(),
            limits: Limits::default(),
            containers: 2,
            between: None,
            link_mtu: LabConfig::default().mtu,
            segmentation: true,
            background: true,
            cut_writes: true,
            shards: None,
            cm_retries: None,
            exceptions: Vec::new(),
        };
        if encrypted {
            let why = "the program that encrypts drops packets when its queues are full";
            return setup.may_break(Oracle::Retransmissions, why);
        }
        setup
    }

    /// The test breaks this rule every time, because of `why`. It fails if it does not.
    #[must_use]
    pub fn breaks(mut self, oracle: Oracle, why: &'static str) -> Self {
        self.exceptions.push(Exception { oracle, always: true, why });
        self
    }

    /// The test may break this rule, because of `why`: whether it does depends on the machine.
    #[must_use]
    pub fn may_break(mut self, oracle: Oracle, why: &'static str) -> Self {
        self.exceptions.push(Exception { oracle, always: false, why });
        self
    }

    /// The backend of the software device. Panics if it runs on a device of the kernel.
    #[must_use]
    pub(crate) fn backend(&self) -> Backend {
        match self.on {
            On::Software(backend) => backend,
            On::Encrypted => Backend::Udp,
            On::Kernel(_) => panic!("a lab is for the device in software"),
        }
    }

    /// The MTU in bytes of the link below an encrypted one: Ethernet's 1500 where the test asks for
    /// a path MTU that fits it, else 9000.
    pub(crate) fn underlay(&self) -> u32 {
        match self.connect.mtu {
            Some(mtu) if mtu <= Mtu::Mtu1024 => 1500,
            _ => 9000,
        }
    }

    /// The lab of software devices. Panics if it cannot be made.
    pub(crate) fn lab(&self) -> Lab {
        let (mtu, queues) = (self.link_mtu, self.receive_queues());
        let config = LabConfig { containers: self.containers, mtu, queues, ..LabConfig::default() };
        let lab = self.between.map_or_else(
            || Lab::new(&config),
            |between| {
                let containers_each = self.containers.div_ceil(2);
                Lab::of_hosts(&Hosts { hosts: 2, containers_each, between }, &config)
            },
        );
        lab.expect("a lab")
    }

    /// Number of receive queues that the devices need: each shard over AF_XDP has its own.
    fn receive_queues(&self) -> u32 {
        let environment = || std::env::var(SHARDS_VARIABLE).ok()?.parse().ok();
        match self.on {
            On::Software(Backend::Xdp) => {
                self.shards.or_else(environment).map_or(1, |count| count as u32)
            }
            _ => 1,
        }
    }

    /// How a software device is opened.
    pub(crate) fn open_options(&self, backend: Backend) -> OpenOptions {
        let options = OpenOptions::new()
            .netdev(backend)
            .port(self.port.clone())
            .limits(self.limits)
            .cut_writes(self.cut_writes)
            .background(self.background);
        let options = match self.shards {
            Some(count) => options.shards(count),
            None => options,
        };
        match self.cm_retries {
            Some(times) => options.cm_retries(times),
            None => options,
        }
    }

    /// With this path MTU.
    #[must_use]
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.connect.mtu = Some(mtu);
        self
    }

    /// With these addresses.
    #[must_use]
    pub fn family(mut self, family: Family) -> Self {
        self.family = family;
        self
    }

    /// With receive buffers as in a default container: `rmem_max` is 212,992 bytes, and the process
    /// may not exceed it.
    #[must_use]
    pub fn small_buffers(mut self) -> Self {
        self.port.udp.rx_buffer_bytes = 212_992;
        self.port.tx_buffer_bytes = 212_992;
        self.port.force_buffers = false;
        self
    }
}
