//! `rocinante stat`: the traffic of containers, or of their queue pairs, a line of each in each
//! interval.

mod agent;
mod pages;
pub(crate) mod rates;
mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante_netdev::Interface;
use rocinante_netdev::for_agent::rtnl::{Queued, queues};
use rocinante_netdev::handed::page::ROWS_MAX;
use serde::Serialize;
use serde_json::json;

use self::rates::Rates;
use crate::ending;
use crate::output::{self, Failure, Output, Result};
use crate::perf::interval;

const PROGRAM: &str = "rocinante stat";

/// Show what containers send and receive: a line for each in each interval
///
/// An agent of this host has the figures of all its containers. Without one, or inside a container,
/// they are those of the processes of the same user, or of all for root, a line for each network
/// namespace.
///
/// The first line comes after the first interval: each figure is of its interval alone, as
/// `iostat -y` and sar(1) have it. Rates are per second, all else is counts. Gb/s are of all that a
/// UDP datagram carries; with --qps of the payload.
///
/// Exit status: 0 after --count intervals, 1 if there is no such container, 2 if the command line
/// makes no sense, 128 plus its number for a signal.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only this one: the host's end of its interface, or at least four characters of its engine's
    /// name for it; without an agent, a process in it, a name of `ip netns`, or `net:[INODE]`
    container: Option<String>,
    /// Seconds between two lines
    #[arg(short, long, default_value = "1", value_parser = interval::seconds)]
    interval: Duration,
    /// End after this number of intervals [default: at a signal]
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// A line for each queue pair
    #[arg(long)]
    qps: bool,
    /// Where the agent serves metrics: an address with its port or the path of a socket; `off` asks
    /// none [default: root's socket, if an agent runs]
    #[arg(long, value_name = "PLACE")]
    agent: Option<String>,
    /// Print one JSON object on one line for each interval; all else goes to standard error
    #[arg(long)]
    json: bool,
}

/// Queue pairs of one container that are kept when they are gone: those of two pages.
const AWAY_MAX: usize = 2 * ROWS_MAX;

/// A container at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Container {
    /// The host's end, or the kernel's name of its network namespace.
    pub(crate) name: String,
    /// Its engine's name for it.
    pub(crate) id: Option<String>,
    /// Those of its open devices.
    pub(crate) backends: Vec<String>,
    /// The counters, by a key of what has counted.
    pub(crate) counters: BTreeMap<String, BTreeMap<String, u64>>,
    /// By a key of the device and the number.
    pub(crate) queue_pairs: BTreeMap<(String, u32), QueuePair>,
    /// Those of earlier moments that are not among them, for when they are again: a page may have
    /// changed while it was read.
    pub(crate) away: BTreeMap<(String, u32), QueuePair>,
    pub(crate) limits: Vec<Limit>,
    pub(crate) queues: Vec<Queue>,
    /// Pages that changed whenever they were read.
    pub(crate) unread: usize,
    /// The network namespace of a process in it.
    pub(crate) place: Option<PathBuf>,
}

impl Container {
    /// One of which no more is known.
    pub(crate) fn called(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Has the last counters of pages that could not be read now, and the last queue pairs.
    fn keep(&mut self, before: &Self) {
        let earlier = before.queue_pairs.iter().chain(&before.away);
        let away = earlier.filter(|(key, _)| !self.queue_pairs.contains_key(key));
        self.away = away.take(AWAY_MAX).map(|(key, qp)| (key.clone(), qp.clone())).collect();
        if self.unread > 0 {
            for (key, counters) in &before.counters {
                self.counters.entry(key.clone()).or_insert_with(|| counters.clone());
            }
        }
    }

    /// Adds the queue of its host's end, if that is in this network namespace.
    pub(crate) fn add_host_end(&mut self, name: Option<&str>) {
        let index = name.and_then(|name| Some(Interface::by_name(name).ok()?.index));
        let queued = index.and_then(|index| queues().ok()?.remove(&index));
        self.queues.extend(queued.map(Queue::of_host_end));
    }

    /// With the queue pairs of all of these.
    pub(crate) fn of_all(name: &str, all: Vec<Self>) -> Self {
        let mut one = Self::called(name);
        all.into_iter().for_each(|it| one.queue_pairs.extend(it.queue_pairs));
        one
    }
}

/// A queue pair at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct QueuePair {
    pub(crate) peer: Option<std::net::IpAddr>,
    pub(crate) peer_number: u32,
    pub(crate) service: String,
    pub(crate) state: String,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    /// These wrap at 2^32.
    pub(crate) repeated: u32,
    pub(crate) not_ready: u32,
    pub(crate) requests: [u32; 2],
    pub(crate) held: [u32; 2],
}

