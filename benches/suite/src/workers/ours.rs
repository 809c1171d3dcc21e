//! RDMA measurements through the verbs API: the steps of both sides.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rocinante::exchange::Exchange;
use rocinante::verbs::Mtu;
use rocinante::{ConnectOptions, Context};
use serde::{Deserialize, Serialize};

use super::measure::{Figure, Measure, Step, Target};
use super::peers::{PAUSE, quantile_us, tails};
use super::{cost, datagrams};
use rocinante_cli::measure::{
    Bulk, BulkOp, BulkResult, Connected, Connecting, End, Pinging, RoundTrip, Side, Until,
    bulk_with_shares, histogram, jain, post_receives, receive_bulk, round_trips, round_trips_apart,
    send_latency, serve, write_latency,
};
use rocinante_cli::output::Result;

/// Longest time without progress.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// Time of the warm-up before a figure.
pub(super) const WARM_UP: Duration = Duration::from_millis(20);
/// Bytes of half a region, unless a message is larger.
const HALF: usize = 4 << 20;
/// Depth of the send queue of a single queue pair.
const DEPTH: u32 = 1024;
/// Depth of each send queue if there are several queue pairs.
const SENDS_OF_MANY: u32 = 64;
/// Depth of the receive queue.
const RECEIVES: u32 = 512;
/// Bytes of inline data.
const INLINE: u32 = 64;
/// Number of large messages in flight, as in perftest.
const LARGE: usize = 128;
/// Messages in flight on each queue pair where their number does not depend on that of the queue
/// pairs.
pub(super) const QUEUED: usize = 16;
/// Messages below this are posted in lists.
const SMALL: usize = 4096;

/// Connected queue pairs for steps.
pub(super) struct OpenDevice {
    connected: Connected,
    side: Side,
    /// Whether the receive queue is full. Later SENDs of the same device are no larger.
    receives: Cell<bool>,
}

impl OpenDevice {
    /// Connects `qps` queue pairs, with memory for all `steps`.
    pub(super) fn connect(
        ctx: Context,
        side: Side,
        (mtu, qps): (u32, u32),
        steps: &[Step],
        exchange: &mut Exchange,
    ) -> Result<Self> {
        let half = steps.iter().map(|step| step.size).fold(HALF, usize::max);
        let sends = if qps == 1 { DEPTH } else { SENDS_OF_MANY };
        let how = Connecting {
            options: ConnectOptions::default().mtu(Mtu::from_bytes(mtu)),
            qps,
            sends,
            receives: if qps == 1 { RECEIVES } else { 1 },
            elements: 1,
            inline: INLINE,
            completions: qps * sends + RECEIVES,
            half,
        };
        Ok(Self {
            connected: Connected::new(ctx, &how, exchange)?,
            side,
            receives: Cell::new(false),
        })
    }

    /// Does a step together with the other side. Returns the figures on the first side.
    pub(super) fn step(&self, exchange: &mut Exchange, step: &Step) -> Result<Vec<Figure>> {
        if step.measure == Measure::UdRate {
            let figure = datagrams::rate(self.connected.ctx(), self.side, step, exchange)?;
            return Ok(figure.into_iter().collect());
        }
        let ends = self.connected.ends(PATIENCE);
        let until = Until::Time(Duration::from_secs_f64(step.seconds));
        let first = &ends[0];
        let receives = step.measure == Measure::SendBw && self.side == Side::Second;
        if receives && !self.receives.replace(true) {
            post_receives(&ends, step.size, RECEIVES as usize)?;
        }
        exchange.barrier("ready")?;
        let (side, size, mut times) = (self.side, step.size, histogram());
        let mut ping = |exchange: &mut Exchange, pinging| {
            write_latency(first, exchange, pinging, side, size, until, &mut times)
        };
        match step.measure {
            Measure::WriteLat | Measure::WriteLatOneCpu => ping(exchange, Pinging::Usual)?,
            Measure::WriteLatSignaled => ping(exchange, Pinging::Signaled)?,
            Measure::WriteLatMemory => ping(exchange, Pinging::ByMemory)?,
            Measure::SendLatBlocking => {
                let first = End { channel: Some(self.connected.channel()), ..*first };
                send_latency(&first, exchange, side, size, until, &mut times)?;
            }
            _ if self.side == Side::First => return self.ask(&ends, exchange, step, until),
            _ => return self.answer(&ends, exchange, step),
        }
        Ok(if self.side == Side::First { tails(step, &times) } else { Vec::new() })
    }

