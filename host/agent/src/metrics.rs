//! The facts of a scrape: as metrics, and as JSON.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeMetric as _, MetricEncoder, prometheus_text, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use rocinante_netdev::for_agent::rtnl::Queued;
use rocinante_netdev::handed::page::{COUNTERS, OBJECTS, QueuePair, SERVICES, STATES};
use serde_json::{Value, json};

use crate::control::{AgentStatus, ContainerStatus, Requests};
use crate::host::LinkCounts;
use crate::pages::Sum;
use crate::quota::{Use, Uses};
use crate::waits::Waits;

/// The facts at one moment.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    pub(crate) agent: AgentStatus,
    pub(crate) waits: Waits,
    pub(crate) ring: RingMemory,
    pub(crate) containers: Vec<ContainerFacts>,
}

/// The memory for rings, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RingMemory {
    /// The most that all ports may take.
    pub(crate) limit: usize,
    /// The part that each container is promised.
    pub(crate) promised_each: usize,
    /// That of the ports that are there.
    pub(crate) used: usize,
}

/// A host's end.
#[derive(Debug, Default)]
pub(crate) struct ContainerFacts {
    pub(crate) name: String,
    /// If it has, or had, ports.
    pub(crate) status: Option<ContainerStatus>,
    /// The kernel's counts.
    pub(crate) link: Option<LinkCounts>,
    /// Its queueing disciplines'.
    pub(crate) queued: Option<Queued>,
    /// The program's, by the names of its devices.
    pub(crate) devices: BTreeMap<String, Sum>,
    /// Requests of its network namespace.
    pub(crate) requests: Requests,
    /// What its programs hold.
    pub(crate) rdma: Uses,
}

impl ContainerFacts {
    /// Devices of `udp`, if its programs asked for more in vain.
    fn fallen_back(&self) -> usize {
        let asked = self.requests.lost + self.requests.refused.values().sum::<u64>();
        let open = |sum: &Sum| sum.open.get("udp").map_or(0, Vec::len);
        if asked > 0 { self.devices.values().map(open).sum() } else { 0 }
    }

    fn json(&self) -> Value {
        let mut value = match &self.status {
            Some(status) => json!(status),
            None => json!({ "name": self.name, "requests": self.requests, "rdma": self.rdma }),
        };
        let devices: Vec<Value> =
            self.devices.iter().map(|(name, sum)| device(name, sum)).collect();
        value["devices"] = devices.into();
        if let Some(link) = &self.link {
            value["host_end"] = json!(link);
        }
        if let Some(queued) = &self.queued {
            value["host_end_queue"] = json!(queued);
        }
        value
    }
}

fn device(name: &str, sum: &Sum) -> Value {
    let counters: BTreeMap<&str, u64> = sum.counters.iter().collect();
    let objects: BTreeMap<&str, u64> = OBJECTS.into_iter().zip(sum.objects).collect();
    let open = sum.open.iter().flat_map(|(backend, reasons)| {
        reasons.iter().map(move |why| json!({ "backend": backend, "why": why }))
    });
    let open: Vec<Value> = open.collect();
    let mut value = json!({
        "device": name, "open": open, "objects": objects, "counters": counters,
    });
    if !sum.queue_pairs.is_empty() {
        value["queue_pairs"] = sum.queue_pairs.iter().map(queue_pair).collect();
    }
    value
}

fn queue_pair(qp: &QueuePair) -> Value {
    json!({
        "number": qp.numbers[0],
        "peer_number": qp.numbers[1],
        "peer": qp.peer,
        "service": SERVICES.get(usize::from(qp.service)),
        "state": STATES.get(usize::from(qp.state)),
        "sent_packets": qp.sent[0],
        "sent_bytes": qp.sent[1],
        "received_packets": qp.received[0],
        "received_bytes": qp.received[1],
        "repeated_packets": qp.repeated,
        "receiver_not_ready": qp.not_ready,
        "sent_requests": qp.requests[0],
        "received_requests": qp.requests[1],
        "held_by_peer": qp.held[0],
        "held_by_network": qp.held[1],
    })
}

/// All containers, as JSON.
pub(crate) fn containers(facts: &Facts) -> Value {
    facts.containers.iter().map(ContainerFacts::json).collect()
}

pub(crate) fn container(facts: &Facts, name: &str) -> Option<Value> {
    facts.containers.iter().find(|it| it.name == name).map(ContainerFacts::json)
}

