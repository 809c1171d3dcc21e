//! The engine's caller, as the engine sees it: memory for placement, queues for completions.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rocinante_stack::Completions;
use rocinante_stack::mem::{
    AccessError, Atomic, AtomicOp, Checked, Memory, Read, RegionTable, Write,
};
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::verbs::{CqId, Cqe, QpState, WcOpcode, WcStatus};
use rocinante_stack::{Datagram, Engine, QpAttr};

use super::announce::{CqShared, Pushed};
use super::faults::{DeviceFaults, fail};
use super::front::QpShared;
use crate::provider::memory::{Range, Summing, faults};
use crate::provider::trace;
use crate::provider::wakers::Woken;
use crate::tuning::memory::{PAUSE, WATCHED_MAX};
use crate::tuning::room::PENDING;

/// Regions, completion queues and queue pairs, by the engine's numbers.
#[derive(Debug)]
pub struct Host {
    pub(crate) regions: RegionTable,
    pub cqs: Table<Arc<CqShared>>,
    pub(crate) qps: Table<Arc<QpShared>>,
    /// Completions since the last [`Host::deliver`].
    pending: Vec<(CqId, Cqe)>,
    /// Tasks to wake once the shard is unlocked.
    pub(crate) woken: Woken,
    summing: Summing,
    /// The faults of its completions and receives.
    faults: Option<Box<Judge>>,
    /// When it was last made sure that a page that is gone ends no process, and when packets came
    /// or left last.
    watched_at: Time,
    active_at: Time,
}

impl Host {
    pub(crate) fn new(max_mr: usize) -> Self {
        Self {
            regions: RegionTable::new(max_mr),
            cqs: Table::default(),
            qps: Table::default(),
            pending: Vec::with_capacity(PENDING),
            woken: Woken::default(),
            summing: Summing::detect(),
            faults: None,
            watched_at: Time(0),
            active_at: Time(0),
        }
    }

    /// A packet is about to be placed, or packets to be made.
    #[inline]
    pub(super) fn before_packets(&mut self, now: Time) {
        let since = now.since(self.watched_at);
        if since > WATCHED_MAX || (since > PAUSE && now.since(self.active_at) > PAUSE) {
            self.watched_at = now;
            faults::watch();
        }
    }

    /// Packets came or left.
    #[inline]
    pub(super) fn after_packets(&mut self, now: Time) {
        self.active_at = now;
    }

    /// Faults decide on completions and receives from now on.
    pub(super) fn meet(&mut self, faults: &Arc<DeviceFaults>) {
        self.faults = Some(Box::new(Judge { faults: faults.clone(), broken: Vec::new() }));
    }

    /// Gives the engine a datagram, which finds no receive if a fault decides so.
    #[inline]
    pub(super) fn judge(&mut self, now: Time, datagram: &Datagram<'_>, engine: &mut Engine) {
        self.before_packets(now);
        if self.faults.as_ref().is_some_and(|judge| judge.faults.is_unready(datagram)) {
            engine.handle_unready(now, datagram, self);
        } else {
            engine.handle_datagram(now, datagram, self);
        }
    }

    /// Breaks the queue pairs of the completions that a fault made errors.
    #[cold]
    pub(super) fn break_judged(&mut self, engine: &mut Engine) {
        let broken = self.faults.as_mut().map(|judge| std::mem::take(&mut judge.broken));
        self.break_some(broken.unwrap_or_default(), engine);
    }

    /// Puts completions into their queues, with one lock per queue and burst. Calls `ends` for each
    /// full queue.
    pub(crate) fn deliver(&mut self, mut ends: impl FnMut(Ended)) {
        self.pending.iter().for_each(|(_, cqe)| trace::completed(cqe));
        let mut rest = &self.pending[..];
        while let Some((cq, _)) = rest.first() {
            let run = rest.iter().take_while(|(other, _)| other == cq).count();
            if let Some(shared) = self.cqs.get(cq.0) {
                let completions = rest[..run].iter().map(|(_, cqe)| *cqe);
                match shared.push(completions, &mut self.woken) {
                    Pushed::All => {}
                    Pushed::Overflow { news } => ends(Ended::Queue(*cq, news)),
                    Pushed::Not => {
                        if let Some(judge) = &mut self.faults {
                            judge.push(shared, &rest[..run], &mut self.woken, &mut ends);
                        }
                    }
                }
            }
            rest = &rest[run..];
        }
        self.pending.clear();
    }

    /// Takes every queue pair to the error state.
    pub(crate) fn break_all(&mut self, engine: &mut Engine) {
        let qpns: Vec<_> = self.qps.iter().map(|qp| qp.qpn()).collect();
        self.break_some(qpns, engine);
    }

