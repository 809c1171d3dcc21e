//! Reports about containers, for an operator.

use std::collections::{BTreeMap, BTreeSet};

use super::ports::Port;
use super::promise::Memory;
use super::{Container, Containers, Inner};
use crate::called::Called;
use crate::config::Config;
use crate::control::{ContainerStatus, PortStatus};
use crate::host::{ADDRESSES_MAX, Reason, Shaper, SourceFilter};
use crate::limits::Share;
use crate::metrics::RingMemory;

/// The shortest beginning of a container's name that names it.
const ID_LEAST: usize = 4;

/// All containers in numbers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) containers: usize,
    pub(crate) ports: usize,
    /// Bytes of kernel memory.
    pub(crate) bytes: usize,
}

impl Containers {
    /// The numbers of all.
    pub(crate) fn totals(&self) -> Totals {
        let inner = self.lock();
        let ports = || inner.containers.values().flat_map(|container| container.ports.values());
        Totals {
            containers: inner.containers.len(),
            ports: ports().map(|port| port.sockets.len()).sum(),
            bytes: ports().map(|port| port.bytes).sum(),
        }
    }

    pub(crate) fn ring_memory(&self) -> RingMemory {
        let config = self.config();
        let inner = self.lock();
        let memory = Memory::new(&config, config.ring_mib_max);
        let (limit, promised_each) = memory.promised(inner.in_use().len());
        drop(inner);
        RingMemory { limit, promised_each, used: self.totals().bytes }
    }

    /// The containers, or the one with this host's end.
    pub(crate) fn report(&self, name: Option<&str>) -> Vec<ContainerStatus> {
        let inner = self.lock();
        let config = self.config();
        let meant = name.map(|name| inner.meant(name));
        let wanted = inner.containers.iter();
        let wanted = wanted.filter(|(end, _)| meant.as_ref().is_none_or(|it| it.contains(end)));
        let reports = wanted.map(|(end, container)| {
            let mut report = container.report(&config);
            report.requests = inner.journal.requests(Some(Share::Container(container.namespace)));
            report.cut_off = inner.cut_off.contains_key(&container.namespace);
            report.closed = inner.closes(container);
            (*end, report)
        });
        let mut reports: Vec<(u32, ContainerStatus)> = reports.collect();
        // Nothing waits for the questions to the kernel.
        drop(inner);
        let uses = self.pages.uses();
        for (end, report) in &mut reports {
            let dropped = SourceFilter::find(*end).ok().flatten();
            let dropped = dropped.and_then(|filter| filter.all_dropped().ok());
            let counts = Reason::ALL.iter().zip(dropped.into_iter().flatten());
            let shaped = Shaper::open().and_then(|mut it| it.in_force(*end));
            [report.ingress, report.egress] = shaped.unwrap_or_default();
            report.rdma = uses.get(&report.namespace).cloned().unwrap_or_default();
            report.dropped = counts.map(|(why, count)| (why.to_string(), count)).collect();
        }
        reports.into_iter().map(|(_, report)| report).collect()
    }
}

impl Inner {
    /// The hosts' ends that an operator means: the one with this name, else those of the containers
    /// that their engines call so, else of those whose name begins so.
    pub(super) fn meant(&self, name: &str) -> BTreeSet<u32> {
        let by = |is_meant: &dyn Fn(&Container) -> bool| -> BTreeSet<u32> {
            self.containers.iter().filter(|(_, it)| is_meant(it)).map(|(end, _)| *end).collect()
        };
        let is_id = |it: &Container| it.called().is_some_and(|called| called.id == name);
        let begins = |it: &Container| it.called().is_some_and(|it| it.id.starts_with(name));
        let by_name = [by(&|it| it.name == name), by(&is_id)].into_iter();
        let by_beginning = (name.len() >= ID_LEAST).then(|| by(&begins));
        by_name.chain(by_beginning).find(|ends| !ends.is_empty()).unwrap_or_default()
    }
}

impl Container {
    /// Its engine's name for it: the engine's own word is the last one.
    pub(super) fn called(&self) -> Option<&Called> {
        self.introduced.as_ref().map(|it| &it.called).or(self.called.as_ref())
    }

    /// The name of its host's end, and its engine's for it, as the log has them.
    pub(super) fn label(&self) -> String {
        match self.called() {
            Some(called) => format!("{} ({called})", self.name),
            None => self.name.clone(),
        }
    }

    fn report(&self, config: &Config) -> ContainerStatus {
        let mut ports = BTreeMap::<&str, PortStatus>::new();
        for port in self.ports.values() {
            let backend = port.backend();
            let new = || PortStatus { backend: backend.into(), ports: 0, slots: 0, bytes: 0 };
            let of = ports.entry(backend).or_insert_with(new);
            of.ports += port.sockets.len();
            of.slots += u64::from(port.slots) * port.sockets.len() as u64;
            of.bytes += port.bytes;
        }
        ContainerStatus {
            name: self.name.clone(),
            id: self.called().map(|it| it.id.clone()),
            engine: self.called().map(|it| it.engine.clone()),
            class: self.class(config),
            namespace: self.namespace,
            interface: self.peer.1,
            mac: mac(self.sources.mac),
            addresses: self.sources.addresses.iter().take(ADDRESSES_MAX).copied().collect(),
            fixed: self.fixed.is_some(),
            other_ways_out: self.unguarded.values().cloned().collect(),
            ports: ports.into_values().collect(),
            ingress: None,
            egress: None,
            rate_fault: self.shaped.fault.clone(),
            rdma: BTreeMap::new(),
            cut_off: false,
            closed: false,
            dropped: BTreeMap::new(),
            requests: Default::default(),
        }
    }
}

impl Port {
    fn backend(&self) -> &'static str {
        if self.is_xdp() { "afxdp" } else { "packet" }
    }
}

pub(super) fn mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
