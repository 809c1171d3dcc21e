//! The engine's caller, as the engine sees it: memory for placement, queues for completions.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rocinante_stack::Completions;
use rocinante_stack::mem::{
    AccessError, Atomic, AtomicOp, Checked, Memory, Read, RegionTable, Write,
};
use rocinante_stack::types::Time;
use rocinante_stack::verbs::{CqId, Cqe, QpState, WcOpcode};
use rocinante_stack::{Engine, QpAttr};

use super::announce::{CqShared, Pushed};
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

    /// Puts completions into their queues, with one lock per queue and burst. Calls `overflow` for
    /// each full queue, with whether this is its first overflow.
    pub(crate) fn deliver(&mut self, mut overflow: impl FnMut(CqId, bool)) {
        self.pending.iter().for_each(|(_, cqe)| trace::completed(cqe));
        let mut rest = &self.pending[..];
        while let Some((cq, _)) = rest.first() {
            let run = rest.iter().take_while(|(other, _)| other == cq).count();
            if let Some(shared) = self.cqs.get(cq.0) {
                let completions = rest[..run].iter().map(|(_, cqe)| *cqe);
                match shared.push(completions, &mut self.woken) {
                    Pushed::All => {}
                    Pushed::Overflow { news } => overflow(*cq, news),
                }
            }
            rest = &rest[run..];
        }
        self.pending.clear();
    }

    /// Takes every queue pair to the error state.
    pub(crate) fn break_all(&mut self, engine: &mut Engine) {
        let qpns: Vec<_> = self.qps.iter().map(|qp| qp.qpn()).collect();
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
