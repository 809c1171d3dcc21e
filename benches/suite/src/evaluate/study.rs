//! Measures the cells of a study.

mod control;
mod failure;
mod pressure;
mod rate;
mod size;
mod start;

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rocinante_cli::measure::jain;
use rocinante_cli::output::{Failure, Output, Result};
use rocinante_lab::ChildGuard;

use super::experiment::Experiment;
use super::plan::{Carrier, Cell, MODES, Mode, containers, seconds};
use super::progress::Progress;
use super::store::{Key, Load, Row, Session, Store};
use crate::attempts::{Attempts, Subject};
use crate::workers::{
    Link, Loaded, Measure, Outcome, Pairing, Places, Rights, Step, Together, Traffic, Work,
};

/// The path MTU of the links, which are ours, and of the kernel's devices.
const MTU: u32 = 4096;
const MTU_KERNEL: u32 = 1024;
/// Bytes of the messages of pairs, and of the answers to requests at planned times.
const SHARED: usize = 64 << 10;
const ANSWER: usize = 4096;
/// Bytes of a message where its size does not matter.
const SMALL: usize = 64;
/// The ACK timeout of pairs: 4.096 µs · 2^18 = 1.1 s.
const ACK_TIMEOUT: u8 = 18;
/// Time that is kept for the report.
const RESERVE: Duration = Duration::from_secs(8);

/// The reason where a mode has failed before, and never worked.
const IN_VAIN: &str = "it never worked";

/// Named figures of one point.
type Figures = BTreeMap<String, f64>;

/// A study in progress.
pub(super) struct Study {
    pub(super) session: Session,
    pub(super) store: Store,
    places: Option<Places>,
    /// Why there is no agent, once one was wanted.
    agent: Option<Result>,
    attempts: Attempts,
    until: Instant,
    /// Number of cells for which there was no time.
    pub(super) skipped: usize,
}

impl Study {
    /// A study that ends within `time`.
    pub(super) fn new(session: Session, store: Store, time: Duration) -> Self {
        let until = Instant::now() + time - RESERVE;
        let (places, agent, mut attempts) = (None, None, Attempts::default());
        let worked = |row: &Row, mode: &Mode| row.key.mode == mode.name && row.missing.is_none();
        for mode in MODES.iter().filter(|mode| store.rows.iter().any(|row| worked(row, mode))) {
            attempts.add(Subject::Netdev(mode.name), true);
        }
        Self { session, store, places, agent, attempts, until, skipped: 0 }
    }

    /// Measures all cells that have rows to measure. Error: a row cannot be written, or there are
    /// no namespaces.
    pub(super) fn measure(&mut self, out: Output) -> Result {
        let quick = self.session.choice.quick;
        let mut cells = self.session.choice.cells();
        for cell in &mut cells {
            let (experiment, mode, round) = (cell.experiment, cell.mode, cell.round);
            cell.xs.retain(|x| !self.store.has(&key(experiment, mode, *x, round)));
        }
        cells.retain(|cell| !cell.xs.is_empty());
        if cells.is_empty() {
            return Ok(());
        }
        let all = cells.iter().map(|cell| cell.seconds(quick)).sum();
        let mut progress = Progress::new(all, out);
        progress.begins("making namespaces");
        let count = u8::try_from(containers(&cells)).unwrap_or(u8::MAX);
        if self.places.is_none() {
            let places = Places::of(&self.session.place_args(), Link::Bridge, count);
            self.places = Some(places?);
        }
        for cell in &cells {
            let planned = cell.seconds(quick);
            if Instant::now() + Duration::from_secs_f64(planned) > self.until {
                self.skipped += 1;
            } else {
                progress.begins(&cell.name());
                self.cell(cell, &progress)?;
            }
            progress.ended(planned);
        }
        progress.finish();
        if self.skipped > 0 {
            let count = self.skipped;
            out.note(format_args!("no time was left for {count} measurements: --resume goes on"));
        }
        Ok(())
    }