    /// The part of the side that leads.
    fn ask(
        &self,
        ends: &[End<'_>],
        exchange: &mut Exchange,
        step: &Step,
        until: Until,
    ) -> Result<Vec<Figure>> {
        let round_trip = match step.measure {
            Measure::ReadLat
            | Measure::ReadLatPassive
            | Measure::ReadLatAsleep
            | Measure::ReadLatOneCpu => Some(RoundTrip::Read(step.size)),
            Measure::AtomicLat | Measure::AtomicLatPassive | Measure::AtomicLatAsleep => {
                Some(RoundTrip::FetchAdd)
            }
            _ => None,
        };
        if let Some(what) = round_trip {
            let mut times = histogram();
            match step.measure.target() {
                Target::Asleep => round_trips_apart(&ends[0], what, PAUSE, until, &mut times)?,
                Target::Active | Target::Passive => {
                    round_trips(&ends[0], what, until, &mut times)?;
                }
            }
            exchange.barrier("done")?;
            return Ok(vec![step.figure(step.measure, quantile_us(&times, 0.5))]);
        }
        let own = self.flow(ends, &in_bulk(step, ends.len(), until))?;
        if step.measure == Measure::WriteBwBoth {
            serve(self.connected.ctx(), exchange, "done")?;
        } else {
            exchange.barrier("done")?;
        }
        let theirs: Answered = receive_answer(exchange)?;
        Ok(own.figures(step, &theirs))
    }

    /// Warms up, and then measures.
    fn flow(&self, ends: &[End<'_>], what: &Bulk) -> Result<Flow> {
        let (begin, softirq) = (cost::own()?, cost::softirq()?);
        let warm_up = Bulk { until: Until::Time(WARM_UP), ..*what };
        let (before, _) = bulk_with_shares(ends, &warm_up, |_| ())?;
        let (idle, start) = (cost::idle()?, Instant::now());
        let (result, shares) = bulk_with_shares(ends, what, |_| ())?;
        let (elapsed, idle) = (start.elapsed().as_secs_f64(), cost::idle()? - idle);
        let machine = (elapsed * cost::online()? as f64 - idle).max(0.0);
        let (cpu, softirq) = (cost::own()? - begin, cost::softirq()? - softirq);
        let bytes = before.bytes + result.bytes;
        Ok(Flow { result, shares, machine, cpu, softirq, bytes })
    }

    /// The part of the side that answers.
    fn answer(
        &self,
        ends: &[End<'_>],
        exchange: &mut Exchange,
        step: &Step,
    ) -> Result<Vec<Figure>> {
        let begin = cost::own()?;
        let mut gbps = 0.0;
        match step.measure {
            Measure::SendBw => {
                for _ in 0..2 {
                    receive_bulk(ends, step.size, |_| ())?;
                }
                exchange.barrier("done")?;
            }
            Measure::WriteBwBoth => {
                let until = Until::Time(Duration::from_secs_f64(step.seconds));
                gbps = self.flow(ends, &in_bulk(step, ends.len(), until))?.result.gbps();
                serve(self.connected.ctx(), exchange, "done")?;
            }
            _ if step.measure.target() == Target::Active => {
                serve(self.connected.ctx(), exchange, "done")?;
            }
            _ => exchange.barrier("done")?,
        }
        if !step.measure.is_whole_round_trip() {
            let answered = Answered { cpu: cost::own()? - begin, gbps };
            exchange.say(&serde_json::to_string(&answered).expect("figures are JSON"))?;
        }
        Ok(Vec::new())
    }
}

/// The leading side's results of a flow.
struct Flow {
    result: BulkResult,
    /// Messages of each queue pair.
    shares: Vec<u64>,
    /// Busy seconds of all processors during the flow.
    machine: f64,
    /// Processor time of this process and of the system's softirqs in seconds, and bytes sent, all
    /// with the warm-up.
    cpu: f64,
    softirq: f64,
    bytes: u64,
}

/// The answering side's results.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Answered {
    /// Processor time in seconds.
    cpu: f64,
    /// Its own goodput, in 10⁹ bits per second.
    gbps: f64,
}

impl Flow {
    fn figures(&self, step: &Step, theirs: &Answered) -> Vec<Figure> {
        let Self { result, shares, machine, cpu, softirq, bytes } = self;
        let machine = machine / (result.bytes as f64 / 1e9);
        let value = match step.measure.unit() {
            "Mop/s" => result.mops(),
            _ => result.gbps() + theirs.gbps,
        };
        let mut figures = vec![step.figure(step.measure, value)];
        if shares.len() > 1 {
            let fairness = match step.measure {
                Measure::WriteBwQueued => Measure::WriteBwQueuedFairness,
                _ => Measure::WriteBwFairness,
            };
            figures.push(step.figure(fairness, jain(shares.iter().map(|it| *it as f64))));
        }
        let cpu = cpu + theirs.cpu;
        match step.measure {
            Measure::WriteBw => figures.push(step.figure(Measure::MachineCpuPerGb, machine)),
            Measure::WriteBwPassive => figures.extend([
                step.figure(Measure::CpuPerGb, cpu / (*bytes as f64 / 1e9)),
                step.figure(Measure::WriteBwPerCore, per_core(*bytes, cpu + softirq)),
                step.figure(Measure::MachineCpuPerGbPassive, machine),
            ]),
            _ => {}
        }
        figures
    }
}

fn receive_answer(exchange: &mut Exchange) -> Result<Answered> {
    let line = exchange.hear()?;
    let answered = serde_json::from_str(&line);
    Ok(answered.map_err(|_| exchange.error(format_args!("it sent {line}")))?)
}

/// Number of messages that each of `qps` queue pairs keeps in flight in a step.
pub(crate) fn depth(step: &Step, qps: u32) -> usize {
    match step.measure.unit() {
        "us" => 1,
        _ => in_bulk(step, qps as usize, Until::Messages(1)).depth,
    }
}

/// How the requests of a measure are posted on each queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Posting {
    /// Requests of one call.
    list: usize,
    /// Requests that are outstanding at most.
    outstanding: usize,
    spins: Spins,
}

/// The sides whose programs poll without sleeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Spins {
    Both,
    Requester,
    Neither,
}

