//! The runs.

use std::time::{Duration, Instant};

use rocinante_baselines::{Raw, Task};

use super::plan::{self, Cell, Choice, Group, Peer, Rival};
use super::rows::{Row, Rows, Sample};
use crate::attempts::{Attempts, Subject};
use crate::machine::{Begun, Calibration, Machine, Standing};
use crate::workers::{
    Carrier, Congestion, Device, Figure, Link, Measure, PlaceArgs, Places, Provider, Step, Traffic,
    Work,
};
use rocinante_cli::output::{Failure, Output, Result};

/// Time limits of one run. A run that needs less leaves the rest to the next.
const TIME_MAX: Duration = Duration::from_secs(4 * 60);
const TIME_MAX_QUICK: Duration = Duration::from_secs(40);
/// Time that is kept for the last cell.
const RESERVE: Duration = Duration::from_secs(5);

/// A running benchmark.
pub(super) struct Bench {
    places: Places,
    place: PlaceArgs,
    out: Output,
    /// Whether the ports are measured, too.
    ports: bool,
    /// The slowness of this machine: its time divided by an ordinary machine's.
    slowness: f64,
    begin: Instant,
    until: Instant,
    pub(super) rows: Rows,
    pub(super) machine: Machine,
    /// The machine's state, in each run.
    pub(super) calibrations: Vec<Calibration>,
    /// Measurements that failed, and why.
    pub(super) notes: Vec<String>,
    attempts: Attempts,
}

impl Bench {
    pub(super) fn new(
        place: &PlaceArgs,
        (quick, runs): (bool, u32),
        ports: bool,
        slowness: f64,
        out: Output,
    ) -> Result<Self> {
        let time = runs * if quick { TIME_MAX_QUICK } else { TIME_MAX };
        Ok(Self {
            begin: Instant::now(),
            until: Instant::now() + time.mul_f64(slowness) - RESERVE,
            places: Places::new(place)?.slower(slowness),
            place: place.clone(),
            out,
            ports,
            slowness,
            rows: Rows::default(),
            machine: Machine::here(),
            calibrations: Vec::new(),
            notes: Vec::new(),
            attempts: Attempts::default(),
        })
    }

    /// Measures everything up to `runs` times, as far as time allows.
    pub(super) fn measure(&mut self, choice: &Choice, runs: usize) {
        self.out.note(&self.machine);
        if self.is_slow() {
            self.note(format!(
                "the processor is emulated, or as slow: {:.1} times slower than an ordinary one. Figures are measured as many times longer, unless \
                 told --seconds; only ratios between rows mean anything, and no goal is judged",
                self.slowness
            ));
        }
        if self.place.is_soft_roce() {
            self.note(
                "the kernel's threads do the work of Soft-RoCE: so that they have turns, too, no process goes before others (--patient)"
                    .to_owned(),
            );
        }
        if choice.congestions.len() < Congestion::ALL.len() {
            let found: Vec<_> = choice.congestions.iter().map(|one| one.name()).collect();
            self.note(format!(
                "TCP is measured with {} only: the kernel has no other of cubic and bbr loaded (modprobe tcp_bbr)",
                if found.is_empty() { "nothing".to_owned() } else { found.join(", ") }
            ));
        }
        for run in 1..=runs {
            if !self.run(choice, run) {
                break;
            }
        }
        if self.is_slow() {
            let why = "figures of a slow processor say nothing";
            self.rows.judge(|_| Standing::NotJudged(why.to_owned()));
        } else {
            self.rows.judge(|run| self.calibrations[run - 1].standing());
        }
        for remark in self.rows.remarks() {
            self.note(remark);
        }
    }

