//! RDMA devices of the kernel, used through libibverbs.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use rocinante::Context;
use rocinante::device::{Atomics, DeviceAttr, HardwareDevice, HardwarePort};
use serde::Serialize;

use super::DeviceLimits;

/// An RDMA device of the kernel.
#[derive(Debug, Serialize)]
pub struct Hardware {
    pub(super) name: String,
    file: Option<String>,
    ports: Vec<Port>,
    /// Its attributes, if it can be opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
    /// The reason why it cannot be used, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct Port {
    number: u8,
    state: String,
    link_layer: String,
    gids: Vec<KernelGid>,
}

#[derive(Debug, Serialize)]
struct KernelGid {
    index: u8,
    gid: Ipv6Addr,
    address: IpAddr,
    interface: Option<String>,
}

/// Attributes that only an open device tells.
#[derive(Debug, Serialize)]
struct Details {
    firmware: String,
    node_guid: String,
    vendor_id: u32,
    vendor_part_id: u32,
    hw_ver: u32,
    atomics: &'static str,
    max_path_mtu: u32,
    active_path_mtu: u32,
    max_msg_sz: u32,
    max_mr_size: u64,
    limits: DeviceLimits,
}

impl Hardware {
    /// Describes a device. Opens it if `open`.
    #[must_use]
    pub fn examine(device: &HardwareDevice, open: bool) -> Self {
        let opened = open.then(|| Context::open_device(&device.name).map(|ctx| ctx.query_device()));
        let (attr, problem) = match opened {
            None => (None, None),
            Some(Ok(attr)) => (Some(attr), None),
            Some(Err(error)) => (None, Some(error.to_string())),
        };
        Self {
            name: device.name.clone(),
            file: device.file.as_ref().map(|file| file.display().to_string()),
            ports: device.ports.iter().map(Port::from).collect(),
            details: attr.as_ref().and_then(Details::of),
            problem,
        }
    }
}

impl From<&HardwarePort> for Port {
    fn from(port: &HardwarePort) -> Self {
        let gids = port.gids.iter().map(|gid| KernelGid {
            index: gid.index,
            gid: super::gid(gid.address),
            address: gid.address,
            interface: gid.interface.clone(),
        });
        Self {
            number: port.number,
            state: port.state.clone(),
            link_layer: port.link_layer.clone(),
            gids: gids.collect(),
        }
    }
}

impl Details {
    fn of(attr: &DeviceAttr) -> Option<Self> {
        let hardware = attr.hardware.as_ref()?;
        Some(Self {
            firmware: hardware.firmware.clone(),
            node_guid: super::guid_text(hardware.node_guid),
            vendor_id: hardware.vendor_id,
            vendor_part_id: hardware.vendor_part_id,
            hw_ver: hardware.hw_ver,
            atomics: match hardware.atomics {
                Atomics::None => "none",
                Atomics::Device => "against others of the device",
                Atomics::Global => "against the processor's, too",
            },
            max_path_mtu: hardware.max_mtu.bytes(),
            active_path_mtu: attr.active_mtu.bytes(),
            max_msg_sz: hardware.max_msg_sz,
            max_mr_size: hardware.max_mr_size,
            limits: DeviceLimits::from(&attr.limits),
        })
    }
}

impl Hardware {
    /// The cells of one line for each port.
    pub(super) fn cells(&self) -> impl Iterator<Item = Vec<String>> {
        self.ports.iter().map(|port| {
            let interface = port.gids.iter().find_map(|gid| gid.interface.as_deref());
            super::cells(
                format!("{}/{}", self.name, port.number),
                &port.state,
                "kernel",
                interface.unwrap_or("none"),
                self.details.as_ref().map(|details| details.active_path_mtu),
                port.gids.iter().map(|gid| &gid.address),
                self.problem.as_deref(),
            )
        })
    }
}

impl fmt::Display for Hardware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "hca_id: {}", self.name)?;
        let mut row = |key: &str, value: &dyn fmt::Display| writeln!(f, "\t{key:<18}{value}");
        let services = super::SERVICES.join(", ");
        row("transport:", &format_args!("{services}; the kernel's RDMA device, by libibverbs"))?;
        row("file:", &self.file.as_deref().unwrap_or("none"))?;
        for Port { number, state, link_layer, gids } in &self.ports {
            row(&format!("port {number}:"), &format_args!("PORT_{state}, {link_layer}"))?;
            for KernelGid { index, gid, address, interface } in gids {
                let interface = interface.as_deref().unwrap_or("no interface");
                row(&format!("GID[{index}]:"), &format_args!("{gid} ({address}, {interface})"))?;
            }
        }
        if let Some(problem) = &self.problem {
            row("cannot be used:", problem)?;
        }
        let Some(details) = &self.details else { return Ok(()) };
        if !details.firmware.is_empty() {
            row("fw_ver:", &details.firmware)?;
        }
        row("node_guid:", &details.node_guid)?;
        row("vendor_id:", &format_args!("0x{:06x}", details.vendor_id))?;
        row("vendor_part_id:", &details.vendor_part_id)?;
        row("hw_ver:", &format_args!("0x{:x}", details.hw_ver))?;
        row("atomics:", &details.atomics)?;
        row("max_mtu:", &super::mtu_text(details.max_path_mtu))?;
        row("active_mtu:", &super::mtu_text(details.active_path_mtu))?;
        row("max_msg_sz:", &details.max_msg_sz)?;
        row("max_mr_size:", &details.max_mr_size)?;
        details.limits.rows(&mut row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocinante::device::HardwareGid;

    #[test]
    fn a_device_that_cannot_be_opened_is_listed_with_the_reason() {
        let gid = HardwareGid {
            index: 3,
            address: [192, 0, 2, 77].into(),
            interface: Some("eth7".to_owned()),
        };
        let port = HardwarePort {
            number: 1,
            state: "ACTIVE".to_owned(),
            link_layer: "Ethernet".to_owned(),
            gids: vec![gid],
        };
        let file = Some("/dev/infiniband/uverbs7".into());
        let device = HardwareDevice { name: "nosuch7".to_owned(), file, ports: vec![port] };
        let examined = Hardware::examine(&device, true);
        let [cells] = &examined.cells().collect::<Vec<_>>()[..] else { panic!("one port") };
        assert_eq!(
            cells[..5],
            ["nosuch7/1", "state ACTIVE", "backend kernel", "netdev eth7", "mtu unknown"]
        );
        assert!(cells[5].starts_with("gid 192.0.2.77 unusable: there is no device"), "{cells:?}");
        let text = examined.to_string();
        for part in [
            "hca_id: nosuch7",
            "file:             /dev/infiniband/uverbs7",
            "port 1:           PORT_ACTIVE, Ethernet",
            "GID[3]:           ::ffff:192.0.2.77 (192.0.2.77, eth7)",
            "cannot be used:   there is no device \"nosuch7\"",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("fw_ver"), "{text}");
    }
}
