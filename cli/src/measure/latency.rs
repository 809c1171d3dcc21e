//! Round trips, one at a time.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rocinante::exchange::Exchange;
use rocinante::verbs::{GRH_LEN, SendData, SendOp, WcOpcode};
use rocinante::{RecvWr, SendWr, Wc};
use serde::{Deserialize, Serialize};

use super::{End, MeasureError, Result, Until, sleep, succeeded};

/// The side of a ping-pong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side {
    /// The side that begins, measures, and decides when to end.
    First,
    /// The side that answers.
    Second,
}

/// The operation of [`round_trips`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundTrip {
    /// READs, with their size in bytes.
    Read(usize),
    /// Fetch and add.
    FetchAdd,
    /// Compare and swap.
    CompareSwap,
}

/// A histogram of nanoseconds, up to a minute, with a precision of three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds that make sense")
}

/// Takes the times of messages.
pub trait Times {
    /// Takes one.
    fn take(&mut self, time: Duration);
}

impl Times for Histogram<u64> {
    fn take(&mut self, time: Duration) {
        record(self, time);
    }
}

/// Records a time, in nanoseconds.
pub fn record(histogram: &mut Histogram<u64>, time: Duration) {
    histogram.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

/// The last byte of the last message. The last bytes of other messages change from one to the next.
const LAST: u8 = 255;

fn mark(number: u64) -> u8 {
    u8::try_from(number % 254 + 1).unwrap_or(1)
}

/// How both sides of [`write_latency`] work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinging {
    /// Both sides poll their memory and drive the device. One WRITE in 16 is signaled, and the last
    /// one.
    Usual,
    /// The same, but each WRITE is signaled, so each has its own acknowledgement.
    Signaled,
    /// Both sides poll only their memory. The device's own thread does everything except posting.
    ByMemory,
}

/// Ping-pong of WRITEs of `size` bytes (1 to half the region) between two sides that poll their
/// memory. Records half the time of each round trip in `times`, in nanoseconds. The second side
/// ignores `until`, and records nothing. Both sides meet at a barrier before they begin. Error: a
/// request fails, or there is no progress.
pub fn write_latency(
    end: &End<'_>,
    exchange: &mut Exchange,
    pinging: Pinging,
    side: Side,
    size: usize,
    until: Until,
    times: &mut impl Times,
) -> Result {
    let signal_every = match pinging {
        Pinging::Usual => SIGNAL_EVERY,
        Pinging::Signaled => 1,
        Pinging::ByMemory => u64::MAX,
    };
    let mut pings = Pings::new(end, size, signal_every);
    // No mark is 0.
    end.mr.write(end.landing() + size - 1, &[0]);
    exchange.barrier("write latency")?;
    let mut arrived = 0;
    if side == Side::Second {
        for number in 1.. {
            arrived = pings.await_mark(arrived)?;
            debug_assert!(arrived == LAST || arrived == mark(number));
            pings.write(arrived)?;
            if arrived == LAST {
                break;
            }
        }
    } else {
        let start = Instant::now();
        let mut before = start;
        for number in 1.. {
            let last = until.is_last(number, before - start);
            pings.write(if last { LAST } else { mark(number) })?;
            arrived = pings.await_mark(arrived)?;
            let after = Instant::now();
            times.take((after - before) / 2);
            before = after;
            if last {
                break;
            }
        }
    }
    pings.finish()?;
    Ok(())
}

/// The WRITEs of one side.
struct Pings<'a> {
    end: &'a End<'a>,
    size: usize,
    inline: bool,
    /// One WRITE in this many is signaled, and the last one. With `u64::MAX` only the last one is,
    /// and this thread never polls the completion queue before: the background thread drives the
    /// device.
    signal_every: u64,
    posted: u64,
    unfinished: u64,
    buffer: Vec<u8>,
}

/// One WRITE in this many is signaled.
const SIGNAL_EVERY: u64 = 16;

impl<'a> Pings<'a> {
    fn new(end: &'a End<'a>, size: usize, signal_every: u64) -> Self {
        let inline = size <= end.qp.query().2.max_inline_data as usize;
        Self { end, size, inline, signal_every, posted: 0, unfinished: 0, buffer: vec![0; size] }
    }

    fn write(&mut self, mark: u8) -> Result {
        let end = self.end;
        let last = self.size - 1;
        self.buffer[last] = mark;
        // The previous message has arrived, because its answer has. So its bytes are free.
        if !self.inline {
            end.mr.write(last, &[mark]);
        }
        let sge = [end.mr.sge(0, self.size)];
        let data = if self.inline { SendData::Inline(&self.buffer) } else { SendData::Sges(&sge) };
        self.posted += 1;
        let signaled = mark == LAST || self.posted.is_multiple_of(self.signal_every);
        self.unfinished += u64::from(signaled);
        let op = SendOp::Write { remote: end.remote_landing(), rkey: end.remote.rkey, imm: None };
        let wr = SendWr::new(op, data).wr_id(self.posted).signaled(signaled);
        Ok(end.qp.post_send(&[wr])?)
    }

