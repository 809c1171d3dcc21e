//! Which packets ask for an acknowledgement (BTH.AckReq). That is the requester's choice (IBTA
//! volume 1, 9.7.5.1.2 \[M\]).
//!
//! - Problem: an acknowledgement is a packet, and it takes credit of our own receive queue. But
//!   completions, the congestion window and the peer's credit wait for it.
//! - Rule: while there is credit, each message asks at its end, and long ones in between; without,
//!   only the last packet that may leave does. Small messages that answer each other and make no
//!   completion ask one in eight times ([`Acks`]).
//! - Cost if wrong: the sender stands still until a probe, or each packet costs two.
//! - Measured: `docs/performance/method.md`.
//!
//! Where two sides answer each other's SENDs or WRITEs, an acknowledgement leaves with each answer:
//! two packets in the place of one, and their receiver looks at both before its program sees the
//! one. Nothing waits for the acknowledgement if the message makes no completion. Cards ask once in
//! a number of packets: 2^8 of mlx5 (`log_ack_req_freq` in Linux' `fpga/conn.c`), 2^5 of illumos
//! (`HERMON_QP_ACKREQ_FREQ`). The next packet that asks has all of them acknowledged at once.
//!
//! If none follows, the probe asks ([`clock`](crate::rc::clock)), as if the acknowledgement had
//! been lost: 2 ms later, by the last packet again. A standard responder answers that in any state:
//! with an acknowledgement of all if it has that packet, by taking it if that alone was lost, with
//! a NAK of the first missing packet otherwise. A probe without data would need a PSN that is
//! acknowledged already, and its answer could not be told from a late one.
//!
//! So a loss is noticed as early as without this rule: by the gap in front of the next packets, or
//! by the probe. A responder whose program ends acknowledges its packets before that
//! ([`Engine::acknowledge_unasked`](crate::Engine::acknowledge_unasked)).

use crate::peer::Peers;
use crate::qp::sq::{SendQueue, WqeIndex};
use crate::rc::Qp;
use crate::rc::requester::Requester;
use crate::tuning::ack_requests::{BYTES_MAX, ENABLED, EVERY, SOON_NS, TIMEOUT_NS_MIN};
use crate::tuning::probes::{PATIENCE_NS, ROUND_TRIPS};
use crate::types::{Seq, Time};
use crate::verbs::SendOp;

/// When packets asked, and which need not have.
#[derive(Debug, Default)]
pub(super) struct Acks {
    /// The last PSN that asked.
    last: Seq,
    /// One more than the index of the last request that left and did not ask, although nothing
    /// followed it; 0 if it goes again, or there is none.
    unasked: WqeIndex,
    /// When requests left last.
    left: Time,
    /// The PSN that was expected of the peer then.
    expected: Seq,
}

impl Acks {
    pub(super) fn start(psn: Seq) -> Self {
        Self { last: psn, ..Self::default() }
    }

    /// The last PSN that asked.
    #[inline]
    pub(super) fn last(&self) -> Seq {
        self.last
    }

    /// The packet of `psn`, which asks, left.
    #[inline]
    pub(super) fn asked(&mut self, psn: Seq) {
        self.last = psn;
    }

    /// The requests before that of index `next` left, when the PSN `expected` was expected of the
    /// peer; `never` if the last of them did not ask.
    #[inline]
    pub(super) fn left(&mut self, next: WqeIndex, never: bool, now: Time, expected: Seq) {
        self.unasked = if never { next } else { WqeIndex::default() };
        (self.left, self.expected) = (now, expected);
    }

    /// Everything from `from` on goes again, and asks.
    pub(super) fn taken_back(&mut self, from: Seq) {
        (self.last, self.unasked) = (from, WqeIndex::default());
    }

    /// Everything that left is to be asked about: the queue pair drains.
    pub(super) fn drains(&mut self) {
        self.unasked = WqeIndex::default();
    }

    /// Whether an unacknowledged packet left without asking.
    pub(super) fn has_unasked(&self, sq: &SendQueue) -> bool {
        self.unasked > sq.head
    }
}

impl Qp {
    /// Whether the message of one packet under the cursor, the last of the queue, need not ask: one
    /// that is followed asks by the next. The caller found that it makes no completion, which would
    /// ask, and that its data was copied at the post: no program that has its answer finds its data
    /// in use.
    pub(super) fn is_quiet_answer(&self, now: Time, peers: &Peers) -> bool {
        let Self { core, requester, responder, params, .. } = self;
        let Requester { acks, control, recovery, round_trip, .. } = requester;
        let wqe = core.sq.get(requester.wqe_next);
        debug_assert!(wqe.is_plain() && wqe.is_inline_and_unsignaled());
        debug_assert_eq!(requester.wqe_next + 1, core.sq.tail);
        let small =
            matches!(wqe.op, SendOp::Write { .. } | SendOp::Send { .. }) && wqe.len <= BYTES_MAX;
        let answers = responder.expected() != acks.expected && now.since(acks.left) < SOON_NS;
        let asked_lately = requester.snd_nxt - acks.last < u64::from(EVERY);
        // Its resources are given back late, and others may want them: the send queue, the peer's
        // credit, the window, the receives that the peer announced.
        let has_room =
            core.sq.is_mostly_free() && control.has_ample(EVERY, wqe, params.peer, peers);
        // An unknown path is not probed, and a long one late.
        let probed = (1..=PATIENCE_NS / ROUND_TRIPS).contains(&round_trip.srtt())
            && self.timeout().is_none_or(|timeout| timeout >= TIMEOUT_NS_MIN);
        let usual = recovery.is_open() && requester.snd_nxt == requester.snd_max;
        ENABLED
            && small
            && answers
            && asked_lately
            && has_room
            && probed
            && usual
            && requester.responses.is_empty()
    }
}

impl Requester {
    /// Whether all unacknowledged packets left without asking, and nothing was posted since: no
    /// response is to come that has the engine driven.
    #[inline]
    pub(in crate::rc) fn is_quiet(&self, sq: &SendQueue) -> bool {
        self.acks.unasked == sq.tail
            && self.wqe_next == sq.tail
            && self.ack_requests.end().is_none()
    }

    /// Whether no unacknowledged packet has asked: the peer was right to be silent.
    pub(in crate::rc) fn asked_nothing(&self) -> bool {
        self.outstanding() && self.ack_requests.end().is_none() && self.responses.is_empty()
    }
}
