//! `rocinante devices`: lists the devices that can be opened, one a line as `rdma link` does, or
//! all about each as `ibv_devinfo -v` does.

pub(crate) mod columns;
pub mod hardware;
pub mod kernel;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::process::ExitCode;

use rocinante::device::{
    Backend, Capabilities, FAULT_VARIABLE, Interface, Limits, NETDEV_VARIABLE, PortConfig,
    hardware_devices,
};
use rocinante::verbs::Mtu;
use rocinante::{OpenOptions, VerbsError};
use rocinante_netdev::auto;
use rocinante_netdev::handed::Agent;
use serde::{Serialize, Serializer};

use crate::ending;
use crate::output::{Failure, Output, Result};
use crate::session::{faults_of, no_device};
use columns::Columns;
use hardware::Hardware;
use kernel::KernelCounters;

/// Show the devices: every interface that can carry RoCEv2, with its addresses, limits, and the
/// backend that would carry it; and the kernel's own RDMA devices, which --device takes by their
/// names
///
/// A line names device and port, state, backend, interface, path MTU, and the addresses of the GID
/// table.
///
/// To find out, each device is opened for a moment, except with AF_XDP, which attaches a program to
/// the interface.
///
/// Exit status: 0 if there is a device, 1 if there is none, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only the device of this name
    name: Option<String>,
    /// Print all that is known of each device
    #[arg(short, long)]
    verbose: bool,
    /// Print the names alone
    #[arg(short, long, conflicts_with_all = ["verbose", "counters", "json"])]
    list: bool,
    /// Print the kernel's counters: interfaces, UDP sockets, and the sockets on UDP/4791
    #[arg(long)]
    counters: bool,
    /// End standard output with one JSON object on one line; all else goes to standard error
    #[arg(long)]
    json: bool,
}

/// Whether an RDMA device of the kernel is Soft-RoCE (`rdma_rxe`). `device` may name a port after a
/// colon.
#[must_use]
pub fn is_soft_roce(device: &str) -> bool {
    let name = device.split(':').next().unwrap_or(device);
    let path = Path::new("/sys/class/infiniband").join(name);
    // Soft-RoCE is on no bus, and names the interface that it uses.
    !path.join("device").exists() && path.join("parent").exists()
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    devices: Vec<Device>,
    hardware: Vec<Hardware>,
    unusable: Vec<Unusable>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counters: Option<KernelCounters>,
}

/// The services of queue pairs. Soft-RoCE and cards have them, too; they may have others.
const SERVICES: [&str; 3] = ["RC", "UC", "UD"];