/// A queue at the host's end of a container.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Queue {
    /// `ingress_rate` and `egress_rate` of an agent; `host_end` for all others there.
    name: &'static str,
    /// Bytes that wait now.
    backlog: u64,
    /// Packets that waited and that were dropped, modulo 2^32.
    delayed: u32,
    dropped: u32,
}

impl Queue {
    fn of_host_end(it: Queued) -> Self {
        let Queued { backlog_bytes: backlog, delayed, dropped, .. } = it;
        Self { name: "host_end", backlog, delayed, dropped }
    }
}

/// A limit in force.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Limit {
    pub(crate) name: String,
    /// The part in use; a rate has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<u64>,
    pub(crate) max: u64,
}

/// All containers at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Moment {
    at: Instant,
    pub(crate) containers: Vec<Container>,
}

/// Where figures come from.
pub(crate) enum Source {
    Agent(agent::Place),
    Pages,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent(place) => write!(f, "the agent at {place}"),
            Self::Pages => write!(f, "the processes of this user"),
        }
    }
}

impl Source {
    /// Error: the agent that `args` names does not answer.
    pub(crate) fn of(place: Option<&str>) -> Result<Self> {
        match place {
            Some("off") => Ok(Self::Pages),
            Some(place) => {
                let place = agent::Place::of(place);
                place.containers()?;
                Ok(Self::Agent(place))
            }
            None => {
                let place = agent::Place::default();
                let answers = place.containers().is_ok();
                Ok(if answers { Self::Agent(place) } else { Self::Pages })
            }
        }
    }

    /// Error: no container is called so; or the agent does not answer.
    pub(crate) fn look(&self, container: Option<&str>, qps: bool) -> Result<Moment> {
        let containers = match self {
            Self::Agent(place) => place.look(container, qps)?,
            Self::Pages => pages::look(container, qps)?,
        };
        Ok(Moment { at: Instant::now(), containers })
    }
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    ending::attended(PROGRAM, out, || watch(args, out))
}

fn watch(args: &Args, out: Output) -> Result {
    let source = Source::of(args.agent.as_deref())?;
    ending::enter("watching");
    let container = args.container.as_deref();
    let mut before = source.look(container, args.qps)?;
    if before.containers.is_empty() {
        let why = match source {
            Source::Agent(_) => "no container has a device open yet",
            Source::Pages => {
                "no process of this user has a device open yet, and no agent says more: as root it \
                 would, where one runs"
            }
        };
        out.note(format_args!("{PROGRAM}: {why}"));
    }
    let mut due = before.at;
    let mut table = table::Table::new(args.qps);
    for _ in 0..args.count.unwrap_or(u64::MAX) {
        due += args.interval;
        wait_until(due)?;
        let mut now = source.look(container, args.qps)?;
        let rates = Rates::between(&before, &mut now);
        if out.json {
            out.result(output::object(PROGRAM, json!(rates)));
        } else {
            table.lines(&rates).into_iter().for_each(|line| out.line(line));
        }
        before = now;
        // A machine that slept makes no lines up for the time.
        due = due.max(before.at - args.interval);
    }
    Ok(())
}

fn wait_until(due: Instant) -> Result {
    loop {
        ending::check_signal()?;
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(ending::LOOK));
    }
}

fn unknown(name: &str, lists: &str) -> Failure {
    Failure::Failed(format!("no container is called {name}: {lists}"))
}
