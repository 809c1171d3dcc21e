//! The slice of the node, by which the scheduler knows its uplinks. A kubelet that starts removes
//! it, and it is made again. It stays when the driver ends, for the next one: a slice that goes and
//! comes would keep pods waiting.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::ResourceExt as _;
use kube::core::DynamicObject;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::{Value, json};
use tokio::sync::watch::{Receiver, Sender};
use tokio::time::Instant;

use super::claim::device_of;
use super::quantity::{LEAST, written};
use super::state::{Records, Store, make_folder};
use super::{DRIVER, Dra};
use crate::agent::{Status, Uplink};
use crate::look::Looks;
use crate::objects::{AGAIN, Failed};
use crate::publish::OfNode;
use crate::said::Said;

/// A file that one driver of a node has locked: it publishes and reports.
const KEEPER: &str = "keeper";
/// The rate of a claim that names no capacity, unless the uplink has less.
const DEFAULT: u64 = 100_000_000;
/// A slice with taints has no more devices.
const DEVICES_MAX: usize = 64;
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Taints of devices: of uplinks that are not shared, and of those with less than is allocated.
const DOWN: &str = "rocinante.dev/down";
const SHORT: &str = "rocinante.dev/short";

/// The fields of a slice that the API server keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Keeps {
    shares: bool,
    taints: bool,
}

/// The facts of an interface that attributes have.
fn facts(interface: &str) -> Vec<(&'static str, Value)> {
    let folder = Path::new("/sys/class/net").join(interface);
    let number = |name: &str| {
        let text = std::fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse::<i64>().ok().filter(|it| *it >= 0)
    };
    let mut facts = Vec::new();
    if folder.exists() {
        let all = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
        let has = all.lines().any(|line| line.split_whitespace().last() == Some(interface));
        facts.push(("ipv6", json!({"bool": has})));
    }
    facts.extend(number("mtu").map(|mtu| ("mtu", json!({"int": mtu}))));
    let numa = number("device/numa_node");
    facts.extend(numa.map(|it| ("resource.kubernetes.io/numaNode", json!({"int": it}))));
    facts
}

fn capacity(rate: u64) -> Value {
    let least = written(LEAST);
    json!({
        "value": written(rate),
        "requestPolicy": {
            "default": written(DEFAULT.min(rate)),
            "validRange": {"min": least, "max": written(rate), "step": least},
        },
    })
}

/// The devices of a node. Uplinks that are down stay with the taint that keeps pods away, if the
/// server keeps taints.
fn devices(status: &Status, records: &Records, keeps: Keeps) -> Vec<Value> {
    if !keeps.shares {
        return Vec::new();
    }
    let mut devices = Vec::new();
    for Uplink { interface, rate, fault } in &status.uplinks {
        // A step of the policy.
        let rate = rate / LEAST * LEAST;
        let name = device_of(interface);
        let all = records.values().flat_map(|it| &it.shares).filter(|it| it.device == name);
        let sum = |of: fn(&super::claim::Share) -> u64| all.clone().map(of).sum::<u64>();
        let taint = match fault {
            Some(_) => Some(DOWN),
            None if sum(|it| it.egress).max(sum(|it| it.ingress)) > rate => Some(SHORT),
            None => None,
        };
        if rate == 0 || taint.is_some() && !keeps.taints {
            continue;
        }
        let mut attributes = serde_json::Map::new();
        attributes.insert("interface".into(), json!({"string": interface}));
        attributes.insert("speed".into(), json!({"int": rate}));
        attributes.insert("agent".into(), json!({"version": status.version}));
        attributes.extend(facts(interface).into_iter().map(|(key, it)| (key.to_owned(), it)));
        let mut device = json!({
            "name": name,
            "allowMultipleAllocations": true,
            "attributes": attributes,
            "capacity": {"egress": capacity(rate), "ingress": capacity(rate)},
        });
        if let Some(key) = taint {
            device["taints"] = json!([{"key": key, "effect": "NoSchedule"}]);
        }
        devices.push(device);
    }
    devices.truncate(DEVICES_MAX);
    devices
}

/// The devices as they were sent: the server adds the time of a taint.
fn sent(slice: &DynamicObject) -> Vec<Value> {
    let mut devices = slice.data["spec"]["devices"].as_array().cloned().unwrap_or_default();
    let taints = devices.iter_mut().filter_map(|it| it.get_mut("taints")?.as_array_mut());
    for taint in taints.flatten() {
        taint.as_object_mut().map(|it| it.remove("timeAdded"));
    }
    devices
}

/// The fields of a slice that a server dropped.
fn kept(wanted: &[Value], slice: &DynamicObject) -> Keeps {
    let has = sent(slice);
    let shares = |device: &Value| {
        let policy = |name: &str| device["capacity"][name]["requestPolicy"].is_object();
        device["allowMultipleAllocations"] == true && policy("egress") && policy("ingress")
    };
    let tainted = |all: &[Value]| all.iter().filter(|it| it["taints"].is_array()).count();
    Keeps { shares: has.iter().all(shares), taints: tainted(wanted) == tainted(&has) }
}

fn slice_of(node: &str) -> String {
    format!("{node}-{DRIVER}")
}

/// The slice with these devices, in the place of one that is there.
fn slice(
    node: &str,
    uid: &str,
    devices: &[Value],
    old: Option<&DynamicObject>,
    last: i64,
) -> Value {
    let owner =
        json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": true});
    let version = old.and_then(|it| it.metadata.resource_version.as_ref());
    let mut metadata = json!({"name": slice_of(node), "ownerReferences": [owner]});
    if let Some(version) = version {
        metadata["resourceVersion"] = json!(version);
    }
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": last + 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    })
}

