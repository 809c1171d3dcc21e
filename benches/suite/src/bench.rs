//! `rocinante-bench`: measures everything, each figure right after its raw baseline, with TCP
//! beside.
//!
//! One run measures every cell once, and the runs follow each other. Within a run, figures to be
//! compared are measured right after each other, by pairs of processes in two network namespaces.
//! So a machine that changes its speed changes it for all of them.

mod goals;
mod plan;
mod plot;
mod report;
mod rows;
mod run;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use rocinante::verbs::Mtu;

use self::plan::Choice;
use self::run::Bench;
use crate::goal;
use crate::machine::Mode;
use crate::workers::{Congestion, PlaceArgs, Provider};
use rocinante_cli::output::{Failure, Output, Result};
use rocinante_cli::session::mtu;

/// Measure everything: bandwidth, rate and latency of all backends beside their raw baselines and
/// TCP, and their processor time
///
/// With Soft-RoCE devices all processes wait for their turn, since the kernel's threads need their
/// cores. On an emulated processor the measurements take longer by its slowness, and no goal is
/// judged.
///
/// A raw baseline measures the same interface without a protocol: packets of the same sizes, ICRC
/// and copies, and nothing else. A run does not count if the machine changed its speed meanwhile,
/// or its hypervisor took time away. Everything is measured between two network namespaces with one
/// veth between them, unless addresses are given.
///
/// Exit status: 0 if something was measured, 1 if nothing could be, 2 if the command line makes no
/// sense. The output names measurements that failed.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Fewer sizes, each for a shorter time, no links and no fan_in: at most 40 seconds a run
    /// instead of 4 minutes
    #[arg(long)]
    quick: bool,
    /// Only these groups (bandwidth, rate, latency, both, qps, small_buffers, links, fan_in, sweep,
    /// latency_sweep, idle), measures (write_bw, …) or peers (tcp-spin, tcp-blocking, iperf3, udp,
    /// quinn-udp, sockperf-udp, sockperf-tcp)
    #[arg(long, value_delimiter = ',', value_name = "WORDS")]
    only: Vec<String>,
    /// Backends: udp, packet, afxdp; hw for the kernel's RDMA devices [default: all that are
    /// available]
    #[arg(long, value_delimiter = ',')]
    netdev: Vec<Provider>,
    /// Path MTUs of bandwidths, in bytes
    #[arg(long, value_delimiter = ',', default_value = "4096,1024", value_parser = mtu)]
    mtu: Vec<Mtu>,
    /// How often everything is measured
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// How long each figure is measured, in seconds [default: 0.25, or 0.08 with --quick; more on a
    /// slow machine]
    #[arg(long)]
    seconds: Option<f64>,
    /// Also the backends' ports with no engine behind them, as rows of udp-port and packet-port
    #[arg(long)]
    ports: bool,
    #[command(flatten)]
    place: PlaceArgs,
    /// Write a report to this directory: report.md, rows.jsonl, samples.jsonl, and plots over the
    /// size of messages
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print one JSON object per row, and everything else to standard error
    #[arg(long)]
    json: bool,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    match measure(args, out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => out.end("rocinante-bench", &Err::<(), _>(failure)),
    }
}

impl Args {
    /// The choice of what to measure, on a machine that is `slowness` times slower than an ordinary
    /// one.
    fn choice(&self, slowness: f64) -> Result<Choice> {
        let usual = slowness * if self.quick { 0.08 } else { 0.25 };
        let seconds = self.seconds.unwrap_or(usual);
        if seconds.is_nan() || !(0.01..=60.0).contains(&seconds) {
            return Err(Failure::Usage("--seconds must be from 0.01 to 60".into()));
        }
        self.only.iter().try_for_each(|word| Choice::check(word).map_err(Failure::Usage))?;
        let providers = Provider::wanted(&self.netdev, &self.place)?;
        Ok(Choice {
            providers,
            mtus: self.mtu.iter().map(|mtu| mtu.bytes()).collect(),
            congestions: Congestion::available(),
            only: self.only.clone(),
            seconds,
            quick: self.quick,
        })
    }
}

fn measure(args: &Args, out: Output) -> Result {
    let slowness = Mode::now().slowness();
    let choice = args.choice(slowness)?;
    let mut bench = Bench::new(&args.place, (args.quick, args.runs), args.ports, slowness, out)?;
    bench.measure(&choice, args.runs as usize);
    let rows = bench.finish()?;
    let goals = if bench.is_slow() { Vec::new() } else { goals::all(&rows) };
    if let Some(dir) = &args.report {
        report::write(dir, &bench, &rows, &goals)?;
        out.note(format_args!("the report is in {}", dir.display()));
    }
    if args.json {
        rows.iter().for_each(|row| out.result(row.json()));
        return Ok(());
    }
    let caution = bench.rows.caution();
    out.line(table::markdown(&rows, &caution));
    if args.only.is_empty() && !goals.is_empty() {
        out.line(goal::markdown(&goals, &caution));
    }
    out.line(bench.remarks());
    Ok(())
}
