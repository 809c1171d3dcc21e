//! Networks with routers: their addresses and routes.

use crate::error::Result;
use crate::netns::Netns;
use std::net::{Ipv4Addr, Ipv6Addr};

/// An IPv4 network, a /24, and an IPv6 network, a /64.
#[derive(Debug, Clone, Copy)]
pub(super) struct Network {
    /// Second byte of its IPv4 addresses, and second word of its IPv6 addresses.
    kind: (u8, u16),
    index: u8,
}

impl Network {
    /// The network of containers that have a router.
    pub(super) const fn of_containers(index: u8) -> Self {
        Self { kind: (78, 0x78), index }
    }

    /// The network of hosts' uplinks.
    pub(super) const fn of_uplinks(index: u8) -> Self {
        Self { kind: (79, 0x79), index }
    }

    pub(super) fn v4(self, number: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, self.kind.0, self.index, number)
    }

    pub(super) fn v6(self, number: u8) -> Ipv6Addr {
        Ipv6Addr::new(0xfd00, self.kind.1, 0, self.index.into(), 0, 0, 0, number.into())
    }

    /// Gives a device the addresses of this number, and sets it up.
    pub(super) fn join(self, netns: &Netns, device: &str, number: u8, ipv6: bool) -> Result {
        netns.command(&format!("ip address add {}/24 dev {device}", self.v4(number)))?;
        if ipv6 {
            netns
                .command(&format!("ip -6 address add {}/64 dev {device} nodad", self.v6(number)))?;
        }
        netns.command(&format!("ip link set {device} up")).map(drop)
    }

    /// Sends packets for all other networks to this number.
    pub(super) fn route_by(self, netns: &Netns, number: u8, ipv6: bool) -> Result {
        netns.command(&format!("ip route add default via {}", self.v4(number)))?;
        if ipv6 {
            netns.command(&format!("ip -6 route add default via {}", self.v6(number)))?;
        }
        Ok(())
    }

    /// Sends packets for this network to the number of another.
    pub(super) fn reach(self, netns: &Netns, by: Self, number: u8, ipv6: bool) -> Result {
        netns.command(&format!("ip route add {}/24 via {}", self.v4(0), by.v4(number)))?;
        if ipv6 {
            let (net, router) = (self.v6(0), by.v6(number));
            netns.command(&format!("ip -6 route add {net}/64 via {router}"))?;
        }
        Ok(())
    }
}
