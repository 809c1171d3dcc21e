//! The reliable connection: one queue pair, its requester, completer and responder.
//!
//! The roles never call each other. They return what they found or decided, and the queue pair applies it.

mod asks;
pub(crate) mod attr;
mod company;
mod completer;
mod credits;
mod inbound;
mod progress;
mod records;
mod requester;
mod responder;
mod rq;
pub(crate) mod sq;
mod transmit;
mod window;

use self::attr::{ModifyError, PeerAddress, QpAttr, QpInit};
use self::requester::{Limits, OVERHEAD, Requester};
use self::responder::Responder;
use self::rq::RecvQueue;
use self::sq::{PostError, SendQueue};
use crate::engine::Shared;
use crate::ingress::SourceCheck;
use crate::pool::{Budget, PoolId};
use crate::timer::Deadline;
use crate::types::{Key, Mtu, Qpn};
use crate::verbs::{Completions, Cqe, QpState, RecvWr, SendWr, WcOpcode, WcStatus};

pub(crate) use self::transmit::Turn;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) qpn: Qpn,
    pub(crate) init: QpInit,
    pub(crate) state: QpState,
    pub(crate) attr: QpAttr,
    pub(crate) source: SourceCheck,
    /// In the list of queue pairs with something to send.
    pub(crate) queued: bool,
    /// The pool in whose line it waits, or from whose line it was called.
    pub(crate) waiting: Option<PoolId>,
    slot: u32,
    limits: Limits,
    sq: SendQueue,
    requester: Requester,
    responder: Responder,
    deadline: Deadline,
    /// The deadline is that of a wait for room, not for an answer: nothing has left since it was set.
    waits_to_send: bool,
    retry_left: u8,
    rnr_left: u8,
    established: bool,
    /// The end of what was begun before SQD is to be reported.
    drain_wanted: bool,
}

impl Qp {
    pub(crate) fn new(qpn: Qpn, slot: u32, init: QpInit) -> Self {
        let depth = |wr: u32| wr as usize;
        Self {
            qpn,
            init,
            state: QpState::Reset,
            attr: QpAttr::default(),
            source: SourceCheck::default(),
            queued: false,
            waiting: None,
            slot,
            limits: Limits {
                slot,
                mtu: Mtu::Mtu256,
                pd: init.pd,
                peer: PoolId::OWN,
                read_packets: 1,
            },
            sq: SendQueue::new(
                depth(init.max_send_wr),
                depth(init.max_send_sge),
                depth(init.max_inline_data),
            ),
            requester: Requester::new(),
            responder: Responder::new(RecvQueue::new(
                depth(init.max_recv_wr),
                depth(init.max_recv_sge),
            )),
            deadline: Deadline::default(),
            waits_to_send: false,
            retry_left: 0,
            rnr_left: 0,
            established: false,
            drain_wanted: false,
        }
    }

    /// Changes attributes and state.
    pub(crate) fn modify<H: Completions>(
        &mut self,
        attr: &QpAttr,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), ModifyError> {
        let (from, to) = (self.state, attr.check(self.state)?);
        self.merge(attr);
        match to {
            QpState::Reset => self.reset(shared),
            // Who broke already says no more than it has to say.
            QpState::Err if from != to => {
                self.responder.stop();
                self.break_down(shared, host);
            }
            QpState::Rtr if from != to => self.ready_to_receive(shared),
            QpState::Rts if from == QpState::Rtr => self.ready_to_send(shared),
            QpState::Rts if from == QpState::Sqd => {
                self.requester.begins = true;
                self.drain_wanted = false;
                shared.enqueue(self.slot, &mut self.queued);
            }
            QpState::Sqd => {
                self.drain(attr);
                shared.enqueue(self.slot, &mut self.queued);
            }
            _ => {}
        }
        self.state = to;
        self.report_drained(shared);
        Ok(())
    }

    fn merge(&mut self, attr: &QpAttr) {
        macro_rules! take {
            ($($field:ident)*) => { $( self.attr.$field = attr.$field.or(self.attr.$field); )* };
        }
        take!(state sqd_async_notify pkey_index port access peer path_mtu dest_qpn rq_psn max_dest_rd_atomic
              min_rnr_timer sq_psn max_rd_atomic retry_cnt rnr_retry timeout);
    }

    fn reset(&mut self, shared: &mut Shared) {
        self.detach(shared);
        self.attr = QpAttr::default();
        self.source = SourceCheck::default();
        self.sq.reset(0);
        self.responder.rq.reset();
        self.responder.stop();
        self.established = false;
        self.drain_wanted = false;
    }

    /// Leaves the pools, their lines and the timers.
    pub(crate) fn detach(&mut self, shared: &mut Shared) {
        self.requester.release_all(&self.limits, &mut shared.pools);
        shared.pools.quit(self.slot, &mut self.waiting);
        if self.limits.peer != PoolId::OWN {
            shared.pools.leave(self.limits.peer);
            self.limits.peer = PoolId::OWN;
        }
        self.requester.rnr_until = None;
        shared.timers.remove(self.slot, &mut self.deadline);
    }

