//! The common part of queue pairs of every service: state and attributes, the two queues, and how
//! work completes and is flushed.

pub(crate) mod attr;
pub(crate) mod message;
pub(crate) mod opcode;
pub(crate) mod outbound;
pub(crate) mod post;
pub(crate) mod rq;
mod scatter;
pub(crate) mod sq;
mod tally;

use self::attr::{Kept, PeerAddress, QpAttr, QpInit};
use self::message::Rights;
use self::post::SendLimits;
use self::rq::{Received, RecvQueue};
use self::sq::{SendQueue, WqeIndex};
use self::tally::Tally;
use crate::budget::Cost;
use crate::cm::ConnId;
use crate::events::Events;
use crate::ingress::Datagram;
use crate::mem::{Access, Accessor, Memory, PdId};
use crate::peer::PeerId;
use crate::srq::{Receives, Srqs};
use crate::stats::{Hits, Limit, LimitsHit};
use crate::timer::Deadline;
use crate::types::{Key, Mtu, Qpn, Seq, Time};
use crate::verbs::{Completions, Cqe, QpEvent, QpState, SendOp, WcOpcode, WcStatus};

/// How soon an engine must transmit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// There is nothing to send, or a response to the packets in flight will have the engine
    /// driven.
    Idle,
    /// By this time at the latest. Until then it may wait and leave with more.
    By(Time),
    /// At once.
    Now,
}

impl Urgency {
    /// The more urgent of two.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Now, _) | (_, Self::Now) => Self::Now,
            (Self::By(one), Self::By(another)) => Self::By(one.min(another)),
            (Self::Idle, more) | (more, Self::Idle) => more,
        }
    }
}

/// How a queue pair's turn to send ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnEnd {
    /// Nothing to send now.
    Idle,
    /// There is more, but others are waiting.
    Quantum,
    SinkFull,
    /// The receiver has too little credit for this packet.
    Wait(PeerId, Cost),
}

/// A queue pair's turn to send.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Packets that it may still send.
    pub(crate) left: usize,
    /// Whether a request left.
    pub(crate) progress: bool,
    pub(crate) end: TurnEnd,
}

/// The common part of a queue pair.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) qpn: Qpn,
    pub(crate) init: QpInit,
    pub(crate) state: QpState,
    pub(crate) attr: Kept,
    /// Whether it is in the list of queue pairs with something to send.
    pub(crate) queued: bool,
    /// The receiver credit for which it waits, or which was just granted to it.
    pub(crate) waiting: Option<PeerId>,
    /// Packets already sent in the current turn. The turn was interrupted because there was no more
    /// room.
    pub(crate) spent: u16,
    pub(crate) slot: u32,
    pub(crate) sq: SendQueue,
    /// Receives. With a shared receive queue: the receive that it took from there.
    pub(crate) rq: RecvQueue,
    /// The domain of the receives.
    pub(crate) recv_pd: PdId,
    pub(crate) deadline: Deadline,
    pub(crate) tally: Tally,
    pub(crate) limits_hit: Hits,
    established: bool,
    /// The connection that the first message establishes, as the RTU does.
    pub(crate) awaited_by: Option<ConnId>,
    /// Whether the event that it takes no more from its shared receive queue was reported.
    last_wqe_reported: bool,
    /// Whether the event is wanted that all work begun before SQD is done.
    pub(crate) drain_wanted: bool,
    /// The generation of peers in which it looked up its own.
    pub(crate) peers_seen: u32,
}

