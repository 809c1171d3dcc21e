//! `rocinante perf --compat perftest`: the other side is one of perftest's programs, such as
//! `ib_write_bw`.
//!
//! Both sides agree on little ([`talk`]): pages, cache lines, path MTU. The user must give sizes
//! and numbers to both. Each side sends the addresses of its queue pairs and of their memory
//! ([`message`]), all of them twice. They then exchange them once more as a barrier ("meet"):
//!
//! | | before | for each size | at the end |
//! |---|---|---|---|
//! | `send_bw` | | post receives, meet, both work; `-b -n`: both tell results; `-a`: meet | close |
//! | `write_bw`, `read_bw`, `atomic_bw` | | the client works | meet, both tell results, close |
//! | the same with `-b` | | meet, both work; `-a`: meet; both tell results | close |
//! | `send_lat` | | post receives, meet, back and forth | close |
//! | `write_lat` | meet | back and forth, the server first | |
//! | `read_lat`, `atomic_lat` | meet | the client works | close |
//!
//! All messages go over TCP, or with `-z` and `-R` over a queue pair that the connection manager
//! connects (`managed`).

pub mod bench;
mod connect;
pub mod latency;
mod managed;
pub mod message;
pub mod options;
pub mod plan;
pub mod print;
pub mod talk;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rocinante::Context;

use crate::compat::device;
use crate::compat::wire::Wire;
use crate::ending;
use crate::measure::{BulkResult, Flowed, Receive, Until};
use crate::output::{Failure, Output};
use crate::perf::Args;
use crate::perf::plan::Given;
use crate::perf::round::Peak;
use crate::perf::table::{Bandwidth, Latency, Row};
use crate::perf::test::{Atomic, Test};
use crate::pingpong::Place;
use crate::session::join::Joined;
use crate::session::{self, Own, address, diagnosis};
use bench::{Bench, Trouble};
use message::Report;
pub use options::{Options, QpOptions};
use plan::{Managed, PerftestPlan};
use talk::Talk;

/// The program of the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PerftestProgram {
    /// perftest's ib_send_bw, ib_write_lat and so on
    Perftest,
}

/// Time that a side stays after its last write. If its acknowledgement of the peer's last message
/// was lost, the peer asks again.
const FAREWELL: Duration = Duration::from_millis(200);

/// The result of a measurement.
#[derive(Debug)]
pub struct PerftestOutcome {
    /// The plan that was carried out.
    pub plan: PerftestPlan,
    /// The device that was used.
    pub ctx: Context,
    /// The peer's version.
    pub version: String,
    /// The path MTU.
    pub mtu: u32,
    /// The first queue pair, and the peer's.
    pub ends: [Place; 2],
    /// One row per size. The server of a one-sided test has none.
    pub results: Vec<Row>,
}

/// Measures with one of perftest's programs.
///
/// # Errors
/// The peer says something else, goes, or stays silent; there is no device; or a request fails. The
/// text names the peer and the phase.
pub fn run(args: &Args, given: &Given, out: Output) -> Result<PerftestOutcome, Failure> {
    let mut plan = PerftestPlan::new(args.test, given, &args.options, &args.qp, &args.net)?;
    let choice = args.options.choice();
    let (ctx, wire, side) = if plan.managed == Managed::Nothing {
        let wire = meet(args, out)?;
        (device::open(&args.net, &args.options.device, choice, wire.local()?, out)?, wire, None)
    } else {
        let (ctx, wire, side) = managed::meet(args, &plan, choice, out)?;
        (ctx, wire, Some(side).filter(|_| plan.managed == Managed::All))
    };
    let mut talk = Talk::new(wire, plan.client);
    if plan.loses() {
        talk.expect_losses();
    }
    let bench = Bench::connect(ctx.clone(), &mut plan, &mut talk, side)?;
    let run = TestRun { bench: &bench, plan: &plan, out };
    run.begin(&talk);
    let results = match plan.test {
        Test::SendBw => run.send_bandwidth(talk),
        Test::WriteBw | Test::ReadBw | Test::AtomicBw if plan.both => run.both_ways(talk),
        Test::WriteBw | Test::ReadBw | Test::AtomicBw => run.one_way(talk),
        Test::SendLat | Test::WriteLat | Test::ReadLat | Test::AtomicLat => run.latency(talk),
    }?;
    out.line(print::LINE);
    let (version, mtu) = (bench.terms.version.clone(), bench.terms.mtu.bytes());
    let places = [(ctx.gids()[0], &bench.own[0]), (bench.peer, &bench.theirs[0])];
    let ends = places.map(|(address, keys)| Place::new(address, keys.qpn, keys.psn));
    bench.end(&plan);
    Ok(PerftestOutcome { plan, ctx, version, mtu, ends, results })
}

