//! The facts about a queue pair that a peer needs.

use std::net::IpAddr;

use rocinante_stack::Budget;
use rocinante_stack::types::{Mtu, Psn, Qpn, QueueKind};

/// The data of a queue pair that a peer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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
    /// The resource that limits its receive queue. `None` of a device of the kernel's, of
    /// another implementation, and of earlier versions, which announce the budget alone.
    pub queue: Option<QueueKind>,
}

setters! {
    Endpoint {
        address: IpAddr,
        psn: Psn,
        budget: Budget,
        queue: Option<QueueKind>,
    }
}

impl Endpoint {
    /// The data of a queue pair that a peer sent by other means than
    /// `Exchange`. Implementations other than this one announce no receive
    /// budget: it is [`Budget::STANDARD`].
    #[must_use]
    pub const fn new(address: IpAddr, qpn: Qpn, psn: Psn, mtu: Mtu) -> Self {
        Self { address, qpn, psn, mtu, budget: Budget::STANDARD, queue: None }
    }
}
