//! The other shards of a device, seen from one: mail to them, and mail from them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::verbs::QpState;
use rocinante_stack::{Datagram, Engine, HandOff, QpAttr};

use super::clock::Clock;
use super::host::Host;
use super::mail::{Letters, Order};
use super::progress::Core;
use super::shard::accepted;
use super::staging::Staging;
use crate::tuning::shard::OVERDUE_MAX;

/// The most shards: the bits of a word.
pub const SHARDS_MAX: usize = 64;
/// The shard of a queue pair, of those whose slots begin with `first`; otherwise a number that no
/// shard has.
pub(super) const fn shard_of(qpn: Qpn, first: u8) -> usize {
    qpn.slot().wrapping_sub(first) as usize
}

/// The destination of a datagram, if it is so long.
#[inline]
pub(super) fn dest_qpn(bytes: &[u8]) -> Option<Qpn> {
    let &[upper, middle, lower] = bytes.get(5..8)?.first_chunk()?;
    Some(Qpn::new(u32::from_be_bytes([0, upper, middle, lower])))
}

/// State that all shards of a device share.
#[derive(Debug, Default)]
pub(super) struct Common {
    /// Set once all shards are made.
    pub(super) cores: OnceLock<Box<[Weak<Core>]>>,
    /// Number of shards whose ports have broken.
    broken: AtomicUsize,
}

/// The shards of a device, for one of them.
#[derive(Debug)]
pub(super) struct Others {
    own: usize,
    /// The slot of the first shard.
    first: u8,
    /// Those of all shards, by shard.
    boxes: Arc<[Arc<Staging>]>,
    common: Arc<Common>,
    /// Shards that have new mail and have not been rung yet.
    unrung: u64,
    /// The mail taken from the own box.
    letters: Letters,
    /// Orders of other shards, each with the last round in which it must be done; until then it
    /// waits for the port to be drained.
    orders: VecDeque<(u64, Order)>,
    /// Number of rounds with waiting orders.
    round: u64,
    /// Datagrams handed over to other shards.
    pub(super) handed_over: u64,
}

impl Others {
    pub(super) fn new(
        own: usize,
        first: u8,
        boxes: &Arc<[Arc<Staging>]>,
        common: &Arc<Common>,
    ) -> Self {
        Self {
            own,
            first,
            boxes: boxes.clone(),
            common: common.clone(),
            unrung: 0,
            letters: Letters::new(),
            orders: VecDeque::with_capacity(64),
            round: 0,
            handed_over: 0,
        }
    }

    pub(super) fn own_staging(&self) -> Arc<Staging> {
        self.boxes[self.own].clone()
    }

    /// Hands a datagram over if it belongs to another shard. One without an owner stays here.
    #[inline]
    pub(super) fn hand_over(&mut self, datagram: &Datagram<'_>) -> bool {
        let Some(dest) = dest_qpn(datagram.bytes) else { return false };
        let owner = if dest == Qpn::GSI { 0 } else { self.shard_of(dest) };
        if owner == self.own {
            return false;
        }
        let Some(other) = self.boxes.get(owner) else { return false };
        #[allow(clippy::cast_possible_truncation, reason = "64 shards at most")]
        if !other.mail.hand_over(self.own as u8, datagram) {
            self.boxes[self.own].mail.waste();
        }
        self.unrung |= 1 << owner;
        self.handed_over += 1;
        true
    }

    /// The number on the device of this shard's object `number`.
    pub(super) fn number_of(&self, number: u32) -> u32 {
        #[allow(clippy::cast_possible_truncation, reason = "64 shards at most")]
        let (count, own) = (self.boxes.len() as u32, self.own as u32);
        number * count + own
    }

    /// This shard's port has broken. Returns whether it is the first of the device, and whether it
    /// is the last.
    pub(super) fn breaks(&self) -> (bool, bool) {
        let others = self.common.broken.fetch_add(1, Ordering::AcqRel);
        (others == 0, others + 1 == self.boxes.len())
    }

    fn shard_of(&self, qpn: Qpn) -> usize {
        shard_of(qpn, self.first)
    }

    /// Leaves an order for the shard of a queue pair. Returns whether that is another one.
    pub(super) fn order_owner(&mut self, qpn: Qpn, order: Order) -> bool {
        let owner = self.shard_of(qpn);
        let is_other = owner != self.own;
        if is_other {
            self.order(owner, order);
        }
        is_other
    }

    /// Leaves an order for a shard.
    fn order(&mut self, shard: usize, order: Order) {
        if let Some(other) = self.boxes.get(shard) {
            other.mail.order(order);
            self.unrung |= 1 << shard;
        }
    }

