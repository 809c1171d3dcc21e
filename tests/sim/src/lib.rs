//! A deterministic simulator: some hosts, their queue pairs, a bad network, other faults, and a
//! model that knows the right result.
//!
//! The engines are the real ones, of `rocinante-stack`. Time is virtual, and all random numbers
//! come from one seed: the same seed does the same, to the last byte, which the digest of a run
//! proves. A run has several rounds, each with a world of its own. First comes a storm, in which
//! everything goes wrong that can. Then nothing goes wrong any more, and all that was begun must
//! end within a bound. Then all requests must succeed.
//!
//! A step is one event: a packet that arrives or is lost, a timer, a call of the engine.
//!
//! The invariants, each checked at once (`check.rs`):
//! - every completion comes once, in the order of its queue, with the right status, length, opcode
//!   and immediate data;
//! - each byte that an engine stores is the next one of the request in turn, at its place: so all
//!   bytes are placed exactly once and in order;
//! - success means that the peer has executed the request to its end, and that the result is what
//!   the peer had;
//! - no access leaves a registered region, or exceeds its permissions;
//! - a request that must be refused is refused, with the status that says why, and no other request
//!   is;
//! - a packet that was damaged or misrouted, or is of an earlier life of the connection, has no
//!   effect;
//! - a failed queue pair has flushed all its work; counters add up; an unreliable connection
//!   delivers a message whole and once, or not at all;
//! - a datagram is accepted whole, with the header before it, if key and receive are right, and
//!   changes nothing if not; each leaves once and in order;
//! - a shared receive is consumed once, by the queue pair that took it; the event of the limit
//!   comes when the limit is reached, and never else; a queue pair that breaks reports that it
//!   takes no more receives;
//! - a marked packet of a reliable connection is answered by a congestion notification, and no
//!   other packet is;
//! - each packet of a request leaves in its order. If the port has no room for a while, the packet
//!   leaves as soon as there is room;
//! - nothing gets through a window that is unbound, or belongs to another queue pair;
//! - a connection ends once on each side, by one event that the programs' actions explain; words of
//!   programs arrive unchanged; a restarted peer is noticed, and no queue pair number is released
//!   early;
//! - no queue pair waits for receiver credit that is there, and none that could send is forgotten;
//! - an engine's resources are bounded by its queue pairs and its configuration, and nothing is
//!   left once all is destroyed (`bounds.rs`).

#![forbid(unsafe_code)]

mod asked;
mod bounds;
mod callers;
mod check;
mod cm_events;
mod datagram;
mod draft;
mod features;
mod gathered;
mod leaving;
mod life;
mod mads;
mod managed;
mod marks;
mod memory;
mod mishap;
mod model;
mod network;
mod random;
mod receives;
mod scarce;
mod served;
mod shards;
mod talk;
mod traffic;
mod windows;
mod work;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Serialize;

use self::features::Features;
pub use self::network::Faults;
use self::random::{Digest, Random};
use self::world::{Tally, World};

/// The options of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// The seed of all random numbers.
    pub seed: u64,
    /// After this many steps no new round begins; the last one runs to its end.
    pub steps: u64,
    /// Whether to print every packet, request and completion on standard error.
    pub trace: bool,
    /// Swarm testing: the seed draws which faults may happen, which policies engines and programs
    /// have, and which resources are scarce. It omits each with probability 1/2.
    pub swarm: bool,
    /// Whether queue pairs wait for each other in any case: there are many of them, and receive
    /// queues and windows are small.
    pub scarce: bool,
    /// Whether no program gives the kind of its peer, and engines find out themselves.
    pub strangers: bool,
}

/// The command line that runs it again.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rocinante-sim --seed {} --steps {}", self.seed, self.steps)?;
        let flags = [
            (self.swarm, " --swarm"),
            (self.scarce, " --scarce"),
            (self.strangers, " --strangers"),
        ];
        flags.into_iter().filter(|(on, _)| *on).try_for_each(|(_, flag)| f.write_str(flag))
    }
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// As in [`Options`].
    pub seed: u64,
    /// As in [`Options`].
    pub swarm: bool,
    /// As in [`Options`].
    pub scarce: bool,
    /// As in [`Options`].
    pub strangers: bool,
    /// Faults and policies that the run does not have, and kinds of scarcity.
    pub omitted: Vec<&'static str>,
    /// Events.
    pub steps: u64,
    /// Packets that engines sent.
    pub packets: u64,
    /// Requests and receives posted.
    pub ops: u64,
    /// Completions.
    pub completions: u64,
    /// Connections requested from a connection manager.
    pub calls: u64,
    /// Sides of connections that ended.
    pub released: u64,
    /// Congestion notifications that were owed and sent.
    pub notifications: u64,
    /// The faults, and how often each happened.
    pub faults: Faults,
    /// How often lives of queue pairs ended, by the status that broke them or by the operation that
    /// ended them.
    pub qps_ended: BTreeMap<String, u64>,
    /// Invariants that were violated: the run ends with the first.
    pub violations: u64,
    /// A digest of all that happened.
    pub digest: String,
    /// The violation, and when it was found.
    #[serde(skip)]
    pub violation: Option<String>,
}

/// Runs the simulation.
#[must_use]
pub fn run(options: &Options) -> Report {
    let mut tally = Tally {
        steps: 0,
        packets: 0,
        ops: 0,
        completions: 0,
        calls: 0,
        released: 0,
        notifications: 0,
        faults: Faults::default(),
        ended: BTreeMap::new(),
        digest: Digest::new(options.seed),
    };
    let mut features = Features::new(options.seed, options.swarm, options.scarce);
    features.strangers = options.strangers;
    let mut random = Random::new(options.seed);
    let mut violation = None;
    let mut round = 0;
    while tally.steps < options.steps && violation.is_none() {
        round += 1;
        let (seed, length) = (random.next(), random.range(2_000, 10_000));
        violation = run_round(seed, length, features, options.trace, &mut tally)
            .err()
            .map(|why| format!("step {}, round {round}: {why}", tally.steps));
    }
    Report {
        seed: options.seed,
        swarm: options.swarm,
        scarce: options.scarce,
        strangers: options.strangers,
        omitted: features.omitted(),
        steps: tally.steps,
        packets: tally.packets,
        ops: tally.ops,
        completions: tally.completions,
        calls: tally.calls,
        released: tally.released,
        notifications: tally.notifications,
        faults: tally.faults,
        qps_ended: tally.ended.iter().map(|(how, count)| ((*how).to_owned(), *count)).collect(),
        violations: u64::from(violation.is_some()),
        digest: format!("{:016x}", tally.digest.value()),
        violation,
    }
}

/// Runs one round. An engine that panics violates an invariant, too.
fn run_round(
    seed: u64,
    length: u64,
    has: Features,
    trace: bool,
    tally: &mut Tally,
) -> Result<(), String> {
    let round = catch_unwind(AssertUnwindSafe(|| World::new(seed, has, trace, tally).run(length)));
    round.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("the engine panicked: {}", text.unwrap_or("without a word")))
    })
}
