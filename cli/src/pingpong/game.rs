//! The loop of a ping-pong.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::verbs::{SendData, Sge, WcOpcode};
use rocinante::{CompChannel, Context, Cq, Mr, Qp, RecvWr, SendWr, VerbsError, Wc, WcStatus};

use super::pattern;
use crate::output::{Failure, Kind, Result};
use crate::session::diagnosis::{self, Unanswered};

/// A connected queue pair and the objects that it uses.
pub struct PingPong<'a> {
    /// The device.
    pub ctx: &'a Context,
    /// The connected queue pair.
    pub qp: &'a Qp,
    /// Its completion queue.
    pub cq: Cq,
    /// The channel of completion events, if this side sleeps for them.
    pub channel: Option<CompChannel>,
    /// First half: the message to send. Second half: the received message.
    pub memory: Mr,
    /// Bytes of a message.
    pub size: usize,
    /// The peer's address.
    pub peer: IpAddr,
    /// Whether messages are validated: `Some` if so, with `true` on the side that begins.
    pub chk: Option<bool>,
}

/// The exchanges so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Played {
    /// Exchanges.
    pub iters: u64,
    /// Their time.
    pub time: Duration,
}

/// Longest time without a completion.
const PATIENCE: Duration = Duration::from_secs(15);
/// Empty polls before this thread yields its core.
const SPINS: u32 = 2000;

impl PingPong<'_> {
    /// Posts `count` receives, all with the same memory. Each message is checked before the next
    /// one can arrive. Error: the receive queue is full.
    pub fn post_receives(&self, count: u32) -> Result {
        let sge = self.sge(self.memory.len() / 2);
        let wr = RecvWr { wr_id: 0, sges: &sge };
        (0..count)
            .try_for_each(|_| self.qp.post_recv(&[wr]))
            .map_err(|e| VerbsError::from(e).into())
    }

    /// Sends and receives `iters` messages. Sends each after the previous one was answered. Calls
    /// `begun` after the first success, and counts each exchange in `played`. Error: a request
    /// fails, a message has wrong contents, or no message arrives.
    pub fn play(
        &self,
        begins: bool,
        iters: u64,
        rx_depth: u32,
        begun: impl FnOnce(),
        played: &mut Played,
    ) -> Result {
        let mut begun = Some(begun);
        let (mut sent, mut completed, mut received) = (0, 0, 0);
        let mut posted = rx_depth;
        let mtu = self.qp.query().1.path_mtu;
        let start = Instant::now();
        if begins {
            self.send(sent)?;
            sent += 1;
        }
        while completed < iters || received < iters {
            let unanswered = diagnosis::unanswered(self.size, mtu, completed + received > 0);
            let wc = self.next(unanswered)?;
            if wc.status != WcStatus::Success {
                return Err(diagnosis::of_status(self.ctx, self.peer, wc.status, unanswered));
            }
            if let Some(begun) = begun.take() {
                begun();
            }
            played.iters = iters.min(completed).min(received);
            played.time = start.elapsed();
            if wc.opcode == WcOpcode::Recv {
                self.check(received, &wc)?;
                received += 1;
                posted -= 1;
                if posted <= 1 {
                    self.post_receives(rx_depth - posted)?;
                    posted = rx_depth;
                }
            } else {
                completed += 1;
            }
            // Sends the next message once the last one is at the peer and its answer is here.
            if completed == sent && received == sent + u64::from(!begins) && sent < iters {
                self.send(sent)?;
                sent += 1;
            }
        }
        *played = Played { iters, time: start.elapsed() };
        Ok(())
    }

    fn send(&self, number: u64) -> Result {
        if let Some(begins) = self.chk {
            let mut message = vec![0; self.size];
            pattern::fill(&mut message, seed(number, begins));
            self.memory.write(0, &message);
        }
        let sge = self.sge(0);
        let wr = SendWr::send(SendData::Sges(&sge)).wr_id(number);
        self.qp.post_send(&[wr]).map_err(|error| VerbsError::from(error).into())
    }

    /// The SGEs of a message at `offset`: none for an empty message.
    fn sge(&self, offset: usize) -> Vec<Sge> {
        if self.size == 0 { Vec::new() } else { vec![self.memory.sge(offset, self.size)] }
    }

    fn check(&self, number: u64, wc: &Wc) -> Result {
        if wc.byte_len as usize != self.size {
            let what =
                format!("message {number} has {} bytes instead of {}", wc.byte_len, self.size);
            return Err(Failure::Of(Kind::Data, what));
        }
        let Some(begins) = self.chk else { return Ok(()) };
        let message = self.memory.to_vec(self.memory.len() / 2, self.size);
        match pattern::first_difference(&message, seed(number, !begins)) {
            None => Ok(()),
            Some(at) => {
                let what = format!(
                    "invalid data: byte {at} of message {number} is not the byte that the peer sent"
                );
                Err(Failure::Of(Kind::Data, what))
            }
        }
    }

    /// The next completion.
    fn next(&self, unanswered: Unanswered) -> Result<Wc> {
        let deadline = Instant::now() + PATIENCE;
        let silent = || diagnosis::of_silence(self.ctx, self.peer, PATIENCE, unanswered);
        let mut spins = 0u32;
        loop {
            if let Some(wc) = self.cq.poll_one()? {
                return Ok(wc);
            }
            match &self.channel {
                None if spins < SPINS => {
                    spins += 1;
                    std::hint::spin_loop();
                }
                None if Instant::now() >= deadline => return Err(silent()),
                None => std::thread::yield_now(),
                Some(channel) => {
                    self.cq.req_notify(false)?;
                    // Completions that came before it was armed make no event.
                    if let Some(wc) = self.cq.poll_one()? {
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
}

/// The seed of a message. Messages of both directions differ.
fn seed(number: u64, of_first: bool) -> u64 {
    number * 2 + u64::from(of_first)
}
