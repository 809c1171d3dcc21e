//! The plan of a measurement against a perftest program, with that program's defaults.

use std::time::Duration;

use rocinante::verbs::{GRH_LEN, Mtu, QpType};

use super::options::{Options, QpOptions};
use crate::measure::{BulkOp, Until};
use crate::output::Failure;
use crate::perf::plan::Given;
use crate::perf::test::{Atomic, Test};
use crate::session::NetArgs;

/// Requests with larger messages are all signaled, unless `-Q` says otherwise.
const LARGE: u32 = 8192;
/// The largest message of `-a`.
const ALL_MAX: u32 = 1 << 23;

/// The connections that the connection manager makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Managed {
    /// None.
    Nothing,
    /// The queue pair over which both sides talk (`-z`).
    Words,
    /// That one, and the queue pairs of the measurement (`-R`).
    All,
}

/// The plan of a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerftestPlan {
    /// The test.
    pub test: Test,
    /// The transport service.
    pub service: QpType,
    /// The connections that the connection manager makes.
    pub managed: Managed,
    /// Whether this side is the client.
    pub client: bool,
    /// Whether messages go in both directions.
    pub both: bool,
    /// The sizes of messages, one after the other.
    pub sizes: Vec<usize>,
    /// Whether these are all sizes of `-a`. Both sides meet after each.
    pub all: bool,
    /// The end of the measurement, on each queue pair.
    pub until: Until,
    /// In a test for a time: the part that does not count, at the beginning and again at the end.
    pub margin: Duration,
    /// Queue pairs.
    pub qps: u32,
    /// The path MTU, if one was given.
    pub mtu: Option<Mtu>,
    /// Requests outstanding per queue pair.
    pub tx_depth: u32,
    /// Receives posted per queue pair.
    pub rx_depth: u32,
    /// Requests posted at once.
    pub post_list: u32,
    /// One request in this many is signaled.
    pub cq_mod: u32,
    /// The kind of atomic.
    pub atomic: Atomic,
    /// Whether this side sleeps until a completion arrives.
    pub events: bool,
    /// Messages up to this size are sent inline.
    pub inline: u32,
    /// READs and atomics in flight.
    pub out_reads: u8,
    /// The ACK timeout: 4.096 µs · 2^timeout.
    pub timeout: u8,
    /// The traffic class of the packets.
    pub traffic_class: u8,
    /// Whether to look for the best stretch.
    pub peak: bool,
    /// Whether to print 10⁹ bits instead of 2²⁰ bytes.
    pub gbits: bool,
}

impl PerftestPlan {
    /// The plan that the command line gives.
    ///
    /// # Errors
    /// The options contradict each other or are out of range.
    pub fn new(
        test: Test,
        given: &Given,
        options: &Options,
        qp: &QpOptions,
        net: &NetArgs,
    ) -> Result<Self, Failure> {
        options.check()?;
        given.check(test)?;
        let until = match (given.iters, given.duration) {
            (_, Some(seconds)) => Until::Time(Duration::from_secs(seconds)),
            (Some(iters), None) => Until::Messages(iters),
            (None, None) => Until::Messages(if test == Test::WriteBw { 5000 } else { 1000 }),
        };
        let bulk = test.bulk(Atomic::FetchAdd).is_some();
        let size = given.size.unwrap_or(match test {
            Test::AtomicBw | Test::AtomicLat => 8,
            _ if bulk => 65_536,
            _ => 2,
        });
        let largest = if given.all { ALL_MAX } else { size };
        let limit = match until {
            Until::Messages(iters) => u32::try_from(iters).unwrap_or(u32::MAX),
            Until::Time(_) => u32::MAX,
        };
        let tx_depth = given.tx_depth.unwrap_or(if bulk { 128 } else { 1 }).min(limit);
        let cq_mod = if largest > LARGE && !given.all { 1 } else { 32.min(tx_depth / 2) };
        let inline = qp.inline_size.unwrap_or(if bulk { 0 } else { 64 });
        let margin = Self::margin(until, options)?;
        let plan = Self {
            test,
            service: qp.service(test)?.unwrap_or_default().qp_type(),
            managed: options.managed(net.cm),
            client: net.host.is_some(),
            both: given.bidirectional,
            sizes: if given.all {
                (1..=23).map(|shift| 1 << shift).collect()
            } else {
                vec![size as usize]
            },
            all: given.all,
            until,
            margin,
            qps: given.qps.unwrap_or(1),
            mtu: given.mtu.and_then(Mtu::from_bytes),
            tx_depth,
            rx_depth: given.rx_depth.unwrap_or(512).min(limit),
            post_list: given.post_list.unwrap_or(1).min(tx_depth),
            cq_mod: given.cq_mod.unwrap_or(cq_mod).clamp(1, tx_depth),
            atomic: given.atomic.unwrap_or(Atomic::FetchAdd),
            events: qp.events,
            inline: if test.is_send() || test.is_write() { inline } else { 0 },
            out_reads: qp.outs.unwrap_or(16),
            timeout: qp.qp_timeout.unwrap_or(16),
            traffic_class: options.traffic_class(qp).unwrap_or(0),
            peak: !options.no_peak && matches!(until, Until::Messages(_)),
            gbits: options.report_gbits,
        };
        if plan.managed != Managed::All && options.tos.is_some() {
            return Err(Failure::Usage(
                "-T (--tos) is for connections by rdma_cm (-R): --tclass has the same effect"
                    .into(),
            ));
        }
        plan.check()?;
        Ok(plan)
    }

