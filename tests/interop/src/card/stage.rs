//! The surroundings of a run: the device, its agent, our interface, and the limits of each.

use std::cell::OnceCell;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rocinante::OpenOptions;
use rocinante::device::{Backend, Interface, hardware_devices};
use rocinante_dropin::install::Installation;
use rocinante_lab::Netns;

use super::cells::BACKENDS;
use super::losses::LossPlace;
use super::{Args, Expect};
use crate::agent::machine::{Device, Kind, Machine};
use crate::agent::proto::Request;
use crate::agent::{self, Agent, PORT, RemoteAgent, Verbs};
use crate::matrix::{Node, Step, cannot};

/// How long a running agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug)]
enum AgentPlace {
    /// In this process.
    Local,
    /// At this address, called from this namespace or from the present one.
    Remote(SocketAddr, Option<Netns>),
}

/// Our side: the software device.
#[derive(Debug)]
struct Software {
    netns: Option<Netns>,
    interface: Interface,
    addresses: Vec<IpAddr>,
    /// For each backend and address family: the path MTU that fits, or why there is no such device.
    opened: Vec<(Backend, bool, Result<u32, String>)>,
    losses: LossPlace,
}

/// Our end in one setting.
pub(super) struct OurSide<'a> {
    pub(super) netns: Option<&'a Netns>,
    pub(super) interface: &'a Interface,
    pub(super) address: IpAddr,
    pub(super) active_mtu: u32,
}

/// Both ends, examined.
#[derive(Debug)]
pub(super) struct Stage {
    control: AgentPlace,
    expect: Expect,
    /// The device's name as given, with its port if it has one.
    name: String,
    addresses: Vec<IpAddr>,
    /// The machine with the device.
    pub(super) machine: Machine,
    pub(super) here: Machine,
    software: Result<Software, String>,
    /// The installation of `rocinante run`, made for the first unmodified program.
    installed: OnceCell<Result<Installation, String>>,
}

impl Stage {
    /// Examines both ends. Error: no agent, no such device, an address that the device lacks, or no
    /// permission: the text says what to do. A missing `--ours` is no error: cells with our side
    /// are then not run.
    pub(super) fn new(args: &Args) -> Step<Self> {
        let netns = args.netns.as_deref().map(open_netns).transpose()?;
        let control = AgentPlace::new(&args.agent, netns.as_ref())?;
        let name = args.device.clone();
        let address = args.address.first().copied();
        let describe = Request::describe { name: name.clone(), address };
        let machine: Machine = agent::call(&mut *control.agent()?, describe)
            .map_err(|why| format!("{}: {why}", control.place()))?;
        let device = machine.device.as_ref().ok_or("the agent says nothing of the device")?;
        let addresses = addresses_of(device, &args.address)?;
        let software = match args.ours.is_empty() {
            true => {
                Err("no --ours ADDRESS was given: our address, for the device in software".into())
            }
            false => Software::new(args, netns, &control)?,
        };
        let (here, expect) = (Machine::present(), args.expect);
        let installed = OnceCell::new();
        Ok(Self { control, expect, name, addresses, machine, here, software, installed })
    }

    /// A new connection to the agent.
    pub(super) fn agent(&self) -> Step<Box<dyn Agent>> {
        self.control.agent()
    }

    pub(super) fn device_name(&self) -> String {
        self.name.clone()
    }

    fn shown(&self) -> &Device {
        self.machine.device.as_ref().expect("it was looked at")
    }

    /// The path MTU that fits the device's link.
    pub(super) fn active_mtu(&self) -> u32 {
        self.shown().mtus.0
    }

    pub(super) fn device_address(&self, ipv6: bool) -> Step<IpAddr> {
        let found = self.addresses.iter().find(|address| address.is_ipv6() == ipv6).copied();
        found.ok_or_else(|| {
            let family = if ipv6 { "global IPv6" } else { "IPv4" };
            cannot(format!(
                "{} has no {family} address: `ip address add` on its interface",
                self.name
            ))
        })
    }

    /// The device as a side of a scenario, through a new connection.
    pub(super) fn device(&self, ipv6: bool) -> Step<Node> {
        let address = self.device_address(ipv6)?;
        let mut node = Node::open(self.agent()?, &self.shown().name, &self.name, address)?;
        if self.expect == Expect::Specification {
            node.hold_to_the_specification();
        }
        Ok(node)
    }

