//! The plan of a study: its modes, its experiments, and their cells in order.

use serde::{Deserialize, Serialize};

use super::experiment::{Event, Experiment, RULES, VERDICTS};
use crate::workers::{Link, Provider, Suite};

/// The way in which the two sides of a measurement reach each other.
#[derive(Debug, PartialEq)]
pub(super) struct Mode {
    pub(super) name: &'static str,
    pub(super) carrier: Carrier,
    pub(super) link: Link,
    /// Its row of the report's table of modes.
    pub(super) about: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Verbs(Provider),
    Tcp {
        spin: bool,
    },
    Iperf3,
    /// Unmodified programs by `rocinante run`, on a backend.
    Programs(Suite, Provider),
}

/// The plain link of a study is a veth of each container, and the bridge between them.
pub(super) const BRIDGE: Link = Link::Plain;

const fn mode(name: &'static str, carrier: Carrier, link: Link, about: &'static str) -> Mode {
    Mode { name, carrier, link, about }
}

/// All modes.
pub(super) static MODES: [Mode; 20] = [
    mode("udp", Carrier::Verbs(Provider::Udp), BRIDGE, "UDP sockets, needs no rights"),
    mode("packet", Carrier::Verbs(Provider::Packet), BRIDGE, "AF_PACKET, needs CAP_NET_RAW"),
    mode(
        "afxdp",
        Carrier::Verbs(Provider::Afxdp),
        BRIDGE,
        "AF_XDP, needs CAP_NET_ADMIN and CAP_BPF",
    ),
    mode(
        "packet-agent",
        Carrier::Verbs(Provider::Handed),
        BRIDGE,
        "AF_PACKET from the agent, no rights",
    ),
    mode(
        "afxdp-agent",
        Carrier::Verbs(Provider::HandedAfxdp),
        BRIDGE,
        "AF_XDP from the agent, no rights",
    ),
    mode("tcp-spin", Carrier::Tcp { spin: true }, BRIDGE, "a TCP stream, both ends spin"),
    mode("tcp-blocking", Carrier::Tcp { spin: false }, BRIDGE, "a TCP stream, both ends sleep"),
    mode("iperf3", Carrier::Iperf3, BRIDGE, "a TCP stream of iperf3"),
    mode("vxlan-udp", Carrier::Verbs(Provider::Udp), Link::Vxlan, "udp, two hosts, VXLAN"),
    mode("vxlan-packet", Carrier::Verbs(Provider::Packet), Link::Vxlan, "packet, two hosts, VXLAN"),
    mode("vxlan-tcp", Carrier::Tcp { spin: true }, Link::Vxlan, "tcp-spin, two hosts, VXLAN"),
    mode("bare-udp", Carrier::Verbs(Provider::Udp), Link::Loopback, "udp, one namespace for both"),
    mode(
        "bare-packet",
        Carrier::Verbs(Provider::Packet),
        Link::Loopback,
        "packet, one namespace for both",
    ),
    mode(
        "bare-tcp",
        Carrier::Tcp { spin: true },
        Link::Loopback,
        "tcp-spin, one namespace for both",
    ),
    mode(
        "podman-udp",
        Carrier::Verbs(Provider::Contained),
        BRIDGE,
        "udp in containers of podman, no rights",
    ),
    mode(
        "perftest-udp",
        Carrier::Programs(Suite::Perftest, Provider::Udp),
        BRIDGE,
        "unmodified perftest by `rocinante run`, udp",
    ),
    mode(
        "perftest-packet",
        Carrier::Programs(Suite::Perftest, Provider::Packet),
        BRIDGE,
        "unmodified perftest by `rocinante run`, packet",
    ),
    mode(
        "ucx-udp",
        Carrier::Programs(Suite::Ucx, Provider::Udp),
        BRIDGE,
        "unmodified UCX by `rocinante run`, udp",
    ),
    mode(
        "ucx-packet",
        Carrier::Programs(Suite::Ucx, Provider::Packet),
        BRIDGE,
        "unmodified UCX by `rocinante run`, packet",
    ),
    mode("kernel", Carrier::Verbs(Provider::Hw), BRIDGE, "RDMA devices of the kernel"),
];

impl Mode {
    /// The device of the kernel has addresses of its own, and all else is on our links.
    pub(super) fn is_kernel(&self) -> bool {
        self.carrier == Carrier::Verbs(Provider::Hw)
    }

