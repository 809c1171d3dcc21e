//! Whether the peers of idle connections are still there.
//!
//! A peer that ends without a word while nothing is in flight would never be noticed. So, where the
//! peer answers such questions (`Announced::answers`), the manager looks at a connection now and
//! then: whether its queue pair has received something since. After a silence of the connection's
//! period it asks the peer whether it has the connection. The peer's "yes" counts like a packet,
//! and so does its own question about the connection. A "no" ends the connection; so do three
//! questions without an answer.
//!
//! - A look at a queue pair tells that something came since the one before, not when. So a silence
//!   counts from the look before the last packet.
//! - Deadlines are rounded up, so one deadline of the device serves all its idle connections, and
//!   one datagram asks for up to 26 connections to one device.
//! - The side that accepted asks a little earlier than the other, so of two that would ask, one
//!   does.
//! - An answer is believed if it has the transaction id of the question, which is drawn from 64
//!   bits, and both communication ids. A notice is not believed: it only has the peer be asked now.

use core::net::IpAddr;

use super::conn::{Conn, State};
use super::{CmEvent, ConnId, ConnectionManager, Ended, Transmit};
use crate::tuning::cm::{
    ASKS, ASKS_GRID, DAMAGED, DAMAGED_NS, LOOKS_GRID, NOTICE_NS, NOTICES, PATIENCE, PERIOD_MAX,
    PERIOD_MIN,
};
use crate::types::{Qpn, Time};
use crate::wire::cm::CommId;
use crate::wire::{AliveMad, Pairs};

/// The liveness of a peer.
#[derive(Debug, Default)]
pub(super) struct Alive {
    /// The silence after which the peer is asked, nanoseconds; 0 for never.
    pub(super) period: u64,
    /// Packets that the queue pair had received at the last look.
    packets: u64,
    /// The last sign of the peer is no older.
    since: Time,
    /// The last look; 0 before the first one.
    looked: Time,
    /// The transaction id of the questions that wait for an answer; 0 for none.
    tid: u64,
    /// Questions since the last sign of the peer.
    asks: u8,
}

impl Alive {
    pub(super) fn new(period: u64) -> Self {
        let period = if period == 0 { 0 } else { period.clamp(PERIOD_MIN, PERIOD_MAX) };
        Self { period, ..Self::default() }
    }

    fn heard(&mut self, now: Time) {
        (self.since, self.looked, self.tid, self.asks) = (now, now, 0, 0);
    }

    /// The queue pair has received something since the last look.
    fn received(&mut self, now: Time, packets: u64) {
        self.packets = packets;
        (self.since, self.looked, self.tid, self.asks) = (self.looked, now, 0, 0);
    }

    /// When to look again at a connection in use.
    fn look_at(&self, now: Time) -> Time {
        let step = self.period / LOOKS_GRID;
        on_grid(now.after(step), step)
    }
}

/// The next multiple of `step` that is not before `at`.
fn on_grid(at: Time, step: u64) -> Time {
    Time(at.0.checked_next_multiple_of(step).unwrap_or(u64::MAX))
}

impl Conn {
    fn is_watched(&self) -> bool {
        self.state == State::Established && self.answers && self.alive.period > 0
    }

    /// When the peer is asked if it stays silent.
    fn ask_at(&self) -> Time {
        let Alive { period, since, .. } = self.alive;
        let step = period / ASKS_GRID;
        let later = if self.active { period / LOOKS_GRID } else { 0 };
        on_grid(since.after(period - step), step).after(later)
    }
}

/// The datagram in which a connection is asked about: the addresses, the slot of the peer's device,
/// and the transaction id, 0 for a new one. A question that is repeated keeps its id: a late answer
/// is one, too.
pub(super) type Letter = ((IpAddr, IpAddr), u8, u64);

/// The rate limits of packets for queue pairs that do not exist.
#[derive(Debug)]
pub(super) struct Notices {
    /// Notices that may leave.
    notices: Rate,
    /// Packets that may turn out to be damaged. They take no notice away from whole ones.
    damaged: Rate,
}

impl Default for Notices {
    fn default() -> Self {
        Self { notices: Rate::new(NOTICES, NOTICE_NS), damaged: Rate::new(DAMAGED, DAMAGED_NS) }
    }
}

