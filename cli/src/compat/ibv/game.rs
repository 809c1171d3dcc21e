//! The loop of a ping-pong with one of rdma-core's programs.
//!
//! Those programs have one buffer: each sends the bytes that it received last, on any queue pair.
//! So every message of both directions equals the client's first one, and a side that validates can
//! compare every byte with it. The client's message is a pattern with a zero at the start of each
//! page, because those programs check for that.

use std::time::{Duration, Instant};

use rocinante::verbs::{SendData, Sge, WcOpcode};
use rocinante::{Context, Mr, RecvWr, SendWr, VerbsError, Wc, WcStatus};

use super::{Laid, Rules};
use crate::compat::wire::Wire;
use crate::ending;
use crate::output::Failure;
use crate::pingpong::game::Played;
use crate::pingpong::pattern;
use crate::session::diagnosis::{self, Unanswered};

/// Longest time without a completion.
const PATIENCE: Duration = Duration::from_secs(15);
/// Time that a side stays after its last message. If its acknowledgement of the peer's last message
/// was lost, the peer asks again after 67 ms.
const FAREWELL: Duration = Duration::from_millis(200);
/// Empty polls before this thread yields its core.
const SPINS: u32 = 2000;
/// A validated message has a zero at each multiple of this.
const PAGE: usize = 4096;
/// Fills the memory where a message will arrive. A zero would look like a part of a message.
const NOTHING: u8 = 0xa5;

/// Bytes of memory that a game needs.
#[must_use]
pub fn bytes(rules: &Rules) -> usize {
    let areas = if rules.chk { 1 + rules.seats() } else { 1 };
    areas * area_len(rules)
}

/// Bytes of an area: the part before the message, and the message.
fn area_len(rules: &Rules) -> usize {
    rules.program.head() + rules.size
}

/// Offset of the message in an area.
fn message_at(rules: &Rules, area: usize) -> usize {
    area * area_len(rules) + rules.program.head()
}

/// The memory where a seat's messages arrive. As in those programs, this is the memory of the next
/// send, unless messages are compared.
#[must_use]
pub fn landing(rules: &Rules, memory: &Mr, seat: usize) -> Vec<Sge> {
    let (area, len) = (if rules.chk { 1 + seat } else { 0 }, area_len(rules));
    if len == 0 { Vec::new() } else { vec![memory.sge(area * len, len)] }
}

/// Wipes the memory where the next message of a seat arrives, if it will be compared. Call it
/// before that message can arrive.
pub fn clear(rules: &Rules, memory: &Mr, seat: usize) {
    if rules.chk {
        memory.write(message_at(rules, 1 + seat), &vec![NOTHING; rules.size]);
    }
}

/// The memory of the message to send.
fn sges(rules: &Rules, memory: &Mr) -> Vec<Sge> {
    if rules.size == 0 { Vec::new() } else { vec![memory.sge(message_at(rules, 0), rules.size)] }
}

/// The work request ID of a seat's receives.
#[must_use]
pub const fn recv_id(seat: usize) -> u64 {
    (seat as u64) << 1 | 1
}

/// The work request ID of a queue pair's sends.
const fn send_id(index: usize) -> u64 {
    (index as u64) << 1
}

/// The open operations of a queue pair.
#[derive(Debug, Clone, Copy)]
struct Turn {
    /// The last send has not completed.
    sending: bool,
    /// The peer's message has not arrived.
    waiting: bool,
}

/// A game that is ready to begin.
#[derive(Debug)]
pub struct IbvGame<'a> {
    ctx: &'a Context,
    rules: &'a Rules,
    table: Laid,
    wire: Wire,
    turns: Vec<Turn>,
    /// Number of posted receives, by seat.
    posted: Vec<u32>,
    /// The contents of every message, once known.
    message: Option<Vec<u8>>,
}

impl<'a> IbvGame<'a> {
    /// Creates the game. Receives are posted already, and the peer's first message may have
    /// arrived.
    #[must_use]
    pub fn new(ctx: &'a Context, rules: &'a Rules, table: Laid, wire: Wire) -> Self {
        let mut message = vec![0; rules.size];
        pattern::fill(&mut message, rules.size as u64);
        message.iter_mut().step_by(PAGE).for_each(|first| *first = 0);
        let turns = vec![Turn { sending: false, waiting: true }; table.qps.len()];
        let posted = vec![rules.each(); rules.seats()];
        if rules.begins {
            table.memory.write(message_at(rules, 0), &message);
        }
        let message = rules.begins.then_some(message);
        Self { ctx, rules, table, wire, turns, posted, message }
    }

