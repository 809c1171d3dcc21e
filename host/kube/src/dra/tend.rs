//! The work beside the kubelet's calls: files, agent and claims are compared, pods that come to a
//! prepared claim are made known, and claims' status is written.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::ResourceExt as _;
use kube::core::DynamicObject;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::{Value, json};
use tokio::sync::watch::Receiver;
use tokio::time::Instant;

use super::Dra;
use super::claim::{self, Network, Record, claim_of, is_id};
use super::health::Devices;
use crate::agent::commanded;
use crate::objects::{AGAIN, Failed};
use crate::said::Said;

/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// The API's answer about a claim that is prepared, or has a file of CDI.
enum Word {
    /// It is allocated here.
    Here(Box<Record>),
    /// It is gone, made anew, or allocated no more.
    Gone,
}

impl Dra {
    /// Error: the API server does not say it.
    async fn word(&self, namespace: &str, name: &str, uid: &str) -> Result<Word, Failed> {
        match self.cluster.claim(namespace, name).await {
            Ok(claim) => match Record::read(&claim, uid, &self.node) {
                Ok(record) => Ok(Word::Here(Box::new(record))),
                // A pod that ends may have left no reservation, and its claim is prepared.
                Err(_) if claim.uid().as_deref() == Some(uid) && is_allocated(&claim) => {
                    Err(Failed::Unknown("the claim is about to end".into()))
                }
                Err(_) => Ok(Word::Gone),
            },
            Err(Failed::Gone) => Ok(Word::Gone),
            Err(failed) => Err(failed),
        }
    }

    /// Has the file, CDI and the agent agree, by the API. Without the API server the claims of the
    /// file stay. Error: the rest of the work.
    async fn mend(&self) -> Result<(), String> {
        let error = |error: std::io::Error| error.to_string();
        let before = self.locked().await?.records.clone();
        let files = self.store.cdi_files().map_err(error)?;
        let mut asked = BTreeMap::new();
        for record in before.values() {
            asked.insert(&record.uid, (&*record.namespace, &*record.name));
        }
        for (uid, file) in &files {
            asked.entry(uid).or_insert_with(|| claim_of(file).unwrap_or_default());
        }
        let mut words = BTreeMap::new();
        let mut left = None;
        for (uid, (namespace, name)) in asked {
            match self.word(namespace, name, uid).await {
                Ok(word) => _ = words.insert(uid, word),
                Err(failed) => left = Some(format!("the claim {name}: {failed}")),
            }
        }
        // Calls went on meanwhile, and their changes stay.
        let mut state = self.locked().await?;
        let mut wanted = state.records.clone();
        for (uid, word) in words {
            let known = state.records.get(uid);
            if known != before.get(uid) {
                continue;
            }
            match (word, known) {
                (Word::Gone, _) => {
                    tracing::info!(uid, "the claim has gone");
                    state.remove(uid).map_err(error)?;
                    wanted.remove(uid);
                }
                (Word::Here(record), None) => {
                    tracing::info!(uid, "the claim is known again");
                    state.insert(&record).map_err(error)?;
                    wanted.insert(uid.clone(), *record);
                }
                (Word::Here(record), Some(known)) => {
                    wanted.insert(uid.clone(), record.renewed(known));
                }
            }
        }
        let list = json!({"version": 1, "command": "claims"});
        let known = commanded(&self.agent, &list).await?;
        for uid in known.iter().map(|it| &it.uid).filter(|it| !state.records.contains_key(*it)) {
            // A claim whose file is there may be known again.
            if !files.contains_key(uid) || left.is_none() {
                let unclaim = json!({"version": 1, "command": "unclaim", "name": uid});
                commanded(&self.agent, &unclaim).await?;
            }
        }
        for record in wanted.values() {
            if let Err(why) = self.apply(&mut state, record, false).await {
                left = Some(format!("the claim {}: {why}", record.name));
            }
        }
        left.map_or(Ok(()), Err)
    }

