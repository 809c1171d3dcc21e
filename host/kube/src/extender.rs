//! The verbs of the extender: `filter` and `prioritize` look into the ledger, `bind` reserves in it
//! and then binds.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt as _;
use parking_lot::Mutex;
use rocinante_placement::{Interface, STEPS, demand};

use crate::lease::Lease;
use crate::ledger::{Ledger, Outcome};
use crate::objects::{AGAIN, Cluster, Failed, PodKey, PodState as _, REQUIRED};
use crate::wire::{Arguments, Binding, Bound, Filtered, PodMeta, Priority};

/// The steps of all searches of one `filter`: a few milliseconds. Where there are many nodes each
/// has its part, and at least as much as any common demand takes.
const FILTER_STEPS: usize = 100_000;
const NODE_STEPS_MIN: u32 = 128;

/// How long to wait for the watch to show an assumed pod, before the API is asked.
pub const ASSUMED_FOR: Duration = Duration::from_secs(15);
/// How often that is how long an API server works on a request: 60 s, and some more.
pub(crate) const REQUEST_TIMES: u32 = 6;

/// The extender. Its clones are one.
#[derive(Clone)]
pub(crate) struct Extender {
    cluster: Cluster,
    ledger: Arc<Mutex<Ledger>>,
    lease: Arc<Lease>,
    assumed_for: Duration,
}

impl Extender {
    pub(crate) fn new(
        cluster: Cluster,
        ledger: Arc<Mutex<Ledger>>,
        lease: Arc<Lease>,
        assumed_for: Duration,
    ) -> Self {
        Self { cluster, ledger, lease, assumed_for }
    }

    /// Error: the taken rates are not known yet.
    pub(crate) fn ready(&self) -> Result<(), String> {
        self.ledger.lock().ready()
    }

    /// The answer to `filter`, as JSON.
    pub(crate) fn filter(&self, body: &[u8]) -> String {
        to_text(&self.filtered(body).unwrap_or_else(Filtered::failed))
    }

    fn filtered<'a>(&self, body: &'a [u8]) -> Result<Filtered<'a>, String> {
        let (pod, candidates) = Arguments::parsed(body)?;
        let wanted = wanted(&pod);
        let names = candidates.names();
        let each = (FILTER_STEPS / names.len().max(1)).min(STEPS as usize) as u32;
        let steps = each.max(NODE_STEPS_MIN);
        let mut unfit = Vec::new();
        let mut fits = vec![true; names.len()];
        match wanted {
            Ok(wanted) if wanted.is_empty() => {}
            Ok(wanted) => {
                let ledger = self.ledger.lock();
                ledger.ready()?;
                for (name, fits) in names.iter().zip(&mut fits) {
                    if let Err(why) = ledger.fits(&pod.uid, &wanted, name, steps) {
                        *fits = false;
                        unfit.push(((*name).to_owned(), why.reason, why.with_others_gone));
                    }
                }
            }
            Err(reason) => {
                fits.fill(false);
                let all = names.iter().map(|name| ((*name).to_owned(), reason.clone(), false));
                unfit.extend(all);
            }
        }
        let mut filtered = candidates.filtered(&fits);
        for (name, reason, with_others_gone) in unfit {
            if !with_others_gone {
                filtered.failed_and_unresolvable_nodes.insert(name.clone(), reason.clone());
            }
            filtered.failed_nodes.insert(name, reason);
        }
        Ok(filtered)
    }

    /// The answer to `prioritize`, as JSON. Error: there is none to give; the scheduler goes on
    /// without.
    pub(crate) fn prioritize(&self, body: &[u8]) -> Result<String, String> {
        let (pod, candidates) = Arguments::parsed(body)?;
        let wanted = wanted(&pod)?;
        let ledger = self.ledger.lock();
        ledger.ready()?;
        let score = |name: &str| match wanted.is_empty() {
            true => 0,
            false => ledger.score(&wanted, name),
        };
        let names = candidates.names().into_iter();
        let scores: Vec<Priority> =
            names.map(|name| Priority { host: name.to_owned(), score: score(name) }).collect();
        Ok(to_text(&scores))
    }

    /// The answer to `bind`, as JSON. The work goes on when the scheduler does not wait for it.
    pub(crate) async fn bind(&self, body: &[u8]) -> String {
        let error = match serde_json::from_slice::<Binding>(body) {
            Err(error) => format!("not understood: {error}"),
            Ok(binding) => {
                let this = self.clone();
                let work = tokio::spawn(async move { this.bound(binding).await });
                match work.await {
                    Ok(Ok(())) => String::new(),
                    Ok(Err(error)) => error,
                    Err(error) => format!("the bind failed: {error}"),
                }
            }
        };
        to_text(&Bound { error })
    }

    async fn bound(self, binding: Binding) -> Result<(), String> {
        let Binding { name, namespace, uid, node } = binding;
        let failed = |failed: Failed| format!("pod {namespace}/{name}: {failed}");
        let pod = self.cluster.pod(&namespace, &name).await.map_err(failed)?;
        let key = PodKey::of(&pod);
        if key.uid != uid {
            return Err(format!("pod {namespace}/{name} is another one by now"));
        }
        match pod.node() {
            // The answer to an earlier bind was lost.
            Some(bound) if bound == node => return Ok(()),
            Some(bound) => return Err(format!("the pod is bound to {bound}")),
            None => {}
        }
        let required = pod.annotations().get(REQUIRED).map_or("", String::as_str);
        let wanted = demand(required).map_err(|error| format!("{REQUIRED}: {error}"))?;
        if wanted.is_empty() {
            return self.cluster.bind(&key, &node, &[]).await.map_err(failed);
        }
        // The pod was read before: if another has the lease by then, and has fenced it, this fails.
        self.lease.held()?;
        let reserved = self.ledger.lock().reserve(&key.uid, &wanted, &node)?;
        let done = self.cluster.bind(&key, &node, &reserved.placed).await;
        let outcome = done.as_ref().err().map_or(Outcome::Done, Failed::outcome);
        if self.ledger.lock().answered(&key.uid, &reserved, outcome) {
            let wait = match done {
                Err(Failed::Conflict(_)) => Duration::ZERO,
                _ => self.assumed_for,
            };
            tokio::spawn(self.clone().expire(key, reserved.attempt, wait));
        }
        done.map_err(failed)
    }

    /// Forgets an assumed pod that is not bound after its time.
    async fn expire(self, key: PodKey, attempt: u64, wait: Duration) {
        tokio::time::sleep(wait).await;
        while self.ledger.lock().is_assumed(&key.uid, attempt) {
            match self.cluster.fence(&key).await {
                // The watch will show it.
                Ok(pod) if pod.node().is_some() && !pod.has_ended() => {}
                Ok(_) | Err(Failed::Gone) => {
                    tracing::warn!(pod = key.name, "forgotten: it was never bound");
                    self.ledger.lock().forget(&key.uid, attempt);
                }
                Err(failed) => tracing::warn!(pod = key.name, "still assumed: {failed}"),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

fn wanted(pod: &PodMeta) -> Result<Vec<Interface>, String> {
    let text = pod.annotation(REQUIRED).unwrap_or_default();
    demand(text).map_err(|error| format!("{REQUIRED}: {error}"))
}

fn to_text(answer: &impl serde::Serialize) -> String {
    // The types have no map with keys that are no strings, and no serializer of ours fails.
    serde_json::to_string(answer).unwrap_or_default()
}
