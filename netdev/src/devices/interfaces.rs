//! Interfaces of the own network namespace, asked of the kernel, and their ports as verbs.h
//! describes them.

use std::io;
use std::net::IpAddr;

use crate::ROCE_PORT;
use crate::kernel::ethtool;
use crate::kernel::interface::{Interface, Unusable};
use crate::kernel::rtnl::{RouteQuery, Rtnl};

impl Interface {
    /// All interfaces of the calling thread's network namespace, in index order. Error: no netlink
    /// socket is available (`PermissionDenied` where a sandbox forbids it), or the kernel refuses
    /// to list.
    pub fn all() -> io::Result<Vec<Self>> {
        Rtnl::open().and_then(|mut rtnl| rtnl.interfaces()).map_err(explained)
    }

    /// The interface of that name. Error: as [`all`](Self::all); and `NotFound`, which names the
    /// existing interfaces.
    pub fn by_name(name: &str) -> io::Result<Self> {
        let all = Self::all()?;
        let names: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
        let message = format!("no interface {name:?}: there are {}", names.join(", "));
        all.into_iter().find(|i| i.name == name).ok_or_else(|| not_found(message))
    }

    /// The interface that has the address, the [nearest](Self::nearest) of several. On loopback,
    /// all of an IPv4 prefix is local: 127.0.0.2 belongs to the interface that has 127.0.0.1/8.
    /// Error: as [`all`](Self::all); `AddrNotAvailable` if an interface has it but cannot use it
    /// ([`Unusable`]), and `NotFound` if none has it.
    pub fn by_address(address: IpAddr) -> io::Result<Self> {
        let all = Self::all()?;
        let has = |it: &&Self| it.addresses.iter().any(|(own, _)| *own == address);
        let found = Self::nearest(all.iter().filter(has), |it| it)
            .or_else(|| all.iter().find(|i| i.has(address)));
        if let Some(found) = found {
            return Ok(found.clone());
        }
        let unusable = Unusable::all()?.into_iter().find(|it| it.address == address);
        Err(unusable.map_or_else(
            || not_found(format!("no interface has the address {address}: see `ip address`")),
            |it| io::Error::new(io::ErrorKind::AddrNotAvailable, it.to_string()),
        ))
    }

    /// Whether datagrams from an own address of this interface reach a peer by it, or stay in this
    /// machine. Neither address is multicast. Error: `HostUnreachable` if the only way leads by
    /// another interface; or the kernel's answer.
    pub fn reaches(&self, from: IpAddr, peer: IpAddr) -> io::Result<()> {
        let mut rtnl = Rtnl::open()?;
        let domain = rtnl.domain(self.index)?;
        let query = RouteQuery {
            destination: peer,
            source: Some(from),
            interface: None,
            tos: 0,
            src_port: ROCE_PORT,
        };
        rtnl.way(self, domain, query).map(drop)
    }

    /// The speed of its link now, in Mb/s. `None` if it has none, as loopback, or is down.
    #[must_use]
    pub fn link_speed(&self) -> Option<u32> {
        ethtool::link_speed(&self.name)
    }

    /// The capabilities of its port (`port_cap_flags` of verbs.h): `IBV_PORT_CM_SUP` and
    /// `IBV_PORT_IP_BASED_GIDS`.
    pub const PORT_CAPABILITIES: u32 = 1 << 16 | 1 << 26;

    /// The width of its port and the speed of a lane, by their codes in verbs.h: the least that
    /// carry the link's rate. Without a speed, as on loopback, it is one lane of the slowest, as
    /// the kernel reports of Soft-RoCE.
    #[must_use]
    pub fn lanes(&self) -> (u8, u8) {
        let lanes = Lanes::of(self.link_speed().unwrap_or(0));
        (lanes.width, lanes.speed)
    }

    /// The rate of its port as sysfs writes it: `100 Gb/sec (4X EDR)`.
    #[must_use]
    pub fn rate(&self) -> String {
        Lanes::of(self.link_speed().unwrap_or(0)).text.to_owned()
    }
}

impl Unusable {
    /// All of the calling thread's network namespace. Error: as [`Interface::all`].
    pub fn all() -> io::Result<Vec<Self>> {
        Rtnl::open().and_then(|mut rtnl| rtnl.unusable()).map_err(explained)
    }
}

/// The length of a table with this number of GIDs. Its end is empty.
#[must_use]
pub fn gid_table_len(gids: usize) -> usize {
    (gids + 1).next_multiple_of(16)
}

/// The lanes of a port.
struct Lanes {
    /// `IBV_WIDTH_1X` or `..._4X`.
    width: u8,
    /// `active_speed` of verbs.h.
    speed: u8,
    text: &'static str,
}

impl Lanes {
    /// The least that carry this many Mb/s, or the most there are.
    fn of(link_speed: u32) -> Self {
        const ONE: u8 = 1;
        const FOUR: u8 = 2;
        let table = [
            (2_500, ONE, 1, "2.5 Gb/sec (1X SDR)"),
            (10_000, ONE, 8, "10 Gb/sec (1X FDR10)"),
            (20_000, FOUR, 2, "20 Gb/sec (4X DDR)"),
            (25_000, ONE, 32, "25 Gb/sec (1X EDR)"),
            (40_000, FOUR, 8, "40 Gb/sec (4X FDR10)"),
            (50_000, ONE, 64, "50 Gb/sec (1X HDR)"),
            (100_000, FOUR, 32, "100 Gb/sec (4X EDR)"),
            (200_000, FOUR, 64, "200 Gb/sec (4X HDR)"),
            (u32::MAX, FOUR, 128, "400 Gb/sec (4X NDR)"),
        ];
        let mut rows = table.into_iter().skip_while(|(carry, ..)| link_speed > *carry);
        let (_, width, speed, text) = rows.next().unwrap_or(table[0]);
        Self { width, speed, text }
    }
}