/// The lock of the driver that publishes, if this one gets it.
fn keeper(store: &Store) -> std::io::Result<File> {
    make_folder(&store.folder)?;
    let file =
        File::options().write(true).create(true).truncate(false).open(store.folder.join(KEEPER))?;
    file.try_lock()?;
    Ok(file)
}

/// Whether the API server has no slices.
fn is_unknown(error: &watcher::Error) -> bool {
    let watcher::Error::InitialListFailed(kube::Error::Api(status)) = error else { return false };
    status.code == 404
}

async fn no_shares(dra: &Dra, what: &str) {
    let why = format!("the API server {what}: the node has rocinante.dev/mbps in place of devices");
    dra.cluster.event(&dra.node, "NoSharedDevices", &why).await;
}

/// Keeps the slice for ever, as soon as no other driver of the node does. `is_keeper` says when
/// that is; `has_shares`, whether the API server shares devices.
pub(crate) async fn keep(
    dra: &Dra,
    mut agent: Receiver<Option<Status>>,
    mut node: Receiver<OfNode>,
    is_keeper: Sender<bool>,
    has_shares: impl Fn(bool),
    mut looks: Looks,
) {
    let name = &*dra.node;
    let _lock = loop {
        match keeper(&dra.store) {
            Ok(lock) => break lock,
            Err(_) => looks.again(false).await,
        }
    };
    is_keeper.send_replace(true);
    let ours =
        watcher::Config::default().fields(&format!("spec.nodeName={name},spec.driver={DRIVER}"));
    let mut events = pin!(watcher(dra.cluster.slices(), ours).default_backoff());
    let (mut watch_said, mut write_said) = (Said::default(), Said::default());
    let mut slices = BTreeMap::<String, DynamicObject>::new();
    let (mut listed, mut is_synced) = (BTreeMap::new(), false);
    let mut keeps = Keeps { shares: true, taints: true };
    // The generation of the last slice, and what was sent of it under this version.
    let (mut last, mut answered) = (0, None::<(Option<String>, Vec<Value>)>);
    let (mut next, mut pause) = (Instant::now(), AGAIN);
    loop {
        tokio::select! {
            biased;
            Some(event) = events.next() => {
                match event {
                    Ok(event) => {
                        watch_said = Said::default();
                        match event {
                            Event::Init => listed.clear(),
                            Event::InitApply(it) => _ = listed.insert(it.name_any(), it),
                            Event::InitDone => {
                                (slices, is_synced) = (std::mem::take(&mut listed), true);
                            }
                            Event::Apply(it) => _ = slices.insert(it.name_any(), it),
                            Event::Delete(it) => _ = slices.remove(&it.name_any()),
                        }
                    }
                    Err(error) => {
                        if is_unknown(&error) && std::mem::take(&mut keeps.shares) {
                            no_shares(dra, "has no resource.k8s.io/v1").await;
                            has_shares(false);
                        }
                        watch_said.warn(format!("the watch of slices was interrupted: {error}"));
                    }
                }
            }
            Ok(()) = agent.changed() => {}
            Ok(()) = node.changed() => {}
            () = looks.again(Instant::now() >= next) => {}
        }
        let (Some(status), OfNode { uid: Some(uid), is_extenders }, true) =
            (agent.borrow().clone(), node.borrow().clone(), is_synced && Instant::now() >= next)
        else {
            continue;
        };
        let records = dra.store.read().unwrap_or_default();
        // One authority for an uplink.
        let wanted = if is_extenders { Vec::new() } else { devices(&status, &records, keeps) };
        let other = slices.keys().find(|it| **it != slice_of(name)).cloned();
        let now = slices.get(&slice_of(name));
        let is_so = now.is_some_and(|it| match &answered {
            Some((version, devices)) if *version == it.metadata.resource_version => {
                *devices == wanted
            }
            _ => sent(it) == wanted,
        });
        let done = if let Some(other) = other {
            let done = match dra.cluster.delete_slice(&other).await {
                Err(Failed::Gone) => Ok(()),
                done => done,
            };
            done.map(|()| _ = slices.remove(&other))
        } else if is_so {
            continue;
        } else {
            last = last.max(
                now.map_or(0, |it| it.data["spec"]["pool"]["generation"].as_i64().unwrap_or(0)),
            );
            let Ok(slice) = serde_json::from_value(slice(name, &uid, &wanted, now, last)) else {
                continue;
            };
            match dra.cluster.write_slice(&slice).await {
                Err(failed) => Err(failed),
                Ok(written) => {
                    last += 1;
                    let Keeps { shares, taints } = kept(&wanted, &written);
                    if !taints && std::mem::take(&mut keeps.taints) {
                        let why = "the API server drops taints of devices (DRADeviceTaints): an \
                                   uplink that is down is no device";
                        dra.cluster.event(name, "NoDeviceTaints", why).await;
                    }
                    if !shares && std::mem::take(&mut keeps.shares) {
                        no_shares(dra, "drops shares of devices (DRAConsumableCapacity)").await;
                        has_shares(false);
                    }
                    let (devices, version) =
                        (wanted.len(), written.metadata.resource_version.clone());
                    tracing::info!(generation = last, devices, "the node's slice is new");
                    answered = Some((version, wanted));
                    slices.insert(written.name_any(), written);
                    Ok(())
                }
            }
        };
        match done {
            Ok(()) => (write_said, pause) = (Said::default(), AGAIN),
            Err(failed) => {
                write_said.warn(format!("the node's slice is not written: {failed}"));
                // The watch shows the others.
                if matches!(failed, Failed::Gone) {
                    slices.remove(&slice_of(name));
                }
                next = Instant::now() + pause;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}
