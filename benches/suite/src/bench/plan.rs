//! The plan of a run: its cells and their order.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use rocinante_baselines::{Kind, Task};

use super::rows::{Key, Tcp};
use crate::workers::{
    Congestion, IPERF3_WARM_UP, Link, Measure, NAMESPACES, Provider, SENDERS_MAX, SOCKPERF_WARM_UP,
    Step, TcpMode, depth,
};

/// Bytes of a small message, and of a large one.
pub(super) const SMALL: usize = 64;
pub(super) const LARGE: usize = 1 << 20;
/// Message bytes with many queue pairs.
pub(super) const SHARED: usize = 64 << 10;
/// Bytes of an atomic.
const ATOMIC: usize = 8;
/// The path MTU where a cell does not choose another.
pub(super) const MTU: u32 = 4096;
/// The plain link's MTU, which TCP uses.
pub(super) const LINK_MTU: u32 = Link::Plain.mtu();
/// Bytes that a TCP stream writes at once, where the size of messages does not vary. Which is
/// fastest depends on the congestion control and on who spins.
pub(super) const TCP_WRITES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
/// Bytes that iperf3 writes at once by default.
pub(super) const IPERF3_WRITES: usize = 128 << 10;
/// Numbers of queue pairs between the two processes.
pub(super) const QPS: [u32; 5] = [1, 4, 16, 64, 256];
/// The same, each with 16 messages outstanding.
pub(super) const QUEUED_QPS: [u32; 3] = [1, 64, 256];
/// Numbers of processes that send to one.
pub(super) const SENDERS: [u32; 3] = [1, 16, SENDERS_MAX];
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
    /// Small WRITEs at the highest rate.
    Rate,
    /// Small messages one at a time.
    Latency,
    /// Large messages in both directions.
    Both,
    /// Several queue pairs.
    Qps,
    /// Bandwidth and rate with small receive buffers.
    SmallBuffers,
    /// Bandwidth over links of other kinds.
    Links,
    /// Many processes that send to one.
    FanIn,
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
    /// The packets of a baseline on UDP sockets that `quinn-udp` drives.
    QuinnUdp,
    /// UDP datagrams of sockperf.
    SockperfUdp,
    /// A TCP stream of sockperf.
    SockperfTcp,
}

impl Peer {
    /// Its name in the rows.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::TcpSpin => "tcp-spin",
            Self::TcpBlocking => "tcp-blocking",
            Self::Iperf3 => "iperf3",
            Self::Udp => "udp-sockets",
            Self::QuinnUdp => "quinn-udp",
            Self::SockperfUdp => "sockperf-udp",
            Self::SockperfTcp => "sockperf-tcp",
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
            _ => return None,
        };
        Some(TcpMode { cc: self.cc?, spin })
    }

    /// The row of one of its figures over `link`.
    fn key(&self, link: Link, measure: Measure, size: usize) -> Key {
        let spin = self.peer == Peer::TcpSpin;
        let tcp = self.cc.map(|cc| Tcp { cc, spin, write_size: size });
        let mtu = if self.peer == Peer::QuinnUdp { MTU } else { link.mtu() };
        Key { measure, netdev: self.peer.name(), size, mtu, qps: 1, link, tcp }
    }

    /// The packets of a baseline that it sends.
    pub(super) fn tasks(&self) -> Vec<Task> {
        let steps = self.steps.iter().filter(|_| self.peer == Peer::QuinnUdp);
        steps.filter_map(|step| task(step, MTU, 1)).collect()
    }

    /// The least time that it takes to measure.
    fn time(&self) -> Duration {
        let beside = match self.peer {
            Peer::Iperf3 => IPERF3_WARM_UP,
            Peer::SockperfUdp | Peer::SockperfTcp => SOCKPERF_WARM_UP,
            Peer::QuinnUdp => return self.tasks().iter().map(Task::planned).sum(),
            _ => 0.0,
        };
        let all = self.steps.iter().map(|step| step.seconds + beside).sum();
        Duration::from_secs_f64(all)
    }
}