    /// Our end in a setting.
    pub(super) fn ours(&self, backend: Backend, ipv6: bool) -> Step<OurSide<'_>> {
        let software = self.software.as_ref().map_err(cannot)?;
        let address = software.addresses.iter().find(|address| address.is_ipv6() == ipv6);
        let address = address.copied().ok_or_else(|| {
            let family = if ipv6 { "global IPv6" } else { "IPv4" };
            cannot(format!("our interface {} has no {family} address", software.interface.name))
        })?;
        let opened = software.opened.iter().find(|(b, v6, _)| (*b, *v6) == (backend, ipv6));
        let (_, _, opened) =
            opened.ok_or_else(|| cannot(format!("left out by --netdev: {backend}")))?;
        let active_mtu = *opened.as_ref().map_err(cannot)?;
        let (netns, interface) = (software.netns.as_ref(), &software.interface);
        Ok(OurSide { netns, interface, address, active_mtu })
    }

    /// The installation of `rocinante run`.
    pub(super) fn installed(&self) -> Step<&Installation> {
        self.installed.get_or_init(install).as_ref().map_err(cannot)
    }

    /// Where packets between the sides can be lost.
    pub(super) fn losses(&self) -> Step<&LossPlace> {
        self.software.as_ref().map(|software| &software.losses).map_err(cannot)
    }

    /// The report's lines about our side.
    pub(super) fn our_side(&self) -> Vec<(&'static str, String)> {
        let software = match &self.software {
            Ok(software) => software,
            Err(why) => return vec![("our side", why.clone())],
        };
        let Interface { name, mtu, .. } = &software.interface;
        let losses = &software.losses;
        let whose = if losses.beyond { "the other end of our veth" } else { "our own interface" };
        vec![
            ("our interface", format!("{name}, MTU {mtu}")),
            ("our addresses", list(&software.addresses)),
            ("packets are lost at", format!("{} ({whose})", losses.interface)),
        ]
    }

    /// The device's addresses in use.
    pub(super) fn used(&self) -> String {
        list(&self.addresses)
    }

    /// Circumstances that may spoil the result.
    pub(super) fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if let Ok(software) = &self.software {
            let name = &software.interface.name;
            let devices = hardware_devices();
            let owner = devices.iter().find(|device| {
                let mut gids = device.ports.iter().flat_map(|port| &port.gids);
                gids.any(|gid| gid.interface.as_ref() == Some(name))
            });
            if let Some(owner) = owner.filter(|owner| Kind::of(&owner.name) == Kind::Device) {
                remarks.push(format!(
                    "our interface {name} belongs to {}, which may keep RoCE packets (UDP port 4791) from the kernel, and so from us: take an \
                     interface without RoCE, or switch it off there (mlx5: `devlink dev param set pci/… name enable_roce value false \
                     cmode driverinit && devlink dev reload pci/…`)",
                    owner.name
                ));
            }
        }
        remarks
    }
}

impl AgentPlace {
    fn new(agent: &str, netns: Option<&Netns>) -> Step<Self> {
        if agent == "local" {
            return Ok(Self::Local);
        }
        let address = resolve(agent)?;
        // Try the packets' namespace first, then the namespace of this process.
        let mut control = Self::Remote(address, netns.cloned());
        if netns.is_some() && control.agent().is_err() {
            control = Self::Remote(address, None);
        }
        control.agent()?;
        Ok(control)
    }

    fn agent(&self) -> Step<Box<dyn Agent>> {
        let Self::Remote(address, netns) = self else { return Ok(Box::new(Verbs::kernel())) };
        let connect = || RemoteAgent::connect(*address, PATIENCE);
        let agent = match netns {
            Some(netns) => netns.run(connect).map_err(|error| error.to_string())?,
            None => connect(),
        };
        Ok(Box::new(agent.map_err(|error| error.to_string())?))
    }

    fn place(&self) -> String {
        match self {
            Self::Local => "this machine".into(),
            Self::Remote(address, _) => format!("the machine of the agent {address}"),
        }
    }
}

/// `HOST`, `HOST:PORT`, an address, or `[ADDRESS]:PORT`.
fn resolve(agent: &str) -> Step<SocketAddr> {
    let bare = agent.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, PORT));
    }
    let with_port = if agent.contains(':') { agent.to_owned() } else { format!("{agent}:{PORT}") };
    let found = with_port.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.ok_or_else(|| format!("--agent {agent}: `local`, a host, or HOST:PORT"))
}

/// The device's addresses in use: those asked for, else the first of each family.
fn addresses_of(device: &Device, wanted: &[IpAddr]) -> Step<Vec<IpAddr>> {
    let all: Vec<IpAddr> = device.gids.iter().map(|(_, address)| *address).collect();
    if let Some(missing) = wanted.iter().find(|address| !all.contains(address)) {
        let (name, all) = (&device.name, list(&all));
        return Err(format!("{name} has not the RoCE v2 address {missing}: it has {all}"));
    }
    let each = [false, true].map(|ipv6| {
        let wanted = wanted.iter().find(|address| address.is_ipv6() == ipv6).copied();
        wanted.or_else(|| device.address(ipv6))
    });
    Ok(each.into_iter().flatten().collect())
}