impl Core {
    /// A datagram must fit `port_mtu`. `shared` is the domain of its shared receive queue, and a
    /// queue for the receives taken from there.
    pub(crate) fn new(
        qpn: Qpn,
        slot: u32,
        init: QpInit,
        port_mtu: Mtu,
        shared: Option<(PdId, RecvQueue)>,
    ) -> Self {
        let QpInit { qp_type, max_send_sge, max_inline_data, .. } = init;
        let limits = SendLimits::new(qp_type, max_send_sge, max_inline_data, port_mtu);
        let own = || (init.pd, RecvQueue::new(init.max_recv_wr, init.max_recv_sge));
        let (recv_pd, rq) = shared.unwrap_or_else(own);
        Self {
            qpn,
            init,
            state: QpState::Reset,
            attr: Kept::default(),
            queued: false,
            waiting: None,
            spent: 0,
            slot,
            sq: SendQueue::new(init.max_send_wr, limits),
            rq,
            recv_pd,
            tally: Tally::default(),
            limits_hit: Hits::default(),
            deadline: Deadline::default(),
            established: false,
            awaited_by: None,
            last_wqe_reported: false,
            drain_wanted: false,
            peers_seen: 0,
        }
    }

    /// Takes the attributes that a change sets.
    pub(crate) fn merge(&mut self, attr: &QpAttr) {
        self.attr.merge(attr);
        if attr.peer.is_some() {
            self.peers_seen = 0;
        }
        self.drain_wanted |= attr.sqd_async_notify == Some(true);
    }

    /// Goes back to RESET: all work and all attributes are forgotten.
    pub(crate) fn reset(&mut self) {
        self.attr = Kept::default();
        self.sq.reset(Seq::default());
        self.rq.reset();
        self.established = false;
        self.awaited_by = None;
        self.last_wqe_reported = false;
        self.drain_wanted = false;
    }

    pub(crate) fn set_state(&mut self, state: QpState) {
        self.state = state;
    }

    pub(crate) fn peer(&self) -> Option<&PeerAddress> {
        self.attr.peer.as_ref()
    }

    /// Whether a datagram comes from the peer and goes to us. Without a peer: never.
    #[inline]
    pub(crate) fn is_from_peer(&self, datagram: &Datagram<'_>) -> bool {
        self.peer().is_some_and(|peer| peer.remote == datagram.src && peer.local == datagram.dst)
    }

    /// The queue of its next receive.
    #[inline]
    pub(crate) fn receives<'a>(&'a mut self, srqs: &'a mut Srqs) -> Receives<'a> {
        Receives { own: &mut self.rq, srqs, srq: self.init.srq, done: None }
    }

    /// Gives back the receives that it took from a shared receive queue and did not complete.
    pub(crate) fn give_back(&mut self, srqs: &mut Srqs) {
        if let Some(srq) = self.init.srq {
            srqs.give_back(srq, &mut self.rq);
        }
    }

    /// Whether a request in a queue names `key`.
    pub(crate) fn uses(&self, key: Key) -> bool {
        self.sq.uses(key) || self.rq.uses(key)
    }

    /// Counts why nothing more leaves in this turn.
    #[inline]
    pub(crate) fn limited(&mut self, limit: Limit, all: &mut LimitsHit) {
        self.limits_hit.hit(limit);
        all.hit(limit);
    }

    /// A packet came from the peer.
    #[inline]
    pub(crate) fn on_packet(&mut self, events: &mut Events) {
        if self.state == QpState::Rtr && !self.established {
            self.established = true;
            events.push(self.qpn, QpEvent::CommEst);
        }
    }

    /// Whether to say when all requests that were begun are done: in SQD, once.
    #[inline]
    pub(crate) fn awaits_drain(&self) -> bool {
        self.drain_wanted && self.state == QpState::Sqd
    }

    /// All requests that were begun are done.
    #[cold]
    pub(crate) fn drained(&mut self, events: &mut Events) {
        self.drain_wanted = false;
        events.push(self.qpn, QpEvent::SqDrained);
    }

    /// Permissions of the connection.
    pub(crate) fn rights(&self, mtu: Mtu) -> Rights {
        Rights {
            by: self.accessor(),
            recv_pd: self.recv_pd,
            mtu,
            access: self.attr.access.unwrap_or(Access::NONE),
        }
    }

    /// The identity with which it accesses memory for its peer.
    #[inline]
    pub(crate) fn accessor(&self) -> Accessor {
        Accessor { pd: self.init.pd, qpn: self.qpn }
    }