    pub(super) const fn is_tcp(&self) -> bool {
        matches!(self.carrier, Carrier::Tcp { .. } | Carrier::Iperf3)
    }

    /// Whether processes open the device in software by rights of their own.
    pub(super) const fn is_plain_verbs(&self) -> bool {
        matches!(self.carrier, Carrier::Verbs(Provider::Udp | Provider::Packet | Provider::Afxdp))
    }

    /// The name of its backend, if it is the device in software.
    pub(super) fn backend(&self) -> Option<String> {
        match self.carrier {
            Carrier::Verbs(provider) => provider.backend_name(),
            _ => None,
        }
    }

    /// Whether its processes are in containers of podman.
    pub(super) const fn is_contained(&self) -> bool {
        matches!(self.carrier, Carrier::Verbs(Provider::Contained))
    }

    /// Whether programs of others measure it.
    pub(super) const fn is_programs(&self) -> bool {
        matches!(self.carrier, Carrier::Programs(..))
    }

    /// Whether an agent opens its ports.
    pub(super) const fn is_handed(&self) -> bool {
        matches!(self.carrier, Carrier::Verbs(Provider::Handed | Provider::HandedAfxdp))
    }
}

/// What a study measures. An empty list is of all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Choice {
    pub(super) quick: bool,
    /// Whether its processes take turns with others.
    pub(super) patient: bool,
    pub(super) only: Vec<String>,
    pub(super) modes: Vec<String>,
    pub(super) pairs: Vec<u64>,
}

/// The most pairs: their containers, and the probe's, are on one bridge.
pub(super) const PAIRS_MAX: u64 = 100;

/// The fewest programs that start at once.
pub(super) const PROGRAMS_MIN: u64 = 2;
/// Numbers of threads that share queue pairs.
const THREADS: [u64; 4] = [1, 2, 4, 8];

/// The most neighbours of a probe.
const NEIGHBOURS_MAX: u64 = 8;

/// A part of a study: one experiment in one mode, at some points, once.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    pub(super) experiment: Experiment,
    pub(super) mode: &'static Mode,
    pub(super) xs: Vec<u64>,
    /// From 1.
    pub(super) round: u32,
}

/// Time of one figure, in seconds.
pub(super) const fn seconds(experiment: Experiment, quick: bool) -> f64 {
    match (experiment, quick) {
        (Experiment::Size, true) => 0.03,
        (Experiment::Size, false) => 0.08,
        (Experiment::Scale, true) => 0.6,
        (Experiment::Scale, false) => 2.0,
        (Experiment::ManyToOne, true) => 0.4,
        (Experiment::ManyToOne, false) => 2.0,
        (Experiment::Isolation | Experiment::Starvation, true) => 0.4,
        (Experiment::Isolation | Experiment::Starvation, false) => 1.0,
        // The longest wait for an error.
        (Experiment::Failure, _) => 5.0,
        (Experiment::Start, true) => 0.3,
        (Experiment::Control, true) => 0.6,
        (Experiment::Start | Experiment::Control, false) => 1.0,
        (Experiment::Rate, true) => 0.1,
        (Experiment::Rate, false) => 0.3,
        (Experiment::Pressure, _) => 0.0,
        (Experiment::Load, true) => 0.15,
        (Experiment::Load, false) => 0.5,
    }
}

impl Choice {
    /// Error: a word that is not known, with those that are; a number of pairs that cannot be.
    pub(super) fn check(&self) -> Result<(), String> {
        let experiments: Vec<&str> = Experiment::ALL.iter().map(|one| one.name()).collect();
        known("--only", &self.only, &experiments)?;
        let modes: Vec<&str> = MODES.iter().map(|mode| mode.name).collect();
        known("--modes", &self.modes, &modes)?;
        match self.pairs.iter().find(|pairs| !(1..=PAIRS_MAX).contains(*pairs)) {
            Some(pairs) => Err(format!("--pairs {pairs}: from 1 to {PAIRS_MAX}")),
            None => Ok(()),
        }
    }

    /// Whether it is a quick study of everything, which has the least points.
    const fn is_short(&self) -> bool {
        self.quick && self.only.is_empty()
    }

