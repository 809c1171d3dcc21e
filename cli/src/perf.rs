//! `rocinante perf`: bandwidth and latency between two processes, measured as in perftest's
//! programs.

pub mod interval;
pub mod plan;
pub mod round;
pub mod table;
pub mod test;

use std::process::ExitCode;
use std::time::Duration;

use rocinante::Context;
use rocinante::verbs::Mtu;
use serde::ser::Error as _;
use serde::{Serialize, Serializer};

use crate::counters;
use crate::ending;
use crate::output::{self, Failure, Kind, Output, Result};
use crate::pingpong::Place;
use crate::session::{self, NetArgs, Server, Session};
use crate::size::size;
use crate::turns::{Processor, Watch};
use plan::{Given, Plan};
use round::{Own, Round};
use table::Row;
use test::{Atomic, Service, Test};

/// Measure bandwidth or latency between two processes, like perftest's ib_write_bw and its kin
///
/// The server is started with the test alone, the client with the server's name or address as well.
/// The client's options hold for both; an option that the server is given as well must be the same.
/// The client prints the results. The server ends after one client.
///
/// Latency is half the round trip for send and write (both sides poll), the whole for read and
/// atomic. Bandwidth counts payload: Gb/s are 10⁹ bits per second, Mpps 10⁶ messages per second.
/// Its peak is the best stretch of at least 10 ms.
///
/// perftest's names are names of the tests, too. perftest itself, which speaks with perftest on
/// other devices, runs by `rocinante run`.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense, 3 if the
/// result is below -w or -y.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to measure
    #[arg(value_enum)]
    test: Test,
    #[command(flatten)]
    net: NetArgs,
    /// Bytes of each message [default: 65536 for bandwidth, 2 for latency; atomics have 8]
    #[arg(short, long, value_parser = size::<1, { plan::SIZE_MAX }>)]
    size: Option<u32>,
    /// Measure all powers of two from 2 bytes to 8 MiB
    #[arg(short, long, conflicts_with = "size")]
    all: bool,
    /// Messages of each queue pair [default: 1000 for latency, 5000 for bandwidth; with -a, at most
    /// 1 GiB of each size]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Run for this time (per size) instead of a number of messages
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "iters", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    duration: Option<u64>,
    /// Queue pairs (bandwidth only) [default: 1]
    #[arg(short, long, alias = "qp", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::QPS_MAX))]
    qps: Option<u32>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest that fits both links]
    #[arg(short, long, value_parser = session::mtu)]
    mtu: Option<Mtu>,
    /// Requests outstanding per queue pair (bandwidth only) [default: 128]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::DEPTH_MAX))]
    tx_depth: Option<u32>,
    /// Receives posted per queue pair (send-bw; else without effect) [default: 512]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::DEPTH_MAX))]
    rx_depth: Option<u32>,
    /// Requests posted by one call (bandwidth only) [default: 1]
    #[arg(short = 'l', long, alias = "post_list", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::DEPTH_MAX))]
    post_list: Option<u32>,
    /// Requests per completion (bandwidth only) [default: 32, at most half of -t]
    #[arg(short = 'Q', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::DEPTH_MAX))]
    cq_mod: Option<u32>,
    /// Which atomic atomic-bw and atomic-lat do [default: fetch-add]
    #[arg(short = 'A', long, value_enum, alias = "atomic_type")]
    atomic: Option<Atomic>,
    /// In both directions at once (bandwidth only): the sum of both sides is printed
    #[arg(short, long)]
    bidirectional: bool,
    /// The transport service: RC, UC for send and write, UD for send [default: RC]
    #[arg(short = 'c', long, value_name = "TYPE")]
    connection: Option<String>,
    /// Sleep on completion events instead of polling
    #[arg(short, long)]
    events: bool,
    /// Send messages up to this size inline [default: 0 for bandwidth, 64 for latency]
    #[arg(short = 'I', long = "inline_size", alias = "inline-size", value_name = "BYTES", value_parser = size::<0, 4096>)]
    inline_size: Option<u32>,
    /// READs or atomics outstanding at a time [default: 16]
    #[arg(short = 'o', long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=128))]
    outs: Option<u8>,
    /// Wait 4.096 µs · 2^N for an acknowledgement [default: 14]
    #[arg(short = 'u', long = "qp-timeout", value_name = "N", value_parser = clap::value_parser!(u8).range(1..=31))]
    qp_timeout: Option<u8>,
    /// Traffic class of the packets: DSCP in the upper six bits, ECN in the lower two
    #[arg(long, value_name = "CLASS")]
    tclass: Option<u8>,
    /// Print a line for each interval of this length while measuring
    #[arg(short, long, value_name = "SECONDS", value_parser = interval::seconds)]
    interval: Option<Duration>,
    /// Run until a signal comes, and print a line for each interval of -i or -D [default: 5 s]
    #[arg(long = "run_infinitely", alias = "run-infinitely", conflicts_with_all = ["all", "iters"])]
    run_infinitely: bool,
    /// The least bandwidth, in Gb/s: if it is less, the exit status is 3
    #[arg(short = 'w', long = "limit_bw", alias = "limit-bw", value_name = "BANDWIDTH")]
    limit_bw: Option<f64>,
    /// The least rate of messages, in 10⁶ messages per second: if it is less, the exit status is 3
    #[arg(short = 'y', long = "limit_msgrate", alias = "limit-msgrate", value_name = "MPPS")]
    limit_msgrate: Option<f64>,
    /// Print this process's counters at the end, also if it fails or a signal ends it
    #[arg(long)]
    counters: bool,
    /// End standard output with one JSON object on one line; all else goes to standard error
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    test: Test,
    role: &'static str,
    netdev: &'static str,
    /// The first queue pair of each side, in the last measurement.
    local: Place,
    remote: Place,
    #[serde(flatten, serialize_with = "with_snake_case")]
    plan: Plan,
    /// One row per size. The server of a one-sided test has none.
    results: Vec<Row>,
    /// How this side's thread got its processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    processor: Option<Processor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counters: Option<serde_json::Value>,
}

