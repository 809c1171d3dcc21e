//! The pages in which programs publish what their devices have counted, and the sums of each
//! container. A container may write anything there: its own figures are wrong then, and no others.
//!
//! A sum never gets less. It has what devices counted that have gone, and what an earlier agent
//! read (`file`).

mod file;
mod quota;
mod serve;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rocinante_netdev::handed::page::{self, Counts as Counters, OBJECTS, PAGES_MAX, QueuePair};
use tokio::sync::Notify;

use self::file::Kept;
pub(crate) use self::quota::{Exceeding, LimitOf};
use self::quota::{Place, Quota};
use crate::ends::End;
use crate::journal::Seldom;
use crate::limits::{Limits, Turns};

/// Pages of all containers. Each takes three descriptors.
const ALL_PAGES_MAX: usize = 8192;
/// Names of devices of a container. Those of further ones are [`OTHER`].
const DEVICES_MAX: usize = 16;
const OTHER: &str = "other";
/// Backends as they are named; another name is [`OTHER`].
const BACKENDS: [&str; 4] = ["udp", "packet", "afxdp", "sim"];

/// All pages.
#[derive(Debug)]
pub(crate) struct Pages {
    file: file::CountersFile,
    limits: Arc<Limits>,
    inner: Mutex<Inner>,
    unwritten: Mutex<Seldom>,
    /// Of the devices that end, by the index of the host's end.
    ends: Turns<u32>,
    /// A device or a limit has come, so that programs may hold more than they may.
    pub(crate) may_exceed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    /// By the index of the host's end.
    containers: BTreeMap<u32, Container>,
    next: u64,
    /// Whether the file has other values.
    changed: bool,
    limit_of: LimitOf,
}

#[derive(Debug, Default)]
struct Container {
    /// The host's end.
    name: String,
    /// The inode of its network namespace.
    namespace: u64,
    /// The last counters of devices that are gone, by their names.
    past: BTreeMap<String, Counters>,
    /// The devices that are open, or were when an earlier agent ended, by a number of our own.
    devices: BTreeMap<u64, Device>,
    quota: Quota,
}

#[derive(Debug)]
struct Device {
    /// Its program gave it this number, and says it again to the next agent.
    key: u64,
    page: Option<Arc<File>>,
    /// Of the container's ledger, if its program keeps limits.
    slot: Option<usize>,
    /// Its name, once it was read.
    name: Option<String>,
    counters: Counters,
    /// The rest of the last reading.
    now: Option<Now>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Now {
    backend: &'static str,
    why: String,
    objects: [u64; OBJECTS.len()],
}

/// A page that was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PageId {
    host_end: u32,
    number: u64,
}

/// The devices of a container that have one name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) counters: Counters,
    pub(crate) objects: [u64; OBJECTS.len()],
    /// Those that are open, by their backends, and the reason of each.
    pub(crate) open: BTreeMap<&'static str, Vec<String>>,
    /// Of those that are open, if they were asked for.
    pub(crate) queue_pairs: Vec<QueuePair>,
}

/// The sums of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sums {
    /// The host's end.
    pub(crate) name: String,
    /// The inode of its network namespace.
    pub(crate) namespace: u64,
    /// By the names of its devices.
    pub(crate) devices: BTreeMap<String, Sum>,
}

impl Pages {
    /// With the sums that an earlier agent left beside the state at `state`. `limits` say how many
    /// pages a container may ask for.
    pub(crate) fn new(state: &std::path::Path, namespace: u64, limits: Limits) -> io::Result<Self> {
        let file = file::CountersFile::beside(state, namespace)?;
        let containers = match file.read() {
            Ok(kept) => kept.into_iter().map(|kept| (kept.host_end, kept.into())).collect(),
            Err(why) => {
                tracing::warn!("counters of earlier agents are lost: {why}");
                BTreeMap::new()
            }
        };
        let next = containers.values().flat_map(|it: &Container| it.devices.keys()).max();
        let next = next.map_or(0, |last| last + 1);
        Ok(Self {
            file,
            limits: Arc::new(limits),
            inner: Mutex::new(Inner { containers, next, ..Inner::default() }),
            unwritten: Mutex::default(),
            ends: Turns::new(1),
            may_exceed: Notify::new(),
        })
    }

