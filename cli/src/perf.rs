//! `rocinante perf`: bandwidth and latency between two processes, measured as in perftest's
//! programs.

pub mod plan;
pub mod round;
pub mod table;

use std::process::ExitCode;

use rocinante::{Context, Mtu};
use serde::ser::Error as _;
use serde::{Serialize, Serializer};

use crate::compat::perftest::{self, Options, PerftestProgram};
use crate::counters;
use crate::ending;
use crate::output::{Failure, Output};
use crate::pingpong::Place;
use crate::session::{self, NetArgs, Server, Session};
use plan::{Atomic, Given, Plan, Test};
use round::Round;
use table::Row;

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
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to measure
    #[arg(value_enum)]
    pub(crate) test: Test,
    #[command(flatten)]
    pub(crate) net: NetArgs,
    /// Bytes of each message [default: 65536 for bandwidth, 2 for latency; atomics have 8]
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=plan::SIZE_MAX))]
    size: Option<u32>,
    /// Measure all powers of two from 2 bytes to 8 MiB
    #[arg(short, long, conflicts_with = "size")]
    all: bool,
    /// Messages of each queue pair [default: 1000 for latency, 5000 for bandwidth; with -a, at most
    /// 1 GiB of each size]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Run for so many seconds (per size) instead of a number of messages
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
    /// Receives posted per queue pair (send-bw only) [default: 512]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::DEPTH_MAX))]
    rx_depth: Option<u32>,
    /// Requests posted by one call (bandwidth only) [default: 1]
    #[arg(short = 'l', long, alias = "post_list", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::DEPTH_MAX))]
    post_list: Option<u32>,
    /// One completion for so many requests (bandwidth only) [default: 32, at most half of -t]
    #[arg(short = 'Q', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=plan::DEPTH_MAX))]
    cq_mod: Option<u32>,
    /// Which atomic atomic-bw and atomic-lat do [default: fetch-add]
    #[arg(short = 'A', long, value_enum, alias = "atomic_type")]
    atomic: Option<Atomic>,
    /// In both directions at once (bandwidth only): the sum of both sides is printed
    #[arg(short, long)]
    bidirectional: bool,
    /// The other side is a program of this kind
    #[arg(long, value_enum, value_name = "PROGRAM")]
    compat: Option<PerftestProgram>,
    #[command(flatten)]
    pub(crate) options: Options,
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
    /// The version of the peer's exchange, if the peer is one of perftest's programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    perftest: Option<String>,
    /// The first queue pair of each side, in the last measurement.
    local: Place,
    remote: Place,
    #[serde(flatten, serialize_with = "with_snake_case")]
    plan: Plan,
    /// One row per size. The server of a one-sided test has none.
    results: Vec<Row>,
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

fn run_side(args: &Args, command: &str, out: Output) -> Result<Report, Failure> {
    let given = args.given();
    if args.compat.is_some() {
        return with_perftest(args, &given, out);
    }
    args.options.check_absent()?;
    given.check_own(args.test)?;
    let (session, plan) = match &args.net.host {
        None => Server::start(&args.net, out)?.accept::<Plan>(command, &given)?,
        Some(host) => {
            let plan = given.plan(args.test);
            (Session::connect(&args.net, host, command, &plan, out)?, plan)
        }
    };
    session.run(|session| {
        plan.check(args.test)?;
        measure(session, args, plan, out)
    })
}

/// Measures with one of perftest's programs.
fn with_perftest(args: &Args, given: &Given, out: Output) -> Result<Report, Failure> {
    let outcome = perftest::run(args, given, out)?;
    let mut plan = given.plan(args.test);
    plan.mtu = Some(outcome.mtu);
    let done = &outcome.plan;
    let messages = Some(done.iters()).filter(|iters| *iters > 0);
    plan.done_as(messages, done.cq_mod, [done.tx_depth, done.rx_depth]);
    let (ends, version) = (outcome.ends, Some(outcome.version));
    Ok(args.report(&outcome.ctx, plan, ends, outcome.results, version, out))
}

impl Args {
    fn report(
        &self,
        ctx: &Context,
        plan: Plan,
        [local, remote]: [Place; 2],
        results: Vec<Row>,
        perftest: Option<String>,
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
            perftest,
            local,
            remote,
            plan,
            results,
            counters: counters.as_ref().map(counters::json),
        }
    }

    pub(crate) fn given(&self) -> Given {
        Given {
            size: self.size,
            all: self.all,
            iters: self.iters,
            duration: self.duration,
            qps: self.qps,
            mtu: self.mtu.map(Mtu::bytes),
            tx_depth: self.tx_depth,
            rx_depth: self.rx_depth,
            post_list: self.post_list,
            cq_mod: self.cq_mod,
            atomic: self.atomic,
            bidirectional: self.bidirectional,
        }
    }
}

fn measure(
    session: &mut Session,
    args: &Args,
    mut plan: Plan,
    out: Output,
) -> Result<Report, Failure> {
    let (test, client) = (args.test, args.net.host.is_some());
    let (mut results, mut last) = (Vec::new(), None);
    for (index, size) in plan.sizes().enumerate() {
        let round = Round::connect(session, test, &plan, size, client)?;
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
        last = Some((round.mtu().bytes(), round.ends_of_first()));
    }
    let (mtu, ends) = last.ok_or_else(|| session.failed("there is no size to measure"))?;
    plan.mtu = Some(mtu);
    Ok(args.report(&session.ctx, plan, ends, results, None, out))
}