/// The options by the names that they have in JSON. Between the two sides they have those of the
/// command line.
fn with_snake_case<S: Serializer>(plan: &Plan, to: S) -> Result<S::Ok, S::Error> {
    let options = serde_json::to_value(plan).map_err(S::Error::custom)?;
    let options = options.as_object().into_iter().flatten();
    to.collect_map(options.map(|(name, value)| (name.replace('-', "_"), value)))
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    let command = args.test.command();
    let program = format!("rocinante {command}");
    ending::begin(&program, out, args.counters);
    out.end(&program, &run_side(args, &command, out))
}

fn run_side(args: &Args, command: &str, out: Output) -> Result<Report> {
    let given = args.given()?;
    given.check(args.test)?;
    if args.events && args.test == Test::WriteLat {
        let why = "-e: write-lat waits for memory, not for completions";
        return Err(Failure::Usage(why.into()));
    }
    let Some(host) = &args.net.host else { return serve(args, &given, command, out) };
    let plan = given.plan(args.test);
    plan.check(args.test)?;
    let session = Session::connect(&args.net, host, command, &plan, out)?;
    session.run(|session| measure(session, args, plan, out))
}

/// Serves one client, or with `-P` one after the other.
fn serve(args: &Args, given: &Given, command: &str, out: Output) -> Result<Report> {
    let server = Server::start(&args.net, out)?;
    server.serve(|| {
        let (session, plan) = server.accept::<Plan>(command, given)?;
        session.run(|session| {
            plan.check(args.test)?;
            measure(session, args, plan, out)
        })
    })
}