    /// Measures a cell, and adds its rows.
    fn cell(&mut self, cell: &Cell, progress: &Progress) -> Result {
        let subject = Subject::Netdev(cell.mode.name);
        let measured = match self.can_be(cell) {
            Err(failure) => Err(failure),
            Ok(()) if self.attempts.in_vain(subject) => Err(Failure::Failed(IN_VAIN.into())),
            Ok(()) => {
                let measured = self.points(cell).and_then(|points| {
                    points.iter().try_for_each(|(_, figures)| plausible(figures))?;
                    Ok(points)
                });
                self.attempts.add(subject, measured.is_ok());
                measured
            }
        };
        if let Err(failure) = &measured {
            progress.note(&format!("{}: not measured: {failure}", cell.name()));
        }
        for &x in &cell.xs {
            let key = key(cell.experiment, cell.mode, x, cell.round);
            let figures = match &measured {
                Ok(points) => points.iter().find(|(at, _)| *at == x).map(|(_, all)| all.clone()),
                Err(_) => None,
            };
            let missing = match (&figures, &measured) {
                (Some(_), _) => None,
                (None, Err(failure)) => Some(self.why(cell.mode, &failure.to_string())),
                (None, Ok(_)) => Some("a worker printed no figure of it".to_owned()),
            };
            self.store.add(Row { key, figures: figures.unwrap_or_default(), missing })?;
        }
        Ok(())
    }

    /// The first reason why a mode could not be measured stands for all later ones.
    fn why(&self, mode: &Mode, last: &str) -> String {
        let rows = self.store.rows.iter().rev().filter(|row| row.key.mode == mode.name);
        let before = rows.filter_map(|row| row.missing.as_deref()).next();
        if last == IN_VAIN { before.unwrap_or(last) } else { last }.to_owned()
    }

    fn points(&mut self, cell: &Cell) -> Result<Vec<(u64, Figures)>> {
        let places = self.places.as_mut().ok_or_else(|| Failure::Failed("no places".into()))?;
        let args = self.session.place_args();
        let traffic = match cell.mode.carrier {
            Carrier::Verbs(provider) => Some(Traffic::Verbs(provider.device(&args)?)),
            Carrier::Tcp { .. } => Some(Traffic::Tcp),
            Carrier::Iperf3 | Carrier::Programs(..) => None,
        };
        let mtu = if cell.mode.is_kernel() { MTU_KERNEL } else { MTU };
        let quick = self.session.choice.quick;
        let seconds = seconds(cell.experiment, quick);
        match (cell.experiment, traffic) {
            (Experiment::Size, traffic) => size::measure(places, cell, traffic, mtu, quick),
            (Experiment::Scale | Experiment::Isolation, Some(traffic)) => {
                let pairs = Pairs::new(traffic, mtu, seconds);
                let scale = |&x| Ok((x, pairs.scale(places, x)?));
                cell.xs.iter().map(scale).collect()
            }
            (Experiment::ManyToOne, Some(traffic)) => {
                let to_one = |&x| Ok((x, to_one(places, &traffic, mtu, x, seconds)?));
                cell.xs.iter().map(to_one).collect()
            }
            (Experiment::Starvation, Some(traffic)) => {
                let starve = |&loops| Ok((loops, starve(places, &traffic, mtu, loops, seconds)?));
                cell.xs.iter().map(starve).collect()
            }
            (Experiment::Failure, Some(traffic)) => {
                let work = on_demand(traffic, mtu, SMALL);
                let patience = Duration::from_secs_f64(seconds);
                let of = |&x| Ok((x, failure::measure(places, &args, &work, x, patience)?));
                cell.xs.iter().map(of).collect()
            }
            (Experiment::Start, Some(traffic)) => {
                let work = on_demand(traffic, mtu, SMALL);
                let how = start::How { args: &args, mode: cell.mode, work: &work, seconds };
                cell.xs.iter().map(|&x| Ok((x, start::measure(places, &how, x)?))).collect()
            }
            (Experiment::Control, Some(traffic)) => {
                let pairs = Pairs::new(traffic, mtu, seconds);
                let of = |&x| Ok((x, control::measure(places, cell.mode, &pairs, x, quick)?));
                cell.xs.iter().map(of).collect()
            }
            (Experiment::Rate, Some(traffic)) => {
                let how = rate::How { link: cell.mode.link, traffic, mtu, seconds, quick };
                cell.xs.iter().map(|&x| Ok((x, rate::measure(places, &how, x)?))).collect()
            }
            (Experiment::Pressure, Some(traffic)) => {
                let work = |size| on_demand(traffic.clone(), mtu, size as usize);
                let of = |&x| Ok((x, pressure::measure(places, &args, &work(x), x)?));
                cell.xs.iter().map(of).collect()
            }
            (Experiment::Load, Some(traffic)) => {
                let (size, percents) = (ANSWER, cell.xs.clone());
                let work = Work::Load { traffic, mtu, size, seconds, percents };
                match places.run(cell.mode.link, &work)? {
                    Outcome::Load(all) => Ok(all.iter().map(loaded).collect()),
                    _ => Err(Failure::Failed(
                        "the worker printed figures of another measurement".into(),
                    )),
                }
            }
            (_, None) => Err(Failure::Failed("it measures nothing but streams".into())),
        }
    }

