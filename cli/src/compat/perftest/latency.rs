//! Round trips in the way of perftest's programs: one at a time, on the first queue pair.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rocinante::verbs::SendData;
use rocinante::{Cq, RecvWr, SendWr, VerbsError, Wc, WcStatus};

use super::bench::{Bench, Trouble};
use super::plan::PerftestPlan;
use crate::measure::{self, BulkOp, Lane, MeasureError, Until};
use crate::perf::test::Atomic;

/// Results of a measurement.
#[derive(Debug)]
pub struct Latencies {
    /// Nanoseconds from one message to the next, halved where the peer sends one in between.
    pub histogram: Histogram<u64>,
    /// Messages that count: in a test for a time, those between the margins.
    pub messages: u64,
    /// Time that those messages took.
    pub elapsed: Duration,
}

/// A running measurement.
struct Trips<'a> {
    bench: &'a Bench,
    plan: &'a PerftestPlan,
    lane: Lane<'a>,
    size: usize,
    start: Instant,
    /// When the previous message was posted.
    before: Option<Instant>,
    halves: u32,
    latencies: Latencies,
    counted: Option<(u64, Instant)>,
}

/// Measures with messages of `size` bytes.
///
/// Returns also why it ended too early, if it did: a request failed, the network stayed silent, or
/// the peer is gone.
pub fn measure(
    bench: &Bench,
    plan: &PerftestPlan,
    size: usize,
) -> (Latencies, Result<(), Trouble>) {
    let op = match plan.atomic {
        _ if plan.test.is_write() => BulkOp::Write,
        _ if plan.test.is_send() => BulkOp::Send,
        _ if !plan.test.is_atomic() => BulkOp::Read,
        Atomic::FetchAdd => BulkOp::FetchAdd,
        Atomic::CompareSwap => BulkOp::CompareSwap,
    };
    let answered = matches!(op, BulkOp::Write | BulkOp::Send);
    let histogram =
        Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds that make sense");
    let latencies = Latencies { histogram, messages: 0, elapsed: Duration::ZERO };
    let mut trips = Trips {
        bench,
        plan,
        lane: bench.lane(0),
        size,
        start: Instant::now(),
        before: None,
        halves: if answered { 2 } else { 1 },
        latencies,
        counted: None,
    };
    let ended = match op {
        BulkOp::Write => trips.write(),
        BulkOp::Send => trips.send(),
        op => trips.ask(op),
    };
    (trips.latencies, ended)
}

/// Posts the first receives of a measurement of SENDs. Call it before both sides meet.
///
/// # Errors
/// A receive cannot be posted.
pub fn post_receives(bench: &Bench, plan: &PerftestPlan, size: usize) -> Result<(), MeasureError> {
    (0..plan.rx_depth).try_for_each(|_| receive(bench, size))
}

fn receive(bench: &Bench, size: usize) -> Result<(), MeasureError> {
    let lane = bench.lane(0);
    let sges = [bench.mr.sge(lane.landing, lane.head() + size)];
    Ok(lane.qp.post_recv(&[RecvWr { wr_id: 0, sges: &sges }])?)
}

