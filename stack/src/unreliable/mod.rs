//! Queue pairs whose packets no peer acknowledges: the unreliable connection (UC) and the
//! unreliable datagram (UD).
//!
//! A request is complete when its last packet has left, so the only cursor is the next PSN of the
//! oldest request. The receivers differ: [`uc`] puts messages together, [`ud`] takes datagrams from
//! any sender.

mod transmit;
mod uc;
mod ud;

use self::uc::Connection;
pub use self::ud::grh_addresses;
use crate::ingress::{Datagram, SourceCheck};
use crate::mem::Memory;
use crate::qp::attr::{ModifyError, QpAttr};
use crate::qp::{Core, Urgency};
use crate::shared::Shared;
use crate::tuning::pacing::BATCH_NS;
use crate::types::{Mtu, Seq, Time};
use crate::verbs::{Completions, QpState, QpType, SendWr};
use crate::wire::{Packet, Service};

/// An unreliable queue pair.
// In the order written: the common part is first in either, so that it is found without asking
// which it is.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) core: Core,
    /// Of UC, from RTR on.
    connection: Option<Box<Connection>>,
    mtu: Mtu,
    /// Next PSN to send: of the oldest request, or of the next that is posted.
    next: Seq,
    /// Whether requests that were not begun may be: not in SQD.
    begins: bool,
    recent: Recent,
}

/// Packets that left recently.
#[derive(Debug, Default)]
struct Recent {
    last: Time,
    packets: usize,
}

impl Recent {
    fn left(&mut self, now: Time, packets: usize) {
        if now.since(self.last) > BATCH_NS {
            self.packets = 0;
        }
        self.last = now;
        self.packets = self.packets.saturating_add(packets);
    }
}

impl Qp {
    pub(crate) fn new(core: Core) -> Self {
        Self {
            core,
            connection: None,
            mtu: Mtu::Mtu256,
            next: Seq::default(),
            begins: true,
            recent: Recent::default(),
        }
    }

    /// Changes attributes and state.
    pub(crate) fn modify<H: Completions>(
        &mut self,
        attr: &QpAttr,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), ModifyError> {
        let from = self.core.state;
        let to = attr.check(self.core.init.qp_type, from)?;
        attr.check_drained(from, || self.is_drained())?;
        self.core.merge(attr);
        match to {
            QpState::Reset => {
                self.detach(shared);
                self.core.reset();
            }
            QpState::Err if from != to => self.break_down(shared, host),
            QpState::Rtr if from != to => self.ready_to_receive(shared),
            QpState::Rts if from == QpState::Rtr => {
                self.core.sq.reset(self.core.attr.sq_psn.unwrap_or_default().first());
                self.go(shared);
            }
            QpState::Rts if from != to => self.go(shared),
            QpState::Sqd => {
                self.begins = false;
                if attr.peer.is_some() {
                    self.take_path(shared);
                }
            }
            _ => {}
        }
        self.core.set_state(to);
        self.report_drained(shared);
        Ok(())
    }

    fn ready_to_receive(&mut self, shared: &mut Shared) {
        self.mtu = match self.core.init.qp_type {
            QpType::Ud => shared.config.port_mtu,
            _ => self.core.attr.path_mtu.unwrap_or(Mtu::Mtu256),
        };
        if let Some(peer) = self.core.attr.peer {
            let dest = self.core.attr.dest_qpn;
            let receiver =
                shared.peers.join((peer.local, peer.remote), dest, peer.budget, peer.kind);
            let psn = self.core.attr.rq_psn.unwrap_or_default().first();
            self.connection = Some(Box::new(Connection::new(receiver, psn)));
        }
    }

    /// The peer is reached by another path, perhaps at another address.
    #[cold]
    fn take_path(&mut self, shared: &mut Shared) {
        let (Some(peer), Some(connection)) = (&self.core.attr.peer, &mut self.connection) else {
            return;
        };
        let to = shared.peers.join(
            (peer.local, peer.remote),
            self.core.attr.dest_qpn,
            peer.budget,
            peer.kind,
        );
        shared.peers.leave(std::mem::replace(&mut connection.receiver, to));
        connection.source = SourceCheck::default();
    }

    /// Sends the posted requests, from the next message on.
    fn go(&mut self, shared: &mut Shared) {
        let sq = &self.core.sq;
        if sq.is_empty() {
            self.next = sq.next_psn;
        }
        self.begins = true;
        self.core.drain_wanted = false;
        shared.enqueue(self.core.slot, &mut self.core.queued);
    }

    /// Leaves the peer's receive queue and the timers, and returns its packets of a shared receive
    /// queue.
    pub(crate) fn detach(&mut self, shared: &mut Shared) {
        self.core.give_back(&mut shared.srqs);
        if let Some(connection) = self.connection.take() {
            shared.peers.leave(connection.receiver);
        }
        shared.timers.remove(self.core.slot, &mut self.core.deadline);
    }

    /// To the error state: all work is flushed.
    pub(crate) fn break_down<H: Completions>(&mut self, shared: &mut Shared, host: &mut H) {
        self.core.set_state(QpState::Err);
        self.core.deadline.clear();
        self.core.flush(&mut shared.srqs, &mut shared.events, host);
    }

    /// The only permitted sender: the peer of a connection. Datagrams may come from any.
    #[inline]
    pub(crate) fn source(&mut self) -> Option<&mut SourceCheck> {
        self.connection.as_mut().map(|connection| &mut connection.source)
    }

    pub(crate) fn service(&self) -> Service {
        match self.core.init.qp_type {
            QpType::Ud => Service::Ud,
            _ => Service::Uc,
        }
    }

    /// How soon a request that is posted now must leave. A program that sends one datagram, and no
    /// more before it is answered, has nothing to batch it with.
    pub(crate) fn post_urgency(&self) -> Urgency {
        match self.recent {
            _ if !self.core.sq.is_empty() && self.core.state.requests() => Urgency::Idle,
            Recent { last, packets: 2.. } => Urgency::By(last.after(BATCH_NS)),
            _ => Urgency::Now,
        }
    }

    /// PSNs for a status report: next to send, first unacknowledged, expected.
    pub(crate) fn sequence(&self) -> (Seq, Seq, Seq) {
        let expected =
            self.connection.as_ref().map_or(self.next, |connection| connection.expected());
        (self.core.sq.next_psn, self.next, expected)
    }

    /// A send request was posted.
    #[inline(never)]
    pub(crate) fn push(&mut self, wr: &SendWr<'_>, len: u32) {
        self.core.sq.push(wr, len, self.mtu, 0, self.core.init.sq_sig_all);
    }

    /// Takes a packet.
    #[inline(never)]
    pub(crate) fn handle<H: Memory + Completions>(
        &mut self,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        match self.connection {
            Some(_) => {
                self.core.on_packet(&mut shared.events);
                self.handle_request(packet, shared, host);
            }
            None => self.handle_datagram(packet, datagram, shared, host),
        }
    }

    /// The timer has expired: paced packets may leave.
    pub(crate) fn handle_timer(&mut self, now: Time, shared: &mut Shared) {
        if shared.is_due(self.core.slot, &mut self.core.deadline, now) {
            shared.enqueue(self.core.slot, &mut self.core.queued);
        }
    }

    /// Whether all requests that were begun are done.
    pub(crate) fn is_drained(&self) -> bool {
        let sq = &self.core.sq;
        sq.is_empty() || self.next <= sq.get(sq.head).first
    }

    #[inline]
    fn report_drained(&mut self, shared: &mut Shared) {
        if self.core.awaits_drain() && self.is_drained() {
            self.core.drained(&mut shared.events);
        }
    }
}
