//! Runs: messages of one packet that leave one after the other.
//!
//! What [`Requester::plan`] would find for each of them is looked at once for all of them: as long
//! as nothing is special each may leave, and each asks, as its message ends with it and there is
//! room for the answers; but for one that is [quiet](crate::rc::requester::ack_policy). What is special, and why no
//! more may leave, is for the planner to say.

use crate::mem::Memory;
use crate::peer::{Cost, Peers};
use crate::qp::opcode::data_opcode;
use crate::qp::outbound::{RequestPacket, Sent};
use crate::qp::sq::SendQueue;
use crate::rc::Qp;
use crate::rc::requester::ack_requests::ACK;
use crate::rc::requester::batching::Awaited;
use crate::rc::requester::plan::request_header;
use crate::rc::requester::{Limits, Requester};
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::types::Time;

impl Qp {
    /// Sends what is next as long as nothing is special about it, and counts down `quantum`.
    #[inline(never)]
    pub(in crate::rc) fn transmit_run<H: Memory>(
        &mut self,
        now: Time,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) {
        let (sq, cur) = (&self.core.sq, self.requester.wqe_next);
        if cur == sq.tail || !sq.get(cur).is_plain() {
            return;
        }
        let quiet = self.may_be_quiet(now, &mut shared.peers);
        let Self { core, requester, responder, limits, .. } = self;
        let sq = &core.sq;
        let queued = (sq.tail - requester.wqe_next).min(*quantum as u64);
        let Some(room) = requester.room_for_run(queued, limits, &mut shared.peers) else { return };
        let Some(to) = core.target() else { return };
        let asked = requester.ack_requests.end().is_some();
        let mut run = Cost::default();
        while run.datagrams < room.datagrams {
            let index = requester.wqe_next + u64::from(run.datagrams);
            let wqe = sq.get(index);
            let bytes = run.bytes + u64::from(wqe.cost());
            if !wqe.is_plain() || bytes > room.bytes || requester.credits.exceeded(wqe) {
                break;
            }
            let size = wqe.len + request_header(&wqe.op, true);
            if asked || run.datagrams > 0 {
                match requester.awaits(sq, wqe.first, size, true, run.datagrams) {
                    Awaited::Nothing => {}
                    Awaited::Messages | Awaited::Window => break,
                    Awaited::Room(packets) => {
                        let all = run.bytes + u64::from(packets) * u64::from(wqe.cost());
                        if run.datagrams + packets > room.datagrams || all > room.bytes {
                            break;
                        }
                    }
                }
            }
            let piece = RequestPacket {
                index,
                psn: wqe.first,
                opcode: data_opcode(&wqe.op, true, true),
                offset: 0,
                len: wqe.len,
                message: wqe.len,
                ack_req: !quiet,
                solicited: wqe.is_solicited(),
            };
            let counters = &mut shared.counters;
            if core.send_packet_of(wqe, &piece, &to, counters, host, sink) != Sent::Yes {
                break;
            }
            requester.batch.sent(size);
            run = Cost { bytes, datagrams: run.datagrams + 1 };
        }
        if run.datagrams > 0 {
            *quantum -= run.datagrams as usize;
            requester.sent_run(now, run, quiet, limits, &mut shared.peers);
            requester.quiet.sent(requester.wqe_next, quiet, now, responder.expected());
        }
    }
}

impl Requester {
    /// What a run of so many requests at most may be charged with; `None` if anything is special.
    #[inline]
    fn room_for_run(&self, queued: u64, limits: &Limits, peers: &mut Peers) -> Option<Cost> {
        let usual = self.snd_nxt == self.snd_max
            && self.wqe_next == self.wqe_max
            && self.begins
            && self.rnr_until.is_none()
            && !self.force_ack_req
            && !self.silent
            && !self.ack_requests.is_open()
            && !self.is_repairing()
            && self.window.behind_the_missing() == u64::MAX;
        if !usual {
            return None;
        }
        let room = peers.get(limits.peer).room_for(limits.slot);
        let window = self.window.packets().saturating_sub(self.in_flight.datagrams);
        // Each of them takes room for its answer, and asks if there is still room for one more.
        let spared = peers.spared();
        #[allow(clippy::cast_possible_truncation)]
        let answers = (spared.bytes / ACK.bytes).min(u64::from(spared.datagrams)) as u32;
        let datagrams = room.datagrams.min(window).min(answers.saturating_sub(1));
        let datagrams = datagrams.min(u32::try_from(queued).unwrap_or(u32::MAX));
        (datagrams > 0).then_some(Cost { bytes: room.bytes, datagrams })
    }

    /// What the packet of `psn`, of so many `bytes`, should wait for; `begins` if it is a message's
    /// first. Before it left `run` more packets than were told.
    #[inline]
    pub(in crate::rc) fn awaits(
        &self,
        sq: &SendQueue,
        psn: u64,
        bytes: u32,
        begins: bool,
        run: u32,
    ) -> Awaited {
        let (queued, under_way) = (sq.next_psn - psn, self.in_flight.datagrams + run);
        match self.batch.awaited(bytes, begins, queued, under_way, self.window.packets()) {
            // After a loss the window is what keeps the path full, and every packet of it counts.
            Awaited::Window | Awaited::Room(_)
                if !self.window.is_whole() || self.is_repairing() =>
            {
                Awaited::Nothing
            }
            awaited => awaited,
        }
    }

    /// So many packets, all of which ask or one that is `quiet`, left.
    #[inline]
    fn sent_run(&mut self, now: Time, run: Cost, quiet: bool, limits: &Limits, peers: &mut Peers) {
        let packets = u64::from(run.datagrams);
        peers.get(limits.peer).charge(run);
        self.in_flight.add(run);
        // What does not ask is not answered in the time that the path takes.
        self.round_trip.sent(self.snd_nxt, now, quiet);
        if !quiet {
            let each = peers.expect_each(ACK, run.datagrams);
            self.ack_requests.asked_all(self.snd_nxt, run.datagrams, each);
            self.last_ack_req = self.snd_nxt + packets - 1;
        }
        self.snd_nxt += packets;
        self.snd_max = self.snd_nxt;
        self.wqe_next += packets;
        self.wqe_max = self.wqe_next;
        (self.overdraft, self.half_way) = (false, false);
    }
}