impl Args {
    fn report(
        &self,
        ctx: &Context,
        plan: Plan,
        [local, remote]: [Place; 2],
        results: Vec<Row>,
        processor: Option<Processor>,
        out: Output,
    ) -> Report {
        let counters = self.counters.then(|| ctx.counters());
        if let Some(counters) = &counters {
            out.note(counters::text(counters));
        }
        Report {
            test: self.test,
            role: if self.net.host.is_some() { "client" } else { "server" },
            netdev: ctx.provider().name(),
            local,
            remote,
            plan,
            results,
            processor,
            counters: counters.as_ref().map(counters::json),
        }
    }

    /// Checks the results against `-w` and `-y`.
    fn check_limits(&self, results: &[Row]) -> Result {
        for row in results {
            let Row::Bandwidth(row) = row else { continue };
            let measured = [
                (self.limit_bw, row.gbps, "Gb/s", "-w"),
                (self.limit_msgrate, row.mpps, "million messages per second", "-y"),
            ];
            for (limit, value, unit, option) in measured {
                if let Some(limit) = limit.filter(|limit| value < *limit) {
                    let (bytes, value) = (row.bytes, output::digits(value));
                    return Err(Failure::Of(
                        Kind::Limit,
                        format!(
                            "{value} {unit} with messages of {bytes} bytes, less than {limit} ({option})"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// The length of an interval, if a line is printed for each.
    fn interval(&self) -> Option<Duration> {
        const USUAL: u64 = 5;
        let usual = || Duration::from_secs(self.duration.unwrap_or(USUAL));
        self.interval.or_else(|| self.run_infinitely.then(usual))
    }

    fn given(&self) -> Result<Given> {
        if !self.test.is_bandwidth() && (self.limit_bw.is_some() || self.limit_msgrate.is_some()) {
            let why = format!("-w and -y are for bandwidth: {} has none", self.test);
            return Err(Failure::Usage(why));
        }
        let forever = self.run_infinitely.then_some(u64::MAX);
        let connection = self.connection.as_deref();
        let connection = connection.map(|name| Service::of(name, self.test)).transpose()?;
        Ok(Given {
            size: self.size,
            all: self.all,
            iters: self.iters.or(forever),
            duration: self.duration.filter(|_| forever.is_none()),
            qps: self.qps,
            mtu: self.mtu.map(Mtu::bytes),
            tx_depth: self.tx_depth,
            // Other tests queue no receives.
            rx_depth: self.rx_depth.filter(|_| self.test == Test::SendBw),
            post_list: self.post_list,
            cq_mod: self.cq_mod,
            atomic: self.atomic,
            bidirectional: self.bidirectional,
            connection,
            outs: self.outs,
            qp_timeout: self.qp_timeout,
            tclass: self.tclass,
        })
    }
}

fn measure(session: &mut Session, args: &Args, mut plan: Plan, out: Output) -> Result<Report> {
    let (test, client) = (args.test, args.net.host.is_some());
    let (mut results, mut last) = (Vec::new(), None);
    let watch = Watch::start();
    for (index, size) in plan.sizes().enumerate() {
        let how = Own {
            client,
            events: args.events,
            inline: args.inline_size,
            interval: args.interval(),
        };
        let round = Round::connect(session, test, &plan, size, how)?;
        if plan.all && !round.fits() {
            break;
        }
        round.check_size().map_err(|why| session.failed(why))?;
        if index == 0 {
            out.line(round.banner(session));
            if client || test == Test::SendBw {
                out.line(table::header(test));
            }
        }
        if let Some(row) = round.measure(session, out)? {
            out.line(&row);
            ending::add(&row);
            results.push(row);
        }
        last = Some((round.mtu.bytes(), round.ends));
    }
    let (mtu, ends) = last.ok_or_else(|| session.failed("there is no size to measure"))?;
    plan.mtu = Some(mtu);
    let processor = watch.end(out);
    args.check_limits(&results)?;
    Ok(args.report(&session.ctx, plan, ends, results, processor, out))
}
