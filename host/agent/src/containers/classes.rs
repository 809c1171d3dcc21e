//! The classes of containers.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::{Container, Containers, Inner};
use crate::class::{Class, Subject};
use crate::config::Config;
use crate::control::ClassStatus;
use crate::host::Sources;
use crate::limits::Share;
use crate::pages::{Exceeding, LimitOf};
use crate::quota::{RdmaExceeded, RdmaMax};
use crate::state::Introduced;

/// The facts that decide a class. The name of a control group is none: a user of the host may
/// choose it, and another container of a pod that asks last.
pub(super) fn subject<'a>(
    end: &'a str,
    introduced: Option<&'a Introduced>,
    sources: &'a Sources,
) -> Subject<'a> {
    let called = introduced.map(|it| &it.called);
    Subject {
        end,
        id: called.map(|it| it.id.as_str()),
        engine: called.map(|it| it.engine.as_str()),
        addresses: &sources.addresses,
        class: introduced
            // A user makes claims, and an operator configures engines.
            .and_then(|it| it.class.as_ref().or(it.claimed.class.as_ref()))
            .map(|it| &**it),
        rates: introduced
            .map(|it| it.claimed.rates().least(it.rates.unwrap_or_default()))
            .unwrap_or_default(),
    }
}

/// How long a container is cut off at least.
const CUT_OFF_MIN: Duration = Duration::from_secs(15);

impl Container {
    pub(super) fn class(&self, config: &Config) -> ClassStatus {
        let of = subject(&self.name, self.introduced.as_ref(), &self.sources);
        match config.bounds(&of) {
            Ok(bounds) => ClassStatus::Of(bounds),
            Err(_) => ClassStatus::Gone { name: of.class.unwrap_or_default().to_owned() },
        }
    }
}

impl Inner {
    /// How often each container may ask in a second, and what its programs may hold together.
    pub(super) fn strictest(
        &self,
        config: &Config,
    ) -> (HashMap<Share, u32>, HashMap<u64, RdmaMax>) {
        let (mut rates, mut held) = (HashMap::new(), HashMap::new());
        for container in self.containers.values().filter(|_| !config.classes.is_empty()) {
            let ClassStatus::Of(bounds) = container.class(config) else { continue };
            let rate = rates.entry(Share::Container(container.namespace));
            let rate = rate.or_insert(bounds.requests_per_second);
            *rate = bounds.requests_per_second.min(*rate);
            let max = held.entry(container.namespace).or_insert(bounds.rdma_max);
            *max = max.least(bounds.rdma_max);
        }
        (rates, held)
    }
}

/// The network namespaces that are cut off from now on, each with the time when it was: those of
/// `wanted`, and for a while those of before, so that the log has few lines of one that comes and
/// goes.
fn cut_off(
    before: &BTreeMap<u64, Instant>,
    wanted: impl Iterator<Item = u64>,
    now: Instant,
) -> BTreeMap<u64, Instant> {
    let mut after = before.clone();
    after.retain(|_, since| now.saturating_duration_since(*since) < CUT_OFF_MIN);
    after.extend(wanted.map(|it| (it, before.get(&it).copied().unwrap_or(now))));
    after
}

impl Containers {
    /// Has each container asked no more often than its class may, and tells its programs what they
    /// may hold: with several ends on the host what the strictest allows.
    pub(super) fn classify(&self, inner: &Inner) {
        let config = self.config();
        let (others, held) = inner.strictest(&config);
        self.limits.set_others(others);
        let limit_of = move |namespace, name: &str| {
            let known = held.get(&namespace).copied();
            // One that has not asked for a port is known by its end alone.
            let unknown = || config.bounds(&subject(name, None, &Sources::default()));
            known.or_else(|| Some(unknown().ok()?.rdma_max)).unwrap_or_default()
        };
        self.pages.limit(LimitOf::new(limit_of));
    }

