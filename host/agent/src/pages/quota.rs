//! The limits that the programs of a container keep together: the agent's side of their ledger.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante_netdev::handed::page::{Amounts, Ledger, PAGES_MAX, RESOURCES, Usage};

use super::{Container, Inner, Pages};
use crate::journal::{MINUTE, Seldom};
use crate::quota::{RdmaMax, Uses};

/// A program charges before it adds up, and takes a charge beyond the limit back: it exceeds only
/// if it still does a while later.
const STILL: Duration = Duration::from_secs(1);

/// A container's limits, and what it holds.
#[derive(Debug, Default)]
pub(super) struct Quota {
    ledger: Option<Arc<Shared>>,
    max: RdmaMax,
    /// As it was read last.
    pub(super) usage: Usage,
    /// More than the limit that was there when the limit came.
    tolerated: Amounts,
    /// Until then programs come back that an earlier agent knew, with what they hold.
    returns_until: Option<Instant>,
    /// Since when it holds more.
    exceeds: Option<Instant>,
    written: Seldom,
}

/// A ledger, and its file to hand over.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) file: OwnedFd,
    pub(super) ledger: Ledger,
}

/// A ledger with the slot of a device.
pub(super) type Place = (Arc<Shared>, usize);

/// A container whose programs hold more than they may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exceeding {
    pub(crate) name: String,
    /// The resources in words.
    pub(crate) held: String,
    /// Whether the log has not said so for a minute.
    pub(crate) is_news: bool,
}

/// The limits of a container, by its network namespace and the name of its end on the host.
type Rule = Box<dyn Fn(u64, &str) -> RdmaMax + Send>;

/// A rule, or none yet.
#[derive(Default)]
pub(crate) struct LimitOf(Option<Rule>);

impl LimitOf {
    pub(crate) fn new(of: impl Fn(u64, &str) -> RdmaMax + Send + 'static) -> Self {
        Self(Some(Box::new(of)))
    }
}

impl fmt::Debug for LimitOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitOf").finish_non_exhaustive()
    }
}

impl Quota {
    /// That of a container of an earlier agent, where its programs could hold up to `bound`.
    pub(super) fn of_earlier(usage: Usage, bound: Amounts) -> Self {
        let returns_until = Some(Instant::now() + MINUTE);
        Self { usage, tolerated: bound, returns_until, ..Self::default() }
    }

    /// The most that its programs may hold: their limits, or the excess that is tolerated.
    pub(super) fn bound(&self) -> Amounts {
        std::array::from_fn(|nth| self.max.0[nth].max(self.tolerated[nth]))
    }

    /// The ledger, which is made for the first program that asks.
    fn shared(&mut self) -> io::Result<Arc<Shared>> {
        if let Some(shared) = &self.ledger {
            return Ok(Arc::clone(shared));
        }
        let (file, ledger) = Ledger::make(&self.usage)?;
        ledger.limit(&self.max.0);
        let shared = Arc::new(Shared { file, ledger });
        Ok(Arc::clone(self.ledger.insert(shared)))
    }

    #[cfg(test)]
    pub(super) fn shared_now(&self) -> Option<Arc<Shared>> {
        self.ledger.clone()
    }

    /// The device of a slot has gone, perhaps the last one.
    pub(super) fn leaves(&mut self, slot: usize, is_last: bool) {
        if let Some(shared) = &self.ledger {
            shared.ledger.clear(slot);
        }
        if is_last {
            self.ledger = None;
        }
    }

    fn limit(&mut self, max: RdmaMax) {
        if self.max != max {
            // More than the old limit is no more right than before.
            let (bound, current) = (self.bound(), &self.usage.current);
            if self.returns_until.is_none() {
                self.tolerated = std::array::from_fn(|nth| bound[nth].min(current[nth]));
            }
            self.max = max;
        }
        self.put_limits();
    }

    fn put_limits(&self) {
        if let Some(shared) = &self.ledger {
            shared.ledger.limit(&self.max.0);
        }
    }

    /// The resources of which it holds more than it may, and more than was tolerated.
    fn exceeded(&mut self, now: Instant) -> Vec<usize> {
        let current = &self.usage.current;
        if self.returns_until.is_some_and(|until| now < until) {
            return Vec::new();
        }
        self.returns_until = None;
        let bounds = self.tolerated.iter_mut().zip(current);
        bounds.for_each(|(tolerated, current)| *tolerated = (*tolerated).min(*current));
        let exceeds = |nth: &usize| current[*nth] > self.max.0[*nth].max(self.tolerated[*nth]);
        (0..RESOURCES.len()).filter(exceeds).collect()
    }
}

