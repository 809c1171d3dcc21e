//! The reliable connection: one queue pair, its requester, completer and responder.
//!
//! The roles never call each other. They return their findings and decisions, and the queue pair
//! applies them.

mod clock;
mod completer;
mod congestion;
mod inbound;
mod progress;
pub(crate) mod reorder;
pub(crate) mod requester;
pub(crate) mod responder;
mod transmit;

use self::clock::Clock;
use self::congestion::ecn::Notifier;
use self::reorder::ReorderBuffer;
use self::requester::{ConnParams, PathParams, Requester};
use self::responder::Responder;
use crate::budget::Budget;
use crate::ingress::SourceCheck;
use crate::peer::{PeerId, PeerKind, Peers, datagrams_max};
use crate::qp::Core;
use crate::qp::attr::{ModifyError, PeerAddress, QpAttr};
use crate::qp::sq::OVERHEAD;
use crate::shared::Shared;
use crate::tuning::selective_repeat;
use crate::types::{Mtu, Qpn, Seq, Time};
use crate::verbs::{Completions, QpState, SendWr};
use crate::wire::{Operation, Packet};

/// The receive queue of a peer, with one more user.
fn join(peer: &PeerAddress, dest: Option<Qpn>, shared: &mut Shared) -> PeerId {
    shared.peers.join((peer.local, peer.remote), dest, peer.budget, peer.kind)
}

/// Packets that may be in flight to a peer.
fn window_of(peer: &PeerAddress, shared: &Shared) -> u32 {
    datagrams_max(peer.budget, peer.kind).min(shared.config.window_max)
}

/// A queue pair of a reliable connection.
// In the order written: the common part is first in either, so that it is found without asking
// which it is.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) core: Core,
    pub(crate) source: SourceCheck,
    params: ConnParams,
    requester: Requester,
    responder: Responder,
    held: ReorderBuffer,
    notifier: Notifier,
    clock: Clock,
    /// The deadline is that of a wait for room, not for an answer: nothing has left since it was
    /// set.
    waits_to_send: bool,
    /// The retries since something was acknowledged: after a timeout, and after an RNR NAK.
    retries: u8,
    rnr_retries: u8,
}

