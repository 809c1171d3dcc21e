//! Processes that measure together, each in a namespace of its own: pairs, or one receiver and many
//! senders. [`bench`](crate::bench) uses them.
//!
//! A [`Measure`] names a quantity to measure. A `Step` is a measure with a size and a time. One
//! pair of processes does the steps of one subject: our device, a raw baseline, or another
//! transport. Each process of a pair keeps to its own core.

mod agent;
mod cost;
mod datagrams;
mod fan_in;
mod idle;
mod job;
mod load;
mod measure;
mod on_demand;
mod ours;
mod pairs;
mod peers;
mod place;
mod podman;
mod programs;
mod provider;
mod rate;
mod raw;

pub(crate) use cost::{Ticks, resident};
pub(crate) use fan_in::{NAMESPACES, SENDERS_MAX, now};
pub(crate) use job::{Device, Outcome, Traffic, Work};
pub use job::{WorkerArgs, run_worker};
pub(crate) use load::Loaded;
pub use measure::{Figure, Measure, Step};
#[cfg(test)]
pub(crate) use on_demand::Opened;
pub(crate) use on_demand::{Errand, OnDemand, Ready, Sent};
pub(crate) use ours::{Posting, depth};
#[cfg(test)]
pub(crate) use pairs::Paired;
pub(crate) use pairs::{Pairing, Rights, Together};
pub(crate) use peers::{Congestion, IPERF3_WARM_UP, SOCKPERF_WARM_UP, TcpMode};
pub use place::PlaceArgs;
pub(crate) use place::{Link, Places};
pub(crate) use programs::{Foreign, Suite};
pub use provider::Provider;
pub(crate) use raw::Carrier;
