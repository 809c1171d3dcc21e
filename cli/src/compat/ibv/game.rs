//! The loop of a ping-pong with a program of rdma-core's.
//!
//! Those programs have one buffer: what arrives is what they send next, on whichever queue pair. So every message of both directions is
//! the client's first one, and a side that validates can compare every byte of every message with it. The client's message is a
//! pattern with a zero at the start of each page, because that is what those programs look for themselves.

use std::time::{Duration, Instant};

use rocinante::{Context, Mr, RecvWr, SendData, SendWr, Sge, VerbsError, Wc, WcOpcode, WcStatus};

use super::{Laid, Rules};
use crate::compat::wire::Wire;
use crate::output::Failure;
use crate::pingpong::pattern;
use crate::session::diagnosis;

/// How long nothing may happen.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long a side stays when it has finished, so that the peer's last message is acknowledged though that acknowledgement was lost: the peer asks
/// again after 67 ms.
const FAREWELL: Duration = Duration::from_millis(200);
/// Polls that find nothing before others get the core for a moment.
const SPINS: u32 = 2000;
/// At the start of each there is a zero in a message that is validated.
const PAGE: usize = 4096;
/// What is in the memory where a message is to arrive. A zero would look like a part of one.
const NOTHING: u8 = 0xa5;

/// Bytes of memory that a game needs.
#[must_use]
pub fn bytes(rules: &Rules) -> usize {
    let areas = if rules.chk { 1 + rules.seats() } else { 1 };
    areas * area_len(rules)
}

/// Bytes of an area: what comes before a message, and the message.
fn area_len(rules: &Rules) -> usize {
    rules.program.head() + rules.size
}

/// Where the message of an area begins.
fn message_at(rules: &Rules, area: usize) -> usize {
    area * area_len(rules) + rules.program.head()
}

/// Where messages of a seat arrive: in what is sent next, as in those programs, unless they are compared.
#[must_use]
pub fn landing(rules: &Rules, memory: &Mr, seat: usize) -> Vec<Sge> {
    let (area, len) = (if rules.chk { 1 + seat } else { 0 }, area_len(rules));
    if len == 0 { Vec::new() } else { vec![memory.sge(area * len, len)] }
}

/// Wipes the memory where the next message of a seat arrives, if it will be compared. To be called before that can come.
pub fn clear(rules: &Rules, memory: &Mr, seat: usize) {
    if rules.chk {
        memory.write(message_at(rules, 1 + seat), &vec![NOTHING; rules.size]);
    }
}

/// The message that is sent.
fn sges(rules: &Rules, memory: &Mr) -> Vec<Sge> {
    if rules.size == 0 { Vec::new() } else { vec![memory.sge(message_at(rules, 0), rules.size)] }
}

/// The work request's name for a receive of a seat.
#[must_use]
pub const fn recv_id(seat: usize) -> u64 {
    (seat as u64) << 1 | 1
}

/// That for a send of a queue pair.
const fn send_id(index: usize) -> u64 {
    (index as u64) << 1
}

/// What is open on a queue pair.
#[derive(Debug, Clone, Copy)]
struct Turn {
    /// The message sent last is not on the other side yet.
    sending: bool,
    /// The peer's message has not come.
    waiting: bool,
}

/// A game that can begin.
#[derive(Debug)]
pub struct Game<'a> {
    ctx: &'a Context,
    rules: &'a Rules,
    table: Laid,
    wire: Wire,
    turns: Vec<Turn>,
    /// Receives that are posted, by seat.
    posted: Vec<u32>,
    /// What every message is, once that is known.
    message: Option<Vec<u8>>,
}

impl<'a> Game<'a> {
    /// Makes it. Receives are posted already, and the peer's first message may be there.
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

    /// Plays it to its end: how long that took.
    ///
    /// # Errors
    /// A request fails, a message is not what it should be, the peer stays silent.
    pub fn play(mut self) -> Result<Duration, Failure> {
        let iters = self.rules.iters;
        let (mut sent, mut received) = (0, 0);
        if let Some(cq) = self.table.channel.is_some().then_some(&self.table.cq) {
            cq.req_notify(false)?;
        }
        let start = Instant::now();
        if self.rules.begins {
            (0..self.turns.len()).try_for_each(|index| self.send(index))?;
        }
        while sent < iters || received < iters {
            let wc = self.next()?;
            if wc.status != WcStatus::Success {
                let why = diagnosis::of_status(self.ctx, self.table.peer, wc.status);
                return Err(self.wire.failed(why));
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
            if !sending && !waiting && sent < iters {
                self.send(index)?;
            }
        }
        let time = start.elapsed();
        self.stay();
        Ok(time)
    }

    fn send(&mut self, index: usize) -> Result<(), Failure> {
        let sges = sges(self.rules, &self.table.memory);
        let wr = SendWr {
            wr_id: send_id(index),
            op: self.table.send_op(index),
            data: SendData::Sges(&sges),
            signaled: true,
            solicited: false,
            fence: false,
        };
        let posted = self.table.qps[index].post_send(&[wr]).map_err(VerbsError::from);
        posted.map_err(|error| self.wire.failed(error))?;
        self.turns[index].sending = true;
        self.turns[index].waiting = true;
        Ok(())
    }

    /// The queue pair that a message came to.
    fn of(&self, wc: &Wc) -> Result<usize, Failure> {
        let index = self.table.qp_of(wc.qpn);
        index.ok_or_else(|| {
            self.wire.failed("a message came to a queue pair that is not of this game")
        })
    }

    /// Posts receives when there is but one left.
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
    fn next(&self) -> Result<Wc, Failure> {
        let deadline = Instant::now() + PATIENCE;
        let silent = || {
            let why = diagnosis::of_silence(self.ctx, self.table.peer, PATIENCE);
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
                None => std::thread::yield_now(),
                Some(channel) => {
                    self.table.cq.req_notify(false)?;
                    // What came before it was armed makes no event.
                    if let Some(wc) = self.table.cq.poll_one()? {
                        return Ok(wc);
                    }
                    let left = deadline.saturating_duration_since(Instant::now());
                    match channel.wait_event(Some(left)) {
                        Err(VerbsError::TimedOut) => return Err(silent()),
                        other => drop(other?),
                    }
                }
            }
        }
    }

    /// Answers for a while.
    fn stay(&self) {
        let end = Instant::now() + FAREWELL;
        while Instant::now() < end {
            self.ctx.progress();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