    /// The points of an experiment in one mode, in pieces of which each is measured at once.
    pub(super) fn points(&self, experiment: Experiment, mode: &Mode) -> Vec<Vec<u64>> {
        match experiment {
            Experiment::Size if mode.carrier == Carrier::Iperf3 => {
                // It takes whole seconds for each.
                let all: &[u64] = if self.quick { &[1 << 20] } else { &[4096, 65_536, 1 << 20] };
                all.iter().map(|size| vec![*size]).collect()
            }
            Experiment::Size if mode.is_programs() => {
                let all: &[u64] =
                    if self.quick { &[64, 1 << 20] } else { &[64, 4096, 65_536, 1 << 20] };
                all.iter().map(|size| vec![*size]).collect()
            }
            Experiment::Size => {
                let has_few = mode.link == Link::Loopback || mode.is_contained();
                let all: Vec<u64> = match (self.quick, has_few) {
                    (true, true) => vec![64, 1 << 20],
                    (true, _) | (_, true) => vec![64, 4096, 65_536, 1 << 20],
                    _ => (1..=23).map(|shift| 1 << shift).collect(),
                };
                all.chunks(8).map(<[u64]>::to_vec).collect()
            }
            Experiment::Scale => {
                let all: &[u64] = if self.quick { &[1, 16] } else { &[1, 10, 25, 50, 100] };
                let all = if self.pairs.is_empty() { all } else { &self.pairs };
                all.iter().map(|pairs| vec![*pairs]).collect()
            }
            Experiment::ManyToOne => {
                let all: &[u64] = if self.quick { &[1, 8] } else { &[1, 4, 16, 64] };
                all.iter().map(|senders| vec![*senders]).collect()
            }
            Experiment::Isolation => {
                let all: &[u64] = if self.quick { &[0, 1] } else { &[0, 1, 2, 4, 8] };
                all.iter().map(|neighbours| vec![*neighbours]).collect()
            }
            Experiment::Starvation => {
                let all: &[u64] = if self.quick { &[8] } else { &[0, 4, 8, 16, 32] };
                all.iter().map(|loops| vec![*loops]).collect()
            }
            Experiment::Failure => {
                let in_time = |event: &Event| match event {
                    Event::KilledPeer => !self.is_short() || !mode.is_handed(),
                    Event::RestartedAgent => true,
                    Event::PulledLink | Event::MovedContainer => !self.quick,
                };
                let has = |event: &Event| event.has(mode) && in_time(event);
                let all = (0..).zip(Event::ALL).filter(|(_, event)| has(event));
                all.map(|(x, _)| vec![x]).collect()
            }
            Experiment::Start => {
                let all: &[u64] = match (self.is_short(), self.quick) {
                    _ if mode.is_contained() => &[4],
                    (true, _) => &[20],
                    (_, true) => &[PROGRAMS_MIN, 20],
                    _ => &[PROGRAMS_MIN, 20, 100, 200],
                };
                all.iter().map(|programs| vec![*programs]).collect()
            }
            Experiment::Control => {
                let all: &[u64] = match (self.is_short(), self.quick) {
                    (true, _) => &[100],
                    (_, true) => &[VERDICTS, 100],
                    _ => &[VERDICTS, RULES, 10, 100, 1000, 10_000],
                };
                let has = |x: &&u64| **x != VERDICTS || mode.is_plain_verbs();
                all.iter().filter(has).map(|x| vec![*x]).collect()
            }
            Experiment::Rate => {
                let all: &[u64] = match (self.is_short(), self.quick) {
                    (true, _) => &[16],
                    (_, true) => &[1, 16],
                    _ => &[1, 4, 16, 64],
                };
                all.iter().map(|qps| vec![*qps]).collect()
            }
            Experiment::Pressure => {
                let all: &[u64] = if self.quick { &[65_536] } else { &[64, 4096, 65_536, 1 << 20] };
                all.iter().map(|size| vec![*size]).collect()
            }
            Experiment::Load => {
                let all: &[u64] =
                    if self.quick { &[10, 50, 90] } else { &[10, 25, 50, 75, 90, 95] };
                vec![all.to_vec()]
            }
        }
    }

    /// How often an experiment is measured. Its processes take long to start where there are many.
    const fn rounds(&self, experiment: Experiment) -> u32 {
        match (self.quick, experiment) {
            (true, _)
            | (
                _,
                Experiment::Scale | Experiment::Start | Experiment::Control | Experiment::Pressure,
            ) => 1,
            (_, Experiment::Starvation | Experiment::Failure | Experiment::Rate) => 2,
            _ => 3,
        }
    }