    /// Plays the game to its end. Keeps `played` true to what has been done.
    ///
    /// # Errors
    /// A request fails, a message has wrong contents, or the peer stays silent.
    pub fn play(mut self, played: &mut Played) -> Result<(), Failure> {
        let _attentive = ending::attentive();
        let iters = self.rules.iters;
        let (mut sent, mut received) = (0, 0);
        let (size, mtu) = (self.rules.size, Some(self.rules.mtu));
        if let Some(cq) = self.table.channel.is_some().then_some(&self.table.cq) {
            cq.req_notify(false)?;
        }
        let start = Instant::now();
        if self.rules.begins {
            (0..self.turns.len()).try_for_each(|index| self.send(index))?;
        }
        while sent < iters || received < iters {
            ending::check_signal()?;
            let unanswered = diagnosis::unanswered(size, mtu, sent + received > 0);
            let wc = self.next(unanswered)?;
            if wc.status != WcStatus::Success {
                let why = diagnosis::of_status(self.ctx, self.table.peer, wc.status, unanswered);
                return Err(why.told(|text| self.wire.failed(text).to_string()));
            }
            if sent + received == 0 {
                self.wire.enter("ping-pong");
            }
            let place = (wc.wr_id >> 1) as usize;
            let index = if wc.opcode == WcOpcode::Recv { self.of(&wc)? } else { place };
            if wc.opcode == WcOpcode::Recv {
                self.check(place, received, &wc)?;
                received += 1;
                self.turns[index].waiting = false;
                self.refill(place)?;
            } else {
                sent += 1;
                self.turns[index].sending = false;
            }
            let Turn { sending, waiting, .. } = self.turns[index];
            *played = Played { iters: sent.min(received), time: start.elapsed() };
            if !sending && !waiting && sent < iters {
                self.send(index)?;
            }
        }
        self.stay();
        Ok(())
    }

    fn send(&mut self, index: usize) -> Result<(), Failure> {
        let sges = sges(self.rules, &self.table.memory);
        let wr =
            SendWr::new(self.table.send_op(index), SendData::Sges(&sges)).wr_id(send_id(index));
        let posted = self.table.qps[index].post_send(&[wr]).map_err(VerbsError::from);
        posted.map_err(|error| self.wire.failed(error))?;
        self.turns[index].sending = true;
        self.turns[index].waiting = true;
        Ok(())
    }

    /// The index of the queue pair that received a message.
    fn of(&self, wc: &Wc) -> Result<usize, Failure> {
        let index = self.table.qp_of(wc.qpn);
        index.ok_or_else(|| {
            self.wire.failed("a message came to a queue pair that is not of this game")
        })
    }

    /// Posts receives when only one is left.
    fn refill(&mut self, seat: usize) -> Result<(), Failure> {
        let (posted, each) = (&mut self.posted[seat], self.rules.each());
        *posted -= 1;
        if *posted > 1 {
            return Ok(());
        }
        let sges = landing(self.rules, &self.table.memory, seat);
        let wr = RecvWr { wr_id: recv_id(seat), sges: &sges };
        for _ in *posted..each {
            let posted = self.table.post_recv(&wr, seat);
            posted.map_err(|error| self.wire.failed(error))?;
        }
        *posted = each;
        Ok(())
    }

    fn check(&mut self, seat: usize, number: u64, wc: &Wc) -> Result<(), Failure> {
        let size = self.rules.size;
        let came = (wc.byte_len as usize).saturating_sub(self.rules.program.head());
        if came != size {
            return Err(self.wire.failed(format_args!(
                "message {number} has {came} bytes instead of {size}: give both sides the same size (-s)"
            )));
        }
        if !self.rules.chk {
            return Ok(());
        }
        let came = self.table.memory.to_vec(message_at(self.rules, 1 + seat), size);
        match &self.message {
            None => {
                if let Some(page) = came.iter().step_by(PAGE).position(|first| *first != 0) {
                    return Err(self.wire.failed(format_args!(
                        "invalid data in page {page}: it does not begin with a zero: was the peer started with -c, too?"
                    )));
                }
                self.table.memory.write(message_at(self.rules, 0), &came);
                self.message = Some(came);
            }
            Some(message) => {
                let difference = came.iter().zip(message).position(|(is, should)| is != should);
                if let Some(at) = difference {
                    return Err(self.wire.failed(format_args!(
                        "invalid data: byte {at} of message {number} is not what this side sent before"
                    )));
                }
            }
        }
        clear(self.rules, &self.table.memory, seat);
        Ok(())
    }

    /// The next completion.
    fn next(&self, unanswered: Unanswered) -> Result<Wc, Failure> {
        let deadline = Instant::now() + PATIENCE;
        let silent = || {
            let why = diagnosis::of_silence(self.ctx, self.table.peer, PATIENCE, unanswered);
            self.wire.failed(format_args!("{why}; or was it given another -n or -q?"))
        };
        let mut spins = 0u32;
        loop {
            if let Some(wc) = self.table.cq.poll_one()? {
                return Ok(wc);
            }
            spins = spins.saturating_add(1);
            match &self.table.channel {
                _ if spins < SPINS && self.table.channel.is_none() => std::hint::spin_loop(),
                None if Instant::now() >= deadline => return Err(silent()),
                None => {
                    ending::check_signal()?;
                    std::thread::yield_now();
                }
                Some(channel) => {
                    self.table.cq.req_notify(false)?;
                    // Completions that came before it was armed make no event.
                    if let Some(wc) = self.table.cq.poll_one()? {
                        return Ok(wc);
                    }
                    ending::check_signal()?;
                    let left = deadline.saturating_duration_since(Instant::now());
                    match channel.wait_event(Some(left.min(ending::LOOK))) {
                        Err(VerbsError::TimedOut) if left > ending::LOOK => {}
                        Err(VerbsError::TimedOut) => return Err(silent()),
                        other => drop(other?),
                    }
                }
            }
        }
    }

    /// Keeps answering the peer for a while.
    fn stay(&self) {
        let end = Instant::now() + FAREWELL;
        while Instant::now() < end {
            self.ctx.progress();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
