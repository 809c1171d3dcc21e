//! The sums of all that is promised.

use std::collections::BTreeMap;

use serde_json::Value;

/// Rates by node and uplink.
type Sums = BTreeMap<(String, String), u64>;

/// All that is promised at every resource version.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    /// Versions at which an uplink had promised more than it has.
    pub(crate) over: usize,
    /// The most that any uplink had promised too much, in bits per second.
    pub(crate) worst: u64,
    /// Pods that were bound at any time.
    pub(crate) bound: usize,
    /// The most that all uplinks had promised at once.
    pub(crate) most: u64,
}

impl Audit {
    /// Replays a log: of each change the node or the pod, before and after it. The sums are made
    /// here anew, from the annotations alone.
    pub(crate) fn of<'a>(
        log: impl IntoIterator<Item = (Option<&'a Value>, Option<&'a Value>)>,
    ) -> Self {
        let (mut capacity, mut promised) = (Sums::new(), Sums::new());
        let mut audit = Self::default();
        for (before, after) in log {
            let uplinks = after.map_or_else(Vec::new, |it| annotation(it, rocinante_kube::UPLINKS));
            if let (Some(node), false) = (after, uplinks.is_empty()) {
                for uplink in uplinks {
                    let name = uplink["name"].as_str().unwrap();
                    let at = (text(&node["metadata"]["name"]), name.to_owned());
                    capacity.insert(at, uplink["egress"].as_u64().unwrap());
                }
                continue;
            }
            for (at, rate) in before.map_or_else(Vec::new, holds) {
                *promised.get_mut(&at).expect("it was promised before") -= rate;
            }
            for (at, rate) in after.map_or_else(Vec::new, holds) {
                *promised.entry(at).or_default() += rate;
            }
            audit.bound +=
                usize::from(!before.is_some_and(is_bound) && after.is_some_and(is_bound));
            let over = promised.iter().map(|(at, sum)| sum.saturating_sub(capacity[at]));
            let worst = over.max().unwrap_or(0);
            audit.over += usize::from(worst > 0);
            audit.worst = audit.worst.max(worst);
            audit.most = audit.most.max(promised.values().sum());
        }
        audit
    }
}

fn is_bound(pod: &Value) -> bool {
    pod["spec"]["nodeName"].is_string()
}

/// The places of a pod that is bound, and has not ended.
fn holds(pod: &Value) -> Vec<((String, String), u64)> {
    let has_ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if !is_bound(pod) || has_ended {
        return Vec::new();
    }
    let node = text(&pod["spec"]["nodeName"]);
    let placed = annotation(pod, rocinante_kube::PLACED).into_iter();
    placed.map(|it| ((node.clone(), text(&it["uplink"])), it["egress"].as_u64().unwrap())).collect()
}

fn annotation(object: &Value, key: &str) -> Vec<Value> {
    let text = object["metadata"]["annotations"][key].as_str();
    text.map_or_else(Vec::new, |text| serde_json::from_str(text).unwrap())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}
