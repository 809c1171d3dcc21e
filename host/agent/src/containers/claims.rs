//! The claims of pods, on the containers that are there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::MutexGuard;

use super::report::mac;
use super::{Container, Containers, Inner};
use crate::claims::Claim;
use crate::config::Config;
use crate::control::{ClassStatus, Reply, Request, Verb};
use crate::host::Portion;
use crate::rate::Rate;
use crate::state::Introduced;

impl Container {
    pub(super) fn pod(&self) -> Option<&str> {
        self.introduced.as_ref()?.pod.as_deref()
    }
}

impl Containers {
    /// A driver's command about claims.
    pub(crate) fn claims(&self, command: &Request, each: &mut dyn FnMut(Reply)) {
        let refused = |reason: &str| Reply::Refused { reason: reason.to_owned() };
        match (command.command, &command.claim, &command.name) {
            (Verb::Claim, Some(claim), _) => {
                // It is locked before the containers, elsewhere, too.
                let uplinks = self.uplinks();
                let mut inner = self.lock();
                let before = inner.claims.0.get(&claim.uid).cloned();
                if let Err(reason) = inner.claims.take(claim, &self.config(), &uplinks) {
                    return each(refused(&reason));
                }
                let pods = before.iter().chain([claim]).flat_map(|it| &it.pods);
                self.claimed(inner, &pods.collect());
            }
            (Verb::Unclaim, _, Some(uid)) => {
                let mut inner = self.lock();
                if let Some(before) = inner.claims.0.remove(uid) {
                    self.claimed(inner, &before.pods.iter().collect());
                }
            }
            (Verb::Claims, ..) => {
                let inner = self.lock();
                inner.claims.0.values().for_each(|claim| inner.networks(claim, each));
            }
            _ => each(refused("the claim is missing")),
        }
    }

    /// Puts changed claims of these pods in force.
    fn claimed(&self, mut inner: MutexGuard<'_, Inner>, pods: &BTreeSet<&String>) {
        let Inner { containers, claims, .. } = &mut *inner;
        for introduced in containers.values_mut().filter_map(|it| it.introduced.as_mut()) {
            introduced.claimed = claims.claimed(introduced.pod.as_deref());
        }
        let is_its = |it: &Introduced| it.pod.as_ref().is_some_and(|pod| pods.contains(pod));
        let of_pods = inner.containers.values();
        let of_pods = of_pods.filter(|it| it.introduced.as_ref().is_some_and(is_its));
        let of_pods: BTreeSet<u64> = of_pods.map(|it| it.namespace).collect();
        inner.follow_closed(|it| of_pods.contains(&it.namespace));
        self.write(&inner);
        let ends = inner.to_shape(&self.config());
        // The kernel takes its time.
        drop(inner);
        self.shape_each(&ends);
        self.share_uplinks(false);
    }
}

impl Inner {
    /// A line for each container of a claim's pods, or one without a container.
    fn networks(&self, claim: &Claim, each: &mut dyn FnMut(Reply)) {
        let line = |it: Option<&Container>| Reply::Claimed {
            uid: claim.uid.clone(),
            pod: it.and_then(Container::pod).map(str::to_owned),
            mac: it.map(|it| mac(it.sources.mac)),
            addresses: it.iter().flat_map(|it| &it.sources.addresses).copied().collect(),
        };
        let is_its = |it: &&Container| it.pod().is_some_and(|pod| claim.pods.contains(pod));
        let mut its = self.containers.values().filter(is_its).peekable();
        if its.peek().is_none() {
            each(line(None));
        }
        its.for_each(|it| each(line(Some(it))));
    }

    /// The parts of an uplink: of the pods that have claims there, and of containers by their
    /// classes. Pods with the same claims share one part. A claim is divided among pods of which
    /// some have others, too.
    pub(super) fn portions(&self, config: &Config, uplink: &str) -> Vec<Portion> {
        let mut by_class = Vec::new();
        let mut by_claims = BTreeMap::<Vec<&str>, (Portion, Vec<&Claim>)>::new();
        for (end, container) in &self.containers {
            let ClassStatus::Of(bounds) = container.class(config) else { continue };
            let of_class = bounds.uplink_ceil.unwrap_or(Rate::MOST);
            let (end, addresses) = (*end, container.sources.addresses.clone());
            let claims = self.claims.of(container.pod()).filter(|it| it.rate(uplink).is_some());
            let claims: Vec<&Claim> = claims.collect();
            if claims.is_empty() {
                let portion = |rate| Portion { end, rate, ceil: of_class, addresses };
                by_class.extend(bounds.uplink_rate.map(portion));
                continue;
            }
            let uids = claims.iter().map(|it| &*it.uid).collect();
            let all: Option<Vec<Rate>> = claims.iter().map(|it| it.ceil(uplink)).collect();
            let ceil = all.and_then(Rate::sum).map_or(of_class, |it| it.min(of_class));
            // Its rate is known once all are.
            let portion = Portion { end, rate: ceil, ceil, addresses: Default::default() };
            let (portion, _) = by_claims.entry(uids).or_insert((portion, claims));
            portion.addresses.extend(addresses);
            portion.ceil = portion.ceil.min(ceil);
        }
        let parts = |claim: &Claim| by_claims.keys().filter(|it| it.contains(&&*claim.uid)).count();
        let rate = |claims: &[&Claim]| {
            let each = claims.iter().filter_map(|it| Some((it.rate(uplink)?, parts(it))));
            Rate::sum(each.map(|(rate, parts)| rate.among(parts as u64)))
        };
        let with_rate = |(portion, claims): &(Portion, Vec<&Claim>)| {
            let rate = rate(claims)?;
            Some(Portion { rate, ceil: portion.ceil.max(rate), ..portion.clone() })
        };
        let mut portions: Vec<Portion> = by_claims.values().filter_map(with_rate).collect();
        portions.extend(by_class);
        portions.sort_by_key(|it| it.end);
        portions
    }
}
