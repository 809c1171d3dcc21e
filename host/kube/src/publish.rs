//! Keeps what a node's object says of this project, also when the object is made anew or another
//! process changes it.

use std::pin::pin;

use futures_util::StreamExt as _;
use kube::ResourceExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::objects::{AGAIN, Cluster, Failed, Node, UPLINKS};
use crate::said::Said;

/// The change by which a node has these uplinks, if it has others.
fn lacking(node: &Node, uplinks: &str) -> Option<Value> {
    let says = node.annotations().get(UPLINKS);
    let patch = || json!({"metadata": {"annotations": {UPLINKS: uplinks}}});
    says.is_none_or(|says| says != uplinks).then(patch)
}

/// Keeps a node's object as it is wanted, for ever.
pub(crate) async fn keep(
    cluster: &Cluster,
    name: &str,
    mut wanted: watch::Receiver<Option<String>>,
) {
    let of_node = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = pin!(watcher(cluster.nodes(), of_node).default_backoff());
    let mut said = Said::default();
    let mut node = None;
    loop {
        tokio::select! {
            Some(event) = events.next() => match event {
                Ok(Event::Apply(it) | Event::InitApply(it)) => node = Some(it),
                Ok(Event::Delete(_)) => node = None,
                Ok(Event::Init | Event::InitDone) => {}
                Err(error) => said.warn(format!("the watch of {name} was interrupted: {error}")),
            },
            Ok(()) = wanted.changed() => {}
            else => return,
        }
        while let Some(it) = &node {
            let change = wanted.borrow().as_ref().and_then(|uplinks| lacking(it, uplinks));
            let Some(change) = change else { break };
            match cluster.change_node(name, &change).await {
                Ok(changed) => {
                    tracing::info!("node {name} says {change}");
                    node = Some(changed);
                }
                Err(Failed::Gone) => node = None,
                Err(failed) => said.warn(format!("node {name} does not say {change}: {failed}")),
            }
            // Another process may undo it at once.
            tokio::time::sleep(AGAIN).await;
        }
    }
}
