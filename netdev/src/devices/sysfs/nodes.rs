//! The files of a device: Documentation/ABI/stable/sysfs-class-infiniband of Linux, and
//! drivers/infiniband/core/{sysfs,uverbs_main}.c.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use super::counts::Counts;
use crate::devices::interfaces::gid_table_len;
use crate::devices::names::NamedInterface;
use crate::kernel::interface::Interface;

/// A file of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    /// A line of text.
    Text(String),
    Link(String),
    /// A counter, which keeps its value.
    Count,
    /// A directory, which may be empty.
    Directory,
}

/// The files by their paths, which are relative.
pub(super) type Nodes = BTreeMap<PathBuf, Node>;

/// `counters`, in the kernel's order (`port_cap_flags` of an InfiniBand port).
const COUNTERS: [&str; 21] = [
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_discards",
    "port_xmit_constraint_errors",
    "port_rcv_constraint_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
    "port_xmit_data",
    "port_rcv_data",
    "port_xmit_packets",
    "port_rcv_packets",
    "port_xmit_wait",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
];
/// `hw_counters`: the names of Soft-RoCE, then those of mlx5 and EFA for values that it does not
/// count.
const HW_COUNTERS: [&str; 21] = [
    "sent_pkts",
    "rcvd_pkts",
    "duplicate_request",
    "out_of_seq_request",
    "rcvd_rnr_err",
    "send_rnr_err",
    "rcvd_seq_err",
    "ack_deferred",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "send_err",
    "link_downed",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "packet_seq_err",
    "np_cnp_sent",
    "rp_cnp_handled",
    "np_ecn_marked_roce_packets",
    "resp_remote_access_errors",
    "rx_icrc_encapsulated",
    "retrans_pkts",
];

/// The counters by their paths below a port.
fn counter_files() -> impl Iterator<Item = String> {
    let counters = COUNTERS.iter().map(|name| format!("counters/{name}"));
    counters.chain(HW_COUNTERS.iter().map(|name| format!("hw_counters/{name}")))
}

/// A tree's facts about a device, without its counters.
#[derive(Debug, serde::Serialize)]
pub(super) struct Facts<'a> {
    device: &'a NamedInterface,
    rate: String,
    numa: String,
    cpus: String,
    /// The device of the bus that the interface belongs to, below /sys/devices.
    parent: Option<String>,
}

impl<'a> Facts<'a> {
    pub(super) fn of(device: &'a NamedInterface) -> Self {
        let netdev = netdev_of(&device.interface);
        let netdev = netdev.as_deref().unwrap_or(Path::new("/nowhere")).join("device");
        let read = |file: &str| fs::read_to_string(netdev.join(file)).ok();
        let word = |file: &str, else_: &str| {
            read(file).map_or_else(|| else_.to_owned(), |text| text.trim().to_owned())
        };
        let parent = netdev.canonicalize().ok().and_then(|path| {
            let parent = path.strip_prefix("/sys/devices").ok()?;
            Some(parent.to_str()?.to_owned())
        });
        Self {
            device,
            rate: device.interface.rate(),
            numa: word("numa_node", "-1"),
            cpus: word("local_cpulist", ""),
            parent,
        }
    }

    /// Adds the device's files.
    pub(super) fn add(&self, nodes: &mut Nodes) {
        let NamedInterface { name, number, interface, .. } = self.device;
        let parent = parent_of(self.device);
        let mut add = |path: String, node| drop(nodes.insert(path.into(), node));
        let class = |class: &str, of: &str| {
            let path = format!("sys/class/{class}/{of}");
            (path, Node::Link(format!("../../devices/rocinante/{name}/{class}/{of}")))
        };
        let (path, link) = class("infiniband", name);
        add(path, link);
        let uverbs = format!("uverbs{number}");
        let (path, link) = class("infiniband_verbs", &uverbs);
        add(path, link);
        // A character device, because UCX asks for one. Nothing is ever read from it.
        add(format!("dev/infiniband/{uverbs}"), Node::Link("/dev/null".to_owned()));

        add(format!("{parent}/uevent"), Node::Text("DRIVER=rocinante".to_owned()));
        add(format!("{parent}/numa_node"), Node::Text(self.numa.clone()));
        if !self.cpus.is_empty() {
            add(format!("{parent}/local_cpulist"), Node::Text(self.cpus.clone()));
        }
        let netdev = format!("/sys/class/net/{}", interface.name);
        add(format!("{parent}/net/{}", interface.name), Node::Link(netdev));

        let up = match &self.parent {
            Some(parent) => format!("../../../../{parent}"),
            None => format!("../../../{name}"),
        };
        for (path, class) in [
            (format!("{parent}/infiniband/{name}"), "infiniband"),
            (format!("{parent}/infiniband_verbs/{uverbs}"), "infiniband_verbs"),
        ] {
            add(format!("{path}/device"), Node::Link(up.clone()));
            let subsystem = format!("../../../../../class/{class}");
            add(format!("{path}/subsystem"), Node::Link(subsystem));
        }
        let own = format!("{parent}/infiniband_verbs/{uverbs}");
        let minor = 192 + number;
        for (file, text) in [
            ("ibdev", name.clone()),
            ("abi_version", "1".to_owned()),
            ("dev", format!("231:{minor}")),
            ("uevent", format!("MAJOR=231\nMINOR={minor}\nDEVNAME=infiniband/{uverbs}")),
        ] {
            add(format!("{own}/{file}"), Node::Text(text));
        }
        self.add_device(&format!("{parent}/infiniband/{name}"), &mut add);
    }

