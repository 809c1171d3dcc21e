//! The whole matrix with an RDMA device of the kernel, such as a ConnectX, and a report of it: the
//! device by itself, with itself, with Rocinante in software, and Rocinante with programs of other
//! projects.

mod cells;
mod losses;
mod report;
mod stage;

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rocinante::device::Backend;
use rocinante_lab::kill_children_on_signal;

use self::cells::CardCell;
use self::report::{Entry, Report};
use self::stage::Stage;
use crate::matrix::{Step, Verdict};

/// Run the whole matrix with an RDMA device of the kernel, and write a report
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The device, as `ibv_devices` lists it: `mlx5_0`; `mlx5_0:2` is its second port
    #[arg(long, value_name = "NAME")]
    device: String,
    /// An address of the device; else the first IPv4 and the first global IPv6 address of the port.
    /// May be repeated
    #[arg(long, value_name = "ADDRESS")]
    address: Vec<IpAddr>,
    /// Where the verbs agent of the device's machine is (`cargo xtask interop agent` starts it
    /// there): HOST or HOST:PORT; `local`: the device is in this machine
    #[arg(long, value_name = "HOST|local", default_value = "local")]
    agent: String,
    /// An address of ours, for Rocinante in software; that of the other family is found on the same
    /// interface. May be repeated
    #[arg(long, value_name = "ADDRESS")]
    ours: Vec<IpAddr>,
    /// The network namespace of our address, if it is not the present one: a name of `ip netns`, or
    /// a path
    #[arg(long, value_name = "NAME|PATH")]
    netns: Option<String>,
    /// Only these backends: udp, packet, afxdp
    #[arg(long, value_name = "BACKENDS", value_delimiter = ',')]
    netdev: Vec<Backend>,
    /// The behaviour expected of Soft-RoCE: its known departures from the specification, or the
    /// specification, as of any other device
    #[arg(long, value_enum, default_value = "known")]
    expect: Expect,
    /// Where the report is written; else `interop-DEVICE.md`
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Only name the cells
    #[arg(long)]
    list: bool,
    /// Run only cells with all these words in their names; A,B is a word that may be A or B
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
}

/// The behaviour expected of Soft-RoCE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Expect {
    /// Its known departures.
    Known,
    /// The specification.
    Specification,
}

impl Args {
    fn takes(&self, backend: Backend) -> bool {
        self.netdev.is_empty() || self.netdev.contains(&backend)
    }

    /// The reason why a cell is left out, if it is.
    fn leaves_out(&self, name: &str) -> Option<String> {
        let any = |word: &String| word.split(',').any(|part| name.contains(part));
        let chosen = self.filters.iter().all(any);
        (!chosen).then(|| format!("left out by the filter `{}`", self.filters.join(" ")))
    }
}

/// How often in a row an agent may fail to answer before the run gives up.
const MISSED_MAX: u32 = 3;

/// Runs the cells that `args` selects and writes the report. It fails if a cell fails, or if no
/// cell could run.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let cells = cells::all();
    if args.list {
        let names = cells.iter().map(CardCell::to_string);
        names.filter(|name| args.leaves_out(name).is_none()).for_each(|name| println!("{name}"));
        return ExitCode::SUCCESS;
    }
    match attempt(args, &cells) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("interop: {why}");
            ExitCode::FAILURE
        }
    }
}

fn attempt(args: &Args, cells: &[CardCell]) -> Step<bool> {
    // Ctrl-C ends all child processes, and with them the rules.
    kill_children_on_signal().map_err(|error| format!("no handler for Ctrl-C: {error}"))?;
    let mut report = Report::begin();
    let stage = Stage::new(args);
    match &stage {
        Ok(stage) => {
            report.describe(stage);
            run_all(args, stage, cells, &mut report);
        }
        Err(why) => {
            eprintln!("interop: {why}");
            report.give_up(why);
            let left = |cell| Entry::new(cell, Verdict::NotRun(format!("nothing was run: {why}")));
            report.entries = cells.iter().map(left).collect();
        }
    }
    let bare = args.device.replace(['/', ':'], "-");
    let file = args.report.clone().unwrap_or_else(|| format!("interop-{bare}.md").into());
    let text = report.to_string();
    fs::write(&file, &text)
        .map_err(|error| format!("cannot write the report {}: {error}\n{text}", file.display()))?;
    println!("{}; the report: {}", report.totals(), file.display());
    Ok(report.is_good())
}

fn run_all(args: &Args, stage: &Stage, cells: &[CardCell], report: &mut Report) {
    let mut missed = 0;
    for cell in cells {
        let name = cell.to_string();
        if let Some(why) = args.leaves_out(&name) {
            report.entries.push(Entry::new(cell, Verdict::NotRun(why)));
            continue;
        }
        if missed >= MISSED_MAX {
            let why = "the agent was gone: see the failures";
            report.entries.push(Entry::new(cell, Verdict::NotRun(why.into())));
            continue;
        }
        let begun = Instant::now();
        let verdict = Verdict::from(cell.run(stage, &mut report.noticed));
        say(&name, &verdict, begun.elapsed());
        missed = match (&verdict, stage.agent()) {
            (Verdict::Failed(_), Err(_)) => missed + 1,
            _ => 0,
        };
        report.entries.push(Entry::new(cell, verdict));
    }
}

fn say(name: &str, verdict: &Verdict, took: Duration) {
    let seconds = took.as_secs_f64();
    match verdict {
        Verdict::Passed => println!("test {name} ... ok ({seconds:.2} s)"),
        Verdict::Failed(why) => println!("test {name} ... FAILED ({seconds:.2} s)\n    {why}"),
        Verdict::NotRun(why) => println!("test {name} ... not run: {why}"),
    }
}
