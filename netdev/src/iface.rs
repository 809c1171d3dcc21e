//! Network interfaces and their addresses.

use std::net::IpAddr;

/// An interface of the own network namespace, as rtnetlink reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Addresses in GID order: IPv4 first, then IPv6 (link-local last), each with its prefix length.
    pub addresses: Vec<(IpAddr, u8)>,
}