    /// Whether there is something to [judge](Self::judge): a limit and a device, or a container
    /// that was cut off.
    pub(crate) fn may_exceed(&self) -> bool {
        let is_limited = |class: &Class| !class.rdma_max.is_none();
        let has_limits = self.config().classes.iter().any(is_limited);
        has_limits && self.pages.has_open() || !self.lock().cut_off.is_empty()
    }

    /// Writes to the log which containers hold more than they may, cuts them off if their class
    /// says so, and no others. A container that is not known is not cut off.
    pub(crate) fn judge(&self, now: Instant) {
        let exceeding = self.pages.exceeding(now);
        for Exceeding { name, held, .. } in exceeding.values().filter(|it| it.is_news) {
            tracing::warn!(container = name, held, "programs hold more than they may");
        }
        let config = self.config();
        let mut inner = self.lock();
        let is_wanted = |container: &Container| match container.class(&config) {
            ClassStatus::Of(bounds) => bounds.rdma_exceeded == RdmaExceeded::CutOff,
            ClassStatus::Gone { .. } => false,
        };
        let wanted = inner.containers.values().filter(|it| exceeding.contains_key(&it.namespace));
        let wanted = wanted.filter(|it| is_wanted(it)).map(|it| it.namespace);
        let before = inner.cut_off.clone();
        let after = cut_off(&before, wanted, now);
        let ends = inner.containers.iter();
        let (was, is) = (
            |it: &Container| before.contains_key(&it.namespace),
            |it: &Container| after.contains_key(&it.namespace),
        );
        let changed: Vec<(u32, bool)> =
            ends.filter(|(_, it)| was(it) != is(it)).map(|(end, it)| (*end, is(it))).collect();
        inner.cut_off = after;
        for (end, is_cut) in changed {
            let container = &inner.containers[&end];
            match is_cut {
                true => tracing::warn!(container = container.label(), "is cut off"),
                false => tracing::info!(container = container.label(), "is cut off no more"),
            }
            inner.follow(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::called::Called;
    use crate::claims::Claimed;

    #[test]
    fn the_class_that_the_engine_named_binds_before_a_claims() {
        let sources = Sources::default();
        for (engine, claim, is) in [
            (Some("small"), Some("gold"), Some("small")),
            (None, Some("gold"), Some("gold")),
            (Some("small"), None, Some("small")),
            (None, None, None),
        ] {
            let introduced = Introduced {
                called: Called { id: "c".into(), engine: "e".into() },
                class: engine.map(str::to_owned),
                rates: None,
                pod: Some("p".into()),
                claimed: Claimed { class: claim.map(str::to_owned), limit: None },
                given: (&sources).into(),
            };
            assert_eq!(subject("veth0", Some(&introduced), &sources).class, is);
        }
    }

    /// Two of them, of which one holds more for a long time: it is let out when it holds less, and
    /// the other after the least time.
    #[test]
    fn a_container_is_cut_off_for_the_least_time_and_while_it_holds_more() {
        let (start, mut cut) = (Instant::now(), BTreeMap::new());
        let least = CUT_OFF_MIN.as_secs();
        let mut let_out = [None; 2];
        for second in 0..4 * least {
            let now = start + Duration::from_secs(second);
            let wanted = [(7, 3 * least), (8, 2)].into_iter().filter(|(_, until)| second < *until);
            cut = cut_off(&cut, wanted.map(|(namespace, _)| namespace), now);
            for (namespace, out) in [7, 8].into_iter().zip(&mut let_out) {
                match cut.get(&namespace) {
                    Some(since) => assert_eq!((*since, *out), (start, None), "{second}"),
                    None => _ = out.get_or_insert(second),
                }
            }
        }
        assert_eq!(let_out, [Some(3 * least), Some(least)]);
        // The next time is one of its own.
        let late = start + 5 * CUT_OFF_MIN;
        assert_eq!(cut_off(&cut, [8].into_iter(), late), [(8, late)].into());
    }
}
