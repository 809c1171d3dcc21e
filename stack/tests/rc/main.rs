//! Reliable connections: two ends, or one end and a peer that the test plays.

#[path = "../common/mod.rs"]
mod common;

mod clock;
mod credits;
mod cuts;
mod drain;
mod flush;
mod hostile;
mod ingress;
mod limits;
mod local;
mod loss;
mod pools;
mod quiet;
mod reads;
mod requests;
mod reserved;
mod scenarios;
mod selective;
mod stalls;
mod states;
mod transfers;
mod turns;
