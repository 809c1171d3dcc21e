//! cargo-deny: licences, sources and bans always; advisories if their database is reachable.

use crate::command;
use crate::{demo, setup};
use std::process::Command;

/// The version known to understand our deny.toml.
const CARGO_DENY: &str = "0.20.2";

/// Runs cargo-deny; returns unchecked parts as `name: reason`.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let deny = setup::tool("cargo-deny", CARGO_DENY, &demo::target()?)?;
    let deny = |args: &[&str]| {
        let mut command = Command::new(&deny);
        // As cargo does for its subcommands.
        command.arg("deny").args(args);
        command
    };
    command::run(&mut deny(&["check", "--hide-inclusion-graph", "bans", "licenses", "sources"]))?;
    if command::read(&mut deny(&["fetch", "db"])).is_err() {
        return Ok(vec!["deny::advisories: the advisory database cannot be reached".into()]);
    }
    command::run(&mut deny(&["check", "--disable-fetch", "advisories"]))?;
    Ok(Vec::new())
}
