//! The plan of a run: its cells and their order.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use rocinante_baselines::{Kind, Task};

use super::rows::{Key, Tcp};
use crate::workers::{Congestion, IPERF3_WARM_UP, Measure, Provider, Step, TcpMode, depth};

/// Bytes of a small message, and of a large one.
pub(super) const SMALL: usize = 64;
pub(super) const LARGE: usize = 1 << 20;
/// Message bytes with many queue pairs.
pub(super) const SHARED: usize = 64 << 10;
/// Bytes of an atomic.
const ATOMIC: usize = 8;
/// The path MTU where a cell does not choose another.
pub(super) const MTU: u32 = 4096;
/// The link's MTU, which TCP uses.
pub(super) const LINK_MTU: u32 = 9000;
/// Bytes that a TCP stream writes at once, where the size of messages does not vary. Which is
/// fastest depends on the congestion control and on who spins.
pub(super) const TCP_WRITES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
/// Bytes that iperf3 writes at once by default.
pub(super) const IPERF3_WRITES: usize = 128 << 10;
/// Numbers of queue pairs between the two processes.
pub(super) const QPS: [u32; 5] = [1, 4, 16, 64, 256];
/// Number of idle queue pairs.
pub(super) const IDLE_QPS: u32 = 1000;
/// The largest message of the latencies by size: every receive queue has room for one.
const LATENCY_MAX: usize = 64 << 10;

/// Measurements that belong together, in the order in which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Group {
    /// Large messages in one direction: WRITE, SEND, READ, a passive target.
    Bandwidth,
    /// Small WRITEs, as many as go.
    Rate,
    /// Small messages one at a time.
    Latency,
    /// Large messages in both directions.
    Both,
    /// Several queue pairs.
    Qps,
    /// Bandwidth and rate with small receive buffers.
    SmallBuffers,
    /// Bandwidth by the size of messages.
    Sweep,
    /// Latency by the size of messages.
    LatencySweep,
    /// Connected, and nothing happens.
    Idle,
}

/// Other transports, to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Peer {
    /// One TCP stream, both ends spinning.
    TcpSpin,
    /// One TCP stream, both ends sleeping in their calls.
    TcpBlocking,
    /// One TCP stream of iperf3.
    Iperf3,
    /// UDP sockets.
    Udp,
}

impl Peer {
    /// Its name in the rows.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::TcpSpin => "tcp-spin",
            Self::TcpBlocking => "tcp-blocking",
            Self::Iperf3 => "iperf3",
            Self::Udp => "udp-sockets",
        }
    }
}

/// What another transport measures.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rival {
    pub(super) peer: Peer,
    /// Of TCP.
    pub(super) cc: Option<Congestion>,
    pub(super) steps: Vec<Step>,
}

impl Rival {
    /// How its stream runs, if it is one of ours.
    pub(super) fn mode(&self) -> Option<TcpMode> {
        let spin = match self.peer {
            Peer::TcpSpin => true,
            Peer::TcpBlocking => false,
            Peer::Iperf3 | Peer::Udp => return None,
        };
        Some(TcpMode { cc: self.cc?, spin })
    }

    /// The row of one of its figures.
    pub(super) fn key(&self, measure: Measure, size: usize) -> Key {
        let spin = self.peer == Peer::TcpSpin;
        let tcp = self.cc.map(|cc| Tcp { cc, spin, write_size: size });
        Key { measure, netdev: self.peer.name(), size, mtu: LINK_MTU, qps: 1, tcp }
    }

    fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.steps.iter().map(|step| self.key(step.measure, step.size))
    }
}

/// One or more steps that processes measure right after each other.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    pub(super) group: Group,
    /// `None` if it measures peers only.
    pub(super) ours: Option<Provider>,
    pub(super) mtu: u32,
    pub(super) qps: u32,
    pub(super) small_buffers: bool,
    pub(super) steps: Vec<Step>,
    pub(super) rivals: Vec<Rival>,
}

impl Cell {
    /// The tasks that give these steps their baselines.
    pub(super) fn tasks(&self) -> Vec<Task> {
        let mut tasks: Vec<Task> = Vec::new();
        for step in &self.steps {
            let Some((kind, message)) = reference(step.measure, step.size) else { continue };
            if !tasks.iter().any(|task| (task.kind, task.message) == (kind, message)) {
                let (mtu, seconds) = (self.mtu as usize, step.seconds);
                tasks.push(Task { kind, message, mtu, depth: depth(step, self.qps), seconds });
            }
        }
        tasks
    }

