//! The counters of a device in this process.

use rocinante::stats::DeviceCounters;
use serde_json::{Map, Value, json};

/// The counters that are not zero, one per line.
#[must_use]
pub fn text(counters: &DeviceCounters) -> String {
    let mut lines = vec!["counters of this process (those that are not 0):".to_owned()];
    for (group, name, count) in counters.iter().filter(|(_, _, count)| *count > 0) {
        lines.push(format!("  {:<40} {count}", format!("{group}.{name}")));
    }
    lines.join("\n")
}

/// All counters, by group.
#[must_use]
pub fn json(counters: &DeviceCounters) -> Value {
    let mut groups = Map::new();
    for (group, name, count) in counters.iter() {
        let of = groups.entry(group).or_insert_with(|| Value::Object(Map::new()));
        of[name] = json!(count);
    }
    Value::Object(groups)
}
