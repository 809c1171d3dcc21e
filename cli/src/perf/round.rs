//! One measurement: its queue pairs, its memory, and how both sides go through it.

mod flow;
mod so_far;
mod work;

use std::net::IpAddr;
use std::time::Duration;

use rocinante::verbs::{GRH_LEN, Mtu};
use rocinante::{Access, CompChannel, Context, Cq, Mr, RemoteSlice};

use self::so_far::SoFar;
use super::interval::{self, Meter};
use super::plan::Plan;
use super::table::{Bandwidth, Row};
use super::test::{Atomic, Service, Test};
use crate::ending;
use crate::measure::{self, End, MeasureError};
use crate::output::{Failure, Output, Result};
use crate::pingpong::Place;
use crate::session::join::{Joined, QKEY, Target, Theirs};
use crate::session::{self, Session, diagnosis, progress};
use crate::ticks::Ticks;

/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(15);
/// Memory that messages in flight are spread over, as far as they fill it, so that they do not all
/// lie in the fastest cache.
const SPREAD: usize = 4 << 20;
/// RNR timer code 1: 10 µs. A late receive then costs as little as possible.
const RNR_10_US: u8 = 1;

/// The choices that one side makes by itself.
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
    pub(super) mtu: Mtu,
    /// The first queue pair, and the peer's.
    pub(super) ends: [Place; 2],
}

impl<'a> Round<'a> {
    /// Creates and connects the queue pairs. Error: a limit is exceeded, the path MTU does not fit,
    /// or the peer is gone.
    pub fn connect(
        session: &mut Session,
        test: Test,
        plan: &'a Plan,
        size: usize,
        how: Own,
    ) -> Result<Self> {
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

    /// Whether the messages fit into packets, if they are datagrams.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.plan.connection != Service::Ud || self.size <= self.mtu.bytes() as usize
    }

    /// As [`fits`](Self::fits). Error: they do not fit. The text names the largest size that fits.
    pub fn check_size(&self) -> Result<(), String> {
        let (size, mtu) = (self.size, self.mtu);
        let what =
            format!("-s {size}: a datagram has {mtu} bytes at most, the path MTU: give less");
        if self.fits() { Ok(()) } else { Err(what) }
    }

    /// Describes the measurement of both sides, in a few lines.
    #[must_use]
    pub fn banner(&self, session: &Session) -> String {
        let Self { test, plan, mtu, peer, ctx, .. } = self;
        let (verb, peer_is) =
            if self.how.client { ("of", "server") } else { ("served for", "client") };
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
            " {what} {verb} {peer_is} {peer} ({} {}) from {local} on {}, netdev {}, path MTU {mtu}, {} QP{}, tx depth {}",
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
    /// printed. Error: a request fails, there is no progress, or the peer is gone.
    pub fn measure(&self, session: &mut Session, out: Output) -> Result<Option<Row>> {
        let ends = self.ends();
        if self.test == Test::SendBw {
            let posted = match self.flow() {
                Some((lanes, what)) => lanes.post_receives(&what),
                None if self.how.client => Ok(()),
                None => measure::post_receives(&ends, self.size, self.plan.rx_depth as usize),
            };
            posted.map_err(|error| self.failure(error, &SoFar::new(None)))?;
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
        let mut so_far = SoFar::new(meter.clone());
        let measured = session.watched(
            |exchange| {
                let _progress = self.begin_to_tell(meter, out);
                let measured = self.work(&ends, exchange, &mut so_far);
                measured.map_err(|error| self.failure(error, &so_far))
            },
            abandon,
        );
        measured.inspect_err(|_| self.tell(&so_far, out))?;
        let row = so_far.row(self.test, self.size);
        session.barrier(&self.farewell(row.as_ref()))?;
        match row {
            Some(Row::Bandwidth(row)) if self.plan.bidirectional => {
                self.sum(session, row).map(Some)
            }
            row => Ok(row),
        }
    }

    /// Prints the progress of the measurement until the returned value is dropped.
    fn begin_to_tell(&self, meter: Option<Meter>, out: Output) -> Ticks {
        match meter.zip(self.how.interval) {
            Some((meter, length)) => {
                interval::start(meter, length, self.size, self.test.is_bandwidth(), out)
            }
            None => progress::start(&self.ctx, &format!("{}, {} bytes", self.test, self.size)),
        }
    }

    /// Adds up the results of both sides, which measured at the same time.
    fn sum(&self, session: &mut Session, row: Bandwidth) -> Result<Row> {
        let own = serde_json::to_string(&row).expect("a result is JSON");
        session.enter("telling results");
        session.exchange.say(&own)?;
        let theirs = session.exchange.hear()?;
        let theirs: Bandwidth = serde_json::from_str(&theirs).map_err(|error| {
            session.failed(format_args!(
                "its result cannot be read: {error}: use the same version on both sides"
            ))
        })?;
        Ok(Row::Bandwidth(row.and(&theirs)))
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

    fn ends(&self) -> Vec<End<'_>> {
        let end = |(index, qp)| End {
            to: self.targets.get(index).map(Target::to),
            channel: self.channel.as_ref(),
            ..End::new(&self.ctx, qp, &self.cq, &self.mr, self.remote, PATIENCE)
        };
        self.qps.iter().map(|qp| &**qp).enumerate().map(end).collect()
    }

    /// Prints the row of a measurement that failed.
    fn tell(&self, so_far: &SoFar, out: Output) {
        if let Some(row) = so_far.row(self.test, self.size) {
            out.line(&row);
            ending::add(&row);
        }
    }

    fn failure(&self, error: MeasureError, so_far: &SoFar) -> Failure {
        let passed = so_far.bulk.messages > 0 || so_far.warm;
        let unanswered = diagnosis::unanswered(self.size, Some(self.mtu), passed);
        match error {
            MeasureError::Completion(status) => {
                diagnosis::of_status(&self.ctx, self.peer, status, unanswered)
            }
            MeasureError::Silence { patience, .. } => {
                diagnosis::of_silence(&self.ctx, self.peer, patience, unanswered)
            }
            MeasureError::Verbs(error) => error.into(),
        }
    }
}