    /// Measures everything once. Returns `false` if the time was too short for some cells.
    fn run(&mut self, choice: &Choice, run: usize) -> bool {
        let begun = Begun::now();
        self.out.note(format_args!("run {run}: {begun}"));
        // The two cores need not be alike.
        self.places.swap(run.is_multiple_of(2));
        let cells = choice.cells();
        let count = cells.len();
        let mut skipped = 0;
        for (index, cell) in cells.iter().enumerate() {
            if Instant::now() + cell.time(self.ports) > self.until {
                skipped += 1;
                continue;
            }
            let spent = self.begin.elapsed().as_secs();
            self.out.note(format_args!("{spent:3} s: run {run}, {} of {count}: {cell}", index + 1));
            self.cell(run, cell);
        }
        if skipped > 0 {
            self.note(format!(
                "run {run}: there was no time left for {skipped} of {count} cells: they are not measured"
            ));
        }
        self.calibrations.push(begun.ended());
        skipped == 0
    }

    /// Whether the processor is too slow for the goals.
    pub(super) fn is_slow(&self) -> bool {
        self.slowness > 1.0
    }

    /// The notes, as a list: measurements that failed, and runs that do not count.
    pub(super) fn remarks(&self) -> String {
        self.notes.iter().map(|note| format!("- {note}\n")).collect()
    }

    pub(super) fn finish(&mut self) -> Result<Vec<Row>> {
        if self.rows.is_empty() {
            let why = if self.notes.is_empty() {
                "there is nothing of that name".to_owned()
            } else {
                self.notes.join("; ")
            };
            return Err(Failure::Failed(format!("nothing was measured: {why}")));
        }
        Ok(self.rows.rows())
    }