    /// The path of the file.
    pub(crate) fn path(state: &std::path::Path) -> PathBuf {
        file::path(state)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a device is open.
    pub(crate) fn has_open(&self) -> bool {
        let inner = self.lock();
        inner.containers.values().any(|it| it.open() > 0)
    }

    /// Takes up a page of a container that was handed to a device with this key, and gives it a
    /// seat if it wants one. `None` if there are too many.
    fn begin(
        &self,
        (host_end, name, namespace): (u32, &str, u64),
        (key, wants_seat): (u64, bool),
        page: File,
    ) -> Option<(PageId, Option<Place>)> {
        let mut inner = self.lock();
        let Inner { containers, next, limit_of, .. } = &mut *inner;
        let open = Container::open;
        let all: usize = containers.values().map(open).sum();
        let number = *next;
        // Its first end may be another one since: open devices keep their ledger for all.
        let same = |it: &Container| it.namespace == namespace && open(it) > 0;
        let host_end = containers.iter().find(|(_, it)| same(it)).map_or(host_end, |(at, _)| *at);
        let own = containers.get(&host_end).map_or(0, open);
        if all >= ALL_PAGES_MAX || own >= PAGES_MAX {
            return None;
        }
        let container = containers.entry(host_end).or_default();
        name.clone_into(&mut container.name);
        container.namespace = namespace;
        container.limit(limit_of);
        self.may_exceed.notify_one();
        let seat = if wants_seat { container.seat() } else { None };
        let slot = seat.as_ref().map(|(_, slot)| *slot);
        let page = Some(Arc::new(page));
        // It has counted on since an earlier agent read it.
        let known = container.devices.iter_mut().find(|(_, it)| it.key == key && it.page.is_none());
        if let Some((number, known)) = known {
            (known.page, known.slot) = (page, slot);
            return Some((PageId { host_end, number: *number }, seat));
        }
        let counters = Counters::default();
        let device = Device { key, page, slot, name: None, counters, now: None };
        container.devices.insert(number, device);
        // Of an earlier agent's there is no end.
        while container.devices.len() > 2 * PAGES_MAX {
            let lost = container.devices.iter().find(|(_, it)| it.page.is_none());
            let Some(number) = lost.map(|(number, _)| *number) else { break };
            container.bury(number);
        }
        *next += 1;
        Some((PageId { host_end, number }, seat))
    }

    /// The device of a page has gone. Its turn comes behind one of each other container: to read a
    /// page takes long if its program keeps it busy.
    async fn ended(self: &Arc<Self>, id: PageId) {
        let _turn = self.ends.turn(id.host_end, std::future::ready(())).await;
        let it = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || it.end(id)).await;
    }

    /// What the device has published last stays.
    fn end(&self, id: PageId) {
        self.read(|of, _| of == id);
        let mut inner = self.lock();
        if let Some(container) = inner.containers.get_mut(&id.host_end) {
            container.bury(id.number);
            inner.changed = true;
        }
    }

    /// Reads the pages of these devices.
    fn read(&self, of: impl Fn(PageId, &Device) -> bool) {
        let inner = self.lock();
        let mut pages: Vec<(PageId, Arc<File>)> = Vec::new();
        for (&host_end, container) in &inner.containers {
            let page = |(&number, it): (&u64, &Device)| {
                let id = PageId { host_end, number };
                of(id, it).then(|| Some((id, it.page.clone()?))).flatten()
            };
            pages.extend(container.devices.iter().filter_map(page));
        }
        // A container may keep its pages busy.
        drop(inner);
        for (id, page) in pages {
            let Some(reading) = page::read(&page) else { continue };
            let mut inner = self.lock();
            let Some(container) = inner.containers.get_mut(&id.host_end) else { continue };
            inner.changed |= container.update(id.number, reading);
        }
    }

    /// The last values, before the agent ends.
    pub(crate) fn last(&self) {
        self.read(|_, _| true);
        self.write();
    }

