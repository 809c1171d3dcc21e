//! An agent's description of its machine and of one device, for reports, and to know what to expect
//! of the device.

use std::fs;
use std::net::IpAddr;
use std::process::{Command, Stdio};

use rocinante::device::{Atomics, HardwareDevice, hardware_devices};
use rocinante::{Context, OpenOptions};
use rocinante_cli::devices::is_soft_roce;
use serde::{Deserialize, Serialize};

/// The kind of a device. Scenarios expect the behaviour of the specification, except for known
/// departures of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Rocinante's software device.
    Rocinante,
    /// Linux Soft-RoCE, with its known departures.
    SoftRoce,
    /// Any other device of the kernel; scenarios expect the behaviour of the specification.
    Device,
}

/// A machine with an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its host name.
    pub name: String,
    /// The kernel's release.
    pub kernel: String,
    /// The distribution.
    pub system: String,
    /// The processor.
    pub processor: String,
    /// Programs and libraries with their versions.
    pub versions: Vec<(String, String)>,
    /// The device that was asked for, if any.
    pub device: Option<Device>,
}

/// An RDMA device of the kernel, and the port in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name, without a port.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// The kernel's module.
    pub driver: String,
    /// The device's part, as driver and bus name it.
    pub part: String,
    /// Version of its firmware.
    pub firmware: String,
    /// The node's GUID, in hexadecimal digits.
    pub node_guid: String,
    /// The port.
    pub port: u8,
    /// State, link layer and rate of the port.
    pub link: String,
    /// The network interface behind it, and its MTU.
    pub interface: Option<(String, u32)>,
    /// The largest path MTU that fits the link, and the largest that the port supports.
    pub mtus: (u32, u32),
    /// READs and atomics that a queue pair may have outstanding.
    pub max_rd_atomic: u32,
    /// Scatter-gather elements of a request.
    pub max_sge: u32,
    /// The scope of its atomics.
    pub atomics: String,
    /// Its RoCE v2 addresses with their indices.
    pub gids: Vec<(u8, IpAddr)>,
}

impl Kind {
    /// The kind of an RDMA device of the kernel; a port may be named behind a colon.
    #[must_use]
    pub fn of(device: &str) -> Self {
        if is_soft_roce(device) { Self::SoftRoce } else { Self::Device }
    }
}

/// Where the kernel shows its RDMA devices.
const CLASS: &str = "/sys/class/infiniband";

impl Machine {
    /// This machine, without a device.
    #[must_use]
    pub fn present() -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let after = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            let value = line.and_then(|line| line.split_once(['=', ':']));
            value.map_or_else(String::new, |(_, value)| value.trim().trim_matches('"').to_owned())
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            name: line("/proc/sys/kernel/hostname"),
            kernel: line("/proc/sys/kernel/osrelease"),
            system: after(&system, "PRETTY_NAME="),
            processor: format!("{} × {cores}", after(&cpu, "model name")),
            versions: vec![],
            device: None,
        }
    }

    /// This machine with a device, which must have `address` if one is given. Error: the device
    /// cannot be opened. The text names the devices that there are, and says what to do.
    pub fn with_device(name: &str, address: Option<IpAddr>) -> Result<Self, String> {
        let opened = match address {
            Some(address) => OpenOptions::new().device(name).open(address),
            None => Context::open_device(name),
        };
        let ctx = opened.map_err(|error| error.to_string())?;
        let all = hardware_devices();
        let device = all.iter().find(|device| device.name == bare(ctx.name()));
        let device = device.ok_or_else(|| format!("{name} is no RDMA device of the kernel"))?;
        let device = Device::look(&ctx, device)?;
        Ok(Self { device: Some(device), versions: versions(), ..Self::present() })
    }
}

