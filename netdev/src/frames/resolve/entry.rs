//! The state of one path, and when the path changes its way.

use std::net::IpAddr;

use crate::kernel::interface::Interface;
use crate::kernel::rtnl::{Neighbour, NeighbourStatus};
use crate::port::contract::{PathId, PathSpec};
use crate::port::headers::FrameTemplate;

/// A path: its target, and how its datagrams leave.
#[derive(Debug)]
pub(super) struct PathEntry {
    pub(super) spec: PathSpec,
    pub(super) src_port: u16,
    pub(super) target: Target,
    pub(super) guard: PathId,
    /// Headers with the Ethernet address last known.
    pub(super) template: Option<FrameTemplate>,
    /// The next burst takes the guard although there is a template.
    pub(super) check: bool,
    /// The neighbour has answered, but the kernel may still be sending datagrams that waited for
    /// that.
    pub(super) answered: bool,
    /// The port's number for the last frame that left directly.
    pub(super) last: u64,
    /// A change of way that waits until the kernel has taken the earlier datagrams.
    pub(super) turn: Option<Turn>,
    /// Whether a datagram was sent since the last refresh.
    pub(super) used: bool,
    /// The neighbour changed, or the routes did.
    pub(super) changed: bool,
    pub(super) rerouted: bool,
    pub(super) route_refreshes: u32,
    pub(super) ip_id: u16,
}

/// Identifies the frames of a path among those that wait for the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// The path.
    pub path: PathId,
    /// The guard's id of the path.
    pub guard: PathId,
    /// The last number given to [`super::PathTable::sent`]; 0 if there was none.
    pub last: u64,
}

/// A pending change of way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    pub(super) neighbour: Option<Neighbour>,
}

/// The target of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// An address of this machine: the guard sends, and the kernel's loopback carries.
    Own,
    /// A multicast group: the guard sends, so that members on this machine get a copy.
    Group,
    /// An Ethernet address that needs no resolution: any address on the loopback interface.
    Fixed([u8; 6]),
    /// A neighbour: the destination itself, or a gateway.
    Neighbour(IpAddr),
    /// No route any more; the guard gets the kernel's error for every datagram.
    Nowhere,
}

impl PathEntry {
    /// A path of which nothing is known yet but where it leads.
    pub(super) fn new(spec: PathSpec, src_port: u16, target: Target, guard: PathId) -> Self {
        Self {
            spec,
            src_port,
            target,
            guard,
            template: None,
            check: false,
            answered: false,
            last: 0,
            turn: None,
            used: false,
            changed: false,
            rerouted: false,
            route_refreshes: 0,
            ip_id: 0,
        }
    }

    /// Whether the kernel resolves its next hop, now or once there is a route.
    pub(super) fn is_resolved_by_kernel(&self) -> bool {
        matches!(self.target, Target::Neighbour(_) | Target::Nowhere)
    }

    /// Whether it is in use, was announced as changed, or has no usable neighbour yet.
    pub(super) fn is_to_be_looked_at(&self) -> bool {
        self.used || self.changed || self.template.is_none()
    }

    pub(super) fn sent(&self, path: PathId) -> Sent {
        Sent { path, guard: self.guard, last: self.last }
    }

    /// The Ethernet address of the next hop, and whether the kernel has to check it.
    pub(super) fn next_hop(&self, neighbour: Option<Neighbour>) -> Option<([u8; 6], bool)> {
        match self.target {
            Target::Own | Target::Group | Target::Nowhere => None,
            Target::Fixed(mac) => Some((mac, self.check)),
            Target::Neighbour(_) => {
                let Neighbour { mac, status } = neighbour.filter(|_| is_usable(neighbour))?;
                Some((mac?, status == NeighbourStatus::Stale))
            }
        }
    }

    /// Whether the change is one between direct frames and the guard.
    pub(super) fn turns(&self, to: Turn) -> bool {
        let direct = self.template.is_some() && !self.check;
        direct != matches!(self.next_hop(to.neighbour), Some((_, false)))
    }

    /// Adopts the state of the neighbour cache.
    pub(super) fn settle(&mut self, iface: &Interface, neighbour: Option<Neighbour>) {
        let Some((mac, check)) = self.next_hop(neighbour) else {
            self.template = None;
            (self.check, self.answered) = (false, false);
            return;
        };
        self.check = check;
        if self.template.as_ref().is_none_or(|template| template.dst_mac() != mac) {
            self.template = FrameTemplate::new(iface.mac, mac, &self.spec, self.src_port);
        }
    }
}

/// Whether frames may be sent to this entry of the neighbour cache.
pub(super) fn is_usable(neighbour: Option<Neighbour>) -> bool {
    neighbour.is_some_and(|known| known.status != NeighbourStatus::Unresolved)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(target: Target) -> PathEntry {
        let spec = PathSpec {
            local: [10, 9, 0, 1].into(),
            remote: [10, 9, 0, 2].into(),
            src_port: 0,
            tos: 0,
            ttl: 64,
            flow_label: 0,
        };
        PathEntry::new(spec, 49152, target, PathId(0))
    }

    fn iface() -> Interface {
        Interface {
            name: "v0".into(),
            index: 2,
            mtu: 4200,
            mac: [2; 6],
            up: true,
            loopback: false,
            addresses: Vec::new(),
        }
    }

    /// From any earlier state to any new one.
    #[test]
    fn frames_go_to_addresses_that_are_known_and_usable() {
        use NeighbourStatus::{Probing, Stale, Unresolved, Valid};
        let macs = [None, Some([4; 6]), Some([6; 6])];
        let statuses = [Valid, Stale, Probing, Unresolved];
        let known = macs.iter().flat_map(|&mac| statuses.map(|status| Neighbour { mac, status }));
        let all: Vec<Option<Neighbour>> = known.map(Some).chain([None]).collect();
        for before in &all {
            for now in &all {
                let mut entry = entry(Target::Neighbour([10, 9, 0, 2].into()));
                entry.settle(&iface(), *before);
                entry.settle(&iface(), *now);
                let usable = now.filter(|now| now.status != Unresolved).and_then(|now| now.mac);
                let template = entry.template.as_ref().map(FrameTemplate::dst_mac);
                assert_eq!(template, usable, "{before:?}, then {now:?}");
                let stale = now.is_some_and(|now| now.status == Stale);
                assert_eq!(entry.check, usable.is_some() && stale, "{before:?}, then {now:?}");
            }
        }
        for target in [Target::Nowhere, Target::Group, Target::Own] {
            for now in &all {
                let mut entry = entry(target);
                entry.settle(&iface(), *now);
                assert!(entry.template.is_none() && !entry.check, "{target:?}: {now:?}");
            }
        }
    }
}
