//! `rocinante policy-check`: the rules and limits that bind in this kernel.
//!
//! The matrix: every [control](table::CONTROLS) × every backend × IPv4 and IPv6. Each cell puts a
//! control on the path between two containers of a lab of its own, sends RDMA traffic through it,
//! and compares the effect with the table.

mod agent;
mod install;
mod lab;
pub(crate) mod live;
mod measure;
pub mod table;

use std::io::{self, Write};
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante_lab::{
    Lab, LabError, Privilege, enter_user_namespace, kill_children, kill_children_on_signal,
};
use serde::Serialize;

use crate::ending;
use crate::output::{self, Failure, Output, rounded};
use crate::workers::Workers;
use install::Trouble;
use measure::{Bench, Figures};
use table::{BACKENDS, CONTROLS, Control, Effect, Group, Topology};

pub use lab::Family;

/// The command's name.
const NAME: &str = "rocinante policy-check";
/// Time limit of an answer.
const LIMIT: Duration = Duration::from_secs(30);
/// Path MTU.
const MTU: u32 = 4096;
/// The limit of every shaper, in bits per second.
const RATE: u32 = 100_000_000;
/// Bytes that a shaper lets pass at once.
const BURST: u32 = 128 << 10;

/// Show which rules and limits of the host bind which backend in this kernel
///
/// Makes network namespaces of its own, puts each of 46 controls (rules, shapers, marks) on the
/// path between two containers, sends RDMA through it over each backend, and compares the effect
/// with docs/netfilter.md. It does not touch the machine's own network.
///
/// Needs root, or unprivileged user namespaces (then without afxdp and tcx, which load BPF
/// programs).
///
/// Exit status: 0 if every cell that the machine can try is as documented.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Try every control with IPv4 and IPv6; else the families alternate
    #[arg(long)]
    pub all: bool,
    /// End standard output with the result as one JSON object on one line; all else goes to
    /// standard error
    #[arg(long)]
    pub json: bool,
    /// Only controls whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Only this backend
    #[arg(long, value_parser = BACKENDS)]
    pub netdev: Option<String>,
    /// In place of the matrix: say which rules, shapers and limits of an agent lie on the path of
    /// a running container, and which backend each binds. NETNS is a name of `ip netns` or a path
    #[arg(long, value_name = "NETNS|PID", conflicts_with_all = ["all", "only", "netdev"])]
    pub live: Option<String>,
    /// With --live: send ten datagrams from the container to this address, and count them at the
    /// host end by a counter that is removed afterwards
    #[arg(long, value_name = "PEER", requires = "live")]
    pub probe: Option<IpAddr>,
    /// Take every rule away before traffic is sent: each cell must then fail
    #[arg(long, hide = true)]
    pub without_rules: bool,
}

/// The verdict on a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "why", rename_all = "kebab-case")]
pub enum Verdict {
    /// As documented.
    AsDocumented,
    /// Not as documented: the differences.
    Differs(Vec<String>),
    /// The kernel lacks this option, or the user this right.
    #[serde(serialize_with = "as_list")]
    NotToBeHad(String),
}

/// One text in the form of several.
fn as_list<S: serde::Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    [text].serialize(to)
}

/// A cell of the matrix.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// The control's name.
    pub control: &'static str,
    /// Its kind.
    pub group: Group,
    /// Its network.
    pub topology: Topology,
    /// The backend.
    pub netdev: &'static str,
    /// The family.
    pub family: Family,
    /// The effect by the table.
    pub expected: Effect,
    /// Whether it is so.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// How often it was tried: twice only if the first time differed by a time or a rate, which may
    /// have been the machine's.
    pub attempts: u32,
    /// The figures measured.
    pub figures: Figures,
}

impl Cell {
    /// A cell that was not tried.
    fn new(control: &Control, at: usize, family: Family, verdict: Verdict) -> Self {
        Self {
            control: control.name,
            group: control.group,
            topology: control.topology,
            netdev: BACKENDS[at],
            family,
            expected: control.expected[at],
            verdict,
            attempts: 0,
            figures: Figures::default(),
        }
    }
}