/// A number of events that grows with time, up to a limit.
#[derive(Debug)]
struct Rate {
    left: u32,
    /// When the number grew last.
    since: Time,
    most: u32,
    /// Nanoseconds until it grows by one.
    each: u64,
}

impl Rate {
    const fn new(most: u32, each: u64) -> Self {
        Self { left: most, since: Time(0), most, each }
    }

    fn has_one(&mut self, now: Time) -> bool {
        let grown = now.since(self.since) / self.each;
        let more = u32::try_from(grown).unwrap_or(u32::MAX);
        self.left = self.most.min(self.left.saturating_add(more));
        // The rest of a unit counts for the next one, unless the number is at its limit.
        let is_full = self.left == self.most;
        self.since = if is_full { now } else { self.since.after(grown * self.each) };
        self.left > 0
    }

    const fn take(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

impl ConnectionManager {
    /// A connection to look at: pass the number of packets that its queue pair has received to
    /// [`looked`](Self::looked). Call after [`handle_timeout`](Self::handle_timeout).
    pub fn poll_look(&mut self) -> Option<(ConnId, Qpn)> {
        let id = self.looks.pop_front()?;
        // It may have ended.
        let qpn = self.conns.get(&id).map_or(Qpn::default(), |conn| conn.qpn);
        Some((ConnId(id), qpn))
    }

    /// The queue pair of a connection has received this many packets in all; `None` if it is gone.
    /// If that is news, the peer is alive. If it has been silent for too long, it is asked.
    pub fn looked(&mut self, now: Time, conn: ConnId, packets: Option<u64>) {
        let Some(it) = self.conns.get_mut(&conn.0).filter(|it| it.is_watched()) else { return };
        let is_first = it.alive.looked == Time(0);
        if is_first {
            it.alive.heard(now);
        }
        let news = packets.filter(|packets| *packets != it.alive.packets);
        if let Some(packets) = news.or(packets.filter(|_| is_first)) {
            it.alive.received(now, packets);
            let due = it.alive.look_at(now);
            return self.set_deadline(conn.0, Some(due));
        }
        it.alive.looked = now;
        let ask_at = it.ask_at();
        if it.alive.asks == 0 && now < ask_at {
            return self.set_deadline(conn.0, Some(ask_at));
        }
        if it.alive.asks == ASKS {
            self.counters.silent_peers += 1;
            return self.end_gone(now, conn.0);
        }
        self.ask_alive(now, conn.0);
    }

    /// From now on the peer may die unnoticed.
    pub(super) fn watch(&mut self, id: CommId) {
        let is_watched = self.conns.get(&id).is_some_and(Conn::is_watched);
        // The first look is due: it has the time.
        self.set_deadline(id, is_watched.then_some(Time(0)));
    }

    /// Asks the peer, and gives it its time.
    fn ask_alive(&mut self, now: Time, id: CommId) {
        let Some(it) = self.conns.get_mut(&id) else { return };
        it.alive.asks += 1;
        let letter = (it.addresses, crate::ids::slot_of(it.remote.0), it.alive.tid);
        self.letters.entry(letter).or_default().push(id);
        self.set_deadline(id, Some(now.after(PATIENCE)));
    }

    /// The next datagram with questions.
    pub(super) fn next_question(&mut self) -> Option<Transmit> {
        loop {
            let mut letter = self.letters.first_entry()?;
            let (addresses, _, tid) = *letter.key();
            let ids = letter.get_mut();
            let now: Vec<CommId> = ids.drain(..ids.len().min(Pairs::MAX)).collect();
            if ids.is_empty() {
                letter.remove();
            }
            let tid = if tid == 0 { self.ids.draw().max(1) } else { tid };
            let mut pairs = Vec::with_capacity(now.len());
            let mut via = None;
            for id in now {
                // Some connections may have ended, and some peers may have shown life.
                let waits = |it: &&mut Conn| it.is_watched() && it.alive.asks > 0;
                let Some(it) = self.conns.get_mut(&id).filter(waits) else { continue };
                it.alive.tid = tid;
                via = Some(it.qpn);
                pairs.push((it.local, it.remote));
            }
            if pairs.is_empty() {
                continue;
            }
            self.counters.sent += 1;
            self.counters.asked_alive += pairs.len() as u64;
            let (local, remote) = addresses;
            let mad = AliveMad::Question(Pairs::new(pairs)).emit(tid);
            return Some(Transmit { local, remote, via, mad });
        }
    }

    pub(super) fn on_alive(&mut self, now: Time, way: (IpAddr, IpAddr), tid: u64, mad: AliveMad) {
        match mad {
            AliveMad::Question(pairs) => self.on_question(now, way, tid, pairs),
            AliveMad::Answer(pairs, known) => {
                for (at, (local, remote)) in pairs.iter().enumerate() {
                    self.on_answer(now, way, tid, (local, remote), known >> at & 1 == 1);
                }
            }
            AliveMad::Notice(qpn) => self.on_notice(now, way, qpn),
            AliveMad::Unknown => self.counters.malformed += 1,
        }
    }

    /// Answers from the message alone. A peer that asks about a connection is alive.
    fn on_question(&mut self, now: Time, way: (IpAddr, IpAddr), tid: u64, pairs: Pairs) {
        let (mut known, mut via) = (0, None);
        for (at, (remote, local)) in pairs.iter().enumerate() {
            let conn = self.conn_of(way, local).filter(|it| it.remote == remote);
            let Some(it) = conn else { continue };
            match it.state {
                State::ReqSent | State::ReqReceived | State::DreqSent | State::TimeWait => continue,
                State::RepSent | State::RepReceived | State::Established => {}
            }
            known |= 1 << at;
            via = Some(it.qpn);
            self.peer_lives(now, local);
        }
        let ((src, dst), mad) = (way, AliveMad::Answer(pairs, known).emit(tid));
        self.send_via(via, (dst, src), mad);
    }

    fn on_answer(
        &mut self,
        now: Time,
        way: (IpAddr, IpAddr),
        tid: u64,
        (local, remote): (CommId, CommId),
        exists: bool,
    ) {
        let asked = self.conn_of(way, local).is_some_and(|it| {
            it.remote == remote && it.is_watched() && it.alive.tid == tid && tid != 0
        });
        if !asked {
            self.counters.stray += 1;
        } else if exists {
            self.peer_lives(now, local);
        } else {
            self.counters.denied += 1;
            self.end_gone(now, local);
        }
    }

    /// A packet of ours came to the peer for a queue pair that it does not have, or the notice is
    /// forged: asks at once, unless there was a sign of the peer just now.
    fn on_notice(&mut self, now: Time, (src, dst): (IpAddr, IpAddr), qpn: Qpn) {
        let known = self.by_qpn.get(&(src, qpn)).copied();
        let conn = known.and_then(|id| self.conn_of((src, dst), id));
        let asks = conn.filter(|it| {
            let was_heard = now.since(it.alive.since) < PATIENCE;
            it.is_watched() && it.alive.asks == 0 && !was_heard
        });
        match asks.map(|it| it.local) {
            Some(id) => self.ask_alive(now, id),
            None => self.counters.stray += 1,
        }
    }

    /// Notifies a Rocinante that it sent a packet to a queue pair that does not exist. Ask
    /// [`may_notify`](Self::may_notify) first.
    pub(crate) fn notify(&mut self, way: (IpAddr, IpAddr), qpn: Qpn) {
        self.counters.notices += 1;
        let tid = self.ids.draw();
        self.send(way, AliveMad::Notice(qpn).emit(tid));
    }

    /// Whether a packet for a queue pair that does not exist may be checked, and answered if it is
    /// whole. Pass the result to [`checked`](Self::checked).
    pub(crate) fn may_notify(&mut self, now: Time) -> bool {
        self.notices.notices.has_one(now) && self.notices.damaged.has_one(now)
    }

    /// The packet was whole or damaged: it counts for the rate limit of its kind.
    pub(crate) const fn checked(&mut self, is_whole: bool) {
        let Notices { notices, damaged } = &mut self.notices;
        if is_whole { notices.take() } else { damaged.take() }
    }

    fn peer_lives(&mut self, now: Time, id: CommId) {
        let Some(it) = self.conns.get_mut(&id).filter(|it| it.is_watched()) else { return };
        it.alive.heard(now);
        let due = it.ask_at();
        self.set_deadline(id, Some(due));
    }

    /// The peer has gone without a word.
    fn end_gone(&mut self, now: Time, id: CommId) {
        let ended = CmEvent::Disconnected { conn: ConnId(id), ended: Ended::Gone };
        self.report_end(id, ended);
        self.enter_timewait(now, id);
    }
}
