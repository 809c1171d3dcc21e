//! One measurement: its queue pairs, its memory, and the part of each side.

use std::net::IpAddr;
use std::time::Duration;

use hdrhistogram::Histogram;
use rocinante::{Access, ConnectOptions, Context, Cq, Exchange, Mr, Mtu, RemoteSlice};

use super::plan::{Atomic, Plan, Test};
use super::table::{Bandwidth, Latency, Row};
use crate::ending;
use crate::measure::{
    self, BulkOp, BulkResult, End, FlowPlan, Flowed, Idle, Lane, Lanes, MeasureError, Pinging,
    Receive, RoundTrip, Side, Until,
};
use crate::output::{Failure, Output};
use crate::pingpong::Place;
use crate::session::join::{Joined, Theirs};
use crate::session::progress::Progress;
use crate::session::{self, Session, diagnosis};

/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(15);
/// Messages before the measured ones. They fill caches and train predictors, and show that the
/// second side is ready.
const WARM_UP: u64 = 100;
/// Memory that messages in flight are spread over, as far as they fill it, so that they do not all
/// lie in the fastest cache.
const SPREAD: usize = 4 << 20;
/// RNR timer code 1: 10 µs. A late receive then costs as little as possible.
const RNR_10_US: u8 = 1;

/// Connected queue pairs that share a completion queue and a region.
pub struct Round<'a> {
    test: Test,
    plan: &'a Plan,
    size: usize,
    client: bool,
    ctx: Context,
    cq: Cq,
    mr: Mr,
    qps: Vec<Joined>,
    remote: RemoteSlice,
    peer: IpAddr,
    mtu: Mtu,
    ends: [Place; 2],
}

impl<'a> Round<'a> {
    /// Creates and connects the queue pairs.
    ///
    /// # Errors
    /// A limit is exceeded, the path MTU does not fit, or the peer is gone.
    pub fn connect(
        session: &mut Session,
        test: Test,
        plan: &'a Plan,
        size: usize,
        client: bool,
    ) -> Result<Self, Failure> {
        let ctx = session.ctx.clone();
        let pd = ctx.alloc_pd();
        let cq = ctx.create_cq(u32::try_from(plan.completions()).unwrap_or(u32::MAX))?;
        let half = match test.bulk(plan.atomic) {
            Some(_) => size.max((size * plan.tx_depth as usize).min(SPREAD)),
            None => size.max(8),
        };
        let mr = pd.allocate(2 * half.next_multiple_of(64), Access::ALL)?;
        let prepared = (0..plan.qps).map(|_| {
            let qp = pd
                .qp(&cq, &cq)
                .access(Access::ALL)
                .max_send_wr(plan.tx_depth)
                .max_recv_wr(plan.rx_depth);
            qp.build()
        });
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        let wanted = plan.path_mtu();
        let options =
            ConnectOptions { mtu: wanted, min_rnr_timer: RNR_10_US, ..ConnectOptions::default() };
        let Theirs { qps, first: [own, first], region } =
            session.join(prepared, Some(mr.remote()), &options)?;
        let remote = region.ok_or_else(|| session.failed("it has no region"))?;
        let mtu = wanted.unwrap_or(ctx.query_device().active_mtu.min(first.mtu));
        let peer = first.address;
        let ends = [Place::from(&own), Place::from(&first)];
        Ok(Self { test, plan, size, client, ctx, cq, mr, qps, remote, peer, mtu, ends })
    }

    /// The path MTU.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// The first queue pair, and the peer's.
    #[must_use]
    pub fn ends_of_first(&self) -> [Place; 2] {
        self.ends
    }

