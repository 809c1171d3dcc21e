//! The names of interfaces as RDMA devices, for programs that know nothing of interfaces: `roce0`,
//! `roce1` and so on.
//!
//! A name belongs to its port, which is an interface of a network namespace by its index. Once
//! given, it stays: another port gets another name, also when the first is gone. The same holds for
//! the number of a device and for the places of its GIDs.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::kernel::descriptors::network_namespace;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::{RouteQuery, Rtnl};

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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NamedInterface {
    /// Name of the device.
    pub name: String,
    /// Number of the device: that of its `uverbs`.
    pub number: u32,
    /// The interface.
    pub interface: Interface,
    /// Its GIDs, by their indices; `None` is a hole.
    pub gids: Vec<Option<IpAddr>>,
}

/// A port that got a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    namespace: u64,
    index: u32,
    number: u32,
    name: String,
    /// The interface's name when the port got its own, which the list has.
    interface: String,
    gids: Vec<Option<IpAddr>>,
}

/// The names that were given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    known: Vec<Known>,
}

/// The devices of the calling thread's network namespace, named as for the first time: see
/// [`Names::list`]. Error: as [`Names::list`].
pub fn named_interfaces(list: Option<&str>) -> io::Result<Vec<NamedInterface>> {
    Names::none().list(list)
}

impl Names {
    /// No names yet.
    #[must_use]
    pub const fn none() -> Self {
        Self { known: Vec::new() }
    }

    /// The devices of the calling thread's network namespace: each interface that has an address,
    /// up or down. They are in the order of their numbers, which those that are new get in turn:
    /// the interface of the default route is the first, loopback the last; the others are in index
    /// order. `list` is the value of [`DEVICES_VARIABLE`]; empty, it is none. Error: the kernel
    /// does not list its interfaces; or (`InvalidInput`) the list names an interface that was never
    /// there, or a device twice or in a way that cannot be a file name.
    pub fn list(&mut self, list: Option<&str>) -> io::Result<Vec<NamedInterface>> {
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
        let namespace = network_namespace()?;
        let wanted: Vec<(Interface, Option<&str>)> =
            match list.map(str::trim).filter(|list| !list.is_empty()) {
                None => {
                    all.retain(|interface| !interface.addresses.is_empty());
                    all.into_iter().map(|interface| (interface, None)).collect()
                }
                Some(list) => self.listed(list, namespace, &all).map_err(|why| {
                    let why = format!("{DEVICES_VARIABLE}: {why}");
                    io::Error::new(io::ErrorKind::InvalidInput, why)
                })?,
            };
        let named =
            wanted.into_iter().map(|(interface, name)| self.name(namespace, name, interface));
        let mut devices: Vec<NamedInterface> = named.collect();
        devices.sort_by_key(|device| device.number);
        Ok(devices)
    }

    /// Takes in what other processes named. Where both have named one port, theirs holds.
    pub(crate) fn take_in(&mut self, others: &Self) {
        let own = std::mem::replace(&mut self.known, others.known.clone());
        for known in own {
            let is_same = |it: &Known| (it.namespace, it.index) == (known.namespace, known.index);
            if !self.known.iter().any(|it| is_same(it) || it.name == known.name) {
                self.known.push(known);
            }
        }
    }