    /// The least time that it takes to measure. Other work, above all starting processes, comes on
    /// top: its time is unknown.
    pub(super) fn time(&self, ports: bool) -> Duration {
        let of = |steps: &[Step]| steps.iter().map(|step| step.seconds).sum::<f64>();
        let has_port = ports && self.ours.is_some_and(|ours| ours.port_name().is_some());
        let times = if has_port { 2.0 } else { 1.0 };
        let raw: Duration = self.tasks().iter().map(Task::planned).sum();
        let rivals = self.rivals.iter().map(|Rival { peer, steps, .. }| match peer {
            Peer::Iperf3 => of(steps) + IPERF3_WARM_UP * steps.len() as f64,
            _ => of(steps),
        });
        raw.mul_f64(times) + Duration::from_secs_f64(of(&self.steps) + rivals.sum::<f64>())
    }

    /// The row of one of its figures. `None` if the figure has no row.
    pub(super) fn key(&self, netdev: &'static str, measure: Measure, size: usize) -> Option<Key> {
        let measure = match measure {
            Measure::MachineCpuPerGb | Measure::MachineCpuPerGbPassive => return None,
            measure if self.small_buffers => measure.with_small_buffers()?,
            measure => measure,
        };
        Some(Key { measure, netdev, size, mtu: self.mtu, qps: self.qps, tcp: None })
    }

    fn own_key(&self, step: &Step) -> Option<Key> {
        self.key(self.ours?.name(), step.measure, step.size)
    }

    /// The rows of its steps, without the figures that the steps yield besides.
    fn keys(&self) -> Vec<Key> {
        let own = self.steps.iter().filter_map(|step| self.own_key(step));
        own.chain(self.rivals.iter().flat_map(Rival::keys)).collect()
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, ours, mtu, qps, steps, .. } = self;
        let netdev = ours.map_or("TCP", Provider::name);
        write!(f, "{}: {netdev}, MTU {mtu}", name(group))?;
        if *qps > 1 {
            write!(f, ", {qps} queue pairs")?;
        }
        match (steps.first(), steps.last()) {
            (Some(first), Some(last)) if steps.len() > 1 && first.measure == last.measure => {
                write!(f, ", {} to {} bytes", first.size, last.size)
            }
            _ => Ok(()),
        }
    }
}

/// The task and message size that make the baseline of a figure.
pub(super) fn reference(measure: Measure, size: usize) -> Option<(Kind, usize)> {
    match measure {
        Measure::WriteBw
        | Measure::WriteBwPassive
        | Measure::WriteBwBoth
        | Measure::SendBw
        | Measure::ReadBw
        | Measure::WriteRate
        | Measure::WriteRatePassive => Some((Kind::Flood, size)),
        Measure::WriteLat | Measure::WriteLatSignaled | Measure::WriteLatMemory => {
            Some((Kind::PingPong, size))
        }
        // Their baseline is the round trip of a small WRITE.
        Measure::ReadLat
        | Measure::ReadLatPassive
        | Measure::ReadLatAsleep
        | Measure::AtomicLat
        | Measure::AtomicLatPassive
        | Measure::AtomicLatAsleep => Some((Kind::PingPong, SMALL)),
        _ => None,
    }
}

/// The choice of what to measure.
#[derive(Debug, Clone)]
pub(super) struct Choice {
    pub(super) providers: Vec<Provider>,
    pub(super) mtus: Vec<u32>,
    /// Congestion controls of TCP.
    pub(super) congestions: Vec<Congestion>,
    /// Names of groups, measures and peers; none for all.
    pub(super) only: Vec<String>,
    /// How long each figure is measured, in seconds.
    pub(super) seconds: f64,
    pub(super) quick: bool,
}

impl Choice {
    /// Checks that `word` names a group, a measure or a peer.
    pub(super) fn check(word: &str) -> Result<(), String> {
        let groups = names::<Group>();
        let (measures, peers) = (names::<Measure>(), names::<Peer>());
        let all = [groups, peers, measures].concat();
        if all.iter().any(|name| name == word) {
            return Ok(());
        }
        Err(format!("there is no {word}: there are {}", all.join(", ")))
    }

