//! The ports of containers: room for them, and the lists of those that were handed over.

use std::collections::{BTreeMap, BTreeSet};

use rocinante_netdev::Backend;
use rocinante_netdev::handed::{Code, Granted, Refused, Request, Ring};
use rocinante_netdev::{GiveLimits, Given, Kept};

use super::promise::Memory;
use super::{Container, Containers, HostEnd, Inner};
use crate::holders::Sought;
use crate::state::KnownPort;

/// The ports of one answer.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) sockets: BTreeSet<u64>,
    /// The receive ring of each; ports of `afxdp` have none.
    pub(super) ring: Option<Ring>,
    /// The guards of the rings.
    pub(super) kept: Vec<Kept>,
    /// Bytes of memory that the kernel keeps for them.
    pub(super) bytes: usize,
    /// Slots of each receive ring, of `afxdp` chunks.
    pub(super) slots: u32,
}

/// The resources that ports take.
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
        self.give_back(&mut self.containers.lock());
    }
}

impl Room<'_> {
    fn give_back(&mut self, inner: &mut Inner) {
        let taken = std::mem::take(&mut self.taken);
        let Some(reserved) = inner.reserved.get_mut(&self.host_end) else { return };
        reserved.ports -= taken.ports;
        reserved.bytes -= taken.bytes;
        if *reserved == Taken::default() {
            inner.reserved.remove(&self.host_end);
        }
    }

    /// Notes the ports for which it was reserved, which are about to be handed over. From then on
    /// they count themselves. Error: what to answer: the container has gone meanwhile.
    pub(crate) fn fill(
        mut self,
        sockets: BTreeSet<u64>,
        given: &mut Given,
    ) -> Result<PortId, Refused> {
        let (ring, slots) = match &given.answer.outcome {
            Ok(Granted::Packet { ring }) => (Some(*ring), ring.frames),
            Ok(Granted::Xdp { chunks }) => (None, *chunks),
            _ => (None, 0),
        };
        let (containers, host_end) = (self.containers, self.host_end);
        let mut inner = containers.lock();
        self.give_back(&mut inner);
        let number = inner.next_port;
        inner.next_port += 1;
        let Some(container) = inner.containers.get_mut(&host_end) else {
            return Err(Refused::new(Code::Interface, "your interface has gone", ""));
        };
        let kept = std::mem::take(&mut given.kept);
        let port = Port { sockets, ring, kept, bytes: given.bytes, slots };
        container.ports.insert(number, port);
        containers.write(&inner);
        Ok(PortId { host_end, number })
    }
}

/// Ports in the list of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortId {
    pub(crate) host_end: u32,
    pub(super) number: u64,
}

impl Containers {
    /// Reserves room for the ports of a request, and says how large they may be. Error: what to
    /// answer if there is none.
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
        let bounds = &end.bounds;
        if !bounds.has(request.backend) {
            let (class, backend) = (&bounds.class, request.backend);
            let reason = format!("containers of the class {class:?} get no port of {backend}");
            let hint = "see [[class]] in agent.toml, or choose another --netdev";
            return Err(Refused::new(Code::Forbidden, reason, hint));
        }
        let config = self.config();
        let mut inner = self.lock();
        let has_xdp = |container: &Container| container.ports.values().any(Port::is_xdp);
        if request.backend == Backend::Xdp && inner.containers.get(&end.index).is_some_and(has_xdp)
        {
            // Before anything is made for nothing.
            let reason = "your container has a port of afxdp on this interface already";
            return Err(Refused::new(Code::InUse, reason, "close it, or choose --netdev packet"));
        }
        let mut others = inner.in_use();
        let own = others.remove(&end.index).unwrap_or_default();
        let busy = |reason| {
            let class = &bounds.class;
            let hint = format!(
                "close ports, or see ports_max and ring_mib_max of the class {class:?} in agent.toml"
            );
            Err(Refused::new(Code::Busy, reason, hint))
        };
        if own.ports + request.shards.count > bounds.ports_max {
            return busy(format!("your container has {} ports already", own.ports));
        }
        let others: Vec<usize> = others.values().map(|taken| taken.bytes).collect();
        let allowed = Memory::new(&config, bounds.ring_mib_max).allowed(own.bytes, &others);
        let Some(limits) = GiveLimits::within(allowed.fair, allowed.most, request) else {
            let all = (own.bytes + others.iter().sum::<usize>()) >> 20;
            let own = own.bytes >> 20;
            return busy(format!("your container's ports have {own} MiB already, all have {all}"));
        };
        let ring_frames_max = limits.ring_frames_max.min(bounds.ring_frames_max);
        let limits = GiveLimits { ring_frames_max, ..limits };
        let bytes = limits.memory_bytes(request);
        let taken = Taken { ports: request.shards.count, bytes };
        let reserved = inner.reserved.entry(end.index).or_default();
        *reserved = *reserved + taken;
        Ok((Room { containers: self, host_end: end.index, taken }, limits))
    }

    /// The sockets of ports, if they are there.
    pub(crate) fn port(&self, id: PortId) -> Option<Sought> {
        let inner = self.lock();
        let container = inner.containers.get(&id.host_end)?;
        let sockets = container.ports.get(&id.number)?.sockets.clone();
        let all = inner.containers.values().map(|it| (it.namespace, &it.called));
        Some(Sought::of(sockets, (container.namespace, &container.called), all))
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
    /// The resources of each container that has ports or is about to.
    pub(super) fn in_use(&self) -> BTreeMap<u32, Taken> {
        let mut all = self.reserved.clone();
        for end in self.containers.keys() {
            let taken = self.taken(*end);
            if taken.ports > 0 {
                let of = all.entry(*end).or_default();
                *of = *of + taken;
            }
        }
        all
    }

    /// The resources that the ports of a container take.
    fn taken(&self, host_end: u32) -> Taken {
        let ports = self.containers.get(&host_end).map(|container| &container.ports);
        ports.into_iter().flat_map(BTreeMap::values).map(Port::taken).sum()
    }
}

impl Port {
    fn taken(&self) -> Taken {
        Taken { ports: self.sockets.len(), bytes: self.bytes }
    }

    pub(super) fn is_xdp(&self) -> bool {
        self.ring.is_none()
    }
}

impl From<&Port> for KnownPort {
    fn from(port: &Port) -> Self {
        let sockets = port.sockets.iter().copied().collect();
        Self { sockets, ring: port.ring, bytes: port.bytes, slots: port.slots }
    }
}

#[cfg(test)]
mod tests;
