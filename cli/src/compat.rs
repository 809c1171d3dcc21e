//! The other side may be somebody else's program: rdma-core's ping-pongs, perftest's measurements.
//!
//! Each of them tells its peer where its queue pairs are, in messages of its own, over TCP or over a queue pair that the connection manager
//! connected ([`queue`]). [`wire`] reads and writes such messages within a time, and an error names the peer and the phase it is in; [`device`] finds the device by the names that their
//! users know; [`gid`] is the address in them. [`ibv`] is `ibv_rc_pingpong` and `ibv_srq_pingpong`.
//!
//! What is written here was learned from the programs' behaviour (rdma-core 44, perftest 4.5-0.17).

pub mod device;
pub mod gid;
pub mod ibv;
pub mod perftest;
pub mod queue;
pub mod refused;
pub mod wire;