    /// Leaves an order for every other shard.
    pub(super) fn order_all(&mut self, order: Order) {
        for shard in (0..self.boxes.len()).filter(|shard| *shard != self.own) {
            self.boxes[shard].mail.order(order);
            self.unrung |= 1 << shard;
        }
    }

    /// The next order that is due.
    fn next_order(&mut self, drained: bool) -> Option<Order> {
        let (latest, _) = self.orders.front()?;
        let due = drained || self.round >= *latest;
        due.then(|| self.orders.pop_front())?.map(|(_, order)| order)
    }

    /// Whether an order to break the queue pair is waiting.
    pub(super) fn is_to_break(&self, qpn: Qpn) -> bool {
        self.orders.iter().any(|(_, order)| *order == Order::Break(qpn))
    }

    /// Rings the shards that have new mail.
    #[inline]
    pub(super) fn ring(&mut self) {
        if self.unrung != 0 {
            self.ring_all();
        }
    }

    #[cold]
    fn ring_all(&mut self) {
        let cores = self.common.cores.get();
        while self.unrung != 0 {
            let shard = self.unrung.trailing_zeros() as usize;
            self.unrung &= self.unrung - 1;
            // A device in setup or shutdown has no thread to wake.
            if let Some(core) = cores.and_then(|cores| cores[shard].upgrade()) {
                core.kick();
            }
        }
    }

    /// Handles the datagrams of other shards, and queues their orders. Returns whether there was
    /// mail in the own box.
    #[inline]
    pub(super) fn read_mail(
        &mut self,
        own: &Staging,
        now: Time,
        engine: &mut Engine,
        host: &mut Host,
    ) -> bool {
        if !own.mail.take(&mut self.letters) {
            return false;
        }
        for (from, datagram) in self.letters.datagrams() {
            own.take(engine, host);
            let before = accepted(engine);
            engine.handle_datagram(now, &datagram, host);
            // Tells the receiving shard, which can then leave its port alone for a moment and wake
            // no thread meanwhile.
            if accepted(engine) == before {
                self.boxes[from].mail.waste();
            }
        }
        let latest = self.round + u64::from(OVERDUE_MAX);
        self.orders.extend(self.letters.orders().map(|order| (latest, order)));
        true
    }

    /// Whether orders wait.
    pub(super) fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }

    /// Executes the orders of other shards once the port is drained, because messages that arrived
    /// before an order still count: a connection ends after its last messages. If a peer keeps the
    /// port full, orders wait no longer than deadlines do.
    #[inline]
    pub(super) fn obey(
        &mut self,
        drained: bool,
        clock: Clock,
        engine: &mut Engine,
        host: &mut Host,
    ) {
        if self.orders.is_empty() {
            return;
        }
        self.round += 1;
        while let Some(order) = self.next_order(drained) {
            match order {
                // The queue pair may be gone, or already in the error state.
                Order::Break(qpn) => break_down(engine, host, qpn),
                Order::Release(qpn) => engine.release_qpn(qpn),
                Order::Arrived(conn) => {
                    if let Some(cm) = engine.cm() {
                        cm.message_arrived(conn);
                    }
                }
                Order::Look(conn, qpn) => {
                    self.order(0, Order::Looked(conn, engine.packets_of(qpn)));
                }
                Order::Looked(conn, packets) => {
                    if let Some(cm) = engine.cm() {
                        cm.looked(clock.now(), conn, packets);
                    }
                }
                Order::HandOff(report) => engine.take_hand_off(clock.now(), &report),
                // The queue may be gone, and its number reused.
                Order::Overflow(cq) => {
                    if host.cqs.get(cq.0).is_some_and(|cq| cq.has_ended()) {
                        engine.cq_overflow(cq, host);
                    }
                }
            }
        }
    }

    /// Leaves mail for events of the engine that concern other shards.
    pub(super) fn write_mail(&mut self, engine: &mut Engine) {
        while let Some(conn) = engine.poll_arrived() {
            self.order(0, Order::Arrived(conn));
        }
        while let Some((conn, qpn)) = engine.poll_look() {
            self.order(self.shard_of(qpn), Order::Look(conn, qpn));
        }
        self.ring();
    }

    /// Leaves mail for the engine's reports about peers.
    pub(super) fn report_peers(&mut self, engine: &mut Engine) {
        while let Some(report) = engine.poll_hand_off() {
            match report {
                HandOff::FirstPacket { .. } => self.order(0, Order::HandOff(report)),
                HandOff::Learn(..) => self.order_all(Order::HandOff(report)),
            }
        }
        self.ring();
    }
}

/// Takes the queue pair to the error state, which every other state allows.
pub(super) fn break_down(engine: &mut Engine, host: &mut Host, qpn: Qpn) {
    let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    // The queue pair may be gone, or already in the error state.
    let _ = engine.modify_qp(qpn, &error, host);
}