impl Container {
    pub(super) fn limit(&mut self, LimitOf(rule): &LimitOf) {
        let max = rule.as_ref().map(|of| of(self.namespace, &self.name));
        self.quota.limit(max.unwrap_or_default());
    }

    /// The device of a slot has gone.
    pub(super) fn leave(&mut self, slot: usize) {
        self.count();
        let is_last = self.devices.values().all(|it| it.slot.is_none());
        self.quota.leaves(slot, is_last);
    }

    /// A slot that no open device has, and the ledger; `None` if there is neither.
    pub(super) fn seat(&mut self) -> Option<Place> {
        let taken: Vec<usize> = self.devices.values().filter_map(|it| it.slot).collect();
        let slot = (0..PAGES_MAX).find(|slot| !taken.contains(slot))?;
        let shared = self.quota.shared().ok()?;
        shared.ledger.clear(slot);
        Some((shared, slot))
    }

    /// Reads what its programs hold. Devices of programs that keep no limits count as their pages
    /// say. Returns whether something has changed that stays.
    fn count(&mut self) -> bool {
        let others = self.devices.values().filter(|it| it.page.is_some() && it.slot.is_none());
        let others = others.filter_map(|it| it.now.as_ref());
        let others: Vec<u64> = others
            .map(|it| it.objects.iter().fold(0, |sum, more| more.saturating_add(sum)))
            .collect();
        let before = self.quota.usage;
        let shared = self.quota.ledger.as_ref();
        let mut usage = shared.map(|it| it.ledger.usage()).unwrap_or_default();
        usage.current[0] = usage.current[0].saturating_add(others.len() as u64);
        let objects = others.into_iter().fold(usage.current[1], u64::saturating_add);
        usage.current[1] = objects;
        for nth in 0..RESOURCES.len() {
            usage.peak[nth] = usage.peak[nth].max(before.peak[nth]).max(usage.current[nth]);
            usage.events[nth] = usage.events[nth].max(before.events[nth]);
        }
        self.quota.usage = usage;
        (usage.peak, usage.events) != (before.peak, before.events)
    }
}

impl Inner {
    /// Reads what the programs of all containers hold.
    fn count(&mut self) {
        for container in self.containers.values_mut() {
            self.changed |= container.count();
        }
    }
}

impl Pages {
    /// Puts limits in force, for containers that come later, too.
    pub(crate) fn limit(&self, of: LimitOf) {
        let mut inner = self.lock();
        inner.count();
        inner.limit_of = of;
        let Inner { containers, limit_of, .. } = &mut *inner;
        containers.values_mut().for_each(|it| it.limit(limit_of));
        drop(inner);
        self.may_exceed.notify_one();
    }

    /// The limits of each container and what its programs hold, by its network namespace.
    pub(crate) fn uses(&self) -> BTreeMap<u64, Uses> {
        let mut inner = self.lock();
        inner.count();
        let held = |it: &Container| (it.namespace, it.quota.max.uses(&it.quota.usage));
        let uses = inner.containers.values().map(held).collect();
        drop(inner);
        self.write();
        uses
    }

    /// The containers that hold more than they may, by their network namespaces.
    pub(crate) fn exceeding(&self, now: Instant) -> BTreeMap<u64, Exceeding> {
        // Those with a slot charge there.
        self.read(|_, device| device.slot.is_none());
        let mut inner = self.lock();
        inner.count();
        let mut all = BTreeMap::new();
        for container in inner.containers.values_mut() {
            let quota = &mut container.quota;
            // A program may have written there.
            quota.put_limits();
            let resources = quota.exceeded(now);
            if resources.is_empty() {
                quota.exceeds = None;
                continue;
            }
            let since = *quota.exceeds.get_or_insert(now);
            if now.saturating_duration_since(since) < STILL {
                continue;
            }
            let held = |nth: &usize| {
                format!(
                    "{}={} of {}",
                    RESOURCES[*nth], quota.usage.current[*nth], quota.max.0[*nth]
                )
            };
            let held = resources.iter().map(held).collect::<Vec<_>>().join(", ");
            let (name, is_news) = (container.name.clone(), quota.written.permits(now));
            all.insert(container.namespace, Exceeding { name, held, is_news });
        }
        all
    }
}
