//! Pods that are created, scheduled, ended and deleted, all at once, and a watch that sums the
//! promises at every resource version.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::TryStreamExt as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ApiResource, DynamicObject, ListParams, WatchEvent, WatchParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::Value;

use crate::Done;
use crate::audit::Audit;
use crate::parts::{Cluster, until};

const NODES: [(&str, &[(&str, u64)]); 3] =
    [("n1", &[("a", 10), ("b", 10)]), ("n2", &[("a", 25)]), ("n3", &[("a", 9), ("b", 6)])];

pub(crate) struct Storm {
    pub(crate) seed: u64,
    pub(crate) pods: usize,
}

/// An object after a change, by resource version; none if it is gone.
type Log = Arc<Mutex<BTreeMap<u64, (String, Option<Value>)>>>;

/// The storm: no uplink may have promised more than it has, at any resource version, and the room
/// must have been used.
pub(crate) async fn life_and_death(cluster: &Cluster, storm: Storm) -> Done {
    let Storm { seed, pods } = storm;
    let mut random = fastrand::Rng::with_seed(seed);
    let log = Log::default();
    let (of_pods, of_nodes) =
        (watch::<Pod>(cluster, &log).await?, watch::<Node>(cluster, &log).await?);
    for (name, uplinks) in NODES {
        cluster.add_node(name, uplinks, None).await?;
    }
    let made = AtomicBool::new(false);
    let mut of_makers = random.fork();
    let makes = async {
        for at in 0..pods {
            let rates: Vec<u64> =
                (0..of_makers.usize(1..=3)).map(|_| of_makers.u64(1..=8) * 500).collect();
            cluster.add_pod(&format!("p{at}"), &rates).await?;
            tokio::time::sleep(Duration::from_millis(of_makers.u64(0..20))).await;
        }
        made.store(true, Ordering::Release);
        until("no pod waits", async || {
            let waiting = ListParams::default().fields("spec.nodeName=").limit(1);
            cluster.pods().list(&waiting).await.ok()?.items.is_empty().then_some(())
        })
        .await?;
        let last = cluster.pods().list(&ListParams::default()).await;
        let last = last.map_err(|error| error.to_string())?.items;
        let last: Vec<(String, u64)> =
            last.iter().map(|pod| (format!("Pod {}", pod.name_any()), version(pod))).collect();
        until("the watch shows all pods", async || {
            let log = log.lock();
            let is_shown = |(key, version): &(String, u64)| {
                log.range(version..).any(|(_, (shown, _))| shown == key)
            };
            last.iter().all(is_shown).then_some(())
        })
        .await
    };
    let lives = async {
        loop {
            for pod in cluster.all_pods().await? {
                let name = pod["metadata"]["name"].as_str().unwrap_or_default();
                let is_bound = pod["spec"]["nodeName"].is_string();
                if matches!(pod["status"]["phase"].as_str(), Some("Failed" | "Succeeded")) {
                    continue;
                }
                match (is_bound, random.u16(0..1000)) {
                    (true, 0..300) => cluster.set_phase(name, "Running").await?,
                    (true, 300..330) => cluster.set_phase(name, "Failed").await?,
                    (true, 330..360) => cluster.set_phase(name, "Succeeded").await?,
                    (true, 360..400) | (false, 0) => cluster.delete_pod(name).await?,
                    _ => {}
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let over: Done = tokio::select! {
        done = makes => done,
        done = lives => done,
        done = of_pods => done,
        done = of_nodes => done,
    };
    over.map_err(|why| format!("seed {seed}: {why}"))?;
    let audit = judged(&log.lock());
    println!("  seed {seed}: {audit:?}");
    if audit.over > 0 {
        return Err(format!("seed {seed}: promised too much: {audit:?}"));
    }
    if audit.bound < pods / 3 || audit.most < 30_000_000_000 {
        return Err(format!("seed {seed}: too tame: {audit:?}"));
    }
    for pod in cluster.all_pods().await? {
        cluster.delete_pod(pod["metadata"]["name"].as_str().unwrap_or_default()).await?;
    }
    for (name, _) in NODES {
        let deleted = cluster.nodes().delete(name, &kube::api::DeleteParams::default()).await;
        deleted.map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn judged(log: &BTreeMap<u64, (String, Option<Value>)>) -> Audit {
    let mut last: BTreeMap<&str, &Value> = BTreeMap::new();
    let changes = log.values().map(|(key, after)| {
        let before = match after {
            Some(after) => last.insert(key, after),
            None => last.remove(key.as_str()),
        };
        (before, after.as_ref())
    });
    Audit::of(changes.collect::<Vec<_>>())
}

fn version<K: kube::ResourceExt>(object: &K) -> u64 {
    object.resource_version().and_then(|it| it.parse().ok()).unwrap_or(0)
}

/// Watches all objects of a kind from now on. The task ends with an error if the watch does.
async fn watch<K: Resource<DynamicType = ()>>(
    cluster: &Cluster,
    log: &Log,
) -> Result<impl Future<Output = Done> + use<K>, String> {
    let client: Client = cluster.client.clone();
    let kind = K::kind(&()).into_owned();
    let api: Api<DynamicObject> = Api::all_with(client, &ApiResource::erase::<K>(&()));
    let now = api.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
    let from = now.metadata.resource_version.unwrap_or_default();
    let log = Arc::clone(log);
    Ok(async move {
        let params = WatchParams::default().timeout(290);
        let events = api.watch(&params, &from).await.map_err(|error| error.to_string())?;
        let each = events.map_err(|error| error.to_string()).try_for_each(|event| {
            let (object, is_gone) = match event {
                WatchEvent::Added(it) | WatchEvent::Modified(it) => (it, false),
                WatchEvent::Deleted(it) => (it, true),
                WatchEvent::Bookmark(_) => return std::future::ready(Ok(())),
                WatchEvent::Error(status) => {
                    return std::future::ready(Err(format!("the watch: {status:?}")));
                }
            };
            let version = version(&object);
            let key = format!("{kind} {}", object.name_any());
            let value = serde_json::to_value(&object).expect("it was JSON");
            log.lock().insert(version, (key, (!is_gone).then_some(value)));
            std::future::ready(Ok(()))
        });
        each.await?;
        Err("the watch ended".to_owned())
    })
}