    fn margin(until: Until, options: &Options) -> Result<Duration, Failure> {
        let Until::Time(time) = until else { return Ok(Duration::ZERO) };
        // Whole seconds, as in perftest.
        let margin =
            options.margin.map_or(Duration::from_secs(time.as_secs() / 4), Duration::from_secs);
        if margin * 2 >= time {
            return Err(Failure::Usage(format!(
                "twice the margin of {} s leaves nothing of {} s: give a smaller -f or a larger -D",
                margin.as_secs(),
                time.as_secs()
            )));
        }
        Ok(margin)
    }

    fn check(&self) -> Result<(), Failure> {
        let usage = |why: &str| Err(Failure::Usage(why.to_owned()));
        let timed = matches!(self.until, Until::Time(_));
        if self.managed == Managed::All && self.service == QpType::Uc {
            return usage(
                "perftest's programs connect no UC by the connection manager: leave out -R at both sides, or -c UC",
            );
        }
        if timed && self.all {
            return usage("perftest's programs do not take -D with -a: give -n, or one size");
        }
        if timed && self.events {
            return usage("perftest's programs do not take -D with -e: leave one out");
        }
        if self.events && self.test == Test::WriteLat {
            return usage("-e: write-lat waits for memory, not for completions");
        }
        if let Until::Messages(iters) = self.until {
            if iters < 5 {
                return usage("perftest's programs take -n from 5 on");
            }
            if !iters.is_multiple_of(u64::from(self.post_list)) {
                return usage("-n must be a multiple of -l");
            }
        }
        Ok(())
    }

    /// The operation that this side sends.
    #[must_use]
    pub fn op(&self) -> Option<BulkOp> {
        self.test.bulk(self.atomic)
    }

    /// Bytes that come before a message in its receive.
    #[must_use]
    pub fn head(&self) -> usize {
        if self.service == QpType::Ud { GRH_LEN } else { 0 }
    }

    /// Whether messages may be lost.
    #[must_use]
    pub fn loses(&self) -> bool {
        self.service != QpType::Rc
    }

    /// Checks the sizes of datagrams against the path MTU. Drops larger sizes of `-a`, as
    /// perftest's programs do. A single size must fit.
    ///
    /// # Errors
    /// The size does not fit.
    pub fn fit(&mut self, mtu: Mtu) -> Result<(), Failure> {
        let most = mtu.bytes() as usize;
        if self.service != QpType::Ud {
            return Ok(());
        }
        if self.all {
            self.sizes.retain(|size| *size <= most);
        }
        match self.size_max() {
            size if size > most => Err(Failure::Usage(format!(
                "-s {size}: a datagram has {most} bytes at most, the path MTU: give both sides -s {most} or less"
            ))),
            _ => Ok(()),
        }
    }

    /// The largest message.
    #[must_use]
    pub fn size_max(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Number of messages of each queue pair; 0 in a test for a time.
    #[must_use]
    pub fn iters(&self) -> u64 {
        match self.until {
            Until::Messages(iters) => iters,
            Until::Time(_) => 0,
        }
    }
}