    /// All cells, in order: modes that are to be compared follow each other, and the first round of
    /// everything comes before the second.
    pub(super) fn cells(&self) -> Vec<Cell> {
        let in_time = |one: &Experiment| {
            // Programs beside busy loops take long to start.
            !self.is_short() || *one != Experiment::Starvation
        };
        let experiments = Experiment::ALL.into_iter().filter(in_time);
        let experiments = experiments.filter(|one| wants(&self.only, one.name()));
        let experiments: Vec<Experiment> = experiments.collect();
        let rounds = experiments.iter().map(|one| self.rounds(*one)).max().unwrap_or(0);
        let mut cells = Vec::new();
        for round in 1..=rounds {
            for &experiment in experiments.iter().filter(|one| round <= self.rounds(**one)) {
                let modes = MODES.iter().filter(|mode| wants(&self.modes, mode.name));
                let modes = modes.filter(|mode| experiment.has(mode));
                let modes: Vec<_> =
                    modes.map(|mode| (mode, self.points(experiment, mode))).collect();
                let pieces = modes.iter().map(|(_, points)| points.len()).max().unwrap_or(0);
                for piece in 0..pieces {
                    cells.extend(modes.iter().filter_map(|(mode, points)| {
                        let xs = points.get(piece)?.clone();
                        Some(Cell { experiment, mode, xs, round })
                    }));
                }
            }
        }
        cells
    }
}

/// The containers that cells need: two of each pair, and two of the probe; or the senders and one
/// receiver; or one for each program.
pub(super) fn containers(cells: &[Cell]) -> u64 {
    let senders = cells.iter().filter(|cell| cell.experiment == Experiment::ManyToOne);
    let senders = senders.flat_map(|cell| cell.xs.iter().copied()).max().unwrap_or(0);
    let programs = cells.iter().filter(|cell| cell.experiment == Experiment::Start);
    let programs = programs.flat_map(|cell| cell.xs.iter().copied()).max().unwrap_or(0);
    (2 * pairs_max(cells) + 2).max(senders + 1).max(programs)
}

/// The numbers of threads that share this many queue pairs.
pub(super) fn threads(qps: u64, quick: bool) -> impl Iterator<Item = u64> {
    let most = if quick { 2 } else { THREADS[3] };
    THREADS.into_iter().filter(move |threads| *threads <= qps.min(most))
}

/// The most pairs of containers that are measured at once.
fn pairs_max(cells: &[Cell]) -> u64 {
    let scales = cells.iter().filter(|cell| cell.experiment == Experiment::Scale);
    let scales = scales.flat_map(|cell| cell.xs.iter().copied()).max().unwrap_or(0);
    scales.max(if cells.iter().any(|cell| cell.experiment.is_paired()) {
        NEIGHBOURS_MAX
    } else {
        0
    })
}

impl Cell {
    /// The time that it takes on an ordinary machine, in seconds.
    pub(super) fn seconds(&self, quick: bool) -> f64 {
        let each = seconds(self.experiment, quick);
        let points = self.xs.len() as f64;
        let podman = if self.mode.is_contained() { 1.0 } else { 0.0 };
        match (self.experiment, self.mode.carrier) {
            (Experiment::Size, Carrier::Iperf3) => 2.3,
            (Experiment::Size, Carrier::Verbs(_)) => 0.2 + podman + points * 4.0 * (each + 0.03),
            (Experiment::Size, Carrier::Tcp { .. }) => 0.3 + points * 2.0 * (each + 0.05),
            (Experiment::Size, Carrier::Programs(suite, _)) => {
                let of = |x: &u64| 0.5 * suite.of_size(*x, quick).len() as f64;
                self.xs.iter().map(of).sum()
            }
            (Experiment::Isolation, _) => each + 0.4,
            (Experiment::Starvation, _) => 2.0 * (each + 1.5),
            (Experiment::Failure, _) => {
                let of = |x: &u64| match Event::of(*x) {
                    Some(Event::PulledLink | Event::MovedContainer) => 5.0,
                    _ => 1.2,
                };
                self.xs.iter().map(of).sum()
            }
            (Experiment::Start, _) => {
                let few = self.xs.contains(&PROGRAMS_MIN);
                let connections = if few { each + 1.5 } else { 0.0 };
                let program = 0.03 + podman / 2.0;
                0.3 + program * self.xs.iter().sum::<u64>() as f64 + connections
            }
            (Experiment::Control, _) => {
                let verdicts = if quick { 3.0 } else { 60.0 };
                let of = |x: &u64| if *x == VERDICTS { verdicts } else { each + 0.4 };
                self.xs.iter().map(of).sum()
            }
            (Experiment::Rate, _) => {
                let of = |qps: &u64| threads(*qps, quick).count() as f64 * (each + 0.2);
                self.xs.iter().map(of).sum()
            }
            (Experiment::Pressure, _) => points,
            (Experiment::ManyToOne, _) => each + 0.3 + 0.04 * self.xs.iter().sum::<u64>() as f64,
            (Experiment::Scale, _) => each + 0.5 + 0.1 * self.xs.iter().sum::<u64>() as f64,
            (Experiment::Load, _) => 0.3 + each * (points + 1.0),
        }
    }
}

