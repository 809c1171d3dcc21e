//! The parts of the `rocinante` command that tests and benchmarks share.
//!
//! - [`demo`] shows all features.
//! - [`policy`] shows which rules bind which backend.
//! - [`devices`] lists the devices that can be opened.
//! - [`run`] starts programs of others on our libibverbs.
//! - [`pingpong`] and [`perf`] work between two processes that meet through [`session`]. With
//!   [`compat`] the other side may be a program of rdma-core or perftest.
//! - [`rping`] and [`ucmatose`] connect through the connection manager, [`udaddy`] finds queue
//!   pairs for datagrams through it.
//! - [`mckey`] sends to multicast groups.
//! - [`decode`] reads capture files.
//! - [`manual`] makes completions for shells, and man pages.
//! - [`measure`] has the loops behind latencies and bandwidths.
#![forbid(unsafe_code)]

pub mod command;
pub mod compat;
pub mod cores;
pub mod counters;
mod datagrams;
pub mod decode;
pub mod demo;
pub mod devices;
pub mod ending;
pub mod manual;
pub mod mckey;
pub mod measure;
mod names;
mod orders;
pub mod output;
pub mod perf;
pub mod pingpong;
pub mod policy;
pub mod quiet;
pub mod rping;
pub mod run;
pub mod session;
pub mod size;
pub mod ticks;
pub mod turns;
pub mod ucmatose;
pub mod udaddy;
