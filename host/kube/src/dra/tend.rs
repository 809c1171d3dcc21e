//! What is done beside the kubelet's calls: files, agent and claims are compared, pods that come to
//! a prepared claim are made known, and claims' status is written.

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
use super::claim::{Network, Record, claim_of, is_id};
use crate::agent::commanded;
use crate::objects::{AGAIN, Failed};
use crate::said::Said;

/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// What the API says of a claim that is prepared, or has a file of CDI.
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
        let is_as_before = |now: Option<&Record>, uid: &String| now == before.get(uid);
        for (uid, word) in words {
            if !is_as_before(state.records.get(uid), uid) {
                continue;
            }
            match word {
                Word::Gone => {
                    tracing::info!(uid, "the claim has gone");
                    state.remove(uid).map_err(error)?;
                }
                Word::Here(record) if !state.records.contains_key(uid) => {
                    tracing::info!(uid, "the claim is known again");
                    state.records.insert(uid.clone(), *record);
                    state.write().map_err(error)?;
                }
                Word::Here(_) => {}
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
        for record in state.records.values() {
            state.write_cdi(record).map_err(error)?;
            if let Err(why) = commanded(&self.agent, &record.command()).await {
                left = Some(format!("the claim {}: {why}", record.name));
            }
        }
        left.map_or(Ok(()), Err)
    }

    /// Makes the pods known that a prepared claim is reserved for by now.
    async fn join(&self, record: &Record) -> Result<(), String> {
        let claim = self.cluster.claim(&record.namespace, &record.name).await;
        let claim = claim.map_err(|failed| failed.to_string())?;
        let pods = Record::pods(&claim);
        if claim.uid().as_deref() != Some(&record.uid) || pods.is_subset(&record.pods) {
            return Err("the claim is not reserved for it".into());
        }
        let mut state = self.locked().await?;
        let Some(now) = state.records.get_mut(&record.uid) else { return Ok(()) };
        now.pods.extend(pods);
        let command = now.command();
        state.write().map_err(|error| error.to_string())?;
        commanded(&self.agent, &command).await.map(drop)
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
    match claims_of(pod) {
        none if none.is_empty() => _ = pods.remove(&uid),
        claims => _ = pods.insert(uid, (pod.namespace().unwrap_or_default(), claims)),
    }
}

/// Tends the claims for ever: compares all at the start and when the agent is back, and as the one
/// that keeps the slice follows pods and writes claims' status.
pub(crate) async fn tend(
    dra: &Dra,
    mut health: Receiver<bool>,
    mut keeps: Receiver<bool>,
    period: Duration,
) {
    let of_node = watcher::Config::default().fields(&format!("spec.nodeName={}", dra.node));
    let mut events = pin!(watcher(dra.cluster.pod_claims(), of_node).default_backoff());
    let (mut said, mut watch_said) = (Said::default(), Said::default());
    let (mut pods, mut listed) = (Pods::new(), Pods::new());
    // What a claim's status says.
    let mut reported = BTreeMap::<String, Option<Network>>::new();
    let (mut is_due, mut next, mut pause) = (true, Instant::now(), AGAIN);
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
            Ok(()) = health.changed() => {}
            Ok(()) = keeps.changed() => {}
            () = dra.unsettled.notified() => is_due = true,
            () = tokio::time::sleep(period) => {}
        }
        // An agent that was away may have forgotten all.
        let is_healthy = *health.borrow_and_update();
        is_due |= is_healthy && !was_healthy;
        was_healthy = is_healthy;
        if !is_healthy || Instant::now() < next {
            continue;
        }
        let mut done = Ok(());
        if is_due {
            done = dra.mend().await;
            is_due = done.is_err();
        }
        if is_keeper {
            let each = follow(dra, &pods, &mut reported).await;
            done = done.and(each);
        }
        match done {
            Ok(()) => (said, pause) = (Said::default(), AGAIN),
            Err(why) => {
                said.warn(format!("not all claims are settled: {why}"));
                next = Instant::now() + pause;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}

/// Follows the pods of claims, and writes their status. Error: the rest of the work.
async fn follow(
    dra: &Dra,
    pods: &Pods,
    reported: &mut BTreeMap<String, Option<Network>>,
) -> Result<(), String> {
    let records = dra.store.read().map_err(|error| error.to_string())?;
    reported.retain(|uid, _| records.contains_key(uid));
    let mut left = Ok(());
    for record in records.values() {
        let is_its = |(namespace, claims): &(String, BTreeSet<String>)| {
            *namespace == record.namespace && claims.contains(&record.name)
        };
        let mut of_it = pods.iter().filter(|(_, it)| is_its(it)).map(|(uid, _)| uid);
        if of_it.any(|uid| is_id(uid) && !record.pods.contains(uid))
            && let Err(why) = dra.join(record).await
        {
            left = Err(format!("a pod of the claim {}: {why}", record.name));
        }
    }
    // The agent is asked as long as a pod has no network.
    let is_open = |uid: &String| reported.get(uid).is_none_or(Option::is_none);
    if !records.keys().any(is_open) {
        return left;
    }
    let list = json!({"version": 1, "command": "claims"});
    for claimed in commanded(&dra.agent, &list).await? {
        let Some(record) = records.get(&claimed.uid) else { continue };
        let network = claimed.mac.map(|mac| Network { mac, addresses: claimed.addresses });
        if reported.get(&record.uid) == Some(&network) {
            continue;
        }
        match dra.cluster.report(record, &record.status(network.as_ref())).await {
            Ok(()) | Err(Failed::Gone) => _ = reported.insert(record.uid.clone(), network),
            // A right or a feature is missing: pods run without it.
            Err(Failed::Refused(why)) => {
                tracing::warn!(claim = record.name, "its status is not written: {why}");
                reported.insert(record.uid.clone(), network);
            }
            Err(failed) => left = Err(format!("the status of {}: {failed}", record.name)),
        }
    }
    left
}
