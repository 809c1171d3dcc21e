//! Unmodified programs of others on `rocinante run`, each between two network namespaces.
//!
//! - [`table`] has the rows: a program, the mode in which it runs, and the backend.
//! - `programs` builds those that no package has.
//! - [`row`] runs one.
//! - [`foreign`] has rows that also run on another processor's emulator.
//! - [`kills`] has many on one address, of which a third is killed.
//! - [`transports`] runs programs over this project and over TCP.
//! - [`suite`] runs rdma-core's own tests, as Debian ships them.
//! - [`document`] is the table in `docs/dropin.md`.
//!
//! On `udp` a program runs as a user without capabilities. A program counts as working only if it
//! ran to its end and printed the expected output.
#![forbid(unsafe_code)]

pub mod document;
pub mod foreign;
pub mod install;
pub mod kills;
mod programs;
pub mod row;
pub mod suite;
pub mod table;
pub mod transports;

use serde_json::{Value, json};

/// The user of programs on `udp`: nobody.
pub const NOBODY: u32 = 65534;

/// The result of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The row.
    pub row: table::Row,
    /// Why it does not work, in one line.
    pub result: Result<(), String>,
}

impl Outcome {
    /// The line of `--json`.
    #[must_use]
    pub fn json(&self) -> Value {
        let table::Row { program, mode, netdev, .. } = self.row;
        let why = self.result.as_ref().err();
        json!({"program": program, "mode": mode, "netdev": netdev, "ok": why.is_none(),
            "why": why.map_or("", String::as_str)})
    }

    /// The line for people.
    #[must_use]
    pub fn line(&self) -> String {
        let table::Row { program, mode, netdev, .. } = self.row;
        match &self.result {
            Ok(()) => format!("ok      {netdev:<6}  {program} {mode}"),
            Err(why) => format!("FAILED  {netdev:<6}  {program} {mode}: {why}"),
        }
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn in_words(error: rocinante_lab::LabError) -> String {
    error.to_string()
}
