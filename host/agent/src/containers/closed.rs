//! Containers that no RoCEv2 leaves: those without a claim, where claims decide.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Container, FoundEnd, Inner};
use crate::config::DefaultPolicy;
use crate::host::Sources;

/// The source addresses that leave a network namespace: none of one that is cut off.
pub(super) fn allowed(
    cut_off: &BTreeMap<u64, Instant>,
    namespace: u64,
    sources: &Sources,
    is_closed: bool,
) -> Sources {
    match cut_off.contains_key(&namespace) {
        true => Sources { mac: sources.mac, ..Sources::default() },
        false => Sources { is_closed, ..sources.clone() },
    }
}

impl Inner {
    /// Whether no RoCEv2 leaves a container. One of which an earlier agent's state is lost stays as
    /// its program has it, until it asks or is introduced.
    pub(super) fn closes(&self, container: &Container) -> bool {
        match container.namespace {
            0 => self.policy == DefaultPolicy::Claimed && container.sources.is_closed,
            namespace => self.is_closed(namespace, container.pod()),
        }
    }

    /// Whether no RoCEv2 leaves the ends of a network namespace, of which one is of this pod. The
    /// engine may have introduced another of them alone.
    pub(super) fn is_closed(&self, namespace: u64, pod: Option<&str>) -> bool {
        let has_claim = |pod| self.claims.of(pod).next().is_some();
        let mut ends = self.containers.values().filter(|it| it.namespace == namespace);
        self.policy == DefaultPolicy::Claimed
            && !has_claim(pod)
            && !ends.any(|it| has_claim(it.pod()))
    }

    /// The source addresses that leave an end that is about to be guarded.
    pub(super) fn allowed_of(&self, found: &FoundEnd) -> Sources {
        let pod = found.introduced.as_ref().and_then(|it| it.pod.as_deref());
        let is_closed = self.is_closed(found.namespace, pod);
        allowed(&self.cut_off, found.namespace, &found.end.sources, is_closed)
    }

    /// Puts another policy in force, at once.
    pub(super) fn has_policy(&mut self, policy: DefaultPolicy) {
        if std::mem::replace(&mut self.policy, policy) != policy {
            self.follow_all(|_| true);
        }
    }

    /// Opens or closes ends, where claims decide.
    pub(super) fn follow_closed(&mut self, wanted: impl Fn(&Container) -> bool) {
        if self.policy == DefaultPolicy::Claimed {
            self.follow_all(wanted);
        }
    }

    fn follow_all(&mut self, wanted: impl Fn(&Container) -> bool) {
        let all = self.containers.iter().filter(|(_, it)| wanted(it));
        let ends: Vec<u32> = all.map(|(end, _)| *end).collect();
        for end in ends {
            // An announcement tells of one that has gone.
            self.follow(end);
        }
    }
}
