//! Pods that are created, scheduled by two schedulers, ended and deleted, all at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use rocinante_placement::{STEPS, Uplink, demand, place, placed, to_json, uplinks};
use serde_json::{Value, json};

use crate::api::{Api, Fault};
use crate::audit::Audit;
use crate::process::Process;
use crate::scheduler::{Cache, schedule};
use crate::{Extender, answered, get, until};

const PODS: usize = 300;
const NODES: [&str; 3] = ["n1", "n2", "n3"];
const G: u64 = 1_000_000_000;
/// Binds that a scheduler has under way at a time.
const BINDS: usize = 8;
/// The time of a request to the API.
const LATENCY: Duration = Duration::from_millis(2);

/// Three nodes: two uplinks, one, and two that are not equal.
async fn cluster() -> Api {
    let api = Api::start(LATENCY).await;
    let nodes: [&[(&str, u64)]; 3] = [&[("a", 10), ("b", 10)], &[("a", 25)], &[("a", 9), ("b", 6)]];
    for (name, speeds) in NODES.iter().zip(nodes) {
        let of: Vec<Uplink> = speeds.iter().map(|(name, g)| Uplink::new(name, g * G)).collect();
        api.add_node(name, &to_json(&of).unwrap());
    }
    api
}

/// A demand of one to three interfaces.
fn required(random: &mut fastrand::Rng) -> String {
    let one = |random: &mut fastrand::Rng| json!({"min_tx_rate": random.u64(1..=8) * 500});
    let all: Vec<Value> = (0..random.usize(1..=3)).map(|_| one(random)).collect();
    Value::from(all).to_string()
}

/// The part that binds.
#[derive(Clone)]
enum Binder {
    /// An extender, which may move.
    Extender(Arc<Mutex<SocketAddr>>),
    /// A scheduler without a memory: as Link's, it asks what the nodes use by now.
    Stateless,
}

impl Binder {
    async fn schedule(&self, api: &Api, pod: &Value, cache: Cache) -> Result<String, String> {
        match self {
            Self::Extender(at) => {
                let at = *at.lock();
                schedule(api, at, pod, &NODES, cache).await
            }
            Self::Stateless => stateless(api, pod).await,
        }
    }
}

/// A bind by what running pods use: those whose network is not there yet use nothing.
async fn stateless(api: &Api, pod: &Value) -> Result<String, String> {
    let text = |object: &Value, key: &str| {
        object["metadata"]["annotations"][key].as_str().unwrap_or("[]").to_owned()
    };
    let wanted = demand(&text(pod, rocinante_kube::REQUIRED)).unwrap();
    for name in NODES {
        let mut free = uplinks(&text(&api.node(name).unwrap(), rocinante_kube::UPLINKS)).unwrap();
        for other in api.pods() {
            if other["spec"]["nodeName"] == name && other["status"]["phase"] == "Running" {
                for held in placed(&text(&other, rocinante_kube::PLACED)).unwrap() {
                    let uplink = free.iter_mut().find(|it| it.name == held.uplink).unwrap();
                    uplink.taken = uplink.taken.with(held.min);
                }
            }
        }
        let Ok(places) = place(&free, &wanted, STEPS) else { continue };
        let chosen = places.iter().zip(&wanted).map(
            |(at, it)| json!({"uplink": free[*at].name, "egress": it.min.egress, "ingress": 0}),
        );
        let chosen = Value::from(chosen.collect::<Vec<_>>()).to_string();
        let metadata = json!({
            "uid": pod["metadata"]["uid"],
            "annotations": {rocinante_kube::PLACED: chosen},
        });
        let body = json!({"metadata": metadata, "target": {"name": name}}).to_string();
        let name_of = pod["metadata"]["name"].as_str().unwrap();
        let path = format!("/api/v1/namespaces/default/pods/{name_of}/binding");
        let head = format!("POST {path} HTTP/1.1\r\nContent-Length: {}\r\n", body.len());
        let (status, text) = answered(api.address, head.into_bytes(), body.as_bytes()).await;
        return if status == 201 { Ok(name.to_owned()) } else { Err(text) };
    }
    Err("no node".to_owned())
}

