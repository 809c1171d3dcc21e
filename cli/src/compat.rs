//! Talks to other programs: rdma-core's ping-pongs, perftest's measurements.
//!
//! Each of them tells its peer the addresses of its queue pairs in its own message format, over TCP
//! or over a queue pair that the connection manager connected ([`queue`]). [`wire`] reads and
//! writes such messages within a time limit; its errors name the peer and the phase. [`device`]
//! finds the device by the names that the users of these programs know. [`gid`] converts the
//! addresses in the messages. [`ibv`] is `ibv_rc_pingpong` and `ibv_srq_pingpong`.
//!
//! These modules follow the observed behaviour of the programs (rdma-core 44, perftest 4.5-0.17).

pub mod device;
pub mod gid;
pub mod ibv;
pub mod perftest;
pub mod queue;
pub mod refused;
pub mod wire;