/// The agent, as JSON.
pub(crate) fn node(facts: &Facts) -> Value {
    let RingMemory { limit, promised_each, used } = facts.ring;
    let ring = json!({ "limit": limit, "promised_each": promised_each, "used": used });
    let fallen_back = facts.containers.iter().filter(|it| it.fallen_back() > 0).count();
    json!({ "agent": facts.agent, "ring_bytes": ring, "containers_fallen_back": fallen_back })
}

/// A text format for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    OpenMetrics,
    /// Prometheus's, which has no type for facts. promtool reads it alone.
    Prometheus,
}

impl Format {
    /// The kind of text, for HTTP.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }
}

/// All, as metrics. Error: none that is known.
pub(crate) fn text(facts: Facts, format: Format) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(facts));
    let mut to = String::new();
    match format {
        Format::OpenMetrics => text::encode(&mut to, &registry)?,
        Format::Prometheus => prometheus_text::encode(&mut to, &registry)?,
    }
    Ok(to)
}

/// Writes metrics with labels.
struct Family<'a>(MetricEncoder<'a>);

type Labels<'a> = &'a [(&'a str, &'a str)];

impl Family<'_> {
    fn counter(&mut self, labels: Labels<'_>, value: u64) -> fmt::Result {
        ConstCounter::new(value).encode(self.0.encode_family(&labels)?)
    }

    fn gauge(&mut self, labels: Labels<'_>, value: u64) -> fmt::Result {
        ConstGauge::new(value).encode(self.0.encode_family(&labels)?)
    }
}

impl Facts {
    fn devices(&self) -> impl Iterator<Item = (&str, &str, &Sum)> {
        self.containers.iter().flat_map(|it| {
            it.devices.iter().map(|(device, sum)| (it.name.as_str(), device.as_str(), sum))
        })
    }

    /// The counters of programs, by themselves.
    fn encode_pages(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (at, (name, help)) in COUNTERS.iter().enumerate() {
            let name = format!("rocinante_{name}");
            let mut family = family(to, &name, help, MetricType::Counter)?;
            for (container, device, sum) in self.devices() {
                let labels = [("container", container), ("device", device)];
                family.counter(&labels, sum.counters.0[at])?;
            }
        }
        let help = "Objects of open devices";
        let mut objects = family(to, "rocinante_objects", help, MetricType::Gauge)?;
        for (container, device, sum) in self.devices() {
            for (kind, count) in OBJECTS.iter().zip(sum.objects) {
                let labels = [("container", container), ("device", device), ("kind", kind)];
                objects.gauge(&labels, count)?;
            }
        }
        let help = "Open devices by their backends";
        let mut open = family(to, "rocinante_open_devices", help, MetricType::Gauge)?;
        for (container, device, sum) in self.devices() {
            for (backend, reasons) in &sum.open {
                let labels = [("container", container), ("device", device), ("backend", backend)];
                open.gauge(&labels, reasons.len() as u64)?;
            }
        }
        Ok(())
    }

    /// Limits that programs keep.
    fn encode_uses(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Value = fn(&Use) -> Option<u64>;
        let series: [(&str, &str, MetricType, Value); 4] = [
            ("max", "The most that programs may hold", MetricType::Gauge, |it| it.max),
            ("current", "What programs hold", MetricType::Gauge, |it| Some(it.current)),
            ("peak", "The most that programs held", MetricType::Gauge, |it| Some(it.peak)),
            ("events", "Refusals", MetricType::Counter, |it| Some(it.events)),
        ];
        for (name, help, kind, value) in series {
            let name = format!("rocinante_rdma_{name}");
            let mut family = family(to, &name, help, kind)?;
            let all = self.containers.iter();
            let all = all.flat_map(|it| it.rdma.iter().map(move |of| (it.name.as_str(), of)));
            for (container, (resource, of)) in all {
                let Some(value) = value(of) else { continue };
                let labels = [("container", container), ("resource", resource)];
                match kind {
                    MetricType::Counter => family.counter(&labels, value)?,
                    _ => family.gauge(&labels, value)?,
                }
            }
        }
        Ok(())
    }

