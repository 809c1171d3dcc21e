//! The status in words.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::class::Bounds;
use crate::host::{InForce, Means};
use crate::quota::Use;

use super::{AgentStatus, ClassStatus, ContainerStatus, Requests, UplinkStatus};

/// The agent and its containers, each in a few lines.
pub(super) fn status(agent: &AgentStatus, containers: &[ContainerStatus]) -> String {
    let AgentStatus { version, uptime_s, requests, .. } = agent;
    let mut out = format!(
        "rocinante-agent {version}, for {}: {} containers, {} ports, {}\n",
        time(*uptime_s),
        agent.containers,
        agent.ports,
        memory(agent.bytes),
    );
    add_requests(&mut out, requests);
    for UplinkStatus { interface, rate, fault } in &agent.uplinks {
        // Strings of formatting cannot fail.
        let _ = match fault {
            None => writeln!(out, "  uplink {interface:?}: {rate}, shared"),
            Some(why) => writeln!(out, "  uplink {interface:?}: not shared: {why}"),
        };
    }
    for container in containers {
        let ContainerStatus { name, namespace, interface, mac, .. } = container;
        let fixed = if container.fixed { ", addresses fixed" } else { "" };
        // Strings of formatting cannot fail.
        let _ = writeln!(out, "\n{name:?}: net:[{namespace}], interface {interface}, {mac}{fixed}");
        if let (Some(id), Some(engine)) = (&container.id, &container.engine) {
            let _ = writeln!(out, "  container: {id:?} of {engine:?}");
        }
        let _ = match &container.class {
            ClassStatus::Of(bounds) => writeln!(out, "  class: {:?}", bounds.class),
            ClassStatus::Gone { name } => {
                writeln!(out, "  class: {name:?}, which is not configured: it gets no port")
            }
        };
        let addresses: Vec<String> = container.addresses.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "  addresses: {}", or_none(&addresses.join(" ")));
        if !container.other_ways_out.is_empty() {
            let _ = writeln!(out, "  other ways out: {}", quoted(&container.other_ways_out));
        }
        add_rates(&mut out, container);
        add_uses(&mut out, container);
        if container.closed {
            out.push_str("  closed: no RoCEv2 leaves it, as no claim opens it\n");
        }
        let ports = container.ports.iter().map(|of| {
            let memory = memory(of.bytes);
            format!("{} {} with {} slots, {memory}", of.ports, of.backend, of.slots)
        });
        let ports: Vec<String> = ports.collect();
        let _ = writeln!(out, "  ports: {}", or_none(&ports.join("; ")));
        let _ = writeln!(out, "  dropped frames: {}", or_none(&counts(&container.dropped)));
        add_requests(&mut out, &container.requests);
    }
    out
}

fn add_rates(out: &mut String, container: &ContainerStatus) {
    if let Some(fault) = &container.rate_fault {
        let _ = writeln!(out, "  rates: not in force: {fault}");
        return;
    }
    let ClassStatus::Of(Bounds { rates, .. }) = &container.class else { return };
    let rates = [
        ("into it", rates.ingress, container.ingress),
        ("out of it", rates.egress, container.egress),
    ];
    for (way, rate, in_force) in rates {
        let (Some(rate), Some(InForce { by, delayed, dropped, .. })) = (rate, in_force) else {
            continue;
        };
        let how = match by {
            Means::Shaper => format!("{delayed} frames delayed, {dropped} dropped"),
            Means::Policer => {
                format!("{dropped} frames dropped, none delayed: nft chains are at its ingress")
            }
        };
        let _ = writeln!(out, "  rate {way}: {rate}, {how}");
    }
}

fn add_uses(out: &mut String, container: &ContainerStatus) {
    for (name, it) in &container.rdma {
        let Use { max, current, peak, events } = it;
        let max = max.map_or("max".to_owned(), |max| max.to_string());
        let _ = writeln!(out, "  {name}: {current} of {max}, peak {peak}, {events} refused");
    }
    if container.cut_off {
        let _ = writeln!(out, "  cut off: its programs hold more than they may");
    }
}

fn add_requests(out: &mut String, requests: &Requests) {
    let Requests { granted, lost, refused, waited } = requests;
    let refused = match counts(refused) {
        none if none.is_empty() => "0 refused".to_owned(),
        counts => format!("refused: {counts}"),
    };
    let _ = write!(out, "  requests: {granted} granted, {lost} hung up, {refused}");
    if granted + lost > 0 {
        let [p50, p99, max, mean] =
            [waited.p50_us, waited.p99_us, waited.max_us, waited.mean_us].map(|us| us as f64 / 1e3);
        let _ = write!(out, "; waited {p50:.1} ms in the middle, {p99:.1} of 99 %");
        let _ = write!(out, ", {max:.1} at most, {mean:.1} in the mean");
    }
    out.push('\n');
}