/// Breaks the connections, so that whatever waits for a completion gets one.
fn abandon(qps: &[Joined]) {
    qps.iter().for_each(|qp| session::abandon(qp));
}

/// A new connection over TCP, before any message.
fn meet(args: &Args, out: Output) -> Result<Wire, Failure> {
    let (port, program) = (args.net.port, program(args.test));
    if let Some(host) = &args.net.host {
        ending::enter("connecting");
        return Wire::connect(host, port, args.net.patience.time(), &program);
    }
    // The packets' address may be of another family than the TCP connection, which is always IPv4
    // with these programs.
    let bind = args.net.bind.as_ref().and_then(Own::only).filter(IpAddr::is_ipv4);
    let listener = address::listen(bind, port)?;
    ending::enter("waiting for a client");
    out.note(format_args!("waiting for a client ({program}) on TCP port {port}"));
    let wire = Wire::accept(&listener)?;
    out.note(format_args!("client {}", wire.peer()));
    Ok(wire)
}

/// The name of perftest's program.
fn program(test: Test) -> String {
    format!("ib_{}", test.to_string().replace('-', "_"))
}

/// A measurement that is ready to begin.
struct TestRun<'a> {
    bench: &'a Bench,
    plan: &'a PerftestPlan,
    out: Output,
}