/// An interface that can carry RoCEv2.
#[derive(Debug, Serialize)]
struct Device {
    name: String,
    services: [&'static str; 3],
    fw_ver: &'static str,
    /// The EUI-64 of the interface's MAC, as Soft-RoCE makes it.
    node_guid: String,
    link_layer: &'static str,
    state: &'static str,
    mac: String,
    link_mtu: u32,
    max_path_mtu: u32,
    active_path_mtu: u32,
    gids: Vec<GidEntry>,
    /// The backend that would carry it, if there is one.
    netdev: Option<&'static str>,
    /// The reason for this backend, or for none.
    reason: String,
    capabilities: Option<PortCapabilities>,
    limits: DeviceLimits,
}

/// An entry of the GID table.
#[derive(Debug, Serialize)]
struct GidEntry {
    index: usize,
    gid: Ipv6Addr,
    address: IpAddr,
    prefix_len: u8,
}

/// The capabilities of a port.
#[derive(Debug, Serialize)]
struct PortCapabilities {
    segments_max: u16,
    run_bytes_max: u32,
    ip_id_exact: bool,
    tos_on_send: bool,
    tos_on_receive: bool,
    rx_budget_bytes: u32,
    rx_budget_datagrams: u32,
    copies_because: Option<String>,
}

/// The limits of a device, by their names in verbs.h; `None` if the device does not say.
#[derive(Debug)]
struct DeviceLimits([(&'static str, Option<u32>); 12]);

/// An interface that cannot carry RoCEv2.
#[derive(Debug, Serialize)]
struct Unusable {
    name: String,
    why: String,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    ending::begin("rocinante devices", out, false);
    let result = report(args);
    if let Ok(report) = &result {
        report.print(args, out);
    }
    out.end("rocinante devices", &result)
}

fn report(args: &Args) -> Result<Report> {
    let mut known = hardware_devices();
    known.retain(|device| args.name.as_ref().is_none_or(|name| *name == device.name));
    let interfaces = match &args.name {
        Some(name) => Interface::by_name(name).map(|interface| vec![interface]),
        None => Interface::all(),
    };
    let interfaces = match interfaces {
        Ok(interfaces) => interfaces,
        Err(_) if !known.is_empty() => Vec::new(),
        Err(error) => return Err(no_device(VerbsError::from(error))),
    };
    let hardware = known.iter().map(|device| Hardware::examine(device, !args.list));
    let hardware: Vec<Hardware> = hardware.collect();
    let (mut devices, mut unusable) = (Vec::new(), Vec::new());
    for interface in &interfaces {
        match Device::examine(interface, !args.list) {
            Ok(device) => devices.push(device),
            Err(why) => unusable.push(Unusable { name: interface.name.clone(), why }),
        }
    }
    if devices.is_empty() && hardware.is_empty() {
        let why: Vec<String> = unusable.iter().map(|u| format!("{}: {}", u.name, u.why)).collect();
        return Err(no_device(Failure::Failed(format!(
            "no interface can carry RoCEv2: {}: bring one up with `ip link set NAME up` and `ip address add …`",
            why.join("; ")
        ))));
    }
    let counters = args.counters.then(|| KernelCounters::read(&interfaces));
    Ok(Report { devices, hardware, unusable, counters })
}

impl Device {
    /// Describes an interface, or says why it is no device. Opens it if `open`.
    fn examine(interface: &Interface, open: bool) -> Result<Self, String> {
        if interface.addresses.is_empty() {
            return Err("it has no address".to_owned());
        }
        let active = Mtu::for_link(interface.mtu)
            .ok_or_else(|| format!("its MTU is {}, and RoCEv2 needs 336", interface.mtu))?;
        if !interface.up {
            return Err("it is down, or has no carrier".to_owned());
        }
        let (netdev, reason, capabilities) = if open {
            backend(interface, &std::env::var(NETDEV_VARIABLE).unwrap_or_default())
        } else {
            (None, String::new(), None)
        };
        let gids = interface.addresses.iter().enumerate();
        Ok(Self {
            name: interface.name.clone(),
            services: SERVICES,
            fw_ver: env!("CARGO_PKG_VERSION"),
            node_guid: guid_text(interface.guid()),
            link_layer: "Ethernet",
            state: "PORT_ACTIVE",
            mac: interface.mac.map(|byte| format!("{byte:02x}")).join(":"),
            link_mtu: interface.mtu,
            max_path_mtu: 4096,
            active_path_mtu: active.bytes(),
            gids: gids
                .map(|(index, &(address, prefix_len))| GidEntry {
                    index,
                    gid: gid(address),
                    address,
                    prefix_len,
                })
                .collect(),
            netdev: netdev.map(Backend::name),
            reason,
            capabilities: capabilities.as_ref().map(PortCapabilities::from),
            limits: DeviceLimits::from(&Limits::default()),
        })
    }
}

/// The backend that a program without a choice of its own would get if [`NETDEV_VARIABLE`] is
/// `word`, with the reason; or the reason why it would get none.
pub(crate) fn backend(
    interface: &Interface,
    word: &str,
) -> (Option<Backend>, String, Option<Capabilities>) {
    if !word.is_empty() && word != "auto" {
        return requested(interface, word);
    }
    preview(interface, None)
}

fn preview(
    interface: &Interface,
    want: Option<Backend>,
) -> (Option<Backend>, String, Option<Capabilities>) {
    let addresses: Vec<IpAddr> = interface.addresses.iter().map(|(address, _)| *address).collect();
    let agent = match Agent::from_environment() {
        Ok(agent) => agent,
        Err(why) => return (None, why, None),
    };
    match auto::preview(interface, &addresses, want, &PortConfig::default(), &agent) {
        Ok((capabilities, choice)) => (Some(choice.backend), choice.reason, capabilities),
        Err(error) => (None, error.to_string(), None),
    }
}

fn requested(interface: &Interface, word: &str) -> (Option<Backend>, String, Option<Capabilities>) {
    let backend = match word.parse() {
        Ok(backend) => backend,
        Err(why) => return (None, format!("{NETDEV_VARIABLE}: {why}"), None),
    };
    let asked = format!("asked for by {NETDEV_VARIABLE}");
    if backend == Backend::Xdp {
        return match preview(interface, Some(backend)) {
            (Some(Backend::Xdp), ..) => (Some(backend), asked, None),
            other => other,
        };
    }
    let opened = OpenOptions::new().netdev(backend).background(false);
    match opened.open_interface(&interface.name) {
        Ok(ctx) => (Some(backend), asked, ctx.query_device().port),
        Err(error) => (None, error.to_string(), None),
    }
}

/// A GUID as `ibv_devinfo` prints it: `0200:00ff:fe00:0009`.
pub(crate) fn guid_text(guid: u64) -> String {
    let words = guid.to_be_bytes();
    let words = words.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1]));
    words.collect::<Vec<_>>().join(":")
}

/// A path MTU in bytes, with its code in brackets: `4096 (5)`.
fn mtu_text(bytes: u32) -> String {
    let code = Mtu::from_bytes(bytes).map_or(0, Mtu::code);
    format!("{bytes} ({code})")
}

fn gid(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

impl From<&Capabilities> for PortCapabilities {
    fn from(port: &Capabilities) -> Self {
        Self {
            segments_max: port.segments_max,
            run_bytes_max: port.run_bytes_max,
            ip_id_exact: port.ip_id_exact,
            tos_on_send: port.tos_on_send,
            tos_on_receive: port.tos_on_receive,
            rx_budget_bytes: port.rx_budget.bytes,
            rx_budget_datagrams: port.rx_budget.datagrams,
            copies_because: port.copies_because.clone(),
        }
    }
}

impl From<&Limits> for DeviceLimits {
    fn from(limits: &Limits) -> Self {
        Self([
            ("max_qp", Some(limits.max_qp)),
            ("max_qp_wr", Some(limits.max_qp_wr)),
            ("max_sge", Some(limits.max_sge)),
            ("max_inline_data", Some(limits.max_inline_data).filter(|bytes| *bytes != u32::MAX)),
            ("max_qp_rd_atom", Some(limits.max_qp_rd_atom)),
            ("max_srq", Some(limits.max_srq)),
            ("max_srq_wr", Some(limits.max_srq_wr)),
            ("max_srq_sge", Some(limits.max_srq_sge)),
            ("max_cq", Some(limits.max_cq)),
            ("max_cqe", Some(limits.max_cqe)),
            ("max_mr", Some(limits.max_mr)),
            ("max_mw", Some(limits.max_mw)),
        ])
    }
}

impl Serialize for DeviceLimits {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0)
    }
}