    /// Describes what both sides are about to do, in a few lines.
    #[must_use]
    pub fn banner(&self, session: &Session) -> String {
        let Self { test, plan, mtu, peer, ctx, .. } = self;
        let (verb, who) = if self.client { ("of", "server") } else { ("served for", "client") };
        let local = session.ctx.gids();
        let local = local.first().map_or_else(String::new, ToString::to_string);
        let what = match test {
            Test::AtomicBw | Test::AtomicLat => match plan.atomic {
                Atomic::FetchAdd => format!("{test} (fetch and add)"),
                Atomic::CompareSwap => format!("{test} (compare and swap)"),
            },
            _ => test.to_string(),
        };
        let what = if plan.bidirectional { format!("bidirectional {what}") } else { what };
        format!(
            " {what} {verb} {who} {peer} ({} {}) from {local} on {}, netdev {}, path MTU {mtu}, {} QP{}, tx depth {}",
            if session.is_managed() { "CM" } else { "TCP" },
            session.peer(),
            ctx.name(),
            ctx.provider(),
            plan.qps,
            if plan.qps == 1 { "" } else { "s" },
            plan.tx_depth,
        )
    }

    /// Measures. Returns `None` at the server of a one-sided test. If it fails, the row so far is
    /// printed.
    ///
    /// # Errors
    /// A request fails, there is no progress, or the peer is gone.
    pub fn measure(&self, session: &mut Session, out: Output) -> Result<Option<Row>, Failure> {
        let ends = self.ends();
        if self.test == Test::SendBw {
            let posted = match self.both_ways() {
                Some((lanes, what)) => lanes.post_receives(&what),
                None if self.client => Ok(()),
                None => measure::post_receives(&ends, self.size, self.plan.rx_depth as usize),
            };
            posted.map_err(|error| self.failure(&error, &SoFar::default()))?;
        }
        session.barrier("ready")?;
        if !self.client && self.is_passive() {
            session.enter("measuring");
            measure::serve(&self.ctx, &mut session.exchange, "finished")?;
            return Ok(None);
        }
        session.enter("measuring");
        let abandon = || self.qps.iter().for_each(|qp| session::abandon(qp));
        let mut so_far = SoFar::default();
        let row = session.watched(
            |exchange| {
                let _progress = Progress::start(&self.ctx, &self.label());
                let measured = self.work(&ends, exchange, &mut so_far);
                measured.map_err(|error| self.failure(&error, &so_far))
            },
            abandon,
        );
        let row = row.inspect_err(|_| self.tell(&so_far, out))?;
        session.barrier(&self.farewell(row.as_ref()))?;
        match row {
            Some(Row::Bandwidth(row)) if self.plan.bidirectional => {
                self.sum(session, row).map(Some)
            }
            row => Ok(row),
        }
    }

    /// Adds up the results of both sides, which measured at the same time.
    fn sum(&self, session: &mut Session, row: Bandwidth) -> Result<Row, Failure> {
        let own = serde_json::to_string(&row).expect("a result is JSON");
        session.enter("telling results");
        session.exchange.say(&own)?;
        let theirs = session.exchange.hear()?;
        let theirs: Bandwidth = serde_json::from_str(&theirs).map_err(|error| {
            session.failed(format_args!(
                "its result is none: {error}: use the same version on both sides"
            ))
        })?;
        Ok(Row::Bandwidth(row.and(&theirs)))
    }

    /// The lanes and parameters of SENDs in both directions; `None` for other tests.
    fn both_ways(&self) -> Option<(Lanes<'_>, FlowPlan)> {
        if self.test != Test::SendBw || !self.plan.bidirectional {
            return None;
        }
        let (half, plan) = (self.mr.len() / 2, self.plan);
        let lane = |qp| Lane {
            qp,
            source: 0,
            landing: half,
            remote: self.remote.address,
            rkey: self.remote.rkey,
            to: None,
        };
        let lanes = Lanes {
            ctx: &self.ctx,
            cqs: std::slice::from_ref(&self.cq),
            channel: None,
            mr: &self.mr,
            lanes: self.qps.iter().map(|qp| lane(qp)).collect(),
        };
        let bulk = plan.bulk(BulkOp::Send, self.size);
        let what = FlowPlan {
            op: Some(BulkOp::Send),
            receive: Receive::Marked,
            size: self.size,
            room: self.size,
            slots: (half / self.size.max(1)).clamp(1, bulk.depth),
            stride: self.size,
            depth: bulk.depth,
            recv_depth: plan.rx_depth as usize,
            list: bulk.list,
            signal_every: bulk.signal_every,
            until: plan.until(self.size),
            mark_last: true,
            second: false,
        };
        Some((lanes, what))
    }