impl TestRun<'_> {
    fn begin(&self, talk: &Talk) {
        let Self { bench, plan, out } = self;
        let both = if plan.both { "bidirectional " } else { "" };
        let role = if plan.client { "client" } else { "server" };
        out.line(print::LINE);
        out.line(format_args!(
            " {both}{} as {role}, with perftest {} at {}: {} on {}, {}, path MTU {}, {} QPs, tx depth {}",
            plan.test,
            bench.terms.version,
            talk.wire().peer(),
            bench.peer,
            bench.ctx.name(),
            bench.ctx.provider().name(),
            bench.terms.mtu,
            plan.qps,
            plan.tx_depth,
        ));
        for (side, all) in [("local", &bench.own), ("remote", &bench.theirs)] {
            for keys in all {
                out.line(format_args!(
                    " {side} address: LID 0000 QPN {:#06x} PSN {:#08x} RKey {:#010x} VAddr {:#018x}",
                    keys.qpn, keys.psn, keys.rkey, keys.address
                ));
            }
        }
        out.line(print::LINE);
        out.line(print::header(plan));
    }

    /// The client works. The server waits and prints the client's results.
    fn one_way(&self, mut talk: Talk) -> Result<Vec<Row>, Failure> {
        let Self { bench, plan, out } = self;
        let own = &bench.own[0];
        let (mut rows, mut last) = (Vec::new(), Report::default());
        talk.enter("measuring");
        if plan.client {
            for size in &plan.sizes {
                let row = self.bandwidth(&talk, *size)?;
                last = print::report(plan, &row);
                out.line(print::bandwidth(plan, &last));
                ending::add(&row);
                rows.push(Row::Bandwidth(row));
            }
            talk.enter("telling results");
        }
        talk.meet(&bench.ctx, own)?;
        talk.enter("telling results");
        let theirs = print::in_own_unit(plan, talk.report(&bench.ctx, &last)?);
        if !plan.client {
            talk.check(&theirs)?;
            self.check_sum(&talk, &theirs)?;
            out.line(print::bandwidth(plan, &theirs));
        }
        talk.close(&bench.ctx, own)?;
        Ok(rows)
    }

    /// Checks that each of the client's fetch-and-adds took effect exactly once. Swaps leave the
    /// memory as it is.
    fn check_sum(&self, talk: &Talk, theirs: &Report) -> Result<(), Failure> {
        let Self { bench, plan, .. } = self;
        if plan.test != Test::AtomicBw || plan.iters() == 0 {
            return Ok(());
        }
        let expected = if plan.atomic == Atomic::FetchAdd { theirs.iters } else { 0 };
        match bench.landed_sum() {
            sum if sum == expected => Ok(()),
            sum => Err(talk.failed(format_args!(
                "its {} atomics came to {sum} instead of {expected}: were both sides given -n and the same -q and -A?",
                theirs.iters
            ))),
        }
    }

    /// Both sides send.
    fn both_ways(&self, mut talk: Talk) -> Result<Vec<Row>, Failure> {
        let (bench, plan) = (self.bench, self.plan);
        let own = &bench.own[0];
        let mut rows = Vec::new();
        for size in &plan.sizes {
            talk.enter("meeting before a size");
            talk.meet(&bench.ctx, own)?;
            talk.enter("measuring");
            let row = self.bandwidth(&talk, *size)?;
            if plan.all {
                talk.meet(&bench.ctx, own)?;
            }
            let row = self.sum(&mut talk, &row)?;
            ending::add(&row);
            rows.push(Row::Bandwidth(row));
        }
        talk.close(&bench.ctx, own)?;
        Ok(rows)
    }

    /// Adds up the results of both sides, which measured at the same time.
    fn sum(&self, talk: &mut Talk, row: &Bandwidth) -> Result<Bandwidth, Failure> {
        let plan = self.plan;
        talk.enter("telling results");
        let ours = print::report(plan, row);
        let theirs = print::in_own_unit(plan, talk.report(&self.bench.ctx, &ours)?);
        talk.check(&theirs)?;
        let sum = Report {
            peak: ours.peak + theirs.peak,
            average: ours.average + theirs.average,
            rate: ours.rate + theirs.rate,
            ..ours
        };
        self.out.line(print::bandwidth(plan, &sum));
        let factor = |theirs: f64, ours: f64| if ours > 0.0 { 1.0 + theirs / ours } else { 1.0 };
        Ok(Bandwidth {
            gbps_peak: row.gbps_peak * factor(theirs.peak, ours.peak),
            gbps: row.gbps * factor(theirs.average, ours.average),
            mpps: sum.rate,
            ..row.clone()
        })
    }

    /// Both sides count messages.
    fn send_bandwidth(&self, mut talk: Talk) -> Result<Vec<Row>, Failure> {
        let Self { bench, plan, out } = self;
        let own = &bench.own[0];
        let mut rows = Vec::new();
        for size in &plan.sizes {
            let posted = bench.lanes().post_receives(&bench.flow(plan, *size));
            posted.map_err(|error| bench.failure(&talk, &error.into(), 0))?;
            talk.enter("meeting before a size");
            talk.meet(&bench.ctx, own)?;
            talk.enter("measuring");
            let mut row = self.bandwidth(&talk, *size)?;
            if plan.both && plan.iters() > 0 {
                row = self.sum(&mut talk, &row)?;
            } else {
                out.line(print::bandwidth(plan, &print::report(plan, &row)));
            }
            ending::add(&row);
            rows.push(Row::Bandwidth(row));
            if plan.all {
                talk.enter("meeting after a size");
                talk.meet(&bench.ctx, own)?;
            }
        }
        talk.close(&bench.ctx, own)?;
        Ok(rows)
    }

    fn latency(&self, mut talk: Talk) -> Result<Vec<Row>, Failure> {
        let Self { bench, plan, .. } = self;
        let own = &bench.own[0];
        let mut rows = Vec::new();
        let works = plan.client || plan.test.is_send() || plan.test.is_write();
        for size in plan.sizes.iter().filter(|_| works) {
            if plan.test.is_send() {
                let posted = latency::post_receives(bench, plan, *size);
                posted.map_err(|error| bench.failure(&talk, &error.into(), 0))?;
                talk.enter("meeting before a size");
                talk.meet(&bench.ctx, own)?;
            }
            talk.enter("measuring");
            let qps = &bench.qps;
            let work = || latency::measure(bench, plan, *size);
            let (measured, ended) = ending::interruptible(|| abandon(qps), work);
            if !measured.histogram.is_empty() {
                let row = Latency::new(*size, &measured.histogram);
                self.out.line(print::latency(plan, &row, measured.elapsed));
                ending::add(&row);
                rows.push(Row::Latency(row));
            }
            let passed = !measured.histogram.is_empty();
            let unanswered = diagnosis::unanswered(*size, Some(bench.terms.mtu), passed);
            ended.map_err(|trouble| bench.failure(&talk, &trouble, unanswered))?;
        }
        if plan.test.is_write() {
            // These programs leave without a closing message.
            let end = Instant::now() + FAREWELL;
            while Instant::now() < end {
                bench.ctx.progress();
                std::thread::sleep(Duration::from_millis(1));
            }
            return Ok(rows);
        }
        talk.enter("measuring");
        talk.close(&bench.ctx, own)?;
        Ok(rows)
    }

    /// Measures a bandwidth.
    fn bandwidth(&self, talk: &Talk, size: usize) -> Result<Bandwidth, Failure> {
        let Self { bench, plan, .. } = self;
        let what = bench.flow(plan, size);
        let mut sample = Sample::new(plan, &what.receive, what.op.is_some());
        let observe = |so_far: &Flowed| sample.observe(so_far);
        let qps = &bench.qps;
        let work = || {
            bench.lanes().flow(&what, observe, |so_far, idle| bench.idle_flow(plan, so_far, idle))
        };
        let flowed = ending::interruptible(|| abandon(qps), work);
        let flowed = flowed.map_err(|trouble: Trouble| {
            if let Some(row) = sample.so_far(size) {
                let report = Report { iters: row.messages, ..print::report(plan, &row) };
                self.out.line(print::bandwidth(plan, &report));
                ending::add(&row);
            }
            let passed = sample.last.0 > 0;
            let unanswered = diagnosis::unanswered(size, Some(bench.terms.mtu), passed);
            bench.failure(talk, &trouble, unanswered)
        })?;
        let mut row = sample.row(size, &flowed);
        if plan.loses() && what.receive == Receive::Until && plan.iters() > 0 {
            let all = plan.iters().saturating_mul(plan.qps.into());
            let lost = all.saturating_sub(flowed.received);
            row.lost = Some(lost);
            if lost > 0 {
                self.out.note(format_args!("{lost} of {all} messages were lost on their way here"));
            }
        }
        Ok(row)
    }
}