/// One or more steps that processes measure right after each other.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    pub(super) group: Group,
    /// `None` if it measures peers only.
    pub(super) ours: Option<Provider>,
    pub(super) link: Link,
    pub(super) mtu: u32,
    /// Queue pairs, or processes that send with one each.
    pub(super) qps: u32,
    pub(super) small_buffers: bool,
    pub(super) steps: Vec<Step>,
    pub(super) rivals: Vec<Rival>,
}

impl Cell {
    /// The tasks that give these steps their baselines.
    pub(super) fn tasks(&self) -> Vec<Task> {
        let mut tasks: Vec<Task> = Vec::new();
        for task in self.steps.iter().filter_map(|step| task(step, self.mtu, self.qps)) {
            if !tasks.iter().any(|one| (one.kind, one.message) == (task.kind, task.message)) {
                tasks.push(task);
            }
        }
        tasks
    }

    /// The least time that it takes to measure. Other work, above all starting processes, comes on
    /// top: its time is unknown.
    pub(super) fn time(&self, ports: bool) -> Duration {
        let own: f64 = self.steps.iter().map(|step| step.seconds).sum();
        let has_port = ports && self.ours.is_some_and(|ours| ours.port_name().is_some());
        let times = if has_port { 2.0 } else { 1.0 };
        let raw: Duration = self.tasks().iter().map(Task::planned).sum();
        let rivals: Duration = self.rivals.iter().map(Rival::time).sum();
        raw.mul_f64(times) + Duration::from_secs_f64(own) + rivals
    }

    /// The row of one of its figures. `None` if the figure has no row.
    pub(super) fn key(&self, netdev: &'static str, measure: Measure, size: usize) -> Option<Key> {
        let measure = match measure {
            measure if !self.has_row(measure) => return None,
            measure if self.small_buffers => measure.with_small_buffers()?,
            measure => measure,
        };
        let Self { mtu, qps, link, .. } = *self;
        Some(Key { measure, netdev, size, mtu, qps, link, tcp: None })
    }

    /// The row of a figure of one of its rivals.
    pub(super) fn key_of(&self, rival: &Rival, measure: Measure, size: usize) -> Option<Key> {
        self.has_row(measure).then(|| rival.key(self.link, measure, size))
    }

    /// Steps have figures that are rows only where they are measured for long.
    fn has_row(&self, measure: Measure) -> bool {
        match measure {
            Measure::MachineCpuPerGb | Measure::MachineCpuPerGbPassive => false,
            Measure::WriteBwPerCore => self.group == Group::Bandwidth,
            Measure::WriteLatP99 | Measure::WriteLatP999 => self.group == Group::Latency,
            _ => true,
        }
    }

    /// Number of network namespaces that it is measured in.
    pub(super) fn namespaces(&self) -> u8 {
        if self.group == Group::FanIn { NAMESPACES } else { 2 }
    }

    fn own_key(&self, step: &Step) -> Option<Key> {
        self.key(self.ours?.name(), step.measure, step.size)
    }

