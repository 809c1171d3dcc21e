//! The API on two devices of a simulated network.

#[path = "../sim/mod.rs"]
mod sim;

mod cm;
mod families;
mod numbers;
mod people;
mod queues;
mod regions;
mod two;
mod two_cm;