    fn ready_to_receive(&mut self, shared: &mut Shared) {
        let Some(peer) = self.attr.peer else { return };
        let mtu = self.attr.path_mtu.unwrap_or(Mtu::Mtu256);
        // A READ request asks for one super-packet at most, and for no more than half of what our own receive queue holds,
        // so that another is under way while it is answered.
        let half = shared.config.own_budget.holds(mtu.bytes() + OVERHEAD) / 2;
        self.limits = Limits {
            slot: self.slot,
            mtu,
            pd: self.init.pd,
            peer: shared.pools.join(peer.remote, peer.budget),
            read_packets: (61_440 / mtu.bytes()).min(60).min(half).max(1),
        };
        self.source = SourceCheck::new(&peer);
        let psn = self.attr.rq_psn.unwrap_or_default().first();
        let advertise = shared.config.advertise_credits;
        self.responder.start(psn, self.attr.max_dest_rd_atomic.unwrap_or(0), advertise);
    }

    fn ready_to_send(&mut self, shared: &mut Shared) {
        let psn = self.attr.sq_psn.unwrap_or_default().first();
        self.sq.reset(psn);
        let budget = self.peer().map_or(Budget::STRANGER, |peer| peer.budget);
        let window = budget.datagrams.min(shared.config.window_max);
        let rd = self.attr.max_rd_atomic.unwrap_or(0);
        self.requester.start(psn, self.sq.tail, rd, window);
        self.retry_left = self.attr.retry_cnt.unwrap_or(0);
        self.rnr_left = self.attr.rnr_retry.unwrap_or(0);
    }

    /// Begins no request any more; the attributes of those to come may change.
    fn drain(&mut self, attr: &QpAttr) {
        self.requester.begins = false;
        self.drain_wanted |= attr.sqd_async_notify == Some(true);
        if let Some(max) = attr.max_rd_atomic {
            self.requester.set_max_rd_atomic(max);
        }
        if attr.retry_cnt.is_some() || attr.rnr_retry.is_some() {
            self.retry_left = self.attr.retry_cnt.unwrap_or(0);
            self.rnr_left = self.attr.rnr_retry.unwrap_or(0);
        }
    }

    pub(crate) fn peer(&self) -> Option<&PeerAddress> {
        self.attr.peer.as_ref()
    }

    /// Whether a request in a queue names `key`.
    pub(crate) fn uses(&self, key: Key) -> bool {
        self.sq.uses(key) || self.responder.rq.uses(key)
    }

    pub(crate) fn is_busy(&self) -> bool {
        let pending = self.requester.outstanding() || self.requester.cursor() != self.sq.tail;
        pending && self.state.requests()
    }

    /// PSNs for a status report: next to send, first unacknowledged, expected.
    pub(crate) fn sequence(&self) -> (u64, u64, u64) {
        (self.sq.next_psn, self.requester.una(), self.responder.expected())
    }

    pub(crate) fn post_send<H: Completions>(
        &mut self,
        wr: &SendWr<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), PostError> {
        match self.state {
            QpState::Rts | QpState::Sqd | QpState::Err => {}
            _ => return Err(PostError::State),
        }
        let len = self.sq.check(wr)?;
        let (mtu, read_packets) = (self.limits.mtu, self.limits.read_packets);
        self.sq.push(wr, len, mtu, read_packets, self.init.sq_sig_all);
        if self.state == QpState::Err {
            self.flush(host);
        } else {
            shared.enqueue(self.slot, &mut self.queued);
        }
        Ok(())
    }

    pub(crate) fn post_recv<H: Completions>(
        &mut self,
        wr: &RecvWr<'_>,
        host: &mut H,
    ) -> Result<(), PostError> {
        if self.state == QpState::Reset {
            return Err(PostError::State);
        }
        self.responder.rq.push(wr)?;
        if self.state == QpState::Err {
            self.flush(host);
        }
        Ok(())
    }

    /// To the error state: no request is sent or taken any more, all work is flushed. Responses that are due to
    /// earlier requests, and a NAK, still leave unless the responder was stopped.
    pub(crate) fn break_down<H: Completions>(&mut self, shared: &mut Shared, host: &mut H) {
        self.state = QpState::Err;
        self.attr.state = Some(QpState::Err);
        self.requester.release_all(&self.limits, &mut shared.pools);
        shared.pools.quit(self.slot, &mut self.waiting);
        self.requester.rnr_until = None;
        self.deadline.clear();
        self.responder.close();
        self.flush(host);
    }

    /// Completes all work with `WR_FLUSH_ERR`.
    fn flush<H: Completions>(&mut self, host: &mut H) {
        let mut sends = 0;
        while !self.sq.is_empty() {
            let wqe = self.sq.get(self.sq.head);
            let cqe = self.send_cqe(wqe.wr_id, WcStatus::WrFlushErr, wqe.op.completion(), 0);
            host.complete(self.init.send_cq, cqe);
            self.sq.pop();
            sends += 1;
        }
        let mut receives = 0;
        while let Some(wr_id) = self.responder.rq.front() {
            let cqe = self.send_cqe(wr_id, WcStatus::WrFlushErr, WcOpcode::Recv, 0);
            host.complete(self.init.recv_cq, cqe);
            self.responder.rq.pop();
            receives += 1;
        }
        if sends > 0 {
            host.send_retired(self.init.cookie, sends);
        }
        if receives > 0 {
            host.recv_retired(self.init.cookie, receives);
        }
    }

    fn send_cqe(&self, wr_id: u64, status: WcStatus, opcode: WcOpcode, byte_len: u32) -> Cqe {
        let solicited = status != WcStatus::Success;
        Cqe { wr_id, status, opcode, byte_len, imm: None, qpn: self.qpn, solicited }
    }
}
