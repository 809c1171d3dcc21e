//! Small WRITEs that ask for no acknowledgement, though nothing follows them.
//!
//! Where two sides answer each other's WRITEs, each answer takes the acknowledgement of what it
//! answers along: two packets in the place of one, and their receiver looks at both before its
//! program sees the one. Nobody waits for it if the WRITE makes no completion, so of such WRITEs
//! only each eighth ack_requests. Which packets ask is the requester's choice (IBTA volume 1, 9.7.5.1.2
//! \[M\]); cards ask once in so many (`log_ack_req_freq` of mlx5, in Linux' `fpga/conn.c` 2^8;
//! `HERMON_QP_ACKREQ_FREQ` of illumos, 2^5). All are acknowledged, several at once, by whatever
//! asks next.
//!
//! If nothing does, the probe asks ([`clock`](crate::rc::clock)), as if the acknowledgement had been
//! lost: 2 ms later, by the last packet again. That is what a standard responder answers wherever
//! it stands: with an acknowledgement of all if it has that packet, by taking it if that alone was
//! lost, with a NAK of the first that is missing otherwise. Anything shorter would have to bear a
//! number that is acknowledged already, so that it is not taken for what was lost, and its answer
//! could be an older one that was late.
//!
//! So a lost WRITE is noticed when it would have been noticed before: by the gap in front of what
//! follows, or by the probe.

use crate::peer::Peers;
use crate::qp::sq::{SendQueue, Wqe};
use crate::rc::Qp;
use crate::rc::clock::PATIENCE_NS;
use crate::rc::requester::Requester;
use crate::types::Time;
use crate::verbs::SendOp;

/// One of so many ack_requests.
const EVERY: u32 = 8;
/// A queue pair that sends one so soon after the other asks by the last of them in half the time in
/// which the probe would. One that sends more rarely would be probed for each.
const SOON_NS: u64 = PATIENCE_NS / 2 / EVERY as u64;
/// What costs little when the probe sends it again.
const BYTES_MAX: u32 = 256;
/// An acknowledgement timeout of no less than this is not over before the probe is answered.
const TIMEOUT_NS_MIN: u64 = 4 * PATIENCE_NS;

/// What left without asking.
#[derive(Debug, Default)]
pub(in crate::rc) struct Quiet {
    /// One more than the index of the last request that did; 0 if it is sent again, or there was
    /// none.
    until: u64,
    /// When requests left last, of whatever kind runs are made of.
    left: Time,
    /// The PSN that was expected of the peer then.
    heard: u64,
}

impl Quiet {
    /// A run of requests before the one of index `next` left, the last of them `quiet` or not, when
    /// the PSN `heard` was expected of the peer.
    #[inline]
    pub(in crate::rc) fn sent(&mut self, next: u64, quiet: bool, now: Time, heard: u64) {
        *self = Self { until: if quiet { next } else { 0 }, left: now, heard };
    }

    /// Everything that was sent last is sent again, and ack_requests.
    #[inline]
    pub(in crate::rc) fn ends(&mut self) {
        self.until = 0;
    }
}

impl Qp {
    /// Whether the request under the cursor, a message of one packet of which nothing is special,
    /// need not ask.
    #[inline]
    pub(in crate::rc) fn may_be_quiet(&self, now: Time, peers: &mut Peers) -> bool {
        let (sq, cur) = (&self.core.sq, self.requester.wqe_next);
        let wqe = sq.get(cur);
        // A request with a completion asks, and one that is followed does by the next. Inline data
        // is our own memory: no program that has its answer finds it in use.
        wqe.is_inline_and_unsignaled() && cur + 1 == sq.tail && self.is_an_answer(now, wqe, peers)
    }

    #[inline(never)]
    fn is_an_answer(&self, now: Time, wqe: &Wqe, peers: &mut Peers) -> bool {
        let Self { core, requester, responder, limits, .. } = self;
        let Requester { quiet, window, round_trip, .. } = requester;
        let writes = matches!(wqe.op, SendOp::Write { imm: None, .. }) && wqe.len <= BYTES_MAX;
        let answers = responder.expected() != quiet.heard && now.since(quiet.left) < SOON_NS;
        let asked_lately = requester.snd_nxt - requester.last_ack_req < u64::from(EVERY);
        // What it takes is given back late, and others may want it: of the send queue, of the
        // peer's room, of the window.
        let has_room = core.sq.is_mostly_free()
            && peers.get(limits.peer).is_mostly_free(EVERY)
            && window.is_whole()
            && window.packets() > EVERY;
        // Of a path that is not known nothing is probed, and of a long one late.
        let probed = (1..=PATIENCE_NS / 4).contains(&round_trip.srtt())
            && self.timeout().is_none_or(|timeout| timeout >= TIMEOUT_NS_MIN);
        writes && answers && asked_lately && has_room && probed && requester.responses.is_empty()
    }
}

impl Requester {
    /// Whether all that nobody has told of left without asking, and nothing was posted since:
    /// nothing will come that makes anybody drive.
    #[inline]
    pub(in crate::rc) fn is_quiet(&self, sq: &SendQueue) -> bool {
        self.quiet.until == sq.tail
            && self.wqe_next == sq.tail
            && self.begins
            && self.ack_requests.end().is_none()
    }

    /// Whether nothing of what is not acknowledged has asked: the peer was silent because it was to
    /// be.
    pub(in crate::rc) fn asked_nobody(&self, sq: &SendQueue) -> bool {
        self.outstanding()
            && self.has_quiet(sq)
            && self.ack_requests.end().is_none()
            && self.responses.is_empty()
            && self.rnr_until.is_none()
    }

    /// Whether something of what is not acknowledged left without asking.
    pub(in crate::rc) fn has_quiet(&self, sq: &SendQueue) -> bool {
        self.quiet.until > sq.head
    }
}
