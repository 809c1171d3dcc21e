use std::collections::{BTreeMap, BTreeSet};

use rocinante_netdev::handed::page::{self, NO_LIMIT, Usage};

use super::*;
use crate::control::{PortStatus, Waited};
use crate::quota::RdmaMax;

/// Two containers, with two of each thing.
fn facts() -> Facts {
    let requests = Requests {
        granted: 3,
        lost: 1,
        refused: [("busy", 2), ("forbidden", 1)].map(|(code, n)| (code.to_owned(), n)).into(),
        waited: Waited::default(),
    };
    let sum = |count, backend| Sum {
        counters: page::Counts([count; COUNTERS.len()]),
        objects: [count; OBJECTS.len()],
        open: BTreeMap::from([(backend, vec!["it is \"so\"".to_owned(); 2])]),
        queue_pairs: Vec::new(),
    };
    let port =
        |backend: &str| PortStatus { backend: backend.into(), ports: 2, ..PortStatus::default() };
    let container = |name: &str, backend| ContainerFacts {
        name: name.into(),
        status: Some(ContainerStatus {
            name: name.into(),
            id: Some(format!("{name}\\\"\n")),
            engine: Some("podman".into()),
            ports: vec![port("packet"), port("afxdp")],
            dropped: [("mac", 4), ("ip", 5)].map(|(why, n)| (why.to_owned(), n)).into(),
            ..ContainerStatus::default()
        }),
        link: Some(LinkCounts { received_bytes: 7, ..LinkCounts::default() }),
        queued: Some(Queued { backlog_packets: 3, ..Queued::default() }),
        devices: BTreeMap::from([
            ("eth0".into(), sum(8, backend)),
            ("eth1".into(), sum(9, backend)),
        ]),
        requests: requests.clone(),
        rdma: RdmaMax([2, NO_LIMIT, 100]).uses(&Usage {
            current: [1, 5, 50],
            peak: [2, 6, 60],
            events: [3, 0, 7],
        }),
    };
    Facts {
        agent: AgentStatus { requests: requests.clone(), ..AgentStatus::default() },
        containers: vec![container("v1", "udp"), container("v2", "packet")],
        ..Facts::default()
    }
}

/// The names of all samples.
fn names(text: &str) -> BTreeSet<&str> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.filter_map(|line| line.split(['{', ' ']).next()).collect()
}

#[test]
fn a_scrape_has_each_thing_once_with_its_labels() {
    let text = text(facts(), Format::OpenMetrics).expect("encoded");
    for line in [
        "rocinante_sent_pkts_total{container=\"v1\",device=\"eth0\"} 8",
        "rocinante_retrans_pkts_total{container=\"v2\",device=\"eth1\"} 9",
        "rocinante_objects{container=\"v2\",device=\"eth0\",kind=\"qp\"} 8",
        "rocinante_open_devices{container=\"v1\",device=\"eth1\",backend=\"udp\"} 2",
        "rocinante_rdma_max{container=\"v1\",resource=\"mr_bytes\"} 100",
        "rocinante_rdma_current{container=\"v2\",resource=\"hca_object\"} 5",
        "rocinante_rdma_peak{container=\"v1\",resource=\"hca_handle\"} 2",
        "rocinante_rdma_events_total{container=\"v1\",resource=\"mr_bytes\"} 7",
        "rocinante_host_end_received_bytes_total{container=\"v2\"} 7",
        "rocinante_forged_frames_total{container=\"v1\",reason=\"mac\"} 4",
        "rocinante_agent_requests_total{outcome=\"busy\"} 2",
        "rocinante_agent_request_wait_seconds_bucket{le=\"+Inf\"} 0",
        "rocinante_agent_ring_bytes{kind=\"promised_each\"} 0",
        "rocinante_fallen_back_devices{container=\"v1\"} 4",
        "rocinante_fallen_back_devices{container=\"v2\"} 0",
        "rocinante_ports{container=\"v1\",backend=\"afxdp\"} 2",
        "rocinante_container_info{container=\"v2\",id=\"v2\\\\\\\"\\n\",engine=\"podman\"} 1",
        "# TYPE rocinante_sent_pkts counter",
        "# EOF",
    ] {
        assert_eq!(text.lines().filter(|it| *it == line).count(), 1, "{line}\n{text}");
    }
    let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let series: BTreeSet<&str> =
        samples.iter().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
    assert_eq!(series.len(), samples.len(), "no series is there twice");
    let all = names(&text);
    for (name, _) in COUNTERS {
        assert!(all.contains(format!("rocinante_{name}_total").as_str()), "{name}");
    }
}