    /// The rows of its steps, without the figures that the steps yield besides.
    fn keys(&self) -> Vec<Key> {
        let own = self.steps.iter().filter_map(|step| self.own_key(step));
        let of = |rival: &Rival, step: &Step| self.key_of(rival, step.measure, step.size);
        let rivals = self.rivals.iter();
        own.chain(rivals.flat_map(|rival| rival.steps.iter().filter_map(move |s| of(rival, s))))
            .collect()
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, ours, link, mtu, qps, steps, .. } = self;
        let netdev = ours.map_or("TCP", Provider::name);
        write!(f, "{}: {netdev}, MTU {mtu}", name(group))?;
        if !link.is_plain() {
            write!(f, ", {}", link.name())?;
        }
        if *group == Group::FanIn {
            write!(f, ", {qps} senders")?;
        } else if *qps > 1 {
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

/// The path MTU over a link: the largest that fits.
pub(super) const fn path_mtu(link: Link) -> u32 {
    if link.mtu() < MTU { 1024 } else { MTU }
}

/// The task that gives a step its baseline.
fn task(step: &Step, mtu: u32, qps: u32) -> Option<Task> {
    let (kind, message) = reference(step.measure, step.size)?;
    let (mtu, seconds) = (mtu as usize, step.seconds);
    Some(Task { kind, message, mtu, depth: depth(step, qps), seconds })
}

/// The task and message size that make the baseline of a figure.
pub(super) fn reference(measure: Measure, size: usize) -> Option<(Kind, usize)> {
    match measure {
        Measure::WriteBw
        | Measure::WriteBwPassive
        | Measure::WriteBwBoth
        | Measure::WriteBwQueued
        | Measure::SendBw
        | Measure::ReadBw
        | Measure::WriteRate
        | Measure::WriteRatePassive
        | Measure::WriteRateSingle
        | Measure::UdRate => Some((Kind::Flood, size)),
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
    /// measure selects no steps in the sweeps and `Links`, in `Qps` all but `write_bw`, and in
    /// `SmallBuffers` only by its name with small buffers.
    fn steps(&self, group: Group, steps: Vec<Step>) -> Vec<Step> {
        let by_measure = !matches!(
            group,
            Group::Sweep | Group::LatencySweep | Group::Qps | Group::SmallBuffers | Group::Links
        );
        let all = self.wants(&name(&group));
        let wanted = |step: &Step| {
            all || step.figures().any(|measure| {
                let alias = measure.with_small_buffers().filter(|_| group == Group::SmallBuffers);
                let measure = alias.unwrap_or(measure);
                (by_measure
                    || alias.is_some()
                    || group == Group::Qps && measure != Measure::WriteBw)
                    && self.wants(&measure.name())
            })
        };
        steps.into_iter().filter(wanted).collect()
    }

    /// Whether to leave out long measurements, unless they are named.
    fn is_short(&self) -> bool {
        self.quick && self.only.is_empty()
    }

    /// All cells of a run, in order.
    pub(super) fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        let takes_long = |group: &Group| matches!(group, Group::Links | Group::FanIn);
        let in_time = |group: &&Group| !(self.is_short() && takes_long(group));
        for &group in Group::value_variants().iter().filter(in_time) {
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
            link: Link::Plain,
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
            Group::Rate => {
                let rates = [Measure::WriteRate, Measure::WriteRateSingle, Measure::UdRate];
                vec![cell(MTU, 1, rates.map(|rate| step(rate, SMALL)).to_vec())]
            }
            Group::Latency => self.latency(&cell, first),
            Group::Both => {
                vec![cell(MTU, 1, vec![step(Measure::WriteBwBoth, LARGE)])]
            }
            Group::Qps => {
                let at = |measure| move |qps| (qps, step(measure, SHARED));
                let qps = QPS.into_iter().filter(|_| !self.is_short());
                let all = qps.map(at(Measure::WriteBw));
                let all = all.chain(QUEUED_QPS.into_iter().map(at(Measure::WriteBwQueued)));
                all.map(|(qps, step)| cell(MTU, qps, vec![step])).collect()
            }
            // The kernel's devices choose their own buffers, and have a link already.
            Group::SmallBuffers | Group::Links | Group::FanIn if provider == Provider::Hw => {
                Vec::new()
            }
            Group::Links => {
                let over = |link: Link| {
                    let mtu = path_mtu(link);
                    let steps = vec![step(Measure::WriteBw, SHARED)];
                    let rivals = if first { self.over_links() } else { Vec::new() };
                    Cell { link, rivals, ..cell(mtu, 1, steps) }
                };
                Link::OTHERS.into_iter().map(over).collect()
            }
            Group::FanIn => {
                // Processes that share a core have turns of some milliseconds: each needs several.
                let seconds = 4.0 * self.seconds;
                let step = Step { measure: Measure::FanIn, size: SHARED, seconds };
                let from = |senders| Cell { link: Link::Bridge, ..cell(MTU, senders, vec![step]) };
                SENDERS.into_iter().map(from).collect()
            }
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

    fn latency(&self, cell: &impl Fn(u32, u32, Vec<Step>) -> Cell, first: bool) -> Vec<Cell> {
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
        let on_one_cpu = [Measure::WriteLatOneCpu, Measure::ReadLatOneCpu];
        let on_one_cpu = cell(MTU, 1, on_one_cpu.map(|m| step(m, SMALL)).to_vec());
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
        if first {
            cell.rivals.extend(self.ping_pongs());
        }
        vec![cell, on_one_cpu]
    }

    /// The ping-pongs of TCP and sockperf that are measured beside small messages.
    fn ping_pongs(&self) -> Vec<Rival> {
        let step = |measure, seconds| vec![Step { measure, size: SMALL, seconds }];
        let whole = self.wants(&name(&Group::Latency));
        let mut all = Vec::new();
        if whole || self.wants(&name(&Peer::TcpSpin)) {
            all.extend(self.with_each_cc(Peer::TcpSpin, &step(Measure::WriteLat, self.seconds)));
        }
        // Over TCP its client cannot spin: it does not wait for a connection then.
        for (peer, measure) in [
            (Peer::SockperfUdp, Measure::WriteLat),
            (Peer::SockperfUdp, Measure::SendLatBlocking),
            (Peer::SockperfTcp, Measure::SendLatBlocking),
        ] {
            if whole && !self.is_short() || self.only.contains(&name(&peer)) {
                all.push(Rival { peer, cc: None, steps: step(measure, 1.0) });
            }
        }
        all
    }

    /// The TCP streams that are measured beside the other links.
    fn over_links(&self) -> Vec<Rival> {
        if !self.wants(&name(&Group::Links)) {
            return Vec::new();
        }
        let step = |size| Step { measure: Measure::WriteBw, size, seconds: self.seconds };
        let steps = TCP_WRITES.map(step);
        let peers = [Peer::TcpSpin, Peer::TcpBlocking].into_iter();
        peers.flat_map(|peer| self.with_each_cc(peer, &steps)).collect()
    }

    /// The streams that are measured beside large messages.
    fn streams(&self, first: bool) -> Vec<Rival> {
        let step = |seconds| move |size| Step { measure: Measure::WriteBw, size, seconds };
        let all = [
            (Peer::TcpSpin, TCP_WRITES.map(step(self.seconds)).to_vec()),
            (Peer::TcpBlocking, TCP_WRITES.map(step(self.seconds)).to_vec()),
            (Peer::Iperf3, vec![step(1.0)(IPERF3_WRITES)]),
        ];
        let wanted = all.into_iter().filter(|(peer, _)| {
            let bandwidth = self.only.is_empty() || self.wants(&name(&Group::Bandwidth));
            (bandwidth || self.wants(&name(peer))) && (*peer != Peer::Iperf3 || first)
        });
        let mut all: Vec<Rival> =
            wanted.flat_map(|(peer, steps)| self.with_each_cc(peer, &steps)).collect();
        if first && (self.wants(&name(&Group::Bandwidth)) || self.wants(&name(&Peer::QuinnUdp))) {
            let steps = vec![step(self.seconds)(LARGE)];
            all.push(Rival { peer: Peer::QuinnUdp, cc: None, steps });
        }
        all
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
        let (link, steps) = (Link::Plain, Vec::new());
        vec![Cell { group, ours: None, link, mtu, qps, small_buffers, steps, rivals }]
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
        let (link, steps) = (cell.link, std::mem::take(&mut cell.steps));
        let is_new = |step: &Step| cell.own_key(step).is_none_or(|key| !measured.contains(&key));
        cell.steps = steps.into_iter().filter(is_new).collect();
        for rival in &mut cell.rivals {
            let steps = std::mem::take(&mut rival.steps);
            let is_new =
                |step: &Step| !measured.contains(&rival.key(link, step.measure, step.size));
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
