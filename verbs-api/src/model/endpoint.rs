//! What a peer needs to know of a queue pair.

use std::net::IpAddr;

use rocinante_stack::Budget;
use rocinante_stack::types::{Mtu, Psn, Qpn};

/// The data of a queue pair that a peer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Its address.
    pub address: IpAddr,
    /// Its number.
    pub qpn: Qpn,
    /// The first PSN that it will send.
    pub psn: Psn,
    /// The largest path MTU of its link.
    pub mtu: Mtu,
    /// Its receive budget.
    pub budget: Budget,
}