    fn add_device(&self, ib: &str, add: &mut impl FnMut(String, Node)) {
        let NamedInterface { name, interface, gids, .. } = self.device;
        let guid = guid_text(interface.guid());
        for (file, text) in [
            ("node_type", "1: CA"),
            ("node_guid", &guid),
            ("sys_image_guid", &guid),
            ("node_desc", "rocinante"),
            ("fw_ver", env!("CARGO_PKG_VERSION")),
            ("hca_type", "Rocinante"),
            ("hw_rev", "0x0"),
            ("board_id", "rocinante"),
            ("uevent", &format!("NAME={name}")),
        ] {
            add(format!("{ib}/{file}"), Node::Text(text.to_owned()));
        }
        let port = format!("{ib}/ports/1");
        let (state, physical) =
            if interface.up { ("4: ACTIVE", "5: LinkUp") } else { ("1: DOWN", "3: Disabled") };
        for (file, text) in [
            ("state", state),
            ("phys_state", physical),
            ("link_layer", "Ethernet"),
            ("rate", &self.rate),
            ("lid", "0x0"),
            ("lid_mask_count", "0"),
            ("sm_lid", "0x0"),
            ("sm_sl", "0"),
            ("cap_mask", &format!("{:#010x}", Interface::PORT_CAPABILITIES)),
            ("pkeys/0", "0xffff"),
            // How long a value is kept, in ms.
            ("hw_counters/lifespan", "0"),
        ] {
            add(format!("{port}/{file}"), Node::Text(text.to_owned()));
        }
        for index in 0..gid_table_len(gids.len()) {
            let gid = gids.get(index).copied().flatten();
            add(format!("{port}/gids/{index}"), Node::Text(gid_text(gid)));
            if gid.is_some() {
                let attributes = format!("{port}/gid_attrs");
                add(format!("{attributes}/types/{index}"), Node::Text("RoCE v2".to_owned()));
                add(format!("{attributes}/ndevs/{index}"), Node::Text(interface.name.clone()));
            }
        }
        counter_files().for_each(|file| add(format!("{port}/{file}"), Node::Count));
    }
}

/// What there is without a device.
pub(super) fn common() -> Nodes {
    let text = |path: &str, text: &str| (path.into(), Node::Text(text.to_owned()));
    let directory = |path: &str| (path.into(), Node::Directory);
    Nodes::from([
        directory("sys/class/infiniband"),
        directory("sys/class/infiniband_verbs"),
        directory("sys/class/infiniband_mad"),
        directory("sys/devices/rocinante"),
        directory("dev/infiniband"),
        text("sys/class/infiniband_verbs/abi_version", "6"),
        // Of the files that libibumad opens to see whether there are devices.
        text("sys/class/infiniband_mad/abi_version", "5"),
    ])
}

/// The directory between /sys/devices and the classes of a device. It has the device's name,
/// because that stays while the interface is renamed.
fn parent_of(device: &NamedInterface) -> String {
    format!("sys/devices/rocinante/{}", device.name)
}

/// Where the device's counters are.
pub(super) fn port_of(device: &NamedInterface) -> PathBuf {
    format!("{}/infiniband/{}/ports/1", parent_of(device), device.name).into()
}

/// The interface in sysfs, which may be mounted for another network namespace, with interfaces of
/// the same names.
fn netdev_of(interface: &Interface) -> Option<PathBuf> {
    let netdev = Path::new("/sys/class/net").join(&interface.name);
    let word = |file: &str| fs::read_to_string(netdev.join(file)).unwrap_or_default();
    let mac = interface.mac.map(|byte| format!("{byte:02x}")).join(":");
    let is_it = word("ifindex").trim() == interface.index.to_string();
    (is_it && word("address").trim() == mac).then_some(netdev)
}

/// How often the link went down: the kernel counts that of the interface.
pub(super) fn count_downs(interface: &Interface, counts: &mut Counts) {
    let Some(netdev) = netdev_of(interface) else { return };
    let read = fs::read_to_string(netdev.join("carrier_down_count")).ok();
    let read = read.and_then(|text| text.trim().parse().ok());
    if let Some(downs) = read {
        for name in ["counters/link_downed", "hw_counters/link_downed"] {
            counts.insert(name.to_owned(), downs);
        }
    }
}

/// A GUID as sysfs writes it: four groups of four digits.
fn guid_text(guid: u64) -> String {
    let words = [48, 32, 16, 0].map(|shift| format!("{:04x}", guid >> shift & 0xffff));
    words.join(":")
}

/// A GID as sysfs writes it: eight groups of four digits.
fn gid_text(gid: Option<IpAddr>) -> String {
    let gid = match gid {
        Some(IpAddr::V4(address)) => address.to_ipv6_mapped(),
        Some(IpAddr::V6(address)) => address,
        None => Ipv6Addr::UNSPECIFIED,
    };
    gid.segments().map(|word| format!("{word:04x}")).join(":")
}