    fn wants(&self, word: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == word)
    }

    /// The wanted steps of a group. The name of a group selects all of its steps. The name of a
    /// measure selects no steps in the sweeps, in `Qps` only by its fairness, and in `SmallBuffers`
    /// only by its name with small buffers.
    fn steps(&self, group: Group, steps: Vec<Step>) -> Vec<Step> {
        let by_measure =
            !matches!(group, Group::Sweep | Group::LatencySweep | Group::Qps | Group::SmallBuffers);
        let all = self.wants(&name(&group));
        let wanted = |step: &Step| {
            all || step.figures().any(|measure| {
                let alias = measure.with_small_buffers().filter(|_| group == Group::SmallBuffers);
                let measure = alias.unwrap_or(measure);
                (by_measure
                    || alias.is_some()
                    || group == Group::Qps && measure == Measure::WriteBwFairness)
                    && self.wants(&measure.name())
            })
        };
        steps.into_iter().filter(wanted).collect()
    }

    /// All cells of a run, in order.
    pub(super) fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &group in Group::value_variants() {
            for (index, &provider) in self.providers.iter().enumerate() {
                cells.extend(self.of_group(group, provider, index == 0));
            }
            cells.extend(self.of_tcp(group));
        }
        leave_out(&mut cells);
        cells.retain(|cell| !cell.steps.is_empty() || !cell.rivals.is_empty());
        cells
    }

    fn of_group(&self, group: Group, provider: Provider, first: bool) -> Vec<Cell> {
        let cell = |mtu, qps, steps| Cell {
            group,
            ours: Some(provider),
            mtu,
            qps,
            small_buffers: group == Group::SmallBuffers,
            steps: self.steps(group, steps),
            rivals: Vec::new(),
        };
        let step = |measure, size| Step { measure, size, seconds: self.seconds };
        match group {
            Group::Bandwidth => {
                let measures =
                    [Measure::WriteBw, Measure::SendBw, Measure::ReadBw, Measure::WriteBwPassive];
                let at = |(index, &mtu)| {
                    let mut cell = cell(mtu, 1, measures.map(|m| step(m, LARGE)).to_vec());
                    if index == 0 && (first || !self.quick) {
                        cell.rivals = self.streams(first);
                    }
                    cell
                };
                self.mtus.iter().enumerate().map(at).collect()
            }
            Group::Rate => vec![cell(MTU, 1, vec![step(Measure::WriteRate, SMALL)])],
            Group::Latency => self.latency(&cell),
            Group::Both => {
                vec![cell(MTU, 1, vec![step(Measure::WriteBwBoth, LARGE)])]
            }
            Group::Qps => {
                let at = |qps| cell(MTU, qps, vec![step(Measure::WriteBw, SHARED)]);
                QPS.into_iter().map(at).collect()
            }
            // The kernel's devices choose their own buffers.
            Group::SmallBuffers if provider == Provider::Hw => Vec::new(),
            Group::SmallBuffers => {
                let at = |&mtu| {
                    let rate = (mtu == MTU).then(|| step(Measure::WriteRate, SMALL));
                    let steps = std::iter::once(step(Measure::WriteBw, LARGE)).chain(rate);
                    cell(mtu, 1, steps.collect())
                };
                self.mtus.iter().map(at).collect()
            }
            Group::Sweep | Group::LatencySweep => {
                let in_chunks = self.sweep(group);
                in_chunks.into_iter().map(|steps| cell(MTU, 1, steps)).collect()
            }
            Group::Idle => {
                let seconds = if self.quick { 1.0 } else { 2.0 };
                let idle = Step { measure: Measure::IdleWakeups, size: 0, seconds };
                vec![cell(MTU, IDLE_QPS, vec![idle])]
            }
        }
    }

    fn latency(&self, cell: &impl Fn(u32, u32, Vec<Step>) -> Cell) -> Vec<Cell> {
        let step = |measure, size| Step { measure, size, seconds: self.seconds };
        // A step that waits two milliseconds between round trips has few of them, so it takes
        // longer.
        let slow = |measure, size| Step { measure, size, seconds: (2.0 * self.seconds).max(0.2) };
        let steps = vec![
            step(Measure::WriteLat, SMALL),
            step(Measure::WriteLatSignaled, SMALL),
            step(Measure::WriteLatMemory, SMALL),
            step(Measure::ReadLat, SMALL),
            step(Measure::AtomicLat, ATOMIC),
            step(Measure::ReadLatPassive, SMALL),
            step(Measure::AtomicLatPassive, ATOMIC),
            slow(Measure::ReadLatAsleep, SMALL),
            slow(Measure::AtomicLatAsleep, ATOMIC),
            step(Measure::SendLatBlocking, SMALL),
        ];
        let mut cell = cell(MTU, 1, steps);
        let sleeps = |step: &Step| {
            use Measure::{AtomicLatAsleep, ReadLatAsleep, SendLatBlocking};
            matches!(step.measure, AtomicLatAsleep | ReadLatAsleep | SendLatBlocking)
        };
        let wake_up = self.wants(&Measure::WakeUp.name());
        if cell.steps.iter().any(sleeps) || wake_up || self.wants(&name(&Peer::Udp)) {
            let steps = vec![step(Measure::SendLatBlocking, SMALL), slow(Measure::WakeUp, SMALL)];
            cell.rivals.push(Rival { peer: Peer::Udp, cc: None, steps });
        }
        vec![cell]
    }

    /// The TCP streams that are measured beside large messages.
    fn streams(&self, with_iperf3: bool) -> Vec<Rival> {
        let step = |seconds| move |size| Step { measure: Measure::WriteBw, size, seconds };
        let all = [
            (Peer::TcpSpin, TCP_WRITES.map(step(self.seconds)).to_vec()),
            (Peer::TcpBlocking, TCP_WRITES.map(step(self.seconds)).to_vec()),
            (Peer::Iperf3, vec![step(1.0)(IPERF3_WRITES)]),
        ];
        let wanted = all.into_iter().filter(|(peer, _)| {
            let bandwidth = self.only.is_empty() || self.wants(&name(&Group::Bandwidth));
            (bandwidth || self.wants(&name(peer))) && (*peer != Peer::Iperf3 || with_iperf3)
        });
        wanted.flat_map(|(peer, steps)| self.with_each_cc(peer, &steps)).collect()
    }

    /// The same steps with each congestion control, or with the first if time is short.
    fn with_each_cc(&self, peer: Peer, steps: &[Step]) -> Vec<Rival> {
        let rival = |cc: &Congestion| Rival { peer, cc: Some(*cc), steps: steps.to_vec() };
        let most = if self.quick { 1 } else { usize::MAX };
        self.congestions.iter().take(most).map(rival).collect()
    }

    /// TCP by the size of messages.
    fn of_tcp(&self, group: Group) -> Vec<Cell> {
        if !matches!(group, Group::Sweep | Group::LatencySweep) || !self.wants(&name(&group)) {
            return Vec::new();
        }
        let steps = self.sweep(group).concat();
        let rivals = self.with_each_cc(Peer::TcpSpin, &steps);
        let (mtu, qps, small_buffers) = (LINK_MTU, 1, false);
        vec![Cell { group, ours: None, mtu, qps, small_buffers, steps: Vec::new(), rivals }]
    }

    /// The steps of all message sizes, in chunks, so that each baseline is measured soon before its
    /// figure.
    fn sweep(&self, group: Group) -> Vec<Vec<Step>> {
        const AT_ONCE: usize = 6;
        let (measure, max) = match group {
            Group::LatencySweep => (Measure::WriteLat, LATENCY_MAX),
            _ => (Measure::WriteBw, 8 << 20),
        };
        let seconds = (self.seconds / 4.0).max(0.02);
        let sizes = (1..=23).step_by(if self.quick { 2 } else { 1 }).map(|shift| 1 << shift);
        let steps = sizes.filter(|size| *size <= max);
        let steps: Vec<Step> = steps.map(|size| Step { measure, size, seconds }).collect();
        steps.chunks(AT_ONCE).map(<[Step]>::to_vec).collect()
    }
}

/// Removes from the sweeps what other groups measure for longer: all samples of a row are of one
/// kind.
fn leave_out(cells: &mut [Cell]) {
    let is_sweep = |cell: &&mut Cell| matches!(cell.group, Group::Sweep | Group::LatencySweep);
    let (sweeps, others): (Vec<_>, Vec<_>) = cells.iter_mut().partition(is_sweep);
    let measured: Vec<Key> = others.iter().flat_map(|cell| cell.keys()).collect();
    for cell in sweeps {
        let steps = std::mem::take(&mut cell.steps);
        let is_new = |step: &Step| cell.own_key(step).is_none_or(|key| !measured.contains(&key));
        cell.steps = steps.into_iter().filter(is_new).collect();
        for rival in &mut cell.rivals {
            let steps = std::mem::take(&mut rival.steps);
            let is_new = |step: &Step| !measured.contains(&rival.key(step.measure, step.size));
            rival.steps = steps.into_iter().filter(is_new).collect();
        }
        cell.rivals.retain(|rival| !rival.steps.is_empty());
    }
}

fn names<T: ValueEnum>() -> Vec<String> {
    T::value_variants().iter().map(name).collect()
}

fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
