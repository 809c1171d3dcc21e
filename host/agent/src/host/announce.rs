//! The place of a container's Ethernet address, made known to a bridge and the network behind it.
//!
//! A container announces an address the moment that it has it, and its kernel sends no announcement
//! twice. The program that judges senders may not let the address out yet, and then the network
//! sends the container's packets to where the address was before.

use std::io;

use rocinante_netdev::for_agent::rtnl::query::Query;
use rocinante_netdev::for_agent::rtnl::socket::NetlinkSocket;
use rocinante_netdev::for_agent::send_frame;

const RTM_NEWNEIGH: u16 = 28;
// Of `linux/neighbour.h`.
const REACHABLE: u16 = 0x02;
const BY_MASTER: u8 = 0x04;
const LINK_LAYER_ADDRESS: u16 = 2;
/// An entry that a packet might have made, in the place of another.
const FLAGS: u16 = (libc::NLM_F_CREATE | libc::NLM_F_REPLACE) as u16;

/// Has the bridge with this index reach the Ethernet address at its port `end`, and says so to all
/// other ports by a broadcast of that address. Works in the calling thread's network namespace.
/// Error: the bridge keeps it elsewhere, is down, or has gone; the kernel's.
pub(crate) fn announce(bridge: u32, end: u32, mac: [u8; 6]) -> io::Result<()> {
    let query = Query::new(&neighbour_header(end)).attribute(LINK_LAYER_ADDRESS, &mac);
    let mut socket = NetlinkSocket::open(netlink_sys::protocols::NETLINK_ROUTE)?;
    socket.request_one(RTM_NEWNEIGH, FLAGS, query.bytes(), &mut |_, _| {})?;
    send_frame(bridge, &reverse_arp(mac))
}

/// `struct ndmsg`: of a bridge's table, at its port.
fn neighbour_header(port: u32) -> [u8; 12] {
    let mut header = [0; 12];
    header[0] = libc::AF_BRIDGE as u8;
    header[4..8].copy_from_slice(&port.to_ne_bytes());
    header[8..10].copy_from_slice(&REACHABLE.to_ne_bytes());
    header[10] = BY_MASTER;
    header
}

/// A request of RARP (RFC 903) for the own address, as virtual machines send it after a move: it
/// names no IP address, so it changes no table of neighbours.
fn reverse_arp(mac: [u8; 6]) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // RARP; Ethernet, IPv4, the lengths of their addresses, and the request.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}
