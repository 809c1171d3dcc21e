//! A queue pair of any service.

use crate::ingress::{Datagram, SourceCheck};
use crate::mem::Memory;
use crate::qp::attr::{ModifyError, QpAttr};
use crate::qp::post::PostError;
use crate::qp::{Core, Turn, Urgency};
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::types::{Seq, Time};
use crate::verbs::{Completions, QpState, QpType, RecvWr, SendWr};
use crate::wire::{Packet, Service};
use crate::{rc, unreliable};

/// A queue pair.
#[derive(Debug)]
pub(crate) enum AnyQp {
    Rc(Box<rc::Qp>),
    Unreliable(Box<unreliable::Qp>),
}

/// Runs the same code for either kind.
macro_rules! either {
    ($qp:expr, $name:ident => $body:expr) => {
        match $qp {
            AnyQp::Rc($name) => $body,
            AnyQp::Unreliable($name) => $body,
        }
    };
}

impl AnyQp {
    pub(crate) fn new(core: Core) -> Self {
        match core.init.qp_type {
            QpType::Rc => Self::Rc(Box::new(rc::Qp::new(core))),
            QpType::Uc | QpType::Ud => Self::Unreliable(Box::new(unreliable::Qp::new(core))),
        }
    }

    #[inline]
    pub(crate) fn core(&self) -> &Core {
        either!(self, qp => &qp.core)
    }

    #[inline]
    pub(crate) fn core_mut(&mut self) -> &mut Core {
        either!(self, qp => &mut qp.core)
    }

    /// The check of the only permitted source of its packets. `None` if any source may send to it.
    #[inline]
    pub(crate) fn source(&mut self) -> Option<&mut SourceCheck> {
        match self {
            Self::Rc(qp) => Some(&mut qp.source),
            Self::Unreliable(qp) => qp.source(),
        }
    }

    #[inline]
    pub(crate) fn service(&self) -> Service {
        match self {
            Self::Rc(_) => Service::Rc,
            Self::Unreliable(qp) => qp.service(),
        }
    }

    pub(crate) fn modify<H: Completions>(
        &mut self,
        attr: &QpAttr,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), ModifyError> {
        either!(self, qp => qp.modify(attr, shared, host))
    }

    /// Gives up its part of the shared state: the queue pair goes away.
    pub(crate) fn detach(&mut self, shared: &mut Shared) {
        either!(self, qp => qp.detach(shared));
    }

    /// Owes the peer an acknowledgement of the packets that arrived without AckReq.
    pub(crate) fn acknowledge_unasked(&mut self, shared: &mut Shared) {
        if let Self::Rc(qp) = self {
            qp.acknowledge_unasked(shared);
        }
    }

    /// Moves to the error state and flushes all work.
    pub(crate) fn break_down<H: Completions>(&mut self, shared: &mut Shared, host: &mut H) {
        match self {
            Self::Rc(qp) => qp.break_down(shared, host),
            Self::Unreliable(qp) => qp.break_down(shared, host),
        }
    }

    /// A packet arrived with an ECN congestion mark, or from an overloaded receive queue.
    #[cold]
    pub(crate) fn on_congestion(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        shared: &mut Shared,
    ) {
        let is_marked = datagram.is_congested();
        shared.counters.rcvd_ecn_ce += u64::from(is_marked);
        shared.counters.rcvd_overload += u64::from(!is_marked);
        if let Self::Rc(qp) = self {
            qp.marked(now, packet, shared);
        }
    }

    /// The peer reports congestion marks on our packets. A service without acknowledgements has no
    /// window to shrink.
    #[cold]
    pub(crate) fn on_cnp(&mut self, now: Time) {
        if let Self::Rc(qp) = self {
            qp.notified(now);
        }
    }

    /// PSNs for a status report: next to send, first unacknowledged, expected.
    pub(crate) fn sequence(&self) -> (Seq, Seq, Seq) {
        either!(self, qp => qp.sequence())
    }

    /// Whether all requests that were begun are done.
    pub(crate) fn is_drained(&self) -> bool {
        either!(self, qp => qp.is_drained())
    }

    /// How soon a request that is posted now must leave.
    pub(crate) fn post_urgency(&self) -> Urgency {
        match self {
            Self::Rc(qp) if qp.is_busy() => Urgency::Idle,
            Self::Rc(_) => Urgency::Now,
            Self::Unreliable(qp) => qp.post_urgency(),
        }
    }

    #[inline]
    pub(crate) fn post_send<H: Completions>(
        &mut self,
        wr: &SendWr<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), PostError> {
        let core = self.core_mut();
        if !core.state.takes_sends() {
            return Err(PostError::State);
        }
        let len = core.sq.check(wr)?;
        match self {
            Self::Rc(qp) => qp.push(wr, len, &shared.peers),
            Self::Unreliable(qp) => qp.push(wr, len),
        }
        let core = self.core_mut();
        match core.state {
            QpState::Err | QpState::Sqe => core.flush_sends(host),
            _ => shared.enqueue(core.slot, &mut core.queued),
        }
        Ok(())
    }

    pub(crate) fn post_recv<H: Completions>(
        &mut self,
        wr: &RecvWr<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), PostError> {
        let core = self.core_mut();
        if core.init.srq.is_some() {
            return Err(PostError::Shared);
        }
        if core.state == QpState::Reset {
            return Err(PostError::State);
        }
        core.rq.push(wr)?;
        if core.state == QpState::Err {
            core.flush(&mut shared.srqs, &mut shared.events, host);
        }
        Ok(())
    }

    /// Takes a packet of its service.
    #[inline(always)]
    pub(crate) fn handle<H: Memory + Completions>(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        match self {
            Self::Rc(qp) if packet.info.is_request() => qp.handle_request(packet, shared, host),
            Self::Rc(qp) => qp.handle_response(now, packet, shared, host),
            Self::Unreliable(qp) => qp.handle(packet, datagram, shared, host),
        }
    }

    /// Its timer expired.
    pub(crate) fn handle_timer<H: Completions>(
        &mut self,
        now: Time,
        shared: &mut Shared,
        host: &mut H,
    ) {
        match self {
            Self::Rc(qp) => qp.handle_timer(now, shared, host),
            Self::Unreliable(qp) => qp.handle_timer(now, shared),
        }
    }

    /// Packets that `transmit` wrote at `now` really left at `left`.
    pub(crate) fn left_late(&mut self, now: Time, left: Time, shared: &mut Shared) {
        if let Self::Rc(qp) = self {
            qp.left_late(now, left, shared);
        }
    }

    /// Sends as many packets as the turn has left.
    #[inline]
    pub(crate) fn transmit<H: Memory + Completions>(
        &mut self,
        now: Time,
        turn: &mut Turn,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) {
        either!(self, qp => qp.transmit(now, turn, shared, host, sink));
    }
}