    /// Makes the pods known that a prepared claim is reserved for by now.
    async fn join(&self, record: &Record) -> Result<(), String> {
        let claim = self.cluster.claim(&record.namespace, &record.name).await;
        let claim = claim.map_err(|failed| failed.to_string())?;
        let fresh = Record::read(&claim, &record.uid, &self.node)?;
        if fresh.pods.is_subset(&record.pods) {
            return Err("the claim is not reserved for it".into());
        }
        let mut state = self.locked().await?;
        let Some(known) = state.records.get(&record.uid) else { return Ok(()) };
        let fresh = fresh.renewed(known);
        self.apply(&mut state, &fresh, false).await
    }
}

fn is_allocated(claim: &super::claim::Claim) -> bool {
    claim.status.as_ref().is_some_and(super::claim::ClaimStatus::is_allocated)
}

/// The claims of a pod, by their names.
fn claims_of(pod: &DynamicObject) -> BTreeSet<String> {
    let (spec, status) = (&pod.data["spec"], &pod.data["status"]);
    let list = |it: &Value| it.as_array().cloned().unwrap_or_default();
    let all = [list(&spec["resourceClaims"]), list(&status["resourceClaimStatuses"])].concat();
    let extended = &status["extendedResourceClaimStatus"];
    let names = all.iter().chain([extended]).filter_map(|it| it["resourceClaimName"].as_str());
    names.map(str::to_owned).collect()
}

/// The pods of the node that have claims, by their UIDs: namespace and claims.
type Pods = BTreeMap<String, (String, BTreeSet<String>)>;

fn pod_is(pods: &mut Pods, pod: &DynamicObject) {
    let Some(uid) = pod.uid() else { return };
    let phase = pod.data["status"]["phase"].as_str();
    match claims_of(pod) {
        // One that has ended needs no claim, and the claim is reserved for it no more.
        _ if matches!(phase, Some("Succeeded" | "Failed")) => _ = pods.remove(&uid),
        none if none.is_empty() => _ = pods.remove(&uid),
        claims => _ = pods.insert(uid, (pod.namespace().unwrap_or_default(), claims)),
    }
}

/// Something that is tried until it is done, after longer and longer pauses.
#[derive(Default)]
struct Attempts {
    said: Said,
    /// When it is due after a failure, and the pause after the next one.
    again: Option<(Instant, Duration)>,
}

impl Attempts {
    fn is_due(&self) -> bool {
        self.again.is_none_or(|(next, _)| Instant::now() >= next)
    }

    fn done(&mut self, done: Result<(), String>) {
        let Err(why) = done else { return *self = Self::default() };
        self.said.warn(format!("not all claims are settled: {why}"));
        let pause = self.again.map_or(AGAIN, |(_, pause)| pause);
        self.again = Some((Instant::now() + pause, (pause * 2).min(PAUSE_MAX)));
    }
}

/// The claims whose pods are followed, by their UIDs.
#[derive(Default)]
struct Followed {
    /// A claim's status.
    reported: BTreeMap<String, claim::Word>,
    reports: BTreeMap<String, Attempts>,
    joins: BTreeMap<String, Attempts>,
}

