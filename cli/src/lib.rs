//! The parts of the `rocinante` command that tests and benchmarks share.
//!
//! - [`demo`] shows all features.
//! - [`policy`] shows which rules bind which backend. Its processes in containers are [`worker`]s.
//! - [`devices`] lists the devices that can be opened.
//! - [`run`] starts programs of others on our libibverbs.
//! - [`pingpong`] and [`perf`] work between two processes that meet through [`session`].
//! - [`rping`] connects through the connection manager.
//! - [`decode`] reads capture files.
//! - [`manual`] makes completions for shells, and man pages.
//! - [`measure`] has the loops behind latencies and bandwidths.
#![forbid(unsafe_code)]

pub mod capture;
pub mod command;
pub mod cores;
pub mod counters;
pub mod decode;
pub mod demo;
pub mod devices;
pub mod ending;
pub mod manual;
pub mod measure;
mod messages;
pub mod output;
pub mod perf;
pub mod pingpong;
pub mod policy;
pub mod quiet;
pub mod rping;
pub mod run;
pub mod session;
pub mod size;
pub mod stat;
pub mod ticks;
pub mod top;
pub mod turns;
pub mod worker;
mod workers;