    /// Makes what a mode needs. Error: it cannot be had, and why.
    fn can_be(&mut self, cell: &Cell) -> Result {
        let failed = |why: &str| Err(Failure::Failed(why.to_owned()));
        let Cell { mode, experiment, .. } = cell;
        if mode.is_kernel() && self.session.place.is_empty() {
            return failed("it needs --devices with --local and --remote");
        }
        let sleeps = matches!(mode.carrier, Carrier::Tcp { spin: false } | Carrier::Iperf3);
        let spins =
            matches!(experiment, Experiment::Size | Experiment::Load | Experiment::Rate) && !sleeps;
        if self.session.machine.cpus < 2 && spins {
            return failed("both sides spin, which needs two processors: this machine has one");
        }
        let Some(places) = &mut self.places else { return failed("no places") };
        if mode.is_handed() {
            return self.agent.get_or_insert_with(|| places.start_agent()).clone();
        }
        places.prepare(mode.link, 2)
    }
}

fn on_demand(traffic: Traffic, mtu: u32, size: usize) -> Work {
    Work::OnDemand { traffic, mtu, size }
}

/// Figures by their names.
fn named<const N: usize>(figures: [(&str, f64); N]) -> Figures {
    figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn in_words(error: impl std::fmt::Display) -> Failure {
    Failure::Failed(error.to_string())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Cell {
    fn name(&self) -> String {
        let experiment = self.experiment;
        let range = match self.xs[..] {
            [x] => experiment.point(x),
            [first, .., last] => {
                format!("{} to {}", experiment.point(first), experiment.point(last))
            }
            [] => String::new(),
        };
        format!("{}: {}, {range}", experiment.name(), self.mode.name)
    }
}

fn key(experiment: Experiment, mode: &Mode, x: u64, round: u32) -> Key {
    Key { experiment: experiment.name().into(), mode: mode.name.into(), x, round }
}

const fn figure_name(measure: Measure) -> Option<&'static str> {
    Some(match measure {
        Measure::WriteBw => "write_gbps",
        Measure::SendBw => "send_gbps",
        Measure::ReadBw => "read_gbps",
        Measure::FanIn => "sum_gbps",
        Measure::FanInFairness => "jain",
        Measure::FanInErrors => "errors",
        Measure::WriteLat => "p50_us",
        Measure::WriteLatP99 => "p99_us",
        Measure::WriteLatP999 => "p999_us",
        _ => return None,
    })
}

/// Pairs of containers that work at once.
struct Pairs {
    traffic: Traffic,
    mtu: u32,
    /// Bytes of a message.
    size: usize,
    seconds: f64,
    ack_timeout: u8,
}

impl Pairs {
    const fn new(traffic: Traffic, mtu: u32, seconds: f64) -> Self {
        Self { traffic, mtu, size: SHARED, seconds, ack_timeout: ACK_TIMEOUT }
    }

    /// Calls `edge` when the time in which they count begins, and when it ends.
    fn together(
        &self,
        places: &Places,
        pairs: u64,
        edge: &mut dyn FnMut() -> Result,
    ) -> Result<Together> {
        if !places.are_own() {
            return Err(Failure::Failed("pairs need namespaces of our own".into()));
        }
        let work = |probes| {
            let Self { size, seconds, ack_timeout, .. } = *self;
            let pairing = Pairing { size, seconds, ack_timeout, probes };
            Work::Paired { traffic: self.traffic.clone(), mtu: self.mtu, pairing }
        };
        let together = places.together(&work(false), &work(true), pairs as u32, edge)?;
        if together.pairs.is_empty() && together.probe.is_none() {
            return Err(Failure::Failed(together.why.unwrap_or_default()));
        }
        Ok(together)
    }

    fn scale(&self, places: &Places, pairs: u64) -> Result<Figures> {
        let together = self.together(places, pairs, &mut || Ok(()))?;
        Ok(scaled(&together, pairs, self.seconds))
    }
}

/// Containers that send to one.
fn to_one(
    places: &Places,
    traffic: &Traffic,
    mtu: u32,
    senders: u64,
    seconds: f64,
) -> Result<Figures> {
    if !places.are_own() {
        return Err(Failure::Failed("many senders need namespaces of our own".into()));
    }
    let step = Step { measure: Measure::FanIn, size: SHARED, seconds };
    let traffic = traffic.clone();
    let work = Work::FanIn { traffic, mtu, senders: senders as u32, step };
    let figures = places.figures(Link::Plain, &work)?;
    let named = figures
        .iter()
        .filter_map(|figure| Some((figure_name(figure.measure)?.to_owned(), figure.value)));
    Ok(named.collect())
}

/// A pair and a probe beside programs that never sleep, with a short and a long ACK timeout.
fn starve(
    places: &Places,
    traffic: &Traffic,
    mtu: u32,
    loops: u64,
    seconds: f64,
) -> Result<Figures> {
    let busy = (0..loops).map(|_| {
        let mut command = std::process::Command::new("/bin/sh");
        ChildGuard::spawn(command.args(["-c", "while :; do :; done"]).stdin(Stdio::null()))
    });
    let _busy =
        busy.collect::<Result<Vec<_>, _>>().map_err(|error| Failure::Failed(error.to_string()))?;
    let mut figures = Figures::new();
    for ack_timeout in [14, ACK_TIMEOUT] {
        let pairs = Pairs { ack_timeout, ..Pairs::new(traffic.clone(), mtu, seconds) };
        for (name, value) in pairs.scale(places, 1)? {
            if ["sum_gbps", "errors", "probe_p99_us"].contains(&name.as_str()) {
                let (name, unit) = name.rsplit_once('_').unwrap_or((&name, ""));
                let end = if unit.is_empty() { String::new() } else { format!("_{unit}") };
                figures.insert(format!("{name}_u{ack_timeout}{end}"), value);
            }
        }
    }
    Ok(figures)
}

fn scaled(together: &Together, pairs: u64, seconds: f64) -> Figures {
    let mut shares: Vec<u64> = together.pairs.iter().map(|pair| pair.bytes).collect();
    // A pair without a result sent nothing.
    shares.resize(pairs as usize, 0);
    let gbps = |bytes: u64| bytes as f64 * 8.0 / seconds / 1e9;
    let sum: u64 = shares.iter().sum();
    let failed = together.pairs.iter().chain(&together.probe).filter(|pair| pair.failed).count();
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut figures = vec![
        ("sum_gbps", gbps(sum)),
        ("slowest_gbps", gbps(shares.iter().copied().min().unwrap_or(0))),
        ("jain", jain(shares.iter().map(|it| *it as f64))),
        ("errors", failed as f64 + f64::from(together.lost)),
        ("process_mib", mib(together.private)),
        ("start_ms", together.started * 1e3),
    ];
    if pairs == 0 {
        // The probe is alone.
        figures.retain(|(name, _)| *name == "errors");
    }
    if let Some(Rights { capabilities, uid, seccomp }) = together.rights {
        let all = [("capabilities", capabilities), ("uid", uid), ("seccomp", seccomp)];
        figures.extend(all.map(|(name, value)| (name, f64::from(value))));
    }
    if sum > 0 {
        figures.push(("cpu_s_per_gb", together.busy / (sum as f64 / 1e9)));
    }
    figures.extend(together.kernel.map(|kernel| ("kernel_mib", mib(kernel))));
    if let Some([p50, p99]) = together.probe.and_then(|probe| probe.probe_us) {
        figures.extend([("probe_p50_us", p50), ("probe_p99_us", p99)]);
    }
    figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn loaded(loaded: &Loaded) -> (u64, Figures) {
    let Loaded { percent, us: [p50, p99, p999], offered, achieved, peak, unloaded } = *loaded;
    let figures = [
        ("p50_us", p50),
        ("p99_us", p99),
        ("p999_us", p999),
        ("offered_mops", offered),
        ("achieved_mops", achieved),
        ("peak_mops", peak),
        ("unloaded_us", unloaded),
    ];
    (percent, figures.map(|(name, value)| (name.to_owned(), value)).into_iter().collect())
}

/// Whether figures can be true. A worker is another process, which may be broken.
fn plausible(figures: &Figures) -> Result {
    for (name, &value) in figures {
        let most = match name {
            name if name == "jain" => 1.0 + 1e-9,
            name if name == "uid" => f64::from(u32::MAX),
            // No memory moves faster.
            name if name.ends_with("_gbps") => 1e4,
            name if name.starts_with("of_") => 1e2,
            name if name.ends_with("_mops") => 1e3,
            _ => 1e9,
        };
        if !(0.0..=most).contains(&value) {
            return Err(Failure::Failed(format!(
                "a worker printed what cannot be: {name} {value}"
            )));
        }
    }
    Ok(())
}

impl Load {
    /// Whether other programs run now: this looks a few times.
    pub(super) fn now() -> Self {
        const LOOKS: u32 = 25;
        let running = || {
            let stat = std::fs::read_to_string("/proc/stat").ok()?;
            let line = stat.lines().find_map(|line| line.strip_prefix("procs_running "))?;
            // This one runs, too.
            Some(line.trim().parse::<f64>().ok()? - 1.0)
        };
        let looks = (0..LOOKS).filter_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            running()
        });
        let cpus = std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64);
        let busy = looks.sum::<f64>() / f64::from(LOOKS) / cpus > 0.25;
        if busy { Self::Busy } else { Self::Quiet }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tempfile::TempDir;

    use super::super::plan::Choice;
    use super::*;
    use crate::machine::Machine;
    use crate::workers::Paired;

    fn figures(all: &[(&str, f64)]) -> Figures {
        all.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn figures_that_cannot_be_are_refused() {
        assert!(
            plausible(&figures(&[("write_gbps", 40.0), ("p50_us", 3.0), ("jain", 1.0)])).is_ok()
        );
        for (name, value) in [
            ("write_gbps", -1.0),
            ("write_gbps", f64::NAN),
            ("p50_us", f64::INFINITY),
            ("read_gbps", 20_000.0),
            ("jain", 1.1),
            ("peak_mops", 2e3),
        ] {
            let error = plausible(&figures(&[("errors", 0.0), (name, value)])).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn a_pair_without_a_result_sent_nothing() {
        let pair = |bytes| Paired { bytes, ..Paired::default() };
        let probe = Paired { failed: true, probe_us: Some([5.0, 9.0]), ..Paired::default() };
        let (pairs, probe) = (vec![pair(1_000_000_000), pair(1_000_000_000)], Some(probe));
        let together = Together { pairs, probe, lost: 1, busy: 4.0, ..Together::default() };
        let figures = scaled(&together, 3, 2.0);
        assert_eq!((figures["sum_gbps"], figures["slowest_gbps"]), (8.0, 0.0));
        assert!((figures["jain"] - 2.0 / 3.0).abs() < 1e-9 && figures["errors"] == 2.0);
        assert_eq!((figures["cpu_s_per_gb"], figures["probe_p99_us"]), (2.0, 9.0));
        assert!(!figures.contains_key("kernel_mib"), "unknown is not 0");
    }

    /// A worker that dies, that hangs, or that prints nonsense leaves a row that says so.
    #[test]
    fn a_broken_worker_is_told_in_its_row() {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let place = ["127.0.0.1", "127.0.0.2"].map(str::to_owned).to_vec();
        let choice = Choice { quick: true, only: vec!["load".into()], ..Choice::default() };
        let machine = Machine { cpus: 2, ..Machine::here() };
        let session = Session { machine, load: Load::Quiet, choice, place };
        for (number, (script, why)) in [
            ("exit 3", "exit status: 3"),
            ("kill -9 $$", "signal: 9"),
            ("echo '{\"Load\":[{\"percent\":10,\"us\":[-1,2,3],\"offered\":1,\"achieved\":1,\"peak\":1,\"unloaded\":1}]}'", "cannot be: p50_us -1"),
            ("echo '{\"Load\":[{\"percent\":10,\"us\":[NaN,2,3]}]}'", "printed no figures"),
            ("echo '{\"Load\":[]}'", "no figure of it"),
            ("echo '{\"Figures\":[]}'", "figures of another measurement"),
            ("echo hello", "no figures: \"hello\""),
            ("sleep 60", "did not end"),
        ]
        .into_iter()
        .enumerate()
        {
            let program = dir.join(format!("worker{number}"));
            write_script(&program, script);
            let at = dir.join(number.to_string());
            let store = Store::create(&at, &session).unwrap();
            let mut study = Study::new(session.clone(), store, Duration::from_secs(120));
            let places = Places::of(&session.place_args(), Link::Plain, 2).unwrap();
            let program = program.to_str().unwrap();
            // What ends at all may take long on a busy machine.
            let patience = if script.starts_with("sleep") { 2 } else { 60 };
            study.places = Some(places.with_program(program, Duration::from_secs(patience)));
            let mode = MODES.iter().find(|mode| mode.name == "udp").unwrap();
            let cell = Cell { experiment: Experiment::Load, mode, xs: vec![10], round: 1 };
            let progress = Progress::new(1.0, Output { json: false });
            study.cell(&cell, &progress).unwrap();
            let [row] = &study.store.rows[..] else { panic!("one row") };
            assert!(row.figures.is_empty(), "{script}: {row:?}");
            let said = row.missing.as_deref().unwrap();
            assert!(said.contains(why), "{script}: {said}");
        }
    }

    #[test]
    fn a_mode_that_worked_before_is_not_given_up_in_a_resumed_study() {
        let dir = TempDir::new().unwrap();
        let session = Session {
            machine: Machine::here(),
            load: Load::Quiet,
            choice: Choice::default(),
            place: Vec::new(),
        };
        let mut store = Store::create(dir.path(), &session).unwrap();
        let mode = |name| MODES.iter().find(|mode| mode.name == name).unwrap();
        let row = |name, missing: Option<&str>| Row {
            key: key(Experiment::Load, mode(name), 10, 1),
            figures: figures(&[("peak_mops", 1.0)]),
            missing: missing.map(str::to_owned),
        };
        store.add(row("udp", None)).unwrap();
        store.add(row("packet", Some("it hung"))).unwrap();
        let mut study = Study::new(session, store, Duration::from_secs(120));
        let subjects = ["udp", "packet"].map(Subject::Netdev);
        for subject in subjects.into_iter().chain(subjects) {
            study.attempts.add(subject, false);
        }
        assert_eq!(subjects.map(|subject| study.attempts.in_vain(subject)), [false, true]);
    }

    /// By another process: a child that another test starts meanwhile would hold this one's
    /// descriptor, and a file that can be written to does not start (`ETXTBSY`).
    fn write_script(path: &Path, script: &str) {
        let draft = path.with_extension("draft");
        std::fs::write(&draft, format!("#!/bin/sh\n{script}\n")).unwrap();
        let mut install = std::process::Command::new("install");
        assert!(
            install.args(["-m", "755"]).args([draft.as_path(), path]).status().unwrap().success()
        );
    }
}
