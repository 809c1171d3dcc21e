//! The reliable connection: one queue pair, its requester, completer and responder.
//!
//! The roles never call each other. They return what they found or decided, and the queue pair applies it.

pub(crate) mod attr;
mod completer;
mod requester;
mod responder;
mod rq;
pub(crate) mod sq;
mod transmit;
mod window;

use self::attr::{ModifyError, PeerAddress, QpAttr, QpInit};
use self::completer::{DataVerdict, Verdict, Why};
use self::requester::{Limits, Requester};
use self::responder::{Outcome, Received, Responder, Rights};
use self::rq::RecvQueue;
use self::sq::{PostError, SendQueue};
use crate::engine::Shared;
use crate::ingress::SourceCheck;
use crate::mem::{Access, Memory};
use crate::pool::{Budget, PoolId};
use crate::timer::Deadline;
use crate::types::{Mtu, Qpn, Time};
use crate::verbs::{
    Completions, Cqe, QpEvent, QpState, RecvWr, SendOp, SendWr, WcOpcode, WcStatus,
};
use crate::wire::ext::rnr_timer_us;
use crate::wire::{NakCode, Operation, Packet};

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
    /// In the waiting list of a pool.
    pub(crate) waiting: bool,
    slot: u32,
    limits: Limits,
    sq: SendQueue,
    requester: Requester,
    responder: Responder,
    deadline: Deadline,
    retry_left: u8,
    rnr_left: u8,
    established: bool,
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
            waiting: false,
            slot,
            limits: Limits { mtu: Mtu::Mtu256, pd: init.pd, peer: PoolId::OWN, read_packets: 1 },
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
            retry_left: 0,
            rnr_left: 0,
            established: false,
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
            QpState::Err => self.break_down(shared, host),
            QpState::Rtr if from != to => self.ready_to_receive(shared),
            QpState::Rts if from != to => self.ready_to_send(shared),
            _ => {}
        }
        self.state = to;
        if to == QpState::Err {
            self.flush(shared, host);
        }
        Ok(())
    }

    fn merge(&mut self, attr: &QpAttr) {
        macro_rules! take {
            ($($field:ident)*) => { $( self.attr.$field = attr.$field.or(self.attr.$field); )* };
        }
        take!(state pkey_index port access peer path_mtu dest_qpn rq_psn max_dest_rd_atomic
              min_rnr_timer sq_psn max_rd_atomic retry_cnt rnr_retry timeout);
    }

    fn reset(&mut self, shared: &mut Shared) {
        self.detach(shared);
        self.attr = QpAttr::default();
        self.sq.reset(0);
        self.responder.rq.reset();
        self.responder.stop();
        self.established = false;
    }

    /// Leaves the pools and forgets the timer.
    pub(crate) fn detach(&mut self, shared: &mut Shared) {
        self.requester.release_all(&self.limits, &mut shared.pools);
        if self.attr.peer.is_some() && self.limits.peer != PoolId::OWN {
            shared.pools.leave(self.limits.peer);
            self.limits.peer = PoolId::OWN;
        }
        self.requester.rnr_until = None;
        self.deadline.clear();
    }

    fn ready_to_receive(&mut self, shared: &mut Shared) {
        let Some(peer) = self.attr.peer else { return };
        let mtu = self.attr.path_mtu.unwrap_or(Mtu::Mtu256);
        self.limits = Limits {
            mtu,
            pd: self.init.pd,
            peer: shared.pools.join(peer.remote, peer.budget, shared.config.max_qp as usize),
            // A READ request asks for one super-packet at most.
            read_packets: (61_440 / mtu.bytes()).clamp(1, 60),
        };
        self.source = SourceCheck::new(&peer);
        let psn = self.attr.rq_psn.unwrap_or_default().first();
        self.responder.start(psn, self.attr.max_dest_rd_atomic.unwrap_or(0));
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

    pub(crate) fn peer(&self) -> Option<&PeerAddress> {
        self.attr.peer.as_ref()
    }

    pub(crate) fn peer_pool(&self) -> PoolId {
        self.limits.peer
    }

    /// Whether a request in a queue names `key`.
    pub(crate) fn uses(&self, key: crate::types::Key) -> bool {
        self.sq.uses(key) || self.responder.rq.uses(key)
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.queued || self.requester.outstanding()
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
            QpState::Rts | QpState::Err => {}
            _ => return Err(PostError::State),
        }
        let len = self.sq.check(wr)?;
        self.sq.push(wr, len, self.limits.mtu, self.init.sq_sig_all);
        if self.state == QpState::Err {
            self.flush(shared, host);
        } else {
            shared.enqueue(self.slot, &mut self.queued);
        }
        Ok(())
    }

    pub(crate) fn post_recv<H: Completions>(
        &mut self,
        wr: &RecvWr<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), PostError> {
        if self.state == QpState::Reset {
            return Err(PostError::State);
        }
        self.responder.rq.push(wr)?;
        if self.state == QpState::Err {
            self.flush(shared, host);
        }
        Ok(())
    }

    /// A request from the peer.
    #[inline]
    pub(crate) fn handle_request<H: Memory + Completions>(
        &mut self,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if self.state == QpState::Rtr && !self.established {
            self.established = true;
            shared.event(self.qpn, QpEvent::CommEst);
        }
        let rights = Rights {
            pd: self.init.pd,
            mtu: self.limits.mtu,
            access: self.attr.access.unwrap_or(Access::NONE),
            min_rnr_timer: self.attr.min_rnr_timer.unwrap_or(0),
        };
        let respond = match self.responder.request(packet, &rights, host) {
            Outcome::Done { received, respond } => {
                shared.counters.rcvd_bytes += packet.payload().len() as u64;
                if let Some(received) = received {
                    self.complete_recv(&received, host);
                }
                respond
            }
            Outcome::Duplicate { respond } => {
                shared.counters.duplicate_request += 1;
                respond
            }
            Outcome::Stale => {
                shared.drops.stale_duplicate += 1;
                false
            }
            Outcome::Gap { report } => {
                shared.counters.out_of_seq_request += 1;
                shared.counters.sent_seq_err += u64::from(report);
                shared.drops.out_of_sequence += u64::from(!report);
                report
            }
            Outcome::NotReady => {
                shared.counters.send_rnr_err += 1;
                true
            }
            Outcome::Refused { code, received } => {
                self.refused(code, received, shared, host);
                true
            }
        };
        if respond {
            shared.enqueue(self.slot, &mut self.queued);
        }
    }

    fn refused<H: Completions>(
        &mut self,
        code: NakCode,
        received: Option<Received>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let event = if code == NakCode::RemoteAccessError {
            shared.counters.remote_access_errors += 1;
            QpEvent::AccessErr
        } else {
            shared.counters.remote_invalid_request += 1;
            QpEvent::ReqErr
        };
        match received {
            Some(received) => self.complete_recv(&received, host),
            None if self.responder.in_receive() => {}
            None => shared.event(self.qpn, event),
        }
        self.break_down(shared, host);
    }

    fn complete_recv<H: Completions>(&self, received: &Received, host: &mut H) {
        host.recv_retired(self.init.cookie, 1);
        host.complete(
            self.init.recv_cq,
            Cqe {
                wr_id: received.wr_id,
                status: received.status,
                opcode: received.opcode,
                byte_len: received.byte_len,
                imm: received.imm,
                qpn: self.qpn,
                solicited: received.solicited,
            },
        );
    }

    /// A response from the peer.
    #[inline]
    pub(crate) fn handle_response<H: Memory + Completions>(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let psn = packet.bth.psn.expand(self.requester.una());
        match packet.info.operation {
            Operation::Acknowledge => self.handle_ack(now, psn, packet, shared, host),
            _ => self.handle_data(now, psn, packet, shared, host),
        }
    }

    fn handle_ack<H: Completions>(
        &mut self,
        now: Time,
        psn: u64,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let Some(aeth) = packet.aeth() else { return };
        let (una, sent) = (self.requester.una(), self.requester.sent_max());
        let gate = self.requester.gate(&self.sq, psn.saturating_add(1)).map(|(_, at)| at);
        match completer::judge(aeth.syndrome, psn, una, sent, gate) {
            Verdict::Advance { to } => self.advance(now, to, shared, host),
            Verdict::Retry { to, from, why } => {
                self.advance(now, to, shared, host);
                self.retry(now, from, why, shared);
            }
            Verdict::RnrWait { to, timer } => {
                shared.counters.rcvd_rnr_err += 1;
                self.advance(now, to, shared, host);
                self.rnr_wait(now, to, timer, shared, host);
            }
            Verdict::Fatal { to, status } => {
                self.advance(now, to, shared, host);
                self.fail_head(status, shared, host);
            }
            Verdict::Duplicate => {}
            Verdict::Ghost => shared.drops.ghost_response += 1,
            Verdict::BadSyndrome => shared.drops.bad_syndrome += 1,
        }
    }

    fn handle_data<H: Memory + Completions>(
        &mut self,
        now: Time,
        psn: u64,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let (una, sent) = (self.requester.una(), self.requester.sent_max());
        let gate = self.requester.gate(&self.sq, psn.saturating_add(1));
        match completer::judge_data(psn, una, sent, gate.map(|(_, at)| at)) {
            DataVerdict::Take => {}
            DataVerdict::Retry { from } => return self.retry(now, from, Why::Implied, shared),
            DataVerdict::Duplicate => return,
            DataVerdict::Ghost => {
                shared.drops.ghost_response += 1;
                return;
            }
        }
        let Some((index, _)) = gate else { return };
        // Everything before the READ is acknowledged by its response.
        if psn > una {
            self.advance(now, psn, shared, host);
        }
        match self.place_response(index, psn, packet, shared, host) {
            Ok(()) => self.advance(now, psn + 1, shared, host),
            Err(status) => self.fail_head(status, shared, host),
        }
    }

    fn place_response<H: Memory>(
        &self,
        index: u64,
        psn: u64,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), WcStatus> {
        let wqe = self.sq.get(index);
        let pd = self.init.pd;
        let placed = match (&wqe.op, packet.atomic_ack()) {
            (SendOp::Read { .. }, None) => {
                let payload = packet.payload();
                if payload.len() != wqe.payload(psn, self.limits.mtu) as usize {
                    return Err(WcStatus::BadRespErr);
                }
                shared.counters.rcvd_bytes += payload.len() as u64;
                let offset = wqe.offset(psn, self.limits.mtu);
                self.sq.scatter(index, offset, payload, pd, host)
            }
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Some(found)) => {
                self.sq.scatter(index, 0, &found.to_ne_bytes(), pd, host)
            }
            _ => return Err(WcStatus::BadRespErr),
        };
        placed.map_err(|_| WcStatus::LocProtErr)
    }

    /// Everything before `to` is acknowledged.
    #[inline]
    fn advance<H: Completions>(&mut self, now: Time, to: u64, shared: &mut Shared, host: &mut H) {
        if to <= self.requester.una() {
            return;
        }
        self.requester.advance(to, &self.sq, &self.limits, &mut shared.pools);
        let mut retired = 0;
        while !self.sq.is_empty() && self.sq.get(self.sq.head).last < to {
            let wqe = self.sq.get(self.sq.head);
            if wqe.signaled {
                let cqe = self.send_cqe(wqe.wr_id, WcStatus::Success, wqe.op.completion(), wqe.len);
                host.complete(self.init.send_cq, cqe);
            }
            self.sq.head += 1;
            retired += 1;
        }
        if retired > 0 {
            host.send_retired(self.init.cookie, retired);
        }
        self.retry_left = self.attr.retry_cnt.unwrap_or(0);
        self.rnr_left = self.attr.rnr_retry.unwrap_or(0);
        self.requester.rnr_until = None;
        if self.requester.outstanding() {
            self.arm(now, shared);
        } else {
            self.deadline.clear();
        }
        if self.requester.cursor() != self.sq.tail {
            shared.enqueue(self.slot, &mut self.queued);
        }
        shared.wake(self.limits.peer);
        shared.wake(PoolId::OWN);
    }

    fn send_cqe(&self, wr_id: u64, status: WcStatus, opcode: WcOpcode, byte_len: u32) -> Cqe {
        let solicited = status != WcStatus::Success;
        Cqe { wr_id, status, opcode, byte_len, imm: None, qpn: self.qpn, solicited }
    }

    fn retry(&mut self, now: Time, from: u64, why: Why, shared: &mut Shared) {
        match why {
            Why::SequenceNak => shared.counters.rcvd_seq_err += 1,
            Why::Implied if self.requester.implied_nak(from) => {
                shared.counters.implied_nak_seq_err += 1;
            }
            Why::Implied => return,
        }
        let sent = self.requester.sent_max();
        self.requester.window.lost(from, sent);
        self.requester.go_back(from, &self.sq, &self.limits, &mut shared.pools);
        self.arm(now, shared);
        shared.enqueue(self.slot, &mut self.queued);
        shared.wake(self.limits.peer);
    }

    fn rnr_wait<H: Completions>(
        &mut self,
        now: Time,
        to: u64,
        timer: u8,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if self.requester.rnr_until.is_some() || to != self.requester.una() {
            return;
        }
        if self.attr.rnr_retry != Some(7) {
            if self.rnr_left == 0 {
                shared.counters.retry_rnr_exceeded_err += 1;
                return self.fail_head(WcStatus::RnrRetryExcErr, shared, host);
            }
            self.rnr_left -= 1;
        }
        self.requester.go_back(to, &self.sq, &self.limits, &mut shared.pools);
        let until = now.after(u64::from(rnr_timer_us(timer)) * 1000);
        self.requester.rnr_until = Some(until);
        shared.timers.set(self.slot, &mut self.deadline, until);
        shared.wake(self.limits.peer);
    }

    /// Starts the acknowledgement timer over.
    #[inline]
    fn arm(&mut self, now: Time, shared: &mut Shared) {
        match self.attr.timeout {
            None | Some(0) => {}
            Some(exponent) => {
                let due = now.after(4096 << exponent);
                shared.timers.set(self.slot, &mut self.deadline, due);
            }
        }
    }

    /// The heap's entry of `filed` came up.
    pub(crate) fn handle_timer<H: Completions>(
        &mut self,
        now: Time,
        filed: Time,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if !shared.timers.settle(self.slot, &mut self.deadline, filed, now) {
            return;
        }
        if self.requester.rnr_until.take().is_some() {
            shared.enqueue(self.slot, &mut self.queued);
            return;
        }
        if self.state != QpState::Rts || !self.requester.outstanding() {
            return;
        }
        shared.counters.local_ack_timeout_err += 1;
        if self.retry_left == 0 {
            shared.counters.retry_exceeded_err += 1;
            return self.fail_head(WcStatus::RetryExcErr, shared, host);
        }
        self.retry_left -= 1;
        let (una, sent) = (self.requester.una(), self.requester.sent_max());
        self.requester.window.timed_out(sent);
        self.requester.forget_implied();
        self.requester.go_back(una, &self.sq, &self.limits, &mut shared.pools);
        // Counts from now, also if nothing can be sent.
        self.arm(now, shared);
        shared.enqueue(self.slot, &mut self.queued);
        shared.wake(self.limits.peer);
    }

    /// The oldest request failed, and with it the queue pair.
    fn fail_head<H: Completions>(&mut self, status: WcStatus, shared: &mut Shared, host: &mut H) {
        if self.sq.is_empty() {
            return;
        }
        let wqe = self.sq.get(self.sq.head);
        let cqe = self.send_cqe(wqe.wr_id, status, wqe.op.completion(), 0);
        host.complete(self.init.send_cq, cqe);
        host.send_retired(self.init.cookie, 1);
        // The head moves only after the charges of its packets are given back.
        self.requester.release_all(&self.limits, &mut shared.pools);
        self.sq.head += 1;
        self.break_down(shared, host);
    }

    /// To the error state: nothing more is sent but a NAK, all work is flushed.
    pub(crate) fn break_down<H: Completions>(&mut self, shared: &mut Shared, host: &mut H) {
        self.state = QpState::Err;
        self.attr.state = Some(QpState::Err);
        self.requester.release_all(&self.limits, &mut shared.pools);
        self.requester.rnr_until = None;
        self.deadline.clear();
        self.responder.stop();
        self.flush(shared, host);
        shared.wake(self.limits.peer);
        shared.wake(PoolId::OWN);
    }

    /// Completes all work with `WR_FLUSH_ERR`.
    fn flush<H: Completions>(&mut self, _shared: &mut Shared, host: &mut H) {
        let mut sends = 0;
        while !self.sq.is_empty() {
            let wqe = self.sq.get(self.sq.head);
            let cqe = self.send_cqe(wqe.wr_id, WcStatus::WrFlushErr, wqe.op.completion(), 0);
            host.complete(self.init.send_cq, cqe);
            self.sq.head += 1;
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
}
