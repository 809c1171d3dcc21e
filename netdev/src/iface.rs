//! Network interfaces and their addresses.

use std::io;
use std::net::IpAddr;

use crate::ethtool;
use crate::rtnl::Rtnl;

/// An interface of the own network namespace, as rtnetlink reports it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Interface {
    /// Name, as in `ip link`.
    pub name: String,
    /// Index.
    pub index: u32,
    /// MTU in bytes, IP header included.
    pub mtu: u32,
    /// Ethernet address; zero on loopback.
    pub mac: [u8; 6],
    /// Whether the link is administratively up and has carrier.
    pub up: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// Addresses in GID order, each with its prefix length: IPv4 first, then IPv6 (link-local
    /// last).
    pub addresses: Vec<(IpAddr, u8)>,
}

impl Interface {
    /// All interfaces of the calling thread's network namespace, in index order.
    ///
    /// # Errors
    /// No netlink socket is available, or the kernel refuses to list.
    pub fn all() -> io::Result<Vec<Self>> {
        Rtnl::open()?.interfaces()
    }

    /// The interface of that name.
    ///
    /// # Errors
    /// As [`all`](Self::all); and `NotFound`, which names the existing interfaces.
    pub fn by_name(name: &str) -> io::Result<Self> {
        let all = Self::all()?;
        let names: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
        let message = format!("no interface {name:?}: there are {}", names.join(", "));
        all.into_iter().find(|i| i.name == name).ok_or_else(|| not_found(message))
    }

    /// The node GUID of its device: the modified EUI-64 of its MAC (RFC 4291, appendix A). Loopback
    /// has no MAC: its index stands for one.
    #[must_use]
    pub fn guid(&self) -> u64 {
        if self.mac == [0; 6] {
            let [_, _, high, low] = self.index.to_be_bytes();
            return u64::from_be_bytes([2, 0, 0, 0xff, 0xfe, 0, high, low.max(1)]);
        }
        let [a, b, c, d, e, f] = self.mac;
        u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])
    }

    /// The speed of its link now, in Mb/s. `None` if it has none, as loopback, or is down.
    #[must_use]
    pub fn link_speed(&self) -> Option<u32> {
        ethtool::link_speed(&self.name)
    }

    /// What its port announces (`port_cap_flags` of verbs.h): `IBV_PORT_CM_SUP` and
    /// `IBV_PORT_IP_BASED_GIDS`.
    pub const PORT_CAPABILITIES: u32 = 1 << 16 | 1 << 26;

    /// The width of its port and the speed of a lane, by their codes in verbs.h: the least that
    /// carry what the link does. Without a speed, as on loopback, it is one lane of the slowest, as
    /// the kernel says of Soft-RoCE.
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

    /// The interface that has the address. On loopback, all of an IPv4 prefix is local: 127.0.0.2
    /// belongs to the interface that has 127.0.0.1/8.
    ///
    /// # Errors
    /// As [`all`](Self::all); and `NotFound` if no interface has it.
    pub fn by_address(address: IpAddr) -> io::Result<Self> {
        let all = Self::all()?;
        all.iter()
            .find(|i| i.addresses.iter().any(|(own, _)| *own == address))
            .or_else(|| all.iter().find(|i| i.has(address)))
            .cloned()
            .ok_or_else(|| {
                not_found(format!("no interface has the address {address}: see `ip address`"))
            })
    }

    /// Whether the address is one of this interface's; on loopback, whether an IPv4 prefix contains
    /// it.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|(own, _)| *own == address)
            || (self.loopback && self.covers(address))
    }

    /// Whether an IPv4 prefix of this interface contains the address.
    fn covers(&self, address: IpAddr) -> bool {
        let IpAddr::V4(address) = address else { return false };
        self.addresses.iter().any(|(own, prefix_len)| match own {
            IpAddr::V4(own) => {
                let host_bits = 32_u32.saturating_sub(u32::from(*prefix_len));
                let mask = u32::MAX.checked_shl(host_bits).unwrap_or(0);
                own.to_bits() & mask == address.to_bits() & mask
            }
            IpAddr::V6(_) => false,
        })
    }
}

/// The length of a table of so many GIDs. Its end is empty.
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

fn not_found(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_its_prefix_however_long() {
        for (prefix_len, has_2, has_other) in [
            (0, true, true),
            (8, true, false),
            (32, false, false),
            (33, false, false),
            (255, false, false),
        ] {
            let lo = Interface {
                addresses: vec![([127, 0, 0, 1].into(), prefix_len)],
                ..crate::sides::lo()
            };
            assert!(lo.has([127, 0, 0, 1].into()));
            assert_eq!(lo.has([127, 0, 0, 2].into()), has_2, "/{prefix_len}");
            assert_eq!(lo.has([10, 0, 0, 1].into()), has_other, "/{prefix_len}");
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
        let guid = |mac, index| Interface { mac, index, ..crate::sides::lo() }.guid();
        assert_eq!(guid([0x52, 0x54, 0, 1, 2, 3], 7), 0x5054_00ff_fe01_0203);
        assert_eq!(guid([0x52, 0x54, 0, 1, 2, 4], 7), 0x5054_00ff_fe01_0204);
        assert_eq!(guid([0; 6], 1), 0x0200_00ff_fe00_0001);
        assert_ne!(guid([0; 6], 1), guid([0; 6], 2));
    }
}