#[test]
fn the_json_has_the_same_figures() {
    let facts = facts();
    let all = containers(&facts);
    assert_eq!(all[0]["name"], "v1");
    assert_eq!(all[1]["devices"][1]["counters"]["sent_pkts"], 9);
    assert_eq!(all[0]["devices"][0]["open"][1]["backend"], "udp");
    assert_eq!(all[0]["host_end"]["received_bytes"], 7);
    assert_eq!(all[1]["host_end_queue"]["backlog_packets"], 3);
    assert_eq!(container(&facts, "v2").expect("it is there"), all[1]);
    assert_eq!(container(&facts, "v3"), None);
    assert_eq!(node(&facts)["containers_fallen_back"], 1);
    let none = ContainerFacts { name: "v9".into(), ..ContainerFacts::default() };
    assert_eq!(none.json()["name"], "v9");
}

/// Requests that were refused or lost, of a container with devices of two backends.
#[test]
fn a_container_fell_back_if_it_asked_in_vain() {
    for (lost, refusals, fallen) in [(0, 0, 0), (1, 0, 4), (0, 1, 4), (2, 3, 4)] {
        let mut facts = facts();
        let of_packet = facts.containers[1].devices["eth0"].clone();
        let one = &mut facts.containers[0];
        let refused = [("busy".to_owned(), 0), ("forbidden".to_owned(), refusals)].into();
        one.requests = Requests { granted: 9, lost, refused, ..Requests::default() };
        one.devices.insert("eth2".into(), of_packet);
        assert_eq!(one.fallen_back(), fallen, "{lost} lost, {refusals} refused");
    }
}

/// The metrics that an expression of PromQL names.
fn named(expression: &str) -> impl Iterator<Item = &str> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    expression.split(move |c| !is_word(c)).filter(|word| word.starts_with("rocinante_"))
}

/// All values of the key `expr` in a JSON document.
fn expressions(of: &Value, into: &mut Vec<String>) {
    match of {
        Value::Object(all) => {
            into.extend(all.get("expr").and_then(Value::as_str).map(str::to_owned));
            all.values().for_each(|it| expressions(it, into));
        }
        Value::Array(all) => all.iter().for_each(|it| expressions(it, into)),
        _ => {}
    }
}

#[test]
fn the_dashboard_and_the_alerts_name_metrics_of_a_scrape() {
    let text = text(facts(), Format::OpenMetrics).expect("encoded");
    let all = names(&text);
    // The other format has the same samples.
    let plain = super::text(facts(), Format::Prometheus).expect("encoded");
    assert_eq!(names(&plain), all);
    let dashboard: Value =
        serde_json::from_str(include_str!("../../dist/grafana.json")).expect("JSON");
    let mut wanted = Vec::new();
    expressions(&dashboard, &mut wanted);
    assert!(wanted.len() >= 10, "{}", wanted.len());
    let alerts = include_str!("../../dist/alerts.yml");
    let of_alerts: Vec<String> =
        alerts.lines().filter_map(|line| Some(line.split_once("expr: ")?.1.into())).collect();
    assert!(of_alerts.len() >= 5, "{of_alerts:?}");
    for expression in wanted.iter().chain(&of_alerts) {
        assert!(named(expression).next().is_some(), "{expression} names none");
        for name in named(expression) {
            assert!(all.contains(name), "{expression}: a scrape has no {name}");
        }
    }
}