impl Device {
    fn look(ctx: &Context, shown: &HardwareDevice) -> Result<Self, String> {
        let attr = ctx.query_device();
        let hardware = attr.hardware.ok_or("a device without hardware")?;
        let name = shown.name.clone();
        let port = shown.ports.iter().find(|port| port.number == hardware.port);
        let port = port.ok_or("the port has vanished")?;
        let folder = format!("{CLASS}/{name}");
        let rate = line(&format!("{folder}/ports/{}/rate", port.number));
        let interface = port.gids.iter().find_map(|gid| gid.interface.clone());
        let mtu = |name: &String| line(&format!("/sys/class/net/{name}/mtu")).parse().unwrap_or(0);
        let driver = fs::read_link(format!("{folder}/device/driver")).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
        let kind = Kind::of(&name);
        let driver = driver.unwrap_or_else(|| match kind {
            Kind::SoftRoce => "rdma_rxe".into(),
            _ => "unknown".into(),
        });
        let (hca, board) =
            (line(&format!("{folder}/hca_type")), line(&format!("{folder}/board_id")));
        let (vendor, part) = (hardware.vendor_id, hardware.vendor_part_id);
        let guid = hardware.node_guid;
        Ok(Self {
            kind,
            driver,
            part: format!("{hca} {board} vendor {vendor:#06x} part {part}").trim().to_owned(),
            firmware: hardware.firmware,
            node_guid: format!("{guid:016x}"),
            port: port.number,
            link: format!("{}, {}, {rate}", port.state, port.link_layer),
            interface: interface.map(|name| (name.clone(), mtu(&name))),
            mtus: (attr.active_mtu.bytes(), hardware.max_mtu.bytes()),
            max_rd_atomic: attr.limits.max_qp_rd_atom,
            max_sge: attr.limits.max_sge,
            atomics: match hardware.atomics {
                Atomics::None => "none",
                Atomics::Device => "among the device's",
                Atomics::Global => "with the processor's, too",
            }
            .into(),
            gids: port.gids.iter().map(|gid| (gid.index, gid.address)).collect(),
            name,
        })
    }

    /// The first address of a family. Link-local addresses are left out: another machine needs a
    /// link to use them.
    #[must_use]
    pub fn address(&self, ipv6: bool) -> Option<IpAddr> {
        let usable = |address: &IpAddr| match address {
            IpAddr::V4(_) => !ipv6,
            IpAddr::V6(v6) => ipv6 && !v6.is_unicast_link_local(),
        };
        self.gids.iter().map(|(_, address)| *address).find(usable)
    }
}

/// The name without a port.
fn bare(device: &str) -> &str {
    device.split(':').next().unwrap_or(device)
}

/// The first line of a file of the kernel's.
fn line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

/// The versions of this machine's user-space RDMA libraries and programs.
fn versions() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    if let Some(path) = maps
        .lines()
        .find_map(|line| line.split_whitespace().nth(5).filter(|p| p.contains("libibverbs.so")))
    {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        let file = real.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.push(("libibverbs".to_owned(), file));
    }
    let packages: [(&str, &str, &[&str]); 3] = [
        ("rdma-core", "dpkg-query", &["-W", "-f", "${Version}", "libibverbs1"]),
        ("rdma-core", "rpm", &["-q", "libibverbs"]),
        ("perftest", "ib_write_bw", &["--version"]),
    ];
    for (name, program, args) in packages {
        let output = Command::new(program).args(args).stdin(Stdio::null()).output();
        // perftest prints its version with the exit code of a failure.
        let said = output.ok().filter(|output| output.status.success() || name == "perftest");
        let said = said.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        if let Some(version) = said.filter(|said| !said.is_empty()) {
            found.push((name.to_owned(), version.trim_start_matches("Version: ").to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_no_part_of_a_devices_name() {
        assert_eq!((bare("mlx5_0:2"), bare("rxe0")), ("mlx5_0", "rxe0"));
    }

    #[test]
    fn what_is_not_known_to_be_soft_roce_is_held_to_the_specification() {
        assert_eq!(Kind::of("no-such-device"), Kind::Device);
    }
}