/// The part of a flow that counts: all of it, or, in a test for a time, the part between the
/// margins.
#[derive(Debug)]
struct Sample {
    window: Option<(Duration, Duration)>,
    first: Option<(u64, Duration)>,
    last: (u64, Duration),
    peak: Peak,
    sends: bool,
    /// Whether received messages count beside sent ones. perftest counts so in a test for a time.
    both: bool,
}

impl Sample {
    fn new(plan: &PerftestPlan, receive: &Receive, sends: bool) -> Self {
        let window = match plan.until {
            Until::Time(time) => Some((plan.margin, time - plan.margin)),
            Until::Messages(_) => None,
        };
        let both = window.is_some() && *receive != Receive::No;
        Self { window, first: None, last: (0, Duration::ZERO), peak: Peak::default(), sends, both }
    }

    fn count(&self, flowed: &Flowed) -> u64 {
        match (self.sends, self.both) {
            (true, false) => flowed.sent,
            (true, true) => flowed.sent + flowed.received,
            (false, _) => flowed.received,
        }
    }

    fn observe(&mut self, flowed: &Flowed) {
        let now = (self.count(flowed), flowed.elapsed);
        if self.window.is_some_and(|(begin, end)| !(begin..=end).contains(&now.1)) {
            return;
        }
        self.first.get_or_insert(now);
        self.last = now;
        self.peak.observe(&BulkResult { messages: now.0, bytes: now.0, elapsed: now.1 });
    }

    /// The row of what was observed; none if that is nothing.
    fn so_far(&self, bytes: usize) -> Option<Bandwidth> {
        let (count, elapsed) = self.last;
        let (sent, received) = if self.sends { (count, 0) } else { (0, count) };
        let flowed = Flowed { sent, received, elapsed, all_sent: false };
        (count > 0).then(|| self.row(bytes, &flowed))
    }

