//! Pairs of processes that measure together, one in each of two namespaces. [`bench`](crate::bench)
//! and [`compare`](crate::compare) use them.
//!
//! A [`Measure`] names what is measured. A `Step` is a measure with a size and a time. One pair of
//! processes does the steps of one subject: our device, a raw baseline, or another transport. Each
//! process keeps to its own core.

mod cost;
mod idle;
mod job;
mod measure;
mod ours;
mod peers;
mod place;
mod provider;
mod raw;

pub(crate) use cost::{Ticks, resident};
pub(crate) use job::{Device, Outcome, Work};
pub use job::{WorkerArgs, run_worker};
pub use measure::{Figure, Measure, Step};
pub(crate) use ours::depth;
pub(crate) use peers::{Congestion, IPERF3_WARM_UP, TcpMode};
pub use place::PlaceArgs;
pub(crate) use place::Places;
pub use provider::Provider;
