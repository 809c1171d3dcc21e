//! Keeps what a node's object says of this project, also when the object is made anew or another
//! process changes it: a kubelet that finds no checkpoint sets all extended resources to 0
//! (`reconcileExtendedResource`). Nothing is taken back at the end: the uplinks and the pods that
//! count on them stay, and a process that replaces this one would find the node without.

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::ResourceExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::objects::{AGAIN, Change, Cluster, Failed, MBPS, Node, UPLINKS};
use crate::said::Said;
use crate::sysfs::bits;

/// The longest pause between two changes that the API server refuses.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// What a node's object is to say; `None` if that is not known, or another process's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    uplinks: Option<String>,
    mbps: Option<u64>,
}

impl Wanted {
    /// Whether that is new.
    pub(crate) fn has_uplinks(&mut self, text: String) -> bool {
        self.uplinks.as_ref() != Some(&text) && {
            self.uplinks = Some(text);
            true
        }
    }

    /// Whether that is new.
    pub(crate) fn has_mbps(&mut self, mbps: u64) -> bool {
        self.mbps.replace(mbps) != Some(mbps)
    }

    /// A change that a node lacks.
    fn lacking(&self, node: &Node) -> Option<Change> {
        let uplinks = node.annotations().get(UPLINKS);
        if let Some(wanted) = &self.uplinks
            && uplinks != Some(wanted)
        {
            return Some(Change::Object(json!({"metadata": {"annotations": {UPLINKS: wanted}}})));
        }
        // One authority for an uplink: with that annotation it is the extender.
        let wanted = self.mbps.map(|mbps| if uplinks.is_some() { 0 } else { mbps })?;
        let says = node.status.as_ref().and_then(|status| status.capacity.mbps.as_deref());
        // The API server writes 25000 as 25k.
        let is_so = match says {
            None => wanted == 0,
            Some(text) => wanted != 0 && bits(text) == Some(wanted),
        };
        let wanted = (wanted != 0).then(|| wanted.to_string());
        (!is_so).then(|| Change::Status(json!({"status": {"capacity": {MBPS: wanted}}})))
    }
}

/// The facts of a node that a driver has to know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OfNode {
    pub(crate) uid: Option<String>,
    /// Its uplinks are the extender's.
    pub(crate) is_extenders: bool,
}

impl OfNode {
    fn new(node: &Node) -> Self {
        Self { uid: node.uid(), is_extenders: node.annotations().contains_key(UPLINKS) }
    }
}

/// Keeps a node's object as it is wanted, for ever. `seen` has the node at each change.
pub(crate) async fn keep(
    cluster: &Cluster,
    name: &str,
    mut wanted: watch::Receiver<Wanted>,
    seen: impl Fn(OfNode),
) {
    let of_node = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = pin!(watcher(cluster.nodes(), of_node).default_backoff());
    let (mut watch_said, mut patch_said) = (Said::default(), Said::default());
    let mut node = None;
    let (mut next, mut pause) = (Instant::now(), AGAIN);
    loop {
        let change = node.as_ref().and_then(|node| wanted.borrow().lacking(node));
        tokio::select! {
            biased;
            Some(event) = events.next() => {
                match event {
                    Ok(event) => {
                        watch_said = Said::default();
                        match event {
                            Event::Apply(it) | Event::InitApply(it) => {
                                seen(OfNode::new(&it));
                                node = Some(it);
                            }
                            Event::Delete(_) => node = None,
                            Event::Init | Event::InitDone => {}
                        }
                    }
                    Err(error) => {
                        watch_said.warn(format!("the watch of {name} was interrupted: {error}"));
                    }
                }
            }
            Ok(()) = wanted.changed() => {}
            // Another process may undo it at once, and the watch has older states to show.
            () = tokio::time::sleep_until(next), if change.is_some() => {
                let Some(change) = change else { continue };
                let mut wait = AGAIN;
                match cluster.change_node(name, &change).await {
                    Ok(changed) => {
                        tracing::info!("node {name} says {change}");
                        node = Some(changed);
                        (patch_said, pause) = (Said::default(), AGAIN);
                    }
                    Err(Failed::Gone) => (node, pause) = (None, AGAIN),
                    Err(failed) => {
                        patch_said.warn(format!("node {name} does not say {change}: {failed}"));
                        wait = pause;
                        pause = (pause * 2).min(PAUSE_MAX);
                    }
                }
                next = Instant::now() + wait;
            }
            else => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn node(annotations: &Value, capacity: &Value) -> Node {
        let metadata = json!({"name": "n", "annotations": annotations});
        let node = json!({"metadata": metadata, "spec": {}, "status": {"capacity": capacity}});
        serde_json::from_value(node).unwrap()
    }

    #[test]
    fn a_node_lacks_only_what_it_does_not_say() {
        let mbps = |mbps| Wanted { uplinks: None, mbps };
        let status =
            |value: Value| Some(Change::Status(json!({"status": {"capacity": {MBPS: value}}})));
        for (wanted, says, lacks) in [
            (None, json!({}), None),
            (None, json!({MBPS: "5"}), None),
            (Some(25_000), json!({}), status("25000".into())),
            (Some(25_000), json!({MBPS: "25k"}), None),
            (Some(25_000), json!({MBPS: "0"}), status("25000".into())),
            (Some(25_000), json!({MBPS: "25Ki"}), status("25000".into())),
            (Some(1_500_001), json!({MBPS: "1500001", "cpu": "4"}), None),
            (Some(0), json!({}), None),
            (Some(0), json!({MBPS: "0"}), status(Value::Null)),
        ] {
            let of_node = mbps(wanted).lacking(&node(&json!({}), &says));
            assert_eq!(of_node, lacks, "{wanted:?} {says}");
        }
        let extenders = json!({UPLINKS: "[]"});
        let taken = mbps(Some(5)).lacking(&node(&extenders, &json!({MBPS: "5"})));
        assert_eq!(taken, status(Value::Null));
        assert_eq!(mbps(Some(5)).lacking(&node(&extenders, &json!({}))), None);
        assert_eq!(mbps(None).lacking(&node(&extenders, &json!({MBPS: "5"}))), None);
    }
}
