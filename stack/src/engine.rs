//! The engine: all queue pairs of one shard, their shared state, and the entry points.

mod multicast;
mod qp1;
mod schedule;
mod srqs;
mod status;

use std::collections::BTreeMap;

pub use self::schedule::{Transmitted, TxStop};
use crate::ah::{Handle, Handles};
use crate::any::AnyQp;
use crate::cm::ConnId;
use crate::contacts::Contacts;
use crate::events::Events;
use crate::groups::Groups;
use crate::gsi::Gsi;
use crate::ingress::{Datagram, Integrity, Sources};
use crate::mem::{Memory, PdId};
use crate::peer::Peers;
use crate::qp::Core;
use crate::qp::attr::{ModifyError, PeerAddress, QpAttr, QpInit};
use crate::qp::post::PostError;
use crate::rc::reorder::ReorderSlab;
use crate::rc::requester::lists::SpareLists;
use crate::ring::Ring;
use crate::shared::{EngineConfig, Shared};
use crate::srq::Srqs;
use crate::stats::LimitsHit;
use crate::stats::{Counters, Drops};
use crate::timer::Timers;
use crate::tuning::engine::QPNS;
use crate::types::{Pkey, Qpn, Time};
use crate::verbs::{AhId, Completions, CqId, QpEvent, QpState, RecvWr, SendWr};
use crate::wire::{Operation, Packet, WireError};

/// Queue pairs and the state that they share. It never blocks, and has neither clock nor network.
///
/// After each of `handle_datagram`, `handle_timeout`, `post_send` and `modify_qp` there may be
/// something to send ([`poll_transmit`](Self::poll_transmit)), and the deadline may have moved
/// ([`poll_timeout`](Self::poll_timeout)).
#[derive(Debug)]
pub struct Engine {
    pub(crate) qps: Vec<Option<AnyQp>>,
    free: Vec<u32>,
    /// Slot of each QPN's lower 16 bits, plus one.
    index: Box<[u16; 1 << 16]>,
    pub(crate) sources: Sources,
    pub(crate) gsi: Gsi,
    pub(crate) groups: Groups,
    /// Lower halves of the numbers that must not be used again yet, with the number of keepers of
    /// each.
    reserved: BTreeMap<u16, u32>,
    is_overloaded: bool,
    pub(crate) shared: Shared,
}

