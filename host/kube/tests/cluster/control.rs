//! The control plane: kube-scheduler, with the extender or by the extended resource. The nodes are
//! objects without a kubelet.

use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use kube::api::{Api, ListParams};
use serde_json::json;

use crate::parts::{Cluster, until};
use crate::storm::{Storm, life_and_death};
use crate::{Arguments, Done, Scenario};

const NONE: &[&str] = &[];

/// In the order in which they run.
pub(crate) const ALL: &[Scenario] = &[
    Scenario { name: "extender_places_pods", needs: NONE, run: |c, _| places(c).boxed_local() },
    Scenario { name: "exactly_full", needs: NONE, run: |c, _| full(c).boxed_local() },
    Scenario { name: "capacity_that_shrinks", needs: NONE, run: |c, _| shrinks(c).boxed_local() },
    Scenario { name: "extender_restarts", needs: NONE, run: |c, _| restarts(c).boxed_local() },
    Scenario { name: "two_authorities", needs: NONE, run: |c, _| authorities(c).boxed_local() },
    Scenario { name: "mbps_are_summed", needs: NONE, run: |c, _| mbps(c).boxed_local() },
    Scenario { name: "storm", needs: NONE, run: |c, it| storms(c, it).boxed_local() },
    Scenario {
        name: "storm_and_slow_answers",
        needs: NONE,
        run: |c, it| slow(c, it).boxed_local(),
    },
    Scenario { name: "many_nodes_and_pods", needs: NONE, run: |c, it| many(c, it).boxed_local() },
];

fn is(what: &str, is_so: bool) -> Done {
    if is_so { Ok(()) } else { Err(what.to_owned()) }
}

/// Filter, prioritize and bind: only backtracking places 3, 3 and 8 on 9 and 6; the fullest node
/// that fits is taken; pods without a demand go anywhere.
async fn places(cluster: &mut Cluster) -> Done {
    let extender = cluster.extender(0).await?;
    let _scheduler = cluster.scheduler(extender.address)?;
    cluster.add_node("two", &[("a", 9), ("b", 6)], None).await?;
    cluster.add_pod("three", &[3000, 3000, 8000]).await?;
    is("three is on two", cluster.bound("three").await? == "two")?;
    let places = cluster.places("three").await?;
    is(&format!("places: {places:?}"), places == ["b", "b", "a"])?;
    // One Gb/s is left here, and 25 there.
    cluster.add_node("wide", &[("a", 25)], None).await?;
    cluster.add_pod("small", &[1000]).await?;
    is("small is on the fullest", cluster.bound("small").await? == "two")?;
    cluster.add_pod("large", &[20_000]).await?;
    is("large is on wide", cluster.bound("large").await? == "wide")?;
    cluster.add_pod("plain", &[]).await?;
    cluster.bound("plain").await.map(drop)
}

/// All of an uplink can be had, and not a megabit more; the reason is in an event; an end gives it
/// back.
async fn full(cluster: &mut Cluster) -> Done {
    let extender = cluster.extender(0).await?;
    let _scheduler = cluster.scheduler(extender.address)?;
    cluster.add_node("n", &[("a", 10)], None).await?;
    for name in ["p1", "p2"] {
        cluster.add_pod(name, &[5000]).await?;
        cluster.bound(name).await?;
    }
    cluster.add_pod("over", &[1]).await?;
    let why = cluster.refused("over").await?;
    println!("  kube-scheduler: {why}");
    is(&why, why.contains("0/1 nodes are available"))?;
    // Deleted, or ended: both give it back.
    cluster.delete_pod("p1").await?;
    cluster.bound("over").await?;
    cluster.set_phase("p2", "Succeeded").await?;
    cluster.add_pod("again", &[9999]).await?;
    cluster.bound("again").await.map(drop)
}

/// Promises stay, and no more are made.
async fn shrinks(cluster: &mut Cluster) -> Done {
    let extender = cluster.extender(0).await?;
    let _scheduler = cluster.scheduler(extender.address)?;
    cluster.add_node("n", &[("a", 10)], None).await?;
    cluster.add_pod("first", &[4000]).await?;
    cluster.bound("first").await?;
    cluster.set_uplinks("n", &[("a", 3)]).await?;
    // The extender reads it some time after the API server has it: a pod that waits shows it.
    cluster.add_pod("second", &[5000]).await?;
    cluster.refused("second").await?;
    is("first stays", cluster.bound("first").await? == "n")?;
    cluster.set_uplinks("n", &[("a", 20)]).await?;
    cluster.bound("second").await.map(drop)
}

/// A new extender counts what the old one promised.
async fn restarts(cluster: &mut Cluster) -> Done {
    let mut extender = cluster.extender(8888).await?;
    let _scheduler = cluster.scheduler(extender.address)?;
    cluster.add_node("n", &[("a", 10)], None).await?;
    cluster.add_pod("before", &[7000]).await?;
    cluster.bound("before").await?;
    extender.kill();
    cluster.add_pod("over", &[4000]).await?;
    cluster.refused("over").await?;
    let _extender = cluster.extender(8888).await?;
    cluster.add_pod("fits", &[3000]).await?;
    cluster.bound("fits").await?;
    let over = cluster.pods().get("over").await.map_err(|error| error.to_string())?;
    is("over waits", over.spec.is_some_and(|it| it.node_name.is_none()))
}

