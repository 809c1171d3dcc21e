//! A deterministic simulator: some hosts, their queue pairs, a bad network, bad luck, and a model that knows what must come of it.
//!
//! The engines are the real ones, of `rocinante-stack`. Time is virtual, and everything that is random comes from one seed: the same seed does the same, to the
//! last byte, which the digest of a run proves. A run goes through rounds, each with a world of its own: a storm, in which everything goes wrong that can; then nothing
//! goes wrong any more, and all that was begun must come to its end within a bound; then everything that is asked for must work.
//!
//! A step is one event: a packet that arrives or is lost, a timer, a call of the engine.
//!
//! What is checked, at the moment when it happens (`check.rs`):
//! - every completion comes once, in the order of its queue, with the right status, length, opcode and immediate data;
//! - each byte that an engine stores is the next one of the request whose turn it is, at its place: so everything is placed exactly once and in order;
//! - success means that the peer has executed the request to its end, and that the result is what the peer had;
//! - no access leaves a registered region, or does what the region does not permit;
//! - a request that must be refused is refused, with the status that says why, and nothing else is;
//! - a packet that was damaged or misrouted, or is of an earlier life of the connection, has no effect;
//! - a queue pair that failed has flushed all its work; counters add up; an unreliable connection delivers a message whole and once or not at all.
//! - a datagram is taken whole, with the header before it, if key and receive are right, and touches nothing if not; each leaves once and in order;
//! - a shared receive is consumed once, by whoever took it; the limit is told of when it is reached, and not else; who breaks says that it takes no more;
//! - a marked packet of a reliable connection is answered by a congestion notification, and nothing
//!   else is;
//! - each packet of a request leaves in its order, also if the port had no room for a while: then
//!   it leaves as soon as there is some;
//! - nothing gets through a window that shows nothing any more, or belongs to another queue pair;
//! - a connection ends once on each side, by one event that what the programs did explains; words
//!   of programs arrive unchanged; a peer that was restarted is found, and no
//!   number of a queue pair is released early;
//! - what an engine holds is bounded by its queue pairs and its configuration, and nothing is left when all is given up (`bounds.rs`).

#![forbid(unsafe_code)]

mod asked;
mod bounds;
mod callers;
mod check;
mod datagram;
mod gathered;
mod heard;
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
mod served;
mod shards;
mod talk;
mod traffic;
mod windows;
mod wish;
mod work;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Serialize;

pub use self::network::Faults;
use self::random::{Digest, Random};
use self::world::{Tally, World};

/// What to simulate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Where all that is random comes from.
    pub seed: u64,
    /// After so many steps no new round begins: the last one comes to its end.
    pub steps: u64,
    /// Whether to print every packet, request and completion on standard error.
    pub trace: bool,
}

/// What a run did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// As in [`Options`].
    pub seed: u64,
    /// Events.
    pub steps: u64,
    /// Packets that engines sent.
    pub packets: u64,
    /// Requests and receives posted.
    pub ops: u64,
    /// Completions.
    pub completions: u64,
    /// Connections that were asked for of a connection manager, and sides of connections that came
    /// to their end.
    pub calls: u64,
    /// See [`calls`](Self::calls).
    pub released: u64,
    /// Congestion notifications that were owed and sent.
    pub notifications: u64,
    /// What went wrong, how often.
    pub faults: Faults,
    /// How the lives of queue pairs ended, how often: by the status that broke them, or by what was done to them.
    pub qps_ended: BTreeMap<String, u64>,
    /// Invariants that were violated: the run ends with the first.
    pub violations: u64,
    /// All that happened in one number.
    pub digest: String,
    /// The violation, and when it was found.
    #[serde(skip)]
    pub violation: Option<String>,
}

/// Simulates.
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
    let mut random = Random::new(options.seed);
    let mut violation = None;
    let mut round = 0;
    while tally.steps < options.steps && violation.is_none() {
        round += 1;
        let (seed, length) = (random.next(), random.range(2_000, 10_000));
        violation = run_round(seed, length, options, &mut tally)
            .err()
            .map(|why| format!("step {}, round {round}: {why}", tally.steps));
    }
    Report {
        seed: options.seed,
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

/// One round. An engine that panics violates an invariant, too.
fn run_round(seed: u64, length: u64, options: &Options, tally: &mut Tally) -> Result<(), String> {
    let until = tally.steps + length;
    let round =
        catch_unwind(AssertUnwindSafe(|| World::new(seed, options.trace, tally).run(until)));
    round.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("the engine panicked: {}", text.unwrap_or("without a word")))
    })
}