fn wants(words: &[String], word: &str) -> bool {
    words.is_empty() || words.iter().any(|one| one == word)
}

fn known(option: &str, words: &[String], all: &[&str]) -> Result<(), String> {
    match words.iter().find(|word| !all.contains(&word.as_str())) {
        Some(word) => Err(format!("{option}: there is no {word:?}: there are {}", all.join(", "))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &str) -> Vec<String> {
        words.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }

    #[test]
    fn modes_take_turns_and_no_point_comes_twice() {
        let choice = Choice { modes: words("packet tcp-spin udp"), ..Choice::default() };
        let cells = choice.cells();
        let first: Vec<&str> = cells.iter().take(4).map(|cell| cell.mode.name).collect();
        assert_eq!(first, ["udp", "packet", "tcp-spin", "udp"]);
        let mut keys: Vec<_> = cells
            .iter()
            .flat_map(|cell| {
                cell.xs.iter().map(|x| (cell.experiment, cell.mode.name, *x, cell.round))
            })
            .collect();
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count);
        assert_eq!(pairs_max(&cells), 100);
        let rounds: Vec<u32> = cells.iter().map(|cell| cell.round).collect();
        assert!(rounds.is_sorted(), "a first round is complete before the second");
    }

    #[test]
    fn a_choice_is_of_known_words_and_possible_numbers() {
        let of = |only: &str, modes: &str, pairs: &[u64]| {
            let (only, modes, pairs) = (words(only), words(modes), pairs.to_vec());
            Choice { quick: true, patient: false, only, modes, pairs }.check()
        };
        assert_eq!(of("", "", &[]), Ok(()));
        assert_eq!(of("scale size", "udp kernel", &[1, 100]), Ok(()));
        let error = of("scael", "", &[]).unwrap_err();
        assert!(
            error.contains("scael") && error.contains("size, scale, load, many_to_one"),
            "{error}"
        );
        let error = of("", "tcp", &[]).unwrap_err();
        assert!(error.contains("\"tcp\"") && error.contains("tcp-blocking, iperf3"), "{error}");
        for pairs in [0, 101] {
            let error = of("", "", &[1, pairs]).unwrap_err();
            assert!(error.contains(&format!("--pairs {pairs}")), "{error}");
        }
    }

    #[test]
    fn a_study_has_its_time() {
        let time = |quick| {
            let choice = Choice { quick, ..Choice::default() };
            choice.cells().iter().map(|cell| cell.seconds(quick)).sum::<f64>()
        };
        assert!(time(true) < 110.0, "{} s", time(true));
        assert!(time(false) < 2_200.0, "{} s", time(false));
    }

    #[test]
    fn pairs_are_those_that_are_wanted() {
        let choice = Choice { only: words("scale"), pairs: vec![3, 7], ..Choice::default() };
        let cells = choice.cells();
        assert!(cells.iter().all(|cell| cell.experiment == Experiment::Scale));
        assert_eq!(pairs_max(&cells), 8, "containers are there for all neighbours, too");
        assert!(cells.iter().all(|cell| cell.mode.name != "tcp-spin"), "they would all spin");
        let only_size = Choice { only: words("size"), ..Choice::default() };
        assert_eq!((pairs_max(&only_size.cells()), containers(&only_size.cells())), (0, 2));
        let to_one = Choice { only: words("many_to_one"), ..Choice::default() };
        assert_eq!(containers(&to_one.cells()), 65);
    }
}