impl Software {
    /// Our side. The inner error says why there is none, although the arguments are valid.
    fn new(args: &Args, netns: Option<Netns>, control: &AgentPlace) -> Step<Result<Self, String>> {
        if matches!(control, AgentPlace::Local) && netns.is_none() {
            return Ok(Err("the device is in our own namespace, where packets between two own addresses never leave: give our side \
                           another one by --netns"
                .into()));
        }
        let interfaces = inside(netns.as_ref(), Interface::all)?.map_err(|e| e.to_string())?;
        let has = |interface: &Interface, address: &IpAddr| {
            interface.addresses.iter().any(|(own, _)| own == address)
        };
        let found = interfaces.iter().find(|i| args.ours.iter().all(|address| has(i, address)));
        let interface = found.cloned().ok_or_else(|| {
            let each = |i: &Interface| {
                let own: Vec<IpAddr> = i.addresses.iter().map(|(address, _)| *address).collect();
                format!("{} has {}", i.name, list(&own))
            };
            let all: Vec<String> = interfaces.iter().map(each).collect();
            format!(
                "--ours: no interface has {}: {}; --netns NAME if it is in another namespace",
                list(&args.ours),
                all.join(", ")
            )
        })?;
        let addresses = own_addresses(&interface, &args.ours);
        let mut opened = Vec::new();
        for backend in BACKENDS.into_iter().filter(|backend| args.takes(*backend)) {
            for address in &addresses {
                let context = || {
                    OpenOptions::new().netdev(backend).open(*address).map(|ctx| ctx.query_device())
                };
                let found = inside(netns.as_ref(), context)?;
                let found = found.map(|attr| attr.active_mtu.bytes());
                let found = found.map_err(|error| format!("{backend} cannot be opened: {error}"));
                opened.push((backend, address.is_ipv6(), found));
            }
        }
        let losses = place_of_losses(netns.as_ref(), &interface);
        Ok(Ok(Self { netns, interface, addresses, opened, losses }))
    }
}

/// The addresses asked for, and the first address of the other family.
fn own_addresses(interface: &Interface, wanted: &[IpAddr]) -> Vec<IpAddr> {
    let each = [false, true].map(|ipv6| {
        let fits = |address: &&IpAddr| match address {
            IpAddr::V4(_) => !ipv6,
            IpAddr::V6(v6) => ipv6 && !v6.is_unicast_link_local(),
        };
        let given = wanted.iter().find(|address| address.is_ipv6() == ipv6);
        given.or_else(|| interface.addresses.iter().map(|(address, _)| address).find(fits)).copied()
    });
    each.into_iter().flatten().collect()
}

/// The other end of our veth, if it is in the present namespace: each backend's packets pass there.
/// Else our own interface.
fn place_of_losses(netns: Option<&Netns>, own: &Interface) -> LossPlace {
    let beyond = netns.and_then(|netns| {
        let links = |netns: Option<&Netns>| {
            let mut command = Command::new("ip");
            command.args(["-j", "-d", "link", "show", "type", "veth"]);
            let output = match netns {
                Some(netns) => netns.output(&mut command).ok()?,
                None => command.output().ok()?,
            };
            serde_json::from_slice::<Vec<serde_json::Value>>(&output.stdout).ok()
        };
        let (there, here) = (links(Some(netns))?, links(None)?);
        let peer =
            there.iter().find(|link| link["ifindex"] == own.index)?["link_index"].as_u64()?;
        let other = here.iter().find(|link| link["ifindex"] == peer)?;
        (other["link_index"] == own.index).then(|| other["ifname"].as_str().map(str::to_owned))?
    });
    match beyond {
        Some(interface) => LossPlace { netns: None, interface, beyond: true },
        None => LossPlace { netns: netns.cloned(), interface: own.name.clone(), beyond: false },
    }
}

/// Installs this program as `rocinante`, and the libraries that cargo built beside it.
fn install() -> Result<Installation, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let beside = own.parent().unwrap_or(Path::new("."));
    let built = [beside.join("deps"), beside.to_owned()].into_iter();
    let installed = built.map(|built| Installation::of(&own, &built)).reduce(Result::or);
    installed.expect("there are two places").map_err(|error| {
        format!("{error}: `cargo build --release -p rocinante-capi -p rocinante-paths`")
    })
}

fn open_netns(name: &str) -> Step<Netns> {
    let path = match name.contains('/') {
        true => PathBuf::from(name),
        false => Path::new("/run/netns").join(name),
    };
    Netns::open(&path).map_err(|error| {
        format!("--netns {name}: {error}: a name that `ip netns` lists, or a path such as /proc/PID/ns/net; root may enter it")
    })
}

fn inside<T: Send>(netns: Option<&Netns>, work: impl FnOnce() -> T + Send) -> Step<T> {
    match netns {
        Some(netns) => netns.run(work).map_err(|error| error.to_string()),
        None => Ok(work()),
    }
}

/// Addresses, separated by commas.
pub(super) fn list(addresses: &[IpAddr]) -> String {
    let words: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    if words.is_empty() { "no address".into() } else { words.join(", ") }
}
