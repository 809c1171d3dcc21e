//! The benchmarks: everything that is measured between two processes.
//!
//! - [`mod@bench`] measures all backends, each figure beside a raw baseline and TCP, and judges
//!   goals.
//! - [`cm`] measures the connection manager.
//! - [`evaluate`] makes the whole study of a machine.
//! - [`workers`] starts the two processes of a measurement.
#![forbid(unsafe_code)]

mod attempts;
pub mod bench;
mod chart;
pub mod cm;
pub mod command;
pub mod evaluate;
mod goal;
mod machine;
pub mod workers;
