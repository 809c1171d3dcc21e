//! Keeps a ledger as the API has it.

use std::pin::pin;

use futures_util::{Stream, StreamExt as _};
use kube::ResourceExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use parking_lot::Mutex;
use rocinante_placement::{placed, uplinks};

use crate::ledger::Ledger;
use crate::objects::{Cluster, HOLDING, Node, PLACED, Pod, UPLINKS};

/// Watches nodes and pods for ever; of one node alone if it is named.
pub(crate) async fn watch(cluster: &Cluster, ledger: &Mutex<Ledger>, node: Option<&str>) {
    let (of_nodes, of_pods) = match node {
        None => (watcher::Config::default(), watcher::Config::default().fields(HOLDING)),
        Some(name) => (
            watcher::Config::default().fields(&format!("metadata.name={name}")),
            watcher::Config::default().fields(&format!("{HOLDING},spec.nodeName={name}")),
        ),
    };
    let nodes = watcher(cluster.nodes(), of_nodes).default_backoff();
    let pods = watcher(cluster.pods(), of_pods).default_backoff();
    tokio::join!(
        each(nodes, "nodes", |event| node_event(&mut ledger.lock(), event)),
        each(pods, "pods", |event| pod_event(&mut ledger.lock(), event)),
    );
}

async fn each<K>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
    kind: &str,
    mut take: impl FnMut(Event<K>),
) {
    let mut events = pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take(event),
            // The stream begins anew by itself. Until then nothing is forgotten.
            Err(error) => tracing::warn!("the watch of {kind} was interrupted: {error}"),
        }
    }
}

fn node_event(ledger: &mut Ledger, event: Event<Node>) {
    match event {
        Event::Init => ledger.nodes_begin(),
        Event::InitApply(node) => {
            ledger.node_listed(&node.name_any());
            node_is(ledger, &node);
        }
        Event::Apply(node) => node_is(ledger, &node),
        Event::Delete(node) => ledger.node_gone(&node.name_any()),
        Event::InitDone => ledger.nodes_end(),
    }
}

fn pod_event(ledger: &mut Ledger, event: Event<Pod>) {
    match event {
        Event::Init => ledger.pods_begin(),
        Event::InitApply(pod) => {
            ledger.pod_listed(&pod.uid().unwrap_or_default());
            pod_is(ledger, &pod);
        }
        Event::Apply(pod) => pod_is(ledger, &pod),
        Event::Delete(pod) => ledger.pod_gone(&pod.uid().unwrap_or_default()),
        Event::InitDone => ledger.pods_end(),
    }
}

fn node_is(ledger: &mut Ledger, node: &Node) {
    let text = node.annotations().get(UPLINKS);
    ledger.node(&node.name_any(), text.map(|text| uplinks(text)));
}

fn pod_is(ledger: &mut Ledger, pod: &Pod) {
    let (Some(uid), Some(node)) = (pod.uid(), &pod.spec.node_name) else { return };
    let places = pod.annotations().get(PLACED).map(|text| placed(text));
    if let Some(Err(error)) = &places {
        tracing::warn!(pod = pod.name_any(), "{PLACED} is not understood: {error}");
    }
    ledger.pod(&uid, node, places.and_then(Result::ok));
}