    fn row(&self, bytes: usize, flowed: &Flowed) -> Bandwidth {
        let ((before, since), (messages, at)) = match (self.window, self.first) {
            (Some(_), Some(first)) => (first, self.last),
            _ => ((0, Duration::ZERO), (self.count(flowed), flowed.elapsed)),
        };
        let messages = messages - before;
        let seconds = (at - since).as_secs_f64().max(1e-9);
        let gbps = messages as f64 * bytes as f64 * 8.0 / seconds / 1e9;
        // The peak was observed in messages.
        let gbps_peak = (self.peak.best * bytes as f64).max(gbps);
        Bandwidth {
            bytes,
            messages,
            seconds,
            gbps_peak,
            gbps,
            mpps: messages as f64 / seconds / 1e6,
            lost: None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use clap::Parser;
    use rocinante::verbs::{Mtu, QpType};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// The plan of a server's command line.
    pub(crate) fn plan(line: &str) -> Result<PerftestPlan, Failure> {
        let words = ["perf"].into_iter().chain(line.split_whitespace());
        let Line { args } = Line::try_parse_from(words).unwrap();
        PerftestPlan::new(args.test, &args.given()?, &args.options, &args.qp, &args.net)
    }

    #[test]
    fn defaults_are_those_of_perftest() {
        let write = plan("write-bw 10.0.0.2").unwrap();
        assert_eq!((write.iters(), write.size_max(), write.tx_depth), (5000, 65_536, 128));
        assert!(write.client && write.cq_mod == 1 && write.inline == 0 && write.peak);
        let send = plan("send-lat").unwrap();
        assert_eq!(
            (send.iters(), send.size_max(), send.tx_depth, send.rx_depth),
            (1000, 2, 1, 512)
        );
        let few = plan("send-bw -n 20").unwrap();
        assert_eq!((few.tx_depth, few.rx_depth), (20, 20));
        let timed = plan("read-bw -D 8").unwrap();
        assert_eq!((timed.iters(), timed.margin), (0, Duration::from_secs(2)));
        let all = plan("write-bw -a").unwrap();
        assert_eq!((all.sizes.len(), all.size_max()), (23, 8 << 20));
        let atomic = plan("atomic-bw -A CMP_AND_SWAP -o 4").unwrap();
        assert_eq!((atomic.size_max(), atomic.out_reads), (8, 4));
    }

    #[test]
    fn what_perftest_does_not_take_is_refused() {
        for (line, word) in [
            ("write-bw -a -D 4", "-a"),
            ("send-bw -e -D 4", "-e"),
            ("write-lat -e", "memory"),
            ("write-bw -n 4", "from 5"),
            ("write-bw -n 10 -l 3", "multiple"),
            ("write-lat -b", "-b"),
            ("write-bw -D 4 -f 2", "margin"),
            ("atomic-bw -s 16", "8 bytes"),
            ("write-bw -R -c UC", "connect no UC"),
            ("write-bw -z -T 4", "--tclass"),
            ("read-bw -c UC", "UC for send and write"),
            ("write-bw -c UD", "UD for send"),
            ("send-bw -c XRC", "RC is for every test"),
        ] {
            let failure = plan(line).unwrap_err();
            assert_eq!(failure.code(), 2);
            assert!(failure.to_string().contains(word), "{line}: {failure}");
        }
    }

    #[test]
    fn datagrams_are_no_longer_than_the_path_mtu() {
        let mut all = plan("send-bw -a -c UD").unwrap();
        all.fit(Mtu::Mtu1024).unwrap();
        assert_eq!((all.sizes.len(), all.size_max(), all.head()), (10, 1024, 40));
        assert!(plan("send-lat -c UD -s 1025").unwrap().fit(Mtu::Mtu1024).is_err());
        let mut connected = plan("send-bw -c UC -s 1025").unwrap();
        connected.fit(Mtu::Mtu1024).unwrap();
        assert_eq!((connected.service, connected.head()), (QpType::Uc, 0));
    }

    #[test]
    fn margins_do_not_count() {
        let plan = plan("write-bw -D 8 10.0.0.2").unwrap();
        let mut sample = Sample::new(&plan, &Receive::No, true);
        let at = |sent, seconds| Flowed {
            sent,
            elapsed: Duration::from_secs(seconds),
            ..Flowed::default()
        };
        for (sent, seconds) in [(1000, 1), (1010, 2), (1110, 4), (1210, 6), (9999, 7)] {
            sample.observe(&at(sent, seconds));
        }
        let row = sample.row(1000, &at(9999, 8));
        assert_eq!((row.messages, row.seconds), (200, 4.0));
        assert!((row.mpps - 50e-6).abs() < 1e-12);
    }
}