    /// The sums of all containers now; with the queue pairs of the one with this name. Containers
    /// whose hosts' ends are not among `ends` are forgotten, if those are known.
    pub(crate) fn sums(
        &self,
        ends: Option<&BTreeMap<u32, End>>,
        with_queue_pairs: Option<&str>,
    ) -> Vec<Sums> {
        self.read(|_, _| true);
        let mut inner = self.lock();
        let before = inner.containers.len();
        inner.containers.retain(|index, it| {
            let end = ends.and_then(|ends| ends.get(index));
            if let Some(end) = end {
                it.name.clone_from(&end.name);
            }
            ends.is_none() || end.is_some() || it.open() > 0
        });
        inner.changed |= inner.containers.len() != before;
        let sums = inner.containers.values().map(|it| {
            let devices = it.sums(with_queue_pairs.is_some_and(|name| name == it.name));
            Sums { name: it.name.clone(), namespace: it.namespace, devices }
        });
        let sums = sums.collect();
        drop(inner);
        self.write();
        sums
    }

    /// Writes the sums to the file, if they have changed.
    pub(crate) fn write(&self) {
        let mut inner = self.lock();
        if !std::mem::take(&mut inner.changed) {
            return;
        }
        let kept = inner.containers.iter().map(|(host_end, it)| Kept::of(*host_end, it)).collect();
        // Under the lock: the last one has the last values.
        if let Err(error) = self.file.write(kept) {
            inner.changed = true;
            let mut unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
            if unwritten.permits(Instant::now()) {
                tracing::error!("counters cannot be written: {error}");
            }
        }
    }
}

impl Container {
    /// The number of its devices that are open.
    fn open(&self) -> usize {
        self.devices.values().filter(|it| it.page.is_some()).count()
    }

    /// The name by which a device is counted.
    fn named(&self, name: &str) -> String {
        let others = self.devices.values().filter_map(|it| it.name.as_ref());
        let known: std::collections::BTreeSet<&String> = self.past.keys().chain(others).collect();
        let is_known = known.iter().any(|known| *known == name);
        if is_known || known.len() < DEVICES_MAX { name.to_owned() } else { OTHER.to_owned() }
    }

    /// Takes a reading over. Returns whether something has changed that stays.
    fn update(&mut self, number: u64, reading: page::Reading) -> bool {
        let page::Reading { head, objects, counters } = reading;
        let name = self.named(&head.device);
        let Some(device) = self.devices.get_mut(&number) else { return false };
        device.name.get_or_insert(name);
        let backend = BACKENDS.into_iter().find(|it| *it == head.backend).unwrap_or(OTHER);
        device.now = Some(Now { backend, why: head.why, objects });
        let mut changed = false;
        for (last, now) in device.counters.0.iter_mut().zip(counters.0) {
            changed |= now > *last;
            *last = now.max(*last);
        }
        changed
    }

    /// Adds what a device has counted to the past.
    fn bury(&mut self, number: u64) {
        let Some(Device { name, counters, slot, .. }) = self.devices.remove(&number) else {
            return;
        };
        slot.into_iter().for_each(|slot| self.leave(slot));
        let Some(name) = name else { return };
        self.past.entry(name).or_default().add(&counters);
    }

    fn sums(&self, with_queue_pairs: bool) -> BTreeMap<String, Sum> {
        let past = self
            .past
            .iter()
            .map(|(name, counters)| (name.clone(), Sum { counters: *counters, ..Sum::default() }));
        let mut sums: BTreeMap<String, Sum> = past.collect();
        for device in self.devices.values() {
            let Some(name) = &device.name else { continue };
            let sum = sums.entry(name.clone()).or_default();
            sum.counters.add(&device.counters);
            let (Some(now), Some(page)) = (&device.now, &device.page) else { continue };
            add(&mut sum.objects, &now.objects);
            sum.open.entry(now.backend).or_default().push(now.why.clone());
            if with_queue_pairs {
                sum.queue_pairs.extend(page::queue_pairs(page));
            }
        }
        sums
    }
}

fn add<const N: usize>(sums: &mut [u64; N], more: &[u64; N]) {
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
}

#[cfg(test)]
mod tests;