    fn send_both_ways(
        &self,
        lanes: &Lanes<'_>,
        what: &FlowPlan,
        so_far: &mut SoFar,
    ) -> Result<(), MeasureError> {
        let result = |so_far: &Flowed| BulkResult {
            messages: so_far.sent,
            bytes: so_far.sent * self.size as u64,
            elapsed: so_far.elapsed,
        };
        let idle = |_: &Flowed, idle| match idle {
            idle if idle < PATIENCE => Ok(Idle::Wait),
            _ => Err(MeasureError::Silence { what: "message", patience: PATIENCE }),
        };
        let flowed = lanes.flow(what, |flowed| so_far.observe(&result(flowed)), idle)?;
        so_far.bulk = result(&flowed);
        Ok(())
    }

    /// The closing message of both sides. They must have counted the same number of messages.
    fn farewell(&self, row: Option<&Row>) -> String {
        match row {
            Some(Row::Bandwidth(row)) if self.test == Test::SendBw && !self.plan.bidirectional => {
                format!("finished after {} messages", row.messages)
            }
            _ => "finished".to_owned(),
        }
    }

    fn is_passive(&self) -> bool {
        let one_sided = matches!(self.test, Test::WriteBw | Test::ReadBw | Test::AtomicBw);
        matches!(self.test, Test::ReadLat | Test::AtomicLat)
            || one_sided && !self.plan.bidirectional
    }

    fn label(&self) -> String {
        format!("{}, {} bytes", self.test, self.size)
    }

