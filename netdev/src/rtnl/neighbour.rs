//! The neighbour cache (ARP, ND): `RTM_GETNEIGH` for one entry.

use std::io;
use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};

use super::Rtnl;

const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;

/// How much an entry is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeighbourStatus {
    /// Confirmed lately, permanent, or a link without resolution: the address may be used.
    Valid,
    /// Usable, but a datagram sent by the kernel is needed before it is checked again.
    Stale,
    /// Usable; the kernel is checking it.
    Probing,
    /// Being resolved, failed or unknown: not usable.
    Unresolved,
}

/// An entry of the neighbour cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// Ethernet address, where there is one.
    pub mac: Option<[u8; 6]>,
    /// Whether it may be used.
    pub status: NeighbourStatus,
}

impl Rtnl {
    /// The entry for `address` on an interface, or `None` if there is none.
    ///
    /// # Errors
    /// Whatever the kernel answers, other than that there is no such entry.
    pub fn neighbour(&mut self, interface: u32, address: IpAddr) -> io::Result<Option<Neighbour>> {
        let mut query = NeighbourMessage::default();
        query.header.family =
            if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        query.header.ifindex = interface;
        query.attributes.push(NeighbourAttribute::Destination(address.into()));
        match self.ask::<_, NeighbourMessage>(RTM_GETNEIGH, RTM_NEWNEIGH, false, &query) {
            Ok(found) => Ok(found.first().map(neighbour_from)),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

fn neighbour_from(message: &NeighbourMessage) -> Neighbour {
    let mac = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => <[u8; 6]>::try_from(&bytes[..]).ok(),
        _ => None,
    });
    let status = match message.header.state {
        NeighbourState::Reachable | NeighbourState::Permanent | NeighbourState::Noarp => {
            NeighbourStatus::Valid
        }
        NeighbourState::Stale => NeighbourStatus::Stale,
        NeighbourState::Delay | NeighbourState::Probe => NeighbourStatus::Probing,
        _ => NeighbourStatus::Unresolved,
    };
    Neighbour { mac, status }
}
