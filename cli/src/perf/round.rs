//! One measurement: its queue pairs, its memory, and the part of each side.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rocinante::exchange::Exchange;
use rocinante::verbs::{GRH_LEN, Mtu};
use rocinante::{Access, CompChannel, Context, Cq, Mr, RemoteSlice};

use super::interval::{Intervals, Meter, Timed};
use super::plan::{Atomic, Plan, Service, Test};
use super::table::{Bandwidth, Latency, Row};
use crate::ending;
use crate::measure::{
    self, BulkOp, BulkResult, End, FlowPlan, Flowed, Idle, Lane, Lanes, MeasureError, Pinging,
    Receive, RoundTrip, Side, Times, Until,
};
use crate::output::{Failure, Output};
use crate::pingpong::Place;
use crate::session::join::{Joined, QKEY, Target, Theirs};
use crate::session::progress::Progress;
use crate::session::{self, Session, diagnosis};

/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(15);
/// Messages before the measured ones, at most. They fill caches and train predictors, and show that
/// the second side is ready. Large ones need fewer: together they have `SPREAD` bytes.
const WARM_UP: u64 = 100;
/// Memory that messages in flight are spread over, as far as they fill it, so that they do not all
/// lie in the fastest cache.
const SPREAD: usize = 4 << 20;
/// Messages count as lost after this much silence, once the peer has said that it sent all.
const LOST: Duration = Duration::from_millis(200);
/// RNR timer code 1: 10 µs. A late receive then costs as little as possible.
const RNR_10_US: u8 = 1;

/// What one side decides by itself.
#[derive(Debug, Clone, Copy)]
pub struct Own {
    /// Whether this side is the client.
    pub client: bool,
    /// Whether it sleeps on completion events.
    pub events: bool,
    /// Messages up to this size go inline.
    pub inline: Option<u32>,
    /// Length of the intervals for which a line is printed.
    pub interval: Option<Duration>,
}