    /// Executes the request `index`, which concerns this side only.
    pub(crate) fn run_local(
        &self,
        index: WqeIndex,
        memory: &mut impl Memory,
    ) -> Result<(), WcStatus> {
        let (by, op) = (self.accessor(), &self.sq.get(index).op);
        let regions = memory.regions_mut();
        match (op, op.bind()) {
            (_, Some(bind)) => regions.bind(by, &bind).map_err(|_| WcStatus::MwBindErr),
            (SendOp::LocalInv { rkey }, _) => {
                regions.invalidate(by, *rkey).map_err(|_| WcStatus::LocQpOpErr)
            }
            _ => Ok(()),
        }
    }

    /// The oldest send request is done.
    #[inline]
    pub(crate) fn retire_send<H: Completions>(&mut self, host: &mut H) {
        let wqe = self.sq.get(self.sq.head);
        if wqe.is_signaled() {
            let cqe = self.cqe(wqe.wr_id, WcStatus::Success, wqe.op.completion(), wqe.len);
            host.complete(self.init.send_cq, cqe);
        }
        self.sq.pop();
    }

    /// The oldest send request failed.
    pub(crate) fn fail_send<H: Completions>(&mut self, status: WcStatus, host: &mut H) {
        let wqe = self.sq.get(self.sq.head);
        let cqe = self.cqe(wqe.wr_id, status, wqe.op.completion(), 0);
        host.complete(self.init.send_cq, cqe);
        host.send_retired(self.init.cookie, 1);
        self.sq.pop();
    }

    /// Completes a receive request that was taken from the queue.
    pub(crate) fn complete_recv<H: Completions>(&self, received: &Received, host: &mut H) {
        if self.init.srq.is_none() {
            host.recv_retired(self.init.cookie, 1);
        }
        host.complete(
            self.init.recv_cq,
            Cqe {
                wr_id: received.wr_id,
                status: received.status,
                opcode: received.opcode,
                byte_len: received.byte_len,
                imm: received.imm,
                invalidated: received.invalidated,
                qpn: self.qpn,
                context: self.init.context,
                sender: received.sender,
                solicited: received.solicited,
            },
        );
    }

    /// Completes all work with `WR_FLUSH_ERR`. With a shared receive queue, that includes the
    /// receives already taken from it; the queue pair takes no more.
    pub(crate) fn flush<H: Completions>(
        &mut self,
        srqs: &mut Srqs,
        events: &mut Events,
        host: &mut H,
    ) {
        self.flush_sends(host);
        let mut receives = 0;
        while let Some(wr_id) = self.rq.front() {
            let cqe = self.cqe(wr_id, WcStatus::WrFlushErr, WcOpcode::Recv, 0);
            host.complete(self.init.recv_cq, cqe);
            self.rq.pop();
            receives += 1;
        }
        if let Some(srq) = self.init.srq {
            (0..receives).for_each(|_| srqs.complete(srq));
            if !std::mem::replace(&mut self.last_wqe_reported, true) {
                events.push(self.qpn, QpEvent::LastWqeReached);
            }
        } else if receives > 0 {
            host.recv_retired(self.init.cookie, receives);
        }
    }

    /// Completes all send requests with `WR_FLUSH_ERR`.
    pub(crate) fn flush_sends<H: Completions>(&mut self, host: &mut H) {
        let mut sends = 0;
        while !self.sq.is_empty() {
            let wqe = self.sq.get(self.sq.head);
            let cqe = self.cqe(wqe.wr_id, WcStatus::WrFlushErr, wqe.op.completion(), 0);
            host.complete(self.init.send_cq, cqe);
            self.sq.pop();
            sends += 1;
        }
        if sends > 0 {
            host.send_retired(self.init.cookie, sends);
        }
    }

    fn cqe(&self, wr_id: u64, status: WcStatus, opcode: WcOpcode, byte_len: u32) -> Cqe {
        let solicited = status != WcStatus::Success;
        let (qpn, context) = (self.qpn, self.init.context);
        let (imm, invalidated, sender) = (None, None, None);
        Cqe { wr_id, status, opcode, byte_len, imm, invalidated, qpn, context, sender, solicited }
    }
}
