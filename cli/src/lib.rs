//! What the `rocinante` command is made of, as far as tests and benchmarks share it.
//!
//! [`demo`] shows everything. [`devices`] lists what there is to open. [`pingpong`] and [`perf`] work between two processes that find each other by [`session`]; by [`compat`] the other side may be a program of rdma-core's or perftest's. [`rping`] and [`ucmatose`] connect by the connection manager, [`udaddy`] finds queue pairs for datagrams by it, [`mckey`] sends to multicast groups. [`decode`] reads capture files. [`measure`] has the loops behind latencies and bandwidths. [`lab`] makes small networks out of network namespaces: containers,
//! the host's bridge between them, and the host's policy on it.
#![forbid(unsafe_code)]

pub mod bench;
pub mod cm_bench;
pub mod command;
pub mod compare;
pub mod compat;
mod cores;
pub mod counters;
mod datagrams;
pub mod decode;
pub mod demo;
pub mod devices;
pub mod lab;
pub mod mckey;
pub mod measure;
pub mod output;
pub mod perf;
pub mod pingpong;
pub mod quiet;
pub mod rping;
pub mod session;
pub mod sim;
pub mod ucmatose;
pub mod udaddy;
pub mod workers;
