//! Shared parts of the end-to-end tests: the network lab, and the rules for tests that cannot run
//! here.
//!
//! A test that cannot run is never silently off. It ends by [`skip!`] or one of the `require_…!`
//! macros. These print one line, `SKIPPED name: reason`, on the real standard error, which the test
//! harness does not capture. They also append the line to the file that the environment variable
//! `ROCINANTE_TEST_LOG` names, if it is set.
//!
//! ```no_run
//! use rocinante_lab::{Lab, LabConfig};
//!
//! fn two_containers_talk() {
//!     rocinante_tests::require!(rocinante_tests::need::lab());
//!     let lab = Lab::new(&LabConfig::default()).unwrap();
//!     assert_eq!(lab.containers().len(), 2);
//! }
//! # two_containers_talk();
//! ```

pub mod alone;
pub mod attacker;
pub mod capi;
pub mod captures;
pub mod confined;
mod delay;
pub mod fuzz;
pub mod harness;
pub mod idle;
pub mod need;
pub mod oracles;
pub mod rails;
pub mod running;
pub mod setup;
pub mod skip;
pub mod snapshot;
pub mod tshark;
pub mod tunnel;
pub mod unique;
pub mod verbs;

/// The program in the README compiles. It is tested here, since the README of the workspace is in
/// no package.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
