//! What RDMA programs read below /sys/class/infiniband and /dev/infiniband, as a directory tree.
//!
//! The library of paths (`capi/paths`) leads there. A tree is named for its content, so all
//! programs that find the same devices share one, and none is ever changed. It shows the state of
//! the devices at the start of the program; what changes later, libibverbs tells.

use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};

use rocinante_netdev::{Interface, NamedInterface};

use crate::devices::guid_text;

/// A file of a tree.
#[derive(Debug, Hash, PartialEq, Eq)]
enum Node {
    /// A line of text.
    Text(String),
    /// A link to a path outside of the tree.
    Link(String),
}

/// The tree of these devices.
///
/// # Errors
/// No directory can be written to, or the one for it belongs to another user.
pub fn make(devices: &[NamedInterface]) -> io::Result<PathBuf> {
    let uid = rustix::process::getuid().as_raw();
    let make = |place: PathBuf| make_in(&place.join(format!("rocinante-{uid}")), uid, devices);
    // The first may be that of the user that this process was before.
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").ok_or(io::ErrorKind::NotFound.into());
    runtime.and_then(|place| make(place.into())).or_else(|_: io::Error| make(std::env::temp_dir()))
}

fn make_in(place: &Path, uid: u32, devices: &[NamedInterface]) -> io::Result<PathBuf> {
    // Others may read it: a program may become another user.
    match DirBuilder::new().mode(0o755).create(place) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(place)?;
    if !found.is_dir() || found.uid() != uid || found.mode() & 0o022 != 0 {
        let why = format!("{} is not this user's own", place.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let nodes = nodes(devices);
    let mut hasher = DefaultHasher::new();
    nodes.hash(&mut hasher);
    let tree = place.join(format!("{:016x}", hasher.finish()));
    if tree.is_dir() {
        return Ok(tree);
    }
    // It appears whole, or not at all.
    let draft = place.join(format!(".{}", std::process::id()));
    let _ = fs::remove_dir_all(&draft);
    let made = write(&draft, &nodes).and_then(|()| fs::rename(&draft, &tree));
    if made.is_err() {
        let _ = fs::remove_dir_all(&draft);
    }
    // Another process may have been faster.
    if tree.is_dir() { Ok(tree) } else { made.map(|()| tree) }
}

fn write(root: &Path, nodes: &[(String, Node)]) -> io::Result<()> {
    let directories = ["sys/class/infiniband", "sys/class/infiniband_verbs", "dev/infiniband"];
    for directory in directories {
        fs::create_dir_all(root.join(directory))?;
    }
    for (path, node) in nodes {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        match node {
            Node::Text(text) => fs::write(path, format!("{text}\n"))?,
            Node::Link(target) => symlink(target, path)?,
        }
    }
    Ok(())
}

/// The files as the kernel has them: Documentation/ABI/stable/sysfs-class-infiniband of Linux, and
/// drivers/infiniband/core/uverbs_main.c.
fn nodes(devices: &[NamedInterface]) -> Vec<(String, Node)> {
    let mut nodes = vec![text("sys/class/infiniband_verbs/abi_version", "6")];
    for (index, NamedInterface { name, interface }) in devices.iter().enumerate() {
        let ib = format!("sys/class/infiniband/{name}");
        nodes.extend(device(&ib, interface).into_iter().chain(port(&ib, interface)));
        let uverbs = format!("sys/class/infiniband_verbs/uverbs{index}");
        nodes.push(text(&format!("{uverbs}/ibdev"), name));
        nodes.push(text(&format!("{uverbs}/abi_version"), "1"));
        // A character device, because UCX asks for one. Nothing is ever read from it.
        let device = format!("dev/infiniband/uverbs{index}");
        nodes.push((device, Node::Link("/dev/null".to_owned())));
    }
    nodes
}

fn device(ib: &str, interface: &Interface) -> Vec<(String, Node)> {
    let netdev = format!("/sys/class/net/{}", interface.name);
    let numa = fs::read_to_string(format!("{netdev}/device/numa_node"));
    let guid = guid_text(interface.guid());
    vec![
        text(&format!("{ib}/node_type"), "1: CA"),
        text(&format!("{ib}/node_guid"), &guid),
        text(&format!("{ib}/sys_image_guid"), &guid),
        text(&format!("{ib}/node_desc"), "rocinante"),
        text(&format!("{ib}/fw_ver"), env!("CARGO_PKG_VERSION")),
        text(&format!("{ib}/device/numa_node"), numa.as_deref().unwrap_or("-1").trim()),
        (format!("{ib}/device/net/{}", interface.name), Node::Link(netdev)),
    ]
}

fn port(ib: &str, interface: &Interface) -> Vec<(String, Node)> {
    let port = format!("{ib}/ports/1");
    let (state, physical) =
        if interface.up { ("4: ACTIVE", "5: LinkUp") } else { ("1: DOWN", "3: Disabled") };
    let mut nodes = vec![
        text(&format!("{port}/state"), state),
        text(&format!("{port}/phys_state"), physical),
        text(&format!("{port}/link_layer"), "Ethernet"),
        text(&format!("{port}/lid"), "0x0"),
        text(&format!("{port}/pkeys/0"), "0xffff"),
    ];
    for (index, (address, _)) in interface.addresses.iter().enumerate() {
        nodes.push(text(&format!("{port}/gids/{index}"), &gid_text(*address)));
        nodes.push(text(&format!("{port}/gid_attrs/types/{index}"), "RoCE v2"));
        nodes.push(text(&format!("{port}/gid_attrs/ndevs/{index}"), &interface.name));
    }
    nodes
}

/// A GID as sysfs writes it: eight groups of four digits.
fn gid_text(address: IpAddr) -> String {
    let address = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    address.segments().map(|word| format!("{word:04x}")).join(":")
}

fn text(path: &str, text: &str) -> (String, Node) {
    (path.to_owned(), Node::Text(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> NamedInterface {
        let interface = Interface {
            name: "nosuch0".into(),
            index: 99,
            mtu: 1500,
            mac: [2, 0, 0, 0, 0, 9],
            up: true,
            loopback: false,
            addresses: vec![([192, 0, 2, 77].into(), 24)],
        };
        NamedInterface { name: "roce0".into(), interface }
    }

    #[test]
    fn a_tree_is_made_once_and_only_where_it_is_ours() {
        let place = std::env::temp_dir().join(format!("rocinante-tree-{}", std::process::id()));
        let uid = rustix::process::getuid().as_raw();
        let tree = make_in(&place, uid, &[device()]).unwrap();
        assert_eq!(make_in(&place, uid, &[device()]).unwrap(), tree);
        let read = |path: &str| fs::read_to_string(tree.join(path)).unwrap();
        let ib = "sys/class/infiniband/roce0";
        assert_eq!(read(&format!("{ib}/ports/1/state")), "4: ACTIVE\n");
        assert_eq!(
            read(&format!("{ib}/ports/1/gids/0")),
            "0000:0000:0000:0000:0000:ffff:c000:024d\n"
        );
        assert_eq!(read(&format!("{ib}/node_guid")), "0000:00ff:fe00:0009\n");
        assert_eq!(read("sys/class/infiniband_verbs/uverbs0/ibdev"), "roce0\n");
        let net: Vec<_> = fs::read_dir(tree.join(ib).join("device/net")).unwrap().collect();
        assert_eq!(net[0].as_ref().unwrap().file_name(), "nosuch0");
        // Without devices another tree, in which there are none.
        let empty = make_in(&place, uid, &[]).unwrap();
        assert_eq!(fs::read_dir(empty.join("sys/class/infiniband")).unwrap().count(), 0);
        assert_ne!(empty, tree);
        let error = make_in(&place, uid + 1, &[device()]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        fs::remove_dir_all(place).unwrap();
    }
}