    /// The kernel's counters at hosts' ends.
    fn encode_links(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Count = fn(&LinkCounts) -> u64;
        let counts: [(&str, &str, Count); 4] = [
            ("received_bytes", "Bytes that containers sent", |it| it.received_bytes),
            ("received_packets", "Packets that containers sent", |it| it.received_packets),
            ("sent_bytes", "Bytes sent to containers", |it| it.sent_bytes),
            ("sent_packets", "Packets sent to containers", |it| it.sent_packets),
        ];
        for (name, help, count) in counts {
            let name = format!("rocinante_host_end_{name}");
            let mut family = family(to, &name, help, MetricType::Counter)?;
            for it in &self.containers {
                let Some(link) = &it.link else { continue };
                family.counter(&[("container", &it.name)], count(link))?;
            }
        }
        let help = "Frames of the container that the program at its host's end dropped";
        let mut forged = family(to, "rocinante_forged_frames", help, MetricType::Counter)?;
        for (name, status) in self.known() {
            for (reason, count) in &status.dropped {
                forged.counter(&[("container", name), ("reason", reason)], *count)?;
            }
        }
        Ok(())
    }

    fn known(&self) -> impl Iterator<Item = (&str, &ContainerStatus)> {
        self.containers.iter().filter_map(|it| Some((it.name.as_str(), it.status.as_ref()?)))
    }

    /// The agent's own counters.
    fn encode_agent(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Version of the agent";
        let mut version = family(to, "rocinante_agent_build", help, MetricType::Info)?;
        version.0.encode_info(&[("version", self.agent.version.as_str())])?;

        let help = "Seconds that the agent has run";
        let mut uptime = family(to, "rocinante_agent_uptime_seconds", help, MetricType::Gauge)?;
        uptime.0.encode_gauge(&self.agent.uptime_s)?;

        let help = "Requests for ports by their outcome";
        let mut requests = family(to, "rocinante_agent_requests", help, MetricType::Counter)?;
        let Requests { granted, lost, refused, .. } = &self.agent.requests;
        requests.counter(&[("outcome", "granted")], *granted)?;
        requests.counter(&[("outcome", "lost")], *lost)?;
        for (code, count) in refused {
            requests.counter(&[("outcome", code)], *count)?;
        }

        let help = "How long those waited that were granted or lost";
        let name = "rocinante_agent_request_wait_seconds";
        let mut waits = family(to, name, help, MetricType::Histogram)?;
        let (sum, count, buckets) = self.waits.histogram();
        let none = None::<&std::collections::HashMap<usize, Exemplar<[(&str, &str); 0], f64>>>;
        waits.0.encode_histogram(sum, count, &buckets, none)?;

        let help = "Memory of receive rings: the most of all, the part promised to each \
                    container, and that of open ports";
        let mut ring = family(to, "rocinante_agent_ring_bytes", help, MetricType::Gauge)?;
        let RingMemory { limit, promised_each, used } = self.ring;
        for (kind, bytes) in [("limit", limit), ("promised_each", promised_each), ("used", used)] {
            ring.gauge(&[("kind", kind)], bytes as u64)?;
        }

        let help = "Open devices of udp in a container whose programs asked for more in vain";
        let mut fallen = family(to, "rocinante_fallen_back_devices", help, MetricType::Gauge)?;
        for it in &self.containers {
            fallen.gauge(&[("container", &it.name)], it.fallen_back() as u64)?;
        }

        let help = "Ports handed over that are open";
        let mut ports = family(to, "rocinante_ports", help, MetricType::Gauge)?;
        for (name, status) in self.known() {
            for port in &status.ports {
                let labels = [("container", name), ("backend", &port.backend)];
                ports.gauge(&labels, port.ports as u64)?;
            }
        }

        let help = "The engine's name for a container";
        let mut names = family(to, "rocinante_container", help, MetricType::Info)?;
        let mut seen = HashSet::new();
        for (name, status) in self.known().filter(|(name, _)| seen.insert(*name)) {
            let id = status.id.as_deref().unwrap_or_default();
            let engine = status.engine.as_deref().unwrap_or_default();
            let labels: Labels<'_> = &[("container", name), ("id", id), ("engine", engine)];
            names.0.encode_info(&labels)?;
        }
        Ok(())
    }
}

impl Collector for Facts {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_pages(&mut to)?;
        self.encode_uses(&mut to)?;
        self.encode_links(&mut to)?;
        self.encode_agent(&mut to)
    }
}

fn family<'a>(
    to: &'a mut DescriptorEncoder<'_>,
    name: &'a str,
    help: &str,
    kind: MetricType,
) -> Result<Family<'a>, fmt::Error> {
    to.encode_descriptor(name, help, None, kind).map(Family)
}

#[cfg(test)]
mod tests;