    /// The interfaces of a list, each with the name that the list gives it.
    fn listed<'a>(
        &self,
        list: &'a str,
        namespace: u64,
        all: &[Interface],
    ) -> Result<Vec<(Interface, Option<&'a str>)>, String> {
        let entries = list.split(',').map(|entry| match entry.split_once('=') {
            Some((word, name)) => (word.trim(), Some(name.trim())),
            None => (entry.trim(), None),
        });
        // A port that got its name by this list keeps it, whatever its interface is called by now.
        let of_entry = |(word, name): (&str, Option<&str>)| {
            let is_it = |it: &&Known| {
                (it.namespace, &*it.interface) == (namespace, word)
                    && name.is_none_or(|name| it.name == name)
            };
            let mut ports = self.known.iter().filter(is_it);
            ports.find_map(|port| all.iter().find(|interface| interface.index == port.index))
        };
        let taken: HashSet<u32> =
            entries.clone().filter_map(of_entry).map(|interface| interface.index).collect();
        let mut wanted = Vec::new();
        let mut names = HashSet::new();
        for (at, (word, name)) in entries.enumerate() {
            let shown = name.map_or_else(|| format!("roce{at}"), str::to_owned);
            let is_short = (1..=NAME_MAX).contains(&shown.len());
            if !is_short || shown.starts_with('.') || shown.contains('/') {
                return Err(format!(
                    "{shown:?} can be no device's name: give 1 to {NAME_MAX} letters"
                ));
            }
            if !names.insert(shown.clone()) {
                return Err(format!("two devices with the name {shown}"));
            }
            let is_it = |it: &&Interface| it.name == word && !taken.contains(&it.index);
            match of_entry((word, name)).or_else(|| all.iter().find(is_it)) {
                Some(interface) => wanted.push((interface.clone(), name)),
                // It was there.
                None if self.known.iter().any(|known| known.interface == word) => {}
                None => {
                    let names: Vec<&str> = all.iter().map(|it| it.name.as_str()).collect();
                    return Err(format!("no interface {word:?}: there are {}", names.join(", ")));
                }
            }
        }
        Ok(wanted)
    }

    /// A device. Its name is the one that it got before, or that is asked for, or a new one.
    fn name(&mut self, namespace: u64, name: Option<&str>, interface: Interface) -> NamedInterface {
        let of_port = |it: &Known| (it.namespace, it.index) == (namespace, interface.index);
        let found = match name {
            // The port that the user means by the interface's name may have been made anew: the
            // one that had the name is gone.
            Some(name) => self.known.iter().position(|it| it.name == name),
            None => self.known.iter().position(of_port),
        };
        let at = found.unwrap_or_else(|| {
            let (number, name) = self.next(name);
            let gids = Vec::new();
            let (index, interface) = (interface.index, interface.name.clone());
            self.known.push(Known { namespace, index, number, name, interface, gids });
            self.known.len() - 1
        });
        let known = &mut self.known[at];
        (known.namespace, known.index) = (namespace, interface.index);
        follow_gids(&mut known.gids, &interface.addresses);
        let Known { name, number, gids, .. } = known.clone();
        NamedInterface { name, number, interface, gids }
    }

    /// A number and a name that no device has had.
    fn next(&self, name: Option<&str>) -> (u32, String) {
        let is_free = |number: &u32, name: &str| {
            self.known.iter().all(|known| known.number != *number && known.name != name)
        };
        let mut numbers = (0..)
            .map(|number| (number, name.map_or_else(|| format!("roce{number}"), str::to_owned)));
        numbers.find(|(number, name)| is_free(number, name)).unwrap_or_default()
    }
}