    /// Polls memory until the mark differs from `old`.
    fn await_mark(&mut self, old: u8) -> Result<u8> {
        let end = self.end;
        let at = end.landing() + self.size - 1;
        let (unfinished, drives) = (&mut self.unfinished, self.signal_every != u64::MAX);
        end.spin("answer to a WRITE", || {
            let mark = end.mr.load_byte(at);
            if mark != old {
                return Ok(Some(mark));
            }
            if !drives {
                return Ok(None);
            }
            if *unfinished == 0 {
                end.ctx.progress();
            } else if let Some(wc) = end.cq.poll_one()? {
                succeeded(wc)?;
                *unfinished -= 1;
            }
            Ok(None)
        })
    }

    fn finish(mut self) -> Result {
        while self.unfinished > 0 {
            self.end.wait("acknowledgement of a WRITE")?;
            self.unfinished -= 1;
        }
        Ok(())
    }
}

/// Ping-pong of SENDs of `size` bytes (0 to half the region). Both sides sleep on the channel of
/// their end, or else poll the completion queue. As [`write_latency`].
///
/// The receive queue must be empty. Error: a request fails, or there is no progress.
pub fn send_latency(
    end: &End<'_>,
    exchange: &mut Exchange,
    side: Side,
    size: usize,
    until: Until,
    times: &mut impl Times,
) -> Result {
    let inline = size <= end.qp.query().2.max_inline_data as usize;
    let buffer = end.mr.to_vec(0, size);
    let mut sends = Sends { end, size, inline, unfinished: 0, buffer };
    sends.receive()?;
    exchange.barrier("send latency")?;
    let start = Instant::now();
    let mut before = start;
    for number in 1.. {
        let last = match side {
            Side::First => {
                let last = until.is_last(number, before - start);
                sends.send(number, last)?;
                sends.await_message()?;
                let after = Instant::now();
                times.take((after - before) / 2);
                before = after;
                last
            }
            Side::Second => {
                let last = sends.await_message()?;
                if !last {
                    // Posted before the answer, which makes the peer send the next message.
                    sends.receive()?;
                }
                sends.send(number, last)?;
                last
            }
        };
        if last {
            break;
        }
        if side == Side::First {
            sends.receive()?;
        }
    }
    while sends.unfinished > 0 {
        end.wait("acknowledgement of a SEND")?;
        sends.unfinished -= 1;
    }
    Ok(())
}

struct Sends<'a> {
    end: &'a End<'a>,
    size: usize,
    inline: bool,
    unfinished: u64,
    buffer: Vec<u8>,
}

impl Sends<'_> {
    fn receive(&self) -> Result {
        let head = if self.end.to.is_some() { GRH_LEN } else { 0 };
        let sge = [self.end.mr.sge(self.end.landing(), head + self.size)];
        Ok(self.end.qp.post_recv(&[RecvWr { wr_id: 0, sges: &sge }])?)
    }

    /// Sends a message. The last one has immediate data.
    fn send(&mut self, number: u64, last: bool) -> Result {
        let end = self.end;
        let sge = [end.mr.sge(0, self.size)];
        let data = if self.inline { SendData::Inline(&self.buffer) } else { SendData::Sges(&sge) };
        let signaled = last || number.is_multiple_of(SIGNAL_EVERY);
        self.unfinished += u64::from(signaled);
        let imm = last.then_some([0; 4]);
        let op = match end.to {
            Some(to) => SendOp::SendTo { to, imm },
            None => SendOp::Send { imm },
        };
        let wr = SendWr::new(op, data).wr_id(number).signaled(signaled);
        Ok(end.qp.post_send(&[wr])?)
    }

    fn next(&self) -> Result<Wc> {
        const WHAT: &str = "answer to a SEND";
        let (end, Some(channel)) = (self.end, self.end.channel) else { return self.end.wait(WHAT) };
        let look = || end.cq.poll_one()?.map(succeeded).transpose();
        loop {
            if let Some(wc) = look()? {
                return Ok(wc);
            }
            let before = Instant::now();
            if let Some(wc) = sleep(channel, end.cq, end.patience, look)? {
                return Ok(wc);
            }
            if before.elapsed() >= end.patience {
                return Err(MeasureError::Silence { what: WHAT, patience: end.patience });
            }
        }
    }

    /// Waits for a message. Returns whether it is the last.
    fn await_message(&mut self) -> Result<bool> {
        loop {
            let wc = self.next()?;
            if wc.opcode == WcOpcode::Recv {
                return Ok(wc.imm.is_some());
            }
            self.unfinished -= 1;
        }
    }
}

