//! The ports of containers: room for them, and the lists of those that were handed over.

use std::collections::{BTreeMap, BTreeSet};

use rocinante_netdev::Backend;
use rocinante_netdev::handed::{Code, GiveLimits, Given, Granted, Kept, Refused, Request, Ring};

use super::{Containers, HostEnd, Inner};
use crate::state::KnownPort;

/// The ports of one answer.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) sockets: BTreeSet<u64>,
    /// The receive ring of each; ports of `afxdp` have none.
    pub(super) ring: Option<Ring>,
    /// What guards the rings.
    pub(super) _kept: Vec<Kept>,
    /// Bytes of memory that the kernel keeps for them.
    pub(super) bytes: usize,
}

/// What ports take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Taken {
    ports: usize,
    /// Bytes of kernel memory.
    bytes: usize,
}

/// Room for ports that are being made, until it is dropped.
#[derive(Debug)]
pub(crate) struct Room<'a> {
    containers: &'a Containers,
    host_end: u32,
    taken: Taken,
}

impl std::ops::Add for Taken {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { ports: self.ports + other.ports, bytes: self.bytes + other.bytes }
    }
}

impl std::iter::Sum for Taken {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), std::ops::Add::add)
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut inner = self.containers.lock();
        let Some(reserved) = inner.reserved.get_mut(&self.host_end) else { return };
        reserved.ports -= self.taken.ports;
        reserved.bytes -= self.taken.bytes;
        if *reserved == Taken::default() {
            inner.reserved.remove(&self.host_end);
        }
    }
}

/// Ports in the list of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortId {
    pub(super) host_end: u32,
    pub(super) number: u64,
}

impl Containers {
    /// Reserves room for the ports of a request, and says how large they may be.
    ///
    /// # Errors
    /// What to answer if there is none.
    pub(crate) fn reserve(
        &self,
        end: &HostEnd,
        request: &Request,
    ) -> Result<(Room<'_>, GiveLimits), Refused> {
        if let Some(foreign) = request.addresses.iter().find(|a| !end.sources.addresses.contains(a))
        {
            let reason = format!("{foreign} came to your container later than the agent allows");
            let hint = "see self_administered in agent.toml";
            return Err(Refused::new(Code::Interface, reason, hint));
        }
        let mut inner = self.lock();
        let has_xdp = |container: &super::Container| container.ports.values().any(Port::is_xdp);
        if request.backend == Backend::Xdp && inner.containers.get(&end.index).is_some_and(has_xdp)
        {
            // Before anything is made for nothing.
            let reason = "your container has a port of afxdp on this interface already";
            return Err(Refused::new(Code::InUse, reason, "close it, or choose --netdev packet"));
        }
        let all: Taken = inner.containers.keys().map(|end| inner.taken(*end)).sum::<Taken>();
        let all = all + inner.reserved.values().copied().sum();
        let reserved = inner.reserved.get(&end.index).copied().unwrap_or_default();
        let own = inner.taken(end.index) + reserved;
        let busy = |reason| {
            let hint = "close ports, or see ports_max and ring_mib_max in agent.toml";
            Err(Refused::new(Code::Busy, reason, hint))
        };
        if own.ports + request.shards.count > self.config.ports_max {
            return busy(format!("your container has {} ports already", own.ports));
        }
        let left = (self.config.ring_mib_total << 20).saturating_sub(all.bytes);
        let Some(limits) = GiveLimits::within(left, request) else {
            return busy(format!("the ports of all containers have {} bytes already", all.bytes));
        };
        let ring_frames_max = limits.ring_frames_max.min(self.config.ring_frames_max);
        let limits = GiveLimits { ring_frames_max, ..limits };
        let bytes = limits.memory_bytes(request);
        if own.bytes + bytes > self.config.ring_mib_max << 20 {
            let own = own.bytes;
            return busy(format!("your container's ports have {own} bytes already"));
        }
        let taken = Taken { ports: request.shards.count, bytes };
        inner.reserved.insert(end.index, reserved + taken);
        Ok((Room { containers: self, host_end: end.index, taken }, limits))
    }

    /// Notes ports that are about to be handed over.
    ///
    /// # Errors
    /// What to answer: the container has gone meanwhile.
    pub(crate) fn add_port(
        &self,
        end: &HostEnd,
        sockets: BTreeSet<u64>,
        given: &mut Given,
    ) -> Result<PortId, Refused> {
        let ring = match &given.answer.outcome {
            Ok(Granted::Packet { ring }) => Some(*ring),
            _ => None,
        };
        let mut inner = self.lock();
        let number = inner.next_port;
        inner.next_port += 1;
        let Some(container) = inner.containers.get_mut(&end.index) else {
            return Err(Refused::new(Code::Interface, "your interface has gone", ""));
        };
        let kept = std::mem::take(&mut given.kept);
        container.ports.insert(number, Port { sockets, ring, _kept: kept, bytes: given.bytes });
        self.write(&inner);
        Ok(PortId { host_end: end.index, number })
    }

    /// The namespace and the sockets of ports, if they are there.
    pub(crate) fn port(&self, id: PortId) -> Option<(u64, BTreeSet<u64>)> {
        let inner = self.lock();
        let container = inner.containers.get(&id.host_end)?;
        Some((container.namespace, container.ports.get(&id.number)?.sockets.clone()))
    }

    /// Lets ports go that no process has any more. The kernel takes its time with the last
    /// descriptor of a ring.
    pub(crate) fn remove_port(&self, id: PortId) {
        let mut inner = self.lock();
        let container = inner.containers.get_mut(&id.host_end);
        let port = container.and_then(|container| container.ports.remove(&id.number));
        if port.is_some() {
            self.write(&inner);
        }
        drop(inner);
        drop(port);
    }
}

impl Inner {
    /// What the ports of a container take.
    fn taken(&self, host_end: u32) -> Taken {
        let ports = self.containers.get(&host_end).map(|container| &container.ports);
        ports.into_iter().flat_map(BTreeMap::values).map(Port::taken).sum()
    }
}

impl Port {
    fn taken(&self) -> Taken {
        Taken { ports: self.sockets.len(), bytes: self.bytes }
    }

    fn is_xdp(&self) -> bool {
        self.ring.is_none()
    }
}

impl From<&Port> for KnownPort {
    fn from(port: &Port) -> Self {
        let sockets = port.sockets.iter().copied().collect();
        Self { sockets, ring: port.ring, bytes: port.bytes }
    }
}