fn counts(counts: &BTreeMap<String, u64>) -> String {
    let counts = counts.iter().filter(|(_, count)| **count > 0);
    counts.map(|(kind, count)| format!("{kind} {count}")).collect::<Vec<_>>().join(", ")
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" ")
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

fn memory(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn time(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PortStatus, Waited};
    use super::*;

    #[test]
    fn the_words_have_each_number() {
        let waited = Waited { p50_us: 1500, p99_us: 20_000, max_us: 30_000, mean_us: 2000 };
        let refused = [("busy".to_owned(), 3), ("failed".to_owned(), 0)].into();
        let requests = Requests { granted: 4, lost: 1, refused, waited };
        let agent = AgentStatus {
            version: "1.2.3".into(),
            uptime_s: 3 * 3600 + 61,
            containers: 1,
            ports: 2,
            bytes: 3 << 19,
            requests: requests.clone(),
            uplinks: Vec::new(),
        };
        let ports = PortStatus { backend: "packet".into(), ports: 2, slots: 360, bytes: 3 << 19 };
        let mut container = ContainerStatus {
            name: "veth0\n".into(),
            id: None,
            engine: None,
            class: ClassStatus::Gone { name: "go\"ld".into() },
            namespace: 4711,
            interface: 2,
            mac: "02:00:00:00:00:01".into(),
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            fixed: true,
            other_ways_out: vec!["net1".into(), "a\n".into()],
            ports: vec![ports],
            ingress: None,
            egress: None,
            rate_fault: None,
            rdma: Default::default(),
            cut_off: false,
            closed: false,
            dropped: [("ipv4".to_owned(), 7), ("arp".to_owned(), 0)].into(),
            requests,
        };
        let said = status(&agent, std::slice::from_ref(&container));
        let asked = "  requests: 4 granted, 1 hung up, refused: busy 3; waited 1.5 ms in the \
                     middle, 20.0 of 99 %, 30.0 at most, 2.0 in the mean\n";
        let first = "rocinante-agent 1.2.3, for 3 h 1 min: 1 containers, 2 ports, 1.5 MiB\n";
        let second = "\n\"veth0\\n\": net:[4711], interface 2, 02:00:00:00:00:01, addresses fixed\n  \
                      class: \"go\\\"ld\", which is not configured: it gets no port\n  \
                      addresses: 10.0.0.1 fd00::1\n  other ways out: \"net1\" \"a\\n\"\n  \
                      ports: 2 packet with 360 slots, 1.5 MiB\n  \
                      dropped frames: ipv4 7\n";
        assert_eq!(said, format!("{first}{asked}{second}{asked}"));
        let bounds = crate::config::Config::default().bounds(&crate::class::Subject {
            end: "veth0",
            id: None,
            engine: None,
            addresses: &Default::default(),
            class: None,
            rates: Default::default(),
        });
        container.class = ClassStatus::Of(bounds.expect("the default"));
        container.ports.clear();
        container.dropped.clear();
        container.requests = Requests::default();
        let most = crate::quota::RdmaMax([rocinante_netdev::handed::page::NO_LIMIT, 3, 4]);
        let (current, peak, events) = ([1, 2, 3], [4, 5, 6], [0, 7, 0]);
        container.rdma =
            most.uses(&rocinante_netdev::handed::page::Usage { current, peak, events });
        (container.cut_off, container.closed) = (true, true);
        let said = status(&agent, &[container]);
        assert!(said.contains("  class: \"default\"\n"), "{said}");
        let held = "  hca_handle: 1 of max, peak 4, 0 refused\n  hca_object: 2 of 3, peak 5, 7 \
                    refused\n  mr_bytes: 3 of 4, peak 6, 0 refused\n  cut off: its programs hold more \
                    than they may\n  closed: no RoCEv2 ";
        assert!(said.contains(held), "{said}");
        let nothing = "  ports: none\n  dropped frames: none\n  requests: 0 granted, 0 hung up, 0 \
                       refused\n";
        assert!(said.ends_with(nothing), "{said}");
        let times = [3, 60, 86_400 + 7200].map(time);
        assert_eq!(times, ["3 s", "1 min", "1 d 2 h"]);
    }
}