/// The result.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// All cells.
    pub cells: Vec<Cell>,
    /// Their number.
    pub total: usize,
    /// Those as documented.
    pub documented: usize,
    /// Those that this kernel or this user does not have.
    pub not_to_be_had: usize,
    /// Options of the kernel that other controls need, and that it lacks: no cell tries those.
    pub lacking: Vec<&'static str>,
    /// The time that all took.
    pub seconds: f64,
}

impl Report {
    fn add(&mut self, cell: Cell, out: Output) {
        out.line(line(&cell));
        self.cells.push(cell);
    }

    fn finish(&mut self, seconds: f64) {
        let count = |is: fn(&Verdict) -> bool| self.cells.iter().filter(|c| is(&c.verdict)).count();
        self.documented = count(|verdict| *verdict == Verdict::AsDocumented);
        self.not_to_be_had = count(|verdict| matches!(verdict, Verdict::NotToBeHad(_)));
        self.total = self.cells.len();
        self.seconds = rounded(seconds);
    }

    /// Whether something was tried, and nothing differs.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.documented > 0 && self.documented + self.not_to_be_had == self.total
    }

    /// The last line.
    #[must_use]
    pub fn line(&self) -> String {
        let mut line = format!("{} cells: {} as documented", self.total, self.documented);
        let differ = self.total - self.documented - self.not_to_be_had;
        for (number, what) in [(differ, "not"), (self.not_to_be_had, "not to be had")] {
            if number > 0 {
                line += &format!(", {number} {what}");
            }
        }
        line
    }
}

/// Runs the command. Call it before the process has a second thread.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    if let Some(name) = &args.live {
        let _attentive = ending::attentive();
        let looked = live::look(name, args.probe).map_err(Failure::Failed);
        let looked = looked.and_then(|live| ending::check_signal().map(|()| live));
        for line in looked.iter().flat_map(live::lines) {
            out.line(line);
        }
        return out.end(NAME, &looked.map(|live| serde_json::json!({ "live": live })));
    }
    let report = match check(args, out) {
        Ok(report) => report,
        Err(error) => {
            let failed = Failure::Failed(error.to_string());
            return out.end(NAME, &Err::<(), _>(failed));
        }
    };
    for option in &report.lacking {
        out.line(format_args!("in no cell: not to be had: {option}"));
    }
    out.line(report.line());
    if args.json {
        // The reader of our output may be gone; the exit status has the result, too.
        let json = output::object(NAME, &report);
        let _ = writeln!(io::stdout(), "{json}");
    }
    if report.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn check(args: &Args, out: Output) -> Result<Report, LabError> {
    let start = Instant::now();
    if enter_user_namespace()? == Privilege::UserNamespace {
        out.line("In a user namespace, without root: afxdp and tcx are left out");
    }
    if let Err(error) = kill_children_on_signal() {
        out.note(format_args!("no signal handler: {error}"));
    }
    let mut report = Report::default();
    for topology in Topology::ALL {
        let wanted = wanted(args, topology);
        if wanted.is_empty() {
            continue;
        }
        let network = match lab::network(topology) {
            Ok(network) => network,
            Err(error) => {
                let Trouble::NotToBeHad(option) = Trouble::of(&error) else { return Err(error) };
                for (control, at, family) in wanted {
                    let verdict = Verdict::NotToBeHad(option.clone());
                    report.add(Cell::new(control, at, family, verdict), out);
                }
                continue;
            }
        };
        if args.only.is_none() && topology == Topology::Bridged {
            report.lacking = install::lacking(&network);
        }
        for (at, netdev) in BACKENDS.into_iter().enumerate() {
            for family in Family::BOTH {
                let of_these = wanted.iter().filter(|cell| (cell.1, cell.2) == (at, family));
                let controls: Vec<_> = of_these.map(|cell| cell.0).collect();
                let mut run = Run { network: &network, netdev, at, family, args, out };
                run.all(&controls, &mut report);
            }
        }
    }
    kill_children();
    report.finish(start.elapsed().as_secs_f64());
    Ok(report)
}

