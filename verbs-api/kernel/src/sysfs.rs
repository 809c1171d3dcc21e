//! The kernel's RDMA devices in `/sys/class/infiniband`. Reading them opens no device and needs no
//! permission.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use super::convert;

/// The folder of device classes.
pub(super) const ROOT: &str = "/sys/class";

/// An RDMA device of the kernel: a card, or Soft-RoCE (`rdma_rxe`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HardwareDevice {
    /// Its name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// The file through which programs open it; `None` if `ib_uverbs` does not serve it.
    pub file: Option<PathBuf>,
    /// Its ports.
    pub ports: Vec<HardwarePort>,
}

/// A port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HardwarePort {
    /// Its number, from 1 on.
    pub number: u8,
    /// The state in the kernel's words, such as `ACTIVE` or `DOWN`.
    pub state: String,
    /// `Ethernet`, or a link layer that cannot carry RoCE.
    pub link_layer: String,
    /// Its RoCE v2 addresses: IPv4, then global IPv6, then link-local ones, each in the order of
    /// the table.
    pub gids: Vec<HardwareGid>,
}

/// An entry of the GID table that speaks RoCE v2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HardwareGid {
    /// Its index in the device's table.
    pub index: u8,
    /// The address.
    pub address: IpAddr,
    /// The interface of the address, if the kernel reports it.
    pub interface: Option<String>,
}

impl HardwarePort {
    /// Whether RoCE v2 connections can be made over it: an active Ethernet port with an address.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.state == "ACTIVE" && self.link_layer == "Ethernet" && !self.gids.is_empty()
    }
}

/// The RDMA devices of this network namespace, by name; none if the kernel has no RDMA.
#[must_use]
pub fn hardware_devices() -> Vec<HardwareDevice> {
    devices(Path::new(ROOT))
}

pub(super) fn devices(root: &Path) -> Vec<HardwareDevice> {
    let names = entries(&root.join("infiniband"));
    let files = files(root);
    // Below `rocinante run` there are devices in software.
    let is_soft = |name: &String| {
        let kind = line(&root.join("infiniband").join(name).join("hca_type"));
        kind.as_deref() == Some("Rocinante")
    };
    names
        .into_iter()
        .filter(|name| !is_soft(name))
        .map(|name| {
            let ports = root.join("infiniband").join(&name).join("ports");
            let file = files.iter().find(|(device, _)| *device == name);
            HardwareDevice {
                file: file.map(|(_, file)| Path::new("/dev/infiniband").join(file)),
                ports: entries(&ports)
                    .iter()
                    .filter_map(|number| Some((number.parse().ok()?, ports.join(number))))
                    .map(|(number, path)| port(number, &path))
                    .collect(),
                name,
            }
        })
        .collect()
}

/// The device of each file.
fn files(root: &Path) -> Vec<(String, String)> {
    let class = root.join("infiniband_verbs");
    let files = entries(&class).into_iter().filter(|name| name.starts_with("uverbs"));
    files.filter_map(|file| Some((line(&class.join(&file).join("ibdev"))?, file))).collect()
}

fn port(number: u8, path: &Path) -> HardwarePort {
    // "4: ACTIVE"
    let state = line(&path.join("state")).unwrap_or_default();
    let state = state.split_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned();
    let link_layer = line(&path.join("link_layer")).unwrap_or_default();
    // An address vector has eight bits for the index.
    let indices = entries(&path.join("gids")).into_iter().filter_map(|name| name.parse().ok());
    let mut gids: Vec<HardwareGid> = indices.filter_map(|index| gid(index, path)).collect();
    gids.sort_by_key(|gid| (rank(gid.address), gid.index));
    HardwarePort { number, state, link_layer, gids }
}

fn gid(index: u8, port: &Path) -> Option<HardwareGid> {
    let gid: Ipv6Addr = line(&port.join(format!("gids/{index}")))?.parse().ok()?;
    if gid.is_unspecified() {
        return None;
    }
    // An entry that is no longer valid has no type: reading it fails.
    let kind = line(&port.join(format!("gid_attrs/types/{index}")))?;
    let interface = line(&port.join(format!("gid_attrs/ndevs/{index}")));
    let interface = interface.filter(|name| !name.is_empty());
    let address = convert::address(gid.octets());
    (kind == "RoCE v2").then_some(HardwareGid { index, address, interface })
}

fn rank(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(address) if address.is_unicast_link_local() => 2,
        IpAddr::V6(_) => 1,
    }
}

/// The counters of a device's port: name and value of each file in `hw_counters` and `counters`.
pub(super) fn counters(device: &str, port: u8) -> impl Iterator<Item = (String, u64)> {
    let port = Path::new(ROOT).join("infiniband").join(device).join(format!("ports/{port}"));
    ["hw_counters", "counters"].into_iter().flat_map(move |folder| {
        let folder = port.join(folder);
        entries(&folder)
            .into_iter()
            .filter_map(move |name| Some((line(&folder.join(&name))?.parse().ok()?, name)))
            .map(|(value, name)| (name, value))
    })
}

/// The first line of a small file.
fn line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// The names in a folder, sorted.
fn entries(folder: &Path) -> Vec<String> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        found.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(PathBuf);

    impl Fake {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("rocinante-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_device_is_read_with_the_addresses_that_speak_roce_v2() {
        let fake = Fake::new("sysfs");
        let port = "infiniband/mlx5_0/ports/1";
        fake.file(&format!("{port}/state"), "4: ACTIVE\n");
        fake.file(&format!("{port}/link_layer"), "Ethernet\n");
        for (index, gid, kind) in [
            (0, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1"),
            (1, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2"),
            (2, "fd77:0000:0000:0000:0000:0000:0000:0002", "RoCE v2"),
            (3, "0000:0000:0000:0000:0000:ffff:0a4d:0002", "RoCE v2"),
            (4, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),
            (10, "0000:0000:0000:0000:0000:ffff:0a4d:0003", "RoCE v2"),
        ] {
            fake.file(&format!("{port}/gids/{index}"), gid);
            fake.file(&format!("{port}/gid_attrs/types/{index}"), kind);
        }
        fake.file(&format!("{port}/gids/300"), "0000:0000:0000:0000:0000:ffff:0a4d:0004");
        fake.file(&format!("{port}/gid_attrs/types/300"), "RoCE v2");
        fake.file(&format!("{port}/gid_attrs/ndevs/3"), "eth0\n");
        fake.file("infiniband_verbs/uverbs4/ibdev", "mlx5_0\n");
        fake.file("infiniband_verbs/abi_version", "6\n");
        // A device of `rocinante run`.
        fake.file("infiniband/roce0/hca_type", "Rocinante\n");
        fake.file("infiniband/roce0/ports/1/state", "4: ACTIVE\n");
        let found = devices(&fake.0);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].file.as_deref(), Some(Path::new("/dev/infiniband/uverbs4")));
        let port = &found[0].ports[0];
        assert!(port.is_usable() && port.number == 1);
        let gids: Vec<(u8, String)> =
            port.gids.iter().map(|gid| (gid.index, gid.address.to_string())).collect();
        let expected =
            [(3, "10.77.0.2"), (10, "10.77.0.3"), (2, "fd77::2"), (1, "fe80::ff:fe00:1")];
        assert_eq!(gids, expected.map(|(index, text)| (index, text.to_owned())));
        assert_eq!(port.gids[0].interface.as_deref(), Some("eth0"));
    }

    #[test]
    fn a_kernel_without_rdma_has_no_devices() {
        assert_eq!(devices(Path::new("/nonexistent")), []);
    }
}
