//! Expired deadlines: retransmission, MRAs and giving up.

use super::conn::State;
use super::tables::Timer;
use super::{CmEvent, ConnectionManager, Ended};
use crate::tuning::cm::A_WHILE;
use crate::types::Time;
use crate::wire::cm::{CmMessage, CommId, Mra, RejReason, Subject};

impl ConnectionManager {
    /// Handles the timers that are due at `now`. Call when [`poll_timeout`](Self::poll_timeout) has
    /// come.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some((due, timer)) = self.timers.first().copied().filter(|(due, _)| *due <= now) {
            self.timers.remove(&(due, timer));
            match timer {
                Timer::Conn(id) => self.conn_timeout(now, id),
                Timer::Query(id) => self.query_timeout(now, id),
                Timer::Ask(id) => self.ask_timeout(id),
                Timer::Early(id) => self.early_timeout(now, id),
            }
        }
    }

    fn conn_timeout(&mut self, now: Time, id: CommId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.deadline = None;
        match conn.state {
            State::ReqSent | State::RepSent | State::DreqSent if conn.retries > 0 => {
                conn.retries -= 1;
                // The peer may send another MRA for the repetition.
                conn.mra = false;
                self.counters.repeated += 1;
                self.send_stored(id);
                self.set_deadline(id, Some(now.after(self.interval())));
            }
            State::ReqReceived | State::RepReceived if !conn.mra => self.send_mra(now, id),
            State::TimeWait => self.remove(id),
            State::Established => self.looks.push_back(id),
            state => self.give_up(now, id, state),
        }
    }

    fn give_up(&mut self, now: Time, id: CommId, state: State) {
        self.counters.timeouts += 1;
        let conn = super::ConnId(id);
        let timed_out = CmEvent::TimedOut { conn };
        match state {
            State::ReqSent | State::ReqReceived | State::RepReceived => {
                let about_rep = state == State::RepReceived;
                let subject = if about_rep { Subject::Rep } else { Subject::Req };
                self.reject_conn(id, subject, RejReason::TIMEOUT, &[]);
                self.report_end(id, timed_out);
                self.remove(id);
            }
            // The peer may have begun to send.
            State::RepSent => {
                self.reject_conn(id, Subject::Rep, RejReason::TIMEOUT, &[]);
                self.report_end(id, timed_out);
                self.enter_timewait(now, id);
            }
            State::DreqSent => {
                self.report_end(id, CmEvent::Disconnected { conn, ended: Ended::Unanswered });
                self.enter_timewait(now, id);
            }
            State::Established | State::TimeWait => {}
        }
    }

    /// The peer repeated its message, so the MRA did not reach it: sends the MRA again. If none was
    /// sent yet, an answer is on its way, or soon will be.
    pub(super) fn repeat_mra(&mut self, now: Time, id: CommId) {
        if self.conns.get(&id).is_some_and(|conn| conn.mra) {
            self.send_mra(now, id);
        }
    }

    /// Asks the peer for patience (MRA).
    ///
    /// A peer that sent a REQ repeats it and gets another answer, so it may wait for as long as the
    /// program may take. A peer that sent a REP learns only from the RTU that the wait is over, and
    /// the RTU may be lost. So it is asked for less time, and repeatedly.
    fn send_mra(&mut self, now: Time, id: CommId) {
        let (config, patience) = (self.config, self.patience());
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (subject, service_timeout) = match conn.state {
            State::ReqReceived => (Subject::Req, config.service_timeout),
            State::RepReceived => {
                (Subject::Rep, config.service_timeout.min(config.response_timeout + A_WHILE))
            }
            _ => return,
        };
        let (local, remote) = (conn.local, conn.remote);
        let mra = Mra { local, remote, subject, service_timeout, private: &[] };
        let (addresses, mad) = (conn.addresses, CmMessage::Mra(mra).emit(conn.tid));
        let first = !std::mem::replace(&mut conn.mra, true);
        self.send(addresses, mad);
        // A repeated MRA restarts the peer's wait. The program's deadline stays.
        if first {
            self.set_deadline(id, Some(now.after(patience)));
        }
    }
}