/// The cells of a network that are wanted: control, backend and family.
fn wanted(args: &Args, topology: Topology) -> Vec<(&'static Control, usize, Family)> {
    let mut cells = Vec::new();
    for (number, control) in CONTROLS.iter().enumerate() {
        let named = args.only.as_deref().is_none_or(|text| control.name.contains(text));
        if control.topology != topology || !named {
            continue;
        }
        for (at, netdev) in BACKENDS.into_iter().enumerate() {
            if args.netdev.as_deref().is_some_and(|only| only != netdev) {
                continue;
            }
            for (which, family) in Family::BOTH.into_iter().enumerate() {
                if args.all || which == (number + at) % 2 {
                    cells.push((control, at, family));
                }
            }
        }
    }
    cells
}

/// The cells of one backend and one family in one network.
struct Run<'a> {
    network: &'a Lab,
    netdev: &'static str,
    at: usize,
    family: Family,
    args: &'a Args,
    out: Output,
}

impl Run<'_> {
    fn all(&mut self, controls: &[&'static Control], report: &mut Report) {
        let mut sides = None;
        let mut unavailable = None;
        for control in controls {
            let (verdict, figures, attempts) = match &unavailable {
                Some(why) => (Verdict::NotToBeHad(String::clone(why)), Figures::default(), 0),
                None => self.cell(control, &mut sides),
            };
            if let (Verdict::NotToBeHad(why), None) = (&verdict, &sides) {
                unavailable = Some(why.clone());
            }
            let cell = Cell::new(control, self.at, self.family, verdict);
            report.add(Cell { attempts, figures, ..cell }, self.out);
        }
    }

    /// Tries a control; once more if only a time or a rate differs. The last value is the number
    /// of attempts.
    fn cell(&self, control: &Control, sides: &mut Option<Workers>) -> (Verdict, Figures, u32) {
        let (verdict, figures) = self.once(control, sides);
        let Verdict::Differs(why) = &verdict else { return (verdict, figures, 1) };
        // A connection may be left in any state.
        *sides = None;
        let late = why.iter().all(|why| why.starts_with(measure::LATE));
        let rate = matches!(control.action, table::Action::Limit(_));
        if self.args.without_rules || !(late || rate) {
            return (verdict, figures, 1);
        }
        let (verdict, figures) = self.once(control, sides);
        if matches!(verdict, Verdict::Differs(_)) {
            *sides = None;
        }
        (verdict, figures, 2)
    }

    /// Starts a process in each container and opens its device. The inner error says why the
    /// backend is not to be had here.
    fn open(&self) -> Result<Result<Workers, String>, String> {
        const NAMES: [&str; 3] = ["the sender", "the receiver", "the second sender"];
        let address = |index| lab::address(self.network, index, self.family);
        let containers = self.network.containers().iter().zip(NAMES).enumerate();
        let containers: Vec<_> = containers
            .map(|(index, (container, name))| (container, address(index), name))
            .collect();
        let mut sides = Workers::start(&containers, false).map_err(|error| error.to_string())?;
        Ok(sides.open(self.netdev, LIMIT)?.map(|()| sides))
    }

    fn once(&self, control: &Control, sides: &mut Option<Workers>) -> (Verdict, Figures) {
        let none = |verdict| (verdict, Figures::default());
        let sides = match sides {
            Some(sides) => sides,
            None => match self.open() {
                Ok(Ok(opened)) => sides.insert(opened),
                Ok(Err(why)) => return none(Verdict::NotToBeHad(why)),
                Err(why) => return none(Verdict::Differs(vec![why])),
            },
        };
        let (network, family) = (self.network, self.family);
        let mut bench = Bench { network, sides, family, without_rules: self.args.without_rules };
        match bench.cell(control, control.expected[self.at]) {
            Ok(outcome) if outcome.wrong.is_empty() => (Verdict::AsDocumented, outcome.figures),
            Ok(outcome) => (Verdict::Differs(outcome.wrong), outcome.figures),
            Err(Trouble::NotToBeHad(option)) => none(Verdict::NotToBeHad(option)),
            Err(Trouble::Failed(why)) => none(Verdict::Differs(vec![why])),
        }
    }
}

