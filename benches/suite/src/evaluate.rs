//! `rocinante-bench evaluate`: the whole study of a machine by one command.
//!
//! A study is a table of experiments (`plan`), each in all modes, measured in turns. Every row is
//! in a file when it is measured (`store`), so that a study goes on where it was stopped. The
//! report is made of the rows alone.

mod experiment;
mod judge;
mod plan;
mod progress;
mod report;
mod solutions;
mod store;
mod study;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rocinante_cli::output::{Failure, Output, Result};

use self::plan::Choice;
use self::store::{Found, Load, Session, Store};
use self::study::Study;
use crate::machine::Machine;
use crate::workers::PlaceArgs;

/// Make the whole study of this machine: all modes beside TCP, by the size of messages, the number
/// of pairs of containers, and the offered load, with a report that begins with which to use when
///
/// Each row is in DIR/rows.jsonl when it is measured. A study that was stopped goes on with
/// --resume, which takes only rows of the same version, machine and settings.
///
/// Everything is measured between containers behind a bridge, which are network namespaces or
/// podman's, on two hosts with VXLAN between them, or in one namespace. Unmodified programs run by
/// `rocinante`, which is beside this program. A mode that cannot be had stays in the report, with
/// the reason.
///
/// Exit status: 0 if something was measured, 1 if nothing could be, 2 if the command line makes no
/// sense.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The directory of a new study: report.md, report.html, plots, rows.jsonl
    #[arg(long, value_name = "DIR", required_unless_present = "resume")]
    report: Option<PathBuf>,
    /// Go on with the study of this directory, as it was begun unless other options are given
    #[arg(long, value_name = "DIR", conflicts_with = "report")]
    resume: Option<PathBuf>,
    /// Fewer points, each for a shorter time and once: within 2 minutes instead of 40
    #[arg(long)]
    quick: bool,
    /// Only these experiments: size, scale, load, many_to_one, isolation, starvation, failure,
    /// start, control, rate, pressure
    #[arg(long, value_delimiter = ',', value_name = "EXPERIMENTS")]
    only: Vec<String>,
    /// Only these modes: a wrong name lists them all
    #[arg(long, value_delimiter = ',', value_name = "MODES")]
    modes: Vec<String>,
    /// Take turns with the other processes of the machine, instead of going first
    #[arg(long)]
    patient: bool,
    /// Numbers of pairs of containers at once, 1 to 100
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS")]
    pairs: Vec<u64>,
    /// Address of the side that sends, for --devices
    #[arg(long, requires_all = ["remote", "devices"])]
    local: Option<IpAddr>,
    /// Address of the side that receives
    #[arg(long, requires = "local")]
    remote: Option<IpAddr>,
    /// RDMA devices of the two addresses, for the mode kernel
    #[arg(long, value_delimiter = ',', requires = "local")]
    devices: Vec<String>,
}

/// Time of a study. What does not fit is left to --resume.
const TIME_MAX: Duration = Duration::from_secs(40 * 60);
const TIME_MAX_QUICK: Duration = Duration::from_secs(120);

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: false };
    match evaluate(args, out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => out.end(store::COMMAND, &Err::<(), _>(failure)),
    }
}

impl Args {
    /// The choice of these options, and of an earlier session where they say nothing.
    fn choice(&self, earlier: Option<Choice>) -> Choice {
        let earlier = earlier.unwrap_or_default();
        let or = |given: &[String], before| if given.is_empty() { before } else { given.to_vec() };
        Choice {
            quick: self.quick || earlier.quick,
            patient: self.patient || earlier.patient,
            only: or(&self.only, earlier.only),
            modes: or(&self.modes, earlier.modes),
            pairs: if self.pairs.is_empty() { earlier.pairs } else { self.pairs.clone() },
        }
    }

    /// The addresses and the devices, or those of an earlier session.
    fn place(&self, earlier: Vec<String>) -> Vec<String> {
        let (Some(local), Some(remote)) = (self.local, self.remote) else { return earlier };
        let addresses = [local.to_string(), remote.to_string()];
        addresses.into_iter().chain(self.devices.iter().cloned()).collect()
    }
}

impl Session {
    /// Where it measures.
    fn place_args(&self) -> PlaceArgs {
        let address = |index: usize| self.place.get(index)?.parse().ok();
        let devices = self.place.iter().skip(2).cloned().collect();
        let (local, remote) = (address(0), address(1));
        PlaceArgs { local, remote, devices, patient: self.choice.patient, agent: false }
    }
}

fn evaluate(args: &Args, out: Output) -> Result {
    args.choice(None).check().map_err(Failure::Usage)?;
    let (machine, load) = (Machine::here(), Load::now());
    let session = |choice, place| Session {
        machine: machine.clone(),
        load,
        choice: args.choice(choice),
        place: args.place(place),
    };
    let (dir, session, store): (&Path, _, _) = match (&args.report, &args.resume) {
        (Some(dir), _) => {
            let session = session(None, Vec::new());
            (dir, session.clone(), Store::create(dir, &session)?)
        }
        (None, Some(dir)) => {
            let (text, mut now) = (Found::read(dir)?, None);
            let found =
                Found::of(&text, |choice, place| now.insert(session(choice, place)).clone());
            out.note(format_args!("{}: {}", dir.display(), found.told()));
            let session = now.unwrap_or_else(|| session(None, Vec::new()));
            (dir, session.clone(), Store::resume(dir, &session, found)?)
        }
        (None, None) => return Err(Failure::Usage("--report or --resume is needed".into())),
    };
    let time = if session.choice.quick { TIME_MAX_QUICK } else { TIME_MAX };
    let mut study = Study::new(session, store, time);
    study.measure(out)?;
    report::write(dir, &study)?;
    let rows = &study.store.rows;
    if rows.iter().all(|row| row.missing.is_some()) {
        let why = rows.first().and_then(|row| row.missing.clone()).unwrap_or_default();
        return Err(Failure::Failed(format!("nothing was measured: {why}")));
    }
    out.line(report::summary(&study));
    out.note(format_args!("the report is in {}", dir.display()));
    Ok(())
}
