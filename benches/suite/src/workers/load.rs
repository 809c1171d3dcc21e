//! Latency against offered load, open loop: each request has a planned time, and its latency counts
//! from that time. So a stall is seen by all the requests that it delayed.
//!
//! A request reads memory of the other side: by a READ, or over TCP by a small message that a
//! process answers. Times between planned requests are random, with an exponential distribution.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

use fastrand::Rng;
use hdrhistogram::Histogram;
use rocinante::exchange::Exchange;
use rocinante::verbs::{Mtu, SendData, SendOp};
use rocinante::{ConnectOptions, Context, SendWr, Wc, WcStatus};
use rocinante_cli::measure::{
    Connected, Connecting, End, MeasureError, Side, histogram, record, serve,
};
use rocinante_cli::output::{Failure, Result};
use serde::{Deserialize, Serialize};

use super::ours::{PATIENCE, WARM_UP};
use super::peers::{self, failed, quantile_us};

/// Most requests that wait for their answers.
const DEPTH: usize = 64;
/// Bytes of a request over TCP.
const REQUEST: usize = 16;
/// A share of the time of a load, in which the highest rate and the unloaded latency are measured.
const BEFORE: f64 = 0.5;
/// Requests that were planned, but not sent when this many times the planned time is over, are not
/// answered in time.
const DRAINS: u32 = 3;

/// The parameters of a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan<'a> {
    /// Bytes of an answer.
    pub(super) size: usize,
    /// Time of each load.
    pub(super) seconds: f64,
    /// Loads, in percent of the highest rate.
    pub(super) percents: &'a [u64],
}

/// The result of one load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Loaded {
    pub(crate) percent: u64,
    /// Latency from the planned time: median, 99th and 99.9th percentile, in microseconds.
    pub(crate) us: [f64; 3],
    /// 10⁶ requests per second: planned, and completed.
    pub(crate) offered: f64,
    pub(crate) achieved: f64,
    /// The highest rate with many requests in flight.
    pub(crate) peak: f64,
    /// The median with one request in flight.
    pub(crate) unloaded: f64,
}

/// Time of the whole measurement, in seconds.
pub(super) fn seconds(each: f64, loads: usize) -> f64 {
    each * (loads as f64 + 2.0 * BEFORE)
}

/// One side of the measurement. The second has no results.
pub(super) fn run(
    ctx: Option<Context>,
    side: Side,
    ends: (IpAddr, IpAddr),
    mtu: u32,
    plan: &Plan<'_>,
    exchange: &mut Exchange,
) -> Result<Vec<Loaded>> {
    let Some(ctx) = ctx else { return over_tcp(side, ends, plan, exchange) };
    let how = Connecting {
        options: ConnectOptions::default().mtu(Mtu::from_bytes(mtu)),
        qps: 1,
        sends: DEPTH as u32,
        receives: 1,
        elements: 1,
        inline: 0,
        completions: 2 * DEPTH as u32,
        half: DEPTH * plan.size,
    };
    let connected = Connected::new(ctx, &how, exchange)?;
    let loaded = match side {
        Side::First => {
            let end = connected.end(PATIENCE);
            let results = measure(&mut Reads { end, size: plan.size, number: 0 }, plan);
            exchange.barrier("done")?;
            results?
        }
        Side::Second => {
            serve(connected.ctx(), exchange, "done")?;
            Vec::new()
        }
    };
    exchange.barrier("over")?;
    Ok(loaded)
}

fn over_tcp(
    side: Side,
    ends: (IpAddr, IpAddr),
    plan: &Plan<'_>,
    exchange: &mut Exchange,
) -> Result<Vec<Loaded>> {
    let stream = peers::connect(side, ends, exchange)?;
    let in_tcp = failed("TCP");
    stream.set_nonblocking(true).map_err(&in_tcp)?;
    if side == Side::Second {
        answer(stream, plan.size).map_err(&in_tcp)?;
        return Ok(Vec::new());
    }
    let answers = vec![0; DEPTH * plan.size];
    measure(&mut Stream { stream, answers, size: plan.size, read: 0, unsent: 0 }, plan)
}