/// Connected queue pairs that share a completion queue and a region.
pub struct Round<'a> {
    test: Test,
    plan: &'a Plan,
    size: usize,
    how: Own,
    ctx: Context,
    channel: Option<CompChannel>,
    cq: Cq,
    mr: Mr,
    qps: Vec<Joined>,
    /// The destinations of datagrams.
    targets: Vec<Target>,
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
        how: Own,
    ) -> Result<Self, Failure> {
        let ctx = session.ctx.clone();
        let pd = ctx.alloc_pd();
        let channel = how.events.then(|| ctx.create_comp_channel()).transpose()?;
        let completions = u32::try_from(plan.completions()).unwrap_or(u32::MAX);
        let cq = match &channel {
            Some(channel) => ctx.create_cq_with(completions, channel)?,
            None => ctx.create_cq(completions)?,
        };
        let is_datagrams = plan.connection == Service::Ud;
        let taken = size + if is_datagrams { GRH_LEN } else { 0 };
        let half = match test.bulk(plan.atomic) {
            Some(_) => taken.max((taken * plan.tx_depth as usize).min(SPREAD)),
            None => taken.max(8),
        };
        let mr = pd.allocate(2 * half.next_multiple_of(64), Access::ALL)?;
        let prepared = (0..plan.qps).map(|_| {
            let qp = pd
                .qp(&cq, &cq)
                .access(Access::ALL)
                .max_send_wr(plan.tx_depth)
                .max_recv_wr(plan.rx_depth);
            let qp = qp.qp_type(plan.connection.qp_type()).qkey(QKEY);
            let qp = qp.sgid_index(session.gid_index());
            match how.inline {
                Some(bytes) => qp.max_inline_data(bytes).build(),
                None => qp.build(),
            }
        });
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        let wanted = plan.path_mtu();
        let region = Some(mr.remote());
        let (theirs, targets) = if is_datagrams {
            session.join_datagrams(&pd, prepared, region, plan.tclass)?
        } else {
            let options = plan.options().min_rnr_timer(RNR_10_US);
            (session.join(prepared, region, &options)?, Vec::new())
        };
        let Theirs { qps, first: [own, first], region } = theirs;
        let remote = region.ok_or_else(|| session.failed("it has no region"))?;
        let mtu = wanted.unwrap_or(ctx.query_device().active_mtu.min(first.mtu));
        let peer = first.address;
        let ends = [Place::from(&own), Place::from(&first)];
        Ok(Self {
            test,
            plan,
            size,
            how,
            ctx,
            channel,
            cq,
            mr,
            qps,
            targets,
            remote,
            peer,
            mtu,
            ends,
        })
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

    /// Whether the messages fit into packets, if they are datagrams.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.plan.connection != Service::Ud || self.size <= self.mtu.bytes() as usize
    }

    /// As [`fits`](Self::fits).
    ///
    /// # Errors
    /// They do not fit. The text says what does.
    pub fn check_size(&self) -> Result<(), String> {
        let (size, mtu) = (self.size, self.mtu);
        let what =
            format!("-s {size}: a datagram has {mtu} bytes at most, the path MTU: give less");
        if self.fits() { Ok(()) } else { Err(what) }
    }

    /// Describes what both sides are about to do, in a few lines.
    #[must_use]
    pub fn banner(&self, session: &Session) -> String {
        let Self { test, plan, mtu, peer, ctx, .. } = self;
        let (verb, who) = if self.how.client { ("of", "server") } else { ("served for", "client") };
        let local = session.ctx.gids().get(session.gid_index());
        let local = local.map_or_else(String::new, ToString::to_string);
        let what = match test {
            Test::AtomicBw | Test::AtomicLat => match plan.atomic {
                Atomic::FetchAdd => format!("{test} (fetch and add)"),
                Atomic::CompareSwap => format!("{test} (compare and swap)"),
            },
            _ => test.to_string(),
        };
        let what = if plan.bidirectional { format!("bidirectional {what}") } else { what };
        let what =
            if plan.connection.loses() { format!("{what} ({})", plan.connection) } else { what };
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
            let posted = match self.flow() {
                Some((lanes, what)) => lanes.post_receives(&what),
                None if self.how.client => Ok(()),
                None => measure::post_receives(&ends, self.size, self.plan.rx_depth as usize),
            };
            posted.map_err(|error| self.failure(&error, &SoFar::default()))?;
        }
        session.barrier("ready")?;
        if !self.how.client && self.is_passive() {
            session.enter("measuring");
            if self.how.events {
                session.barrier("finished")?;
            } else {
                measure::serve(&self.ctx, &mut session.exchange, "finished")?;
            }
            return Ok(None);
        }
        session.enter("measuring");
        let abandon = || self.qps.iter().for_each(|qp| session::abandon(qp));
        let meter = self.how.interval.map(|_| Meter::started());
        let mut so_far = SoFar { meter: meter.clone(), ..SoFar::default() };
        let row = session.watched(
            |exchange| {
                let _progress = self.begin_to_tell(meter, out);
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

    /// Begins to print how the measurement goes on, until what this returns is dropped.
    fn begin_to_tell(
        &self,
        meter: Option<Meter>,
        out: Output,
    ) -> (Option<Progress>, Option<Intervals>) {
        let Some((meter, length)) = meter.zip(self.how.interval) else {
            return (Some(Progress::start(&self.ctx, &self.label())), None);
        };
        let is_bandwidth = self.test.is_bandwidth();
        (None, Some(Intervals::start(meter, length, self.size, is_bandwidth, out)))
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

    /// The lanes and parameters of SENDs in both directions, or of messages that may be lost;
    /// `None` for other tests.
    fn flow(&self) -> Option<(Lanes<'_>, FlowPlan)> {
        let (plan, both) = (self.plan, self.plan.bidirectional);
        let loses = plan.connection.loses();
        if self.test != Test::SendBw || !(both || loses) {
            return None;
        }
        let half = self.mr.len() / 2;
        let lane = |(index, qp)| Lane {
            qp,
            source: 0,
            landing: half,
            remote: self.remote.address,
            rkey: self.remote.rkey,
            to: self.targets.get(index).map(Target::to),
        };
        let lanes: Vec<_> = self.qps.iter().map(|qp| &**qp).enumerate().map(lane).collect();
        let taken = self.size + lanes.first().map_or(0, Lane::head);
        let lanes = Lanes {
            ctx: &self.ctx,
            cqs: std::slice::from_ref(&self.cq),
            channel: self.channel.as_ref(),
            mr: &self.mr,
            lanes,
        };
        let bulk = plan.bulk(BulkOp::Send, self.size, false);
        let sends = both || self.how.client;
        let receive = match (loses, both || !self.how.client) {
            (false, _) => Receive::Marked,
            (true, true) => Receive::Until,
            (true, false) => Receive::No,
        };
        let until = match plan.until(self.size) {
            // The sender says when the time is over.
            Until::Time(_) if !sends => Until::Messages(u64::MAX),
            until => until,
        };
        let what = FlowPlan {
            op: sends.then_some(BulkOp::Send),
            receive,
            size: self.size,
            room: self.size,
            slots: (half / taken.max(1)).clamp(1, bulk.depth),
            stride: taken,
            depth: bulk.depth,
            recv_depth: plan.rx_depth as usize,
            list: bulk.list,
            signal_every: bulk.signal_every,
            until,
            mark_last: true,
            second: false,
        };
        Some((lanes, what))
    }

    /// Sends, receives, or both. Messages that may be lost end when both sides have said how many
    /// they sent, and no more come.
    fn flow_by(
        &self,
        lanes: &Lanes<'_>,
        what: &FlowPlan,
        exchange: &mut Exchange,
        so_far: &mut SoFar,
    ) -> Result<(), MeasureError> {
        let sends = what.op.is_some();
        // A first poll may find many messages at once, and all of them took time.
        let begin = Instant::now();
        let result = |flowed: &Flowed| {
            let messages = if sends { flowed.sent } else { flowed.received };
            BulkResult {
                messages,
                bytes: messages * self.size as u64,
                elapsed: if sends { flowed.elapsed } else { begin.elapsed() },
            }
        };
        let loses = self.plan.connection.loses();
        let mut words = Words::default();
        let mut received = 0;
        let idle = |flowed: &Flowed, idle: Duration| {
            if loses && words.are_over(exchange, flowed, idle)? {
                return Ok(Idle::End);
            }
            match idle {
                idle if idle < PATIENCE => Ok(Idle::Wait),
                _ => Err(MeasureError::Silence { what: "message", patience: PATIENCE }),
            }
        };
        let observe = |flowed: &Flowed| {
            received = flowed.received;
            so_far.observe(&result(flowed));
        };
        let flowed = lanes.flow(what, observe, idle)?;
        if !loses {
            so_far.bulk = result(&flowed);
            return Ok(());
        }
        let theirs = words.close(exchange, flowed.sent)?;
        let arrived = tell_number(exchange, "received", received)?;
        so_far.lost = Some(if sends {
            flowed.sent.saturating_sub(arrived)
        } else {
            theirs.saturating_sub(received)
        });
        Ok(())
    }

    /// The closing message of both sides. They must have counted the same number of messages.
    fn farewell(&self, row: Option<&Row>) -> String {
        match row {
            Some(Row::Bandwidth(row)) if self.test == Test::SendBw && self.flow().is_none() => {
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
        let end = |(index, qp)| End {
            to: self.targets.get(index).map(Target::to),
            channel: self.channel.as_ref(),
            ..End::new(&self.ctx, qp, &self.cq, &self.mr, self.remote, PATIENCE)
        };
        self.qps.iter().map(|qp| &**qp).enumerate().map(end).collect()
    }

    fn work(
        &self,
        ends: &[End<'_>],
        exchange: &mut Exchange,
        so_far: &mut SoFar,
    ) -> Result<Option<Row>, MeasureError> {
        match (self.flow(), self.test.bulk(self.plan.atomic)) {
            (Some((lanes, what)), _) => self.flow_by(&lanes, &what, exchange, so_far)?,
            (None, Some(BulkOp::Send)) if !self.how.client => {
                so_far.bulk =
                    measure::receive_bulk(ends, self.size, |result| so_far.observe(result))?;
            }
            (None, Some(op)) => {
                let inline = self.how.inline.is_some_and(|bytes| self.size <= bytes as usize);
                let what = self.plan.bulk(op, self.size, inline);
                so_far.bulk = measure::bulk(ends, &what, |result| so_far.observe(result))?;
            }
            (None, None) => {
                let (end, mut warm_up) = (&ends[0], measure::histogram());
                let enough = (SPREAD / self.size.max(1)).max(2) as u64;
                let until = Until::Messages(WARM_UP.min(enough));
                self.latency(end, exchange, until, &mut warm_up)?;
                so_far.warm = true;
                let until = self.plan.until(self.size);
                let SoFar { times, meter, .. } = so_far;
                self.latency(
                    end,
                    exchange,
                    until,
                    &mut Timed { all: times, meter: meter.as_ref() },
                )?;
            }
        }
        Ok(self.row(so_far))
    }

    /// The row of what has been measured; none if that is nothing.
    fn row(&self, so_far: &SoFar) -> Option<Row> {
        if self.test.is_bandwidth() {
            let SoFar { bulk, peak, lost, .. } = so_far;
            (bulk.messages > 0).then(|| self.bandwidth(bulk, peak, *lost))
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
        times: &mut impl Times,
    ) -> Result<(), MeasureError> {
        let side = if self.how.client { Side::First } else { Side::Second };
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

    fn bandwidth(&self, result: &BulkResult, peak: &Peak, lost: Option<u64>) -> Row {
        let gbps = result.gbps();
        Row::Bandwidth(Bandwidth {
            bytes: self.size,
            messages: result.messages,
            seconds: result.elapsed.as_secs_f64(),
            gbps_peak: peak.best.max(gbps),
            gbps,
            mpps: result.mops(),
            lost,
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

/// The words of two sides whose messages may be lost.
#[derive(Debug, Default)]
struct Words {
    said: bool,
    /// How many messages the peer sent, once it has said so.
    theirs: Option<u64>,
}

impl Words {
    /// To be called while no message comes. Says how many messages were sent, once that is known,
    /// and listens. Returns whether the missing messages are lost.
    fn are_over(
        &mut self,
        exchange: &mut Exchange,
        flowed: &Flowed,
        idle: Duration,
    ) -> Result<bool, MeasureError> {
        if flowed.all_sent && !self.said {
            self.say(exchange, flowed.sent)?;
        }
        if self.theirs.is_none()
            && let Some(line) = exchange.try_hear()?
        {
            self.theirs = Some(number(exchange, "sent", &line)?);
        }
        let late = |theirs| flowed.received >= theirs || idle >= LOST;
        Ok(self.said && self.theirs.is_some_and(late))
    }

    fn say(&mut self, exchange: &mut Exchange, sent: u64) -> Result<(), MeasureError> {
        self.said = true;
        Ok(exchange.say(&format!("sent {sent}"))?)
    }

    /// How many messages the peer sent. Waits until it has said so.
    fn close(mut self, exchange: &mut Exchange, sent: u64) -> Result<u64, MeasureError> {
        if !self.said {
            self.say(exchange, sent)?;
        }
        match self.theirs {
            Some(theirs) => Ok(theirs),
            None => {
                let line = exchange.hear()?;
                number(exchange, "sent", &line)
            }
        }
    }
}

/// Tells the peer a number, and returns the peer's.
fn tell_number(exchange: &mut Exchange, what: &str, own: u64) -> Result<u64, MeasureError> {
    exchange.say(&format!("{what} {own}"))?;
    let line = exchange.hear()?;
    number(exchange, what, &line)
}

/// The number that the peer told.
fn number(exchange: &Exchange, what: &str, line: &str) -> Result<u64, MeasureError> {
    let number = line.strip_prefix(what).and_then(|rest| rest.trim_start().parse().ok());
    number.ok_or_else(|| {
        exchange
            .error("it does not say how many messages: use the same version on both sides")
            .into()
    })
}

/// What has been measured so far.
struct SoFar {
    bulk: BulkResult,
    peak: Peak,
    times: Histogram<u64>,
    /// Whether the messages before the measured ones have passed.
    warm: bool,
    /// Messages that did not arrive.
    lost: Option<u64>,
    /// The counts for the lines of intervals.
    meter: Option<Meter>,
}

impl Default for SoFar {
    fn default() -> Self {
        Self {
            bulk: BulkResult::default(),
            peak: Peak::default(),
            times: measure::histogram(),
            warm: false,
            lost: None,
            meter: None,
        }
    }
}

impl SoFar {
    fn observe(&mut self, result: &BulkResult) {
        self.peak.observe(result);
        self.bulk = *result;
        if let Some(meter) = &self.meter {
            meter.observe(result);
        }
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
