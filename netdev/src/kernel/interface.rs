//! Network interfaces and their addresses, as values.

use std::net::IpAddr;

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

/// An address that an interface has, but cannot use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// The address.
    pub address: IpAddr,
    /// Name of the interface.
    pub interface: String,
    /// Why it cannot be used.
    pub why: WhyUnusable,
}

/// Why an address cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyUnusable {
    /// Duplicate address detection runs (RFC 4862): it will be usable in a moment.
    Tentative,
    /// Another station on the link has it, too.
    Duplicate,
    /// Duplicate address detection waits for the link.
    LinkDown,
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, interface, why } = self;
        match why {
            WhyUnusable::Tentative => write!(
                f,
                "the address {address} of {interface} is tentative: the kernel still asks whether \
                 another station has it, which takes a second or two (`nodad` leaves that out)"
            ),
            WhyUnusable::Duplicate => write!(
                f,
                "the address {address} of {interface} is a duplicate: another station on the link \
                 has it, too: give this one another"
            ),
            WhyUnusable::LinkDown => write!(
                f,
                "the address {address} of {interface} waits for the link, which is down: \
                 `ip link set {interface} up`, and the other end, too"
            ),
        }
    }
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
                ..crate::testing::sides::lo()
            };
            assert!(lo.has([127, 0, 0, 1].into()));
            assert_eq!(lo.has([127, 0, 0, 2].into()), has_2, "/{prefix_len}");
            assert_eq!(lo.has([10, 0, 0, 1].into()), has_other, "/{prefix_len}");
        }
    }
}