/// Adds what to do where a sandbox forbids netlink.
fn explained(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EAFNOSUPPORT | libc::EPERM | libc::EACCES) => io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "cannot list the network interfaces: {error}: this process may make no netlink \
                 socket: allow AF_NETLINK (systemd: RestrictAddressFamilies=, containers: the \
                 seccomp profile)"
            ),
        ),
        _ => error,
    }
}

fn not_found(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, message)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::kernel::interface::WhyUnusable;
    use crate::testing::sides::ip;
    use crate::testing::testns::{NetNs, Pair, forbid_family, has_address, or_skip};

    /// Each cause has words of its own, and the errors tell them apart.
    #[test]
    fn why_an_address_is_not_found_is_told() {
        let pair = or_skip!("iface::why_an_address_is_not_found_is_told", Pair::new_in_calm());
        let missing = |ns: &NetNs, address: &str| {
            ns.run(|| Interface::by_address(ip(address)).expect_err("it cannot be used"))
        };
        // The peer has the address already.
        pair.b.sh("ip address add fd09::77/64 dev v0 nodad");
        pair.b.run(|| has_address("fd09::77")).expect("it has it");
        pair.a.sh("echo 100 > /proc/sys/net/ipv6/conf/v0/dad_transmits
                   ip address add fd09::66/64 dev v0
                   ip address add fd09::77/64 dev v0
                   ip link add w0 type veth peer name w1
                   ip address add fd0a::55/64 dev w0");
        let end = Instant::now() + Duration::from_secs(60);
        let duplicate = loop {
            let error = missing(&pair.a, "fd09::77").to_string();
            if error.contains("duplicate") || Instant::now() > end {
                break error;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(duplicate.contains("another station on the link has it"), "{duplicate}");
        for (address, why) in [("fd09::66", "v0 is tentative"), ("fd0a::55", "link, which is down")]
        {
            let error = missing(&pair.a, address);
            assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable, "{error}");
            assert!(
                error.to_string().contains(why) && error.to_string().contains(address),
                "{error}"
            );
        }
        let none = missing(&pair.a, "fd09::99");
        assert_eq!(none.kind(), io::ErrorKind::NotFound, "{none}");
        let all = pair.a.run(|| Unusable::all().expect("a list"));
        let mut states: Vec<_> = all.iter().map(|it| (it.address, it.why)).collect();
        states.retain(|(address, _)| [ip("fd09::66"), ip("fd09::77")].contains(address));
        states.sort_by_key(|(address, _)| *address);
        let (tentative, twice) = (WhyUnusable::Tentative, WhyUnusable::Duplicate);
        assert_eq!(states, [(ip("fd09::66"), tentative), (ip("fd09::77"), twice)]);
        let lo = pair.a.run(|| Interface::by_address(ip("::1")).expect("lo"));
        assert!(lo.loopback, "usable ones are found beside them");
    }

    #[test]
    fn a_sandbox_without_netlink_is_told_of() {
        let asked = std::thread::spawn(|| {
            forbid_family(libc::AF_NETLINK);
            let errors = [
                Interface::all().map(drop),
                Interface::by_name("lo").map(drop),
                Interface::by_address(ip("127.0.0.1")).map(drop),
                Unusable::all().map(drop),
            ];
            errors.map(|it| it.expect_err("no netlink"))
        });
        for error in asked.join().expect("the thread ends") {
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
            assert!(error.to_string().contains("AF_NETLINK"), "{error}");
        }
    }

    #[test]
    fn lanes_carry_what_the_link_does() {
        for (link_speed, width, speed, text) in [
            (0, 1, 1, "2.5 Gb/sec (1X SDR)"),
            (2_500, 1, 1, "2.5 Gb/sec (1X SDR)"),
            (2_501, 1, 8, "10 Gb/sec (1X FDR10)"),
            (100_000, 2, 32, "100 Gb/sec (4X EDR)"),
            (400_000, 2, 128, "400 Gb/sec (4X NDR)"),
            (u32::MAX, 2, 128, "400 Gb/sec (4X NDR)"),
        ] {
            let lanes = Lanes::of(link_speed);
            assert_eq!((lanes.width, lanes.speed, lanes.text), (width, speed, text));
        }
    }

    #[test]
    fn two_interfaces_have_two_guids_with_a_mac_and_without() {
        let guid = |mac, index| Interface { mac, index, ..crate::testing::sides::lo() }.guid();
        assert_eq!(guid([0x52, 0x54, 0, 1, 2, 3], 7), 0x5054_00ff_fe01_0203);
        assert_eq!(guid([0x52, 0x54, 0, 1, 2, 4], 7), 0x5054_00ff_fe01_0204);
        assert_eq!(guid([0; 6], 1), 0x0200_00ff_fe00_0001);
        assert_ne!(guid([0; 6], 1), guid([0; 6], 2));
    }
}