/// A cell as a line.
fn line(cell: &Cell) -> String {
    let Cell { control, netdev, family, expected, figures, .. } = cell;
    let what = match &cell.verdict {
        Verdict::AsDocumented if cell.attempts > 1 => {
            format!("{expected:8}  {}, the second time", words(figures))
        }
        Verdict::AsDocumented => format!("{expected:8}  {}", words(figures)),
        Verdict::Differs(why) => {
            format!("NOT as documented ({expected}): {}; {}", why.join("; "), words(figures))
        }
        Verdict::NotToBeHad(option) => {
            // The error of a device goes on with what to do: a matrix needs the cause alone.
            format!("not to be had: {}", option.split(": needs ").next().unwrap_or(option))
        }
    };
    format!("{control:41} {netdev:6} {family:4}  {what}").trim_end().to_owned()
}

fn words(figures: &Figures) -> String {
    let mut words = Vec::new();
    if let Some(of_limit) = figures.of_limit {
        words.push(format!("{:.1} % of {} Mbit/s", of_limit * 100.0, RATE / 1_000_000));
    }
    if let Some(drops) = figures.shaper_drops.filter(|drops| *drops > 0) {
        words.push(format!("{drops} dropped"));
    }
    if let Some(jain) = figures.jain {
        words.push(format!("Jain {jain:.3}"));
    }
    if let Some(packets) = figures.packets {
        words.push(format!("{packets} packets"));
    }
    if let (Some(status), Some(seconds)) = (&figures.status, figures.seconds) {
        words.push(format!("{status} after {seconds:.3} s"));
    }
    if let Some(bytes) = figures.placed_bytes {
        words.push(format!("{bytes} bytes placed"));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(all: bool) -> Args {
        Args {
            all,
            json: false,
            only: None,
            netdev: None,
            live: None,
            probe: None,
            without_rules: false,
        }
    }

    #[test]
    fn the_matrix_has_276_cells_and_half_of_them_by_default() {
        let count = |all| {
            let args = args(all);
            Topology::ALL.map(|t| wanted(&args, t).len()).iter().sum()
        };
        let [all, some]: [usize; 2] = [count(true), count(false)];
        assert_eq!((all, some), (276, 138));
        let v6 = wanted(&args(false), Topology::Bridged);
        assert!(v6.iter().any(|cell| cell.2 == Family::V6));
    }

    #[test]
    fn what_is_not_to_be_had_is_no_pass() {
        let cell =
            |verdict| Cell { attempts: 1, ..Cell::new(&CONTROLS[0], 0, Family::V4, verdict) };
        let lacking = || cell(Verdict::NotToBeHad("NET_ACT_POLICE".into()));
        let mut report = Report { cells: vec![lacking()], ..Report::default() };
        report.finish(1.0);
        assert!(!report.is_ok());
        report.cells.push(cell(Verdict::AsDocumented));
        report.finish(1.0);
        assert!(report.is_ok());
        assert_eq!(report.line(), "2 cells: 1 as documented, 1 not to be had");
        assert!(line(&lacking()).ends_with("not to be had: NET_ACT_POLICE"));
        report.cells.push(cell(Verdict::Differs(vec!["why".into()])));
        report.finish(1.0);
        assert!(!report.is_ok());
        let json = serde_json::to_value(&report.cells[2]).unwrap();
        assert_eq!((&json["verdict"], &json["why"][0]), (&"differs".into(), &"why".into()));
    }
}
