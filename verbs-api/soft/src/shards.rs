//! The shards of a device: each has an engine, a port and a thread, and a lock of its own.
//!
//! A queue pair lives on one shard: the upper byte of its number, its slot, says which. All shards
//! know all regions, completion queues and address handles. The connection manager belongs to the
//! first shard.
//!
//! Threads lock shards in ascending order. A thread that drives a shard takes no other shard's
//! lock: it leaves [mail](super::mail).

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocinante_netdev::{AnyPort, Capabilities, Port as _, Slots};
use rocinante_stack::types::{Mtu, Qpn, QueueKind};
use rocinante_stack::{Budget, Engine, EngineConfig, RunLimits};

use super::events::Events;
use super::host::Host;
use super::neighbours::Neighbours;
use super::opens::Claim;
use super::others::{self, Common, Others};
use super::pin;
use super::progress::{Core, Held};
use super::publish::{Publisher, Turns};
use super::router::Router;
use super::shard::Shard;
use super::staging::Staging;
use super::{Settings, cm, recognition, slice};
use crate::model::error::VerbsError;
use crate::provider::memory::faults;
use crate::provider::wake;

/// All shards of a device, and their threads.
#[derive(Debug)]
pub struct Shards {
    /// The slot of the first one; the others follow.
    slot: u8,
    first: Arc<Core>,
    rest: Box<[Arc<Core>]>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Shards {
    fn drop(&mut self) {
        self.all().for_each(|core| core.shut_down());
        let own = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // A completion on a thread of the device may own the last of its objects. That thread
            // ends once it has dropped them.
            if thread.thread().id() != own {
                // A thread never panics on purpose; if it did, there is nothing left to save.
                let _ = thread.join();
            }
        }
        // A thread that is left may have it.
        self.all().filter_map(|core| core.shard.try_lock()).for_each(|mut it| it.publish_all());
    }
}

impl Shards {
    /// Starts one shard for each port.
    pub(super) fn start(
        (settings, name, ports, port_mtu): (&Settings, &str, Vec<AnyPort>, Mtu),
        why: &str,
        (own_budget, own_queue): (Budget, QueueKind),
        advertised: Budget,
        (slots, claim): (Option<&Arc<Slots>>, Option<&Arc<Claim>>),
    ) -> Result<Self, VerbsError> {
        faults::watch();
        let count = ports.len();
        // Ids name the slot where other processes have some, too.
        let shared = slots.map(|slots| slots.first());
        let slot = shared.unwrap_or(0);
        let backend = ports[0].capabilities().backend;
        let info = recognition::peer_info((advertised, own_queue), backend, (slot, count));
        let events = Arc::new(Events::default());
        // A single shard gets no mail.
        let staging = if count > 1 { Staging::with_mail } else { Staging::default };
        let boxes: Arc<[_]> = (0..count).map(|_| Arc::new(staging())).collect();
        let common = Arc::new(Common::default());
        let publisher = Publisher::new(slots, (name, backend.name(), why), count, &events);
        let mut cores = Vec::with_capacity(count);
        for (index, port) in ports.into_iter().enumerate() {
            let mut engine = Engine::new(EngineConfig {
                max_qp: settings.limits.max_qp,
                qpn_slot: slot + u8::try_from(index).expect("64 shards at most"),
                own_budget,
                own_queue,
                port_mtu,
                window_max: settings.window_max,
                advertise_credits: settings.advertise_credits,
                split_writes: settings.cut_writes && port.capabilities().segments_max > 1,
                runs: run_limits(port.capabilities()),
                sharers: u32::try_from(count).expect("64 shards at most"),
                ..EngineConfig::default()
            });
            if index == 0 {
                engine.start_cm(cm::config(settings, shared)?);
            }
            recognition::start(&mut engine, settings, index, shared, info)?;
            let host = Host::new(settings.limits.max_mr as usize);
            let others = (count > 1).then(|| Others::new(index, slot, &boxes, &common));
            let router = Router::new(others, slots.map(Neighbours::new));
            let mut shard = Shard::new(name, engine, port, host, router);
            shard.turns = Turns::new(publisher.clone(), index);
            cores.push(Arc::new(Core::new(shard, events.clone())?));
        }
        common.cores.set(cores.iter().map(Arc::downgrade).collect()).expect("set once");
        let rest = cores.split_off(1).into();
        let first = cores.pop().expect("one port at least");
        let mut shards = Self { slot, first, rest, threads: Vec::new() };
        if settings.background {
            shards.spawn(name, &settings.cpus, claim)?;
        }
        Ok(shards)
    }

    fn spawn(
        &mut self,
        name: &str,
        cpus: &[usize],
        claim: Option<&Arc<Claim>>,
    ) -> Result<(), VerbsError> {
        let mut cpus = cpus.iter().cycle();
        let cores: Vec<_> = self.all().cloned().collect();
        for (index, core) in cores.into_iter().enumerate() {
            let thread = match index {
                0 => format!("roce-{name}"),
                _ => format!("roce-{name}.{index}"),
            };
            let claim = claim.cloned();
            let work = move || {
                slice::shorten();
                faults::unblock();
                core.background();
                // The port is closed before another may be opened in its place.
                drop((core, claim));
            };
            self.threads.push(pin::spawn(&thread, cpus.next().copied(), work)?);
        }
        Ok(())
    }

    pub fn count(&self) -> usize {
        1 + self.rest.len()
    }

    /// The shard of the connection manager.
    #[inline]
    pub fn first(&self) -> &Arc<Core> {
        &self.first
    }