impl DeviceLimits {
    /// Writes one row per limit.
    fn rows(&self, row: &mut impl FnMut(&str, &dyn fmt::Display) -> fmt::Result) -> fmt::Result {
        self.0.iter().try_for_each(|(name, limit)| match limit {
            Some(limit) => row(&format!("{name}:"), limit),
            None => row(&format!("{name}:"), &"the device does not say"),
        })
    }
}

impl Report {
    fn print(&self, args: &Args, out: Output) {
        if args.list {
            let names = self.devices.iter().map(|device| &device.name);
            names.chain(self.hardware.iter().map(|device| &device.name)).for_each(|name| {
                out.line(name);
            });
            return;
        }
        if let Some(words) = faults_of(None) {
            // Programs with the same environment have them.
            out.note(format_args!("{FAULT_VARIABLE}={words}: faults are on"));
        }
        if args.verbose {
            self.devices.iter().for_each(|device| out.line(device));
            self.hardware.iter().for_each(|device| out.line(device));
        } else {
            let mut lines = Columns::of_text();
            self.devices.iter().for_each(|device| lines.push(device.cells()));
            self.hardware.iter().flat_map(Hardware::cells).for_each(|cells| lines.push(cells));
            out.line(lines);
        }
        for Unusable { name, why } in &self.unusable {
            out.note(format_args!("{name} is no device: {why}"));
        }
        if let Some(counters) = &self.counters {
            out.line(counters);
        }
    }
}

/// The cells of a line, from the state on.
fn cells<'a>(
    place: String,
    state: &str,
    backend: &str,
    netdev: &str,
    mtu: Option<u32>,
    gids: impl Iterator<Item = &'a IpAddr>,
    problem: Option<&str>,
) -> Vec<String> {
    let gids: Vec<String> = gids.map(ToString::to_string).collect();
    let gids = if gids.is_empty() { "none".to_owned() } else { gids.join(",") };
    let problem = problem.map_or(String::new(), |why| format!(" unusable: {why}"));
    vec![
        place,
        format!("state {state}"),
        format!("backend {backend}"),
        format!("netdev {netdev}"),
        mtu.map_or_else(|| "mtu unknown".to_owned(), |mtu| format!("mtu {mtu}")),
        format!("gid {gids}{problem}"),
    ]
}

