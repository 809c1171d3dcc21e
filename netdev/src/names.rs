//! The names of interfaces as RDMA devices, for programs that know nothing of interfaces: `roce0`,
//! `roce1` and so on. They are the same in each process of a network namespace.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::iface::Interface;
use crate::rtnl::{RouteQuery, Rtnl};

/// Names the environment variable that limits and renames the devices: interfaces in the order
/// wanted, separated by commas, each with `=NAME` or without: `eth0=mlx5_0,eth1`.
pub const DEVICES_VARIABLE: &str = "ROCINANTE_DEVICES";

/// How long a name may be: verbs.h has `char name[64]` (`IBV_SYSFS_NAME_MAX`), with a zero.
const NAME_MAX: usize = 63;

/// Addresses that only a default route leads to: of documentation (RFC 5737, RFC 3849).
const OUTSIDE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// An interface under its name as a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedInterface {
    /// Name of the device.
    pub name: String,
    /// The interface.
    pub interface: Interface,
}

/// The devices of the calling thread's network namespace: each interface that has an address, up
/// or down. That of the default route is the first, loopback the last; the others are in index
/// order. `list` is the value of [`DEVICES_VARIABLE`]; empty, it is none.
///
/// # Errors
/// The kernel does not list its interfaces; or (`InvalidInput`) the list names an interface that is
/// not there, or a device twice or in a way that cannot be a file name.
pub fn named_interfaces(list: Option<&str>) -> io::Result<Vec<NamedInterface>> {
    let mut rtnl = Rtnl::open()?;
    let mut all = rtnl.interfaces()?;
    let first = OUTSIDE.iter().find_map(|outside| {
        let query = RouteQuery {
            destination: *outside,
            source: None,
            interface: None,
            tos: 0,
            src_port: 0,
        };
        rtnl.route(&query).ok().map(|route| route.interface)
    });
    all.sort_by_key(|i| (i.loopback, Some(i.index) != first, i.index));
    match list.map(str::trim).filter(|list| !list.is_empty()) {
        None => {
            all.retain(|interface| !interface.addresses.is_empty());
            Ok(all.into_iter().enumerate().map(|(at, i)| named(at, None, i)).collect())
        }
        Some(list) => listed(list, &all).map_err(|why| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{DEVICES_VARIABLE}: {why}"))
        }),
    }
}

fn listed(list: &str, all: &[Interface]) -> Result<Vec<NamedInterface>, String> {
    let mut devices: Vec<NamedInterface> = Vec::new();
    for (at, entry) in list.split(',').map(str::trim).enumerate() {
        let (word, name) = match entry.split_once('=') {
            Some((word, name)) => (word.trim(), Some(name.trim())),
            None => (entry, None),
        };
        let interface = all.iter().find(|interface| interface.name == word).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|interface| interface.name.as_str()).collect();
            format!("no interface {word:?}: there are {}", names.join(", "))
        })?;
        let device = named(at, name, interface.clone());
        let name = &device.name;
        if name.is_empty() || name.len() > NAME_MAX || name.starts_with('.') || name.contains('/') {
            return Err(format!("{name:?} can be no device's name: give 1 to {NAME_MAX} letters"));
        }
        if devices.iter().any(|other| other.name == *name) {
            return Err(format!("two devices with the name {name}"));
        }
        devices.push(device);
    }
    Ok(devices)
}

/// `interface`, which is at this place of the list, as a device.
fn named(at: usize, name: Option<&str>, interface: Interface) -> NamedInterface {
    NamedInterface { name: name.map_or_else(|| format!("roce{at}"), str::to_owned), interface }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testns::{Pair, or_skip};

    fn names(list: Option<&str>) -> Vec<(String, String)> {
        let devices = named_interfaces(list).expect("a list").into_iter();
        devices.map(|device| (device.name, device.interface.name)).collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(name, interface)| ((*name).into(), (*interface).into())).collect()
    }

    #[test]
    fn the_default_route_is_first_and_loopback_last() {
        let pair = or_skip!("names::the_default_route_is_first_and_loopback_last", Pair::new());
        // The peer has no address.
        pair.a.sh("ip link add d0 type veth peer name d1
                   ip link set d1 addrgenmode none; ip link set d1 up
                   ip address add 10.8.0.1/24 dev d0; ip link set d0 up");
        pair.a.run(|| {
            let expected = [("roce0", "v0"), ("roce1", "d0"), ("roce2", "lo")];
            assert_eq!(names(None), pairs(&expected));
        });
        pair.a.sh("ip route add default via 10.8.0.2");
        pair.a.run(|| {
            let expected = pairs(&[("roce0", "d0"), ("roce1", "v0"), ("roce2", "lo")]);
            assert_eq!(names(None), expected);
            assert_eq!(names(Some(" ")), expected);
        });
        pair.a.sh("ip link set d0 down");
        // A link that is down has no route, and is a device all the same.
        pair.a.run(|| {
            assert_eq!(names(None), pairs(&[("roce0", "v0"), ("roce1", "d0"), ("roce2", "lo")]));
        });
    }

    #[test]
    fn the_list_limits_and_renames() {
        let pair = or_skip!("names::the_list_limits_and_renames", Pair::new());
        pair.a.run(|| {
            assert_eq!(names(Some("v0=mlx5_0, lo")), pairs(&[("mlx5_0", "v0"), ("roce1", "lo")]));
            for (list, word) in [
                ("eth7", "no interface \"eth7\": there are"),
                ("v0=a,lo=a", "two devices"),
                ("v0=roce1,lo", "two devices"),
                ("v0=", "no device's name"),
                ("v0=../x", "no device's name"),
                ("v0,", "no interface \"\""),
            ] {
                let error = named_interfaces(Some(list)).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
                assert!(error.to_string().contains(word), "{list}: {error}");
            }
        });
    }
}
