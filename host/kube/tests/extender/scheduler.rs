//! The part of kube-scheduler that asks an extender, and the sums of all that is promised.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::api::{Api, Change};
use crate::post;

/// Whether the scheduler sends nodes or their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    Capable,
    Incapable,
}

pub(crate) fn arguments(api: &Api, pod: &Value, nodes: &[&str], cache: Cache) -> Value {
    match cache {
        Cache::Capable => json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}),
        Cache::Incapable => {
            let items: Vec<Value> = nodes.iter().filter_map(|name| api.node(name)).collect();
            json!({"Pod": pod, "Nodes": {"metadata": {}, "items": items}, "NodeNames": null})
        }
    }
}

/// The nodes that pass `filter`, and the reasons for the others.
pub(crate) async fn filter(
    api: &Api,
    at: SocketAddr,
    pod: &Value,
    nodes: &[&str],
    cache: Cache,
) -> Result<(Vec<String>, BTreeMap<String, String>), String> {
    let arguments = arguments(api, pod, nodes, cache);
    let (status, text) = post(at, "/scheduler/filter", arguments.to_string().as_bytes()).await;
    let Ok(answer) = serde_json::from_str::<Value>(&text) else {
        return Err(format!("{status} {text}"));
    };
    match answer["Error"].as_str() {
        Some("") => {}
        other => return Err(other.unwrap_or_default().to_owned()),
    }
    let passed = match cache {
        Cache::Capable => serde_json::from_value(answer["NodeNames"].clone()).unwrap(),
        Cache::Incapable => {
            let items = answer["Nodes"]["items"].as_array().unwrap().iter();
            items.map(|node| node["metadata"]["name"].as_str().unwrap().to_owned()).collect()
        }
    };
    Ok((passed, serde_json::from_value(answer["FailedNodes"].clone()).unwrap()))
}

/// The answer to `bind`: an error, or none.
pub(crate) async fn bind(at: SocketAddr, pod: &Value, node: &str) -> Result<(), String> {
    let body = json!({
        "PodName": pod["metadata"]["name"],
        "PodNamespace": pod["metadata"]["namespace"],
        "PodUID": pod["metadata"]["uid"],
        "Node": node,
    });
    let (status, text) = post(at, "/scheduler/bind", body.to_string().as_bytes()).await;
    let answer: Value =
        serde_json::from_str(&text).map_err(|error| format!("{status} {text} {error}"))?;
    match answer["Error"].as_str() {
        Some("") => Ok(()),
        other => Err(other.unwrap_or_default().to_owned()),
    }
}

/// One try for a pod, as kube-scheduler makes it; the node that it is bound to.
pub(crate) async fn schedule(
    api: &Api,
    at: SocketAddr,
    pod: &Value,
    nodes: &[&str],
    cache: Cache,
) -> Result<String, String> {
    let (passed, failed) = filter(api, at, pod, nodes, cache).await?;
    if passed.is_empty() {
        return Err(format!("{failed:?}"));
    }
    let passed: Vec<&str> = passed.iter().map(String::as_str).collect();
    let arguments = arguments(api, pod, &passed, cache);
    let (status, text) = post(at, "/scheduler/prioritize", arguments.to_string().as_bytes()).await;
    let Ok(Value::Array(scores)) = serde_json::from_str(&text) else {
        return Err(format!("{status} {text}"));
    };
    assert_eq!(scores.len(), passed.len());
    let best = scores.iter().max_by_key(|it| it["Score"].as_u64().unwrap()).unwrap();
    let node = best["Host"].as_str().unwrap();
    bind(at, pod, node).await.map(|()| node.to_owned())
}

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
    /// Replays a log of changes. The sums are made here anew, from the annotations alone.
    pub(crate) fn of(log: &[Change]) -> Self {
        let (mut capacity, mut promised) = (Sums::new(), Sums::new());
        let mut audit = Self::default();
        for change in log {
            if change.kind == "nodes" {
                let node = change.after.as_ref().expect("no node of a test goes");
                for uplink in annotation(node, rocinante_kube::UPLINKS) {
                    let name = uplink["name"].as_str().unwrap();
                    let at = (text(&node["metadata"]["name"]), name.to_owned());
                    capacity.insert(at, uplink["egress"].as_u64().unwrap());
                }
                continue;
            }
            for (at, rate) in change.before.iter().flat_map(holds) {
                *promised.get_mut(&at).expect("it was promised before") -= rate;
            }
            for (at, rate) in change.after.iter().flat_map(holds) {
                *promised.entry(at).or_default() += rate;
            }
            let node = |pod: &Option<Value>| pod.as_ref().is_some_and(is_bound);
            audit.bound += usize::from(!node(&change.before) && node(&change.after));
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