/// Tends the claims for ever: compares all at the start and when the agent is back, and as the one
/// that keeps the slice follows pods and writes claims' status.
pub(crate) async fn tend(
    dra: &Dra,
    mut devices: Devices,
    mut keeps: Receiver<bool>,
    period: Duration,
) {
    let of_node = watcher::Config::default().fields(&format!("spec.nodeName={}", dra.node));
    let mut events = pin!(watcher(dra.cluster.pod_claims(), of_node).default_backoff());
    let mut watch_said = Said::default();
    let (mut pods, mut listed) = (Pods::new(), Pods::new());
    let (mut mends, mut follows) = (Attempts::default(), Attempts::default());
    let mut followed = Followed::default();
    let mut is_due = true;
    let mut was_healthy = false;
    loop {
        let is_keeper = *keeps.borrow_and_update();
        tokio::select! {
            biased;
            Some(event) = events.next(), if is_keeper => match event {
                Ok(event) => {
                    watch_said = Said::default();
                    match event {
                        Event::Init => listed.clear(),
                        Event::InitApply(pod) => pod_is(&mut listed, &pod),
                        Event::InitDone => pods = std::mem::take(&mut listed),
                        Event::Apply(pod) => pod_is(&mut pods, &pod),
                        Event::Delete(pod) => _ = pods.remove(&pod.uid().unwrap_or_default()),
                    }
                }
                Err(error) => {
                    watch_said.warn(format!("the watch of pods was interrupted: {error}"));
                }
            },
            Ok(()) = devices.is_there.changed() => {}
            Ok(()) = devices.serves.changed() => {}
            Ok(()) = devices.uplinks.changed() => {}
            Ok(()) = keeps.changed() => {}
            () = dra.unsettled.notified() => is_due = true,
            () = tokio::time::sleep(period) => {}
        }
        // An agent that was away may have forgotten all.
        let is_healthy = *devices.is_there.borrow_and_update();
        devices.uplinks.mark_unchanged();
        is_due |= is_healthy && !was_healthy;
        was_healthy = is_healthy;
        if is_healthy && is_due && mends.is_due() {
            let done = dra.mend().await;
            is_due = done.is_err();
            mends.done(done);
        }
        if is_keeper && follows.is_due() {
            follows.done(follow(dra, &devices, is_healthy.then_some(&pods), &mut followed).await);
        }
    }
}

/// Follows the pods of claims while there is an agent, and writes the claims' status. Error: that
/// of all claims; one of which something failed waits alone.
async fn follow(
    dra: &Dra,
    devices: &Devices,
    pods: Option<&Pods>,
    followed: &mut Followed,
) -> Result<(), String> {
    let records = dra.store.read().map_err(|error| error.to_string())?;
    let Followed { reported, reports, joins } = followed;
    reported.retain(|uid, _| records.contains_key(uid));
    reports.retain(|uid, _| records.contains_key(uid));
    joins.retain(|uid, _| records.contains_key(uid));
    for record in records.values() {
        let is_its = |(namespace, claims): &(String, BTreeSet<String>)| {
            *namespace == record.namespace && claims.contains(&record.name)
        };
        let mut of_it = pods.into_iter().flatten().filter(|(_, it)| is_its(it)).map(|(uid, _)| uid);
        if !of_it.any(|uid| is_id(uid) && !record.pods.contains(uid)) {
            joins.remove(&record.uid);
            continue;
        }
        let attempts = joins.entry(record.uid.clone()).or_default();
        if attempts.is_due() {
            let done = dra.join(record).await;
            attempts.done(done.map_err(|why| format!("a pod of the claim {}: {why}", record.name)));
        }
    }
    // The agent is asked as long as a pod has no network.
    let is_open = |uid: &String| reported.get(uid).is_none_or(|it| it.network.is_none());
    let mut networks = BTreeMap::new();
    if pods.is_some() && records.keys().any(is_open) {
        let list = json!({"version": 1, "command": "claims"});
        for claimed in commanded(&dra.agent, &list).await? {
            let network = claimed.mac.map(|mac| Network { mac, addresses: claimed.addresses });
            networks.insert(claimed.uid, network);
        }
    }
    for (uid, record) in &records {
        let before = reported.get(uid);
        let known = before.map(|it| it.network.clone());
        // Without an agent nothing is known of a claim of an earlier driver.
        let Some(network) = networks.remove(uid).or(known) else { continue };
        let states = record.states(|it| devices.fault(it), before.map(|it| &*it.states));
        let word = claim::Word { network, states };
        let attempts = reports.entry(uid.clone()).or_default();
        if before == Some(&word) || !attempts.is_due() {
            continue;
        }
        match dra.cluster.report(record, &record.status(&word)).await {
            Ok(()) | Err(Failed::Gone) => _ = reported.insert(uid.clone(), word),
            // A right or a feature is missing: pods run without it.
            Err(Failed::Refused(why)) => {
                tracing::warn!(claim = record.name, "its status is not written: {why}");
                reported.insert(uid.clone(), word);
            }
            // The others wait with it: each may take its time, and pods are to be joined meanwhile.
            Err(failed) => {
                attempts.done(Err(format!("the status of {}: {failed}", record.name)));
                break;
            }
        }
        attempts.done(Ok(()));
    }
    Ok(())
}
