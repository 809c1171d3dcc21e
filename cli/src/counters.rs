//! The counters of a device in this process.

use rocinante::stats::DeviceCounters;
use serde_json::{Map, Value, json};

/// The counters that are not zero, one per line.
#[must_use]
pub fn text(counters: &DeviceCounters) -> String {
    let mut lines = vec!["counters of this process (those that are not 0):".to_owned()];
    for (group, list) in groups(counters) {
        let list = list.into_iter().filter(|(_, count)| *count > 0);
        lines.extend(
            list.map(|(name, count)| format!("  {:<40} {count}", format!("{group}.{name}"))),
        );
    }
    lines.join("\n")
}

/// All counters, by group.
#[must_use]
pub fn json(counters: &DeviceCounters) -> Value {
    let groups = groups(counters).into_iter().map(|(group, list)| {
        let list: Map<String, Value> =
            list.into_iter().map(|(name, count)| (name.to_owned(), json!(count))).collect();
        (group.to_owned(), Value::Object(list))
    });
    Value::Object(groups.collect())
}

type Group = (&'static str, Vec<(&'static str, u64)>);

fn groups(counters: &DeviceCounters) -> [Group; 5] {
    let port = &counters.port;
    [
        ("transport", counters.transport.iter().collect()),
        ("drops", counters.drops.iter().collect()),
        (
            "limits_hit",
            counters.limits_hit.iter().map(|(limit, count)| (limit.name(), count)).collect(),
        ),
        (
            "port",
            vec![
                ("rx_datagrams", port.rx_datagrams),
                ("rx_bytes", port.rx_bytes),
                ("rx_runs", port.rx_runs),
                ("rx_queue_drops", port.rx_queue_drops),
                ("rx_malformed", port.rx_malformed),
                ("tx_datagrams", port.tx_datagrams),
                ("tx_bytes", port.tx_bytes),
                ("tx_runs", port.tx_runs),
                ("tx_failed", port.tx_failed),
                ("tx_blocked", port.tx_blocked),
                ("tx_unresolved", port.tx_unresolved),
            ],
        ),
        (
            "shards",
            vec![
                ("handed_over", counters.handed_over.0),
                ("handed_over_lost", counters.handed_over.1),
            ],
        ),
    ]
}
