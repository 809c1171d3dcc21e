//! The wire between two sides. It can lose packets.

use rocinante_lab::{Lab, Match, Rule};

use super::node::{Node, Step};
use crate::agent::machine::Kind;

/// The carrier of packets between two sides.
pub trait Wire {
    /// Loses `percent` of the RoCE packets from one side to the other, until the returned value is
    /// dropped. Error: the wire cannot lose them: [`cannot`](super::cannot) gives the reason if
    /// that is no fault.
    fn lose(&self, from: &Node, to: &Node, percent: f64) -> Step<Box<dyn Losing>>;
}

/// A rule that loses packets. Dropping it removes the rule.
pub trait Losing {
    /// Number of the kernel's packets that were lost; a super-packet counts as one. Error: the
    /// error text of `nft`.
    fn lost(&self) -> Step<u64>;
}

/// The bridge of a lab, with the first container at one port and a guest at another.
pub(super) struct Bridge<'a> {
    pub(super) lab: &'a Lab,
    /// The guest's port.
    pub(super) tap: &'a str,
}

impl Wire for Bridge<'_> {
    fn lose(&self, from: &Node, _: &Node, percent: f64) -> Step<Box<dyn Losing>> {
        let what = match from.kind() {
            Kind::Rocinante => Match::roce().from(self.lab.container(0)),
            Kind::SoftRoce | Kind::Device => Match::roce().from_port(self.tap),
        };
        let rule = self.lab.lose(&what, percent).map_err(|error| error.to_string())?;
        Ok(Box::new(rule))
    }
}

impl Losing for Rule {
    fn lost(&self) -> Step<u64> {
        self.counter().map(|counter| counter.packets).map_err(|error| error.to_string())
    }
}
