//! The neighbour cache (ARP, ND): `RTM_GETNEIGH` for one entry.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::NLM_F_CREATE;

use super::Rtnl;
use super::query::{Query, family};
use super::socket::Attributes;

/// Length of `struct ndmsg` (linux/neighbour.h).
const HEADER_LEN: usize = 12;

/// Usability of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NeighbourStatus {
    /// Confirmed lately, permanent, or a link without resolution: the address may be used.
    Valid,
    /// Usable, but the kernel checks it again only after it sends a datagram there itself.
    Stale,
    /// Usable; the kernel is checking it.
    Probing,
    /// Being resolved, failed or unknown: not usable.
    Unresolved,
}

/// An entry of the neighbour cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Neighbour {
    /// Ethernet address, where there is one.
    pub mac: Option<[u8; 6]>,
    /// Whether it may be used.
    pub status: NeighbourStatus,
}

impl Rtnl {
    /// The entry for `address` on an interface, or `None` if there is none. Does not allocate.
    /// Error: any error of the kernel, except that there is no such entry.
    pub(crate) fn neighbour(
        &mut self,
        interface: u32,
        address: IpAddr,
    ) -> io::Result<Option<Neighbour>> {
        let query = named(interface, address, 0);
        match self.ask_one(libc::RTM_GETNEIGH, libc::RTM_NEWNEIGH, &query, neighbour_from) {
            Ok(found) => Ok(Some(found)),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Makes the kernel resolve `address` as if it had something to send there (`NTF_USE`), without
    /// waiting for the answer. Does not allocate. Error: `EPERM` without CAP_NET_ADMIN, or any
    /// other error of the kernel.
    pub(crate) fn solicit(&mut self, interface: u32, address: IpAddr) -> io::Result<()> {
        self.tell(libc::RTM_NEWNEIGH, NLM_F_CREATE, &named(interface, address, libc::NTF_USE))
    }
}

/// A `struct ndmsg` with these flags (`NTF_*`) about this entry.
fn named(interface: u32, address: IpAddr, flags: u8) -> Query {
    let mut header = [0; HEADER_LEN];
    header[0] = family(address).0;
    header[4..8].copy_from_slice(&interface.to_ne_bytes());
    header[10] = flags;
    Query::new(&header).address(libc::NDA_DST, address)
}

pub(super) fn neighbour_from(message: &[u8]) -> Option<Neighbour> {
    let (header, attributes) = message.split_first_chunk::<HEADER_LEN>()?;
    let state = u16::from_ne_bytes([header[8], header[9]]);
    let mac = Attributes(attributes).find(|(kind, _)| *kind == libc::NDA_LLADDR);
    let status = match state {
        libc::NUD_REACHABLE | libc::NUD_PERMANENT | libc::NUD_NOARP => NeighbourStatus::Valid,
        libc::NUD_STALE => NeighbourStatus::Stale,
        libc::NUD_DELAY | libc::NUD_PROBE => NeighbourStatus::Probing,
        _ => NeighbourStatus::Unresolved,
    };
    Some(Neighbour { mac: mac.and_then(|(_, bytes)| bytes.try_into().ok()), status })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `struct ndmsg` in this state, with a link address.
    fn message(state: u16, lladdr: Option<&[u8]>) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_LEN];
        bytes[8..10].copy_from_slice(&state.to_ne_bytes());
        if let Some(lladdr) = lladdr {
            bytes.extend((lladdr.len() as u16 + 4).to_ne_bytes());
            bytes.extend(libc::NDA_LLADDR.to_ne_bytes());
            bytes.extend(lladdr);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    #[test]
    fn only_states_that_are_known_are_usable() {
        let mac = [2, 0, 0, 0, 0, 7];
        for state in 0..=u16::MAX {
            let status = match state {
                0x02 | 0x80 | 0x40 => NeighbourStatus::Valid, // reachable, permanent, no ARP
                0x04 => NeighbourStatus::Stale,
                0x08 | 0x10 => NeighbourStatus::Probing, // delay, probe
                _ => NeighbourStatus::Unresolved,
            };
            let found = neighbour_from(&message(state, Some(&mac)));
            assert_eq!(found, Some(Neighbour { mac: Some(mac), status }), "{state:#x}");
        }
    }

    #[test]
    fn link_addresses_of_another_length_are_none() {
        for length in [0, 1, 5, 7, 8, 20, 32] {
            let found = neighbour_from(&message(0x80, Some(&vec![7; length]))).expect("an entry");
            assert_eq!(found.mac, None, "{length}");
        }
        assert_eq!(neighbour_from(&message(0x80, None)).expect("an entry").mac, None);
        for length in 0..HEADER_LEN {
            assert_eq!(neighbour_from(&message(0x80, None)[..length]), None, "{length}");
        }
    }
}