/// What schedulers tried.
#[derive(Default)]
struct Tries {
    all: AtomicUsize,
    refused: AtomicUsize,
}

/// A scheduler: tries all pods that wait, again and again, until none waits or each had its tries.
async fn scheduler(
    api: Api,
    binder: Binder,
    cache: Cache,
    tries: Arc<Tries>,
    made: Arc<AtomicBool>,
) {
    for _round in 0..400 {
        let all_made = made.load(Ordering::Acquire);
        let waiting = api.pods().into_iter().filter(|pod| pod["spec"]["nodeName"].is_null());
        let waiting: Vec<Value> = waiting.collect();
        if waiting.is_empty() && all_made {
            return;
        }
        stream::iter(waiting)
            .for_each_concurrent(BINDS, |pod| {
                let (api, binder, tries) = (&api, &binder, &tries);
                async move {
                    tries.all.fetch_add(1, Ordering::Relaxed);
                    if binder.schedule(api, &pod, cache).await.is_err() {
                        tries.refused.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
            .await;
        tokio::time::sleep(LATENCY).await;
    }
}

/// Kubelets and users: bound pods run, fail, succeed and are deleted; a few that wait, too.
async fn life(api: Api, mut random: fastrand::Rng, is_over: Arc<AtomicBool>) {
    while !is_over.load(Ordering::Acquire) {
        for pod in api.pods() {
            let name = pod["metadata"]["name"].as_str().unwrap();
            let is_bound = pod["spec"]["nodeName"].is_string();
            // Of a pod that has ended no phase follows.
            if matches!(pod["status"]["phase"].as_str(), Some("Failed" | "Succeeded")) {
                continue;
            }
            match (is_bound, random.u16(0..1000)) {
                (true, 0..300) => api.set_phase(name, "Running"),
                (true, 300..330) => api.set_phase(name, "Failed"),
                (true, 330..360) => api.set_phase(name, "Succeeded"),
                (true, 360..400) | (false, 0) => api.delete_pod(name),
                _ => {}
            }
        }
        tokio::time::sleep(LATENCY * 5).await;
    }
}

async fn create(api: Api, mut random: fastrand::Rng, made: Arc<AtomicBool>) {
    for at in 0..PODS {
        api.add_pod(&format!("p{at}"), &required(&mut random));
        if random.u8(0..4) == 0 {
            tokio::time::sleep(LATENCY / 2).await;
        }
    }
    made.store(true, Ordering::Release);
}

/// The storm; what was promised in it, and the tries.
async fn storm(api: &Api, binder: &Binder, seed: u64) -> (Audit, Arc<Tries>) {
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (made, is_over) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let tries = Arc::<Tries>::default();
    let lives = tokio::spawn(life(api.clone(), random.fork(), Arc::clone(&is_over)));
    let creates = tokio::spawn(create(api.clone(), random.fork(), Arc::clone(&made)));
    let schedulers = [Cache::Capable, Cache::Incapable].map(|cache| {
        let (tries, made) = (Arc::clone(&tries), Arc::clone(&made));
        tokio::spawn(scheduler(api.clone(), binder.clone(), cache, tries, made))
    });
    creates.await.unwrap();
    for scheduler in schedulers {
        scheduler.await.unwrap();
    }
    is_over.store(true, Ordering::Release);
    lives.await.unwrap();
    let log = api.log();
    let audit = Audit::of(log.iter().map(|it| (it.before.as_ref(), it.after.as_ref())));
    let counts = (tries.all.load(Ordering::Relaxed), tries.refused.load(Ordering::Relaxed));
    println!("{audit:?}, tries and refused {counts:?}");
    (audit, tries)
}

/// Faults of the API server, for a part of the binds.
fn faults(seed: u64) -> Vec<Fault> {
    let mut random = fastrand::Rng::with_seed(seed);
    let one = |_| match random.u8(0..5) {
        0 => Fault::Refuses,
        1 => Fault::Conflicts,
        2 => Fault::DoesAndConflicts,
        3 => Fault::LosesAnswer,
        _ => Fault::Late(Duration::from_millis(random.u64(1..80))),
    };
    (0..80).map(one).collect()
}

/// All pods go; whatever fitted in the beginning fits again.
async fn nothing_is_left(api: &Api, at: SocketAddr) {
    for pod in api.pods() {
        api.delete_pod(pod["metadata"]["name"].as_str().unwrap());
    }
    // Each fills one node alone, and no other.
    let all = [("n1", vec![10_000, 10_000]), ("n2", vec![25_000]), ("n3", vec![9000, 6000])];
    for (node, rates) in all {
        let wanted: Vec<Value> = rates.iter().map(|it| json!({"min_tx_rate": it})).collect();
        let required = Value::from(wanted).to_string();
        api.add_pod("last", &required);
        let pod = api.pod("last").unwrap();
        until(node, async || {
            let bound = crate::scheduler::bind(at, &pod, node).await;
            bound.is_ok()
        })
        .await;
        api.delete_pod("last");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_is_never_promised_more_than_there_is() {
    let seed = fastrand::u64(..);
    let api = cluster().await;
    api.fail(faults(seed));
    let extender = Extender::ready(&api, Duration::from_millis(200)).await;
    let binder = Binder::Extender(Arc::new(Mutex::new(extender.address)));
    let (audit, tries) = storm(&api, &binder, seed).await;
    assert_eq!((audit.over, audit.worst), (0, 0), "seed {seed}");
    // It was one: there was more to bind than room, and the room was used.
    assert!(audit.bound >= PODS / 3, "seed {seed}: {audit:?}");
    assert!(audit.most >= 40 * G, "seed {seed}: {audit:?}");
    assert!(tries.refused.load(Ordering::Relaxed) > 0, "seed {seed}");
    assert_eq!(api.faults(), 0, "seed {seed}");
    nothing_is_left(&api, extender.address).await;
}

/// Else the storm would be too tame to show anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_storm_makes_a_stateless_extender_promise_too_much() {
    let api = cluster().await;
    let (audit, _) = storm(&api, &Binder::Stateless, 37).await;
    assert!(audit.over > 0 && audit.worst >= G, "{audit:?}");
}

const EXTENDER: [&str; 5] = ["extender", "--listen", "127.0.0.1:0", "--lease", "1"];

/// The extender is killed in the storm, with binds under way, and another one takes its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_over_restarts_is_never_promised_more_than_there_is() {
    let seed = fastrand::u64(..);
    let api = cluster().await;
    let mut process = Process::start(&api, &EXTENDER);
    let at = Arc::new(Mutex::new(process.address));
    let binder = Binder::Extender(Arc::clone(&at));
    let stormy = storm(&api, &binder, seed);
    let restarts = async {
        for restarts in 0..5 {
            // In the middle of a bind, wherever there is one: those that come late land afterwards.
            let count = || api.requests().iter().filter(|it| it.ends_with("/binding")).count();
            let before = count();
            api.fail([Fault::Late(Duration::from_millis(300)); BINDS]);
            let bound = async || count() >= before + BINDS || api.faults() == 0;
            // Until the storm is over.
            if tokio::time::timeout(Duration::from_secs(10), until("binds", bound)).await.is_err() {
                return (process, restarts);
            }
            process.kill();
            process = Process::start(&api, &EXTENDER);
            *at.lock() = process.address;
            let address = process.address;
            until("it is ready", async || get(address, "/healthz").await.0 == 200).await;
        }
        (process, 5)
    };
    let ((audit, _), (_process, restarts)) = tokio::join!(stormy, restarts);
    assert!(restarts > 0, "seed {seed}: nothing was killed");
    assert_eq!((audit.over, audit.worst), (0, 0), "seed {seed}");
    assert!(audit.bound >= PODS / 4, "seed {seed}: {audit:?}");
    let address = *at.lock();
    nothing_is_left(&api, address).await;
}
