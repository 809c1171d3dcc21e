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
use tokio::time::{Instant, sleep_until};

use super::Dra;
use super::claim::{self, Network, Record, claim_of, is_id};
use super::health::Devices;
use crate::agent::{Claimed, commanded};
use crate::look::Looks;
use crate::objects::{AGAIN, Failed};
use crate::said::Said;

/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A pod whose containers have ended loses its network a little before or after the API says so.
const GRACE: Duration = Duration::from_secs(5);

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
                (Word::Here(record), known) => {
                    if known.is_none() {
                        tracing::info!(uid, "the claim is known again");
                        state.insert(&record).map_err(error)?;
                    }
                    wanted.insert(uid.clone(), *record);
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
        if !state.records.contains_key(&record.uid) {
            return Ok(());
        }
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

/// A pod of the node that has claims.
#[derive(PartialEq)]
struct OfNode {
    namespace: String,
    name: String,
    claims: BTreeSet<String>,
    /// It has a network, and is not about to end.
    runs: bool,
}

/// By their UIDs.
type Pods = BTreeMap<String, OfNode>;

/// Updates a pod. Returns whether that changed anything.
fn pod_is(pods: &mut Pods, pod: &DynamicObject) -> bool {
    let Some(uid) = pod.uid() else { return false };
    let phase = pod.data["status"]["phase"].as_str();
    let claims = claims_of(pod);
    // One that has ended needs no claim, and the claim is reserved for it no more.
    if claims.is_empty() || matches!(phase, Some("Succeeded" | "Failed")) {
        return pods.remove(&uid).is_some();
    }
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let runs = phase == Some("Running") && pod.metadata.deletion_timestamp.is_none();
    let now = OfNode { namespace, name, claims, runs };
    let is_new = pods.get(&uid) != Some(&now);
    pods.insert(uid, now);
    is_new
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
        self.again().is_none_or(|next| Instant::now() >= next)
    }

    fn again(&self) -> Option<Instant> {
        self.again.map(|(next, _)| next)
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
    /// The pods that had an interface: others have none to lose.
    named: BTreeSet<String>,
    /// Running pods whose interface the agent knows no more: since when, and the message.
    lost: BTreeMap<String, (Instant, String)>,
    /// When there is something to do without an event.
    next: Option<Instant>,
}

impl Followed {
    /// There is something to do then.
    fn waits_until(&mut self, at: Option<Instant>) {
        self.next = self.next.into_iter().chain(at).min();
    }
}

/// Tends the claims for ever: compares all at the start and when the agent is back, and as the one
/// that keeps the slice follows pods and writes claims' status.
pub(crate) async fn tend(
    dra: &Dra,
    mut devices: Devices,
    mut keeps: Receiver<bool>,
    mut looks: Looks,
) {
    let of_node = watcher::Config::default().fields(&format!("spec.nodeName={}", dra.node));
    let mut events = pin!(watcher(dra.cluster.pod_claims(), of_node).default_backoff());
    let mut watch_said = Said::default();
    let (mut pods, mut listed) = (None::<Pods>, Pods::new());
    let (mut mends, mut follows) = (Attempts::default(), Attempts::default());
    let mut followed = Followed::default();
    let (mut is_due, mut was_healthy) = (true, false);
    // When there is something to do without an event.
    let mut next = None;
    loop {
        let is_keeper = *keeps.borrow_and_update();
        let mut is_new = false;
        tokio::select! {
            biased;
            Some(event) = events.next(), if is_keeper => match event {
                Ok(event) => {
                    watch_said = Said::default();
                    match event {
                        Event::Init => listed.clear(),
                        Event::InitApply(pod) => _ = pod_is(&mut listed, &pod),
                        Event::InitDone => {
                            (pods, is_new) = (Some(std::mem::take(&mut listed)), true);
                        }
                        Event::Apply(pod) => is_new |= pod_is(pods.get_or_insert_default(), &pod),
                        Event::Delete(pod) => {
                            let uid = pod.uid().unwrap_or_default();
                            is_new |= pods.get_or_insert_default().remove(&uid).is_some();
                        }
                    }
                }
                Err(error) => {
                    watch_said.warn(format!("the watch of pods was interrupted: {error}"));
                }
            },
            Ok(()) = devices.is_there.changed() => is_new = true,
            Ok(()) = devices.serves.changed() => is_new = true,
            Ok(()) = devices.uplinks.changed() => is_new = true,
            Ok(()) = keeps.changed() => is_new = true,
            () = dra.unsettled.notified() => is_due = true,
            () = looks.again(true) => is_new = true,
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => is_new = true,
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
        if is_keeper && is_new && follows.is_due() {
            let pods = pods.as_ref().filter(|_| is_healthy);
            follows.done(follow(dra, &devices, pods, &mut followed).await);
        }
        let of_mends = mends.again().filter(|_| is_due && is_healthy);
        next = of_mends.into_iter().chain(follows.again().or(followed.next)).min();
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
    followed.next = None;
    followed.reported.retain(|uid, _| records.contains_key(uid));
    followed.reports.retain(|uid, _| records.contains_key(uid));
    followed.joins.retain(|uid, _| records.contains_key(uid));
    followed.named.retain(|pod| records.values().any(|it| it.pods.contains(pod)));
    followed.lost.retain(|uid, _| records.contains_key(uid));
    for record in records.values() {
        let is_its =
            |it: &OfNode| it.namespace == record.namespace && it.claims.contains(&record.name);
        let mut of_it = pods.into_iter().flatten().filter(|(_, it)| is_its(it)).map(|(uid, _)| uid);
        if !of_it.any(|uid| is_id(uid) && !record.pods.contains(uid)) {
            followed.joins.remove(&record.uid);
            continue;
        }
        let attempts = followed.joins.entry(record.uid.clone()).or_default();
        if attempts.is_due() {
            let done = dra.join(record).await;
            attempts.done(done.map_err(|why| format!("a pod of the claim {}: {why}", record.name)));
        }
        let again = attempts.again();
        followed.waits_until(again);
    }
    let mut words = BTreeMap::<String, (Option<Network>, BTreeSet<String>)>::new();
    if pods.is_some() && !records.is_empty() {
        let list = json!({"version": 1, "command": "claims"});
        for Claimed { uid, pod, mac, addresses } in commanded(&dra.agent, &list).await? {
            let (network, has) = words.entry(uid).or_default();
            *network = network.take().or(mac.map(|mac| Network::new(mac, addresses)));
            has.extend(pod.clone());
            followed.named.extend(pod);
        }
    }
    // Nothing is asked of the API while an agent is only late.
    let is_away = *devices.serves.borrow() == Some(false);
    for (uid, record) in &records {
        let word = words.remove(uid);
        if word.is_none() && !followed.reported.contains_key(uid) && !is_away {
            continue;
        }
        let attempts = followed.reports.entry(uid.clone()).or_default();
        if !attempts.is_due() {
            let again = attempts.again();
            followed.waits_until(again);
            continue;
        }
        let done = followed.report(dra, devices, pods, record, word).await;
        let attempts = followed.reports.entry(uid.clone()).or_default();
        match done {
            Ok(word) => {
                attempts.done(Ok(()));
                followed.reported.insert(uid.clone(), word);
            }
            // The others wait with it: each may take its time, and pods are to be joined meanwhile.
            Err(failed) => {
                attempts.done(Err(format!("the status of {}: {failed}", record.name)));
                followed.waits_until(Some(Instant::now() + AGAIN));
                break;
            }
        }
    }
    Ok(())
}

impl Followed {
    /// Writes a claim's status, if it is new. Returns that which is written.
    async fn report(
        &mut self,
        dra: &Dra,
        devices: &Devices,
        pods: Option<&Pods>,
        record: &Record,
        word: Option<(Option<Network>, BTreeSet<String>)>,
    ) -> Result<claim::Word, Failed> {
        let before = match self.reported.get(&record.uid) {
            Some(before) => before.clone(),
            None => match dra.cluster.claim(&record.namespace, &record.name).await {
                Ok(claim) => record.written(&claim).unwrap_or_default(),
                Err(Failed::Gone) => claim::Word::default(),
                Err(failed) => return Err(failed),
            },
        };
        // An agent that is away has not said that it has the claim.
        if word.is_none() && before.states.is_empty() {
            return Ok(before);
        }
        let now = self.word(devices, pods, record, word, &before);
        if now != before {
            match dra.cluster.report(record, &record.status(&now)).await {
                Ok(()) | Err(Failed::Gone) => {}
                // A right or a feature is missing: pods run without it.
                Err(Failed::Refused(why)) => {
                    tracing::warn!(claim = record.name, "its status is not written: {why}");
                }
                Err(failed) => return Err(failed),
            }
        }
        Ok(now)
    }

    /// The status of a claim, by the agent's word, if there is one, and the status before.
    fn word(
        &mut self,
        devices: &Devices,
        pods: Option<&Pods>,
        record: &Record,
        word: Option<(Option<Network>, BTreeSet<String>)>,
        before: &claim::Word,
    ) -> claim::Word {
        let (now, has) = word.map_or((None, None), |(now, has)| (now, Some(has)));
        let said = |why: &str| before.states.iter().any(|it| it.fault() == Some(why));
        // Without an answer of the agent `lost` stays.
        if let (Some(pods), Some(has)) = (pods, has) {
            let lost = record.pods.difference(&has).find_map(|uid| {
                let OfNode { name, .. } = pods.get(uid).filter(|it| it.runs)?;
                let why = format!("the agent knows no interface of the pod {name} any more");
                // An earlier driver may have known it.
                (self.named.contains(uid) || said(&why)).then_some(why)
            });
            let before = self.lost.remove(&record.uid);
            let since = before.map_or_else(Instant::now, |(since, _)| since);
            self.lost.extend(lost.map(|why| (record.uid.clone(), (since, why))));
        }
        let lost = self.lost.get(&record.uid).cloned().filter(|(since, why)| {
            let is_over = said(why) || since.elapsed() >= GRACE;
            self.waits_until((!is_over).then(|| *since + GRACE));
            is_over
        });
        let lost = lost.map(|(_, why)| why);
        let fault = |it: &str| devices.fault(it).or(lost.clone());
        let network = now.or_else(|| before.network.clone());
        claim::Word { states: record.states(fault, &before.states), network }
    }
}