    pub fn all(&self) -> impl Iterator<Item = &Arc<Core>> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    pub fn get(&self, index: usize) -> Option<&Arc<Core>> {
        match index {
            0 => Some(&self.first),
            _ => self.rest.get(index - 1),
        }
    }

    /// The shard of a queue pair.
    pub(super) fn of_qpn(&self, qpn: Qpn) -> Option<&Arc<Core>> {
        self.get(self.number_of(qpn))
    }

    /// The number of a queue pair's shard.
    pub(super) fn number_of(&self, qpn: Qpn) -> usize {
        others::shard_of(qpn, self.slot)
    }

    /// Locks all shards.
    pub fn hold_all(&self) -> HeldAll<'_> {
        let first = self.first.hold();
        HeldAll { rest: self.rest.iter().map(|core| core.hold()).collect(), first }
    }

    /// Drives the shards of a set. Returns whether anything happened.
    #[inline]
    pub(super) fn drive(&self, set: u64) -> bool {
        if self.rest.is_empty() {
            return self.first.drive();
        }
        self.of(set).fold(false, |busy, core| core.drive() | busy)
    }

    /// Sends posted requests on the shards of a set that wait there for more, so that completions
    /// of those that need no answer are in their queues.
    pub(super) fn send_waiting(&self, set: u64) {
        for core in self.of(set) {
            let mut shard = core.hold();
            shard.take_staged();
            shard.send_waiting();
        }
    }

    /// Drives the shards of a set for a task that sleeps if it finds nothing.
    pub(super) fn drive_for_task(&self, set: u64) {
        self.of(set).for_each(|core| core.drive_for_task());
    }

    /// The program may be about to sleep until the shards of a set complete something.
    #[inline]
    pub(super) fn expect(&self, set: u64) {
        self.of(set).for_each(|core| core.expect());
    }

    /// As [`wait`](Self::wait), for a thread that polls. Without a shard it waits for `fd` alone.
    pub(super) fn rest(&self, set: u64, fd: BorrowedFd<'_>, until: Instant) {
        match set.count_ones() {
            0 => drop(wake::wait(None, fd, Some(until.saturating_duration_since(Instant::now())))),
            _ if self.rest.is_empty() => self.first.rest(fd, until),
            1 => self.of(set).for_each(|core| core.rest(fd, until)),
            _ => self.wait(set, fd, Some(until)),
        }
    }

    fn of(&self, set: u64) -> impl Iterator<Item = &Arc<Core>> {
        self.all().enumerate().filter(move |(index, _)| set >> index & 1 == 1).map(|(_, core)| core)
    }

    /// Sleeps until `fd` is readable or until `until`. For a set of at most one shard, it watches
    /// that shard's port as well and drives the shard. For several shards a thread of the program
    /// cannot watch the ports: the background threads do.
    pub(super) fn wait(&self, set: u64, fd: BorrowedFd<'_>, until: Option<Instant>) {
        let (port, sleep) = self.waits(set, until);
        self.waited(set, wake::wait(port, fd, sleep) && port.is_some());
    }

    /// Before a sleep on the shards of a set: the port to watch, if one is, and the longest sleep.
    /// [`waited`](Self::waited) follows it, for the same set.
    pub(super) fn waits(
        &self,
        set: u64,
        until: Option<Instant>,
    ) -> (Option<(BorrowedFd<'_>, bool)>, Option<Duration>) {
        if let Some(core) = self.alone(set) {
            return core.waits(until);
        }
        self.of(set).for_each(|core| core.sleeps());
        (None, until.map(|until| until.saturating_duration_since(Instant::now())))
    }

    /// After that sleep; `woken` if the port or the time ended it.
    pub(super) fn waited(&self, set: u64, woken: bool) {
        match self.alone(set) {
            Some(core) => core.waited(woken),
            None => self.of(set).for_each(|core| core.wakes()),
        }
    }

    /// The shard of a set of at most one.
    fn alone(&self, set: u64) -> Option<&Arc<Core>> {
        if !self.rest.is_empty() && set.count_ones() > 1 {
            return None;
        }
        let only = if set == 0 { 0 } else { set.trailing_zeros() as usize };
        Some(self.get(only).unwrap_or(&self.first))
    }
}

/// The longest run of a port. Without super-packets a run is the packets of one system call, and to
/// wait for that was measured to pay as well (`docs/performance/method.md`).
pub(super) fn run_limits(capabilities: &Capabilities) -> RunLimits {
    let longest = RunLimits::default();
    match capabilities.segments_max {
        0 | 1 => longest,
        segments => RunLimits {
            bytes: capabilities.run_bytes_max.min(longest.bytes),
            packets: u32::from(segments).min(longest.packets),
        },
    }
}

/// All shards, locked. The first shard is unlocked last: unlocking may drive it, and it leaves mail
/// for the others. Tasks are woken after that.
pub struct HeldAll<'a> {
    pub(super) rest: Vec<Held<'a>>,
    first: Held<'a>,
}

impl Drop for HeldAll<'_> {
    fn drop(&mut self) {
        let mut woken = std::mem::take(&mut self.first.host.woken);
        self.rest.drain(..).for_each(|held| held.release_into(&mut woken));
        // They are woken when the first shard is unlocked, too.
        self.first.host.woken = woken;
    }
}

impl<'a> HeldAll<'a> {
    pub(super) fn first(&mut self) -> &mut Shard {
        &mut self.first
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Held<'a>> {
        std::iter::once(&mut self.first).chain(&mut self.rest)
    }
}
