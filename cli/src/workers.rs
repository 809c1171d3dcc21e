//! Pairs of processes that measure together, one in each of two namespaces: what [`bench`](crate::bench) and [`compare`](crate::compare) are made of.
//!
//! A [`Measure`] is what is measured, a `Step` is that with a size and a time. One pair of processes does the steps of one subject: our device, a
//! raw ceiling, or something else that carries bytes. Each process keeps to a core of its own.

mod cost;
mod idle;
mod job;
mod measure;
mod ours;
mod peers;
mod place;
mod provider;
mod raw;

pub(crate) use cost::resident;
pub(crate) use job::{Device, Outcome, Work};
pub use job::{WorkerArgs, run_worker};
pub use measure::{Figure, Measure, Step};
pub(crate) use ours::depth;
pub(crate) use peers::IPERF3_WARM_UP;
pub use place::PlaceArgs;
pub(crate) use place::Places;
pub use provider::Provider;