/// A node's uplinks are the extender's or the extended resource's: pods of the other way go
/// elsewhere.
async fn authorities(cluster: &mut Cluster) -> Done {
    let extender = cluster.extender(0).await?;
    let _scheduler = cluster.scheduler(extender.address)?;
    cluster.add_node("by-extender", &[("a", 10)], None).await?;
    cluster.add_node("by-sum", &[], Some(10_000)).await?;
    for at in 0..3 {
        let (one, other) = (format!("annotated{at}"), format!("counted{at}"));
        cluster.add_pod(&one, &[2000]).await?;
        cluster.create(counted(&other, 2000)).await?;
        is("the extender's node", cluster.bound(&one).await? == "by-extender")?;
        is("the sum's node", cluster.bound(&other).await? == "by-sum")?;
    }
    Ok(())
}

/// A pod that asks by the extended resource.
fn counted(name: &str, mbps: u64) -> serde_json::Value {
    let resources = json!({"limits": {rocinante_kube::MBPS: mbps.to_string()}});
    let container = json!({"name": "main", "image": "nothing", "resources": resources});
    json!({
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    })
}

/// Without an extender: any scheduler sums the extended resource.
async fn mbps(cluster: &mut Cluster) -> Done {
    let _scheduler = cluster.scheduler(None)?;
    cluster.add_node("n1", &[], Some(10_000)).await?;
    cluster.add_node("n2", &[], Some(4000)).await?;
    for (name, rate) in [("p1", 6000), ("p2", 4000), ("p3", 4000)] {
        cluster.create(counted(name, rate)).await?;
        cluster.bound(name).await?;
    }
    cluster.create(counted("over", 1)).await?;
    let why = cluster.refused("over").await?;
    is(&why, why.contains("Insufficient rocinante.dev/mbps"))?;
    cluster.delete_pod("p2").await?;
    cluster.bound("over").await.map(drop)
}

async fn storms(cluster: &mut Cluster, arguments: &Arguments) -> Done {
    let extender = cluster.extender(0).await?;
    let _scheduler = cluster.scheduler(extender.address)?;
    for seed in seeds(arguments) {
        life_and_death(cluster, Storm { seed, pods: 300 }).await?;
    }
    Ok(())
}

/// An extender that does not answer for longer than the scheduler waits, again and again.
async fn slow(cluster: &mut Cluster, arguments: &Arguments) -> Done {
    let extender = cluster.extender(0).await?;
    let _scheduler = cluster.scheduler(extender.address)?;
    let seed = seeds(arguments).next().unwrap_or_default();
    let stops = async {
        loop {
            tokio::time::sleep(Duration::from_secs(3)).await;
            extender.signal("-STOP");
            // kube-scheduler gives an extender five seconds.
            tokio::time::sleep(Duration::from_secs(7)).await;
            extender.signal("-CONT");
        }
    };
    tokio::select! {
        done = life_and_death(cluster, Storm { seed, pods: 100 }) => done,
        () = stops => Ok(()),
    }
}

fn seeds(arguments: &Arguments) -> impl Iterator<Item = u64> + use<> {
    let first = arguments.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    first..first + arguments.seeds
}

/// Pods bound in a second, with a demand and without, and by the sum: what the extender costs.
async fn many(cluster: &mut Cluster, arguments: &Arguments) -> Done {
    let (nodes, pods) = if arguments.large { (300, 3000) } else { (60, 300) };
    let extender = cluster.extender(0).await?;
    let mut rates = Vec::new();
    for (way, of) in [("nothing", None), ("mbps", None), ("extender", extender.address)] {
        let scheduler = cluster.scheduler(of)?;
        let one = |at: usize| format!("{way}-{at}");
        for at in 0..nodes {
            match way {
                "extender" => cluster.add_node(&one(at), &[("a", 25), ("b", 25)], None).await?,
                _ => cluster.add_node(&one(at), &[], Some(50_000)).await?,
            }
        }
        let start = Instant::now();
        let cluster = &*cluster;
        let made = stream::iter((0..pods).map(|at| async move {
            match way {
                "nothing" => cluster.add_pod(&one(at), &[]).await,
                "mbps" => cluster.create(counted(&one(at), 1000)).await,
                _ => cluster.add_pod(&one(at), &[500, 500]).await,
            }
        }));
        made.buffer_unordered(16).try_collect::<()>().await?;
        until("all are bound", async || {
            let waiting = ListParams::default().fields("spec.nodeName=").limit(1);
            let all = cluster.pods().list(&waiting).await.ok()?;
            all.items.is_empty().then_some(())
        })
        .await?;
        rates.push(f64::from(u32::try_from(pods).unwrap_or(0)) / start.elapsed().as_secs_f64());
        drop(scheduler);
        let now = kube::api::DeleteParams::default().grace_period(0);
        let all = ListParams::default();
        let gone = cluster.pods().delete_collection(&now, &all).await;
        gone.map_err(|error| error.to_string())?;
        let nodes: Api<k8s_openapi::api::core::v1::Node> = cluster.nodes();
        nodes.delete_collection(&now, &all).await.map_err(|error| error.to_string())?;
    }
    println!(
        "  {nodes} nodes, {pods} pods: bound per second without a demand {:.0}, by mbps {:.0}, by the extender {:.0}",
        rates[0], rates[1], rates[2]
    );
    Ok(())
}