    fn break_some(&mut self, qpns: Vec<Qpn>, engine: &mut Engine) {
        let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
        for qpn in qpns {
            // The change is allowed from every state.
            let _ = engine.modify_qp(qpn, &error, self);
        }
    }

    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether some of the pending completions complete receives.
    pub(crate) fn has_pending_receives(&self) -> bool {
        self.pending
            .iter()
            .any(|(_, cqe)| matches!(cqe.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm))
    }
}

/// An end that came with completions.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ended {
    /// A queue that is full; with whether this is its first overflow.
    Queue(CqId, bool),
    /// Queue pairs, by faults.
    Pairs,
}

/// Faults of a shard's completions and receives.
#[derive(Debug)]
struct Judge {
    faults: Arc<DeviceFaults>,
    /// Queue pairs with a completion that is an error by a fault: they are about to break, and all
    /// later requests of them are flushed.
    broken: Vec<Qpn>,
}

impl Judge {
    /// Puts completions of a queue into it, each as a fault has it.
    #[cold]
    fn push(
        &mut self,
        cq: &CqShared,
        all: &[(CqId, Cqe)],
        woken: &mut Woken,
        ends: &mut impl FnMut(Ended),
    ) {
        let mut overrun = false;
        let mut judged = Vec::with_capacity(all.len());
        for (_, cqe) in all {
            let mut cqe = *cqe;
            if cqe.status == WcStatus::Success {
                if self.broken.contains(&cqe.qpn) {
                    fail(&mut cqe, WcStatus::WrFlushErr);
                } else if self.faults.change(&mut cqe) {
                    overrun = true;
                    break;
                } else if cqe.status != WcStatus::Success {
                    self.broken.push(cqe.qpn);
                }
            }
            judged.push(cqe);
        }
        if let Pushed::Overflow { news } = cq.push_judged(&judged, overrun, woken) {
            ends(Ended::Queue(CqId(cq.id), news));
        }
        if !self.broken.is_empty() {
            ends(Ended::Pairs);
        }
    }
}

impl Completions for Host {
    #[inline]
    fn complete(&mut self, cq: CqId, cqe: Cqe) {
        self.pending.push((cq, cqe));
    }

    #[inline]
    fn send_retired(&mut self, cookie: u32, count: u32) {
        if let Some(qp) = self.qps.get(cookie) {
            // There is one writer, because the shard's lock is held.
            let retired = qp.send_retired.load(Ordering::Relaxed) + u64::from(count);
            qp.send_retired.store(retired, Ordering::Relaxed);
        }
    }

    #[inline]
    fn recv_retired(&mut self, cookie: u32, count: u32) {
        if let Some(qp) = self.qps.get(cookie) {
            let retired = qp.recv_retired.load(Ordering::Relaxed) + u64::from(count);
            qp.recv_retired.store(retired, Ordering::Relaxed);
        }
    }
}

impl Memory for Host {
    #[inline]
    fn regions(&self) -> &RegionTable {
        &self.regions
    }

    fn regions_mut(&mut self) -> &mut RegionTable {
        &mut self.regions
    }

    #[inline]
    fn place(&mut self, dst: Checked<Write>, src: &[u8]) -> Result<(), AccessError> {
        let range = Range { address: dst.host(), len: dst.len() as usize };
        assert_eq!(range.len, src.len());
        // SAFETY: a `Checked<Write>` exists only for a range inside a registered region with that
        // right, and was made in this call of the engine, under the shard's lock. A region is
        // removed under the same lock before its memory is freed (`Mr`), and the caller that
        // registered raw memory promised the same.
        unsafe { range.store(src) }.map_err(|_| AccessError::Memory)
    }

    #[inline]
    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<(), AccessError> {
        let range = Range { address: src.host(), len: src.len() as usize };
        assert_eq!(range.len, dst.len());
        // SAFETY: as for `place`.
        unsafe { range.load(dst) }.map_err(|_| AccessError::Memory)
    }

    #[inline]
    fn fetch_summed(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<Option<u32>, AccessError> {
        let range = Range { address: src.host(), len: src.len() as usize };
        assert_eq!(range.len, dst.len());
        // SAFETY: as for `place`.
        unsafe { range.load_summed(dst, self.summing) }.map_err(|_| AccessError::Memory)
    }

    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> Result<u64, AccessError> {
        let range = Range { address: at.host(), len: at.len() as usize };
        // SAFETY: as for `place`; `Checked<Atomic>` is eight bytes and aligned.
        unsafe { range.atomic(op) }.map_err(|_| AccessError::Memory)
    }
}

/// Objects by small numbers.
#[derive(Debug)]
pub struct Table<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Behind the greatest number.
    pub(crate) fn end(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn insert(&mut self, make: impl FnOnce(u32) -> T) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            u32::try_from(self.entries.len() - 1).expect("fewer objects than numbers")
        });
        self.entries[index as usize] = Some(make(index));
        index
    }

    #[inline]
    pub fn get(&self, index: u32) -> Option<&T> {
        self.entries.get(index as usize)?.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().flatten()
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let entry = self.entries.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(entry)
    }
}