impl Posting {
    /// Of a measure over `qps` queue pairs of a device in software. `None` if it posts nothing.
    pub(crate) fn of(measure: Measure, size: usize, qps: u32) -> Option<Self> {
        if matches!(measure, Measure::QpBytes | Measure::IdleWakeups) {
            return None;
        }
        let step = Step { measure, size, seconds: 0.0 };
        let (list, outstanding) = match measure.unit() {
            "us" => (1, 1),
            _ => {
                let bulk = in_bulk(&step, qps as usize, Until::Messages(1));
                (bulk.list, bulk.depth)
            }
        };
        let spins = match measure.target() {
            _ if measure == Measure::SendLatBlocking || measure.is_fan_in() => Spins::Neither,
            Target::Active => Spins::Both,
            Target::Passive | Target::Asleep => Spins::Requester,
        };
        Some(Self { list, outstanding, spins })
    }
}

/// The bulk transfer of a step over `qps` queue pairs.
pub(super) fn in_bulk(step: &Step, qps: usize, until: Until) -> Bulk {
    let op = match step.measure {
        Measure::SendBw | Measure::UdRate => BulkOp::Send,
        Measure::ReadBw => BulkOp::Read,
        _ => BulkOp::Write,
    };
    // Posting and completing messages this small costs more than sending them, so post them in
    // lists.
    if step.size < SMALL || step.measure.unit() == "Mop/s" {
        let small = Bulk::small(op, step.size, until);
        let list = if step.measure == Measure::WriteRateSingle { 1 } else { small.list };
        return Bulk { list, ..small };
    }
    use Measure::{WriteBwQueued, WriteBwQueuedFairness};
    if step.measure.is_fan_in() || matches!(step.measure, WriteBwQueued | WriteBwQueuedFairness) {
        return Bulk::large(op, step.size, QUEUED, until);
    }
    let depth = (2 * HALF / step.size).clamp(2, LARGE) / qps;
    Bulk::large(op, step.size, depth.max(2), until)
}

/// 10⁹ payload bits for each second of processor time.
pub(super) fn per_core(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 * 8.0 / 1e9 / seconds.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_requests_are_posted_is_told() {
        let of = |measure, size, qps| {
            let posting = Posting::of(measure, size, qps).expect("requests");
            (posting.list, posting.outstanding, posting.spins)
        };
        let shared = 64 << 10;
        for (measure, size, qps, expected) in [
            (Measure::WriteBw, 1 << 20, 1, (1, 8, Spins::Both)),
            (Measure::WriteBw, shared, 64, (1, 2, Spins::Both)),
            (Measure::WriteBwQueued, shared, 256, (1, 16, Spins::Both)),
            (Measure::WriteBwPassive, 1 << 20, 1, (1, 8, Spins::Requester)),
            (Measure::FanInFairness, shared, 16, (1, 16, Spins::Neither)),
            (Measure::WriteRate, 64, 1, (32, 512, Spins::Both)),
            (Measure::WriteRateSingle, 64, 1, (1, 512, Spins::Both)),
            (Measure::UdRate, 64, 1, (32, 512, Spins::Both)),
            (Measure::WriteLatP99, 64, 1, (1, 1, Spins::Both)),
            (Measure::ReadLatOneCpu, 64, 1, (1, 1, Spins::Requester)),
            (Measure::SendLatBlocking, 64, 1, (1, 1, Spins::Neither)),
        ] {
            assert_eq!(of(measure, size, qps), expected, "{measure}, {qps} queue pairs");
        }
        assert_eq!(Posting::of(Measure::QpBytes, 0, 1000), None);
    }

    #[test]
    fn what_is_outstanding_fits_into_the_queues() {
        for qps in [1_usize, 2, 16, 256] {
            for size in [2, 64, 4096, 65_536, 1 << 20, 8 << 20] {
                let step = Step { measure: Measure::WriteBw, size, seconds: 0.1 };
                let bulk = in_bulk(&step, qps, Until::Messages(1));
                let sends = if qps == 1 { DEPTH } else { SENDS_OF_MANY };
                assert!(qps > 1 && size < SMALL || bulk.depth <= sends as usize, "{bulk:?}");
            }
        }
    }
}