/// READs or atomics, each posted after the previous one completed. Records the time of each in
/// `times`, in nanoseconds. Error: a request fails, or there is no progress.
pub fn round_trips(end: &End<'_>, what: RoundTrip, until: Until, times: &mut impl Times) -> Result {
    round_trips_apart(end, what, Duration::ZERO, until, times)
}

/// As [`round_trips`], with the time `apart` between a completion and the next post. Error: a
/// request fails, or there is no progress.
pub fn round_trips_apart(
    end: &End<'_>,
    what: RoundTrip,
    apart: Duration,
    until: Until,
    times: &mut impl Times,
) -> Result {
    let (remote, rkey) = (end.remote.address, end.remote.rkey);
    let (op, size) = match what {
        RoundTrip::Read(size) => (SendOp::Read { remote, rkey }, size),
        RoundTrip::FetchAdd => (SendOp::FetchAdd { remote, rkey, add: 1 }, 8),
        RoundTrip::CompareSwap => (SendOp::CompareSwap { remote, rkey, compare: 0, swap: 1 }, 8),
    };
    let sge = [end.mr.sge(end.landing(), size)];
    let data = SendData::Sges(&sge);
    let start = Instant::now();
    let mut before = start;
    for number in 1.. {
        let last = until.is_last(number, before - start);
        if !apart.is_zero() {
            // Spins, because a core that rests would be slow afterwards.
            while before.elapsed() < apart {
                std::hint::spin_loop();
            }
            before = Instant::now();
        }
        let wr = SendWr::new(op, data).wr_id(number);
        end.qp.post_send(&[wr])?;
        end.wait("response")?;
        let after = Instant::now();
        times.take(after - before);
        before = after;
        if last {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::pair::both;
    use super::*;
    use rocinante::WcStatus;
    use rocinante::verbs::{ModifyAttr, QpState};

    /// The round trips that a measurement records.
    fn timed(measure: impl FnOnce(&mut Histogram<u64>) -> Result) -> Result<Histogram<u64>> {
        let mut times = histogram();
        measure(&mut times).map(|()| times)
    }

    #[test]
    fn writes_are_answered_one_by_one() {
        for size in [1, 64, 5000] {
            let until = Until::Messages(600);
            for pinging in [Pinging::Usual, Pinging::Signaled, Pinging::ByMemory] {
                let ping = |end: &End<'_>, exchange: &mut Exchange, side| {
                    timed(|times| write_latency(end, exchange, pinging, side, size, until, times))
                };
                let (first, second) = both(
                    |end, exchange| ping(end, exchange, Side::First),
                    |end, exchange| ping(end, exchange, Side::Second),
                );
                assert_eq!((first.unwrap().len(), second.unwrap().len()), (600, 0), "{pinging:?}");
            }
        }
    }

    #[test]
    fn sends_are_answered_one_by_one() {
        for size in [0, 64, 5000] {
            let until = Until::Messages(100);
            let (first, second) = both(
                |end, exchange| {
                    timed(|times| send_latency(end, exchange, Side::First, size, until, times))
                },
                |end, exchange| {
                    timed(|times| send_latency(end, exchange, Side::Second, size, until, times))
                },
            );
            assert_eq!((first.unwrap().len(), second.unwrap().len()), (100, 0));
        }
    }

    #[test]
    fn time_ends_a_measurement() {
        // Longer than a round trip takes on a busy machine.
        let time = Duration::from_secs(1);
        let (histogram, ()) = both(
            |end, _| timed(|times| round_trips(end, RoundTrip::Read(64), Until::Time(time), times)),
            |_, _| (),
        );
        assert!(histogram.unwrap().len() > 1);
    }

    #[test]
    fn atomics_count() {
        let (value, ()) = both(
            |end, _| {
                timed(|times| round_trips(end, RoundTrip::FetchAdd, Until::Messages(5), times))
                    .unwrap();
                end.mr.load_u64(end.landing())
            },
            |_, _| (),
        );
        assert_eq!(value, 4);
    }

    #[test]
    fn a_connection_that_breaks_ends_a_wait_for_memory() {
        let (result, ()) = both(
            |end, exchange| {
                let start = Instant::now();
                let until = Until::Messages(2);
                let side = Side::First;
                let result = timed(|times| {
                    write_latency(end, exchange, Pinging::Usual, side, 8, until, times)
                });
                assert!(start.elapsed() < end.patience, "by its status, not by its silence");
                result
            },
            |end, exchange| {
                end.qp.modify(&ModifyAttr::state(QpState::Err)).unwrap();
                exchange.barrier("write latency").unwrap();
            },
        );
        let error = result.unwrap_err();
        assert!(matches!(error, MeasureError::Completion(WcStatus::RetryExcErr)), "{error}");
    }
}