    /// Its name in the rows.
    fn netdev(&self, provider: Provider) -> &'static str {
        match provider {
            Provider::Hw if self.place.is_soft_roce() => "rxe",
            _ => provider.name(),
        }
    }

    fn note(&mut self, text: String) {
        self.out.note(&text);
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Measures the baseline, our backend, and the peers, one right after the other.
    fn cell(&mut self, run: usize, cell: &Cell) {
        if let Err(failure) = self.places.prepare(cell.link, cell.namespaces()) {
            return self.note(format!("the link {}: {failure}: not measured", cell.link.name()));
        }
        if let Some(provider) = cell.ours
            && !cell.steps.is_empty()
            && let netdev = self.netdev(provider)
            && !self.attempts.in_vain(Subject::Netdev(netdev))
        {
            let baselines = self.raw(cell, provider, false);
            if let Some(port_name) = provider.port_name().filter(|_| self.ports) {
                let port = self.raw(cell, provider, true);
                let figure = |step: &Step| {
                    Some(step.figure(step.measure, baseline(step.measure, step.size, &port)?))
                };
                let figures: Vec<Figure> = cell.steps.iter().filter_map(figure).collect();
                self.add(run, cell, port_name, &figures, &baselines);
            }
            let ours = self.ours(cell, provider);
            self.attempts.add(Subject::Netdev(netdev), ours.is_ok());
            match ours {
                Ok(figures) => self.add(run, cell, netdev, &figures, &baselines),
                Err(failure) => self.note(format!("{cell}: {failure}")),
            }
        }
        for rival in &cell.rivals {
            self.rival(run, cell, rival);
        }
    }

    fn rival(&mut self, run: usize, cell: &Cell, rival: &Rival) {
        let name = rival.peer.name();
        if self.attempts.in_vain(Subject::Netdev(name)) {
            return;
        }
        let figures = self.figures_of(cell.link, rival);
        self.attempts.add(Subject::Netdev(name), figures.is_ok());
        let figures = match figures {
            Ok(figures) => figures,
            Err(failure) => return self.note(format!("{name}: {failure}")),
        };
        for Figure { measure, size, value } in figures.iter().copied() {
            if let Some(key) = cell.key_of(rival, measure, size) {
                self.rows.add(key, Sample { run, value, baseline: None });
            }
        }
        // The other figures are present whenever any figure is.
        let wake_up = |of: Measure| of == Measure::WakeUp;
        if rival.steps.iter().any(|step| wake_up(step.measure))
            && !figures.iter().any(|figure| wake_up(figure.measure))
        {
            self.note(format!(
                "run {run}: no wake_up: the process that spun answered later than the one that slept, because other programs had its core: stop them, or measure with more cores"
            ));
        }
    }

    fn add(
        &mut self,
        run: usize,
        cell: &Cell,
        netdev: &'static str,
        figures: &[Figure],
        baselines: &[(Task, Raw)],
    ) {
        for Figure { measure, size, value } in figures.iter().copied() {
            let baseline = baseline(measure, size, baselines);
            if let Some(key) = cell.key(netdev, measure, size) {
                self.rows.add(key, Sample { run, value, baseline });
            }
        }
    }

    /// Measures the baseline of the backend, or its port with no engine behind it.
    fn raw(&mut self, cell: &Cell, provider: Provider, port: bool) -> Vec<(Task, Raw)> {
        let tasks = cell.tasks();
        let Some(backend) = provider.backend_name().filter(|_| !tasks.is_empty()) else {
            return Vec::new();
        };
        let netdev = provider.name();
        let (subject, carrier, what) = if port {
            (Subject::Port(netdev), Carrier::Port(backend), "the port")
        } else {
            (Subject::Baseline(netdev), Carrier::Baseline(backend), "its raw baseline")
        };
        if self.attempts.in_vain(subject) {
            return Vec::new();
        }
        let carried = self.places.carried(cell.link, carrier, tasks);
        self.attempts.add(subject, carried.is_ok());
        match carried {
            Ok(carried) => carried,
            Err(failure) => {
                self.note(format!("{cell}: {what}: {failure}"));
                Vec::new()
            }
        }
    }

    fn ours(&self, cell: &Cell, provider: Provider) -> Result<Vec<Figure>> {
        let mut device = provider.device(&self.place)?;
        if let Device::Software { small_buffers, .. } = &mut device {
            *small_buffers = cell.small_buffers;
        }
        let Cell { group, mtu, qps, steps, .. } = cell;
        let work = match (group, &steps[..]) {
            (Group::FanIn, [step]) => {
                let traffic = Traffic::Verbs(device);
                Work::FanIn { traffic, mtu: *mtu, senders: *qps, step: *step }
            }
            _ => Work::Verbs { device, mtu: *mtu, qps: *qps, steps: steps.clone() },
        };
        self.places.figures(cell.link, &work)
    }

    fn figures_of(&self, link: Link, rival: &Rival) -> Result<Vec<Figure>> {
        let work = match (rival.peer, rival.mode(), rival.cc, &rival.steps[..]) {
            (Peer::QuinnUdp, .., steps) => {
                let carried = self.places.carried(link, Carrier::QuinnUdp, rival.tasks())?;
                let figure = |step: &Step| {
                    let value = baseline(step.measure, step.size, &carried)?;
                    Some(step.figure(step.measure, value))
                };
                return Ok(steps.iter().filter_map(figure).collect());
            }
            (Peer::SockperfUdp | Peer::SockperfTcp, .., [step]) => {
                Work::Sockperf { tcp: rival.peer == Peer::SockperfTcp, step: *step }
            }
            (_, Some(mode), _, steps) => Work::Tcp(mode, steps.to_vec()),
            (_, None, Some(cc), [step]) => Work::Iperf3(cc, *step),
            (_, None, _, steps) => Work::Udp(steps.to_vec()),
        };
        self.places.figures(link, &work)
    }
}

/// The value of a figure without a protocol.
fn baseline(measure: Measure, size: usize, baselines: &[(Task, Raw)]) -> Option<f64> {
    let (kind, message) = plan::reference(measure, size)?;
    let of = |task: &Task| (task.kind, task.message) == (kind, message);
    let (_, raw) = baselines.iter().find(|(task, _)| of(task))?;
    Some(match (raw, measure.unit()) {
        (Raw::Flood { mpps, .. }, "Mop/s") => *mpps,
        (Raw::Flood { gbps, .. }, _) => *gbps,
        // These figures are whole round trips.
        (Raw::PingPong { us }, _) if measure.is_whole_round_trip() => 2.0 * us,
        (Raw::PingPong { us }, _) => *us,
    })
}