impl Trips<'_> {
    /// Each side writes a number into the last byte of the other's message and waits for the
    /// other's number. The server writes first.
    fn write(&mut self) -> Result<(), Trouble> {
        let (bench, size) = (self.bench, self.size);
        let (post_at, poll_at) = (self.lane.source + size - 1, self.lane.landing + size - 1);
        let (mut sent, mut received) = (0u64, 0u64);
        while self.goes_on(sent) || self.goes_on(received) {
            if self.goes_on(received) && (sent > 0 || self.plan.client) {
                received += 1;
                let arrived = self.wait(None, |_| {
                    Ok((bench.mr.load_byte(poll_at) == received as u8).then_some(()))
                })?;
                if arrived.is_none() {
                    break;
                }
            }
            if self.goes_on(sent) {
                sent += 1;
                bench.mr.write(post_at, &[sent as u8]);
                self.post(BulkOp::Write, sent, true)?;
                if self.completion(0)?.is_none() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Each side sends and waits for the answer. The client sends first.
    fn send(&mut self) -> Result<(), Trouble> {
        let (mut sent, mut received) = (0u64, 0u64);
        let ahead = u64::from(self.plan.rx_depth);
        while self.goes_on(sent) || self.goes_on(received) {
            if self.goes_on(received) && (sent > 0 || !self.plan.client) {
                if self.completion(1)?.is_none() {
                    break;
                }
                received += 1;
                let more = match self.plan.until {
                    Until::Messages(all) => received + ahead <= all,
                    Until::Time(_) => true,
                };
                if more {
                    receive(self.bench, self.size)?;
                }
            }
            if self.goes_on(sent) {
                sent += 1;
                let last = self.plan.until == Until::Messages(sent);
                let signaled = last || sent.is_multiple_of(self.plan.cq_mod.into());
                self.post(BulkOp::Send, sent, signaled)?;
                if signaled && self.completion(0)?.is_none() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Only the client sends requests.
    fn ask(&mut self, op: BulkOp) -> Result<(), Trouble> {
        let mut asked = 0;
        while self.goes_on(asked) {
            asked += 1;
            self.post(op, asked, true)?;
            if self.completion(0)?.is_none() {
                break;
            }
        }
        // Ends the last round trip.
        self.tick();
        Ok(())
    }

    fn goes_on(&self, number: u64) -> bool {
        match self.plan.until {
            Until::Messages(all) => number < all,
            Until::Time(time) => self.start.elapsed() < time,
        }
    }

    fn post(&mut self, op: BulkOp, number: u64, signaled: bool) -> Result<(), Trouble> {
        self.tick();
        let (lane, mr, size) = (&self.lane, &self.bench.mr, self.size);
        let op = lane.request(op, 0, false);
        let sges = [mr.sge(lane.source, size)];
        let mut bytes = [0; INLINE_MAX];
        let answered = !op.has_response();
        let data = if answered && size <= self.plan.inline as usize {
            mr.read(lane.source, &mut bytes[..size]);
            SendData::Inline(&bytes[..size])
        } else {
            SendData::Sges(&sges)
        };
        let wr = SendWr::new(op, data).wr_id(number).signaled(signaled);
        lane.qp.post_send(&[wr]).map_err(MeasureError::from)?;
        Ok(())
    }

    /// Marks the start of a message, and records the time since the previous one.
    fn tick(&mut self) {
        let now = Instant::now();
        let Some(before) = self.before.replace(now) else { return };
        if let Until::Time(time) = self.plan.until {
            let since = now - self.start;
            if since < self.plan.margin || since > time - self.plan.margin {
                return;
            }
        }
        let taken = (now - before) / self.halves;
        let nanos = u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX);
        self.latencies.histogram.saturating_record(nanos);
        let (messages, since) = self.counted.get_or_insert((0, before));
        *messages += 1;
        (self.latencies.messages, self.latencies.elapsed) = (*messages, now - *since);
    }

    /// The next completion of sends (`which` = 0) or of receives (1). `None` if the time is over.
    fn completion(&mut self, which: usize) -> Result<Option<()>, Trouble> {
        let bench = self.bench;
        let cq = &bench.cqs[which];
        let found = self.wait(Some(cq), |_| cq.poll_one())?;
        let Some(wc): Option<Wc> = found else { return Ok(None) };
        match wc.status {
            WcStatus::Success => Ok(Some(())),
            status => Err(bench.broken(status)),
        }
    }

    /// Polls until `look` finds something. `None` if the time is over.
    fn wait<T>(
        &self,
        cq: Option<&Cq>,
        mut look: impl FnMut(&Self) -> Result<Option<T>, VerbsError>,
    ) -> Result<Option<T>, Trouble> {
        let begin = Instant::now();
        let mut looks = 0u32;
        loop {
            if let Some(found) = look(self).map_err(MeasureError::from)? {
                return Ok(Some(found));
            }
            if cq.is_none() {
                self.bench.ctx.progress();
            }
            looks = looks.wrapping_add(1);
            if !looks.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            if matches!(self.plan.until, Until::Time(time) if self.start.elapsed() >= time) {
                return Ok(None);
            }
            self.bench.idle(begin.elapsed())?;
            let (Some(channel), Some(cq)) = (&self.bench.channel, cq) else {
                std::thread::yield_now();
                continue;
            };
            let found = measure::sleep(channel, [cq], NAP, || Ok(look(self)?))?;
            if found.is_some() {
                return Ok(found);
            }
        }
    }
}

/// Longest sleep before the next look at the peer.
const NAP: Duration = Duration::from_millis(50);
/// Bytes that the device takes inline.
const INLINE_MAX: usize = 4096;