impl Qp {
    pub(crate) fn new(core: Core) -> Self {
        Self {
            source: SourceCheck::default(),
            params: ConnParams {
                slot: core.slot,
                mtu: Mtu::Mtu256,
                pd: core.init.pd,
                peer: PeerId::OWN,
                selective: false,
                splits_writes: false,
            },
            core,
            requester: Requester::new(),
            responder: Responder::new(),
            held: ReorderBuffer::default(),
            notifier: Notifier::default(),
            clock: Clock::default(),
            waits_to_send: false,
            retries: 0,
            rnr_retries: 0,
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
        let before = self.core.attr.peer;
        self.core.merge(attr);
        self.responder.min_rnr_timer = self.core.attr.min_rnr_timer.unwrap_or(0);
        match to {
            QpState::Reset => self.reset(shared),
            // One that broke already keeps the responses that it owes.
            QpState::Err if from != to => {
                self.responder.stop();
                self.break_down(shared, host);
            }
            QpState::Rtr if from != to => self.ready_to_receive(shared),
            QpState::Rts if from == QpState::Rtr => self.ready_to_send(shared),
            QpState::Rts if from == QpState::Sqd => {
                self.requester.drain(false);
                self.core.drain_wanted = false;
                shared.enqueue(self.core.slot, &mut self.core.queued);
            }
            QpState::Sqd => {
                self.drain(attr);
                if let Some(before) = before.filter(|_| attr.peer.is_some()) {
                    self.take_path(before, shared);
                }
                shared.enqueue(self.core.slot, &mut self.core.queued);
            }
            _ => {}
        }
        self.core.state = to;
        self.responder.rights = self.core.rights(self.params.mtu);
        self.report_drained(shared);
        Ok(())
    }

    /// Whether all requests that were begun are done.
    pub(crate) fn is_drained(&self) -> bool {
        self.requester.is_drained(&self.core.sq)
    }

    fn reset(&mut self, shared: &mut Shared) {
        self.detach(shared);
        self.core.reset();
        self.source = SourceCheck::default();
        self.responder.stop();
    }

    /// Leaves receivers, their wait queues and the timers, and returns its packets of a shared
    /// receive queue.
    pub(crate) fn detach(&mut self, shared: &mut Shared) {
        self.core.give_back(&mut shared.srqs);
        self.requester.release_all(&self.params, &mut shared.peers, &mut shared.lists);
        self.held.clear(&mut shared.reorder_slab);
        shared.peers.quit(self.core.slot, &mut self.core.waiting);
        if self.params.peer != PeerId::OWN {
            shared.peers.leave(self.params.peer);
            self.params.peer = PeerId::OWN;
        }
        self.notifier = Notifier::default();
        self.clock = Clock::default();
        shared.timers.remove(self.core.slot, &mut self.core.deadline);
    }

    fn ready_to_receive(&mut self, shared: &mut Shared) {
        let Some(peer) = self.core.attr.peer else { return };
        let mtu = self.core.attr.path_mtu.unwrap_or(Mtu::Mtu256);
        self.params = ConnParams {
            slot: self.core.slot,
            mtu,
            pd: self.core.init.pd,
            peer: join(&peer, self.core.attr.dest_qpn, shared),
            selective: Self::is_selective(&peer, shared),
            splits_writes: shared.config.split_writes,
        };
        self.source = SourceCheck::default();
        let psn = self.core.attr.rq_psn.unwrap_or_default().first();
        // Receives that queue pairs share cannot be promised to one peer.
        let advertise = shared.config.advertise_credits && self.core.init.srq.is_none();
        self.responder.start(psn, self.core.attr.max_dest_rd_atomic.unwrap_or(0), advertise);
    }

    fn ready_to_send(&mut self, shared: &mut Shared) {
        let psn = self.core.attr.sq_psn.unwrap_or_default().first();
        self.core.sq.reset(psn);
        let Some(peer) = self.core.attr.peer else { return };
        let path = self.new_path(&peer, shared);
        self.requester.start(psn, self.core.sq.tail, &path);
        (self.retries, self.rnr_retries) = (0, 0);
    }

    fn new_path(&self, peer: &PeerAddress, shared: &Shared) -> PathParams {
        let mtu = self.params.mtu;
        PathParams {
            mtu,
            window_max: window_of(peer, shared),
            max_rd_atomic: self.core.attr.max_rd_atomic.unwrap_or(0),
            room: shared.peers.answers_one_by_one(mtu.bytes() + OVERHEAD),
            to_rocinante: peer.kind.is_rocinante(),
        }
    }

    /// The same queue pair of the peer is reached by another path, perhaps at another address. All
    /// packets that left were acknowledged, so PSNs go on and nothing is repeated. The peer's
    /// announcement holds for its address only.
    #[cold]
    fn take_path(&mut self, before: PeerAddress, shared: &mut Shared) {
        let Some(peer) = &mut self.core.attr.peer else { return };
        if peer.kind == PeerKind::Standard && peer.remote == before.remote {
            (peer.budget, peer.kind) = (before.budget, before.kind);
        }
        let peer = *peer;
        shared.peers.quit(self.core.slot, &mut self.core.waiting);
        let to = join(&peer, self.core.attr.dest_qpn, shared);
        let from = std::mem::replace(&mut self.params.peer, to);
        shared.peers.take_over(from, to, self.requester.charged());
        self.params.selective = Self::is_selective(&peer, shared);
        if !self.params.selective {
            self.held.clear(&mut shared.reorder_slab);
        }
        self.source = SourceCheck::default();
        self.notifier = Notifier::default();
        self.clock = Clock::default();
        self.waits_to_send = false;
        self.core.deadline.clear();
        let path = self.new_path(&peer, shared);
        self.requester.take_path(&path, &mut shared.lists);
    }

    /// Whether packets that come too early are held, and missing ones are reported.
    fn is_selective(peer: &PeerAddress, shared: &Shared) -> bool {
        selective_repeat::ENABLED
            && shared.config.reorder_packets_max > 0
            && peer.kind.is_rocinante()
    }

    /// The peer turned out to be a Rocinante. From now on packets that come too early are held,
    /// missing ones are reported, and the window is the peer's room. The peer need not know the
    /// same of us: it may always go back as the specification says, and need not report.
    #[cold]
    pub(crate) fn upgrade(&mut self, budget: Budget, kind: PeerKind, shared: &mut Shared) {
        let Some(peer) = &mut self.core.attr.peer else { return };
        if peer.kind != PeerKind::Standard || self.params.peer == PeerId::OWN {
            return;
        }
        (peer.budget, peer.kind) = (budget, kind);
        let peer = *peer;
        shared.peers.quit(self.core.slot, &mut self.core.waiting);
        let to = join(&peer, self.core.attr.dest_qpn, shared);
        let from = std::mem::replace(&mut self.params.peer, to);
        shared.peers.take_over(from, to, self.requester.charged());
        self.params.selective = Self::is_selective(&peer, shared);
        self.requester.upgrade(window_of(&peer, shared));
        shared.enqueue(self.core.slot, &mut self.core.queued);
    }

    /// Begins no request any more; the attributes of those to come may change.
    fn drain(&mut self, attr: &QpAttr) {
        self.requester.drain(true);
        if let Some(max) = attr.max_rd_atomic {
            self.requester.set_max_rd_atomic(max);
        }
        if let Some(max) = attr.max_dest_rd_atomic {
            self.responder.set_max_dest_rd_atomic(max);
        }
        if attr.retry_cnt.is_some() || attr.rnr_retry.is_some() {
            (self.retries, self.rnr_retries) = (0, 0);
        }
    }

    /// Number of packets held behind a gap, and of responses kept.
    pub(crate) fn holds(&self) -> (usize, usize) {
        (self.held.len(), self.responder.records())
    }

    /// Whether it has something to send, and nothing will let it: it has no turn, waits for no
    /// credit, and no response is to come.
    pub(crate) fn is_forgotten(&self) -> bool {
        let Core { queued, waiting, state, sq, .. } = &self.core;
        let waits = *queued || waiting.is_some();
        state.requests() && !waits && self.requester.lacks_only_credit(sq)
    }

    pub(crate) fn is_busy(&self) -> bool {
        // A quiet request brings no response that would have the engine driven.
        let sq = &self.core.sq;
        let awaits = self.requester.outstanding() && !self.requester.is_quiet(sq);
        let pending = awaits || self.requester.cursor() != sq.tail;
        pending && self.core.state.requests()
    }

    /// PSNs for a status report: next to send, first unacknowledged, expected.
    pub(crate) fn sequence(&self) -> (Seq, Seq, Seq) {
        (self.core.sq.next_psn, self.requester.snd_una(), self.responder.expected())
    }

    /// To the error state: no request is sent or taken any more, all work is flushed. Responses
    /// that are due to earlier requests, and a NAK, still leave unless the responder was stopped.
    pub(crate) fn break_down<H: Completions>(&mut self, shared: &mut Shared, host: &mut H) {
        self.core.set_state(QpState::Err);
        self.requester.release_all(&self.params, &mut shared.peers, &mut shared.lists);
        self.held.clear(&mut shared.reorder_slab);
        shared.peers.quit(self.core.slot, &mut self.core.waiting);
        self.clock = Clock::default();
        self.core.deadline.clear();
        self.responder.close();
        self.core.flush(&mut shared.srqs, &mut shared.events, host);
    }

    /// A packet came with a congestion mark: its sender gets a notification. Responses to READs
    /// come as fast as they are asked for, so there is less to ask for, too.
    #[cold]
    pub(crate) fn marked(&mut self, now: Time, packet: &Packet<'_>, shared: &mut Shared) {
        if packet.info.operation == Operation::ReadResponse {
            self.requester.on_marked_response();
        }
        if self.notifier.marked(now) {
            shared.enqueue(self.core.slot, &mut self.core.queued);
        }
    }

    /// The peer reports that our packets were marked (CNP).
    #[cold]
    pub(crate) fn notified(&mut self, now: Time) {
        self.requester.on_ecn(now);
    }

    /// A send request was posted.
    #[inline]
    pub(crate) fn push(&mut self, wr: &SendWr<'_>, len: u32, peers: &Peers) {
        let mtu = self.params.mtu;
        let split = if len > mtu.bytes() { self.split(&wr.op, len, peers) } else { 0 };
        self.core.sq.push(wr, len, mtu, split, self.core.init.sq_sig_all);
    }
}