/// Answers requests until the stream ends.
fn answer(mut stream: TcpStream, size: usize) -> std::io::Result<()> {
    let (mut buffer, answers) = ([0; DEPTH * REQUEST], vec![0x5a; DEPTH * size]);
    let (mut read, mut owed) = (0, 0);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(bytes) => {
                read += bytes;
                owed += read / REQUEST * size;
                read %= REQUEST;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
        if owed > 0 {
            match stream.write(&answers[..owed.min(answers.len())]) {
                Ok(written) => owed -= written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Requests that are answered in their order.
trait Requests {
    /// Sends one.
    fn send(&mut self) -> Result;
    /// Goes on. Returns the number of requests that were answered.
    fn answered(&mut self) -> Result<usize>;
}

struct Reads<'a> {
    end: End<'a>,
    size: usize,
    number: u64,
}

impl Requests for Reads<'_> {
    fn send(&mut self) -> Result {
        let End { qp, mr, remote, .. } = self.end;
        let slot = self.number as usize % DEPTH;
        let sge = [mr.sge(mr.len() / 2 + slot * self.size, self.size)];
        let op = SendOp::Read { remote: remote.address, rkey: remote.rkey };
        self.number += 1;
        let wr = SendWr::new(op, SendData::Sges(&sge)).wr_id(self.number);
        Ok(qp.post_send(&[wr]).map_err(MeasureError::from)?)
    }

    fn answered(&mut self) -> Result<usize> {
        let mut out = [Wc::default(); 16];
        let done = self.end.cq.poll(&mut out)?;
        match done.iter().find(|wc| wc.status != WcStatus::Success) {
            Some(wc) => Err(MeasureError::Completion(wc.status).into()),
            None => Ok(done.len()),
        }
    }
}

struct Stream {
    stream: TcpStream,
    answers: Vec<u8>,
    size: usize,
    /// Bytes of an answer that is not complete.
    read: usize,
    /// Bytes of requests that the socket did not take yet.
    unsent: usize,
}

impl Requests for Stream {
    fn send(&mut self) -> Result {
        self.unsent += REQUEST;
        self.flush()
    }

    fn answered(&mut self) -> Result<usize> {
        self.flush()?;
        match self.stream.read(&mut self.answers) {
            Ok(0) => Err(Failure::Failed("TCP: the other side is gone".into())),
            Ok(bytes) => {
                self.read += bytes;
                let answers = self.read / self.size;
                self.read %= self.size;
                Ok(answers)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(failed("TCP")(error)),
        }
    }
}

impl Stream {
    fn flush(&mut self) -> Result {
        const REQUESTS: [u8; DEPTH * REQUEST] = [0; DEPTH * REQUEST];
        if self.unsent > 0 {
            match self.stream.write(&REQUESTS[..self.unsent.min(REQUESTS.len())]) {
                Ok(written) => self.unsent -= written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed("TCP")(error)),
            }
        }
        Ok(())
    }
}

/// The highest rate, the unloaded latency, and then all loads.
fn measure(requests: &mut impl Requests, plan: &Plan<'_>) -> Result<Vec<Loaded>> {
    let before = Duration::from_secs_f64(BEFORE * plan.seconds);
    closed(requests, DEPTH, WARM_UP)?;
    let (_, unloaded) = closed(requests, 1, before)?;
    let (peak, _) = closed(requests, DEPTH, before)?;
    let unloaded = quantile_us(&unloaded, 0.5);
    let mut random = Rng::with_seed(1);
    let load = |&percent: &u64| {
        let offered = peak * percent as f64 / 100.0;
        let time = Duration::from_secs_f64(plan.seconds);
        let (achieved, times) = open(requests, offered, time, &mut random)?;
        let us = [0.5, 0.99, 0.999].map(|quantile| quantile_us(&times, quantile));
        let [offered, achieved, peak] = [offered, achieved, peak].map(|rate| rate / 1e6);
        Ok(Loaded { percent, us, offered, achieved, peak, unloaded })
    };
    plan.percents.iter().map(load).collect()
}

/// Keeps `depth` requests in flight. Returns the answers per second, and the times from request to
/// answer.
fn closed(
    requests: &mut impl Requests,
    depth: usize,
    time: Duration,
) -> Result<(f64, Histogram<u64>)> {
    let (begin, mut times) = (Instant::now(), histogram());
    let mut sent = VecDeque::new();
    let mut answers = 0_u64;
    loop {
        let over = begin.elapsed() >= time;
        while !over && sent.len() < depth {
            sent.push_back(Instant::now());
            requests.send()?;
        }
        answers += take(requests, &mut sent, &mut times)?;
        if over && sent.is_empty() {
            return Ok((answers as f64 / begin.elapsed().as_secs_f64(), times));
        }
        if begin.elapsed() > time + PATIENCE {
            return Err(silent());
        }
    }
}

/// Sends requests at planned times, `rate` of them per second. Returns the answers per second, and
/// the times from the planned time to the answer. A request that has no answer in the end counts
/// with the time that it has waited.
fn open(
    requests: &mut impl Requests,
    rate: f64,
    time: Duration,
    random: &mut Rng,
) -> Result<(f64, Histogram<u64>)> {
    let (begin, mut times) = (Instant::now(), histogram());
    // Planned times of requests in flight, and of the next one.
    let (mut sent, mut planned) = (VecDeque::new(), Duration::ZERO);
    let mut answers = 0_u64;
    loop {
        let now = begin.elapsed();
        while planned <= now.min(time) && sent.len() < DEPTH {
            requests.send()?;
            sent.push_back(begin + planned);
            planned += Duration::from_secs_f64(gap(random) / rate);
        }
        answers += take(requests, &mut sent, &mut times)?;
        if planned > time && sent.is_empty() {
            return Ok((answers as f64 / begin.elapsed().max(time).as_secs_f64(), times));
        }
        if now > time * DRAINS {
            break;
        }
    }
    let (now, in_flight) = (Instant::now(), sent.len());
    while planned <= time {
        sent.push_back(begin + planned);
        planned += Duration::from_secs_f64(gap(random) / rate);
    }
    sent.iter().for_each(|planned| record(&mut times, now.saturating_duration_since(*planned)));
    // The next load begins without requests in flight.
    sent.truncate(in_flight);
    let rate = answers as f64 / begin.elapsed().as_secs_f64();
    drain(requests, &mut sent)?;
    Ok((rate, times))
}

fn drain(requests: &mut impl Requests, sent: &mut VecDeque<Instant>) -> Result {
    let (begin, mut ignored) = (Instant::now(), histogram());
    while !sent.is_empty() {
        take(requests, sent, &mut ignored)?;
        if begin.elapsed() > PATIENCE {
            return Err(silent());
        }
    }
    Ok(())
}

/// Takes the answers that have come to requests that began at the times of `sent`.
fn take(
    requests: &mut impl Requests,
    sent: &mut VecDeque<Instant>,
    times: &mut Histogram<u64>,
) -> Result<u64> {
    let answers = requests.answered()?;
    let now = Instant::now();
    for began in sent.drain(..answers.min(sent.len())) {
        record(times, now.saturating_duration_since(began));
    }
    Ok(answers as u64)
}

fn silent() -> Failure {
    MeasureError::Silence { what: "answer", patience: PATIENCE }.into()
}

/// A random time between two events of which one comes on average per unit of time.
fn gap(random: &mut Rng) -> f64 {
    -f64::ln(1.0 - random.f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers at once, but for one stall.
    struct Stalls {
        begin: Instant,
        stall: std::ops::Range<Duration>,
        waiting: usize,
    }

    impl Requests for Stalls {
        fn send(&mut self) -> Result {
            self.waiting += 1;
            Ok(())
        }

        fn answered(&mut self) -> Result<usize> {
            if self.stall.contains(&self.begin.elapsed()) {
                return Ok(0);
            }
            Ok(std::mem::take(&mut self.waiting))
        }
    }

    /// A stall of a third of the time: as many requests were planned in it, though only `DEPTH`
    /// were in flight.
    #[test]
    fn a_stall_is_seen_by_all_that_it_delayed() {
        let (stall, time) = (Duration::from_millis(100), Duration::from_millis(300));
        let stall = stall..2 * stall;
        let mut requests = Stalls { begin: Instant::now(), stall, waiting: 0 };
        let (_, times) = open(&mut requests, 10_000.0, time, &mut Rng::with_seed(7)).unwrap();
        let slow = 1.0 - times.quantile_below(10_000_000);
        assert!(times.len() > 2_500, "{} requests of 3,000", times.len());
        assert!(slow > 0.2, "{slow} of the requests waited 10 ms");
        assert!(quantile_us(&times, 0.999) > 50_000.0);
    }

    /// No answer comes any more: the requests count with the time that they have waited.
    #[test]
    fn requests_without_an_answer_count() {
        let time = Duration::from_millis(50);
        // A pause of the test itself must not bring the answers in time.
        let stall = Duration::ZERO..40 * time;
        let mut requests = Stalls { begin: Instant::now(), stall, waiting: 0 };
        let (rate, times) = open(&mut requests, 10_000.0, time, &mut Rng::with_seed(7)).unwrap();
        assert_eq!(rate, 0.0);
        assert!(times.len() > 300 && quantile_us(&times, 0.5) > 100_000.0, "{}", times.len());
    }

    #[test]
    fn gaps_have_an_average_of_one() {
        let mut random = Rng::with_seed(1);
        let gaps: Vec<f64> = (0..100_000).map(|_| gap(&mut random)).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let above = gaps.iter().filter(|gap| **gap > 1.0).count() as f64 / gaps.len() as f64;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!((above - (-1.0_f64).exp()).abs() < 0.01, "{above}");
    }
}