    fn ends(&self) -> Vec<End<'_>> {
        let end = |qp| End {
            ctx: &self.ctx,
            qp,
            cq: &self.cq,
            mr: &self.mr,
            remote: self.remote,
            patience: PATIENCE,
        };
        self.qps.iter().map(|qp| end(qp)).collect()
    }

    fn work(
        &self,
        ends: &[End<'_>],
        exchange: &mut Exchange,
        so_far: &mut SoFar,
    ) -> Result<Option<Row>, MeasureError> {
        match (self.both_ways(), self.test.bulk(self.plan.atomic)) {
            (Some((lanes, what)), _) => self.send_both_ways(&lanes, &what, so_far)?,
            (None, Some(BulkOp::Send)) if !self.client => {
                so_far.bulk =
                    measure::receive_bulk(ends, self.size, |result| so_far.observe(result))?;
            }
            (None, Some(op)) => {
                let what = self.plan.bulk(op, self.size);
                so_far.bulk = measure::bulk(ends, &what, |result| so_far.observe(result))?;
            }
            (None, None) => {
                let (end, mut warm_up) = (&ends[0], measure::histogram());
                self.latency(end, exchange, Until::Messages(WARM_UP), &mut warm_up)?;
                so_far.warm = true;
                let until = self.plan.until(self.size);
                self.latency(end, exchange, until, &mut so_far.times)?;
            }
        }
        Ok(self.row(so_far))
    }

    /// The row of what has been measured; none if that is nothing.
    fn row(&self, so_far: &SoFar) -> Option<Row> {
        if self.test.is_bandwidth() {
            let SoFar { bulk, peak, .. } = so_far;
            (bulk.messages > 0).then(|| self.bandwidth(bulk, peak))
        } else {
            let times = &so_far.times;
            (!times.is_empty()).then(|| Row::Latency(Latency::new(self.size, times)))
        }
    }

    /// Prints the row of a measurement that failed.
    fn tell(&self, so_far: &SoFar, out: Output) {
        if let Some(row) = self.row(so_far) {
            out.line(&row);
            ending::add(&row);
        }
    }

    fn latency(
        &self,
        end: &End<'_>,
        exchange: &mut Exchange,
        until: Until,
        times: &mut Histogram<u64>,
    ) -> Result<(), MeasureError> {
        let side = if self.client { Side::First } else { Side::Second };
        match self.test {
            Test::WriteLat => {
                let how = Pinging::Usual;
                measure::write_latency(end, exchange, how, side, self.size, until, times)
            }
            Test::ReadLat => measure::round_trips(end, RoundTrip::Read(self.size), until, times),
            Test::AtomicLat => {
                let what = match self.plan.atomic {
                    Atomic::FetchAdd => RoundTrip::FetchAdd,
                    Atomic::CompareSwap => RoundTrip::CompareSwap,
                };
                measure::round_trips(end, what, until, times)
            }
            _ => measure::send_latency(end, exchange, side, self.size, until, times),
        }
    }

    fn bandwidth(&self, result: &BulkResult, peak: &Peak) -> Row {
        let gbps = result.gbps();
        Row::Bandwidth(Bandwidth {
            bytes: self.size,
            messages: result.messages,
            seconds: result.elapsed.as_secs_f64(),
            gbps_peak: peak.best.max(gbps),
            gbps,
            mpps: result.mops(),
            lost: None,
        })
    }

    fn failure(&self, error: &MeasureError, so_far: &SoFar) -> Failure {
        let passed = so_far.bulk.messages > 0 || so_far.warm;
        let unanswered = diagnosis::unanswered(self.size, Some(self.mtu), passed);
        match error {
            MeasureError::Completion(status) => {
                diagnosis::of_status(&self.ctx, self.peer, *status, unanswered)
            }
            MeasureError::Silence { patience, .. } => {
                diagnosis::of_silence(&self.ctx, self.peer, *patience, unanswered)
            }
            MeasureError::Verbs(error) => Failure::Failed(error.to_string()),
        }
    }
}

/// What has been measured so far.
struct SoFar {
    bulk: BulkResult,
    peak: Peak,
    times: Histogram<u64>,
    /// Whether the messages before the measured ones have passed.
    warm: bool,
}

impl Default for SoFar {
    fn default() -> Self {
        Self {
            bulk: BulkResult::default(),
            peak: Peak::default(),
            times: measure::histogram(),
            warm: false,
        }
    }
}

impl SoFar {
    fn observe(&mut self, result: &BulkResult) {
        self.peak.observe(result);
        self.bulk = *result;
    }
}

/// The best stretch of a run so far.
#[derive(Debug, Default)]
pub(crate) struct Peak {
    bytes: u64,
    at: Duration,
    pub(crate) best: f64,
}

impl Peak {
    /// Over shorter stretches the rate depends on the moments of polling.
    const STRETCH: Duration = Duration::from_millis(10);

    pub(crate) fn observe(&mut self, so_far: &BulkResult) {
        let time = so_far.elapsed - self.at;
        if time >= Self::STRETCH {
            let gbps = (so_far.bytes - self.bytes) as f64 * 8.0 / time.as_secs_f64() / 1e9;
            self.best = self.best.max(gbps);
            (self.bytes, self.at) = (so_far.bytes, so_far.elapsed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_stretch_is_found() {
        let mut peak = Peak::default();
        let at = |bytes, ms| BulkResult { messages: 1, bytes, elapsed: Duration::from_millis(ms) };
        for (bytes, ms) in [(1_000_000, 1), (12_500_000, 10), (37_500_000, 20), (40_000_000, 60)] {
            peak.observe(&at(bytes, ms));
        }
        assert!((peak.best - 20.0).abs() < 1e-9, "{peak:?}");
    }
}