/// Changes a table of GIDs as the addresses have changed. An index belongs to its address until
/// that is gone, which leaves a hole. A new address takes the first hole, or else the end, as in
/// the kernel's table.
pub fn follow_gids(gids: &mut Vec<Option<IpAddr>>, addresses: &[(IpAddr, u8)]) {
    for gid in gids.iter_mut() {
        *gid = gid.filter(|known| addresses.iter().any(|(address, _)| address == known));
    }
    for (address, _) in addresses {
        if gids.contains(&Some(*address)) {
            continue;
        }
        match gids.iter_mut().find(|gid| gid.is_none()) {
            Some(hole) => *hole = Some(*address),
            None => gids.push(Some(*address)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::testns::{Pair, or_skip};

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
    fn a_name_that_was_given_stays_with_its_port() {
        let pair = or_skip!("names::a_name_that_was_given_stays_with_its_port", Pair::new());
        let mut known = Names::none();
        let mut list = |list: Option<&str>| {
            let devices = pair.a.run(|| known.list(list)).expect("a list").into_iter();
            let gids = |gids: Vec<Option<IpAddr>>| gids.iter().map(Option::is_some).collect();
            let triple =
                |it: NamedInterface| (it.name, it.number, it.interface.name, gids(it.gids));
            devices.map(triple).collect::<Vec<(String, u32, String, Vec<bool>)>>()
        };
        let row = |name: &str, number, interface: &str, gids: &[bool]| {
            (name.to_owned(), number, interface.to_owned(), gids.to_vec())
        };
        let at_first = list(None);
        let (v0, lo) = (at_first[0].clone(), at_first[1].clone());
        assert_eq!((&*v0.0, &*v0.2, &*lo.0, &*lo.2), ("roce0", "v0", "roce1", "lo"));
        // Another port comes, and the default route leaves by it.
        pair.a.sh("ip link add d0 type veth peer name d1
                   ip link set d0 addrgenmode none; ip link set d1 addrgenmode none
                   ip link set d1 up; ip link set d0 up
                   ip address add 10.8.0.1/24 dev d0; ip address add 10.8.1.1/24 dev d0
                   ip route add default via 10.8.0.2");
        let both = row("roce2", 2, "d0", &[true, true]);
        assert_eq!(list(None), [v0.clone(), lo.clone(), both]);
        // The place of an address that is gone stays empty until the next one comes.
        pair.a.sh("ip address del 10.8.0.1/24 dev d0");
        let hole = row("roce2", 2, "d0", &[false, true]);
        assert_eq!(list(None), [v0.clone(), lo.clone(), hole]);
        // Another interface of the same name is another port.
        pair.a.sh("ip link del d0; ip link add d0 type veth peer name d1
                   ip link set d0 addrgenmode none; ip address add 10.8.0.1/24 dev d0");
        let again = row("roce3", 3, "d0", &[true]);
        assert_eq!(list(None), [v0.clone(), lo.clone(), again]);
        // The name that the user gave to an interface is for that one, too; the name of a port
        // that is gone is not given to another.
        assert_eq!(list(Some("d0=x,v0")), [v0.clone(), row("x", 4, "d0", &[true])]);
        pair.a.sh("ip link del d0");
        assert_eq!(list(Some("d0=x,v0")), [v0]);
        // A port keeps its name while its interface gets another one, and then gives it to none.
        pair.a.sh("ip link add d0 type veth");
        let mut renamed = Names::none();
        let mut shown = |list: &str| {
            let devices = pair.a.run(|| renamed.list(Some(list))).expect("a list").into_iter();
            devices.map(|it| (it.name, it.interface.name)).collect::<Vec<_>>()
        };
        for list in ["d0=x,v0,e0=y", "d0,v0,e0"] {
            pair.a.sh("ip link add e0 type veth");
            let before = shown(list);
            let at = |interface: &str| {
                before.iter().find(|(_, it)| it == interface).expect("it is there").0.clone()
            };
            let now = |wanted: &[(&str, &str)]| {
                let mut wanted: Vec<(String, String)> =
                    wanted.iter().map(|(before, it)| (at(before), (*it).to_owned())).collect();
                wanted.sort();
                wanted
            };
            let mut sorted = || {
                let mut shown = shown(list);
                shown.sort();
                shown
            };
            pair.a.sh("ip link set d0 name f0; ip link add d0 type veth");
            assert_eq!(sorted(), now(&[("d0", "f0"), ("v0", "v0"), ("e0", "e0")]));
            // Also where its new name is that of another port in the list, which is gone.
            pair.a.sh("ip link del e0; ip link set f0 name e0");
            assert_eq!(sorted(), now(&[("d0", "e0"), ("v0", "v0")]));
            // Once it is gone, the interface that the user names is another port.
            pair.a.sh("ip link del e0");
            let anew = sorted();
            assert_eq!(anew.len(), 2);
            let (name, _) = anew.iter().find(|(_, it)| it == "d0").expect("it is listed");
            assert_eq!(*name == at("d0"), list.contains('='));
        }
        // What another process has named holds, and names of both do not meet.
        let mut other = Names::none();
        other.known = known.known[1..].to_vec();
        let mut own = Names { known: known.known[..1].to_vec() };
        own.take_in(&other);
        assert_eq!(own.known.len(), known.known.len());
        let numbers: HashSet<u32> = own.known.iter().map(|known| known.number).collect();
        assert_eq!(numbers.len(), own.known.len());
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