impl Device {
    fn cells(&self) -> Vec<String> {
        let state = self.state.trim_start_matches("PORT_");
        cells(
            format!("{}/1", self.name),
            state,
            self.netdev.unwrap_or("none"),
            &self.name,
            Some(self.active_path_mtu),
            self.gids.iter().map(|gid| &gid.address),
            self.netdev.is_none().then_some(&self.reason),
        )
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, state, mac, link_mtu, reason, .. } = self;
        writeln!(f, "hca_id: {name}")?;
        let mut row = |key: &str, value: &dyn fmt::Display| writeln!(f, "\t{key:<18}{value}");
        let services = self.services.join(", ");
        row("transport:", &format_args!("RoCE v2 (UDP/4791): {services}; in software"))?;
        row("fw_ver:", &self.fw_ver)?;
        row("node_guid:", &self.node_guid)?;
        row("link_layer:", &self.link_layer)?;
        row("state:", &format_args!("{state} (4)"))?;
        row("mac:", mac)?;
        row("link mtu:", link_mtu)?;
        row("max_mtu:", &mtu_text(self.max_path_mtu))?;
        row("active_mtu:", &mtu_text(self.active_path_mtu))?;
        for GidEntry { index, gid, prefix_len, address } in &self.gids {
            row(&format!("GID[{index}]:"), &format_args!("{gid} ({address}/{prefix_len})"))?;
        }
        row("netdev:", &format_args!("{}: {reason}", self.netdev.unwrap_or("none")))?;
        if let Some(port) = &self.capabilities {
            let (segments, bytes) = (port.segments_max, port.run_bytes_max);
            row("super-packets:", &format_args!("{segments} packets, {bytes} bytes"))?;
            match &port.copies_because {
                None => row("sent in bulk:", &"by reference")?,
                Some(why) => row("sent in bulk:", &format_args!("by copy: {why}"))?,
            }
            let (bytes, datagrams) = (port.rx_budget_bytes, port.rx_budget_datagrams);
            row("receive queue:", &format_args!("{bytes} bytes, {datagrams} packets"))?;
        }
        self.limits.rows(&mut row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface() -> Interface {
        Interface {
            name: "nosuch0".into(),
            index: 99,
            mtu: 1500,
            mac: [2, 0, 0, 0, 0, 9],
            up: true,
            loopback: false,
            addresses: vec![([192, 0, 2, 77].into(), 24)],
        }
    }

    #[test]
    fn what_cannot_be_a_device_says_why() {
        for (spoil, word) in [
            ((|i| i.addresses.clear()) as fn(&mut Interface), "no address"),
            (|i| i.mtu = 300, "336"),
            (|i| i.up = false, "down"),
        ] {
            let mut interface = interface();
            spoil(&mut interface);
            assert!(Device::examine(&interface, true).unwrap_err().contains(word));
        }
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_listed_with_the_reason() {
        // No interface of this machine has that address.
        let device = Device::examine(&interface(), true).unwrap();
        assert_eq!((device.netdev, device.active_path_mtu), (None, 1024));
        let text = device.to_string();
        assert!(
            text.contains("hca_id: nosuch0") && text.contains("netdev:           none: "),
            "{text}"
        );
        for row in [
            "GID[0]:           ::ffff:192.0.2.77 (192.0.2.77/24)",
            "transport:        RoCE v2 (UDP/4791): RC, UC, UD; in software",
            "node_guid:        0000:00ff:fe00:0009",
            "link_layer:       Ethernet",
            "state:            PORT_ACTIVE (4)",
            "max_mtu:          4096 (5)",
            "active_mtu:       1024 (3)",
        ] {
            assert!(text.contains(row), "{row}: {text}");
        }
        let cells = device.cells();
        assert_eq!(
            cells[..5],
            ["nosuch0/1", "state ACTIVE", "backend none", "netdev nosuch0", "mtu 1024"]
        );
        assert!(cells[5].starts_with("gid 192.0.2.77 unusable: "), "{cells:?}");
    }
}