impl Engine {
    /// An engine without queue pairs.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        Self {
            qps: Vec::new(),
            free: Vec::new(),
            index: vec![0; 1 << 16].into_boxed_slice().try_into().expect("of that length"),
            sources: Sources::default(),
            gsi: Gsi::default(),
            groups: Groups::default(),
            reserved: BTreeMap::new(),
            is_overloaded: false,
            shared: Shared {
                peers: Peers::new(config.own_budget, config.stable_packets)
                    .of_kind(config.own_queue)
                    .sending(config.runs, config.pacing),
                contacts: Contacts::default(),
                due: Time(0),
                handles: Handles::default(),
                config: EngineConfig {
                    max_qp: config.max_qp.min(QPNS as u32),
                    quantum: config.quantum.clamp(1, u16::MAX.into()),
                    ..config
                },
                srqs: Srqs::default(),
                reorder_slab: ReorderSlab::new(config.reorder_packets_max),
                lists: SpareLists::default(),
                timers: Timers::default(),
                counters: Counters::default(),
                drops: Drops::default(),
                limits_hit: LimitsHit::default(),
                dirty: Ring::default(),
                more_than_acks: false,
                arrived_at: Time(0),
                undriven_us_before: 0,
                events: Events::default(),
            },
        }
    }

    /// Makes a queue pair in the RESET state; its number is drawn from `random`. `None` if the
    /// limit of queue pairs is reached, or if the shared receive queue does not exist.
    pub fn create_qp(&mut self, init: &QpInit, random: u32) -> Option<Qpn> {
        let live = self.qps.len() - self.free.len();
        if live >= self.shared.config.max_qp as usize || live + self.reserved.len() >= QPNS {
            return None;
        }
        let receives = match init.srq {
            Some(srq) => Some(self.shared.srqs.join(srq)?),
            None => None,
        };
        let mut low = random as u16;
        // 0 and 1 are the management queue pairs', 0xffff is multicast's.
        while low < 2
            || low == u16::MAX
            || self.index[usize::from(low)] != 0
            || self.reserved.contains_key(&low)
        {
            low = low.wrapping_add(0x9e37);
        }
        let qpn = Qpn::new(u32::from(self.shared.config.qpn_slot) << 16 | u32::from(low));
        let slot = self.free.pop().unwrap_or(self.qps.len() as u32);
        if slot as usize == self.qps.len() {
            self.qps.push(None);
        }
        let port_mtu = self.shared.config.port_mtu;
        self.qps[slot as usize] = Some(AnyQp::new(Core::new(qpn, slot, *init, port_mtu, receives)));
        let entry = slot as u16 + 1;
        self.index[usize::from(low)] = entry;
        self.shared.timers.reserve(self.qps.len());
        self.shared.dirty.reserve(self.qps.len());
        self.shared.peers.reserve(self.qps.len());
        self.shared.events.reserve(self.qps.len());
        Some(qpn)
    }

    /// Destroys a queue pair; outstanding work never completes (`ibv_destroy_qp(3)`). The queue
    /// pair leaves its multicast groups: call [`groups_of`](Self::groups_of) before, to learn which
    /// ones.
    ///
    /// The number may be given out again. So the caller must also free the windows that are bound
    /// for it, with [`RegionTable::free_windows`](crate::mem::RegionTable::free_windows); the same
    /// holds after a reset. Error: [`ModifyError::UnknownQp`].
    pub fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), ModifyError> {
        let slot = self.slot(qpn).ok_or(ModifyError::UnknownQp)?;
        for group in self.groups_of(qpn) {
            let _ = self.detach_multicast(qpn, group);
        }
        let Some(mut qp) = self.qps[slot].take() else { return Err(ModifyError::UnknownQp) };
        qp.detach(&mut self.shared);
        if let Some(srq) = qp.core().init.srq {
            self.shared.srqs.leave(srq);
        }
        self.index[usize::from(low_bits(qpn))] = 0;
        let slot = slot as u32;
        self.free.push(slot);
        self.shared.peers.forget(slot);
        self.shared.dirty.retain(|dirty| *dirty != slot);
        self.shared.events.forget(qpn);
        Ok(())
    }

    /// Makes an address handle of `pd` (`ibv_create_ah(3)`). `None` if there are a million.
    pub fn create_ah(&mut self, pd: PdId, to: &PeerAddress) -> Option<AhId> {
        let receiver = self.shared.peers.join((to.local, to.remote), None, to.budget, to.kind);
        let handle = self.shared.handles.insert(Handle { pd, path: to.path, receiver });
        if handle.is_none() {
            self.shared.peers.leave(receiver);
        }
        handle
    }

    /// Destroys an address handle: a request that names it and has not left fails. Returns whether
    /// the handle existed.
    pub fn destroy_ah(&mut self, ah: AhId) -> bool {
        let gone = self.shared.handles.remove(ah);
        if let Some(handle) = &gone {
            self.shared.peers.leave(handle.receiver);
        }
        gone.is_some()
    }

    /// Changes attributes and state of a queue pair (`ibv_modify_qp(3)`). The change to ERR flushes
    /// its work. Error: [`ModifyError`]; nothing has changed then.
    pub fn modify_qp<H: Completions>(
        &mut self,
        qpn: Qpn,
        attr: &QpAttr,
        host: &mut H,
    ) -> Result<(), ModifyError> {
        let slot = self.slot(qpn).ok_or(ModifyError::UnknownQp)?;
        let qp = self.qps[slot].as_mut().ok_or(ModifyError::UnknownQp)?;
        qp.modify(attr, &mut self.shared, host)
    }

    /// Appends a send request. Error: [`PostError`]; nothing has changed then.
    #[inline]
    pub fn post_send<H: Completions>(
        &mut self,
        qpn: Qpn,
        wr: &SendWr<'_>,
        host: &mut H,
    ) -> Result<(), PostError> {
        let slot = self.slot(qpn).ok_or(PostError::UnknownQp)?;
        let qp = self.qps[slot].as_mut().ok_or(PostError::UnknownQp)?;
        qp.post_send(wr, &mut self.shared, host)
    }

    /// Appends a receive request. Error: [`PostError`]; nothing has changed then.
    #[inline]
    pub fn post_recv<H: Completions>(
        &mut self,
        qpn: Qpn,
        wr: &RecvWr<'_>,
        host: &mut H,
    ) -> Result<(), PostError> {
        let slot = self.slot(qpn).ok_or(PostError::UnknownQp)?;
        let qp = self.qps[slot].as_mut().ok_or(PostError::UnknownQp)?;
        qp.post_recv(wr, &mut self.shared, host)
    }

    /// Reports that `datagrams` of `bytes` in all (BTH to ICRC) arrived in `runs`: a super-packet
    /// is one run, and so is a datagram that arrived alone. Where runs take less of the receive
    /// queue than their datagrams would one by one ([`EngineConfig::own_queue`]), READs then ask
    /// for more at once. A caller that never reports is taken to receive one by one.
    #[inline]
    pub fn arrived(&mut self, runs: u32, datagrams: u32, bytes: u64) {
        self.shared.peers.arrived(runs, datagrams, bytes);
    }

    /// Reports that `datagrams` of `bytes` in all (BTH to ICRC) left from the sink in `runs`, as in
    /// [`arrived`](Self::arrived). While runs are long and nothing
    /// is lost, a peer's receive queue is taken to hold more datagrams than it announced. A caller
    /// that never reports is taken to send one by one.
    #[inline]
    pub fn departed(&mut self, runs: u32, datagrams: u32, bytes: u64) {
        self.shared.peers.departed(runs, datagrams, bytes);
    }

    /// Sets whether the receive queue of the next datagrams is nearly full. While it is, the engine
    /// answers packets of reliable connections as if a switch had marked them (CNP), so their
    /// senders send less.
    #[inline]
    pub fn set_overloaded(&mut self, is_overloaded: bool) {
        self.is_overloaded = is_overloaded;
    }

    /// The last value of [`set_overloaded`](Self::set_overloaded).
    #[must_use]
    #[inline]
    pub const fn is_overloaded(&self) -> bool {
        self.is_overloaded
    }

    /// Takes one datagram. Bad ones are dropped and counted. Nothing that a peer sends can do more
    /// than break its own queue pair.
    #[inline]
    pub fn handle_datagram<H: Memory + Completions>(
        &mut self,
        now: Time,
        datagram: &Datagram<'_>,
        host: &mut H,
    ) {
        let drops = &mut self.shared.drops;
        let packet = match Packet::parse(datagram.bytes) {
            Ok(packet) => packet,
            Err(WireError::UnknownOpcode(_)) => return drops.unknown_opcode += 1,
            Err(_) => return drops.malformed += 1,
        };
        if packet.bth().version != 0 {
            return drops.version += 1;
        }
        let qpn = packet.bth().dest_qpn;
        let slot = match self.index[usize::from(low_bits(qpn))] {
            0 if qpn == Qpn::MULTICAST => {
                return self.handle_multicast(now, &packet, datagram, host);
            }
            0 => return self.handle_management(now, &packet, datagram),
            slot => usize::from(slot) - 1,
        };
        let Some(qp) = self.qps[slot].as_mut().filter(|qp| qp.core().qpn == qpn) else {
            return drops.unknown_qpn += 1;
        };
        if !qp.core().state.receives() {
            return drops.unknown_qpn += 1;
        }
        if !Pkey::DEFAULT.admits(packet.bth().pkey) {
            return drops.pkey += 1;
        }
        let is_peers = qp.core().is_from_peer(datagram);
        let integrity = match qp.source() {
            Some(_) if !is_peers => return drops.wrong_source += 1,
            Some(source) => source.integrity(now, datagram, &mut self.sources.solver),
            None if datagram.dst.is_multicast() => return drops.wrong_source += 1,
            None => self.sources.integrity(now, datagram),
        };
        match integrity {
            Integrity::Right => {}
            Integrity::Solved => self.shared.counters.icrc_id_solved += 1,
            Integrity::Wrong => return drops.icrc += 1,
        }
        if packet.info.service != qp.service() {
            if packet.info.operation != Operation::Notification {
                return drops.wrong_service += 1;
            }
            self.shared.counters.rcvd_cnp += 1;
            return qp.on_cnp(now);
        }
        self.shared.counters.rcvd_pkts += 1;
        qp.core().tally.received();
        self.shared.arrived_at = now;
        if datagram.is_congested() || self.is_overloaded {
            qp.on_congestion(now, &packet, datagram, &mut self.shared);
        }
        if qp.core().awaited_by.is_some() {
            return self.handle_first(now, slot, &packet, datagram, host);
        }
        qp.handle(now, &packet, datagram, &mut self.shared, host);
    }

    /// Takes a packet for QP1, or for no queue pair.
    #[cold]
    fn handle_management(&mut self, now: Time, packet: &Packet<'_>, datagram: &Datagram<'_>) {
        let (sources, shared) = (&mut self.sources, &mut self.shared);
        let peer = self.gsi.handle(now, packet, datagram, sources, shared);
        if let Some((remote, info)) = peer {
            self.replied(remote, &info);
        }
    }

    /// Takes a packet for a queue pair with a connection that is not established yet. If the packet
    /// is the expected message, it establishes the connection: the peer's queue pair is in RTS
    /// (IBTA volume 1, 12.9 \[M\], `IB_EVENT_COMM_EST`).
    #[cold]
    fn handle_first<H: Memory + Completions>(
        &mut self,
        now: Time,
        slot: usize,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        host: &mut H,
    ) {
        let Some(qp) = self.qps[slot].as_mut() else { return };
        let (_, _, expected) = qp.sequence();
        qp.handle(now, packet, datagram, &mut self.shared, host);
        let arrived = qp.sequence().2 != expected;
        if let Some(conn) = qp.core_mut().awaited_by.take_if(|_| arrived) {
            self.gsi.message_arrived(conn);
        }
    }

    /// Handles everything that is due at `now`. Call when [`poll_timeout`](Self::poll_timeout) has
    /// come.
    pub fn handle_timeout<H: Completions>(&mut self, now: Time, host: &mut H) {
        self.shared.undriven_us_before = self.shared.counters.undriven_us;
        self.shared.age(now);
        while let Some(slot) = self.shared.timers.pop(now) {
            if let Some(Some(qp)) = self.qps.get_mut(slot as usize) {
                qp.handle_timer(now, &mut self.shared, host);
            }
        }
        self.handle_cm_timeout(now);
    }

    /// When to call [`handle_timeout`](Self::handle_timeout): at this time. It may be slightly too
    /// early; the call then does nothing. `None` if nothing is due without other input.
    #[inline]
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let cm = self.gsi.cm.as_ref().and_then(|cm| cm.poll_timeout());
        Time::earlier(Time::earlier(self.shared.timers.next(), self.shared.peers.next_age()), cm)
    }

    /// The next asynchronous event.
    pub fn poll_event(&mut self) -> Option<(Qpn, QpEvent)> {
        self.shared.events.pop()
    }

    /// Makes the next [`poll_transmit`](Self::poll_transmit) acknowledge packets that arrived
    /// without AckReq: those of the queue pair `of`, or of all. Call it before a queue pair is
    /// destroyed or the program ends: after that, no responder answers the peer's probe.
    pub fn acknowledge_unasked(&mut self, of: Option<Qpn>) {
        let slots = match of {
            Some(qpn) => self.slot(qpn).map_or(0..0, |slot| slot..slot + 1),
            None => 0..self.qps.len(),
        };
        for qp in self.qps[slots].iter_mut().flatten() {
            qp.acknowledge_unasked(&mut self.shared);
        }
    }

    /// A completion queue overflowed: every queue pair that uses it breaks (`IBV_EVENT_CQ_ERR`).
    ///
    /// It looks at all queue pairs. A queue overflows once; an index of its users would take memory
    /// of every queue pair.
    pub fn cq_overflow<H: Completions>(&mut self, cq: CqId, host: &mut H) {
        for qp in self.qps.iter_mut().flatten() {
            let core = qp.core();
            let uses = core.init.send_cq == cq || core.init.recv_cq == cq;
            if uses && core.state != QpState::Err {
                self.shared.event(core.qpn, QpEvent::Fatal);
                qp.break_down(&mut self.shared, host);
            }
        }
    }

    /// Lets the connection manager know of the first message that arrives for this queue pair: like
    /// an RTU, it says that the peer is ready.
    pub fn await_message(&mut self, qpn: Qpn, conn: ConnId) {
        if let Some(slot) = self.slot(qpn)
            && let Some(qp) = &mut self.qps[slot]
        {
            qp.core_mut().awaited_by = Some(conn);
        }
    }

    /// Reserves the number of this queue pair, also after the queue pair is gone: packets for it
    /// may still be in flight. Each connection reserves it once; it is free again when each has
    /// released it.
    pub fn reserve_qpn(&mut self, qpn: Qpn) {
        *self.reserved.entry(low_bits(qpn)).or_default() += 1;
    }

    /// Releases one reservation of the number.
    pub fn release_qpn(&mut self, qpn: Qpn) {
        let low = low_bits(qpn);
        if let Some(count) = self.reserved.get_mut(&low) {
            *count -= 1;
            if *count == 0 {
                self.reserved.remove(&low);
            }
        }
    }

    #[inline]
    pub(crate) fn slot(&self, qpn: Qpn) -> Option<usize> {
        let slot = usize::from(self.index[usize::from(low_bits(qpn))]).checked_sub(1)?;
        self.qps[slot].as_ref().filter(|qp| qp.core().qpn == qpn).map(|_| slot)
    }
}

fn low_bits(qpn: Qpn) -> u16 {
    qpn.value() as u16
}
